"""The queue's decision, and the dispatcher that carries it out: it starts queued jobs, after changes and every few seconds.

    queued ──▶ starting ──▶ running ──▶ … ──▶ a final state
      │   ▲       │  └────▶ failed: the job could not be started
      │   └───────┘ the service was killed meanwhile, and the job does not exist
      └──▶ cancelled

Each of these arrows is taken once, whatever is killed when: state changes in the store are compare-and-set, a job is marked
starting before anything of it is created, and a job with a tape has run and is not started again. Jobs that ended while no
service was running are found when their capacity is needed. The functions that find out a job's status are arguments.

``decide`` says which queued jobs start now, and why the others wait. It is pure. The order is strict: higher priority first,
then first come, first served. No job overtakes another: the first job that does not fit blocks all behind it, even those
that would fit, so that small jobs never starve a large one.

A job fits while fewer than ``jobs_max`` jobs run and every node group that it names has, beyond what the running jobs want
there, what its islands ask for. What jobs want counts, not what happens to be free, because a lost island comes back. A
group counts as a whole, cordoned or not. Whether a single node has room for an island turns out when it is placed; until
there is room, the island waits in its job.

An outline is what the queue and the lists need of a specification, computed once, because it never changes. Parsing a
specification takes about a millisecond, and longer with many islands; outlines make a queue of a thousand jobs cheap to look
through. The least recently used outlines are dropped.

Source: Slurm's builtin scheduler (strict priority order, no backfill).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from api.jobs.background_loop import BackgroundLoop, ProblemLog, reason_of
from api.jobs.checkpoints import keep_origin
from api.jobs.control import ControlPort
from api.jobs.cordons import Cordons
from api.jobs.path_check import keep_tokenizer, refuse_outside
from api.jobs.status_cache import StatusCache
from api.run.folder import Run, prepare_run_dir
from api.schemas import Job, JobState
from api.storage.store import JobRow, Store
from orchestrator.core.vocabulary import IslandId
from orchestrator.errors import AtollError, InfrastructureError, NotFound, first_line
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.sections import IslandsSection
from orchestrator.status import JobStatus, NodeGroupRecord
from orchestrator.system.roots import AllowedRoots

UNNOTICED = 1e-6
"""CPUs are fractions, whose sums are rounded."""
OUTLINES_MAX = 4096
logger = logging.getLogger(__name__)
JOBS_MAX = 16
"""Each job costs the head three processes, which no node group accounts for."""
POLL_EVERY_S = 2.0
PATIENCE_S = 4.0
"""For a running job that has not answered by then, its specification counts."""
CLOSE_TIMEOUT_S = 5.0
PLACES_HOLD_S = 0.25
GONE_FOR_GOOD = frozenset({"stopped", "drained", "failed"})
"""States of an island that needs no resources. An operator may place it again; it then waits for them in its job."""


@dataclass(frozen=True, slots=True)
class Outline:
    """``wants``: what the job asks for when it starts; ``wants_at_most``: with all slots that an operator may fill."""

    island_count: int
    token_budget: int
    wants: Wants
    wants_at_most: Wants


class Outlines:
    def __init__(self) -> None:
        self._outlines: OrderedDict[str, Outline] = OrderedDict()
        self._changing = Lock()

    def of(self, job: str, read_spec: Callable[[], Mapping[str, Any]]) -> Outline:
        """Return the job's outline. Raises pydantic's ValueError if its specification is invalid, and as ``read_spec``."""
        with self._changing:
            if outline := self._outlines.get(job):
                self._outlines.move_to_end(job)
                return outline
        outline = outline_of(read_spec())
        with self._changing:
            self._outlines[job] = outline
            while len(self._outlines) > OUTLINES_MAX:
                self._outlines.popitem(last=False)
        return outline


def outline_of(document: Mapping[str, Any]) -> Outline:
    spec = JobSpec.model_validate(document)
    standbys = spec.standby_sections().values()
    return Outline(
        island_count=len(spec.policy().islands),
        token_budget=spec.token_budget,
        wants=wants_of([*spec.island_sections().values(), *standbys]),
        wants_at_most=wants_of([*spec.island_sections(slots=True).values(), *standbys]),
    )


class Dispatcher:
    """``statuses`` queries living jobs. ``job_of`` returns a job's state within the given time, and stores a final one.

    ``record`` returns its status record, or None if the job left none. Jobs may use files below ``roots``.
    """

    def __init__(
        self,
        control: ControlPort,
        store: Store,
        cordons: Cordons,
        statuses: StatusCache,
        job_of: Callable[[JobRow, float], Job],
        record: Callable[[JobRow], JobStatus | None],
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
        """The first waiting job, and its priority."""
        self._places: tuple[float, dict[str, int]] = (float("-inf"), {})
        self._problem_log = ProblemLog(logger)
        self._inherited: set[str] = set()
        """Jobs whose start was interrupted, by the end of the process or a failure of the store, and is not settled yet."""

    def inherit(self) -> None:
        """Settle the jobs that the last process was starting when it ended."""
        self._inherited = {row.job for row in self._store.jobs(states={JobState.STARTING})}
        self._settle_inherited()

    def begin(self) -> None:
        """Start the loop that starts queued jobs."""
        self._loop.start()

    def close(self) -> None:
        """Stop starting jobs. A start that does not end soon is left to the next process."""
        self._closing = True
        self._loop.stop(CLOSE_TIMEOUT_S)

    def wake(self) -> None:
        """Start the next round soon, because something changed."""
        self.count_anew()
        self._loop.wake()

    def count_anew(self) -> None:
        """Drop the counted places, because the queue has changed."""
        self._places = (float("-inf"), {})

    def why(self, job: str) -> str:
        """Return why a queued job waits."""
        waits = self._decided.waits
        if job in waits or not waits:
            return waits.get(job, "the next round will decide")
        first, why = next(iter(waits.items()))
        return behind(first, why)

    def place(self, job: str) -> int | None:
        """Return the job's place in the queue, from 1, at most ``PLACES_HOLD_S`` old; None if it is not queued."""
        counted_at, places = self._places
        if time.monotonic() - counted_at > PLACES_HOLD_S:
            places = {queued: place for place, (queued, _, _) in enumerate(self._store.queued(), 1)}
            self._places = (time.monotonic(), places)
        return places.get(job)

    def is_behind(self, row: JobRow) -> bool:
        """Return whether a waiting job is ahead of this one. Then this one cannot start, and no round is needed."""
        if self._first is None or self._first[0] == row.job or self._first[1] < row.priority:
            return False
        first = self._store.job(self._first[0])
        return first is not None and first.state == JobState.QUEUED and first.priority >= row.priority

    @property
    def unschedulable(self) -> bool:
        """Return whether the first queued job asks for more than the fleet has, so that waiting does not help."""
        return self._decided.unschedulable

    def dispatch(self, patience_s: float = -1) -> None:
        """Start every queued job whose turn it is. If another thread does so, wait ``patience_s`` and leave it to that."""
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
                    logger.warning("starting job %s was interrupted: %s", job, error)
                except Exception:  # the other jobs must not wait; this one gets another turn
                    logger.exception("starting job %s was interrupted", job)
        finally:
            self._one_at_a_time.release()

    def _queued(self) -> list[QueuedJob]:
        """Return the queued jobs, the next one first. A job whose specification is no longer readable fails."""
        queued = []
        for job, priority, number in self._store.queued():
            try:
                wants = self.outlines.of(job, lambda job=job: self._spec(job)).wants  # type: ignore[misc]
            except InfrastructureError:
                raise  # the store does not answer; the job is not at fault
            except Exception as error:
                logger.error("job %s cannot be queued: %s", job, error)
                reason = f"its stored specification is no longer valid: {first_line(error)}"
                self._store.move_job(job, JobState.QUEUED, JobState.FAILED, reason=reason, idempotency_key=None)
                continue
            queued.append(QueuedJob(job, priority, number, wants))
        return queued

    def _spec(self, job: str) -> Mapping[str, Any]:
        row = self._store.job(job)
        if row is None:
            raise NotFound(detail=f"Job {job!r} does not exist.")
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
        # Running jobs are not queried if everything fits even beside the largest that each of them may become.
        at_most = [outline.wants_at_most for row in alive if (outline := self._outline(row))]
        decided = decide(queued, at_most, groups, self._jobs_max)
        return decide(queued, self._wants(alive), groups, self._jobs_max) if decided.waits else decided

    def _outline(self, row: JobRow) -> Outline | None:
        """Return the job's outline, or None if its stored specification cannot be read."""
        try:
            return self.outlines.of(row.job, lambda: row.spec)
        except Exception as error:
            self._problem_log.note(f"job {row.job}", f"its resources are unknown: {reason_of(error)}")
            return None

    def _wants(self, alive: Sequence[JobRow]) -> list[Wants]:
        """Return the resources that each of these jobs, if it still runs, currently wants."""
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
            except Exception as error:  # a damaged row or answer must not block other jobs
                if not isinstance(error, AtollError):
                    self._problem_log.note(
                        f"job {row.job}", f"its specification counts instead of its status: {reason_of(error)}", error
                    )
                wants.append(outline.wants)
            else:
                self._problem_log.settle(f"job {row.job}")
        return wants

    def _start(self, row: JobRow) -> None:
        """Start the job; it then runs, has failed with the reason, or was cancelled at the last moment.

        Raises InfrastructureError if the store failed meanwhile. The outcome is settled once the store answers again.
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
                return  # disconnected from the cluster during the start; the next process settles it
            logger.exception("job %s could not be started", row.job)
            # Free the key: a repeated request should try again, not get this failure.
            values = {"reason": f"could not be started: {error}", "idempotency_key": None}
            self._store.move_job(row.job, JobState.STARTING, JobState.FAILED, **values)
            return
        self._store.move_job(row.job, JobState.STARTING, JobState.RUNNING)
        if self._cordons.callers() != cordoned:
            self._cordons.tell(row.job, row.caller)

    def _settle_inherited(self) -> None:
        """Settle inherited jobs. If the cluster does not answer for one, the next round tries again."""
        for job in list(self._inherited):
            row = self._store.job(job)
            try:
                if row:
                    # ``record`` reads the run folder first: the job may have ended while no service was running.
                    ran = self._record(row) is not None or Run(row.job, Path(row.run_dir), False).tape.exists()
                    self._store.move_job(job, JobState.STARTING, JobState.RUNNING if ran else JobState.QUEUED)
            except Exception as error:  # other jobs and the queue are not affected
                self._problem_log.note(f"job {job}, inherited", reason_of(error), error)
            else:
                self._inherited.discard(job)
                self._problem_log.settle(f"job {job}, inherited")


def sections_of(row: JobRow, *, slots: bool = False) -> dict[IslandId, IslandsSection]:
    """Return the islands and standbys of the job's specification, by name."""
    spec = JobSpec.model_validate(row.spec)
    return {**spec.island_sections(slots=slots), **spec.standby_sections()}


