"""Recovery times of islands, by part: a recovery time is published with its parts or not at all.

    killed_at ──detect──▶ lost ──place──▶ placed ──start──▶ ready ──connect + transfer──▶ caught up ──first_merge──▶ merged

``killed_at`` is the operator's command, or, without one, the island's last report; for an island that an operator kept
away, it is the command to re-add it. ``place`` holds the back-off and every
attempt that failed on the way; ``connect`` is the wait for a donor and for it to answer, ``transfer`` the moving of bytes.
A recovery is complete when a merge includes work of the new incarnation. Until then it keeps the longest gap between two
steps of islands that were there all the time, which is what the loss of one island costs the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.accounting.island_time import ABSENT, GONE, KEPT_AWAY, Change
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import CaughtUp, Progress, Ready
from orchestrator.core.vocabulary import (
    Duration,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    PayloadId,
    Version,
)

PARTS = ("detect", "place", "start", "connect", "transfer", "first_merge")


@dataclass(slots=True)
class Recovery:
    """One absence. ``incarnation`` is the latest attempt to come back."""

    island: IslandId
    killed_at: Instant
    lost_at: Instant
    incarnation: Incarnation
    attempts: int = 0
    placed_at: Instant | None = None
    ready_at: Instant | None = None
    caught_up_at: Instant | None = None
    transfer: Duration = 0.0
    merged_at: Instant | None = None
    others_gap_max: Duration | None = None

    def parts(self) -> dict[str, Duration]:
        """The parts that are over."""
        parts = {"detect": self.lost_at - self.killed_at}
        if self.placed_at is not None:
            parts["place"] = self.placed_at - self.lost_at
        if self.placed_at is not None and self.ready_at is not None:
            parts["start"] = self.ready_at - self.placed_at
        if self.ready_at is not None and self.caught_up_at is not None:
            catch_up_seconds = self.caught_up_at - self.ready_at
            parts["transfer"] = min(self.transfer, catch_up_seconds)
            parts["connect"] = catch_up_seconds - parts["transfer"]
        if self.caught_up_at is not None and self.merged_at is not None:
            parts["first_merge"] = self.merged_at - self.caught_up_at
        return {name: parts[name] for name in PARTS if name in parts}

    def summary(self) -> dict[str, Any]:
        complete = self.merged_at is not None
        return {
            "island": self.island,
            "incarnation": self.incarnation,
            "attempts": self.attempts,
            "killed_at": self.killed_at,
            "complete": complete,
            "parts": self.parts(),
            "total": self.merged_at - self.killed_at if self.merged_at is not None else None,
            "others_gap_max_s": self.others_gap_max,
        }


class Recoveries:
    """All absences of a job, in the order they were noticed; one that is open has its place in ``all`` by its island."""

    all: list[Recovery]
    _open: dict[IslandId, int]
    _killed_at: dict[IslandId, Instant]
    _heard_at: dict[IslandId, Instant]
    _payloads: dict[PayloadId, IslandId]
    _merging: dict[tuple[FragmentId, Version], list[IslandId]]

    def __init__(self) -> None:
        self.all = []
        self._open = {}
        self._killed_at = {}
        self._heard_at = {}
        self._payloads = {}
        self._merging = {}

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...], changes: list[Change]) -> None:
        if isinstance(event, e.IslandReported) and isinstance(event.report, Progress):
            self._heard_at[event.island] = event.at
        elif isinstance(event, e.MergeCompleted):
            self._merged(event)
        for effect in effects:
            if isinstance(effect, f.KillIsland):
                self._killed_at.setdefault(effect.island, event.at)
        for change in changes:
            self._changed(change)
        if self._open:
            self._advance(event)
            self._follow(effects)

    def _changed(self, change: Change) -> None:
        if change.before == ABSENT or (change.before in GONE and change.incarnation == 1):
            return  # it comes for the first time
        if change.after in GONE and change.before not in GONE:
            if change.after in KEPT_AWAY:
                self._open.pop(change.island, None)
            elif change.island not in self._open:
                killed_at = self._killed_at.get(change.island, self._heard_at.get(change.island, change.at))
                self._begin(Recovery(change.island, killed_at, change.at, change.incarnation))
            self._killed_at.pop(change.island, None)
        elif change.before in GONE:
            if change.island not in self._open:  # it was kept away until now
                self._begin(Recovery(change.island, change.at, change.at, change.incarnation))
            recovery = self.all[self._open[change.island]]
            recovery.incarnation, recovery.attempts = change.incarnation, recovery.attempts + 1
            recovery.placed_at = recovery.ready_at = recovery.caught_up_at = None

    def _begin(self, recovery: Recovery) -> None:
        self._open[recovery.island] = len(self.all)
        self.all.append(recovery)

    def _advance(self, event: e.Event) -> None:
        if not isinstance(event, (e.IslandPlaced, e.IslandReported)):
            return
        if (
            isinstance(event, e.IslandReported)
            and isinstance(event.report, Progress)
            and event.island not in self._open
        ):
            for place in self._open.values():
                longest = self.all[place].others_gap_max or 0.0
                self.all[place].others_gap_max = max(longest, event.report.gap_max_seconds)
        recovery = self._of(event.island)
        if recovery is None or recovery.incarnation != event.incarnation:
            return
        if isinstance(event, e.IslandPlaced):
            recovery.placed_at = event.at
        elif isinstance(event.report, Ready):
            recovery.ready_at = event.at
        elif isinstance(event.report, CaughtUp):
            recovery.caught_up_at, recovery.transfer = event.at, event.report.transfer_seconds

    def _follow(self, effects: tuple[f.Effect, ...]) -> None:
        """Remember which payloads, and then which merges, hold work of an island that is coming back."""
        for effect in effects:
            if isinstance(effect, f.AdmitContribution):
                c = effect.contribution
                if (recovery := self._of(c.island)) is not None and recovery.incarnation == c.incarnation:
                    self._payloads[c.payload] = c.island
            elif isinstance(effect, f.MergeFragment):
                back = [self._payloads[item.payload] for item in effect.inputs if item.payload in self._payloads]
                if back:
                    self._merging[effect.fragment, effect.version] = back
            elif isinstance(effect, f.ReleasePayload):
                self._payloads.pop(effect.payload, None)

    def _merged(self, event: e.MergeCompleted) -> None:
        for island in self._merging.pop((event.fragment, event.version), ()):
            recovery = self._of(island)
            if recovery is not None and recovery.caught_up_at is not None:
                recovery.merged_at = event.at
                del self._open[island]

    def _of(self, island: IslandId) -> Recovery | None:
        """The island's open one."""
        place = self._open.get(island)
        return None if place is None else self.all[place]
