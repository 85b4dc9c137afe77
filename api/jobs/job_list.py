"""The list of all jobs, page by page, and the removal of jobs that have ended: on request, or by age and size.

Removal is permanent: the row, its commands, and the run's folder with tape, report and merged parameters. Jobs that have not
ended are not removed. What islands left on other machines is swept in the background, also on machines that come back later.

Removal by age and size is what ``atoll up --retention-days`` and its like ask for:

    completed, cancelled   removed ``days`` after their end, and the oldest first while all ended jobs exceed ``bytes``
    failed                 removed ``failed_days`` after their end, and never for room before that; never if that is not set
    any other state        never removed

A job stays while the specification of another that has not ended names a file in its folder, such as a checkpoint to go on
from. The age of a job is that of its final status, or of its submission where it left none, on a clock that cannot be set
(``api.clocks``). What to remove is decided from facts alone (``due``), so that a dry run shows what a round would do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Event

from api.clocks import Ages
from api.jobs.background_loop import BackgroundLoop, ProblemLog, reason_of
from api.jobs.control import ControlPort
from api.jobs.overseer import is_mirrored
from api.jobs.service import Service
from api.jobs.status_cache import refuse_outdated
from api.run.folder import run_bytes
from api.schemas import ALIVE, FINAL, Jobs, JobState, Removal, RetentionPlan
from api.storage.store import JobRow, Store
from orchestrator.errors import Conflict, InfrastructureError, NotFound
from orchestrator.system.run_folder import STATUS, Retention, remove_tree

SWEEP_EVERY_S = 10.0
logger = logging.getLogger(__name__)
DAY_S = 86400.0
RETENTION_EVERY_S = 60.0


class JobList:
    def __init__(self, service: Service, store: Store, control: ControlPort, runs: Path) -> None:
        self._service = service
        self._store = store
        self._control, self._runs = control, runs
        self._removed = Event()
        self._loop = BackgroundLoop(self.sweep, "sweep", SWEEP_EVERY_S)

    def begin(self) -> None:
        """Start sweeping other machines in the background."""
        self._loop.start()

    def close(self) -> None:
        self._loop.stop()

    def sweep(self) -> None:
        """Remove from other machines what is left there of jobs that do not exist (any more)."""
        again = self._removed.is_set()
        self._removed.clear()
        try:
            self._control.sweep(self._runs, lambda job: self._store.job(job) is not None, again=again)
        except BaseException:
            if again:
                self._removed.set()
            raise

    def page(self, state: JobState | None, name: str | None, limit: int, cursor: str | None) -> Jobs:
        """Return the newest ``limit`` jobs of this state and name, or those after the job ``cursor``."""
        last = None if cursor is None else self._store.job(cursor)
        if cursor is not None and last is None:
            raise NotFound(detail=f"The cursor {cursor!r} does not name a job.", remedy="Start without a cursor.")
        before = last.number if last else None
        if state is None:
            rows = self._store.jobs(name=name, before=before, limit=limit + 1)
        else:
            rows = self._store.jobs(name=name, before=before, states={state, *ALIVE})
        summaries = self._service.summaries(rows)
        wanted = (job for job in summaries if state is None or job.state == state)
        page = list(islice(wanted, limit))
        more = next(wanted, None) is not None
        return Jobs(jobs=page, next_cursor=page[-1].job if more else None)

    def remove(self, job: str, if_match: str | None = None) -> None:
        """Remove the job with everything it left. The row goes last: if something fails midway, it is still there."""
        if job == "latest":
            detail = "`latest` names another job once this one is removed, so a repeated request would remove two jobs."
            raise Conflict(detail=detail, remedy="Give the job's id.")
        details = self._service.job(job)
        if not details.state.final:
            remedy = f"End it first with `atoll cancel {job}`."
            raise Conflict(detail=f"Job {job} is {details.state}; only an ended job can be removed.", remedy=remedy)
        refuse_outdated(if_match, str(self._store.generation(job)), f"job {job}")
        if is_mirrored(self._store.job(job)):
            self._control.delete_log(job)
        folder = Path(details.run_dir)
        if folder.name == job:  # else the row is damaged, and names some other folder
            _clear(folder)
        self._store.remove_job(job)
        self._removed.set()
        self._loop.wake()


def _clear(folder: Path) -> None:
    """Remove the run's folder, and ``latest`` beside it if that points to it."""
    latest = folder.parent / "latest"
    try:
        if latest.is_symlink() and latest.resolve() == folder.resolve():
            latest.unlink()
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            folder.unlink()  # a link's target does not belong to the job
        elif folder.exists():
            remove_tree(folder)
    except OSError as error:
        detail = f"The run's folder {folder} cannot be removed: {error.strerror}."
        raise InfrastructureError(detail=detail, remedy="Remove it by hand, and repeat the request.") from error


