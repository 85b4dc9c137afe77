"""The cost of a checkpoint for the islands of a real job: their time from step to step with one in a stretch, and
without.

The job of ``make demo`` on a real service: four JAX islands, merges, the synchroniser saving Θ, all on this machine's
cores. In every other stretch the job is told to save itself, which does what ``checkpoints.every_merges`` does. Both
kinds of stretch are of one job, because two jobs of the same kind differ by more than the bound (``overhead`` found 8 %).
The first checkpoint is not counted and is shown separately. ``checkpoints`` measures one island with nothing beside it.
"""

from __future__ import annotations

import time
from statistics import median

from api.client import Client
from api.installation.home import CONFIGS
from api.installation.up import Installation
from orchestrator.specification.config import read_job_document
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options
from tests.bench.service import end, service, step_seconds, stretches, wait, with_and_without

RATIO_GOAL = 1.03
STRETCH_S, SMALL_STRETCH_S = 30.0, 8.0
"""With steps of 0.14 to 0.22 s, some 140 to 210 steps: about as often as ``every_merges: 64``."""


def main(asked: Options) -> list[Goal]:
    with service() as (client, installation):
        return [measure(client, installation, SMALL_STRETCH_S if asked.small else STRETCH_S)]


def measure(client: Client, installation: Installation, stretch_s: float) -> Goal:
    document = read_job_document(CONFIGS / "demo.yaml")
    document["budget"] = {"steps": 10_000_000}
    job = client.submit(document).job
    count = len(document["islands"])
    wait(lambda: client.job(job).islands_training == count, "all islands train")
    islands = [island.island for island in client.islands(job) if island.state == "training"]
    took = [saved(client, job)]
    bounds = stretches(client, job, stretch_s, lambda: took.append(saved(client, job)))
    size = client.checkpoints(job)[-1].bytes
    end(client, job)
    run_dir = installation.runs / job
    saving, alone = with_and_without(step_seconds(run_dir, bounds, islands))
    goal = at_most("checkpoints-load step ratio", saving / alone, RATIO_GOAL)
    steps = stretch_s / alone
    first, *others = took
    print(f"checkpoints-load step {1e3 * saving:.1f} ms with one in some {steps:.0f} steps, ", end="")
    print(f"{1e3 * alone:.1f} ms without: ratio {goal.value:.3f} ({goal}); ", end="")
    print(f"{size / 1e6:.1f} MB in {median(others):.2f} s, the first in {first:.2f} s")
    return goal


def saved(client: Client, job: str) -> float:
    """Have the job save itself. Return the seconds until the checkpoint was complete."""
    before = max((checkpoint.number for checkpoint in client.checkpoints(job)), default=0)
    began = time.perf_counter()
    client.take_checkpoint(job)
    wait(lambda: any(checkpoint.number > before for checkpoint in client.checkpoints(job)), "a checkpoint")
    return time.perf_counter() - began
