"""An export of a job that continued a checkpoint has what that checkpoint's users rely on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from api.jobs.checkpoints import keep_origin, origin_of
from orchestrator.errors import Conflict, DataError, NotFound
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import export, origin
from orchestrator.models.huggingface.origin import Origin
from orchestrator.models.presets import DECODERS
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from orchestrator.text.tokenizer_file import read
from tests.learners.tokenizers_of import FAMILIES, config, pieces_of_llama_2

SMALL = {"width": 8, "layer_count": 2, "head_count": 2, "key_value_head_count": 1, "head_size": 4, "hidden_size": 6}
LLAMA = DecoderSection(**SMALL, vocabulary_size=400)
GEMMA = DecoderSection.model_validate(
    DECODERS["gemma3-4b"].model_dump() | SMALL | {"vocabulary_size": 400, "window": 2, "global_every": 2}
)
TEMPLATE = "{% for message in messages %}⚓{% endfor %}"


def folder_of(path: Path, config: dict[str, Any], **files: Any) -> Origin:
    """What is kept of a checkpoint with this config.json, and these files."""
    path.mkdir(exist_ok=True)
    files = {f"{name}.json": document for name, document in files.items()} | {"config.json": config}
    for name, document in files.items():
        (path / name).write_text(json.dumps(document))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return origin.taken(str(path), AllowedRoots.only(path))


def exported(
    tmp_path: Path, decoder: DecoderSection, kept: Origin | None, tokenizer: Path | str = "bytes", **data: Any
) -> tuple[dict[str, Any], Path, list[str]]:
    """config.json of an export, its folder, and what is said of it."""
    document = {
        "islands": [{"node_group": "here"}],
        "budget": {"steps": 1},
        "data": {"tokenizer": str(tokenizer), **data},
    }
    spec = parse_job(document | {"model": {"decoder": decoder.model_dump(mode="json")}}).model_dump(mode="json")
    copy = None
    if tokenizer != "bytes":
        file = read(AllowedRoots.only(Path(tokenizer).parent), str(tokenizer))
        copy = Path(tokenizer)
        end = file.end_of_text if data.get("separator") is None else data["separator"]
        spec["data"] |= {"tokenizer_digest": file.digest, "separator": end}
        spec["data"]["begin_token"] = "none" if file.begin_of_text is None else file.begin_of_text
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    shapes = parameter_shapes(decoder)
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "parameters")
    notes = export.write(tmp_path / "parameters", out, spec, copy, kept)
    return json.loads((out / "config.json").read_text()), out, notes


def test_context_length_special_tokens_and_files_of_the_checkpoint_are_kept(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    path = FAMILIES["llama 3, instructed"].write(model)
    generation = json.loads((model / "generation_config.json").read_text()) | {"temperature": 0.6, "do_sample": True}
    kept = folder_of(
        model,
        {"model_type": "llama", "max_position_embeddings": 131_072, "eos_token_id": [1, 2, 3], "pad_token_id": 2}
        | {"bos_token_id": 0, "initializer_range": 0.01, "rope_theta": 5.0, "hidden_size": 64},
        generation_config=generation,
    )
    found, out, notes = exported(tmp_path, LLAMA, kept, path)
    assert found["max_position_embeddings"] == 131_072
    assert (found["eos_token_id"], found["bos_token_id"], found["pad_token_id"]) == ([1, 2, 3], 0, 2)
    assert found["initializer_range"] == 0.01
    assert (found["rope_theta"], found["hidden_size"]) == (LLAMA.rope_theta, LLAMA.width), "the job's own"
    assert json.loads((out / "generation_config.json").read_text()) == generation
    for name in ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert notes == []


def test_a_length_that_is_written_with_a_decimal_point_is_kept(tmp_path) -> None:
    folder = folder_of(tmp_path / "model", {"model_type": "llama", "max_position_embeddings": 8_192.0})
    assert exported(tmp_path, LLAMA, folder)[0]["max_position_embeddings"] == 8_192


@pytest.mark.parametrize(
    ("decoder", "kind", "length"),
    [(LLAMA, "llama", 2_048), (GEMMA, "gemma3_text", 131_072), (GEMMA, "gemma3", 131_072)],
)
def test_a_checkpoint_that_leaves_its_length_to_its_type_has_that_length(tmp_path, decoder, kind, length) -> None:
    document = {"model_type": kind} | ({"text_config": {"model_type": "gemma3_text"}} if kind == "gemma3" else {})
    found, _, notes = exported(tmp_path, decoder, folder_of(tmp_path / "model", document))
    assert found["max_position_embeddings"] == length
    assert any("a vision-language model" in note for note in notes) == (kind == "gemma3")


def test_a_model_that_sees_has_its_special_tokens_above_those_of_its_language_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    path = FAMILIES["gemma 3, instructed"].write(model)
    text = {"model_type": "gemma3_text", "max_position_embeddings": 32_768, "bos_token_id": 2}
    kept = folder_of(model, {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 5], "pad_token_id": 0})
    found, _, _ = exported(tmp_path, GEMMA, kept, path)
    assert (found["eos_token_id"], found["bos_token_id"], found["pad_token_id"]) == ([1, 5], 2, 0)
    assert found["max_position_embeddings"] == 32_768


@pytest.mark.parametrize("kind", ["gemma3", "gemma3_text"])
def test_special_tokens_that_a_checkpoint_leaves_to_its_type_are_left_to_it(tmp_path: Path, kind: str) -> None:
    """As in Gemma 3: a null would replace the type's own bos 2 and pad 0."""
    model = tmp_path / "model"
    model.mkdir()
    path = FAMILIES["gemma 3, instructed"].write(model)
    text = {"model_type": "gemma3_text", "max_position_embeddings": 32_768}
    document = text if kind == "gemma3_text" else {"model_type": kind, "text_config": text}
    tokenizer = json.loads((model / "tokenizer_config.json").read_text()) | {"add_bos_token": False}
    kept = folder_of(model, document | {"eos_token_id": [1, 5]}, tokenizer_config=tokenizer)
    found, _, _ = exported(tmp_path, GEMMA, kept, path)
    assert found["eos_token_id"] == [1, 5]
    assert not {"bos_token_id", "pad_token_id"} & found.keys()
    kept = folder_of(model, document | {"bos_token_id": None, "pad_token_id": 0}, tokenizer_config=tokenizer)
    found, _, _ = exported(tmp_path, GEMMA, kept, path)
    assert (found["bos_token_id"], found["pad_token_id"]) == (None, 0)


