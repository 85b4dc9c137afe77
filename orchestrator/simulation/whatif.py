"""`atoll whatif`: simulates a recorded job under another policy, next to what actually happened.

    happened     the figures of the tape itself
    unchanged    the fitted world under the recorded policy     its distance to `happened` is the error of the fit
    changed      the fitted world under the changed policy      its distance to `unchanged` is the effect of the policy

A changed policy cannot be *replayed*: after its first different decision, the recorded events would answer requests that
were never made. So both policies are simulated in a world fitted to the tape (``fit``). Latencies stay as recorded: the
effect of a different fragment size on transfers is not included.

Changes are given as ``--set quorum=2 --set H=48``, by the name of a synchroniser setting or the paper's symbol
(arXiv:2604.21428). Only settings that decide when and with whom fragments merge can be changed. The others change the
model, which no simulation shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core.vocabulary import JobPolicy
from orchestrator.errors import ConfigurationError, InvalidJobSpec, Problem
from orchestrator.replica.work import AdoptionRule
from orchestrator.simulation.fit import FittedWorld, fit, job_header
from orchestrator.simulation.plan import WorldPlan
from orchestrator.simulation.world import World
from orchestrator.specification import policy_source
from orchestrator.specification.config import JobSpec
from orchestrator.specification.documents import read_yaml
from orchestrator.specification.validation import problem_of
from orchestrator.tape.schema import Tape, job_steps

SYMBOLS: Mapping[str, str] = {
    "K": "quorum",
    "H": "interval_steps",
    "P": "fragments",
    "tau": "overlap_steps",
    "τ": "overlap_steps",
    "gamma": "grace_margin",
    "γ": "grace_margin",
}
SETTINGS: Mapping[str, str] = {
    source.partition(".")[2]: path
    for path in policy_source.paths()
    if (source := policy_source.source_of(path, JobSpec)) is not None
    and source.partition(".")[0] in policy_source.SECTIONS
}
"""Paths within the policy (``quorum``, ``step_limits.ratio``) by the names of their settings in the specification."""
SCHEDULE = ("fragments", "interval_steps", "overlap_steps", "router_interval_steps")
MODEL_ONLY = ("averaging", "outer_optimizer", "mix_alpha", "wire")
ADOPTIONS = ("replace", "rebase")
HAPPENED, UNCHANGED, CHANGED = "happened", "unchanged", "changed"
BADPUT_ROWS, COST_ROWS = 8, 3
AT_ONCE = 500
"""Simulated events between two progress reports: about twenty reports a second on a slow machine."""
_FIGURES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("goodput", "ratio", ("goodput_ratio",)),
    ("uptime", "ratio", ("uptime_ratio",)),
    ("duration", "s", ("duration_s",)),
    ("tokens merged per second", "1/s", ("tokens_merged_per_second",)),
    ("merges", "", ("merges",)),
    ("merges per fragment", "", ("merges_per_fragment_mean",)),
    ("contributors per merge", "", ("contributors_mean",)),
    ("mean wait in grace windows", "s", ("grace_used_mean_s",)),
    ("contributions refused", "", ("refused",)),
    ("slowest recovery", "s", ("recovery_s",)),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that can be changed: the core's policy, and how islands adopt a version."""

    policy: JobPolicy
    adoption: AdoptionRule


@dataclass(frozen=True, slots=True)
class Progress:
    """The column that is being computed, and the part of it that is done."""

    column: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Row:
    """One figure in every column, None where unknown. Units are ratio, s, 1/s, a currency, and "" for counts."""

    name: str
    unit: str
    values: Mapping[str, float | None]


@dataclass(slots=True)
class Column:
    """The figures of one run. ``complete`` is False while it runs, and stays so if it was interrupted."""

    policy: JobPolicy
    complete: bool = False
    figures: dict[str, Any] = field(default_factory=dict)


