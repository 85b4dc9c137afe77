"""A chaos plan: which faults are injected into which islands and when, its blast radius, and what must hold all the same.

    faults        a kind (``core.faults``), a target, and one of at, every, poisson
    blast_radius  keep: the number of islands that keep training, whatever the plan says
    abort         figures of the live job that end the plan at once
    objectives    figures of the job's report that make it pass

Every instant is in seconds since the plan began, which is when more islands train than the blast radius keeps. This module
checks a plan by itself and against a fleet, and reports every problem at once. It knows neither files nor clocks.

An objective or a condition to abort is a figure against a limit, as in ``survivor_gap_max_s < 1``, ``goodput_ratio >= 85 %``
or ``recovery_s.total < 1min``. A comparison with a figure that has no value does not hold. Where figures come from is the
caller's concern.

Which kinds of fault a plan can have, and the fields of each, is derived from ``core.faults``.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from math import fsum
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from orchestrator.accounting import report
from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core.faults import CLASSES, FLAT_NAMES, Fault, Kind, fault_of, flat
from orchestrator.core.vocabulary import Duration, IslandId, IslandPlan
from orchestrator.errors import ConfigurationError, InvalidJobSpec, Problem
from orchestrator.simulation.distributions import duration
from orchestrator.simulation.plan import sample_policy
from orchestrator.simulation.spec import PositiveSeconds, Seconds
from orchestrator.specification.bounds import BytesPerSecond, HostNumber, IslandCount, Name, Seed, Word
from orchestrator.specification.sections import Section
from orchestrator.specification.validation import omitted_count, one_of, problems_of, valid_fields
from orchestrator.system.plain import brief, some_of

PLANNED = tuple(kind for kind in Kind if kind is not Kind.CONTINUE)
"""Every kind that a plan can have. What lasts ends by its duration, so a plan needs no continue."""
ISLANDLESS = frozenset(
    kind for kind, fault in CLASSES.items() if not any(field.name == "island" for field in fields(fault))
)
"""The kinds that affect no island directly."""
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SENTENCE = re.compile(r"([a-z_][\w.-]*+)\s*+(<=|>=|<|>)\s*+(.+)", re.IGNORECASE | re.ASCII)
TEXT_CHARACTERS_MAX = 200
_FORM = "Write a figure, one of < <= > >=, and a limit: survivor_gap_max_s < 1, goodput_ratio > 85 %."
DETAIL = "the chaos plan cannot be used"
UNKNOWN = "Remove it, or correct its spelling; deploy/plans/ holds complete examples."
DURATION_S: Duration = 3600.0
LOSS_GAP = "loss_gap"
"""The one figure that takes a second job: its final held-out loss is the reference (``verdict.loss_gap``)."""
FAULTS_MAX = 10_000
"""Of one plan, all entries together: more would be no test of recovery, since nothing could recover between two."""
INJECTIONS_MAX = 100_000
"""Of one plan on one fleet: a fault of a region is injected into each of its islands, each time by a command of the job."""
ENTRIES_MAX = 1_000
OBJECTIVES_MAX = 100
PLAN_DURATION_MAX_S: Duration = 365.25 * 86_400
FAULT_DURATION_MAX_S: Duration = 86_400.0
"""After a day what stands still was forgotten, not tested."""
PAYLOADS_MAX = 10_000
"""Of one fault: an island offers about one payload a second."""


def _needs(fault: type[Fault], *, required: bool) -> tuple[str, ...]:
    """Return the fields of an entry of this kind, by the plan's names; only those without a default if asked."""
    own = [field for field in fields(fault) if field.name != "island"]
    return tuple(FLAT_NAMES.get(f.name, f.name) for f in own if not required or f.default is MISSING)


NEEDS: Mapping[Kind, tuple[str, ...]] = {kind: _needs(CLASSES[kind], required=True) for kind in PLANNED}
"""The fields of an entry without which its kind means nothing."""
TAKES: Mapping[Kind, tuple[str, ...]] = {kind: _needs(CLASSES[kind], required=False) for kind in PLANNED}
"""The fields that an entry of this kind may have."""


