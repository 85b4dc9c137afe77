"""The position of an island in the learning-rate schedule of its job: from the last anchor, and its own clock since.

    schedule step = ⌊T / (M·B·L)⌋ + (clock − clock at the anchor)     T tokens trained by M islands of B × L tokens a step

The schedule is laid out over the job's token budget, so it goes by what *all* islands have trained, lost work too. Every
publication says how much that was; until the next one an island takes the job to be as quick as its own clock. The clock
alone would not do: it is the furthest island's, and runs on while others are away, so that a job of which a sixth is
always away would have spent its schedule with a sixth of its budget left; and one that grew would end before its schedule.
"""

from __future__ import annotations

from orchestrator.core.vocabulary import ScheduleAnchor


def schedule_step(anchor: ScheduleAnchor, clock: int, tokens_per_schedule_step: int) -> int:
    """Count in inner steps of every island, at the logical step ``clock``; before any anchor it is the clock."""
    return anchor.tokens // tokens_per_schedule_step + max(0, clock - anchor.step)
