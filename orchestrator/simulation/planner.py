"""What a fleet would reach before anybody pays: goodput, settings, memory, time and money, by closed forms.

A fleet is M islands of h hosts each. An island is a gang: if one of its hosts dies, the island dies, and its place is empty
until a host and its processes are back (``Fleet.outage_s``). k more islands may stand by, which follow Θ and take over.

    λ = h/MTBF                       deaths of an island's hosts a second
    R = return + start + 8·16·N/B    until the island trains again: its host, its processes, its state over its line
    q = 1 − e^(−λR)                  the part of the time in which a gang is away: a further death meanwhile begins R anew
    u = E[min(M, M + k − X)]/M       X ~ Binomial(M + k, q): the part of the M islands that train
    c = (H/2 + w)·T (+ takeover)     lost with each death: what was not merged yet, of which w steps were on their way;
                                     H is the mean over parameters if a mixture's routers are merged more often
    goodput = u·(1 − λc)
    spread² = V·min(1, q/(λ·t)) + n·(c/(M·t))²
                                     in t seconds: V the variance of min(M, M + k − X)/M, n = λMt deaths

H, τ, P and the codec are the least change of the defaults with which a fragment returns in time (``line_advice``).

The data-parallel row is one job of all M·h hosts, which trains only while all are there. Each death costs return and start,
and the work since the last checkpoint at the best interval, √(2·save·Λ) of the time with Λ = Mh/MTBF (Young 1974). Its
all-reduce crosses the same lines.

``tests/simulation/test_planner.py`` compares these forms with the simulated protocol, which has the core's own decisions.
Activations are not part of the memory, and the cost of larger H for the model is not part of the goodput: see the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, expm1, fsum, inf, lgamma, log, log1p, sqrt
from typing import Annotated, Any

from pydantic import Field, ValidationError

from orchestrator.accounting.series import median
from orchestrator.core.vocabulary import Duration
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.simulation.bandwidth import Traffic, exchange_of, utilisation
from orchestrator.simulation.line_advice import (
    INTERVAL_MAX,
    Advice,
    Demand,
    Line,
    SyncSettings,
    advised,
    bits_of,
    least_bits_per_second,
    traffic_of,
)
from orchestrator.simulation.observed import Observed
from orchestrator.simulation.spec import Bandwidth, Number, PositiveSeconds, Seconds
from orchestrator.specification.config import JobSpec
from orchestrator.specification.memory_budget import (
    GRADIENT_BYTES,
    TRAINER_STATE_BYTES,
    island_bytes_per_parameter,
    parameter_count_of,
    router_parameter_count_of,
    shard_bytes_per_parameter,
)
from orchestrator.specification.sections import Section, SynchroniserSection
from orchestrator.specification.validation import problems_of
from orchestrator.system.plain import counted, finite, scaled, three_digits

STATE_BYTES = TRAINER_STATE_BYTES + 4.0
"""Bytes per parameter that a new island receives: parameters, moments and Θ."""
TAKEOVER_S: Duration = 3.0
"""From the death of an island until one that stands by trains in its place."""
SAVE_S: Duration = 30.0
"""What a checkpoint of the data-parallel job takes."""
TOKENS_PER_PARAMETER = 20.0
"""The default budget, of which Hoffmann et al. (arXiv:2203.15556) found that it suits a compute budget best."""
STANDBYS_MAX = 4
MTBF_UNSEEN_S: Duration = 3.0 * 86400.0
"""Assumed of a host of which none died in a shorter time: a job of minutes says nothing of days."""
GOODPUT_MIN = 0.001
"""A fleet below this has no plan."""
LINE = "the line"


class Fleet(Section):
    """Describes what could be bought. Durations are in seconds; ``line`` is in bits per second each way, for one island.

    ``outer_moments`` and ``outer_clips`` are those of a job's outer optimizer, for the memory of the synchroniser.
    """

    parameters: Number
    islands: Annotated[Number, Field(le=4096)]
    hosts: Annotated[Number, Field(le=65_536)] = 1
    mtbf_host: PositiveSeconds
    line: Bandwidth
    step_s: PositiveSeconds
    round_trip: Seconds = 0.06
    host_return: Seconds = 900.0
    start: Seconds = 90.0
    accelerators: Number = 8
    tokens_per_step: Number = 1_048_576
    tokens: Number | None = None
    shards: Number = 1
    outer_moments: int = Field(1, ge=0, le=2)
    outer_clips: bool = False
    price: float | None = Field(None, ge=0.0, le=1e6)

    @property
    def budget(self) -> float:
        return self.tokens or TOKENS_PER_PARAMETER * self.parameters

    @property
    def death_rate(self) -> float:
        """λ"""
        return self.hosts / self.mtbf_host

    @property
    def outage_s(self) -> Duration:
        """R"""
        return self.host_return + self.start + 8.0 * STATE_BYTES * self.parameters / self.line


@dataclass(frozen=True, slots=True)
class Plan:
    """Says what a fleet reaches with so many standbys. ``spread`` is a standard deviation, money in the price's currency.

    Bytes are those of one host, of one accelerator without activations, and of one shard of the synchroniser.
    """

    settings: SyncSettings
    standbys: int
    goodput: float
    spread: float
    seconds: Duration
    money: float | None
    line_use: float
    host_bytes: float
    accelerator_bytes: float
    shard_bytes: float
    synchroniser_bits_per_s: float


@dataclass(frozen=True, slots=True)
class Planned:
    """The best plan, all others from the next best on, what data-parallel would reach, and the advice on ``current``."""

    current: SyncSettings
    best: Plan
    others: tuple[Plan, ...]
    data_parallel: Plan | None
    advice: Advice


def fleet_of(document: Mapping[str, Any]) -> Fleet:
    """Return the fleet of these figures. Raises InvalidJobSpec with all problems, named as options of `atoll plan`."""
    try:
        return Fleet.model_validate(dict(document))
    except ValidationError as error:
        wrong = problems_of(error, unknown="Remove it.", missing="Give it.", model=Fleet)
        problems = tuple(replace(one, path="--" + one.path.replace("_", "-")) for one in wrong)
        raise InvalidJobSpec(detail="the fleet cannot be planned", problems=problems) from None


def of_job(spec: JobSpec) -> tuple[dict[str, Any], SyncSettings]:
    """Return the figures of a job, as far as it has them, and its settings. The largest entry of islands counts for all."""
    largest = max(spec.islands, key=lambda entry: (entry.count, entry.hosts))
    sync = spec.synchroniser
    figures = {
        "parameters": parameter_count_of(spec),
        "islands": spec.island_count,
        "hosts": largest.hosts,
        "accelerators": largest.accelerators or 1,
        "tokens_per_step": spec.batch_size_of(largest) * spec.data.sequence_length,
        "tokens": spec.token_budget,
        "shards": sync.shards,
        "outer_moments": sync.outer_optimizer.moment_count,
        "outer_clips": sync.outer_optimizer.clip_norm is not None,
        "step_s": spec.synthetic.step_s if spec.trainer.is_synthetic else None,
    }
    return {name: value for name, value in figures.items() if value is not None}, SyncSettings.of(
        sync, router_parameter_count_of(spec)
    )


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a fleet, and where it comes from: measured, from the specification, or assumed, in words."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Pace:
    """The measured pace of an island: tokens and seconds of an inner step, and its line's slower direction in bits/s."""

    island: str
    step_s: Duration | None
    tokens_per_step: float | None
    line: float | None


