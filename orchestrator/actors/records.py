"""The plain records that cross from jobs to the control plane: node groups, commands, and the status of a job."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class NodeGroupRecord(TypedDict):
    """A set of nodes of one kind in one region. Capacities are totals over its nodes; ``cpus_free`` is right now."""

    name: str
    region: str
    nodes: int
    cpus: float
    cpus_free: float
    accelerators: int


class CommandRecord(TypedDict):
    """What became of a command. ``at`` is when the job took it; ``accepted`` is None until it decided."""

    kind: str
    island: str | None
    caller: str
    at: float
    accepted: bool | None
    detail: str


class StatusRecord(TypedDict):
    """One job as it stands, as plain data. ``RUN_DIR/status.json`` holds the same once the job has ended.

    started_at   unix seconds; zero of every other instant
    at           the instant this was taken, in seconds since then
    view         ``dataclasses.asdict`` of ``orchestrator.core.view.JobView``
    goodput      ``orchestrator.accounting.goodput.Goodput.summary``
    statistics   ``orchestrator.accounting.statistics.Statistics.summary``
    loss_curve   [tokens trained, held-out loss in nats per token, at] of every evaluation, oldest first
    commands     every command on the tape, by id
    fragment_parameters  how many parameters each fragment has, by which payload counts become bytes
    disk_trouble what the disk of journal and tape refuses, while it does; nothing is merged meanwhile
    last_known   set where its files are damaged: version, epoch and tokens are what could still be read of them
    """

    job_id: str
    name: str
    started_at: float
    at: float
    view: dict[str, Any]
    goodput: dict[str, Any]
    statistics: dict[str, Any]
    loss_curve: list[list[float]]
    commands: dict[str, CommandRecord]
    unigram_loss: NotRequired[float | None]
    fragment_parameters: NotRequired[list[int]]
    disk_trouble: NotRequired[str | None]
    last_known: NotRequired[bool]
