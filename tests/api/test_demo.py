"""The demo's script in a world of clockwork: it kills an island on its way, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.api.installation import CONTROL, ROOT, Installation, environment, interruptible
from tests.waiting import PATIENCE_S

SCRIPT = """
import sys
from contextlib import suppress
from pathlib import Path
from rich.console import Console
from api.commands.service import run_demo
from api.installation.home import Home
from api.installation.up import Installation
home, runs, spec, control = sys.argv[1:]
wanted = Installation(Home(Path(home)), Path(runs), control=control)
sys.exit(run_demo(wanted, Path(spec), "asia", Console(), lambda said: print(said, flush=True)))
"""


def start_demo(cold: Installation, steps: int) -> subprocess.Popen[str]:
    spec = cold.folder / "demo.yaml"
    spec.write_text(yaml.safe_dump(cold.spec(steps=steps)))
    command = [sys.executable, "-c", SCRIPT, str(cold.home.path), str(cold.runs), str(spec), CONTROL]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=interruptible,
    )


def command_line_of(pid: int) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def test_the_demo_kills_an_island_a_third_in_and_ends_with_its_report(cold: Installation) -> None:
    demo = start_demo(cold, steps=400)
    said = demo.communicate(timeout=PATIENCE_S)[0]
    assert demo.returncode == 0, said
    assert not cold.home.running()
    report = json.loads((cold.runs / "latest" / "report.json").read_text())
    assert [recovery["island"] for recovery in report["recoveries"]] == ["asia"]
    assert report["recoveries"][0]["complete"]
    assert "killed asia" in said
    for beginning in ("loss      ", "goodput   ", "recovery  asia was back in"):
        assert beginning in said
    assert str(Path(report["job_id"]) / "report.html") in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_ends_what_it_started(cold: Installation, number: signal.Signals) -> None:
    demo = start_demo(cold, steps=20_000)
    assert demo.stdout is not None
    for text in demo.stdout:
        if "training" in text:
            break
    assert cold.home.running()
    demo.send_signal(number)
    said = demo.communicate(timeout=PATIENCE_S)[0]
    assert demo.returncode == 128 + number, said
    assert not cold.home.running()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_service_that_does_not_hold_its_home_yet_is_ended_by_the_signal_that_ends_up(
    cold: Installation, number: signal.Signals
) -> None:
    command = cold.command("up", "--runs", str(cold.runs), "--control", CONTROL, *cold.roots)
    up = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True, preexec_fn=interruptible
    )
    assert up.stderr is not None
    for text in up.stderr:
        if "starting the service" in text:
            break
    up.send_signal(number)
    said = up.communicate(timeout=PATIENCE_S)[1]
    assert up.returncode == 128 + number, said
    assert "interrupted; everything that was started is stopped" in said
    assert not cold.home.discovered_address()
    assert [pid for pid in psutil.pids() if str(cold.home.path) in command_line_of(pid)] == []


def test_a_second_demo_in_the_same_home_starts_nothing_and_ends_nothing(cold: Installation) -> None:
    with cold.home.locked_for_change("demo"):
        second = start_demo(cold, steps=400)
        said = second.communicate(timeout=PATIENCE_S)[0]
    assert second.returncode != 0
    assert "`atoll demo`" in said
    assert "is running in" in said
    assert not cold.home.address()
