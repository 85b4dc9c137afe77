"""The cost of a codec to the model: held-out loss of nano by codec and seed, all else equal. Not part of ``make bench``.

``python -m tests.bench.codecs [CODEC …] [--steps N] [--seeds S …]`` trains the job of ``deploy/configs/compare.yaml`` in
virtual time, with four islands at speeds that differ by ten per cent, each codec up and down, against float32. 500 steps
take four minutes on two idle cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

import yaml

from learners import jax_trainer
from orchestrator.laboratory.multiplex import MultiplexedJob
from orchestrator.parameters.codec.registry import CODEC_NAMES
from orchestrator.specification.config import parse_job

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "configs" / "compare.yaml"
INNER_LR = 0.004


def held_out_loss(codec: str, seed: int, steps: int) -> float:
    document = yaml.safe_load(CONFIGURATION.read_text())["job"]
    document |= {"seed": seed, "budget": {"steps": steps}, "evaluation": {"every_merges": 10**6, "sequences": 512}}
    document["training"]["inner_optimizer"] = {"lr": INNER_LR}
    document["synchroniser"]["wire"] = codec
    job = MultiplexedJob(parse_job(document), jax_trainer.create, transfer_steps=1.0, speed_spread=0.1)
    for _ in job.run():
        pass
    return job.outcome.curve[-1][1]


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.bench.codecs", description=__doc__.splitlines()[0])
    parser.add_argument("codec", nargs="*", choices=[*CODEC_NAMES, []], help=f"{', '.join(CODEC_NAMES)}; all of them")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked = parser.parse_args()
    exact: dict[int, float] = {}
    for seed in asked.seeds:
        for codec in dict.fromkeys(["float32", *(asked.codec or CODEC_NAMES)]):
            began = perf_counter()
            loss = held_out_loss(codec, seed, asked.steps)
            against = loss / exact.setdefault(seed, loss) - 1
            print(f"seed {seed}  {codec:<9} {loss:.4f}  {against:+.2%}  {perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
