"""Timers, seen from outside: every one has an owner, a serial of its own and a deadline that its kind explains.

Responsible for: which timers are awaited. A newer serial replaces an older, so they cannot pile up: there is one timer of
each kind for each subject. Refuses to know: what a timer that rings leads to.
"""

from __future__ import annotations

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, Progress
from orchestrator.core.vocabulary import (
    Duration,
    FragmentId,
    GraceTimer,
    Instant,
    IslandId,
    IslandTimer,
    IslandTimerKind,
    JobPolicy,
    JobTimer,
    Timer,
    Version,
)
from tests.swarm.checkers.violation import require

FLUSH = JobTimer.FLUSH
ROUNDING = 1e-9
"""``at + wait - at`` is not ``wait`` to the last bit."""


def backoff(island: IslandId) -> Timer:
    return IslandTimer(IslandTimerKind.BACKOFF, island)


def departure(island: IslandId) -> Timer:
    return IslandTimer(IslandTimerKind.DEPARTURE, island)


def suspect(island: IslandId) -> Timer:
    return IslandTimer(IslandTimerKind.SUSPECT, island)


class Timers:
    """``rang`` names the timer whose awaited deadline this event is, if it is one."""

    def __init__(self, policy: JobPolicy) -> None:
        islands = [plan.island for plan in (*policy.islands, *policy.standbys)]
        self.rang: Timer | None = None
        self._known: set[Timer] = {*JobTimer, *(GraceTimer(FragmentId(p)) for p in range(policy.fragment_count))}
        self._known |= {IslandTimer(kind, island) for kind in IslandTimerKind for island in islands}
        self._longest = {
            "flush": policy.flush_timeout_s,
            "suspect": policy.suspect_timeout_s,
            "checkpoint": max(policy.checkpoints.every_s, policy.checkpoints.timeout_s or 0.0),
            "backoff": 1.25 * policy.backoff_max_s,
        }
        self._saves_by_size = len(islands) if policy.checkpoints.timeout_s is None else 0
        self._grace_cap_steps = policy.grace_cap_steps or 0.0
        self._leaving_closes = policy.leaving_closes
        self._slowest_step: Duration = 0.0
        self._slowest_sync: Duration = 0.2
        self._closed_at: dict[tuple[FragmentId, Version], Instant] = {}
        self._notice_s: Duration = 0.0
        self._awaited: dict[Timer, int] = {}
        self._serial = 0

    def awaits(self, timer: Timer) -> bool:
        return timer in self._awaited

    def drop(self, timer: Timer) -> None:
        """What it was set for is over; when it rings after all, nothing may come of it."""
        self._awaited.pop(timer, None)

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        self.rang = None
        self._notice_s = (event.seconds or 0.0) if isinstance(event, e.NoticeReceived) else 0.0
        if isinstance(event, e.IslandReported) and isinstance(event.report, Progress):
            self._slowest_step = max(self._slowest_step, event.report.step_seconds_median)
        elif isinstance(event, e.IslandReported) and isinstance(event.report, Adopted):
            closed_at = self._closed_at.pop((event.report.fragment, event.report.version), event.at)
            self._slowest_sync = max(self._slowest_sync, event.at - closed_at)
        elif isinstance(event, e.OuterStateSeeded) and self._saves_by_size:
            by_size = 60.0 + 12 * event.parameter_count * self._saves_by_size / 5e6
            self._longest["checkpoint"] = max(self._longest["checkpoint"], by_size)
        elif isinstance(event, e.TimerFired):
            self._ring(event, effects)
        for effect in effects:
            if isinstance(effect, f.SetTimer):
                self._set(event.at, effect)
            elif isinstance(effect, f.MergeFragment):
                self._closed_at[effect.fragment, effect.version] = event.at

    def _ring(self, event: e.TimerFired, effects: tuple[f.Effect, ...]) -> None:
        if self._awaited.get(event.timer) == event.serial:
            self.rang = event.timer
            del self._awaited[event.timer]
        else:
            require(not effects, "nothing comes of a timer that was replaced", (event, effects))

    def _set(self, at: float, effect: f.SetTimer) -> None:
        require(effect.timer in self._known, "timers have known names, so they cannot pile up", effect)
        require(effect.serial > self._serial, "every timer has a later serial than the one before", effect)
        kind = str(effect.timer).partition(":")[0]
        grace = self._grace_cap_steps * self._slowest_step
        if self._leaving_closes:  # who leaves ends a step, and its work is transferred
            grace = max(grace, 2.0 * self._slowest_step + self._slowest_sync)
        longest = self._longest.get(kind, grace)
        longest = self._notice_s if kind == "departure" else longest
        wait = effect.due_at - at
        require(-ROUNDING <= wait <= longest + ROUNDING, f"a {kind} timer waits as policy says", effect)
        self._serial = effect.serial
        self._awaited[effect.timer] = effect.serial
