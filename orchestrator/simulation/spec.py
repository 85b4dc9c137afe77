"""A simulation's specification: what a user writes, validated once, frozen, every problem reported together.

    fleet  how many chips, how they fail, stall and return      steps  how long an inner step takes, and on how many tokens
    synchroniser  the job specification's section                links  what is sent, and over what

or ``world``, as `atoll tape fit` writes it. Every field has a unit, a default and a reason. Durations are numbers of seconds
or carry a unit (``distributions``). Refuses to know: files, and how anything is simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from orchestrator.core.vocabulary import Duration, Instant
from orchestrator.errors import ConfigurationError, InvalidJobSpec, Problem
from orchestrator.simulation import distributions, worldfile
from orchestrator.simulation.distributions import Constant, Distribution, Exponential
from orchestrator.simulation.fleet import CHIPS_PER_SLICE, RESTART_S, RETURN_S, STALL_S, Scavenged
from orchestrator.simulation.line_advice import bits_of
from orchestrator.specification.bounds import Factor, IslandCount, Name, Ratio, Seed
from orchestrator.specification.sections import Section, SynchroniserSection
from orchestrator.specification.validation import omitted_count, problems_of, valid_fields
from orchestrator.system.plain import brief

System = Literal["data-parallel", "elastic-data-parallel", "diloco", "streaming-diloco", "decoupled"]
ALL_SYSTEMS: tuple[System, ...] = (
    "data-parallel",
    "elastic-data-parallel",
    "diloco",
    "streaming-diloco",
    "decoupled",
)
ISLAND_STEPS_MAX = 200_000
"""At protocol level: inner steps of all learners together. About three events each, so a minute of computing."""
EXAMPLE = "deploy/configs/simulate.yaml"
UNKNOWN = f"Remove it, or correct its spelling; {EXAMPLE} is a complete example."
SECONDS_MIN = 1e-9
BANDWIDTH_MAX = 1e18
"""Bits per second: a thousand million times a fast network card."""
NUMBER_MAX = 10**15
"""Chips, parameters, tokens of a step: a thousand times the largest of each. All its whole numbers are floats."""
SPEED_CLASSES_MAX = 1000
SLICES_MAX = 10**7
"""Of a fleet: a thousand times the largest that there is."""
VISITS_MAX = 1000
"""Visits of further chips: each is a fleet of its own to the simulation."""
WORLD_FIELDS_MAX = 100
"""``worldfile`` says which there are."""
_BITS = {"bps": 1.0, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9, "tbps": 1e12}


def _duration(value: Any) -> Duration:
    try:
        return distributions.duration(value)
    except ConfigurationError as error:
        raise PydanticCustomError("duration", "{problem}", {"problem": str(error)}) from error


def _positive_duration(value: Any) -> Duration:
    seconds = _duration(value)
    if seconds < SECONDS_MIN:
        raise PydanticCustomError(
            "duration", "{problem}", {"problem": f"{brief(value)} must be at least a nanosecond. Write 90s, 30min, 1y."}
        )
    return seconds


def _distribution(value: Any) -> Distribution:
    try:
        return distributions.parse(value)
    except ConfigurationError as error:
        raise PydanticCustomError("duration", "{problem}", {"problem": str(error)}) from error


def _bandwidth(value: Any) -> float:
    """Bits per second out of a number, or a number with a unit."""
    problem = (
        f"{brief(value)} is no bandwidth. Write bits per second from 1 on, or a number with a unit: 800Mbps, 5Gbps."
    )
    if isinstance(value, str) and len(value) <= distributions.TEXT_CHARACTERS_MAX:
        digits = value.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/")
        unit = value.strip()[len(digits) :].lower().replace("bit/s", "bps").replace("b/s", "bps")
        try:
            bits = float(digits) * _BITS[unit or "bps"]
        except (ValueError, KeyError):
            raise PydanticCustomError("bandwidth", "{problem}", {"problem": problem}) from None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        bits = float(max(-1, min(value, 2 * BANDWIDTH_MAX)))  # an integer may be beyond every float
    else:
        raise PydanticCustomError("bandwidth", "{problem}", {"problem": problem})
    if not 1.0 <= bits <= BANDWIDTH_MAX:
        raise PydanticCustomError("bandwidth", "{problem}", {"problem": problem})
    return bits


Seconds = Annotated[Duration, PlainValidator(_duration)]
PositiveSeconds = Annotated[Duration, PlainValidator(_positive_duration)]
Spread = Annotated[Distribution, PlainValidator(_distribution)]
Bandwidth = Annotated[float, PlainValidator(_bandwidth)]
Number = Annotated[int, PlainValidator(lambda value: _whole(value))]
"""These are read by functions of their own, which bound them (``DURATION_MAX_S``, ``BANDWIDTH_MAX``, ``NUMBER_MAX``)."""


def _whole(value: Any) -> int:
    """A count that may be written 12e9 or 1_200_000: YAML reads some of these as text."""
    try:
        short = not isinstance(value, bool | str) or (isinstance(value, str) and len(value) <= 64)
        number = float(value) if short else float("nan")
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not (1.0 <= number <= NUMBER_MAX and number.is_integer()):
        problem = f"{brief(value)} is no count. Write a whole number from 1 to {NUMBER_MAX:.0e}."
        raise PydanticCustomError("number", "{problem}", {"problem": problem})
    return int(number)


class Visit(Section):
    """Chips that are there from one instant until another, on top of the fleet's own."""

    model_config = ConfigDict(populate_by_name=True)
    chips: Number
    since: Seconds = Field(0.0, alias="from")
    until: PositiveSeconds


