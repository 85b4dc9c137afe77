"""A running plan: its schedule, which faults are injected at each look at the job and which are skipped, and the verdict.

    decisions = runner.look(now, training, figures)

               more islands train than are kept            all injected or skipped
    WAITING ────────────────────────────────────▶ BEGUN ───────────────────────────▶ OVER
                                                    └────── a condition to abort ──────▶ OVER (aborted)

Live and simulated runs ask the same object. It keeps the blast radius: an island counts as away from the moment it is
killed, stopped or cut off, however late the status shows that, and with a node all islands of its node group do. An island
whose link is slow, or whose payloads suffer, trains on and counts. A fault that came due too long ago is skipped and never
made up for. A decision is data: the driver injects the fault.

The schedule has everything that depends on chance. It is drawn from the plan's seed and nothing else:

    schedule(plan, islands) == schedule(plan, islands)      live and simulated

Each entry draws from streams of its own, one for instants and one for targets. So an entry that is added or changed leaves
the others as they were, and the instants are the same for every fleet.

The verdict says which of the plan's objectives hold in the job's report, which do not, by how much, and when. Every figure
is the report's, so live and simulated runs are judged alike, and a verdict can be worked out again from plan and report. A
run fails as well if the job did not complete, if the plan was aborted, and if every fault was skipped, because that proves
nothing.

Source: a Poisson process by its exponential gaps, cut to whole microseconds as everywhere (``simulation.distributions``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from random import Random
from typing import Any

from orchestrator.chaos.plan import ISLANDLESS, LOSS_GAP, ChaosPlan, Comparison, FaultSection, Target, describe
from orchestrator.core.faults import Away, Deadly, Fault, Islandless, Kind, LinkFault, PayloadFault, flat
from orchestrator.core.vocabulary import Duration, Incarnation, Instant, IslandId, IslandPlan, NodeGroupId
from orchestrator.simulation.distributions import Exponential
from orchestrator.system.plain import finite

LATE_MAX_S = 3.0
"""A fault that is late by more than this is skipped. Otherwise all faults that came due while the service was away, or while
the job did not answer, would be injected at once, which no plan asked for."""
NODE_LOSS_S: Duration = 20.0
"""By then the processes that died with a node are known to be dead: they end within seconds, and are missed soon after."""
Figures = Callable[[], Mapping[str, Any]]
"""Asked only when the plan has conditions to abort."""
VERDICT_SCHEMA = "atoll-verdict/1"
_WORST: Mapping[str, str] = {"bystander_gap_max_s": "bystander_gap", "survivor_gap_max_s": "survivor_gap"}
"""Figures for which the report says when, and where, they were at their worst."""


class ChaosRunner:
    """One run of a plan. ``decisions`` are all so far; ``aborted`` says why it ended early, if it did."""

    def __init__(self, plan: ChaosPlan, faults: Sequence[PlannedFault]) -> None:
        self.plan = plan
        self.begun_at: Instant | None = None
        self.aborted: str | None = None
        self.decisions: list[Decision] = []
        self._pending = list(faults)
        self._killed: dict[IslandId, Incarnation] = {}
        self._away_until: dict[IslandId, Instant] = {}
        self._lasts_until: dict[IslandId, Instant] = {}

    @property
    def over(self) -> bool:
        return self.aborted is not None or (self.begun_at is not None and not self._pending)

    @property
    def pending(self) -> tuple[PlannedFault, ...]:
        return tuple(self._pending)

    def look(self, now: Instant, training: Mapping[IslandId, Incarnation], figures: Figures) -> list[Decision]:
        """Decide on what is due. ``training`` are the islands that train, with their incarnations."""
        if self.begun_at is None:
            if len(training) <= self.plan.blast_radius.keep:
                return []
            self.begun_at = now
        if self.aborted is not None or self._aborts(figures):
            return []
        decided = []
        while self._pending and self.begun_at + self._pending[0].at <= now:
            decided.append(self._decide(now, self._pending.pop(0), training))
        self.decisions += decided
        return decided

    def abort(self, reason: str) -> None:
        """Inject no further fault."""
        self.aborted = self.aborted or reason

    def refused(self, decision: Decision, reason: str) -> None:
        """Mark a fault as skipped that the job refused."""
        self.decisions[self.decisions.index(decision)] = Decision(decision.at, decision.fault, reason)

    def still_stopped(self, now: Instant) -> list[IslandId]:
        """The islands that are under a fault which ends only later by itself: stopped, cut off, slow, payloads at risk."""
        return [island for island, until in self._lasts_until.items() if until > now]

    def _aborts(self, figures: Figures) -> bool:
        if not self.plan.abort:
            return False
        current = figures()
        for condition in self.plan.abort:
            value = condition.value_in(current)
            if condition.holds(value):
                self.abort(f"{condition.text} (it is {value:.4g})")
                return True
        return False

    def _decide(self, now: Instant, fault: PlannedFault, training: Mapping[IslandId, Incarnation]) -> Decision:
        late = now - ((self.begun_at or 0.0) + fault.at)
        if late > LATE_MAX_S:
            return Decision(now, fault, f"missed: the job was not looked at for {late:.0f} s after the fault came due")
        if isinstance(fault.fault, Islandless):
            return Decision(now, fault)
        live = [island for island, incarnation in training.items() if self._lives(now, island, incarnation)]
        if fault.island not in live:
            return Decision(now, fault, f"{fault.island} does not train")
        if isinstance(fault.fault, Away | Deadly):
            keep, affected = self.plan.blast_radius.keep, {fault.island, *fault.beside}
            if len(set(live) - affected) < keep:
                with_it = f", and with the node of {fault.island} more may die" if fault.beside else ""
                return Decision(now, fault, f"only {len(live)} islands train, and {keep} are kept{with_it}")
        self._note(now, fault, training)
        return Decision(now, fault)

    def _note(self, now: Instant, fault: PlannedFault, training: Mapping[IslandId, Incarnation]) -> None:
        """Remember what the picture of the job will not show at once, and what outlives the plan's end."""
        if isinstance(fault.fault, Deadly):
            self._killed[fault.island] = training[fault.island]
        for island in fault.beside:
            if island == fault.island:
                continue  # its incarnation tells when it is back
            self._away_until[island] = max(now + NODE_LOSS_S, self._away_until.get(island, now))
        if isinstance(fault.fault, Away):
            self._away_until[fault.island] = now + fault.duration
        if isinstance(fault.fault, LinkFault | Away):
            until = inf if isinstance(fault.fault, PayloadFault) else now + fault.duration
            self._lasts_until[fault.island] = max(until, self._lasts_until.get(fault.island, until))

    def _lives(self, now: Instant, island: IslandId, incarnation: Incarnation) -> bool:
        return incarnation > self._killed.get(island, 0) and self._away_until.get(island, now) <= now


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault and when it is due, in seconds since the plan began. ``island`` is empty for a fault of no island.

    ``beside`` are the islands that may die with one node, this one among them. Only the node group of an island is known
    here, so these are all islands of the group, or none if the island is alone in it.
    """

    at: Instant
    fault: Fault
    beside: tuple[IslandId, ...] = ()

    @property
    def kind(self) -> Kind:
        kind: Kind = self.fault.kind
        return kind

    @property
    def island(self) -> IslandId:
        return flat(self.fault).island

    @property
    def duration(self) -> Duration:
        return flat(self.fault).duration

    def description(self) -> str:
        return describe(self.fault, self.island)


def schedule(plan: ChaosPlan, islands: Sequence[IslandPlan]) -> tuple[PlannedFault, ...]:
    """Every fault of the plan, in time order; at one instant in the order of the entries and of the islands."""
    planned = []
    group_of = {island.island: island.node_group for island in islands}
    members: dict[NodeGroupId, list[IslandId]] = defaultdict(list)
    for island in islands:
        members[island.node_group].append(island.island)
    groups = {
        group: tuple(there) if len(there) > 1 else () for group, there in members.items()
    }  # one for all its faults
    for n, entry in enumerate(plan.faults):
        targets = Random(f"{plan.seed}/{n}/target")
        there = _there(entry.target, islands)
        for at in _instants(entry, plan.duration, Random(f"{plan.seed}/{n}/at")):
            for target in _drawn(entry, there, targets):
                beside = groups[group_of[target]] if entry.kind is Kind.KILL_NODE else ()
                planned.append(PlannedFault(at, entry.fault(target), beside))
    return tuple(sorted(planned, key=lambda fault: fault.at))


def _instants(entry: FaultSection, duration: Duration, random: Random) -> Iterator[Instant]:
    if entry.at:
        yield from entry.at
        return
    until = min(duration, duration if entry.until is None else entry.until)
    at, count = entry.start, 0
    while True:
        count += 1
        if entry.poisson is not None:
            at += Exponential(entry.poisson.mtbf).draw(random)
        else:
            at = entry.start + count * (entry.every or duration)
        if at >= until:
            return
        yield at


def _drawn(entry: FaultSection, there: Sequence[IslandId], random: Random) -> Sequence[IslandId]:
    """Return the islands of one fault, in the order of the job."""
    if entry.kind in ISLANDLESS:
        return [IslandId("")]
    if entry.target.random is None:
        return there
    return [there[n] for n in sorted(random.sample(range(len(there)), entry.target.random))]


def _there(target: Target, islands: Sequence[IslandPlan]) -> list[IslandId]:
    """Return the islands that an entry may target, in the order of the job."""
    if target.name is not None:
        return [IslandId(target.name)]
    return [island.island for island in islands if target.region in (None, island.region)]


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on a fault at instant ``at`` of the job. ``skipped`` is the reason for not injecting it, or empty."""

    at: Instant
    fault: PlannedFault
    skipped: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the decision as rows and verdicts have it. A skipped fault has its reason under ``spared``."""
        fault = flat(self.fault.fault)._asdict()
        return {"at": self.at, "planned_at": self.fault.at, **fault, "spared": self.skipped}


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
                "schema": VERDICT_SCHEMA,
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
