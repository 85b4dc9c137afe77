"""A simulated process and the link to it: in which order reports arrive, and what a frozen or cut-off island does.

Reports are carried one by one, in order, as ``runtime``'s links do: an offer's bytes are pulled before the next report is
read. While the island is frozen or cut off nothing is carried either way; what was sent waits. Bytes that were not pulled
die with the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.core.effects import Evaluate
from orchestrator.core.messages import IslandReport
from orchestrator.core.vocabulary import Duration, FragmentId, Instant, IslandId, Version
from orchestrator.impairment import LinkImpairment
from orchestrator.simulation.island import SimulatedIsland


class StateChunk(NamedTuple):
    """A fragment of the state that a donor gave, and the logical step of that donor."""

    donor: IslandId
    version: Version
    step: int


@dataclass(slots=True)
class Host:
    """``impairment`` is its link's, but for cuts, which hold calls back as a freeze does: ``cut_until`` and ``frozen_until``
    lie in the past while all is well, and ``waiting`` are calls held back by either.

    ``began_at`` is when the present step began, ``step_s`` what it takes, ``owed`` the time in it that the island stood
    still and has yet to make up for, ``held_at`` when it would have ended, if the island stood still then (``stepping``).
    ``hung_until``: its step does not end before that.
    ``chunks`` are the fragments that its donors gave so far, ``evaluation`` is what it is to measure at a boundary.
    """

    process: SimulatedIsland
    alive: bool = True
    placed: bool = False
    suspected: bool = False
    carrying: bool = False
    frozen_until: Instant = 0.0
    cut_until: Instant = 0.0
    hung_until: Instant = 0.0
    last_step_end: Instant = 0.0
    began_at: Instant = 0.0
    step_s: Duration = 0.0
    held_at: Instant | None = None
    owed: Duration = 0.0
    reported_at: Instant = 0.0
    impairment: LinkImpairment = field(default_factory=LinkImpairment)
    evaluation: Evaluate | None = None
    chunks: dict[FragmentId, StateChunk] = field(default_factory=dict)
    outbox: deque[IslandReport] = field(default_factory=deque)
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def silent(self, now: Instant) -> bool:
        return now < self.frozen_until or now < self.cut_until

    def post(self, reports: list[IslandReport]) -> None:
        self.outbox.extend(reports)
