"""Failures of islands, and the causes of slowness and death that a diagnosis can name.

A node is bad if it fails islands that live elsewhere (``bad_nodes``). The diagnosis of a job names it, and the service
cordons it if the operator lets it. What is no node's fault does not count: deliberate kills, departures, errors of the job's
own code, and attempts to place an island that found no room (``Origin``). Failures of several islands at the same time count
once, with decay (``series.DecayingCounts``): what lies a half-life back counts half.
"""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
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
from orchestrator.system.plain import counted, some_of

HALF_LIFE_S: Duration = 1800.0
NODE_FAILURES_MIN = 3
INCIDENT_S: Duration = 5.0
"""Failures on a node within this time are one incident."""
OTHERS_RATIO_MIN = 3.0
"""A bad node has at least this many times the failures of the other nodes, on average."""
LOOP_LENGTH = 3
"""So many incarnations in a row that failed without a contribution are a crash loop."""
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
    """An incarnation that failed. ``contributed`` says whether any of its work was admitted."""

    record: int
    at: Instant
    island: IslandId
    node: str
    reason: str
    origin: Origin
    contributed: bool

    @property
    def may_be_the_nodes(self) -> bool:
        return bool(self.node) and self.origin not in _NO_NODES_FAULT


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
        origin = Origin.KILL if own.killed else _origin(event, effects, reason)
        self.all.append(Failure(number, event.at, change.island, own.node, reason, origin, own.contributed))


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


