"""The cost of attrition: the demo's job on synthetic islands, each killed once a minute, beside the same job left alone.

Both run at the same time in one cluster, so that other work of the machine affects both. The figure is the merged tokens
of the first over those of the second, in the same minutes. ``--minutes`` says how many.

``attrition-states`` is the same job in the simulator, by the size of an island's state, cold and with a standby for each
island, for several intervals between the merges of a fragment. Its islands take as long to be placed and to start as those
of ``recovery``, and get their states over a line of ``LINE_BYTES_PER_S``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from api.client import Client
from orchestrator.simulation.plan import ENDLESS_TOKENS, Fault, FaultKind, WorldPlan
from orchestrator.simulation.world import World
from orchestrator.specification.config import parse_job
from orchestrator.specification.documents import read_document
from tests.bench import curve
from tests.bench.goals import Goal, at_least
from tests.bench.options import Options
from tests.bench.service import end, service, wait
from tests.ray.jobs import EVERY_GROUP

STEP_S, LOOK_S = 0.06, 0.5
GOAL, STANDBY_GOAL = 0.90, 0.99
STATE_GB, LINE_BYTES_PER_S = (0.01, 0.1, 1.0), 1.25e9
INTERVALS = (24, 12)
PLACE_S, START_S, TRANSFER_S = 0.6, 1.5, 0.1
BEGIN_S, SIMULATED_MINUTES = 20.0, 5
CONFIG = Path(__file__).parents[2] / "deploy" / "configs" / "demo.yaml"


def main(asked: Options) -> list[Goal]:
    with service() as (client, _):
        return [measure(client, asked.minutes)]


def measure(client: Client, minutes: float) -> Goal:
    worn, reference = (client.submit(document(name)).job for name in ("worn", "reference"))
    for job in (worn, reference):
        wait(lambda job=job: client.job(job).islands_training == len(EVERY_GROUP), "all islands train")
    before = [merged(client, job) for job in (worn, reference)]
    kills = wear(client, worn, EVERY_GROUP, minutes)
    after = [merged(client, job) for job in (worn, reference)]
    goodput = client.job(worn).goodput_ratio
    for job in (worn, reference):
        end(client, job)
    worn_tokens, reference_tokens = (late - early for late, early in zip(after, before, strict=True))
    ratio = worn_tokens / reference_tokens
    goal = at_least("attrition merged tokens' ratio", ratio, GOAL)
    print(f"attrition  {ratio:.3f} of the merged tokens of a job left alone   ", end="")
    print(f"({kills} kills in {minutes:g} min; goodput by its own report {goodput:.3f}; {goal})")
    return goal


def states(asked: Options) -> list[Goal]:
    goals, minutes = [], 1 if asked.small else SIMULATED_MINUTES
    curves: dict[str, list[tuple[float, float]]] = {}
    for interval in INTERVALS[-1:] if asked.small else INTERVALS:
        undisturbed, _ = simulated(interval, 0.0, minutes, standby=False, killed=False)
        for standby in (False, True):
            for gigabytes in STATE_GB[:1] if asked.small else STATE_GB:
                merged_tokens, discarded = simulated(interval, gigabytes, minutes, standby=standby, killed=True)
                ratio, how = merged_tokens / undisturbed, "with standbys" if standby else "cold"
                print(
                    f"attrition  simulated, {how}, {interval} steps between merges, {gigabytes:g} GB: {ratio:.4f} ",
                    end="",
                )
                print(f"merged, {discarded:.4f} of what was trained discarded", end="")
                curves.setdefault(f"{'standby' if standby else 'cold'}, {interval} steps", []).append(
                    (gigabytes, ratio)
                )
                if standby and interval == min(INTERVALS):
                    goals.append(at_least(f"attrition of {gigabytes:g} GB with standbys", ratio, STANDBY_GOAL))
                    print(f"   ({goals[-1]})", end="")
                print()
    if asked.pictures is not None:
        subtitle = "Each island is killed once a minute, with and without standbys. Steps are those between merges."
        across, title = "GB of an island's state", "Merged tokens against an undisturbed job"
        curve.write(asked.pictures / "attrition.svg", title, subtitle, across, curves, (0.90, 1.00))
    return goals


def simulated(interval: int, gigabytes: float, minutes: int, *, standby: bool, killed: bool) -> tuple[float, float]:
    """Return the merged tokens of a simulated job, and the part of its trained tokens that was discarded."""
    wanted = document("simulated")
    knobs = {"interval_steps": interval, "overlap_steps": min(6, interval // 2)}
    wanted["synchroniser"] = {**wanted["synchroniser"], **knobs}
    wanted["islands"] = [{**entry, "standby": int(standby)} for entry in wanted["islands"]]
    policy = replace(parse_job(wanted).policy(standbys=True), token_budget=ENDLESS_TOKENS)
    chance, names = random.Random(8), [plan.island for plan in policy.islands]
    at = [(BEGIN_S + 60.0 * (minute + chance.random()), name) for minute in range(minutes) for name in names]
    plan = WorldPlan(
        (STEP_S,) * len(names),
        adoption="rebase",
        faults=tuple(Fault(instant, FaultKind.KILL, name) for instant, name in sorted(at)) if killed else (),
        place_s=(PLACE_S, PLACE_S),
        start_s=(START_S, START_S),
        transfer_s=(TRANSFER_S + gigabytes * 1e9 / LINE_BYTES_PER_S,) * 2,
        kill_s=(0.05, 0.05),
        detect_s=(0.05, 0.1),
    )
    world = World(policy, plan, seed=1, checked=False)
    world.run(until=BEGIN_S + 60.0 * minutes)
    tokens = world.goodput.summary()["tokens"]
    return tokens["merged"], tokens["discarded"] / tokens["trained"]


def document(name: str) -> dict[str, Any]:
    """Return the demo's policy for islands that sleep through steps of STEP_S, in a job that does not end by itself."""
    return {
        "name": name,
        "synchroniser": read_document(CONFIG)["synchroniser"],
        "trainer": "learners.synthetic:create",
        "synthetic": {"step_s": STEP_S},
        "islands": [{"node_group": group} for group in EVERY_GROUP],
        "budget": {"steps": 10_000_000},
        "recovery": {"restarts_max": 1000},
    }


def merged(client: Client, job: str) -> int:
    return int(client.job(job).goodput["tokens"]["merged"])


def wear(
    client: Client, job: str, islands: Sequence[str], minutes: float, over: Callable[[], bool] = lambda: False
) -> int:
    """Kill each of these islands once in each minute, at an instant of its own, until ``over``. Return the number of
    kills.
    """
    chance, began, struck = random.Random(8), time.monotonic(), 0
    instants = [(60.0 * (minute + chance.random()), island) for minute in range(round(minutes)) for island in islands]
    for at, island in [*sorted(instants), (60.0 * minutes, None)]:
        while (left := began + at - time.monotonic()) > 0.0:
            if over():
                return struck
            time.sleep(min(left, LOOK_S))
        if island is not None:
            client.kill(job, island)
            struck += 1
    return struck