def describe(fault: Fault, target: str) -> str:
    """Return a fault in words: ``stop asia for 6 s``. ``target`` is empty for a kind that affects no island."""
    form = flat(fault)
    how = "by" if form.kind is Kind.DELAY else "for"
    duration = f" {how} {form.duration:g} s" if form.duration else ""
    size = f", {form.payloads} payloads" if form.payloads else ""
    host = f", host {form.host}" if form.host is not None else ""
    rate = f", {form.bytes_per_second:g} bytes/s" if form.bytes_per_second else ""
    return f"{form.kind}{f' {target}' if target else ''}{duration}{size}{rate}{host}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """``figure`` is a name, or names with dots into what a figure holds. ``text`` is what was written."""

    figure: str
    sign: str
    limit: float
    text: str

    def holds(self, value: float | None) -> bool:
        return value is not None and _COMPARE[self.sign](value, self.limit)

    def value_in(self, figures: Mapping[str, Any]) -> float | None:
        """The figure's value, or None where it has none."""
        value: Any = figures
        for name in self.figure.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if number else None

    @property
    def root(self) -> str:
        return self.figure.partition(".")[0]


def parse_comparison(text: Any) -> Comparison:
    """The comparison that ``text`` says. Raises ConfigurationError with the remedy."""
    short = isinstance(text, str) and len(text) <= TEXT_CHARACTERS_MAX
    matched = _SENTENCE.fullmatch(text.strip()) if short else None
    if matched is None:
        raise ConfigurationError(detail=f"{brief(text)} is no comparison. {_FORM}")
    figure, sign, limit = matched.groups()
    return Comparison(figure, sign, _limit(limit), " ".join(text.split()))


def _limit(written: str) -> float:
    """A finite number, a percentage as a ratio, or a duration in seconds."""
    try:
        number = float(written[:-1]) / 100.0 if written.endswith("%") else float(written)
        if math.isfinite(number):
            return number
    except ValueError:
        pass
    try:
        return duration(written)
    except ConfigurationError as error:
        raise ConfigurationError(detail=f"{brief(written)} is no limit. {_FORM}") from error


def _comparison(value: Any) -> Comparison:
    try:
        return parse_comparison(value)
    except ConfigurationError as error:
        raise PydanticCustomError("comparison", "{said}", {"said": str(error)}) from error


def _at_most(count_max: int) -> BeforeValidator:
    """Drop entries beyond the limit, which pydantic would read before it counts them."""
    return BeforeValidator(lambda value: value[: count_max + 1] if isinstance(value, list | tuple) else value)


def _planned_kind(kind: Kind) -> Kind:
    if kind not in PLANNED:
        message, remedy = one_of(kind.value, [kind.value for kind in PLANNED])
        raise ValueError(f"{message} {remedy}")
    return kind


def _instants(value: Any) -> Any:
    """One instant stands for a list of one."""
    return value if isinstance(value, list | tuple) else (value,)


PlannedKind = Annotated[Kind, AfterValidator(_planned_kind)]
Objective = Annotated[Comparison, PlainValidator(_comparison)]


class Target(Section):
    """One island by ``name``; all of a ``region``; or ``random`` so many, of that region or of all, drawn for each fault."""

    name: Word | None = None
    region: Word | None = None
    random: IslandCount | None = None

    def description(self) -> str:
        if self.name is not None:
            return self.name
        whom = f"in {self.region}" if self.region is not None else "of all islands"
        return f"{self.random or 'all'} {whom}"


class Poisson(Section):
    """A fault has no memory of the last: the gaps are exponential with mean ``mtbf``, the mean time between faults."""

    mtbf: PositiveSeconds


