"""Parameters from a safetensors file into an Orbax checkpoint: ``python -m learners.orbax_export FILE FOLDER``.

The checkpoint is one flat mapping of names to float32 arrays, as ``learners.model.build(spec)`` takes them; it is there
whole or not at all. A process of its own, started by ``atoll export``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import orbax.checkpoint as ocp
from safetensors.numpy import load_file


def write(file: Path, folder: Path) -> None:
    """``folder``, which must not exist, is a checkpoint of the tensors in ``file`` afterwards."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve(), load_file(file))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
