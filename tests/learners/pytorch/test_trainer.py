"""A PyTorch island keeps the contract: states, pieces, steps, and folders of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from learners.factories import trainer_of
from orchestrator.errors import ConfigurationError, DataError
from orchestrator.models.huggingface import export, origin
from orchestrator.system.roots import EVERYTHING
from tests.learners.pytorch.small_models import (
    CONFIGS,
    own,
    same,
    saved,
    spec_of,
    torch,
    trained,
    transformers,
)

OPTIMIZERS = [
    {},
    {"kind": "muon"},
    {"factory": "torch.optim:NAdam", "settings": {"betas": [0.9, 0.99]}},
    {"factory": "torch.optim:Adafactor"},
    {"factory": "mine:optimizer", "settings": {"betas": [0.8, 0.9]}},
]


@pytest.mark.parametrize(
    "inner", OPTIMIZERS, ids=lambda inner: str(inner.get("factory") or inner.get("kind") or "adamw")
)
def test_whoever_takes_its_state_whole_or_in_pieces_continues_bit_for_bit(
    mine: ModuleType, inner: dict[str, Any]
) -> None:
    spec = own(inner_optimizer=inner)
    one = trained(spec)
    halves = ["embed.weight[0:100]", "embed.weight[100:256]"]
    pieces = [*halves, *(name for name in one.tensor_shapes() if name != "embed.weight")]
    for state in (one.export_state(), one.export_state(pieces)):
        other = trainer_of(spec, 1, 2)
        other.import_state(state.arrays())
        other.take_shard(0)
        other.seek(3)
        again = trainer_of(spec, 0, 2)
        again.import_state(one.export_state().arrays())
        again.seek(3)
        again.step(3)
        other.step(3)
        assert same(other, again)
    one.step(3)
    assert same(one, other)


def test_a_state_of_another_model_is_refused_and_changes_nothing(mine: ModuleType) -> None:
    trainer = trained(own())
    before = trainer.snapshot(trainer.tensor_shapes()).arrays()
    with pytest.raises(DataError, match="does not fit this island's model: only one of them has"):
        trainer.import_state(trained(own({"width": 16, "depth": 2})).export_state().arrays())
    with pytest.raises(DataError, match="cannot replace"):
        trainer.import_state(trained(own({"width": 32, "depth": 1})).export_state().arrays())
    after = trainer.snapshot(trainer.tensor_shapes()).arrays()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_pieces_are_replaced_and_added_to_and_a_snapshot_stays_as_it_was(mine: ModuleType) -> None:
    trainer = trained(own())
    snapshot = trainer.snapshot(["embed.weight"])
    expected = snapshot.arrays()["embed.weight"].copy()
    trainer.load({"embed.weight[8:16]": np.full((8, 16), 2.0, np.float32)})
    trainer.add({"embed.weight[8:12]": np.full((4, 16), 0.5, np.float32)})
    assert np.array_equal(snapshot.arrays()["embed.weight"], expected)
    expected[8:16], expected[8:12] = 2.0, 2.5
    assert np.array_equal(trainer.snapshot(["embed.weight"]).arrays()["embed.weight"], expected)


def test_version_0_follows_from_the_seed_and_training_does_not_change_it(mine: ModuleType) -> None:
    one, other, third = trained(own()), trainer_of(own(), 1, 2), trainer_of(own(seed=1), 0, 2)
    first, second, different = (each.initial_parameters() for each in (one, other, third))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["embed.weight"], different["embed.weight"])
    part = one.initial_parameters(["embed.weight[3:5]"])["embed.weight[3:5]"]
    assert np.array_equal(part, first["embed.weight"][3:5])


def test_it_learns_and_measuring_changes_nothing(mine: ModuleType) -> None:
    trainer = trainer_of(own(), 0, 1)
    trainer.warm_up()
    names = list(trainer.tensor_shapes())
    before = trainer.evaluate(trainer.snapshot(names).arrays()).loss
    for step in range(30):
        result = trainer.step(step)
    after = trainer.snapshot(names).arrays()
    assert trainer.evaluate(after).loss < before - 0.5
    assert result.token_count == 4 * 16
    initial = trainer.initial_parameters()
    assert trainer.evaluate(initial).loss == pytest.approx(before, rel=1e-5)
    assert all(np.array_equal(after[name], array) for name, array in trainer.snapshot(names).arrays().items())


def test_a_batch_in_parts_is_the_batch(mine: ModuleType) -> None:
    whole, parts = trained(own()), trained(own(training={"batch_size": 4, "accumulation": 4}))
    mine_, theirs = (each.snapshot(["embed.weight"]).arrays()["embed.weight"] for each in (whole, parts))
    assert np.allclose(mine_, theirs, atol=1e-3)


def test_the_adamw_of_torch_takes_the_step_of_the_one_of_optax(mine: ModuleType) -> None:
    """The same gradients, the same groups: five steps agree to rounding."""
    import jax.numpy as jnp

    from learners import optimizers
    from learners.optimizer_settings import update_scale
    from learners.torch_trainer import optimizers_of

    for kind in ("adamw", "muon"):
        section = own(inner_optimizer={"kind": kind}).job.training.inner_optimizer
        drawn = np.random.default_rng(1)
        start = {
            name: drawn.standard_normal(shape).astype(np.float32) for name, shape in {"a": (8, 12), "b": (5,)}.items()
        }
        theirs = {name: torch.nn.Parameter(torch.from_numpy(each.copy())) for name, each in start.items()}
        steps = optimizers_of(section, theirs, {})
        ours, transformation = (
            {name: jnp.asarray(each) for name, each in start.items()},
            optimizers.build(section.model_copy(update={"clip_norm": None})),
        )
        state = transformation.init(ours)
        for step in range(5):
            gradient = {name: drawn.standard_normal(each.shape).astype(np.float32) for name, each in start.items()}
            scale = update_scale(section, 40, step)
            updates, state = transformation.update({n: jnp.asarray(g) for n, g in gradient.items()}, state, ours)
            ours = {name: ours[name] + scale * updates[name] for name in ours}
            for optimizer in steps:
                for group in optimizer.param_groups:
                    group["lr"] = scale
            for name, each in theirs.items():
                each.grad = torch.from_numpy(gradient[name])
            for optimizer in steps:
                optimizer.step()
        tolerance = 1e-5 if kind == "adamw" else 2e-3  # Muon's iteration is in bfloat16 in torch
        for name, each in ours.items():
            assert np.allclose(theirs[name].detach().numpy(), each, atol=tolerance), (kind, name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_of_transformers_trains_and_its_export_loads_with_the_same_logits(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / kind, kind)
    trainer = trained(spec_of(folder, model={"remat": "full"}))
    job, out = spec_of(folder).job, tmp_path / "out"
    out.mkdir()
    from safetensors.numpy import save_file

    arrays = trainer.snapshot(trainer.tensor_shapes()).arrays()
    save_file(arrays, tmp_path / "merged.safetensors")
    document = json.loads(job.model_dump_json())
    export.write(tmp_path / "merged.safetensors", out, document, None, origin.taken(str(folder), EVERYTHING))
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    named = dict(loaded.named_parameters())
    assert all(np.array_equal(named[name].detach().numpy(), array) for name, array in arrays.items())


def test_a_folder_without_weights_starts_from_the_seed_and_settings_replace_its_fields(tmp_path: Path) -> None:
    folder = saved(tmp_path / "config", weights=False)
    trainer = trainer_of(spec_of(folder, {"n_layer": 1}), 0, 1)
    assert not any(".h.1." in name for name in trainer.tensor_shapes())
    with pytest.raises(
        ConfigurationError, match=r"^trainer.settings has n_layers, but config.json of .* no such field"
    ):
        trainer_of(spec_of(folder, {"n_layers": 1}), 0, 1)