def of_running(spec: JobSpec, paces: Sequence[Pace], seen: Observed) -> tuple[dict[str, Figure], SyncSettings]:
    """Return the figures of a job that runs or has run: what it measured, else what its specification says.

    What neither has is missing, or has the default of ``Fleet``. The slowest island's line counts. A line is measured while
    payloads travel, so short or small ones make it look thinner than it is.
    """
    specified, settings = of_job(spec)
    settings = replace(settings, router_parameters=settings.router_parameters or float(seen.router_parameter_count))
    figures = {name: Figure(value, "the specification") for name, value in specified.items()}
    if "parameters" not in figures and seen.parameter_count:
        figures["parameters"] = Figure(seen.parameter_count, "measured")
    paced = [pace.step_s for pace in paces if pace.step_s]
    if steps := paced or seen.step_times():  # an ended job has no pace any more
        figures["step_s"] = Figure(median(steps), f"measured, the median of {counted(len(steps), 'island')}")
    if tokens := [pace.tokens_per_step for pace in paces if pace.tokens_per_step]:
        figures["tokens_per_step"] = Figure(round(median(tokens)), "measured")
    if lines := [(pace.line, pace.island) for pace in paces if pace.line]:
        slowest, island = min(lines)
        figures["line"] = Figure(slowest, f"measured, the slower way of {island}, the slowest of {len(lines)}")
    return figures | _of_deaths(specified.get("hosts", 1), seen), settings


