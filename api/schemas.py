"""The shapes of the REST API's answers, shared by the service, the client and the CLI.

Responsible for names, types and help texts of the JSON that leaves the service. It refuses to know where the values
come from (``api.jobs.translate`` fills them). The job specification itself is ``orchestrator.specification.config.JobSpec``.

Times: ``*_at`` fields of a job are unix seconds; ``*_after_s`` are seconds since the job was created.

The shapes of checkpoints in answers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.specification.bounds import IslandCountFromZero, Word


class JobState(StrEnum):
    """Where a job is. It waits, is alive in the next three, and the others are final."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    FINISHING = "finishing"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in (JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED)


FINAL = frozenset(state for state in JobState if state.final)
ALIVE = frozenset({JobState.STARTING, JobState.RUNNING})
"""What the store says of jobs whose present state only they know."""


class CommandState(StrEnum):
    """What became of an operator's command. ``undelivered``: its job did not answer; it is asked again until it does."""

    PENDING = "pending"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNDELIVERED = "undelivered"


class Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="null")


class Line(Answer):
    """What was carried between an island and the synchroniser since that began."""

    up_payloads: int
    up_bytes: int
    up_busy_seconds: float = Field(description="how long contributions were under way")
    down_payloads: dict[str, int] = Field(description="by kind, as down_bytes")
    down_bytes: dict[str, int] = Field(
        description="update: in the codec of updates; values: whole float32 values; state: those of every fragment"
    )
    down_busy_seconds: float = Field(description="how long publications were under way")
    queued_fragments: int = Field(description="published for the island and not arrived, right now")
    queued_bytes: int
    trouble: str | None = Field(
        default=None, description="what is in the way of its payloads right now, and the remedy"
    )


class Island(Answer):
    island: str
    node_group: str
    region: str
    accelerator_count: int
    hosts: int = Field(default=1, description="how many processes it is, each on a node of its own")
    mesh: dict[str, int] = Field(default={}, description="the axes of its devices that are longer than one")
    state: str = Field(
        description="placing, starting, catching_up, training, standby, suspect, draining, drained, cordoned, lost, "
        "stopped or failed"
    )
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
    flag: str = Field(default="", description="what is wrong with what it contributes; empty once good work is merged")
    quarantines: int = Field(default=0, description="times it was replaced for that, since an operator re-added it")
    standby: bool = Field(default=False, description="no island yet: a process that waits to take a lost one's place")
    spare: bool = Field(default=False, description="a scale-up slot that was never filled: a name and a data shard")
    overdue_s: float = Field(default=0.0, description="seconds in one step, far beyond the usual; 0 while it steps")
    line: Line | None = Field(default=None, description="null before it has one")


class Fragment(Answer):
    fragment: int
    version: int
    phase: str
    offered: list[str]
    step: int
    update_norm: float | None = Field(default=None, description="norm of what the last outer step changed")
    residue_norm: float | None = Field(default=None, description="norm of what the codec of updates still owes")


class Helper(Answer):
    """One helper process of the job: its controller, an evaluator, the agent of a node. A dead one is made again."""

    name: str
    condition: str = Field(description="running, silent or dead")
    reason: str = Field(description="what is wrong with it, and what comes next; empty while it runs")
    restarts: int = Field(description="times it was made again")


class LossPoint(Answer):
    tokens: int
    loss: float | None = Field(description="held-out loss, nats per token")
    after_s: float


class JobSummary(Answer):
    """One line of the list of jobs."""

    job: str
    name: str
    state: JobState
    reason: str = Field(description="why it ended as it did, or why it waits")
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
    priority: int = Field(default=0, description="higher ones start first")
    queue_position: int | None = Field(default=None, description="1: the next to start; null: not in the queue")
    last_known: bool = Field(
        default=False, description="its version, epoch and tokens are as last seen: it could not tell its end itself"
    )


class ProblemItem(Answer):
    path: str
    message: str
    remedy: str


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
    resumed_from: str | None = Field(default=None, description="the checkpoint that the job goes on from")
    wire: dict[str, str] = Field(default={}, description="the codecs, up of contributions and down of updates")
    schedule: dict[str, int] = Field(
        default={}, description="fragments, and their interval_steps and overlap_steps, as the specification has them"
    )
    helpers: list[Helper] = Field(default=[], description="the job's other processes; none before it has answered")
    resume_refused: list[str] = Field(default=[], description="newer checkpoints that are not sound, and why")
    warnings: list[ProblemItem] = Field(
        default=[], description="what of the specification is allowed, and most likely not what its author wants"
    )


