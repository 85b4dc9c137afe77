"""Text in a store: read by fsspec in ranges, as from S3, with objects that are gone, cut short, or others than before."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from typing import ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from learners.streaming import documents, files, order
from learners.streaming.documents import Reader, Unreadable
from learners.text import Text
from orchestrator.errors import ConfigurationError, InfrastructureError, OutsideRoots, UnreadableData
from orchestrator.system.roots import AllowedRoots

BUCKET = "memory://bucket/texts"
TEXTS = [f"document {number}: " + "é words " * (number % 7) for number in range(300)]
OBJECTS = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
PLAIN = "".join(f"line {number} of a text\n" for number in range(3000)).encode()


class Store(MemoryFileSystem):
    """Objects in memory, which are read as those of a real store are: through fsspec's buffer, range by range."""

    failures: ClassVar[dict[str, list[Exception]]] = {}
    """Of the class, for fsspec has another instance in each thread."""

    def _open(self, path: str, mode: str = "rb", **options: object) -> object:
        if mode != "rb":
            return super()._open(path, mode, **options)
        return _Object(self, path, mode, **{k: v for k, v in options.items() if k in ("block_size", "cache_type")})

    def info(self, path: str, **options: object) -> dict[str, object]:
        self._fail(path)
        return super().info(path, **options)

    def size(self, path: str) -> int:
        self._fail(path)
        return int(super().size(path))

    def _fail(self, path: str) -> None:
        if waiting := self.failures.get(path.rsplit("/", 1)[-1]):
            raise waiting.pop(0)


class _Object(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs._fail(self.path)
        content: bytes = MemoryFileSystem.store[self.path].getvalue()[start:end]
        return content


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    before = fsspec.get_filesystem_class("memory")
    fsspec.register_implementation("memory", Store, clobber=True)
    monkeypatch.setattr(documents, "PAUSE_S", 0.0)
    monkeypatch.setattr(files, "PAUSE_S", 0.0)
    store = fsspec.filesystem("memory")
    assert isinstance(store, Store)
    store.failures.clear()
    MemoryFileSystem.store.clear()
    yield store
    MemoryFileSystem.store.clear()
    fsspec.register_implementation("memory", before, clobber=True)


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table({"text": TEXTS}), sink, row_group_size=50)
    return sink.getvalue().to_pybytes()


CONTENTS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: OBJECTS,
    "a.jsonl.gz": lambda: gzip.compress(OBJECTS),
    "a.jsonl.zst": lambda: zstandard.compress(OBJECTS),
    "a.parquet": parquet,
}


def reader(most: int = 0) -> Reader:
    return Reader(AllowedRoots.only(BUCKET), "text", Unreadable(most))


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("count", [1, 7])
def test_the_pieces_of_an_object_are_its_documents_in_their_order(store: Store, name: str, count: int) -> None:
    store.pipe_file(f"/bucket/texts/{name}", CONTENTS[name]())
    pieces = [reader().documents(f"{BUCKET}/{name}", number, count) for number in range(count)]
    assert [text.decode() for piece in pieces for text in piece] == TEXTS


def test_an_object_that_comes_at_the_third_attempt_is_read(store: Store) -> None:
    store.pipe_file("/bucket/texts/a.jsonl", OBJECTS)
    store.failures["a.jsonl"] = [TimeoutError("slow down"), RuntimeError("of a library's own")]
    patient = reader()
    assert len(patient.documents(f"{BUCKET}/a.jsonl", 0, 1)) == len(TEXTS)
    assert not patient.unreadable.reasons


@pytest.mark.parametrize("name", ["gone.jsonl", *CONTENTS])
def test_an_object_that_is_gone_or_cut_short_counts_as_one_that_cannot_be_read(store: Store, name: str) -> None:
    if not name.startswith("gone"):
        content = CONTENTS[name]()
        store.pipe_file(f"/bucket/texts/{name}", content[: len(content) - 40])
    patient = reader(most=1)
    patient.documents(f"{BUCKET}/{name}", 0, 1)
    assert len(patient.unreadable.reasons) == 1
    with pytest.raises(UnreadableData):
        reader().documents(f"{BUCKET}/{name}", 0, 1)


