"""A job's status: one model, from the core to the REST API. And the record of a node group.

    core.state ──▶ host.state_view ─┐
    accounting ──▶ summary() ───────┼──▶ JobStatus ── document() ──▶ the synchroniser's answer, RUN_DIR/status.json
    host.line_traffic, runtime ─────┘        ▲                                     │
                                             └──── model_validate(_json) ──────────┤
                                                                                   ▼
                                             metrics.job ◀── JobStatus ──▶ jobs.translate ──▶ schemas.Job (REST)

Fields that ``status.json`` and the REST API share are in the classes named ``…Facts``, or in a class that both use
(``Line``, ``Helper``). ``api.schemas`` inherits them, so a field that is added here appears in both, with its description.

Every field that an earlier build did not write has a default. ``document`` leaves out what was never set, so readers
can tell "not reported" from a default. Figures of the folds (``GoodputFigures``, ``StatisticsFigures``) are plain
dictionaries with typed keys for the same reason: any key may be absent, and keys that this build does not know pass
through to the REST API.

Bounds protect readers from damaged files. This module decides nothing, and imports little, because every CLI command does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, with_config
from typing_extensions import TypedDict

from orchestrator.specification.bounds import FRAGMENTS_MAX, ISLANDS_MAX

COUNT_MAX = 2**63 - 1
TIME_S_MAX = 1e12

Count = Annotated[int, Field(ge=0, le=COUNT_MAX), WithJsonSchema({"type": "integer"})]
Seconds = Annotated[
    float, Field(ge=-TIME_S_MAX, le=TIME_S_MAX, allow_inf_nan=False), WithJsonSchema({"type": "number"})
]
LossPoint = tuple[float, float | None, float]
"""(tokens trained, loss in nats per token, the instant at which it was known)."""
Point = list[float | None]
"""A LossPoint in the figures of a fold."""
StatusDocument = dict[str, Any]
"""A JobStatus as JSON data, in which form it travels between builds. Read it with ``JobStatus.model_validate``."""


class Facts(BaseModel):
    """The base of all parts of a status. Unknown fields, of a later build, are ignored."""

    model_config = ConfigDict(extra="ignore", defer_build=True)

    def shared(self, facts: type[Facts]) -> dict[str, Any]:
        """Return the fields that this object has from ``facts``, by name."""
        return {name: getattr(self, name) for name in facts.model_fields}


# ── islands ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class IslandFacts(Facts):
    """One island. ``steps_total`` and ``tokens_total`` are over all its incarnations."""

    island: str
    node_group: str
    region: str
    accelerator_count: Count
    state: str = Field(
        description="placing, waiting (for a node), starting, catching_up, training, standby, suspect, draining, drained, "
        "cordoned, lost, stopped or failed"
    )
    reason: str = Field(description="why the island is in this state")
    incarnation: Count = Field(
        default=0, description="number of the island's current process: one more each time it is placed again"
    )
    node: str = ""
    pid: int | None = None
    step: Count = Field(default=0, description="logical step")
    steps_total: Count = 0
    tokens_total: Count = 0
    loss: float | None = Field(default=None, description="training loss of the last step, nats per token")
    learning_rate: float | None = Field(default=None, description="of the last step; null: its trainer has none")
    gradient_norm: float | None = Field(default=None, description="L2 norm of its gradient, before clipping")
    mfu_ratio: float | None = Field(default=None, description="model FLOPs utilisation, recently; null: unknown")
    restarts: Count = 0
    flag: str = Field(default="", description="what is wrong with its contributions; empty once good work is merged")
    quarantines: Count = Field(
        default=0, description="times it was replaced because of them, since an operator re-added it"
    )
    standby: bool = Field(default=False, description="not an island yet: a process that waits to replace a lost island")
    overdue_s: Seconds = Field(
        default=0.0, description="seconds in the current step if that is far beyond the usual; else 0"
    )


class IslandStatus(IslandFacts):
    """An island as its job reports it."""

    model_config = ConfigDict(frozen=True)

    step_seconds: Seconds | None = None
    last_merge_at: Seconds | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the recent pace: mean tokens a step over the median step time. None if it does not train now."""
        trains = self.state == "training" and self.steps_total
        return self.tokens_total / self.steps_total / self.step_seconds if trains and self.step_seconds else None