class FaultSection(Section):
    """``start`` and ``until`` bound ``every`` and ``poisson``; the first of ``every`` is one period after ``start``.

    ``duration``, ``bytes_per_second``, ``payloads`` and ``host`` are fields of the fault; ``kinds.TAKES`` says which
    kind has which.
    """

    kind: PlannedKind
    target: Target = Target.model_construct()
    at: Annotated[
        tuple[Seconds, ...], Field(max_length=FAULTS_MAX), _at_most(FAULTS_MAX), BeforeValidator(_instants)
    ] = ()
    every: PositiveSeconds | None = None
    poisson: Poisson | None = None
    start: Seconds = 0.0
    until: PositiveSeconds | None = None
    duration: PositiveSeconds | None = Field(None, description="of a stop, cut or slow link; how late a payload comes")
    bytes_per_second: BytesPerSecond | None = None
    payloads: Annotated[int, Field(strict=True, ge=1, le=PAYLOADS_MAX)] | None = None
    host: HostNumber | None = Field(None, description="of the island's, from 0; the last where none is said")

    def fault(self, island: IslandId) -> Fault:
        """Return the fault of this entry for one of its islands."""
        duration, rate = self.duration or 0.0, self.bytes_per_second or 0.0
        return fault_of(self.kind, island, duration, rate, self.payloads or 0, self.host)

    def description(self) -> str:
        target = "" if self.kind in ISLANDLESS else self.target.description()
        return describe(self.fault(IslandId("")), target)

    @property
    def period_s(self) -> Duration | None:
        """The mean time between two faults of this entry; None where each is written down."""
        return self.every or (self.poisson.mtbf if self.poisson else None)


class BlastRadius(Section):
    """The plan never leaves fewer than ``keep`` islands training: a fault that would do so is skipped."""

    keep: IslandCount = 1


class ChaosPlan(Section):
    """A whole plan. It injects faults for ``duration`` at most, and never after the job's end."""

    name: Name = "chaos"
    seed: Seed = 0
    duration: PositiveSeconds = DURATION_S
    faults: Annotated[tuple[FaultSection, ...], Field(max_length=ENTRIES_MAX), _at_most(ENTRIES_MAX)] = ()
    blast_radius: BlastRadius = BlastRadius.model_construct()
    abort: Annotated[tuple[Objective, ...], Field(max_length=OBJECTIVES_MAX), _at_most(OBJECTIVES_MAX)] = ()
    objectives: Annotated[
        tuple[Objective, ...], Field(min_length=1, max_length=OBJECTIVES_MAX), _at_most(OBJECTIVES_MAX)
    ]


def parse(document: Mapping[str, Any]) -> ChaosPlan:
    """Validate a whole plan. Raises InvalidJobSpec with every problem at once, each with its remedy."""
    problems: list[Problem] = []
    omitted = 0
    plan: ChaosPlan | None = None
    try:
        plan = ChaosPlan.model_validate(dict(document))
    except ValidationError as error:
        problems += problems_of(error, unknown=UNKNOWN, model=ChaosPlan)
        omitted = omitted_count(error, ChaosPlan)
    problems += _between_fields(document, valid_fields(ChaosPlan, document))
    if problems or plan is None:
        raise InvalidJobSpec(detail=DETAIL, problems=tuple(problems), omitted_count=omitted)
    return plan


def check_fleet(
    plan: ChaosPlan, islands: Sequence[IslandPlan], host_counts: Mapping[IslandId, int] = MappingProxyType({})
) -> None:
    """Raise InvalidJobSpec with every reason why the plan does not fit these islands.

    An island without a host count is not checked for its hosts: a simulation has none.
    """
    if problems := (*_fleet_problems(plan, islands), *_host_problems(plan, islands, host_counts)):
        raise InvalidJobSpec(detail=DETAIL, problems=problems)


# ── rules between fields ──────────────────────────────────────────────────────────────────────────────────────────────


