"""A part of a model is trained: what it computes, what travels, what is refused. Merged matrices are the second opinion."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from api.jobs.path_check import weights_problems, with_weights_digest
from learners import jax_trainer, model
from orchestrator.checkpoints.resumption import differences
from orchestrator.errors import InvalidJobSpec, UnfitWeights
from orchestrator.laboratory.multiplex import MultiplexedJob
from orchestrator.models.huggingface import adapters, export
from orchestrator.models.huggingface.origin import Origin
from orchestrator.models.huggingface.weights import Weights
from orchestrator.models.trainable import A, B
from orchestrator.parameters import fragment_map
from orchestrator.parameters.pieces import joined
from orchestrator.specification.config import parse_job
from orchestrator.specification.memory_budget import (
    NodeMemory,
    demand_of,
    frozen_bytes_of,
    memory_problems,
    parameter_count_of,
)
from orchestrator.system.roots import AllowedRoots
from tests.learners.test_conversations import QWEN, said
from tests.learners.test_pretrained import FAMILIES, drawn

TOKENS = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9]], np.int32) % 11
EVERYTHING = ["all-linear", "router", "experts.*"]


def document(family: str = "qwen3", part: dict[str, Any] | None = None, **of_model: Any) -> dict[str, Any]:
    decoder = FAMILIES[family].model_dump() | {"vocabulary_size": 256}
    return {
        "islands": [{"node_group": "a"}],
        "budget": {"steps": 10},
        "data": {"sequence_length": 8},
        "training": {"batch_size": 2, "inner_optimizer": {"warmup_steps": 0, "lr": 0.01}},
        "model": {"decoder": decoder, "compute_dtype": "float32", **of_model},
        "trainable": {"lora": {"rank": 2, "alpha": 3.0, "targets": ["all-linear"]}} if part is None else part,
        "seed": 5,
    }


def built(given: dict[str, Any]) -> tuple[model.Model, dict[str, Any], dict[str, Any]]:
    """Return the model, its frozen tensors, and adapters of which none is zero."""
    made = model.build(parse_job(given).model_dump(mode="json"))
    assert made.frozen is not None
    frozen = {name: made.frozen.value(name).astype(own.dtype) for name, own in made.frozen.outline.items()}
    generator = np.random.default_rng(1)
    own = {n: generator.standard_normal(t.shape, np.float32) / 4 for n, t in made.initialise(5).items()}
    return made, frozen, own


def merged(frozen: dict[str, Any], own: dict[str, Any], scale: float) -> dict[str, Any]:
    return frozen | {name: frozen[name] + scale * own[name + A] @ own[name + B] for name in frozen if name + A in own}


@pytest.mark.parametrize("family", ["qwen3", "moe"])
def test_adapters_compute_what_the_merged_matrices_do_and_so_do_their_gradients(family: str) -> None:
    part = {"lora": {"rank": 2, "alpha": 3.0, "targets": EVERYTHING if family == "moe" else ["all-linear"]}}
    made, frozen, own = built(document(family, part))
    whole = model.build(parse_job({**document(family), "trainable": None}).model_dump(mode="json"))

    def adapted(adapters: dict[str, Any]) -> jax.Array:
        return made.loss({**frozen, **adapters}, TOKENS)

    def by_matrices(adapters: dict[str, Any]) -> jax.Array:
        return whole.loss(merged(frozen, adapters, 1.5), TOKENS)

    (one, slopes), (other, expected) = (jax.jit(jax.value_and_grad(each))(own) for each in (adapted, by_matrices))
    assert one == pytest.approx(float(other), abs=2e-5)
    for name, slope in expected.items():
        np.testing.assert_allclose(slopes[name], slope, atol=1e-4, err_msg=name)


def test_a_model_begins_as_its_base_bit_for_bit_although_that_is_held_in_halves() -> None:
    made, frozen, _ = built(document(compute_dtype="bfloat16"))
    whole = model.build(parse_job({**document(compute_dtype="bfloat16"), "trainable": None}).model_dump(mode="json"))
    assert frozen["embed"].dtype == "bfloat16"
    assert frozen["final_norm"].dtype == np.float32
    assert float(made.loss({**frozen, **made.initialise(5)}, TOKENS)) == float(whole.loss(whole.initialise(5), TOKENS))


@pytest.mark.parametrize("part", [{"lora": {"rank": 2}}, {"only": ["*norm", "layers.attention.value"]}])
def test_only_what_is_trained_changes_and_leaves_the_island(part: dict[str, Any]) -> None:
    spec = parse_job(document(part=part))
    trainer = jax_trainer.create(spec.model_dump(mode="json"), 0, 1)
    shapes = spec.trainable.trained_shapes(spec.model.network)
    assert trainer.tensor_shapes() == shapes
    frozen = {name: np.array(tensor) for name, tensor in trainer.arrays_frozen().items()}
    trainer.warm_up()
    before = trainer.evaluate(trainer.initial_parameters())
    losses = [trainer.step(step).loss for step in range(3)]
    after = trainer.evaluate(trainer.snapshot(list(shapes)).arrays())
    assert after.loss < before.loss
    assert all(map(math.isfinite, losses))
    for name, tensor in trainer.arrays_frozen().items():
        np.testing.assert_array_equal(tensor, frozen[name])
    state = trainer.export_state().arrays()
    assert {name.removeprefix("parameters/") for name in state if name.startswith("parameters/")} == set(shapes)
    assert sum(array.nbytes for array in state.values()) <= 3 * 4 * parameter_count_of(spec) + 8
    trainer.import_state(state)
    assert trainer.evaluate(trainer.snapshot(list(shapes)).arrays()).loss == after.loss


def test_adapters_of_a_published_size_are_less_than_a_hundredth_of_the_model() -> None:
    given = document() | {"model": {"preset": "qwen3-8b"}}
    spec = parse_job(given | {"trainable": {"lora": {"rank": 16, "targets": ["q_proj", "v_proj"]}}})
    whole = parse_job(given | {"trainable": None})
    fragments = fragment_map.build(spec.trainable.trained_shapes(spec.model.network), 24)
    assert len(fragments) == 24
    assert parameter_count_of(spec) < 0.01 * parameter_count_of(whole)
    assert frozen_bytes_of(spec) == 2 * parameter_count_of(whole)
    needs, needed = (demand_of(each, parameter_count_of(each)) for each in (spec, whole))
    assert needs.islands[0] < 0.08 * needed.islands[0]
    assert needs.head < 0.1 * needed.head
    (problem,) = memory_problems(spec, parameter_count_of(spec), [NodeMemory("host", "a", 15 * 2**30)])
    assert "7,667,712 parameters and 15.3 GiB of frozen ones needs" in problem.message


def test_a_model_without_adapters_of_its_own_gets_them_added_to_its_matrices() -> None:
    given = document() | {"model": {"preset": "nano", "compute_dtype": "float32"}}
    made, frozen, own = built(given | {"trainable": {"lora": {"rank": 2, "targets": ["query", "down"]}}})
    whole = model.build(parse_job(given | {"trainable": None}).model_dump(mode="json"))
    expected = float(whole.loss(merged(frozen, own, 2.0), TOKENS))
    assert float(made.loss({**frozen, **own}, TOKENS)) == pytest.approx(expected, abs=1e-5)
    assert not made.traceable or all(name.endswith((A, B)) for name in made.initialise(0))


def test_a_factory_model_without_such_a_matrix_is_refused_with_those_that_it_has() -> None:
    spec = parse_job(
        document()
        | {"model": {"factory": "tests.learners.test_trainable:small"}, "trainable": {"lora": {"targets": ["x"]}}}
    )
    with pytest.raises(InvalidJobSpec, match="Its matrices are up, down"):
        model.build(spec.model_dump(mode="json"))


def small(_: dict[str, Any]) -> model.Model:
    """Return a model of a user's own, as a factory does."""
    shapes = {"embed": (11, 4), "up": (4, 6), "down": (6, 4)}
    return model.Model(
        lambda seed: {name: np.ones(shape, np.float32) for name, shape in shapes.items()},
        lambda parameters, tokens: (parameters["up"] @ parameters["down"]).mean(),
    )


