"""Explanations of a job, computed from its tape as it grows: its merges, each in plain words, and its diagnosis.

Each of the two is a fold that is kept and fed new lines, so that it reads a tape once in the life of the service. Bounded:
the folds of the few jobs that were queried last, and of merges the newest (the fold's limit). Lines that explain no merge,
most of a tape, are not decoded for merges.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any, Generic, TypeVar

from api.run.folder import Run
from api.run.records import TapeReader, number_of
from api.schemas import Absence, Contributor, Job, Merge, MergeSummary, Refusal
from api.schemas import Diagnosis as DiagnosisAnswer
from orchestrator.accounting.causes import Cause, Diagnosis, Finding
from orchestrator.accounting.diagnosis import Diagnostician
from orchestrator.accounting.explanation import KEEP, Explanation, Explanations
from orchestrator.accounting.failures import Failure, Failures, is_of_disk
from orchestrator.core.vocabulary import FragmentId, IslandId, JobOutcome, Version
from orchestrator.errors import TRY_OUTSIDE, DataError, InfrastructureError, NotFound
from orchestrator.system import plain
from orchestrator.system.plain import seconds
from orchestrator.tape.schema import Header, Record, decode_header, decode_line

Fold = TypeVar("Fold")


def merge_of(explanation: Explanation) -> Merge:
    """Return the whole explanation."""
    facts = _renamed(
        asdict(explanation), opened_at="opened_after_s", quorum_at="quorum_after_s", merge_seconds="merge_s"
    )
    facts |= summary_of(explanation).model_dump()
    return Merge.model_validate(
        facts
        | {
            "grace_window_s": None
            if explanation.grace_until is None
            else explanation.grace_until - explanation.quorum_at,
            "grace_used_s": explanation.closed_at - explanation.quorum_at,
            "contributors": [
                Contributor.model_validate(_renamed(asdict(item), arrived_at="arrived_after_s"))
                for item in explanation.contributors
            ],
            "absent": [Absence(island=island, state=state) for island, state in explanation.absent],
            "refusals": [Refusal.model_validate(_renamed(asdict(item), at="after_s")) for item in explanation.refusals],
        }
    )


def summary_of(explanation: Explanation) -> MergeSummary:
    return MergeSummary(
        fragment=explanation.fragment,
        version=explanation.version,
        islands=[item.island for item in explanation.contributors],
        reason=explanation.reason,
        because=because(explanation),
        closed_after_s=explanation.closed_at,
        merged_after_s=explanation.merged_at,
    )


def because(explanation: Explanation) -> str:
    """Return one sentence: why the round closed when it did, and why islands are missing from it."""
    waited = f"after {seconds(explanation.closed_at - explanation.quorum_at)} of grace"
    parts = [f"closed because {explanation.reason.words}, {waited}"]
    latest = {refusal.island: refusal for refusal in explanation.refusals}
    parts += [f"{r.island} refused: {r.reason.replace('_', ' ')}, {r.detail}" for r in latest.values()]
    absent = [f"{island} ({state.replace('_', ' ')})" for island, state in explanation.absent if island not in latest]
    return "; ".join([*parts, f"without {', '.join(absent)}"] if absent else parts)


def _renamed(facts: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in facts.items()}


JOBS_MAX = 8
UNEVENTFUL, END_BYTES = b'"effects":[]', 40
OF_ISLANDS = b'{"type":"Connection', b'{"type":"Island', b'{"type":"Placement'
RELEVANT = b'{"type":"MergeCompleted"', *OF_ISLANDS
"""Events that matter for a merge or an island's state even if nothing was decided on them."""
OF_FAILURES = *OF_ISLANDS, b'{"type":"NoticeReceived"', b'{"type":"FaultInjected"', b'{"type":"CommandRequested"'
"""The same for failures of islands."""


