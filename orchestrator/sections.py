"""The sections of a job specification: every field with its unit, its default and its reason.

What is right within one section is said here, in types. What needs more than one section is ``config``'s business, and so
is reading files.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """A built-in preset, or ``factory: package.module:function`` of an installed package (see learners/model.py)."""

    preset: Literal["nano", "micro", "small"] = "nano"
    factory: str | None = None
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"


class DataSection(Section):
    """``source: builtin`` is the Python standard library's own source; otherwise ``files`` (.txt, .jsonl, .parquet).

    The commands of ``atoll`` take files relative to the specification; over REST they must be absolute. Every island's
    node must have them, below a root (`atoll up --data`).
    """

    source: Literal["builtin", "files"] = "builtin"
    files: tuple[str, ...] = ()
    text_field: str = "text"
    sequence_length: Count = 128
    held_out_ratio: Annotated[float, Field(gt=0, lt=0.5)] = 0.02


class InnerOptimizerSection(Section):
    """AdamW with linear warm-up, in steps of every island, and cosine decay over the job's token budget."""

    lr: Positive = 2e-3
    lr_final_ratio: Ratio = 0.1
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    beta1: Ratio = 0.9
    beta2: Ratio = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Positive = 1.0


class TrainingSection(Section):
    """What one island does in one inner step. ``batch_size`` is in sequences for one island."""

    batch_size: Count = 8
    inner_optimizer: InnerOptimizerSection = InnerOptimizerSection()


class OuterOptimizerSection(Section):
    kind: Literal["nesterov", "sgd"] = "nesterov"
    lr: Positive = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


class DurabilitySection(Section):
    """When a merge counts as kept, which it is before any island hears of it. Both kinds survive the synchroniser's death.

    With ``async`` up to ``merges_max`` merges are only with the operating system: a loss of power takes them, and a job
    whose islands hold merges that are gone does not go on by itself.
    """

    kind: Literal["sync", "async"] = "sync"
    merges_max: Annotated[int, Field(ge=0)] = Field(8, description="for async; sync has none")
    snapshot_every_records: Count = Field(
        20_000, description="a synchroniser that comes back remembers at most about so many steps one by one"
    )


class SynchroniserSection(Section):
    """Decoupled DiLoCo's knobs, arXiv:2604.21428; the symbols are in ``JobPolicy``."""

    fragments: Count = 8
    interval_steps: Count = 24
    overlap_steps: Annotated[int, Field(ge=0)] = 2
    quorum: Count = 1
    grace_margin: Annotated[float, Field(ge=0, lt=1)] = 0.8
    grace_cap_steps: Annotated[float, Field(ge=0)] | None = 1.0
    staleness_max: Annotated[int, Field(ge=0)] = 0
    averaging: Literal["radial", "mean"] = "radial"
    outer_optimizer: OuterOptimizerSection = OuterOptimizerSection()
    wire: Literal["float32", "bfloat16"] = "float32"
    durability: DurabilitySection = DurabilitySection()
    adoption: Literal["replace", "mix", "rebase"] = "rebase"
    mix_alpha: Ratio = 0.5


class IslandsSection(Section):
    """One or more islands on one node group. ``accelerators`` 0 means CPU; ``cpus`` is what Ray reserves.

    Of the islands from ``count`` up to ``count_max`` each has a name and a data shard from the beginning, and a process only
    once the job is scaled up. Beside them ``standby`` processes wait to take the place of one that is lost.
    """

    node_group: Name
    count: Count = 1
    count_max: Count | None = Field(
        None, description="islands that the job may be scaled up to; no more than count if absent"
    )
    standby: Annotated[int, Field(ge=0)] = Field(
        0, description="processes that are started, hold a state, and train once an island of this entry is lost"
    )
    name: Name | None = Field(None, description="defaults to the node group's; numbered when count is above 1")
    accelerator: Literal["cpu", "gpu", "tpu"] = "cpu"
    accelerators: Annotated[int, Field(ge=0)] = 0
    cpus: Positive = 1.0

    @property
    def has_spares(self) -> bool:
        return self.count_max is not None and self.count_max > self.count

    def island_names(self, *, spares: bool = False) -> list[str]:
        """The names of the islands that are wanted at first, and of the spares behind them."""
        base, most = self.name or self.node_group, max(self.count, self.count_max or 0)
        names = [base] if most == 1 else [f"{base}-{number}" for number in range(most)]
        return names if spares else names[: self.count]

    def standby_names(self) -> list[str]:
        base = f"{self.name or self.node_group}-standby"
        return [base] if self.standby == 1 else [f"{base}-{number}" for number in range(self.standby)]


