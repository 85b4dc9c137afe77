"""The handlers of events in a fragment's life: contributions, merges, adoptions.

Handlers take the job's state and an event, change the state, and return effects. ``fragment_round`` decides what may enter a
round, when a round closes, and what each contribution counts.
"""

from __future__ import annotations

from orchestrator.core import evaluation, fragment_round, island_record
from orchestrator.core.effects import (
    AdmitContribution,
    Effect,
    MergeFragment,
    PublishFragment,
    QuarantineIsland,
    Recipient,
    RefuseContribution,
    ReleasePayload,
    SetTimer,
    StopIsland,
)
from orchestrator.core.events import (
    ContributionArrived,
    ContributionUnusable,
    MergeCompleted,
    MergeFailed,
)
from orchestrator.core.fragment_round import Close, FragmentRound, Wait, grace_window, outer_lr_ratio, refusal_of, weigh
from orchestrator.core.island_record import WITH_PROCESS, Island
from orchestrator.core.messages import Adopted
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import (
    CloseReason,
    Contribution,
    FragmentId,
    GraceTimer,
    Instant,
    IslandId,
    JobPhase,
    RefusalReason,
    ReleaseReason,
    RoundPhase,
    Version,
    replace,
)

_BEHIND = (RefusalReason.LATE, RefusalReason.ALREADY_MERGED)
"""Refusals of an island that has not adopted the present version, which is on its way unless it is overdue."""


def contribution_arrived(state: JobState, event: ContributionArrived) -> list[Effect]:
    c = event.contribution
    current = state.rounds[c.fragment]
    island = state.islands.get(c.island)
    phase = JobPhase.FINISHED if state.complete else state.phase
    norms = state.update_norms[c.fragment]
    refusal = refusal_of(c, island, current, phase, state.policy, event.displacement, norms)
    if refusal is not None:
        effects: list[Effect] = [RefuseContribution(c, *refusal)]
        if all(held.payload != c.payload for held in current.offered.values()):
            effects.append(ReleasePayload(c.payload, ReleaseReason.REFUSED))
        if refusal[0] is RefusalReason.FENCED:
            effects.append(StopIsland(c.island, c.incarnation, refusal[1]))
        if island is not None and _misses_a_publication(state, island, current, c, refusal[0]):
            effects.append(_publication(state, current, (island,), event.at))
        return effects + (_strike(state, event, *refusal) if refusal[0] is RefusalReason.EXPLODING else [])
    assert island is not None
    superseded = current.offered.get(c.island)
    effects = [ReleasePayload(superseded.payload, ReleaseReason.SUPERSEDED)] if superseded else []
    effects.append(AdmitContribution(c, Version(current.version + 1)))
    state.islands[c.island] = island_record.admitted(island, c)
    state.update_norms[c.fragment] = fragment_round.admitted(norms, c, event.displacement, state.policy)
    state.rounds[c.fragment] = fragment_round.admit(current, c, _due_step(state, current), event.at)
    return effects + advance(state, c.fragment, event.at)


def contribution_unusable(state: JobState, event: ContributionUnusable) -> list[Effect]:
    refused = RefuseContribution(event.contribution, event.reason, event.detail)
    return [refused, *_strike(state, event, event.reason, event.detail)]


def _strike(
    state: JobState, event: ContributionArrived | ContributionUnusable, reason: RefusalReason, detail: str
) -> list[Effect]:
    """Count a bad contribution against its island, and quarantine the island if there are too many. An offer counts once.

    An island that sent NaN or Inf has diverged, which adopting does not heal: one such contribution is enough.
    """
    c = event.contribution
    island = state.islands.get(c.island)
    if island is None or island.incarnation != c.incarnation or island.state not in WITH_PROCESS:
        return []
    if c.offer <= island.current.struck_offer.get(c.fragment, 0):
        return []
    note = f"{reason.replace('_', ' ')} contribution to fragment {c.fragment}: {detail}"
    island = state.islands[c.island] = island_record.struck(island, c, note)
    if reason is not RefusalReason.NON_FINITE and island.current.strikes[c.fragment] < state.policy.health.strikes_max:
        return []
    remedy = _remedy(state, island.id, reason)
    after, effects = island_record.quarantine(island, state.policy, note, event.at, state.next_serial(), remedy)
    state.islands[c.island] = after
    return [QuarantineIsland(c.island, c.incarnation, reason, detail), *effects, *advance_all(state, event.at)]


