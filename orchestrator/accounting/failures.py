"""Failures of islands, and the causes of slowness and death that a diagnosis can name.

A node is bad if it fails islands that live elsewhere (``bad_nodes``). The diagnosis of a job names it, and the service
cordons it if the operator lets it. What is no node's fault does not count: deliberate kills, departures, errors of the job's
own code, and attempts to place an island that found no room (``Origin``). Failures of several islands at the same time count
once, with decay (``series.DecayingCounts``): what lies a half-life back counts half.
"""

from __future__ import annotations

import errno
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from math import fsum

from orchestrator.accounting.island_time import ABSENT, FREEZE_MIN_S, FREEZE_RATIO, GONE, Change, Lifecycle
from orchestrator.accounting.series import DecayingCounts, Travels
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.faults import Kind as FaultKind
from orchestrator.core.messages import Adopted, Drained, Overdue, Progress, Saved
from orchestrator.core.vocabulary import (
    NO_INCARNATION,
    Duration,
    FailureExtent,
    Incarnation,
    Instant,
    IslandId,
    IslandState,
    IslandTimer,
    IslandTimerKind,
    RefusalReason,
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
RECORDS_SHOWN = 5
LATE_REASONS = RefusalReason.LATE, RefusalReason.STALE_BASE, RefusalReason.ALREADY_MERGED
UNUSABLE_REASONS = RefusalReason.CORRUPT, RefusalReason.WRONG_SHAPE, RefusalReason.NON_FINITE, RefusalReason.EXPLODING
_KILLS = frozenset({FaultKind.KILL.value, FaultKind.KILL_HOST.value})
_NUMBER = re.compile(r"\d[\d,._]*")
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


# ── what an island does ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class IslandFacts:
    """The facts about one island that its diagnosis needs. ``reached`` are its latest (step, instant) by its reports.

    ``pulls`` is how long its contributions with bytes took, ``deliveries`` how long versions took to reach it, ``arrived``
    and ``adopted`` when the latest of both came, with their records. ``step_count`` is of all incarnations, ``counted`` the
    latest of them with its own steps and seconds in them. ``held_s`` is how long its loop waited for checkpoints, ``gaps_s``
    how long it waited between steps at most, by the longest gap of each report, and ``frozen_s`` how much longer than usual
    the steps took in which it stood still, in all and at the longest. ``slowest`` are the reports of the longest mean steps.
    ``silent_since`` and ``heard_at`` are the ends of its latest silence.
    """

    step_count: int = 0
    counted: tuple[Incarnation, int, Duration] = (NO_INCARNATION, 0, 0.0)
    held_s: Duration = 0.0
    gaps_s: Duration = 0.0
    frozen_s: Duration = 0.0
    frozen_longest_s: Duration = 0.0
    silent_since: Instant | None = None
    heard_at: Instant | None = None
    pulls: Travels = field(default_factory=Travels)
    deliveries: Travels = field(default_factory=Travels)
    arrived: deque[tuple[Instant, int]] = field(default_factory=lambda: deque(maxlen=512))
    adopted: deque[tuple[Instant, int]] = field(default_factory=lambda: deque(maxlen=512))
    slowest: list[tuple[Duration, int]] = field(default_factory=list)
    reached: deque[tuple[int, Instant]] = field(default_factory=lambda: deque(maxlen=512))
    overdue: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    late: deque[tuple[Instant, int]] = field(default_factory=lambda: deque(maxlen=512))
    """When contributions of it were refused as late, with the records."""
    unusable: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    refusals: Counter[RefusalReason] = field(default_factory=Counter)
    stops: deque[int] = field(default_factory=lambda: deque(maxlen=RECORDS_SHOWN))
    """Records of faults that stopped its process, and of reports that it stood still."""
    states: dict[str, deque[int]] = field(default_factory=dict)
    """The latest records with which it entered each state."""
    progress: int = 0
    """The record of its latest report of progress, and below that of its first start."""
    first_start: int = 0

    def reported(self, number: int, event: e.IslandReported, completed_at: Instant | None) -> None:
        """Take in a report. ``completed_at`` is when the merge of the version was complete that it adopted."""
        if self.heard_at is None:
            self.heard_at = event.at
        match event.report:
            case Progress() as report:
                self._progressed(number, event.at, event.incarnation, report)
            case Adopted():
                self.adopted.append((event.at, number))
                if completed_at is not None:
                    self.deliveries.add(event.at - completed_at)
            case Saved() as report:
                self.held_s += report.held_seconds
            case Overdue():
                self.overdue.append(number)

    def _progressed(self, number: int, at: Instant, incarnation: Incarnation, report: Progress) -> None:
        _, steps, stepped_s = self.counted if self.counted[0] == incarnation else (incarnation, 0, 0.0)
        more, took = max(0, report.steps_total - steps), max(0.0, report.stepping_seconds - stepped_s)
        excess = max(0.0, report.gap_max_seconds - report.step_seconds_median)
        self.reached.append((report.step, at))
        self.progress = number
        self.step_count += more
        self.gaps_s += more * excess
        self.counted = incarnation, report.steps_total, report.stepping_seconds
        if more:
            self.slowest = sorted([*self.slowest, (took / more, number)])[-RECORDS_SHOWN:]
        is_long = report.gap_max_seconds > max(FREEZE_MIN_S, FREEZE_RATIO * report.step_seconds_median)
        in_steps_s = took - more * report.step_seconds_median  # and not between two
        is_frozen = is_long and in_steps_s > excess / 2.0
        if is_frozen or self._stood_still(at, report):
            self.frozen_s += excess
            self.frozen_longest_s = max(self.frozen_longest_s, excess)
            self.stops.append(number)
            self.silent_since = None

    def _stood_still(self, at: Instant, report: Progress) -> bool:
        """Return whether it made no step for most of its latest silence. An island that was only cut off steps on.

        The first report after a silence may be an older one, which was written before the process was stopped.
        """
        if self.silent_since is None or self.heard_at is None or at - report.gap_max_seconds > self.heard_at:
            return False
        return report.gap_max_seconds > (self.heard_at - self.silent_since) / 2.0

    def late_records(self) -> tuple[int, ...]:
        """Return the latest records at which a contribution was refused as late."""
        return tuple(number for _, number in self.late)[-RECORDS_SHOWN:]

    def refused(self, number: int, at: Instant, reason: RefusalReason) -> None:
        self.refusals[reason] += 1
        if reason in LATE_REASONS:
            self.late.append((at, number))
        elif reason in UNUSABLE_REASONS:
            self.unusable.append(number)


# ── causes ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Cause(StrEnum):
    """A cause of slowness or death. The value is its name for people; ``remedy`` says what to do."""

    remedy: str

    def __new__(cls, name: str, remedy: str) -> Cause:
        member = str.__new__(cls, name)
        member._value_, member.remedy = name, remedy
        return member

    CODE = (
        "an error in the job's own code",
        "Read the traceback with `atoll logs`, and try the job with `atoll check`. If one island alone has it, look at its "
        "part of the data as well.",
    )
    CRASH_LOOP = "a crash loop", "Read the island's log with `atoll logs`, and drain it if its machine is to blame."
    BAD_NODE = (
        "a bad node",
        "Take the machine out: `atoll cordon GROUP --node NODE`, or `atoll leave` on it. Read its log.",
    )
    FAILURES = (
        "failures of islands",
        "`atoll logs` has their last words, and a kernel's log (`dmesg`) says what it killed for want of memory. Standbys, "
        "and offers that come more often (a smaller H), lose less.",
    )
    DEPARTURES = "islands that left and came back", "Their machines were taken back, or drained: standbys shorten this."
    ON_PURPOSE = "deliberate kills", "Nothing: an operator or chaos killed these islands."
    NO_NODE = "a node group without room", "Add nodes to the group (`atoll join`), or `atoll scale` another one."
    CORDONED = "a cordoned node group", "`atoll uncordon` the group, or scale the job down on it."
    LINK = (
        "a lost connection",
        "Look at the line between the island and the synchroniser: `atoll doctor --lines`. A process that was stopped is as "
        "silent: `atoll islands -o wide` names its node and pid.",
    )
    NO_SYNCHRONISER = (
        "a synchroniser that does not answer",
        "Look at its process and its machine. If it died it is placed again; if it stands still, end its process.",
    )
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
    UNUSABLE_WORK = (
        "unusable contributions",
        "If several islands have it, lower the learning rate. If it is one, suspect its data, its accelerator and its "
        "memory, and for bytes that changed its line.",
    )
    HUNG_STEP = (
        "a hung or stopped process",
        "Look at the island's machine: a process that was stopped, a machine that swaps or was suspended. The island's log "
        "names a step that hung, which may wait for data, a file or a peer.",
    )
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
        "In a longer job this share falls. If most of it is compiling, keep the compile cache across restarts.",
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


USUAL = frozenset({Cause.STARTING, Cause.ENDING, Cause.WAITING, Cause.OVERWRITTEN, Cause.LATE_WORK, Cause.ON_PURPOSE})
"""What any job has, or was meant to have."""


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


@dataclass(frozen=True, slots=True)
class IslandFigures:
    """The figures of an island beside the others'.

    ``step_s`` is the mean time of a step. ``pull_s`` is the median time that a contribution travels, and ``delivery_s`` that
    from a merge to its adoption, less a step. ``waiting_ratio`` is the part of the time in training in which the island did
    not step. Each has its distance ``z`` from the others in spreads.
    """

    island: IslandId
    node: str
    step_s: Duration | None
    step_z: float | None
    pull_s: Duration | None
    pull_z: float | None
    delivery_s: Duration | None
    delivery_z: float | None
    waiting_ratio: float
    waiting_z: float | None
    failure_count: int

    @property
    def line_z(self) -> float | None:
        """Return how far the slower way of its line is from the others'."""
        return max((z for z in (self.pull_z, self.delivery_z) if z is not None), default=None)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``cause`` is None where nothing costs ``SHARE_MIN`` of the time; ``others`` are further causes, largest first."""

    outcome: str | None
    reason: str
    goodput_ratio: float
    cause: Finding | None
    others: tuple[Finding, ...]
    islands: tuple[IslandFigures, ...]
    node_failures: Mapping[str, float]


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
    if Origin.CODE in most:
        return Cause.CODE, island
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
    if _lives_in_vain(own) >= LOOP_LENGTH:
        return (Cause.NO_NODE, group) if Origin.PLACEMENT in most else (Cause.CRASH_LOOP, island)
    if Origin.SILENCE in most:
        return Cause.HUNG_STEP if stood_still else Cause.LINK, island
    return Cause.FAILURES, island if all(one.island == island for one in failures.all) else ""


def _lives_in_vain(failures: Iterable[Failure]) -> int:
    """Return how many incarnations of an island failed in a row without a contribution, at most."""
    in_vain = longest = 0
    for one in failures:
        in_vain = 0 if one.contributed or one.origin is Origin.KILL else in_vain + 1
        longest = max(longest, in_vain)
    return longest


def shared_error(failures: Failures) -> str | None:
    """Return the error of user code that ended incarnations of several islands, or of the only one that was placed.

    Numbers in it do not count: the step at which it was raised is one.
    """
    errors: dict[str, set[IslandId]] = {}
    reasons: dict[str, str] = {}
    for one in failures.all:
        if one.origin is Origin.CODE:
            kind = _NUMBER.sub("0", one.reason)
            errors.setdefault(kind, set()).add(one.island)
            reasons[kind] = one.reason
    placed = sum(map(bool, failures.nodes().values()))
    return next((reasons[kind] for kind, islands in errors.items() if len(islands) >= min(2, placed)), None)


def evidence(failures: Failures, blamed: Sequence[Failure], cause: Cause, subject: str) -> str:
    """Return a statement about failures that are put down to this cause; empty if the cause has other evidence."""
    last, times = blamed[-1].reason.rstrip("."), counted(len(blamed), "failure")
    islands = some_of(sorted({one.island for one in blamed}), 8)
    match cause:
        case Cause.CODE if subject:
            return f"{subject} failed {counted(len(blamed), 'time')} by errors of its own ({last})"
        case Cause.CODE:
            return f"islands die of the same error ({shared_error(failures)})"
        case Cause.CRASH_LOOP:
            times, lives = counted(len(blamed), "time"), _lives_in_vain(blamed)
            return f"{subject} failed {times} and contributed nothing in {lives} lives in a row ({last})"
        case Cause.BAD_NODE:
            return f"{times} on node {subject} ({islands})"
        case Cause.FULL_DISK:
            return f"{times} on {f'node {subject}' if subject else 'several nodes'} ({last})"
        case Cause.FAILURES:
            nodes = some_of(sorted({one.node for one in blamed if one.node}), 8)
            return f"{times} of {islands}{f' on {nodes}' if nodes else ''} (the last: {last})"
        case Cause.ON_PURPOSE:
            return f"{counted(len(blamed), 'deliberate kill')} of {islands}"
        case _:
            return ""
