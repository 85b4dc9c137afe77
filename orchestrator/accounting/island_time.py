"""One island's time, put into classes so that they always add up to the time it was wanted.

Waiting states (placing, starting, suspect, …) are measured by the clock of the events. Within training, the island's own
``stepping_seconds`` say how much of the time it stepped, and its evaluations how long it measured Θ instead; the rest of its
time in training it stalled. What an island that died in training had not yet reported is counted as stepping in vain.

Refuses to know: tokens. What became of the stepping time (productive, discarded, in flight) is ``goodput``'s to split.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.accounting.lifecycle import ABSENT, FLUSHED, GONE, KEPT_AWAY
from orchestrator.core.events import EvaluationCompleted
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import NO_INCARNATION, Duration, Incarnation, Instant, IslandState

_TRAINING, _SUSPECT = IslandState.TRAINING.value, IslandState.SUSPECT.value
_DRAINING, _CORDONED = IslandState.DRAINING.value, IslandState.CORDONED.value
_WAITS = {
    IslandState.PLACING.value: "placing",
    IslandState.STARTING.value: "compiling",
    IslandState.CATCHING_UP.value: "catching up",
}
EVALUATING = "evaluating"
NOT_STEPPING = "alive, not stepping"
ENDING = "waiting for the job to end"
DRAINING = "draining"
AWAY = "away, waiting to be placed"
HELD = "away, its node group is cordoned"
SILENT = "no connection"
DIED = "lost with the island"

FREEZE_RATIO, FREEZE_MIN_S = 4.0, 1.0
"""A gap between steps this many times the median, and this long, was no step: the process was stopped."""

Key = tuple[str, str]
"""A class of goodput (``accounting.goodput``) and the cause within it."""


@dataclass(slots=True)
class Closed:
    """Time split as far as this file can: ``stepping`` is still to be split by what became of its tokens."""

    stepping: Duration = 0.0
    waits: dict[Key, Duration] = field(default_factory=dict)

    def add(self, key: Key, seconds: Duration) -> None:
        if seconds > 0.0:
            self.waits[key] = self.waits.get(key, 0.0) + seconds


@dataclass(slots=True)
class IslandTime:
    """The clock of one island. Feed it every change of state and every report, then ask for ``closed(at)``."""

    state: str = ABSENT
    since: Instant = 0.0
    incarnation: Incarnation = NO_INCARNATION
    past: Closed = field(default_factory=Closed)
    training: Duration = 0.0
    suspect: Duration = 0.0
    stepping: Duration = 0.0
    evaluating: Duration = 0.0
    measured_version: int = -1
    reported_stepping: Duration = 0.0
    reported_steps: int = 0
    heard_at: Instant = 0.0
    trained_until: Instant = 0.0

    def change(self, at: Instant, after: str, incarnation: Incarnation) -> None:
        """The island is in ``after`` from now on."""
        self._charge(self.past, at)
        if self.state == _TRAINING:
            self.training += at - self.since
            self.trained_until = at
        elif self.state == _SUSPECT:
            self.suspect += at - self.since
        if after == _TRAINING and not self.training:
            self.heard_at = at
        if after in GONE and self.state not in GONE:
            self._settle(self.past, self.training, self.suspect, died=self.state not in (FLUSHED, _DRAINING))
            self.training = self.suspect = self.stepping = self.evaluating = self.reported_stepping = 0.0
            self.reported_steps = 0
        self.state, self.since, self.incarnation = after, at, incarnation

    def report(self, at: Instant, incarnation: Incarnation, report: Progress) -> None:
        """Take over how long the island says it has stepped, but for the part in which it was frozen."""
        if incarnation != self.incarnation or self.state in GONE:
            return
        fresh = report.stepping_seconds - self.reported_stepping
        if fresh <= 0.0:
            return
        expected = (report.steps_total - self.reported_steps) * report.step_seconds_median
        excess = min(report.gap_max_seconds - report.step_seconds_median, fresh - expected)
        is_frozen = report.gap_max_seconds > max(FREEZE_MIN_S, FREEZE_RATIO * report.step_seconds_median)
        self.stepping += fresh - (max(0.0, excess) if is_frozen else 0.0)
        self.reported_stepping, self.reported_steps = report.stepping_seconds, report.steps_total
        self.heard_at = at

    def measured(self, event: EvaluationCompleted) -> None:
        """The island measured Θ between two steps. One that steps no more waited anyhow; a repeated event counts once."""
        is_news = event.global_version > self.measured_version
        if self.state == _TRAINING and event.incarnation == self.incarnation and is_news:
            self.evaluating += event.seconds
            self.measured_version = event.global_version

    def closed(self, at: Instant) -> Closed:
        """All time until ``at``, without changing anything."""
        total = Closed(self.past.stepping, dict(self.past.waits))
        self._charge(total, at)
        open_time = at - self.since
        training = self.training + (open_time if self.state == _TRAINING else 0.0)
        suspect = self.suspect + (open_time if self.state == _SUSPECT else 0.0)
        self._settle(total, training, suspect, died=False)
        return total

    def _charge(self, into: Closed, at: Instant) -> None:
        """Book the open span, if its class follows from the state alone."""
        seconds = at - self.since
        if self.state in _WAITS:
            kind = "starting" if self.incarnation <= 1 else "recovering"
            into.add((kind, _WAITS[self.state]), seconds)
        elif self.state == FLUSHED:
            into.add(("stalled", ENDING), seconds)
        elif self.state == _DRAINING:
            into.add(("stalled", DRAINING), seconds)
        elif self.state in GONE - KEPT_AWAY:
            into.add(("down", HELD if self.state == _CORDONED else AWAY), seconds)

    def _settle(self, into: Closed, training: Duration, suspect: Duration, *, died: bool) -> None:
        """Book the incarnation's time in training and under suspicion: what it stepped, and the rest."""
        stepping = min(self.stepping, training + suspect)
        idle = max(0.0, training - stepping)
        unreported = min(idle, max(0.0, self.trained_until - self.heard_at)) if died else 0.0
        into.stepping += stepping
        into.add(("discarded", DIED), unreported)
        evaluating = min(self.evaluating, idle - unreported)
        into.add(("stalled", EVALUATING), evaluating)
        into.add(("stalled", NOT_STEPPING), idle - unreported - evaluating)
        into.add(("down", SILENT), suspect - max(0.0, stepping - training))
