"""Operators change who takes part while a job trains: islands are drained, node groups cordoned, the job scaled."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.core import commands, effects, events
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import GROUPS, Job, gone, synthetic

pytestmark = pytest.mark.ray
Start = Callable[..., Job]
ENDLESS = 100_000


def test_a_drained_island_loses_no_token_and_its_data_goes_on_when_it_is_added_again(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("us-east", "asia")))
    job.wait_for_state("us-east", "training")
    pid = job.wait_for_merge("asia", 1)["pid"]
    command = job.command(commands.Drain("asia"))
    drained = job.wait_for_state("asia", "drained")
    status = job.status()
    assert status["commands"][command]["accepted"] is True
    tokens = status["goodput"]["islands"]["asia"]["tokens"]
    assert tokens["trained"] == tokens["merged"] == drained["tokens_total"] > 0
    job.wait_until(lambda: gone(pid), "the end of its process")
    job.command(commands.Readd("asia"))
    job.wait_for_merge("asia", 2)
    tape = read_tape(job.run_dir / "tape.jsonl")
    assert replay(tape).exact
    asked = [x for r in tape.records for x in r.effects if isinstance(x, effects.BeginCatchUp) and x.island == "asia"]
    assert [x.cursor for x in asked] == [0, drained["steps_total"]]
    assert [event.incarnation for event in job.events(events.IslandDrained, "asia")] == [1]


def test_nothing_new_is_placed_on_a_cordoned_node_group(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("us-east", "asia")), asia="somebody")
    job.wait_for_state("us-east", "training")
    assert job.island("asia")["reason"] == "node group asia is cordoned"
    job.port.submit(job.id, "u1", "test", commands.Uncordon("asia"))
    job.wait_for_merge("asia", 1)
    job.port.submit(job.id, "c1", "test", commands.Cordon("asia"))
    before = job.status()["view"]["global_version"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > before + 8, "merges while asia is cordoned")
    assert job.island("asia")["state"] == "training"
    job.command(commands.Kill("asia"))
    job.wait_for_state("asia", "cordoned")
    job.port.submit(job.id, "u2", "test", commands.Uncordon("asia"))
    job.wait_for_merge("asia", 2)
    tape = read_tape(job.run_dir / "tape.jsonl")
    assert replay(tape).exact
    first, *_ = tape.records
    assert isinstance(first.event, events.CommandRequested)
    assert first.event.request == commands.Cordon("asia")
    held = [x.reason for r in tape.records for x in r.effects if isinstance(x, effects.HoldIsland)]
    assert held == ["node group asia is cordoned"] * 2


def test_a_job_is_scaled_from_three_islands_to_six_while_it_trains_and_back(start: Start) -> None:
    document = synthetic(steps=ENDLESS, synchroniser={"quorum": 2})
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
    assert {job.island(island)["state"] for island in first} == {"training"}
    version = job.status()["view"]["global_version"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > version + 8, "merges of those that stay")
    assert replay(read_tape(job.run_dir / "tape.jsonl")).exact


def adopted(job: Job, island: str) -> set[int]:
    return {event.fragment for event in job.events(events.FragmentAdopted, island)}


def tokens(job: Job, islands: list[str]) -> dict[str, dict[str, float]]:
    of_islands = job.status()["goodput"]["islands"]
    return {island: of_islands[island]["tokens"] for island in islands}
