"""The lab at its smallest: two regions, one line, data-parallel and a job of the service. Bytes and structure, no time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from orchestrator.specification.config import parse_job
from tests.api.installation import ROOT
from tests.programs import missing, required
from tests.waiting import wait_until
from tests.wan.lab import __main__ as lab
from tests.wan.lab.collective import METHODS, RUN, Learner
from tests.wan.lab.losses import Curve, document, time_to
from tests.wan.lab.plan import QUICK, SMALL

CONTROL_RATIO_MAX = 0.5
"""Reports, heartbeats and requests of so small a job, to its parameters."""


@pytest.fixture
def capable() -> None:
    for program in lab.PROGRAMS:
        required(program)
    if os.geteuid() != 0:
        missing("root, which network namespaces need,")


@pytest.mark.soak("half a minute of the lab")
@pytest.mark.ray
@pytest.mark.usefixtures("capable")
def test_the_smallest_lab_counts_bytes_as_the_formulas_do_and_keeps_tables_and_a_picture(tmp_path: Path) -> None:
    done = _lab("small", "--json", "--folder", str(tmp_path))
    said, _ = done.communicate()
    assert done.returncode in (0, 1)  # it may miss goals: they are not for such sizes
    outcome: dict[str, Any] = json.loads(said)
    dense, ours = outcome["windows"]
    assert (dense["method"], ours["method"]) == ("data-parallel", "atoll int4")
    assert dense["sent_bytes_per_token"] == pytest.approx(dense["formula_bytes_per_token"], rel=0.1)
    assert dense["received_bytes_per_token"] == pytest.approx(dense["sent_bytes_per_token"], rel=0.1)
    control = ours["sent_bytes_per_token"] / ours["formula_bytes_per_token"] - 1
    assert control < CONTROL_RATIO_MAX
    assert ours["merged_ratio"] > 0
    lossy = {one["method"]: one["frame_loss_ratio"] for one in outcome["lossy"]}
    assert lossy == {"data-parallel": 0.01, "atoll int4": 0.01}
    assert json.loads((tmp_path / "outcome.json").read_text()) == outcome
    assert "| data-parallel |" in (tmp_path / "tables.md").read_text()
    drawn = ElementTree.parse(tmp_path / "utilisation.svg").getroot()
    assert len(drawn.findall(".//{*}circle")) == len(outcome["windows"])
    assert "prefers-color-scheme:dark" in drawn.findtext("{*}style", "")


@pytest.mark.soak("half a minute of the lab")
@pytest.mark.usefixtures("capable")
def test_an_interrupted_lab_leaves_no_region_and_keeps_what_it_measured(tmp_path: Path) -> None:
    running = _lab("quick", "--only", "data-parallel", "--folder", str(tmp_path))
    wait_until((tmp_path / "outcome.json").exists, "the first window")
    spaces = {path for path in Path("/run/netns").iterdir() if _inhabitants(path) & _descendants(running.pid)}
    assert len(spaces) == 4
    running.send_signal(signal.SIGINT)
    running.communicate()
    assert running.returncode == 130
    assert not [path for path in spaces if path.exists()]
    assert json.loads((tmp_path / "outcome.json").read_text())["windows"]


def test_who_is_not_root_or_lacks_a_program_learns_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    assert lab.main(["small"]) == 2
    assert "sudo make wan-lab" in capsys.readouterr().err
    monkeypatch.setattr(lab.os, "geteuid", lambda: 0)
    monkeypatch.setattr(lab.shutil, "which", lambda program: None if program == "tc" else program)
    assert lab.main(["small"]) == 2
    assert "apt-get install iproute2" in capsys.readouterr().err


@pytest.mark.soak("half a minute of the lab")
@pytest.mark.parametrize("method", METHODS)
def test_an_island_of_each_method_learns_and_its_loss_is_measured(method: str) -> None:
    """By itself: what the others send is its own."""

    class Alone:
        def start(self, vector: np.ndarray) -> Future[np.ndarray]:
            mean: Future[np.ndarray] = Future()
            mean.set_result(vector.copy())
            return mean

    spec = parse_job(document(replace(QUICK, batch_size=2, sequence_length=16), "float32")).model_dump(mode="json")
    schedule = {"interval_steps": 2, "overlap_steps": 1, "outer_lr": 0.7, "outer_momentum": 0.0}
    setting = {"method": method, "spec": spec, "rank": 0, "count": 1, **schedule}
    island = Learner(setting, 2 if method == METHODS[2] else 1)
    before = island.trainer.evaluate(island.tensors()).loss
    stepping = RUN[method](island, Alone(), setting)
    for _ in range(8):
        next(stepping)
    assert island.trainer.evaluate(island.tensors()).loss < before


def test_the_time_to_a_loss_lies_between_two_measurements() -> None:
    curve = Curve("some", 5.0, 30, 1.0, ((10.0, 3.0), (20.0, 2.0), (30.0, 1.5)))
    assert [time_to(curve, loss) for loss in (3.0, 2.5, 2.0, 1.5, 1.0)] == [10.0, 15.0, 20.0, 30.0, None]


def test_settings_share_what_they_compare_by() -> None:
    full, quick = lab.SETTINGS["full"], lab.SETTINGS["quick"]
    assert set(quick.megabits) - {2.0} <= set(full.megabits)
    assert (min(full.megabits), max(full.megabits)) == (1, 10_000)
    assert SMALL.regions == 2


def _lab(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.wan.lab", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _descendants(pid: int) -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def _inhabitants(space: Path) -> set[int]:
    """The processes in a network namespace."""
    told = subprocess.run(["ip", "netns", "pids", space.name], capture_output=True, text=True, check=False).stdout
    return {int(pid) for pid in told.split()}
