"""The faults of chaos: one union, the same from REST to the link, in plans and in the simulator.

    REST body, plan's entry ─▶ Fault ─▶ Inject (``core.commands``) ─▶ runtime ─▶ process or link
                                 └────▶ simulated world

``kind`` says which fault it is. Commands, tapes and verdicts have a fault *flat*: ``kind``, ``island``, ``duration``,
``bytes_per_second``, ``payloads`` and ``host``, each empty where the kind does not have it. ``flat`` and ``fault_of`` are
the only two functions that know that form. A new fault is a kind and a class here, a member of the unions, and a case
wherever a type checker asks for one.

``LinkImpairment`` is what faults do to a link between an island and the synchroniser, as data without waiting or clocks:

    cut                     nothing passes for a while: reports, payloads, publications; the process trains on
    slow                    payloads and publications pass at a limited rate for a while; reports take no time
    corrupt, delay, drop    a number of payloads arrive with flipped bits, late, or not at all

The live link and the simulated one use it, so a plan means the same in both. The faults impair the link of the application,
not the network: other traffic (states from peers, a kill, Ray's own calls) is not delayed. The user of the link does the
waiting and passes the time in. An impairment ends by itself. Kernel rules are no alternative: on one machine all nodes share
the loopback device, and such rules need root and would affect Ray itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from enum import StrEnum
from math import inf
from typing import ClassVar, NamedTuple, assert_never, get_args

from orchestrator.core.vocabulary import Duration, Instant, IslandId


class Kind(StrEnum):
    KILL = "kill"
    STOP = "stop"
    CUT = "cut"
    SLOW = "slow"
    CORRUPT = "corrupt"
    DELAY = "delay"
    DROP = "drop"
    CONTINUE = "continue"
    KILL_NODE = "kill_node"
    KILL_HOST = "kill_host"
    KILL_SYNCHRONISER = "kill_synchroniser"
    KILL_API = "kill_api"


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL of the island's process, without warning. The island is placed again."""

    kind: ClassVar = Kind.KILL
    island: IslandId


@dataclass(frozen=True, slots=True)
class Stop:
    """SIGSTOP, and SIGCONT after ``duration_s``. In between the island neither steps nor answers."""

    kind: ClassVar = Kind.STOP
    island: IslandId
    duration_s: Duration


@dataclass(frozen=True, slots=True)
class Cut:
    """The island's link carries nothing for ``duration_s``: no report, payload or publication. The island trains on."""

    kind: ClassVar = Kind.CUT
    island: IslandId
    duration_s: Duration


@dataclass(frozen=True, slots=True)
class Slow:
    """The island's link carries payloads and publications at ``bytes_per_second`` for ``duration_s``."""

    kind: ClassVar = Kind.SLOW
    island: IslandId
    duration_s: Duration
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The island's next ``payloads`` arrive with flipped bits, and are refused for their checksum."""

    kind: ClassVar = Kind.CORRUPT
    island: IslandId
    payloads: int


@dataclass(frozen=True, slots=True)
class Delay:
    """The island's next ``payloads`` arrive ``duration_s`` late, each with everything queued behind it."""

    kind: ClassVar = Kind.DELAY
    island: IslandId
    duration_s: Duration
    payloads: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The island's next ``payloads`` are lost on the way."""

    kind: ClassVar = Kind.DROP
    island: IslandId
    payloads: int


@dataclass(frozen=True, slots=True)
class Continue:
    """The end of a stop, a cut, a slow link and payload faults before their time."""

    kind: ClassVar = Kind.CONTINUE
    island: IslandId


@dataclass(frozen=True, slots=True)
class KillNode:
    """SIGKILL of the raylet of the island's node. All islands on it die, of any job, and the node does not come back."""

    kind: ClassVar = Kind.KILL_NODE
    island: IslandId


@dataclass(frozen=True, slots=True)
class KillHost:
    """SIGKILL of the island's process on one of its hosts. Its other processes end too, and it is placed again."""

    kind: ClassVar = Kind.KILL_HOST
    island: IslandId
    host: int | None = None


@dataclass(frozen=True, slots=True)
class KillSynchroniser:
    """SIGKILL of the job's synchroniser, once the tape has the fault. It affects no island directly."""

    kind: ClassVar = Kind.KILL_SYNCHRONISER


