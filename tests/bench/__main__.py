"""``make bench``: events per second of core and fleet model, the merge arithmetic, what synchronising costs a step, what
keeping a merge and a checkpoint costs, how soon operators are served, what attrition costs, how soon a killed island is
back, and what that costs who gives it a state, and the others.

python -m tests.bench [core] [fleet] [merge] [journal] [checkpoints] [overhead] [surface [--json]] [attrition]
                      [recovery [cold] [standby] [--json]] [donors] [survivors]          all without arguments
"""

from __future__ import annotations

import sys
from time import perf_counter

from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import IslandPlan
from orchestrator.merge import benchmark
from orchestrator.simulation.plan import WorldPlan
from orchestrator.simulation.world import World
from tests.bench import attrition, checkpoints, donors, fleet, journal, overhead, recovery, surface, survivors
from tests.core.story import policy

EVENTS_PER_SECOND_GOAL = 50_000


def core() -> None:
    """Record a simulated job of eight islands, then hand its events to a fresh core, nothing else."""
    names = "abcdefgh"
    wanted = policy(names, fragment_count=24, sync_interval_steps=24, quorum=1, token_budget=8 * 2000 * 100)
    assert all(isinstance(plan, IslandPlan) for plan in wanted.islands)
    world = World(
        wanted, WorldPlan(step_s=tuple(1.0 + 0.01 * i for i in range(len(names)))), seed=0, checked=False
    ).run()
    events = [record.event for record in world.sink.records]
    best = 0.0
    for _ in range(5):
        fresh = Synchroniser(wanted)
        began = perf_counter()
        for event in events:
            fresh.handle(event)
        best = max(best, len(events) / (perf_counter() - began))
    verdict = "met" if best >= EVENTS_PER_SECOND_GOAL else "MISSED"
    print(f"core       {best:>12,.0f} events/s   ({len(events):,} events; goal {EVENTS_PER_SECOND_GOAL:,}: {verdict})")


def merge() -> None:
    for case in benchmark.cases():
        seconds = min(_timed(case.run) for _ in range(5))
        print(f"{case.name:<44} {seconds * 1000:8.1f} ms   {case.payload_bytes / seconds / 1e9:6.2f} GB/s")


def _timed(run: object) -> float:
    began = perf_counter()
    run()  # type: ignore[operator]
    return perf_counter() - began


PARTS = {
    "core": core,
    "fleet": fleet.main,
    "merge": merge,
    "journal": journal.main,
    "checkpoints": checkpoints.main,
    "overhead": overhead.main,
    "surface": surface.main,
    "attrition": attrition.main,
    "recovery": recovery.main,
    "donors": donors.main,
    "survivors": survivors.main,
}

if __name__ == "__main__":
    options = {"--json", *recovery.GOALS_S}
    for part in [argument for argument in sys.argv[1:] if argument not in options] or PARTS:
        PARTS[part]()
