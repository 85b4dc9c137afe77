"""Running jobs of which nothing runs: started again from their run folders, within bounds, and not where they were ended."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.jobs.outbox import NEVER_REACHED
from api.jobs.overseer import FILES_AWAITED_S, TRIES_MAX, Overseer
from api.jobs.service import Service
from api.schemas import JobState
from api.storage.store import JobRow, Store
from orchestrator.core import commands
from orchestrator.core.vocabulary import JobOutcome, JobPhase
from orchestrator.errors import InfrastructureError
from orchestrator.specification.config import JobSpec
from tests.api.clockwork import Clockwork
from tests.api.installation import Installation
from tests.checkpoints.making import make
from tests.waiting import wait_until

LARGE = [{"node_group": "asia", "cpus": 3}, {"node_group": "europe", "cpus": 0.5}]


class Watched(Clockwork):
    """Knows how often a job was to be started, and may do something before."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[str] = []
        self.before: Callable[[Path], None] = lambda _run_dir: None

    def start_job(self, job_id: str, spec: Any, run_dir: Path, *about: Any) -> None:
        self.asked.append(job_id)
        self.before(run_dir)
        super().start_job(job_id, spec, run_dir, *about)


class Desk:
    """A service with a job that trains, its overseer, and what may happen to both."""

    def __init__(self, folder: Path) -> None:
        self.installation = Installation(folder)
        self.folder = folder / "clockwork"
        self.control = Watched(self.folder)
        self.store = Store(f"sqlite:///{folder / 'store.sqlite'}")
        self.taken_down = folder / "taken-down"
        self.begin()
        self.job = self.submit()
        wait_until(lambda: self.service.job(self.job).islands_training == 2)
        self.control.asked.clear()

    def begin(self) -> None:
        """As a process finds things that comes after one that was killed."""
        self.service = Service(self.control, self.store, self.installation.runs)
        cordons, record = self.service.cordons, self.service.record
        self.overseer = Overseer(self.control, self.store, cordons, record, self.service.roots, self.taken_down)
        self.service.resume()

    def submit(self) -> str:
        return self.service.submit(self.installation.spec(islands=LARGE), "me", None).job

    def state(self) -> tuple[str, str]:
        row = self.store.job(self.job)
        assert row is not None
        return row.state, row.reason

    def row(self, job: str) -> JobRow:
        row = self.store.job(job)
        assert row is not None
        return row

    def lose(self) -> None:
        self.control.lose(self.job)
        time.sleep(0.3)  # a look is remembered for less


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.overseer.close()
    desk.store.close()


def test_a_lost_job_goes_on_and_is_given_what_was_asked_of_it_meanwhile(desk: Desk) -> None:
    before = desk.service.job(desk.job)
    desk.lose()
    told = desk.service.job(desk.job)
    assert (told.state, "will restart it" in told.reason) == ("running", True), "nobody calls it over because he looked"
    asked = desk.service.submit_command(desk.job, commands.Kill("asia", restart=False), "me")
    desk.service.cordons.change("asia", "me", cordoned=True)
    desk.service.tend()
    assert desk.service.command(desk.job, asked.command).state == "undelivered"

    desk.overseer.check()
    assert desk.control.asked == [desk.job]
    after = wait_until(lambda: (told := desk.service.job(desk.job)).global_version > before.global_version and told)
    assert (after.state, after.started_at) == ("running", before.started_at)
    desk.service.tend()
    wait_until(lambda: desk.service.command(desk.job, asked.command).state == "accepted")
    assert desk.control.status(desk.job)["view"]["cordoned"] == ["asia"]
    desk.overseer.check()
    assert desk.control.asked == [desk.job], "once"


