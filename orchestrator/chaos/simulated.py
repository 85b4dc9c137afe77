"""A plan against a simulated job: the same schedule and the same decisions as live, injected in virtual time.

    found = run(plan, policy, world_plan, seed);  found.verdict, found.world

Responsible for looking at the job when a fault is due and every second, as the live driver does; for turning decisions into
what the world knows: an operator's kill, a freeze, a link that is slow; and for saying in the verdict's notes what the world
does not know, so that no plan passes by silence. Refuses to know how a job comes to its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.accounting import report
from orchestrator.chaos.plan import LOSS_GAP, ChaosPlan, check_fleet, figures_now
from orchestrator.chaos.runner import ChaosRunner, Decision, Verdict, judge, schedule
from orchestrator.core.events import FaultInjected
from orchestrator.core.faults import Islandless, Kind, flat
from orchestrator.core.vocabulary import CommandId, Incarnation, Instant, IslandId, IslandState, JobPolicy
from orchestrator.simulation.faults import inject, simulated_fault
from orchestrator.simulation.plan import WorldPlan
from orchestrator.simulation.world import World

LOOK_S = 1.0
NOT_HERE: Mapping[Kind, str] = {
    Kind.KILL_SYNCHRONISER: "a simulated job's synchroniser cannot be killed",
    Kind.KILL_API: "a simulated job has no service",
}
_NOTES: Mapping[Kind, str] = {
    Kind.KILL_SYNCHRONISER: "kill_synchroniser was not injected: the simulated job continues as if it had its synchroniser "
    "throughout, so only a live run shows what its loss costs",
    Kind.KILL_API: "kill_api was not injected: the simulated job has no service, and training asks nothing of one",
    Kind.KILL_NODE: "kill_node: a node stands for its whole node group here, its processes die at once, and there is "
    "always another node for them",
}


@dataclass(frozen=True, slots=True)
class SimulatedChaos:
    world: World
    runner: ChaosRunner
    verdict: Verdict


def run(
    plan: ChaosPlan,
    policy: JobPolicy,
    world_plan: WorldPlan,
    seed: int,
    on_progress: Callable[[float], None] = lambda _ratio: None,
) -> SimulatedChaos:
    """The job to its end under the plan. ``seed`` is the world's; the plan's faults are drawn from its own."""
    check_fleet(plan, policy.islands)
    world = World(policy, world_plan, seed, checked=False)
    runner = ChaosRunner(plan, schedule(plan, policy.islands))
    driver = _Driver(world, runner)
    for _ in world.passing(at_once=1):
        if runner.begun_at is None:
            driver.look()
        on_progress(min(1.0, world.core.state.tokens_trained / policy.token_budget))
    facts = {"job_id": f"simulated-{seed}", "name": plan.name}
    figures = report.build(policy, world.goodput, world.statistics, facts)
    return SimulatedChaos(world, runner, judge(runner, figures, notes=tuple(_notes(plan, world_plan))))


def _notes(plan: ChaosPlan, world_plan: WorldPlan) -> Iterator[str]:
    """Yield how the simulated world differs from the real one for the faults of this plan."""
    kinds = {fault.kind for fault in plan.faults}
    yield from (note for kind, note in _NOTES.items() if kind in kinds)
    if Kind.SLOW in kinds and not world_plan.payload_bytes:
        yield "slow changed nothing here: this world does not know its payloads' size (payload_bytes)"
    if any(objective.root == LOSS_GAP for objective in plan.objectives):
        yield f"{LOSS_GAP} has no value here: a simulated job trains nothing; measure it live, or by `atoll train-tape`"


class _Driver:
    def __init__(self, world: World, runner: ChaosRunner) -> None:
        self._world, self._runner = world, runner

    def look(self) -> None:
        """Let the plan decide; at its beginning, every further look is set."""
        world, runner = self._world, self._runner
        if world.finished is not None:
            return
        waiting = runner.begun_at is None
        for decision in runner.look(world.now, self._training(), self._figures):
            if not decision.skipped:
                self._inject(decision)
        if waiting and runner.begun_at is not None:
            for at in sorted({fault.at for fault in runner.pending}):
                world.later(at, self.look)
            world.later(LOOK_S, self._tick)

    def _tick(self) -> None:
        if self._world.finished is None and not self._runner.over:
            self.look()
            self._world.later(LOOK_S, self._tick)

    def _inject(self, decision: Decision) -> None:
        world, fault = self._world, decision.fault
        if isinstance(fault.fault, Islandless):
            self._runner.refused(decision, NOT_HERE[fault.kind])
            return
        incarnation = world.core.state.islands[fault.island].incarnation
        command = CommandId(f"chaos-{len(self._runner.decisions)}")
        caller = f"chaos:{self._runner.plan.name}"
        island, form = fault.island, flat(fault.fault)
        world.tell(FaultInjected(world.now, command, caller, form.kind, island, incarnation, *form.numbers))
        for beside in dict.fromkeys((island, *fault.beside)):
            inject(world, simulated_fault(world.now, beside, fault.fault))

    def _training(self) -> dict[IslandId, Incarnation]:
        islands = self._world.core.state.islands.values()
        return {island.id: island.incarnation for island in islands if island.state is IslandState.TRAINING}

    def _figures(self) -> dict[str, Any]:
        now: Instant = self._world.now
        worth, statistics = self._world.goodput.summary(now), self._world.statistics.summary(now)
        return figures_now(len(self._training()), worth, statistics)
