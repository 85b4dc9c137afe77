"""The removal of ended jobs by age and size, as ``atoll up --retention-days`` and its like ask for.

    completed, cancelled   removed ``days`` after their end, and the oldest first while all ended jobs exceed ``bytes``
    failed                 removed ``failed_days`` after their end, and never for room before that; never if that is not set
    any other state        never removed

A job stays while the specification of another that has not ended names a file in its folder, such as a checkpoint to go on
from. Removal is that of ``atoll delete``.

The age of a job is that of its final status, or of its submission where it left none, on a clock that cannot be set
(``api.clocks``). What to remove is decided from facts alone (``due``), so that a dry run shows what a round would do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from api.clocks import Ages
from api.jobs.background_loop import ProblemLog, reason_of
from api.jobs.job_list import JobList
from api.run.folder import run_bytes
from api.schemas import FINAL, JobState, Removal, RetentionPlan
from api.storage.store import JobRow, Store
from orchestrator.system.run_folder import STATUS, Retention

logger = logging.getLogger(__name__)

DAY_S = 86400.0
EVERY_S = 60.0


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
