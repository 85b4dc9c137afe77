"""A recorded job simulated under another policy: the same faults and speeds, side by side with what did happen.

    happened     the tape's own figures                         by the folds, from what was recorded
    unchanged    the fitted world under the tape's policy       how far the fit is to be trusted
    changed      the fitted world under the policy asked about

A changed policy cannot be *replayed*: after its first different decision the recorded events answer requests that were never
made. So it is simulated, in a world fitted to the tape (``fit``), and so is the unchanged one: the difference between those
two columns is the policy's, the difference between the first two is the fit's. Latencies stay as they were recorded: what
another number of fragments would do to the size of one is not in them.

``--set quorum=2 --set H=48``: settings of the synchroniser by name or by the paper's symbol, checked all at once.

Responsible for: from (policy, adoption) and what a user wrote to (policy, adoption), or every problem with its remedy. Only
what changes when and with whom fragments merge can be changed: the rest changes the model, which no simulation shows.

Source of the symbols: arXiv:2604.21428.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Annotated, Any

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
MODEL_ONLY = ("averaging", "outer_optimizer", "mix_alpha", "wire")
ADOPTIONS = ("replace", "rebase")


@dataclass(frozen=True, slots=True)
class Settings:
    """What may be changed: the core's policy, and what islands do when they adopt."""

    policy: JobPolicy
    adoption: AdoptionRule


def apply(before: Settings, changes: Mapping[str, str]) -> Settings:
    """The settings with these changes. Raises InvalidJobSpec with every problem at once, each with its remedy."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for name, text in changes.items():
        field = SYMBOLS.get(name, name)
        if field in written:
            problems.append(Problem(name, f"and {written[field]} are the same setting.", "Give one of the two."))
            continue
        written[field] = name
        try:
            values[field] = _value(name, field, text, len(before.policy.islands))
        except _Unusable as error:
            problems.append(error.problem)
    after = _changed(before, values)
    problems += _together(after, values, written)
    if problems:
        raise InvalidJobSpec(detail="this cannot be tried", problems=tuple(problems))
    return after


class _Unusable(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def _value(name: str, field: str, text: str, island_count: int) -> Any:
    if field in ("M", "islands"):
        remedy = "Simulate a specification with that many learners: `atoll simulate`."
        raise _Unusable(
            Problem(name, f"cannot be changed: the tape knows {island_count} islands and no others.", remedy)
        )
    if field.split(".")[0] in MODEL_ONLY:
        message = "changes the model, not when and with whom fragments merge; a simulation shows no difference."
        raise _Unusable(Problem(name, message, "Measure it in real training: `atoll train-tape`, or `atoll compare`."))
    kind = _kind(field)
    if kind is None:
        raise _Unusable(Problem(name, "is no setting that can be tried.", f"Give one of {', '.join(names())}."))
    value = _parsed(text)
    if field == "adoption" and value not in ADOPTIONS:
        message = f"cannot be {text!r}: simulated islands know {' and '.join(ADOPTIONS)}."
        raise _Unusable(Problem(name, message, f"Give one of {', '.join(ADOPTIONS)}."))
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        problem = problem_of(error.errors(include_url=False)[0])
        raise _Unusable(Problem(name, problem.message, problem.remedy)) from error


def names() -> list[str]:
    """Everything that can be changed, symbols last."""
    settings = (name for name in SETTINGS if name.split(".")[0] not in MODEL_ONLY)
    return [*settings, "adoption", *SYMBOLS]


def _kind(name: str) -> TypeAdapter[Any] | None:
    """Return what a value of the setting may be; None if there is no such setting."""
    source = policy_source.source_of(SETTINGS[name], JobSpec) if name in SETTINGS else None
    source = "synchroniser.adoption" if name == "adoption" else source
    if source is None or (described := policy_source.field_at(source, JobSpec)) is None:
        return None
    annotated: Any = Annotated[described.annotation, described]
    return TypeAdapter(annotated)


def _parsed(text: str) -> Any:
    """As YAML reads it, and ``none`` as nothing."""
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
    """The rules between settings, where at least one of them was changed."""
    policy = after.policy
    islands = len(policy.islands)
    if "quorum" in values and policy.quorum > islands:
        message = f"is {policy.quorum}, but the job has {islands} islands: no fragment could ever merge."
        yield Problem(written["quorum"], message, f"Lower it to at most {islands}.")
    if values.keys() & {"overlap_steps", "interval_steps"} and policy.overlap_steps >= policy.sync_interval_steps:
        name = written.get("overlap_steps") or written["interval_steps"]
        message = f"gives overlap_steps {policy.overlap_steps}, not below interval_steps {policy.sync_interval_steps}."
        yield Problem(name, message, "A fragment must come back before it is due again: lower tau, or raise H.")
    if values.keys() & {"adoption", "staleness_max"} and after.adoption == "rebase" and policy.staleness_max:
        name = written.get("staleness_max") or written["adoption"]
        message = f"gives staleness_max {policy.staleness_max} with adoption rebase: work would be counted twice."
        yield Problem(name, message, "Set staleness_max to 0, or adoption to replace.")


HAPPENED, UNCHANGED, CHANGED = "happened", "unchanged", "changed"
BADPUT_ROWS = 8
AT_ONCE = 500
"""Happenings between two looks at the progress: some twenty to the second of a slow machine."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Which column is being worked out, and how far it is, from 0 to 1."""

    column: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Row:
    """One figure in every column; ``None`` where it is not known. Units are ratio, s, 1/s, and "" for counts."""

    name: str
    unit: str
    values: Mapping[str, float | None]


