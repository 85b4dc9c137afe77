"""The sections of a job specification: every field with its unit, its default and its reason.

What is right within one section is said here, in types. What needs more than one section is ``config``'s business, and so is
reading files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from orchestrator.core.vocabulary import Price, Schedule
from orchestrator.errors import Problem
from orchestrator.parameters.codec.registry import CODEC_NAMES, CodecName
from orchestrator.specification.bounds import (
    SHARDS_MAX,
    AcceleratorCount,
    AdviceSeconds,
    AxisLength,
    ByteCount,
    BytesPerSecond,
    CostLimit,
    Cpus,
    Currency,
    DisplacementRatio,
    Epsilon,
    Flops,
    FragmentCount,
    GradientNorm,
    HostCount,
    IslandCount,
    IslandCountFromZero,
    KeptCount,
    LearningRate,
    Location,
    MergeCount,
    MicrobatchCount,
    Money,
    Name,
    NodeGroups,
    ParameterCount,
    Port,
    ProcessCount,
    Ratio,
    RatioBelowOne,
    RecordCount,
    Remark,
    RestartCount,
    RoundSteps,
    RoundStepsOrNone,
    RoundStepsRatio,
    SequenceCount,
    ShardCount,
    StepCount,
    StepRatio,
    StepSeconds,
    StreamCount,
    StrikeCount,
    StrikeCountOrNone,
    Timeout,
    TimeRatio,
    TokenCount,
    VersionCount,
    Wait,
)
from orchestrator.specification.bounds import Section as Section
from orchestrator.specification.validation import one_of

ADAM_LR = 0.005
MOMENT_COUNTS = {"sgd": 0, "momentum": 1, "nesterov": 1, "adam": 2}
"""What the optimizers of ``parameters.outer_optimizer`` keep; a test compares them."""
EVALUATION_RATIO, ISLAND_RATIO = 1.0, 0.02
REFUSED_MAX = 100
"""Checkpoints that a resumed job says were passed over, the newest first."""


class OuterOptimizerSection(Section):
    """The outer optimizer applies the average of the islands' displacements at each merge, by the rule of optax's ``sgd``,
    plain, with ``momentum`` or ``nesterov``, or of its ``adam``.

    The defaults were best, or equal to the best, in runs of 4 to 256 rounds. More momentum overshoots there: with 0.7 and
    0.9, the method's usual setting, such a run makes no progress or diverges. Adam moves each parameter by up to ``lr`` at
    each merge, however far the islands went, so its rate is of the size of a displacement.

    Its learning rate is lr · min(1, version / ``warmup_merges``) · (1 − (1 − ``lr_final_ratio``) · tokens trained / budget).

    ``clip_norm`` limits the norm of a fragment's outer gradient, the average itself, before the optimizer gets it. Fragments
    merge at different times, so it is a limit for each of them, the same with any number of shards; all of a model has about
    √P times the norm of one of its P fragments.
    """

    kind: Literal["nesterov", "momentum", "sgd", "adam"] = "nesterov"
    lr: LearningRate = Field(default=0.5, description=f"with adam {ADAM_LR:g}")
    momentum: RatioBelowOne = Field(default=0.3, description="for nesterov and momentum")
    beta1: RatioBelowOne = Field(default=0.9, description="for adam: the decay of its first moment")
    beta2: RatioBelowOne = Field(default=0.999, description="for adam: the decay of its second moment")
    epsilon: Epsilon = Field(default=1e-8, description="for adam: added to the root of the second moment")
    clip_norm: GradientNorm | None = Field(
        default=None, description="limit of the norm of a fragment's outer gradient; null: no limit"
    )
    warmup_merges: MergeCount = Field(
        default=0, description="merges of each fragment over which the rate rises; 0: no warm-up"
    )
    lr_final_ratio: Ratio = Field(
        default=1.0, description="share of the rate at the end of the budget, reached linearly"
    )

    @model_validator(mode="before")
    @classmethod
    def _adam_has_its_own_rate(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("kind") == "adam" and "lr" not in data:
            return {**data, "lr": ADAM_LR}
        return data

    @property
    def moment_count(self) -> int:
        """Return the number of values that the optimizer keeps for each parameter."""
        return MOMENT_COUNTS[self.kind]


class DurabilitySection(Section):
    """The durability that a merge has before any island receives it. All kinds survive the synchroniser's death.

    With ``mirrored``, it is also in the service's store (``atoll up --store``), and the job survives the loss of the
    synchroniser's machine with its disk. Each merge waits for the store; islands do not.

    With ``async``, up to ``merges_max`` merges may be in the operating system's cache only, and are lost if the power fails.
    A job with islands that hold lost merges does not continue by itself.
    """

    kind: Literal["sync", "async", "mirrored"] = "sync"
    merges_max: MergeCount = Field(default=8, description="for async; ignored otherwise")
    snapshot_every_records: RecordCount = Field(
        default=20_000,
        description="records between snapshots; a restarted synchroniser replays at most about this many",
    )

    @property
    def is_mirrored(self) -> bool:
        """Return whether the service's store has the job's log."""
        return self.kind == "mirrored"


class WireSection(Section):
    """The codecs of payloads: ``up`` for an island's displacement from Θ, ``down`` for the update of Θ. One name sets both.

    The sender adds the coding error of a payload to the next one, so it is not lost.
    """

    up: CodecName = "int4"
    down: CodecName = "int4"

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, wire: Any) -> Any:
        if not isinstance(wire, str):
            return wire
        if wire not in CODEC_NAMES:
            raise ValueError(" ".join(one_of(wire, CODEC_NAMES)).rstrip("."))
        return {"up": wire, "down": wire}


QUORUM_BY_RATIO_ABOVE = 4
HALF_OF_ISLANDS = 0.5
GRACE_FLOOR_STEPS = 0.5
"""Source: docs/decisions/0217-a-merge-needs-half-of-the-islands-above-four.md"""


class SynchroniserSection(Section):
    """The parameters of Decoupled DiLoCo, arXiv:2604.21428; ``JobPolicy`` has their symbols.

    The paper uses an overlap of 2 and a grace window of about one step. With the defaults here, all islands meet in a merge
    even if a fragment travels for up to half a step each way.
    """

    fragments: FragmentCount = 8
    interval_steps: RoundSteps = 24
    overlap_steps: RoundStepsOrNone = 4
    router_interval_steps: RoundSteps | None = Field(
        default=None,
        description="steps between two merges of a mixture's routers, which are then the last of the fragments; if absent, "
        "they are merged with the rest",
    )
    quorum: IslandCount = Field(default=1, description="islands that a merge needs at least")
    quorum_ratio: Ratio | None = Field(
        default=None,
        description="a merge needs at least this part of the training islands; if absent, half of them in jobs of more than "
        "four islands that leave quorum at 1, and otherwise what quorum says",
    )
    grace_margin: RatioBelowOne = 0.8
    grace_cap_steps: RoundStepsRatio | None = 3.0
    grace_floor_steps: RoundStepsRatio | None = Field(
        default=None,
        description="a merge waits at least so long for more than the quorum; if absent, half a step where the quorum is a "
        "part of the training islands, and otherwise 0",
    )
    staleness_max: VersionCount = 0
    shards: ShardCount = Field(
        default=1,
        description="processes that share the fragments, each with its own journal and line; 1: the synchroniser's own",
    )
    shard_groups: tuple[Name, ...] = Field(
        default=(),
        description="node groups of the shards, in turn; empty: the synchroniser's node",
        max_length=SHARDS_MAX,
    )
    averaging: Literal["radial", "mean"] = "radial"
    outer_optimizer: OuterOptimizerSection = OuterOptimizerSection.model_construct()
    wire: WireSection = WireSection.model_construct()
    durability: DurabilitySection = DurabilitySection.model_construct()
    adoption: Literal["replace", "mix", "rebase"] = "rebase"
    mix_alpha: Ratio = 0.5
    node_groups: NodeGroups = ()

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.fragments, self.interval_steps, self.router_interval_steps)

    @property
    def routers_apart(self) -> bool:
        """Return whether routers are a fragment of their own."""
        return self.router_interval_steps is not None

    def staleness_problems(self) -> Iterable[Problem]:
        if self.adoption == "rebase" and self.staleness_max:
            message = f"is {self.staleness_max} with adoption rebase, with which islands offer late work again: "
            yield Problem("synchroniser.staleness_max", f"{message}it would count twice.", "Set it to 0.")

    def shard_problems(self) -> Iterable[Problem]:
        if self.shards > self.fragments:
            message = f"is {self.shards}, but there are only {self.fragments} fragments to share."
            yield Problem("synchroniser.shards", message, f"Lower it to at most {self.fragments}, or raise fragments.")

    def shard_group_problems(self) -> Iterable[Problem]:
        groups, shard_count = self.shard_groups, self.shards
        if groups and shard_count == 1:
            message = "are set, but the only shard is the synchroniser's own."
            yield Problem("synchroniser.shard_groups", message, "Raise synchroniser.shards, or leave them out.")
        elif len(groups) > shard_count:
            message = f"are {len(groups)}, but there are only {shard_count} shards to place."
            yield Problem(
                "synchroniser.shard_groups", message, f"Name at most {shard_count}, or raise synchroniser.shards."
            )

    def quorum_ratio_of(self, islands_max: int) -> float:
        """Return the part of the training islands that a merge needs, in a job of up to so many islands."""
        if self.quorum_ratio is not None:
            return self.quorum_ratio
        return HALF_OF_ISLANDS if islands_max > QUORUM_BY_RATIO_ABOVE and self.quorum == 1 else 0.0

    def grace_floor_steps_of(self, islands_max: int) -> float:
        """Return the shortest grace window in inner steps, in a job of up to so many islands."""
        if self.grace_floor_steps is not None:
            return self.grace_floor_steps
        floor = GRACE_FLOOR_STEPS if self.quorum_ratio_of(islands_max) > 0 else 0.0
        return floor if self.grace_cap_steps is None else min(floor, self.grace_cap_steps)


class MeshSection(Section):
    """The mesh of an island's devices: ``data`` splits batches, ``fsdp`` batches and parameters, ``tensor`` matrices, and
    ``expert`` the experts of a mixture. The product of the lengths must equal the number of the island's devices.
    """

    data: AxisLength | None = Field(default=None, description="if absent, all devices that the other axes leave")
    fsdp: AxisLength = 1
    tensor: AxisLength = 1
    expert: AxisLength = 1


class PriceSection(Section):
    """The price of an island's machines is for an hour of an accelerator, or of a host, of which an island has ``hosts``.

    An island without accelerators counts as one accelerator on each host. Set exactly one of the two.
    """

    chip_hour: Money | None = None
    node_hour: Money | None = None
    kind: Literal["on_demand", "spot", "reserved"] = Field(
        "on_demand", description="reserved machines are paid for also while the island has no process"
    )
    currency: Currency = "USD"

    @model_validator(mode="after")
    def _has_one_price(self) -> Self:
        if (self.chip_hour is None) == (self.node_hour is None):
            raise ValueError("needs exactly one of chip_hour and node_hour; give one of the two")
        return self

    def of_island(self, accelerators: int, hosts: int) -> Price:
        """Return the price of an island of so many hosts with so many accelerators each."""
        per_host = self.chip_hour * max(1, accelerators) if self.chip_hour is not None else self.node_hour or 0.0
        return Price(per_host * hosts, self.currency, self.kind)


class IslandsSection(Section):
    """One or more islands on one node group. ``accelerators: 0`` means CPU; ``cpus`` is the number that Ray reserves.

    ``hosts``, ``mesh``, ``batch_size`` and ``accumulation`` apply to one island; ``accelerators`` and ``cpus`` apply to each
    of its hosts, whose ``processes_per_host`` share them equally.

    The islands from ``count`` up to ``count_max`` have a name and a data shard from the beginning, but a process only after
    the job is scaled up. In addition, ``standby`` processes wait to replace lost islands.
    """

    node_group: Name
    count: IslandCount = 1
    count_max: IslandCount | None = Field(
        None, description="maximum number of islands after scaling up; count if absent"
    )
    standby: IslandCountFromZero = Field(
        0, description="processes that hold a state and replace a lost island of this entry"
    )
    name: Name | None = Field(None, description="default: the name of the node group; numbered if count is above 1")
    accelerator: Literal["cpu", "gpu", "tpu"] = "cpu"
    accelerators: AcceleratorCount = 0
    cpus: Cpus = 1.0
    hosts: HostCount = 1
    processes_per_host: ProcessCount = Field(
        1, description="with trainer.kind torch, as many as accelerators: a process uses one GPU"
    )
    mesh: MeshSection = MeshSection.model_construct()
    framework: Literal["torch"] | None = Field(
        None,
        description="torch: these islands train the decoder of model.initial_weights in PyTorch, beside others in JAX",
    )
    batch_size: SequenceCount | None = Field(
        None, description="sequences in one inner step of one island; training.batch_size if absent"
    )
    accumulation: MicrobatchCount | None = Field(
        None, description="parts in which one island processes a batch; training.accumulation if absent"
    )
    price: PriceSection | None = Field(None, description="default: that of the service's price file")
    peak_flops: Flops | None = Field(
        None,
        description="operations per second of one accelerator (on CPU: of a host) that utilisation is measured against; "
        "default: the known peak of its kind in bfloat16, and none for a CPU",
    )

    @property
    def island_price(self) -> Price | None:
        """Return the price of one island of this entry; None if it is not known."""
        return None if self.price is None else self.price.of_island(self.accelerators, self.hosts)

    @property
    def process_count(self) -> int:
        """Return the number of processes of one island."""
        return self.hosts * self.processes_per_host

    @property
    def has_slots(self) -> bool:
        return self.count_max is not None and self.count_max > self.count

    def island_names(self, *, slots: bool = False) -> list[str]:
        """The names of the islands that are wanted at first, and of the scale-up slots behind them."""
        base, most = self.name or self.node_group, max(self.count, self.count_max or 0)
        names = [base] if most == 1 else [f"{base}-{number}" for number in range(most)]
        return names if slots else names[: self.count]

    def standby_names(self) -> list[str]:
        base = f"{self.name or self.node_group}-standby"
        return [base] if self.standby == 1 else [f"{base}-{number}" for number in range(self.standby)]


class BudgetSection(Section):
    """When the job ends: after a number of tokens over all islands, or of steps of each island. Set exactly one.

    ``cost`` is a limit besides, in the currency of the prices: a job that has cost as much is finished early, as by `atoll
    finish`, or paused: its islands leave until the limit is raised with `atoll set`. The service looks every few seconds,
    and the last work is still merged, so the job costs a little more.
    """

    tokens: TokenCount | None = None
    steps: StepCount | None = None
    cost: CostLimit | None = Field(default=None, description="null: no limit; all node groups of the job need a price")
    at_cost: Literal["finish", "pause"] = Field(default="finish", description="what happens at the limit of cost")

    def problems(self) -> Iterable[Problem]:
        if (self.tokens is None) == (self.steps is None):
            yield Problem("budget", "needs exactly one of tokens and steps.", "Give one of the two.")
        if self.at_cost == "pause" and self.cost is None:
            yield Problem("budget.at_cost", "is pause, but budget.cost is not set.", "Give budget.cost, or remove it.")


class AutopilotBounds(Section):
    """The least and the most of each setting that `act` may choose. It leaves a setting without bounds alone."""

    interval_steps: tuple[RoundSteps, RoundSteps] | None = None
    quorum: tuple[IslandCount, IslandCount] | None = None
    grace: tuple[RoundStepsRatio, RoundStepsRatio] | None = Field(None, description="of grace_cap_steps")
    standbys: tuple[IslandCountFromZero, IslandCountFromZero] | None = Field(
        None, description="for advice only: no command changes the standbys of a running job"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for name, (least, most) in self.ranges().items():
            if least > most:
                raise ValueError(f"{name} is {least:g} to {most:g}; give the smaller number first")
        return self

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the bounds that are set, by setting."""
        pairs = (self.interval_steps, self.quorum, self.grace, self.standbys)
        names = ("interval_steps", "quorum", "grace", "standbys")
        return {name: pair for name, pair in zip(names, pairs, strict=True) if pair is not None}