def _of_deaths(hosts: int, seen: Observed) -> dict[str, Figure]:
    """Return how often hosts died on the tape, and how long it took to replace them and to start."""
    figures = {}
    crashes = sorted((at, island) for island, at, _ in seen.crashes)
    lives = [life for life in seen.lives.values() if life.placed_at is not None]
    there_s = hosts * fsum(max(0.0, min(life.ended_at, seen.until) - (life.placed_at or 0.0)) for life in lives)
    if there_s > 0.0:
        deaths = f"{counted(len(crashes), 'death')} in {there_s / 3600.0:.3g} host-hours of its tape"
        if crashes:
            figures["mtbf_host"] = Figure(there_s / len(crashes), f"measured, {deaths}")
        else:
            figures["mtbf_host"] = Figure(max(there_s, MTBF_UNSEEN_S), f"assumed, {deaths}")
    starts = [
        life.training_ordered_at - (life.placed_at or 0.0) for life in lives if life.training_ordered_at is not None
    ]
    if starts:
        figures["start"] = Figure(median(starts), f"measured, the median of {counted(len(starts), 'start')}")
    returns = []
    for at, island in crashes:
        later = (life.placed_at for (name, _), life in seen.lives.items() if name == island and life.placed_at)
        returns += [min(placed - at for placed in after)] if (after := [one for one in later if one > at]) else []
    if returns:
        figures["host_return"] = Figure(median(returns), f"measured, the median of {counted(len(returns), 'return')}")
    return figures


