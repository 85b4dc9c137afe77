"""The causes of slowness and death that a diagnosis can name, and the causes that failures are put down to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.accounting.failures import Failure, Failures, Origin, bad_nodes
from orchestrator.core.vocabulary import Duration, Instant, IslandId
from orchestrator.system.plain import counted, some_of

LOOP_LENGTH = 3
"""So many incarnations in a row that failed without a contribution are a crash loop."""
_NUMBER = re.compile(r"\d[\d,._]*")


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
