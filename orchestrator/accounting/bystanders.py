"""Injected faults, and the longest gap of any bystander: the measure of "an island's death never stops another".

A *bystander* is an island while it trains undisturbed: connected, not stopped by chaos, and neither just before. Its
longest time between two steps is what a fault may not lengthen. Unlike the report's survivors, never harmed in the whole
job, every island is a bystander most of the time, so the figure exists however many faults follow one another.
"""

from __future__ import annotations

from typing import Any

from orchestrator.core import events as e
from orchestrator.core.vocabulary import Duration, Instant, IslandId

STOP, CONTINUE = "stop", "continue"
SETTLE_S: Duration = 2.0
"""For so long after a disturbance an island's reports do not count, nor does the next one: one of them holds the
disturbance, and reports that were under way before it come first."""


class Bystanders:
    """The fold. One entry is kept for each fault, so memory grows with what chaos does, not with the job."""

    _faults: list[dict[str, float | str]]
    _disconnected: set[IslandId]
    _disturbed_until: dict[IslandId, Instant]
    _longest: tuple[Duration, Instant, IslandId] | None

    def __init__(self) -> None:
        self._faults = []
        self._disconnected = set()
        self._disturbed_until = {}
        self._longest = None

    def apply(self, event: e.Event) -> None:
        match event:
            case e.FaultInjected():
                self._injected(event)
            case e.IslandPlaced():  # another process: nothing of the last one's disturbance is in its steps
                self._disturbed_until.pop(event.island, None)
                self._disconnected.discard(event.island)
            case e.ConnectionLost():
                self._disconnected.add(event.island)
            case e.ConnectionRestored():
                self._disconnected.discard(event.island)
                self._disturb(event.island, event.at)
            case e.ProgressReported():
                self._progressed(event)

    def summary(self) -> dict[str, Any]:
        """``bystander_gap`` is None until a bystander has reported."""
        gap, at, island = self._longest or (None, None, None)
        longest = None if gap is None else {"seconds": gap, "at": at, "island": island}
        return {"bystander_gap_max_s": gap, "bystander_gap": longest, "faults": list(self._faults)}

    def _injected(self, event: e.FaultInjected) -> None:
        if event.kind == CONTINUE:  # the end of a fault, not another one
            self._disturbed_until[event.island] = event.at
            return
        if event.kind == STOP:
            self._disturb(event.island, event.at + event.duration)
        names = ("at", "kind", "island", "duration", "bytes_per_second", "payloads", "caller")
        self._faults.append({name: getattr(event, name) for name in names})

    def _disturb(self, island: IslandId, until: Instant) -> None:
        self._disturbed_until[island] = max(until, self._disturbed_until.get(island, until))

    def _progressed(self, event: e.ProgressReported) -> None:
        until = self._disturbed_until.get(event.island)
        if until is not None:
            if event.at >= until + SETTLE_S:
                del self._disturbed_until[event.island]
        elif event.island not in self._disconnected and (
            self._longest is None or event.gap_max_seconds > self._longest[0]
        ):
            self._longest = (event.gap_max_seconds, event.at, event.island)
