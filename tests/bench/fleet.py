"""The fleet model's events per second while it writes a tape to disk, and the time of all cells of the goodput table.

The figures are processor seconds of one core, so that other processes on the machine do not count. Systems in lock-step
are listed separately: the waiting that they add is computed once per stall, for all learners.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import process_time

from orchestrator.simulation import published
from orchestrator.simulation.fleet import LOCK_STEP, FleetPlan, System
from orchestrator.simulation.fleet_world import FleetTape, FleetWorld, fleet_header
from orchestrator.tape.storage import TapeWriter
from tests.bench.goals import Goal, at_least, at_most
from tests.bench.options import Options

EVENTS_PER_SECOND_GOAL, TABLE_SECONDS_GOAL = 200_000, 20.0
DAYS, RUNS = 20, 3
SMALL_DAYS, SMALL_RUNS = 1, 1
SMALL_STDERR = 0.02
"""The standard error of a cell of the goodput table at the smallest size."""


def main(asked: Options) -> list[Goal]:
    judged = []
    days, runs = (SMALL_DAYS, SMALL_RUNS) if asked.small else (DAYS, RUNS)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        for system in System:
            plan = FleetPlan(1_200_000, days * 86400.0, system)
            events, best = 0, 0.0
            for run in range(runs):
                with TapeWriter(Path(folder) / f"{system}-{run}.jsonl", fleet_header(plan, run)) as writer:
                    world = FleetWorld(plan, run, tape=FleetTape(plan, writer))
                    began = process_time()
                    for _ in world.batches():
                        pass
                events, best = world.events, max(best, world.events / (process_time() - began))
            goal = at_least(f"fleet events/s, {system}", best, EVENTS_PER_SECOND_GOAL)
            judged += [] if system in LOCK_STEP else [goal]
            told = "no goal" if system in LOCK_STEP else goal
            print(f"fleet      {best:>12,.0f} events/s with tape   ({system}; {events:,} events; {told})")
    began = process_time()
    cells = list(published.goodput(seed=0, stderr=SMALL_STDERR if asked.small else published.STDERR))
    seconds = process_time() - began
    widest = max(cell.stderr or 0.0 for cell in cells)
    goal = at_most("fleet seconds for the goodput table", seconds, TABLE_SECONDS_GOAL)
    print(
        f"fleet      {seconds:12.1f} s for the goodput table's {len(cells)} cells, each to ±{196 * widest:.2f} pp ",
        end="",
    )
    print(f"({goal})")
    return [*judged, goal]
