"""The cost of attrition: the demo's job on synthetic islands, each killed once a minute, beside the same job left alone.

Both run at the same time in one cluster, so that other work of the machine affects both. The figure is the merged tokens
of the first over those of the second, in the same minutes. ``--minutes`` says how many.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from api.client import Client
from orchestrator.specification.config import read_document
from tests.bench.goals import Goal, at_least
from tests.bench.options import Options
from tests.bench.service import end, service, wait
from tests.ray.jobs import EVERY_GROUP

STEP_S, LOOK_S = 0.06, 0.5
GOAL = 0.90
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
