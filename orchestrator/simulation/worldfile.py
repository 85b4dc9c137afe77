"""A fitted world as a file that people can read and change: ``world.yaml``.

    world:
      job, until, notes
      policy       the core's settings                islands   speeds, recorded starts, paces, capacities
      faults       who, what, when, how long          latencies, chances, and what else the world is like

What is written reads back as the same world. Beside ``world`` stand ``name``, ``duration`` and the like, so that the file is
also what ``atoll simulate`` takes. Every problem of a file is reported at once, with its remedy. Refuses to know: disks.

The sections of a world file: every field with its unit, its default and its range. ``worldfile`` reads and writes them.

What is right within one section is said here, in types; what needs more than one is ``worldfile``'s business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from math import inf, isfinite
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, PlainValidator, StrictBool, ValidationError
from pydantic_core import PydanticCustomError

from orchestrator.core.vocabulary import Incarnation, IslandId, IslandPlan, JobPolicy, NodeGroupId, Price, Schedule
from orchestrator.errors import ConfigurationError, InvalidJobSpec, Problem
from orchestrator.simulation import distributions
from orchestrator.simulation.distributions import Constant, Distribution
from orchestrator.simulation.fit import FittedWorld
from orchestrator.simulation.plan import (
    ENDLESS_TOKENS,
    RESTARTS_MAX,
    Capacity,
    Fault,
    FaultKind,
    IncarnationStart,
    Latency,
    Pace,
    WorldPlan,
)
from orchestrator.specification import documents, policy_source
from orchestrator.specification.bounds import (
    ISLANDS_MAX,
    ByteCount,
    BytesPerSecond,
    Currency,
    IncarnationCount,
    IslandCount,
    Money,
    Ratio,
    RatioBelowOne,
    Remark,
    Section,
    TokenCount,
    VirtualSeconds,
    VirtualSecondsAboveZero,
    Word,
    WordOrNone,
)
from orchestrator.specification.config import JobSpec
from orchestrator.specification.policy_source import instance_of, schedule_problems, section_of
from orchestrator.specification.validation import omitted_count, problems_of
from orchestrator.system.plain import some_of


def _distribution(value: Any) -> Distribution:
    try:
        return distributions.parse(value)
    except ConfigurationError as error:
        raise PydanticCustomError("duration", "{said}", {"said": str(error)}) from error


Spread = Annotated[Distribution, PlainValidator(_distribution)]

ENTRIES_MAX = 1_000_000
"""Samples, paces, lives and faults that a tape showed: what a file of ``documents.FILE`` has room for."""
NOTES_MAX = 1000


POLICY_BOUNDS: Mapping[str, Any] = {
    "token_budget": Annotated[int, Field(strict=True, ge=1, le=ENDLESS_TOKENS)],
    "restarts_max": Annotated[int, Field(strict=True, ge=0, le=RESTARTS_MAX)],
    "evaluation.sequences": Annotated[int, Field(strict=True, ge=0, le=10**6)],  # 0 on tapes of earlier builds
    "moving_average_decay": RatioBelowOne,
}
"""Ranges of the policy's fields where tapes, also those of simulations, have more than the specification allows."""


def _policy_bounds(path: str) -> Any:
    if path in POLICY_BOUNDS:
        return POLICY_BOUNDS[path]
    return policy_source.bounds_of(path, JobSpec)


def policy_part(policy: type[Any]) -> type[Section]:
    """Return the section of a policy: its fields but the places, which have sections of their own.

    The fields with a default are those that tapes of earlier builds lack.
    """
    return section_of(policy, _policy_bounds, omit=policy_source.PLACES)


if TYPE_CHECKING:
    PolicyPart = JobPolicy
else:
    PolicyPart = policy_part(JobPolicy)


class LifePart(Section):
    """``plan.IncarnationStart`` of one incarnation of the island it stands under."""

    incarnation: IncarnationCount
    place_s: VirtualSeconds | None = None
    placement_fails: StrictBool = False
    start_s: VirtualSeconds | None = None
    transfer_s: VirtualSeconds | None = None
    begin_s: VirtualSeconds | None = None


class PricePart(Section):
    """``Price``: of all hosts of the island."""

    per_hour: Money
    currency: Currency = "USD"
    kind: Literal["on_demand", "spot", "reserved"] = "on_demand"


