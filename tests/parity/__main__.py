"""``make parity``: whether a model has the same logits here and in transformers, whichever of the two wrote it.

Theirs: transformers writes random small checkpoints of each model type, whole in float32, and in bfloat16 in several files;
they are read here. Ours: small decoders of each family are exported as a job's result is, and transformers loads them. Each
line is the largest difference of a logit, in standard deviations of the logits. Exits with 1 if one is above ``GOAL``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from learners.models.decoder import decoder, logits
from orchestrator.config import parse_job
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import export
from orchestrator.models.huggingface.weights import Weights, described
from orchestrator.models.presets import DECODERS
from orchestrator.roots import EVERYTHING

PYTHON = Path(".cache/parity/bin/python")
REFERENCE = Path(__file__).with_name("reference.py")
GOAL = 1e-4
SMALLER = {
    "vocabulary_size": 96,
    "width": 64,
    "layer_count": 7,
    "head_count": 4,
    "key_value_head_count": 2,
    "head_size": 16,
}


def main() -> int:
    with TemporaryDirectory() as folder:
        theirs, ours = Path(folder, "theirs"), Path(folder, "ours")
        theirs.mkdir()
        reference("build", theirs)
        tokens = np.load(theirs / "tokens.npy").astype(np.int32)
        differences = {f"import {path.name}": imported(path, tokens) for path in sorted(theirs.glob("*/"))}
        ours.mkdir()
        np.save(ours / "tokens.npy", tokens.astype(np.int64))
        own = {name: exported(name, ours, tokens) for name in DECODERS if name.endswith(("20m", "-1b", "-8b"))}
        reference("measure", ours)
        differences |= {f"export {name}": apart(own[name], np.load(ours / name / "logits.npy")) for name in own}
    for name, difference in differences.items():
        print(f"{name:40} {difference:.1e}{'' if difference <= GOAL else f'   above {GOAL:.0e}'}")
    print(f"largest difference {max(differences.values()):.1e} of {len(differences)} checkpoints (goal {GOAL:.0e})")
    return int(max(differences.values()) > GOAL)


def reference(command: str, folder: Path) -> None:
    subprocess.run([PYTHON, REFERENCE, command, folder], check=True)


def imported(folder: Path, tokens: np.ndarray) -> float:
    config = described(str(folder), EVERYTHING)
    return apart(
        computed(config, Weights(config, str(folder), EVERYTHING).taken(), tokens), np.load(folder / "logits.npy")
    )


def exported(name: str, folder: Path, tokens: np.ndarray) -> np.ndarray:
    """The logits of a small decoder like the preset, of which ``folder`` has an export afterwards."""
    preset, sizes = DECODERS[name], dict(SMALLER)
    if preset.window is not None:
        sizes["window"] = 8
    if preset.experts is None:
        sizes["hidden_size"] = 112
    config = DecoderSection.model_validate(preset.model_dump() | sizes)
    drawn = np.random.default_rng(7)
    parameters = {
        each: (np.asarray(start) + 0.1 * drawn.standard_normal(start.shape)).astype(np.float32)
        for each, start in decoder(config, "float32").initialise(7).items()
    }
    assert {each: array.shape for each, array in parameters.items()} == parameter_shapes(config)
    target, merged = folder / name, folder / f"{name}.safetensors"
    target.mkdir()
    job = parse_job(
        {
            "islands": [{"node_group": "here"}],
            "budget": {"steps": 1},
            "model": {"decoder": config.model_dump(mode="json")},
        }
    )
    save_file(parameters, merged)
    export.write(merged, target, json.loads(job.model_dump_json()))
    return computed(config, parameters, tokens)


def computed(config: DecoderSection, parameters: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda p, t: logits(config, jnp.float32, p, t))(parameters, tokens))


def apart(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / other.std())


if __name__ == "__main__":
    sys.exit(main())