class Line(Facts):
    """The traffic between an island and the synchroniser since the synchroniser began."""

    up_payloads: Count
    up_bytes: Count
    up_busy_seconds: Seconds = Field(description="time with a contribution in transfer")
    down_payloads: dict[str, Count] = Field(description="by kind, as down_bytes")
    down_bytes: dict[str, Count] = Field(
        description="update: in the codec of updates; values: whole float32 values; state: those of every fragment"
    )
    down_busy_seconds: Seconds = Field(description="time with a publication in transfer")
    queued_fragments: Count = Field(description="published for the island and not arrived yet")
    queued_bytes: Count
    trouble: str | None = Field(default=None, description="what obstructs its payloads now, and the remedy")


class LinesStatus(Facts):
    """Every line of a job by island, and their sums by region."""

    model_config = ConfigDict(frozen=True)

    islands: dict[str, Line] = {}
    regions: dict[str, Line] = {}


# ── fragments ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class FragmentStatus(Facts):
    """One fragment and its open round. ``offered`` are the islands with a contribution in it."""

    fragment: Count
    version: Count
    phase: str
    offered: list[str]
    step: Count


class FragmentNorms(Facts):
    """The last merge of a fragment in this life of the synchroniser: ‖Θ' − Θ‖, and the norm of what its codec still owes."""

    model_config = ConfigDict(frozen=True)

    fragment: Count
    version: Count
    update_norm: float | None
    residue_norm: float | None


# ── the job ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class CheckpointFacts(Facts):
    """The checkpoints of a job. Instants are in seconds since the job was created."""

    model_config = ConfigDict(frozen=True)

    scheduled: bool = Field(default=False, description="whether the specification asks for checkpoints")
    taken_at: Seconds | None = Field(
        default=None, description="when the newest complete one was cut; null: there is none"
    )
    bytes: Count = Field(default=0, description="the size of the newest complete one")
    failures: Count = Field(default=0, description="how many failed")
    failures_in_a_row: Count = Field(default=0, description="how many failed since the newest complete one")
    retry_at: Seconds | None = Field(default=None, description="none begins by itself before; null: as scheduled")
    trouble: str | None = Field(default=None, description="why checkpoints fail, while they do, and when one is tried")


class ProgressFacts(Facts):
    """A job's progress, which its line in the list of jobs shows as well. ``global_version`` is Σ_p version."""

    token_budget: Count
    tokens_trained: Count
    global_version: Count


class SettingsNow(Facts):
    """The settings that `atoll set` changes, as they are now."""

    lr_ratio: float = Field(default=1.0, description="the inner learning rate, as a ratio of the specification's")
    quorum: Count = Field(default=1, description="islands that a merge needs at least")
    grace: Seconds | None = Field(default=None, description="the longest grace window in inner steps; null: no limit")
    interval: Count = Field(default=0, description="inner steps between two offers of a fragment: H")
    changed: bool = Field(default=False, description="whether an operator has changed one")
    changes: Count = Field(default=0, description="how often one was changed")
    cost: float | None = Field(default=None, description="the limit of cost that was set; null: the specification's")


class JobFacts(ProgressFacts):
    """The state of a job apart from its islands and fragments."""

    pause_reason: str | None = Field(description="set while no fragment can merge")
    paused: bool = Field(default=False, description="all islands are sent away until the limit of cost is raised")
    epoch: Count
    quorum: Count = Field(default=1, description="contributions that a merge needs now: K")
    checkpoint: CheckpointFacts = CheckpointFacts.model_construct()
    settings: SettingsNow | None = Field(default=None, description="null: its build does not say")
    build: str = Field(default="", description="the release of the job's synchroniser; empty if it is older than 0.2")


