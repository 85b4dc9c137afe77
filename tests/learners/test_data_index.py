"""An epoch has every token once, with an index and without: on any islands, with any batches, over a resumption."""

from __future__ import annotations

import fcntl
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from learners import data_indexing, tokenizer
from learners.held_out import HeldOut, digest, smallest
from learners.island_spec import origin
from learners.streaming import counting, files, order
from learners.streaming.documents import Reader, Unreadable
from learners.streaming.files import TRAINING, located
from learners.streaming.streamed import TOKEN_BYTES_MAX
from learners.text import Text
from orchestrator.core.vocabulary import NO_FLAWS
from orchestrator.errors import ConfigurationError, InfrastructureError, UnreadableData
from orchestrator.system.roots import EVERYTHING
from tests.soak import examples

SEPARATOR, RATIO = 0, 0.1
ALL = ("web-0.jsonl", "web-1.jsonl.zst", "web-2.jsonl.gz", "code.parquet")


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "PIECE_BYTES_MIN", 1_500)
        patch.setattr(order, "PIECE_BYTES_MAX", 2_500)
        patch.setattr(order, "GROUP_BYTES", 6_000)
        yield


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Documents of which no two share a word, in files of all kinds, and a tokenizer with one token for each word."""
    folder, chance = tmp_path_factory.mktemp("indexed"), random.Random(7)
    texts = {
        name: [
            " ".join(f"{name}{n:03d}x{place:02d}" for place in range(chance.choice((1, 5, 20, 60))))
            for n in range(count)
        ]
        for name, count in (("w", 300), ("c", 200), ("r", 20))
    }
    (folder / ALL[0]).write_bytes(lines(texts["w"][:140]))
    (folder / ALL[1]).write_bytes(zstandard.compress(lines(texts["w"][140:220])))
    (folder / ALL[2]).write_bytes(gzip.compress(lines(texts["w"][220:]), mtime=0))
    pyarrow.parquet.write_table(pa.table({"text": texts["c"] + texts["r"]}), folder / ALL[3], row_group_size=16)
    (folder / "reserved.jsonl").write_bytes(lines(texts["r"]))
    words = [word for each in texts.values() for text in each for word in text.split()]
    vocabulary = {"</s>": SEPARATOR, **{word: 1 + number for number, word in enumerate(words)}}
    model = {"type": "WordLevel", "vocab": {**vocabulary, "<unk>": len(vocabulary)}, "unk_token": "<unk>"}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": SEPARATOR, "content": "</s>", "special": True, **plain}]
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def section(folder: Path, **changes) -> dict:
    sources = [{"name": "all", "files": [str(folder / name) for name in ALL]}]
    named = {
        "source": "streamed",
        "sources": sources,
        "held_out_ratio": RATIO,
        "tokenizer": str(folder / "tokenizer.json"),
    }
    return {**named, **changes}


@dataclass(frozen=True)
class Indexed:
    """``path`` is None where islands count for themselves."""

    folder: Path
    path: Path | None
    small: bool

    def text(self, make_job, length: int, batch_size: int = 1, seed: int = 0, legs=(), **changes) -> Text:
        named = {"index": str(self.path)} if self.path is not None else {}
        data = section(self.folder, sequence_length=length, **named, **changes)
        job = make_job(data=data, seed=seed, training={"batch_size": batch_size})
        return Text({**job, "roots": EVERYTHING, "legs": legs})

    def documents(self, length: int) -> list[list[tuple[str, ...]]]:
        """The words of the documents to train on, by piece, as said here once more."""
        source = located(EVERYTHING, [str(self.folder / name) for name in ALL], "all", TRAINING)
        pieces, reader = source.pieces, Reader(EVERYTHING, "text", Unreadable(0))
        texts = [
            reader.documents(source.paths[file], number, count)
            for file, number, count in zip(pieces.file, pieces.number.tolist(), pieces.count.tolist(), strict=True)
        ]
        sizes = {digest(text): len(text) for piece in texts for text in piece}
        wanted = max(RATIO * sum(sizes.values()), TOKEN_BYTES_MAX * (length + 1))
        held_out = HeldOut(int(RATIO * 2**64), smallest(sizes, wanted) if self.small else frozenset())
        by_piece = [[tuple(text.decode().split()) for text in piece if not held_out.has(text)] for piece in texts]
        assert sum(map(len, by_piece)) < sum(map(len, texts)), "nothing is held out"
        return [by_piece[piece] for piece in source.order]


@pytest.fixture(scope="module", params=["small", "by ratio"])
def indexed(request, folder, make_job):
    """An index, made by processes as the command does, of files that are looked through for what to hold out, or not."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "by ratio":
            patch.setattr(files, "SMALL_BYTES", 0)
        path = folder / f"{request.param}.index"
        data_indexing.make(make_job(data=section(folder))["data"], path, 2, progress=False)
        yield Indexed(folder, path, request.param == "small")


