"""A job's tokens that are there already: Megatron's order, each island's own part, and files that do not fit refused."""

from __future__ import annotations

import re
import struct
import tempfile

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from api.auth.permissions import code_problems
from learners.streaming.tokens import GptOrder, OrderSize, held_back
from learners.text import Text
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.specification.config import parse_job
from orchestrator.specification.data_check import data_problems
from orchestrator.system.roots import AllowedRoots
from orchestrator.text import tokenizer_file
from tests.learners.tokenizers_of import FAMILIES

LENGTH = 8
VOCABULARY = 2_000


def write_megatron(prefix, documents, dtype="<u2") -> str:
    """Write .bin and .idx as Megatron-LM's `IndexedDatasetBuilder` does, by the layout that it documents."""
    code = {"<u1": 1, "<i4": 4, "<i8": 5, "<f4": 7, "<u2": 8}[dtype]
    arrays = [np.array(document, dtype) for document in documents]
    prefix.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    lengths = np.array([len(array) for array in arrays], "<i4")
    places = np.cumsum([0, *(array.nbytes for array in arrays)])[: len(arrays)].astype("<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(arrays), len(arrays) + 1)
    bounds = np.arange(len(arrays) + 1, dtype="<i8")
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + places.tobytes() + bounds.tobytes())
    return str(prefix.with_suffix(".bin"))


def numbered(lengths) -> list[list[int]]:
    """Documents in which every token differs."""
    tokens = iter(range(1, VOCABULARY))
    return [[next(tokens) for _ in range(length)] for length in lengths]