def weights(folder: Path, vocabulary_size: int = 256) -> dict[str, Any]:
    """Write a checkpoint and return the job that adapts it."""
    folder.mkdir()
    given = document(initial_weights=str(folder))
    given["model"]["decoder"]["vocabulary_size"] = vocabulary_size
    exported = parse_job({**given, "model": {**given["model"], "initial_weights": None}, "trainable": None})
    save_file(drawn(exported.model.network), folder / "own.safetensors")
    export.write(folder / "own.safetensors", folder, exported.model_dump(mode="json"))
    (folder / "own.safetensors").unlink()
    return given


def test_the_frozen_tensors_are_those_of_the_initial_weights_and_others_are_refused(tmp_path: Path) -> None:
    given, roots = weights(tmp_path / "base"), AllowedRoots.only(tmp_path)
    spec = with_weights_digest(parse_job(given), roots)
    assert spec.model.weights_digest is not None
    assert weights_problems(spec, roots) == ()
    own = spec.model_dump(mode="json") | {"roots": roots}
    frozen = model.build(own).frozen
    name = "layers.attention.query"
    np.testing.assert_array_equal(frozen.value(name), drawn(spec.model.network)[name])

    file = tmp_path / "base/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # one bit of one value
    file.write_bytes(content)
    with pytest.raises(UnfitWeights, match="has other weights than the job was submitted with"):
        model.build(own).frozen.value("embed")
    with pytest.raises(InvalidJobSpec, match=r"model\.weights_digest"):
        with_weights_digest(spec, roots)


