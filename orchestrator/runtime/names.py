"""The names of a job's actors. All begin with ``JOB:``, so that whatever is left of a job can be looked up."""

from __future__ import annotations

from orchestrator.core.vocabulary import Incarnation, IslandId


def prefix(job: str) -> str:
    return f"{job}:"


def synchroniser_name(job: str) -> str:
    return f"{prefix(job)}synchroniser"


def controller_name(job: str) -> str:
    return f"{prefix(job)}controller"


def evaluator_name(job: str, number: int, node_group: str = "") -> str:
    """Numbered: a name is taken until Ray has noticed its actor's end. ``node_group`` is empty for that of the head."""
    return f"{prefix(job)}evaluator-{f'{node_group}-' if node_group else ''}{number}"


def island_name(job: str, island: IslandId, incarnation: Incarnation) -> str:
    return f"{prefix(job)}{island}:{incarnation}"


def rank_name(island: str, rank: int) -> str:
    """Of the process of this rank, in an island whose rank 0 is called ``island``."""
    return f"{island}/{rank}" if rank else island