class TapeFold(Generic[Fold]):
    """A fold over one job's tape, kept and fed the lines that are new. Use it with ``reading`` held.

    ``begin`` makes it from the tape's header, ``take`` feeds it a record. Lines that ``is_relevant`` declines are skipped.
    """

    def __init__(
        self,
        run: Run,
        begin: Callable[[Header], Fold],
        take: Callable[[Fold, Record], None],
        is_relevant: Callable[[bytes], bool],
    ) -> None:
        self.reading = threading.Lock()
        self._reader = TapeReader(run.tape)
        self._begin, self._take, self._is_relevant = begin, take, is_relevant
        self._fold: Fold | None = None

    def caught_up(self) -> Fold | None:
        """Return the fold up to the tape's current end; None while there is no tape."""
        try:
            epoch = self._reader.epoch
            while lines := self._reader.read():
                if self._reader.epoch != epoch:
                    epoch, self._fold = self._reader.epoch, None
                for line in lines:
                    self._taken(line)
        except DataError:
            # a partly read chunk is no place to continue from
            self._reader, self._fold = TapeReader(self._reader.path), None
            raise
        return self._fold

    def _taken(self, line: bytes) -> None:
        """Feed a line to the fold. Raises DataError for anything that is wrong with it."""
        try:
            if self._fold is None:
                self._fold = self._begin(header_of(line))
            elif self._is_relevant(line) and isinstance(record := decode_line(line.decode()), Record):
                self._take(self._fold, record)
        except DataError:
            raise
        except Exception as error:  # a readable line that cannot be of a tape
            what = f"{type(error).__name__} at {line[:80]!r}"
            raise DataError(detail=f"{self._reader.path} is damaged: {what}.") from error


class MergeHistory:
    """One job's explained merges."""

    def __init__(self, run: Run, keep: int) -> None:
        self._tape = TapeFold(run, lambda header: Explanations(header.policy, keep), _explain, explains_merges)

    def merges(self) -> list[Explanation]:
        """Return the kept merges, newest first."""
        with self._tape.reading:
            fold = self._tape.caught_up()
            return list(reversed(fold.merges.values())) if fold else []

    def merge(self, job: str, fragment: int, version: int) -> Explanation:
        """Return one merge. Raises NotFound with a hint at what exists."""
        with self._tape.reading:
            fold = self._tape.caught_up()
            explanation = fold.merges.get((FragmentId(fragment), Version(version))) if fold else None
            stands = fold.version(FragmentId(fragment)) if fold else None
        if explanation is None:
            raise NotFound(
                detail=f"Job {job} has no merge {fragment}:{version}.", remedy=_instead(job, version, stands)
            )
        return explanation


class JobExplanations:
    """Both explanations of one job."""

    def __init__(self, run: Run, keep: int) -> None:
        self.history = MergeHistory(run, keep)
        self._tape = TapeFold(run, lambda header: Diagnostician(header.policy), _diagnose, is_record)

    def diagnosis(self) -> Diagnosis | None:
        """Return the diagnosis so far; None while the job has no tape."""
        with self._tape.reading:
            fold = self._tape.caught_up()
            return None if fold is None else fold.diagnosis()


@dataclass(frozen=True, slots=True)
class _DatedFailures:
    failures: Failures
    started_at: float


class NodeFailures:
    """The failures of one job's islands, for a rule about nodes that looks at all jobs."""

    def __init__(self, run: Run) -> None:
        self._job = run.job
        self._tape = TapeFold(run, _dated_failures, _note_failure, concerns_islands)

    def so_far(self) -> tuple[list[Failure], dict[IslandId, frozenset[str]]]:
        """Return the newest failures, dated in Unix seconds, and the nodes of each island. Islands are named JOB/ISLAND."""
        with self._tape.reading:
            fold = self._tape.caught_up()
            if fold is None:
                return [], {}
            failures = [
                replace(one, at=fold.started_at + one.at, island=self._name(one.island)) for one in fold.failures.all
            ]
            return failures, {self._name(island): nodes for island, nodes in fold.failures.nodes().items()}

    def _name(self, island: IslandId) -> IslandId:
        return IslandId(f"{self._job}/{island}")


class AllExplanations:
    """The explanations of the jobs that were queried last."""

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._jobs: OrderedDict[str, JobExplanations] = OrderedDict()
        self._choosing = threading.Lock()

    def of(self, run: Run) -> JobExplanations:
        with self._choosing:
            explanations = self._jobs.pop(run.job, None) or JobExplanations(run, self._keep)
            self._jobs[run.job] = explanations
            if len(self._jobs) > JOBS_MAX:
                self._jobs.popitem(last=False)
            return explanations


def header_of(line: bytes) -> Header:
    """Return the header of a job's tape that begins with this line."""
    header = decode_header(line.decode())
    if not isinstance(header, Header):
        raise DataError(detail="this is the tape of a simulated fleet, which has no merges.")
    return header


def _explain(fold: Explanations, record: Record) -> None:
    fold.apply(record.event, record.effects)  # type: ignore[arg-type]  # its header says: a job's tape


