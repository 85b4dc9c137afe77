"""A tokenizer is looked at when its job is submitted: whether it is one, fits the model, and which it is."""

from __future__ import annotations

import json
import tracemalloc
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from api.jobs.path_check import PIECE_BYTES, keep_tokenizer, tokenizer_of, with_tokenizer
from orchestrator.errors import Conflict, InvalidJobSpec
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots


@pytest.fixture
def submit(tmp_path):
    def submit(tokens: dict[str, int], **data):
        special = [{"content": text, "id": tokens[text], "special": True} for text in ("</s>", "<s>") if text in tokens]
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": special}))
        section = {"tokenizer": str(tmp_path / "tokenizer.json"), **data}
        document = {"islands": [{"node_group": "a"}], "budget": {"steps": 1}, "data": section}
        return with_tokenizer(parse_job(document), AllowedRoots.only(tmp_path)).data

    return submit


def test_its_digest_becomes_the_job_s(submit) -> None:
    data = submit({"a": 0, "</s>": 1})
    assert len(data.tokenizer_digest) == 32
    assert submit({"a": 0, "</s>": 1}, tokenizer_digest=data.tokenizer_digest) == data


def test_the_tokens_around_a_document_become_the_job_s(submit, tmp_path) -> None:
    tokens = {"a": 0, "</s>": 1, "<s>": 2}
    data = submit(tokens)
    assert (data.separator, data.begin_token) == (1, "none")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "bos_token": "<s>"}))
    data = submit(tokens)
    assert (data.separator, data.begin_token) == (1, 2)
    data = submit(tokens, separator=0, begin_token="none")
    assert (data.separator, data.begin_token) == (0, "none")


@pytest.mark.parametrize(
    ("tokens", "data", "problem"),
    [
        (
            {"a": 0, "</s>": 256},
            {},
            r"data.tokenizer: is .* with 257 tokens, but the model has only 256. Use the tokenizer",
        ),
        ({"a": 0}, {}, r"data.separator: is not given, .* no control token that is known to end a text. Set it"),
        ({"a": 0, "<eos>": 1}, {}, r"data.separator: is not given, .*'<eos>' is an ordinary token in it.* Set it"),
        ({"a": 0}, {"separator": 1}, r"data.separator: is 1, .* has no token 1: its last one is 0. Use"),
        ({"a": 0, "</s>": 1}, {"begin_token": 2}, r"data.begin_token: is 2, .* has no token 2: its last one is 1. Use"),
        ({"a": 0, "</s>": 1}, {"tokenizer_digest": "0" * 32}, r"data.tokenizer_digest: is 0{32}, but the file has"),
        ({}, {}, r"data.tokenizer: .* is neither a tokenizer.json nor"),
        ({"a": 0}, {"tokenizer": "gone.json"}, r"data.tokenizer: .* cannot be read here"),
    ],
)
def test_what_cannot_be_is_refused_with_field_value_and_remedy(submit, tmp_path, tokens, data, problem) -> None:
    if data.get("tokenizer"):
        data = {"tokenizer": str(tmp_path / data["tokenizer"])}
    with pytest.raises(InvalidJobSpec, match=problem):
        submit(tokens, **data)


def test_what_lies_outside_is_said_by_who_looks_at_paths(tmp_path) -> None:
    document = {"islands": [{"node_group": "a"}], "budget": {"steps": 1}, "data": {"tokenizer": "/elsewhere/a.json"}}
    spec = parse_job(document)
    assert with_tokenizer(spec, AllowedRoots.only(tmp_path)) == spec


def stored(path: Path, content: bytes) -> dict[str, Any]:
    path.write_bytes(content)
    return {"data": {"tokenizer": str(path), "tokenizer_digest": blake2b(content, digest_size=16).hexdigest()}}


def test_a_downloaded_tokenizer_is_the_runs_copy_or_else_the_file_read_piece_by_piece(tmp_path: Path) -> None:
    """However large it is, a request holds a piece of it in memory, and nothing is parsed."""
    content, run_dir = b"\x00not parsed" * 1_000_000, tmp_path / "run"
    run_dir.mkdir()
    spec, roots = stored(tmp_path / "tokenizer.json", content), AllowedRoots.only(tmp_path)
    for _ in ("the file", "the run's copy"):
        tracemalloc.start()
        file, size = tokenizer_of("mine", run_dir, spec, roots)
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert highest < 4 * PIECE_BYTES < size == len(content)
        with file:
            assert file.read() == content
        keep_tokenizer(run_dir, spec, roots)
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)


def test_a_tokenizer_that_is_another_by_now_is_refused(tmp_path: Path) -> None:
    spec, roots = stored(tmp_path / "tokenizer.json", b"as it was"), AllowedRoots.only(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"as it is")
    with pytest.raises(Conflict, match="but job mine was submitted with"):
        tokenizer_of("mine", tmp_path / "run", spec, roots)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(Conflict, match="cannot be read here"):
        tokenizer_of("mine", tmp_path / "run", spec, roots)