@dataclass(frozen=True, slots=True)
class Resources:
    """CPUs and accelerators: what islands ask for, or what a node group has."""

    cpus: float = 0.0
    accelerators: float = 0

    def plus(self, more: Resources) -> Resources:
        return Resources(self.cpus + more.cpus, self.accelerators + more.accelerators)

    def minus(self, less: Resources) -> Resources:
        return Resources(self.cpus - less.cpus, self.accelerators - less.accelerators)

    def lacks(self, wanted: Resources) -> str | None:
        """Return the first kind of resource of which there is less than wanted, or None."""
        if wanted.cpus > self.cpus + UNNOTICED:
            return "cpus"
        return "accelerators" if wanted.accelerators > self.accelerators else None


Wants = Mapping[str, Resources]
"""The resources that a job asks for, by node group."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """``number`` rises with the order in which jobs came."""

    job: str
    priority: int
    number: int
    wants: Wants


@dataclass(frozen=True, slots=True)
class Decision:
    """``waits``: the reason for each waiting job, in order. ``unschedulable``: the first needs more than the fleet has."""

    starts: tuple[str, ...]
    waits: Mapping[str, str]
    unschedulable: bool


NOTHING_QUEUED = Decision((), {}, unschedulable=False)


def decide(
    queued: Iterable[QueuedJob], running: Sequence[Wants], groups: Iterable[NodeGroupRecord], jobs_max: int
) -> Decision:
    """Return which jobs start now, given what the running jobs want."""
    fleet = {group["name"]: Resources(group["cpus"], group["accelerators"]) for group in groups if group["nodes"]}
    free = dict(fleet)
    for wants in running:
        free = _without(free, wants)
    starts: list[str] = []
    waits: dict[str, str] = {}
    unschedulable = False
    for job in sorted(queued, key=lambda job: (-job.priority, job.number)):
        if waits:
            first, why = next(iter(waits.items()))
            waits[job.job] = behind(first, why)
        elif missing := _missing(fleet, job.wants):
            waits[job.job], unschedulable = missing, True
        elif lacks := _too_little(free, fleet, job.wants):
            waits[job.job] = lacks
        elif len(running) + len(starts) >= jobs_max:
            waits[job.job] = f"{jobs_max} jobs are running, the limit of the service"
        else:
            starts.append(job.job)
            free = _without(free, job.wants)
    return Decision(tuple(starts), waits, unschedulable)


def behind(first: str, why: str) -> str:
    """Return the reason why a job behind the first one waits."""
    return f"behind {first}: {why}"


def wants_of(sections: Iterable[IslandsSection]) -> Wants:
    """Return the resources of one island for each of these sections, by node group. A section may occur several times."""
    wants: dict[str, Resources] = defaultdict(Resources)
    for section in sections:
        wants[section.node_group] = wants[section.node_group].plus(Resources(section.cpus, section.accelerators))
    return dict(wants)


def _without(free: Mapping[str, Resources], wants: Wants) -> dict[str, Resources]:
    return {name: resources.minus(wants.get(name, Resources())) for name, resources in free.items()}


def _missing(fleet: Mapping[str, Resources], wants: Wants) -> str | None:
    """Return what the whole fleet lacks, however many jobs end, because nodes were lost since the submission."""
    for name, wanted in sorted(wants.items()):
        if name not in fleet:
            return f"node group {name} has no nodes"
        if kind := fleet[name].lacks(wanted):
            needed, has = getattr(wanted, kind), getattr(fleet[name], kind)
            return f"it asks for {needed:g} {kind} on {name}, which now has {has:g} in total"
    return None


def _too_little(free: Mapping[str, Resources], fleet: Mapping[str, Resources], wants: Wants) -> str | None:
    """Return what running jobs currently leave too little of."""
    for name, wanted in sorted(wants.items()):
        if kind := free[name].lacks(wanted):
            needed, left, has = (getattr(resources, kind) for resources in (wanted, free[name], fleet[name]))
            return f"it asks for {needed:g} {kind} on {name}, where running jobs leave {max(0, left):g} of {has:g}"
    return None
