"""What it brings to merge a mixture's routers more often. No part of ``make bench``: ``python -m tests.bench.routers``.

A tiny mixture is trained in virtual time, by three ways to merge and the same seeds: routers with the rest, routers apart
with a period of their own, and the whole model that often. Printed are the held-out loss of the result, the distance of
islands' routers over their travel, as a mean over merges, and by how much an adoption raises the training loss, as a mean
over islands. Takes about two minutes of one core.
"""

from __future__ import annotations

import argparse
from math import fsum, sqrt
from typing import Any

from learners import jax_trainer
from orchestrator.laboratory.multiplex import MultiplexedJob
from orchestrator.specification.config import parse_job

INTERVAL, OWN = 24, 6
ARMS: dict[str, dict[str, Any]] = {
    f"all every {INTERVAL}": {"interval_steps": INTERVAL},
    f"routers every {OWN}": {"interval_steps": INTERVAL, "router_interval_steps": OWN},
    f"all every {OWN}": {"interval_steps": OWN},
}
MIXTURE: dict[str, Any] = {
    "vocabulary_size": 256,
    "width": 32,
    "layer_count": 2,
    "head_count": 2,
    "key_value_head_count": 1,
    "head_size": 16,
    "experts": {"count": 8, "active": 2, "hidden_size": 32, "balance_weight": 0.01},
}


def trained(sync: dict[str, Any], seed: int, islands: int, steps: int) -> tuple[float, float, float, float]:
    """Return loss, distance over travel, the rise of the loss at adoptions, and merges of the routers."""
    document = {
        "seed": seed,
        "islands": [{"node_group": "here", "count": islands}],
        "budget": {"steps": steps},
        "model": {"decoder": MIXTURE, "compute_dtype": "float32"},
        "data": {"sequence_length": 64},
        "training": {"batch_size": 4, "inner_optimizer": {"lr": 4e-3, "warmup_steps": steps // 10}},
        "evaluation": {"sequences": 64},
        "synchroniser": {"fragments": 4, "overlap_steps": 2, "grace_cap_steps": 2, "quorum": islands, **sync},
    }
    job = MultiplexedJob(parse_job(document), jax_trainer.create, transfer_steps=0.5)
    for _ in job.run():
        pass
    mixture = job.outcome.statistics["mixture"]
    routers, own = mixture["routers"], mixture["islands"].values()
    merges = sum(one["merges"] for one in routers)
    apart = fsum(one["merges"] * one["distance_mean"] / one["travel_mean"] for one in routers) / merges
    rise = fsum(one["loss_after"] - one["loss_before"] for one in own) / len(own)
    return job.outcome.loss, apart, rise, merges


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.routers", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    for arm, sync in ARMS.items():
        runs = [trained(sync, seed, options.islands, options.steps) for seed in range(options.seeds)]
        losses = [run[0] for run in runs]
        mean = fsum(losses) / len(runs)
        error = sqrt(fsum((loss - mean) ** 2 for loss in losses) / max(1, len(runs) - 1) / len(runs))
        apart, rise, merges = (fsum(column) / len(runs) for column in list(zip(*runs, strict=True))[1:])
        print(
            f"{arm:16} loss {mean:.4f} ± {error:.4f} nats; {merges:.0f} merges with routers, {apart:.3f} of their travel "
            f"apart; adoptions raise the loss by {rise:+.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
