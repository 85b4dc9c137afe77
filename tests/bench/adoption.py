"""The cost of adopting a version with own work, for the thread that takes the steps: Θ − θ_since is added where the
parameters are. The thread that received the publication has computed it.

For comparison, the earlier way: the fragment's own values to the host, Θ + (θ − θ_since) there, and back. The two take
turns, best of five each, on `small`, whose 24 fragments have five million parameters each.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import jax
import numpy as np

from learners import jax_trainer
from learners.island_arrays import update
from orchestrator.parameters import fragment_map
from tests.bench.goals import Goal, at_most
from tests.bench.one_island import specification
from tests.bench.options import Options

SECONDS_PER_GB_GOAL = 0.3
"""The goal on a processor, where "the device" is host memory. On an accelerator the gain is that only Δ crosses its bus."""
TURNS = 5


def main(asked: Options) -> list[Goal]:
    spec = specification(asked).model_dump(mode="json")
    trainer = jax_trainer.create(spec, 0, 1)
    shapes = trainer.tensor_shapes()
    names = max(fragment_map.build(shapes, 24, trainer.roles()), key=len)
    since = trainer.snapshot(names).arrays()
    published = {name: array + np.float32(0.001) for name, array in since.items()}
    gigabytes = sum(array.nbytes for array in since.values()) / 1e9
    prepared = update(published, since)

    def by_the_host() -> None:
        own = trainer.snapshot(names).arrays()
        trainer.load({name: array + (own[name] - since[name]) for name, array in published.items()})

    seconds: dict[str, list[float]] = {"added": [], "by the host": [], "worked out": []}
    for turn in range(TURNS + 1):
        for way, work in (
            ("added", lambda: trainer.add(prepared)),
            ("by the host", by_the_host),
            ("worked out", lambda: update(published, since)),
        ):
            took = _timed(work)
            if turn:  # the first compiles
                seconds[way].append(took / gigabytes)
    best = {way: min(figures) for way, figures in seconds.items()}
    goal = at_most("adoption s/GB in the loop's thread", best["added"], SECONDS_PER_GB_GOAL)
    print(
        f"adoption   {best['added']:.2f} s/GB in the loop's thread ({goal}); {best['by the host']:.2f} by way of the host; "
        f"{best['worked out']:.2f} in the thread that receives a publication"
    )
    return [goal]


def _timed(work: Callable[[], object]) -> float:
    """Return the seconds until the devices have finished."""
    began = perf_counter()
    work()
    jax.block_until_ready(jax.live_arrays())
    return perf_counter() - began