class FleetSection(Section):
    """Chips in slices: a failing chip takes its slice out. The defaults of the stalls are those ``calibration`` fitted."""

    chips: Number
    chips_per_slice: Number = CHIPS_PER_SLICE
    learners: IslandCount = 8
    mtbi_chip: PositiveSeconds = distributions.UNITS["y"]
    return_time: Spread = Exponential(RETURN_S)
    stall_down: Spread = Constant(STALL_S)
    stall_up: Spread = Constant(STALL_S)
    restart: Spread = Constant(RESTART_S)
    scavenged: Annotated[tuple[Visit, ...], Field(max_length=VISITS_MAX)] = ()

    def visits(self) -> tuple[Scavenged, ...]:
        return tuple(Scavenged(one.chips, one.since, one.until) for one in self.scavenged)


class SpeedClass(Section):
    """So many learners whose steps take ``factor`` times as long."""

    learners: IslandCount
    factor: Factor = 1.0


class StepsSection(Section):
    """``step_time`` is drawn anew for every step at protocol level; its mean is what the fleet level needs.

    A constant one is spread by ``jitter_ratio`` either way. Not 0 by default: learners that all step in exactly the same
    time keep their phases for ever, which real ones do not.
    """

    step_time: Spread = Constant(1.0)
    jitter_ratio: Ratio = 0.05
    speed_classes: Annotated[tuple[SpeedClass, ...], Field(max_length=SPEED_CLASSES_MAX)] = ()
    tokens_per_step: Number = 1024


class LinksSection(Section):
    """One link a learner, full duplex; ``latency`` is one way.

    ``bits`` are those of a parameter on the wire, each way; absent, they are those of the codec in ``synchroniser.wire``.
    """

    bandwidth: Bandwidth = 5e9
    latency: Seconds = 0.03
    parameters: Number = 12_000_000_000
    bits: Annotated[float, Field(strict=True, ge=0.01, le=1024)] | None = None


class SimulationSpec(Section):
    """The whole. ``level: both`` runs decoupled at protocol level too, on the same capacities."""

    name: Name = "simulation"
    seed: Seed = 0
    duration: PositiveSeconds
    systems: Annotated[tuple[System, ...], Field(min_length=1, max_length=len(ALL_SYSTEMS))] = ALL_SYSTEMS
    level: Literal["fleet", "protocol", "both"] = "fleet"
    fleet: FleetSection | None = None
    steps: StepsSection = StepsSection()
    synchroniser: SynchroniserSection = SynchroniserSection(fragments=24, interval_steps=24)
    links: LinksSection = LinksSection()
    world: Annotated[dict[str, Any], Field(max_length=WORLD_FIELDS_MAX)] | None = None

    @property
    def step_s(self) -> Duration:
        return self.steps.step_time.mean

    @property
    def codec_bits(self) -> float:
        """Bits a parameter of the codec in ``synchroniser.wire``; of the larger, where the two ways differ."""
        wire = self.synchroniser.wire
        return max(bits_of(wire.up), bits_of(wire.down))

    @property
    def wire_bits(self) -> float:
        """Bits a parameter on the wire, each way."""
        return self.codec_bits if self.links.bits is None else self.links.bits

    def speed_factors(self) -> tuple[float, ...]:
        """Of each learner, in order."""
        classes = self.steps.speed_classes
        if not classes:
            return (1.0,) * (self.fleet.learners if self.fleet else 0)
        return tuple(one.factor for one in classes for _ in range(one.learners))


def parse(document: Mapping[str, Any]) -> SimulationSpec:
    """Validate a whole specification. Raises InvalidJobSpec with every problem at once, each with its remedy."""
    problems: list[Problem] = []
    omitted = 0
    spec: SimulationSpec | None = None
    try:
        spec = SimulationSpec.model_validate(dict(document))
        sections: Mapping[str, Any] = {name: getattr(spec, name) for name in SimulationSpec.model_fields}
    except ValidationError as error:
        problems += problems_of(error, unknown=UNKNOWN, model=SimulationSpec)
        omitted = omitted_count(error, SimulationSpec)
        sections = valid_fields(SimulationSpec, document)
    problems += _between_sections(document, sections)
    if problems or spec is None:
        detail = "the simulation cannot be run as specified"
        raise InvalidJobSpec(detail=detail, problems=tuple(problems), omitted_count=omitted)
    return spec


