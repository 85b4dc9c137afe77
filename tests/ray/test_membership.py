"""A job is scaled while it trains; other changes of who takes part are in ``shared_job``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.core import commands
from orchestrator.core.messages import Adopted
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import ENDLESS, Job, synthetic

pytestmark = pytest.mark.ray
Start = Callable[..., Job]
GROUPS = ("us-east", "asia")


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
