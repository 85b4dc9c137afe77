"""Commands of operators, and of chaos, to a running job. Frozen data, the same from the command line to the tape.

    CLI, client ─▶ route ─▶ row of the store ─▶ control port ─▶ synchroniser ─▶ CommandRequested ─▶ core

Nobody on this way knows more of a command than its class; ``tape.command_codec`` gives it the one plain form that the store,
calls between processes and the tape have of it. A new one is a class here, a member of a union below, and a handler in
``core.synchroniser``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.faults import Fault, fault_of, flat
from orchestrator.core.vocabulary import UNWRITTEN_DEFAULT, Epoch, IslandId, JobPolicy, NodeGroupId, replace


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL the island's process, no warning. With ``restart`` false it stays away until it is re-added."""

    island: IslandId
    restart: bool = True


@dataclass(frozen=True, slots=True)
class Drain:
    """Have the island step no more, see all its work merged, then end its process. It stays away until it is re-added."""

    island: IslandId


@dataclass(frozen=True, slots=True)
class Readd:
    """Place an island that is away, now: forget its back-off and its failures. One that is draining trains on."""

    island: IslandId


@dataclass(frozen=True, slots=True)
class Scale:
    """Have ``count`` islands on the node group: place more, or drain the last of them."""

    node_group: NodeGroupId
    count: int


@dataclass(frozen=True, slots=True)
class Cordon:
    """Place nothing new on the node group. What trains there, or is being placed, goes on."""

    node_group: NodeGroupId


@dataclass(frozen=True, slots=True)
class Uncordon:
    """The node group takes islands again, and first those that wait for it."""

    node_group: NodeGroupId


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Take a checkpoint now."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """Bring the job back to where ``checkpoint`` has it; 0 is the newest."""

    checkpoint: int


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Take a checkpoint, then have the synchroniser go on as a process of the release ``build``, which ``python`` runs.

    ``python`` is the path of an interpreter on the synchroniser's machine. The service has tried it there.
    """

    build: str
    python: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the job without waiting for the work in flight."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End the job early, as at the end of its budget: islands give their last work, and it completes once that is merged."""


@dataclass(frozen=True, slots=True)
class Set:
    """Change settings of the running job. A setting that is None stays as it is.

    lr_ratio             the inner learning rate, as a ratio of the specification's schedule
    quorum               K
    grace_cap_steps      the longest grace window, in inner steps
    sync_interval_steps  H
    cost_max             the limit of what the job may cost, which the service watches
    reason               the autopilot's reason; empty if an operator changes them
    """

    lr_ratio: float | None = None
    quorum: int | None = None
    grace_cap_steps: float | None = None
    sync_interval_steps: int | None = None
    cost_max: float | None = None
    reason: str = field(default="", metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class Pause:
    """Have all islands give their work and leave, and place none, until ``Continue``. The service's, at a limit of cost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Continue:
    """Place the islands again that left when the job was paused."""

    reason: str


@dataclass(frozen=True, slots=True)
class Inject:
    """Inject a fault of chaos into the island, or into the synchroniser where ``island`` is None.

    This is the flat form of a fault (``core.faults``), as it is stored and sent between builds: ``fault`` is its kind. The
    shell carries it out and records it as ``FaultInjected``. The core decides only on a kill, as on an operator's.
    """

    fault: str
    island: IslandId | None
    duration: float = 0.0
    bytes_per_second: float = 0.0
    payloads: int = 0
    host: int | None = None

    @classmethod
    def of(cls, fault: Fault) -> Inject:
        """Return the command that injects this fault."""
        form = flat(fault)
        return cls(form.kind.value, form.island or None, *form.numbers)

    def typed(self) -> Fault:
        """Return the fault. Raises ValueError for a kind that this build does not know."""
        return fault_of(self.fault, self.island, self.duration, self.bytes_per_second, self.payloads, self.host)


def settings_applied(policy: JobPolicy, request: Set) -> JobPolicy:
    """Return the policy with these settings."""
    return replace(
        policy,
        quorum=policy.quorum if request.quorum is None else request.quorum,
        grace_cap_steps=policy.grace_cap_steps if request.grace_cap_steps is None else request.grace_cap_steps,
        sync_interval_steps=request.sync_interval_steps or policy.sync_interval_steps,
    )


IslandCommand = Kill | Drain | Readd
NodeGroupCommand = Scale | Cordon | Uncordon
JobCommand = Checkpoint | Rollback | Upgrade | Cancel | Finish | Set | Pause | Continue
OperatorCommand = IslandCommand | NodeGroupCommand | JobCommand
"""Those that the core decides on. Each is answered by one ``ResolveCommand``."""
Command = OperatorCommand | Inject


def kind_of(command: Command) -> str:
    """The word that people have for it: kill, drain …; of a fault its kind."""
    return command.fault if isinstance(command, Inject) else type(command).__name__.lower()


def island_of(command: Command) -> IslandId | None:
    """The island that it is for, if it is for one."""
    return command.island if isinstance(command, IslandCommand | Inject) else None


@dataclass(frozen=True, slots=True)
class ChangedSettings:
    """The settings of a job that operators changed; None: it is as in the specification. The latest changes count.

    epoch, count         the epoch of the last change, and how many there were: of two records the higher pair is newer
    lr_ratio             the inner learning rate, as a ratio of the specification's schedule
    quorum               K
    grace_cap_steps      the longest grace window, in inner steps
    sync_interval_steps  H
    cost_max             the limit of what the job may cost. No decision depends on it
    """

    epoch: Epoch = Epoch(0)
    count: int = 0
    lr_ratio: float | None = None
    quorum: int | None = None
    grace_cap_steps: float | None = None
    sync_interval_steps: int | None = None
    cost_max: float | None = None


UNCHANGED = ChangedSettings()
CANCEL_PROFILE = 0
"""In place of a number of steps, it ends a recording of an island's steps without a trace. Earlier builds ignore it.

A trace is no command: the service asks the island's process for it, and no core hears of that.
"""
