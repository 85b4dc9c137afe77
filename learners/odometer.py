"""How far an island has come, and how fast: counted step by step, told as ``Progress`` now and then.

Responsible for the longest gap between two steps being told once, with the report that follows it. Refuses to know when
to report (``loop``), and what the steps were for. Times are ``time.monotonic``'s, in seconds.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from orchestrator.core.messages import Progress

STEP_TIMES_KEPT = 64


class Odometer:
    """``steps_total`` and ``tokens_total`` are of all steps; ``read_at`` is when the last report was made."""

    def __init__(self, now: float) -> None:
        self.steps_total = self.tokens_total = 0
        self.read_at = now
        self._steps_reported = 0
        self._stepping_seconds = self._gap_max_seconds = 0.0
        self._step_seconds: deque[float] = deque(maxlen=STEP_TIMES_KEPT)
        self._last_step_end: float | None = None
        self._loss = float("nan")

    def count(self, began: float, ended: float, token_count: int, loss: float) -> None:
        """A step was taken."""
        self.steps_total += 1
        self.tokens_total += token_count
        self._loss = loss
        self._stepping_seconds += ended - began
        self._step_seconds.append(ended - began)
        if self._last_step_end is not None:
            self._gap_max_seconds = max(self._gap_max_seconds, ended - self._last_step_end)
        self._last_step_end = ended

    def read(self, step: int, now: float) -> Progress | None:
        """How far training is, at logical step ``step``; None if that was said already."""
        if self.steps_total == self._steps_reported:
            return None
        told = Progress(
            step=step,
            steps_total=self.steps_total,
            tokens_total=self.tokens_total,
            stepping_seconds=self._stepping_seconds,
            step_seconds_median=median(self._step_seconds),
            gap_max_seconds=self._gap_max_seconds,
            loss=self._loss,
        )
        self._steps_reported, self._gap_max_seconds, self.read_at = self.steps_total, 0.0, now
        return told