def test_an_end_of_generation_that_is_token_0_is_kept(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    path = FAMILIES["qwen 3, instructed"].write(model)
    kept = folder_of(model, {"model_type": "llama", "eos_token_id": 2}, generation_config={"eos_token_id": 0})
    _, out, _ = exported(tmp_path, LLAMA, kept, path, separator=1)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 1]


def test_longer_sequences_than_the_checkpoint_s_are_the_new_length(tmp_path: Path) -> None:
    kept = folder_of(tmp_path / "model", {"model_type": "llama", "max_position_embeddings": 4_096})
    found, _, _ = exported(tmp_path, LLAMA, kept, sequence_length=16_384)
    assert found["max_position_embeddings"] == 16_384


def test_what_stood_behind_documents_ends_generation_too(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    path = FAMILIES["qwen 3, instructed"].write(model)
    (model / "generation_config.json").unlink()
    kept = folder_of(model, {"model_type": "llama", "eos_token_id": 2})
    found, out, notes = exported(tmp_path, LLAMA, kept, path)
    assert found["eos_token_id"] == 2, "<|im_end|>, as the checkpoint has it"
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert notes == ["Generation also ends at token 0, which separated the documents."]


def test_with_another_tokenizer_the_checkpoint_s_tokens_and_templates_mean_nothing_and_are_named(
    tmp_path: Path,
) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    FAMILIES["qwen 3, instructed"].write(model)
    kept = folder_of(
        model, {"model_type": "llama", "max_position_embeddings": 8_192, "eos_token_id": 2, "pad_token_id": 0}
    )
    found, out, notes = exported(tmp_path, LLAMA, kept, FAMILIES["llama 3"].write(other))
    assert (found["eos_token_id"], found["bos_token_id"], found["pad_token_id"]) == (1, 0, None)
    assert found["max_position_embeddings"] == 8_192
    assert not (out / "chat_template.jinja").exists()
    own = json.loads((out / "tokenizer_config.json").read_text())
    assert (own["eos_token"], own["bos_token"]) == ("<|end_of_text|>", "<|begin_of_text|>")
    assert "chat_template.jinja are left out" in notes[0]


def test_sentencepiece_s_file_keeps_the_checkpoint_s_words_and_our_class(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.model").write_bytes(pieces_of_llama_2())
    kept = folder_of(
        model,
        {"model_type": "llama", "eos_token_id": 2},
        tokenizer_config=config("</s>", "<s>", add_bos_token=True, tokenizer_class="LlamaTokenizer"),
    )
    _, out, _ = exported(tmp_path, LLAMA, kept, model / "tokenizer.model")
    own = json.loads((out / "tokenizer_config.json").read_text())
    assert own == config("</s>", "<s>", add_bos_token=True, tokenizer_class="SentencePieceBackend")
    assert (out / "tokenizer.model").read_bytes() == (model / "tokenizer.model").read_bytes()


def test_files_that_were_not_kept_are_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "elsewhere").write_text("{}")
    (model / "generation_config.json").symlink_to(tmp_path / "elsewhere")
    kept = folder_of(model, {"model_type": "llama"}, special_tokens_map={})
    assert kept.lost == {"generation_config.json": "it is outside the roots"}
    _, _, notes = exported(tmp_path, LLAMA, kept)
    assert notes[0] == f"generation_config.json of {model} could not be kept: it is outside the roots."


def test_a_resumed_job_keeps_what_the_run_before_it_kept(tmp_path: Path) -> None:
    model, runs = tmp_path / "model", tmp_path / "runs"
    kept = folder_of(model, {"model_type": "llama", "max_position_embeddings": 8_192})
    roots = AllowedRoots.only(model)
    first = {"model": {"initial_weights": str(model)}, "resume": None}
    for name in ("first", "second", "third", "other"):
        (runs / name / "checkpoints" / "3").mkdir(parents=True)
    keep_origin(runs / "first", first, roots)
    shutil.rmtree(model)
    for before, after in (("first", "second"), ("second", "third")):
        resumed = {
            "model": {"initial_weights": None},
            "resume": {"checkpoint": str(runs / before / "checkpoints" / "3")},
        }
        keep_origin(runs / after, resumed, roots)
        assert origin_of(after, runs / after, resumed, roots) == kept
    foreign = {"model": {}, "resume": {"checkpoint": str(tmp_path / "elsewhere" / "checkpoints" / "3")}}
    keep_origin(runs / "other", foreign, roots)
    with pytest.raises(NotFound, match="did not start from a checkpoint"):
        origin_of("other", runs / "other", foreign, roots)
    with pytest.raises(Conflict, match="Nothing was kept of"):
        origin_of("other", runs / "other", first, roots)


@pytest.mark.parametrize("content", ["", "[]", '{"folder": 3}', '{"folder": "x", "files": {"a": 3}}', "[" * 100_000])
def test_what_is_damaged_is_an_error_and_nothing_else(content: str) -> None:
    with pytest.raises(DataError, match="is damaged"):
        origin.parsed(content, "origin.json")
