"""The explained merges of each job, computed from its tape as it grows.

Every line of a tape is read once in the life of the service: the fold is kept and fed new lines. Bounded: the newest merges
(the fold's limit) of the few jobs that were queried last. Lines that explain no merge, most of a tape, are not decoded.

A merge's explanation as the API answers it, and in plain words. Pure.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from api.run.folder import Run
from api.run.records import TapeReader, number_of
from api.schemas import Absence, Contributor, Merge, MergeSummary, Refusal
from orchestrator.accounting.explanation import KEEP, Explanation, Explanations
from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.errors import DataError, NotFound
from orchestrator.system.plain import seconds
from orchestrator.tape.schema import Header, Record, decode_header, decode_line


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
UNEVENTFUL = b'"effects":[]}'
RELEVANT = b'{"type":"MergeCompleted"', b'{"type":"Connection', b'{"type":"Island', b'{"type":"Placement'
"""Events that matter for a merge or an island's state even if nothing was decided on them."""


class MergeHistory:
    """One job's explained merges."""

    def __init__(self, run: Run, keep: int) -> None:
        self._reader = TapeReader(run.tape)
        self._keep = keep
        self._fold: Explanations | None = None
        self._reading = threading.Lock()

    def merges(self) -> list[Explanation]:
        """Return the kept merges, newest first."""
        with self._reading:
            fold = self._caught_up()
            return list(reversed(fold.merges.values())) if fold else []

    def merge(self, job: str, fragment: int, version: int) -> Explanation:
        """Return one merge. Raises NotFound with a hint at what exists."""
        with self._reading:
            fold = self._caught_up()
            explanation = fold.merges.get((FragmentId(fragment), Version(version))) if fold else None
            stands = fold.version(FragmentId(fragment)) if fold else None
        if explanation is None:
            raise NotFound(
                detail=f"Job {job} has no merge {fragment}:{version}.", remedy=_instead(job, version, stands)
            )
        return explanation

    def _caught_up(self) -> Explanations | None:
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
            self._take(line)
        except DataError:
            raise
        except Exception as error:  # a readable line that cannot be of a tape
            what = f"{type(error).__name__} at {line[:80]!r}"
            raise DataError(detail=f"{self._reader.path} is damaged: {what}.") from error

    def _take(self, line: bytes) -> None:
        if self._fold is None:
            self._fold = fold_of(line, self._keep)
        elif is_relevant(line) and isinstance(record := decode_line(line.decode()), Record):
            self._fold.apply(record.event, record.effects)  # type: ignore[arg-type]  # its header says: a job's tape


class MergeHistories:
    """The merge histories of the jobs that were queried last."""

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._histories: OrderedDict[str, MergeHistory] = OrderedDict()
        self._choosing = threading.Lock()

    def of(self, run: Run) -> MergeHistory:
        with self._choosing:
            history = self._histories.pop(run.job, None) or MergeHistory(run, self._keep)
            self._histories[run.job] = history
            if len(self._histories) > JOBS_MAX:
                self._histories.popitem(last=False)
            return history


def fold_of(line: bytes, keep: int) -> Explanations:
    """Return a fold for the tape that begins with this line."""
    header = decode_header(line.decode())
    if not isinstance(header, Header):
        raise DataError(detail="this is the tape of a simulated fleet, which has no merges.")
    return Explanations(header.policy, keep)


def is_relevant(line: bytes) -> bool:
    if number_of(line) is None:
        return False
    return not line.endswith(UNEVENTFUL) or any(kind in line for kind in RELEVANT)


def _instead(job: str, version: int, stands: Version | None) -> str:
    if stands is None:
        return f"`atoll merges {job}` lists all merges."
    if 1 <= version <= stands:
        return f"It is older than the merges that are kept; the tape has it: GET /v1/jobs/{job}/tape."
    return f"The fragment is at version {stands}."