@dataclass(slots=True)
class Column:
    """One way it went. ``complete`` is false while it is worked out, and stays so if that was stopped."""

    policy: JobPolicy
    complete: bool = False
    figures: dict[str, Any] = field(default_factory=dict)


class WhatIf:
    """One question. ``run`` works it out; ``summary`` and ``rows`` tell what is known at any time."""

    def __init__(self, tape: Tape, changes: Mapping[str, str], seed: int = 0) -> None:
        """Raises InvalidJobSpec for changes that cannot be tried, DataError for a tape that shows no world."""
        self.changes, self.seed = dict(changes), seed
        self.columns: dict[str, Column] = {}
        self.fitted: FittedWorld = fit(tape)
        self._tape = tape
        before = Settings(job_header(tape).policy, self.fitted.plan.adoption)
        self._settings = {UNCHANGED: before}
        if changes:
            self._settings[CHANGED] = apply(before, changes)

    def run(self) -> Iterator[Progress]:
        """Work out all columns, one after the other. Stop whenever you like: what there is stays."""
        yield from self._happened()
        for name, settings in self._settings.items():
            yield from self._simulate(name, settings)

    def summary(self) -> dict[str, Any]:
        """Everything as plain data."""
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
        """The table's rows: the figures that matter, then badput by cause, largest first."""
        return [
            Row(name, unit, {column: _at(result.figures, path) for column, result in self.columns.items()})
            for name, unit, path in (*_FIGURES, *self._causes())
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
        finally:  # also when whoever asked asks no more
            column.figures = _figures(policy, world.goodput, world.statistics)
        yield Progress(name, 1.0)


_FIGURES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("goodput", "ratio", ("goodput_ratio",)),
    ("uptime", "ratio", ("uptime_ratio",)),
    ("duration", "s", ("duration_s",)),
    ("tokens merged per second", "1/s", ("tokens_merged_per_second",)),
    ("merges", "", ("merges",)),
    ("merges per fragment", "", ("merges_per_fragment_mean",)),
    ("contributors per merge", "", ("contributors_mean",)),
    ("waited in grace windows", "s", ("grace_used_mean_s",)),
    ("contributions refused", "", ("refused",)),
    ("slowest recovery", "s", ("recovery_s",)),
)


def _figures(policy: JobPolicy, goodput: Goodput, statistics: Statistics) -> dict[str, Any]:
    worth, summary = goodput.summary(), statistics.summary()
    recovery = summary["recovery_s"]
    return {
        "goodput_ratio": worth["goodput_ratio"],
        "uptime_ratio": worth["uptime_ratio"],
        "duration_s": summary["duration_s"],
        "outcome": summary["outcome"],
        "tokens_trained": worth["tokens"]["trained"],
        "tokens_merged": worth["tokens"]["merged"],
        "tokens_merged_per_second": worth["tokens_merged_per_second"],
        "merges": summary["merges"],
        "merges_per_fragment": summary["merges_per_fragment"],
        "merges_per_fragment_mean": fsum(summary["merges_per_fragment"]) / policy.fragment_count,
        "contributors_mean": summary["contributors_mean"],
        "merges_by_contributors": summary["merges_by_contributors"],
        "grace_used_mean_s": summary["grace_used_mean_s"],
        "refused": sum(summary["refusals"].values()),
        "refusals": summary["refusals"],
        "recovery_s": recovery["total"] if recovery else None,
        "island_seconds": worth["island_seconds"],
        "badput_seconds": worth["badput_seconds"],
    }


def _at(figures: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = figures
    for key in path:
        value = value.get(key, 0.0 if len(path) > 1 and value else None)
    return value if isinstance(value, int | float) else None