class PlacePart(Section):
    """``IslandPlan``: of a standby, all there is to say."""

    island: Word
    node_group: Word
    region: WordOrNone
    accelerator_count: IslandCount = 1
    price: PricePart | None = None


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
    absence_s: Spread | None = None
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
    absent: Ratio = 0.0
    states_left: Ratio = 0.0
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
    parameter_count: Annotated[int, Field(strict=True, ge=1, le=2**53)] = 1000
    router_parameter_count: Annotated[int, Field(strict=True, ge=0, le=2**53)] = 0
    latencies: LatenciesPart
    chances: ChancesPart = ChancesPart.model_construct()
    faults: Annotated[tuple[FaultPart, ...], Field(max_length=ENTRIES_MAX)] = ()
    islands: Annotated[tuple[IslandPart, ...], Field(min_length=1, max_length=ISLANDS_MAX)]
    standbys: Annotated[tuple[PlacePart, ...], Field(max_length=ISLANDS_MAX)] = ()


DETAIL = "this world cannot be simulated"
UNKNOWN = "Remove it, or correct its spelling."
MISSING = "Add it, or fit the world again with `atoll tape fit`."
ROOM = 2.0
"""The file's ``duration`` is so many times the tape's: the job ends by its budget, under whatever policy."""
ROOM_WITHOUT_END_S = 3600.0


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def dump(world: FittedWorld) -> str:
    """The file's text: what it assumes as comments, then the world."""
    plan, policy = world.plan, world.policy
    settings = {name: value for name, value in asdict(policy).items() if name not in policy_source.PLACES}
    ends = [pace[-1].until for pace in plan.paces if pace]
    length = max([*ends, *(fault.at for fault in plan.faults), 0.0]) if world.until == inf else world.until
    latencies = {name: getattr(plan, name) for name in LatenciesPart.model_fields}
    document = {
        "name": "world",
        "duration": round(length * ROOM, 3) or ROOM_WITHOUT_END_S,
        "systems": ["decoupled"],
        "level": "protocol",
        "world": {
            "job": world.job,
            **({} if world.until == inf else {"until": world.until}),
            "notes": list(world.notes),
            "policy": settings,
            "tokens_per_step": plan.tokens_per_step,
            "step_jitter_ratio": plan.step_jitter_ratio,
            "adoption": plan.adoption,
            "median_over": plan.median_over,
            "report_every_s": plan.report_every_s,
            "silence_s": plan.silence_s,
            "seed_s": plan.seed_s,
            **({"calm_at": plan.calm_at} if isfinite(plan.calm_at) else {}),
            "payload_bytes": plan.payload_bytes,
            **(_sizes(plan) if plan.router_parameter_count else {}),
            "chances": {name: getattr(plan, name) for name in ChancesPart.model_fields},
            "faults": [{**asdict(fault), "kind": fault.kind.value} for fault in plan.faults],
            "latencies": {name: _plain(latency) for name, latency in latencies.items() if latency is not None},
            "islands": [_island(world, n) for n in range(len(policy.islands))],
            **({"standbys": [_place(standby) for standby in policy.standbys]} if policy.standbys else {}),
        },
    }
    head = [
        f"# The world of {world.job}'s tape, fitted by `atoll tape fit`; `atoll simulate` runs it. Seconds throughout."
    ]
    head += [f"# Assumed: {note}." for note in world.notes]
    text = documents.dump(document, default_flow_style=None, width=110, allow_unicode=True)
    return "\n".join([*head, text])


def _sizes(plan: WorldPlan) -> dict[str, int]:
    return {"parameter_count": plan.parameter_count, "router_parameter_count": plan.router_parameter_count}


def _plain(latency: Latency) -> Any:
    if not isinstance(latency, tuple):
        return latency.plain()
    return {"uniform": list(latency)} if latency[1] > 0.0 else 0.0


def _place(plan: IslandPlan) -> dict[str, Any]:
    return {name: value for name, value in asdict(plan).items() if value is not None}


def _island(world: FittedWorld, n: int) -> dict[str, Any]:
    plan, about = world.plan, _place(world.policy.islands[n])
    name = about["island"]
    about["step_s"] = plan.step_s[n]
    if plan.pause_s:
        about["pause_s"] = plan.pause_s[n]
    if plan.bandwidth_bytes_per_s and isfinite(plan.bandwidth_bytes_per_s[n]):
        about["bandwidth_bytes_per_s"] = plan.bandwidth_bytes_per_s[n]
    lives = [{k: v for k, v in asdict(life).items() if k != "island"} for life in plan.lives if life.island == name]
    about["lives"] = [{k: v for k, v in life.items() if v is not None and v is not False} for life in lives]
    about["capacity"] = [[change.at, change.ratio] for change in plan.capacity if change.island == name]
    if plan.step_samples:
        about["step_samples"] = list(plan.step_samples[n])
    if plan.paces:
        about["paces"] = [[pace.since, pace.until, pace.step_s, pace.pause_s] for pace in plan.paces[n]]
    return about


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse(data: Mapping[str, Any]) -> FittedWorld:
    """The world of what stands under ``world``. Raises InvalidJobSpec with every problem at once, each with its remedy."""
    try:
        part = WorldPart.model_validate(dict(data))
    except ValidationError as error:
        problems = problems_of(error, unknown=UNKNOWN, missing=MISSING, under="world", model=WorldPart)
        raise InvalidJobSpec(
            detail=DETAIL, problems=tuple(problems), omitted_count=omitted_count(error, WorldPart)
        ) from error
    if between := tuple(_between(part)):
        raise InvalidJobSpec(detail=DETAIL, problems=between)
    return _world(part)


