"""What the synchroniser does when its process is a new one: nothing is merged that nobody holds, and nothing waits in vain.

What died with the process is declared lost: contributions whose bytes it held, merges that were not journalled. Islands
keep what they offered until a version holds it, and offer it again to the new epoch. What may have been decided and never
done is asked for again; every request is idempotent by its name. A suspect island is heard again by its link; timers
keep their deadlines (``tape.recovery``).
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import checkpoints, island_life
from orchestrator.core.effects import (
    DrainIsland,
    Effect,
    FlushIsland,
    KillIsland,
    PlaceIsland,
    StartTraining,
)
from orchestrator.core.events import SynchroniserRestarted
from orchestrator.core.fragment_life import begin_evaluation, lose_payloads, publish_newer
from orchestrator.core.island_record import WITH_PROCESS, Island
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import Instant, IslandState, JobPhase, Version


def restarted(state: JobState, event: SynchroniserRestarted) -> list[Effect]:
    """Declare lost what is lost, and ask again for all that is pending. An epoch that is not newer changes nothing."""
    if event.epoch <= state.epoch:
        return []
    state.epoch = event.epoch
    effects = [*lose_payloads(state), *checkpoints.give_up(state, "the synchroniser died while it was taken")]
    gathering = state.phase is JobPhase.FINISHING and not state.complete
    for island in list(state.islands.values()):
        if gathering and island.flushed:  # what it gave last may be lost
            island = state.islands[island.id] = replace(state.islands[island.id], flushed=False)
        effects += _asked_again(state, state.islands[island.id], event.at)
    effects += island_life.flush_deadline(state, event.at) if gathering else []
    return effects + _evaluation(state)


def _asked_again(state: JobState, island: Island, now: Instant) -> list[Effect]:
    life = (island.id, island.incarnation)
    effects: list[Effect] = []
    match island.state:
        case IslandState.PLACING:
            effects.append(PlaceIsland(*life, island.plan.node_group, island.reason, island.process))
        case IslandState.CATCHING_UP:
            effects += island_life.catch_up(state, island.id)
        case IslandState.STANDBY:
            effects += publish_newer(state, island, tuple(Version(0) for _ in state.rounds), now)
        case IslandState.TRAINING | IslandState.DRAINING:
            effects += publish_newer(state, island, tuple(Version(0) for _ in state.rounds), now)
            usual = StartTraining if island.state is IslandState.TRAINING else DrainIsland
            asked = FlushIsland if state.phase is JobPhase.FINISHING else usual
            effects += [] if state.complete else [asked(*life)]
    if island.doomed and island.state in WITH_PROCESS:
        effects.append(KillIsland(*life, island.doomed))
    return effects


def _evaluation(state: JobState) -> list[Effect]:
    """One that was under way is made anew. An ending job asks for its last one by itself."""
    if state.evaluating is None:
        return []
    if state.phase is JobPhase.RUNNING:
        return [begin_evaluation(state)]
    state.evaluating = None
    return []