def test_an_object_that_is_cut_short_while_it_is_read_is_no_shorter_text(store: Store) -> None:
    store.pipe_file("/bucket/texts/a.txt", PLAIN)
    size = store.size("/bucket/texts/a.txt")

    class Shrinking(_Object):
        def _fetch_range(self, start: int, end: int) -> bytes:
            return super()._fetch_range(start, min(end, 1000))

    patient = reader(most=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "_open", lambda self, path, mode="rb", **_: Shrinking(self, path, mode))
        assert patient.documents(f"{BUCKET}/a.txt", 0, 1, size) == []
    (reason,) = patient.unreadable.reasons.values()
    assert "it ends at byte 1,000, but should have" in reason


def test_an_object_that_is_another_than_was_listed_is_not_read_by_the_old_list(store: Store) -> None:
    store.pipe_file("/bucket/texts/a.jsonl", OBJECTS)
    patient = reader(most=1)
    assert patient.documents(f"{BUCKET}/a.jsonl", 0, 3, len(OBJECTS))
    store.pipe_file("/bucket/texts/a.jsonl", OBJECTS + OBJECTS)
    assert patient.documents(f"{BUCKET}/a.jsonl", 1, 3, len(OBJECTS)) == []
    (reason,) = patient.unreadable.reasons.values()
    assert f"has {2 * len(OBJECTS):,} bytes, but had {len(OBJECTS):,} when" in reason


def test_an_array_record_in_a_store_is_refused_with_what_to_do(store: Store) -> None:
    store.pipe_file("/bucket/texts/a.arrayrecord", b"whatever it is")
    with pytest.raises(ConfigurationError, match="Copy it to the nodes, or use parquet"):
        reader(most=9).documents(f"{BUCKET}/a.arrayrecord", 0, 1)


def test_no_other_bucket_is_touched(store: Store) -> None:
    store.pipe_file("/other/a.jsonl", OBJECTS)
    with pytest.raises(OutsideRoots):
        reader(most=9).documents("memory://other/a.jsonl", 0, 1)


@pytest.fixture
def make_text(store: Store, make_job, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Text]:
    monkeypatch.setattr(order, "PIECE_BYTES_MIN", 2_000)
    monkeypatch.setattr(order, "PIECE_BYTES_MAX", 4_000)

    def make() -> Text:
        source = {"name": "web", "files": [f"{BUCKET}/{name}" for name in CONTENTS]}
        data = {"source": "streamed", "sources": [source], "sequence_length": 32, "held_out_ratio": 0.1}
        return Text({**make_job(data=data, training={"batch_size": 4}), "roots": AllowedRoots.only(BUCKET)})

    return make


def test_a_job_reads_a_store_as_it_reads_a_disk(store: Store, make_text: Callable[[], Text]) -> None:
    for name, content in CONTENTS.items():
        store.pipe_file(f"/bucket/texts/{name}", content())
    text = make_text()
    drawn = [text.draw(0, 2)(number) for number in range(40)]
    again = make_text().draw(0, 2)
    assert all(np.array_equal(drawn[number], again(number)) for number in (39, 0, 17))
    assert len(text.held_out_batches(4)) >= 1


def test_what_is_not_there_is_the_specification_s_fault_and_a_store_in_trouble_is_not(
    store: Store, make_text: Callable[[], Text]
) -> None:
    with pytest.raises(ConfigurationError, match=r"a\.jsonl.* cannot be read here"):
        make_text().draw(0, 1)
    for name, content in CONTENTS.items():
        store.pipe_file(f"/bucket/texts/{name}", content())
    store.failures["a.parquet"] = [RuntimeError("no credentials yet")] * 9
    with pytest.raises(InfrastructureError, match=r"a\.parquet.* cannot be examined: RuntimeError: no credentials yet"):
        make_text().draw(0, 1)
