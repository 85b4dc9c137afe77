"""Documents that share a row, each with attention and positions of its own: the logits and losses are those of it alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from api.jobs.path_check import with_tokenizer
from learners import jax_trainer, model
from learners.contract import Batch
from learners.conversations import FIRST, segmented
from learners.models.decoder import logits
from learners.text import Text
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from tests.learners.test_conversations import QWEN
from tests.learners.test_tokens import write_megatron
from tests.learners.tokenizers_of import FAMILIES, Family

DECODER = {
    "vocabulary_size": 300, "width": 16, "layer_count": 2, "head_count": 2, "key_value_head_count": 1, "head_size": 8,
    "hidden_size": 16,
}  # fmt: skip
MODEL = {"decoder": DECODER, "compute_dtype": "float32"}
LENGTH = 95
TEXTS = [f"{n}: " + "abc"[n % 3] * (n % 37) for n in range(200)]
BOTH = Family(("<|endoftext|>",), "<|endoftext|>", "<|endoftext|>", template="<|endoftext|>")
"""One token is before a document, and behind it."""


@pytest.fixture
def make(make_job: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Returns the document of a job that masks documents; of these texts, unless it names other data."""

    def document(family: Family = QWEN, **data: Any) -> dict[str, Any]:
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        text = {"source": "files", "files": [str(tmp_path / "texts.jsonl")], "tokenizer": str(family.write(tmp_path))}
        data = {**({} if "source" in data and data["source"] != "files" else text), **data}
        if data["source"] == "streamed":
            files = {"sources": [{"name": "web", "files": text["files"]}], "tokenizer": text["tokenizer"]}
            data = {**files, **data}
        section = {"sequence_length": LENGTH, "held_out_ratio": 0.1, "intra_document_masking": True, **data}
        spec = make_job(data=section, model=MODEL, training={"batch_size": 4}, evaluation={"sequences": 16})
        return {**spec, "roots": AllowedRoots.only(tmp_path)}

    return document


def parts_of(batch: Batch) -> list[tuple[int, np.ndarray]]:
    """Return the segments of a batch: its row, and which of the row's tokens."""
    return [
        (row, batch.segments[row] == number)
        for row in range(len(batch))
        for number in range(1, int(batch.segments[row].max()) + 1)
    ]


def logits_by(document: dict[str, Any]) -> Callable[[Any, Any], np.ndarray]:
    """Return a function of parameters and rows of one length, which returns logits; compiled once for each kind of rows."""
    decoder = parse_job({name: value for name, value in document.items() if name != "roots"}).model.network
    compiled = jax.jit(lambda parameters, rows: logits(decoder, jnp.float32, parameters, rows))
    return lambda parameters, rows: np.asarray(compiled(parameters, rows))


@pytest.mark.parametrize("source", ["files", "streamed"])
def test_logits_and_loss_of_packed_documents_are_those_of_each_alone(make: Any, source: str) -> None:
    document = make(source=source)
    text = Text(document, 300)
    batch = text.draw(0, 1)(3)
    assert isinstance(batch, Batch)
    parts = parts_of(batch)
    assert len(parts) > 2 * len(batch), "several documents share a row"
    rng = np.random.default_rng(0)
    built = model.build(document)
    parameters = {
        name: np.asarray(tensor) + 0.2 * rng.standard_normal(tensor.shape, np.float32)
        for name, tensor in built.initialise(0).items()
    }
    scores_of = logits_by(document)
    packed = scores_of(parameters, batch)
    rows = np.zeros((len(parts), batch.tokens.shape[1]), np.int32)
    for at, (row, own) in enumerate(parts):
        rows[at, : own.sum()] = batch.tokens[row][own]
    nats = list[float]()
    for (row, own), alone in zip(parts, scores_of(parameters, rows), strict=True):
        expected = np.float64(alone[: own.sum()])
        np.testing.assert_allclose(packed[row][own], expected, atol=2e-5)
        chosen = expected[np.arange(own.sum() - 1), batch.tokens[row][own][1:]]
        nats += (np.log(np.exp(expected[:-1]).sum(axis=-1)) - chosen).tolist()
    assert float(built.loss(parameters, batch)) == pytest.approx(np.mean(nats), abs=1e-5)
    assert np.abs(scores_of(parameters, batch.tokens) - packed).max() > 0.01, "without the mask they differ"


def test_documents_are_whole_or_cut_by_their_row(make: Any) -> None:
    document = make()
    text = Text(document, 300)
    whole = {f"{text}\n" for text in TEXTS}
    vocabulary = json.loads(Path(document["data"]["tokenizer"]).read_text())["model"]["vocab"]
    names = {token: name for name, token in vocabulary.items()}
    shown = {"\u0120": " ", "<|endoftext|>": "\n"}
    found = 0
    for number in range(20):
        batch = text.draw(0, 1)(number)
        for row, own in parts_of(batch):
            if own[0] or own[-1]:
                continue  # it may begin or end in another row
            said = "".join(shown.get(names[token], names[token]) for token in batch.tokens[row][own])
            assert said in whole
            assert batch.positions[row][own].tolist() == list(range(int(own.sum())))
            found += 1
    assert found > 200


