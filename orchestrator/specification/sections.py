"""The sections of a job specification: every field with its unit, its default and its reason.

What is right within one section is said here, in types. What needs more than one section is ``config``'s business, and so
is reading files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from orchestrator.models.decoder import DecoderSection, VocabularySize
from orchestrator.models.presets import DECODERS, PLAIN, Architecture, PresetName
from orchestrator.parameters.codec.registry import CODEC_NAMES, CodecName
from orchestrator.specification.bounds import (
    SHARDS_MAX,
    AcceleratorCount,
    AxisLength,
    ByteCount,
    BytesPerSecond,
    Cpus,
    Digest,
    DisplacementRatio,
    FragmentCount,
    Function,
    GradientNorm,
    HostCount,
    IslandCount,
    IslandCountFromZero,
    KeptCount,
    LearningRate,
    Location,
    MergeCount,
    MicrobatchCount,
    Name,
    ParameterCount,
    Port,
    RateRatio,
    Ratio,
    RatioBelowOne,
    RecordCount,
    Remark,
    RestartCount,
    RoundSteps,
    RoundStepsOrNone,
    RoundStepsRatio,
    SequenceCount,
    SequenceLength,
    ShardCount,
    SourceWeight,
    StepCount,
    StepCountOrNone,
    StepRatio,
    StepSeconds,
    StoredBytes,
    StreamCount,
    StrikeCount,
    StrikeCountOrNone,
    TensorPattern,
    Timeout,
    TimeRatio,
    TokenCount,
    TokenId,
    UnreadableCount,
    VersionCount,
    Wait,
    WeightDecay,
    Word,
)
from orchestrator.specification.bounds import Section as Section
from orchestrator.specification.validation import one_of

BUILT_IN_TRAINER = "learners.jax_trainer:create"
FILES_MAX = 10_000
"""Of a data set: an island opens each to count its lines. More are fewer files if they are put together."""
SOURCES_MAX = 64
"""Of a streamed data set: an island holds some megabytes of each."""
EVALUATION_RATIO, ISLAND_RATIO = 1.0, 0.02
GROUPS_MAX = 100
"""Groups of tensors: each is tried on each tensor, whenever a step is compiled."""
REFUSED_MAX = 100
"""Checkpoints that a resumed job says were passed over, the newest first."""


class ModelSection(Section):
    """The model: a preset, your own ``decoder``, or ``factory: package.module:function`` of an installed package.

    Set ``vocabulary_size`` if the tokenizer's size differs from the preset's. ``initial_weights`` is a folder with weights
    that fit the model, in the format of Hugging Face's libraries (`config.json`, `model.safetensors`); the job continues
    from them. The evaluator's node must have the folder, below a root (`atoll up --data`). ``remat`` selects what a decoder
    recomputes for the gradient: ``dots`` recomputes everything except matrix products, which costs less time; ``full``
    recomputes everything, which takes the least memory.
    """

    preset: PresetName = "nano"
    decoder: DecoderSection | None = None
    factory: Function | None = None
    vocabulary_size: VocabularySize | None = None
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: Literal["none", "dots", "full"] = "none"
    initial_weights: Location | None = None

    @model_validator(mode="after")
    def _one_model(self) -> ModelSection:
        of_built_in = {
            "decoder": self.decoder,
            "vocabulary_size": self.vocabulary_size,
            "initial_weights": self.initial_weights,
        }
        named = [name for name, value in of_built_in.items() if value is not None]
        if self.factory is not None and named:
            raise ValueError(f"has factory and {named[0]}, which only a built-in model takes; leave one of the two out")
        if self.decoder is not None and self.preset != "nano":
            raise ValueError("has preset and decoder, which are two models; leave one of the two out")
        if self.initial_weights is not None and not isinstance(self.network, DecoderSection):
            raise ValueError(
                f"has initial_weights and the preset {self.preset!r}, which only atoll has; use the preset of the "
                "weights' model, or decoder"
            )
        return self

    @property
    def network(self) -> Architecture | DecoderSection | None:
        """The configuration of the built-in model that is asked for; None where only a package knows it."""
        if self.factory is not None:
            return None
        if self.decoder is None and self.preset in PLAIN:
            plain = PLAIN[self.preset]
            return replace(plain, vocabulary_size=self.vocabulary_size or plain.vocabulary_size)
        decoder = self.decoder or DECODERS[self.preset]
        return decoder.model_copy(update={"vocabulary_size": self.vocabulary_size or decoder.vocabulary_size})


class SourceSection(Section):
    """One kind of text of a streamed data set. ``weight`` is its share of all sequences, relative to the other weights.

    A file's name determines how it is read, regardless of case: .jsonl, .json, .ndjson and .jsonlines are JSON Lines (one
    object per line), .parquet is Parquet, .arrayrecord is ArrayRecord (one text per record), and everything else is UTF-8
    text. JSON Lines and text may be compressed: .gz, .gzip, .zst, .zstd. A file is refused if its content does not match
    its name. In Parquet and JSON the text is in ``text_field``.

    The part of a file's name after the last slash may be a pattern with ``*``, ``?`` and ``[…]``, except in a store. The
    service replaces it by the files that it finds when the job is submitted. Without ``held_out``, the share
    ``data.held_out_ratio`` of the text is held out.
    """

    name: Name
    files: Annotated[tuple[Location, ...], Field(min_length=1, max_length=FILES_MAX)]
    held_out: Annotated[tuple[Location, ...], Field(max_length=FILES_MAX)] = Field(
        default=(), description="files for the source's held-out loss; no island trains on them"
    )
    weight: SourceWeight = 1.0
    text_field: Word = "text"


class DataSection(Section):
    """The text, and its conversion to tokens. ``source: builtin`` is the source code of Python's standard library.

    ``source: files`` accepts the same kinds of files as ``sources``. Each island holds all of the text, which takes 2.5
    times its size in memory; use it for some 100 MB, and at most 2 GiB. ``source: streamed`` reads ``sources`` a few
    megabytes at a time, and each island reads only its own part.

    The commands of ``atoll`` accept paths relative to the specification; over REST they must be absolute, or URLs of a store
    (s3://…, gs://…). The node of every island must be able to read the files, below a root (`atoll up --data`). The same
    applies to ``tokenizer``, which is `bytes`, a `tokenizer.json` of Hugging Face's tokenizers or a `.model` of
    SentencePiece, and to ``index``, which `atoll data index` creates. Without an index islands count streamed text as they
    read it, and the length of an epoch is estimated if an island's part of a source has more than 1 GiB.
    """

    source: Literal["builtin", "files", "streamed"] = "builtin"
    files: Annotated[tuple[Location, ...], Field(max_length=FILES_MAX)] = ()
    sources: Annotated[tuple[SourceSection, ...], Field(max_length=SOURCES_MAX)] = ()
    text_field: Word = Field(default="text", description="for source: files")
    tokenizer: Location = "bytes"
    tokenizer_digest: Digest | None = Field(
        default=None, description="digest of the tokenizer's file; filled in by the service"
    )
    separator: TokenId | None = Field(
        default=None,
        description="the token between two documents; if absent, the control token that ends a text, filled in by the "
        "service",
    )
    begin_token: TokenId | Literal["tokenizer", "none"] = Field(
        default="tokenizer",
        description="the token before each document; `tokenizer`: the one that the tokenizer itself puts before a text, if "
        "any, filled in by the service",
    )
    index: Location | None = Field(
        default=None, description="index of a streamed data set, with the token counts of its pieces"
    )
    index_digest: Digest | None = Field(default=None, description="digest of the index; filled in by the service")
    stored_bytes: Annotated[tuple[StoredBytes, ...], Field(max_length=SOURCES_MAX)] = Field(
        default=(),
        description="size of each source's files on the service's machine, if there is no index; filled in by the service",
    )
    sequence_length: SequenceLength = 128
    held_out_ratio: Annotated[float, Field(strict=True, ge=1e-6, lt=0.5)] = 0.02
    unreadable_max: UnreadableCount = Field(
        default=0,
        description="unreadable records (not UTF-8, or without text) and pieces of files that an island may skip; one more "
        "ends the job",
    )


class OptimizerGroupSection(Section):
    """A group of tensors with its own learning rate or weight decay. It contains the tensors that match both ``tensors``
    and ``role``.

    ``tensors`` is a pattern of names, with ``*`` and ``?``; ``role`` is the tensors' purpose. At least one is required.
    """

    tensors: TensorPattern | None = None
    role: Literal["embedding", "matrix", "vector"] | None = None
    lr_ratio: RateRatio = Field(default=1.0, description="factor of the learning rate, also for the decay")
    weight_decay: WeightDecay | None = Field(
        default=None, description="if absent, the common weight decay, which excludes embeddings and vectors"
    )

    @model_validator(mode="after")
    def _names_some(self) -> OptimizerGroupSection:
        if self.tensors is None and self.role is None:
            raise ValueError("names no tensors; give it a pattern of names, a role, or both")
        return self


class InnerOptimizerSection(Section):
    """The optimizer of every island's inner steps, with its schedule: a linear warm-up, then a decay by ``schedule`` to
    ``lr · lr_final_ratio`` at the end of the job's token budget.

    ``muon`` updates matrices by Muon and everything else by AdamW, at one learning rate, that of AdamW. For Lion use a third
    to a tenth of AdamW's rate. The first of the ``groups`` that matches a tensor applies.

    ``factory`` is ``package.module:function``, and replaces ``kind``. It gets this section as a dictionary and returns a
    complete optax optimizer, such as ``optax.adamw(3e-4)``, whose updates are added to the parameters. The optimizer has its
    own learning rate and weight decay; the schedule multiplies its updates by a factor that is 1 after warm-up and
    ``lr_final_ratio`` at the end. Gradients are clipped only if ``clip_norm`` is set. A job with a factory that ascends
    fails at its first step.
    """

    kind: Literal["adamw", "muon", "lion", "adafactor"] = "adamw"
    factory: Function | None = None
    lr: LearningRate = 2e-3
    lr_final_ratio: Ratio = 0.1
    warmup_steps: StepCountOrNone = Field(default=50, description="steps of each island")
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    decay_ratio: Ratio = Field(
        default=0.2, description="for wsd: the share of the budget at its end during which the rate falls"
    )
    beta1: RatioBelowOne = Field(default=0.9, description="for AdamW and Lion")
    beta2: RatioBelowOne = Field(default=0.95, description="for AdamW and Lion; use 0.99 for Lion")
    momentum: RatioBelowOne = Field(default=0.95, description="for Muon")
    weight_decay: WeightDecay = 0.1
    clip_norm: GradientNorm | None = Field(
        default=1.0, description="limit of the norm of all gradients; null, the default with a factory: no limit"
    )
    groups: Annotated[tuple[OptimizerGroupSection, ...], Field(max_length=GROUPS_MAX)] = ()

    @model_validator(mode="before")
    @classmethod
    def _a_factory_clips_itself(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("factory") is not None and "clip_norm" not in data:
            return {**data, "clip_norm": None}
        return data

    @model_validator(mode="after")
    def _one_optimizer(self) -> InnerOptimizerSection:
        if self.factory is not None and "kind" in self.model_fields_set and self.kind != "adamw":
            raise ValueError(f"has kind {self.kind} and a factory, which takes its place; leave one of them out")
        if self.factory is not None and any(group.weight_decay is not None for group in self.groups):
            raise ValueError(
                "has a factory, whose optimizer decays weights itself, and a group with a weight_decay of its own; "
                "remove that, and use optax.add_decayed_weights with a mask in the factory"
            )
        return self


class TrainingSection(Section):
    """The inner steps of one island. ``batch_size`` is in sequences for one island.

    With ``accumulation`` a step processes its batch in that many equal parts, one after another: activations take less
    memory, and the result is the same. Decoder models add ``z_loss`` times the mean of log²Z to their objective, where Z is
    the sum of the exponentials of a position's logits (arXiv:2204.02311, section 5). Reported losses do not include it.
    """

    batch_size: SequenceCount = 8
    accumulation: MicrobatchCount = Field(default=1, description="number of parts of a batch; must divide batch_size")
    z_loss: Ratio = 0.0
    inner_optimizer: InnerOptimizerSection = InnerOptimizerSection()


class OuterOptimizerSection(Section):
    """The outer optimizer applies the average of the islands' displacements at each merge.

    The defaults were best, or equal to the best, in runs of 4 to 256 rounds. More momentum overshoots there: with 0.7 and
    0.9, the method's usual setting, such a run makes no progress or diverges.

    Its learning rate is lr · min(1, version / ``warmup_merges``) · (1 − (1 − ``lr_final_ratio``) · tokens trained / budget).
    """

    kind: Literal["nesterov", "sgd"] = "nesterov"
    lr: LearningRate = 0.5
    momentum: RatioBelowOne = 0.3
    warmup_merges: MergeCount = Field(
        default=0, description="merges of each fragment over which the rate rises; 0: no warm-up"
    )
    lr_final_ratio: Ratio = Field(
        default=1.0, description="share of the rate at the end of the budget, reached linearly"
    )


class DurabilitySection(Section):
    """The durability that a merge has before any island receives it. Both kinds survive the synchroniser's death.

    With ``async``, up to ``merges_max`` merges may be in the operating system's cache only, and are lost if the power fails.
    A job with islands that hold lost merges does not continue by itself.
    """

    kind: Literal["sync", "async"] = "sync"
    merges_max: MergeCount = Field(default=8, description="for async; ignored with sync")
    snapshot_every_records: RecordCount = Field(
        default=20_000,
        description="records between snapshots; a restarted synchroniser replays at most about this many",
    )


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
    outer_optimizer: OuterOptimizerSection = OuterOptimizerSection()
    wire: WireSection = WireSection()
    durability: DurabilitySection = DurabilitySection()
    adoption: Literal["replace", "mix", "rebase"] = "rebase"
    mix_alpha: Ratio = 0.5

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


class IslandsSection(Section):
    """One or more islands on one node group. ``accelerators: 0`` means CPU; ``cpus`` is the number that Ray reserves.

    ``hosts``, ``mesh``, ``batch_size`` and ``accumulation`` apply to one island; ``accelerators`` and ``cpus`` apply to each
    of its hosts.

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
    mesh: MeshSection = MeshSection()
    batch_size: SequenceCount | None = Field(
        None, description="sequences in one inner step of one island; training.batch_size if absent"
    )
    accumulation: MicrobatchCount | None = Field(
        None, description="parts in which one island processes a batch; training.accumulation if absent"
    )

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
    """When the job ends: after a number of tokens over all islands, or of steps of each island. Set exactly one."""

    tokens: TokenCount | None = None
    steps: StepCount | None = None


class EvaluationSection(Section):
    """When and where Θ is measured on held-out data, and how long that may take.

    ``on: head`` uses one CPU thread of the lowest priority beside the synchroniser, which suffices for models of up to some
    100M parameters. ``on: node_group`` uses a process on a node of ``node_group``, which reserves ``accelerators`` and
    ``cpus`` as an island would; while that group has no room for it, the head measures. ``on: islands`` uses the island that
    is furthest ahead, between two of its steps, with the parameters that it already holds.

    An evaluation takes at most ``time_ratio_max`` of the time that the merges between two evaluations take. If all
    ``sequences`` would take longer, the first half of them is measured, or the first quarter, and so on. The first
    evaluation of a job, before any merge, and the last one always measure all sequences.
    """

    every_merges: MergeCount = 32
    sequences: SequenceCount = 128
    on: Literal["head", "node_group", "islands"] = "head"
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
    """

    suspect_timeout_s: Timeout = 30.0
    cut_off_timeout_s: Timeout = 900.0
    backoff_first_s: Wait = 0.2
    backoff_max_s: Timeout = 60.0
    restarts_max: RestartCount = 10
    flush_timeout_s: Timeout = 30.0
    step_limit_s: Timeout | None = 120.0
    step_limit_ratio: StepRatio = 50.0
    first_step_limit_s: Timeout = 1800.0
    donors_max: IslandCount = 1
    donor_bytes_per_s: BytesPerSecond | None = None


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
