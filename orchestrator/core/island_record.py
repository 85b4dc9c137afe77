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
                          ├──▶ PLACING   at once, incarnation + 1, as the process of a standby
                          ├──▶ CORDONED  its node group takes nothing new; PLACING once it does
                          └──▶ FAILED    given up, with the reason

    PLACING ──its node group has no node, or no room──▶ WAITING ──a node is there──▶ STARTING

    TRAINING ◀──re-added── DRAINING ──all its work is merged──▶ DRAINED      (an operator wants it away, and its work kept)
                              └──the same, but its node is about to go──▶ LOST, and placed elsewhere

A lost island is placed again after a back-off that doubles with each life that ended without a contribution, with a jitter
that is a function of island and incarnation (so that islands lost together do not come back together, and a replay
decides the same). After ``restarts_max`` such lives it is given up, and says why; an operator may re-add it. An island that
waits for a node has not failed, however long that takes. An island in quarantine is lost in the same way, whatever it
contributed before: a new process with a peer's state heals what has diverged. It does not heal bad hardware, under which it
would come and go for ever: so only ``quarantines_max`` times.

Records are frozen; every function returns the next one, those that begin or end an incarnation with what is to be done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from orchestrator.core.effects import Effect, PlaceIsland, SetTimer, StopIsland
from orchestrator.core.events import IslandPlaced
from orchestrator.core.messages import CaughtUp, LeftState, Overdue, Progress, Ready
from orchestrator.core.saving import SurvivingIsland
from orchestrator.core.vocabulary import (
    NO_INCARNATION,
    AllOffers,
    Contribution,
    Duration,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    IslandPlan,
    IslandState,
    IslandTimer,
    IslandTimerKind,
    JobPolicy,
    Life,
    MergedOffer,
    Version,
    offer_of_number,
    replace,
)

WITH_PROCESS = frozenset(
    {
        IslandState.PLACING,
        IslandState.WAITING,
        IslandState.STARTING,
        IslandState.CATCHING_UP,
        IslandState.TRAINING,
        IslandState.STANDBY,
        IslandState.SUSPECT,
        IslandState.DRAINING,
    }
)
"""States in which a process of the current incarnation may exist."""
PLACED = WITH_PROCESS - {IslandState.PLACING, IslandState.WAITING}
"""States in which the synchroniser knows of that process, and listens to it."""

DOUBLINGS_MAX = 60
"""More doublings change nothing: every back-off is capped long before. A far larger power of two would overflow a float."""


