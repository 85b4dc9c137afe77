"""Every document of a file is in exactly one of its pieces, whatever its kind; what cannot be read is counted."""

from __future__ import annotations

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from learners.streaming import documents
from learners.streaming.documents import Reader, Unreadable
from orchestrator.errors import ConfigurationError, OutsideRoots, UnreadableData
from orchestrator.system.roots import AllowedRoots
from orchestrator.text import parquet_rows

TEXTS = [f"document {number}: " + "é words " * (number % 7) for number in range(60)]
OBJECTS = "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS).encode()


def parquet(path):
    table = pa.table({"other": list(range(len(TEXTS))), "text": TEXTS})
    pyarrow.parquet.write_table(table, path, row_group_size=17)


def array_record(path):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(OBJECTS),
    "no-last-newline.jsonl": lambda path: path.write_bytes(OBJECTS.rstrip()),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(OBJECTS[:999]) + gzip.compress(OBJECTS[999:])),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(OBJECTS[:999]) + zstandard.compress(OBJECTS[999:])),
    "a.parquet": parquet,
    "a.arrayrecord": array_record,
}


def reader(folder, most=0, field="text") -> Reader:
    return Reader(AllowedRoots.only(folder), field, Unreadable(most))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_the_pieces_of_a_file_are_its_documents_in_their_order(tmp_path, name, count) -> None:
    WRITERS[name](tmp_path / name)
    read = [reader(tmp_path).documents(str(tmp_path / name), number, count) for number in range(count)]
    assert [text.decode() for piece in read for text in piece] == TEXTS
    assert count == 1 or name.endswith((".gz", ".zst")) or sum(map(bool, read)) > 1


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "large_binary", "binary_view"])
@pytest.mark.parametrize("is_dictionary", [False, True])
def test_row_groups_that_are_read_in_several_batches_are_divided_among_pieces(tmp_path, kind, is_dictionary) -> None:
    texts = [f"row {number % 40}" for number in range(1000)]
    column = pa.array([text.encode() for text in texts] if "binary" in kind else texts, getattr(pa, kind)())
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"text": column}), path, row_group_size=900, use_dictionary=is_dictionary)
    assert parquet_rows.ROWS < 900
    patient = reader(tmp_path)
    read = [patient.documents(str(path), number, 7) for number in range(7)]
    assert [text.decode() for piece in read for text in piece] == texts
    assert not patient.unreadable.reasons


LINES = st.text(st.characters(exclude_categories=("C",)), max_size=12).map(str.encode)


@settings(max_examples=60)
@given(st.lists(LINES, max_size=20), st.integers(1, 30))
def test_plain_text_is_divided_between_lines(tmp_path_factory, lines, count) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(b"\n".join(lines))
    pieces = [reader(path.parent).documents(str(path), number, count) for number in range(count)]
    assert b"".join(part for piece in pieces for part in piece) == path.read_bytes()
    assert all(part.endswith(b"\n") for piece in pieces[:-1] for part in piece[:-1])


def test_lines_that_are_no_documents_are_passed_over_up_to_the_limit_and_counted_once(tmp_path) -> None:
    lines = [b'{"text": "one"}', b"{", b'{"no": 1}', b'{"text": 5}', b'{"text": "two"}', b""]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    patient = reader(tmp_path, most=3)
    for _ in range(2):
        assert patient.documents(str(tmp_path / "a.jsonl"), 0, 1) == [b"one", b"two"]
    assert len(patient.unreadable.reasons) == 3
    with pytest.raises(UnreadableData, match=r"data.unreadable_max is 2.*the line at byte 28.*failure 3 of"):
        reader(tmp_path, most=2).documents(str(tmp_path / "a.jsonl"), 0, 1)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrayrecord", "a.jsonl.gz", "a.jsonl.zst", "gone.jsonl"])
