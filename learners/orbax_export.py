"""Write parameters from a safetensors file as an Orbax checkpoint: ``python -m learners.orbax_export FILE FOLDER``.

The checkpoint is a flat mapping of names to float32 arrays, as ``learners.model.build(spec)`` accepts them. It is written as
a whole or not at all. ``atoll export`` starts this as a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import orbax.checkpoint as ocp
from safetensors.numpy import load_file


def write(file: Path, folder: Path) -> None:
    """Write a checkpoint of the tensors in ``file`` to ``folder``, which must not exist."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve(), load_file(file))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
