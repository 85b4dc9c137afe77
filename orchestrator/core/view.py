"""Views: a frozen copy of a job's state for others, made on request, safe to keep and to turn into JSON.

Views are made of plain values only, so that the API and the CLI need nothing else of the core. Nothing is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.vocabulary import (
    Duration,
    Epoch,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    IslandState,
    JobOutcome,
    JobPhase,
    NodeGroupId,
    RoundPhase,
    Version,
)


@dataclass(frozen=True, slots=True)
class IslandView:
    """One island. ``steps_total`` and ``tokens_total`` are over all its incarnations; ``reason`` says why this state.

    ``flag`` says what was wrong with its last contribution, until work of it is merged again; empty while it is well.
    ``standby``: it is no island yet, and may be promoted to one. ``overdue_s``: it has been so long in one step, far longer
    than is usual; 0 while it steps.
    """

    island: IslandId
    node_group: NodeGroupId
    region: str
    accelerator_count: int
    state: IslandState
    reason: str
    incarnation: Incarnation
    node: str
    pid: int | None
    step: int
    steps_total: int
    tokens_total: int
    step_seconds: Duration | None
    loss: float | None
    last_merge_at: Instant | None
    restarts: int
    flag: str
    quarantines: int
    standby: bool
    overdue_s: Duration


@dataclass(frozen=True, slots=True)
class FragmentView:
    """One fragment: where it stands, and who is in its open round."""

    fragment: FragmentId
    version: Version
    phase: RoundPhase
    offered: tuple[IslandId, ...]
    step: int


@dataclass(frozen=True, slots=True)
class JobView:
    """The whole job. ``global_version`` is Σ_p version; ``pause_reason`` is set while no fragment can merge.

    ``cordoned`` are the node groups that the job places nothing new on.
    """

    at: Instant
    phase: JobPhase
    outcome: JobOutcome | None
    reason: str
    pause_reason: str | None
    epoch: Epoch
    token_budget: int
    tokens_trained: int
    global_version: int
    cordoned: tuple[NodeGroupId, ...]
    islands: tuple[IslandView, ...]
    fragments: tuple[FragmentView, ...]
