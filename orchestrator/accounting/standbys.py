"""The account of standbys: their time, apart from that of the islands, and how often one was promoted.

A standby's seconds are in no class of ``goodput``. They are not productive, for it trains nothing; counted as badput among
the islands' they would make a job look worse the better it is prepared, and change what the ratio means: which part of the
time of its islands reached a merge. Nor may they be hidden, for accelerators that wait cost what those cost that train.
"""

from __future__ import annotations

from typing import Any

from orchestrator.accounting.lifecycle import ACTIVE, Lifecycle
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.vocabulary import Duration, Instant, IslandState, JobPolicy

_READY = IslandState.STANDBY.value


class Standbys:
    """The fold. ``apply`` every step, then ask for a ``summary``."""

    _lifecycle: Lifecycle
    _seconds: dict[str, Duration]
    _promotions: int

    def __init__(self, policy: JobPolicy) -> None:
        self._lifecycle = Lifecycle(tuple(plan.island for plan in policy.standbys))
        self._seconds = {}
        self._promotions = 0

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        lives = self._lifecycle.lives
        if not lives or self._lifecycle.finished_at is not None:
            return
        since = {standby: life.since for standby, life in lives.items()}
        for change in self._lifecycle.apply(event, effects):
            self._add(change.before, change.at - since[change.island])
            since[change.island] = change.at
        for effect in effects:
            if isinstance(effect, f.PlaceIsland) and effect.standby is not None:
                self._promotions += not isinstance(event, e.SynchroniserRestarted)

    def summary(self, at: Instant) -> dict[str, Any]:
        """Seconds over all standbys until ``at``: standing by, and coming to it."""
        seconds = dict(self._seconds)
        until = at if self._lifecycle.finished_at is None else self._lifecycle.finished_at
        for life in self._lifecycle.lives.values():
            if life.state in ACTIVE:
                seconds[life.state] = seconds.get(life.state, 0.0) + until - life.since
        ready = seconds.get(_READY, 0.0)
        rest = sum(spent for state, spent in sorted(seconds.items()) if state != _READY)
        return {"ready_seconds": ready, "preparing_seconds": rest, "takeovers": self._promotions}

    def _add(self, state: str, seconds: Duration) -> None:
        if state in ACTIVE:
            self._seconds[state] = self._seconds.get(state, 0.0) + seconds