class AutopilotSection(Section):
    """Advice on H, K, the grace window and standbys while the job runs, by a simulation of its own tape.

    The service looks at the tape every ``every_s``, in a process of the lowest priority. ``observe`` records the advice,
    which `atoll advise` and the job's page show. ``act`` also makes the change, within ``bounds``, as a command on the tape
    that names the autopilot and its reason. It never changes a setting that an operator has changed with `atoll set`.
    """

    kind: Literal["off", "observe", "act"] = "off"
    bounds: AutopilotBounds = AutopilotBounds.model_construct()
    every_s: AdviceSeconds = Field(600.0, description="from the end of one look to the next")
    gain_min_ratio: RatioBelowOne = Field(0.01, description="a change that gains less is no advice")

    @model_validator(mode="after")
    def _acts_within_bounds(self) -> Self:
        if self.kind == "act" and not self.bounds.ranges().keys() - {"standbys"}:
            raise ValueError(
                "has kind act, but bounds names nothing that it may change; give bounds of interval_steps, quorum or grace"
            )
        return self


class EvaluationSection(Section):
    """When and where Θ is measured on held-out data, and how long that may take.

    ``on: head`` uses one CPU thread of the lowest priority beside the synchroniser, which suffices for models of up to some
    100M parameters. ``on: node_group`` uses a process on a node of ``node_group``, which reserves ``accelerators`` and
    ``cpus`` as an island would; while that group has no room for it, the head measures. ``on: islands`` uses the island that
    is furthest ahead, between two of its steps, with the parameters that it already holds. If no island can measure, the
    head does, but not in a job of several shards: it would hold all parameters. Then the evaluation fails and says so.

    An evaluation takes at most ``time_ratio_max`` of the time that the merges between two evaluations take. If all
    ``sequences`` would take longer, the first half of them is measured, or the first quarter, and so on. The first
    evaluation of a job, before any merge, and the last one always measure all sequences.
    """

    every_merges: MergeCount = 32
    sequences: SequenceCount = 128
    on: Literal["head", "node_group", "islands"] = Field(
        default="head",
        description="if absent in a job of several shards: islands, if each is one host and adoption is rebase",
    )
    node_group: Name | None = Field(default=None, description="for on: node_group")
    accelerator: Literal["cpu", "gpu", "tpu"] = "cpu"
    accelerators: AcceleratorCount = 0
    cpus: Cpus = 1.0
    time_ratio_max: TimeRatio | None = Field(
        default=None,
        description=f"if absent, {EVALUATION_RATIO:g}; with on: islands, which pause for it, {ISLAND_RATIO:g}",
    )

    @property
    def time_ratio(self) -> float:
        if self.time_ratio_max is not None:
            return self.time_ratio_max
        return ISLAND_RATIO if self.on == "islands" else EVALUATION_RATIO


