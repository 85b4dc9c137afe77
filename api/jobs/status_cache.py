"""A cache of jobs' statuses: however many readers there are, a job is asked a few times a second at most.

    read ──▶ younger than FRESH_S? ──yes──▶ the cached snapshot
                     └──────no──▶ one request to the job, for all who want to know; cache its answer

Responsible for many readers costing a job no more than one, also when it does not answer: the request waits in a thread of
its own, the first reader waits with it, the others for a moment only, and its silence is cached longer than an answer.
A later snapshot never shows an earlier state: whoever asks afresh renews what all others see.

A job's version is its entity tag, ``"GENERATION.DIGEST"``. The digest is that of the answer, new with every snapshot of a
job that trains. The generation counts the commands to the job, and is all that ``If-Match`` compares: progress is no
conflict. It refuses to know where a job's state comes from.

Source: RFC 9110, sections 8.8.3 (ETag) and 13.1 (preconditions).

The readiness probe: one question to the cluster at a time, shared by all who probe, and never waited for long.

Responsible for one question being under way at most, however many want to know and however dead the cluster is. While no
answer comes, the cluster counts as one that does not answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from threading import Lock

from api.schemas import ALIVE, Job
from api.storage.store import JobRow
from orchestrator.actors.records import StatusRecord
from orchestrator.errors import AtollError, InfrastructureError, PreconditionFailed
from orchestrator.system.threads import BoundedThreads

ANSWER_WITHIN_S = 0.7
"""The longest wait of one probe, so that with all around it, it is answered within a second."""
NOT_YET = InfrastructureError(
    detail=f"The cluster has not said within {ANSWER_WITHIN_S:g} s which node groups there are.",
    remedy="Wait for it; if it stays silent, `atoll doctor` says what is wrong, and `atoll up` starts what has died.",
)


class Readiness:
    """``node_group_count`` asks the cluster, for as long as that takes."""

    def __init__(self, node_group_count: Callable[[], int]) -> None:
        self._node_group_count = node_group_count
        self._threads = BoundedThreads("the question whether the cluster answers", 1)
        self._asking = Lock()
        self._question: Future[int] | None = None

    def question(self) -> Future[int]:
        """The request to the cluster that is under way, or one that begins now."""
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
            raise InfrastructureError(detail=f"The cluster cannot be asked: {type(error).__name__}: {error}") from error


def group_count(question: Future[int]) -> int:
    """The number of node groups. Raises the reason why nobody knows it."""
    if not question.done():
        raise NOT_YET.with_traceback(None)
    if error := question.exception():
        raise error.with_traceback(None)  # it is raised for everybody who asked
    return question.result()


FRESH_S = 0.25
"""Well below what people notice, and well above what an answer takes."""
STALE_MAX_S = 1.0
"""While one reader waits for a job that is slow to answer, the others get a snapshot of this age at most."""
SILENT_S = 2.0
"""A job that did not answer is not asked again for so long. Readers get its silence as an error at once."""
PATIENCE_S = 15.0
"""The reader that began the request waits as long as the control port does."""
ASKED_S = 3.0
"""The others wait until the request is so old."""
REQUESTS_MAX = 64
JOBS_MAX = 128


class StatusSnapshot:
    """One job's status record, or the error of its silence; when it was asked; and the answer made of the record."""

    def __init__(
        self,
        asked_at: float,
        record: StatusRecord | None,
        generation: int = 0,
        error: InfrastructureError | None = None,
    ) -> None:
        self.asked_at = asked_at
        self.record = record
        self.generation = generation
        self.error = error
        self.answer: Job | None = None

    @cached_property
    def body(self) -> bytes:
        """The answer as it is sent. Raises ValueError before there is one."""
        if self.answer is None:
            raise ValueError("no answer was made of this snapshot yet")
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
    """``ask`` returns a job's status record, None if nothing is known; ``generation`` counts the commands to it so far."""

    def __init__(self, ask: Callable[[JobRow], StatusRecord | None], generation: Callable[[str], int]) -> None:
        self._ask = ask
        self._generation = generation
        self._snapshots: OrderedDict[str, StatusSnapshot] = OrderedDict()
        self._changing = Lock()
        self._threads = BoundedThreads("questions to jobs", REQUESTS_MAX)
        self._requests: dict[str, PendingRequest] = {}

    def recent(self, row: JobRow, patience_s: float = PATIENCE_S) -> StatusSnapshot:
        """A snapshot at most ``FRESH_S`` old; ``STALE_MAX_S`` while the job is being asked. Raises a silent job's error."""
        now, cached = time.monotonic(), self._snapshots.get(row.job)
        if cached and now - cached.asked_at <= (FRESH_S if cached.error is None else SILENT_S):
            return answered(cached)
        if row.state not in ALIVE:
            return self.fresh(row)  # what is known of it is on the disk
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
            detail = f"The synchroniser of job {row.job} was asked {since_s:.1f} s ago, and has not answered yet."
            raise InfrastructureError(detail=detail, remedy="Try again; training goes on meanwhile.") from error

    def ask_all(self, rows: Iterable[JobRow]) -> None:
        """Ask all of these that live at once, so that a reader of them all waits for the slowest only."""
        for row in rows:
            now, cached = time.monotonic(), self._snapshots.get(row.job)
            if row.state in ALIVE and (cached is None or now - cached.asked_at > FRESH_S):
                with suppress(InfrastructureError):  # whoever wants this one hears of it
                    self._request(row, now)

    def _request(self, row: JobRow, since: float) -> tuple[PendingRequest, bool]:
        """The request to this job that is under way or began after ``since``, else a new one, and whether it is new."""
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
        """A snapshot from now. One without a record is not cached: the job may be about to begin."""
        asked_at, generation = time.monotonic(), self._generation(row.job)
        try:
            snapshot = StatusSnapshot(asked_at, self._ask(row), generation)
        except InfrastructureError as error:
            self._store(row.job, StatusSnapshot(time.monotonic(), None, generation, error))  # it is silent from now on
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
    """The snapshot itself. Raises its error where the job was silent."""
    if snapshot.error is not None:
        raise snapshot.error.with_traceback(None)  # the same one is raised again and again
    return snapshot


def tag_of(generation: str, body: bytes) -> str:
    """The entity tag of this representation."""
    return f'"{generation}.{blake2b(body, digest_size=8).hexdigest()}"'


def refuse_outdated(if_match: str | None, generation: str, what: str) -> None:
    """Raises PreconditionFailed if the caller has seen ``what`` before something else was asked of it."""
    if if_match is None or if_match.strip() == "*":
        return
    seen = {tag.strip().strip('"').partition(".")[0] for tag in if_match.split(",") if tag.strip().startswith('"')}
    if generation not in seen:
        detail = f"If-Match is {if_match}, but since that look something else was asked of {what}."
        raise PreconditionFailed(detail=detail, remedy=f"Look at {what} again, and repeat the request with its ETag.")


def unchanged(if_none_match: str | None, tag: str) -> bool:
    """Whether the caller has this representation already."""
    return if_none_match is not None and (
        if_none_match.strip() == "*" or tag in [seen.strip().removeprefix("W/") for seen in if_none_match.split(",")]
    )
