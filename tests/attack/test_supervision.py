"""One job cannot hold up others: whatever its row, its folder or its answer is, the rounds of the service go on."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.chaos.active_run import FAILURES_MAX, RunThread
from api.chaos.schemas import RunState
from api.chaos.store import ChaosRunRow, ChaosStore
from api.jobs.background_loop import BackgroundLoop
from api.jobs.job_list import JobList
from api.jobs.overseer import TRIES_MAX, Overseer
from api.jobs.service import Service
from api.metrics.exposition import JobsCollector, families_of
from api.schemas import JobState
from api.storage.store import CommandRow, JobRow, Store
from orchestrator.core import commands
from orchestrator.errors import InfrastructureError, StoreUnavailable
from orchestrator.specification.config import parse_job
from orchestrator.status import StatusDocument
from tests.api.clockwork import Clockwork
from tests.api.installation import Installation
from tests.waiting import wait_until

ISLANDS = [{"node_group": "asia", "cpus": 0.01}, {"node_group": "europe", "cpus": 0.01}]
RAISED = (
    TypeError("x"),
    ValueError("embedded null byte"),
    KeyError("view"),
    RecursionError(),
    OSError(5, "Input/output"),
)


class Sick(Clockwork):
    """Some jobs answer with what makes no sense, or raise what nobody foresaw."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.answers: dict[str, Callable[[StatusDocument], Any]] = {}

    def status(self, job_id: str) -> StatusDocument:
        told = super().status(job_id)
        return self.answers[job_id](told) if job_id in self.answers else told


def raising(error: Exception) -> Callable[[Any], Any]:
    def answer(_: Any) -> Any:
        raise error

    return answer


MALFORMED: dict[str, Callable[[Any], Any]] = {
    **{f"raises {type(error).__name__}": raising(error) for error in RAISED},
    "an empty object": lambda told: {},
    "a list": lambda told: [],
    "a number": lambda told: 7,
    "no view": lambda told: {name: value for name, value in told.items() if name != "view"},
    "a view of nothing": lambda told: told | {"view": None},
    "islands that are numbers": lambda told: told | {"view": told["view"] | {"islands": [5]}},
    "a phase unknown": lambda told: told | {"view": told["view"] | {"phase": "somewhere"}},
    "a lone surrogate": lambda told: told | {"view": told["view"] | {"reason": "\ud800"}},
    "commands that are a number": lambda told: told | {"commands": 5},
    "a version that is text": lambda told: told | {"view": told["view"] | {"global_version": "many"}},
}


class Desk:
    """A service without a process: its rounds are called by hand."""

    def __init__(self, folder: Path) -> None:
        self.installation, self.folder = Installation(folder), folder
        self.control = Sick(folder / "clockwork")
        self.database = folder / "store.sqlite"
        self.taken_down = folder / "taken-down"
        self.begin()

    def begin(self) -> None:
        """As a process finds things that comes after one that was killed."""
        self.store = Store(f"sqlite:///{self.database}")
        self.service = Service(self.control, self.store, self.installation.runs)
        self.job_list = JobList(self.service, self.store, self.control, self.installation.runs)
        service = self.service
        self.overseer = Overseer(
            self.control, self.store, service.cordons, service.record, service.roots, self.taken_down
        )
        self.service.resume()

    def submit(self, **changes: Any) -> str:
        job = self.service.submit(self.installation.spec(islands=ISLANDS, **changes), "me", None).job
        wait_until(lambda: (told := self.service.job(job)).islands_training == 2 or told.state.final)
        return job

    def states(self, *jobs: str) -> list[str]:
        return [row.state if (row := self.store.job(job)) else "removed" for job in jobs]

    def lose(self, *jobs: str) -> None:
        for job in jobs:
            self.control.lose(job)
        time.sleep(0.3)  # a look is remembered for less

    def edit(self, job: str, **values: Any) -> None:
        """What somebody else's program does to the row."""
        with sqlite3.connect(self.database) as connection:
            for name, value in values.items():
                connection.execute(f"UPDATE jobs SET {name} = ? WHERE job = ?", (value, job))
        connection.close()

    def metrics(self) -> str:
        families = families_of(JobsCollector(self.service, self.store, None, [])._samples())
        return "\n".join(str(sample) for family in families for sample in family.samples)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.overseer.close()
    desk.store.close()


