"""A cache of jobs' statuses, so that a job is queried a few times a second at most, by any number of readers.

    read ──▶ younger than FRESH_S? ──yes──▶ the cached snapshot
                     └──────no──▶ one request to the job, shared by all readers; cache its answer

Many readers cost a job no more than one, even if it does not answer: the request waits in a thread of its own, the first
reader waits for it, the others only for a moment, and a missing answer is cached longer than an answer. A later snapshot
never shows an earlier state: a fresh request renews what all readers see.

A list shows what is cached and does not wait: two threads renew what is older than a second, job by job. Requests to twenty
jobs at the same time, whose answers are all parsed at once, would hold up the list itself.

A job's version is its entity tag, ``"GENERATION.DIGEST"``. The digest is of the answer, and changes with every snapshot of a
training job. The generation counts the commands to the job, and only it is compared by ``If-Match``: progress is no
conflict.

``Readiness`` answers probes: at most one request to the cluster is under way, shared by all probes, and none waits long.
While there is no answer, the cluster counts as not answering.

Source: RFC 9110, sections 8.8.3 (ETag) and 13.1 (preconditions).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from threading import Lock

from api.schemas import ALIVE, Job, JobSummary
from api.storage.store import JobRow
from orchestrator.errors import AtollError, InfrastructureError, PreconditionFailed
from orchestrator.status import JobStatus
from orchestrator.system.threads import BoundedThreads

ANSWER_WITHIN_S = 0.7
"""The longest wait of a probe, so that it is answered within a second in all."""
NOT_YET = InfrastructureError(
    detail=f"The cluster did not list its node groups within {ANSWER_WITHIN_S:g} s.",
    remedy="Wait a moment. If it stays silent, run `atoll doctor` to find the problem, or `atoll up` to restart it.",
)


class Readiness:
    """``node_group_count`` asks the cluster, and may take any time."""

    def __init__(self, node_group_count: Callable[[], int]) -> None:
        self._node_group_count = node_group_count
        self._threads = BoundedThreads("readiness checks", 1)
        self._asking = Lock()
        self._question: Future[int] | None = None

    def question(self) -> Future[int]:
        """Return the request to the cluster that is under way, or start one."""
        with self._asking:
            if self._question is None or self._question.done():
                self._question = self._threads.begin(self._ask)
            return self._question

    def _ask(self) -> int:
        try:
            return self._node_group_count()
        except AtollError:
            raise
        except Exception as error:
            raise InfrastructureError(detail=f"Asking the cluster failed: {type(error).__name__}: {error}") from error


def group_count(question: Future[int]) -> int:
    """Return the number of node groups. Raises the error of the request, or ``NOT_YET``."""
    if not question.done():
        raise NOT_YET.with_traceback(None)
    if error := question.exception():
        raise error.with_traceback(None)  # the same error is raised for all probes
    return question.result()


FRESH_S = 0.25
"""Well below what people notice, and well above the time of an answer."""
STALE_MAX_S = 1.0
"""While one reader waits for a slow job, the others get a snapshot of at most this age."""
LIST_FRESH_S, LIST_STALE_MAX_S = 1.0, 5.0
"""The list of jobs asks a job once a second at most. It shows a snapshot of up to five seconds rather than wait for the
next, unless the job has had a command since."""
SILENT_S = 2.0
"""A job that did not answer is not asked again for this long. Readers get an error at once."""
PATIENCE_S = 15.0
"""The reader that started the request waits as long as the control port does."""
ASKED_S = 3.0
"""Other readers wait until the request is this old."""
REQUESTS_MAX = 64
RENEWALS_MAX = 2
JOBS_MAX = 128


class StatusSnapshot:
    """A job's status record or the error instead of it, the time of the request, and the answer built from the record."""

    def __init__(
        self,
        asked_at: float,
        record: JobStatus | None,
        generation: int = 0,
        error: InfrastructureError | None = None,
    ) -> None:
        self.asked_at = asked_at
        self.record = record
        self.generation = generation
        self.error = error
        self.answer: Job | None = None
        self.summary: JobSummary | None = None

    @cached_property
    def body(self) -> bytes:
        """The answer as it is sent. Raises ValueError before there is one."""
        if self.answer is None:
            raise ValueError("this snapshot has no answer yet")
        return self.answer.model_dump_json().encode()

    @cached_property
    def tag(self) -> str:
        return tag_of(str(self.generation), self.body)


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request for a job's status that is under way."""

    answer: Future[StatusSnapshot]
    begun_at: float


