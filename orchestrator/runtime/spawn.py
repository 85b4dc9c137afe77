"""The spawning of an island's processes as Ray actors: their class, their node group, and what they book there.

Refuses to decide whether it fits (``placement``), and to wait (``controller``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.actors.handle import ActorHandle
from orchestrator.actors.island import IslandFactory, IslandInterface
from orchestrator.core.vocabulary import Life
from orchestrator.logbook import Logbook, rank_logbook
from orchestrator.runtime import cluster
from orchestrator.runtime.names import island_name, rank_name
from orchestrator.runtime.placement import Gang, environment_of
from orchestrator.runtime.settings import GROUP_LABEL, abandoned_after_s
from orchestrator.sections import IslandsSection

ISLAND_CLASS = "learners.island:Island"
CONCURRENCY = 32


def spawn_island(
    job: str,
    life: Life,
    section: IslandsSection,
    wanted: Mapping[str, float],
    selector: Mapping[str, str],
    book: Logbook,
) -> ActorHandle[IslandInterface]:
    """Ask for the process of this life on a node of its group that ``selector`` allows, with ``wanted`` booked there."""
    where = {"label_selector": {GROUP_LABEL: section.node_group, **selector}}
    return _spawned(island_name(job, *life), life, section, wanted, where, book)


def spawn_gang(
    job: str,
    life: Life,
    section: IslandsSection,
    wanted: Mapping[str, float],
    gang: Gang,
    selector: Mapping[str, str],
    book: Logbook,
    timeout_s: float,
) -> tuple[ActorHandle[IslandInterface], ...]:
    """As ``spawn_island``, the processes of an island of many hosts, by rank; none where not all can be placed in time."""
    name = island_name(job, *life)
    selectors = [{GROUP_LABEL: section.node_group, **selector, **own} for own in gang.selectors]
    booking = cluster.booked(name, wanted, selectors, timeout_s)
    if booking is None:
        return ()
    return tuple(
        _spawned(
            rank_name(name, rank),
            life,
            section,
            wanted,
            cluster.in_booking(booking, rank),
            rank_logbook(book, rank),
        )
        for rank in range(len(selectors))
    )


def _spawned(
    name: str,
    life: Life,
    section: IslandsSection,
    wanted: Mapping[str, float],
    where: Mapping[str, Any],
    book: Logbook,
) -> ActorHandle[IslandInterface]:
    island_class: IslandFactory = cluster.actor_class(ISLAND_CLASS)
    options = {
        "name": name,
        "max_restarts": 0,
        "max_concurrency": CONCURRENCY,
        "num_cpus": wanted["CPU"],
        "num_gpus": wanted.get("GPU", 0),
        "resources": {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")},
        "enable_task_events": False,
        **where,
    }
    return cluster.start_actor(island_class, options, life[0], environment_of(section), book, abandoned_after_s())