def test_two_jobs_of_unusable_checkpoint_folders_stop_the_supervision_of_nobody(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    bad, worse, well = desk.submit(), desk.submit(), desk.submit()
    for job, folder in ((bad, "/data/a\u0000b"), (worse, "reference://x")):
        row = desk.store.job(job)
        assert row is not None
        desk.store.update_job(job, spec=row.spec | {"checkpoints": row.spec["checkpoints"] | {"folder": folder}})
    (desk.folder / "clockwork" / "no-more-jobs").touch()
    desk.lose(bad, worse, well)
    for _ in range(TRIES_MAX):
        desk.overseer.check()
    assert desk.states(bad, worse, well) == ["failed"] * 3
    assert "checkpoints.folder" in desk.service.job(bad).reason
    assert "checkpoints.folder" in desk.service.job(worse).reason
    assert "No synchroniser could be placed" in desk.service.job(well).reason
    assert len([r for r in caplog.records if "whether it has checkpoints" in r.message]) == 2


def test_a_running_job_whose_specification_is_damaged_holds_up_no_queue(desk: Desk) -> None:
    """The queue asks what those that run want. Before, one such row ended each of its rounds, and each submission."""
    large = [{"node_group": "asia", "cpus": 3}]
    damaged = desk.submit()
    running = desk.service.submit(desk.installation.spec(islands=large), "me", None).job
    waiting = desk.service.submit(desk.installation.spec(islands=large), "me", None).job
    for spec in ('{"islands": ', "[]", '{"islands": 7}', "null", '{"synchroniser": {"quorum": "x"}}'):
        desk.edit(damaged, spec=spec)
        desk.service.queue.dispatch()
        assert desk.states(running, waiting) == ["running", "queued"]
    desk.service.submit_command(running, commands.Cancel(), "me")
    wait_until(lambda: desk.service.job(running).state.final)
    desk.service.queue.dispatch()
    assert desk.states(waiting) == ["running"]


def test_a_store_that_fails_for_a_moment_fails_no_queued_job(tmp_path: Path) -> None:
    class Moody(Store):
        well = True

        def job(self, job: str) -> JobRow | None:
            if not self.well:
                raise StoreUnavailable(detail="the database does not answer", remedy="")
            return super().job(job)

    store = Moody(f"sqlite:///{tmp_path / 'store.sqlite'}")
    spec = parse_job(Installation(tmp_path).spec()).model_dump(mode="json")
    about = {"name": "trial", "caller": "me", "submitted_at": 1.0, "state": "queued"}
    store.add_job(JobRow(job="trial-abcde", run_dir=str(tmp_path / "runs" / "trial-abcde"), spec=spec, **about))
    service = Service(Clockwork(tmp_path / "clockwork"), store, tmp_path / "runs")
    store.well = False
    with pytest.raises(StoreUnavailable):
        service.queue.dispatch()
    store.well = True
    assert [row.state for row in store.jobs()] == ["queued"]
    service.queue.dispatch()
    assert [row.state for row in store.jobs()] == ["running"]
    store.close()


def test_what_was_taken_down_is_forgotten_whatever_one_job_is(desk: Desk) -> None:
    bad, well = desk.submit(), desk.submit()
    desk.control.answers[bad] = raising(TypeError("not of this world"))
    desk.taken_down.touch()
    desk.lose(well)
    desk.overseer.check()
    assert desk.states(bad, well) == ["running", "failed"]
    assert not desk.taken_down.exists()


def test_a_flag_that_cannot_be_removed_stops_no_round_and_concerns_no_later_job(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.taken_down.mkdir()
    desk.overseer.check()
    later = desk.submit()
    desk.lose(later)
    for _ in range(3):
        desk.overseer.check()
    assert desk.states(later) == ["running"], "it was started again"
    assert len([r for r in caplog.records if "cannot remove it" in r.message]) == 1


@pytest.mark.parametrize("answer", MALFORMED)
def test_a_job_whose_answer_makes_no_sense_is_its_own_misfortune(
    desk: Desk, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, well = desk.submit(), desk.submit()
    desk.control.answers[bad] = MALFORMED[answer]
    desk.lose(well)
    for _ in range(3):
        desk.overseer.check()
        desk.service.cordons.tell_all("me")
        desk.service.tend()
    assert desk.states(bad, well) == ["running", "running"]
    wait_until(lambda: desk.service.job(well).islands_training == 2)
    page = {job.job: job for job in desk.job_list.page(None, None, 10, None).jobs}
    assert page[well].state == "running"
    assert set(page) == {bad, well}
    assert f"'atoll_job': '{well}'" in desk.metrics()
    assert len([r for r in caplog.records if bad in r.message]) <= 4, "once each, not each round"
    desk.begin()  # the next process begins as well
    assert desk.job_list.page(JobState.RUNNING, None, 10, None).jobs


PRECIOUS = "somebody else's"
"""Stands for a folder of the test's own: a service that is not mended removes it, whatever it is."""
ROWS: dict[str, dict[str, Any]] = {
    "a specification cut short": {"spec": '{"name": "tri'},
    "a specification of another shape": {"spec": "[]"},
    "a specification that this build refuses": {"spec": '{"islands": [], "budget": {"steps": -1}}'},
    "no UTF-8": {"name": b"\xff\xfe", "reason": b"\xff"},
    "a state unknown": {"state": "somewhere"},
    "a time that is text": {"submitted_at": "yesterday"},
    "a summary cut short": {"summary": '{"job":', "state": "completed"},
    "a summary of another shape": {"summary": "5", "state": "completed"},
    "what was known last": {"last_known": '{"global_version": "many", "epoch": -1, "tokens_trained": 1e400}'},
    "a folder that cannot be": {"run_dir": "/nowhere/a\u0000b"},
    "a folder of somebody else's": {"run_dir": PRECIOUS},
}


@pytest.mark.parametrize("damage", ROWS)
def test_a_damaged_row_is_told_of_its_own_job_which_can_be_removed(desk: Desk, damage: str) -> None:
    bad, well = desk.submit(), desk.submit()
    desk.lose(bad, well)
    precious = desk.folder / "precious"
    precious.mkdir()
    desk.edit(bad, **{name: str(precious) if value == PRECIOUS else value for name, value in ROWS[damage].items()})
    for _ in range(TRIES_MAX + 1):
        desk.overseer.check()
        desk.service.tend()
    assert desk.states(well) == ["running"]
    page = {job.job: job for job in desk.job_list.page(None, None, 10, None).jobs}
    assert page[well].state == "running"
    desk.metrics()
    desk.service.job(bad)
    desk.begin()
    if not desk.service.job(bad).state.final:
        desk.service.submit_command(bad, commands.Cancel(), "me")
        wait_until(lambda: desk.service.job(bad).state.final)
    time.sleep(0.3)
    desk.job_list.remove(bad)
    assert desk.states(bad, well) == ["removed", "running"]
    assert precious.is_dir()


def test_a_damaged_command_is_refused_and_what_was_asked_after_it_is_done(desk: Desk) -> None:
    job, other = desk.submit(), desk.submit()
    row = CommandRow(
        command="stop-1", job=job, request={"kind": "inject", "fault": "stop", "island": "asia", "nonsense": 1},
        caller="me", requested_at=time.time(),
    )  # fmt: skip
    desk.store.add_command(row)
    asked = desk.service.submit_command(job, commands.Kill("asia", restart=False), "me")
    elsewhere = desk.service.submit_command(other, commands.Kill("asia", restart=False), "me")
    for _ in range(4):
        desk.service.tend()
    wait_until(lambda: desk.service.command(job, asked.command).state == "accepted")
    wait_until(lambda: desk.service.command(other, elsewhere.command).state == "accepted")
    told = desk.service.command(job, "stop-1")
    assert (told.state, "could not be delivered" in told.detail) == ("refused", True)


@pytest.mark.parametrize("again", [False, True])
def test_a_failed_job_keeps_what_was_last_known_of_it(desk: Desk, again: bool) -> None:
    job = desk.submit()
    wait_until(lambda: desk.service.job(job).global_version >= 8)
    before = desk.service.job(job)
    desk.overseer.check()
    if again:  # another process, which never saw the job alive
        desk.overseer.close()
        desk.begin()
    (desk.folder / "clockwork" / "no-more-jobs").touch()
    desk.lose(job)
    gone = desk.service.job(job)
    assert (gone.state, gone.last_known) == ("running", True)
    assert gone.global_version >= before.global_version
    for _ in range(TRIES_MAX):
        desk.overseer.check()
    told = desk.service.job(job)
    assert (told.state, told.last_known, told.epoch) == ("failed", True, 1)
    assert told.global_version >= before.global_version
    assert told.tokens_trained >= before.tokens_trained > 0


def test_an_emptied_tape_of_a_job_that_had_merged_is_no_beginning_even_without_a_witness(desk: Desk) -> None:
    job = desk.submit()
    wait_until(lambda: desk.service.job(job).global_version >= 4)
    desk.overseer.check()
    desk.lose(job)
    (desk.installation.runs / job / "tape.jsonl").write_bytes(b"")
    desk.overseer.check()
    told = desk.service.job(job)
    assert (told.state, "is empty, though it had merged" in told.reason) == ("failed", True)


def test_a_round_that_fails_for_hours_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rounds: list[int] = []

    def fail() -> None:
        rounds.append(1)
        raise OSError(5, "Input/output error" if len(rounds) < 20 else "something else")

    tending = BackgroundLoop(fail, "test", 0.001)
    with caplog.at_level(logging.INFO):
        tending.start()
        wait_until(lambda: len(rounds) > 40)
        tending.stop()
    assert [r.message.split(": ", 1)[1] for r in caplog.records] == [
        "failed, and will be repeated: OSError: [Errno 5] Input/output error",
        "failed, and will be repeated: OSError: [Errno 5] something else",
    ]


def test_a_run_of_a_plan_whose_rows_are_damaged_ends_and_is_logged_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    job, book = desk.submit(), ChaosStore(desk.store.engine)
    row = ChaosRunRow(
        run="chaos-1", job=job, plan="p", text="name: [", fleet=[], caller="me", requested_at=1.0, holds=job
    )
    book.add(row)

    def begun(_: ChaosRunRow) -> Any:
        raise KeyError("planned_at")

    thread = RunThread(row, desk.service, book, begun, lambda run: None)
    polls = [thread._poll() for _ in range(FAILURES_MAX)]
    assert polls == [True] * (FAILURES_MAX - 1) + [False]
    found = book.run(job, "chaos-1")
    assert found is not None
    assert (found.state, found.holds) == (RunState.FAILED, None)
    assert "KeyError" in found.reason
    assert len([r for r in caplog.records if "chaos-1" in r.message]) == 1


def test_a_report_that_is_damaged_fails_the_verdict_and_nothing_else(desk: Desk) -> None:
    job = desk.submit(budget={"steps": 4})
    wait_until(lambda: desk.service.job(job).state.final)
    path = desk.installation.runs / job / "report.json"
    for raw in (b"{}", b"[]", b"\xff", b'{"a":' * 5000, json.dumps({"islands": 5}).encode()):
        path.write_bytes(raw)
        desk.service.job(job)
    path.unlink()
    secret = desk.folder / "secret"
    secret.write_text("{}")
    path.symlink_to(secret)
    with pytest.raises(Exception, match="not a regular file"):
        desk.service.result(job, "report.json")


def test_a_silent_job_is_left_alone_and_holds_up_only_what_is_about_it(desk: Desk) -> None:
    silent, well = desk.submit(), desk.submit()
    desk.control.answers[silent] = raising(InfrastructureError(detail="The synchroniser does not answer."))
    desk.taken_down.touch()
    desk.lose(well)
    desk.overseer.check()
    later = desk.submit()
    desk.lose(later)
    desk.overseer.check()
    assert desk.states(silent, well, later) == ["running", "failed", "running"]
    assert desk.taken_down.exists(), "whether it is gone is not known yet"
