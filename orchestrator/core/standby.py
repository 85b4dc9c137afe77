"""Standbys: processes that wait to take a lost island's place, so that it trains again in seconds.

    PLACING ──▶ STARTING ──▶ CATCHING_UP ──▶ STANDBY ──an island of its kind is lost──▶ its process is the island's
       ▲                                        │                                       next incarnation
       └──────placed again, as its own next incarnation

A standby is placed, started, suspected and placed again as an island is (``island_life``). It has no data, trains
nothing, is in no quorum and gives nobody a state; it is given one as any island, and gets every publication. A promoted
standby goes on from the state it holds; of the island it gets name, shard and cursor.

An island waits for no back-off when a standby of its kind (node group and accelerators) stands by, at once or later. Like
all that places, this honours a cordon; and lives in a row that end without a contribution are counted all the same, so an
island that kills every process it is given is given up as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from orchestrator.core import island_record
from orchestrator.core.effects import Effect, PlaceIsland
from orchestrator.core.island_record import Island
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import IslandState


def promote(state: JobState) -> list[Effect]:
    """Every lost island that a standby matches goes on as the standby's process; the standby is placed again."""
    effects: list[Effect] = []
    for island, standby in list(_matches(state)):
        process = (standby.id, standby.incarnation)
        reason = f"goes on as the standby {standby.id}"
        after, _ = island_record.place(island, state.reports.pop(island.id, None), reason)
        state.islands[island.id] = replace(after, process=process)
        next_standby, placing = island_record.place(standby, None, f"its process is {island.id} now")
        state.islands[standby.id] = next_standby
        effects += [PlaceIsland(island.id, after.incarnation, island.plan.node_group, reason, process), *placing]
    return effects


def _matches(state: JobState) -> Iterator[tuple[Island, Island]]:
    idle = [i for i in map(state.islands.__getitem__, sorted(state.standbys)) if _stands_by(i)]
    for plan in state.policy.islands:
        island = state.islands[plan.island]
        waits = island.state is IslandState.LOST and island.wanted and island.incarnation > 0
        if not waits or plan.node_group in state.cordoned:
            continue
        standby = next((other for other in idle if _kind(other) == _kind(island)), None)
        if standby is not None:
            idle.remove(standby)
            yield island, standby


def _stands_by(standby: Island) -> bool:
    return standby.state is IslandState.STANDBY and not standby.kill_reason


def _kind(island: Island) -> tuple[str, int]:
    return island.plan.node_group, island.plan.accelerator_count