@dataclass(frozen=True, slots=True, eq=False)
class CurrentIncarnation:
    """The memory of an island's latest incarnation. Placing the island again replaces it as a whole.

    Nothing here survives a placement, so a new field cannot be forgotten there. Each field has one sentence and, after
    "Invariant", what ``core.invariants`` holds of it. Dictionaries are by fragment; a missing fragment means "none yet".
    """

    node: str = ""
    """The name of the node of its process, empty until ``IslandPlaced``."""
    pid: int | None = None
    """The process id. Invariant: None before ``IslandPlaced``, and again once the incarnation is over."""
    process: Life | None = None
    """The standby and its incarnation whose process this incarnation took over; None if the process was made for it.
    Invariant: only an island that is no standby took one over, and the standby is in a later incarnation by now."""
    ready: bool = False
    """Whether ``IslandReady`` arrived. Invariant: true while the island catches up, trains, stands by or drains."""
    left: LeftState | None = None
    """The state that an earlier incarnation left on this one's machine. Invariant: None before it is ready."""
    flushed: bool = False
    """Whether the island has given all its work and takes no more steps. Invariant: no round waits for a flushed island."""
    kill_reason: str = ""
    """Why an operator had the process killed; empty if nobody did. Its death has not been reported yet, or has ended it."""
    state_before_suspect: IslandState | None = None
    """The state to return to when a suspect island answers. Invariant: set exactly while the island is SUSPECT."""
    suspect_since: Instant = 0.0
    """When the latest suspicion began, 0 if there was none. Means something only while the island is SUSPECT."""
    timer_serial: int = 0
    """The serial of the one timer that it waits for (suspicion, back-off or departure); timers of other serials are ignored.
    Invariant: a serial that was given out. A SUSPECT island has one, and a LOST one that was placed before."""
    donors: tuple[IslandId, ...] = ()
    """The peers that it takes a state from, or took the last one from; its own id stands for its part of a checkpoint.
    Invariant: all different, and none of ``failed_donors``."""
    failed_donors: frozenset[IslandId] = frozenset()
    """The donors that gave no state. Invariant: empty once the island trains or stands by."""
    last_offer: dict[FragmentId, int] = field(default_factory=dict)
    """The number of its latest offer that a round admitted. After a restart of the synchroniser an offer whose bytes were
    lost counts as not seen. Invariant: a contribution of this incarnation in an open round is its latest."""
    merged_into: dict[FragmentId, Version] = field(default_factory=dict)
    """The version that its latest merged work went into, or that a rollback put in its place. Invariant: it exists."""
    merged_offer: dict[FragmentId, MergedOffer] = field(default_factory=dict)
    """The number of its latest offer that is merged; ``AllOffers`` after a rollback. Invariant: for the fragments of
    ``merged_into``, and not after ``last_offer``."""
    behind: dict[FragmentId, tuple[Version, int]] = field(default_factory=dict)
    """A version that it lacked when an offer was first refused for that, and the step of that offer. Invariant: the version
    exists."""
    strikes: dict[FragmentId, int] = field(default_factory=dict)
    """How many contributions in a row were bad. Invariant: at least 1, and fewer than ``health.strikes_max`` while there is
    a process."""
    struck_offer: dict[FragmentId, int] = field(default_factory=dict)
    """The number of the latest bad offer, so that none counts twice. Invariant: for every fragment of ``strikes``."""
    overdue_s: Duration = 0.0
    """How long its step had taken when ``StepOverdue`` last said so, in seconds; 0 if it steps. Invariant: 0 before it is
    ready."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The part of ``incarnation`` in the totals of earlier incarnations."""

    incarnation: Incarnation = NO_INCARNATION
    steps: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Island:
    """One island: what is wanted of it, where it is in its life, and what outlives its incarnations.

    What it has trained since its latest placement is in its latest report (``JobState.reports``), which changes too often
    to be kept here. Fields are documented as those of ``CurrentIncarnation`` are.
    """

    plan: IslandPlan
    """Its name, node group, region and accelerators, as in the policy. Invariant: the name is its key among the islands."""
    state: IslandState = IslandState.LOST
    """Where it is in its life (see the drawing above). Invariant: with a process only after a placement, and with none
    after the job's end."""
    reason: str = ""
    """Why it is in this state, for people. No decision reads it, but messages quote it."""
    wanted: bool = True
    """Whether the job wants a process of it. Invariant: true while LOST or CORDONED, false once DRAINED."""
    incarnation: Incarnation = NO_INCARNATION
    """The number of its latest incarnation, 0 before the first. Rises by one with each placement."""
    current: CurrentIncarnation = field(default_factory=CurrentIncarnation)
    """What is remembered of that incarnation only. Replaced as a whole at each placement."""
    step: int = 0
    """Its logical step when its state was taken; at a placement, that of the last report. Invariant: not negative."""
    steps_before: int = 0
    """Inner steps of its earlier incarnations, by their last reports. Invariant: 0 until the second placement."""
    tokens_before: int = 0
    """Tokens of its earlier incarnations, by their last reports. Invariant: 0 until the second placement."""
    counted: Counted = field(default_factory=Counted)
    """The latest incarnation that reported progress and is over. Invariant: no part of it exceeds the totals."""
    last_merge_at: Instant | None = None
    """When work of it was last merged; None if none ever was."""
    failures: int = 0
    """Incarnations in a row that ended without a contribution. Invariant: above ``restarts_max``, FAILED or STOPPED."""
    health_note: str = ""
    """What was wrong with its last bad contribution, until later work is merged. Invariant: set while it has strikes."""
    quarantines: int = 0
    """Quarantines since it was last re-added. Invariant: above ``health.quarantines_max``, FAILED or STOPPED."""
    saved: bool = False
    """Whether its first incarnation may still take its state from the checkpoint that the job continues. Invariant: only in
    a job that continues one, and until the second placement."""
    incarnations_lost: Incarnation = NO_INCARNATION
    """The number of its latest incarnation on a tape that is lost; the first placement continues from it. 0 if there was
    none. Invariant: not above ``incarnation`` once the island was placed."""
    survivor: SurvivingIsland | None = None
    """What the island held when the job was salvaged. Its totals count until its first report. Invariant: its incarnation is
    the present one, or the one that is placed next."""

    @property
    def unreported(self) -> SurvivingIsland | None:
        """Return what the present incarnation held when the job was salvaged. It counts until there is a report."""
        survivor = self.survivor
        return survivor if survivor is not None and survivor.incarnation == self.incarnation else None

    @property
    def id(self) -> IslandId:
        return self.plan.island

    @property
    def restarts(self) -> int:
        """Return how often the island was placed again."""
        return max(0, self.incarnation - 1)

    @property
    def live(self) -> bool:
        """Return whether a round may wait for the island."""
        return self.state is IslandState.TRAINING and not self.current.flushed

    @property
    def gives(self) -> bool:
        """Return whether the island has stopped stepping and may still have work to offer."""
        return self.state is IslandState.DRAINING and not self.current.flushed