class RecoverySection(Section):
    """When an island counts as lost and is placed again, and how it then takes a state from its peers.

    An island that is silent although its node answers hangs or was stopped; ``suspect_timeout_s`` applies. An island with an
    unreachable node probably continues to train, and its work is lost if it is replaced; ``cut_off_timeout_s`` applies.

    An island that answers but does not finish its step also hangs. Its limit is ``step_limit_s``, or ``step_limit_ratio``
    times its own median step if that is longer. After a quarter of the limit the job's status names the island. At the limit
    its process is ended, and the island is placed again. In its first steps, which compile, and outside of steps, the limit
    is ``first_step_limit_s``. Only the time in which the process runs counts. ``step_limit_s: null`` disables the limit.

    A state from one donor belongs to one boundary. With several donors each sends fragment after fragment, at its own
    boundaries: a large state arrives sooner and costs each donor less. A donor sends at most ``donor_bytes_per_s`` on
    average to all receivers together; at that rate a fragment with its moments must take less than five minutes.

    Once a standby has taken an island's place, the next standby is made after ``standby_wait_s``, so that its start takes no
    processor time from the island's first steps.
    """

    suspect_timeout_s: Timeout = 30.0
    cut_off_timeout_s: Timeout = 900.0
    backoff_first_s: Wait = 0.05
    backoff_max_s: Timeout = 60.0
    restarts_max: RestartCount = 12
    flush_timeout_s: Timeout = 30.0
    step_limit_s: Timeout | None = 120.0
    step_limit_ratio: StepRatio = 50.0
    first_step_limit_s: Timeout = 1800.0
    donors_max: IslandCount = 1
    donor_bytes_per_s: BytesPerSecond | None = None
    standby_wait_s: Wait = 3.0


