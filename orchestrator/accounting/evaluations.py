"""Evaluations as figures: the curve of held-out loss, and what measuring it took, of how much, and where.

Part of ``statistics``, fed by it.
"""

from __future__ import annotations

from typing import Any

from orchestrator.accounting.series import Series
from orchestrator.core.effects import Evaluate
from orchestrator.core.events import EvaluationCompleted, EvaluationFailed
from orchestrator.core.vocabulary import Duration, Instant, SourceLoss


class Evaluations:
    """``curve`` holds (tokens trained, loss, instant) of each: the tokens that were trained when it began, because Θ is
    measured as it was then, and the instant at which the loss was known. The rest, but the sums, is of the last one.

    ``initial`` is the loss of what training began with: of version 0, or of the checkpoint that the job continues.
    """

    curve: Series[tuple[float, float, Instant]]
    initial: float | None
    count: int
    failures: int
    seconds: Duration
    last_seconds: Duration
    last_sequence_count: int
    last_place: str
    last_remark: str
    last_bits_per_byte: float | None
    last_sources: tuple[SourceLoss, ...]
    _begun: tuple[int, int, bool]

    def __init__(self) -> None:
        self.curve = Series()
        self.initial = None
        self._begun = (-1, 0, False)
        self.count = self.failures = self.last_sequence_count = 0
        self.seconds = self.last_seconds = 0.0
        self.last_place = self.last_remark = ""
        self.last_bits_per_byte, self.last_sources = None, ()

    def began(self, effect: Evaluate, tokens: int, *, unmerged: bool) -> None:
        """Θ is to be measured as it is now, when so many tokens are trained; ``unmerged``: as training began with it."""
        self._begun = (effect.global_version, tokens, unmerged)

    def completed(self, event: EvaluationCompleted, tokens: int) -> None:
        """Where the tape does not say when it began, so many tokens are trained by now."""
        version, tokens_before, unmerged = self._begun
        if version == event.global_version:
            tokens = tokens_before
            self.initial = event.loss if unmerged else self.initial
        self.curve.add((float(tokens), event.loss, event.at))
        self.count += 1
        self.seconds += event.seconds
        self.last_seconds, self.last_sequence_count = event.seconds, event.sequence_count
        self.last_place, self.last_remark = event.place, event.remark
        self.last_bits_per_byte, self.last_sources = event.bits_per_byte, event.sources

    def failed(self, event: EvaluationFailed) -> None:
        self.failures += 1
        self.last_remark = event.reason

    def summary(self) -> dict[str, Any]:
        """All but ``count``, ``failures`` and ``seconds`` are of the last one."""
        return {
            "count": self.count,
            "failures": self.failures,
            "seconds": self.seconds,
            "last_seconds": self.last_seconds,
            "sequence_count": self.last_sequence_count,
            "place": self.last_place,
            "remark": self.last_remark,
            "bits_per_byte": self.last_bits_per_byte,
            "sources": [
                {"source": one.source, "loss": one.loss, "bits_per_byte": one.bits_per_byte}
                for one in self.last_sources
            ],
        }
