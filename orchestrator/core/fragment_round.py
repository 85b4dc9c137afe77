"""One fragment's merge round: collect contributions, wait out the grace window, merge.

                 quorum reached           everyone in, or window over
    COLLECTING ─────────────────▶ GRACE ─────────────────────────────▶ MERGING
        ▲                                                                 │
        └───────────────────── outer step applied ────────────────────────┘

A round is due when its fragment is: at the first due point after the step of the last merge. What comes earlier is held,
and counts towards the quorum, but the round does not close before somebody is *on time*: an island that missed the last
round and kept its work offers it again at its next due point, and would otherwise merge alone, a step after all others,
so that every outer step were taken twice. Early contributions are ours; the paper has none, because there an island
that missed a round has lost its work.

A round never reads a clock and never sees a tensor. Time reaches it as the ``now`` of an event; parameters reach it
as payload ids. A contribution that comes while MERGING is late (``admission``): the outer step in flight has already
fixed its inputs.

Source: Decoupled DiLoCo, arXiv:2604.21428 (minimum quorum, grace window).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from orchestrator.core.vocabulary import (
    CloseReason,
    Contribution,
    Duration,
    FragmentId,
    Instant,
    IslandId,
    RoundPhase,
    Version,
)


@dataclass(frozen=True, slots=True)
class FragmentRound:
    """Fragment ``fragment`` stands at ``version``, made at ``step``; the open round, if it closes, makes ``version + 1``.

    ``restoring``: that version comes from a checkpoint, by nobody's contributions.

    ``reached_at`` is when an island first reported to be at ``step``, ``merge_step_at`` the same of ``merge_step``.
    """

    fragment: FragmentId
    version: Version = Version(0)
    step: int = 0
    reached_at: Instant | None = None
    phase: RoundPhase = RoundPhase.COLLECTING
    offered: dict[IslandId, Contribution] = field(default_factory=dict)
    opened_at: Instant = 0.0
    merge_step_at: Instant | None = None
    quorum_at: Instant = 0.0
    closed_at: Instant | None = None
    timer_serial: int = 0
    restoring: bool = False

    @property
    def merge_step(self) -> int:
        """The logical step of a merge of what is offered: the highest among the contributions."""
        return max([self.step, *(c.step for c in self.offered.values())])


@dataclass(frozen=True, slots=True)
class Wait:
    """Quorum is reached: keep the round open until ``due_at``, or until everyone is in when it is ``None``."""

    due_at: Instant | None


@dataclass(frozen=True, slots=True)
class Close:
    """Stop waiting and merge what is there."""

    reason: CloseReason
    detail: str


def admit(before: FragmentRound, contribution: Contribution, due_step: int, now: Instant) -> FragmentRound:
    """Take the contribution in; an earlier one of the same island is replaced. Opened by the first on time."""
    offered = {**before.offered, contribution.island: contribution}
    opening = not on_time(before, due_step)
    furthest = contribution.step > before.merge_step
    return replace(
        before,
        offered=offered,
        opened_at=now if opening else before.opened_at,
        merge_step_at=now if furthest else before.merge_step_at,
    )


def on_time(current: FragmentRound, due_step: int) -> Set[IslandId]:
    """The islands whose contribution was made at or after the due point."""
    return {island for island, c in current.offered.items() if c.step >= due_step}


def decide(
    current: FragmentRound, due_step: int, quorum: int, live: Set[IslandId], window: Duration | None, now: Instant
) -> Wait | Close | None:
    """The decision on the round, with its reason; ``None`` to stay as it is. Safe to call at any time.

    Islands with only an early contribution are waited for like those with none: they may have a better one soon.
    """
    present = on_time(current, due_step)
    if current.phase is RoundPhase.MERGING or len(current.offered) < quorum or not present:
        return None
    if live <= present:
        return Close(CloseReason.EVERYONE_IN, f"all {len(live)} training islands are in")
    if current.phase is RoundPhase.GRACE:
        return None
    if window is None:
        return Wait(None)
    if window <= 0.0:
        return Close(CloseReason.NO_GRACE_LEFT, f"quorum of {quorum} reached and no slack to wait in")
    return Wait(now + window)


def begin_grace(before: FragmentRound, now: Instant, timer_serial: int) -> FragmentRound:
    return replace(before, phase=RoundPhase.GRACE, quorum_at=now, timer_serial=timer_serial)


def begin_merge(before: FragmentRound, now: Instant) -> FragmentRound:
    """Fix the inputs. ``step`` stays with the version it belongs to, which may be published again meanwhile."""
    quorum_at = before.quorum_at if before.phase is RoundPhase.GRACE else now
    return replace(before, phase=RoundPhase.MERGING, quorum_at=quorum_at, closed_at=now)


def begin_restoring(before: FragmentRound) -> FragmentRound:
    """The next version will not be a merge: what was collected goes, and what comes now is late."""
    return replace(abandon(before), phase=RoundPhase.MERGING, restoring=True)


def finish_merge(before: FragmentRound) -> FragmentRound:
    """The outer step is applied: open the next round, empty."""
    return FragmentRound(
        fragment=before.fragment,
        version=Version(before.version + 1),
        step=before.merge_step,
        reached_at=before.merge_step_at,
        closed_at=before.closed_at,
    )


def abandon(before: FragmentRound) -> FragmentRound:
    """Discard the contributions: open the same round again, empty."""
    return FragmentRound(before.fragment, before.version, before.step, before.reached_at)
