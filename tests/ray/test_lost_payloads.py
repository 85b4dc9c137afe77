"""What died with an earlier synchroniser is not taken from its successor, to whom it may have been sent again already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from orchestrator.core import effects as f
from orchestrator.core.vocabulary import (
    CloseReason,
    Epoch,
    FragmentId,
    Incarnation,
    IslandId,
    NodeGroupId,
    PayloadId,
    ReleaseReason,
    Version,
    WeightedPayload,
)
from orchestrator.errors import InternalError
from orchestrator.host.job_context import JobContext, Timers
from orchestrator.parameters import wire_format
from orchestrator.parameters.journal import Journal
from orchestrator.parameters.outer_optimizer import Sgd
from orchestrator.parameters.outer_state import Averaging, OuterState, OuterStep
from orchestrator.parameters.shard import Held, ParameterShard
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from tests.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from orchestrator.runtime.interpreter import Interpreter

PAYLOAD = PayloadId("asia.1.0.7")


SPEC = parse_job({"islands": [{"node_group": "here"}], "budget": {"steps": 10}})


class Closed:
    """Nothing is measured here, nothing saved, and nothing comes over the channel."""

    endpoint: Any = None

    def close(self) -> None:
        pass


@pytest.fixture
def shard(tmp_path: Path) -> ParameterShard:
    """A link heard the island's standing offer before the pump came to the restart, and the shard holds its bytes."""
    optimizer = Sgd(1.0)
    made = ParameterShard(Journal(tmp_path), Epoch(2), lambda _, work: work())
    made.seed(OuterState({"w": np.zeros(3, np.float32)}, (("w",),), OuterStep(Averaging.MEAN, optimizer)), {})
    assert isinstance(made.receive(PAYLOAD, FragmentId(0), wire_format.encode({"w": np.ones(3, np.float32)})), Held)
    return made


@pytest.fixture
def interpreter(port: object, shard: ParameterShard, tmp_path: Path) -> Iterator[Interpreter]:
    from orchestrator.runtime.interpreter import Interpreter, Workers  # imports Ray, which reads its environment then
    from orchestrator.runtime.shard_worker import LocalShard, ShardWorker

    nobody: Any = None
    context = JobContext("job", SPEC, tmp_path, AllowedRoots(), Epoch(2), lambda: 0.0, nobody, nobody, nobody)
    local = LocalShard(shard, nobody, OuterStep.of(SPEC.synchroniser))
    worker, nothing = ShardWorker(context, [local], Closed()), Closed()
    workers = Workers(nobody, worker, nothing, Timers(lambda: 0.0, nobody), nothing)
    made = Interpreter(context, workers, resolve=nobody, finish=nobody, hand_over=nobody, announced=lambda *_: None)
    yield made
    made.close()


def merged(shard: ParameterShard) -> float:
    """What becomes of the fragment by a merge of the payload alone. Raises InternalError where that is not held."""
    inputs = (WeightedPayload(PAYLOAD, IslandId("asia"), 1.0),)
    shard.merge(f.MergeFragment(Epoch(2), FragmentId(0), Version(1), 7, inputs, CloseReason.EVERYONE_IN, ""))
    return float(shard.state(FragmentId(0)).parameters["w"].sum())


def test_bytes_that_came_anew_before_their_loss_was_decided_are_kept(
    interpreter: Interpreter, shard: ParameterShard
) -> None:
    interpreter.act(f.ReleasePayload(PAYLOAD, ReleaseReason.LOST))
    assert merged(shard) == 3.0


@pytest.mark.parametrize("reason", [reason for reason in ReleaseReason if reason is not ReleaseReason.LOST])
def test_for_any_other_reason_they_are_let_go(
    interpreter: Interpreter, shard: ParameterShard, reason: ReleaseReason
) -> None:
    interpreter.act(f.ReleasePayload(PAYLOAD, reason))
    with pytest.raises(InternalError, match="not held"):
        merged(shard)


class BusyController:
    """A controller that has not placed anything yet. ``begun`` are the islands that it was asked to place."""

    def __init__(self) -> None:
        self.begun: list[IslandId] = []
        self.gate = Event()

    @property
    def handle(self) -> BusyController:
        return self

    def call(self, method: object, island: IslandId, *_: object) -> None:
        self.begun.append(island)
        self.gate.wait(PATIENCE_S)
        raise InternalError("the test ends")


def test_an_island_that_is_ended_while_it_waits_to_be_placed_is_not_placed(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[tuple[IslandId, Incarnation]] = []
    monkeypatch.setattr(interpreter, "_place", lambda island, incarnation, _: placed.append((island, incarnation)))
    monkeypatch.setattr(interpreter, "_end_for_certain", lambda *_: None)
    here, first, second = IslandId("here"), Incarnation(1), Incarnation(2)
    interpreter.act(f.PlaceIsland(here, first, NodeGroupId("here"), "", wait_s=0.1))
    interpreter.act(f.StopIsland(here, first, ""))
    interpreter.act(f.PlaceIsland(here, second, NodeGroupId("here"), "", wait_s=0.2))
    wait_until(lambda: placed)
    assert placed == [(here, second)]


def test_islands_beyond_what_the_controller_works_on_wait_where_no_deadline_runs(
    port: object, shard: ParameterShard, tmp_path: Path
) -> None:
    """When all of 128 were asked for at once, those whose turn had not come in time were given up and begun again."""
    from orchestrator.runtime.controllers import THREADS_MAX
    from orchestrator.runtime.interpreter import PLACEMENTS_MAX, Interpreter, Workers
    from orchestrator.runtime.shard_worker import ShardWorker

    spec = parse_job({"islands": [{"node_group": "here", "count": 128}], "budget": {"steps": 10}})
    ended: list[BaseException] = []
    nobody: Any = None
    context = JobContext("job", spec, tmp_path, AllowedRoots(), Epoch(1), lambda: 0.0, nobody, ended.append, nobody)
    controller: Any = BusyController()
    nothing: Any = Closed()
    workers = Workers(
        controller, ShardWorker(context, [shard], Closed()), nothing, Timers(lambda: 0.0, nobody), nothing
    )
    interpreter = Interpreter(
        context, workers, resolve=nobody, finish=nobody, hand_over=nobody, announced=lambda *_: None
    )
    for number in range(128):
        interpreter.act(f.PlaceIsland(IslandId(f"here-{number}"), Incarnation(1), NodeGroupId("here"), ""))
    wait_until(lambda: len(controller.begun) >= PLACEMENTS_MAX)
    assert set(controller.begun) == {f"here-{number}" for number in range(PLACEMENTS_MAX)}
    assert PLACEMENTS_MAX < THREADS_MAX, "the controller has threads left to end processes"
    controller.gate.set()
    wait_until(lambda: len(controller.begun) == 128)
    interpreter.close()
