"""Failures of islands, and the nodes that fail them.

A node is bad if it fails islands that live elsewhere (``bad_nodes``). The diagnosis of a job names it, and the service
cordons it if the operator lets it. What is no node's fault does not count: deliberate kills, departures, errors of the job's
own code, and attempts to place an island that found no room (``Origin``). Failures of several islands at the same time count
once, with decay (``series.DecayingCounts``): what lies a half-life back counts half.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import fsum

from orchestrator.accounting.island_time import ABSENT, GONE, Change, Lifecycle
from orchestrator.accounting.series import DecayingCounts
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.faults import Kind as FaultKind
from orchestrator.core.messages import Drained, Overdue
from orchestrator.core.vocabulary import (
    Duration,
    FailureExtent,
    Instant,
    IslandId,
    IslandState,
    IslandTimer,
    IslandTimerKind,
)

HALF_LIFE_S: Duration = 1800.0
NODE_FAILURES_MIN = 3
INCIDENT_S: Duration = 5.0
"""Failures on a node within this time are one incident."""
OTHERS_RATIO_MIN = 3.0
"""A bad node has at least this many times the failures of the other nodes, on average."""
FAILURES_KEPT = 512
_KILLS = frozenset({FaultKind.KILL.value, FaultKind.KILL_HOST.value})
_OF_DISK = tuple(f"[Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO))


def is_of_disk(reason: str) -> bool:
    """Return whether this last line of a traceback says that a disk is full, read-only or broken."""
    return any(number in reason for number in _OF_DISK)


class Origin(Enum):
    """The way in which an incarnation failed."""

    PROCESS = auto()
    """Its process died by itself."""
    KILL = auto()
    """An operator or chaos killed it."""
    CODE = auto()
    """Its own code raised an error."""
    DISK = auto()
    """A disk refused what it read or wrote."""
    PLACEMENT = auto()
    """There was no process: its node group had no room."""
    QUARANTINE = auto()
    """Its contributions could not be used."""
    HUNG = auto()
    """A step did not end within its limit."""
    SILENCE = auto()
    """It did not answer for too long."""


_NO_NODES_FAULT = frozenset({Origin.KILL, Origin.CODE, Origin.PLACEMENT})


@dataclass(frozen=True, slots=True)
class Failure:
    """An incarnation that failed. ``contributed`` says whether any of its work was admitted.

    ``kill`` is the record of the command or fault that killed it; 0 if it died otherwise.
    """

    record: int
    at: Instant
    island: IslandId
    node: str
    reason: str
    origin: Origin
    contributed: bool
    kill: int = 0

    @property
    def may_be_the_nodes(self) -> bool:
        return bool(self.node) and self.origin not in _NO_NODES_FAULT


@dataclass(slots=True)
class _Island:
    """``node`` and the facts are those of its current incarnation, ``nodes`` all on which it was.

    ``kill`` is the record at which an operator or chaos killed it; 0 if none did.
    """

    node: str = ""
    nodes: set[str] = field(default_factory=set)
    contributed: bool = False
    kill: int = 0
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
                    island.kill = number if island.node == own.node else island.kill
            elif event.kind in _KILLS:
                own.kill = number
        for effect in effects:
            if isinstance(effect, f.AdmitContribution) and effect.contribution.island in self._islands:
                self._islands[effect.contribution.island].contributed = True
            elif isinstance(effect, f.KillIsland) and isinstance(event, e.CommandRequested):
                self._islands[effect.island].kill = number
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
            own.contributed = own.noticed = False
            own.kill = 0
        is_failure = change.after in (IslandState.LOST.value, IslandState.FAILED.value) and change.before not in GONE
        left = isinstance(event, e.IslandReported) and isinstance(event.report, Drained)
        if not is_failure or change.before == ABSENT or own.noticed or left:
            return
        reason = next((effect.reason for effect in effects if isinstance(effect, f.StopIsland)), "")
        if isinstance(event, (e.ConnectionLost, e.PlacementFailed)):
            reason = event.reason
        origin = Origin.KILL if own.kill else _origin(event, effects, reason)
        self.all.append(Failure(number, event.at, change.island, own.node, reason, origin, own.contributed, own.kill))


def _origin(event: e.Event, effects: tuple[f.Effect, ...], reason: str) -> Origin:
    """Return how the incarnation failed that ends with this event."""
    if any(isinstance(effect, f.QuarantineIsland) for effect in effects):
        return Origin.QUARANTINE
    is_raised = reason.startswith("its own code failed")
    match event:
        case e.PlacementFailed():
            return Origin.PLACEMENT
        case e.ConnectionLost() if is_raised and is_of_disk(reason):
            return Origin.DISK
        case e.ConnectionLost(extent=extent) if is_raised or extent is not FailureExtent.INCARNATION:
            return Origin.CODE
        case e.IslandReported(report=Overdue()):
            return Origin.HUNG
        case e.TimerFired(timer=IslandTimer(kind=IslandTimerKind.SUSPECT)):
            return Origin.SILENCE
        case _:
            return Origin.PROCESS


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
