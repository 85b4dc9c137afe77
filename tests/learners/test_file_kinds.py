"""What a file is: every name with every content is either read as what it is, or refused with what to do."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import tarfile
import zipfile
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given
from hypothesis import strategies as st

from learners.corpus import file_documents
from learners.streaming.documents import Reader, Unreadable
from orchestrator.errors import ConfigurationError
from orchestrator.specification.training_sections import DataSection
from orchestrator.system.roots import EVERYTHING
from orchestrator.text import file_kinds
from orchestrator.text.file_kinds import Compression, FileKind, Format, kind_of, refusal

TEXTS = [f"Le texte numéro {number}, d'été." for number in range(40)]
PLAIN = "".join(f"{text}\n" for text in TEXTS).encode()
LINES = "".join(json.dumps({"id": n, "text": text, "url": "u"}) + "\n" for n, text in enumerate(TEXTS)).encode()
OTHER_LINES = LINES.replace(b'"text"', b'"content"')
ARRAY = json.dumps([json.loads(line) for line in LINES.splitlines()]).encode()


def parquet() -> bytes:
    content = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"id": list(range(len(TEXTS))), "text": TEXTS}), content)
    return content.getvalue()


def array_record(folder: Path) -> bytes:
    writer = ArrayRecordWriter(str(folder / "made"), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    return (folder / "made").read_bytes()


def archive(kind: str) -> bytes:
    content = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(content, "w") as zipped:
            zipped.writestr("a.jsonl", LINES)
    else:
        with tarfile.open(fileobj=content, mode="w") as tarred:
            entry = tarfile.TarInfo("a.jsonl")
            entry.size = len(LINES)
            tarred.addfile(entry, io.BytesIO(LINES))
    return content.getvalue()


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return {
        "text": PLAIN,
        "text with BOM": b"\xef\xbb\xbf" + PLAIN,
        "lines": LINES,
        "lines with BOM": b"\xef\xbb\xbf" + LINES,
        "lines of other fields": OTHER_LINES,
        "array": ARRAY,
        "array over lines": json.dumps(json.loads(ARRAY), indent=1).encode(),
        "object over lines": json.dumps(json.loads(LINES.splitlines()[0]), indent=1).encode(),
        "lists": b"".join(b"[" + line + b"]\n" for line in LINES.splitlines()),
        "lines with a comment": b"# made by hand\n" + LINES + b"done\n",
        "lines of a field each": b"".join(b'{"a%d": 1}\n' % number for number in range(20)),
        "array of other fields": json.dumps([json.loads(line) for line in OTHER_LINES.splitlines()]).encode(),
        "array of texts": json.dumps(TEXTS).encode(),
        "object with an array": json.dumps({"version": 1, "data": json.loads(ARRAY)}).encode(),
        "web page": b"<!DOCTYPE html>\n<html><title>404</title>\n<p>Not found</p></html>\n",
        "ISO-2022": ("\u540d\u524d\u306f\u307e\u3060\u7121\u3044\n" * 20).encode("iso-2022-jp"),
        "parquet": parquet(),
        "records": array_record(tmp_path_factory.mktemp("records")),
        "text, gzip": gzip.compress(PLAIN),
        "text, zstd": zstandard.compress(PLAIN),
        "lines, gzip": gzip.compress(LINES),
        "lines, zstd": zstandard.compress(LINES),
        "lines, gzip twice": gzip.compress(gzip.compress(LINES)),
        "array, gzip": gzip.compress(ARRAY),
        "tar, gzip": gzip.compress(archive("tar")),
        "zlib": zlib.compress(LINES, 9),
        "bzip2": bz2.compress(LINES),
        "xz": lzma.compress(LINES),
        "lz4": b"\x04\x22\x4d\x18" + zlib.compress(LINES),
        "zip": archive("zip"),
        "tar": archive("tar"),
        "UTF-16": PLAIN.decode().encode("utf-16"),
        "UTF-16 without BOM": PLAIN.decode().encode("utf-16-le"),
        "UTF-32": PLAIN.decode().encode("utf-32"),
        "Latin-1": "été\n".encode("latin-1") * 20,
        "pdf": b"%PDF-1.7\n1 0 obj\n",
        "pickle": b"\x80\x04\x95\0\0\0\0" + bytes(range(256)),
        "git lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    }


READ_AS = {
    Format.TEXT: {"": ["text", "text with BOM", "web page"], "gzip": ["text, gzip"], "zstd": ["text, zstd"]},
    Format.JSON_LINES: {"": ["lines", "lines with BOM"], "gzip": ["lines, gzip"], "zstd": ["lines, zstd"]},
    Format.PARQUET: {"": ["parquet"]},
    Format.ARRAY_RECORD: {"": ["records"]},
}
NAMES = {
    Format.TEXT: ["README", "a.txt", "A.TXT", "a.md", "a.py", "a.log", "part-00000", "a.jsonl.bak", ".hidden"],
    Format.JSON_LINES: ["a.jsonl", "PART.JSONL", "c4-train.00000-of-01024.json", "a.ndjson", "a.jsonlines", "a.Json"],
    Format.PARQUET: ["a.parquet", "PART.PARQUET", "a.pq"],
    Format.ARRAY_RECORD: ["a.arrayrecord", "a.ARRAY_RECORD"],
}
ENDINGS = {"": [""], "gzip": [".gz", ".GZ", ".gzip"], "zstd": [".zst", ".ZSTD"]}


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
@pytest.mark.parametrize("compression", ENDINGS)
def test_every_content_under_every_name_is_read_as_what_it_is_or_refused_by_both_readers(
    tmp_path: Path, contents: dict[str, bytes], name: str, compression: str
) -> None:
    for ending in ENDINGS[compression]:
        path = tmp_path / f"{name}{ending}"
        kind = kind_of(str(path))
        readable = READ_AS[kind.format].get(kind.compression, [])
        for of, content in contents.items():
            path.write_bytes(content)
            section = DataSection(files=[str(path)], text_field="text")
            streamed, whole = (
                lambda: Reader(EVERYTHING, "text", Unreadable(0)).documents(str(path), 0, 1),  # noqa: B023
                lambda: list(file_documents(section, EVERYTHING)),  # noqa: B023
            )
            for read in (streamed, whole):
                if of in readable:
                    as_text = content if of == "web page" else PLAIN
                    expected = as_text if kind.format is Format.TEXT else "".join(TEXTS).encode()
                    assert b"".join(read()) == expected, (path.name, of)
                else:
                    with pytest.raises(ConfigurationError) as refused:
                        read()
                    assert path.name in str(refused.value), (path.name, of)
                    assert str(refused.value).rstrip().endswith("."), refused.value


@given(st.sampled_from(["jsonl", "json", "ndjson", "parquet", "txt", "gz"]), st.booleans(), st.data())
def test_letters_case_changes_no_files_kind(ending: str, compressed: bool, data: st.DataObject) -> None:
    name = f"part.{ending}" + (".gz" if compressed else "")
    flipped = "".join(data.draw(st.sampled_from([letter.lower(), letter.upper()])) for letter in name)
    assert kind_of(flipped) == kind_of(name)
    assert (refusal(flipped) is None) == (refusal(name) is None)


@pytest.mark.parametrize(
    "name",
    ["a.csv", "A.TSV.GZ", "a.zip", "a.tar.gz", "a.tgz", "a.parquet.gz", "a.jsonl.gz.gz", "a.bz2", "a.jsonl.xz",
     "a.jsonl.br", "a.jsonl.snappy", "a.lz4", "a.arrow", "a.warc.gz", "a.npy", "a.safetensors", "a.PDF", "a.tfrecord"],
)  # fmt: skip
def test_a_name_of_what_is_not_read_is_refused_with_a_remedy(name: str) -> None:
    refused = refusal(f"/data/{name}")
    assert refused is not None
    assert refused.remedy


@pytest.mark.parametrize(
    ("name", "of", "remedy"),
    [
        ("a.txt", "lines, gzip", r"Add \.gz to its name"),
        ("a.jsonl", "lines, zstd", r"Add \.zst to its name"),
        ("a.jsonl.gz", "lines", "Give it the name of what it is"),
        ("a.txt", "parquet", r"Name it \.parquet"),
        ("a.txt", "lines", r"Name it \.jsonl, and set text_field"),
        ("a.txt.gz", "lines, gzip", r"Name it \.jsonl\.gz, and set text_field"),
        ("a.txt", "lines of other fields", r"Name it \.jsonl, and set text_field"),
        ("a.json", "array", r"jq -c '\.\[\]'"),
        ("a.json", "array over lines", r"jq -c '\.\[\]'"),
        ("a.json.gz", "array, gzip", r"jq -c '\.\[\]'"),
        ("a.json", "object over lines", r"jq -c \."),
        ("a.json", "text", r"Name it \.txt if it is text"),
        ("a.txt", "UTF-16", "iconv -f UTF-16 -t UTF-8"),
        ("a.jsonl", "UTF-16", "iconv -f UTF-16 -t UTF-8"),
        ("a.txt", "zip", "Unpack it"),
        ("a.txt.gz", "tar, gzip", "Unpack it"),
        ("a.txt", "git lfs", "git lfs pull"),
        ("a.parquet", "git lfs", "git lfs pull"),
        ("a.jsonl.gz", "git lfs", "git lfs pull"),
        ("a.txt.gz", "zip", "Unpack it"),
        ("a.jsonl", "web page", "download the file again"),
        ("a.parquet", "web page", "download the file again"),
        ("a.jsonl.gz", "web page", "download the file again"),
        ("a.txt", "lines with a comment", r"Name it \.jsonl"),
        ("a.txt", "lines of a field each", r"Name it \.jsonl"),
        ("a.txt", "array of other fields", r"jq -c '\.\[\]'"),
        ("a.txt", "array of texts", r"jq -c '\.\[\]'"),
        ("a.jsonl", "lists", r"jq -c '\.\[\]'"),
        ("a.json", "object with an array", r"""jq -c '\.\["data"\]\[\]'"""),
        ("a.txt", "object with an array", r"jq -c"),
        ("a.txt", "ISO-2022", "iconv -f ENCODING -t UTF-8"),
        ("a.txt", "Latin-1", "iconv -f ENCODING -t UTF-8"),
    ],
)
def test_the_refusal_says_what_to_do(contents: dict[str, bytes], name: str, of: str, remedy: str) -> None:
    seen = file_kinds.look(name, io.BytesIO(contents[of]), "text")
    assert isinstance(seen, file_kinds.Misfit)
    assert re.search(remedy, seen.remedy), seen


def test_text_that_only_begins_as_another_format_does_is_text() -> None:
    for words in (
        "ORCHESTRA\n",
        "PARENTS\n",
        "PAR1 is a magic number\n",
        "BZh is one\n",
        "Rare\n",
        "{not json}\n",
        "[1]\n",
    ):
        assert not isinstance(file_kinds.look("a.txt", io.BytesIO(words.encode() * 9), "text"), file_kinds.Misfit), (
            words
        )


@given(st.binary(max_size=400), st.sampled_from(["a.txt", "a.jsonl", "a.parquet", "a.txt.gz", "a.jsonl.zst", "a.pq"]))
def test_any_bytes_are_looked_at_without_another_error_than_damage(content: bytes, name: str) -> None:
    try:
        file_kinds.look(name, io.BytesIO(content), "text")
    except file_kinds.DAMAGE:
        assert kind_of(name).is_compressed


def test_a_zstd_window_beyond_what_is_decompressed_is_told_with_the_remedy() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    framed = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    content = framed.compress(LINES) + framed.flush()
    seen = file_kinds.look("a.jsonl.zst", io.BytesIO(content), "text")
    assert isinstance(seen, file_kinds.Misfit)
    assert "window of 256 MiB, but at most 128 MiB" in seen.message
    assert "zstd -d --long=31" in seen.remedy
    assert kind_of("a.jsonl.zst") == FileKind(Format.JSON_LINES, Compression.ZSTD)
