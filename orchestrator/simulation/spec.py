"""The specification of a simulation: validated once, frozen, with all problems reported together.

    fleet          how many chips there are, and how they fail, stall and return
    steps          how long an inner step takes, and on how many tokens
    synchroniser   the section of a job specification
    links          the size of the model and the lines over which it is sent
    world          instead of all these: a fitted world, as `atoll tape fit` writes it

Durations are numbers of seconds, or numbers with a unit (``distributions``).
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
from orchestrator.specification.policy_source import schedule_problems
from orchestrator.specification.sections import PriceSection, Section, SynchroniserSection
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
"""The limit on inner steps of all learners at protocol level. With three events each, that is a minute of computing."""
EXAMPLE = "deploy/configs/simulate.yaml"
UNKNOWN = f"Remove it, or correct its spelling; {EXAMPLE} is a complete example."
SECONDS_MIN = 1e-9
BANDWIDTH_MAX = 1e18
"""Bits per second: a thousand million times a fast network card."""
NUMBER_MAX = 10**15
"""The limit on chips, parameters and tokens per step: a thousand times the largest today, and exact as a float."""
SPEED_CLASSES_MAX = 1000
SLICES_MAX = 10**7
"""A thousand times the largest fleet today."""
VISITS_MAX = 1000
"""The limit on scavenged capacities. Each costs the simulation as much as a fleet."""
WORLD_FIELDS_MAX = 100
"""``worldfile`` checks the fields themselves."""
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
    """Parse bits per second, or a number with a unit."""
    problem = f"{brief(value)} is not a bandwidth. Write bits per second, 1 or more, or use a unit: 800Mbps, 5Gbps."
    if isinstance(value, str) and len(value) <= distributions.TEXT_CHARACTERS_MAX:
        digits = value.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/")
        unit = value.strip()[len(digits) :]
        if unit.endswith(("Bps", "B/s")):
            problem = (
                f"{brief(value)} are bytes per second. Write bits per second, eight times as many: 800Mbps, 5Gbps."
            )
            raise PydanticCustomError("bandwidth", "{problem}", {"problem": problem})
        unit = unit.lower().replace("bit/s", "bps").replace("b/s", "bps")
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
"""These types have parsers, which also check the limits (``DURATION_MAX_S``, ``BANDWIDTH_MAX``, ``NUMBER_MAX``)."""


def _whole(value: Any) -> int:
    """Parse a count, which may be written 12e9 or 1_200_000. YAML reads some of these as text."""
    try:
        short = not isinstance(value, bool | str) or (isinstance(value, str) and len(value) <= 64)
        number = float(value) if short else float("nan")
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not (1.0 <= number <= NUMBER_MAX and number.is_integer()):
        problem = f"{brief(value)} is not a count. Write a whole number from 1 to {NUMBER_MAX:.0e}."
        raise PydanticCustomError("number", "{problem}", {"problem": problem})
    return int(number)


class Visit(Section):
    """Chips that are available from one instant until another, in addition to the fleet's own."""

    model_config = ConfigDict(populate_by_name=True)
    chips: Number
    since: Seconds = Field(0.0, alias="from")
    until: PositiveSeconds


class FleetSection(Section):
    """Chips in slices. A failing chip takes its slice out of service. ``calibration`` fitted the defaults of the stalls.

    ``price`` is of a chip, for an hour. A slice that is away costs nothing, unless it is reserved.
    """

    chips: Number
    chips_per_slice: Number = CHIPS_PER_SLICE
    learners: IslandCount = 8
    mtbi_chip: PositiveSeconds = distributions.UNITS["y"]
    return_time: Spread = Exponential(RETURN_S)
    stall_down: Spread = Constant(STALL_S)
    stall_up: Spread = Constant(STALL_S)
    restart: Spread = Constant(RESTART_S)
    scavenged: Annotated[tuple[Visit, ...], Field(max_length=VISITS_MAX)] = ()
    price: PriceSection | None = None

    def visits(self) -> tuple[Scavenged, ...]:
        return tuple(Scavenged(one.chips, one.since, one.until) for one in self.scavenged)


