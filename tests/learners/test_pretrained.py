"""Weights as Hugging Face has them: what is exported is read again bit for bit, and what does not fit begins no job.

That transformers computes the same with them is ``make parity``'s to show.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from api.cli import app
from api.jobs.path_check import weights_problems
from learners import jax_trainer, model
from orchestrator.errors import DataError, InvalidJobSpec, UnfitWeights
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import configuration, export, files
from orchestrator.models.huggingface.origin import Origin
from orchestrator.models.huggingface.weights import Weights, completed
from orchestrator.models.presets import DECODERS
from orchestrator.parameters.pieces import Piece
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots

SMALLER: dict[str, Any] = {"vocabulary_size": 11, "width": 8, "layer_count": 3, "head_count": 2, "head_size": 4}
FAMILIES = {
    "llama": DecoderSection(**SMALLER, key_value_head_count=1, hidden_size=6, tied_embeddings=False),
    "qwen3": DecoderSection(**SMALLER, key_value_head_count=2, hidden_size=6, query_key_norm=True),
    "gemma3": DecoderSection.model_validate(
        DECODERS["gemma3-4b"].model_dump()
        | SMALLER
        | {"key_value_head_count": 1, "hidden_size": 6, "window": 2, "global_every": 2}
    ),
    "moe": DecoderSection.model_validate(
        DECODERS["moe-20m"].model_dump() | SMALLER | {"experts": {"count": 3, "active": 2, "hidden_size": 5}}
    ),
}
SIZES = {**SMALLER, "key_value_head_count": 1, "hidden_size": 6}
FAMILIES |= {
    "llama, biased": DecoderSection(**SIZES, attention_bias=True, output_bias=True),
    "mistral": DecoderSection(**SIZES, window=2, global_every=None, window_rope_theta=None),
    "qwen2": DecoderSection(**SIZES, attention_bias=True, rope_scaling={"kind": "yarn", "factor": 4.0}),
    "olmo2": DecoderSection(**SIZES, pre_norms=False, post_norms=True, query_key_norm=True, joint_heads_norm=True),
    "smollm3": DecoderSection(**SIZES, unrotated_every=2),
    "mixtral": DecoderSection(
        **{**SIZES, "hidden_size": None}, experts={"count": 3, "active": 2, "hidden_size": 5}, tied_embeddings=False
    ),
}
LLAMA = FAMILIES["llama"]


def drawn(decoder: DecoderSection) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in parameter_shapes(decoder).items()}


def document(decoder: DecoderSection, **model: Any) -> dict[str, Any]:
    return {
        "islands": [{"node_group": "here"}],
        "budget": {"steps": 1},
        "model": {"decoder": decoder.model_dump(mode="json"), **model},
    }


def exported(decoder: DecoderSection, folder: Path, continued: str = "", **settings: Any) -> dict[str, np.ndarray]:
    """The parameters of which ``folder`` has an export now, of a job that continued a checkpoint of that type."""
    parameters = drawn(decoder)
    save_file(parameters, folder / "merged")
    origin = Origin("/theirs", {"config.json": json.dumps({"model_type": continued})}) if continued else None
    spec = parse_job(document(decoder)).model_dump(mode="json")
    export.write(folder / "merged", folder, spec, origin=origin, **settings)
    (folder / "merged").unlink()
    return parameters


def weights(decoder: DecoderSection, folder: Path) -> Weights:
    return Weights(decoder, str(folder), AllowedRoots.only(folder))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_exported_is_read_again_bit_for_bit(name: str, tmp_path: Path) -> None:
    parameters = exported(FAMILIES[name], tmp_path)
    assert sorted(os.listdir(tmp_path)) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    read = weights(FAMILIES[name], tmp_path).taken()
    assert read.keys() == parameters.keys()
    assert all(np.array_equal(read[each], parameters[each]) for each in parameters)
    theirs = load_file(tmp_path / "model.safetensors")
    assert np.array_equal(theirs["model.layers.1.self_attn.q_proj.weight"].T, parameters["layers.attention.query"][1])


def test_a_checkpoint_keeps_its_type_and_fused_matrices_are_read_and_written(tmp_path: Path) -> None:
    parameters = exported(LLAMA, tmp_path, continued="phi3")
    theirs = load_file(tmp_path / "model.safetensors")
    of_layer = [parameters[f"layers.attention.{name}"][1].T for name in ("query", "key", "value")]
    assert np.array_equal(theirs["model.layers.1.self_attn.qkv_proj.weight"], np.concatenate(of_layer))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Phi3ForCausalLM"]
    fused = weights(LLAMA, tmp_path)
    read = fused.taken()
    assert all(np.array_equal(read[each], parameters[each]) for each in parameters)
    for name in ("attention.key", "feedforward.up"):
        assert np.array_equal(fused.read(f"layers.{name}", (1,)), parameters[f"layers.{name}"][1])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_is_rounded_and_in_files_of_a_size(name: str, dtype: str, tmp_path: Path) -> None:
    parameters = exported(FAMILIES[name], tmp_path, dtype=dtype, shard_bytes=600)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {path.name for path in shards} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == 2 * sum(map(np.size, parameters.values()))
    for shard in shards:
        tensors = [tensor for tensor, file in index["weight_map"].items() if file == shard.name]
        assert shard.name.endswith(f"-of-{len(shards):05}.safetensors")
        assert len(tensors) == 1 or sum(entry_bytes(shard, tensor) for tensor in tensors) <= 600
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype
    read = weights(FAMILIES[name], tmp_path).taken()
    assert all(np.array_equal(read[each], parameters[each].astype(HALVES[dtype])) for each in parameters)


def entry_bytes(file: Path, tensor: str) -> int:
    entry = files.read_header(lambda: file.open("rb")).entries[tensor]
    return 2 * int(np.prod(entry.shape))


def test_a_number_that_a_type_cannot_hold_is_not_exported_as_infinite(tmp_path: Path) -> None:
    with (
        (tmp_path / "file").open("wb") as file,
        pytest.raises(DataError, match=r"norm has 7e\+04, which float16 cannot hold\. Export as bfloat16"),
    ):
        files.write(file, {"norm": (2,)}, [np.array([1, 7e4], np.float32)], "F16")


def test_the_weights_alone_say_what_the_model_is(tmp_path: Path) -> None:
    for name, decoder in FAMILIES.items():
        (folder := tmp_path / name).mkdir()
        exported(decoder, folder)
        alone = document(LLAMA) | {"model": {"initial_weights": str(folder), "remat": "full"}}
        spec = parse_job(completed(alone, AllowedRoots.only(tmp_path)))
        assert spec.model.remat == "full"
        assert isinstance(spec.model.network, DecoderSection)
        assert configuration.differences(spec.model.network, decoder) == []
        assert weights_problems(spec, AllowedRoots.only(tmp_path)) == ()
        assert parse_job(alone).model.network is None
        assert model.build({**alone, "roots": AllowedRoots.only(tmp_path)}).vocabulary_size == 11


def test_inspection_says_what_the_folder_has_and_whether_it_can_be_trained(tmp_path: Path) -> None:
    exported(FAMILIES["mixtral"], tmp_path, dtype="bfloat16")
    shown = CliRunner().invoke(app, ["model", "inspect", str(tmp_path), "--json"])
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout)
    count = FAMILIES["mixtral"].parameter_count
    assert facts["model_type"] == "mixtral"
    assert facts["dtypes"] == ["BF16"]
    assert (facts["parameters"], facts["stored_bytes"]) == (count, 2 * count)
    assert facts["memory_bytes"]["island_on_cpu"] > facts["memory_bytes"]["island"] > 12 * count
    assert facts["trainable"]
    assert (
        f"model: {{initial_weights: {tmp_path}}}" in CliRunner().invoke(app, ["model", "inspect", str(tmp_path)]).stdout
    )
    changed(model_type="gpt2", architectures=["GPT2LMHeadModel"])(tmp_path)
    facts = json.loads(CliRunner().invoke(app, ["model", "inspect", str(tmp_path), "--json"]).stdout)
    assert (facts["trainable"], facts["decoder"], facts["parameters"]) == (False, None, count)
    assert "model_type 'gpt2'" in facts["problem"]["message"]
    assert "no: config.json has model_type" in CliRunner().invoke(app, ["model", "inspect", str(tmp_path)]).stdout


def test_the_folder_is_asked_only_where_it_alone_says_what_the_model_is(tmp_path: Path) -> None:
    for section in ({"preset": "qwen3-20m"}, {"decoder": LLAMA.model_dump(mode="json")}, {"preset": "micro"}, {"x": 1}):
        whole = document(LLAMA) | {"model": {**section, "initial_weights": str(tmp_path)}}
        assert completed(whole, AllowedRoots.only(tmp_path)) is whole
    assert completed({"model": 3}, AllowedRoots.only(tmp_path)) == {"model": 3}
    alone = document(LLAMA) | {"model": {"initial_weights": str(tmp_path)}}
    assert completed(alone | {"trainer": "package:function"}, AllowedRoots.only(tmp_path))["model"] == alone["model"]
    with pytest.raises(InvalidJobSpec, match=r"model\.initial_weights: .* It must have config\.json"):
        completed(alone, AllowedRoots.only(tmp_path))


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_fragments_are_read_piece_by_piece(name: str, tmp_path: Path) -> None:
    parameters, read = exported(FAMILIES[name], tmp_path), weights(FAMILIES[name], tmp_path)
    tensors = ["embed", "layers.attention.query", "layers.experts.up" if name == "moe" else "layers.feedforward.up"]
    for tensor, axis in [(name, axis) for name in tensors for axis in range(parameters[name].ndim)]:
        (piece,) = read.taken([Piece(tensor, (axis, 1, 3)).name]).values()
        assert np.array_equal(piece, parameters[tensor].take([1, 2], axis))


def test_a_checkpoint_in_several_files_and_in_halves_is_read(tmp_path: Path) -> None:
    parameters = exported(LLAMA, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    types = [np.float32, np.float16, ml_dtypes.bfloat16]
    shards: list[dict[str, Any]] = [{}, {}, {}]
    for number, (name, array) in enumerate(sorted(tensors.items())):
        shards[number % 3][name] = array.astype(types[number % 3])
    named = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        written(tmp_path / file, shard)
        named |= dict.fromkeys(shard, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    for name, array in weights(LLAMA, tmp_path).taken().items():
        np.testing.assert_allclose(array, parameters[name], rtol=2**-8)


def written(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """As ``save_file``, also of bfloat16."""
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    header, content = {}, b""
    for name, array in tensors.items():
        offsets = [len(content), len(content) + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
        content += array.tobytes()
    described = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(described)) + described + content)


def seeing(folder: Path, text: str = "language_model.model.", head: str = "language_model.lm_head.") -> None:
    """The export in ``folder`` as the language model of one that also sees."""
    tensors = load_file(folder / "model.safetensors")
    own = {name.replace("model.", text, 1) if name.startswith("model.") else name: a for name, a in tensors.items()}
    own = {name.replace("lm_head.", head, 1) if name.startswith("lm_head.") else name: a for name, a in own.items()}
    save_file({**own, "vision_tower.x.bias": np.ones(3, np.float32)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kind = {"gemma3_text": "gemma3", "llama": "llava"}[config["model_type"]]
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "text_config": config, "vision_config": {}}))


@pytest.mark.parametrize("name", ["gemma3", "llama"])
@pytest.mark.parametrize(
    "prefixes", [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")]
)
def test_the_language_model_of_one_that_also_sees_is_read(name: str, prefixes: tuple[str, str], tmp_path: Path) -> None:
    parameters = exported(FAMILIES[name], tmp_path)
    seeing(tmp_path, *prefixes)
    read = weights(FAMILIES[name], tmp_path).taken()
    assert read.keys() == parameters.keys()
    assert all(np.array_equal(read[each], parameters[each]) for each in parameters)


def test_a_published_configuration_that_leaves_sizes_to_its_type_is_the_preset() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    found = configuration.decoder_of(
        {"model_type": "gemma3", "text_config": text, "vision_config": {"image_size": 896}}
    )
    assert configuration.differences(found, DECODERS["gemma3-4b"].model_copy(update={"vocabulary_size": 262_208})) == []


def of_sight(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def change_both(folder: Path) -> None:
        seeing(folder)
        change(folder)

    return change_both


def text_changed(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        changed(text_config={**config["text_config"], **fields})(folder)

    return change


def test_version_0_of_a_job_is_made_of_its_initial_weights(tmp_path: Path) -> None:
    parameters = exported(FAMILIES["qwen3"], tmp_path)
    spec = parse_job(document(FAMILIES["qwen3"], initial_weights=str(tmp_path)))
    roots = AllowedRoots.only(tmp_path)
    assert weights_problems(spec, roots) == ()
    plain = spec.model_dump(mode="json") | {"roots": roots}
    trainer = jax_trainer.JaxTrainer(
        plain, model.build(plain), draw=lambda _: lambda number: np.zeros((1, 2), np.int32)
    )
    first = trainer.initial_parameters()
    assert all(np.array_equal(first[name], parameters[name]) for name in parameters)


def changed(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


def tensors_changed(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def header_changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """With another header of as many bytes at least, and the same data."""

    def rewrite(folder: Path) -> None:
        content = (folder / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        change(header)
        described = json.dumps(header).encode()
        target = folder / "model.safetensors"
        target.write_bytes(struct.pack("<Q", len(described)) + described + content[8 + length :])

    return rewrite


def overwritten(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def index_of(named: Any) -> Callable[[Path], None]:
    return overwritten("model.safetensors.index.json", json.dumps({"weight_map": named}).encode())


def indexed_without(name: str) -> Callable[[Path], None]:
    """With one tensor more in the file, of which the index says nothing."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        index_of(dict.fromkeys(tensors, "model.safetensors"))(folder)
        save_file({**tensors, name: np.ones(3, np.float32)}, folder / "model.safetensors")

    return change