def test_selected_tensors_begin_as_the_initial_weights_have_them(tmp_path: Path) -> None:
    given, roots = weights(tmp_path / "base"), AllowedRoots.only(tmp_path)
    spec = parse_job(given | {"trainable": {"only": ["*.value"]}})
    trainer = jax_trainer.create(spec.model_dump(mode="json") | {"roots": roots}, 0, 1)
    (name,) = trainer.tensor_shapes()
    expected = drawn(spec.model.network)
    np.testing.assert_array_equal(trainer.initial_parameters()[name], expected[name])
    np.testing.assert_array_equal(trainer.arrays_frozen()["embed"], expected["embed"])


def test_adapters_are_exported_as_peft_has_them_and_merged_into_their_base(tmp_path: Path) -> None:
    given, roots = weights(tmp_path / "base"), AllowedRoots.only(tmp_path)
    spec = with_weights_digest(parse_job(given), roots)
    _, frozen, own = built(given | {"model": given["model"] | {"initial_weights": None}})
    frozen = drawn(spec.model.network)
    save_file(own, tmp_path / "own.safetensors")
    (tmp_path / "out").mkdir()
    adapters.write(tmp_path / "own.safetensors", tmp_path / "out", spec.model_dump(mode="json"))
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 3, str(tmp_path / "base"))
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    theirs = load_file(tmp_path / "out/adapter_model.safetensors")
    one = theirs["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"]
    np.testing.assert_array_equal(one, own["layers.attention.query.lora_a"][1].T)
    assert len(theirs) == 2 * 7 * 3

    (tmp_path / "merged").mkdir()
    base = Weights(spec.model.network, str(tmp_path / "base"), roots, spec.model.weights_digest)
    export.write(tmp_path / "own.safetensors", tmp_path / "merged", spec.model_dump(mode="json"), base=base)
    whole = Weights(spec.model.network, str(tmp_path / "merged"), roots).taken()
    for name, tensor in merged(frozen, own, 1.5).items():
        if name in whole:
            np.testing.assert_allclose(whole[name], tensor, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("family", "kind", "targets"),
    [
        ("llama", "phi3", ["all-linear"]),
        ("llama", "phi3", ["value", "up"]),
        ("mixtral", "mixtral", EVERYTHING),
        ("moe", "qwen3_moe", ["experts.up", "query"]),
        ("moe", "qwen3_moe", ["experts.down"]),
    ],
)
def test_adapters_of_matrices_that_are_one_in_transformers_are_one_in_peft(
    family: str, kind: str, targets: list[str], tmp_path: Path
) -> None:
    """By PEFT's own formulas, they change the merged checkpoint's tensors as the merged export does."""
    part = {"lora": {"rank": 2, "alpha": 3.0, "targets": targets}}
    _, frozen, own = built(document(family, part))
    spec = parse_job(document(family, part, initial_weights="/theirs"))
    origin = Origin("/theirs", {"config.json": json.dumps({"model_type": kind})})
    whole = merged(frozen, own, 1.5)
    for name, tensors in (("own", own), ("before", frozen), ("after", {n: np.asarray(whole[n]) for n in frozen})):
        save_file({each: np.asarray(tensor, np.float32) for each, tensor in tensors.items()}, tmp_path / name)
    plain = parse_job({**document(family), "trainable": None}).model_dump(mode="json")
    changed: list[dict[str, Any]] = []
    for name in ("before", "after"):
        (tmp_path / f"{name}-theirs").mkdir()
        export.write(tmp_path / name, tmp_path / f"{name}-theirs", plain, origin=origin)
        changed.append(load_file(tmp_path / f"{name}-theirs/model.safetensors"))
    differences_of = {name: changed[1][name] - tensor for name, tensor in changed[0].items()}

    (tmp_path / "out").mkdir()
    notes = adapters.write(tmp_path / "own", tmp_path / "out", spec.model_dump(mode="json"), origin)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    theirs = load_file(tmp_path / "out/adapter_model.safetensors")
    assert any("transformers 5" in note for note in notes) is bool(config.get("target_parameters"))
    count, found = spec.model.network.experts.count if spec.model.network.experts else 1, 0
    for name in [each.removesuffix(".lora_A.weight") for each in theirs if each.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.")
        a, b = (theirs[f"{name}.lora_{end}.weight"] for end in "AB")
        if "experts" not in module:
            end = module.rpartition(".")[2]
            rank, alpha = scales_in(config, end)
            assert len(a) == rank
            place = module.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else module
            np.testing.assert_allclose(alpha / rank * b @ a, differences_of.pop(f"{place}.weight"), atol=1e-5)
            found += 1
            continue
        layer, parameter = module.split(".")[2], "gate_up_proj" if module.endswith("base_layer") else "down_proj"
        if not {"experts.down_proj", "experts.gate_up_proj"} <= set(config["target_parameters"]):
            parameter = config["target_parameters"][0].removeprefix("experts.")
        rank, alpha = scales_in(config, parameter)
        change = alpha / rank * np.einsum("ore,eri->eoi", b.reshape(len(b), rank, count), a.reshape(count, rank, -1))
        names = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}.get(
            kind, ("mlp", "gate_proj", "up_proj", "down_proj")
        )
        for expert in range(count):
            where = f"model.layers.{layer}.{names[0]}.experts.{expert}"
            ends = names[3:] if parameter == "down_proj" else names[1:3]
            expected = np.concatenate([differences_of.pop(f"{where}.{end}.weight") for end in ends])
            np.testing.assert_allclose(change[expert], expected, atol=1e-5)
            found += 1
    assert found
    for name, difference in differences_of.items():
        assert not difference.any(), f"{name} has no adapter"


