"""A run of a plan under way: at each look at the job, what strikes, what is spared and why, and whether it is over.

    decisions = runner.look(now, training, figures)

               more islands train than are kept             all struck or spared
    WAITING ────────────────────────────────────▶ BEGUN ───────────────────────────▶ OVER
                                                    └────── a condition to abort ──────▶ OVER (aborted)

Live and simulated runs ask the same object. Responsible for the blast radius, which counts an island as away from the
moment it is killed, stopped or cut off, however long the picture of the job needs to show that, and with a node all islands
of its node group. One whose link is slow or whose payloads suffer trains on and counts. Responsible too for never making up
for what nobody was there to do: a fault that came due too long ago is spared. Refuses to strike: a decision is data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from orchestrator.chaos.kinds import AWAY, DEADLY, ISLANDLESS, LINK
from orchestrator.chaos.plan import ChaosPlan
from orchestrator.chaos.schedule import PlannedFault
from orchestrator.core.vocabulary import Duration, Incarnation, Instant, IslandId

LATE_MAX_S = 3.0
"""How late a look may find a fault that strikes all the same. Faults whose time passed while nobody looked (the service was
away, the job did not answer) would strike all at once, which no plan asked for."""
NODE_LOSS_S: Duration = 20.0
"""By then whoever died with a node is known to be dead: its processes end within seconds, and are missed soon after."""
Figures = Callable[[], Mapping[str, Any]]
"""Asked only when the plan has conditions to abort."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a fault at instant ``at`` of the job. ``spared`` says why it does not strike; empty if it does."""

    at: Instant
    fault: PlannedFault
    spared: str = ""

    def plain(self) -> dict[str, Any]:
        names = (field.name for field in fields(self.fault) if field.name not in ("at", "beside"))
        fault = {name: getattr(self.fault, name) for name in names}
        return {"at": self.at, "planned_at": self.fault.at, **fault, "spared": self.spared}


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
        """Nothing strikes any more."""
        self.aborted = self.aborted or reason

    def refused(self, decision: Decision, reason: str) -> None:
        """A fault that was to strike did not after all: the job would not take it."""
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
            return Decision(now, fault, f"missed: nobody looked for {late:.0f} s after it came due")
        if fault.kind in ISLANDLESS:
            return Decision(now, fault)
        live = [island for island, incarnation in training.items() if self._lives(now, island, incarnation)]
        if fault.island not in live:
            return Decision(now, fault, f"{fault.island} does not train")
        if fault.kind in AWAY | DEADLY:
            keep, struck = self.plan.blast_radius.keep, {fault.island, *fault.beside}
            if len(set(live) - struck) < keep:
                with_it = f", and with the node of {fault.island} more may die" if fault.beside else ""
                return Decision(now, fault, f"only {len(live)} islands train, and {keep} are kept{with_it}")
        self._note(now, fault, training)
        return Decision(now, fault)

    def _note(self, now: Instant, fault: PlannedFault, training: Mapping[IslandId, Incarnation]) -> None:
        """Remember what the picture of the job will not show at once, and what outlives the plan's end."""
        if fault.kind in DEADLY:
            self._killed[fault.island] = training[fault.island]
        for island in fault.beside:
            if island == fault.island:
                continue  # its incarnation tells when it is back
            self._away_until[island] = max(now + NODE_LOSS_S, self._away_until.get(island, now))
        if fault.kind in AWAY:
            self._away_until[fault.island] = now + fault.duration
        if fault.kind in LINK | AWAY:
            until = inf if fault.payloads else now + fault.duration
            self._lasts_until[fault.island] = max(until, self._lasts_until.get(fault.island, until))

    def _lives(self, now: Instant, island: IslandId, incarnation: Incarnation) -> bool:
        return incarnation > self._killed.get(island, 0) and self._away_until.get(island, now) <= now
