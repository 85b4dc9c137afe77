"""Events per second of the core: a simulated job of eight islands is recorded, then fed to a fresh core without anything
else.
"""

from __future__ import annotations

from time import perf_counter

from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import IslandPlan
from orchestrator.simulation.plan import WorldPlan
from orchestrator.simulation.world import World
from tests.bench.goals import Goal, at_least
from tests.bench.options import Options
from tests.harness.story import policy

EVENTS_PER_SECOND_GOAL = 50_000
STEPS, SMALL_STEPS = 2000, 50


def main(asked: Options) -> list[Goal]:
    names = "abcdefgh"
    budget = 8 * (SMALL_STEPS if asked.small else STEPS) * 100
    wanted = policy(names, fragment_count=24, sync_interval_steps=24, quorum=1, token_budget=budget)
    assert all(isinstance(plan, IslandPlan) for plan in wanted.islands)
    steps = WorldPlan(step_s=tuple(1.0 + 0.01 * i for i in range(len(names))))
    world = World(wanted, steps, seed=0, checked=False).run()
    events = [record.event for record in world.sink.records]
    best = 0.0
    for _ in range(5):
        fresh = Synchroniser(wanted)
        began = perf_counter()
        for event in events:
            fresh.handle(event)
        best = max(best, len(events) / (perf_counter() - began))
    goal = at_least("core events/s", best, EVENTS_PER_SECOND_GOAL)
    print(f"core       {best:>12,.0f} events/s   ({len(events):,} events; {goal})")
    return [goal]
