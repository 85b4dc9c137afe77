"""The kinds of faults, and what each needs to be said of it.

Refuses to know how a fault is carried out: ``runtime.faults`` does that live, ``chaos.simulated`` in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from orchestrator.core.vocabulary import FaultSpec
from orchestrator.simulation.impairment import LinkFault


class Kind(StrEnum):
    KILL = "kill"
    """SIGKILL, no warning; the island is placed again by itself."""
    STOP = "stop"
    """SIGSTOP for a duration, then SIGCONT: it neither steps nor answers meanwhile."""
    CUT = "cut"
    """Its link carries nothing for a duration; the process trains on."""
    SLOW = "slow"
    """Its link carries ``bytes_per_second`` for a duration."""
    CORRUPT = "corrupt"
    """Its next ``payloads`` arrive with flipped bits."""
    DELAY = "delay"
    """Its next ``payloads`` arrive ``duration`` late."""
    DROP = "drop"
    """Its next ``payloads`` do not arrive."""
    KILL_NODE = "kill_node"
    """SIGKILL of the raylet of the island's node; all islands on it die, and it does not come back."""
    KILL_HOST = "kill_host"
    """SIGKILL of the island's process on one ``host``, else its last; those on its others, if any, end with it."""
    KILL_SYNCHRONISER = "kill_synchroniser"
    """SIGKILL of the process that decides and merges."""
    KILL_API = "kill_api"
    """SIGKILL of the service, which is started again as it was. Only in a plan: it strikes no job."""


CONTINUE = "continue"
"""No fault, but asked for like one: what goes on by itself ends now."""
LINK = frozenset(Kind(kind.value) for kind in LinkFault)
"""What strikes a link; the process at its end is left alone."""
AWAY = frozenset({Kind.STOP, Kind.CUT})
"""While it lasts, the island is of no use to anybody."""
DEADLY = frozenset({Kind.KILL, Kind.KILL_NODE, Kind.KILL_HOST})
"""The island's process ends."""
ISLANDLESS = frozenset({Kind.KILL_SYNCHRONISER, Kind.KILL_API})
"""What strikes no island."""
NEEDS: Mapping[Kind, tuple[str, ...]] = {
    Kind.STOP: ("duration",),
    Kind.CUT: ("duration",),
    Kind.SLOW: ("duration", "bytes_per_second"),
    Kind.CORRUPT: ("payloads",),
    Kind.DELAY: ("duration", "payloads"),
    Kind.DROP: ("payloads",),
}
"""Fields of ``core.vocabulary.FaultSpec``, by the kinds that mean nothing without them."""
TAKES: Mapping[Kind, tuple[str, ...]] = {**NEEDS, Kind.KILL_HOST: ("host",)}
"""Those that a kind may have."""


def describe(kind: Kind, whom: str, dose: FaultSpec) -> str:
    """A fault in words: ``stop asia for 6 s``. ``whom`` is empty where the kind strikes none."""
    how = "by" if kind is Kind.DELAY else "for"
    lasts = f" {how} {dose.duration:g} s" if dose.duration else ""
    size = f", {dose.payloads} payloads" if dose.payloads else ""
    where = f", host {dose.host}" if dose.host is not None else ""
    rate = f", {dose.bytes_per_second:g} bytes/s" if dose.bytes_per_second else ""
    return f"{kind}{f' {whom}' if whom else ''}{lasts}{size}{rate}{where}"