class CoreStatus(JobFacts):
    """The core's part of a status: the job, its islands and its fragments.

    ``cordoned`` are the node groups on which the job places nothing new.
    """

    model_config = ConfigDict(frozen=True)

    at: Seconds = 0.0
    phase: Literal["running", "finishing", "finished"]
    outcome: Literal["completed", "cancelled", "failed"] | None
    reason: str
    cordoned: list[str] = []
    islands: Annotated[list[IslandStatus], Field(max_length=ISLANDS_MAX)]
    fragments: Annotated[list[FragmentStatus], Field(max_length=FRAGMENTS_MAX)]

    @property
    def has_decided(self) -> bool:
        """True once the job decides nothing more. It may still have to write its parameters and its report."""
        return self.phase == "finished" or self.outcome is not None


class CommandStatus(Facts):
    """The outcome of a command. ``at`` is when the job took it; ``accepted`` is None until it decides."""

    model_config = ConfigDict(frozen=True)

    kind: str
    island: str | None
    caller: str
    at: Seconds
    accepted: bool | None
    detail: str

    def resolved(self, accepted: bool, detail: str) -> CommandStatus:
        """Return the command with the job's answer."""
        return self.model_copy(update={"accepted": accepted, "detail": detail})


class Helper(Facts):
    """One helper process of the job: its controller, an evaluator, the agent of a node. A dead one is made again."""

    name: str
    condition: str = Field(description="running, silent or dead")
    reason: str = Field(description="what is wrong with it, and what happens next; empty while it runs")
    restarts: Count = Field(description="times it was restarted")


class Shard(Facts):
    """One of several shards of the synchroniser, each a process with its own journal."""

    shard: Count
    node: str = Field(description="the name of the node that it is on")
    fragments: Annotated[list[Count], Field(max_length=FRAGMENTS_MAX)]
    byte_count: Count = Field(description="of the parameters of its fragments, as float32")
    condition: Literal["running", "starting", "moving"] = Field(
        description="starting: its process is being started again, and its fragments do not merge; moving: to another node"
    )
    reason: str = Field(description="what is wrong with it; empty while it runs")


# ── figures of the folds ──────────────────────────────────────────────────────────────────────────────────────────────

_FIGURES = ConfigDict(extra="allow")
Figure = int | float
"""A number that stays an integer where it is one."""


class Gap(TypedDict):
    """The longest time between two steps of an island, and when it ended."""

    seconds: float
    at: float
    island: str


class Histogram(TypedDict):
    """``counts`` has one entry more than ``bounds``: the values above the last of them."""

    bounds: list[Figure]
    counts: list[int]
    sum: Figure


@with_config(_FIGURES)
class IslandGoodput(TypedDict, total=False):
    """One island's seconds by class, its tokens by what became of them, and its lost seconds by cause."""

    seconds: dict[str, float]
    tokens: dict[str, float]
    badput_seconds: dict[str, float]


@with_config(_FIGURES)
class StandbyFigures(TypedDict, total=False):
    """Seconds over all standbys: ready, and preparing to be."""

    ready_seconds: Figure
    preparing_seconds: Figure
    takeovers: int


@with_config(_FIGURES)
class CostFigures(TypedDict, total=False):
    """The cost of a job in ``currency``, also by cause of badput and by node group.

    ``unpriced`` are its node groups without a price, which are not in it. ``forecast`` is the cost at the end of the budget:
    expected, low and high. It is null for an ended job and before the first merges.
    """

    currency: str
    so_far: float
    per_merged_million_tokens: float | None
    badput: dict[str, float]
    node_groups: dict[str, float]
    unpriced: list[str]
    forecast: dict[str, float | None] | None


@with_config(_FIGURES)
class GoodputFigures(TypedDict, total=False):
    """A job's time and tokens by what became of them (``accounting.goodput``). What its build did not compute is absent."""

    at: float
    goodput_ratio: Annotated[float, Field(allow_inf_nan=False)] | None
    uptime_ratio: float | None
    island_seconds: dict[str, float]
    badput_seconds: dict[str, float]
    tokens: dict[str, float]
    discarded_tokens: dict[str, float]
    tokens_merged_per_second: float | None
    islands: dict[str, IslandGoodput]
    standbys: StandbyFigures
    cost: CostFigures
    carried: dict[str, Any]


