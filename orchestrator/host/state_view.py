"""The one view through which a job's process reads the core's state, whatever thread asks.

    pump     with view.changing(): driver.step(event) ──▶ the core's state, and the accounts folded from the same events
    others   view.phase, view.islands(), …               each under the same lock: what stands between two events
    status   with view.unchanged(timeout_s):              several reads that belong to one moment, accounts included

The rule: only the pump changes the state, inside ``changing``; everybody else, and the pump outside of it, reads through
this view. What it returns is frozen, or a copy. Before a view is made, whoever opens the job's files has the core to itself
(``job_files``), and a snapshot is taken inside ``changing`` (``snapshot_writer``). A test holds the shell to this.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.core import invariants
from orchestrator.core.island_record import Island
from orchestrator.core.state import Checkpoints
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.view import JobView
from orchestrator.core.vocabulary import Incarnation, Instant, IslandId, JobOutcome, JobPhase

FOREVER = -1.0


class StateView:
    """``island_ids`` are those of the job's policy, standbys included: they never change, and need no lock."""

    def __init__(self, core: Synchroniser) -> None:
        self._core = core
        self._checked: dict[IslandId, Island] = {}
        self._lock = threading.RLock()  # reads inside ``unchanged`` and ``changing`` take it again
        self.island_ids = tuple(core.state.islands)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Lock the state while the pump changes it. Readers wait until the event is decided and recorded."""
        with self._lock:
            yield

    @contextmanager
    def unchanged(self, timeout_s: float = FOREVER) -> Iterator[bool]:
        """Nothing changes inside. False, and no promise, where the pump was still at one event after ``timeout_s``."""
        held = self._lock.acquire(timeout=timeout_s)
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def check(self) -> None:
        """Raise InternalError where the core's invariants do not hold."""
        with self._lock:
            invariants.check(self._core.state, self._checked)

    @property
    def phase(self) -> JobPhase:
        with self._lock:
            return self._core.state.phase

    @property
    def outcome(self) -> JobOutcome | None:
        with self._lock:
            return self._core.state.outcome

    def view(self, at: Instant) -> JobView:
        """The job as everybody outside may see it."""
        with self._lock:
            return self._core.view(at)

    def islands(self) -> dict[IslandId, Island]:
        with self._lock:
            return dict(self._core.state.islands)

    def incarnation_of(self, island: IslandId) -> Incarnation:
        with self._lock:
            return self._core.state.islands[island].incarnation

    def step_counts(self) -> dict[IslandId, int]:
        """Return how many steps each island has trained, those of its earlier incarnations included."""
        with self._lock:
            reports = self._core.state.reports
            return {
                island.id: island.steps_before + (reports[island.id].steps_total if island.id in reports else 0)
                for island in self._core.state.islands.values()
            }

    def checkpoints(self) -> Checkpoints:
        with self._lock:
            return self._core.state.checkpoints
