"""Bytes on the device while a state leaves it, for a checkpoint or a peer, and while a peer's state arrives.

The figure is the peak of all live arrays over those between two steps: 2 is a full copy beside the state. It is taken
whenever an array has reached the host, or the devices. The bench also measures how long the loop waits, because its next
step changes every array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from learners import jax_trainer
from tests.bench.goals import Goal, at_most
from tests.bench.one_island import seconds_of, specification
from tests.bench.options import Options

FRAGMENTS = 24
RATIO_GOAL = 1.0 + 1.0 / FRAGMENTS
"""One fragment beside the state."""
TURNS = 3


def main(asked: Options) -> list[Goal]:
    spec = specification(asked).model_dump(mode="json")
    trainer = jax_trainer.create(spec, 0, 1)
    saved, gone = highest(trainer.export_state)
    state = saved.arrays()
    gigabytes = sum(array.nbytes for array in state.values()) / 1e9
    on_device = {name: jax.device_put(array) for name, array in state.items()}
    copied = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays))
    held = min(seconds_of(trainer.export_state) for _ in range(TURNS)) / gigabytes
    beside = min(seconds_of(lambda: jax.block_until_ready(copied(on_device))) for _ in range(TURNS)) / gigabytes
    on_device.clear()
    _, come = highest(lambda: trainer.import_state(state))
    judged = [
        at_most("device bytes over the state while it is saved", gone, RATIO_GOAL),
        at_most("device bytes over the state while a peer's arrives", come, RATIO_GOAL),
    ]
    print(
        f"device     {gone:.3f} of the state while it is saved ({judged[0]}), "
        f"{come:.3f} while a peer's arrives ({judged[1]}); "
        f"the loop stands still for {held:.2f} s/GB; copied on the device it would for {beside:.2f}"
    )
    return judged


def highest(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of ``work``, and the peak of bytes on the devices meanwhile, relative to before."""
    seen: list[int] = []

    def counting(convert: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            result = convert(*arguments, **named)
            seen.append(_live_bytes())
            return result

        return counted

    work()  # the first compiles, and allocates
    before = _live_bytes()
    with (
        patch.object(np, "asarray", counting(np.asarray)),
        patch.object(np, "array", counting(np.array)),
        patch.object(jax, "make_array_from_callback", counting(jax.make_array_from_callback)),
    ):
        result = work()
    return result, max(seen) / before


def _live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())