class WhatIf:
    """One question. ``run`` computes the columns; ``summary`` and ``rows`` return what is known at any time."""

    def __init__(self, tape: Tape, changes: Mapping[str, str], seed: int = 0) -> None:
        """Raises InvalidJobSpec for changes that cannot be simulated, and DataError if no world fits the tape."""
        self.changes, self.seed = dict(changes), seed
        self.columns: dict[str, Column] = {}
        self.fitted: FittedWorld = fit(tape)
        self._tape = tape
        before = Settings(job_header(tape).policy, self.fitted.plan.adoption)
        self._settings = {UNCHANGED: before}
        if changes:
            self._settings[CHANGED] = apply(before, changes)

    def run(self) -> Iterator[Progress]:
        """Compute all columns, one after the other. The caller may stop at any time and keeps what there is."""
        yield from self._happened()
        for name, settings in self._settings.items():
            yield from self._simulate(name, settings)

    def summary(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "job": self.fitted.job,
            "changes": self.changes,
            "seed": self.seed,
            "complete": list(self.columns) == [HAPPENED, *self._settings]
            and all(c.complete for c in self.columns.values()),
            "assumed": list(self.fitted.notes),
            "columns": {name: {"complete": column.complete, **column.figures} for name, column in self.columns.items()},
        }

    def rows(self) -> list[Row]:
        """Return the rows of the table: the main figures, then badput by cause, largest first."""
        return [
            Row(name, unit, {column: _at(result.figures, path) for column, result in self.columns.items()})
            for name, unit, path in (*_FIGURES, *self._costs(), *self._causes())
        ]

    def _costs(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return the rows of money, if the tape has prices: in all, by merged tokens, and of badput by cause."""
        costs = [cost for column in self.columns.values() if (cost := column.figures.get("cost"))]
        if not costs:
            return []
        unit = costs[0]["currency"]
        worst: dict[str, float] = {}
        for cause, value in (item for cost in costs for item in cost["badput"].items()):
            worst[cause] = max(worst.get(cause, 0.0), value)
        ranked = sorted(worst, key=lambda cause: (-worst[cause], cause))
        return [
            ("cost", unit, ("cost", "so_far")),
            ("cost per merged million tokens", unit, ("cost", "per_merged_million_tokens")),
            *((f"cost of {cause}", unit, ("cost", "badput", cause)) for cause in ranked[:COST_ROWS]),
        ]

    def _causes(self) -> list[tuple[str, str, tuple[str, ...]]]:
        worst: dict[str, float] = {}
        for column in self.columns.values():
            for cause, seconds in column.figures.get("badput_seconds", {}).items():
                worst[cause] = max(worst.get(cause, 0.0), seconds)
        ranked = sorted(worst, key=lambda cause: (-worst[cause], cause))
        return [(f"lost to {cause}", "s", ("badput_seconds", cause)) for cause in ranked[:BADPUT_ROWS]]

    def _happened(self) -> Iterator[Progress]:
        policy = job_header(self._tape).policy
        goodput, statistics = Goodput(policy), Statistics(policy)
        for event, effects in job_steps(self._tape):
            goodput.apply(event, effects)
            statistics.apply(event, effects)
        self.columns[HAPPENED] = Column(policy, complete=True, figures=_figures(policy, goodput, statistics))
        yield Progress(HAPPENED, 1.0)

    def _simulate(self, name: str, settings: Settings) -> Iterator[Progress]:
        policy = settings.policy
        plan: WorldPlan = replace(self.fitted.plan, adoption=settings.adoption)
        world = World(policy, plan, self.seed, checked=False)
        column = self.columns[name] = Column(policy)
        try:
            for _ in world.passing(self.fitted.until, AT_ONCE):
                yield Progress(name, min(1.0, sum(world.goodput.ledger.trained.values()) / policy.token_budget))
            column.complete = True
        finally:  # also if the caller stops iterating
            column.figures = _figures(policy, world.goodput, world.statistics)
        yield Progress(name, 1.0)


def apply(before: Settings, changes: Mapping[str, str]) -> Settings:
    """Return the changed settings. Raises InvalidJobSpec with all problems at once, each with its remedy."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, text in changes.items():
        field = SYMBOLS.get(name, name)
        if field in written:
            problems.append(Problem(name, f"and {written[field]} are the same setting.", "Give only one of them."))
            continue
        written[field] = name
        try:
            values[field] = _value(name, field, text, len(before.policy.islands))
        except _Unusable as error:
            problems.append(error.problem)
    after = _changed(before, values)
    problems += _together(after, values, written)
    if problems:
        raise InvalidJobSpec(detail="these changes cannot be simulated", problems=tuple(problems))
    return after


class _Unusable(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def _value(name: str, field: str, text: str, island_count: int) -> Any:
    if field in ("M", "islands"):
        remedy = "Use `atoll simulate` with a specification that has the wanted number of learners."
        raise _Unusable(Problem(name, f"cannot be changed: the tape records {island_count} islands.", remedy))
    if field.split(".")[0] in MODEL_ONLY:
        message = "affects only the model, not when and with whom fragments merge, so a simulation shows no difference."
        raise _Unusable(Problem(name, message, "Measure it in real training: `atoll train-tape` or `atoll compare`."))
    kind = _kind(field)
    if kind is None:
        raise _Unusable(Problem(name, "is not a setting that can be changed.", f"Give one of {', '.join(names())}."))
    value = _parsed(text)
    if field == "adoption" and value not in ADOPTIONS:
        message = f"cannot be {text!r}: simulated islands support only {' and '.join(ADOPTIONS)}."
        raise _Unusable(Problem(name, message, f"Give one of {', '.join(ADOPTIONS)}."))
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        problem = problem_of(error.errors(include_url=False)[0])
        raise _Unusable(Problem(name, problem.message, problem.remedy)) from error


def names() -> list[str]:
    """Return the names of all settings that can be changed, symbols last."""
    settings = (name for name in SETTINGS if name.split(".")[0] not in MODEL_ONLY)
    return [*settings, "adoption", *SYMBOLS]


def _kind(name: str) -> TypeAdapter[Any] | None:
    """Return the type of a setting's value, or None if there is no such setting."""
    bounds: Any = policy_source.bounds_of(SETTINGS[name], JobSpec) if name in SETTINGS else None
    if name == "adoption" and (described := policy_source.field_at("synchroniser.adoption", JobSpec)) is not None:
        bounds = described.annotation
    return None if bounds is None else TypeAdapter(bounds)


def _parsed(text: str) -> Any:
    """Parse a value as YAML, with ``none`` as None."""
    try:
        return None if text.strip().lower() == "none" else read_yaml(text)
    except ConfigurationError:
        return text


def _changed(before: Settings, values: Mapping[str, Any]) -> Settings:
    policy = before.policy
    for name, value in values.items():
        if name != "adoption":
            policy = _replaced(policy, SETTINGS[name], value)
    return Settings(policy, values.get("adoption", before.adoption))


def _replaced(policy: Any, path: str, value: Any) -> Any:
    field, _, rest = path.partition(".")
    return replace(policy, **{field: _replaced(getattr(policy, field), rest, value) if rest else value})


def _together(after: Settings, values: Mapping[str, Any], written: Mapping[str, str]) -> Iterator[Problem]:
    """Check the rules between settings of which at least one was changed."""
    policy = after.policy
    islands = len(policy.islands)
    if "quorum" in values and policy.quorum > islands:
        message = f"is {policy.quorum}, but the job has {islands} islands: no fragment could ever merge."
        yield Problem(written["quorum"], message, f"Lower it to {islands} or less.")
    if changed := [name for field, name in written.items() if field in values and field in SCHEDULE]:
        for problem in policy_source.schedule_problems(policy.schedule, policy.overlap_steps, ""):
            if name := written.get(problem.path):
                yield replace(problem, path=name)
            else:
                message = f"does not go with {problem.path}, which {problem.message}"
                yield Problem(changed[0], message, f"Choose another value, or change {problem.path} as well.")
    if values.keys() & {"adoption", "staleness_max"} and after.adoption == "rebase" and policy.staleness_max:
        name = written.get("staleness_max") or written["adoption"]
        message = f"gives staleness_max {policy.staleness_max} with adoption rebase, which would count work twice."
        yield Problem(name, message, "Set staleness_max to 0, or adoption to replace.")


def _figures(policy: JobPolicy, goodput: Goodput, statistics: Statistics) -> dict[str, Any]:
    time, counts = goodput.summary(), statistics.summary()
    recovery = counts["recovery_s"]
    return {
        "goodput_ratio": time["goodput_ratio"],
        "uptime_ratio": time["uptime_ratio"],
        "duration_s": counts["duration_s"],
        "outcome": counts["outcome"],
        "tokens_trained": time["tokens"]["trained"],
        "tokens_merged": time["tokens"]["merged"],
        "tokens_merged_per_second": time["tokens_merged_per_second"],
        "merges": counts["merges"],
        "merges_per_fragment": counts["merges_per_fragment"],
        "merges_per_fragment_mean": fsum(counts["merges_per_fragment"]) / policy.fragment_count,
        "contributors_mean": counts["contributors_mean"],
        "merges_by_contributors": counts["merges_by_contributors"],
        "grace_used_mean_s": counts["grace_used_mean_s"],
        "refused": sum(counts["refusals"].values()),
        "refusals": counts["refusals"],
        "recovery_s": recovery["total"] if recovery else None,
        "island_seconds": time["island_seconds"],
        "badput_seconds": time["badput_seconds"],
        **({"cost": time["cost"]} if "cost" in time else {}),
    }


def _at(figures: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = figures
    for key in path:
        value = value.get(key, 0.0 if len(path) > 1 and value else None)
    return value if isinstance(value, int | float) else None
