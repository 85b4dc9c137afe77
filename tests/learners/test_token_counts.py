"""What is counted of pieces is kept on the node, only saves time, and is forgotten when the text is another."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from learners.streaming import files, order, streamed
from learners.streaming.counting import SourceTokens, TokenCounts
from learners.text import Text
from orchestrator.core.vocabulary import NO_FLAWS
from orchestrator.errors import UnreadableData
from orchestrator.system.roots import EVERYTHING

PIECES = np.arange(4)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(order, "PIECE_BYTES_MIN", 2_000)
    monkeypatch.setattr(order, "PIECE_BYTES_MAX", 2_000)
    monkeypatch.setattr(order, "GROUP_BYTES", 8_000)
    monkeypatch.setattr(files, "SMALL_BYTES", 0)


@pytest.fixture
def web(tmp_path) -> Path:
    lines = [json.dumps({"text": f"{number:05d} " * 20}) + "\n" for number in range(400)]
    (tmp_path / "web.jsonl").write_text("".join(lines))
    (tmp_path / "web.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return tmp_path / "web.jsonl"


@pytest.fixture
def make_text(make_job):
    def make(*paths: Path, unreadable_max: int = 0, **training) -> Text:
        sources = [{"name": "web", "files": [str(path)]} for path in paths]
        data = {"source": "streamed", "sources": sources, "sequence_length": 32, "unreadable_max": unreadable_max}
        return Text({**make_job(data=data, training={"batch_size": 4}), "roots": EVERYTHING, **training})

    return make


@pytest.fixture
def pieces_read(monkeypatch) -> list[tuple]:
    read = []
    documents = streamed.Reader.documents
    monkeypatch.setattr(
        streamed.Reader, "documents", lambda self, *of: read.append((self.unreadable, of)) or documents(self, *of)
    )
    return read


def read_by_others(read: list[tuple], earlier: list[tuple]) -> list[tuple]:
    """The pieces that were read since by other texts: a thread of an earlier one may still read ahead."""
    before = [unreadable for unreadable, _ in earlier]
    return [of for unreadable, of in read if not any(unreadable is one for one in before)]


def counted(pieces) -> list[tuple[int, int]]:
    return [(piece, 10 * piece + 3) for piece in pieces]


def refused(pieces):
    raise AssertionError(f"{pieces} are counted again")


def test_a_piece_is_counted_once_on_a_node(tmp_path) -> None:
    first = TokenCounts(4, tmp_path / "of" / "web.tokens")
    assert first.of(PIECES[1:3], counted).tolist() == [13, 23]
    assert first.of(PIECES[:3], lambda pieces: counted(pieces) if pieces == [0] else refused(pieces)).tolist() == [
        3,
        13,
        23,
    ]
    assert TokenCounts(4, tmp_path / "of" / "web.tokens").of(PIECES[:3], refused).tolist() == [3, 13, 23]


@pytest.mark.parametrize("damage", [b"2 99 00000000\n", b"9 9", b"\xff\xfe\n", b"17 4 8d5ba1ae\n", b"-1 3 x\n\n\n"])
def test_a_damaged_line_is_counted_again_and_the_others_are_not(tmp_path, damage) -> None:
    path = tmp_path / "web.tokens"
    TokenCounts(4, path).of(PIECES[:2], counted)
    with open(path, "ab") as file:
        file.write(damage)
    TokenCounts(4, path).of(PIECES[3:], counted)
    again = list[int]()
    TokenCounts(4, path).of(PIECES, lambda pieces: again.extend(pieces) or counted(pieces))
    assert set(again) <= {2, 3}
    assert 2 in again


@pytest.mark.parametrize("folder", ["/dev/null/atoll", "/proc/atoll", "/dev/full"])
def test_what_cannot_be_kept_is_counted_all_the_same(folder) -> None:
    counts = TokenCounts(4, Path(folder) / "web.tokens" if folder != "/dev/full" else Path(folder))
    assert counts.of(PIECES, counted).tolist() == [3, 13, 23, 33]
    assert counts.of(PIECES, refused).tolist() == [3, 13, 23, 33]


def test_what_was_counted_before_a_piece_that_cannot_be_read_is_kept(tmp_path) -> None:
    def failing(pieces):
        yield from counted(pieces[:2])
        raise UnreadableData(detail="the third", most=0)

    with pytest.raises(UnreadableData):
        TokenCounts(4, tmp_path / "web.tokens").of(PIECES, failing)
    assert TokenCounts(4, tmp_path / "web.tokens").of(PIECES[:2], refused).tolist() == [3, 13]


@pytest.mark.parametrize("name", ["web.jsonl", "web.jsonl.gz"])
def test_an_island_that_begins_again_reads_only_what_it_draws(make_text, web, pieces_read, name) -> None:
    path = web.with_name(name)
    drawn = list(map(make_text(path).draw(0, 1), range(250)))
    earlier = list(pieces_read)
    again = make_text(path).draw(0, 1)
    assert np.array_equal(again(249), drawn[249])
    assert len(set(read_by_others(pieces_read, earlier))) <= 3 * 8_000 // 2_000


def test_an_island_that_begins_on_another_node_counts_what_was_drawn_and_draws_the_same(
    make_text, web, pieces_read, monkeypatch, tmp_path
) -> None:
    drawn = list(map(make_text(web).draw(0, 1), range(120)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    earlier = list(pieces_read)
    assert np.array_equal(make_text(web).draw(0, 1)(119), drawn[119])
    by_this_one = read_by_others(pieces_read, earlier)
    assert len(by_this_one) == len(set(by_this_one)), "a piece was read twice"
    assert len(by_this_one) > 3 * 8_000 // 2_000


def test_a_compressed_file_is_decompressed_once_to_count_what_was_drawn(
    make_text, web, monkeypatch, tmp_path, pieces_read
) -> None:
    path = web.with_name("web.jsonl.gz")
    expected = make_text(path).draw(0, 1)(200)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    passes = []
    pieces = streamed.Reader.pieces
    monkeypatch.setattr(streamed.Reader, "pieces", lambda self, *of: passes.append(of) or pieces(self, *of))
    earlier = list(pieces_read)
    assert np.array_equal(make_text(path).draw(0, 1)(200), expected)
    assert len(passes) + len(read_by_others(pieces_read, earlier)) < 8


def test_counts_are_of_a_file_as_it_is_now(make_text, web) -> None:
    """Other text of the same size: what was counted of the old one says nothing."""
    list(map(make_text(web).draw(0, 1), range(60)))
    os.utime(web, ns=(1, 1))
    before = len(list(Path(os.environ["XDG_CACHE_HOME"], "atoll", "tokens").iterdir()))
    web.write_bytes(web.read_bytes().replace(b" 001", b"\\n01"))
    text = make_text(web)
    list(map(text.draw(0, 1), range(60)))
    assert len(list(Path(os.environ["XDG_CACHE_HOME"], "atoll", "tokens").iterdir())) == before + 1
    assert text.flaws() == NO_FLAWS


def overwrite(path: Path, content: bytes) -> None:
    """In place, for a thread may be reading it."""
    with open(path, "r+b", buffering=0) as file:
        file.write(content)


def test_text_that_changes_while_a_job_reads_it_is_named_and_forgotten(make_text, web) -> None:
    def draw(unreadable_max: int):
        content = web.read_bytes()
        text = make_text(web, unreadable_max=unreadable_max)
        draws = text.draw(0, 1)
        list(map(draws, range(450)))  # more than an epoch: all of it is counted
        kept = list(Path(os.environ["XDG_CACHE_HOME"], "atoll", "tokens").iterdir())
        overwrite(web, content.replace(b" 001", b"\\n01"))
        try:
            list(map(draws, range(450, 900)))
        finally:
            overwrite(web, content)
        return text.flaws(), kept

    flaws, kept = draw(unreadable_max=100)
    assert flaws.unreadable_records > 0
    assert 0 < flaws.repeated_sequences + flaws.omitted_sequences < 200
    assert not kept[0].exists()
    with pytest.raises(UnreadableData, match=r"this island has counted .*Files must not change while a job reads them"):
        draw(unreadable_max=0)


def test_what_is_drawn_of_changed_text_is_counted_and_nothing_else() -> None:
    """Two pieces were counted with 40 tokens each; one has 25 now, and the other 55."""
    now = {0: np.arange(25, dtype=np.uint8), 1: np.arange(55, dtype=np.uint8)}
    misread = []
    tokens = SourceTokens(
        np.array([40, 40]), lambda pieces: ((p, now[p]) for p in pieces), 0, lambda *of: misread.append(of)
    )
    text = tokens.text((0, 1))
    assert misread == [(0, 40, 25), (1, 40, 55)]
    assert len(text.tokens) == 80
    windows = [text.window(first, 11) for first in range(0, 80, 10)]
    assert [window.is_repeated for window in windows] == [False, False, False, True, False, False, False, False]
    assert [window.omitted for window in windows] == [0, 0, 0, 0, 0, 0, 0, 15]