class SpeedClass(Section):
    """A number of learners whose steps take ``factor`` times as long."""

    learners: IslandCount
    factor: Factor = 1.0


class StepsSection(Section):
    """The inner steps. The protocol level draws ``step_time`` for every step; the fleet level only uses its mean.

    A constant step time varies by ``jitter_ratio`` either way. The default is not 0 because learners with exactly equal
    step times would keep their phases forever, which real ones do not.
    """

    step_time: Spread = Constant(1.0)
    jitter_ratio: Ratio = 0.05
    speed_classes: Annotated[tuple[SpeedClass, ...], Field(max_length=SPEED_CLASSES_MAX)] = ()
    tokens_per_step: Number = 1024


class LinksSection(Section):
    """One full-duplex link per learner. ``latency`` is one way.

    ``bits`` is the size of a parameter on the wire, each way. By default it follows from the codec in ``synchroniser.wire``.
    """

    bandwidth: Bandwidth = 5e9
    latency: Seconds = 0.03
    parameters: Number = 12_000_000_000
    bits: Annotated[float, Field(strict=True, ge=0.01, le=1024)] | None = None


class SimulationSpec(Section):
    """The whole specification. ``level: both`` also runs decoupled at protocol level, on the same capacities."""

    name: Name = "simulation"
    seed: Seed = 0
    duration: PositiveSeconds
    systems: Annotated[tuple[System, ...], Field(min_length=1, max_length=len(ALL_SYSTEMS))] = ALL_SYSTEMS
    level: Literal["fleet", "protocol", "both"] = "fleet"
    fleet: FleetSection | None = None
    steps: StepsSection = StepsSection.model_construct()
    synchroniser: SynchroniserSection = SynchroniserSection(fragments=24, interval_steps=24)
    links: LinksSection = LinksSection.model_construct()
    world: Annotated[dict[str, Any], Field(max_length=WORLD_FIELDS_MAX)] | None = None

    @property
    def step_s(self) -> Duration:
        return self.steps.step_time.mean

    @property
    def codec_bits(self) -> float:
        """Bits per parameter of the codec in ``synchroniser.wire``: the larger, if the directions differ."""
        wire = self.synchroniser.wire
        return max(bits_of(wire.up), bits_of(wire.down))

    @property
    def wire_bits(self) -> float:
        """Bits per parameter on the wire, each way."""
        return self.codec_bits if self.links.bits is None else self.links.bits

    def speed_factors(self) -> tuple[float, ...]:
        """Return the step time factor of each learner, in order."""
        classes = self.steps.speed_classes
        if not classes:
            return (1.0,) * (self.fleet.learners if self.fleet else 0)
        return tuple(one.factor for one in classes for _ in range(one.learners))


def parse(document: Mapping[str, Any]) -> SimulationSpec:
    """Validate a whole specification. Raises InvalidJobSpec with all problems at once, each with its remedy."""
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
        detail = "the simulation cannot run as specified"
        raise InvalidJobSpec(detail=detail, problems=tuple(problems), omitted_count=omitted)
    return spec


