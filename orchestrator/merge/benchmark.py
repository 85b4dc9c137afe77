"""The merge's work at a stated size, as things to call: for ``make bench``, which has the clock this package has not.

The default: eight islands' float32 copies of a fragment of four million parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.merge import wire
from orchestrator.merge.outer_gradient import Averaging
from orchestrator.merge.outer_optimizer import Nesterov
from orchestrator.merge.outer_state import OuterState, outer_step


@dataclass(frozen=True, slots=True)
class Case:
    """``run`` does the work once; ``payload_bytes`` is the parameters' size it reads, for a rate in bytes per second."""

    name: str
    run: Callable[[], object]
    payload_bytes: int


def cases(island_count: int = 8, parameter_count: int = 4_000_000, seed: int = 0) -> tuple[Case, ...]:
    """Merge (without and with its digest), encode, decode and check, on random parameters."""
    generator = np.random.default_rng(seed)
    anchor = generator.standard_normal(parameter_count, dtype=np.float32)
    replicas = [
        anchor - 0.01 * generator.standard_normal(parameter_count, dtype=np.float32) for _ in range(island_count)
    ]
    weights = [1 / island_count] * island_count
    optimizer = Nesterov(lr=0.7, decay=0.9)
    momentum = optimizer.initial_momentum(anchor)
    state = OuterState({"kernel": anchor}, (("kernel",),), Averaging.RADIAL, optimizer)
    inputs = [({"kernel": replica}, weight) for replica, weight in zip(replicas, weights, strict=True)]
    float32, bfloat16 = wire.encode({"kernel": anchor}), wire.encode({"kernel": anchor}, "bfloat16")

    def step(averaging: Averaging) -> Callable[[], object]:
        return lambda: outer_step(anchor, momentum, replicas, weights, averaging, optimizer)

    def merge() -> object:
        return state.merge(FragmentId(0), Version(state.version(FragmentId(0)) + 1), inputs)

    merged, single = anchor.nbytes * island_count, anchor.nbytes
    return (
        Case("merge, radial average, Nesterov", step(Averaging.RADIAL), merged),
        Case("merge, plain mean, Nesterov", step(Averaging.MEAN), merged),
        Case("merge, radial average, Nesterov, digest", merge, merged),
        Case("encode float32", lambda: wire.encode({"kernel": anchor}), single),
        Case("encode bfloat16", lambda: wire.encode({"kernel": anchor}, "bfloat16"), single),
        Case("decode float32", lambda: wire.decode(float32), single),
        Case("decode bfloat16", lambda: wire.decode(bfloat16), single),
        Case("check", lambda: wire.check({"kernel": anchor}, {"kernel": anchor.shape}), single),
    )
