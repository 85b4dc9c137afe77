"""The parts of an export that need JAX, each a process of its own, which ``atoll export`` starts.

    python -m learners.export orbax FILE FOLDER    parameters from a safetensors file as an Orbax checkpoint
    python -m learners.export drawn SPEC FILE      the model that a job draws from its seed, as a safetensors file

The checkpoint is a flat mapping of names to float32 arrays, as ``learners.model.build(spec)`` accepts them. Either file is
written as a whole or not at all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def write_orbax(file: Path, folder: Path) -> None:
    """Write a checkpoint of the tensors in ``file`` to ``folder``, which must not exist."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve(), load_file(file))


def write_drawn(spec: Mapping[str, Any], file: Path) -> None:
    """Write the tensors that this specification's model begins with if it has no initial weights."""
    from learners import model

    own = {**spec["model"], "initial_weights": None, "weights_digest": None}
    built = model.build({**spec, "model": own, "trainable": None})
    draft = file.with_suffix(".draft")
    save_file({name: np.asarray(tensor) for name, tensor in built.initialise(spec["seed"]).items()}, draft)
    draft.replace(file)


def main() -> None:
    form, source, target = sys.argv[1:]
    if form == "orbax":
        write_orbax(Path(source), Path(target))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    write_drawn(json.loads(Path(source).read_text()), Path(target))


if __name__ == "__main__":
    main()
