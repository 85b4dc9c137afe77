"""The end of a job: it is over for everybody once its report can be read, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.jobs.overseer import Overseer
from api.jobs.service import Service
from api.metrics.exposition import state_of
from api.run.explanations import with_end, with_silence, with_status, without_tape
from api.schemas import Job, JobState
from api.storage.store import Store
from orchestrator.accounting.causes import Cause, Diagnosis, Finding
from orchestrator.core import commands
from orchestrator.errors import TRY_OUTSIDE, Conflict, InfrastructureError, NotFound
from orchestrator.status import StatusDocument
from tests.api.clockwork import Clockwork
from tests.api.installation import Installation
from tests.waiting import wait_until

FILES = ("report.json", "report.html", "status.json")


class Writing(Clockwork):
    """Jobs that have decided how they end, and whose files are not on the disk until ``written`` is set."""

    written = False
    gone = False
    folder: Path
    said: StatusDocument | None = None

    def status(self, job_id: str) -> StatusDocument:
        if self.gone:
            raise NotFound(detail=f"No process of job {job_id} runs here.")
        status = self.said or super().status(job_id)
        if status["view"]["phase"] == "finished":
            self.said, run_dir = status, self.folder / job_id
            for name in FILES:
                place = run_dir / name if not self.written else run_dir / f"{name}.later"
                if place.exists():
                    place.rename(run_dir / f"{name}.later" if not self.written else run_dir / name)
        return status

    def start_job(self, *arguments: Any, **named: Any) -> None:
        """One that had decided before it died writes its files again."""
        self.gone = False
        super().start_job(*arguments, **named)


@pytest.fixture
def control(tmp_path: Path) -> Writing:
    control = Writing(tmp_path / "clockwork")
    control.folder = tmp_path / "runs"
    return control


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    yield store
    store.close()


@pytest.fixture
def service(tmp_path: Path, control: Writing, store: Store) -> Service:
    return Service(control, store, tmp_path / "runs")


def decided(service: Service, control: Writing, tmp_path: Path, cancel: bool) -> str:
    """A job that has decided how it ends."""
    job = service.submit(Installation(tmp_path).spec(steps=20_000 if cancel else 2), "me", None).job
    if cancel:
        service.submit_command(job, commands.Cancel(), "me")
    wait_until(lambda: service.job(job) and control.said)
    return job


@pytest.mark.parametrize(("cancel", "outcome"), [(False, "completed"), (True, "cancelled")])
def test_a_job_is_over_once_its_report_can_be_read(
    service: Service, store: Store, control: Writing, tmp_path: Path, cancel: bool, outcome: str
) -> None:
    job = decided(service, control, tmp_path, cancel)
    told = service.job(job)
    assert (told.state, told.report_ready, told.ended_at) == (JobState.FINISHING, False, None)
    assert f"ending as {outcome}" in told.reason
    assert "being written" in told.reason
    assert [summary.state for summary in service.jobs()] == [JobState.FINISHING]
    row = store.job(job)
    assert row is not None
    assert state_of(row, service.record(row)) is JobState.FINISHING
    with pytest.raises(Conflict, match="finishing"):
        service.report(job)
    control.written = True
    wait_until(lambda: service.job(job).state.final)
    assert (service.job(job).state, service.job(job).report_ready) == (outcome, True)
    assert service.report(job)["job_id"] == job


def test_a_job_that_died_before_its_report_was_written_is_made_to_write_it(
    service: Service, store: Store, control: Writing, tmp_path: Path
) -> None:
    job = decided(service, control, tmp_path, cancel=False)
    control.gone = True
    wait_until(lambda: "restart it" in service.job(job).reason)
    assert service.job(job).state is JobState.RUNNING, "nobody calls it completed"
    overseer = Overseer(control, store, service.cordons, service.record, service.roots)
    overseer.check()
    overseer.close()
    control.written = True
    wait_until(lambda: service.job(job).state.final)
    assert service.report(job)["job_id"] == job


@pytest.mark.parametrize(
    ("state", "reason", "cause"),
    [
        ("failed", f"trainer 'a:b' raises KeyError: 'width'. {TRY_OUTSIDE}", Cause.CODE),
        ("failed", "the evaluator's process died 2 times as it built the model.", Cause.OTHER),
        ("cancelled", "a user asked for it", Cause.STARTING),
    ],
)
def test_an_end_that_the_tape_lacks_is_in_the_diagnosis(state: str, reason: str, cause: Cause) -> None:
    """The evaluator's errors end a job without a record: it was diagnosed as running, and its start was blamed."""
    starting = Finding(Cause.STARTING, "", 4.0, 1.0, "islands were placed", Cause.STARTING.remedy, (2,))
    so_far = Diagnosis(None, "", 0.0, starting, (), (), {})
    ended = with_end(so_far, state, reason)
    assert (ended.outcome, ended.reason) == (state, reason)
    assert ended.cause is not None
    assert ended.cause.cause is cause
    assert (reason in ended.cause.statement) == (state == "failed")
    assert starting in (ended.cause, *ended.others)
    on_tape = replace(so_far, outcome="failed", reason="as on the tape")
    assert with_end(on_tape, state, reason) is on_tape


SO_FAR = Diagnosis(None, "", 0.5, Finding(Cause.STARTING, "", 4.0, 0.5, "started", "wait", (2,)), (), (), {})


def job_that(state: JobState, reason: str = "", *troubles: str) -> Job:
    return Job.model_construct(job="a", state=state, reason=reason, troubles=list(troubles))


def test_a_full_disk_leads_the_diagnosis_though_the_tape_cannot_have_it() -> None:
    told = "the tape cannot be written: [Errno 28] No space left on device"
    diagnosis = with_status(SO_FAR, job_that(JobState.RUNNING, "", "a line is slow", told))
    assert diagnosis.cause is not None
    assert (diagnosis.cause.cause, diagnosis.cause.statement) == (Cause.FULL_DISK, told)
    assert SO_FAR.cause in diagnosis.others
    assert with_status(SO_FAR, job_that(JobState.RUNNING, "", "a line is slow")) is SO_FAR


def test_a_synchroniser_that_does_not_answer_leads_the_diagnosis() -> None:
    """The tape is on the disk, and the diagnosis is wanted most just then."""
    error = InfrastructureError(detail="The synchroniser of job a has not answered for 9.0 s.", remedy="Try again.")
    diagnosis = with_silence(SO_FAR, error)
    assert diagnosis.cause is not None
    assert diagnosis.cause.cause is Cause.NO_SYNCHRONISER
    assert "has not answered for 9.0 s" in diagnosis.cause.statement
    assert SO_FAR.cause in diagnosis.others


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        (JobState.QUEUED, "waits for 4 CPUs", "Job a is queued (waits for 4 CPUs) and has no tape yet."),
        (
            JobState.COMPLETED,
            "the budget is reached.",
            "Job a is completed (the budget is reached), and there is no tape",
        ),
    ],
)
def test_a_job_without_a_tape_is_told_so_with_its_state(state: JobState, reason: str, expected: str) -> None:
    assert without_tape(job_that(state, reason), Path("/runs/a")).detail.startswith(expected)
