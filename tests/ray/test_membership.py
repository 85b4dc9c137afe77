"""A job is scaled while it trains; other changes of who takes part are in ``shared_job``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.actors import IslandInterface
from orchestrator.core import commands
from orchestrator.core.messages import Adopted
from orchestrator.core.vocabulary import NO_ANCHOR, Epoch, Incarnation, IslandId, ScheduleAnchor
from orchestrator.host.job_context import JobContext
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import ENDLESS, Job, synthetic
from tests.waiting import wait_until

if TYPE_CHECKING:
    from orchestrator.runtime.control_port import RayControlPort

pytestmark = pytest.mark.ray
Start = Callable[..., Job]
GROUPS = ("us-east", "asia")


@pytest.mark.soak("by scaling, what shared_job/test_membership.py has by draining and adding")
def test_a_job_is_scaled_from_two_islands_to_four_while_it_trains_and_back(start: Start) -> None:
    document = synthetic(steps=ENDLESS, groups=GROUPS, synchroniser={"quorum": 2})
    for section in document["islands"]:
        section |= {"count_max": 2, "cpus": 0.4}
    job = start(document)
    first, spares = ([f"{group}-{number}" for group in GROUPS] for number in (0, 1))
    for island in first:
        job.wait_for_state(island, "training")
    assert {job.island(island)["state"] for island in spares} == {"stopped"}
    for group in GROUPS:
        job.port.submit(job.id, f"up {group}", "test", commands.Scale(group, 2))
    for island in spares:
        job.wait_for_merge(island, 1)
        job.wait_until(lambda island=island: adopted(job, island) == {0, 1, 2, 3}, f"adoptions by {island}")
    for group in GROUPS:
        job.port.submit(job.id, f"down {group}", "test", commands.Scale(group, 1))
    for island in spares:
        job.wait_for_state(island, "drained")
    after = tokens(job, spares)
    for island in spares:  # also what they trained between a peer's state and their first adoptions
        assert (after[island]["discarded"], after[island]["in_flight"]) == (0, 0), after
        assert after[island]["merged"] == after[island]["trained"] > 0
    assert {job.island(island)["incarnation"] for island in first} == {1}
    version = job.status()["view"]["global_version"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > version + 8, "merges of those that stay")
    assert replay(read_tape(job.run_dir / "tape.jsonl")).exact


def adopted(job: Job, island: str) -> set[int]:
    return {event.fragment for event in job.events(Adopted, island)}


def tokens(job: Job, islands: list[str]) -> dict[str, dict[str, float]]:
    of_islands = job.status()["goodput"]["islands"]
    return {island: of_islands[island]["tokens"] for island in islands}


class Slow:
    """Answers its first start only once that has been made again. ``commands`` are those that it carried out."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.again = threading.Event()

    def start(self, epoch: Epoch, anchor: ScheduleAnchor) -> None:
        self.commands.append("start")
        if len(self.commands) > 1:
            self.again.set()
        self.again.wait()

    def drain(self, epoch: Epoch) -> None:
        self.commands.append("drain")

    def reports(self, *_: object) -> list[object]:
        time.sleep(0.1)
        return []

    def hello(self) -> None:
        """The link asks this after a silence, which a loaded machine makes."""

    def carried_out(self) -> list[str]:
        return self.commands


def test_a_start_that_is_made_again_does_not_follow_the_drain_that_was_decided_after_it(
    port: RayControlPort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start cancels a drain: the island would train on, and the job would wait for its last work in vain."""
    import ray

    from orchestrator.runtime import report_link
    from orchestrator.runtime.cluster import start_actor
    from orchestrator.runtime.parameter_link import ImpairedLink

    monkeypatch.setattr(report_link, "COMMAND_TIMEOUT_S", 0.5)
    island: Any = start_actor(Slow, {"max_concurrency": 4, "num_cpus": 0, "name": f"slow-{tmp_path.name}"})
    closed, failures = threading.Event(), list[BaseException]()
    spec = parse_job(synthetic(steps=ENDLESS, groups=GROUPS))
    roots = AllowedRoots.only(tmp_path)
    context = JobContext("job", spec, tmp_path, roots, Epoch(1), lambda: 0.0, lambda _: 0, failures.append, lambda: 0)
    unused: Any = None
    parameters: Any = SimpleNamespace(answered_at=0.0)
    life = (IslandId("asia"), Incarnation(1))
    link = report_link.ReportLink(life, island, context, ImpairedLink(closed), parameters, unused, lost=False)
    try:
        link.command(IslandInterface.start, NO_ANCHOR)
        link.command(IslandInterface.drain)

        def done() -> bool:
            return "drain" in ray.get(island.call(Slow.carried_out))

        wait_until(done, "the drain")
        *starts, last = ray.get(island.call(Slow.carried_out))
        assert len(starts) >= 2
        assert set(starts) == {"start"}
        assert last == "drain"
        assert failures == []
    finally:
        closed.set()
        link.close()
        ray.kill(island.ray_handle)
