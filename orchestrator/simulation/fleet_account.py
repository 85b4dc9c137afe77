"""An account of a fleet's time, batch by batch: its shares by cause, and their standard error.

Responsible for: shares that add up, and the standard error by the method of batch means. Refuses to know what happened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from orchestrator.core.vocabulary import Duration
from orchestrator.simulation.fleet import Badput, Cause


class FleetAccount:
    """Batches of one length each. ``None`` among the causes stands for productive time."""

    def __init__(self) -> None:
        self._spent: list[Mapping[Cause | None, float]] = []
        self._up: list[Duration] = []
        self._seconds: list[Duration] = []

    def add(self, spent: Mapping[Cause | None, float], up: Duration, seconds: Duration) -> None:
        """A batch of ``seconds``: slice-seconds by cause, and how long somebody trained."""
        self._spent.append(spent)
        self._up.append(up)
        self._seconds.append(seconds)

    @property
    def batch_count(self) -> int:
        return len(self._spent)

    @property
    def duration(self) -> Duration:
        return math.fsum(self._seconds)

    @property
    def uptime(self) -> float:
        return math.fsum(self._up) / self.duration if self._seconds else math.nan

    @property
    def goodput(self) -> float:
        return self._of(None) / self._total if self._spent else math.nan

    @property
    def batches(self) -> tuple[float, ...]:
        """Goodput of each batch. One in which no capacity was there counts as 0."""
        return tuple((spent[None] / total if (total := math.fsum(spent.values())) else 0.0) for spent in self._spent)

    @property
    def stderr(self) -> float:
        """Standard error of the mean of equal batches, s/√n. NaN with fewer than two."""
        means = self.batches
        if len(means) < 2:
            return math.nan
        middle = math.fsum(means) / len(means)
        return math.sqrt(math.fsum((x - middle) ** 2 for x in means) / (len(means) - 1) / len(means))

    def badput(self, chips_per_slice: int) -> tuple[Badput, ...]:
        """Every cause, also those that cost nothing."""
        return tuple(
            Badput(cause, self._of(cause) * chips_per_slice, self._of(cause) / self._total if self._spent else math.nan)
            for cause in Cause
        )

    @property
    def _total(self) -> float:
        return math.fsum(value for spent in self._spent for value in spent.values())

    def _of(self, cause: Cause | None) -> float:
        return math.fsum(spent.get(cause, 0.0) for spent in self._spent)
