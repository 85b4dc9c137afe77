"""Events per second of the core: a simulated job of eight islands is recorded, then fed to a fresh core without anything
else.

``capacity`` does so for jobs of up to 1,000 islands and of several numbers of fragments, and also with all that a live
synchroniser does with an event but for Ray's calls: its folds, and its tape on this disk. Figures are processor seconds, so
that other work of the machine counts little.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import events as e
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import IslandPlan, JobPolicy
from orchestrator.simulation.plan import WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.system.run_folder import TAPE
from orchestrator.tape.driver import Driver, Pending
from orchestrator.tape.schema import Header
from orchestrator.tape.storage import TapeWriter
from tests.bench import curve
from tests.bench.goals import Goal, at_least
from tests.bench.options import Options
from tests.harness.story import policy

EVENTS_PER_SECOND_GOAL = 50_000
STEPS, SMALL_STEPS = 2000, 50
SIZES = ((8, 8), (64, 8), (256, 8), (1000, 8), (64, 24), (64, 96))
"""Islands and fragments of the jobs of ``capacity``."""
SMALL_SIZES = ((8, 4),)
INTERVAL_STEPS, USUAL_FRAGMENTS = 24, 8


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


def capacity(asked: Options) -> list[Goal]:
    curves: dict[str, list[tuple[float, float]]] = {"core": [], "with the tape": []}
    for islands, fragments in SMALL_SIZES if asked.small else SIZES:
        events, merges = _recorded(islands, fragments)
        wanted = _policy(islands, fragments)
        fresh = Synchroniser(wanted)
        alone = _per_second(events, fresh.handle)
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            tape = TapeWriter(Path(folder) / TAPE, Header("a job", wanted))
            folds = (Pending(), Goodput(wanted), Statistics(wanted))
            driven = _per_second(events, Driver(Synchroniser(wanted), folds, tape).step)
            tape.let_go()
        if fragments == USUAL_FRAGMENTS:
            for one, per_second in zip(curves.values(), (alone, driven), strict=True):
                one.append((islands, per_second))
        a_round = fragments * len(events) / max(1, merges)
        print(
            f"capacity   {islands:5} islands, {fragments:3} fragments: core {alone:9,.0f} events/s, with folds and tape "
            f"{driven:7,.0f}; {len(events) / max(1, merges):6.0f} events a merge, so that all of a round's take "
            f"{a_round / driven:.2f} s of a core"
        )
    if asked.pictures is not None:
        subtitle = f"A core of a processor, {USUAL_FRAGMENTS} fragments."
        curve.write(asked.pictures / "events.svg", "Events per second", subtitle, "islands", curves)
    return []


def _policy(islands: int, fragments: int) -> JobPolicy:
    steps = INTERVAL_STEPS + INTERVAL_STEPS // 4
    return sample_policy(islands, fragment_count=fragments, interval=INTERVAL_STEPS, steps=steps, quorum=1)


def _recorded(islands: int, fragments: int) -> tuple[Sequence[e.Event], int]:
    """Return the events of a job of one round, and how many of them are merges."""
    plan = WorldPlan((1.0,) * islands, adoption="rebase", report_every_s=1.0)
    world = World(_policy(islands, fragments), plan, seed=0, checked=False).run()
    events = [record.event for record in world.sink.records]
    return events, sum(isinstance(event, e.MergeCompleted) for event in events)


def _per_second(events: Sequence[e.Event], handle: Callable[[e.Event], object]) -> float:
    began = process_time()
    for event in events:
        handle(event)
    return len(events) / (process_time() - began)