Step = tuple[Island, tuple[Effect, ...]]


# ── the incarnation goes on ───────────────────────────────────────────────────────────────────────────────────────


def placed(before: Island, event: IslandPlaced) -> Island:
    """Record where the process runs. The island builds its model next."""
    current = replace(before.current, node=event.node, pid=event.pid)
    return _entered(before, IslandState.STARTING, "building the model", current)


def waiting(before: Island, reason: str) -> Island:
    """Wait for a node. The incarnation stays the same, and is placed as soon as its node group has a node with room."""
    return _entered(before, IslandState.WAITING, reason, before.current)


def ready(before: Island, report: Ready | None = None) -> Island:
    """Record that the model is built, and the state that an earlier incarnation left."""
    current = replace(before.current, ready=True, left=report.left if report else None)
    return replace(before, reason="waiting for the initial parameters", current=current)


def usable_left(before: Island, versions: Sequence[Version]) -> LeftState | None:
    """Return the state that an earlier incarnation left if it holds work that Θ, at ``versions``, has not moved past.

    It must be the latest incarnation that trained, as far as the tape knows: later ones have drawn the same data again.
    """
    left = before.current.left
    if left is None or before.health_note or not len(left.versions) == len(versions) == len(left.kept_tokens):
        return None
    latest = max(before.counted.incarnation, Incarnation(before.incarnations_lost + 1))
    counted = before.counted if before.counted.incarnation == left.incarnation else Counted()
    is_latest = latest <= left.incarnation < before.incarnation
    is_later = left.steps_total >= counted.steps and left.tokens_total >= counted.tokens
    works = any(kept_fragments(left, versions))
    return left if is_latest and is_later and works else None


def kept_fragments(left: LeftState, versions: Sequence[Version]) -> list[FragmentId]:
    """Return the fragments with work in the left state that no version of Θ can contain."""
    facts = zip(left.versions, left.kept_tokens, versions, strict=True)
    return [FragmentId(p) for p, (based_on, tokens, present) in enumerate(facts) if tokens > 0 and based_on == present]


def cursor_after(before: Island, left: LeftState) -> int:
    """Return the batches that its earlier incarnations have drawn, if all that the left state has is counted."""
    counted = before.counted.steps if before.counted.incarnation == left.incarnation else 0
    return before.steps_before + left.steps_total - counted


def continued(before: Island, left: LeftState) -> Island:
    """Count all that the incarnation trained whose state the island continues from: also what it never reported."""
    counted = before.counted if before.counted.incarnation == left.incarnation else Counted()
    return replace(
        before,
        steps_before=before.steps_before + left.steps_total - counted.steps,
        tokens_before=before.tokens_before + left.tokens_total - counted.tokens,
        counted=Counted(left.incarnation, left.steps_total, left.tokens_total),
    )


def catching_up(before: Island, donors: tuple[IslandId, ...], reason: str) -> Island:
    """Record from which peers the island takes its state."""
    return _entered(before, IslandState.CATCHING_UP, reason, replace(before.current, donors=donors))


def failed_by(before: Island, donor: IslandId) -> Island:
    """Exclude a donor that gave no state."""
    failed_donors = before.current.failed_donors | {donor}
    return replace(before, current=replace(before.current, failed_donors=failed_donors))


def caught_up(before: Island, report: CaughtUp) -> Island:
    """Begin to train with the state that the island has."""
    process = before.current.process
    source = report.donor or (f"the standby {process[0]}" if process else "the synchroniser")
    source = "the checkpoint" if report.donor == before.id else " and ".join(sorted(set(report.sources))) or source
    if report.left is not None:
        source = f"the file of incarnation {report.left.incarnation}, with its unmerged work"
    current = replace(before.current, failed_donors=frozenset())
    after = _entered(before, IslandState.TRAINING, f"state taken from {source}", current)
    return replace(after, step=report.step, saved=False)


