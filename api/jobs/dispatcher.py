"""The queue's hands: it looks who may start, and starts them, whenever something changed and every few seconds.

    queued ──▶ starting ──▶ running ──▶ … ──▶ a final state
      │   ▲       │  └────▶ failed: the job could not be started
      │   └───────┘ the service was killed meanwhile, and nothing of the job is there
      └──▶ cancelled

Responsible for each of these arrows being taken once, whoever is killed when: a state is moved on in the store by
comparing first, a job is called starting before anything of it is made, and one that has written a tape has run and is not
started again. Jobs that ended while no service was up are found when their room is asked for. Refuses to decide
(``api.jobs.queue``), and to know how a job stands: it is told by whoever made it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from api.jobs.control import ControlPort, StatusRecord
from api.jobs.cordons import Cordons
from api.jobs.places import refuse_outside
from api.jobs.queue import NOTHING_QUEUED, Decision, QueuedJob, Wants, decide, wants_of
from api.jobs.tending import Tending
from api.run.folder import Run, prepare_run_dir
from api.schemas import Job, JobState
from api.storage.store import JobRow, Store
from orchestrator.config import JobSpec
from orchestrator.core.vocabulary import IslandId
from orchestrator.errors import AtollError, InfrastructureError
from orchestrator.roots import AllowedRoots
from orchestrator.sections import IslandsSection

logger = logging.getLogger(__name__)

JOBS_MAX = 16
"""Each costs the head three processes, which no node group accounts for."""
LOOK_EVERY_S = 2.0
PATIENCE_S = 4.0
"""A running job that has not said by then how it stands is reckoned by its specification."""
CLOSE_TIMEOUT_S = 5.0
GONE_FOR_GOOD = frozenset({"stopped", "drained", "failed"})
"""States of an island that asks for no room. An operator may place it again; it then waits for some, in its job."""


class Dispatcher:
    """Jobs touch files below ``roots``. ``look`` tells how a job stands and remembers it if it has ended.

    ``record`` is None for one of which nothing is.
    """

    def __init__(
        self,
        control: ControlPort,
        store: Store,
        cordons: Cordons,
        look: Callable[[JobRow], Job],
        record: Callable[[JobRow], StatusRecord | None],
        jobs_max: int,
        roots: AllowedRoots,
    ) -> None:
        self._control, self._store, self._cordons, self._roots = control, store, cordons, roots
        self._look, self._record = look, record
        self._jobs_max = jobs_max
        self._pool = ThreadPoolExecutor(8, "queue")
        self._one_at_a_time = threading.Lock()
        self._looking = Tending(self.dispatch, "queue", LOOK_EVERY_S)
        self._closing = False
        self._decided = NOTHING_QUEUED
        self._inherited: set[str] = set()
        """Jobs that an earlier process was starting when it ended, and that are not settled yet."""

    def inherit(self) -> None:
        """After a restart: see to the jobs that were being started when the last process ended."""
        self._inherited = {row.job for row in self._store.jobs(states={JobState.STARTING})}
        self._settle_inherited()

    def begin(self) -> None:
        """From here on it looks by itself."""
        self._looking.start()

    def close(self) -> None:
        """Start nothing more. A start under way that does not end soon is left to the next process."""
        self._closing = True
        self._looking.stop(CLOSE_TIMEOUT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """Something changed: look soon."""
        self._looking.wake()

    def why(self, job: str) -> str:
        """Why a queued job waits."""
        return self._decided.waits.get(job, "it is about to be looked at")

    @property
    def hopeless(self) -> bool:
        """Whether the first in line asks for more than the fleet has, so that waiting does not help."""
        return self._decided.hopeless

    def dispatch(self, patience_s: float = -1) -> None:
        """Start every queued job whose turn it is. While another thread is at it, wait so long, then leave it to that."""
        if not self._one_at_a_time.acquire(timeout=patience_s):
            self.wake()
            return
        try:
            self._settle_inherited()
            queued = self._store.jobs(states={JobState.QUEUED})
            before, self._decided = self._decided, self._decide(queued)
            for job, why in self._decided.waits.items():
                if before.waits.get(job) != why:
                    logger.info("job %s waits: %s", job, why)
            rows = {row.job: row for row in queued}
            for job in self._decided.starts:
                self._start(rows[job])
        finally:
            self._one_at_a_time.release()

    def _decide(self, queued: Sequence[JobRow]) -> Decision:
        if not queued:
            return NOTHING_QUEUED
        jobs = [QueuedJob(row.job, row.priority, row.number, wants_of(sections_of(row).values())) for row in queued]
        alive = self._store.jobs(states={JobState.STARTING, JobState.RUNNING})
        try:
            groups = self._control.node_groups()
        except InfrastructureError as error:
            return Decision((), {row.job: f"the cluster does not answer: {error}" for row in queued}, hopeless=False)
        # Nobody is asked how they stand while all would fit beside the largest that each running job may become.
        at_most = [wants_of(sections_of(row, spares=True).values()) for row in alive]
        decided = decide(jobs, at_most, groups, self._jobs_max)
        return decide(jobs, self._wants(alive), groups, self._jobs_max) if decided.waits else decided

    def _wants(self, alive: Sequence[JobRow]) -> list[Wants]:
        """What those of them that still run want at present."""
        asked = {row.job: self._pool.submit(self._look, row) for row in alive}
        done, _ = wait(asked.values(), timeout=PATIENCE_S)
        wants = []
        for row in alive:
            future, sections = asked[row.job], sections_of(row, spares=True)
            if future not in done or isinstance(future.exception(), AtollError):
                wants.append(wants_of(sections_of(row).values()))
            elif not (job := future.result()).state.final:
                there = [IslandId(island.island) for island in job.islands if island.state not in GONE_FOR_GOOD]
                wants.append(wants_of(sections[island] for island in there))
        return wants

    def _start(self, row: JobRow) -> None:
        """The job runs, or has failed with the reason, or was cancelled in the last instant."""
        if self._closing or not self._store.move_job(row.job, JobState.QUEUED, JobState.STARTING):
            return
        run_dir = Path(row.run_dir)
        try:
            prepare_run_dir(run_dir, row.spec)
            cordoned = self._cordons.callers()
            spec = JobSpec.model_validate(row.spec)
            refuse_outside(spec, self._roots)
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
        """Decide what became of inherited jobs. One whose cluster does not answer is tried again at the next look."""
        for job in list(self._inherited):
            row = self._store.job(job)
            try:
                if row:
                    # ``record`` asks the run folder first: the job may have ended while no service was up.
                    ran = self._record(row) is not None or Run(row.job, Path(row.run_dir), False).tape.exists()
                    self._store.move_job(job, JobState.STARTING, JobState.RUNNING if ran else JobState.QUEUED)
            except AtollError as error:
                logger.warning("job %s: %s", job, error)
            else:
                self._inherited.discard(job)


def sections_of(row: JobRow, *, spares: bool = False) -> dict[IslandId, IslandsSection]:
    """The islands and standbys of the job's specification, by name."""
    spec = JobSpec.model_validate(row.spec)
    return {**spec.island_sections(spares=spares), **spec.standby_sections()}
