"""The spawning of an island's process as a Ray actor: its class, its node group, and what it books there.

Refuses to decide whether it fits (``placement``), and to wait (``controller``).
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.actors.handle import ActorHandle
from orchestrator.actors.island import IslandFactory, IslandInterface
from orchestrator.core.vocabulary import Life
from orchestrator.logbook import Logbook
from orchestrator.runtime import cluster
from orchestrator.runtime.names import island_name
from orchestrator.runtime.placement import environment_of
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
    island_class: IslandFactory = cluster.actor_class(ISLAND_CLASS)
    options = {
        "name": island_name(job, *life),
        "max_restarts": 0,
        "max_concurrency": CONCURRENCY,
        "num_cpus": wanted["CPU"],
        "num_gpus": wanted.get("GPU", 0),
        "resources": {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")},
        "label_selector": {GROUP_LABEL: section.node_group, **selector},
        "enable_task_events": False,
    }
    return cluster.start_actor(island_class, options, life[0], environment_of(section), book, abandoned_after_s())
