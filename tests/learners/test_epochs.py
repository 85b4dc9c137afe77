"""An epoch is the text: marked text is traced place by place, for documents of any length and files of any kind.

Without an index. `python -m tests.bench.epochs` traces the same of corpora of hundreds of MiB.
"""

from __future__ import annotations

import pytest

from learners.streaming import files, order
from tests.bench.epochs import LENGTH, PLACE, corpus, traced

SIZE = 400_000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    """Documents of 3 MB are to pieces of 1 MiB as those of 50 kB are to these."""
    monkeypatch.setattr(order, "PIECE_BYTES_MIN", 4_000)
    monkeypatch.setattr(order, "PIECE_BYTES_MAX", 16_000)
    monkeypatch.setattr(order, "GROUP_BYTES", 64_000)
    monkeypatch.setattr(files, "SMALL_BYTES", 100_000)


def require_once(results, islands: int) -> None:
    """What is left over is a sequence of each island, at most, and the first token of its text."""
    for result in results:
        assert 0.9 <= result.ratio <= 1.0
        assert result.several == 0
        assert result.never <= islands * (LENGTH // PLACE + 1)


@pytest.mark.parametrize("kind", [".jsonl", ".txt", ".parquet", ".jsonl.gz", ".jsonl.zst", ".txt.gz"])
@pytest.mark.parametrize("mean", [100, 3_000, 50_000])
def test_every_place_of_the_text_is_drawn_once(tmp_path, kind, mean) -> None:
    islands = 2 if mean < 50_000 else 1
    require_once(traced([corpus(tmp_path, "text", kind, mean, SIZE)], islands), islands)


def test_every_place_of_each_source_of_a_mixture_is_drawn_once(tmp_path) -> None:
    sources, first = [], 0
    for name, kind, mean, weight in (
        ("web", ".jsonl", 1_000, 2),
        ("books", ".parquet", 50_000, 1),
        ("code", ".txt", 9_000, 1),
    ):
        sources.append(corpus(tmp_path, name, kind, mean, SIZE // 2, first, weight=weight))
        first += sources[-1][2]
    require_once(traced(sources, 2), 2)
