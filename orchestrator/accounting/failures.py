"""Failures of islands: which node they are put down to, and how long the recovery from them takes.

A node is bad if it fails islands that live elsewhere (``bad_nodes``). The diagnosis of a job names it, and the service
cordons it if the operator lets it. What is no node's fault does not count: deliberate kills, departures, errors of the job's
own code, and attempts to place an island that found no room. Failures of several islands at the same time count once, with
decay (``series.DecayingCounts``): what lies a half-life back counts half.

Recovery times of islands, by part: a recovery time is published with its parts or not at all.

    killed_at ──detect──▶ lost ──place──▶ placed ──start──▶ ready ──connect + transfer──▶ caught up ──first_merge──▶ merged

``killed_at`` is the operator's command, or, without one, the island's last report; for an island that an operator kept
away, it is the command to re-add it. ``place`` holds the back-off and every
attempt that failed on the way; ``connect`` is the wait for a donor and for it to answer, ``transfer`` the moving of bytes.
A recovery is complete when a merge includes work of the new incarnation. Until then it keeps the longest gap between two
steps of islands that were there all the time, which is what the loss of one island costs the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from orchestrator.accounting.island_time import ABSENT, GONE, KEPT_AWAY, Change, Lifecycle
from orchestrator.accounting.series import DecayingCounts
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.faults import Kind as FaultKind
from orchestrator.core.messages import CaughtUp, Drained, Progress, Ready
from orchestrator.core.vocabulary import (
    Duration,
    FailureExtent,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    IslandState,
    PayloadId,
    Version,
)

HALF_LIFE_S: Duration = 1800.0
NODE_FAILURES_MIN = 3
INCIDENT_S: Duration = 5.0
"""Failures on a node within this time are one incident."""
OTHERS_RATIO_MIN = 3.0
"""A bad node has at least this many times the failures of the other nodes, on average."""
FAILURES_KEPT = 512
_KILLS = frozenset({FaultKind.KILL.value, FaultKind.KILL_HOST.value})


@dataclass(frozen=True, slots=True)
class Failure:
    """An incarnation that failed. ``contributed`` says whether any of its work was admitted."""

    record: int
    at: Instant
    island: IslandId
    node: str
    reason: str
    on_purpose: bool
    contributed: bool
    is_of_code: bool
    is_placement: bool

    @property
    def may_be_the_nodes(self) -> bool:
        return bool(self.node) and not (self.on_purpose or self.is_of_code or self.is_placement)


@dataclass(slots=True)
class _Island:
    """``node`` and the three facts are those of its current incarnation, ``nodes`` all on which it was."""

    node: str = ""
    nodes: set[str] = field(default_factory=set)
    contributed: bool = False
    killed: bool = False
    noticed: bool = False


class Failures:
    """The fold: the newest failures of these islands, and the nodes on which each island was."""

    all: deque[Failure]
    lifecycle: Lifecycle

    def __init__(self, islands: Iterable[IslandId]) -> None:
        self.all = deque(maxlen=FAILURES_KEPT)
        self._islands = {island: _Island() for island in islands}
        self.lifecycle = Lifecycle(tuple(self._islands))

    def apply(self, number: int, event: e.Event, effects: tuple[f.Effect, ...]) -> list[Change]:
        """Take in a record of the tape. Return how the states of islands changed."""
        if isinstance(event, (e.IslandPlaced, e.NoticeReceived, e.FaultInjected)) and event.island in self._islands:
            own = self._islands[event.island]
            if isinstance(event, e.IslandPlaced):
                own.node = event.node
                own.nodes.add(event.node)
            elif isinstance(event, e.NoticeReceived):
                own.noticed = True
            elif event.kind == FaultKind.KILL_NODE.value:
                for island in self._islands.values():
                    island.killed = island.killed or island.node == own.node
            else:
                own.killed = own.killed or event.kind in _KILLS
        for effect in effects:
            if isinstance(effect, f.AdmitContribution) and effect.contribution.island in self._islands:
                self._islands[effect.contribution.island].contributed = True
            elif isinstance(effect, f.KillIsland) and effect.island in self._islands:
                self._islands[effect.island].killed = isinstance(event, e.CommandRequested)
        changes = self.lifecycle.apply(event, effects)
        for change in changes:
            self._changed(number, event, change, effects)
        return changes

    def nodes(self) -> dict[IslandId, frozenset[str]]:
        """Return the nodes on which each island was."""
        return {island: frozenset(own.nodes) for island, own in self._islands.items()}

    def node_of(self, island: IslandId) -> str:
        """Return the latest node of the island; empty if it was never placed."""
        return self._islands[island].node

    def _changed(self, number: int, event: e.Event, change: Change, effects: tuple[f.Effect, ...]) -> None:
        own = self._islands[change.island]
        if change.after == IslandState.PLACING.value:
            own.contributed = own.killed = own.noticed = False
        is_failure = change.after in (IslandState.LOST.value, IslandState.FAILED.value) and change.before not in GONE
        left = isinstance(event, e.IslandReported) and isinstance(event.report, Drained)
        if not is_failure or change.before == ABSENT or own.noticed or left:
            return
        reason = next((effect.reason for effect in effects if isinstance(effect, f.StopIsland)), "")
        if isinstance(event, (e.ConnectionLost, e.PlacementFailed)):
            reason = event.reason
        of_code = isinstance(event, e.ConnectionLost) and (
            event.extent is not FailureExtent.INCARNATION or reason.startswith("its own code failed")
        )
        unplaced = isinstance(event, e.PlacementFailed)
        facts = number, event.at, change.island, own.node, reason
        self.all.append(Failure(*facts, own.killed, own.contributed, of_code, unplaced))


def failure_counts(failures: Iterable[Failure], at: Instant) -> dict[str, float]:
    """Return the decayed count of incidents of each node that has any, the highest first."""
    counts = DecayingCounts(HALF_LIFE_S)
    for node, own in incidents(failures).items():
        for one in own:
            counts.add(node, one.at)
    return counts.all(at)


def incidents(failures: Iterable[Failure]) -> dict[str, list[Failure]]:
    """Return the first failure of each incident by node. A machine that loses power fails all of its islands once."""
    by_node: dict[str, list[Failure]] = {}
    for one in sorted((one for one in failures if one.may_be_the_nodes), key=lambda one: one.at):
        own = by_node.setdefault(one.node, [])
        if not own or one.at - own[-1].at >= INCIDENT_S:
            own.append(one)
    return by_node


def bad_nodes(
    failures: Iterable[Failure], nodes_of: Mapping[IslandId, Iterable[str]], at: Instant
) -> dict[str, list[Failure]]:
    """Return the nodes that fail islands which do well elsewhere, or several islands while other nodes do well.

    ``nodes_of`` are the nodes on which each island was. Each bad node comes with the failures that count.
    """
    counted = [one for one in failures if one.may_be_the_nodes]
    weights, times = failure_counts(counted, at), incidents(counted)
    places = {island: set(nodes) for island, nodes in nodes_of.items()}
    used = set().union(*places.values())
    bad = {}
    for node, own_times in times.items():
        others = [weights.get(other, 0.0) for other in sorted(used - {node})]
        is_frequent = len(own_times) >= NODE_FAILURES_MIN and weights[node] >= 1.0
        if not is_frequent or not others or weights[node] < OTHERS_RATIO_MIN * fsum(others) / len(others):
            continue
        own = [one for one in counted if one.node == node]
        islands = {one.island for one in own}
        if len(islands) >= 2 or any(len(places.get(island, ())) > 1 for island in islands):
            bad[node] = own
    return bad


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
