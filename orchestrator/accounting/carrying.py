"""What of a job's accounts a checkpoint keeps, and what a job that goes on from one begins with; exact integers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Books:
    """What a checkpoint keeps: tokens trained by all, by each incarnation, and in merges that were closed, by fragment."""

    trained: int
    totals: dict[tuple[str, int], int]
    merged: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """The job before its checkpoint, by fragment: ``trained`` = merged + discarded + kept, by the islands that go on."""

    trained: int
    merged: tuple[int, ...]
    discarded: tuple[int, ...]
    kept: tuple[int, ...]
