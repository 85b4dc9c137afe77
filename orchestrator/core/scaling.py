"""Scaling: an operator changes how many islands of a node group a job wants, while the job trains.

The policy names every island that there may ever be, in order, each with a data shard of its own, so that nothing that is
planned by islands (shards, accounts, names) changes under a running job. Those that are not wanted yet are *scale-up slots*:
they have no process, and cost nothing. Scaling up wants the first that are not wanted; scaling down drains the last that
are, and drops at once what has no work to lose. As with a drain, a quorum must be left to merge that work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.core import island_life, island_record
from orchestrator.core.commands import Scale
from orchestrator.core.effects import DrainIsland, Effect, ResolveCommand, StartTraining, StopIsland, WantIsland
from orchestrator.core.events import CommandRequested
from orchestrator.core.fragment_life import advance_all
from orchestrator.core.island_record import WITH_PROCESS, Island
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import IslandState, JobPhase


def scale(state: JobState, event: CommandRequested, request: Scale) -> list[Effect]:
    group_islands = [state.islands[p.island] for p in state.policy.islands if p.node_group == request.node_group]
    wanted = [i for i in group_islands if i.wanted]
    removed = wanted[request.count :]
    if refusal := _refusal(state, request, group_islands, removed):
        return [ResolveCommand(event.command, False, refusal)]
    added = [i for i in group_islands if not i.wanted][: max(0, request.count - len(wanted))]
    reason = f"{event.caller} wants {request.count} islands of node group {request.node_group}"
    effects: list[Effect] = [ResolveCommand(event.command, True, _outcome(added, removed) or f"{reason}, and has them")]
    for island in added:
        effects += [WantIsland(island.id, True, reason), *_want(state, island, reason)]
    for island in removed:
        effects += [WantIsland(island.id, False, reason), *_leave(state, island, reason)]
    return [*effects, *advance_all(state, event.at)]


def _refusal(state: JobState, request: Scale, group_islands: list[Island], removed: list[Island]) -> str | None:
    if state.phase is not JobPhase.RUNNING:
        return f"the job is {state.phase}: islands are not changed any more"
    if not 0 <= request.count <= len(group_islands):
        return (
            f"of this job there may be 0 to {len(group_islands)} islands on node group {request.node_group!r}; "
            f"{request.count} were asked for"
        )
    removed_live = state.live & {island.id for island in removed}
    live_count = len(state.live - removed_live)
    if removed_live and live_count < state.policy.quorum:
        return (
            f"only {live_count} of the {state.policy.quorum} islands that the quorum needs would go on training, and the "
            f"last work of {', '.join(sorted(removed_live))} might never merge: leave more, or kill them and keep them away"
        )
    return None


def _want(state: JobState, island: Island, reason: str) -> list[Effect]:
    if island.state not in WITH_PROCESS:
        return island_life.place(state, island_record.failures_reset(island), reason)
    state.islands[island.id] = after = island_record.wanted_again(island, reason)
    return [StartTraining(island.id, island.incarnation)] if after.state is IslandState.TRAINING else []


def _leave(state: JobState, island: Island, reason: str) -> list[Effect]:
    """One that trains is drained, a suspect one as soon as it answers; others have no work to lose."""
    state_answered = island.state_before_suspect if island.state is IslandState.SUSPECT else island.state
    if island.state is IslandState.TRAINING:
        state.islands[island.id] = island_record.draining(island, reason)
        return [DrainIsland(island.id, island.incarnation)]
    if state_answered is IslandState.TRAINING:
        state.islands[island.id] = replace(island, wanted=False, state_before_suspect=IslandState.DRAINING)
        return []
    if state_answered is IslandState.DRAINING:
        state.islands[island.id] = replace(island, wanted=False)  # killed meanwhile, to be placed again
        return []
    state.islands[island.id] = island_record.dismissed(island, reason)
    return [StopIsland(island.id, island.incarnation, reason)] if island.state in WITH_PROCESS else []


def _outcome(added: Iterable[Island], removed: Iterable[Island]) -> str:
    placed = [f"{island.id} is placed" for island in added]
    return "; ".join([*placed, *(f"{island.id} leaves" for island in removed)])