def going_on(before: Island, survivor: SurvivingIsland, present: Sequence[Version]) -> Island:
    """Train on, with the state and the work that the island held when the job was salvaged.

    Offers that the ``present`` versions contain were merged into these, or into versions before that nobody remembers. So
    were offers on older versions than it held, which may arrive again: nobody remembers which of them were not.
    """
    offers = {FragmentId(p): offer_of_number(number) for p, number in enumerate(survivor.merged_offers) if number}
    held = {FragmentId(p): version for p, version in enumerate(survivor.versions) if version}
    current = replace(
        before.current,
        ready=True,
        merged_offer={**dict.fromkeys(held, 0), **offers},
        merged_into={**held, **{p: present[p] for p in offers}},
        last_offer={p: offer for p, offer in offers.items() if isinstance(offer, int)},
    )
    reason = "trained on while the synchroniser was lost"
    return replace(_entered(before, IslandState.TRAINING, reason, current), step=survivor.step)


def standing_by(before: Island, report: CaughtUp) -> Island:
    """Begin to wait, with a state, until another island needs the process. Coming so far ends the row of failures."""
    reason = f"ready to take a lost island's place, with a state of {report.donor or 'the synchroniser'}"
    current = replace(before.current, failed_donors=frozenset())
    return replace(_entered(before, IslandState.STANDBY, reason, current), step=report.step, failures=0)


def suspected(before: Island, reason: str, timer_serial: int, at: Instant) -> Island:
    """Guess that the island is gone. A timer decides, unless the island answers first."""
    current = replace(before.current, state_before_suspect=before.state, timer_serial=timer_serial, suspect_since=at)
    return replace(before, state=IslandState.SUSPECT, reason=reason, current=current)


def restored(before: Island) -> Island:
    """The guess was wrong: return to the state before it."""
    state = before.current.state_before_suspect
    assert state is not None
    return _entered(before, state, "connection restored", replace(before.current, timer_serial=0))


def overdue(before: Island, report: Overdue, limit_s: Duration) -> Island:
    """Record that the present step takes far longer than usual."""
    usual = (
        f"where {report.usual_seconds:.2g} s is usual"
        if report.usual_seconds
        else "at one step, boundary or evaluation"
    )
    over = "" if report.seconds < limit_s else f", beyond the limit of {limit_s:.0f} s"
    reason = f"it hangs: {report.seconds:.0f} s {usual}{over}"
    return replace(before, reason=reason, current=replace(before.current, overdue_s=report.seconds))


def steps_again(before: Island) -> Island:
    """Record that the overdue step has ended: it was only slow."""
    reason = f"it steps again, after more than {before.current.overdue_s:.0f} s in one step"
    return replace(before, reason=reason, current=replace(before.current, overdue_s=0.0))


def draining(before: Island, reason: str) -> Island:
    """Stop stepping, and leave when all its work is merged. No round waits for the island meanwhile."""
    return replace(before, state=IslandState.DRAINING, wanted=False, reason=reason)


def handing_over(before: Island, reason: str, timer_serial: int) -> Island:
    """Drain because the node is about to go. The island stays wanted, and continues on another node."""
    current = replace(before.current, timer_serial=timer_serial)
    return replace(before, state=IslandState.DRAINING, reason=reason, current=current)


def wanted_again(before: Island, reason: str) -> Island:
    """Cancel a drain, now or once the island answers again. An island whose process is being killed is placed again."""
    after = replace(before, wanted=True)
    if before.state is IslandState.DRAINING:
        return replace(after, state=IslandState.TRAINING, reason=reason)
    if before.current.state_before_suspect is IslandState.DRAINING:
        return replace(after, current=replace(before.current, state_before_suspect=IslandState.TRAINING))
    return after


def flushed(before: Island, reason: str) -> Island:
    """Record that the island gives no more work."""
    return replace(before, reason=reason, current=replace(before.current, flushed=True))


def not_flushed(before: Island) -> Island:
    """Wait for the island's last work again: it may have been lost with the synchroniser."""
    return replace(before, current=replace(before.current, flushed=False))


def being_killed(before: Island, restart: bool, reason: str) -> Island:
    """Record that an operator has the process killed, and whether the island is to be placed again."""
    return replace(before, wanted=restart, current=replace(before.current, kill_reason=reason))


