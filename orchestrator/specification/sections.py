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
    """A preset; or a ``decoder`` of one's own; or ``factory: package.module:function`` of an installed package.

    ``vocabulary_size`` is for a tokenizer that has another one than the preset. ``initial_weights`` is a folder with the
    weights of a model that fits, as Hugging Face's libraries write them (`config.json`, `model.safetensors`), from which the
    job goes on; the node that evaluates must have it, below a root (`atoll up --data`). ``remat`` is what of a decoder's
    layers is computed again for the gradient: ``dots`` all but matrix products, which takes less time, ``full`` all of it,
    which takes the least memory.
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
    """One kind of text of a streamed data set: ``weight`` is its part of all sequences, beside the weights of the others.

    A file's name says how it is read, in capitals or not: .jsonl, .json, .ndjson and .jsonlines are JSON Lines (one object a
    line), .parquet, .arrayrecord (a record is a text), or else text in UTF-8. JSON Lines and text may be compressed: .gz,
    .gzip, .zst, .zstd. A file whose content is something else is refused. Parquet and JSON have the text in ``text_field``.

    A file's name, behind the last slash, may be a pattern with ``*``, ``?`` and ``[…]``, but not of a store: the service
    that takes the job puts the files in its place that it finds. Without ``held_out`` a part of the text is held out,
    ``data.held_out_ratio``.
    """

    name: Name
    files: Annotated[tuple[Location, ...], Field(min_length=1, max_length=FILES_MAX)]
    held_out: Annotated[tuple[Location, ...], Field(max_length=FILES_MAX)] = Field(
        default=(), description="files, on which nobody trains, to measure the source's held-out loss on"
    )
    weight: SourceWeight = 1.0
    text_field: Word = "text"


class DataSection(Section):
    """The text, and how it becomes tokens. ``source: builtin`` is the Python standard library's own source.

    ``source: files`` takes the same kinds of files, and each island holds all of their text, 2.5 times its size: for some
    100 MB, at most 2 GiB. ``source: streamed`` reads ``sources`` a few megabytes at a time, and each island only its own
    part of them.

    The commands of ``atoll`` take files relative to the specification; over REST they must be absolute, or URLs of a store
    (s3://…, gs://…). Every island's node must have or reach them, below a root (`atoll up --data`). So it is with
    ``tokenizer``: `bytes`, a `tokenizer.json` of Hugging Face's tokenizers or a `.model` of SentencePiece; and with
    ``index``, which `atoll data index` makes. Without it islands count streamed text as they read it, and the length of an
    epoch is estimated where an island's part of a source has more than 1 GiB.
    """

    source: Literal["builtin", "files", "streamed"] = "builtin"
    files: Annotated[tuple[Location, ...], Field(max_length=FILES_MAX)] = ()
    sources: Annotated[tuple[SourceSection, ...], Field(max_length=SOURCES_MAX)] = ()
    text_field: Word = Field(default="text", description="for source: files")
    tokenizer: Location = "bytes"
    tokenizer_digest: Digest | None = Field(
        default=None, description="of the tokenizer's file; the service fills it in"
    )
    separator: TokenId | None = Field(
        default=None,
        description="the token between two documents; if absent the control token that ends a text, which the service "
        "fills in",
    )
    begin_token: TokenId | Literal["tokenizer", "none"] = Field(
        default="tokenizer",
        description="the token before each document; `tokenizer` is the one that the tokenizer itself puts before a text, "
        "if it does, and the service fills it in",
    )
    index: Location | None = Field(
        default=None, description="of a streamed data set: the tokens of its pieces, counted"
    )
    index_digest: Digest | None = Field(default=None, description="of the index; the service fills it in")
    stored_bytes: Annotated[tuple[StoredBytes, ...], Field(max_length=SOURCES_MAX)] = Field(
        default=(),
        description="of each source's files on the service's machine, where there is no index; the service fills it in",
    )
    sequence_length: SequenceLength = 128
    held_out_ratio: Annotated[float, Field(strict=True, ge=1e-6, lt=0.5)] = 0.02
    unreadable_max: UnreadableCount = Field(
        default=0,
        description="records that are not UTF-8 or have no text, and pieces of files, that an island passes over; one more "
        "ends the job",
    )


class OptimizerGroupSection(Section):
    """Tensors with a learning rate or a weight decay of their own: those that ``tensors`` and ``role`` both fit.

    ``tensors`` is a pattern of names, with ``*`` and ``?``; ``role`` is what they are for. Each may be left out, not both.
    """

    tensors: TensorPattern | None = None
    role: Literal["embedding", "matrix", "vector"] | None = None
    lr_ratio: RateRatio = Field(default=1.0, description="multiplies the learning rate, for the decay as well")
    weight_decay: WeightDecay | None = Field(
        default=None, description="that of all if absent, which spares embeddings and vectors"
    )

    @model_validator(mode="after")
    def _names_some(self) -> OptimizerGroupSection:
        if self.tensors is None and self.role is None:
            raise ValueError("names no tensors; give it a pattern of names, a role, or both")
        return self


class InnerOptimizerSection(Section):
    """The optimizer of every island's inner steps, with its schedule: linear warm-up, then by ``schedule`` down to
    ``lr · lr_final_ratio`` at the end of the job's token budget.

    ``muon`` moves matrices by Muon and all else by AdamW, at one learning rate: that of AdamW. Lion's wants to be a third to
    a tenth of that. Of ``groups`` the first that fits a tensor counts.

    ``factory`` is ``package.module:function``, in place of ``kind``. It gets this section as a dictionary and returns a
    whole optax optimizer, such as ``optax.adamw(3e-4)``: its updates are added to the parameters. Learning rate and weight
    decay are the optimizer's own; the schedule multiplies its updates by a factor that is 1 after warm-up and
    ``lr_final_ratio`` at the end. Gradients are clipped only if ``clip_norm`` is written. A job whose factory ascends fails
    at its first step.
    """

    kind: Literal["adamw", "muon", "lion", "adafactor"] = "adamw"
    factory: Function | None = None
    lr: LearningRate = 2e-3
    lr_final_ratio: Ratio = 0.1
    warmup_steps: StepCountOrNone = Field(default=50, description="steps of every island")
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    decay_ratio: Ratio = Field(
        default=0.2, description="for wsd: the last part of the budget, over which the rate falls"
    )
    beta1: RatioBelowOne = Field(default=0.9, description="of AdamW and Lion")
    beta2: RatioBelowOne = Field(default=0.95, description="of AdamW and Lion, which wants 0.99")
    momentum: RatioBelowOne = Field(default=0.95, description="of Muon")
    weight_decay: WeightDecay = 0.1
    clip_norm: GradientNorm | None = Field(
        default=1.0, description="of all gradients together; null, as without it beside a factory: none is clipped"
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
    memory, and the result is the same. ``z_loss`` times the mean of log²Z is added to what decoder models minimise, Z being
    the sum of exponentials of a position's logits (arXiv:2204.02311, section 5): it is no part of the loss that is reported.
    """

    batch_size: SequenceCount = 8
    accumulation: MicrobatchCount = Field(default=1, description="parts of a batch; it divides batch_size")
    z_loss: Ratio = 0.0
    inner_optimizer: InnerOptimizerSection = InnerOptimizerSection()


class OuterOptimizerSection(Section):
    """The outer optimizer applies the average of the islands' displacements at each merge.

    The defaults learned best, or as well as any, in runs of 4 to 256 rounds. More momentum overshoots there: with 0.7 and
    0.9, the method's usual setting, such a run stands still or diverges.

    Its learning rate is lr · min(1, version / ``warmup_merges``) · (1 − (1 − ``lr_final_ratio``) · tokens trained / budget).
    """

    kind: Literal["nesterov", "sgd"] = "nesterov"
    lr: LearningRate = 0.5
    momentum: RatioBelowOne = 0.3
    warmup_merges: MergeCount = Field(default=0, description="of each fragment, over which the rate rises; 0: none")
    lr_final_ratio: Ratio = Field(
        default=1.0, description="of the rate at the end of the budget, to which it falls in a line"
    )


class DurabilitySection(Section):
    """The durability of merges, which they have before any island gets them. Both kinds survive the synchroniser's death.

    With ``async`` up to ``merges_max`` merges are only with the operating system: a loss of power takes them, and a job
    whose islands hold merges that are gone does not go on by itself.
    """

    kind: Literal["sync", "async"] = "sync"
    merges_max: MergeCount = Field(default=8, description="for async; sync has none")
    snapshot_every_records: RecordCount = Field(
        default=20_000, description="a restarted synchroniser replays at most about so many steps one by one"
    )


class WireSection(Section):
    """The codecs of what travels: ``up`` an island's displacement from Θ, ``down`` the update of Θ. One name is both.

    What a codec loses is not lost: its sender adds it to what it sends next.
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
    """The parameters of Decoupled DiLoCo, arXiv:2604.21428; the symbols are in ``JobPolicy``.

    The paper has an overlap of 2 and a grace of about one step. With these defaults all islands meet in a merge where a
    fragment travels for up to half a step each way, and not only where it takes no time.
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
    ``expert`` the experts of a mixture. The product of the lengths is the number of the island's devices.
    """

    data: AxisLength | None = Field(default=None, description="what the other axes leave of the devices, if absent")
    fsdp: AxisLength = 1
    tensor: AxisLength = 1
    expert: AxisLength = 1


class IslandsSection(Section):
    """One or more islands on one node group. ``accelerators`` 0 means CPU; ``cpus`` is what Ray reserves.

    ``hosts``, ``mesh``, ``batch_size`` and ``accumulation`` are of one island; ``accelerators`` and ``cpus`` are of one of
    its hosts.

    Of the islands from ``count`` up to ``count_max`` each has a name and a data shard from the beginning, and a process only
    once the job is scaled up. Beside them ``standby`` processes wait to take the place of one that is lost.
    """

    node_group: Name
    count: IslandCount = 1
    count_max: IslandCount | None = Field(
        None, description="islands that the job may be scaled up to; no more than count if absent"
    )
    standby: IslandCountFromZero = Field(
        0, description="processes that are started, hold a state, and train once an island of this entry is lost"
    )
    name: Name | None = Field(None, description="defaults to the node group's; numbered when count is above 1")
    accelerator: Literal["cpu", "gpu", "tpu"] = "cpu"
    accelerators: AcceleratorCount = 0
    cpus: Cpus = 1.0
    hosts: HostCount = 1
    mesh: MeshSection = MeshSection()
    batch_size: SequenceCount | None = Field(
        None, description="sequences of one inner step of one island; training.batch_size if absent"
    )
    accumulation: MicrobatchCount | None = Field(
        None, description="parts in which one island takes a batch; training.accumulation if absent"
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
    """When the job ends: tokens over all islands together, or steps of each island. Exactly one."""

    tokens: TokenCount | None = None
    steps: StepCount | None = None


class EvaluationSection(Section):
    """When Θ is measured on held-out data, by whom, and for how long at most.

    ``on: head`` is one CPU thread beside the synchroniser, of the lowest priority: for models up to some 100M parameters.
    ``on: node_group`` is a process on a node of ``node_group``, which books what an island of these ``accelerators`` and
    ``cpus`` would; while that group has no room for it, the head measures. ``on: islands`` has an island measure between two
    steps, each time the one that is furthest ahead, with what it holds of the parameters already.

    An evaluation takes at most ``time_ratio_max`` of the time that the merges between two of them take, by measuring the
    first half of the ``sequences``, a quarter, and so on. The first one of a job, before any merge, and the last one measure
    all, however long it takes.
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
        description=f"{EVALUATION_RATIO:g} if absent; on islands, which stand still for it, {ISLAND_RATIO:g}",
    )

    @property
    def time_ratio(self) -> float:
        if self.time_ratio_max is not None:
            return self.time_ratio_max
        return ISLAND_RATIO if self.on == "islands" else EVALUATION_RATIO


