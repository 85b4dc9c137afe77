"""Desired islands against observed ones: place, wait, place again, give up.

A lost island is placed again after a back-off that doubles with each life that ended without a contribution, with a jitter
that is a function of island and incarnation (so that islands lost together do not come back together, and a replay
decides the same). After ``restarts_max`` such lives it is given up, and says why; an operator may re-add it.

An island in quarantine is lost in the same way, whatever it contributed before: a new process with a peer's state heals what
has diverged. It does not heal bad hardware, under which it would come and go for ever: so only ``quarantines_max`` times.
"""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from orchestrator.core.effects import Effect, PlaceIsland, SetTimer, StopIsland
from orchestrator.core.events import ProgressReported
from orchestrator.core.membership import WITH_PROCESS, Island
from orchestrator.core.vocabulary import Duration, Incarnation, Instant, IslandState, JobPolicy

DOUBLINGS_MAX = 60
"""Beyond it every back-off has long been capped, and a power of two would in the end not fit into a float."""

Step = tuple[Island, tuple[Effect, ...]]


def place(before: Island, last_report: ProgressReported | None, reason: str) -> Step:
    """Begin the next incarnation. What the one before had trained, by its last report, is carried on as totals."""
    steps, tokens = (last_report.steps_total, last_report.tokens_total) if last_report else (0, 0)
    after = Island(
        plan=before.plan,
        state=IslandState.PLACING,
        reason=reason,
        incarnation=Incarnation(before.incarnation + 1),
        steps_before=before.steps_before + steps,
        tokens_before=before.tokens_before + tokens,
        step=last_report.step if last_report else before.step,
        last_merge_at=before.last_merge_at,
        failures=before.failures,
        restarts=before.restarts + (1 if before.incarnation else 0),
        flag=before.flag,
        quarantines=before.quarantines,
        saved=before.saved and not before.incarnation,
    )
    return after, (PlaceIsland(after.id, after.incarnation, after.plan.node_group, reason),)


def lose(before: Island, policy: JobPolicy, reason: str, now: Instant, timer_serial: int, *, dead: bool) -> Step:
    """The incarnation is over: wait and place again, or stay away, or give up. A process that may live on is stopped."""
    had_process = before.state in WITH_PROCESS
    stop = () if dead or not had_process else (StopIsland(before.id, before.incarnation, reason),)
    if not before.wanted:
        return replace(before, state=IslandState.STOPPED, reason=reason, pid=None), stop
    failures = before.failures + 1
    if failures > policy.restarts_max:
        why = f"given up after {failures} failures in a row; last: {reason}"
        return replace(before, state=IslandState.FAILED, reason=why, pid=None, failures=failures), stop
    wait = backoff(before, failures, policy)
    after = replace(
        before,
        state=IslandState.LOST,
        reason=f"{reason}; placing again in {wait:.1f} s",
        pid=None,
        failures=failures,
        timer_serial=timer_serial,
    )
    return after, (*stop, SetTimer(backoff_timer(before), timer_serial, now + wait))


def quarantine(before: Island, policy: JobPolicy, reason: str, now: Instant, timer_serial: int) -> Step:
    """The incarnation's work cannot be used: end it, and place the next one, or give up."""
    count = before.quarantines + 1
    flagged = replace(before, quarantines=count, flag=f"quarantined: {reason}")
    after, effects = lose(flagged, policy, flagged.flag, now, timer_serial, dead=False)
    if after.state is not IslandState.LOST or count <= policy.health.quarantines_max:
        return after, effects
    why = f"given up after {count} quarantines; last: {reason}; look at its machine before it is re-added"
    return replace(after, state=IslandState.FAILED, reason=why), tuple(e for e in effects if isinstance(e, StopIsland))


def backoff(island: Island, failures: int, policy: JobPolicy) -> Duration:
    """Seconds to wait before the next life: doubled each time, capped, spread by up to a quarter."""
    doublings = min(failures - 1, DOUBLINGS_MAX)
    wait: Duration = min(policy.backoff_first_s * 2.0**doublings, policy.backoff_max_s)
    jitter = crc32(f"{island.id}.{island.incarnation}".encode()) / 0xFFFFFFFF
    return wait * (1.0 + 0.25 * jitter)


def backoff_timer(island: Island) -> str:
    return f"backoff:{island.id}"


def suspect_timer(island: Island) -> str:
    return f"suspect:{island.id}"