@with_config(_FIGURES)
class CloseReason(TypedDict, total=False):
    """The merges whose rounds closed for this reason."""

    reason: str
    merges: int
    contributors_mean: float
    waited_mean_s: float
    waited_max_s: float


@with_config(_FIGURES)
class SourceLossFigures(TypedDict, total=False):
    """The held-out loss on one source of text."""

    source: str
    loss: float | None
    bits_per_byte: float | None


@with_config(_FIGURES)
class PreferenceFigures(TypedDict, total=False):
    """The share of held-out pairs that prefer the chosen answer, and the mean margin, of a job that learns from pairs."""

    accuracy: float | None
    margin: float | None


@with_config(_FIGURES)
class EvaluationFigures(TypedDict, total=False):
    """All but ``count``, ``failures`` and ``seconds`` describe the last evaluation."""

    count: int
    failures: int
    seconds: float
    last_seconds: float
    sequence_count: int
    place: str
    remark: str
    bits_per_byte: float | None
    sources: list[SourceLossFigures]
    preference: PreferenceFigures | None


@with_config(_FIGURES)
class DataFlawFigures(TypedDict, total=False):
    """Records that could not be read and sequences that came twice or never: in all, by island and by source."""

    total: dict[str, int]
    islands: dict[str, dict[str, int]]
    sources: dict[str, dict[str, int]]
    remark: str


@with_config(_FIGURES)
class RecoveryFigures(TypedDict, total=False):
    """One absence of an island, its parts in seconds, and the others' longest gap. ``total`` is null until it is merged."""

    island: str
    incarnation: int
    attempts: int
    killed_at: float
    complete: bool
    parts: dict[str, float]
    total: float | None
    others_gap_max_s: float | None


@with_config(_FIGURES)
class SynchroniserFigures(TypedDict, total=False):
    """Counts of the synchroniser's deaths, and of those after which its files were damaged."""

    deaths: int
    damages: int


@with_config(_FIGURES)
class FaultFigures(TypedDict, total=False):
    """One injected fault."""

    at: float
    kind: str
    island: str | None
    duration: float
    bytes_per_second: Figure
    payloads: int
    caller: str


@with_config(_FIGURES)
class TrafficFigures(TypedDict, total=False):
    """Counts of payloads by fragment, contributions by island, and catch-ups by source."""

    payloads_up: list[int]
    payloads_down: list[int]
    admitted: dict[str, int]
    refused: dict[str, int]
    staleness: Histogram
    catch_ups: dict[str, int]
    catch_up_failures: int
    placement_failures: int
    merge_failures: int
    quarantines: dict[str, int]


@with_config(_FIGURES)
class StatisticsFigures(TypedDict, total=False):
    """Counts and curves of a job (``accounting.statistics``). What its build did not compute is absent."""

    merges: int
    contributors_mean: float
    merges_by_contributors: dict[str, int]
    merges_per_fragment: list[int]
    contributors_per_fragment: list[dict[str, int]]
    merges_per_island: dict[str, int]
    close_reasons: list[CloseReason]
    grace_used_mean_s: float
    merge_seconds_mean: float | None
    round_seconds: dict[str, Histogram]
    journal_seconds: Histogram
    refusals: dict[str, int]
    outcome: str | None
    reason: str | None
    duration_s: float
    parameter_count: int | None
    loss_initial: float | None
    loss_final: float | None
    loss_curve: list[Point]
    evaluations: EvaluationFigures
    data_flaws: DataFlawFigures
    training_loss_curve: list[Point]
    step_time_median_s: float | None
    step_times_s: dict[str, float | None]
    gaps_max_s: dict[str, float | None]
    survivors: list[str]
    survivor_gap_max_s: float | None
    survivor_gap: Gap | None
    survivor_step_time_median_s: float | None
    recoveries: list[RecoveryFigures]
    recovery_s: dict[str, Any] | None
    synchroniser: SynchroniserFigures
    failures: dict[str, int]
    bystander_gap_max_s: float | None
    bystander_gap: Gap | None
    faults: list[FaultFigures]
    timeline: list[list[str | float]]
    traffic: TrafficFigures
    mixture: dict[str, Any]


