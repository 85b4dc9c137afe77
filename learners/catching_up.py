"""The catch-up of one incarnation: it takes one state, whoever gives it, and reports that as often as it is asked to.

Responsible for two states never being mixed, whatever comes at the same time: the first that is whole is the island's. A
repeated request gets the same report, for a restarted synchroniser may not know. Refuses to know what a state is made of
(``loop``), how peers are reached, and what becomes of an island without one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from time import monotonic

from learners.outbox import Outbox
from learners.state_transfer import Donor, FetchedState, StateFetch
from orchestrator.core.messages import CatchUpFailure, CaughtUp
from orchestrator.core.vocabulary import IslandId, Version
from orchestrator.errors import in_words

log = logging.getLogger(__name__)

RequestNumber = tuple[int, int]
"""The epoch of who requests, and its count of requests. Calls may overtake each other."""


class CatchingUp:
    """The catch-up of one incarnation. ``caught_up`` is its report, once it holds a state."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._lock = threading.Lock()
        self._fetching: StateFetch | None = None
        self._latest: RequestNumber = (0, 0)
        self.caught_up: CaughtUp | None = None

    def take(self, donor: IslandId | None, load: Callable[[], tuple[tuple[Version, ...], int]]) -> None:
        """Have ``load`` take the state of ``donor`` and return its versions and step. ``CaughtUp`` or ``CatchUpFailure``."""
        with self._lock:
            began = monotonic()
            if self.caught_up is None:
                try:
                    versions, step = load()
                except Exception as error:
                    log.exception("the state of %s cannot be taken", donor or "the synchroniser")
                    self._outbox.put(CatchUpFailure(donor, in_words(error)))
                    return
                self._has(CaughtUp(donor, versions, step, monotonic() - began))
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
        """Take a state from these peers, by the names of their processes. ``CaughtUp`` follows.

        And ``CatchUpFailure`` for each that gives nothing. Asked again, it goes on with these from what has come; a
        ``number`` older than the latest is passed over.
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
        """This process is another incarnation from here on, and has yet to say that it holds a state."""
        with self._lock:
            self.caught_up, self._fetching, self._latest = None, None, (0, 0)

    def _fetched(self, state: FetchedState, load: Callable[[FetchedState], None], began: float) -> None:
        """Raises what ``load`` does."""
        with self._lock:
            if self.caught_up is None:
                load(state)
                self._has(CaughtUp(state.donor, state.versions, state.step, monotonic() - began, state.sources))

    def _has(self, report: CaughtUp) -> None:
        source = ", ".join(sorted(set(report.sources))) or report.donor or "the synchroniser"
        log.info("caught up from %s, at step %d", source, report.step)
        self.caught_up = report
        if self._fetching is not None:
            self._fetching.close()
        self._outbox.put(report)

    def _failed(self, donor: IslandId, error: BaseException) -> None:
        log.warning("no state from %s: %s", donor, in_words(error))
        self._outbox.put(CatchUpFailure(donor, in_words(error)))
