"""Islands that are killed or stopped, in real processes: the others never stall, and the island comes back and gives again.

Gaps are the islands' own measurements (``ProgressReported.gap_max_seconds``), read from the job's tape.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import parse_job
from orchestrator.core import commands, events
from orchestrator.runtime import cluster
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.runtime.names import controller_name, synchroniser_name
from tests.ray.jobs import BRIEF_S, GAP_MAX_S, GROUPS, Job, assert_sound, gone, pid_of, synthetic

pytestmark = pytest.mark.ray
Start = Callable[[dict[str, Any]], Job]
ENDLESS = 100_000


def test_a_killed_island_contributes_again_while_the_others_never_stall(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS))
    for group in GROUPS:
        job.wait_for_state(group, "training")
    victim = job.wait_for_merge("asia", 1)
    command = job.command(commands.Kill("asia"))
    back = job.wait_for_merge("asia", 2)
    status = job.status()
    assert status["commands"][command]["accepted"] is True
    assert back["pid"] != victim["pid"]
    assert back["step"] >= victim["step"]
    recovery = status["statistics"]["recovery_s"]
    assert status["statistics"]["recoveries"][-1]["complete"]
    assert recovery is not None
    killed_at = status["commands"][command]["at"]
    gaps = {group: job.gap_max_s(group, killed_at) for group in GROUPS[:-1]}
    assert max(gaps.values()) <= GAP_MAX_S, gaps
    assert job.events(events.IslandCaughtUp, "asia")[-1].donor in GROUPS[:-1]


def test_an_island_that_stops_for_a_while_is_suspected_not_replaced_and_goes_on(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS))
    for group in GROUPS:
        job.wait_for_state(group, "training")
    stopped = job.wait_for_merge("europe", 1)
    at = job.status()["at"]
    os.kill(stopped["pid"], signal.SIGSTOP)
    threading.Timer(8.0, os.kill, (stopped["pid"], signal.SIGCONT)).start()
    job.wait_for_state("europe", "suspect")
    back = job.wait_for_state("europe", "training")
    assert (back["incarnation"], back["pid"]) == (1, stopped["pid"])
    resumed_at = job.events(events.ConnectionRestored, "europe")[-1].at
    job.wait_until(lambda: job.island("europe")["last_merge_at"] > resumed_at, "a merge with europe after its stop")
    gaps = {group: job.gap_max_s(group, at) for group in GROUPS if group != "europe"}
    assert max(gaps.values()) <= GAP_MAX_S, gaps
    assert job.gap_max_s("europe", resumed_at) >= 7.0  # it really stood still
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


def test_an_island_that_stays_silent_is_replaced_and_its_process_ended(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("us-east", "asia"), recovery={"suspect_timeout_s": 0.5}))
    job.wait_for_state("us-east", "training")
    stopped = job.wait_for_merge("asia", 1)
    os.kill(stopped["pid"], signal.SIGSTOP)
    back = job.wait_for_merge("asia", 2)
    assert back["pid"] != stopped["pid"]
    job.wait_until(lambda: gone(stopped["pid"]), "the end of its first process")


def test_an_island_killed_while_it_is_suspect_is_placed_again(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("us-east", "asia")))
    stopped = job.wait_for_merge("asia", 1)["pid"]
    os.kill(stopped, signal.SIGSTOP)
    job.wait_for_state("asia", "suspect")
    os.kill(stopped, signal.SIGKILL)
    job.wait_for_merge("asia", 2)
    lost = job.events(events.ConnectionLost, "asia")
    assert [event.dead for event in lost] == [False, True]


def test_an_island_killed_while_it_is_placed_is_placed_again(start: Start, home: Path) -> None:
    """Its process is stopped as soon as there is one, so it cannot have said that it was placed."""
    job = start(synthetic(steps=ENDLESS, groups=("asia",)))
    killed = 0
    while True:
        pid = job.wait_until(lambda: pid_of("Island", home), "a process for asia", BRIEF_S)
        os.kill(pid, signal.SIGSTOP)
        placing = job.island("asia")["state"] == "placing" and not job.events(events.IslandPlaced, "asia")
        os.kill(pid, signal.SIGKILL)
        killed += 1
        job.wait_until(lambda pid=pid: gone(pid), "its end")
        if placing:
            break
        assert killed < 5, "the process was always too quick to be caught"
    job.wait_for_merge("asia", killed + 1)


def test_an_island_killed_while_it_starts_is_placed_again(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("us-east", "asia"), synthetic={"start_s": 3.0}))
    os.kill(job.wait_for_state("asia", "starting")["pid"], signal.SIGKILL)
    job.wait_for_merge("asia", 2)
    assert job.events(events.ConnectionLost, "asia")[0].dead


def test_an_island_killed_while_it_catches_up_is_placed_again(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("us-east", "asia")), trainer="tests.ray.slow_donor:create")
    job.wait_for_merge("asia", 1)
    job.wait_for_merge("us-east", 1)
    job.command(commands.Kill("asia"))
    os.kill(job.wait_for_state("asia", "catching_up", incarnation=2)["pid"], signal.SIGKILL)
    job.wait_for_merge("asia", 3)


def test_a_killed_island_that_shall_stay_away_comes_only_when_it_is_added_again(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("us-east", "asia")))
    job.wait_for_merge("asia", 1)
    job.command(commands.Kill("asia", restart=False))
    job.wait_for_state("asia", "stopped")
    before = job.status()["view"]["global_version"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > before + 8, "merges without asia")
    assert job.island("asia")["state"] == "stopped"
    job.command(commands.Readd("asia"))
    job.wait_for_merge("asia", 2)


def test_islands_end_when_their_synchroniser_is_gone(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("us-east", "asia")))
    pids = [job.wait_for_state(group, "training")["pid"] for group in ("us-east", "asia")]
    synchroniser = cluster.actor_named(synchroniser_name(job.id))
    cluster.end_actor(synchroniser)
    job.wait_until(lambda: all(gone(pid) for pid in pids), "the islands' end")
    job.wait_until(lambda: cluster.actor_named(controller_name(job.id)) is None, "the controller's end")
    (job.run_dir / "status.json").touch()  # for the fixture: there is nothing left to cancel


def test_a_job_without_its_controller_still_lets_everything_go(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=("us-east", "asia")))
    pids = [job.wait_for_state(group, "training")["pid"] for group in ("us-east", "asia")]
    cluster.end_actor(cluster.actor_named(controller_name(job.id)))
    job.command(commands.Cancel())
    assert job.wait_for_end()["view"]["outcome"] == "cancelled"
    job.wait_until(lambda: all(gone(pid) for pid in pids), "the islands' end")
    job.wait_until(lambda: cluster.actor_named(synchroniser_name(job.id)) is None, "the synchroniser's end")


def test_a_bug_ends_the_job_as_failed_and_everything_with_it(port: RayControlPort, tmp_path: Path) -> None:
    spec = parse_job(synthetic(steps=10, groups=("us-east",)))
    port.start_job("broken", spec.model_copy(update={"trainer": "learners.synthetic:missing"}), tmp_path)
    job = Job(port, "broken", tmp_path)
    job.wait_until((tmp_path / "status.json").exists, "the end")
    job.wait_until(lambda: cluster.actor_named(synchroniser_name("broken")) is None, "the synchroniser's end")
    job.wait_until(lambda: cluster.actor_named(controller_name("broken")) is None, "the controller's end")
    assert (tmp_path / "crash.txt").exists()
    view = job.status()["view"]
    assert (view["phase"], view["outcome"]) == ("finished", "failed")
    assert "see crash.txt" in view["reason"]