def reference(documents, length, seed, sample_count=None) -> list[list[int]]:
    """The samples of `GPTDataset` in their order, from its published algorithm, with lists and one walk over all tokens."""
    per_epoch = sum(map(len, documents))
    epochs, tokens = 1, per_epoch
    while sample_count is not None and tokens < sample_count * length + 1:
        epochs, tokens = epochs + 1, tokens + per_epoch
    sans_final = ((epochs - 1) * per_epoch - 1) // length
    separate = epochs > 1 and sample_count - sans_final < int(0.80 * ((per_epoch - 1) // length))
    state = np.random.RandomState(seed)

    def document_index(count):
        index = np.array([number for _ in range(count) for number in range(len(documents))], np.int32)
        state.shuffle(index)
        return index.tolist()

    order = document_index(epochs - 1) + document_index(1) if separate else document_index(epochs)
    walk = [token for number in order for token in documents[number]]
    samples = [walk[at : at + length + 1] for at in range(0, len(walk) - length, length)]
    first = np.arange(sans_final if separate else len(samples), dtype=np.uint32)
    state.shuffle(first)
    last = np.arange(len(first), len(samples), dtype=np.uint32)
    if separate:
        state.shuffle(last)
    return [samples[number] for number in (*first.tolist(), *last.tolist())]


@pytest.mark.parametrize("sample_count", [None, 10, 40, 60, 75, 200])
@pytest.mark.parametrize("seed", [0, 1234])
def test_the_order_is_that_of_megatrons_data_set_element_by_element(sample_count, seed) -> None:
    documents = numbered(np.random.default_rng(seed).integers(0, 40, 15))
    lengths = np.array(list(map(len, documents)))
    size = OrderSize.of(int(lengths.sum()), LENGTH, sample_count)
    order = GptOrder(lengths, LENGTH, seed, size)
    ours = [
        [
            token
            for document, first, count in order.parts(number)
            for token in documents[document][first : first + count]
        ]
        for number in range(size.sample_count)
    ]
    assert ours == reference(documents, LENGTH, seed, sample_count)


def test_the_last_epoch_is_apart_in_some_of_these_orders_and_not_in_others() -> None:
    sizes = [OrderSize.of(300, LENGTH, count) for count in (10, 40, 60, 70, 200)]
    assert {size.is_last_apart for size in sizes} == {True, False}
    assert [size.epochs for size in sizes] == [1, 2, 2, 2, 6]


@pytest.fixture
def make_text(make_job, tmp_path):
    def make(sources, seed=0, batch_size=2, legs=(), root=tmp_path, **data):
        section = {"source": "tokens", "sequence_length": LENGTH, "sources": sources, **data}
        model = {"vocabulary_size": VOCABULARY}
        spec = make_job(data=section, seed=seed, training={"batch_size": batch_size}, model=model)
        return Text({**spec, "roots": AllowedRoots.only(root), "legs": legs}, VOCABULARY)

    return make


def drawn(text, shard, count, batches) -> list[list[int]]:
    draw = text.draw(shard, count)
    return [sequence.tolist() for number in range(batches) for sequence in draw(number)]


@pytest.fixture
def source(tmp_path):
    documents = numbered(np.random.default_rng(3).integers(5, 30, 60))
    reserved = write_megatron(tmp_path / "reserved", [range(1_500, 1_600)])
    return {"name": "web", "files": [write_megatron(tmp_path / "web", documents)], "held_out": [reserved]}, documents


def test_islands_together_draw_what_megatron_draws(make_text, source) -> None:
    section, documents = source
    expected = reference(documents, LENGTH, 7)
    expected += reference(documents, LENGTH, 8)  # the next epoch
    shards = [drawn(make_text([section], seed=7), shard, 3, 20) for shard in range(3)]
    assert [shards[g % 3][g // 3] for g in range(120)] == expected[:120]


def test_an_order_of_several_epochs_is_that_of_a_training_run(make_text, source) -> None:
    section, documents = source
    expected = reference(documents, LENGTH, 7, sample_count=300)
    assert drawn(make_text([section], seed=7, samples=300), 0, 1, 150) == expected[:300]


def test_islands_of_a_resumed_job_draw_the_rest_once(make_text, source) -> None:
    section, documents = source
    before = [drawn(make_text([section]), shard, 2, cursor) for shard, cursor in ((0, 9), (1, 5))]
    resumed = make_text([section], legs=[(2, (9, 5))])
    after = [sequence for shard in range(3) for sequence in drawn(resumed, shard, 3, 12)]
    everything = [tuple(sequence) for part in (*before, after) for sequence in part]
    assert len(set(everything)) == len(everything) == 2 * 14 + 3 * 24
    assert set(everything) < set(map(tuple, reference(documents, LENGTH, 0)))


def test_sources_have_their_shares_whatever_their_formats(make_text, tmp_path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(400, dtype=np.uint16).reshape(20, 20))
    np.save(tmp_path / "long.npy", np.arange(1_000, 1_900, dtype=np.int64))
    sources = [
        {"name": "rows", "files": [str(tmp_path / "rows.npy")], "weight": 3},
        {"name": "long", "files": [str(tmp_path / "long.npy")], "weight": 1},
    ]
    text = make_text(sources)
    of_long = sum(sequence[0] >= 1_000 for sequence in drawn(text, 0, 2, 512))
    assert of_long == 256
    held_out = {int(token) for batch in text.held_out_batches(4) for token in batch.ravel()}
    trained = {token for shard in range(2) for sequence in drawn(text, shard, 2, 512) for token in sequence}
    assert not held_out & trained
    assert max(held_out) == 1_898, "of its last 18 tokens, two sequences"
    assert {380, 396} <= held_out, "the last row"
    assert len(held_out | trained) > 1_200, "of 1,300"
    assert 0 < text.unigram_loss() < np.log(VOCABULARY) + 1


def test_the_last_documents_are_held_out_and_of_one_long_document_its_end() -> None:
    assert held_back(np.array([10, 10, 10, 10]), 3).tolist() == [10, 10, 10, 0]
    assert held_back(np.array([10, 10, 10, 10]), 11).tolist() == [10, 10, 0, 0]
    assert held_back(np.array([100]), 7).tolist() == [93]
    assert held_back(np.array([10, 100]), 7).tolist() == [10, 93]


def test_a_source_too_small_for_the_islands_is_refused(make_text, tmp_path) -> None:
    np.save(tmp_path / "small.npy", np.arange(40, dtype=np.uint16))
    with pytest.raises(
        ConfigurationError, match=r"small has 3 sequences of 8 tokens to train on, too few for 4 islands"
    ):
        make_text([{"name": "small", "files": [str(tmp_path / "small.npy")]}]).draw(0, 4)
    np.save(tmp_path / "none.npy", np.arange(0, dtype=np.uint16))
    with pytest.raises(ConfigurationError, match="none has 0 training tokens"):
        make_text([{"name": "none", "files": [str(tmp_path / "none.npy")]}]).draw(0, 4)


def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_drawn(make_text, tmp_path) -> None:
    tokens = np.arange(60, dtype=np.int32)
    tokens[11] = 50_256
    np.save(tmp_path / "other.npy", tokens)
    text = make_text([{"name": "other", "files": [str(tmp_path / "other.npy")]}])
    with pytest.raises(
        ConfigurationError, match=r"other\.npy.: it has the token 50,256 \(number 11\), but the model's voc"
    ):
        drawn(text, 0, 1, 20)


def problems_of(tmp_path, make_job, path) -> list[str]:
    data = {"source": "tokens", "sources": [{"name": "web", "files": [str(path)]}], "sequence_length": LENGTH}
    spec = parse_job(make_job(data=data, model={"vocabulary_size": VOCABULARY}))
    return [str(problem) for problem in data_problems(spec, AllowedRoots.only(tmp_path))]


def test_files_that_fit_have_no_problem_at_submission(tmp_path, make_job) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((3, 50), np.uint32))
    assert problems_of(tmp_path, make_job, tmp_path / "rows.npy") == []
    assert problems_of(tmp_path, make_job, write_megatron(tmp_path / "web", [range(40)], "<i4")) == []


def cut_short(path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def test_files_that_do_not_fit_are_refused_at_submission(tmp_path, make_job) -> None:
    def refused(path) -> str:
        (problem,) = problems_of(tmp_path, make_job, path)
        assert problem.startswith("data.sources.0.files.0: is ")
        return problem

    write_megatron(tmp_path / "short", [range(40), range(9)])
    cut_short(tmp_path / "short.bin")
    assert "has 96 bytes, but the documents of its .idx end at byte 98. Copy both" in refused(tmp_path / "short.bin")
    write_megatron(tmp_path / "broken", [range(40)])
    cut_short(tmp_path / "broken.idx")
    assert "has 60 bytes, but 62 for the 1 documents of its header" in refused(tmp_path / "broken.bin")
    write_megatron(tmp_path / "floats", [range(40)], "<f4")
    assert "says dtype code 7 (f4), and tokens are integers" in refused(tmp_path / "floats.bin")
    write_megatron(tmp_path / "alone", [range(40)])
    (tmp_path / "alone.idx").unlink()
    assert "whose index" in refused(tmp_path / "alone.bin")
    (tmp_path / "text.bin").write_bytes(b"some text")
    (tmp_path / "text.idx").write_bytes(b"some text" * 20)
    assert "is no index of Megatron-LM" in refused(tmp_path / "text.bin")
    for name, array, words in (
        ("floats", np.zeros(99), "has numbers of dtype '<f8', and tokens are little-endian integers. Convert it"),
        ("big", np.zeros(99, ">i4"), "has numbers of dtype '>i4'"),
        ("cube", np.zeros((3, 3, 3), np.int32), "has the shape (3, 3, 3), but tokens have one dimension, or two"),
        ("columns", np.asfortranarray(np.zeros((3, 4), np.int32)), "is stored by columns"),
        (
            "beyond",
            np.full(99, VOCABULARY, np.uint16),
            "has the token 2,000 (number 0), but the model's vocabulary has 2,000",
        ),
        ("negative", np.full(99, -1, np.int32), "has the token -1 (number 0)"),
        ("records", np.zeros(9, [("a", "<i4")]), "has records, and tokens are integers"),
    ):
        np.save(tmp_path / f"{name}.npy", array)
        assert words in refused(tmp_path / f"{name}.npy")
    np.save(tmp_path / "cut.npy", np.zeros(99, np.int32))
    cut_short(tmp_path / "cut.npy")
    assert "has 522 bytes, but its header says 524" in refused(tmp_path / "cut.npy")
    (tmp_path / "code.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00__import__('os')")
    assert "has a damaged .npy header" in refused(tmp_path / "code.npy")


def test_names_that_are_never_tokens_are_refused_before_any_file_is_opened(make_job) -> None:
    sources = [{"name": "web", "files": ["/a/web.idx", "/a/web.jsonl", "s3://a/web.npy"]}]
    with pytest.raises(InvalidJobSpec) as refused:
        parse_job(make_job(data={"source": "tokens", "sources": sources}))
    named = [str(problem) for problem in refused.value.problems]
    assert "is the index of a .bin file" in named[0]
    assert "is neither .npy, .bin nor .parquet" in named[1]
    assert "is in a store" in named[2]
    with pytest.raises(InvalidJobSpec, match=r"If they are tokens, set data\.source to tokens"):
        parse_job(make_job(data={"source": "streamed", "sources": [{"name": "web", "files": ["/a/web.npy"]}]}))


# ── a source of one's own ─────────────────────────────────────────────────────────────────────────────────────────────

OWN = """
import numpy as np

class Rows:
    def __init__(self, count, length):
        self.count, self.length = count, length
    def __len__(self):
        return self.count
    def __getitem__(self, number):
        if number == 77:
            raise OSError("no such row")
        return np.full(self.length, number, np.uint16)

def rows(settings):
    return Rows(settings["count"], settings.get("length", 9))

def nothing():
    return object()
"""


@pytest.fixture
def make_own(make_job, tmp_path, monkeypatch):
    (tmp_path / "mylab_rows.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(source="mylab_rows:rows", legs=(), **settings):
        data = {"source": source, "sequence_length": LENGTH, "held_out_ratio": 0.1, "settings": settings}
        spec = make_job(data=data, training={"batch_size": 2}, model={"vocabulary_size": VOCABULARY})
        return Text({**spec, "legs": legs, "roots": AllowedRoots()}, VOCABULARY)

    return make


def test_elements_of_ones_own_source_are_drawn_once_an_epoch_by_one_island(make_own) -> None:
    text = make_own(count=60)
    held_out = {int(batch[0, 0]) for batch in text.held_out_batches(1)}
    shards = [[sequence[0] for sequence in drawn(make_own(count=60), shard, 2, 27)] for shard in range(2)]
    first, second = (set(shard) for shard in shards)
    assert len(held_out) == 6
    assert not first & second
    assert first | second | held_out == set(range(60))
    for shard in shards:
        assert sorted(shard[:27]) == sorted(shard[27:])
        assert shard[:27] != shard[27:]
    assert drawn(make_own(count=60), 1, 2, 27)[30] == [shards[1][30]] * 9


def test_a_resumed_job_continues_ones_own_source(make_own) -> None:
    before = [one[0] for shard, cursor in ((0, 5), (1, 3)) for one in drawn(make_own(count=70), shard, 2, cursor)]
    resumed = make_own(count=70, legs=[(2, (5, 3))])
    after = [one[0] for shard in range(3) for one in drawn(resumed, shard, 3, 5)]
    assert len({*before, *after}) == len(before) + len(after) == 16 + 30


def test_what_a_source_of_ones_own_does_wrong_is_named(make_own) -> None:
    for words, text in (
        (r"element \d+ of data.source 'mylab_rows:rows' has the shape \(5,\)", make_own(count=60, length=5)),
        (r"has 1 elements. It needs at least 2", make_own(count=1)),
        (r"raises KeyError", make_own(other=1)),
        (r"has tokens from \d+ to \d+, but the model's vocabulary has 2,000", make_own(count=30_000)),
        (r"returns an object of type object without __len__", make_own("mylab_rows:nothing")),
        (r"cannot be imported", make_own("mylab_rows:missing")),
    ):
        with pytest.raises(ConfigurationError, match=words):
            drawn(text, 0, 1, 200)


def test_settings_are_plain_data_and_for_ones_own_source_alone(make_job) -> None:
    def refused(**data) -> str:
        with pytest.raises(InvalidJobSpec) as error:
            parse_job(make_job(data=data))
        return str(error.value)

    assert "data.settings: are given, but data.source is builtin, which takes none" in refused(settings={"a": 1})
    deep: dict = {}
    for _ in range(9):
        deep = {"a": deep}
    assert "nested more than 8 deep" in refused(source="a:b", settings=deep)
    assert "more than 1,000 values" in refused(source="a:b", settings={"a": [0] * 1_001})


def test_the_code_of_ones_own_source_must_be_of_an_allowed_package() -> None:
    (problem,) = code_problems({"data": {"source": "mylab_rows:rows"}}, ("learners",))
    assert problem.path == "data.source"
    assert code_problems({"data": {"source": "streamed"}}, ("learners",)) == ()


# ── Parquet ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(name, documents, field="input_ids", kind=None, **noted):
        column = pyarrow.array(documents, kind or pyarrow.list_(pyarrow.int32()))
        written = pyarrow.table({"id": list(range(len(documents))), field: column})
        parquet.write_table(written.replace_schema_metadata(noted), tmp_path / name, row_group_size=7)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    "kind",
    [pyarrow.list_(pyarrow.int64()), pyarrow.large_list(pyarrow.uint16())],
    ids=["of int64", "large, of uint16"],
)
def test_a_column_of_lists_is_drawn_in_megatrons_order_over_epochs_and_resumptions(make_text, table, kind) -> None:
    documents = [*numbered(np.random.default_rng(3).integers(0, 30, 60)), None, []]
    section = {"name": "web", "files": [table("web.parquet", documents, kind=kind)]}
    section["held_out"] = [table("reserved.parquet", [list(range(1_500, 1_600))])]
    documents[-2] = []
    expected = reference(documents, LENGTH, 7) + reference(documents, LENGTH, 8)
    shards = [drawn(make_text([section], seed=7), shard, 3, 20) for shard in range(3)]
    assert [shards[g % 3][g // 3] for g in range(120)] == expected[:120]
    before = [drawn(make_text([section]), shard, 2, cursor) for shard, cursor in ((0, 9), (1, 5))]
    after = [one for shard in range(3) for one in drawn(make_text([section], legs=[(2, (9, 5))]), shard, 3, 5)]
    assert len({tuple(sequence) for part in (*before, after) for sequence in part}) == 2 * 14 + 3 * 10


def test_a_node_copies_the_tokens_of_a_table_once_and_those_of_a_changed_one_again(make_text, table, tmp_path) -> None:
    section = {"name": "web", "files": [table("web.parquet", numbered([9] * 30))]}
    first = drawn(make_text([section]), 0, 1, 9)
    (copy,) = (tmp_path / "cache").rglob("*.bin")
    written_at = copy.stat().st_mtime_ns
    assert drawn(make_text([section]), 0, 1, 9) == first
    assert [one.stat().st_mtime_ns for one in (tmp_path / "cache").rglob("*.bin")] == [written_at]
    table("web.parquet", numbered([10] * 30))
    assert drawn(make_text([section]), 0, 1, 9) != first
    assert not list((tmp_path / "cache").rglob("*.draft"))


def test_a_table_that_does_not_have_the_models_tokens_is_refused_at_submission(table, tmp_path, make_job) -> None:
    def refused(path) -> str:
        (problem,) = problems_of(tmp_path, make_job, path)
        return problem

    assert problems_of(tmp_path, make_job, table("good.parquet", numbered([20] * 9))) == []
    documents = [[1, 2], [3, VOCABULARY, 4], [5]]
    assert "has the token 2,000, but the model's vocabulary has 2,000. Set" in refused(table("big.pq", documents))
    assert "has the token -7, but the model's" in refused(table("negative.pq", [[1], [-7]]))
    assert "input_ids', but" in (other := refused(table("other.parquet", documents, "tokens")))
    assert "has no such column; it has 'id', 'tokens'. Set it to the column that has the tokens." in other
    assert other.startswith("data.sources.0.token_field: is 'input_ids'")
    for name, kind, rows in (
        ("flat", pyarrow.int32(), [1, 2]),
        ("texts", pyarrow.list_(pyarrow.string()), [["a"]]),
        ("floats", pyarrow.list_(pyarrow.float32()), [[1.0]]),
        ("deep", pyarrow.list_(pyarrow.list_(pyarrow.int32())), [[[1]]]),
        ("times", pyarrow.list_(pyarrow.timestamp("us")), [[1]]),
    ):
        assert "in that column, not lists of integers. Set" in refused(table(f"{name}.parquet", rows, kind=kind))
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-20])
    assert "cannot be read as Parquet" in refused(tmp_path / "cut.parquet")


def test_a_table_of_another_tokenizer_is_refused_if_it_says_so(table, tmp_path, make_job) -> None:
    tokenizer = FAMILIES["llama 3, instructed"].write(tmp_path)

    def problems(**noted) -> list[str]:
        data = {"source": "tokens", "sources": [{"name": "web", "files": [table("web.pq", [[1] * 30], **noted)]}]}
        spec = parse_job(make_job(data=data | {"tokenizer": str(tokenizer)}, model={"vocabulary_size": VOCABULARY}))
        return [str(problem) for problem in data_problems(spec, AllowedRoots.only(tmp_path))]

    own = tokenizer_file.read(AllowedRoots.only(tmp_path), str(tokenizer)).digest
    assert problems() == problems(tokenizer_digest=own) == []
    (problem,) = problems(tokenizer_digest="0" * len(own))
    assert "has tokens of another tokenizer (tokenizer_digest 000" in problem
    assert "Name the tokenizer that made the file" in problem


def test_what_only_an_islands_reading_finds_in_a_table_is_named(make_text, table, tmp_path) -> None:
    for words, path in (
        (
            r"a row from 0 on has a null instead of a token. Write the file again",
            table("null.parquet", [[1, None]] * 9),
        ),
        (r"has int64 in the column 'id', not lists of integers", table("flat.parquet", [[1]] * 9)),
    ):
        section = {"name": "web", "files": [path], "token_field": "id" if "flat" in path else "input_ids"}
        with pytest.raises(ConfigurationError, match=words):
            make_text([section]).draw(0, 1)


def test_without_a_cache_an_island_copies_for_itself_with_one_warning(
    make_text, table, tmp_path, monkeypatch, caplog
) -> None:
    files = [table(f"{number}.parquet", numbered([9 + number] * 30)) for number in range(3)]
    section = {"name": "web", "files": files, "held_out": [table("held.parquet", [[1] * 40])]}
    expected = drawn(make_text([section]), 0, 1, 30)
    (tmp_path / "aside").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for places in (
        {"XDG_CACHE_HOME": str(tmp_path / "aside")},
        {"XDG_CACHE_HOME": "", "HOME": "/sys"},
        {"HOME": str(tmp_path / "aside")},
    ):
        for name, place in places.items():
            monkeypatch.setenv(name, place)
        caplog.clear()
        assert drawn(make_text([section]), 0, 1, 30) == expected
        assert len({record.getMessage() for record in caplog.records}) == 1
        assert re.search(r"in the user's cache: .*Training works.* Set XDG_CACHE_HOME", caplog.text)
        assert not list((tmp_path / "temporary").iterdir())
    monkeypatch.setattr(tempfile, "tempdir", "/sys")
    with pytest.raises(
        ConfigurationError, match=r"neither to the user's cache \(.*\) nor to a temporary file .* Set XDG_CACHE_HOME"
    ):
        drawn(make_text([section]), 0, 1, 30)
