"""What islands did not read of their text as it lies in its files: counts of all their lives, by island.

Each life of an island reports its own totals (``core.vocabulary.DataFlaws``) of what it has read and drawn. It reads some
text again that the life before had read: what is amiss there counts in both. A fold over events. Refuses to know what text
there is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from orchestrator.core import events as e
from orchestrator.core.vocabulary import NO_FLAWS, DataFlaws, Incarnation, IslandId, SourceFlaws

KINDS = tuple(field.name for field in fields(DataFlaws) if field.name != "sources")


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
        """Of each island with flaws its counts, and of all islands together, as plain data; ``remark`` says it in words.

        ``sources`` are the records that could not be read, by source.
        """
        flaws = {island: self._sum(island) for island in sorted(self._now) if self._sum(island) != NO_FLAWS}
        islands = {island: _plain(one) for island, one in flaws.items()}
        total = {kind: sum(counts[kind] for counts in islands.values()) for kind in KINDS}
        by_source = tuple[SourceFlaws, ...]()
        for one in flaws.values():
            by_source = _each_source(operator.add, by_source, one.sources)
        sources = {
            one.source: {"unreadable_records": one.unreadable_records, "not_utf8_records": one.not_utf8_records}
            for one in by_source
        }
        return {"total": total, "islands": islands, "sources": sources, "remark": _remark(total, by_source)}

    def _sum(self, island: IslandId) -> DataFlaws:
        return _each(operator.add, self._before.get(island, NO_FLAWS), self._now[island][1])


def _each(of_two: Callable[[int, int], int], one: DataFlaws, other: DataFlaws) -> DataFlaws:
    counts = {kind: of_two(getattr(one, kind), getattr(other, kind)) for kind in KINDS}
    return DataFlaws(**counts, sources=_each_source(of_two, one.sources, other.sources))


def _each_source(
    of_two: Callable[[int, int], int], some: Iterable[SourceFlaws], others: Iterable[SourceFlaws]
) -> tuple[SourceFlaws, ...]:
    left, right = ({each.source: each for each in flaws} for flaws in (some, others))
    both = []
    for name in sorted(left.keys() | right.keys()):
        one, other = (flaws.get(name, SourceFlaws(name, 0, 0)) for flaws in (left, right))
        unreadable = of_two(one.unreadable_records, other.unreadable_records)
        both.append(SourceFlaws(name, unreadable, of_two(one.not_utf8_records, other.not_utf8_records)))
    return tuple(both)


def _plain(flaws: DataFlaws) -> dict[str, int]:
    return {kind: getattr(flaws, kind) for kind in KINDS}


def _remark(total: Mapping[str, int], sources: Iterable[SourceFlaws]) -> str:
    phrases = (
        ("unreadable_records", "records or pieces of files could not be read and were passed over"),
        ("cut_pieces", "pieces of files were cut for their size"),
        ("repeated_sequences", "sequences were drawn a second time in the same epoch"),
        ("omitted_sequences", "sequences were passed over in their epoch"),
    )
    counts = [f"{total[kind]:,} {what}" for kind, what in phrases if total[kind]]
    counts += [
        f"of {one.source} {one.not_utf8_records:,} of {one.unreadable_records:,} because they are not UTF-8"
        for one in sources
        if one.not_utf8_records
    ]
    remark = ", ".join(counts)
    if total["repeated_sequences"] or total["omitted_sequences"]:
        remark += "; `atoll data index` counts the text, so that each comes once"
    return remark