class BudgetSection(Section):
    """When the job ends: tokens over all islands together, or steps of each island. Exactly one."""

    tokens: Count | None = None
    steps: Count | None = None


class EvaluationSection(Section):
    every_merges: Annotated[int, Field(ge=0)] = 32
    sequences: Count = 128


class RecoverySection(Section):
    """When an island is given up as lost, and placed again, and how it then takes a state from its peers.

    One that is silent though its node answers hangs, or was stopped: ``suspect_timeout_s``. One whose node cannot be reached
    trains on, most likely, and its work is lost if it is replaced: ``cut_off_timeout_s``.

    With one donor a state is of one boundary; with several, each gives fragment after fragment, at boundaries of its own: a
    large state comes sooner and costs each less. A donor gives at most ``donor_bytes_per_s``, on average, to all who ask
    together; a fragment with its moments must go within five minutes of that.
    """

    suspect_timeout_s: Positive = 30.0
    cut_off_timeout_s: Positive = 900.0
    backoff_first_s: Annotated[float, Field(ge=0)] = 0.2
    backoff_max_s: Positive = 60.0
    restarts_max: Annotated[int, Field(ge=0)] = 10
    flush_timeout_s: Positive = 30.0
    donors_max: Count = 1
    donor_bytes_per_s: Positive | None = None


class CheckpointsSection(Section):
    """When checkpoints are taken by themselves (``JobPolicy.checkpoints``); ``atoll checkpoint`` takes one at any time.

    ``folder`` is a path or URL below a root (`atoll up --checkpoints`) that every node reaches; each job has a folder of its
    own in it. Absent: the job's run folder.
    """

    every_merges: Annotated[int, Field(ge=0)] = 0
    every_s: Annotated[float, Field(ge=0)] = 0.0
    keep: Count = 2
    timeout_s: Positive = 60.0
    folder: Annotated[str, Field(min_length=1)] | None = None


class ResumeSection(Section):
    """Go on from a checkpoint: ``checkpoint`` is its folder, or a folder of several, of which the newest sound one is used.

    ``atoll submit --resume`` fills this in, also from the name of a job. Model, data and seed must be as they were; islands
    may be others. The budget counts from the beginning. ``refused`` is the service's: checkpoints passed over, and why.
    """

    checkpoint: Annotated[str, Field(min_length=1)]
    refused: tuple[str, ...] = ()


class HealthSection(Section):
    """What contributions must be like (``core.health``). What holds no numbers is always refused, and its island replaced.

    ``displacement_ratio_max`` refuses what is so many times further from the merged parameters than is usual; null: nothing.
    100 lets pass all that warm-up, missed rounds and a new inner optimizer do, and stops what a flipped exponent bit does.
    """

    displacement_ratio_max: Annotated[float, Field(gt=1)] | None = 100.0
    strikes_max: Count = 3
    quarantines_max: Annotated[int, Field(ge=0)] = 3


class SyntheticSection(Section):
    """For ``trainer: learners.synthetic:create``: an island without JAX, of this size and speed."""

    parameters: Count = 100_000
    step_s: Positive = 0.05
    step_jitter_ratio: Ratio = 0.0
    start_s: Annotated[float, Field(ge=0)] = 0.0
