"""A standby takes a killed island's place: its process trains on under the island's name, whichever is killed next."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.core import commands, events
from orchestrator.core.effects import BeginCatchUp, PlaceIsland
from orchestrator.core.messages import CaughtUp
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import Job, gone, synthetic

pytestmark = pytest.mark.ray


def test_a_standbys_process_becomes_the_island_and_remains_it_through_the_deaths_of_others(
    start: Callable[..., Job],
) -> None:
    document = synthetic(100_000, ("us-east", "us-west"))
    document["islands"][0]["standby"] = 1
    job = start(document)
    first = job.wait_for_state("us-east", "training")["pid"]
    standby = job.wait_for_state("us-east-standby", "standby")["pid"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > 8, "merges while it stands by")

    os.kill(first, signal.SIGKILL)
    assert job.wait_for_merge("us-east", 2)["pid"] == standby
    held = next(f for f in effects_of(job, BeginCatchUp) if (f.island, f.incarnation) == ("us-east", 2))
    assert held.held
    assert held.cursor > 0
    taken = next(e for e in job.events(CaughtUp, "us-east") if e.incarnation == 2)
    assert min(taken.versions) > 0  # what was published while it stood by
    # it did not wait for a back-off: the very event that told of the loss placed it
    lost_at = job.at_of(events.ConnectionLost, "us-east", 1)
    placed = [r for r in job.records() if r.event.at == lost_at]
    assert any(isinstance(f, PlaceIsland) and f.standby == ("us-east-standby", 1) for r in placed for f in r.effects)
    assert "which was us-east-standby" in (job.run_dir / "logs" / "islands" / "us-east-2.log").read_text()

    os.kill(job.wait_for_state("us-west", "training")["pid"], signal.SIGKILL)
    job.wait_for_merge("us-west", 2)  # it found its donor under the name that the donor's process was made with
    assert [e.donor for e in job.events(CaughtUp, "us-west") if e.incarnation == 2] == ["us-east"]

    job.wait_for_state("us-east-standby", "standby", incarnation=2)
    [waited] = [p for p in effects_of(job, PlaceIsland) if (p.island, p.incarnation) == ("us-east-standby", 2)]
    assert job.at_of(events.IslandPlaced, "us-east-standby", 2) - lost_at > waited.wait_s > 0.0
    os.kill(job.pid_of_synchroniser(), signal.SIGKILL)
    job.wait_until(lambda: job.answers() and job.restarts(), "the synchroniser's return")
    version = job.status()["view"]["global_version"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > version + 4, "merges after it")
    assert not gone(standby)
    assert {name: job.island(name)["incarnation"] for name in ("us-east", "us-east-standby")} == {
        "us-east": 2,
        "us-east-standby": 2,
    }
    job.command(commands.Cancel())
    job.wait_for_end()
    assert replay(read_tape(job.run_dir / "tape.jsonl")).divergence is None


def effects_of(job: Job, kind: type[Any]) -> list[Any]:
    return [f for r in job.records() for f in r.effects if isinstance(f, kind)]