def _diagnose(fold: Diagnostician, record: Record) -> None:
    fold.apply(record.n, record.event, record.effects)  # type: ignore[arg-type]  # as above


def _dated_failures(header: Header) -> _DatedFailures:
    return _DatedFailures(Failures(plan.island for plan in header.policy.islands), header.started_at)


def _note_failure(fold: _DatedFailures, record: Record) -> None:
    fold.failures.apply(record.n, record.event, record.effects)  # type: ignore[arg-type]  # as above


def is_record(line: bytes) -> bool:
    return number_of(line) is not None


def explains_merges(line: bytes) -> bool:
    return is_record(line) and (decides_something(line) or any(kind in line for kind in RELEVANT))


def concerns_islands(line: bytes) -> bool:
    """Return whether this record may change an island's state, or say why it failed."""
    return is_record(line) and (decides_something(line) or any(kind in line for kind in OF_FAILURES))


def decides_something(line: bytes) -> bool:
    """Return whether the record in this line has effects. A checksum may follow them."""
    return UNEVENTFUL not in line[-END_BYTES:]


def with_end(diagnosis: Diagnosis, state: str, reason: str) -> Diagnosis:
    """Return the diagnosis of a job that has ended. Its tape does not have the end if its own processes failed.

    The evaluator builds the model before any island does, so most errors of a job's code end it so.
    """
    if diagnosis.outcome is not None:
        return diagnosis
    others = diagnosis.others if diagnosis.cause is None else (diagnosis.cause, *diagnosis.others)
    ended = replace(diagnosis, outcome=state, reason=reason)
    if state != JobOutcome.FAILED.value:
        return ended
    cause = Cause.FULL_DISK if is_of_disk(reason) else Cause.CODE if TRY_OUTSIDE in reason else Cause.OTHER
    spent = fsum(one.island_seconds for one in others)
    killer = Finding(cause, "", spent, 1.0, f"the job failed: {reason}", cause.remedy, ())
    return replace(ended, cause=killer, others=others)


def with_status(diagnosis: Diagnosis, job: Job) -> Diagnosis:
    """Return the diagnosis with what the job's status adds to its tape: an end, or a full disk, which keeps the tape from
    having news.
    """
    if job.state.final:
        return with_end(diagnosis, job.state.value, job.reason)
    of_disk = next((trouble for trouble in job.troubles if is_of_disk(trouble)), None)
    return diagnosis if of_disk is None else _led_by(diagnosis, Cause.FULL_DISK, of_disk, Cause.FULL_DISK.remedy)


def with_silence(diagnosis: Diagnosis, error: InfrastructureError) -> Diagnosis:
    """Return the diagnosis of a job that runs, and whose synchroniser does not answer: it merges nothing meanwhile."""
    remedy = f"{Cause.NO_SYNCHRONISER.remedy} Training continues meanwhile."
    return _led_by(diagnosis, Cause.NO_SYNCHRONISER, error.detail.rstrip("."), remedy)


def _led_by(diagnosis: Diagnosis, cause: Cause, statement: str, remedy: str) -> Diagnosis:
    others = diagnosis.others if diagnosis.cause is None else (diagnosis.cause, *diagnosis.others)
    return replace(diagnosis, cause=Finding(cause, "", 0.0, 0.0, statement, remedy, ()), others=others)


def without_tape(job: Job, folder: Path) -> NotFound:
    """Return the answer for a job that nothing can be diagnosed of: it has not started, or its folder was removed."""
    reason = f" ({job.reason.rstrip('.')})" if job.reason else ""
    if not job.state.final:
        detail = f"Job {job.job} is {job.state}{reason} and has no tape yet."
        return NotFound(detail=detail, remedy="The tape is created when the job's processes start.")
    detail = f"Job {job.job} is {job.state}{reason}, and there is no tape in {folder}."
    remedy = "If it ran, restore the folder from a backup. A job that never started has no tape; its reason is all."
    return NotFound(detail=detail, remedy=remedy)


def answer_of(job: str, diagnosis: Diagnosis) -> DiagnosisAnswer:
    """Return the diagnosis as the API answers it."""
    return DiagnosisAnswer.model_validate({"job": job, **plain.finite(asdict(diagnosis))})


def _instead(job: str, version: int, stands: Version | None) -> str:
    if stands is None:
        return f"`atoll merges {job}` lists all merges."
    if 1 <= version <= stands:
        return f"It is older than the merges that are kept; the tape has it: GET /v1/jobs/{job}/tape."
    return f"The fragment is at version {stands}."