def scales_in(config: dict[str, Any], end: str) -> tuple[int, float]:
    """Return the rank and alpha of a module or parameter."""
    ranks, alphas = config.get("rank_pattern", {}), config.get("alpha_pattern", {})
    return ranks.get(end, config["r"]), alphas.get(end, config["lora_alpha"])


@pytest.mark.soak("half a minute each")
@pytest.mark.parametrize("data_format", ["chat", "preference"])
def test_adapters_learn_conversations_on_two_islands_and_become_a_model(tmp_path: Path, data_format: str) -> None:
    given = weights(tmp_path / "base", vocabulary_size=260)
    tokenizer = QWEN.write(tmp_path)
    rows = [
        {"messages": said(f"{n}?", "yes"), "chosen": said(f"{n}?", "yes"), "rejected": said(f"{n}?", "no")}
        for n in range(90)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    training = {**given["training"], "objective": {"kind": "dpo"} if data_format == "preference" else None}
    spec = with_weights_digest(
        parse_job(
            given
            | {
                "islands": [{"node_group": "a"}, {"node_group": "b"}],
                "data": {"source": "files", "files": [str(tmp_path / "rows.jsonl")], "format": data_format,
                         "tokenizer": str(tokenizer), "sequence_length": 95, "held_out_ratio": 0.2},
                "training": training,
                "synchroniser": {"fragments": 2, "interval_steps": 4, "overlap_steps": 1},
                "budget": {"steps": 24},
                "evaluation": {"every_merges": 6, "sequences": 8},
            }
        ),
        AllowedRoots.only(tmp_path),
    )  # fmt: skip
    job = MultiplexedJob(spec, jax_trainer.create, transfer_steps=1.0)
    for _ in job.run():
        pass
    losses = [loss for _, loss in job.outcome.curve]
    assert losses[-1] < 0.9 * losses[0]
    own = joined(job.outcome.parameters)
    assert own.keys() == spec.trainable.trained_shapes(spec.model.network).keys()
    assert any(np.abs(tensor).max() > 1e-3 for name, tensor in own.items() if name.endswith(B))

    save_file(own, tmp_path / "own.safetensors")
    for form in ("adapter", "merged"):
        (tmp_path / form).mkdir()
    document, roots = spec.model_dump(mode="json"), AllowedRoots.only(tmp_path)
    adapters.write(tmp_path / "own.safetensors", tmp_path / "adapter", document)
    base = Weights(spec.model.network, str(tmp_path / "base"), roots, spec.model.weights_digest)
    export.write(tmp_path / "own.safetensors", tmp_path / "merged", document, Path(tokenizer), base=base)
    theirs = load_file(tmp_path / "adapter/adapter_model.safetensors")
    whole, before = (load_file(tmp_path / form / "model.safetensors") for form in ("merged", "base"))
    name = "model.layers.1.self_attn.q_proj"
    a, b = (theirs[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    np.testing.assert_allclose(whole[f"{name}.weight"], before[f"{name}.weight"] + 1.5 * b @ a, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "part", "words"),
    [
        ("qwen3", {"lora": {"rank": 2}}, "its base was drawn from the seed"),
        ("qwen3", {"only": ["*norm"]}, "some of its tensors"),
        ("moe", {"lora": {"rank": 2, "targets": ["experts.up"]}}, "its base was drawn from the seed"),
    ],
)
def test_what_peft_cannot_load_is_not_exported_for_it(family: str, part: dict[str, Any], words: str) -> None:
    problem = adapters.not_of_peft(parse_job(document(family, part)).model_dump(mode="json"), None)
    assert problem is not None
    assert words in str(problem)
    assert "--format huggingface" in str(problem)


def test_a_checkpoint_of_another_base_or_of_other_adapters_is_not_resumed(tmp_path: Path) -> None:
    spec = with_weights_digest(parse_job(weights(tmp_path / "base")), AllowedRoots.only(tmp_path))
    before = spec.model_dump(mode="json")
    assert differences(before, before) == []
    other = before | {"model": before["model"] | {"weights_digest": "0" * 32}}
    (line,) = differences(before, other)
    assert "only fits the frozen weights" in line
    trainable = before["trainable"] | {"lora": {**before["trainable"]["lora"], "rank": 3}}
    (line,) = differences(before, before | {"trainable": trainable})
    assert line == "trainable.lora.rank was 2 but is 3"