def test_a_command_that_was_handed_over_and_lost_with_the_job_is_handed_over_again(desk: Desk) -> None:
    asked = desk.service.submit_command(desk.job, commands.Kill("asia", restart=False), "me")
    desk.store.update_command(asked.command, accepted=None)
    desk.lose()
    desk.service.tend()
    assert desk.service.command(desk.job, asked.command).state == "pending", "not refused: its job is not over"
    desk.overseer.check()
    for _ in range(2):
        desk.service.tend()
    wait_until(lambda: desk.service.command(desk.job, asked.command).state == "accepted")


def test_a_lost_job_keeps_its_room(desk: Desk) -> None:
    waiting = desk.submit()
    desk.lose()
    desk.service.queue.dispatch()
    assert desk.service.job(waiting).state == "queued"
    desk.overseer.check()
    desk.service.queue.dispatch()
    assert [desk.service.job(job).state for job in (desk.job, waiting)] == ["running", "queued"]


def test_a_job_that_does_not_answer_is_left_alone(desk: Desk) -> None:
    (desk.folder / "jobs-are-silent").touch()
    desk.taken_down.touch()
    desk.overseer.check()
    assert (desk.control.asked, desk.state()[0]) == ([], "running")
    assert desk.taken_down.exists(), "whether it is gone is not known yet"


class Minutes:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def after(self, minutes: float) -> None:
        self.now_s += 60.0 * minutes


def restarts(desk: Desk) -> int:
    path = desk.folder / "restarts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def overseer_of(desk: Desk, clock: Minutes, **settings: float) -> Overseer:
    service = desk.service
    return Overseer(desk.control, desk.store, service.cordons, service.record, service.roots, clock=clock, **settings)


def test_a_synchroniser_that_is_silent_for_minutes_is_restarted_and_its_job_continues(desk: Desk) -> None:
    clock = Minutes()
    overseer = overseer_of(desk, clock)
    overseer.check()
    (desk.folder / "jobs-are-silent").touch()
    for minutes in (0.0, 4.9):
        clock.after(minutes)
        overseer.check()
        assert restarts(desk) == 0
    clock.after(0.2)
    overseer.check()
    assert restarts(desk) == 1
    overseer.check()
    assert desk.state()[0] == "running"
    (desk.folder / "jobs-are-silent").touch()
    overseer.check()
    clock.after(4.9)
    overseer.check()
    assert restarts(desk) == 1, "it answered in between, so this silence is a new one"
    overseer.close()


