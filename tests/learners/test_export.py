"""What a job leaves can be used without atoll running: ten lines load it, and it has the loss it had."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from api.commands.checkpoints import described
from learners import corpus, export, jax_trainer
from learners.island_spec import IslandSpec
from orchestrator.host.records import write_parameters
from orchestrator.parameters.tensors import shapes


@pytest.fixture
def trainer(make_job):
    trainer = jax_trainer.create(make_job(), 0, 1)
    for step in range(3):
        trainer.step(step)
    return trainer


def loaded_from_safetensors(folder: Path):
    from safetensors.numpy import load_file

    from learners.model import build

    spec = json.loads((folder / "config.json").read_text())["spec"]
    return build(spec), load_file(folder / "merged.safetensors")


def loaded_from_orbax(folder: Path):
    import orbax.checkpoint as ocp

    from learners.model import build

    spec = json.loads((folder / "config.json").read_text())["spec"]
    return build(spec), ocp.StandardCheckpointer().restore(folder.resolve() / "checkpoint")


@pytest.mark.parametrize("load", [loaded_from_safetensors, loaded_from_orbax])
def test_what_is_exported_has_the_held_out_loss_it_had(trainer, make_job, tmp_path, load):
    spec = make_job()
    parameters = trainer.snapshot(trainer.tensor_shapes()).arrays()
    write_parameters(tmp_path, shapes(parameters), [parameters], {"job": "a", "spec": json.dumps(spec)})
    file = tmp_path / "merged.safetensors"
    (tmp_path / "config.json").write_text(json.dumps(described(file)))
    export.write_orbax(file, tmp_path / "checkpoint")

    model, found = load(tmp_path)

    assert found.keys() == parameters.keys()
    assert all(np.array_equal(found[name], parameters[name]) for name in parameters)
    text = corpus.load(IslandSpec.of(spec).job.data)
    tokens = corpus.held_out_sequences(text, spec["evaluation"]["sequences"], spec["data"]["sequence_length"])
    assert float(model.loss(found, tokens)) == pytest.approx(trainer.evaluate(parameters).loss, rel=1e-5)


def test_an_orbax_checkpoint_is_not_written_over_another(trainer, tmp_path):
    initial = trainer.initial_parameters()
    write_parameters(tmp_path, shapes(initial), [initial], {})
    export.write_orbax(tmp_path / "merged.safetensors", tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="already exists"):
        export.write_orbax(tmp_path / "merged.safetensors", tmp_path / "checkpoint")