def in_two_sets(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model-1.safetensors")
    index_of(dict.fromkeys(tensors, "model-1.safetensors"))(folder)


def overwritten_config(was: bytes, becomes: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / "config.json").read_bytes()
        assert was in content
        (folder / "config.json").write_bytes(content.replace(was, becomes))

    return change


def piped(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def linked(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


NORM = "model.norm.weight"
UNFIT = {
    "another width": (changed(hidden_size=16), "it has width 16, not 8", "set model.decoder (width"),
    "another vocabulary": (changed(vocab_size=12), "vocabulary_size 12, not 11", "set model.decoder"),
    "another rotation": (changed(rope_theta=5.0), "rope_theta 5.0, not 10000.0", "set model.decoder"),
    "a language model of a type of its own": (
        of_sight(text_changed(model_type="qwen3")),
        "text_config of 'qwen3'",
        "Export its language model on its own",
    ),
    "a language model that is none": (
        of_sight(changed(text_config=[3])),
        "text_config of a list",
        "Export its language",
    ),
    "a language model that is quantised": (
        of_sight(changed(quantization_config={"bits": 4})),
        "quantization_config",
        "Use weights",
    ),
    "ties that differ": (
        of_sight(changed(tie_word_embeddings=True)),
        "False in text_config",
        "false if lm_head.weight",
    ),
    "a language model's tensor twice": (
        of_sight(tensors_changed(lambda all_: all_.update({"model.language_model.norm.weight": np.ones(8)}))),
        "which are the same tensor",
        "config.json describes",
    ),
    "a language model's tensor less": (
        of_sight(tensors_changed(lambda all_: all_.pop("language_model.model.norm.weight"))),
        f"lack '{NORM}'",
        "config.json describes",
    ),
    "sight only": (
        of_sight(tensors_changed(lambda all_: [all_.pop(name) for name in list(all_) if "vision" not in name])),
        "lack 'lm_head.weight'",
        "config.json describes",
    ),
    "a type of its own": (changed(model_type="mamba"), "types are llama, mistral, qwen2", "trainer: {kind: torch"),
    "no causal head": (
        changed(architectures=["LlamaForSequenceClassification"]),
        "architectures 'LlamaForSequenceClassification', a class that does not predict the next token",
        "Save the model as LlamaForCausalLM",
    ),
    "a type of its own without a causal head": (
        changed(model_type="bert", architectures=["BertForMaskedLM"]),
        "architectures 'BertForMaskedLM', a class that does not predict the next token",
        "Save the model as one that AutoModelForCausalLM loads",
    ),
    "a base model": (changed(architectures=["LlamaModel"]), "architectures 'LlamaModel'", "as LlamaForCausalLM"),
    "biases": (changed(mlp_bias=True), "mlp_bias", "Use weights of a model that has"),
    "biases that the weights lack": (
        changed(attention_bias=True),
        "attention_bias True, not False",
        "set model.decoder",
    ),
    "a part of each head rotated": (
        changed(rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}),
        "partial_rotary_factor 0.5",
        "trainer: {kind: torch",
    ),
    "quantised": (changed(quantization_config={"bits": 4}), "quantization_config", "Use weights"),
    "longrope": (changed(rope_scaling={"rope_type": "longrope"}), "type 'longrope'", "Use weights"),
    "yarn without a factor": (
        changed(rope_scaling={"rope_type": "yarn"}, max_position_embeddings=None),
        "rope_scaling.factor",
        "Correct config.json",
    ),
    "no number of heads": (changed(num_attention_heads="4"), "num_attention_heads is '4'", "Correct config.json"),
    "no numbers at all": (overwritten("config.json", b"[]"), "config.json", "Correct config.json"),
    "deep": (overwritten("config.json", b"[" * 100_000), "config.json", "Correct config.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "No such file", "It must have config.json"),
    "an adapter alone": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "has adapters (adapter_config.json) and no model",
        "name the base and set trainable.lora",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "No such file", "It must have config.json"),
    "one tensor less": (tensors_changed(lambda all_: all_.pop(NORM)), f"lack '{NORM}'", "config.json describes"),
    "one more": (
        tensors_changed(lambda all_: all_.update({"model.norm.bias": all_[NORM]})),
        "also have 'model.norm.bias'",
        "config.json describes",
    ),
    "one more, which the index does not name": (
        indexed_without("model.norm.bias"),
        "also have 'model.norm.bias', which the model would drop",
        "config.json describes",
    ),
    "a table that no release has written": (
        tensors_changed(lambda all_: all_.update({"model.layers.0.self_attn.sinks": np.ones(2)})),
        "also have 'model.layers.0.self_attn.sinks'",
        "config.json describes",
    ),
    "neither text nor sight": (
        of_sight(tensors_changed(lambda all_: all_.update({"audio_tower.x.bias": np.ones(2)}))),
        "also have 'audio_tower.x.bias', which the model would drop",
        "config.json describes",
    ),
    "an adapter beside": (
        overwritten("adapter_config.json", b"{}"),
        "has adapter_config.json: a PEFT adapter, which would be dropped",
        "merge_and_unload",
    ),
    "two sets of weights": (in_two_sets, "two sets of weights", "Remove the one"),
    "an infinite number": (
        overwritten_config(b'"rope_theta": 10000.0', b'"rope_theta": Infinity'),
        "config.json describes no decoder: rope_theta",
        "Correct config.json",
    ),
    "words for a size": (
        overwritten_config(b'"num_hidden_layers": ', b'"num_hidden_layers": "one", "was": '),
        "config.json describes no decoder: num_hidden_layers is 'one'",
        "Correct config.json",
    ),
    "heads that do not divide": (
        overwritten_config(b'"num_key_value_heads": ', b'"num_key_value_heads": 3, "was": '),
        "config.json describes no decoder: num_key_value_heads is 3, which does not divide num_attention_heads 2",
        "Correct config.json",
    ),
    "another shape": (
        tensors_changed(lambda all_: all_.update({NORM: np.ones(7, np.float32)})),
        f"{NORM} as (7,)",
        "not quantised",
    ),
    "integers": (
        tensors_changed(lambda all_: all_.update({NORM: np.ones(8, np.int8)})),
        "of 'I8', but the model has (8,)",
        "not quantised",
    ),
    "beyond the end": (
        header_changed(lambda header: header[NORM].update(data_offsets=[2**40, 2**40 + 32])),
        "does not fit into the file",
        "It must have",
    ),
    "a negative place": (
        header_changed(lambda header: header[NORM].update(data_offsets=[-32, 0])),
        "does not fit into the file",
        "It must have",
    ),
    "a shape beyond its bytes": (
        header_changed(lambda header: header[NORM].update(shape=[2**62])),
        "does not fit into the file",
        "It must have",
    ),
    "no tensor": (header_changed(lambda header: header.update({NORM: 3})), "does not describe", "It must have"),
    "no header": (overwritten("model.safetensors", b"\xff" * 64), "not a safetensors file", "It must have"),
    "an empty file": (overwritten("model.safetensors", b""), "not a safetensors file", "It must have"),
    "a pipe": (piped, "not a regular file", "It must have"),
    "a link that leads out": (linked, "not an allowed place for data", "--data ROOT"),
    "files beside": (index_of({NORM: "../x.safetensors"}), "leads upwards", "It must have"),
    "no map": (index_of([]), "no weight_map", "It must have"),
    "no texts": (index_of({NORM: 3}), "names files that are not", "It must have"),
    "a file without it": (index_of({"x": "model.safetensors"}), "but it does not", "Copy it again"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_weights_that_do_not_fit_are_refused_before_anything_starts(name: str, tmp_path: Path) -> None:
    make, message, remedy = UNFIT[name]
    folder = tmp_path / "weights"
    folder.mkdir()
    exported(LLAMA, folder)
    make(folder)
    spec = parse_job(document(LLAMA, initial_weights=str(folder)))
    (problem,) = weights_problems(spec, AllowedRoots.only(folder))
    assert problem.path == "model.initial_weights"
    assert message in problem.message
    assert remedy in problem.remedy
    assert len(str(problem)) < 2_000
    assert str(problem).isprintable()


TIED = FAMILIES["qwen3"]
HALVES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tied_with(folder: Path, embed: str, head: str, row: int | None = None) -> None:
    """The folder has tied weights and a head beside them, which differs in one number of ``row``, if that is given."""
    exported(TIED, folder)
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    values = tensors["model.embed_tokens.weight"].astype(HALVES[embed]).astype(np.float32)
    tensors["model.embed_tokens.weight"] = values.astype(HALVES[embed])
    other = values.astype(HALVES[head])
    if row is not None:
        other[row, 5] = other[row, 5] * 1.25
    written(folder / "model.safetensors", {**tensors, "lm_head.weight": other})


@pytest.mark.parametrize(("embed", "head"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_head_that_is_the_embeddings_once_more_is_passed_over(embed: str, head: str, tmp_path: Path) -> None:
    tied_with(tmp_path, embed, head)
    assert "unembed" not in weights(TIED, tmp_path).taken()


@pytest.mark.parametrize(("embed", "head"), [("float32", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
def test_a_head_of_its_own_beside_tied_embeddings_is_refused(embed: str, head: str, tmp_path: Path) -> None:
    tied_with(tmp_path, embed, head, row=9)
    spec = parse_job(document(TIED, initial_weights=str(tmp_path)))
    (problem,) = weights_problems(spec, AllowedRoots.only(tmp_path))
    assert "lm_head.weight differs from model.embed_tokens.weight in row 9" in problem.message
    assert "set tie_word_embeddings to false" in problem.remedy


def test_of_a_large_head_blocks_are_compared_at_submission_and_all_before_the_first_step(tmp_path, monkeypatch) -> None:
    row_bytes = 4 * 8
    for name, value in (("COMPARED_BYTES", 4 * row_bytes), ("COMPARED_BLOCKS", 4), ("BLOCK_BYTES", 2 * row_bytes)):
        monkeypatch.setattr(f"orchestrator.models.huggingface.weights.{name}", value)
    for row in (1, 10):
        (tmp_path / str(row)).mkdir()
        tied_with(tmp_path / str(row), "float32", "float32", row)
    with pytest.raises(UnfitWeights, match="in row 10"):
        weights(TIED, tmp_path / "10")
    read = weights(TIED, tmp_path / "1")
    with pytest.raises(UnfitWeights, match="in row 1"):
        read.taken(["final_norm"])


def test_a_head_of_another_shape_beside_tied_embeddings_is_refused(tmp_path: Path) -> None:
    exported(TIED, tmp_path)
    tensors_changed(lambda tensors: tensors.update({"lm_head.weight": np.ones((3, 8), np.float32)}))(tmp_path)
    with pytest.raises(UnfitWeights, match=r"lm_head.weight as \(3, 8\)"):
        weights(TIED, tmp_path)


def test_tables_that_follow_from_the_configuration_are_passed_over(tmp_path: Path) -> None:
    exported(LLAMA, tmp_path)
    tables = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
    tensors_changed(lambda tensors: tensors.update(dict.fromkeys(tables, np.ones(2, np.float32))))(tmp_path)
    weights(LLAMA, tmp_path)


def test_numbers_of_a_configuration_are_compared_as_float32_writes_them(tmp_path: Path) -> None:
    scaling = {"kind": "llama3", "factor": 8.1, "low_frequency_factor": 1.1, "original_length": 32}
    decoder = DecoderSection.model_validate(LLAMA.model_dump() | {"norm_epsilon": 1e-5, "rope_scaling": scaling})
    exported(decoder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: rounded(each) for name, each in value.items()}
        return float(np.float32(value)) if isinstance(value, float) else value

    assert rounded(config) != config
    (tmp_path / "config.json").write_text(json.dumps(rounded(config)))
    weights(decoder, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.00001e-5}))
    with pytest.raises(UnfitWeights, match=r"norm_epsilon 1\.00001e-05, not 1e-05"):
        weights(decoder, tmp_path)


def test_an_infinite_number_where_nothing_depends_on_it_is_passed_over(tmp_path: Path) -> None:
    exported(LLAMA, tmp_path)
    overwritten_config(b'"torch_dtype"', b'"time_step_limit": [0.0, Infinity], "torch_dtype"')(tmp_path)
    weights(LLAMA, tmp_path)


STRANGE = (None, True, -1, 2**70, 1.5, float("nan"), "x", [], [1], ["full_attention"], {"a": 1}, {"full_attention": 3})


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_a_field_holds_is_a_decoder_or_refused(name: str) -> None:
    config = configuration.document_of(FAMILIES[name], 128)
    for field in (
        *config,
        "rope_parameters",
        "norm_topk_prob",
        "sliding_window_pattern",
        "tie_word_embeddings",
        "no_rope_layers",
    ):
        for value in STRANGE:
            with suppress(UnfitWeights):
                configuration.decoder_of(config | {field: value})


def test_weights_below_no_root_are_refused_and_nothing_of_them_is_said(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    exported(LLAMA, tmp_path)
    spec = parse_job(document(LLAMA, initial_weights=str(tmp_path)))
    (problem,) = weights_problems(spec, AllowedRoots.only(tmp_path / "data"))
    assert "is not an allowed place for data of jobs" in problem.message
    assert "atoll up --data ROOT" in problem.remedy


def test_numbers_that_are_none_end_the_job_before_its_first_step(tmp_path: Path) -> None:
    exported(LLAMA, tmp_path)
    tensors_changed(lambda tensors: tensors[NORM].fill(np.nan))(tmp_path)
    with pytest.raises(UnfitWeights, match="NaN or Inf in the tensor that is final_norm"):
        weights(LLAMA, tmp_path).taken()


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    exported(LLAMA, tmp_path)
    read = weights(LLAMA, tmp_path)
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 4)
    with pytest.raises(UnfitWeights, match="became shorter"):
        read.taken()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_softcap": 5.0}, "attention_softcap 5.0"),
        ({"logit_softcap": 5.0}, "logit_softcap 5.0"),
        ({"window": 4, "global_every": 2}, "global_layers"),
        ({"output_bias": True}, "attention_bias False"),
        ({"activation": "gelu"}, "activation gelu"),
        ({"attention_scale": 0.25}, "attention_scale 0.25"),
    ],
)
def test_a_decoder_that_transformers_lacks_is_not_exported_as_another(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnfitWeights, match=f"model.decoder has {message}"):
        configuration.document_of(LLAMA.model_copy(update=fields), 128)


def test_presets_are_valid() -> None:
    for name, decoder in DECODERS.items():
        assert DecoderSection.model_validate(decoder.model_dump(exclude_unset=True)) == decoder, name


def test_presets_are_what_their_configurations_say() -> None:
    for name, decoder in DECODERS.items():
        assert (
            configuration.differences(decoder, configuration.decoder_of(configuration.document_of(decoder, 128))) == []
        ), name


def test_a_plain_model_is_not_exported(tmp_path: Path) -> None:
    spec = parse_job(document(LLAMA) | {"model": {"preset": "nano"}}).model_dump(mode="json")
    with pytest.raises(UnfitWeights, match=r"its model is model\.preset 'nano', and transformers only has"):
        export.write(tmp_path / "merged", tmp_path, spec)
    assert list(tmp_path.iterdir()) == []
