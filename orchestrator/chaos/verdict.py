"""The verdict on a chaos run: which of the plan's objectives hold in the job's report, which do not, by how much, and when.

Responsible for judging. Every figure is the report's, so live and simulated runs are judged alike, and a verdict can be
worked out again from the two files. Fails as well: a job that did not complete, a plan that was aborted, and one whose
every fault was skipped, since that proves nothing. It measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.chaos.plan import LOSS_GAP, ChaosPlan, Comparison
from orchestrator.chaos.runner import ChaosRunner
from orchestrator.core.vocabulary import Instant
from orchestrator.system.plain import finite

SCHEMA = "atoll-verdict/1"
_WORST: Mapping[str, str] = {"bystander_gap_max_s": "bystander_gap", "survivor_gap_max_s": "survivor_gap"}
"""Figures for which the report says when, and where, they were at their worst."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One objective. ``margin`` is how far the value is on the right side of the limit, negative on the wrong one.

    ``at`` is when the figure was at its worst; where the report does not say, it is a figure of the whole job, and this
    its end.
    """

    objective: str
    passed: bool
    value: float | None
    limit: float | None
    margin: float | None
    at: Instant
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """``conducted`` is what became of every fault, as plain data. ``notes`` say what this run could not show."""

    plan: ChaosPlan
    report: Mapping[str, Any]
    judged: tuple[Judged, ...]
    conducted: tuple[Mapping[str, Any], ...]
    aborted: str | None
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(one.passed for one in self.judged)

    def plain(self) -> dict[str, Any]:
        document: dict[str, Any] = finite(
            {
                "schema": SCHEMA,
                "plan": self.plan.name,
                "seed": self.plan.seed,
                "job": self.report.get("job_id"),
                "passed": self.passed,
                "aborted": self.aborted,
                "objectives": [asdict(one) for one in self.judged],
                "faults": self.conducted,
                "notes": list(self.notes),
            }
        )
        return document


def judge(
    runner: ChaosRunner,
    report: Mapping[str, Any],
    reference: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] = (),
) -> Verdict:
    """The verdict on a plan's run, from what was done and the report of the job it was done to.

    ``reference`` is the report of a job without faults; without one, ``loss_gap`` has no value.
    """
    report = {**report, LOSS_GAP: loss_gap(report, reference)}
    notes = (*notes, *_unlike(report, reference))
    end = float(report["duration_s"])
    judged = [_completed(report, end), *_conducted(runner, end)]
    judged += [_judged(objective, report, runner, end) for objective in runner.plan.objectives]
    faults = tuple(decision.plain() for decision in runner.decisions)
    return Verdict(runner.plan, report, tuple(judged), faults, runner.aborted, notes)


def loss_gap(report: Mapping[str, Any], reference: Mapping[str, Any] | None) -> float | None:
    """Return how much higher the final held-out loss is than the reference's, as a ratio; negative if it is lower."""
    own, other = report.get("loss_final"), (reference or {}).get("loss_final")
    return own / other - 1.0 if own is not None and other else None


def _unlike(report: Mapping[str, Any], reference: Mapping[str, Any] | None) -> Iterator[str]:
    """Why the two losses may differ without any fault."""
    if reference is None:
        return
    for name in ("token_budget", "islands"):
        own, other = report["policy"][name], reference["policy"][name]
        if own != other:
            yield f"the reference has {name} {other} and this job {own}, so {LOSS_GAP} measures more than the faults"


def _completed(report: Mapping[str, Any], end: Instant) -> Judged:
    outcome = report["outcome"]
    return Judged("the job completes", outcome == "completed", None, None, None, end, f"{outcome}: {report['reason']}")


def _conducted(runner: ChaosRunner, end: Instant) -> list[Judged]:
    """Judge the plan itself: that it was not aborted, and that one of its faults, if it has any, was injected."""
    if runner.aborted is not None:
        return [Judged("the plan is not aborted", False, None, None, None, end, runner.aborted)]
    if not runner.plan.faults:
        return []
    count, skipped = len(runner.decisions), sum(bool(decision.skipped) for decision in runner.decisions)
    detail = f"{count - skipped} of {count} faults that came due were injected, {skipped} were skipped"
    return [Judged("a fault is injected", count > skipped, None, None, None, end, detail)]


def _judged(objective: Comparison, report: Mapping[str, Any], runner: ChaosRunner, end: Instant) -> Judged:
    value = objective.value_in(report)
    if value is None:
        detail = f"{objective.figure} has no value in this job's report, so it was not shown to hold"
        return Judged(objective.text, False, None, objective.limit, None, end, detail)
    passed = objective.holds(value)
    margin = objective.limit - value if objective.sign.startswith("<") else value - objective.limit
    by = f"{abs(margin):.4g} {'to spare' if margin >= 0 else 'too much' if objective.sign[0] == '<' else 'too little'}"
    detail = f"{objective.figure} is {value:.4g}: {by}"
    worst = report.get(_WORST.get(objective.figure, ""))
    if worst is None:
        return Judged(objective.text, passed, value, objective.limit, margin, end, f"{detail}, over the whole job")
    at = float(worst["at"])
    where = f"{detail}, at {at:.1f} s on {worst['island']}{_after(runner, at)}"
    return Judged(objective.text, passed, value, objective.limit, margin, at, where)


def _after(runner: ChaosRunner, at: Instant) -> str:
    """Return in words which fault was the last before this instant; empty if there was none."""
    injected: Sequence[Any] = [one for one in runner.decisions if not one.skipped and one.at <= at]
    if not injected:
        return ""
    last = injected[-1]
    whom = f" of {last.fault.island}" if last.fault.island else ""
    return f", {at - last.at:.1f} s after the {last.fault.kind}{whom}"
