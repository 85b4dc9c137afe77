"""The goals of figures: judged in one place, shown beside the figure, and once more at the end with the exit code.

A figure that is not a number has missed its goal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal. ``figure`` names it with its part. Its text is what is printed beside the figure."""

    figure: str
    value: float
    bound: float
    met: bool

    def __str__(self) -> str:
        return f"goal {_number(self.bound)}: {'met' if self.met else 'MISSED'}"


def at_least(figure: str, value: float, bound: float) -> Goal:
    return Goal(figure, value, bound, value >= bound)


def at_most(figure: str, value: float, bound: float) -> Goal:
    return Goal(figure, value, bound, value <= bound)


def told(goals: Sequence[Goal]) -> str:
    """Return the last line: which goals were missed, and by how much."""
    missed = [f"{goal.figure} {_number(goal.value)} (goal {_number(goal.bound)})" for goal in goals if not goal.met]
    return f"MISSED     {len(missed)} of {len(goals)} goals: {'; '.join(missed)}" if missed else _all_met(len(goals))


def exit_code(goals: Sequence[Goal]) -> int:
    return 0 if all(goal.met for goal in goals) else 1


def _all_met(count: int) -> str:
    return f"met        all {count} goals" if count else "met        nothing that was asked for has a goal"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
