"""The dispatcher carries out the queue's decisions: it starts queued jobs, whenever something changed and every few seconds.

    queued ──▶ starting ──▶ running ──▶ … ──▶ a final state
      │   ▲       │  └────▶ failed: the job could not be started
      │   └───────┘ the service was killed meanwhile, and nothing of the job is there
      └──▶ cancelled

Responsible for each of these arrows being taken once, whoever is killed when: a state is moved on in the store by
comparing first, a job is called starting before anything of it is made, and one that has written a tape has run and is not
started again. Jobs that ended while no service was up are found when their capacity is needed. Refuses to decide
(``api.jobs.queue``), and to know how a job stands: its functions for that are arguments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from api.jobs.background_loop import BackgroundLoop, ProblemLog, reason_of
from api.jobs.control import ControlPort
from api.jobs.cordons import Cordons
from api.jobs.origin import keep_origin
from api.jobs.outlines import Outline, Outlines
from api.jobs.path_check import keep_tokenizer, refuse_outside
from api.jobs.queue import NOTHING_QUEUED, Decision, QueuedJob, Wants, behind, decide, wants_of
from api.jobs.status_cache import StatusCache
from api.run.folder import Run, prepare_run_dir
from api.schemas import Job, JobState
from api.storage.store import JobRow, Store
from orchestrator.actors.records import StatusRecord
from orchestrator.core.vocabulary import IslandId
from orchestrator.errors import AtollError, InfrastructureError, NotFound, first_line
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.sections import IslandsSection
from orchestrator.system.roots import AllowedRoots

logger = logging.getLogger(__name__)

JOBS_MAX = 16
"""Each costs the head three processes, which no node group accounts for."""
POLL_EVERY_S = 2.0
PATIENCE_S = 4.0
"""A running job that has not said by then how it stands is reckoned by its specification."""
CLOSE_TIMEOUT_S = 5.0
PLACES_HOLD_S = 0.25
GONE_FOR_GOOD = frozenset({"stopped", "drained", "failed"})
"""States of an island that asks for no room. An operator may place it again; it then waits for some, in its job."""


class Dispatcher:
    """``statuses`` asks living jobs. ``job_of`` returns a job's state within the given time, and stores it if it is final.
    ``record`` returns its status record, None if the job left none. Jobs touch files below ``roots``.
    """

    def __init__(
        self,
        control: ControlPort,
        store: Store,
        cordons: Cordons,
        statuses: StatusCache,
        job_of: Callable[[JobRow, float], Job],
        record: Callable[[JobRow], StatusRecord | None],
        jobs_max: int,
        roots: AllowedRoots,
    ) -> None:
        self._control, self._store, self._cordons, self._roots = control, store, cordons, roots
        self._statuses, self._job_of, self._record = statuses, job_of, record
        self._jobs_max = jobs_max
        self.outlines = Outlines()
        self._one_at_a_time = threading.Lock()
        self._loop = BackgroundLoop(self.dispatch, "queue", POLL_EVERY_S)
        self._closing = False
        self._decided = NOTHING_QUEUED
        self._first: tuple[str, int] | None = None
        """The first of those that wait, and its priority."""
        self._places: tuple[float, dict[str, int]] = (float("-inf"), {})
        self._problem_log = ProblemLog(logger)
        self._inherited: set[str] = set()
        """Jobs that were being started when the process ended, or the store failed, and that are not settled yet."""

    def inherit(self) -> None:
        """After a restart: see to the jobs that were being started when the last process ended."""
        self._inherited = {row.job for row in self._store.jobs(states={JobState.STARTING})}
        self._settle_inherited()

    def begin(self) -> None:
        """Start the loop: from here on queued jobs start without being asked for."""
        self._loop.start()

    def close(self) -> None:
        """Start nothing more. A start under way that does not end soon is left to the next process."""
        self._closing = True
        self._loop.stop(CLOSE_TIMEOUT_S)

    def wake(self) -> None:
        """Something changed: the next round begins soon."""
        self.count_anew()
        self._loop.wake()

    def count_anew(self) -> None:
        """The queue has changed: places that were counted before hold no more."""
        self._places = (float("-inf"), {})

    def why(self, job: str) -> str:
        """Why a queued job waits."""
        waits = self._decided.waits
        if job in waits or not waits:
            return waits.get(job, "it is about to be looked at")
        first, why = next(iter(waits.items()))
        return behind(first, why)

    def place(self, job: str) -> int | None:
        """The job's place in the queue, from 1, counted a moment ago for all of them. None: it is not queued."""
        counted_at, places = self._places
        if time.monotonic() - counted_at > PLACES_HOLD_S:
            places = {queued: place for place, (queued, _, _) in enumerate(self._store.queued(), 1)}
            self._places = (time.monotonic(), places)
        return places.get(job)

    def is_behind(self, row: JobRow) -> bool:
        """Whether a job waits that this one may not overtake: then it cannot start now, and no round is needed."""
        if self._first is None or self._first[0] == row.job or self._first[1] < row.priority:
            return False
        first = self._store.job(self._first[0])
        return first is not None and first.state == JobState.QUEUED and first.priority >= row.priority

    @property
    def unschedulable(self) -> bool:
        """Whether the first in line asks for more than the fleet has, so that waiting does not help."""
        return self._decided.unschedulable

    def dispatch(self, patience_s: float = -1) -> None:
        """Start every queued job whose turn it is. While another thread is at it, wait so long, then leave it to that."""
        if not self._one_at_a_time.acquire(timeout=patience_s):
            self.wake()
            return
        try:
            self.count_anew()
            self._settle_inherited()
            queued = self._queued()
            before, self._decided = self._decided, self._decide(queued)
            first, why = next(iter(self._decided.waits.items()), ("", ""))
            self._first = next(((job.job, job.priority) for job in queued if job.job == first), None)
            if why and before.waits.get(first) != why:
                logger.info("job %s waits, and %d behind it: %s", first, len(self._decided.waits) - 1, why)
            for job in self._decided.starts:
                try:
                    if row := self._store.job(job):
                        self._start(row)
                except InfrastructureError as error:
                    logger.warning("job %s could not be seen to: %s", job, error)
                except Exception:  # the others' turn is now, too; this one's comes again
                    logger.exception("job %s could not be seen to", job)
        finally:
            self._one_at_a_time.release()

    def _queued(self) -> list[QueuedJob]:
        """The queued jobs, the next one first. One whose specification can no longer be read has failed, and says so."""
        queued = []
        for job, priority, number in self._store.queued():
            try:
                wants = self.outlines.of(job, lambda job=job: self._spec(job)).wants  # type: ignore[misc]
            except InfrastructureError:
                raise  # the store does not answer, which says nothing of the job
            except Exception as error:
                logger.error("job %s cannot be queued: %s", job, error)
                reason = f"its stored specification cannot be used any more: {first_line(error)}"
                self._store.move_job(job, JobState.QUEUED, JobState.FAILED, reason=reason, idempotency_key=None)
                continue
            queued.append(QueuedJob(job, priority, number, wants))
        return queued

    def _spec(self, job: str) -> Mapping[str, Any]:
        row = self._store.job(job)
        if row is None:
            raise NotFound(detail=f"There is no job {job!r}.")
        return row.spec

    def _decide(self, queued: Sequence[QueuedJob]) -> Decision:
        if not queued:
            return NOTHING_QUEUED
        alive = self._store.jobs(states={JobState.STARTING, JobState.RUNNING})
        self._problem_log.keep(whom for row in alive for whom in (f"job {row.job}", f"job {row.job}, inherited"))
        try:
            groups = self._control.node_groups()
        except InfrastructureError as error:
            return Decision(
                (), {job.job: f"the cluster does not answer: {error}" for job in queued}, unschedulable=False
            )
        # Nobody is asked how they stand while all would fit beside the largest that each running job may become.
        at_most = [outline.wants_at_most for row in alive if (outline := self._outline(row))]
        decided = decide(queued, at_most, groups, self._jobs_max)
        return decide(queued, self._wants(alive), groups, self._jobs_max) if decided.waits else decided

    def _outline(self, row: JobRow) -> Outline | None:
        """None for a running job whose stored specification cannot be read: nobody knows what it wants."""
        try:
            return self.outlines.of(row.job, lambda: row.spec)
        except Exception as error:
            self._problem_log.note(f"job {row.job}", f"nobody knows what it wants: {reason_of(error)}")
            return None

    def _wants(self, alive: Sequence[JobRow]) -> list[Wants]:
        """The resources that those of them that still run want at present."""
        self._statuses.ask_all(alive)
        due_at = time.monotonic() + PATIENCE_S
        wants: list[Wants] = []
        for row in alive:
            if (outline := self._outline(row)) is None:
                wants.append({})
                continue
            try:
                job = self._job_of(row, max(0.0, due_at - time.monotonic()))
                if job.state.final:
                    continue
                sections = sections_of(row, slots=True)
                there = [IslandId(island.island) for island in job.islands if island.state not in GONE_FOR_GOOD]
                wants.append(wants_of(sections[island] for island in there if island in sections))
            except Exception as error:  # whatever its row and its answer are, the others' turn does not wait for it
                if not isinstance(error, AtollError):
                    self._problem_log.note(
                        f"job {row.job}", f"it is reckoned by its outline: {reason_of(error)}", error
                    )
                wants.append(outline.wants)
            else:
                self._problem_log.settle(f"job {row.job}")
        return wants

    def _start(self, row: JobRow) -> None:
        """The job runs, or has failed with the reason, or was cancelled in the last instant.

        Raises InfrastructureError if the store failed meanwhile. How far it came is settled once that answers again.
        """
        if self._closing:
            return
        cordoned = self._cordons.callers()
        self._inherited.add(row.job)
        if self._store.move_job(row.job, JobState.QUEUED, JobState.STARTING):
            self._start_now(row, cordoned)
        self._inherited.discard(row.job)

    def _start_now(self, row: JobRow, cordoned: Mapping[str, str]) -> None:
        run_dir = Path(row.run_dir)
        try:
            prepare_run_dir(run_dir, row.spec)
            spec = parse_job(row.spec)
            refuse_outside(spec, self._roots)
            keep_origin(run_dir, row.spec, self._roots)
            keep_tokenizer(run_dir, row.spec, self._roots)
            self._control.start_job(row.job, spec, run_dir, cordoned, self._roots)
        except Exception as error:
            if self._closing:
                return  # the cluster was left while it was starting; the next process sees what became of it
            logger.exception("job %s could not be started", row.job)
            # The key is freed: whoever tries again under it wants a job, not this failure once more.
            values = {"reason": f"could not be started: {error}", "idempotency_key": None}
            self._store.move_job(row.job, JobState.STARTING, JobState.FAILED, **values)
            return
        self._store.move_job(row.job, JobState.STARTING, JobState.RUNNING)
        if self._cordons.callers() != cordoned:
            self._cordons.tell(row.job, row.caller)

    def _settle_inherited(self) -> None:
        """Decide what became of inherited jobs. One whose cluster does not answer is tried again in the next round."""
        for job in list(self._inherited):
            row = self._store.job(job)
            try:
                if row:
                    # ``record`` asks the run folder first: the job may have ended while no service was up.
                    ran = self._record(row) is not None or Run(row.job, Path(row.run_dir), False).tape.exists()
                    self._store.move_job(job, JobState.STARTING, JobState.RUNNING if ran else JobState.QUEUED)
            except Exception as error:  # the others are settled, and the queue goes on
                self._problem_log.note(f"job {job}, inherited", reason_of(error), error)
            else:
                self._inherited.discard(job)
                self._problem_log.settle(f"job {job}, inherited")


def sections_of(row: JobRow, *, slots: bool = False) -> dict[IslandId, IslandsSection]:
    """The islands and standbys of the job's specification, by name."""
    spec = JobSpec.model_validate(row.spec)
    return {**spec.island_sections(slots=slots), **spec.standby_sections()}
