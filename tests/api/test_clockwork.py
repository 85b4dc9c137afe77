"""A job of the clockwork is the same whether somebody looks all the time or once, at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.commands import Command, Kill, Scale
from orchestrator.core.vocabulary import IslandId, NodeGroupId
from orchestrator.specification.config import JobSpec
from orchestrator.status import StatusDocument
from tests.api import clockwork
from tests.api.clockwork import Clockwork
from tests.api.installation import Installation

JOB = "trial-1"
COMMANDS: dict[float, Command] = {
    3.0: Kill(IslandId("asia")),
    5.0: Scale(NodeGroupId("europe"), 2),
    7.5: Kill(IslandId("europe")),
}


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_job_is_the_same_however_often_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(clockwork, "uptime", clock)
    monkeypatch.setattr(clockwork.time, "time", clock)
    pictures, tapes = [], []
    for folder, looks_per_second in ((tmp_path / "often", 4), (tmp_path / "once", 0)):
        pictures.append(last_status(folder, clock, looks_per_second))
        tapes.append((folder / "run" / "tape.jsonl").read_bytes())
    assert pictures[0] == pictures[1]
    assert tapes[0] == tapes[1]


def last_status(folder: Path, clock: Clock, looks_per_second: int) -> StatusDocument:
    clock.now, run_dir = 1000.0, folder / "run"
    run_dir.mkdir(parents=True)
    control, spec = Clockwork(folder / "clockwork"), JobSpec.model_validate(Installation(folder).spec())
    control.start_job(JOB, spec, run_dir)
    for tick in range(1, 41):
        clock.now = 1000.0 + tick / 4
        if tick / 4 in COMMANDS:
            control.submit(JOB, f"command-{tick}", "somebody", COMMANDS[tick / 4])
        elif looks_per_second and tick < 40:
            assert control.status(JOB)["view"]["phase"] == "running"
    return control.status(JOB)
