"""The traffic of a job's lines, in bytes as they were carried: one counter for each island, written by its parameter links.

    up    a contribution's payload, as it arrived
    down  by kind: *update* (a publication as one update or a chain of them), *values* (a publication as whole float32
          values), *state* (every fragment's values, for an island that takes its state from the synchroniser)

Busy seconds are those in which something was under way in that direction, so their rate is the line's utilisation by
time, and bytes over busy seconds its speed. Counted since the synchroniser's own start: they begin at zero with every
life of it, as Prometheus' counters may. What is in a line's way is said while it is; of a region's lines, the first's.
Refuses to know how bytes travel, and what peers hand each other.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from orchestrator.core.vocabulary import IslandId, IslandState
from orchestrator.status import CoreStatus, Line, LinesStatus

Kind = Literal["update", "values", "state"]
KINDS: tuple[Kind, ...] = ("update", "values", "state")


class LineCounter:
    """The counts of one island, over all its incarnations. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line = _nothing()

    def received(self, byte_count: int, seconds: float) -> None:
        """A contribution arrived, ``seconds`` after it was first waited for."""
        with self._lock:
            self._line.up_payloads += 1
            self._line.up_bytes += byte_count
            self._line.up_busy_seconds += seconds

    def sent(self, kind: Kind, byte_count: int) -> None:
        """A fragment, or with ``state`` all of them, was put on its way; once more for each time that it was."""
        with self._lock:
            self._line.down_payloads[kind] += 1
            self._line.down_bytes[kind] += byte_count

    def delivered(self, seconds: float) -> None:
        """Count payloads that were sent together and have arrived, or were given up, after ``seconds``."""
        with self._lock:
            self._line.down_busy_seconds += seconds

    def waits(self, fragments: int, byte_count: int) -> None:
        """Set what is published for the island at present and has not arrived."""
        with self._lock:
            self._line.queued_fragments, self._line.queued_bytes = fragments, byte_count

    def hindered(self, trouble: str | None) -> None:
        """Set what hinders payloads at present, in either direction, and what to do about it; None if nothing does."""
        with self._lock:
            self._line.trouble = trouble

    def status(self) -> Line:
        """Return a copy that does not change."""
        with self._lock:
            return _sum((self._line,))


class JobLines:
    """The counters of a job's islands. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[IslandId, LineCounter] = {}

    def of(self, island: IslandId) -> LineCounter:
        """The island's counter; all its incarnations have the same."""
        with self._lock:
            return self._counters.setdefault(island, LineCounter())

    def statuses(self) -> dict[str, Line]:
        """Return the lines of the islands that ever had one, by island."""
        with self._lock:
            counters = sorted(self._counters.items())
        return {island: counter.status() for island, counter in counters}


def pause_reason(lines: Mapping[str, Line], training: Collection[str], quorum: int) -> str | None:
    """Why no fragment can merge, where the lines of so many islands that train are hindered; None if enough are not."""
    troubles = {island: trouble for island in training if island in lines and (trouble := lines[island].trouble)}
    if not troubles or len(training) - len(troubles) >= quorum:
        return None
    island, trouble = min(troubles.items())
    return f"merging waits for the parameter channel of {', '.join(sorted(troubles))}. {island}: {trouble}"


def trouble_of(view: CoreStatus, lines: LinesStatus) -> str | None:
    """Return why lines keep a running job from merging, or None."""
    if view.phase != "running":
        return None
    training = [island.island for island in view.islands if island.state == IslandState.TRAINING]
    return pause_reason(lines.islands, training, view.quorum)


def by_region(lines: Mapping[str, Line], regions: Mapping[str, str]) -> dict[str, Line]:
    """The sums over each region's islands; ``regions`` is each island's."""
    members: dict[str, list[Line]] = {}
    for island, line in lines.items():
        members.setdefault(regions[island], []).append(line)
    return {region: _sum(own) for region, own in sorted(members.items())}


def _nothing() -> Line:
    return Line(
        up_payloads=0,
        up_bytes=0,
        up_busy_seconds=0.0,
        down_payloads=dict.fromkeys(KINDS, 0),
        down_bytes=dict.fromkeys(KINDS, 0),
        down_busy_seconds=0.0,
        queued_fragments=0,
        queued_bytes=0,
        trouble=None,
    )


def _sum(lines: Iterable[Line]) -> Line:
    total = _nothing()
    for line in lines:
        total.up_payloads += line.up_payloads
        total.up_bytes += line.up_bytes
        total.up_busy_seconds += line.up_busy_seconds
        total.down_busy_seconds += line.down_busy_seconds
        total.queued_fragments += line.queued_fragments
        total.queued_bytes += line.queued_bytes
        total.trouble = total.trouble or line.trouble
        for kind in KINDS:
            total.down_payloads[kind] += line.down_payloads[kind]
            total.down_bytes[kind] += line.down_bytes[kind]
    return total
