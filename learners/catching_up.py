"""The catch-up of one incarnation: loads exactly one state, from whichever source delivers first, and reports it.

Two states are never mixed, even if several arrive at the same time: the first complete one becomes the island's state. A
repeated request gets the same report again, because a restarted synchroniser may not have it. What a state consists of is in
``loop``; how peers are reached, and what happens to an island without a state, is decided elsewhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import NamedTuple

from learners.outbox import Outbox
from learners.state_transfer import Donor, FetchedState, StateFetch
from orchestrator.core.messages import CatchUpFailure, CaughtUp, LeftState
from orchestrator.core.vocabulary import IslandId, Version
from orchestrator.errors import AtollError, in_words

log = logging.getLogger(__name__)

RequestNumber = tuple[int, int]
"""The epoch of the requester and its count of requests. A later call may arrive before an earlier one."""


class Loaded(NamedTuple):
    """The versions and the step of a state, and what of it an earlier incarnation left."""

    versions: tuple[Version, ...]
    step: int
    left: LeftState | None = None


class CatchingUp:
    """Catches up once, when ``loadable`` is set. ``caught_up`` is the report, once the island holds a state."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._lock = threading.Lock()
        self._fetching: StateFetch | None = None
        self._latest: RequestNumber = (0, 0)
        self.caught_up: CaughtUp | None = None
        self.loadable = threading.Event()
        """Set when the trainer can take a state. A peer's is fetched before."""

    def take(self, donor: IslandId | None, load: Callable[[], Loaded]) -> None:
        """Load the state of ``donor``.

        ``load`` does it. ``CaughtUp`` or ``CatchUpFailure`` follows.
        """
        self.loadable.wait()
        with self._lock:
            began = monotonic()
            if self.caught_up is None:
                try:
                    versions, step, left = load()
                except BaseException as error:  # a package's trainer may raise anything
                    log.exception("the state of %s could not be loaded", donor or "the synchroniser")
                    self._outbox.put(CatchUpFailure(donor, reason_of(error)))
                    return
                self._has(CaughtUp(donor, versions, step, monotonic() - began, left=left))
            else:
                self._outbox.put(self.caught_up)

    def fetch(
        self,
        number: RequestNumber,
        donors: Mapping[str, Donor],
        fragment_count: int,
        load: Callable[[FetchedState], None],
        *,
        of_one_boundary: bool,
    ) -> None:
        """Fetch a state from these peers, named by their processes. ``CaughtUp`` follows.

        ``CatchUpFailure`` follows for each peer that gives nothing. A repeated request continues with these peers and keeps
        what has arrived. A request whose ``number`` is older than the latest is ignored.
        """
        with self._lock:
            if self.caught_up is not None:
                self._outbox.put(self.caught_up)
                return
            if number <= self._latest:
                return
            self._latest = number
            if self._fetching is None:
                began = monotonic()
                self._fetching = StateFetch(
                    fragment_count,
                    of_one_boundary=of_one_boundary,
                    take=lambda state: self._fetched(state, load, began),
                    failed=self._failed,
                )
            self._fetching.ask(donors)

    def forget(self) -> None:
        """Start over as another incarnation, which has not yet reported that it holds a state."""
        with self._lock:
            self.caught_up, self._fetching, self._latest = None, None, (0, 0)

    def _fetched(self, state: FetchedState, load: Callable[[FetchedState], None], began: float) -> None:
        """Load the fetched state. Raises what ``load`` raises."""
        self.loadable.wait()
        with self._lock:
            if self.caught_up is None:
                load(state)
                self._has(CaughtUp(state.donor, state.versions, state.step, monotonic() - began, state.sources))

    def _has(self, report: CaughtUp) -> None:
        source = ", ".join(sorted(set(report.sources))) or report.donor or "the synchroniser"
        if report.left is not None:
            source = f"what its incarnation {report.left.incarnation} left"
        log.info("caught up from %s, at step %d", source, report.step)
        self.caught_up = report
        if self._fetching is not None:
            self._fetching.close()
        self._outbox.put(report)

    def _failed(self, donor: IslandId, error: BaseException) -> None:
        log.warning("no state from %s: %s", donor, in_words(error))
        self._outbox.put(CatchUpFailure(donor, in_words(error)))


def reason_of(error: BaseException) -> str:
    """Return why a state that is here was not loaded. Foreign errors come from the trainer that was to load it."""
    return in_words(error) if isinstance(error, AtollError) else f"its trainer cannot load it: {in_words(error)}"