class CheckpointsSection(Section):
    """When checkpoints are taken automatically (``JobPolicy.checkpoints``). ``atoll checkpoint`` takes one at any time.

    ``folder`` is a path or URL below a root (`atoll up --checkpoints`) that every node can reach. Each job has its own
    folder in it. Default: the job's run folder.
    """

    every_merges: MergeCount = 0
    every_s: Wait = 0.0
    keep: KeptCount = 2
    timeout_s: Timeout | None = Field(
        default=None, description="time limit for an island's part, or the part is left out; if absent, by its size"
    )
    folder: Location | None = None


class ResumeSection(Section):
    """Resume from a checkpoint. ``checkpoint`` is its folder, or a folder of several checkpoints: the newest intact one is
    used.

    ``atoll submit --resume`` fills this in, also from the name of a job. Model, data and seed must be the same; islands may
    differ. The budget includes the tokens of the former job. The service sets ``refused``: damaged checkpoints, and why.
    """

    checkpoint: Location
    refused: Annotated[tuple[Remark, ...], Field(max_length=REFUSED_MAX)] = ()


class TransportSection(Section):
    """The channel for payloads between islands and shard: the job's own connections, beside Ray's calls.

    The receiver pulls payloads over up to ``streams`` connections if the line is long, or through ``shared_memory`` on one
    machine. Each process listens at its node's address, on a free port of ``ports`` (0, 0: any). Choose a range outside the
    system's ephemeral ports, by default 32768 to 60999, because other connections and Ray's own servers take ports from
    there. Connections from one process to another carry at most ``bytes_per_s`` together. A transfer fails only if no byte
    arrives for ``stall_s``. Payloads of up to ``inline_bytes_max`` are part of Ray's calls: the cap does not apply to them,
    and they are protected only as those calls are. With ``tls: auto`` both ends authenticate and the connections are
    encrypted, unless the cluster is on loopback.
    """

    streams: StreamCount = 8
    ports: tuple[Port, Port] = (0, 0)
    stall_s: Timeout = 60.0
    bytes_per_s: BytesPerSecond | None = None
    inline_bytes_max: ByteCount = 64 << 10
    shared_memory: bool = True
    tls: Literal["auto", "always", "never"] = "auto"

    @model_validator(mode="after")
    def _ports_in_order(self) -> TransportSection:
        first, last = self.ports
        if first > last:
            raise ValueError(f"ports are {first} to {last}; name the first and the last of a range")
        return self


