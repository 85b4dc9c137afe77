"""What the REST API answers with: the wire's shapes, shared by the service, the client and the CLI.

Responsible for names, types and help texts of the JSON that leaves the service. It refuses to know where the values
come from (``api.translate`` fills them). The job specification itself is ``orchestrator.config.JobSpec``.

Times: ``*_at`` fields of a job are unix seconds; ``*_after_s`` are seconds since the job was created.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class JobState(StrEnum):
    """Where a job is. The first three are alive, the others final."""

    STARTING = "starting"
    RUNNING = "running"
    FINISHING = "finishing"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in (JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED)


class CommandState(StrEnum):
    """What became of an operator's command."""

    PENDING = "pending"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNDELIVERED = "undelivered"


class Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="null")


class Island(Answer):
    island: str
    node_group: str
    region: str
    accelerator_count: int
    state: str = Field(description="placing, starting, catching_up, training, suspect, lost, stopped or failed")
    reason: str = Field(description="why the island is in this state")
    incarnation: int = Field(default=0, description="which life of the island: one more each time it is placed again")
    node: str = ""
    pid: int | None = None
    step: int = Field(default=0, description="logical step")
    steps_total: int = 0
    tokens_total: int = 0
    steps_per_second: float | None = None
    loss: float | None = Field(default=None, description="training loss of the last step, nats per token")
    last_merge_after_s: float | None = None
    restarts: int = 0


class Fragment(Answer):
    fragment: int
    version: int
    phase: str
    offered: list[str]
    step: int


class LossPoint(Answer):
    tokens: int
    loss: float | None = Field(description="held-out loss, nats per token")
    after_s: float


class JobSummary(Answer):
    """One line of the list of jobs."""

    job: str
    name: str
    state: JobState
    reason: str
    caller: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    island_count: int
    islands_training: int
    token_budget: int
    tokens_trained: int
    global_version: int
    loss: float | None = Field(description="newest held-out loss, nats per token")
    goodput_ratio: float | None
    run_dir: str


class Job(JobSummary):
    """Everything about one job."""

    after_s: float | None = Field(description="the instant of this picture, in seconds since the job was created")
    pause_reason: str | None = Field(description="set while no fragment can merge")
    epoch: int
    loss_train: float | None = Field(description="mean training loss of the islands' last steps, nats per token")
    islands: list[Island]
    fragments: list[Fragment]
    loss_curve: list[LossPoint]
    goodput: dict[str, Any]
    statistics: dict[str, Any]
    report_ready: bool


class Jobs(Answer):
    jobs: list[JobSummary]


class Islands(Answer):
    islands: list[Island]


class NodeGroup(Answer):
    name: str
    region: str
    nodes: int
    cpus: float
    cpus_free: float
    accelerators: int


class NodeGroups(Answer):
    node_groups: list[NodeGroup]


class Command(Answer):
    """An operator's command and what became of it."""

    command: str
    job: str
    kind: str
    island: str | None
    caller: str
    requested_at: float
    state: CommandState
    detail: str


class Commands(Answer):
    commands: list[Command]


class Health(Answer):
    status: str
    detail: str = ""


class ProblemItem(Answer):
    path: str
    message: str
    remedy: str


class ProblemDocument(Answer):
    """RFC 9457, with two members of ours: what to do about it, and every single problem of a specification."""

    type: str
    title: str
    status: int
    detail: str
    instance: str = ""
    remedy: str = ""
    problems: list[ProblemItem] = []