def of_groups(nodes: Sequence[tuple[str, int, int]]) -> dict[str, Figure]:
    """Return the figures of node groups without a job: each an island. ``nodes`` are (name, nodes, accelerators).

    The smallest group counts for all. Raises ConfigurationError if there is no group with nodes.
    """
    there = [(count, accelerators) for _, count, accelerators in nodes if count]
    if not there:
        raise ConfigurationError(
            detail="No node group of the service has a node. Start one, or describe the fleet by options."
        )
    hosts, accelerators = min(there)
    source = f"the service's {counted(len(there), 'node group')}"
    return {
        "islands": Figure(len(there), source),
        "hosts": Figure(hosts, f"{source}, the smallest of them"),
        "accelerators": Figure(
            max(1, accelerators // hosts), source if accelerators else f"{source}, which have none: 1"
        ),
    }


def planned(fleet: Fleet, current: SyncSettings | None = None) -> Planned:
    """Return plans by what they cost, or by time if there is no price. Raises ConfigurationError if the line is too thin."""
    current = current or SyncSettings.of(SynchroniserSection.model_construct())
    line, demand = _line_and_demand(fleet)
    advice = advised([line], demand, current)
    if advice.settings is None:
        needed, least = least_bits_per_second(line, demand, current)
        if needed == inf:
            raise ConfigurationError(
                detail=f"A round trip of {fleet.round_trip:.3g} s is too long for steps of {fleet.step_s:.3g} s: no "
                f"fragment returns in time with H up to {INTERVAL_MAX:,}, whatever the line. Give a shorter --round-trip "
                "or longer steps."
            )
        raise ConfigurationError(
            detail=f"The line of {scaled(fleet.line, 'bps')} is too thin by {three_digits(needed / fleet.line)} times: at "
            f"least {scaled(needed, 'bps')} are needed, and that with H = {least.interval_steps:,}, P = {least.fragments}, "
            f"τ = {least.overlap_steps:,} and {least.codec}. Give a faster line, fewer parameters or longer steps."
        )
    plans = [_plan(fleet, advice.settings, standbys) for standbys in range(min(STANDBYS_MAX, fleet.islands) + 1)]
    best, *others = sorted(plans, key=lambda plan: (plan.seconds if plan.money is None else plan.money, plan.standbys))
    if best.goodput < GOODPUT_MIN:
        raise ConfigurationError(
            detail=f"An island of this fleet dies every {three_digits(1.0 / fleet.death_rate)} s and trains again after "
            f"{three_digits(fleet.outage_s)} s. Its goodput is {best.goodput:.2g}, so it makes no progress. Give islands of "
            "fewer hosts, a longer --mtbf-host, or a shorter --host-return and --start."
        )
    return Planned(current, best, tuple(others), _data_parallel(fleet), advice)


def goodput_of(fleet: Fleet, settings: SyncSettings, standbys: int = 0) -> tuple[float, Callable[[Duration], float]]:
    """Return the goodput, and a function of a job's time that returns its standard deviation."""
    rate, islands, gangs = fleet.death_rate, fleet.islands, fleet.islands + standbys
    lost_steps = settings.mean_interval_steps(fleet.parameters) / 2 + _way_steps(fleet, settings)
    lost_s = lost_steps * fleet.step_s + (TAKEOVER_S if standbys else 0.0)
    away = -expm1(-rate * fleet.outage_s)
    chances = _binomial(gangs, away)
    there = [min(islands, gangs - x) / islands for x in range(gangs + 1)]
    mean = fsum(part * chance for part, chance in zip(there, chances, strict=True))
    variance = fsum((part - mean) ** 2 * chance for part, chance in zip(there, chances, strict=True))
    goodput = mean * max(0.0, 1.0 - rate * lost_s)

    def spread(seconds: Duration) -> float:
        of_deaths = rate * lost_s**2 / (islands * seconds)
        of_absence = variance * min(1.0, away / (rate * seconds))  # a short job sees one state, not many
        return min(sqrt(of_absence + of_deaths), sqrt(goodput * (1.0 - goodput)))

    return goodput, spread


def _binomial(count: int, chance: float) -> list[float]:
    """Return the chance of each number of successes among ``count``."""
    if not 0.0 < chance < 1.0:
        return [float(x == count * round(chance)) for x in range(count + 1)]
    whole = lgamma(count + 1)
    ways = (whole - lgamma(x + 1) - lgamma(count - x + 1) for x in range(count + 1))
    return [exp(way + x * log(chance) + (count - x) * log1p(-chance)) for x, way in enumerate(ways)]


def _plan(fleet: Fleet, settings: SyncSettings, standbys: int) -> Plan:
    goodput, spread = goodput_of(fleet, settings, standbys)
    seconds = _seconds(fleet, goodput)
    n, codec = float(fleet.parameters), settings.codec
    line, demand = _line_and_demand(fleet)
    exchange = exchange_of("decoupled", traffic_of(line, demand, settings))
    bits_per_s = exchange.bits / exchange.gap
    shard = shard_bytes_per_parameter(
        fleet.islands,
        settings.schedule.shared_count,
        codec,
        codec,
        moments=fleet.outer_moments,
        clips=fleet.outer_clips,
    )
    return Plan(
        settings,
        standbys,
        goodput,
        spread(seconds),
        seconds,
        _money(fleet, fleet.islands + standbys, seconds),
        bits_per_s / fleet.line,
        n * island_bytes_per_parameter(on_cpu=False, saves=True) / fleet.hosts,
        n * (TRAINER_STATE_BYTES + GRADIENT_BYTES) / fleet.hosts / fleet.accelerators,
        n * shard / fleet.shards,
        bits_per_s * (fleet.islands + standbys),
    )


def _data_parallel(fleet: Fleet) -> Plan | None:
    """Return what one job of all hosts reaches, or None if its all-reduce does not get over the line."""
    traffic = Traffic(float(fleet.parameters), fleet.step_s, fleet.islands, round_trip_s=fleet.round_trip)
    stepping = utilisation(exchange_of("data-parallel", traffic), fleet.line) if fleet.islands > 1 else 1.0
    rate = fleet.islands * fleet.death_rate
    outage = fleet.host_return + fleet.start
    goodput = stepping * max(0.0, 1.0 - sqrt(2.0 * SAVE_S * rate)) * exp(-rate * outage)
    if goodput <= 0.0:
        return None
    seconds = _seconds(fleet, goodput)
    spread = min(sqrt(rate / seconds) * outage * goodput, sqrt(goodput * (1.0 - goodput)))
    settings = SyncSettings(1, 0, 1, "bfloat16")
    return replace(
        _plan(fleet, settings, 0),
        goodput=goodput,
        spread=spread,
        seconds=seconds,
        money=_money(fleet, fleet.islands, seconds),
    )


def _line_and_demand(fleet: Fleet) -> tuple[Line, Demand]:
    return Line(LINE, fleet.round_trip, fleet.line), Demand(float(fleet.parameters), fleet.step_s, {LINE: 1})


def _seconds(fleet: Fleet, goodput: float) -> Duration:
    """Return the time to the budget."""
    return fleet.budget * fleet.step_s / (fleet.islands * fleet.tokens_per_step * goodput) if goodput else inf


def _money(fleet: Fleet, gangs: int, seconds: Duration) -> float | None:
    if fleet.price is None:
        return None
    return gangs * fleet.hosts * fleet.accelerators * seconds / 3600.0 * fleet.price


def _way_steps(fleet: Fleet, settings: SyncSettings) -> float:
    """Return how long a fragment travels one way, in steps."""
    bits = settings.fragment_parameters(fleet.parameters) * bits_of(settings.codec)
    return (fleet.round_trip / 2 + bits / fleet.line) / fleet.step_s


def rows(outcome: Planned) -> Iterator[tuple[str, Plan]]:
    """Yield the name and figures of each row, the best first."""
    for plan in (outcome.best, *outcome.others):
        yield (f"{plan.standbys} standby{'' if plan.standbys == 1 else 's'}", plan)
    if outcome.data_parallel is not None:
        yield ("data-parallel", outcome.data_parallel)


def plain(outcome: Planned) -> list[dict[str, Any]]:
    """Return the rows as plain data. A row that never reaches its budget has None as its time and money."""
    return [{"row": name, **finite(asdict(plan))} for name, plan in rows(outcome)]