# ── causes ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Cause(StrEnum):
    """A cause of slowness or death. The value is its name for people; ``remedy`` says what to do."""

    remedy: str

    def __new__(cls, name: str, remedy: str) -> Cause:
        member = str.__new__(cls, name)
        member._value_, member.remedy = name, remedy
        return member

    CODE = "an error in the job's own code", "Read the traceback with `atoll logs`, and try the job with `atoll check`."
    CRASH_LOOP = "a crash loop", "Read the island's log with `atoll logs`, and drain it if its machine is to blame."
    BAD_NODE = (
        "a bad node",
        "Take the machine out: `atoll cordon GROUP --node NODE`, or `atoll leave` on it. Read its log.",
    )
    FAILURES = "failures of islands", "Keep standbys, and offer more often (a smaller H), so that less is lost."
    DEPARTURES = "islands that left and came back", "Their machines were taken back, or drained: standbys shorten this."
    ON_PURPOSE = "deliberate kills", "Nothing: an operator or chaos killed these islands."
    NO_NODE = "a node group without room", "Add nodes to the group (`atoll join`), or `atoll scale` another one."
    CORDONED = "a cordoned node group", "`atoll uncordon` the group, or scale the job down on it."
    LINK = "a lost connection", "Look at the line between the island and the synchroniser: `atoll doctor --lines`."
    FULL_DISK = "a full or broken disk", "Free space on that disk, or replace it. The failures' reasons name the error."
    SLOW_MERGES = (
        "merges that take too long",
        "Look at the load of the synchroniser's machine, and at its disk, which may be full or slow. More shards merge at "
        "the same time, and a larger H needs fewer merges.",
    )
    NOT_ARRIVING = (
        "contributions that do not arrive",
        "Look at the line from the island to the synchroniser (`atoll doctor --lines`), and at limits of size on the way.",
    )
    STRAGGLER = (
        "a straggler",
        "Look for heat, clocks, other processes and slow reads of data on its machine (`atoll profile`), or drain it.",
    )
    THIN_LINE = (
        "a thin line",
        "`atoll doctor --lines` names a codec of fewer bits, a larger H or a longer grace window.",
    )
    OVERWRITTEN = "work that adopted versions overwrote", "Adopt by `rebase`, which keeps own work, or use a smaller H."
    LATE_WORK = (
        "work that came too late",
        "Lengthen the grace window (`atoll set JOB grace=…`). If no slack is left to wait in, set `grace_floor_steps`.",
    )
    UNUSABLE_WORK = "unusable contributions", "Read the island's log; values that are not finite mean a too high rate."
    HUNG_STEP = "a hung or stopped process", "Look at the island's machine; its log names the step that hung."
    HELD_UP = (
        "an island that waits between steps",
        "The others do not: look at its machine's cores, memory and disk, and at what else runs there.",
    )
    WAITING = (
        "islands that wait between steps",
        "Use a larger H, or give the process more cores beside the accelerator.",
    )
    CHECKPOINTS = (
        "checkpoints that hold up islands",
        "Take checkpoints more rarely, or look at the memory of the islands' machines.",
    )
    EVALUATION = "evaluations on training islands", "Evaluate more rarely, on fewer sequences, or on a node of its own."
    STARTING = (
        "the start of islands",
        "Keep the compile cache across restarts. In a longer job this share falls.",
    )
    ENDING = "the end of the job", "Nothing: islands wait for each other's last work. In a longer job this share falls."
    UNDONE = (
        "work before a rollback or resume",
        "Take checkpoints more often, so that less work lies behind the newest.",
    )
    NO_QUORUM = (
        "too few islands for the quorum",
        "Lower it (`atoll set JOB quorum=…`), or bring the islands back.",
    )
    STALL = "no merge for a long time", "`atoll status` names a pause. Otherwise read `atoll logs JOB synchroniser`."
    OTHER = "another cause", "Read `atoll logs JOB synchroniser`."


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. ``island_seconds`` is what it cost, ``share`` its part of all island time, ``records`` are tape lines."""

    cause: Cause
    subject: str
    island_seconds: Duration
    share: float
    statement: str
    remedy: str
    records: tuple[int, ...]


Culprits = Mapping[IslandId, tuple[Cause, str] | None]
"""What the failures of each island are put down to; None if it had none."""


def culprit(
    failures: Failures, island: IslandId, group: str, at: Instant, *, stood_still: bool
) -> tuple[Cause, str] | None:
    """Return what the failures of this island of a node group are put down to; None if it had none.

    ``stood_still`` says whether its process was seen to stand still while it did not answer.
    """
    own = [one for one in failures.all if one.island == island]
    if not own:
        return None
    origins = Counter(one.origin for one in own)
    most = {origin for origin, count in origins.items() if 2 * count > len(own)}
    if Origin.KILL in most:
        return Cause.ON_PURPOSE, ""
    if Origin.CODE in origins and shared_error(failures) is not None:
        return Cause.CODE, ""
    if Origin.DISK in most:
        nodes = {one.node for one in failures.all if one.origin is Origin.DISK}
        return Cause.FULL_DISK, nodes.pop() if len(nodes) == 1 else ""
    node, _ = Counter(one.node for one in own if one.origin is not Origin.KILL).most_common(1)[0]
    if node in bad_nodes(failures.all, failures.nodes(), at):
        return Cause.BAD_NODE, node
    if Origin.QUARANTINE in most:
        return Cause.UNUSABLE_WORK, island
    if Origin.HUNG in most:
        return Cause.HUNG_STEP, island
    in_vain = longest = 0
    for one in own:
        in_vain = 0 if one.contributed or one.origin is Origin.KILL else in_vain + 1
        longest = max(longest, in_vain)
    if longest >= LOOP_LENGTH:
        return (Cause.NO_NODE, group) if Origin.PLACEMENT in most else (Cause.CRASH_LOOP, island)
    if Origin.SILENCE in most:
        return Cause.HUNG_STEP if stood_still else Cause.LINK, island
    return Cause.FAILURES, ""


def shared_error(failures: Failures) -> str | None:
    """Return the error of user code that ended incarnations of several islands, or of the only one that failed so."""
    errors: dict[str, set[IslandId]] = {}
    for one in failures.all:
        if one.origin is Origin.CODE:
            errors.setdefault(one.reason, set()).add(one.island)
    placed = sum(map(bool, failures.nodes().values()))
    return next((reason for reason, islands in errors.items() if len(islands) >= min(2, placed)), None)


def evidence(failures: Failures, blamed: Sequence[Failure], cause: Cause, subject: str) -> str:
    """Return a statement about failures that are put down to this cause; empty if the cause has other evidence."""
    last, times = blamed[-1].reason, counted(len(blamed), "failure")
    islands = some_of(sorted({one.island for one in blamed}), 8)
    match cause:
        case Cause.CODE:
            return f"islands die of the same error ({shared_error(failures)})"
        case Cause.CRASH_LOOP:
            times = counted(len(blamed), "time")
            return f"{subject} failed {times} and contributed nothing in {LOOP_LENGTH} lives in a row ({last})"
        case Cause.BAD_NODE:
            return f"{times} on node {subject} ({islands})"
        case Cause.FULL_DISK:
            return f"{times} on {f'node {subject}' if subject else 'several nodes'} ({last})"
        case Cause.FAILURES:
            return f"{times} of {islands}"
        case Cause.ON_PURPOSE:
            return f"{counted(len(blamed), 'deliberate kill')} of {islands}"
        case _:
            return ""
