"""Protocols through which a part of the simulated world uses the rest: the world imports its parts, and none of them it.

A part names in a protocol of its own what it needs beyond these. ``World`` is all of them, as is one whose synchroniser
dies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from orchestrator.core.events import Event
from orchestrator.core.vocabulary import Incarnation, Instant, IslandId
from orchestrator.simulation.host import Host
from orchestrator.simulation.plan import IncarnationStart, Latency, WorldPlan


class Clock(Protocol):
    """The virtual time, and what is to happen in it."""

    now: Instant

    def later(self, seconds: float, thunk: Callable[[], None]) -> None: ...

    def while_alive(self, seconds: float, thunk: Callable[[], None]) -> None:
        """As ``later``, for what the synchroniser's own process does or hears."""


class Odds(Protocol):
    """What the plan says, and what it leaves to chance."""

    plan: WorldPlan

    def draw(self, latency: Latency) -> float: ...

    def chance(self, probability: float) -> bool: ...

    def life(self, host: Host) -> IncarnationStart: ...


class Listener(Protocol):
    """The synchroniser's ear."""

    def tell(self, event: Event) -> None: ...

    def unless_over(self, event: Event) -> None:
        """Tell it while the job is not finished."""


class Processes(Protocol):
    """The islands' processes, and calls into them."""

    hosts: dict[tuple[IslandId, Incarnation], Host]

    def latest(self, island: IslandId) -> Host | None: ...

    def addressed(self, host: Host, call: Callable[[], None]) -> Callable[[], None]:
        """A call as the synchroniser that lives now makes it; it may arrive later."""

    def reach(self, host: Host, call: Callable[[], None]) -> None: ...

    def die(self, host: Host, reason: str, *, announced: bool) -> None: ...
