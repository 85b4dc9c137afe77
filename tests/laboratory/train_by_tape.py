"""Run by test_train_tape in fresh processes: simulate a faulty job, train by its tape, print the parameters' digest."""

from __future__ import annotations

import sys
from typing import Any

from orchestrator.laboratory import train_tape
from orchestrator.laboratory.multiplex import MakeTrainer
from orchestrator.laboratory.tape_training import TapeTraining, Trained
from orchestrator.simulation.plan import WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.tape.schema import Tape
from tests.laboratory.array_trainer import TOKENS
from tests.laboratory.quadratic import QuadraticTrainer
from tests.simulation.random_faults import random_faults

ISLANDS, FRAGMENTS, INTERVAL = 4, 4, 12
STEP_S = (0.05, 0.05, 0.06, 0.055)


def job(steps: int = 200, **synchroniser: Any) -> JobSpec:
    sync = {"fragments": FRAGMENTS, "interval_steps": INTERVAL, **synchroniser}
    return parse_job(
        {
            "islands": [{"node_group": "here", "count": ISLANDS}],
            "budget": {"steps": steps},
            "data": {"sequence_length": TOKENS},
            "training": {"batch_size": 1},
            "synchroniser": sync,
        }
    )


def world(seed: int, adoption: str, fault_count: int = 8, kind: type[World] = World, **plan: Any) -> World:
    policy = sample_policy(ISLANDS, steps=200, interval=INTERVAL, fragment_count=FRAGMENTS, tokens_per_step=TOKENS)
    faults = random_faults(seed, policy, 9.0, fault_count)
    given = {"step_s": STEP_S, "tokens_per_step": TOKENS, "adoption": adoption, "faults": faults, **plan}
    return kind(policy, WorldPlan(**given), seed)


def train(tape: Tape, spec: JobSpec, make_trainer: MakeTrainer = QuadraticTrainer) -> Trained:
    training = TapeTraining(spec, train_tape.match(tape, spec).trace, make_trainer)
    for _ in training.run():
        pass
    assert training.trained is not None
    return training.trained


def main(seed: int) -> None:
    tape = world(seed, "rebase", duplicate=0.1, reorder=0.1, publication_loss=0.1).run().tape
    print(train(tape, job(adoption="rebase")).digest)


if __name__ == "__main__":
    main(int(sys.argv[1]))