def _between_sections(document: Mapping[str, Any], sections: Mapping[str, Any]) -> Iterator[Problem]:
    """The rules that need more than one field."""
    fleet, world, duration = sections.get("fleet"), sections.get("world"), sections.get("duration")
    if "fleet" not in document and "world" not in document:
        remedy = f"Describe the fleet ({EXAMPLE}), or give the world that `atoll tape fit` wrote."
        yield Problem("fleet", "is missing, and so is world.", remedy)
    if fleet and world:
        yield Problem("world", "stands beside fleet.", "Give one of the two: a fitted world has its own islands.")
    if world:
        try:
            worldfile.parse(world)
        except InvalidJobSpec as error:
            yield from error.problems
    if fleet:
        yield from _fleet_problems(fleet, sections.get("steps"), duration)
    if sync := sections.get("synchroniser"):
        yield from _synchroniser_problems(sync, fleet)
    if sections.get("level") in ("protocol", "both"):
        yield from _protocol_problems(fleet, sections.get("steps"), sections.get("systems"), duration)


def _fleet_problems(fleet: FleetSection, steps: StepsSection | None, duration: Instant | None) -> Iterable[Problem]:
    slices = fleet.chips // fleet.chips_per_slice
    if slices < fleet.learners:
        yield Problem(
            "fleet.chips",
            f"is {fleet.chips}, which makes {slices} slices of {fleet.chips_per_slice} for {fleet.learners} learners.",
            f"Give at least {fleet.learners * fleet.chips_per_slice} chips, or fewer learners or smaller slices.",
        )
    if slices > SLICES_MAX:
        message = (
            f"is {fleet.chips:,}, which makes {slices:,} slices; up to {SLICES_MAX:,} can be simulated one by one."
        )
        yield Problem("fleet.chips", message, "Give fewer chips, or larger slices (chips_per_slice).")
    counted = sum(one.learners for one in steps.speed_classes) if steps else 0
    if counted and counted != fleet.learners:
        remedy = f"Make them add up to {fleet.learners}, or change fleet.learners."
        yield Problem("steps.speed_classes", f"name {counted} learners, the fleet has {fleet.learners}.", remedy)
    for n, extra in enumerate(fleet.scavenged):
        path = f"fleet.scavenged.{n}"
        if extra.until <= extra.since:
            yield Problem(path, "ends before it begins.", "Make until later than from.")
        elif duration is not None and extra.since >= duration:
            yield Problem(path, "begins after the simulation's end.", "Begin earlier, or lengthen duration.")
        if extra.chips < fleet.chips_per_slice:
            remedy = f"Give at least {fleet.chips_per_slice}, one slice."
            yield Problem(f"{path}.chips", f"is {extra.chips}, less than a slice.", remedy)


def _synchroniser_problems(sync: SynchroniserSection, fleet: FleetSection | None) -> Iterable[Problem]:
    if fleet and sync.quorum > fleet.learners:
        remedy = f"Lower it to at most {fleet.learners}, or add learners."
        yield Problem("synchroniser.quorum", f"is {sync.quorum}, but there are {fleet.learners} learners.", remedy)
    if sync.overlap_steps >= sync.interval_steps:
        message = f"is {sync.overlap_steps}, not below interval_steps {sync.interval_steps}."
        remedy = "A fragment must come back before it is due again: lower overlap_steps."
        yield Problem("synchroniser.overlap_steps", message, remedy)
    if sync.adoption == "mix":
        yield Problem("synchroniser.adoption", "is mix, which simulated islands do not know.", "Use rebase or replace.")
    if sync.adoption == "rebase" and sync.staleness_max:
        message = f"is {sync.staleness_max} with adoption rebase, by which a learner offers again what was late."
        yield Problem("synchroniser.staleness_max", message, "Set it to 0: work would be counted twice.")


def _protocol_problems(
    fleet: FleetSection | None, steps: StepsSection | None, systems: tuple[System, ...] | None, duration: Instant | None
) -> Iterable[Problem]:
    if systems is not None and "decoupled" not in systems:
        remedy = "Add decoupled to systems, or set level: fleet."
        yield Problem("level", "asks for the protocol, which only decoupled has.", remedy)
    if fleet and steps and duration is not None and steps.step_time.mean > 0.0:
        count = duration / steps.step_time.mean * fleet.learners
        if count > ISLAND_STEPS_MAX:
            longest = ISLAND_STEPS_MAX * steps.step_time.mean / fleet.learners
            yield Problem(
                "duration",
                f"makes {count:.3g} inner steps of all learners, too many to simulate one by one.",
                f"Lower it to at most {longest:.0f}s, lengthen steps.step_time, or set level: fleet.",
            )
    if steps and steps.step_time.mean <= 0.0:
        yield Problem("steps.step_time", "takes no time.", "Give a step more than 0 seconds.")