@dataclass(frozen=True, slots=True)
class KillApi:
    """SIGKILL of the service, which is started again as it was. Only a plan can have it: it belongs to no job."""

    kind: ClassVar = Kind.KILL_API


PayloadFault = Corrupt | Delay | Drop
LinkFault = Cut | Slow | PayloadFault
"""Faults of an island's link. Its process is left alone."""
Deadly = Kill | KillNode | KillHost
"""Faults by which the island's process ends."""
Away = Stop | Cut
"""Faults that keep an island from contributing while they last."""
IslandFault = Kill | Stop | LinkFault | Continue | KillNode | KillHost
Islandless = KillSynchroniser | KillApi
JobFault = Kill | Stop | Cut | Slow | Corrupt | Delay | Drop | Continue | KillNode | KillHost | KillSynchroniser
"""Faults that a job can be asked for."""
Fault = JobFault | KillApi

CLASSES: dict[Kind, type[Fault]] = {fault.kind: fault for fault in get_args(Fault)}
FLAT_NAMES = {"duration_s": "duration"}


class FlatFault(NamedTuple):
    """A fault as commands, tapes and verdicts have it. ``island`` is empty for a fault of no island."""

    kind: Kind
    island: IslandId
    duration: Duration = 0.0
    bytes_per_second: float = 0.0
    payloads: int = 0
    host: int | None = None

    @property
    def numbers(self) -> tuple[Duration, float, int, int | None]:
        """The fields behind kind and island, in their order."""
        return self.duration, self.bytes_per_second, self.payloads, self.host


def flat(fault: Fault) -> FlatFault:
    """Return the flat form of a fault. ``fault_of`` reads it back."""
    values = {FLAT_NAMES.get(field.name, field.name): getattr(fault, field.name) for field in fields(fault)}
    return FlatFault(**{"kind": fault.kind, "island": IslandId(""), **values})


def fault_of(
    kind: str,
    island: str | None = None,
    duration: Duration = 0.0,
    bytes_per_second: float = 0.0,
    payloads: int = 0,
    host: int | None = None,
) -> Fault:
    """Return the fault of a flat form. Values that its kind does not have are ignored. Raises ValueError for no kind."""
    form = FlatFault(Kind(kind), IslandId(island or ""), duration, bytes_per_second, payloads, host)
    fault = CLASSES[form.kind]
    return fault(**{field.name: getattr(form, FLAT_NAMES.get(field.name, field.name)) for field in fields(fault)})


class LinkImpairment:
    """The impairment of one link; none until a fault is injected. One thread may inject while others read."""

    def __init__(self) -> None:
        self._cut_until: Instant = -inf
        self._slow: tuple[Instant, float] = (-inf, inf)
        self._payload_faults: deque[PayloadFault] = deque()

    def inject(self, fault: LinkFault, now: Instant) -> None:
        """Add a fault. A second cut never shortens the first; a second slow link replaces the first."""
        match fault:
            case Cut():
                self._cut_until = max(self._cut_until, now + fault.duration_s)
            case Slow():
                self._slow = (now + fault.duration_s, fault.bytes_per_second)
            case Corrupt() | Delay() | Drop():
                self._payload_faults.extend([fault] * fault.payloads)
            case _:
                assert_never(fault)

    def clear(self) -> None:
        """Remove every impairment."""
        self._cut_until, self._slow = -inf, (-inf, inf)
        self._payload_faults.clear()

    def cut_s(self, now: Instant) -> Duration:
        """Return how long from ``now`` nothing passes; 0 if the link is not cut."""
        return max(0.0, self._cut_until - now)

    def slow(self, now: Instant) -> bool:
        return now < self._slow[0]

    def transfer_delay_s(self, size_bytes: int, now: Instant) -> Duration:
        """Return how much longer these bytes take than without impairment. What is left when it ends takes no time."""
        until, bytes_per_second = self._slow
        return min(size_bytes / bytes_per_second, until - now) if now < until else 0.0

    def payload_fault(self) -> PayloadFault | None:
        """Return the fault of the payload that arrives now, if it has one. Each is used once."""
        return self._payload_faults.popleft() if self._payload_faults else None
