"""Rollback to an earlier checkpoint while the job runs: versions go on rising, with the checkpoint's parameters.

    asked for ──▶ no round closes any more ──▶ merges under way end ──▶ every fragment is restored ──▶ rounds go on
                                                                     └─ it cannot be read ──▶ rounds go on as they were

A restored fragment is the next version, with the parameters and momentum of the checkpoint. All that islands trained since
they last adopted is overwritten when they adopt it, whatever the job's rule of adoption: it was built on what is undone.
Islands keep their inner optimizer state and their place in the data. A fragment whose newest version the journal has lost
goes back by one version in the same way, without being asked. Refuses to know: files, arrays.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import checkpoints, commands, fragment_round
from orchestrator.core.effects import Effect, ReleasePayload, ResolveCommand
from orchestrator.core.events import CommandRequested
from orchestrator.core.fragment_life import advance_all, publish
from orchestrator.core.health import UpdateNorms
from orchestrator.core.messages import ALL_OFFERS
from orchestrator.core.saving import FROM_JOURNAL, FragmentRestored, RestoreFragments, RollbackFailed
from orchestrator.core.state import JobState, Rollback
from orchestrator.core.vocabulary import FragmentId, Instant, JobPhase, ReleaseReason, RoundPhase, Version


def requested(state: JobState, event: CommandRequested, request: commands.Rollback) -> list[Effect]:
    retained = [checkpoint.number for checkpoint in state.checkpoints.retained]
    number = request.checkpoint or max(retained, default=0)
    refusal = ""
    if state.phase is not JobPhase.RUNNING:
        refusal = f"the job is {state.phase}"
    elif state.rollback is not None:
        refusal = f"it goes back to checkpoint {state.rollback.checkpoint} already"
    elif number not in retained:
        refusal = f"of this job there are the checkpoints {', '.join(map(str, retained)) or '(none)'}"
    if refusal:
        return [ResolveCommand(event.command, False, f"the job does not go back: {refusal}")]
    state.rollback = Rollback(number, frozenset(FragmentId(p) for p in range(len(state.rounds))))
    resolved = ResolveCommand(event.command, True, f"the job goes back to checkpoint {number}")
    return [resolved, *checkpoints.give_up(state, f"the job goes back to checkpoint {number}")]


def settle(state: JobState, now: Instant) -> list[Effect]:
    """After every event: once nothing merges any more, restore what is left.

    A job that ends does not set out; where it has, it goes the rest of the way, for half of it is no state of any job's.
    """
    rollback = state.rollback
    if rollback is None:
        return []
    set_out = len(rollback.left) < len(state.rounds) or any(r.restoring for r in state.rounds)
    if state.phase is JobPhase.FINISHED or (state.phase is JobPhase.FINISHING and not set_out):
        state.rollback = None
        return advance_all(state, now)
    if any(r.phase is RoundPhase.MERGING for r in state.rounds):
        return []
    effects: list[Effect] = []
    versions = []
    for fragment in sorted(rollback.left):
        current = state.rounds[fragment]
        effects += [ReleasePayload(c.payload, ReleaseReason.ABANDONED) for c in current.offered.values()]
        state.rounds[fragment] = fragment_round.begin_restoring(current)
        versions.append((fragment, Version(current.version + 1), current.step))
    return [*effects, RestoreFragments(state.epoch, rollback.checkpoint, tuple(versions))]


def restored(state: JobState, event: FragmentRestored) -> list[Effect]:
    """The fragment is what it was: everybody adopts that, and nothing that was built on another version is taken."""
    before, rollback = state.rounds[event.fragment], state.rollback
    if event.checkpoint == FROM_JOURNAL and rollback is None:
        before, rollback = fragment_round.begin_restoring(before), Rollback(FROM_JOURNAL, frozenset({event.fragment}))
    if rollback is None or not before.restoring or event.version != before.version + 1:
        return []
    after = state.rounds[event.fragment] = fragment_round.finish_merge(before)
    state.update_norms[event.fragment] = UpdateNorms()
    for island in list(state.islands.values()):
        state.islands[island.id] = replace(
            island,
            merged_into={**island.merged_into, event.fragment: after.version},
            merged_offer={**island.merged_offer, event.fragment: ALL_OFFERS},
        )
    left = rollback.left - {event.fragment}
    state.rollback = replace(rollback, left=left) if left else None
    published = publish(state, event.fragment, event.at)
    return [published, *(advance_all(state, event.at) if not left else [])]


def failed(state: JobState, event: RollbackFailed) -> list[Effect]:
    """Fragments that were not restored stand where they stood."""
    if state.rollback is None or state.rollback.checkpoint != event.checkpoint:
        return []
    state.rollback = None
    for current in state.rounds:
        if current.restoring:
            state.rounds[current.fragment] = fragment_round.abandon(current)
    return advance_all(state, event.at)
