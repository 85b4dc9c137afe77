"""With K = M, equal speeds and no faults, the whole machinery is synchronous (Streaming) DiLoCo, to float tolerance.

The second opinion is written from the papers' pseudo-code, without islands, events, rounds or letters: lists of arrays
and one loop. DiLoCo arXiv:2311.08105 algorithm 1; Streaming DiLoCo arXiv:2501.18512 algorithm 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from learners.contract import Arrays
from orchestrator.laboratory.baselines import as_diloco
from orchestrator.laboratory.multiplex import MultiplexedJob, Outcome
from orchestrator.parameters import fragment_map
from orchestrator.parameters.pieces import taken
from orchestrator.specification.config import JobSpec, parse_job
from tests.laboratory.array_trainer import TOKENS
from tests.laboratory.quadratic import LR, SHAPES, QuadraticTrainer, gradient, initial

ISLANDS, OUTER_LR, MOMENTUM = 4, 0.7, 0.9


def job(steps: int, fragments: int, interval: int, overlap: int, averaging: str = "mean") -> JobSpec:
    document: dict[str, Any] = {
        "islands": [{"node_group": f"group-{m}"} for m in range(ISLANDS)],
        "budget": {"steps": steps},
        "data": {"sequence_length": TOKENS},
        "training": {"batch_size": 1},
        "synchroniser": {
            "fragments": fragments,
            "interval_steps": interval,
            "overlap_steps": overlap,
            "quorum": ISLANDS,
            "grace_cap_steps": None,
            "averaging": averaging,
            "adoption": "replace",
            "wire": "float32",
            "outer_optimizer": {"kind": "nesterov", "lr": OUTER_LR, "momentum": MOMENTUM},
        },
    }
    return parse_job(document)


def run(spec: JobSpec, transfer: float, speed_spread: float = 0.0) -> Outcome:
    multiplexed = MultiplexedJob(spec, QuadraticTrainer, transfer_steps=transfer, speed_spread=speed_spread)
    for _ in multiplexed.run():
        pass
    return multiplexed.outcome


def inner_steps(replica: Arrays, shard: int, first: int, count: int) -> None:
    for batch in range(first, first + count):
        for name in replica:
            replica[name] = replica[name] - LR * gradient(name, replica[name], shard, batch)


class Outer:
    """Θ and its Nesterov momentum in float64, one plain mean at a time."""

    def __init__(self) -> None:
        self.theta = {name: array.astype(np.float64) for name, array in initial().items()}
        self.momentum = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def step(self, names: tuple[str, ...], replicas: list[Arrays]) -> Arrays:
        theta, momentum = taken(self.theta, names), taken(self.momentum, names)  # views
        for name in names:
            delta = np.mean([theta[name] - taken(replica, [name])[name] for replica in replicas], axis=0)
            momentum[name][...] = MOMENTUM * momentum[name] + delta
            theta[name] -= OUTER_LR * (delta + MOMENTUM * momentum[name])
        return {name: theta[name].astype(np.float32) for name in names}


def test_with_one_fragment_and_no_overlap_it_is_diloco() -> None:
    interval, rounds = 6, 5
    outcome = run(job(interval * rounds, fragments=1, interval=interval, overlap=0), transfer=0.0)
    outer, replicas = Outer(), [initial() for _ in range(ISLANDS)]
    for outer_round in range(rounds):
        for shard, replica in enumerate(replicas):
            inner_steps(replica, shard, outer_round * interval, interval)
        merged = outer.step(tuple(SHAPES), replicas)
        replicas = [dict(merged) for _ in range(ISLANDS)]
    for name, array in outcome.parameters.items():
        np.testing.assert_allclose(array, outer.theta[name], rtol=2e-5, atol=2e-6)
    assert outcome.goodput["goodput_ratio"] == pytest.approx(1.0)  # nobody overwrites anything


@pytest.mark.parametrize(("fragments", "interval", "overlap"), [(3, 6, 2), (5, 5, 1), (2, 8, 3)])
def test_with_several_fragments_and_overlap_it_is_streaming_diloco(fragments: int, interval: int, overlap: int) -> None:
    steps = 4 * interval + 1
    outcome = run(job(steps, fragments, interval, overlap), transfer=float(overlap))
    names = fragment_map.build(SHAPES, fragments)
    outer, replicas = Outer(), [initial() for _ in range(ISLANDS)]
    arriving: dict[int, tuple[int, Arrays]] = {}  # fragment → (boundary at which it is adopted, value)
    for boundary in range(steps + 1):
        adopted = sorted(p for p, (at, _) in arriving.items() if at == boundary)
        for fragment in adopted:
            for replica in replicas:
                for name, array in arriving[fragment][1].items():
                    taken(replica, [name])[name][...] = array
            del arriving[fragment]
        last = boundary == steps
        due = [p for p in range(fragments) if boundary % interval == p * interval // fragments]
        for fragment in [p for p in range(fragments) if p in due or last] if boundary else []:
            if fragment not in arriving and fragment not in adopted:  # there must be new work in it
                arriving[fragment] = (boundary + overlap, outer.step(names[fragment], replicas))
        if not last:
            for shard, replica in enumerate(replicas):
                inner_steps(replica, shard, boundary, 1)
    for name, array in outcome.parameters.items():
        np.testing.assert_allclose(array, outer.theta[name], rtol=2e-5, atol=2e-6)


def test_the_same_seed_gives_the_same_bits_and_the_same_tape() -> None:
    first, second = (run(job(40, 3, 6, 2, "radial"), transfer=1.0, speed_spread=0.2) for _ in range(2))
    assert first.digest == second.digest
    assert first.tape_digest == second.tape_digest


def test_a_decoupled_job_whose_islands_are_all_in_time_is_synchronous_to_the_bit() -> None:
    """K = 1 with a grace window closes each round with everyone in it: nothing but the waiting differs."""
    document = job(48, fragments=1, interval=24, overlap=1).model_dump(mode="json")
    document["synchroniser"] |= {"quorum": 1, "grace_cap_steps": 1.0, "adoption": "rebase"}
    decoupled = parse_job(document)
    assert run(decoupled, transfer=0.0).digest == run(as_diloco(decoupled, {}), transfer=0.0).digest


def test_islands_that_miss_rounds_lose_no_work_when_they_rebase() -> None:
    """Steps vary by 40 %, the window is a fifth of a step: rounds are missed all the time."""
    document = job(120, fragments=3, interval=6, overlap=2).model_dump(mode="json")
    document["synchroniser"] |= {"quorum": 1, "grace_cap_steps": 0.2, "outer_optimizer": {"kind": "sgd", "lr": 1.0}}
    ratios = {}
    for adoption in ("replace", "rebase"):
        document["synchroniser"]["adoption"] = adoption
        ratios[adoption] = run(parse_job(document), transfer=1.0, speed_spread=0.4).goodput["goodput_ratio"]
    assert ratios["rebase"] > 0.95
    assert ratios["replace"] < 0.8
