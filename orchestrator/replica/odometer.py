"""The odometer of an island: how fast it trains, counted step by step and reported as ``Progress`` now and then.

Responsible for the longest gap between two steps being reported once, with the report that follows it. Refuses to know when
to report, and what the steps were for. It has no clock: durations come from whoever took the step, in seconds.
"""

from __future__ import annotations

from collections import deque

from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import NO_FLAWS, Duration

STEP_TIMES_KEPT = 64


class Odometer:
    """``window`` is over how many of the latest steps the median step time is taken; ``loss`` and ``flaws`` are
    the latest step's.
    """

    def __init__(self, window: int = STEP_TIMES_KEPT) -> None:
        self._stepping_seconds: Duration = 0.0
        self._gap_max_seconds: Duration = 0.0
        self._step_seconds: deque[Duration] = deque(maxlen=window)
        self.loss = float("nan")
        self.flaws = NO_FLAWS
        self._reported_steps = 0

    def count(self, step_seconds: Duration, gap_seconds: Duration) -> None:
        """A step was taken. ``gap_seconds`` lie between its end and that of the step before; 0 for the first."""
        self._stepping_seconds += step_seconds
        self._step_seconds.append(step_seconds)
        self._gap_max_seconds = max(self._gap_max_seconds, gap_seconds)

    def is_news(self, steps_total: int) -> bool:
        """Whether a step was taken since the last report."""
        return steps_total != self._reported_steps

    def report(self, step: int, steps_total: int, tokens_total: int) -> Progress:
        """The progress so far, at the logical step ``step``."""
        progress = Progress(
            step=step,
            steps_total=steps_total,
            tokens_total=tokens_total,
            stepping_seconds=self._stepping_seconds,
            step_seconds_median=_median(self._step_seconds),
            gap_max_seconds=self._gap_max_seconds,
            loss=self.loss,
            flaws=self.flaws,
        )
        self._reported_steps, self._gap_max_seconds = steps_total, 0.0
        return progress


def _median(values: deque[Duration]) -> Duration:
    """The middle value, or the mean of the middle two; 0 of none."""
    if not values:
        return 0.0
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
