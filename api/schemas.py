"""The REST API's answers, shared by the service, the client and the CLI.

What a job says of itself is defined in ``orchestrator.status``. ``Island``, ``Fragment``, ``JobSummary`` and ``Job`` inherit
those fields and add what only the service knows. ``api.jobs.translate`` fills them. The job specification is
``orchestrator.specification.config.JobSpec``.

Times: fields named ``*_at`` are Unix seconds; ``*_after_s`` are seconds since the job was created.

The shapes of tokens and of the audit trail, as the REST API says them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api.auth.permissions import Role
from orchestrator.specification.bounds import IslandCountFromZero, Word
from orchestrator.status import (
    FragmentStatus,
    GoodputFigures,
    Helper,
    IslandFacts,
    JobFacts,
    Line,
    ProgressFacts,
    Shard,
    StatisticsFigures,
)


class JobState(StrEnum):
    """The state of a job: queued, then three in which it is alive, then three that are final."""

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
    """The state of an operator's command. ``undelivered``: its job did not answer; it is asked again until it does."""

    PENDING = "pending"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNDELIVERED = "undelivered"


class Answer(BaseModel):
    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="null", defer_build=True)


class Island(Answer, IslandFacts):
    """One island of a job."""

    hosts: int = Field(default=1, description="number of its processes, each on a separate node")
    mesh: dict[str, int] = Field(default={}, description="the axes of its device mesh that are longer than 1")
    steps_per_second: float | None = None
    tokens_per_second: float | None = Field(
        default=None, description="at its recent pace and mean tokens a step; null: it does not train now"
    )
    last_merge_after_s: float | None = None
    spare: bool = Field(
        default=False, description="a scale-up slot that was never filled: only a name and a data shard"
    )
    line: Line | None = Field(default=None, description="null until it has one")


class Fragment(Answer, FragmentStatus):
    """One fragment of a job."""

    update_norm: float | None = Field(default=None, description="norm of the last outer step's change")
    residue_norm: float | None = Field(default=None, description="norm of what the codec of updates has not sent yet")


class LossPoint(Answer):
    tokens: int
    loss: float | None = Field(description="held-out loss, nats per token")
    after_s: float


class JobOverview(Answer):
    """The beginning of a job's summary, apart so that its JSON begins with what identifies the job."""

    job: str
    name: str
    state: JobState
    reason: str = Field(description="why it ended as it did, or why it waits")
    caller: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    island_count: int
    islands_training: int | None = Field(description="null: unknown, because the job does not answer")


class JobSummary(ProgressFacts, JobOverview):
    """One line of the list of jobs."""

    loss: float | None = Field(description="newest held-out loss, nats per token")
    goodput_ratio: float | None
    run_dir: str
    priority: int = Field(default=0, description="jobs of higher priority start first")
    queue_position: int | None = Field(default=None, description="1: the next to start; null: not in the queue")
    silent: bool = Field(
        default=False,
        description="it does not answer: its islands are not known, and its other figures are as last seen, if at all",
    )
    last_known: bool = Field(
        default=False,
        description="its version, epoch and tokens are the last known ones, because it did not report its own end",
    )
    eta_s: float | None = Field(
        default=None,
        description="seconds until its tokens are trained, at the recent pace of the islands that train; null: nothing can "
        "merge now",
    )
    merged_at: float | None = Field(default=None, description="when its last merge was, Unix seconds")
    troubles: list[str] = Field(default=[], description="what is wrong with a job that has not ended")


class ProblemItem(Answer):
    path: str
    message: str
    remedy: str