def _between_fields(document: Mapping[str, Any], sections: Mapping[str, Any]) -> Iterator[Problem]:
    duration = sections.get("duration", DURATION_S)
    if duration > PLAN_DURATION_MAX_S:
        yield Problem("duration", f"is {duration:g} s, more than a year.", "Write at most 1y.")
    entries = document.get("faults")
    counts = [0.0]
    for n, entry in enumerate(entries[:ENTRIES_MAX] if isinstance(entries, list | tuple) else ()):
        try:
            fault = FaultSection.model_validate(entry)
        except ValidationError:
            continue  # reported already
        counts.append(_fault_count(fault, duration))
        yield from _fault_problems(f"faults.{n}", fault, duration)
    if (planned := fsum(counts)) > FAULTS_MAX and max(counts) <= FAULTS_MAX:  # else reported already
        message = f"make about {planned:.3g} faults in all."
        yield Problem("faults", message, f"Make them rarer, or the plan shorter: at most {FAULTS_MAX} are run.")
    figure_sets = (("objectives", report_figures, "a job's report"), ("abort", live_figures, "a live job"))
    for name, figures, where in figure_sets:
        yield from _unknown_figures(name, document.get(name), figures(), where)


def _fault_count(fault: FaultSection, duration: Duration) -> float:
    """Return how many faults an entry makes, on average if it draws them."""
    if fault.period_s is None:
        return len(fault.at)
    return max(0.0, _end(fault, duration) - fault.start) / fault.period_s


def _end(fault: FaultSection, duration: Duration) -> Duration:
    return min(duration, duration if fault.until is None else fault.until)


def _fault_problems(path: str, fault: FaultSection, duration: Duration) -> Iterator[Problem]:
    schedules = [name for name in ("at", "every", "poisson") if getattr(fault, name)]
    if len(schedules) != 1:
        has = " and ".join(schedules) or "no schedule"
        yield Problem(path, f"has {has}.", "Give exactly one of at, every and poisson.")
    if fault.at and (fault.start or fault.until is not None):
        yield Problem(path, "has start or until beside at.", "Remove them: at says every instant itself.")
    target = fault.target
    if fault.kind in ISLANDLESS and target != Target():
        yield Problem(f"{path}.target", f"goes with no {fault.kind}: it affects no island.", "Remove it.")
    elif target == Target() and fault.kind not in ISLANDLESS:
        remedy = "Give name, region or random: {random: 1}."
        yield Problem(f"{path}.target", "names no island.", remedy)
    if target.name is not None and (target.region is not None or target.random is not None):
        yield Problem(f"{path}.target", "has a name, and region or random beside it.", "Give the name alone.")
    for name, example in (("duration", "8s"), ("bytes_per_second", "50_000"), ("payloads", "3"), ("host", "0")):
        needed, is_given = name in NEEDS.get(fault.kind, ()), getattr(fault, name) is not None
        if needed and not is_given:
            yield Problem(f"{path}.{name}", f"is missing: {fault.kind} needs it.", f"Write {name}: {example}.")
        elif is_given and name not in TAKES.get(fault.kind, ()):
            takers = ", ".join(kind for kind, names in TAKES.items() if name in names)
            yield Problem(f"{path}.{name}", f"goes with {takers} only, not with {fault.kind}.", "Remove it.")
    if fault.duration is not None and fault.duration > FAULT_DURATION_MAX_S:
        yield Problem(f"{path}.duration", f"is {fault.duration:g} s, more than a day.", "Write at most 1d.")
    until = _end(fault, duration)
    if fault.start >= until:
        message = f"is {fault.start:g} s, not before {until:g} s, where this fault or the plan ends."
        yield Problem(f"{path}.start", message, "Start earlier, or lengthen until or duration.")
    elif fault.period_s is not None and (count := _fault_count(fault, duration)) > FAULTS_MAX:
        message = f"makes about {count:.3g} faults in {until - fault.start:g} s."
        yield Problem(path, message, f"Make them rarer, or the plan shorter: at most {FAULTS_MAX} are run.")
    for at in fault.at:
        if at >= duration:
            remedy = f"Write less than {duration:g}, or lengthen duration."
            yield Problem(f"{path}.at", f"{at:g} s is not before the plan's end at {duration:g} s.", remedy)


