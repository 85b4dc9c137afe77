"""The simulated disk with scripted faults of the journal: it fills up, tears writes, or its user dies."""

from __future__ import annotations

from pathlib import Path

from orchestrator.parameters.journal import SUFFIX
from tests.swarm.disk import Died, DiskFault, Operation, SimulatedDisk

__all__ = ["Died", "FaultyDisk"]


class FaultyDisk(SimulatedDisk):
    """A disk with scripted faults. ``faults`` maps the number of a journal's ``append`` or ``sync``, from 1, to its
    fault.
    """

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
