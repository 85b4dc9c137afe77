"""What islands did not read of their text as it lies in its files: counts of all their lives, by island.

Each life of an island reports its own totals (``core.vocabulary.DataFlaws``) of what it has read and drawn. It reads some
text again that the life before had read: what is amiss there counts in both. A fold over events. Refuses to know what text
there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from orchestrator.core import events as e
from orchestrator.core.vocabulary import NO_FLAWS, DataFlaws, Incarnation, IslandId

KINDS = tuple(field.name for field in fields(DataFlaws))


class DataFlawCounts:
    """The fold."""

    _now: dict[IslandId, tuple[Incarnation, DataFlaws]]
    _before: dict[IslandId, DataFlaws]

    def __init__(self) -> None:
        self._now = {}
        self._before = {}

    def apply(self, event: e.Event) -> None:
        if not isinstance(event, e.ProgressReported):
            return
        incarnation, flaws = self._now.get(event.island, (event.incarnation, NO_FLAWS))
        if event.incarnation < incarnation:
            return  # a life that another has followed
        if event.incarnation > incarnation:
            self._before[event.island], flaws = self._sum(event.island), NO_FLAWS
        self._now[event.island] = (event.incarnation, _each(max, flaws, event.flaws))

    def summary(self) -> dict[str, Any]:
        """Of each island with flaws its counts, and of all islands together, as plain data; ``remark`` says it in words."""
        islands = {island: _plain(self._sum(island)) for island in sorted(self._now) if self._sum(island) != NO_FLAWS}
        total = {kind: sum(counts[kind] for counts in islands.values()) for kind in KINDS}
        return {"total": total, "islands": islands, "remark": _remark(total)}

    def _sum(self, island: IslandId) -> DataFlaws:
        return _each(lambda one, other: one + other, self._before.get(island, NO_FLAWS), self._now[island][1])


def _each(of_two: Callable[[int, int], int], one: DataFlaws, other: DataFlaws) -> DataFlaws:
    return DataFlaws(*(of_two(getattr(one, kind), getattr(other, kind)) for kind in KINDS))


def _plain(flaws: DataFlaws) -> dict[str, int]:
    return {kind: getattr(flaws, kind) for kind in KINDS}


def _remark(total: Mapping[str, int]) -> str:
    phrases = (
        ("unreadable_records", "records or pieces of files could not be read and were passed over"),
        ("cut_pieces", "pieces of files were cut for their size"),
        ("repeated_sequences", "sequences were drawn a second time in the same epoch"),
        ("omitted_sequences", "sequences were passed over in their epoch"),
    )
    remark = ", ".join(f"{total[kind]:,} {what}" for kind, what in phrases if total[kind])
    if total["repeated_sequences"] or total["omitted_sequences"]:
        remark += "; `atoll data index` counts the text, so that each comes once"
    return remark