def to_drain(before: Island) -> Island:
    """Have a suspect island drain as soon as it answers."""
    return replace(before, current=replace(before.current, state_before_suspect=IslandState.DRAINING))


# ── its contributions ─────────────────────────────────────────────────────────────────────────────────────────────


def admitted(before: Island, c: Contribution) -> Island:
    """Record that its latest contribution to this fragment is good."""
    current = before.current
    strikes = current.strikes
    if c.fragment in strikes:
        strikes = {fragment: count for fragment, count in strikes.items() if fragment != c.fragment}
    last_offer = {**current.last_offer, c.fragment: c.offer}
    return replace(before, current=replace(current, last_offer=last_offer, strikes=strikes))


def contributed(before: Island, merged: Contribution, version: Version, at: Instant) -> Island:
    """Record that its work is in ``version``: it is healthy, and may not offer the same work again."""
    current = replace(
        before.current,
        merged_into={**before.current.merged_into, merged.fragment: version},
        merged_offer={**before.current.merged_offer, merged.fragment: merged.offer},
    )
    health_note = before.health_note if current.strikes else ""
    return replace(before, last_merge_at=at, failures=0, health_note=health_note, current=current)


def struck(before: Island, c: Contribution, health_note: str) -> Island:
    """Record that its latest contribution to this fragment is bad."""
    current = replace(
        before.current,
        strikes={**before.current.strikes, c.fragment: before.current.strikes.get(c.fragment, 0) + 1},
        struck_offer={**before.current.struck_offer, c.fragment: c.offer},
    )
    return replace(before, health_note=health_note, current=current)


def lagging(before: Island, fragment: FragmentId, version: Version, step: int) -> Island:
    """Record that its offer at ``step`` was refused for want of ``version``."""
    behind = {**before.current.behind, fragment: (version, step)}
    return replace(before, current=replace(before.current, behind=behind))


def payload_lost(before: Island, c: Contribution) -> Island:
    """Allow the island to offer the same work again: its bytes died with the synchroniser."""
    last_offer = {**before.current.last_offer, c.fragment: c.offer - 1}
    return replace(before, current=replace(before.current, last_offer=last_offer))


def rolled_back(before: Island, fragment: FragmentId, version: Version) -> Island:
    """Allow no work on the fragment that was built before ``version``, which took the place of all earlier ones."""
    current = replace(
        before.current,
        merged_into={**before.current.merged_into, fragment: version},
        merged_offer={**before.current.merged_offer, fragment: AllOffers()},
    )
    return replace(before, current=current)


# ── donors of a state ─────────────────────────────────────────────────────────────────────────────────────────────


def choose_donors(steps: Mapping[Island, int], receiver: Island, count: int) -> list[Island]:
    """The ``count`` healthiest peers to take a state from: furthest in their logical clocks, ties by name.

    Excluded are donors that failed this receiver, and islands with a health note. Donors that give to it already come first,
    then idle ones, then those that give to others: islands that come back together do not load the same donor.
    """
    unfit = receiver.current.failed_donors | {receiver.id}
    candidates = [i for i in steps if i.live and not i.health_note and i.id not in unfit]
    others = (i for i in steps if i.state is IslandState.CATCHING_UP and i.id != receiver.id)
    giving = {donor for other in others for donor in other.current.donors}
    state = receiver.current.state_before_suspect if receiver.state is IslandState.SUSPECT else receiver.state
    present = receiver.current.donors if state is IslandState.CATCHING_UP else ()
    return sorted(candidates, key=lambda i: (i.id not in present, i.id in giving, -steps[i], i.id))[:count]


# ── an incarnation begins, or is over ─────────────────────────────────────────────────────────────────────────────────


def place(
    before: Island, last_report: Progress | None, reason: str, process: Life | None = None, *, wait_s: Duration = 0.0
) -> Step:
    """Begin the next incarnation, in a process of its own, which is made after ``wait_s``, or in the standby's ``process``.

    What the incarnation before had trained, by its last report or by its answer when the job was salvaged, is added to the
    totals.
    """
    last_known = last_report or before.unreported
    steps, tokens = (last_known.steps_total, last_known.tokens_total) if last_known else (0, 0)
    latest = max(before.incarnation, before.incarnations_lost)
    after = replace(
        before,
        state=IslandState.PLACING,
        reason=reason,
        incarnation=Incarnation(latest + 1),
        current=CurrentIncarnation(process=process),
        step=last_report.step if last_report else before.step,
        steps_before=before.steps_before + steps,
        tokens_before=before.tokens_before + tokens,
        counted=Counted(before.incarnation, steps, tokens) if last_report else before.counted,
        saved=before.saved and not before.incarnation,
        survivor=before.survivor if before.survivor and before.survivor.incarnation > latest else None,
    )
    return after, (PlaceIsland(after.id, after.incarnation, after.plan.node_group, reason, process, wait_s),)


