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


class LineRecord(TypedDict):
    """What an island's line carried since its synchroniser began, as ``host.line_traffic`` counts it.

    down_payloads, down_bytes  by kind: update, values, state
    *_busy_seconds             how long something was under way in that direction
    queued_*                   published for the island and not arrived, right now
    trouble                    what is in the way of its payloads, right now
    """

    up_payloads: int
    up_bytes: int
    up_busy_seconds: float
    down_payloads: dict[str, int]
    down_bytes: dict[str, int]
    down_busy_seconds: float
    queued_fragments: int
    queued_bytes: int
    trouble: str | None


class LinesRecord(TypedDict):
    """Every line of a job, and their sums by region."""

    islands: dict[str, LineRecord]
    regions: dict[str, LineRecord]


class NormsRecord(TypedDict):
    """Of a fragment's last merge in this life of the synchroniser: ‖Θ' − Θ‖, and the norm of what its codec still owes."""

    fragment: int
    version: int
    update_norm: float
    residue_norm: float


class HelperRecord(TypedDict):
    """One helper process of a job: its controller, an evaluator, the agent of a node.

    condition  running, silent, or dead
    reason     what is wrong with it and what comes next; empty while it runs
    restarts   how often it was made again in this life of the synchroniser, or of the controller for a node's agent
    """

    name: str
    condition: str
    reason: str
    restarts: int


class StatusRecord(TypedDict):
    """One job as it stands, as plain data. ``RUN_DIR/status.json`` holds the same once the job has ended.

    started_at   unix seconds; zero of every other instant
    at           the instant this was taken, in seconds since then
    view         ``dataclasses.asdict`` of ``orchestrator.core.view.JobView``
    goodput      ``orchestrator.accounting.goodput.Goodput.summary``
    statistics   ``orchestrator.accounting.statistics.Statistics.summary``
    loss_curve   [tokens trained, held-out loss in nats per token, at] of every evaluation, oldest first
    commands     every command on the tape, by id
    fragment_parameters  how many parameters each fragment has
    lines        bytes as they were carried between islands and synchroniser
    fragment_norms  of each fragment that was merged in this life of the synchroniser
    helpers      the job's other processes, and whether they are there
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
    lines: NotRequired[LinesRecord]
    fragment_norms: NotRequired[list[NormsRecord]]
    helpers: NotRequired[list[HelperRecord]]
    disk_trouble: NotRequired[str | None]
    last_known: NotRequired[bool]
