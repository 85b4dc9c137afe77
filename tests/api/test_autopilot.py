"""The autopilot of the service: it looks when it is due, records advice, and changes settings only within bounds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from api.jobs.autopilot import CHANGED_MEANWHILE, LOOKS_KEPT, Autopilots, advice_of, tape_in
from api.jobs.service import Service
from api.schemas import Advice, JobState
from api.storage.store import Store
from api.terminal.record_text import advised
from orchestrator.core.commands import Command, Set, Uncordon
from orchestrator.core.vocabulary import NodeGroupId
from orchestrator.errors import DataError, InfrastructureError
from orchestrator.simulation.fit import fit
from orchestrator.specification.sections import AutopilotSection
from orchestrator.system import python_process
from tests.api.clockwork import Clockwork
from tests.api.installation import Installation
from tests.waiting import wait_until

EFFECT = {
    "tokens_per_second": 100.0,
    "spread": 1.0,
    "goodput_ratio": 0.8,
    "contributors": 2.0,
    "drift_steps": 8.0,
    "badput": {},
}


def report(after: float, record: int = 1, held_by: str = "") -> dict[str, Any]:
    advice = {"setting": "interval_steps", "before": 8.0, "after": after, "gain_ratio": 0.05, "error_ratio": 0.01}
    advice |= {"now": EFFECT, "then": EFFECT, "reason": "islands die often", "held_by": held_by}
    settings = {"interval_steps": 8.0, "quorum": 1.0, "grace": None, "standbys": 0.0}
    about = {"record": record, "at": 1.0, "settings": settings, "fit_error_ratio": 0.0, "looked_at": 3}
    return {**about, "outcome": "islands die often", "advice": advice}


class Desk:
    """A service with a job whose autopilot acts within 6 to 16, and a clock that the test turns."""

    def __init__(self, folder: Path, kind: str = "act") -> None:
        self.installation = Installation(folder)
        self.store = Store(f"sqlite:///{folder / 'store.sqlite'}")
        self.service = Service(Clockwork(folder / "clockwork"), self.store, self.installation.runs)
        self.now = 0.0
        self.answers: list[Mapping[str, Any] | InfrastructureError] = []
        self.meanwhile: Command | None = None
        """What an operator asks for during a look."""
        self.autopilots = Autopilots(self.service, self.store, self.look, lambda: self.now)
        autopilot = {"kind": kind, "bounds": {"interval_steps": [6, 16]}, "every_s": 60.0}
        spec = self.installation.spec(steps=2_000_000) | {"autopilot": autopilot}
        self.job = self.service.submit(spec, "me", None).job
        wait_until(lambda: self.service.job(self.job).islands_training)
        self.autopilots.round()

    @property
    def folder(self) -> Path:
        return self.service.run(self.job).folder

    def look(self, folder: Path, section: AutopilotSection) -> Mapping[str, Any]:
        answer = self.answers.pop()
        if self.meanwhile is not None:
            self.service.submit_command(self.job, self.meanwhile, "ada")
        if isinstance(answer, InfrastructureError):
            raise answer
        return answer

    def round(self, answer: Mapping[str, Any] | InfrastructureError) -> None:
        self.now += 61.0
        self.answers.append(answer)
        self.autopilots.round()
        assert not self.answers, "it looks when it is due"

    def commands(self) -> list[tuple[str, str]]:
        self.service.tend()
        return [(command.caller, command.kind) for command in self.service.commands(self.job)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.autopilots.close()
    desk.store.close()


def test_a_change_within_bounds_is_one_command_with_its_reason(desk: Desk) -> None:
    desk.round(report(12.0))
    desk.autopilots.round()  # it is not due
    assert desk.commands() == [("autopilot", "set")]
    (look,) = advice_of(desk.folder)
    assert look.command is not None
    answered = wait_until(
        lambda: (one := desk.service.command(desk.job, look.command or "")).state == "accepted" and one
    )
    assert "interval 12" in answered.detail
    assert "because islands die often" in answered.detail
    desk.round(report(12.0))  # the same record of the tape: as after a kill of the service in between
    assert desk.commands() == [("autopilot", "set")]


def test_a_setting_that_an_operator_changes_during_a_look_is_left_alone(desk: Desk) -> None:
    desk.meanwhile = Set(sync_interval_steps=10)
    desk.round(report(12.0))
    assert desk.commands() == [("ada", "set")]
    (look,) = advice_of(desk.folder)
    assert look.command is None
    assert look.advice is not None
    assert look.advice.held_by == CHANGED_MEANWHILE
    desk.meanwhile = Uncordon(NodeGroupId("asia"))  # which changes no setting
    wait_until(lambda: [one.state for one in desk.service.commands(desk.job)] == ["accepted"])
    desk.round(report(12.0, 2))
    assert desk.commands() == [("ada", "set"), ("ada", "uncordon"), ("autopilot", "set")]


@pytest.mark.parametrize("answer", [report(4.0), report(32.0), report(12.0, held_by="ada has set interval_steps")])
def test_what_is_out_of_bounds_or_an_operators_is_recorded_and_not_done(desk: Desk, answer: Mapping[str, Any]) -> None:
    desk.round(answer)
    assert desk.commands() == []
    (look,) = advice_of(desk.folder)
    assert look.command is None
    assert "Not changed" in shown(Advice(job=desk.job, kind="act", looks=[look]), JobState.RUNNING)


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        ("observe", JobState.RUNNING, "The first look comes `autopilot.every_s` after its start."),
        ("observe", JobState.COMPLETED, "The job is completed. A look comes `autopilot.every_s` after its start: give"),
        ("off", JobState.FAILED, "`autopilot: {kind: observe}` in the specification of the next job."),
    ],
)
def test_without_a_look_the_remedy_is_one_that_the_job_still_allows(kind: str, state: JobState, words: str) -> None:
    assert words in shown(Advice(job="a", kind=kind, looks=[]), state)


def shown(advice: Advice, state: JobState) -> str:
    return str([str(part) for part in advised(advice, state).renderables])  # type: ignore[attr-defined]


def test_a_look_that_fails_is_recorded_and_the_newest_looks_are_kept(desk: Desk) -> None:
    for record in range(LOOKS_KEPT):
        desk.round(report(4.0, record))
    desk.round(InfrastructureError(detail="it took longer than 900 s."))
    looks = advice_of(desk.folder)
    assert len(looks) == LOOKS_KEPT
    assert looks[0].outcome == "this look failed: it took longer than 900 s."
    (desk.folder / "advice.json").write_text("{")
    assert advice_of(desk.folder) == []


def test_observing_changes_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "observe")
    desk.round(report(12.0))
    assert desk.commands() == []
    assert advice_of(desk.folder)[0].advice is not None
    desk.store.close()


def has_a_world(folder: Path) -> bool:
    try:
        return bool(fit(tape_in(folder)).plan.step_s)
    except DataError:
        return False


def test_a_look_in_its_own_process_reads_the_tape_or_says_why_not(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "observe")
    elsewhere = Autopilots(desk.service, desk.store)
    section = AutopilotSection(kind="observe")
    wait_until(lambda: has_a_world(desk.folder), "a tape on which islands train")
    seen = elsewhere.look_elsewhere(desk.folder, section)
    assert seen["outcome"]
    assert set(seen["settings"]) == {"interval_steps", "quorum", "grace", "standbys"}
    with pytest.raises(InfrastructureError, match="there is no tape yet"):
        elsewhere.look_elsewhere(tmp_path / "nowhere", section)
    wanted = {"ranges": {}, "gain_min": 0.01, "service": 1}  # its service is not the process that started it
    command = python_process.module("api.jobs.autopilot", str(desk.folder))
    orphan = subprocess.run(command, input=json.dumps(wanted), capture_output=True, text=True)
    assert (orphan.returncode, orphan.stdout) == (1, "")
    elsewhere.close()
    with pytest.raises(InfrastructureError, match="the service ends"):
        elsewhere.look_elsewhere(desk.folder, section)
    desk.store.close()
