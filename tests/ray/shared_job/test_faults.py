"""Islands that are killed or stopped, in real processes: the others never stall, and the island comes back and gives again.

An island is held where it is until the others have trained on: if they waited for it they would never do so.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.core import commands, events
from orchestrator.core.messages import CaughtUp
from orchestrator.system.logbook import island_logbook
from tests.ray.jobs import BRIEF_S, GROUPS, STEP_S, STEPS_ON, Job, gone, pids_of

pytestmark = pytest.mark.ray
TRIES = 25
"""Of catching a process as it begins, which takes it about a second."""


def test_a_killed_island_contributes_again_while_the_others_never_stall(
    job: Job, plug: Callable[[Path], Path], train_on: Callable[..., None]
) -> None:
    """What it said is found, and its successor's log begins anew."""
    from tests.ray import plugged  # here, because it imports Ray

    victim, others = job.island("asia"), [job.island(group)["pid"] for group in GROUPS if group != "asia"]
    number = victim["incarnation"]
    starting = plug(plugged.act(job.seed, plugged.WARM_UP))
    command = job.command(commands.Kill("asia"))
    job.wait_for_state("asia", "starting", incarnation=number + 1)
    train_on(*others)
    assert job.island("asia")["state"] == "starting"
    starting.unlink()
    back = job.wait_for_merge("asia", number + 1)
    status = job.status()
    assert status["commands"][command]["accepted"] is True
    assert back["pid"] != victim["pid"]
    assert back["step"] >= victim["step"]
    recovery = status["statistics"]["recovery_s"]
    assert status["statistics"]["recoveries"][-1]["complete"]
    assert recovery is not None
    donor = job.events(CaughtUp, "asia")[-1].donor
    assert donor in GROUPS[:-1]

    assert gone(victim["pid"])
    first, second = (
        island_logbook(job.run_dir, "asia", one).path.read_text().splitlines() for one in (number, number + 1)
    )
    assert first[0].endswith(f"asia, incarnation {number}, is process {victim['pid']}")
    assert any("at step" in line for line in first)
    assert second[0].endswith(f"asia, incarnation {number + 1}, is process {back['pid']}")
    assert f"caught up from {donor}" in "\n".join(second)


def test_an_island_that_stops_for_a_while_is_suspected_not_replaced_and_goes_on(
    job: Job, train_on: Callable[..., None]
) -> None:
    stopped, others = job.island("europe"), [job.island(group)["pid"] for group in GROUPS if group != "europe"]
    os.kill(stopped["pid"], signal.SIGSTOP)
    try:
        job.wait_for_state("europe", "suspect")
        train_on(*others)
        assert job.island("europe")["state"] == "suspect"
    finally:
        os.kill(stopped["pid"], signal.SIGCONT)
    back = job.wait_for_state("europe", "training")
    assert (back["incarnation"], back["pid"]) == (stopped["incarnation"], stopped["pid"])
    resumed_at = job.events(events.ConnectionRestored, "europe")[-1].at
    job.wait_until(lambda: job.island("europe")["last_merge_at"] > resumed_at, "a merge with europe after its stop")
    assert job.gap_max_s("europe", resumed_at) >= STEPS_ON * STEP_S / 2, "it stood still while the others stepped"


@pytest.mark.soak("a death and a stop, each of which has a test of its own here")
def test_an_island_killed_while_it_is_suspect_is_placed_again(job: Job) -> None:
    stopped = job.island("asia")
    before = len(job.events(events.ConnectionLost, "asia"))
    os.kill(stopped["pid"], signal.SIGSTOP)
    job.wait_for_state("asia", "suspect")
    os.kill(stopped["pid"], signal.SIGKILL)
    job.wait_for_merge("asia", stopped["incarnation"] + 1)
    lost = [e for e in job.events(events.ConnectionLost, "asia")[before:] if e.incarnation == stopped["incarnation"]]
    assert [event.dead for event in lost] == [False, True]


@pytest.mark.soak("a moment before what the next test kills an island in")
def test_an_island_killed_while_it_is_placed_is_placed_again(job: Job, home: Path) -> None:
    """Its process is stopped as soon as there is one, so it cannot have said that it was placed."""
    number = job.island("asia")["incarnation"]
    others = {job.island(group)["pid"] for group in GROUPS}
    job.command(commands.Kill("asia"))
    while True:
        number += 1
        pid = job.wait_until(lambda: min(pids_of("Island", home) - others, default=None), "asia's process", BRIEF_S)
        others.add(pid)
        os.kill(pid, signal.SIGSTOP)
        placing = job.island("asia")["state"] == "placing" and not job.at_of(events.IslandPlaced, "asia", number)
        os.kill(pid, signal.SIGKILL)
        job.wait_until(lambda pid=pid: gone(pid), "its end")
        if placing:
            break
        assert len(others) < len(GROUPS) + TRIES, "the process was always too quick to be caught"
    job.wait_for_merge("asia", number + 1)


def test_an_island_killed_while_it_starts_and_while_it_catches_up_is_placed_again(
    job: Job, plug: Callable[[Path], Path]
) -> None:
    from tests.ray import plugged  # here, because it imports Ray

    number, before = job.island("asia")["incarnation"], len(job.events(events.ConnectionLost, "asia"))
    starting, handing_over = (plug(plugged.act(job.seed, name)) for name in (plugged.WARM_UP, plugged.HAND_OVER))
    job.command(commands.Kill("asia"))
    for act, state in ((starting, "starting"), (handing_over, "catching_up")):
        number += 1
        caught = job.wait_for_state("asia", state, incarnation=number)
        assert caught["incarnation"] == number
        os.kill(caught["pid"], signal.SIGKILL)
        act.unlink()
    job.wait_for_merge("asia", number + 1)
    died = [event.incarnation for event in job.events(events.ConnectionLost, "asia")[before:] if event.dead]
    assert died[-2:] == [number - 1, number]


def test_a_killed_island_that_shall_stay_away_cannot_be_struck_and_comes_only_when_it_is_added_again(job: Job) -> None:
    stays = job.island("asia")
    faults = job.events(events.FaultInjected, "asia")
    job.command(commands.Kill("asia", restart=False))
    job.wait_for_state("asia", "stopped")
    before = job.status()["view"]["global_version"]
    for kind, numbers in (
        ("cut", {"duration": 5.0}),
        ("corrupt", {"payloads": 1}),
        ("stop", {"duration": 5.0}),
        ("kill_node", {}),
    ):
        noted = job.answer(job.command(commands.Inject(kind, "asia", **numbers)))
        assert (noted["accepted"], noted["detail"][:8]) == (False, "asia has"), noted
    assert job.events(events.FaultInjected, "asia") == faults
    assert gone(stays["pid"])
    job.wait_until(lambda: job.status()["view"]["global_version"] > before + 8, "merges without asia")
    assert job.island("asia")["state"] == "stopped"
    job.command(commands.Readd("asia"))
    job.wait_for_merge("asia", stays["incarnation"] + 1)
