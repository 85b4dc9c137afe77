"""Where in its learning-rate schedule a job is, as one of its islands reckons: from the last fix, and its own steps since.

The schedule is laid out over the job's token budget, so it goes by what *all* islands have trained, lost work too. Every
publication says how much that was; until the next one an island takes the others to be as quick as itself. The logical
clock would not do: it is the furthest island's, and runs on while others are away, so that a job of which a sixth is
always away would have spent its schedule with a sixth of its budget left; and one that grew would end before its schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tokens_per_step(spec: Mapping[str, Any]) -> int:
    """Tokens of one inner step of every island that the job begins with, from its specification as plain data."""
    island_count = sum(section["count"] for section in spec["islands"])
    return int(island_count * spec["training"]["batch_size"] * spec["data"]["sequence_length"])


class Reckoning:
    """``step`` is where the schedule is, in inner steps of every island; until the first fix, by the logical clock."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._fix = self._tokens_told = self._own = 0

    @property
    def step(self) -> int:
        return self._fix + self._own

    def begin(self, logical_step: int) -> None:
        """An island begins, or goes on, from a state of this step."""
        self._fix, self._tokens_told, self._own = logical_step, 0, 0

    def hear(self, tokens_trained: int, steps_since: int) -> None:
        """The job had trained so many tokens, so many steps of the clock ago. What is no news changes nothing."""
        if tokens_trained > self._tokens_told:
            self._fix, self._tokens_told = tokens_trained // self._tokens_per_step, tokens_trained
            self._own = steps_since

    def count(self) -> None:
        """The island took a step."""
        self._own += 1