class Job(JobFacts, JobSummary):
    """Everything about one job."""

    after_s: float | None = Field(description="the time of this status, in seconds since the job was created")
    loss_train: float | None = Field(description="mean training loss of the islands' last steps, nats per token")
    islands: list[Island]
    fragments: list[Fragment]
    loss_curve: list[LossPoint]
    goodput: GoodputFigures
    statistics: StatisticsFigures
    report_ready: bool
    resumed_from: str | None = Field(default=None, description="the checkpoint that the job resumed from")
    wire: dict[str, str] = Field(default={}, description="the codecs: `up` for contributions, `down` for updates")
    schedule: dict[str, int] = Field(
        default={},
        description="fragments, interval_steps, overlap_steps and, if set, router_interval_steps of the specification",
    )
    helpers: list[Helper] = Field(default=[], description="the job's other processes; empty until it has answered")
    upgrade: str = Field(default="", description="the release of this service, if it is newer than that of the job")
    shards: list[Shard] = Field(default=[], description="the shards of the synchroniser, if it has several")
    resume_refused: list[str] = Field(default=[], description="newer checkpoints that are damaged, and why")
    warnings: list[ProblemItem] = Field(
        default=[], description="settings of the specification that are valid but probably a mistake"
    )
    cordoned_nodes: list[NodeCordon] = Field(
        default=[], description="cordoned nodes of the node groups that the job's islands are on"
    )


class JobCheck(Answer):
    """A specification that would be taken."""

    name: str
    island_count: int
    token_budget: int
    steps: int = Field(description="steps of each island, if all are equally fast")
    specification: dict[str, Any] = Field(description="with all defaults, and the fields that the service fills in")


class Specification(Answer):
    """The specification of a job, with all defaults as they were when it was submitted."""

    job: str
    specification: dict[str, Any]


class Jobs(Answer):
    jobs: list[JobSummary]
    next_cursor: str | None = Field(default=None, description="give it as `cursor` for the next page; null: no more")


class Islands(Answer):
    islands: list[Island]


class NodeCordon(Answer):
    """A node on which nothing new is placed. Islands that train there continue."""

    node: str
    node_group: str
    cordoned_by: str
    reason: str = Field(description="why; empty if an operator cordoned it")
    cordoned_at: float
    expires_at: float | None = Field(default=None, description="when it ends by itself (unix); null: never")
    in_force: bool = Field(
        default=True, description="false while its node group has no other node that could be used instead"
    )