def test_a_file_that_is_not_what_its_name_says_is_one_that_cannot_be_read(tmp_path, name) -> None:
    if not name.startswith("gone"):
        (tmp_path / name).write_bytes(b"this is no such file at all" * 9)
    patient = reader(tmp_path, most=1)
    assert patient.documents(str(tmp_path / name), 0, 3) == []
    with pytest.raises(UnreadableData, match="piece 2 of 3"):
        patient.documents(str(tmp_path / name), 1, 3)


def test_a_line_without_end_is_not_held(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(documents, "LINE_BYTES_MAX", 50)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"a" * 500 + b'"}\n{"text": "two"}\n')
    patient = reader(tmp_path, most=1)
    assert patient.documents(str(tmp_path / "a.jsonl"), 0, 1) == [b"two"]


def test_a_piece_that_is_far_too_large_is_cut(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(documents, "PIECE_TEXT_MAX", 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "' + b"a" * 99 + b'"}\n' * 1 + OBJECTS * 50))
    assert 0 < sum(map(len, reader(tmp_path).documents(str(tmp_path / "a.jsonl.gz"), 0, 1))) <= 1000


def test_another_column_is_a_matter_of_the_specification(tmp_path) -> None:
    parquet(tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"has no column 'body' among \['other', 'text'\]\. Set text_field"):
        reader(tmp_path, most=9, field="body").documents(str(tmp_path / "a.parquet"), 0, 1)


def test_nothing_is_read_outside_the_roots_whatever_the_limit(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "a.jsonl").write_bytes(OBJECTS)
    os.symlink(tmp_path / "a.jsonl", tmp_path / "in" / "a.jsonl")
    for path in (tmp_path / "a.jsonl", tmp_path / "in" / "a.jsonl"):
        with pytest.raises(OutsideRoots):
            reader(tmp_path / "in", most=9).documents(str(path), 0, 1)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("missing", [1, 30])
def test_a_compressed_file_that_ends_too_soon_is_no_shorter_text(tmp_path, name, missing) -> None:
    whole = gzip.compress(OBJECTS) if name.endswith(".gz") else zstandard.compress(OBJECTS)
    (tmp_path / name).write_bytes(whole[:-missing])
    patient = reader(tmp_path, most=1)
    assert patient.documents(str(tmp_path / name), 0, 1) == []
    assert len(patient.unreadable.reasons) == 1


def test_what_expands_beyond_all_measure_is_not_decompressed_to_its_end(tmp_path) -> None:
    zeros = zstandard.ZstdCompressor().compressobj()
    with (tmp_path / "a.txt.zst").open("wb") as file:
        for _ in range(300):
            file.write(zeros.compress(b" " * (1 << 20)))
        file.write(zeros.flush())
    patient = reader(tmp_path, most=1)
    assert patient.documents(str(tmp_path / "a.txt.zst"), 0, 1) == []
    (reason,) = patient.unreadable.reasons.values()
    assert "more than 1,000 times its stored size" in reason


def test_a_column_without_text_is_a_matter_of_the_specification(tmp_path) -> None:
    pyarrow.parquet.write_table(pa.table({"text": list(range(100))}), tmp_path / "a.parquet")
    with pytest.raises(ConfigurationError, match=r"has int64 in the column 'text', not text\. Set text_field"):
        reader(tmp_path, most=9).documents(str(tmp_path / "a.parquet"), 0, 1)
    texts = pa.array(TEXTS).dictionary_encode()
    pyarrow.parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    assert len(reader(tmp_path).documents(str(tmp_path / "a.parquet"), 0, 1)) == len(TEXTS)


def test_equal_passages_of_plain_text_are_equal_blocks_wherever_they_are(tmp_path) -> None:
    passage = "".join(f"sentence {number} of the passage, which is like no other\n" for number in range(4000)).encode()
    (tmp_path / "one.txt").write_bytes(passage)
    (tmp_path / "other.txt").write_bytes(b"something else before it\n" * 777 + passage + b"and behind it\n" * 99)
    one, other = (reader(tmp_path).documents(str(tmp_path / name), 0, 1) for name in ("one.txt", "other.txt"))
    assert len(one) > 10
    assert set(one[1:-1]) <= set(other)
