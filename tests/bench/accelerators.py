"""Measures training on a machine with accelerators: ``python -m tests.bench.accelerators [PRESET …]``.

It has two parts, with models of 0.1 to 1.2 billion parameters unless others are named:

    training    each model in a process of its own by ``python -m tests.bench training``: tokens per second and model FLOPs
                utilisation of one island against a bare loop, the cost of a boundary, memory
    recovery    a live job of the first model with an island on each GPU of this machine, on a service of its own: one is
                killed and comes back; the recovery time, and the longest gap between steps of the others

``make bench`` does not run it, because it needs GPUs. ``--on-cpu`` only shows that it runs, with ``nano`` and two
islands.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.bench import training
from tests.bench.recovery import complete, parts, summary
from tests.bench.service import end, service, wait

PRESETS = ("llama3-100m", "qwen3-0.6b", "llama3.2-1b")
GROUP = "here"
BACK_TIMEOUT_S = 600.0
"""The longest time for an island to start or to recover: a model of a billion parameters is compiled anew without a
cache."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.bench.accelerators", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"{', '.join(PRESETS)} unless said")
    parser.add_argument("--on-cpu", action="store_true", help="nano on two islands without accelerators")
    asked = parser.parse_args(arguments)
    gpu_count = 0 if asked.on_cpu else gpus_of_this_machine()
    if not gpu_count and not asked.on_cpu:
        parser.error("JAX finds no GPU here. Install jax[cuda12] into this environment, or say --on-cpu to see it run.")
    presets = asked.presets or (["nano"] if asked.on_cpu else list(PRESETS))
    missed = 0
    for preset in presets:  # a process each: its memory goes back, and what is left is the job's
        small = ["--small"] if asked.on_cpu else []
        missed += subprocess.run(
            [sys.executable, "-m", "tests.bench", "training", "--preset", preset, *small]
        ).returncode
    recover(presets[0], gpu_count)
    return 1 if missed else 0


def gpus_of_this_machine() -> int:
    """Count the GPUs in another process, because JAX takes most of their memory as soon as it finds them."""
    counting = "import jax; print(sum(device.platform == 'gpu' for device in jax.local_devices()))"
    return int(subprocess.run([sys.executable, "-c", counting], stdout=subprocess.PIPE, check=True).stdout)


def recover(preset: str, gpu_count: int) -> None:
    """Kill one island of a job, and print how it came back."""
    island_count = gpu_count or 2
    group = {"name": GROUP, "region": GROUP, "cpus": 4 * island_count, "accelerators": gpu_count}
    with tempfile.TemporaryDirectory(prefix="atoll-groups-") as folder:
        groups = Path(folder) / "groups.yaml"
        groups.write_text(yaml.safe_dump({"node_groups": [group]}))
        with service(groups) as (client, installation):
            job = client.submit(document(preset, island_count, gpu_count)).job
            tape = installation.runs / job / "tape.jsonl"
            wait(lambda: client.job(job).islands_training == island_count, "all islands train", BACK_TIMEOUT_S)
            wait(lambda: summary(tape)["merges"], "something is merged", BACK_TIMEOUT_S)
            client.kill(job, client.islands(job)[0].island)
            wait(lambda: complete(tape), "the killed island is back", BACK_TIMEOUT_S)
            end(client, job)
            back, gap = complete(tape), summary(tape)["survivor_gap_max_s"]
    print(
        f"recovery   {preset}, {island_count} islands on {gpu_count or 'no'} GPUs: SIGKILL to first merge "
        f"{back[0]['total']:.2f} s ({' + '.join(parts(back))}); longest gap of the others "
        + ("none, for there are none" if gap is None else f"{gap:.2f} s")
    )


def document(preset: str, island_count: int, gpu_count: int) -> dict[str, Any]:
    """Return a job that does not end by itself: the model as in ``training``, an island on each GPU."""
    model = training.document(preset, on_cpu=not gpu_count)
    island = {"node_group": GROUP, "count": island_count, "cpus": 1}
    return {
        "name": "accelerators",
        **{section: model[section] for section in ("model", "data", "training")},
        "islands": [island | ({"accelerator": "gpu", "accelerators": 1} if gpu_count else {})],
        "synchroniser": {"fragments": training.FRAGMENTS, "interval_steps": training.INTERVAL},
        "budget": {"steps": 10_000_000},
        "evaluation": {"every_merges": 0, "sequences": 4},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
