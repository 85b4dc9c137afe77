"""Whole jobs on real processes: to the end, without a place, and without the process that started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from orchestrator.errors import NotFound
from orchestrator.host import records
from orchestrator.runtime import cluster, fork_server
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import STEP_S, Job, assert_sound, stop, synthetic
from tests.run_files import undescribed
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.ray
Start = Callable[[dict[str, Any]], Job]


def test_a_job_runs_to_its_budget_and_leaves_report_parameters_and_a_tape_that_replays(start: Start) -> None:
    job = start(synthetic(steps=60, groups=("us-east", "asia")))
    status = job.wait_for_end()
    assert status["view"]["outcome"] == "completed"
    report = json.loads((job.run_dir / "report.json").read_text())
    assert report["tokens_trained"] >= status["view"]["token_budget"]
    assert report["tokens_trained"] == pytest.approx(report["tokens_merged"] + report["tokens_discarded"], abs=2)
    assert report["loss_final"] < status["loss_curve"][0][1] or len(status["loss_curve"]) == 1
    assert report["recovery_s"] is None
    parameters = load_file(job.run_dir / "merged.safetensors")
    assert sum(array.size for array in parameters.values()) == report["parameter_count"]
    assert "<svg" in (job.run_dir / "report.html").read_text()
    tape = read_tape(job.run_dir / "tape.jsonl")
    assert tape.footer is not None
    assert replay(tape).divergence is None
    assert report["lines"] == status["lines"]
    assert undescribed(job.run_dir) == []


def test_bytes_are_counted_as_they_were_carried_and_four_bits_both_ways_are_few(start: Start) -> None:
    document = synthetic(steps=60, groups=("us-east", "asia"))
    document["synchroniser"] |= {"wire": "int4"}
    status = start(document).wait_for_end()
    assert status["view"]["outcome"] == "completed"
    sizes, traffic = status["fragment_parameters"], status["statistics"]["traffic"]
    lines = status["lines"]["islands"].values()
    assert status["lines"]["islands"].keys() == {"us-east", "asia"}
    up, down = sum(line["up_bytes"] for line in lines), sum(line["down_bytes"]["update"] for line in lines)
    float32 = [
        sum(4 * size * count for size, count in zip(sizes, traffic[f"payloads_{way}"], strict=True))
        for way in ("up", "down")
    ]
    unheard = sum(line["up_payloads"] for line in lines) - sum(traffic["payloads_up"])
    assert 0 <= unheard <= len(lines), "of each island one may have come as the job ended"
    assert 0.125 * float32[0] < up < 0.25 * float32[0], "four bits, their scales, and the first one whole perhaps"
    assert 0 < down < 0.25 * float32[1]
    assert all(line["up_busy_seconds"] > 0 and line["down_busy_seconds"] > 0 for line in lines)
    assert [norms["fragment"] for norms in status["fragment_norms"]] == list(range(len(sizes)))
    for norms in status["fragment_norms"]:
        assert norms["update_norm"] > 0
        assert 0 < norms["residue_norm"] < norms["update_norm"]


def test_a_page_that_cannot_be_made_says_so_beside_the_figures(tmp_path: Path) -> None:
    records.write_report(tmp_path, {"no": "report"})
    assert json.loads((tmp_path / "report.json").read_text()) == {"no": "report"}
    assert "could not be made (" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("island", "told"),
    [
        ({"node_group": "mars"}, ["'mars'", "europe", "change islands.node_group"]),
        ({"node_group": "asia", "cpus": 64}, ["asked for 64 CPU", "4 CPU in all", "ask for less"]),
    ],
)
def test_a_job_that_cannot_be_placed_waits_and_says_what_it_asked_what_there_is_and_what_to_do(
    start: Start, island: dict[str, Any], told: list[str]
) -> None:
    """A node with room may join at any time, so this counts as no failure."""
    job = start(synthetic(steps=10, recovery={"restarts_max": 0}) | {"islands": [island]})
    waiting = job.wait_for_state(island["node_group"], "waiting")
    assert all(words in waiting["reason"] for words in told), waiting["reason"]
    assert job.status()["view"]["outcome"] is None


@pytest.mark.soak("a job of its own for what tests/ray/test_service_killed.py and test_recovery.py have")
def test_a_job_outlives_the_process_that_started_it_and_ends_as_it_should_though_its_synchroniser_dies_at_its_end(
    home: Path, port: RayControlPort, tmp_path: Path
) -> None:
    """The budget ends while nobody decides, or soon after: the synchroniser stands still from the job's beginning."""
    program = """
import json, signal, sys
from pathlib import Path
from orchestrator.specification.config import parse_job
from orchestrator.host import records
from orchestrator.runtime import cluster, fork_server
from orchestrator.runtime.control_port import connect
port = connect(Path(sys.argv[1]))
port.start_job("orphan", parse_job(json.loads(sys.argv[3])), Path(sys.argv[2]))
print("started", flush=True)
signal.pause()
"""
    document = json.dumps(synthetic(steps=240, groups=("us-east", "asia")))
    starter = subprocess.Popen(
        [sys.executable, "-c", program, str(home), str(tmp_path), document], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    with starter.stdout:
        assert starter.stdout.readline() == "started\n"
        os.kill(starter.pid, signal.SIGKILL)
        starter.wait(PATIENCE_S)
    job = Job(port, "orphan", tmp_path)
    try:
        job.wait_for_state("us-east", "training")
        pid = job.pid_of_synchroniser()
        stop(pid)
        time.sleep(120 * STEP_S)  # in which islands train on
        os.kill(pid, signal.SIGKILL)
        status = job.wait_for_end()
    finally:
        cluster.end_actors_of(job.id)
    assert status["view"]["outcome"] == "completed"
    assert status["view"]["epoch"] >= 2
    assert (job.run_dir / "merged.safetensors").exists()
    assert_sound(job)
    tokens = status["goodput"]["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["discarded"]


def test_a_synchroniser_that_hangs_is_restarted_on_request_and_titles_of_processes_name_job_and_island(
    start: Start, port: RayControlPort
) -> None:
    """It is stopped, so it can neither answer nor end itself."""
    job = start(synthetic(steps=10**9, groups=("us-east", "asia")))
    for island in ("us-east", "asia"):
        job.wait_for_merge(island, 1)
    islands = {island: job.island(island)["pid"] for island in ("us-east", "asia")}
    hanging = job.pid_of_synchroniser()
    assert title_of(hanging).startswith("ray::SynchroniserActor")
    assert title_of(hanging).endswith(f" {job.id}:synchroniser")
    for island, pid in islands.items():
        assert title_of(pid).endswith(f" {job.id}:{island}:1")
        assert title_of(psutil.Process(pid).ppid()) == fork_server.TITLE, "forks have titles of their own"
    stop(hanging)
    assert str(hanging) in port.restart_job(job.id)
    status = job.status_once_back()
    assert status["view"]["epoch"] == 2
    assert job.pid_of_synchroniser() != hanging
    back = job.restarts()[0].at
    for island, pid in islands.items():
        job.wait_until(lambda island=island: (job.island(island)["last_merge_at"] or 0.0) > back, "a merge of each")
        assert job.island(island)["pid"] == pid, "it trained all the while"
    with pytest.raises(NotFound):
        port.restart_job("no-such-job")


def title_of(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline()).strip()
