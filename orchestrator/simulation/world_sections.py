"""The sections of a world file: every field with its unit, its default and its range. ``worldfile`` reads and writes them.

What is right within one section is said here, in types; what needs more than one is ``worldfile``'s business.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from orchestrator.errors import ConfigurationError
from orchestrator.sections import Count, HealthSection, Positive, Ratio, Section
from orchestrator.simulation import distributions
from orchestrator.simulation.distributions import Constant, Distribution
from orchestrator.simulation.plan import FaultKind


def _distribution(value: Any) -> Distribution:
    try:
        return distributions.parse(value)
    except ConfigurationError as error:
        raise PydanticCustomError("duration", "{said}", {"said": str(error)}) from error


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Spread = Annotated[Distribution, PlainValidator(_distribution)]
Chance = Annotated[float, Field(ge=0, le=1)]


class PolicyPart(Section):
    """``JobPolicy`` without its islands and standbys."""

    fragment_count: Count
    sync_interval_steps: Count
    overlap_steps: Annotated[int, Field(ge=0)]
    quorum: Count
    grace_margin: Annotated[float, Field(ge=0, lt=1)]
    grace_cap_steps: Seconds | None
    staleness_max: Annotated[int, Field(ge=0)]
    token_budget: Count
    evaluation_every_merges: Annotated[int, Field(ge=0)]
    suspect_timeout_s: Positive
    backoff_first_s: Seconds
    backoff_max_s: Positive
    restarts_max: Annotated[int, Field(ge=0)]
    flush_timeout_s: Positive
    moving_average_decay: Annotated[float, Field(ge=0, lt=1)]
    health: HealthSection = HealthSection()


class LifePart(Section):
    """``plan.Life`` of one incarnation of the island it stands under."""

    incarnation: Count
    place_s: Seconds | None = None
    placement_fails: bool = False
    start_s: Seconds | None = None
    transfer_s: Seconds | None = None
    begin_s: Seconds | None = None


class PlacePart(Section):
    """``IslandPlan``: of a standby, all there is to say."""

    island: Annotated[str, Field(min_length=1)]
    node_group: Annotated[str, Field(min_length=1)]
    region: str
    accelerator_count: Count = 1


class IslandPart(PlacePart):
    """Rows of ``paces`` are since, until, step_s, pause_s; rows of ``capacity`` are at, ratio."""

    step_s: Positive
    pause_s: Seconds = 0.0
    bandwidth_bytes_per_s: Positive | None = None
    lives: tuple[LifePart, ...] = ()
    capacity: tuple[tuple[Seconds, Ratio], ...] = ()
    step_samples: tuple[Positive, ...] = ()
    paces: tuple[tuple[Seconds, Seconds, Positive, Seconds], ...] = ()


class FaultPart(Section):
    at: Seconds
    kind: FaultKind
    island: str
    duration: Seconds = 0.0
    count: Annotated[int, Field(ge=0)] = 0
    bytes_per_second: Annotated[float, Field(ge=0)] = 0.0


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

    corrupt: Chance = 0.0
    duplicate: Chance = 0.0
    reorder: Chance = 0.0
    catch_up_failure: Chance = 0.0
    placement_failure: Chance = 0.0
    publication_loss: Chance = 0.0
    merge_failure: Chance = 0.0


class WorldPart(Section):
    """``FittedWorld``. ``until`` is absent where the tape shows the job's end."""

    job: str
    until: Seconds | None = None
    notes: tuple[str, ...] = ()
    policy: PolicyPart
    tokens_per_step: Count
    step_jitter_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    adoption: Literal["replace", "rebase"]
    median_over: Count = 1
    report_every_s: Seconds
    silence_s: Seconds
    seed_s: Seconds
    calm_at: Seconds | None = None
    payload_bytes: Annotated[int, Field(ge=0)] = 0
    latencies: LatenciesPart
    chances: ChancesPart = ChancesPart()
    faults: tuple[FaultPart, ...] = ()
    islands: Annotated[tuple[IslandPart, ...], Field(min_length=1)]
    standbys: tuple[PlacePart, ...] = ()