def _between(part: WorldPart) -> Iterator[Problem]:
    """The rules that need more than one field."""
    names = Counter(island.island for island in (*part.islands, *part.standbys))
    for name in sorted(name for name, uses in names.items() if uses > 1):
        yield Problem("world.islands", f"the name {name!r} is used twice.", "Give each island its own name.")
    for n, fault in enumerate(part.faults):
        if fault.island not in names:
            remedy = f"Name one of {some_of(names)}."
            yield Problem(f"world.faults.{n}.island", f"{fault.island!r} is not an island of this world.", remedy)
    if part.policy.quorum > (most := len(part.islands)):
        message = f"is {part.policy.quorum}, but the world has {most} islands."
        yield Problem("world.policy.quorum", message, f"Lower it to at most {most}.")
    policy = part.policy
    schedule = Schedule(policy.fragment_count, policy.sync_interval_steps, policy.router_interval_steps)
    yield from schedule_problems(schedule, policy.overlap_steps, "world.policy.")
    if part.router_parameter_count >= part.parameter_count:
        message = f"is {part.router_parameter_count:,}, but Θ has {part.parameter_count:,} parameters in all."
        yield Problem("world.router_parameter_count", message, "Lower it, or raise world.parameter_count.")
    if part.adoption == "rebase" and part.policy.staleness_max:
        message = f"is {part.policy.staleness_max} with adoption rebase, by which late work is kept and offered again."
        yield Problem("world.policy.staleness_max", message, "Set it to 0: work would be counted twice.")
    for n, island in enumerate(part.islands):
        for k, (before, after) in enumerate(zip(island.paces, island.paces[1:], strict=False)):
            if after[0] < before[0]:
                remedy = "Sort the rows by their first number."
                yield Problem(f"world.islands.{n}.paces.{k + 1}", f"begins before the row above ({after[0]}).", remedy)


def _world(part: WorldPart) -> FittedWorld:
    parts = part.islands
    islands, standbys = (tuple(map(_plan_of, places)) for places in (parts, part.standbys))
    policy = instance_of(JobPolicy, cast(Section, part.policy), islands=islands, standbys=standbys)
    lives = [
        IncarnationStart(IslandId(i.island), Incarnation(life.incarnation), **life.model_dump(exclude={"incarnation"}))
        for i in parts
        for life in i.lives
    ]
    changes = [Capacity(at, IslandId(i.island), ratio) for i in parts for at, ratio in i.capacity]
    same = {name: getattr(part, name) for name in _SAME}
    plan = WorldPlan(
        **same,
        **part.chances.model_dump(),
        **{name: getattr(part.latencies, name) for name in LatenciesPart.model_fields},
        calm_at=inf if part.calm_at is None else part.calm_at,
        step_s=tuple(i.step_s for i in parts),
        pause_s=_all_or_none(tuple(i.pause_s for i in parts), 0.0),
        bandwidth_bytes_per_s=_all_or_none(tuple(i.bandwidth_bytes_per_s or inf for i in parts), inf),
        faults=tuple(Fault(**{**dict(fault), "island": IslandId(fault.island)}) for fault in part.faults),
        lives=tuple(lives),
        capacity=tuple(sorted(changes, key=lambda change: (change.at, change.island))),
        step_samples=_all_or_none(tuple(i.step_samples for i in parts), ()),
        paces=_all_or_none(tuple(tuple(Pace(*row) for row in i.paces) for i in parts), ()),
    )
    return FittedWorld(part.job, policy, plan, inf if part.until is None else part.until, part.notes)


def _plan_of(part: PlacePart) -> IslandPlan:
    price = None if part.price is None else Price(**dict(part.price))
    return IslandPlan(IslandId(part.island), NodeGroupId(part.node_group), part.region, part.accelerator_count, price)


_SAME = sorted({field.name for field in fields(WorldPlan)} & WorldPart.model_fields.keys() - {"faults", "calm_at"})


def _all_or_none(values: tuple[Any, ...], default: Any) -> tuple[Any, ...]:
    """Return the values as a plan has them: empty if all are the default."""
    return values if any(value != default for value in values) else ()
