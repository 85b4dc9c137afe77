"""The facts about one island that a diagnosis needs, taken from the records of a tape."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from orchestrator.accounting.island_time import FREEZE_MIN_S, FREEZE_RATIO
from orchestrator.accounting.series import Travels
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, Overdue, Progress, Saved
from orchestrator.core.vocabulary import NO_INCARNATION, Duration, Incarnation, Instant, RefusalReason

RECORDS_SHOWN = 5
LATE_REASONS = RefusalReason.LATE, RefusalReason.STALE_BASE, RefusalReason.ALREADY_MERGED
UNUSABLE_REASONS = RefusalReason.CORRUPT, RefusalReason.WRONG_SHAPE, RefusalReason.NON_FINITE, RefusalReason.EXPLODING


@dataclass(slots=True)
class Silence:
    """A time in which an incarnation did not answer.

    ``ended_at`` is when it answered again, ``heard_at`` when the first report came after that; None until then.
    """

    incarnation: Incarnation
    since: Instant
    ended_at: Instant | None = None
    heard_at: Instant | None = None

    def was_standstill(self, at: Instant, report: Progress) -> bool:
        """Return whether a report that came at ``at`` shows that no step ended in most of it.

        An island that is only cut off steps on. Reports that were written before a process was stopped arrive first.
        """
        if self.heard_at is None:
            return False
        half_s = ((self.heard_at if self.ended_at is None else self.ended_at) - self.since) / 2.0
        before_s = report.gap_max_seconds - (at - self.heard_at)
        return min(before_s, report.gap_max_seconds - report.step_seconds_median) > half_s


@dataclass(slots=True)
class IslandEvidence:
    """Takes in what concerns one island. ``reached`` are its latest (step, instant) by its reports.

    ``pulls`` is how long its contributions with bytes took, ``deliveries`` how long versions took to reach it, ``arrived``
    and ``adopted`` when the latest of both came, with their records. ``step_count`` is of all incarnations, ``counted`` the
    latest of them with its own steps and seconds in them. ``held_s`` is how long its loop waited for checkpoints, ``gaps_s``
    how long it waited between steps at most, by the longest gap of each report, and ``frozen_s`` how much longer than usual
    the steps took in which it stood still, in all and at the longest. ``slowest`` are the reports of the longest mean steps.
    ``silence`` is its latest, until a report shows that it stood still.
    """

    step_count: int = 0
    counted: tuple[Incarnation, int, Duration] = (NO_INCARNATION, 0, 0.0)
    held_s: Duration = 0.0
    gaps_s: Duration = 0.0
    frozen_s: Duration = 0.0
    frozen_longest_s: Duration = 0.0
    silence: Silence | None = None
    pulls: Travels = field(default_factory=Travels)
    deliveries: Travels = field(default_factory=Travels)
    arrived: deque[tuple[Instant, int]] = field(default_factory=lambda: deque(maxlen=512))
    adopted: deque[tuple[Instant, int]] = field(default_factory=lambda: deque(maxlen=512))
    slowest: list[tuple[Duration, int]] = field(default_factory=list)
    reached: deque[tuple[int, Instant]] = field(default_factory=lambda: deque(maxlen=512))
    overdue: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    late: deque[tuple[Instant, int]] = field(default_factory=lambda: deque(maxlen=512))
    """When contributions of it were refused as late, with the records."""
    unusable: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    refusals: Counter[RefusalReason] = field(default_factory=Counter)
    stops: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    """Records of faults that stopped its process, and of reports that it stood still."""
    states: dict[str, deque[int]] = field(default_factory=dict)
    """The latest records with which it entered each state."""
    progress: int = 0
    """The record of its latest report of progress, and below that of its first start."""
    first_start: int = 0

    def reported(self, number: int, event: e.IslandReported, completed_at: Instant | None) -> None:
        """Take in a report. ``completed_at`` is when the merge of the version was complete that it adopted."""
        silence = self._silence_of(event.incarnation)
        if silence is not None and silence.heard_at is None:
            silence.heard_at = event.at
        match event.report:
            case Progress() as report:
                self._progressed(number, event.at, event.incarnation, report)
            case Adopted():
                self.adopted.append((event.at, number))
                if completed_at is not None:
                    self.deliveries.add(event.at - completed_at)
            case Saved() as report:
                self.held_s += report.held_seconds
            case Overdue():
                self.overdue.append(number)

    def connected(self, event: e.ConnectionLost | e.ConnectionRestored) -> None:
        """Take in that it does not answer any more, or again."""
        silence = self._silence_of(event.incarnation)
        if isinstance(event, e.ConnectionRestored):
            if silence is not None and silence.ended_at is None:
                silence.ended_at, silence.heard_at = event.at, None
        elif not event.dead:
            self.silence = Silence(event.incarnation, event.at)
        elif silence is not None:
            self.silence = None

    def _silence_of(self, incarnation: Incarnation) -> Silence | None:
        return self.silence if self.silence is not None and self.silence.incarnation == incarnation else None

    def _progressed(self, number: int, at: Instant, incarnation: Incarnation, report: Progress) -> None:
        _, steps, stepped_s = self.counted if self.counted[0] == incarnation else (incarnation, 0, 0.0)
        more, took = max(0, report.steps_total - steps), max(0.0, report.stepping_seconds - stepped_s)
        excess = max(0.0, report.gap_max_seconds - report.step_seconds_median)
        self.reached.append((report.step, at))
        self.progress = number
        self.step_count += more
        self.gaps_s += more * excess
        self.counted = incarnation, report.steps_total, report.stepping_seconds
        if more:
            self.slowest = sorted([*self.slowest, (took / more, number)])[-RECORDS_SHOWN:]
        is_long = report.gap_max_seconds > max(FREEZE_MIN_S, FREEZE_RATIO * report.step_seconds_median)
        in_steps_s = took - more * report.step_seconds_median  # and not between two
        is_frozen = is_long and in_steps_s > excess / 2.0
        silence = self._silence_of(incarnation)
        was_standstill = more > 0 and silence is not None and silence.was_standstill(at, report)
        if is_frozen or was_standstill:
            self.frozen_s += excess
            self.frozen_longest_s = max(self.frozen_longest_s, excess)
            self.stops.append(number)
        if was_standstill:
            self.silence = None

    def late_records(self) -> tuple[int, ...]:
        """Return the latest records at which a contribution was refused as late."""
        return tuple(number for _, number in self.late)[-RECORDS_SHOWN:]

    def refused(self, number: int, at: Instant, reason: RefusalReason) -> None:
        self.refusals[reason] += 1
        if reason in LATE_REASONS:
            self.late.append((at, number))
        elif reason in UNUSABLE_REASONS:
            self.unusable.append(number)