class HealthSection(Section):
    """The limits of healthy contributions. A contribution with NaN or Inf is always refused, and its island is replaced.

    ``displacement_ratio_max`` refuses contributions that are this many times further from the merged parameters than usual;
    null disables the check. 100 admits everything that warm-up, missed rounds and a new inner optimizer cause, and refuses
    the effect of a flipped exponent bit.
    """

    displacement_ratio_max: DisplacementRatio | None = 100.0
    strikes_max: StrikeCount = 3
    quarantines_max: StrikeCountOrNone = 3


class SyntheticSection(Section):
    """Options of ``trainer: learners.synthetic:create``: an island without JAX, of this size and speed."""

    parameters: ParameterCount = 100_000
    step_s: StepSeconds = 0.05
    step_jitter_ratio: Ratio = 0.0
    start_s: Wait = 0.0


def document_end_problems(source: str, separator: int | None, vocabulary_size: int | None) -> Iterator[Problem]:
    """Yield a problem if the token that ends a document in a source of tokens is missing, or none of the model's."""
    if separator is None and source != "tokens":
        message = f"is absent, but data.source is {source} and data.intra_document_masking is true."
        yield Problem("data.separator", message, "Name the token that ends a document in its sequences.")
    elif vocabulary_size is not None and separator is not None and separator >= vocabulary_size:
        message = f"is {separator:,}, but the model has no token above {vocabulary_size - 1:,}."
        yield Problem("data.separator", message, "Name the token that ends a document in these sequences.")