class StoreStatus(Facts):
    """The store of a mirrored job's log, since its synchroniser began. ``trouble`` says what it refuses or is late with."""

    puts: Count = 0
    put_bytes: Count = 0
    put_seconds: Seconds = 0.0
    trouble: str | None = None


# ── the whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class JobStatus(Facts):
    """One job at one instant. ``RUN_DIR/status.json`` holds the last one once the job has ended.

    started_at   Unix seconds; the zero of every other instant
    at           the instant at which this was taken, in seconds since then
    loss_curve   every evaluation, oldest first
    commands     every command on the tape, by id
    fragment_parameters  how many parameters each fragment has
    lines        bytes as they were carried between islands and synchroniser
    fragment_norms  of each fragment that was merged in this life of the synchroniser
    helpers      the job's other processes; ``shards`` the shards, if there are several
    disk_trouble what the disk of journal and tape refuses, while it does; nothing is merged meanwhile
    store        the store of a mirrored job; nothing is merged while it has trouble
    fenced       why this synchroniser has stopped: another one continues the job, and this one's status stands still
    last_known   set where the job's files are damaged: version, epoch and tokens are what could still be read of them
    """

    model_config = ConfigDict(frozen=True)

    job_id: str
    name: str
    started_at: Seconds
    at: Seconds
    view: CoreStatus
    goodput: GoodputFigures
    statistics: StatisticsFigures
    loss_curve: list[LossPoint]
    commands: dict[str, CommandStatus]
    unigram_loss: float | None = None
    fragment_parameters: list[Count] = []
    lines: LinesStatus = LinesStatus.model_construct()
    fragment_norms: Annotated[list[FragmentNorms], Field(max_length=FRAGMENTS_MAX)] = []
    helpers: list[Helper] = []
    shards: list[Shard] = []
    disk_trouble: str | None = None
    store: StoreStatus | None = None
    fenced: str | None = None
    last_known: bool = False

    def document(self) -> StatusDocument:
        """Return the status as JSON data, without the fields that were never set.

        Figures are JSON data already. Copying them would double the cost of an answer.
        """
        figures = {"goodput": self.goodput, "statistics": self.statistics}
        return self.model_dump(mode="json", exclude_unset=True, exclude=set(figures)) | figures

    @property
    def eta_s(self) -> float | None:
        """Return the seconds until the budget is trained, at the islands' recent pace. None: nothing can merge now."""
        view, pace = self.view, sum(island.tokens_per_second or 0.0 for island in self.view.islands)
        if view.phase != "running" or view.pause_reason or not 0.0 < pace < float("inf"):
            return None
        return max(0, view.token_budget - view.tokens_trained) / pace

    def with_view(self, **changes: Any) -> JobStatus:
        """Return a copy in which these fields of ``view`` are changed."""
        return self.model_copy(update={"view": self.view.model_copy(update=changes)})


class NodeGroupRecord(TypedDict):
    """A node group as the control port and the service exchange it: a set of nodes of one kind in one region.

    Capacities are totals over its nodes; ``cpus_free`` is right now. ``nodes_leaving`` of the nodes are about to go, the
    machines of the others ``node_names``. ``nodes_down`` more are dead or cut off, though the head has not given them up.
    """

    name: str
    region: str
    nodes: int
    cpus: float
    cpus_free: float
    accelerators: int
    nodes_leaving: NotRequired[int]
    nodes_down: NotRequired[int]
    node_names: NotRequired[list[str]]
    builds: list[str]


class CertificateRecord(TypedDict):
    """A certificate that the cluster depends on. ``place`` says where it is in use; ``expires_at`` is in Unix seconds."""

    place: str
    expires_at: float
    lifetime_s: float


class UnseenFile(NamedTuple):
    """A file that a node of a group does not see as the service sees it, and why."""

    path: str
    node: str
    group: str
    reason: str