@dataclass(frozen=True, slots=True)
class EndedJob:
    """``needed_by`` is a job that has not ended and uses a file of this one; empty if there is none."""

    job: str
    state: JobState
    age_s: float
    bytes: int
    needed_by: str = ""


def due(ended: Sequence[EndedJob], retention: Retention) -> list[tuple[EndedJob, str]]:
    """Return the jobs to remove, oldest first, each with the reason."""
    removable = sorted((job for job in ended if not job.needed_by), key=lambda job: (-job.age_s, job.job))
    reasons = {job.job: reason for job in removable if (reason := _too_old(job, retention))}
    if retention.bytes is not None:
        total = sum(job.bytes for job in ended if job.job not in reasons)
        for job in removable:
            if total <= retention.bytes:
                break
            if job.job not in reasons and job.state is not JobState.FAILED:
                reasons[job.job] = f"ended jobs take {total:,} bytes, more than {retention.bytes:,}"
                total -= job.bytes
    return [(job, reasons[job.job]) for job in removable if job.job in reasons]


def _too_old(job: EndedJob, retention: Retention) -> str:
    days = retention.failed_days if job.state is JobState.FAILED else retention.days
    if days is None or job.age_s <= days * DAY_S:
        return ""
    return f"it {job.state.value} {job.age_s / DAY_S:.1f} days ago, more than {days:g}"


class Retainer:
    """Applies the retention of one service. ``plan`` is for any thread, ``round`` for that of its loop."""

    def __init__(self, store: Store, job_list: JobList, retention: Retention, ages: Ages | None = None) -> None:
        self._store, self._job_list, self.retention = store, job_list, retention
        self._ages = ages or Ages()
        self._problem_log = ProblemLog(logger)
        self._sizes: dict[str, int] = {}
        """Of ended jobs, measured once: nothing is written to their folders any more, except by users."""

    def plan(self, retention: Retention | None = None) -> RetentionPlan:
        """Return what a round would remove now, with these settings or the service's own."""
        settings = retention or self.retention
        ended = self._ended()
        return RetentionPlan(
            days=settings.days,
            failed_days=settings.failed_days,
            bytes=settings.bytes,
            ended_count=len(ended),
            ended_bytes=sum(job.bytes for job in ended),
            kept_for_others=[job.job for job in ended if job.needed_by],
            removals=[
                Removal(job=job.job, state=job.state, ended_days=job.age_s / DAY_S, bytes=job.bytes, reason=reason)
                for job, reason in due(ended, settings)
            ],
        )

    def round(self) -> None:
        """Remove what is due. A job that cannot be removed is reported once, and affects no other."""
        if not self.retention.removes:
            return
        removals = self.plan().removals
        for removal in removals:
            try:
                self._job_list.remove(removal.job)
            except Exception as error:
                self._problem_log.note(f"job {removal.job}", f"it cannot be removed: {reason_of(error)}")
            else:
                logger.info("removed job %s with %d bytes: %s", removal.job, removal.bytes, removal.reason)
        self._problem_log.keep(f"job {removal.job}" for removal in removals)

    def _ended(self) -> list[EndedJob]:
        rows = self._store.jobs()
        self._ages.forget_all_but(row.job for row in rows)
        living = [row for row in rows if row.state not in FINAL]
        there = {row.job for row in rows}
        self._sizes = {job: size for job, size in self._sizes.items() if job in there}
        return [
            EndedJob(
                row.job,
                JobState(row.state),
                self._ages.of(row.job, ended_at(row)),
                self._size_of(row),
                _needed_by(row, living),
            )
            for row in rows
            if row.state in FINAL
        ]

    def _size_of(self, row: JobRow) -> int:
        if row.job not in self._sizes:
            self._sizes[row.job] = sum(run_bytes(Path(row.run_dir)).values())
        return self._sizes[row.job]


def ended_at(row: JobRow) -> float:
    """Return when the ended job wrote its last status, in Unix seconds; when it was submitted, if it wrote none."""
    try:
        return (Path(row.run_dir) / STATUS).stat().st_mtime
    except (OSError, ValueError):
        return row.submitted_at if isinstance(row.submitted_at, float | int) else time.time()


def _needed_by(row: JobRow, living: Iterable[JobRow]) -> str:
    return next((other.job for other in living if uses(other, row)), "")


def uses(row: JobRow, source: JobRow) -> bool:
    """Return whether the specification of ``row`` names ``source``, or a file in its folder: a checkpoint, or weights."""
    return any(
        text == source.job or Path(text.removeprefix("file://")).is_relative_to(source.run_dir)
        for text in _leaves(row.spec)
    )


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
