"""A job whose model only its own package knows is refused once its parameters are there, before Θ is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from orchestrator.actors import ModelOutline
from orchestrator.core.vocabulary import Epoch
from orchestrator.errors import InvalidJobSpec
from orchestrator.host.job_context import JobContext
from orchestrator.parameters.journal import Journal
from orchestrator.parameters.outer_state import OuterStep
from orchestrator.parameters.shard import ParameterShard
from orchestrator.parameters.tensors import Tensors
from orchestrator.specification.config import parse_job
from orchestrator.specification.memory_budget import HEAD, NodeMemory, demand_of
from orchestrator.system.roots import AllowedRoots

SPEC = parse_job(
    {"model": {"factory": "somebody.models:build"}, "islands": [{"node_group": "here"}], "budget": {"steps": 1}}
)
PARAMETERS = 800
Value = TypeVar("Value")


class Unused:
    """Nothing is handed over here."""

    endpoint: Any = None

    def close(self) -> None:
        pass


class Model:
    """Eight tensors, which nobody may ask for before it is known that there is room for them."""

    def outline(self) -> Future[ModelOutline]:
        return done(ModelOutline({f"w{p}": (PARAMETERS // 8,) for p in range(8)}, {}))

    def initial_pieces(self, names: Sequence[str]) -> Future[Tensors]:
        raise AssertionError(f"{names} were made")


def done(value: Value) -> Future[Value]:
    future: Future[Value] = Future()
    future.set_result(value)
    return future


def seeded(folder: Path, nodes: list[NodeMemory]) -> object:
    """What comes first of a job that begins with ``PARAMETERS`` on these nodes: an event, or why it cannot go on."""
    from orchestrator.runtime.shard_worker import (  # imports Ray, which reads its environment then
        LocalShard,
        ShardWorker,
    )

    first: Future[object] = Future()
    channel: Any = Unused()
    context = JobContext(
        "job",
        SPEC,
        folder,
        AllowedRoots(),
        Epoch(1),
        lambda: 0.0,
        lambda make: first.set_result(make(0.0)),
        first.set_result,
        lambda: 0,
    )
    shard = ParameterShard(Journal(folder), Epoch(1), lambda _, work: work())
    local = LocalShard(shard, channel.endpoint, OuterStep.of(SPEC.synchroniser))
    worker = ShardWorker(context, [local], channel, lambda: nodes)
    worker.seed(Model())
    outcome = first.result()
    worker.close()
    return outcome


@pytest.mark.parametrize("group", [HEAD, "here"])
def test_a_model_that_turns_out_too_large_for_a_node_ends_its_job_with_the_reason(
    port: object, tmp_path: Path, group: str
) -> None:
    demand = demand_of(SPEC, PARAMETERS)
    needed = {HEAD: demand.head, "here": demand.islands[0]}
    nodes = [NodeMemory(name, name, amount - (name == group)) for name, amount in needed.items()]
    refusal = seeded(tmp_path, nodes)
    assert isinstance(refusal, InvalidJobSpec)
    assert refusal.problems[0].path == ("model.factory" if group == HEAD else "islands.0.node_group")
    assert not list(tmp_path.glob("*.journal"))