def _remedy(state: JobState, island: IslandId, reason: RefusalReason) -> str:
    """Return what to do about an island that is given up for its work. One machine may be bad, but hardly all."""
    if reason not in (RefusalReason.NON_FINITE, RefusalReason.EXPLODING):
        return "look at its machine, and its line, before it is re-added"
    others = [other for other in state.job_islands if other.id != island]
    diverged = [other.id for other in others if other.quarantines and other.health_note]
    if diverged:
        count = f"{len(diverged) + 1} of the {len(others) + 1} islands diverged"
        return f"{count}, so the cause is no machine: lower training.inner_optimizer.lr, or look at the data"
    if not others:
        return "lower training.inner_optimizer.lr; if that changes nothing, look at the data and at its machine"
    return "the other islands are well: look at its machine before it is re-added"


def advance_all(state: JobState, now: Instant) -> list[Effect]:
    """Move every round on if it can: after a change of membership, some rounds may have no island left to wait for."""
    return [effect for p in range(len(state.rounds)) for effect in advance(state, FragmentId(p), now)]


def advance(state: JobState, fragment: FragmentId, now: Instant) -> list[Effect]:
    """Move one round on if its contributions allow it. Safe to call at any time."""
    if state.phase is JobPhase.FINISHED or state.rollback is not None:
        return []
    current = state.rounds[fragment]
    flushing = state.phase is JobPhase.FINISHING
    window = None if flushing else grace_window(state.pace, state.policy)
    live = state.live
    leaving = None if live else state.leaving  # which is not asked while others train
    if leaving is not None:
        decision = fragment_round.decide_leaving(current, leaving, now)
    else:
        quorum = state.quorum_of(len(live))
        decision = fragment_round.decide(current, _due_step(state, current), quorum, live, window, now)
    if decision is not None and leaving is None and current.phase is RoundPhase.COLLECTING:
        waited = now - current.opened_at
        state.pace = state.pace.with_quorum(waited, state.policy.moving_average_decay)
    match decision:
        case Wait(due_at):
            serial = state.next_serial()
            state.rounds[fragment] = fragment_round.begin_grace(current, now, serial)
            return [] if due_at is None else [SetTimer(GraceTimer(fragment), serial, due_at)]
        case Close() as closing:
            return _close(
                state, fragment, now, replace(closing, reason=CloseReason.FINAL_FLUSH) if flushing else closing
            )
    return []


def grace_over(state: JobState, fragment: FragmentId, serial: int, now: Instant) -> list[Effect]:
    """Close the round whose grace timer fired. A timer of an earlier round is ignored, and so is any while the job ends."""
    current = state.rounds[fragment]
    if current.phase is not RoundPhase.GRACE or current.timer_serial != serial or state.phase is not JobPhase.RUNNING:
        return []
    if state.rollback is not None:
        return []
    waited, leaving = now - current.quorum_at, state.leaving
    if len(current.offered) >= state.policy.quorum and fragment_round.on_time(current, _due_step(state, current)):
        missing = sorted(state.live - current.offered.keys())
        detail = f"waited {waited:.3f} s after quorum; without {', '.join(missing) or 'nobody'}"
        return _close(state, fragment, now, Close(CloseReason.GRACE_OVER, detail))
    if leaving is not None and len(current.offered) >= leaving.quorum:
        missing = sorted(leaving.giving - current.offered.keys())
        detail = f"no island trains; waited {waited:.3f} s for those that leave; without {', '.join(missing)}"
        return _close(state, fragment, now, Close(CloseReason.LEAVING, detail))
    state.rounds[fragment] = fragment_round.reopen(current)
    return advance(state, fragment, now)


def merge_completed(state: JobState, event: MergeCompleted) -> list[Effect]:
    before = state.rounds[event.fragment]
    if (
        before.phase is not RoundPhase.MERGING
        or before.restoring
        or event.version != before.version + 1
        or state.phase is JobPhase.FINISHED
    ):
        return []  # an answer asked for twice, or one that came after the job was cancelled
    effects: list[Effect] = []
    for c in sorted(before.offered.values(), key=lambda c: c.island):
        effects.append(ReleasePayload(c.payload, ReleaseReason.MERGED))
        island = state.islands[c.island]
        if island.incarnation == c.incarnation:
            state.islands[c.island] = island_record.contributed(island, c, event.version, event.at)
    after = fragment_round.finish_merge(before)
    state.rounds[event.fragment] = after
    effects.append(_publication(state, after, state.recipients, event.at))
    return effects + evaluation.after_merge(state, event.at)


def merge_failed(state: JobState, event: MergeFailed) -> list[Effect]:
    """Discard the round's contributions: nothing that is not finite is published. Islands offer the work again."""
    before = state.rounds[event.fragment]
    inputs = [c.payload for _, c in sorted(before.offered.items())]
    if before.phase is not RoundPhase.MERGING or sorted(event.inputs) != sorted(inputs):
        return []  # a repeated event, or one after the job was cancelled
    state.rounds[event.fragment] = fragment_round.abandon(before)
    return [ReleasePayload(payload, ReleaseReason.ABANDONED) for payload in inputs]