def _between_sections(document: Mapping[str, Any], sections: Mapping[str, Any]) -> Iterator[Problem]:
    """Check the rules that need more than one field."""
    fleet, world, duration = sections.get("fleet"), sections.get("world"), sections.get("duration")
    if "fleet" not in document and "world" not in document:
        remedy = f"Describe the fleet ({EXAMPLE}), or give a world that `atoll tape fit` wrote."
        yield Problem("fleet", "is missing, and so is world.", remedy)
    if fleet and world:
        yield Problem("world", "is given together with fleet.", "Give only one: a fitted world has its own islands.")
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
    if fleet.price is not None and fleet.price.chip_hour is None:
        message = f"is {fleet.price.node_hour:g}, but a simulated fleet has chips and no nodes."
        yield Problem("fleet.price.node_hour", message, "Give fleet.price.chip_hour.")
    slices = fleet.chips // fleet.chips_per_slice
    if slices < fleet.learners:
        yield Problem(
            "fleet.chips",
            f"is {fleet.chips}, only {slices} slices of {fleet.chips_per_slice} chips for {fleet.learners} learners.",
            f"Give at least {fleet.learners * fleet.chips_per_slice} chips, fewer learners, or smaller slices.",
        )
    if slices > SLICES_MAX:
        message = f"is {fleet.chips:,}, which makes {slices:,} slices. At most {SLICES_MAX:,} can be simulated."
        yield Problem("fleet.chips", message, "Give fewer chips, or larger slices (chips_per_slice).")
    counted = sum(one.learners for one in steps.speed_classes) if steps else 0
    if counted and counted != fleet.learners:
        remedy = f"Make them add up to {fleet.learners}, or change fleet.learners."
        yield Problem("steps.speed_classes", f"have {counted} learners, but the fleet has {fleet.learners}.", remedy)
    for n, extra in enumerate(fleet.scavenged):
        path = f"fleet.scavenged.{n}"
        if extra.until <= extra.since:
            yield Problem(path, "ends before it begins.", "Set until later than from.")
        elif duration is not None and extra.since >= duration:
            yield Problem(path, "begins after the end of the simulation.", "Set from earlier, or lengthen duration.")
        if extra.chips < fleet.chips_per_slice:
            remedy = f"Give at least {fleet.chips_per_slice} chips, one slice."
            yield Problem(f"{path}.chips", f"is {extra.chips}, less than one slice.", remedy)


def _synchroniser_problems(sync: SynchroniserSection, fleet: FleetSection | None) -> Iterable[Problem]:
    if fleet and sync.quorum > fleet.learners:
        remedy = f"Lower it to at most {fleet.learners}, or add learners."
        yield Problem("synchroniser.quorum", f"is {sync.quorum}, but the fleet has {fleet.learners} learners.", remedy)
    yield from schedule_problems(sync.schedule, sync.overlap_steps, "synchroniser.")
    if sync.routers_apart:
        message = f"is {sync.router_interval_steps}, but a simulated fleet has no model, and so no routers."
        yield Problem("synchroniser.router_interval_steps", message, "Leave it out: routers are few of the parameters.")
    if sync.adoption == "mix":
        message = "is mix, which simulated islands do not support."
        yield Problem("synchroniser.adoption", message, "Use rebase or replace.")
    if sync.adoption == "rebase" and sync.staleness_max:
        message = f"is {sync.staleness_max} with adoption rebase. Late work is offered again, so it would count twice."
        yield Problem("synchroniser.staleness_max", message, "Set it to 0.")


def _protocol_problems(
    fleet: FleetSection | None, steps: StepsSection | None, systems: tuple[System, ...] | None, duration: Instant | None
) -> Iterable[Problem]:
    if systems is not None and "decoupled" not in systems:
        remedy = "Add decoupled to systems, or set level: fleet."
        yield Problem("level", "includes the protocol level, which only decoupled has.", remedy)
    if fleet and steps and duration is not None and steps.step_time.mean > 0.0:
        count = duration / steps.step_time.mean * fleet.learners
        if count > ISLAND_STEPS_MAX:
            longest = ISLAND_STEPS_MAX * steps.step_time.mean / fleet.learners
            yield Problem(
                "duration",
                f"makes {count:.3g} inner steps of all learners, too many to simulate one by one.",
                f"Set it to {longest:.0f}s or less, lengthen steps.step_time, or set level: fleet.",
            )
    if steps and steps.step_time.mean <= 0.0:
        yield Problem("steps.step_time", "is 0.", "Set it to more than 0 seconds.")
