"""Where the learning-rate schedule of a job is, as one of its islands reckons: from the last fix, and its clock since.

    schedule step = ⌊T / (M·B·L)⌋ + (clock − clock at the fix)        T tokens trained by M islands of B × L tokens a step

The schedule is laid out over the job's token budget, so it goes by what *all* islands have trained, lost work too. Every
publication says how much that was; until the next one an island takes the job to be as quick as its own clock. The clock
alone would not do: it is the furthest island's, and runs on while others are away, so that a job of which a sixth is
always away would have spent its schedule with a sixth of its budget left; and one that grew would end before its schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.vocabulary import Fix


def schedule_step(fix: Fix, clock: int, tokens_per_schedule_step: int) -> int:
    """In inner steps of every island, at the logical step ``clock``; before any fix it is the clock."""
    return fix.tokens // tokens_per_schedule_step + max(0, clock - fix.step)


def tokens_per_schedule_step(spec: Mapping[str, Any]) -> int:
    """As ``JobSpec.tokens_per_schedule_step``, from plain data."""
    island_count = sum(section["count"] for section in spec["islands"])
    return int(island_count * spec["training"]["batch_size"] * spec["data"]["sequence_length"])
