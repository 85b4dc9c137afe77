"""``python -m tests.bench.memory_analysis``: which models fit how many devices, without having the devices.

An island's step is compiled ahead of time for abstract arrays, on as many host devices as the row says, and XLA's figures
for the memory of a device are compared with what the device has. Nothing is allocated. Each row is compiled in a process
of its own.

    arguments   parameters, optimizer state and batch; the step's results take their place
    temporary   gradients, activations and what else XLA needs, as it says for host devices

XLA's compiler for CPU schedules for speed and not for memory, keeps bfloat16 in float32 where a CPU has no such
arithmetic, and fuses less than the compilers of accelerators. So ``temporary`` is an upper bound in practice: what fits
here fits there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.specification.config import JobSpec, parse_job

GIB = 2**30
DEVICE_GIB: Mapping[str, int] = {"v5e": 16, "H100": 80, "v5p": 95}
"""Memory of one chip. Sources: Google Cloud's pages of TPU v5e and v5p, NVIDIA's data sheet of the H100."""
USABLE_RATIO = 0.95
"""The usable part of it. The rest is the runtime's own."""
LENGTH = 2048


class Row(NamedTuple):
    """A model on a number of devices of a kind, with this many sequences of ``LENGTH`` per device in a batch."""

    preset: str
    kind: str
    devices: int
    mesh: Mapping[str, int]
    sequences_per_device: int = 1
    remat: str = "full"


ROWS = (
    Row("llama3.1-8b", "H100", 8, {"fsdp": 8}),
    Row("llama3.1-8b", "v5p", 8, {"fsdp": 8}),
    Row("llama3.1-8b", "H100", 16, {"fsdp": 8, "tensor": 2}),
    Row("llama3.1-8b", "v5e", 16, {"fsdp": 16}),
    Row("llama3.1-8b", "v5e", 32, {"fsdp": 32}),
    Row("llama3.1-8b", "v5e", 64, {"fsdp": 64}),
    Row("gemma3-12b", "H100", 16, {"fsdp": 16}),
    Row("gemma3-12b", "v5p", 16, {"fsdp": 16}),
    Row("gemma3-12b", "v5e", 32, {"fsdp": 32}),
    Row("gemma3-12b", "v5e", 64, {"fsdp": 64}),
    Row("gemma3-12b", "v5e", 64, {"fsdp": 16, "tensor": 4}),
)


class Figures(NamedTuple):
    """Bytes on one device."""

    arguments: int
    temporary: int

    @property
    def total(self) -> int:
        return self.arguments + self.temporary


def island_document(row: Row) -> dict[str, Any]:
    entry = {"node_group": "here", "mesh": dict(row.mesh), "batch_size": row.devices * row.sequences_per_device}
    spec: JobSpec = parse_job(
        {
            "islands": [entry],
            "budget": {"steps": 1},
            "model": {"preset": row.preset, "remat": row.remat},
            "data": {"sequence_length": LENGTH},
        }
    )
    return spec.island_document(spec.islands[0])


def figures_of(document: Mapping[str, Any]) -> Figures:
    """Return the figures of an island on all devices of this process."""
    from learners import jax_trainer

    analysis = jax_trainer.create(document, 0, 1).memory_analysis()
    return Figures(analysis.argument_size_in_bytes, analysis.temp_size_in_bytes)


def compiled_elsewhere(row: Row) -> Figures:
    flags = f"--xla_force_host_platform_device_count={row.devices}"
    answer = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--row", json.dumps(row)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Figures(*json.loads(answer.stdout.splitlines()[-1]))


def line_of(row: Row, figures: Figures) -> str:
    """Return a row of a Markdown table."""
    fits = figures.total <= USABLE_RATIO * DEVICE_GIB[row.kind] * GIB
    mesh = ", ".join(f"{axis} {length}" for axis, length in row.mesh.items())
    sizes = (f"{byte_count / GIB:.1f}" for byte_count in (*figures, figures.total))
    cells = (
        row.preset,
        f"{row.devices} x {row.kind}",
        mesh,
        *sizes,
        str(DEVICE_GIB[row.kind]),
        "yes" if fits else "NO",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.bench.memory_analysis", description=__doc__)
    parser.add_argument("--row", type=lambda text: Row(*json.loads(text)), help="compile this one here")
    parser.add_argument("--preset", help="only rows of this model")
    asked = parser.parse_args(arguments)
    if asked.row is not None:
        print(json.dumps(figures_of(island_document(asked.row))))
        return 0
    print("| model | devices | mesh | arguments, GiB | temporary | together | a device has | fits |")
    print("|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        if asked.preset in (None, row.preset):
            print(line_of(row, compiled_elsewhere(row)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
