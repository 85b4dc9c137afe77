"""Operators change who takes part while a job trains: islands are drained, node groups cordoned."""

from __future__ import annotations

import pytest

from orchestrator.core import commands, effects, events
from orchestrator.core.messages import Drained
from tests.ray.jobs import Job, gone
from tests.ray.shared_job.conftest import WEST

pytestmark = pytest.mark.ray


def test_a_drained_island_loses_no_token_and_its_data_goes_on_when_it_is_added_again(job: Job) -> None:
    island, before = job.island("asia"), job.last["goodput"]["islands"]["asia"]["tokens"]
    command = job.command(commands.Drain("asia"))
    drained = job.wait_for_state("asia", "drained")
    status = job.status()
    assert status["commands"][command]["accepted"] is True
    tokens = status["goodput"]["islands"]["asia"]["tokens"]
    assert (tokens["discarded"], tokens["in_flight"]) == (before["discarded"], 0)
    assert tokens["trained"] == tokens["merged"] + tokens["discarded"] == drained["tokens_total"] > before["trained"]
    job.wait_until(lambda: gone(island["pid"]), "the end of its process")
    job.command(commands.Readd("asia"))
    job.wait_for_merge("asia", island["incarnation"] + 1)
    decided = [effect for record in job.records() for effect in record.effects]
    catch_ups = [x for x in decided if isinstance(x, effects.BeginCatchUp) and x.island == "asia"]
    assert [x.cursor for x in (catch_ups[0], catch_ups[-1])] == [0, drained["steps_total"]]
    assert job.events(Drained, "asia")[-1].incarnation == island["incarnation"]


def test_nothing_new_is_placed_on_a_cordoned_node_group(job: Job) -> None:
    """It was from the job's beginning, and is so again in the end. Who waits there after a death and comes once it is
    uncordoned is tests/core/test_cordon.py's."""
    reason, number = f"node group {WEST} is cordoned", len(job.events(events.IslandPlaced, WEST))
    assert job.island(WEST)["reason"] == reason
    held = len(holds(job))
    job.command(commands.Uncordon(WEST))
    job.wait_for_merge(WEST, number + 1)
    job.command(commands.Cordon(WEST))
    before, pid = job.status()["view"]["global_version"], job.island(WEST)["pid"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > before + 8, f"merges while {WEST} is cordoned")
    assert job.island(WEST)["pid"] == pid, "who trains there stays"
    job.command(commands.Kill(WEST))
    job.wait_for_state(WEST, "cordoned")
    first, *_ = job.records()
    assert isinstance(first.event, events.CommandRequested)
    assert first.event.request == commands.Cordon(WEST)
    assert holds(job)[:held] == [reason] * held
    assert holds(job)[held:] == [reason]


def holds(job: Job) -> list[str]:
    return [x.reason for record in job.records() for x in record.effects if isinstance(x, effects.HoldIsland)]