@pytest.fixture(scope="module", params=["indexed", "counted as it is read"])
def counted(request, indexed):
    return indexed if request.param == "indexed" else replace(indexed, path=None)


def words_of(folder: Path) -> dict[int, str]:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return {token: word for word, token in vocabulary.items()}


batches = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@settings(
    max_examples=examples(10),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(
    before=st.sampled_from([(4,), (2, 3), (1, 4, 2), (2, 6, 4, 2, 8)]),
    after=batches,
    drawn=st.lists(st.integers(0, 6), min_size=5, max_size=5),
    length=st.sampled_from([3, 24, 130]),
    seed=st.integers(0, 99),
)
def test_an_epoch_has_every_token_once_on_any_islands_with_any_batches_over_a_resumption(
    counted: Indexed, make_job: Callable, before, after, drawn, length, seed
) -> None:
    by_piece, names = counted.documents(length), words_of(counted.folder)
    stream_count = len(before)
    documents = [[text for piece in by_piece[stream::stream_count] for text in piece] for stream in range(stream_count)]
    token_counts = [sum(len(words) + 1 for words in of_stream) for of_stream in documents]
    sequence_counts = [(tokens - 1) // length for tokens in token_counts]
    wanted = {(stream, number) for stream, count in enumerate(sequence_counts) for number in range(count)}

    covered, sequences, block = Counter(), list[np.ndarray](), gcd(*before)
    legs = [(block, tuple(size * count // block for size, count in zip(before, drawn, strict=False)))]
    texts = []

    def take(earlier, index: int, size: int, batch: int, draw) -> None:
        rows = draw(batch)
        for row, number in zip(rows, range(batch * size, (batch + 1) * size), strict=True):
            place = origin(earlier, index, len(before) if not earlier else len(after), number)
            covered[place] += 1
            if place in wanted:
                sequences.append(row)

    for index, (size, count) in enumerate(zip(before, drawn, strict=False)):
        texts.append(counted.text(make_job, length, size, seed))
        draw = texts[-1].draw(index, stream_count)
        for batch in range(count):
            take((), index, size, batch, draw)
    resumed = [counted.text(make_job, length, size, seed, legs) for size in after]
    draws = [text.draw(index, len(after)) for index, text in enumerate(resumed)]
    batch = 0
    while not wanted <= covered.keys():
        assert batch <= 2 * stream_count * max(sequence_counts), "the islands do not come to the epoch's end"
        for index, size in enumerate(after):
            take(legs, index, size, batch, draws[index])
        batch += 1

    assert all(covered[place] == 1 for place in wanted)
    targets = Counter(np.concatenate([row[1:] for row in sequences]).tolist())
    separators = targets.pop(SEPARATOR, 0)
    expected = {word for of_stream in documents for words in of_stream for word in words}
    assert {names[token] for token in targets} <= expected, "a held-out document"
    assert set(targets.values()) == {1}, "a token twice"
    assert separators <= sum(map(len, documents))
    # what is left of each stream: its first token, which nothing predicts, and less than a sequence at its end
    left = [tokens - count * length for tokens, count in zip(token_counts, sequence_counts, strict=True)]
    assert all(1 <= tokens <= length for tokens in left)
    assert sum(targets.values()) + separators + sum(left) == sum(token_counts)
    assert all(text.flaws() == NO_FLAWS for text in (*texts, *resumed))


def test_each_epoch_has_another_order_and_leaves_another_rest(counted: Indexed, make_job) -> None:
    text, length = counted.text(make_job, 24), 24
    count = (sum(len(words) + 1 for piece in counted.documents(length) for words in piece) - 1) // length
    draw = text.draw(0, 1)
    epochs = [Counter(bytes(draw(number).data) for number in range(first, first + count)) for first in (0, count)]
    assert all(max(epoch.values()) == 1 for epoch in epochs)
    assert epochs[0] != epochs[1]
    again = counted.text(make_job, 24).draw(0, 1)
    assert all(np.array_equal(draw(number), again(number)) for number in (count + 3, 5, count - 1, 0))


def test_the_same_sequences_are_drawn_with_an_index_and_without(indexed: Indexed, make_job) -> None:
    """Also by islands that begin anywhere, and have to count what comes before."""
    with_index = indexed.text(make_job, 24).draw(1, 3)
    without = [replace(indexed, path=None).text(make_job, 24) for _ in range(3)]
    for text, first in zip(without, (0, 70, 333), strict=True):
        draw = text.draw(1, 3)
        assert all(
            np.array_equal(draw(number), with_index(number)) for number in (first, first + 1, first + 40, 3, 999)
        )


def test_sources_with_reserved_files_are_indexed_together_and_nothing_that_is_measured_is_trained_on(
    folder, make_job, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(files, "SMALL_BYTES", 2_000)  # so that of the reserved files only what is measured is left out
    sources = [
        {"name": "web", "files": [str(folder / name) for name in ALL[:3]], "weight": 3},
        {"name": "code", "files": [str(folder / ALL[3])], "held_out": [str(folder / "reserved.jsonl")]},
    ]
    data = section(folder, sources=sources, sequence_length=16)
    job = make_job(
        data={**data, "index": str(tmp_path / "index")}, training={"batch_size": 1}, evaluation={"sequences": 8}
    )
    data_indexing.make(job["data"], tmp_path / "index", 1, progress=False)
    text, names = Text({**job, "roots": EVERYTHING}), words_of(folder)
    measured = {names[token] for token in np.concatenate(text.held_out_batches(2)).ravel().tolist()}
    draw = text.draw(0, 1)
    of_code = [row for row in (draw(number)[0] for number in range(3_000)) if names[int(max(row))][0] in "cr"]
    targets = [names[token] for row in of_code for token in row[1:].tolist() if token != SEPARATOR]
    first_epoch = targets[: len(set(targets)) - 100]
    assert len(set(first_epoch)) == len(first_epoch), "a token twice before the others came once"
    assert not measured & set(targets)
    assert {word for word in measured if word[0] == "r"}
    assert {word for word in targets if word[0] == "r"}, "reserved, not measured, and in files"
    assert text.flaws() == NO_FLAWS


def test_text_that_changed_in_place_ends_the_job_or_is_passed_over(folder, make_job, tmp_path) -> None:
    content = (folder / ALL[0]).read_bytes()
    (tmp_path / "web.jsonl").write_bytes(content)
    data = section(folder, sources=[{"name": "web", "files": [str(tmp_path / "web.jsonl")]}], sequence_length=16)
    job = make_job(data=data)
    data_indexing.make(job["data"], tmp_path / "index", 1, progress=False)
    (tmp_path / "web.jsonl").write_bytes(content.replace(b"w000x", b"w000 ").replace(b"w100x", b"w100 "))

    def draw(unreadable_max: int) -> Text:
        changed = {**data, "index": str(tmp_path / "index"), "unreadable_max": unreadable_max}
        text = Text({**make_job(data=changed), "roots": EVERYTHING})
        draw = text.draw(0, 1)
        assert all(draw(number).shape == (4, 17) for number in range(100))
        return text

    with pytest.raises(UnreadableData, match=r"tokens to train on, but data\.index has counted .* `atoll data index`"):
        draw(0)
    flaws = draw(50).flaws()
    assert flaws.unreadable_records >= 1
    assert flaws.repeated_sequences + flaws.omitted_sequences >= 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"held_out_ratio": 0.2}, r"leaves out 0\.1 of the documents .*; the job holds out 0\.2"),
        ({"tokenizer": "bytes"}, "counts tokens of the tokenizer with the digest .*; the job has bytes"),
        ({"index_digest": "0" * 32}, "has the digest .* here, but 0{32} where the job was submitted"),
        ({"sources": [{"name": "other", "files": ["/a"]}]}, "has the sources 'all', and not other|cannot be read here"),
    ],
)
def test_an_island_refuses_an_index_that_does_not_fit(folder, make_job, indexed, changes, problem) -> None:
    with pytest.raises(ConfigurationError, match=f"data.*{problem}"):
        indexed.text(make_job, 24, **changes).draw(0, 1)


def test_an_island_refuses_an_index_of_another_build_that_cuts_files_otherwise(make_job, indexed, monkeypatch) -> None:
    monkeypatch.setattr(order, "PIECES_WANTED", 511)
    with pytest.raises(ConfigurationError, match="created by a version of atoll or Python that"):
        indexed.text(make_job, 24).draw(0, 1)


def test_a_file_of_another_size_is_refused(folder, make_job, tmp_path) -> None:
    content = (folder / ALL[0]).read_bytes()
    (tmp_path / "web.jsonl").write_bytes(content)
    data = section(folder, sources=[{"name": "web", "files": [str(tmp_path / "web.jsonl")]}], tokenizer="bytes")
    data_indexing.make(make_job(data=data)["data"], tmp_path / "index", 1, progress=False)
    (tmp_path / "web.jsonl").write_bytes(content + content)
    text = Text({**make_job(data={**data, "index": str(tmp_path / "index")}), "roots": EVERYTHING})
    with pytest.raises(ConfigurationError, match=f"had {len(content):,} bytes, and now has {2 * len(content):,}"):
        text.draw(0, 1)


def test_a_shard_with_less_than_a_sequence_is_refused(make_job, indexed) -> None:
    with pytest.raises(ConfigurationError, match="too few to give each of 5 islands a sequence of 5000 tokens"):
        indexed.text(make_job, 5_000).draw(0, 5)


@pytest.fixture
def in_this_process(monkeypatch) -> list[int]:
    """Pieces are counted here and not by processes; the pieces that were asked for, by call."""
    asked_for: list[int] = []

    def counts(work, section, held_out, listed, process_count):
        asked_for.append(sum(len(task.numbers) for task in work))
        tokens = tokenizer.load(section, EVERYTHING)
        for task in work:
            yield from counting.counted(task, tokens, held_out, listed)

    monkeypatch.setattr(counting, "counts", counts)
    return asked_for


@pytest.mark.parametrize("torn", [b"", b'{"source": 0, "piece"', b'{"source": 7, "piece": 1}\n{}\n'])
def test_what_was_stopped_goes_on_and_gives_the_same_bytes(folder, make_job, tmp_path, in_this_process, torn) -> None:
    data, partial = make_job(data=section(folder))["data"], tmp_path / "b.partial"
    data_indexing.make(data, tmp_path / "a", 1, progress=False)
    interrupted = iter([False] * 11 + [True])

    class Stopping(data_indexing.Counts):
        def add(self, count) -> None:
            if next(interrupted, False):
                raise KeyboardInterrupt
            super().add(count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_indexing, "Counts", Stopping)
        with pytest.raises(KeyboardInterrupt):
            data_indexing.make(data, tmp_path / "b", 1, progress=False)
    assert not (tmp_path / "b").exists()
    with open(partial, "ab") as file:
        file.write(torn)
    data_indexing.make(data, tmp_path / "b", 1, progress=False)
    assert in_this_process == [in_this_process[0], in_this_process[0], in_this_process[0] - 11]
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert not partial.exists()
    assert data_indexing.make(data, tmp_path / "b", 1, progress=False) is None, "it is there, and fits"


def test_what_is_no_index_is_not_overwritten(folder, make_job, tmp_path) -> None:
    data, text = make_job(data=section(folder))["data"], tmp_path / "text.jsonl"
    text.write_text("{}\n")
    for path, problem in ((text, "exists and is not an index"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigurationError, match=f"--output .* {problem}"):
            data_indexing.make(data, path, 1, progress=False)
    assert text.read_text() == "{}\n"


def test_what_was_counted_of_other_files_is_not_gone_on_with(
    folder, make_job, tmp_path, in_this_process, capsys
) -> None:
    data = make_job(data=section(folder))["data"]
    (tmp_path / "index.partial").write_bytes(b'{"of": "another"}\n')
    data_indexing.make(data, tmp_path / "index", 1, progress=False)
    assert "belongs to other files or rules; starting again" in capsys.readouterr().err
    (tmp_path / "index.partial").write_bytes(b"")
    with open(tmp_path / "index.partial", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InfrastructureError, match="Another process is writing"):
            data_indexing.make({**data, "held_out_ratio": 0.2}, tmp_path / "index", 1, progress=False)


def test_a_process_that_dies_is_named(folder, make_job, tmp_path, monkeypatch) -> None:
    def killed(*_):
        raise BrokenPipeError

    monkeypatch.setattr(counting.Connection, "recv", killed)
    with pytest.raises(InfrastructureError, match=r"has died.*give fewer --processes"):
        data_indexing.make(make_job(data=section(folder))["data"], tmp_path / "index", 1, progress=False)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("name", [*ALL, "plain.txt", "plain.txt.gz"])
@pytest.mark.parametrize("cut_off", [0, 200])
def test_a_file_s_pieces_in_turn_are_those_that_are_read_by_themselves(folder, tmp_path, name, cut_off) -> None:
    """Also of a file that ends too soon, where the last pieces cannot be read."""
    plain = b"".join(f"line {number} of a text that goes on\n".encode() for number in range(4_000))
    contents = {"plain.txt": plain, "plain.txt.gz": gzip.compress(plain)}
    content = contents[name] if name in contents else (folder / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) - cut_off])
    size, path = len(content) - cut_off, str(tmp_path / name)
    in_turn, by_themselves = (Reader(EVERYTHING, "text", Unreadable(99)) for _ in range(2))
    pieces = list(in_turn.pieces(path, 7, size))
    assert [number for number, _ in pieces] == list(range(7))
    assert [documents for _, documents in pieces] == [by_themselves.documents(path, n, 7, size) for n in range(7)]
    assert in_turn.unreadable.reasons == by_themselves.unreadable.reasons
    assert bool(in_turn.unreadable.reasons) == bool(cut_off and name != "plain.txt")
