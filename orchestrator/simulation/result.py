"""The result of a simulation, and the tape that it writes while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.core.vocabulary import Duration
from orchestrator.plain import finite
from orchestrator.simulation.spec import SimulationSpec
from orchestrator.tape.schema import FleetHeader, Header, Record

Progress = Callable[[float, str], None]
"""Called with the ratio that is done, and what is being simulated."""


class TapeSink(Protocol):
    """A tape that is being written (``tape.storage.TapeWriter``)."""

    def append(self, record: Record) -> None: ...

    def append_lines(self, lines: bytes, count: int) -> None: ...


OpenTape = Callable[[str, Header | FleetHeader], TapeSink]
"""Called once for each of ``tape_names``, with its header."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """``rows`` are plain data, one for each system and level, in the order of the specification."""

    spec: SimulationSpec
    rows: tuple[Mapping[str, Any], ...]
    simulated_s: Duration
    partial: bool = False
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        about = {"name": self.spec.name, "seed": self.spec.seed, "duration_s": self.spec.duration}
        document: dict[str, Any] = finite(
            {
                **about,
                "simulated_s": self.simulated_s,
                "partial": self.partial,
                "systems": self.rows,
                "notes": self.notes,
            }
        )
        return document
