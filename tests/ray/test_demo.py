"""`atoll demo`, whole: command line, REST, Ray, JAX islands on real text, a SIGKILL, the report, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from orchestrator.core.commands import Kill
from orchestrator.core.events import CommandRequested
from orchestrator.core.messages import CaughtUp
from orchestrator.tape.storage import read_tape
from tests import forked
from tests.harness.reports import of_kind
from tests.ray.jobs import steps_between
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent
GROUPS = ("us-east", "asia")
STEPS = 80


def test_the_demo_survives_its_kill_and_learns(tmp_path: Path) -> None:
    job, fleet = (yaml.safe_load((ROOT / "deploy/configs" / name).read_text()) for name in ("demo.yaml", "groups.yaml"))
    job["budget"] = {"steps": STEPS}
    job["islands"] = [section for section in job["islands"] if section["node_group"] in GROUPS]
    fleet["node_groups"] = [group for group in fleet["node_groups"] if group["name"] in GROUPS]
    options = {"--home": tmp_path / "home", "--runs": (runs := tmp_path / "runs")}
    for option, document in (("--spec", job), ("--groups", fleet)):
        options[option] = tmp_path / f"{option.strip('-')}.yaml"
        options[option].write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "api.cli", "demo", *(str(word) for pair in options.items() for word in pair)]
    demo = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert demo.returncode == 0, demo.stdout + demo.stderr

    report = json.loads((runs / "latest" / "report.json").read_text())
    assert report["outcome"] == "completed"
    assert report["loss_final"] < report["loss_unigram"] - 0.2
    recovery = report["recovery_s"]
    assert recovery["island"] == "asia"
    parts = ("detect", "place", "start", "connect", "transfer", "first_merge")
    assert sum(recovery[part] for part in parts) == pytest.approx(recovery["total"], rel=1e-6)
    assert report["survivors"]  # of those that trained when it was killed; on a busy machine one may still begin
    assert set(report["survivors"]) <= {"us-east-0"}
    assert report["survivor_gap_max_s"] > 0
    records = read_tape(runs / "latest" / "tape.jsonl").records
    killed = next(
        r.event for r in records if isinstance(r.event, CommandRequested) and isinstance(r.event.request, Kill)
    )
    back = next(event for event in of_kind((r.event for r in records), CaughtUp) if event.at > killed.at)
    assert back.island == "asia"
    # One that waited for asia would have ended the step it was in. A spare takes asia's place within about three seconds.
    assert max(steps_between(records, name, killed.at, back.at) for name in report["survivors"]) > 1
    seconds = report["island_seconds"]
    assert sum(s for name, s in seconds.items() if name != "total") == pytest.approx(seconds["total"], rel=1e-6)
    assert report["tokens_trained"] == report["tokens_merged"] + report["tokens_discarded"]

    assert {name: island["spare"] for name, island in report["islands"].items()} == {
        "us-east-0": False,
        "us-east-1": True,
        "asia": False,
    }
    assert report["policy"]["islands"] == 2

    page = (runs / "latest" / "report.html").read_text()
    assert "2 islands in 2 regions" in page
    assert "and 1 spare" in page
    assert page.count("<svg") >= 4
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # self-contained
    assert (runs / "latest" / "merged.safetensors").stat().st_size > 4 * 800_000
    assert forked.atoll("replay", str(runs / "latest" / "tape.jsonl")).returncode == 0
    assert _processes_of(tmp_path) == []


def _processes_of(folder: Path) -> list[str]:
    """Command lines of processes that work for an installation in this folder, ours excepted."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(folder) in line and process.pid != os.getpid():
            found.append(line)
    return found
