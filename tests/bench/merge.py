"""The merge's arithmetic at a stated size, the best of five. It has no goal.

The default: eight islands' float32 copies of a fragment of four million parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.parameters import validation, wire_format
from orchestrator.parameters.codec.registry import CODEC_NAMES
from orchestrator.parameters.outer_gradient import Averaging
from orchestrator.parameters.outer_optimizer import Nesterov
from orchestrator.parameters.outer_state import OuterState, OuterStep, outer_step
from orchestrator.parameters.wire_format import encoded
from tests.bench.goals import Goal
from tests.bench.options import Options

SMALL_PARAMETERS = 10_000


def main(asked: Options) -> list[Goal]:
    for case in cases(parameter_count=SMALL_PARAMETERS) if asked.small else cases():
        took = []
        for _ in range(5):
            began = perf_counter()
            case.run()
            took.append(perf_counter() - began)
        seconds = min(took)
        print(f"{case.name:<44} {seconds * 1000:8.1f} ms   {case.payload_bytes / seconds / 1e9:6.2f} GB/s")
    return []


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
    learned = [0.01 * generator.standard_normal(parameter_count, dtype=np.float32) for _ in range(island_count)]
    weights = [1 / island_count] * island_count
    optimizer = Nesterov(lr=0.7, decay=0.9)
    momentum = optimizer.initial_momentum(anchor)
    state = OuterState({"kernel": anchor}, (("kernel",),), OuterStep(Averaging.RADIAL, optimizer))
    payloads = {name: wire_format.encode({"kernel": anchor}, name) for name in CODEC_NAMES}

    def step(averaging: Averaging) -> Callable[[], object]:
        return lambda: outer_step(anchor, momentum, None, learned, weights, OuterStep(averaging, optimizer))

    def merge() -> object:
        base = state.version(FragmentId(0))
        content = [encoded({"kernel": delta}, "float32", base) for delta in learned]
        inputs = list(zip(content, weights, strict=True))
        return state.merge(FragmentId(0), Version(base + 1), inputs)

    merged, single = anchor.nbytes * island_count, anchor.nbytes
    return (
        Case("merge, radial average, Nesterov", step(Averaging.RADIAL), merged),
        Case("merge, plain mean, Nesterov", step(Averaging.MEAN), merged),
        Case("merge, radial average, Nesterov, digest", merge, merged),
        *(
            Case(f"encode {name}", partial(wire_format.encode, {"kernel": anchor}, name), single)
            for name in CODEC_NAMES
        ),
        *(Case(f"decode {name}", partial(wire_format.decode, payloads[name]), single) for name in CODEC_NAMES),
        Case("check", lambda: validation.check_numbers({"kernel": anchor}), single),
    )
