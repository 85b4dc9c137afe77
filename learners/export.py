"""The parts of an export that need JAX or PyTorch, each a process of its own, which ``atoll export`` starts.

    python -m learners.export orbax FILE FOLDER    parameters from a safetensors file as an Orbax checkpoint
    python -m learners.export drawn SPEC FILE      the model that a job draws from its seed, as a safetensors file
    python -m learners.export merged SPEC FILE     a torch job's whole model, from what it trained, as a safetensors file

With ``merged`` the document has the specification as ``spec`` and the file of what was trained as ``parameters``.
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

from orchestrator.errors import AtollError
from orchestrator.system.roots import EVERYTHING


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


def write_merged(document: Mapping[str, Any], file: Path) -> None:
    """Write all parameters of a torch trainer's module: the folder's frozen ones, and the trained ones merged into them."""
    from learners import torch_model
    from learners.island_spec import IslandSpec

    spec = IslandSpec.of({**document["spec"], "roots": EVERYTHING})
    draft = file.with_suffix(".draft")
    save_file(torch_model.merged(spec, load_file(document["parameters"])), draft)
    draft.replace(file)


def main() -> None:
    form, source, target = sys.argv[1:]
    if form == "orbax":
        write_orbax(Path(source), Path(target))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    write = write_merged if form == "merged" else write_drawn
    try:
        write(json.loads(Path(source).read_text()), Path(target))
    except AtollError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
