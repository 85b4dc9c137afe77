"""The record of one island in the core, and the transitions of its state.

    PLACING ──▶ STARTING ──▶ CATCHING_UP ──▶ TRAINING          (forward: placed, ready, caught up)
        │           │              │            │  ▲
        │           └──────────────┴────────────┤  │ connection restored
        │                                       ▼  │
        │                                     SUSPECT            (no answer; a guess; also while DRAINING)
        │                                       │ timeout
        └──────────────▶ LOST ◀─────────────────┘                (dead; known or decided)
                          │ back-off over: PLACING, incarnation + 1
                          ├──▶ STOPPED   an operator wants it away
                          ├──▶ PLACING   at once, incarnation + 1, as the process of a standby (``standby``)
                          ├──▶ CORDONED  its node group takes nothing new; PLACING once it does
                          └──▶ FAILED    given up, with the reason

    TRAINING ◀──re-added── DRAINING ──all its work is merged──▶ DRAINED      (an operator wants it away, and its work kept)
                              └──the same, but its node is about to go──▶ LOST, and placed elsewhere (``departure``)

A lost island is placed again after a back-off that doubles with each life that ended without a contribution, with a jitter
that is a function of island and incarnation (so that islands lost together do not come back together, and a replay
decides the same). After ``restarts_max`` such lives it is given up, and says why; an operator may re-add it. An island in
quarantine is lost in the same way, whatever it contributed before: a new process with a peer's state heals what has
diverged. It does not heal bad hardware, under which it would come and go for ever: so only ``quarantines_max`` times.

Records are frozen; every function returns the next one, those that begin or end an incarnation with what is to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from zlib import crc32

from orchestrator.core.effects import Effect, PlaceIsland, SetTimer, StopIsland
from orchestrator.core.events import IslandPlaced
from orchestrator.core.messages import CaughtUp, Overdue, Progress
from orchestrator.core.vocabulary import (
    Contribution,
    Duration,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    IslandPlan,
    IslandState,
    JobPolicy,
    Version,
)

WITH_PROCESS = frozenset(
    {
        IslandState.PLACING,
        IslandState.STARTING,
        IslandState.CATCHING_UP,
        IslandState.TRAINING,
        IslandState.STANDBY,
        IslandState.SUSPECT,
        IslandState.DRAINING,
    }
)
"""States in which a process of the current incarnation may exist."""


DOUBLINGS_MAX = 60
"""Beyond it every back-off has long been capped, and a power of two would in the end not fit into a float."""


@dataclass(frozen=True, slots=True, eq=False)
class Island:
    """One island: what is wanted of it (``plan``, ``wanted``) and what has been reported of it.

    ``step`` is the logical step that its state was taken at, ``*_before`` the totals of its earlier incarnations. What it
    has trained since is in its latest report (``JobState.reports``), which changes too often to be kept here.
    ``kill_reason`` says why the process is to be killed, once an operator asked for it. ``failures`` counts lives in a row
    that ended without a contribution. ``last_offer``, ``merged_into`` and ``merged_offer`` are per fragment and of this
    incarnation; so is ``behind``: a version that it lacked when an offer was first refused for that, and that offer's step.
    ``donors`` are those it takes a state from, or took the last one from; ``failed_donors`` those who did not give one.
    ``saved``: the checkpoint that the job goes on from has a state of it, for its first process; it is its own donor then.
    ``strikes`` counts bad contributions in a row by fragment, ``struck_offer`` is the latest of them; ``health_note`` says
    what was wrong with the last, until work of the island is merged again. ``quarantines`` are counted until it is re-added.
    ``overdue_s`` is how long its step has taken when that was last said to be far too long; 0 once it steps again.
    ``process`` is the standby, with its incarnation, whose process this incarnation took over; ``None`` has one of its own.
    """

    plan: IslandPlan
    state: IslandState = IslandState.LOST
    reason: str = ""
    wanted: bool = True
    incarnation: Incarnation = Incarnation(0)
    node: str = ""
    pid: int | None = None
    ready: bool = False
    flushed: bool = False
    kill_reason: str = ""
    state_before_suspect: IslandState | None = None
    suspect_since: Instant = 0.0
    step: int = 0
    steps_before: int = 0
    tokens_before: int = 0
    last_merge_at: Instant | None = None
    failures: int = 0
    restarts: int = 0
    timer_serial: int = 0
    donors: tuple[IslandId, ...] = ()
    failed_donors: frozenset[IslandId] = frozenset()
    last_offer: dict[FragmentId, int] = field(default_factory=dict)
    merged_into: dict[FragmentId, Version] = field(default_factory=dict)
    merged_offer: dict[FragmentId, int] = field(default_factory=dict)
    behind: dict[FragmentId, tuple[Version, int]] = field(default_factory=dict)
    strikes: dict[FragmentId, int] = field(default_factory=dict)
    struck_offer: dict[FragmentId, int] = field(default_factory=dict)
    health_note: str = ""
    quarantines: int = 0
    process: tuple[IslandId, Incarnation] | None = None
    saved: bool = False
    overdue_s: Duration = 0.0

    @property
    def id(self) -> IslandId:
        return self.plan.island

    @property
    def live(self) -> bool:
        """Somebody a round may wait for."""
        return self.state is IslandState.TRAINING and not self.flushed

    @property
    def gives(self) -> bool:
        """Somebody who steps no more, and may still have work to offer."""
        return self.state is IslandState.DRAINING and not self.flushed


Step = tuple[Island, tuple[Effect, ...]]


def placed(before: Island, event: IslandPlaced) -> Island:
    return replace(before, state=IslandState.STARTING, reason="building the model", node=event.node, pid=event.pid)


def catching_up(before: Island, donors: tuple[IslandId, ...], reason: str) -> Island:
    return replace(before, state=IslandState.CATCHING_UP, donors=donors, reason=reason)


def failed_by(before: Island, donor: IslandId) -> Island:
    return replace(before, failed_donors=before.failed_donors | {donor})


def caught_up(before: Island, report: CaughtUp) -> Island:
    source = report.donor or (f"the standby {before.process[0]}" if before.process else "the synchroniser")
    source = "the checkpoint" if report.donor == before.id else " and ".join(sorted(set(report.sources))) or source
    return replace(
        before,
        state=IslandState.TRAINING,
        reason=f"state taken from {source}",
        step=report.step,
        failed_donors=frozenset(),
        saved=False,
    )


def standing_by(before: Island, report: CaughtUp) -> Island:
    """It holds a state, and waits to be needed. That it came so far ends the row of its failures."""
    return replace(
        before,
        state=IslandState.STANDBY,
        reason=f"ready to take a lost island's place, with a state of {report.donor or 'the synchroniser'}",
        step=report.step,
        failed_donors=frozenset(),
        failures=0,
    )


def suspected(before: Island, reason: str, timer_serial: int, at: Instant) -> Island:
    return replace(
        before,
        state=IslandState.SUSPECT,
        state_before_suspect=before.state,
        reason=reason,
        timer_serial=timer_serial,
        suspect_since=at,
    )


def overdue(before: Island, report: Overdue, limit_s: Duration) -> Island:
    """Its step does not end."""
    usual = (
        f"where {report.usual_seconds:.2g} s is usual"
        if report.usual_seconds
        else "at one step, boundary or evaluation"
    )
    over = "" if report.seconds < limit_s else f", beyond the limit of {limit_s:.0f} s"
    return replace(before, overdue_s=report.seconds, reason=f"it hangs: {report.seconds:.0f} s {usual}{over}")


def steps_again(before: Island) -> Island:
    """It was only slow."""
    return replace(
        before, overdue_s=0.0, reason=f"it steps again, after more than {before.overdue_s:.0f} s in one step"
    )


def draining(before: Island, reason: str) -> Island:
    """It steps no more, and nobody waits for it."""
    return replace(before, state=IslandState.DRAINING, wanted=False, reason=reason)


def handing_over(before: Island, reason: str, timer_serial: int) -> Island:
    """It steps no more, and nobody waits for it; it is wanted, and goes on elsewhere."""
    return replace(before, state=IslandState.DRAINING, reason=reason, timer_serial=timer_serial)


def cordoned(before: Island, reason: str) -> Island:
    """It is wanted, and not placed for now."""
    return replace(before, state=IslandState.CORDONED, reason=reason, timer_serial=0)


def dismissed(before: Island, reason: str) -> Island:
    """Nobody wants it any more, and it has no work to lose."""
    return replace(before, state=IslandState.STOPPED, wanted=False, state_before_suspect=None, reason=reason, pid=None)


def wanted_again(before: Island, reason: str) -> Island:
    """A drain is called off, now or once the island answers again; what is being killed will be placed again."""
    after = replace(before, wanted=True)
    if before.state is IslandState.DRAINING:
        return replace(after, state=IslandState.TRAINING, reason=reason)
    if before.state_before_suspect is IslandState.DRAINING:
        return replace(after, state_before_suspect=IslandState.TRAINING)
    return after


def drained(before: Island) -> Island:
    return replace(
        before, state=IslandState.DRAINED, state_before_suspect=None, reason="all its work is merged", pid=None
    )


def restored(before: Island) -> Island:
    """The guess was wrong: go on where it was."""
    assert before.state_before_suspect is not None
    return replace(
        before,
        state=before.state_before_suspect,
        state_before_suspect=None,
        reason="connection restored",
        timer_serial=0,
    )


def contributed(before: Island, merged: Contribution, version: Version, at: Instant) -> Island:
    """Its work is in ``version``: it is healthy, and may not offer the same work again."""
    return replace(
        before,
        merged_into={**before.merged_into, merged.fragment: version},
        merged_offer={**before.merged_offer, merged.fragment: merged.offer},
        last_merge_at=at,
        failures=0,
        health_note=before.health_note if before.strikes else "",
    )


def admitted(before: Island, c: Contribution) -> Island:
    """Its latest contribution to this fragment is good."""
    strikes = {fragment: count for fragment, count in before.strikes.items() if fragment != c.fragment}
    return replace(before, last_offer={**before.last_offer, c.fragment: c.offer}, strikes=strikes)


def struck(before: Island, c: Contribution, health_note: str) -> Island:
    """Its latest contribution to this fragment is bad."""
    return replace(
        before,
        health_note=health_note,
        strikes={**before.strikes, c.fragment: before.strikes.get(c.fragment, 0) + 1},
        struck_offer={**before.struck_offer, c.fragment: c.offer},
    )


def failures_reset(before: Island) -> Island:
    """An operator wants it, whatever it did before."""
    return replace(before, wanted=True, failures=0, quarantines=0)


def choose_donors(steps: Mapping[Island, int], receiver: Island, count: int) -> list[Island]:
    """The ``count`` healthiest peers to take a state from: furthest in their logical clocks, ties by name.

    Excluded are donors that failed this receiver, and islands with a health note. Donors that give to it already come first,
    then idle ones, then those that give to others: islands that come back together do not load the same donor.
    """
    unfit = receiver.failed_donors | {receiver.id}
    candidates = [i for i in steps if i.live and not i.health_note and i.id not in unfit]
    others = (i for i in steps if i.state is IslandState.CATCHING_UP and i.id != receiver.id)
    giving = {donor for other in others for donor in other.donors}
    state = receiver.state_before_suspect if receiver.state is IslandState.SUSPECT else receiver.state
    present = receiver.donors if state is IslandState.CATCHING_UP else ()
    return sorted(candidates, key=lambda i: (i.id not in present, i.id in giving, -steps[i], i.id))[:count]


# ── an incarnation begins, or is over ─────────────────────────────────────────────────────────────────────────────────


def place(before: Island, last_report: Progress | None, reason: str) -> Step:
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
        health_note=before.health_note,
        quarantines=before.quarantines,
        saved=before.saved and not before.incarnation,
    )
    return after, (PlaceIsland(after.id, after.incarnation, after.plan.node_group, reason),)


def lose(
    before: Island, policy: JobPolicy, reason: str, now: Instant, timer_serial: int, *, dead: bool, final: bool = False
) -> Step:
    """The incarnation is over: wait and place again, or stay away, or give up. A process that may live on is stopped.

    ``final`` says that the next one would fail as well.
    """
    had_process = before.state in WITH_PROCESS
    stop = () if dead or not had_process else (StopIsland(before.id, before.incarnation, reason),)
    if not before.wanted:
        return replace(before, state=IslandState.STOPPED, reason=reason, pid=None), stop
    failures = before.failures + 1
    if final:
        return replace(before, state=IslandState.FAILED, reason=reason, pid=None, failures=failures), stop
    if failures > policy.restarts_max:
        summary = f"given up after {failures} failures in a row; last: {reason}"
        return replace(before, state=IslandState.FAILED, reason=summary, pid=None, failures=failures), stop
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


def depart(before: Island, reason: str, now: Instant, timer_serial: int) -> Step:
    """The incarnation is over because its node goes, which is no failure of its own: place the next one, without a wait."""
    stop = StopIsland(before.id, before.incarnation, reason)
    if not before.wanted:
        return dismissed(before, reason), (stop,)
    after = replace(
        before,
        state=IslandState.LOST,
        state_before_suspect=None,
        reason=f"{reason}; placing it elsewhere",
        pid=None,
        timer_serial=timer_serial,
    )
    return after, (stop, SetTimer(backoff_timer(before), timer_serial, now))


def quarantine(before: Island, policy: JobPolicy, reason: str, now: Instant, timer_serial: int, remedy: str) -> Step:
    """The incarnation's work cannot be used: end it, and place the next one, or give up."""
    count = before.quarantines + 1
    flagged = replace(before, quarantines=count, health_note=f"quarantined: {reason}")
    after, effects = lose(flagged, policy, flagged.health_note, now, timer_serial, dead=False)
    if after.state is not IslandState.LOST or count <= policy.health.quarantines_max:
        return after, effects
    summary = f"given up after {count} quarantines; last: {reason.rstrip('.')}; {remedy}"
    return replace(after, state=IslandState.FAILED, reason=summary), tuple(
        e for e in effects if isinstance(e, StopIsland)
    )


def backoff(island: Island, failures: int, policy: JobPolicy) -> Duration:
    """Seconds to wait before the next life: doubled each time, capped, spread by up to a quarter."""
    doublings = min(failures - 1, DOUBLINGS_MAX)
    wait: Duration = min(policy.backoff_first_s * 2.0**doublings, policy.backoff_max_s)
    jitter = crc32(f"{island.id}.{island.incarnation}".encode()) / 0xFFFFFFFF
    return wait * (1.0 + 0.25 * jitter)


def backoff_timer(island: Island) -> str:
    return f"backoff:{island.id}"


def departure_timer(island: Island) -> str:
    return f"departure:{island.id}"


def suspect_timer(island: Island) -> str:
    return f"suspect:{island.id}"
