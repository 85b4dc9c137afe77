from __future__ import annotations

import json
import math

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from learners import corpus
from learners.island_spec import IslandSpec
from learners.streaming.documents import DOCUMENT_BYTES_MAX
from learners.text import Text
from orchestrator.errors import ConfigurationError
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import EVERYTHING

DOCUMENTS = [f"document {number} says {'la ' * (number % 7 + 20)}".encode() for number in range(200)]


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    return corpus.split(DOCUMENTS, held_out_ratio=0.1, sequence_length=32)


def windows_of(batches: list[np.ndarray]) -> list[bytes]:
    return [row.astype(np.uint8).tobytes() for batch in batches for row in batch]


def test_the_builtin_corpus_is_the_standard_librarys_source_without_its_tests(make_job):
    documents = list(corpus.builtin_documents())
    assert documents == list(corpus.builtin_documents())
    assert sum(map(len, documents)) > 5_000_000
    assert any(document.startswith(b'"""Thread module emulating') for document in documents)  # threading.py
    assert not any(b"class AllTest(unittest" in document for document in documents)  # test___all__.py


def test_held_out_documents_are_whole_disjoint_from_training_and_about_as_many_as_asked(text):
    training, held_out = (side.tobytes().split(b"\n") for side in (text.training, text.held_out))
    assert sorted(training + held_out) == sorted(DOCUMENTS)
    assert 0.1 <= len(text.held_out) / sum(map(len, DOCUMENTS)) < 0.12


def test_the_split_does_not_depend_on_the_documents_order(text):
    other = corpus.split(reversed(DOCUMENTS), held_out_ratio=0.1, sequence_length=32)
    assert sorted(other.held_out.tobytes().split(b"\n")) == sorted(text.held_out.tobytes().split(b"\n"))


def test_one_long_document_can_still_be_split():
    document = bytes(np.random.default_rng(0).integers(32, 127, 20 * DOCUMENT_BYTES_MAX, np.uint8))
    parts = corpus.split([document], held_out_ratio=0.1, sequence_length=32)
    assert len(parts.held_out) == 2 * DOCUMENT_BYTES_MAX + 1


def test_too_little_text_is_refused_with_a_remedy():
    with pytest.raises(ConfigurationError, match="fewer than one sequence of 33"):
        corpus.split([b"short", b"also short"], held_out_ratio=0.1, sequence_length=32)