class JobCheck(Answer):
    """A specification that would be taken."""

    name: str
    island_count: int
    token_budget: int
    steps: int = Field(description="of each island, if all are equally fast")
    specification: dict[str, Any] = Field(description="with every default, and what the service fills in")


class Jobs(Answer):
    jobs: list[JobSummary]
    next_cursor: str | None = Field(default=None, description="give it as `cursor` for the next page; null: no more")


class Islands(Answer):
    islands: list[Island]


class NodeGroup(Answer):
    name: str
    region: str
    nodes: int
    cpus: float
    cpus_free: float
    accelerators: int
    cordoned: bool = Field(default=False, description="whether nothing new is placed there")
    cordoned_by: str | None = None


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
    node_group: str | None = Field(default=None, description="of a scale, cordon or uncordon")
    count: int | None = Field(
        default=None, description="of a scale: how many islands; of a rollback: to which checkpoint"
    )


class Commands(Answer):
    commands: list[Command]


class TapeRecord(Answer):
    """One record of a job's tape: an event, and what was decided on it. Messages carry their name under ``type``."""

    n: int = Field(description="the record's number, from 1")
    event: dict[str, Any]
    effects: list[dict[str, Any]]


class Contributor(Answer):
    """One input of a merge."""

    island: str
    incarnation: int
    step: int = Field(description="logical step of the snapshot")
    step_count: int
    token_count: int
    base_version: int
    staleness: int = Field(description="versions between its base and the one that was current")
    weight: float = Field(description="its share of the average; the weights of a merge sum to one")
    arrived_after_s: float
    on_time: bool = Field(description="false: made before the round's due point")


class Refusal(Answer):
    """A contribution that did not enter a round, or came too late for it."""

    island: str
    incarnation: int
    step: int
    token_count: int
    base_version: int
    reason: str
    detail: str
    after_s: float


class Absence(Answer):
    island: str
    state: str = Field(description="of the island, when the round closed")


class MergeSummary(Answer):
    """One line of the list of merges."""

    fragment: int
    version: int = Field(description="the version that the merge made")
    islands: list[str] = Field(description="whose contributions are in it")
    reason: str = Field(description="why it closed: everyone_in, grace_over, no_grace_left or final_flush")
    because: str = Field(description="the same in plain words, with who was late or away")
    closed_after_s: float
    merged_after_s: float | None = Field(description="null while the outer step is being taken")


class Merge(MergeSummary):
    """One merge explained."""

    step: int = Field(description="logical step of the result")
    quorum: int
    opened_after_s: float = Field(description="the first contribution on time")
    quorum_after_s: float = Field(description="from here on the round could have closed")
    grace_window_s: float | None = Field(description="how long it might wait after quorum; null if it did not")
    grace_used_s: float
    detail: str = Field(description="the synchroniser's own words on why it closed")
    contributors: list[Contributor]
    absent: list[Absence]
    refusals: list[Refusal]
    refusal_count: int
    merge_s: float | None
    digest: str | None


class Merges(Answer):
    merges: list[MergeSummary]
    next_cursor: str | None = Field(default=None, description="give it as `cursor` for the next page; null: no more")


class Scale(BaseModel):
    """How many islands of the job shall be on the node group: at most ``islands.count_max`` of its specification."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"node_group": "us-east", "count": 2}]})

    node_group: Word
    count: IslandCountFromZero


class NodeGroupChange(Answer):
    """A node group as it is from now on, and the commands by which the jobs that run were told."""

    node_group: NodeGroup
    commands: list[Command]


class Health(Answer):
    status: str
    detail: str = ""


class ProblemDocument(Answer):
    """RFC 9457, with two members of ours: what to do about it, and every single problem of a specification."""

    type: str
    title: str
    status: int
    detail: str
    instance: str = ""
    remedy: str = ""
    problems: list[ProblemItem] = []


class Checkpoint(Answer):
    """One whole checkpoint of a job. ``url`` is what ``resume.checkpoint`` of a specification takes."""

    number: int
    url: str
    taken_at: float = Field(description="Unix seconds")
    after_s: float = Field(description="seconds since the job was created")
    global_version: int
    tokens_trained: int
    islands: list[str] = Field(description="whose state it holds")
    bytes: int


class RollbackOptions(BaseModel):
    """``checkpoint`` is the number of one that the job keeps; without it, the newest."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: int | None = Field(default=None, strict=True, ge=1, le=2**31 - 1)


class Checkpoints(Answer):
    checkpoints: list[Checkpoint]
