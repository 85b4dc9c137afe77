"""Run by test_replay in fresh processes: simulate a faulty job, replay its tape, print both digests."""

from __future__ import annotations

import sys

from orchestrator.simulation.plan import WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.driver import DigestSink
from orchestrator.tape.replay import replay
from tests.simulation.random_faults import random_faults


def main(seed: int) -> None:
    policy = sample_policy(4, quorum=2, steps=150)
    plan = WorldPlan((0.05, 0.05, 0.07, 0.1), faults=random_faults(seed, policy, 6.0, 8), duplicate=0.1, reorder=0.1)
    world = World(policy, plan, seed).run()
    sink = DigestSink(world.tape.header)
    for record in world.tape.records:
        sink.append(record)
    again = replay(world.tape)
    print(sink.digest.hex(), again.digest, again.matching, again.steps, world.goodput.summary()["goodput_ratio"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
