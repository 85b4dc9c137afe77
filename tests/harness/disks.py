"""The simulated disk, failing at its journal where it is told to: it fills up, tears writes, or its user dies."""

from __future__ import annotations

from pathlib import Path

from orchestrator.parameters.journal.storage import SUFFIX
from tests.swarm.disk import Died, DiskFault, Operation, SimulatedDisk

__all__ = ["Died", "FaultyDisk"]


class FaultyDisk(SimulatedDisk):
    """``faults`` maps the number of an ``append`` or ``sync`` of a journal's file, from 1, to what befalls it."""

    def __init__(self, **faults: dict[int, str]) -> None:
        super().__init__(self._scripted)
        self.calls = {"append": 0, "sync": 0}
        self._faults = faults

    def _scripted(self, operation: Operation, path: Path) -> DiskFault | None:
        if path.suffix != SUFFIX:
            return None
        self.calls[operation] += 1
        fault = self._faults.get(operation, {}).get(self.calls[operation])
        return DiskFault(fault) if fault else None