def fragment_adopted(state: JobState, report: Adopted, now: Instant) -> list[Effect]:
    """End the measurement of how long synchronising takes, at the first adoption of a version."""
    current = state.rounds[report.fragment]
    if report.version == current.version and current.closed_at is not None and current.phase is RoundPhase.COLLECTING:
        seconds = now - current.closed_at
        state.pace = state.pace.with_sync(seconds, state.policy.moving_average_decay)
        state.rounds[report.fragment] = replace(current, closed_at=None)
    return []


def publish_newer(state: JobState, island: Island, versions: tuple[Version, ...], now: Instant) -> list[Effect]:
    """Publish everything that is newer than what the island holds."""
    newer = [r for r, held in zip(state.rounds, versions, strict=True) if r.version > held]
    return [_publication(state, r, (island,), now) for r in newer]


def publish(state: JobState, fragment: FragmentId, now: Instant) -> PublishFragment:
    """Publish the present version to every island that holds a state."""
    return _publication(state, state.rounds[fragment], state.recipients, now)


def abandon_open_rounds(state: JobState) -> list[Effect]:
    """Discard contributions that will not be merged any more."""
    effects: list[Effect] = []
    for current in state.rounds:
        effects += [ReleasePayload(c.payload, ReleaseReason.ABANDONED) for c in current.offered.values()]
        state.rounds[current.fragment] = replace(current, offered={}, phase=RoundPhase.COLLECTING, restoring=False)
    return effects


def lose_payloads(state: JobState) -> list[Effect]:
    """Declare lost all payloads held, and merges under way. Rounds begin anew and may get the same offers again."""
    effects: list[Effect] = []
    for current in state.rounds:
        for c in sorted(current.offered.values(), key=lambda c: c.island):
            effects.append(ReleasePayload(c.payload, ReleaseReason.LOST))
            island = state.islands[c.island]
            if island.incarnation == c.incarnation:
                state.islands[c.island] = island_record.payload_lost(island, c)
        state.rounds[current.fragment] = fragment_round.abandon(current)
    return effects


def _misses_a_publication(
    state: JobState, island: Island, current: FragmentRound, c: Contribution, reason: RefusalReason
) -> bool:
    """Return whether the present version must have been lost on its way to an island that still builds on an older one.

    A version has τ steps to arrive, by the logical clock since the merge or by the island's own steps since its first offer
    that was refused for want of it. The second clock serves an island that lags far behind, such as one that was placed
    again while the others waited for a quorum. Under the first clock alone it would train all those steps in vain.
    """
    if reason is RefusalReason.STALE_BASE:
        return True
    if reason not in _BEHIND or c.base_version >= current.version:
        return False
    version, since = island.current.behind.get(c.fragment, (None, 0))
    if version != current.version:
        version, since = current.version, c.step
        state.islands[island.id] = island_record.lagging(island, c.fragment, version, since)
    return c.step > min(current.step, since) + state.policy.overlap_steps


def _close(state: JobState, fragment: FragmentId, now: Instant, closing: Close) -> list[Effect]:
    merging = fragment_round.begin_merge(state.rounds[fragment], now)
    state.rounds[fragment] = merging
    inputs = weigh(merging.offered.values())
    version = Version(merging.version + 1)
    ratio = outer_lr_ratio(state.policy.outer_rate, version, state.tokens_trained, state.policy.token_budget)
    order = (fragment, version, merging.merge_step, inputs, closing.reason, closing.detail, ratio)
    return [MergeFragment(state.epoch, *order)]


def _due_step(state: JobState, current: FragmentRound) -> int:
    """Return the logical step from which contributions to this round are on time. When the job ends, all are."""
    if state.phase is not JobPhase.RUNNING:
        return 0
    return state.policy.schedule.next_due(current.fragment, current.step)


def _publication(state: JobState, current: FragmentRound, islands: tuple[Island, ...], now: Instant) -> PublishFragment:
    """Publish the present version, with the step to which its adopters' clocks are raised.

    That is the step where the first island at its due point is now. The merge's own step is older by the grace window and
    the transfers. An island that was away and is raised no further than that would be as late to the next round, miss its
    window by as much, and so on for ever. The raise is at most τ steps past the merge: by then the version is with its
    islands. If rounds wait for every island, none is late, and all keep to the pace of the slowest.
    """
    policy, passed = state.policy, state.pace.steps_since(current.reached_at, now)
    step = current.step + (0 if policy.grace_cap_steps is None else min(passed, policy.overlap_steps))
    recipients = tuple(Recipient(i.id, i.incarnation, i.current.merged_offer.get(current.fragment, 0)) for i in islands)
    return PublishFragment(current.fragment, current.version, step, recipients, state.anchor)