class NodeGroup(Answer):
    name: str
    region: str
    nodes: int
    cpus: float
    cpus_free: float
    accelerators: int
    nodes_leaving: int = Field(default=0, description="how many of the nodes are about to go")
    nodes_down: int = Field(
        default=0, description="nodes besides these that do not answer: dead or cut off. Nothing is placed there"
    )
    builds: list[str] = Field(default=[], description="builds of atoll on its nodes: release and wire number")
    node_names: list[str] = Field(default=[], description="the machines of the nodes that answer and stay, by name")
    cordoned: bool = Field(default=False, description="whether nothing new is placed there")
    cordoned_by: str | None = None
    cordoned_nodes: list[NodeCordon] = Field(default=[], description="single nodes on which nothing new is placed")


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
    node_group: str | None = Field(default=None, description="for scale, cordon and uncordon")
    count: int | None = Field(
        default=None, description="scale: the number of islands; rollback: the number of the checkpoint"
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
    weight: float = Field(description="its share of the average; the weights of a merge add up to 1")
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
    state: str = Field(description="the island's state when the round closed")


class MergeSummary(Answer):
    """One line of the list of merges."""

    fragment: int
    version: int = Field(description="the version that the merge made")
    islands: list[str] = Field(description="islands with a contribution in it")
    reason: str = Field(description="why it closed: everyone_in, grace_over, no_grace_left, leaving or final_flush")
    because: str = Field(description="the same in words, with the islands that were late or away")
    closed_after_s: float
    merged_after_s: float | None = Field(description="null while the outer step is being taken")


class Merge(MergeSummary):
    """One merge explained."""

    step: int = Field(description="logical step of the result")
    quorum: int
    opened_after_s: float = Field(description="time of the first contribution that was on time")
    quorum_after_s: float = Field(description="from then on the round could close")
    grace_window_s: float | None = Field(description="how long it could wait after quorum; null if it could not")
    grace_used_s: float
    detail: str = Field(description="the synchroniser's reason for closing it")
    contributors: list[Contributor]
    absent: list[Absence]
    refusals: list[Refusal]
    refusal_count: int
    merge_s: float | None
    digest: str | None


class Finding(Answer):
    """One cause of slowness or death."""

    cause: str = Field(description="its name for people")
    subject: str = Field(description="the island, node or node group it is about; empty: the job")
    island_seconds: float = Field(description="what it cost")
    share: float = Field(description="the part of all island time, 0 to 1")
    statement: str = Field(description="one sentence with the figures that show it")
    remedy: str
    records: list[int] = Field(description="numbers of tape records that show it, the latest ones")


class IslandFigures(Answer):
    """The figures of an island beside the others'. A `z` is the distance from their median in spreads; 3 stands out."""

    island: str
    node: str
    step_s: float | None = Field(description="mean seconds of an inner step")
    step_z: float | None
    pull_s: float | None = Field(description="median seconds from the step of a contribution until it arrived")
    pull_z: float | None
    delivery_s: float | None = Field(description="median seconds from a merge until its adoption, less a step")
    delivery_z: float | None
    waiting_ratio: float = Field(description="the part of its time in training in which it did not step")
    waiting_z: float | None
    failure_count: int


class Diagnosis(Answer):
    """The one cause of a job's slowness or death, and further causes."""

    job: str
    outcome: str | None = Field(description="null while the job runs")
    reason: str
    goodput_ratio: float
    cause: Finding | None = Field(description="null where no cause takes 2 % of the time")
    others: list[Finding] = Field(description="further causes, largest first")
    islands: list[IslandFigures]
    node_failures: dict[str, float] = Field(description="failures by node; one half an hour ago counts half")


class SimulatedEffect(Answer):
    """The simulated figures of a setting, as means over seeds."""

    tokens_per_second: float = Field(description="merged tokens a second")
    spread: float = Field(description="standard deviation of that over seeds")
    goodput_ratio: float
    contributors: float = Field(description="islands in a merge")
    drift_steps: float = Field(description="steps of an island between two merges of a fragment that it takes part in")
    badput: dict[str, float] = Field(description="part of the island time by cause")


class SettingAdvice(Answer):
    """One change of a setting, and its simulated effect."""

    setting: str = Field(description="interval_steps, quorum, grace or standbys")
    before: float | None = Field(description="null: no limit")
    after: float
    gain_ratio: float = Field(description="of merged tokens a second and machine, less what rarer merges cost")
    error_ratio: float = Field(description="its standard error over seeds")
    now: SimulatedEffect
    then: SimulatedEffect
    reason: str
    held_by: str = Field(description="why the autopilot may not make the change; empty if it may")


class Look(Answer):
    """The result of one look of the autopilot at the job's tape."""

    looked_at_time: float = Field(description="Unix seconds")
    record: int = Field(description="the newest record of the tape then")
    at: float = Field(description="seconds since the job was created")
    settings: dict[str, float | None] = Field(description="the settings then; null: no limit")
    fit_error_ratio: float | None = Field(description="how far the simulated present is from what happened")
    looked_at: int = Field(description="number of changes that were simulated")
    outcome: str = Field(description="the advice, or why there is none")
    advice: SettingAdvice | None
    command: str | None = Field(default=None, description="the command that made the change")


class Advice(Answer):
    """The looks of a job's autopilot, the newest first."""

    job: str
    kind: str = Field(description="off, observe or act")
    looks: list[Look]


class Merges(Answer):
    merges: list[MergeSummary]
    next_cursor: str | None = Field(default=None, description="give it as `cursor` for the next page; null: no more")


class Log(Answer):
    """The log of one process of a job."""

    source: str = Field(description="an island, or synchroniser, controller, evaluator")
    incarnation: int = Field(description="incarnation of the island, or number of the process")
    bytes: int
    written_at: float = Field(description="time of its last line, Unix seconds")


class Logs(Answer):
    logs: list[Log]


SettingValue = Annotated[float, Field(strict=True, ge=-1e12, le=1e12, allow_inf_nan=False)]
SettingCount = Annotated[int, Field(strict=True, ge=-(10**12), le=10**12)]
"""The job refuses what its bounds do not allow, and names them: they depend on the job."""


class Scale(BaseModel):
    """The number of the job's islands on the node group: at most ``islands.count_max`` of its specification."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"node_group": "us-east", "count": 2}]})

    node_group: Word
    count: IslandCountFromZero


class SettingsChange(BaseModel):
    """Settings to change in a running job; what is absent or null stays as it is. The job checks them together."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"lr_ratio": 0.5, "interval": 48}]})

    lr: SettingValue | None = Field(default=None, description="the inner learning rate at the schedule's peak")
    lr_ratio: SettingValue | None = Field(default=None, description="the same, as a ratio of the specification's")
    quorum: SettingCount | None = Field(default=None, description="islands that a merge needs at least")
    grace: SettingValue | None = Field(default=None, description="the longest grace window, in inner steps")
    interval: SettingCount | None = Field(default=None, description="inner steps between two offers of a fragment: H")
    cost: SettingValue | None = Field(
        default=None, description="the limit of cost; above the cost so far, a pause ends"
    )


class Restart(Answer):
    """The restart of a job's synchroniser: which process was ended, and what continues. Islands train meanwhile."""

    job: str
    detail: str


class Profile(Answer):
    """Says how far a trace of an island's inner steps is."""

    profile: str = Field(description="its name")
    job: str
    island: str
    incarnation: int = Field(description="the process that records it, and has it until it ends")
    steps: int = Field(description="the steps to record")
    steps_taken: int = Field(description="of these, how many it has")
    seconds: float = Field(description="how long these took; 0 until it has all")
    stalled_s: float = Field(description="how long the island stood still for the profiler")
    byte_count: int | None = Field(description="its size as a zip; null until it is complete")
    problem: str = Field(description="why there is no trace; empty if there is one, or will be")


class NodeGroupChange(Answer):
    """A node group as it is from now on, and the commands by which the jobs that run were told."""

    node_group: NodeGroup
    commands: list[Command]


class Health(Answer):
    status: str
    detail: str = ""
    build: str = Field(default="", description="the service's build of atoll: release and wire number")


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
    islands: list[str] = Field(description="islands with a state in it")
    bytes: int


class RollbackOptions(BaseModel):
    """``checkpoint`` is the number of one that the job keeps; without it, the newest."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: int | None = Field(default=None, strict=True, ge=1, le=2**31 - 1)


class Checkpoints(Answer):
    checkpoints: list[Checkpoint]


class Token(Answer):
    """A token, without its secret. ``valid`` is false once it expired or was revoked. Times are Unix seconds.

    ``role`` is null if its row is damaged; the token is then invalid.
    """

    name: str
    role: Role | None
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None
    valid: bool


class NewToken(Token):
    """A token that was just created. ``token`` is the secret to send; it is shown only once and not stored."""

    token: str


class TokenList(Answer):
    tokens: list[Token]


class Removal(Answer):
    """An ended job that the retention removes, with the reason."""

    job: str
    state: JobState
    ended_days: float = Field(description="how long ago it ended, in days")
    bytes: int = Field(description="size of its run folder")
    reason: str


class RetentionPlan(Answer):
    """The plan lists what the service removes of ended jobs. Null is no limit."""

    days: float | None = Field(description="completed and cancelled jobs are removed so many days after their end")
    failed_days: float | None = Field(description="failed jobs are removed so many days after their end")
    bytes: int | None = Field(description="the oldest are removed while all ended jobs take more")
    ended_count: int
    ended_bytes: int
    kept_for_others: list[str] = Field(description="ended jobs with files that a job which has not ended uses")
    removals: list[Removal] = Field(description="what the next round removes, oldest first")


class AuditEntry(Answer):
    """One changing request: caller, role, method, path, time and status.

    ``status`` is null until the request is answered, and stays null if the service was killed before. ``role`` is null if
    its row is damaged.
    """

    number: int
    at: float
    caller: str
    role: Role | None
    address: str
    method: str
    path: str
    status: int | None


class AuditTrail(Answer):
    entries: list[AuditEntry]
    next_cursor: Annotated[str | None, Field(description="pass it as `cursor` to get the next page; null: no more")]
