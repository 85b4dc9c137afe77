"""One island as the core knows it, and how it moves through its life.

    PLACING ──▶ STARTING ──▶ CATCHING_UP ──▶ TRAINING          (forward: placed, ready, caught up)
        │           │              │            │  ▲
        │           └──────────────┴────────────┤  │ connection restored
        │                                       ▼  │
        │                                     SUSPECT            (no answer; a guess; also while DRAINING)
        │                                       │ timeout
        └──────────────▶ LOST ◀─────────────────┘                (dead; known or decided)
                          │ back-off over: PLACING, incarnation + 1 (``fleet``)
                          ├──▶ STOPPED   an operator wants it away
                          ├──▶ PLACING   at once, incarnation + 1, as the process of a standby (``standby``)
                          ├──▶ CORDONED  its node group takes nothing new; PLACING once it does
                          └──▶ FAILED    given up, with the reason

    TRAINING ◀──re-added── DRAINING ──all its work is merged──▶ DRAINED      (an operator wants it away, and its work kept)

Records are frozen; every function returns the next one. Whether and when to place again is ``fleet``'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.core.events import IslandCaughtUp, IslandPlaced
from orchestrator.core.vocabulary import (
    Contribution,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    IslandPlan,
    IslandState,
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


@dataclass(frozen=True, slots=True, eq=False)
class Island:
    """What is wanted of an island (``plan``, ``wanted``) and what is known of it.

    ``step`` is the logical step that its state was taken at, ``*_before`` the totals of its earlier incarnations. What it
    has trained since is in its latest report (``JobState.reports``), which changes too often to be kept here. ``doomed``
    says why the process is to be killed, once an operator asked for it. ``failures`` counts lives in a row that ended
    without a contribution. ``last_offer``, ``merged_into`` and ``merged_offer`` are per fragment and of this incarnation;
    so is ``behind``: a version that it lacked when an offer was first refused for that, and that offer's step.
    ``donors`` are those it takes a state from, or took the last one from; ``failed_donors`` those who did not give one.
    ``saved``: the checkpoint that the job goes on from has a state of it, for its first process; it is its own donor then.
    ``strikes`` counts bad contributions in a row by fragment, ``struck_offer`` is the latest of them; ``flag`` says what was
    wrong with the last, until work of the island is merged again. ``quarantines`` are counted until it is re-added.
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
    doomed: str = ""
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
    flag: str = ""
    quarantines: int = 0
    process: tuple[IslandId, Incarnation] | None = None
    saved: bool = False

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


def placed(before: Island, event: IslandPlaced) -> Island:
    return replace(before, state=IslandState.STARTING, reason="building the model", node=event.node, pid=event.pid)


def catching_up(before: Island, donors: tuple[IslandId, ...], reason: str) -> Island:
    return replace(before, state=IslandState.CATCHING_UP, donors=donors, reason=reason)


def failed_by(before: Island, donor: IslandId) -> Island:
    return replace(before, failed_donors=before.failed_donors | {donor})


def caught_up(before: Island, event: IslandCaughtUp) -> Island:
    source = event.donor or (f"the standby {before.process[0]}" if before.process else "the synchroniser")
    source = "the checkpoint" if event.donor == before.id else " and ".join(sorted(set(event.sources))) or source
    return replace(
        before,
        state=IslandState.TRAINING,
        reason=f"state taken from {source}",
        step=event.step,
        failed_donors=frozenset(),
        saved=False,
    )


def standing_by(before: Island, event: IslandCaughtUp) -> Island:
    """It holds a state, and waits to be needed. That it came so far ends the row of its failures."""
    return replace(
        before,
        state=IslandState.STANDBY,
        reason=f"ready to take a lost island's place, with a state of {event.donor or 'the synchroniser'}",
        step=event.step,
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


def draining(before: Island, reason: str) -> Island:
    """It steps no more, and nobody waits for it."""
    return replace(before, state=IslandState.DRAINING, wanted=False, reason=reason)


def held(before: Island, reason: str) -> Island:
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
        flag=before.flag if before.strikes else "",
    )


def admitted(before: Island, c: Contribution) -> Island:
    """What it sent last to this fragment is good."""
    strikes = {fragment: count for fragment, count in before.strikes.items() if fragment != c.fragment}
    return replace(before, last_offer={**before.last_offer, c.fragment: c.offer}, strikes=strikes)


def struck(before: Island, c: Contribution, flag: str) -> Island:
    """What it sent last to this fragment is bad."""
    return replace(
        before,
        flag=flag,
        strikes={**before.strikes, c.fragment: before.strikes.get(c.fragment, 0) + 1},
        struck_offer={**before.struck_offer, c.fragment: c.offer},
    )


def pardoned(before: Island) -> Island:
    """An operator wants it, whatever it did before."""
    return replace(before, wanted=True, failures=0, quarantines=0)


def choose_donors(steps: Mapping[Island, int], receiver: Island, count: int) -> list[Island]:
    """The ``count`` healthiest peers to take a state from: furthest in their logical clocks, ties by name.

    None that failed us, and none whose own work was unusable of late. Who gives us pieces already goes on; who gives others
    a state comes last: islands that come back together do not load the same donor.
    """
    unfit = receiver.failed_donors | {receiver.id}
    candidates = [i for i in steps if i.live and not i.flag and i.id not in unfit]
    others = (i for i in steps if i.state is IslandState.CATCHING_UP and i.id != receiver.id)
    giving = {donor for other in others for donor in other.donors}
    state = receiver.state_before_suspect if receiver.state is IslandState.SUSPECT else receiver.state
    ours = receiver.donors if state is IslandState.CATCHING_UP else ()
    return sorted(candidates, key=lambda i: (i.id not in ours, i.id in giving, -steps[i], i.id))[:count]
