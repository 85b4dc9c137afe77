"""A figure against a limit: ``survivor_gap_max_s < 1``, ``goodput_ratio >= 85 %``, ``recovery_s.total < 1min``.

Responsible for reading such a sentence and for whether it holds. Refuses to know where figures come from. A figure without
a value holds nothing: what was not measured was not shown.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigurationError
from orchestrator.simulation.distributions import duration
from orchestrator.system.plain import brief

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SENTENCE = re.compile(r"([a-z_][\w.-]*+)\s*+(<=|>=|<|>)\s*+(.+)", re.IGNORECASE | re.ASCII)
TEXT_CHARACTERS_MAX = 200
_FORM = "Write a figure, one of < <= > >=, and a limit: survivor_gap_max_s < 1, goodput_ratio > 85 %."


@dataclass(frozen=True, slots=True)
class Comparison:
    """``figure`` is a name, or names with dots into what a figure holds. ``text`` is what was written."""

    figure: str
    sign: str
    limit: float
    text: str

    def holds(self, value: float | None) -> bool:
        return value is not None and _COMPARE[self.sign](value, self.limit)

    def value_in(self, figures: Mapping[str, Any]) -> float | None:
        """The figure's value, or None where it has none."""
        value: Any = figures
        for name in self.figure.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if number else None

    @property
    def root(self) -> str:
        return self.figure.partition(".")[0]


def parse(text: Any) -> Comparison:
    """The comparison that ``text`` says. Raises ConfigurationError with the remedy."""
    short = isinstance(text, str) and len(text) <= TEXT_CHARACTERS_MAX
    matched = _SENTENCE.fullmatch(text.strip()) if short else None
    if matched is None:
        raise ConfigurationError(detail=f"{brief(text)} is no comparison. {_FORM}")
    figure, sign, limit = matched.groups()
    return Comparison(figure, sign, _limit(limit), " ".join(text.split()))


def _limit(written: str) -> float:
    """A finite number, a percentage as a ratio, or a duration in seconds."""
    try:
        number = float(written[:-1]) / 100.0 if written.endswith("%") else float(written)
        if math.isfinite(number):
            return number
    except ValueError:
        pass
    try:
        return duration(written)
    except ConfigurationError as error:
        raise ConfigurationError(detail=f"{brief(written)} is no limit. {_FORM}") from error