def lose(
    before: Island, policy: JobPolicy, reason: str, now: Instant, timer_serial: int, *, dead: bool, final: bool = False
) -> Step:
    """End the incarnation: wait and place the island again, or leave it stopped, or give it up.

    A process that may live on is stopped. ``final`` says that the next incarnation would fail as well.
    """
    had_process = before.state in WITH_PROCESS
    stop = () if dead or not had_process else (StopIsland(before.id, before.incarnation, reason),)
    if not before.wanted:
        return _ended(before, IslandState.STOPPED, reason), stop
    failures = before.failures + 1
    counted = replace(before, failures=failures)
    if final:
        return _ended(counted, IslandState.FAILED, reason), stop
    if failures > policy.restarts_max:
        return _ended(counted, IslandState.FAILED, f"given up after {failures} failures in a row; last: {reason}"), stop
    wait = backoff(before, failures, policy)
    after = _ended(counted, IslandState.LOST, f"{reason}; placing again in {wait:.1f} s", timer_serial)
    return after, (*stop, SetTimer(IslandTimer(IslandTimerKind.BACKOFF, before.id), timer_serial, now + wait))


def depart(before: Island, reason: str, now: Instant, timer_serial: int) -> Step:
    """End the incarnation because its node goes. That is no failure of the island, so the next one is placed at once."""
    stop = StopIsland(before.id, before.incarnation, reason)
    if not before.wanted:
        return dismissed(before, reason), (stop,)
    after = _ended(before, IslandState.LOST, f"{reason}; placing it elsewhere", timer_serial)
    return after, (stop, SetTimer(IslandTimer(IslandTimerKind.BACKOFF, before.id), timer_serial, now))


def dismissed(before: Island, reason: str) -> Island:
    """Stop an island that the job does not want and that has no work to lose."""
    return _ended(replace(before, wanted=False), IslandState.STOPPED, reason)


def drained(before: Island) -> Island:
    """End a drain: every version of its work is merged."""
    return _ended(before, IslandState.DRAINED, "all its work is merged")


def stopped(before: Island, reason: str) -> Island:
    """Stop an island because the job ends."""
    return _ended(before, IslandState.STOPPED, reason)


def cordoned(before: Island, reason: str) -> Island:
    """Hold an island that is wanted until its node group takes islands again."""
    return replace(before, state=IslandState.CORDONED, reason=reason, current=replace(before.current, timer_serial=0))


def failures_reset(before: Island) -> Island:
    """Forget earlier failures and quarantines, because an operator wants the island."""
    return replace(before, wanted=True, failures=0, quarantines=0)


def quarantine(before: Island, policy: JobPolicy, reason: str, now: Instant, timer_serial: int, remedy: str) -> Step:
    """End an incarnation whose work cannot be used, and place the next one or give the island up."""
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
    """Return the seconds to wait before the next incarnation: doubled each time, capped, spread by up to a quarter."""
    doublings = min(failures - 1, DOUBLINGS_MAX)
    wait: Duration = min(policy.backoff_first_s * 2.0**doublings, policy.backoff_max_s)
    jitter = crc32(f"{island.id}.{island.incarnation}".encode()) / 0xFFFFFFFF
    return wait * (1.0 + 0.25 * jitter)


def _entered(before: Island, state: IslandState, reason: str, current: CurrentIncarnation) -> Island:
    """Enter a state that is known and not guessed, which ends any suspicion."""
    return replace(before, state=state, reason=reason, current=replace(current, state_before_suspect=None))


def _ended(before: Island, state: IslandState, reason: str, timer_serial: int | None = None) -> Island:
    """Enter a state without a process. ``timer_serial`` is the timer that will end it, if one does."""
    serial = before.current.timer_serial if timer_serial is None else timer_serial
    return _entered(before, state, reason, replace(before.current, pid=None, timer_serial=serial))
