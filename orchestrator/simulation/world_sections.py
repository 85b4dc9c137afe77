"""The sections of a world file: every field with its unit, its default and its range. ``worldfile`` reads and writes them.

What is right within one section is said here, in types; what needs more than one is ``worldfile``'s business.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StrictBool
from pydantic_core import PydanticCustomError

from orchestrator.bounds import (
    ISLANDS_MAX,
    ByteCount,
    BytesPerSecond,
    FragmentCount,
    IncarnationCount,
    IslandCount,
    KeptCount,
    MergeCount,
    Ratio,
    RatioBelowOne,
    Remark,
    RestartCount,
    RoundSteps,
    RoundStepsOrNone,
    RoundStepsRatio,
    StepRatio,
    Timeout,
    TimeRatio,
    TokenCount,
    VersionCount,
    VirtualSeconds,
    VirtualSecondsAboveZero,
    Wait,
    Word,
    WordOrNone,
)
from orchestrator.errors import ConfigurationError
from orchestrator.sections import HealthSection, Section
from orchestrator.simulation import distributions
from orchestrator.simulation.distributions import Constant, Distribution
from orchestrator.simulation.plan import FaultKind


def _distribution(value: Any) -> Distribution:
    try:
        return distributions.parse(value)
    except ConfigurationError as error:
        raise PydanticCustomError("duration", "{said}", {"said": str(error)}) from error


Spread = Annotated[Distribution, PlainValidator(_distribution)]

ENTRIES_MAX = 1_000_000
"""Samples, paces, lives and faults that a tape showed: what a file of ``documents.FILE`` has room for."""
NOTES_MAX = 1000


class CheckpointsPart(Section):
    """``CheckpointPolicy``."""

    every_merges: MergeCount = 0
    every_s: Wait = 0.0
    keep: KeptCount = 2
    timeout_s: Timeout | None = None


class EvaluationPart(Section):
    """``EvaluationPolicy``. ``sequences`` is 0 for tapes written before evaluations had a size."""

    sequences: Annotated[int, Field(strict=True, ge=0, le=10**6)] = 0
    time_ratio_max: TimeRatio | None = None
    on_islands: StrictBool = False
    at_start: StrictBool = False


class OuterRatePart(Section):
    """``OuterRatePolicy``."""

    warmup_merges: MergeCount = 0
    final_ratio: Ratio = 1.0


class StepLimitsPart(Section):
    """``StepLimits``."""

    limit_s: Timeout | None = 120.0
    ratio: StepRatio = 50.0
    first_s: Timeout = 1800.0


class PolicyPart(Section):
    """Every field of ``JobPolicy`` but its islands and standbys, under the same names.

    The fields with a default are those that tapes of earlier builds lack.
    """

    fragment_count: FragmentCount
    sync_interval_steps: RoundSteps
    overlap_steps: RoundStepsOrNone
    quorum: IslandCount
    grace_margin: RatioBelowOne
    grace_cap_steps: RoundStepsRatio | None
    staleness_max: VersionCount
    token_budget: TokenCount
    evaluation_every_merges: MergeCount
    suspect_timeout_s: Timeout
    backoff_first_s: Wait
    backoff_max_s: Timeout
    restarts_max: RestartCount
    flush_timeout_s: Timeout
    moving_average_decay: RatioBelowOne
    health: HealthSection = HealthSection()
    cut_off_timeout_s: Timeout = 900.0
    checkpoints: CheckpointsPart = CheckpointsPart()
    donors_max: IslandCount = 1
    evaluation: EvaluationPart = EvaluationPart()
    outer_rate: OuterRatePart = OuterRatePart()
    step_limits: StepLimitsPart = StepLimitsPart()


class LifePart(Section):
    """``plan.IncarnationStart`` of one incarnation of the island it stands under."""

    incarnation: IncarnationCount
    place_s: VirtualSeconds | None = None
    placement_fails: StrictBool = False
    start_s: VirtualSeconds | None = None
    transfer_s: VirtualSeconds | None = None
    begin_s: VirtualSeconds | None = None


class PlacePart(Section):
    """``IslandPlan``: of a standby, all there is to say."""

    island: Word
    node_group: Word
    region: WordOrNone
    accelerator_count: IslandCount = 1


Row = tuple[VirtualSeconds, VirtualSeconds, VirtualSecondsAboveZero, VirtualSeconds]


class IslandPart(PlacePart):
    """Rows of ``paces`` are since, until, step_s, pause_s; rows of ``capacity`` are at, ratio."""

    step_s: VirtualSecondsAboveZero
    pause_s: VirtualSeconds = 0.0
    bandwidth_bytes_per_s: BytesPerSecond | None = None
    lives: Annotated[tuple[LifePart, ...], Field(max_length=ENTRIES_MAX)] = ()
    capacity: Annotated[tuple[tuple[VirtualSeconds, Ratio], ...], Field(max_length=ENTRIES_MAX)] = ()
    step_samples: Annotated[tuple[VirtualSecondsAboveZero, ...], Field(max_length=ENTRIES_MAX)] = ()
    paces: Annotated[tuple[Row, ...], Field(max_length=ENTRIES_MAX)] = ()


class FaultPart(Section):
    at: VirtualSeconds
    kind: FaultKind
    island: WordOrNone
    duration: VirtualSeconds = 0.0
    count: Annotated[int, Field(strict=True, ge=0, le=ENTRIES_MAX)] = 0
    bytes_per_second: Annotated[float, Field(strict=True, ge=0, le=1e15)] = 0.0


class LatenciesPart(Section):
    """Distributions, as in a simulation's specification."""

    place_s: Spread
    start_s: Spread
    transfer_s: Spread
    begin_s: Spread = Constant(0.0)
    letter_s: Spread
    pull_s: Spread
    delivery_s: Spread
    merge_s: Spread
    evaluate_s: Spread
    evaluate_alone_s: Spread | None = None
    kill_s: Spread = Constant(0.0)
    detect_s: Spread


class ChancesPart(Section):
    """Probabilities, per occasion."""

    corrupt: Ratio = 0.0
    duplicate: Ratio = 0.0
    reorder: Ratio = 0.0
    catch_up_failure: Ratio = 0.0
    placement_failure: Ratio = 0.0
    publication_loss: Ratio = 0.0
    merge_failure: Ratio = 0.0


class WorldPart(Section):
    """``FittedWorld``. ``until`` is absent where the tape shows the job's end."""

    job: WordOrNone
    until: VirtualSeconds | None = None
    notes: Annotated[tuple[Remark, ...], Field(max_length=NOTES_MAX)] = ()
    policy: PolicyPart
    tokens_per_step: TokenCount
    step_jitter_ratio: RatioBelowOne = 0.0
    adoption: Literal["replace", "rebase"]
    median_over: Annotated[int, Field(strict=True, ge=1, le=ENTRIES_MAX)] = 1
    report_every_s: VirtualSeconds
    silence_s: VirtualSeconds
    seed_s: VirtualSeconds
    calm_at: VirtualSeconds | None = None
    payload_bytes: ByteCount = 0
    latencies: LatenciesPart
    chances: ChancesPart = ChancesPart()
    faults: Annotated[tuple[FaultPart, ...], Field(max_length=ENTRIES_MAX)] = ()
    islands: Annotated[tuple[IslandPart, ...], Field(min_length=1, max_length=ISLANDS_MAX)]
    standbys: Annotated[tuple[PlacePart, ...], Field(max_length=ISLANDS_MAX)] = ()