@pytest.mark.parametrize("family", [FAMILIES["gemma 2"], BOTH])
def test_the_token_before_a_document_begins_its_segment(make: Any, family: Family) -> None:
    document = make(family)
    spec = parse_job({name: value for name, value in document.items() if name != "roots"})
    spec = with_tokenizer(spec, document["roots"])
    assert isinstance(spec.data.begin_token, int)
    batch = Text({**spec.model_dump(mode="json"), "roots": document["roots"]}, 300).draw(0, 2)(0)
    inner = [batch.tokens[row][own] for row, own in parts_of(batch) if not (own[0] or own[-1])]
    assert len(inner) > 4
    for tokens in inner:
        assert (tokens[0], tokens[-1]) == (spec.data.begin_token, spec.data.separator)
        assert (tokens == spec.data.separator).sum() == 1 + (spec.data.begin_token == spec.data.separator)


def test_segments_of_rows() -> None:
    batch = segmented(np.array([[5, 0, 6, 7, 0, 0, FIRST | 8]], np.int32), 0)
    assert batch.tokens.tolist() == [[5, 0, 6, 7, 0, 0, 8]]
    assert batch.segments.tolist() == [[1, 1, 2, 2, 2, 3, 4]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 0]]
    assert batch.target_weights.tolist() == [[1, 0, 1, 1, 0, 0]]
    assert segmented(np.array([[5, 0, 9, 6, 0, 8]], np.int32), 0, 9).segments.tolist() == [[1, 1, 2, 2, 2, 2]]


def test_tokens_end_a_document_where_their_file_does_or_at_the_named_token(make: Any, tmp_path: Path) -> None:
    documents = [[n % 40 + 1] * (n % 7 + 2) for n in range(200)]
    table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))})
    parquet.write_table(table, tmp_path / "rows.parquet")
    files = {
        "megatron": write_megatron(tmp_path / "web", documents),
        "table": str(tmp_path / "rows.parquet"),
    }
    for path in files.values():
        text = Text(make(source="tokens", sources=[{"name": "web", "files": [path]}]), 300)
        for batch in (text.draw(0, 1)(0), *text.held_out_batches(2)):
            for row, own in parts_of(batch):
                assert len(set(batch.tokens[row][own].tolist())) == 1, "one document has one token"
        assert 0 < text.unigram_loss() < np.log(300) + 1
    np.save(
        tmp_path / "long.npy",
        np.array([token for n in range(2_000) for token in (n % 90 + 3, n % 90 + 3, 1)], np.uint16),
    )
    sources = [{"name": "web", "files": [str(tmp_path / "long.npy")]}]
    batch = Text(make(source="tokens", sources=sources, separator=1), 300).draw(0, 1)(0)
    assert max(map(int, batch.segments[:, -1])) in range(LENGTH // 3, LENGTH // 3 + 3)
    with pytest.raises(ConfigurationError, match=r"web has one document in each file, so .* needs data\.separator"):
        Text(make(source="tokens", sources=sources), 300).draw(0, 1)


def sequences() -> list[np.ndarray]:
    """Return a source of its own: each sequence has three documents, which end with token 2."""
    return [np.tile(np.r_[np.full(31, n % 200 + 3), 2], 3).astype(np.int32) for n in range(64)]


def test_a_source_of_its_own_names_the_token_that_ends_a_document(make: Any) -> None:
    own = {"source": f"{__name__}:sequences"}
    batch = Text(make(**own, separator=2), 300).draw(0, 2)(0)
    assert {tuple(row) for row in batch.segments.tolist()} == {tuple(np.repeat([1, 2, 3], 32).tolist())}
    with pytest.raises(InvalidJobSpec, match=r"data\.separator: is absent, .* Name the token that ends a document"):
        make(**own)
    with pytest.raises(InvalidJobSpec, match=r"data\.separator: is 400, but the model has no token above 299"):
        make(**own, separator=400)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"source": "builtin"}, "data.intra_document_masking: is true, but data.tokenizer is bytes"),
        (
            {"format": "chat"},
            "has format chat, which always has intra_document_masking; leave that out",
        ),
    ],
)
def test_what_has_no_end_of_a_document_is_refused(make: Any, data: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidJobSpec) as refused:
        make(**data)
    assert words in str(refused.value)


def test_a_separator_that_a_text_may_contain_is_refused_at_submission(make: Any) -> None:
    document = make(separator=65)
    spec = parse_job({name: value for name, value in document.items() if name != "roots"})
    with pytest.raises(InvalidJobSpec, match=r"data\.separator: is 65, an ordinary token of .*Name a control token"):
        with_tokenizer(spec, document["roots"])


def test_a_model_trains_and_is_measured_under_the_mask(make: Any) -> None:
    trainer = jax_trainer.create(make(), 0, 1)
    trainer.trace()
    before = trainer.evaluate(trainer.initial_parameters())
    losses = [trainer.step(number).loss for number in range(8)]
    after = trainer.evaluate(trainer.snapshot(trainer.tensor_shapes()).arrays())
    assert losses[-1] < losses[0]
    assert after.loss < before.loss
    assert trainer.unigram_loss() < before.loss