class StatusCache:
    """``ask`` returns a job's status record, or None if there is none; ``generations`` counts the commands to each job so
    far. ``build`` adds the answer and the summary to a snapshot that was renewed for lists.
    """

    def __init__(
        self,
        ask: Callable[[JobRow], JobStatus | None],
        generations: Callable[[Collection[str]], Mapping[str, int]],
        build: Callable[[JobRow, StatusSnapshot], object],
    ) -> None:
        self._ask, self._build = ask, build
        self._generations = generations
        self._renewals = BoundedThreads("renewals of jobs' statuses", RENEWALS_MAX)
        self._due: OrderedDict[str, JobRow] = OrderedDict()
        """What is to be renewed."""
        self._renewing: set[str] = set()
        self._snapshots: OrderedDict[str, StatusSnapshot] = OrderedDict()
        self._changing = Lock()
        self._threads = BoundedThreads("requests to jobs", REQUESTS_MAX)
        self._requests: dict[str, PendingRequest] = {}

    def recent(self, row: JobRow, patience_s: float = PATIENCE_S) -> StatusSnapshot:
        """Return a snapshot at most ``FRESH_S`` old, or ``STALE_MAX_S`` during a request. Raises a silent job's error."""
        now, cached = time.monotonic(), self._snapshots.get(row.job)
        if cached and now - cached.asked_at <= (FRESH_S if cached.error is None else SILENT_S):
            return answered(cached)
        if row.state not in ALIVE:
            return self.fresh(row)  # its status is on the disk
        request, is_first = self._request(row, now)
        if cached and cached.error is None and not is_first and now - cached.asked_at < STALE_MAX_S:
            return cached
        if cached and cached.error is not None:
            patience_s = min(patience_s, FRESH_S)
        elif not is_first:
            patience_s = min(patience_s, request.begun_at + ASKED_S - now)
        try:
            return request.answer.result(max(0.0, patience_s))
        except TimeoutError as error:
            since_s = time.monotonic() - request.begun_at
            detail = f"The synchroniser of job {row.job} has not answered for {since_s:.1f} s."
            raise InfrastructureError(detail=detail, remedy="Try again. Training continues meanwhile.") from error

    def listed(self, rows: Sequence[JobRow]) -> dict[str, StatusSnapshot]:
        """Return the snapshots that a list may show without waiting, by job, and have those renewed that are not fresh.

        The other jobs that live are queried, all at the same time: a list has to wait for them.
        """
        now, recent = time.monotonic(), {}
        for row in rows:
            cached = self._snapshots.get(row.job)
            if cached is None or cached.error is not None or row.state not in ALIVE:
                continue
            if now - cached.asked_at <= LIST_STALE_MAX_S:
                recent[row.job] = cached
        generations = self._generations(recent) if recent else {}
        shown = {job: cached for job, cached in recent.items() if cached.generation == generations[job]}
        self.ask_all(row for row in rows if row.job not in shown)
        self._renew([row for row in rows if row.job in shown and now - shown[row.job].asked_at > LIST_FRESH_S])
        return shown

    def _renew(self, rows: Sequence[JobRow]) -> None:
        """Query these jobs soon. Returns at once."""
        with self._changing:
            self._due.update({row.job: row for row in rows if row.job not in self._renewing})
        for _ in rows[:RENEWALS_MAX]:
            with suppress(InfrastructureError):  # all are busy, and take what is due next
                self._renewals.begin(self._renew_due)

    def _renew_due(self) -> None:
        while True:
            with self._changing:
                if not self._due:
                    return
                _, row = self._due.popitem(last=False)
                self._renewing.add(row.job)
            try:
                cached = self._snapshots.get(row.job)
                if cached is None or time.monotonic() - cached.asked_at > LIST_FRESH_S:
                    with suppress(InfrastructureError):  # reading that job raises it
                        self._build(row, self.fresh(row))
            finally:
                with self._changing:
                    self._renewing.discard(row.job)

    def ask_all(self, rows: Iterable[JobRow]) -> None:
        """Query all living jobs of these at the same time, so that a reader of all waits only for the slowest."""
        for row in rows:
            now, cached = time.monotonic(), self._snapshots.get(row.job)
            if row.state in ALIVE and (cached is None or now - cached.asked_at > LIST_FRESH_S):
                with suppress(InfrastructureError):  # reading that job raises it
                    self._request(row, now)

    def _request(self, row: JobRow, since: float) -> tuple[PendingRequest, bool]:
        """Return a request to this job that is under way or began after ``since``, else a new one; and whether it is new."""
        with self._changing:
            latest = self._requests.get(row.job)
            if latest and (latest.begun_at >= since or not latest.answer.done()):
                return latest, False
            request = PendingRequest(self._threads.begin(lambda: self.fresh(row)), time.monotonic())
            self._requests[row.job] = request
            for job in [job for job, one in self._requests.items() if one.answer.done() and one is not request]:
                del self._requests[job]
            return request, True

    def fresh(self, row: JobRow) -> StatusSnapshot:
        """Return a new snapshot. One without a record is not cached: the job may be about to start."""
        asked_at, generation = time.monotonic(), self._generations([row.job])[row.job]
        try:
            snapshot = StatusSnapshot(asked_at, self._ask(row), generation)
        except InfrastructureError as error:
            self._store(row.job, StatusSnapshot(time.monotonic(), None, generation, error))  # silent as of now
            raise
        if snapshot.record is not None:
            self._store(row.job, snapshot)
        return snapshot

    def _store(self, job: str, snapshot: StatusSnapshot) -> None:
        with self._changing:
            cached = self._snapshots.get(job)
            if cached is None or cached.asked_at < snapshot.asked_at:
                self._snapshots[job] = snapshot
            self._snapshots.move_to_end(job)
            while len(self._snapshots) > JOBS_MAX:
                self._snapshots.popitem(last=False)


def answered(snapshot: StatusSnapshot) -> StatusSnapshot:
    """Return the snapshot. Raises its error if the job was silent."""
    if snapshot.error is not None:
        raise snapshot.error.with_traceback(None)  # the same error may be raised many times
    return snapshot


def tag_of(generation: str, body: bytes) -> str:
    """Return the entity tag of this representation."""
    return f'"{generation}.{blake2b(body, digest_size=8).hexdigest()}"'


def refuse_outdated(if_match: str | None, generation: str, what: str) -> None:
    """Raise PreconditionFailed if ``what`` was changed since the caller read it."""
    if if_match is None or if_match.strip() == "*":
        return
    seen = {tag.strip().strip('"').partition(".")[0] for tag in if_match.split(",") if tag.strip().startswith('"')}
    if generation not in seen:
        detail = f"If-Match is {if_match}, but {what} has been changed since."
        raise PreconditionFailed(detail=detail, remedy=f"Read {what} again, and repeat the request with the new ETag.")


def unchanged(if_none_match: str | None, tag: str) -> bool:
    """Return whether the caller has this representation already."""
    return if_none_match is not None and (
        if_none_match.strip() == "*" or tag in [seen.strip().removeprefix("W/") for seen in if_none_match.split(",")]
    )
