"""A record that is no text costs itself and is told precisely; what is cut stays one text; memory has a bound."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given
from hypothesis import strategies as st

from learners import corpus, data_indexing
from learners.island_spec import IslandSpec
from learners.streaming import documents, files, order
from learners.streaming.documents import Continuation, Reader, Unreadable, chosen, parts
from learners.text import Text
from learners.tokenizer import Bytes
from orchestrator.core.vocabulary import NO_FLAWS, DataFlaws, SourceFlaws
from orchestrator.errors import ConfigurationError, UnreadableData
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import EVERYTHING
from orchestrator.text import parquet_rows, text_records
from orchestrator.text.text_records import CONVERSATION, PREFERENCE, NotText, text_of

GOOD = [f"été {number}".encode() for number in range(9)]
BAD = "fenêtre".encode("latin-1")
RECORDS = [*GOOD[:5], BAD, *GOOD[5:]]


def binary_rows(path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"text": pa.array(RECORDS, pa.binary())}), path)


def string_rows(path: Path) -> None:
    strings = pa.Array.from_buffers(pa.string(), len(RECORDS), pa.array(RECORDS, pa.binary()).buffers())
    pyarrow.parquet.write_table(pa.table({"text": strings}), path)


def dictionary_rows(path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"text": pa.array(RECORDS, pa.binary()).dictionary_encode()}), path)


def array_records(path: Path) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in RECORDS:
        writer.write(record)
    writer.close()


def json_lines() -> bytes:
    return b"".join(b'{"text": "' + record + b'"}\n' for record in RECORDS)


def plain() -> bytes:
    return b"".join(record + b"\n" for record in RECORDS)


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a.jsonl": (lambda path: path.write_bytes(json_lines()), "line"),
    "a.json.gz": (lambda path: path.write_bytes(gzip.compress(json_lines())), "line"),
    "a.txt": (lambda path: path.write_bytes(plain()), "line"),
    "a.txt.zst": (lambda path: path.write_bytes(zstandard.compress(plain())), "line"),
    "binary.parquet": (binary_rows, "row 5"),
    "string.parquet": (string_rows, "row 5"),
    "dictionary.parquet": (dictionary_rows, "row 5"),
    "a.arrayrecord": (array_records, "record 5"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_bytes_that_are_not_utf8_cost_one_record_and_are_counted_and_named(tmp_path: Path, name: str) -> None:
    write, what = WRITERS[name]
    path = tmp_path / name
    write(path)

    def streamed(most: int) -> tuple[list[bytes], Unreadable]:
        reader = Reader(EVERYTHING, "text", Unreadable(most))
        return reader.documents(str(path), 0, 1), reader.unreadable

    def whole(most: int) -> tuple[list[bytes], Unreadable]:
        unreadable = Unreadable(most)
        return list(
            corpus.file_documents(DataSection(files=[str(path)], text_field="text"), EVERYTHING, unreadable)
        ), unreadable

    for read in (streamed, whole):
        texts, unreadable = read(1)
        assert b"".join(texts).replace(b"\n", b"") == b"".join(GOOD)
        assert len(unreadable.reasons) == 1
        assert [(flaws.unreadable_records, flaws.not_utf8_records) for flaws in unreadable.by_source()] == [(1, 1)]
        with pytest.raises(UnreadableData, match=rf"{name}.*{what}.*is not UTF-8 \(its byte \d+ is 0xea\)"):
            read(0)


def strings(texts: list[bytes]) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


def messages(contents: pa.Array) -> pa.Array:
    count = len(contents)
    contents = pa.concat_arrays([pa.array(["hello"] * count).cast(contents.type), contents])
    order = [at for number in range(count) for at in (number, count + number)]
    turns = pa.StructArray.from_arrays(
        [pa.array(["user", "assistant"] * count), contents.take(order)], ["role", "content"]
    )
    return pa.ListArray.from_arrays(pa.array(range(0, 2 * count + 1, 2), pa.int32()), turns)


CONVERSATION_TABLES: dict[str, tuple[str, Callable[[pa.Array], dict[str, pa.Array]]]] = {
    "messages": (CONVERSATION, lambda texts: {"messages": messages(texts)}),
    "completion": (CONVERSATION, lambda texts: {"prompt": pa.array(["hello"] * len(texts)), "completion": texts}),
    "prompt": (CONVERSATION, lambda texts: {"prompt": texts, "completion": pa.array(["hello"] * len(texts))}),
    "preference": (
        PREFERENCE,
        lambda texts: {
            "prompt": texts,
            "chosen": pa.array(["a"] * len(texts)),
            "rejected": pa.array(["b"] * len(texts)),
        },
    ),
}


@pytest.mark.parametrize("kind", ["string", "binary", "dictionary"])
@pytest.mark.parametrize("form", CONVERSATION_TABLES)
def test_a_conversation_that_is_not_utf8_costs_its_row_alone(tmp_path: Path, form: str, kind: str) -> None:
    texts = pa.array(RECORDS, pa.binary()) if kind == "binary" else strings(RECORDS)
    if kind == "dictionary" and form != "messages":
        texts = pa.array(RECORDS, pa.binary()).dictionary_encode()
    field, table = CONVERSATION_TABLES[form]
    pyarrow.parquet.write_table(pa.table(table(texts)), tmp_path / "a.parquet")
    unreadable = Unreadable(1)
    reader = Reader(EVERYTHING, field, unreadable)
    for rows in (
        reader.documents(str(tmp_path / "a.parquet"), 0, 1),
        list(reader.whole(str(tmp_path / "a.parquet"), 1 << 30)),
    ):
        assert [good for good in GOOD if any(good in row for row in rows)] == GOOD
        assert len(rows) == len(GOOD)
    assert unreadable.by_source() == (SourceFlaws("", 1, 1),)
    with pytest.raises(UnreadableData, match=r"row 5: it is not UTF-8 \(its byte \d+ is 0xea\)"):
        Reader(EVERYTHING, field, Unreadable(0)).documents(str(tmp_path / "a.parquet"), 0, 1)


@pytest.mark.parametrize(
    ("field", "record"),
    [
        ("text", {"text": None}),
        (CONVERSATION, {"messages": None}),
        (CONVERSATION, {"messages": None, "prompt": None, "completion": None}),
        (CONVERSATION, {"prompt": "a", "completion": None}),
        (PREFERENCE, {"prompt": "a", "chosen": "b", "rejected": None}),
    ],
)
def test_a_record_whose_fields_are_null_is_skipped_in_json_as_in_parquet(
    tmp_path: Path, field: str, record: dict[str, None]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    columns = {name: pa.array([value], pa.string()) for name, value in record.items()}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert Reader(EVERYTHING, field, Unreadable(0)).documents(str(tmp_path / name), 0, 1) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": 5}', "has a number in the field 'text', not text"),
        (b'{"text": ["a"]}', "has a list in the field 'text'"),
        (b'{"text": true}', "has true or false in the field 'text'"),
        (b'{"body": "a", "id": 1}', "has no field 'text' (text_field); it has 'body', 'id'"),
        (b"{}", "has no field 'text' (text_field); it has no fields"),
        (b'"text"', "is a text, not a JSON object"),
        (b"[1]", "is a list, not a JSON object"),
        (b'{"text": "\\ud800"}', r"has half of a surrogate pair, \ud800, in the field 'text'"),
        (b'{"text": "a\tb"}', "is not JSON (Invalid control character, at character 11)"),
        (b'{"text": "a"', "is not JSON (Expecting ',' delimiter, at character 12)"),
        (b'{"text": "\xe9"}', "is not UTF-8 (its byte 10 is 0xe9)"),
        (b"[" * 200_000, "is JSON that is nested too deeply"),
    ],
)
def test_a_line_that_has_no_text_is_told_by_what_it_has(line: bytes, said: str) -> None:
    with pytest.raises(NotText) as refused:
        text_of(line, "text")
    assert said in str(refused.value)


def test_null_and_empty_texts_are_skipped_and_numbers_of_any_size_are_no_matter() -> None:
    assert text_of(b'{"text": null}', "text") is None
    assert text_of(b'{"text": ""}', "text") is None
    assert text_of(b'{"id": %s, "text": "a"}' % (b"9" * 5_000), "text") == b"a"
    assert text_of(b'\xef\xbb\xbf{"text": "a"}', "text") == b"a"


@given(st.text(max_size=300), st.integers(4, 40))
def test_a_document_is_cut_between_characters(text: str, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "DOCUMENT_BYTES_MAX", most)
        cut = list(parts(text.encode()))
    assert b"".join(cut) == text.encode()
    assert all(part.decode() and len(part) <= most for part in cut)
    assert [isinstance(part, Continuation) for part in cut] == [False, *[True] * (len(cut) - 1)][: len(cut)]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_a_separator_stands_where_text_was_left_out_or_ends_and_nowhere_else(
    given_parts: list[tuple[bool, bool]],
) -> None:
    """Against a plain model: each part is one letter, and those that follow directly in the file and are kept are a run."""
    texts = [(Continuation if follows and at else bytes)([97 + at]) for at, (follows, _) in enumerate(given_parts)]
    kept = iter([is_kept for _, is_kept in given_parts])
    joined = corpus.joined(Bytes(0), list(chosen(texts, lambda _: next(kept)))).tobytes()
    model = b""
    for at, (text, (_, is_kept)) in enumerate(zip(texts, given_parts, strict=True)):
        follows = isinstance(text, Continuation) and given_parts[at - 1][1]
        model += (b"" if follows or not model else b"\0") * is_kept + bytes(text) * is_kept
    assert joined == model


JAPANESE = ("吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。" * 1_500).encode()


def spec_of(make_job: Callable, folder: Path, source: str, names: list[str], **data: object) -> dict:
    paths = [str(folder / name) for name in names]
    files_ = {"files": paths} if source == "files" else {"sources": [{"name": "all", "files": paths}]}
    section = {"source": source, "separator": 0, "sequence_length": 32, "held_out_ratio": 0.1, **files_, **data}
    return {**make_job(data=section), "roots": EVERYTHING}


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_no_separator_and_no_broken_character_is_in_a_document_of_any_length(make_job, tmp_path, name) -> None:
    others = [f"document number {number} " * 30 for number in range(400)]
    if name == "a.txt":
        (tmp_path / name).write_bytes(JAPANESE)
    else:
        lines = [json.dumps({"text": text}) for text in (JAPANESE.decode(), *others)]
        (tmp_path / name).write_text("\n".join(lines))
    section = IslandSpec.of(spec_of(make_job, tmp_path, "files", [name])).job.data
    split = corpus.load(section, EVERYTHING, Bytes(0))
    whole = [JAPANESE, *(text.encode() for text in others)]
    for side in (split.training, split.held_out):
        runs = side.tobytes().split(b"\0")
        assert all(run.decode() and any(run in document for document in whole) for run in runs)
    if name == "a.txt":
        assert split.training.tobytes().count(b"\0") <= 1, "only where a part is held out"
    reader = Reader(EVERYTHING, "text", Unreadable(0))
    texts = reader.documents(str(tmp_path / name), 0, 1)
    assert all(text.decode() for text in texts)
    assert corpus.joined(Bytes(0), texts).tobytes() == (JAPANESE if name == "a.txt" else b"\0".join(whole))


@pytest.mark.parametrize(("is_small", "begin_token"), [(True, None), (False, None), (True, 1)])
def test_an_index_of_plain_text_counts_what_islands_train_on(
    make_job, tmp_path, monkeypatch, is_small: bool, begin_token: int | None
) -> None:
    """Whatever blocks are held out one by one, neighbours among them: else an island would count the piece as another."""
    monkeypatch.setattr(order, "PIECE_BYTES_MIN", 6_000)
    monkeypatch.setattr(documents, "PASSAGE_BYTES", 300)
    monkeypatch.setattr(files, "SMALL_BYTES", files.SMALL_BYTES if is_small else 0)
    text = "".join(f"The {number}. line of a text, {number * 7919 % 1000} words later.\n" for number in range(1_200))
    (tmp_path / "a.txt").write_text(text)
    # of a small source a third is held out one by one, for so much is measured; of another, by ratio alone
    sizes = {"held_out_ratio": 1e-6, "sequence_length": 2_000} if is_small else {"held_out_ratio": 0.3}
    sizes |= {} if begin_token is None else {"begin_token": begin_token}
    spec = spec_of(make_job, tmp_path, "streamed", ["a.txt"], **sizes)
    tokens = Bytes(0, begin_token)

    def in_this_process(work, section, held_out, listed, process_count):
        for task in work:
            yield from data_indexing.counting.counted(task, tokens, held_out, listed)

    monkeypatch.setattr(data_indexing.counting, "counts", in_this_process)
    data_indexing.make(spec["data"], tmp_path / "a.index", 1, progress=False)
    indexed = Text({**spec, "data": {**spec["data"], "index": str(tmp_path / "a.index")}})
    draw = indexed.draw(0, 1)
    drawn = np.concatenate([draw(number) for number in range(20 if is_small else 200)]).astype(np.uint8)
    assert indexed._text.flaws() == NO_FLAWS
    assert all(run in text for row in drawn for run in row.tobytes().decode().replace("\1", "").split("\0"))


def test_every_piece_of_a_line_that_is_too_long_says_so_with_the_limit_and_a_remedy(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(documents, "LINE_BYTES_MAX", 1 << 20)
    for name, content in (("a.txt", b"word " * 500_000), ("a.jsonl", b'{"text": "%s"}\n' % (b"word " * 500_000))):
        (tmp_path / name).write_bytes(content)
        for number in range(9):
            with pytest.raises(UnreadableData, match=r"longer than the maximum of 1 MiB.*Break it up.*source: files"):
                Reader(EVERYTHING, "text", Unreadable(0)).documents(str(tmp_path / name), number, 9)
        patient = Reader(EVERYTHING, "text", Unreadable(1))
        assert [patient.documents(str(tmp_path / name), number, 9) for number in range(9)] == [[]] * 9
        section = DataSection(files=[str(tmp_path / name)], text_field="text")
        assert list(corpus.file_documents(section, EVERYTHING)) == [b"word " * 500_000]


def test_a_long_line_of_many_values_is_refused_before_they_are_made(tmp_path, monkeypatch) -> None:
    """Two gigabytes of ``[],`` are two megabytes when compressed, and would be forty gigabytes in memory."""
    monkeypatch.setattr(text_records, "LONG_LINE_BYTES", 1 << 16)
    monkeypatch.setattr(text_records, "VALUES_MAX", 10_000)
    prose = json.dumps({"text": 'a "list": [1, 2], \\' * 10_000})
    (tmp_path / "a.jsonl").write_text(prose + "\n")
    for values in ("[]", '"a"', "{}", "[0]", "1"):
        with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
            file.write(f'{{"text": "words", "more": [{", ".join([values] * 30_000)}]}}\n')
        many = DataSection(files=[str(tmp_path / "b.jsonl.gz")], text_field="text")
        with pytest.raises(UnreadableData, match="has more than 10,000 values, which need too much memory"):
            list(corpus.file_documents(many, EVERYTHING))
    section = DataSection(files=[str(tmp_path / "a.jsonl")], text_field="text")
    assert list(corpus.file_documents(section, EVERYTHING)) == [json.loads(prose)["text"].encode()]


def test_text_beyond_what_an_island_can_hold_is_refused_before_it_is_held(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(corpus, "TEXT_BYTES_MAX", 1 << 20)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a line of words\n" * 500_000))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b'{"text": "a line of words"}\n' * 200_000))
    pyarrow.parquet.write_table(pa.table({"text": ["a line of words" * 1_000] * 500}), tmp_path / "c.parquet")
    for name in ("a.txt.gz", "b.json.gz", "c.parquet"):
        with pytest.raises(ConfigurationError, match=r"more than 1 MiB of text.*Use source: streamed"):
            list(corpus.file_documents(DataSection(files=[str(tmp_path / name)], text_field="text"), EVERYTHING))


def test_a_dictionary_of_parquet_is_never_expanded(tmp_path) -> None:
    value = "x" * (8 << 20)
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 512, pa.int32()), pa.array([value]))
    # without Arrow's own schema in it, by which pyarrow would keep the dictionary of itself
    options = {"dictionary_pagesize_limit": 1 << 28, "compression": "zstd", "store_schema": False}
    pyarrow.parquet.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", **options)
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    del rows
    pool = pa.system_memory_pool()
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        reader = Reader(EVERYTHING, "text", Unreadable(0))
        texts = reader.documents(str(tmp_path / "a.parquet"), 0, 1)
        peak = pool.max_memory()
    finally:
        pa.set_memory_pool(before)
    assert sum(map(len, texts)) == documents.PIECE_TEXT_MAX
    assert reader.unreadable.cut, "the rest of 4 GiB"
    assert peak < 200 << 20, f"{peak >> 20} MiB at once"


def test_a_dictionary_of_conversations_is_never_expanded(tmp_path) -> None:
    options = {"dictionary_pagesize_limit": 1 << 28, "compression": "zstd", "store_schema": False}
    values = pa.array(["user", "assistant", "x" * (8 << 20)])
    texts = pa.DictionaryArray.from_arrays(pa.array([2] * 1024, pa.int32()), values)
    roles = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 512, pa.int32()), values[:2])
    turns = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    for name, ends in (("many", range(0, 1025, 2)), ("one", (0, 1024))):
        column = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), turns)
        pyarrow.parquet.write_table(pa.table({"messages": column}), tmp_path / f"{name}.parquet", **options)
    del texts, turns, column
    pool, before = pa.system_memory_pool(), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        many, one = Reader(EVERYTHING, CONVERSATION, Unreadable(0)), Reader(EVERYTHING, CONVERSATION, Unreadable(1))
        assert len(many.documents(str(tmp_path / "many.parquet"), 0, 1)) == 3, "of 16 MiB each, in a piece of 64 MiB"
        assert one.documents(str(tmp_path / "one.parquet"), 0, 1) == []
        peak = pool.max_memory()
    finally:
        pa.set_memory_pool(before)
    assert list(one.unreadable.reasons.values()) == ["it has more than 64 MiB of text"]
    assert peak < 200 << 20, f"{peak >> 20} MiB at once"


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_values_that_repeat_the_one_before_are_read_a_few_at_a_time(tmp_path, version) -> None:
    """A file of 600 bytes had 256 rows of any length in memory at once."""
    options = {"column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "use_dictionary": False, "data_page_size": 1 << 30}
    table = pa.table({"text": ["x" * (8 << 20)] * 60})
    options |= {"compression": "zstd", "data_page_version": version}
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", **options)
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    del table
    texts, peak = reading(
        lambda: Reader(EVERYTHING, "text", Unreadable(0)).documents(str(tmp_path / "a.parquet"), 0, 1)
    )
    assert sum(map(len, texts)) == documents.PIECE_TEXT_MAX
    assert peak < 200 << 20, f"{peak >> 20} MiB at once"


def test_lists_of_values_that_repeat_the_one_before_are_refused_by_name(tmp_path) -> None:
    turns = [{"role": "user", "content": "x" * 99}, {"role": "assistant", "content": "x" * 99}]
    encoding = dict.fromkeys(("messages.list.element.role", "messages.list.element.content"), "DELTA_BYTE_ARRAY")
    table = pa.table({"messages": [turns]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, column_encoding=encoding)
    with pytest.raises(
        UnreadableData, match=r"lists in the encoding DELTA_BYTE_ARRAY.*Write the file again with another"
    ):
        Reader(EVERYTHING, CONVERSATION, Unreadable(0)).documents(str(tmp_path / "a.parquet"), 0, 1)


def test_a_run_of_messages_that_takes_a_few_bytes_is_refused_by_name(tmp_path) -> None:
    for count, problem in (
        (1 << 21, r"2,097,152 values in \d+ bytes.*long runs of one value"),
        (1 << 20, "64 MiB of text"),
    ):
        nothing = pa.StructArray.from_arrays([pa.nulls(count, pa.string())] * 2, ["role", "content"])
        column = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), nothing)
        pyarrow.parquet.write_table(pa.table({"messages": column}), tmp_path / "a.parquet", compression="zstd")
        assert (tmp_path / "a.parquet").stat().st_size < 10_000
        with pytest.raises(UnreadableData, match=problem):
            Reader(EVERYTHING, CONVERSATION, Unreadable(0)).documents(str(tmp_path / "a.parquet"), 0, 1)


def reading(read: Callable[[], Any]) -> tuple[Any, int]:
    """What ``read`` returns, and the most bytes that Arrow held meanwhile."""
    pool, before = pa.system_memory_pool(), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        return read(), pool.max_memory()
    finally:
        pa.set_memory_pool(before)


def test_a_page_beyond_the_budget_is_refused_by_name_before_it_is_decompressed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parquet_rows, "PAGE_BYTES_MAX", 1 << 20)
    rows = [f"{number:06d}" * 10_000 for number in range(200)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"text": rows}), path, use_dictionary=False, data_page_size=1 << 30)
    for read in (
        lambda: Reader(EVERYTHING, "text", Unreadable(0)).documents(str(path), 0, 1),
        lambda: list(corpus.file_documents(DataSection(files=[str(path)], text_field="text"), EVERYTHING)),
    ):
        with pytest.raises(
            UnreadableData, match=r"row group 0 has a page of 11 MiB.*maximum is 1 MiB.*fewer rows in a row"
        ):
            read()


def test_memory_that_runs_out_is_told_as_such(tmp_path, monkeypatch) -> None:
    pyarrow.parquet.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")

    def starved(*_: object) -> None:
        raise pa.lib.ArrowMemoryError("malloc of size 68719476736 failed")

    monkeypatch.setattr(parquet_rows, "_values", starved)
    with pytest.raises(
        UnreadableData, match=r"needs more memory than there is. Write the file again with smaller rows"
    ):
        Reader(EVERYTHING, "text", Unreadable(0)).documents(str(tmp_path / "a.parquet"), 0, 1)
    with pytest.raises(UnreadableData, match=r"a.parquet', the file: it needs more memory than there is"):
        list(corpus.file_documents(DataSection(files=[str(tmp_path / "a.parquet")], text_field="text"), EVERYTHING))


def test_what_a_job_in_memory_passes_over_is_in_its_flaws(make_job, tmp_path) -> None:
    lines = [json.dumps({"text": f"document {number} " * 20}).encode() for number in range(200)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "\xe9"}', b'{"text": 5}']))
    text = Text(spec_of(make_job, tmp_path, "files", ["a.jsonl"], unreadable_max=2))
    text.draw(0, 1)(0)
    assert text.flaws() == DataFlaws(unreadable_records=2, sources=(SourceFlaws("files", 2, 1),))
    with pytest.raises(
        UnreadableData, match=r"data.unreadable_max is 1.*line 202: it has a number in the field 'text'"
    ):
        Text(spec_of(make_job, tmp_path, "files", ["a.jsonl"], unreadable_max=1)).draw(0, 1)