def _unknown_figures(path: str, written: Any, figures: Sequence[str], where: str) -> Iterator[Problem]:
    for n, text in enumerate(written[:OBJECTIVES_MAX] if isinstance(written, list | tuple) else ()):
        try:
            condition = parse_comparison(text)
        except ConfigurationError:
            continue  # reported already
        if condition.root not in figures:
            near = ", ".join(get_close_matches(condition.root, figures)) or ", ".join(figures)
            yield Problem(f"{path}.{n}", f"{condition.root!r} is not a figure of {where}.", f"Use one of {near}.")


def _fleet_problems(plan: ChaosPlan, islands: Sequence[IslandPlan]) -> Iterator[Problem]:
    names = dict.fromkeys(island.island for island in islands)
    regions = Counter(island.region for island in islands)
    injections = 0.0
    keep = plan.blast_radius.keep
    if plan.faults and keep >= len(islands):
        message = f"is {keep} of {len(islands)} islands, so no fault could ever be injected."
        yield Problem("blast_radius.keep", message, f"Lower it to at most {len(islands) - 1}, or add islands.")
    for n, fault in enumerate(plan.faults):
        path, target = f"faults.{n}.target", fault.target
        if target.name is not None and target.name not in names:
            yield Problem(f"{path}.name", f"{target.name!r} is not an island of the job.", f"Use {some_of(names)}.")
        if target.region is not None and target.region not in regions:
            remedy = f"Use {some_of(sorted(regions))}."
            yield Problem(f"{path}.region", f"no island of the job is in {target.region!r}.", remedy)
        there = len(islands) if target.region is None else regions[target.region]
        each = 1 if target.name is not None or fault.kind in ISLANDLESS else min(there, target.random or there)
        injections += _fault_count(fault, plan.duration) * each
        if target.random is not None and 0 < there < target.random:
            remedy = f"Lower it to at most {there}."
            yield Problem(f"{path}.random", f"is {target.random}, but there are {there} islands to draw from.", remedy)
    if injections > INJECTIONS_MAX:
        message = f"would inject about {injections:.3g} faults into {len(islands)} islands."
        yield Problem("faults", message, f"Make them rarer, or their targets fewer: at most {INJECTIONS_MAX} are run.")


def _host_problems(
    plan: ChaosPlan, islands: Sequence[IslandPlan], host_counts: Mapping[IslandId, int]
) -> Iterator[Problem]:
    for n, fault in enumerate(plan.faults):
        host, target = fault.host, fault.target
        if host is None:
            continue
        targets = [one for one in islands if target.name in (None, one.island) and target.region in (None, one.region)]
        counts = {one.island: host_counts[one.island] for one in targets if one.island in host_counts}
        if few := {island: count for island, count in counts.items() if host >= count}:
            hosts = some_of([f"{island} has {count}" for island, count in few.items()])
            remedy = f"Write at most {min(few.values()) - 1}, or leave it out for the last."
            yield Problem(
                f"faults.{n}.host", f"is {host}, counted from 0, and not all of its targets have it: {hosts}.", remedy
            )


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def report_figures() -> list[str]:
    """Return the figures of objectives: the names in the report of a job that never began, and the loss gap."""
    policy = sample_policy()
    return sorted([LOSS_GAP, *_numbers(report.build(policy, Goodput(policy), Statistics(policy), {}))])


def live_figures() -> list[str]:
    """Return the figures of abort conditions."""
    policy = sample_policy()
    return _numbers(figures_now(0, Goodput(policy).summary(), Statistics(policy).summary()))


def figures_now(training: int, goodput: Mapping[str, Any], statistics: Mapping[str, Any]) -> dict[str, Any]:
    """A job as it stands, as what abort conditions are asked of. ``training`` counts the islands that train."""
    return {**statistics, **goodput, "islands_training": training}


def _numbers(figures: Mapping[str, Any]) -> list[str]:
    """The names under which a number may stand, or something that holds numbers."""
    return sorted(name for name, value in figures.items() if not isinstance(value, str | list))