class RecoverySection(Section):
    """When an island is given up as lost, and placed again, and how it then takes a state from its peers.

    One that is silent though its node answers hangs, or was stopped: ``suspect_timeout_s``. One whose node cannot be reached
    trains on, most likely, and its work is lost if it is replaced: ``cut_off_timeout_s``.

    One that answers, and whose step does not end, hangs: it is named in its status after a quarter of ``step_limit_s``,
    or of ``step_limit_ratio`` times its own median step where that is longer, and is ended and placed again after all of
    that. Before it has a median, as while it compiles, and outside of steps, the limit is ``first_step_limit_s``. Only
    seconds in which its process runs count. ``step_limit_s: null`` ends nobody.

    With one donor a state is of one boundary; with several, each gives fragment after fragment, at boundaries of its own: a
    large state comes sooner and costs each less. A donor gives at most ``donor_bytes_per_s``, on average, to all who ask
    together; a fragment with its moments must go within five minutes of that.
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
    """When checkpoints are taken by themselves (``JobPolicy.checkpoints``); ``atoll checkpoint`` takes one at any time.

    ``folder`` is a path or URL below a root (`atoll up --checkpoints`) that every node reaches; each job has a folder of its
    own in it. Absent: the job's run folder.
    """

    every_merges: MergeCount = 0
    every_s: Wait = 0.0
    keep: KeptCount = 2
    timeout_s: Timeout | None = Field(
        default=None, description="an island that has not saved its state by then is left out; by its size if absent"
    )
    folder: Location | None = None


class ResumeSection(Section):
    """Go on from a checkpoint: ``checkpoint`` is its folder, or a folder of several, of which the newest sound one is used.

    ``atoll submit --resume`` fills this in, also from the name of a job. Model, data and seed must be as they were; islands
    may be others. The budget counts from the beginning. ``refused`` is the service's: checkpoints passed over, and why.
    """

    checkpoint: Location
    refused: Annotated[tuple[Remark, ...], Field(max_length=REFUSED_MAX)] = ()


class TransportSection(Section):
    """The channel for payloads between islands and shard: the job's own connections, beside Ray's calls.

    The receiver pulls, over up to ``streams`` connections where the line is long, or on one machine through its
    ``shared_memory``. Each process listens at its node's address, on a free port of ``ports`` (0, 0: any). A range lies best
    outside of the system's ephemeral one, by default 32768 to 60999, of which other connections and Ray's own servers take
    ports as they come. Connections from one process to another carry at most ``bytes_per_s`` together. A transfer has no
    time limit but that of progress: ``stall_s`` without a byte. Payloads up to ``inline_bytes_max`` travel inside the calls,
    past the cap and as safe as those. With ``tls: auto`` both ends prove who they are and what is pulled is encrypted,
    unless the cluster is on loopback.
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
    """The limits of healthy contributions. One with NaN or Inf is always refused, and its island replaced.

    ``displacement_ratio_max`` refuses what is so many times further from the merged parameters than is usual; null: nothing.
    100 lets pass all that warm-up, missed rounds and a new inner optimizer do, and stops what a flipped exponent bit does.
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
