"""Recovery: the handler of the synchroniser's own restart.

Whatever died with the process is declared lost: contributions whose bytes it held, and merges that were not journalled.
Islands keep what they offered until a version contains it, and offer it again to the new epoch. Effects that may have been
decided but not carried out are returned again; each is idempotent by its name. The link to a suspect island finds out
whether it answers. The driver keeps the deadlines of timers (``tape.pending``).
"""

from __future__ import annotations

from orchestrator.core import checkpoints, evaluation, island_life, island_record
from orchestrator.core.effects import (
    DrainIsland,
    Effect,
    FlushIsland,
    KillIsland,
    PlaceIsland,
    StartTraining,
)
from orchestrator.core.events import SynchroniserRestarted
from orchestrator.core.fragment_life import lose_payloads, publish_newer
from orchestrator.core.island_record import WITH_PROCESS, Island
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import Instant, IslandState, JobPhase, Version


def restarted(state: JobState, event: SynchroniserRestarted) -> list[Effect]:
    """Declare lost what is lost, and ask again for all that is pending. An epoch that is not newer changes nothing."""
    if event.epoch <= state.epoch:
        return []
    state.epoch = event.epoch
    effects = [*lose_payloads(state), *checkpoints.give_up(state, "the synchroniser died while it was taken")]
    flushing = state.phase is JobPhase.FINISHING and not state.complete
    for island in list(state.islands.values()):
        if flushing and island.current.flushed:  # what it gave last may be lost
            island = state.islands[island.id] = island_record.not_flushed(state.islands[island.id])
        effects += _pending_requests(state, state.islands[island.id], event.at)
    effects += island_life.flush_deadline(state, event.at) if flushing else []
    return effects + _evaluation(state)


def _pending_requests(state: JobState, island: Island, now: Instant) -> list[Effect]:
    life = (island.id, island.incarnation)
    effects: list[Effect] = []
    match island.state:
        case IslandState.PLACING:
            effects.append(PlaceIsland(*life, island.plan.node_group, island.reason, island.current.process))
        case IslandState.CATCHING_UP:
            effects += island_life.catch_up(state, island.id)
        case IslandState.STANDBY:
            effects += publish_newer(state, island, tuple(Version(0) for _ in state.rounds), now)
        case IslandState.TRAINING | IslandState.DRAINING:
            effects += publish_newer(state, island, tuple(Version(0) for _ in state.rounds), now)
            order = StartTraining if island.state is IslandState.TRAINING else DrainIsland
            command = FlushIsland if state.phase is JobPhase.FINISHING else order
            effects += [] if state.complete else [command(*life)]
    if island.current.kill_reason and island.state in WITH_PROCESS:
        effects.append(KillIsland(*life, island.current.kill_reason))
    return effects


def _evaluation(state: JobState) -> list[Effect]:
    """Repeat an evaluation that was under way. An ending job requests its last evaluation by itself."""
    if state.evaluation is None:
        return []
    if state.phase is JobPhase.RUNNING:
        return [evaluation.begin_anew(state, state.evaluation)]
    state.evaluation = None
    return []