def test_text_json_lines_and_parquet_files_give_their_documents_in_order(make_job, tmp_path):
    (tmp_path / "a.txt").write_bytes(DOCUMENTS[0])
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"body": d.decode()}) for d in DOCUMENTS[1:3]) + "\n\n")
    table = pyarrow.table({"body": [d.decode() for d in DOCUMENTS[3:5]], "other": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    section = DataSection(files=[str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.parquet")], text_field="body")
    assert list(corpus.file_documents(section, EVERYTHING)) == DOCUMENTS[:5]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("absent.txt", None, "cannot be read here"),
        ("wrong.jsonl", b'{"text": "fine"}\n{"txt": 1}\n', "line 2"),
        ("wrong.parquet", b"not a table at all", "is no Parquet file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, content, complaint):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=complaint):
        list(corpus.file_documents(DataSection(files=[str(tmp_path / name)], text_field="text"), EVERYTHING))


@pytest.mark.parametrize(
    ("column", "complaint"),
    [
        ([1, 2], "has int64 in the column 'text', not text. Set text_field"),
        ([["a"], ["b"]], "has list<element: string> in the column 'text'"),
        ([{"a": "b"}], "has struct<a: string> in the column 'text'"),
    ],
)
def test_a_column_without_text_is_refused_by_name(tmp_path, column, complaint):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=complaint):
        list(corpus.file_documents(DataSection(files=[str(tmp_path / "a.parquet")], text_field="text"), EVERYTHING))


def test_a_column_of_bytes_is_text_and_one_of_its_name_too_many_is_refused(tmp_path):
    section = DataSection(files=[str(tmp_path / "a.parquet")], text_field="text")
    table = pyarrow.table({"text": pyarrow.array([b"a", None, "é".encode()], pyarrow.binary())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert list(corpus.file_documents(section, EVERYTHING)) == [b"a", "é".encode()]
    twice = pyarrow.Table.from_arrays([table["text"], table["text"]], ["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match="has 2 columns 'text' among"):
        list(corpus.file_documents(section, EVERYTHING))


def test_the_unigram_loss_of_uniform_bytes_is_ln_256_and_of_one_byte_nearly_nothing():
    uniform = np.tile(np.arange(256, dtype=np.uint8), 100)
    constant = np.zeros(100_000, np.uint8)
    for bytes_, expected in ((uniform, math.log(256)), (constant, 0.0)):
        parts = corpus.Corpus(training=bytes_, held_out=bytes_)
        sequences = corpus.held_out_sequences(parts, count=10, sequence_length=64)
        assert corpus.surprise(corpus.frequencies(parts), sequences) == pytest.approx(expected, abs=0.01)


def test_held_out_sequences_are_spread_evenly_and_never_repeat(text):
    counting = corpus.Corpus(training=text.training, held_out=np.arange(256, dtype=np.uint8)[: 7 * 32 + 1])
    assert corpus.held_out_sequences(counting, count=3, sequence_length=32)[:, 0].tolist() == [0, 2 * 32, 4 * 32]
    everything = corpus.held_out_sequences(text, count=10**6, sequence_length=32)
    assert everything[:, :-1].astype(np.uint8).tobytes() == text.held_out.tobytes()[: everything[:, :-1].size]


def test_one_epoch_of_all_shards_draws_every_window_exactly_once(text, make_job):
    spec = make_job()
    window_count = (len(text.training) - 1) // 32
    drawn = []
    for index in range(3):
        draw = corpus.shard_batches(text, IslandSpec.of(spec), index, 3)
        size = len(range(index, window_count, 3))
        drawn += windows_of([draw(number) for number in range(math.ceil(size / 4))])[:size]
    windows = [text.training[start * 32 : start * 32 + 33].tobytes() for start in range(window_count)]
    assert sorted(drawn) == sorted(windows)


def test_later_epochs_keep_to_the_shard_in_another_order(text, make_job):
    window_count = (len(text.training) - 1) // 32
    size = len(range(0, window_count, 2))
    draw = corpus.shard_batches(text, IslandSpec.of(make_job()), 0, 2)
    drawn = windows_of([draw(number) for number in range(size)])  # batches of 4: four epochs
    first, second = drawn[:size], drawn[size : 2 * size]
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_batch_follows_from_its_number_and_the_seed_alone(text, make_job):
    draw, again = (corpus.shard_batches(text, IslandSpec.of(make_job(seed=5)), 1, 2) for _ in range(2))
    forwards = [draw(number) for number in range(20)]
    backwards = [again(number) for number in reversed(range(20))][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert forwards[0].dtype == np.int32
    assert forwards[0].shape == (4, 33)
    assert not np.array_equal(forwards[0], corpus.shard_batches(text, IslandSpec.of(make_job(seed=6)), 1, 2)(0))


def test_the_data_parallel_baseline_draws_what_the_islands_draw_together(text, make_job, monkeypatch):
    monkeypatch.setattr(corpus, "load", lambda *_: text)
    together = Text(make_job()).union_draw(2)
    apart = [corpus.shard_batches(text, IslandSpec.of(make_job()), index, 2) for index in range(2)]
    assert np.array_equal(together(7), np.concatenate([draw(7) for draw in apart]))


def test_batches_of_any_size_are_cut_from_the_same_stream_of_sequences(text, make_job):
    small, large = (
        corpus.shard_batches(text, IslandSpec.of(make_job(training={"batch_size": size})), 1, 2) for size in (2, 6)
    )
    assert np.array_equal(np.concatenate([small(k) for k in range(9)]), np.concatenate([large(k) for k in range(3)]))


def test_a_corpus_too_small_for_the_islands_is_refused(text, make_job):
    with pytest.raises(ConfigurationError, match="too few to give each of 500 islands one batch of 4"):
        corpus.shard_batches(text, IslandSpec.of(make_job()), 0, 500)