def test_a_synchroniser_that_stays_silent_is_restarted_less_and_less_often(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, attempts = Minutes(), []
    overseer = overseer_of(desk, clock)
    monkeypatch.setattr(desk.control, "restart_job", lambda job: attempts.append(clock.now_s) or "ended")
    (desk.folder / "jobs-are-silent").touch()
    for _ in range(60):
        overseer.check()
        clock.after(1.0)
    waits = [round((after - before) / 60) for before, after in pairwise([1000.0, *attempts])]
    assert waits == [5, 10, 20]
    overseer.close()


def test_a_head_that_is_down_gets_no_restarts_and_stops_no_round(desk: Desk) -> None:
    clock = Minutes()
    overseer = overseer_of(desk, clock)
    for name in ("jobs-are-silent", "cluster-is-gone"):
        (desk.folder / name).touch()
    for _ in range(3):
        overseer.check()
        clock.after(6.0)
    assert (restarts(desk), desk.state()[0]) == (0, "running")
    overseer.close()


@pytest.mark.parametrize("why", ["it is paused", "the setting is 0"])
def test_a_silent_job_is_not_restarted_if(desk: Desk, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Minutes()
    overseer = overseer_of(desk, clock, **({"restart_silent_after_min": 0.0} if "setting" in why else {}))
    if "paused" in why:
        live = desk.control.status

        def paused(job: str) -> dict[str, Any]:
            status = live(job)
            return status | {"view": status["view"] | {"pause_reason": "its disk is full"}}

        monkeypatch.setattr(desk.control, "status", paused)
    overseer.check()
    (desk.folder / "jobs-are-silent").touch()
    for _ in range(5):
        overseer.check()
        clock.after(30.0)
    assert restarts(desk) == 0
    overseer.close()


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_a_job_that_cannot_be_started_again_has_failed_after_some_tries_with_the_way_out(
    desk: Desk, checkpoints: int
) -> None:
    (desk.folder / "no-more-jobs").touch()
    waiting = desk.submit()
    for number in range(checkpoints):
        make(desk.installation.runs / desk.job / "checkpoints", number + 1, job=desk.job)
    desk.lose()
    asked = desk.service.submit_command(desk.job, commands.Kill("asia", restart=False), "me")
    for tried in range(1, TRIES_MAX):
        desk.overseer.check()
        assert (len(desk.control.asked), desk.state()[0]) == (tried, "running")
    for _ in range(3):
        desk.overseer.check()
    assert len(desk.control.asked) == TRIES_MAX
    told = desk.service.job(desk.job)
    assert told.state == "failed"
    assert "No synchroniser could be placed" in told.reason
    assert (f"--resume {desk.job}" in told.reason) == bool(checkpoints)
    desk.service.tend()
    assert desk.service.command(desk.job, asked.command).detail == NEVER_REACHED
    (desk.folder / "no-more-jobs").unlink()
    desk.service.queue.dispatch()
    assert desk.service.job(waiting).state == "running", "its room is free"


def test_a_job_waits_for_the_machine_that_has_its_files_and_fails_in_the_end(desk: Desk) -> None:
    clock = Minutes()
    overseer = overseer_of(desk, clock)
    desk.lose()
    (desk.folder / "files-are-elsewhere").touch()
    for _ in range(2 * TRIES_MAX):
        overseer.check()
        clock.after(0.1)
    assert desk.state()[0] == "running"
    assert "it waits for the machine that has its files: " in desk.service.job(desk.job).reason
    clock.after(FILES_AWAITED_S / 60.0)
    overseer.check()
    state, reason = desk.state()
    assert state == "failed"
    spec = desk.installation.runs / desk.job / "spec.yaml"
    assert (
        f"The files of the job are elsewhere. It has no checkpoint. Begin it anew with `atoll submit {spec}`." in reason
    )


def test_a_job_that_failed_names_its_newest_checkpoint_and_the_command_that_continues_from_it(desk: Desk) -> None:
    run_dir = desk.installation.runs / desk.job
    stored = yaml.safe_load((run_dir / "spec.yaml").read_text())
    for number in (1, 2):
        make(run_dir / "checkpoints", number, spec=stored, job=desk.job)
    desk.lose()
    (run_dir / "tape.jsonl").unlink()
    desk.overseer.check()
    state, reason = desk.state()
    assert state == "failed"
    assert f"Its newest checkpoint is {run_dir}/checkpoints/000002. Continue from it with `atoll submit" in reason
    command = re.findall(r"`atoll submit (\S+) --resume (\S+)`", reason)
    assert command == [(str(run_dir / "spec.yaml"), desk.job)]
    document = stored | {"resume": {"checkpoint": command[0][1]}}
    again = desk.service.submit(document, "me", None)
    assert again.resumed_from == f"{run_dir}/checkpoints/000002"


def test_a_job_waits_for_its_store_however_long_that_is_away(desk: Desk) -> None:
    desk.lose()
    (desk.folder / "log-store-is-down").touch()
    for _ in range(2 * TRIES_MAX):
        desk.overseer.check()
        assert desk.state()[0] == "running"
    assert "it waits for its store: the store memory cannot be reached." in desk.service.job(desk.job).reason
    (desk.folder / "log-store-is-down").unlink()
    desk.overseer.check()
    desk.overseer.check()
    told = desk.service.job(desk.job)
    assert (told.state, told.reason) == ("running", "")


def test_tries_count_in_a_row(desk: Desk) -> None:
    for _ in range(TRIES_MAX + 1):
        desk.lose()
        (desk.folder / "no-more-jobs").touch()
        desk.overseer.check()
        (desk.folder / "no-more-jobs").unlink()
        desk.overseer.check()
        desk.overseer.check()
    assert desk.state()[0] == "running"


def test_a_job_whose_own_files_say_that_it_cannot_go_on_is_asked_once(desk: Desk) -> None:
    """As one with durability async after the machine was started anew: it leaves a final state with the reason."""
    status = desk.control.status(desk.job)
    view = status["view"] | {"phase": JobPhase.FINISHED, "outcome": JobOutcome.FAILED, "reason": "DataError: not here"}

    def refuse(run_dir: Path) -> None:
        (run_dir / "status.json").write_text(json.dumps(dict(status) | {"view": view}))
        raise InfrastructureError(detail="The synchroniser did not start.")

    desk.control.before = refuse
    desk.lose()
    desk.overseer.check()
    desk.overseer.check()
    told = desk.service.job(desk.job)
    assert (told.state, told.reason, desk.control.asked) == ("failed", "DataError: not here", [desk.job])


def test_a_job_of_which_nothing_is_left_has_failed(desk: Desk) -> None:
    desk.lose()
    (desk.installation.runs / desk.job / "tape.jsonl").unlink()
    desk.overseer.check()
    assert desk.control.asked == []
    assert desk.state()[0] == "failed"
    assert "neither a final state nor a tape" in desk.state()[1]


def test_what_was_taken_down_on_purpose_stays_down_and_what_is_lost_later_goes_on(desk: Desk) -> None:
    desk.taken_down.touch()
    desk.lose()
    desk.begin()
    desk.overseer.check()
    assert desk.control.asked == []
    assert desk.state()[0] == "failed"
    assert "atoll down" in desk.state()[1]
    assert not desk.taken_down.exists()
    desk.job = desk.submit()
    wait_until(lambda: desk.service.job(desk.job).islands_training == 2)
    desk.lose()
    desk.overseer.check()
    assert desk.service.job(desk.job).state == "running"


class Killed(BaseException):
    """The process is gone: nothing is tidied up."""


@pytest.mark.parametrize("begun", [False, True])
def test_a_service_killed_while_it_starts_a_job_again_leaves_it_to_the_next(desk: Desk, begun: bool) -> None:
    def die(run_dir: Path) -> None:
        if begun:
            desk.control.before = lambda _run_dir: None
            row = desk.store.job(desk.job)
            assert row is not None
            Clockwork.start_job(desk.control, desk.job, JobSpec.model_validate(row.spec), run_dir)
        raise Killed

    desk.control.before = die
    desk.lose()
    with pytest.raises(Killed):
        desk.overseer.check()
    assert desk.state()[0] == JobState.STARTING
    desk.control.before = lambda _run_dir: None
    desk.begin()
    desk.overseer.check()
    assert desk.service.job(desk.job).state == "running"
    assert len(desk.control.asked) == (1 if begun else 2)


@pytest.mark.parametrize("is_emptied", [True, False])
def test_a_mirrored_job_that_folder_and_store_have_lost_is_not_begun_anew(desk: Desk, *, is_emptied: bool) -> None:
    job, document = desk.job, desk.row(desk.job).spec
    document["synchroniser"]["durability"]["kind"] = "mirrored"
    desk.store.update_job(job, spec=document)
    wait_until(lambda: (record := desk.service.record(desk.row(job))) is not None and record.view.global_version)
    desk.overseer.check()
    desk.lose()
    (Path(desk.row(job).run_dir) / "tape.jsonl").unlink()
    if is_emptied:
        (desk.folder / "store-was-emptied").touch()
    desk.control.asked.clear()
    desk.overseer.check()
    assert (job in desk.control.asked) == (not is_emptied)
    assert (desk.row(job).state == "failed") == is_emptied
    assert ("both were lost. It has no checkpoint." in desk.row(job).reason) == is_emptied
