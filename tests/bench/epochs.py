"""Checks that an epoch of streamed text is the text: every place is drawn once, whatever the documents are, without an
index.

    python -m tests.bench.epochs FOLDER [--mib 40] [--sizes 100,1000,…] [--kinds .jsonl,…] [--names 3] [--islands 1]
                                        [--sections MIB] [--alone]

Each corpus is text in which every 64 bytes have a name (a *place*), in documents of log-normal lengths. All sequences of
every island are drawn until one has a place for the second time, which is where its next epoch begins. The bench prints a
line for each kind of file and size: the length of the epoch over that of the text (least, median and most over sources of
several names, which have their pieces in different orders), the places that were in no sequence, and those that were in
several. ``mixture`` has three weighted sources with documents of different sizes. The rest of an island's part of a
source is shorter than one sequence, and counts among the places never drawn. ``--sections`` divides an island's part as
if it were larger than ``SECTION_BYTES``; an epoch then has as many sequences as the sample predicts. ``--alone`` leaves
out the mixtures. The exit code is 1 for an epoch below 0.9 or above 1.1 of its text, and for places drawn twice where
nothing is predicted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from learners.island_spec import IslandSpec
from learners.streaming import order

PLACE, FIRST, SECOND, LETTERS = 64, 24, 36, 5
"""The bytes of a place, and the offsets of the two copies of its name (a mark and letters), one in each half."""
MIDDLE = FIRST + 9
"""The byte by which a place is counted: every sequence that predicts it has one of the copies whole."""
LENGTH, ROWS = 1024, 64
ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
SIZES = (100, 1_000, 3_000, 20_000, 100_000, 600_000, 3_000_000)
KINDS = (".jsonl", ".txt", ".parquet", ".jsonl.gz", ".jsonl.zst", ".txt.gz")
WEIGHTS = (3.0, 1.0, 0.5)


@dataclass(frozen=True, slots=True)
class Traced:
    """The result for one source: tokens of its text and of its epoch, places, those never drawn, and those drawn more
    than once.
    """

    text_tokens: int
    epoch_tokens: int
    place_count: int
    never: int
    several: int

    @property
    def ratio(self) -> float:
        return self.epoch_tokens / self.text_tokens


def places(first: int, count: int, chance: np.random.Generator) -> np.ndarray:
    """Return that many places of text: (count, PLACE) uint8."""
    text = ALPHABET[chance.integers(0, 26, (count, PLACE))]
    numbers = np.arange(first, first + count)
    for start, mark in ((FIRST, b"4"), (SECOND, b"6")):
        text[:, start] = mark[0]
        for letter in range(LETTERS):
            text[:, start + 1 + letter] = ALPHABET[numbers // 26 ** (LETTERS - 1 - letter) % 26]
    return text


def found(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return row and number of each place whose middle the sequences predict. ``rows`` are (sequences, LENGTH + 1)
    tokens.
    """
    rows = rows.astype(np.uint8)
    last = rows.shape[1] - 1
    row, at = np.nonzero((rows == ord("4")) | (rows == ord("6")))
    is_first = rows[row, at] == ord("4")
    first_at = np.where(is_first, at, at - (SECOND - FIRST))
    middle = first_at + MIDDLE - FIRST
    whole = at + LETTERS <= last
    counts = whole & (middle >= 1) & (middle <= last) & (is_first | (first_at < 0))
    row, at = row[counts], at[counts]
    numbers = np.zeros(len(row), np.int64)
    for letter in range(LETTERS):
        numbers = numbers * 26 + (rows[row, at + 1 + letter].astype(np.int64) - ord("a"))
    return row, numbers


def lengths(mean: int, total: int, chance: np.random.Generator) -> list[int]:
    """Return the places of each document: log-normal with this mean in bytes and σ = 1, ``total`` places together."""
    drawn, left = [], total
    while left > 0:
        size = int(min(left, max(1, chance.lognormal(np.log(mean) - 0.5, 1.0) // PLACE), (12 << 20) // PLACE))
        drawn.append(size)
        left -= size
    return drawn


def write(path: Path, kind: str, mean: int, byte_count: int, first: int, seed: int) -> tuple[int, int]:
    """Write a file of documents. Return its places and its tokens: one for each byte and for each document's end."""
    chance = np.random.default_rng(seed)
    documents = lengths(mean, byte_count // PLACE, chance)
    texts, at = [], first
    for count in documents:
        own = places(at, count, chance)
        if kind.startswith(".txt"):  # lines of 15 places, as of a book
            texts.append(b"\n".join(own[start : start + 15].tobytes() for start in range(0, count, 15)) + b"\n")
        else:
            texts.append(own.tobytes())
        at += count
    if kind == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet

        rows = max(1, min(1000, (16 << 20) // mean))
        table = pa.table({"text": [text.decode() for text in texts]})
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
    else:
        lines = (
            texts
            if kind.startswith(".txt")
            else [json.dumps({"text": text.decode()}).encode() + b"\n" for text in texts]
        )
        content = b"".join(lines)
        if kind.endswith(".gz"):
            content = gzip.compress(content, 1)
        if kind.endswith(".zst"):
            import zstandard

            content = zstandard.compress(content, 1)
        path.write_bytes(content)
    return at - first, sum(len(text) + 1 for text in texts)


def traced(sources: Sequence[tuple[dict, int, int, int]], islands: int, length: int = LENGTH) -> list[Traced]:
    """Draw an epoch of each source, given as its section of a specification, first place, places and tokens."""
    from learners.streaming.streamed import Streamed
    from learners.text import Text
    from learners.tokenizer import Bytes
    from orchestrator.specification.config import parse_job
    from orchestrator.system.roots import EVERYTHING

    data = {"source": "streamed", "sources": [source for source, *_ in sources], "sequence_length": length}
    document = {"islands": [{"node_group": "a", "count": islands}], "budget": {"steps": 1}, "data": data}
    spec = {**parse_job({**document, "training": {"batch_size": ROWS}}).model_dump(mode="json"), "roots": EVERYTHING}
    firsts = np.array([first for _, first, _, _ in sources])
    counts = [np.zeros(count, np.int32) for _, _, count, _ in sources]
    sequences = [0] * len(sources)
    for island in range(islands):
        promised = [sum(of.quotas) for of in Streamed(IslandSpec.of(spec), Bytes()).sections(island, islands)]
        drawn, draw, ended, batch = [0] * len(sources), Text(spec).draw(island, islands), set[int](), 0
        while len(ended) < len(sources):
            rows = draw(batch)
            row, numbers = found(rows)
            source_of = np.searchsorted(firsts, numbers, side="right") - 1
            for one in range(len(rows)):
                mine, source = numbers[row == one], int(source_of[np.argmax(row == one)])
                own = mine - firsts[source]
                if source in ended or not len(mine):
                    continue
                if drawn[source] >= promised[source] if promised[source] else np.any(counts[source][own]):
                    ended.add(source)
                    continue
                np.add.at(counts[source], own, 1)
                drawn[source] += 1
            batch += 1
        sequences = [before + own for before, own in zip(sequences, drawn, strict=True)]
    return [
        Traced(tokens, drawn * length, len(each), int((each == 0).sum()), int((each > 1).sum()))
        for (_, _, _, tokens), drawn, each in zip(sources, sequences, counts, strict=True)
    ]


def corpus(folder: Path, name: str, kind: str, mean: int, byte_count: int, first: int = 0, seed: int = 0, **more):
    """Write a source of two files, and one that it reserves for the held-out loss, in the form that ``traced`` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    files, place_count, token_count = [folder / f"{name}-{number}{kind}" for number in range(2)], 0, 0
    for number, path in enumerate(files):
        own_places, own_tokens = write(path, kind, mean, byte_count // 2, first + place_count, 10 * seed + number)
        place_count, token_count = place_count + own_places, token_count + own_tokens
    reserved = folder / f"{name}-reserved.txt"
    reserved.write_text("\n".join(f"held out of {name}, line {number}" for number in range(2_000)))
    section = {"name": name, "files": list(map(str, files)), "held_out": [str(reserved)], **more}
    return section, first, place_count, token_count


def lines(folder: Path, kind: str, mean: int, mib: int, names: Sequence[str], islands: int) -> Iterator[Traced]:
    """Return the results of one corpus under each of these names of its source."""
    section, *numbers = corpus(folder, "corpus", kind, mean, mib << 20)
    for name in names:
        yield traced([({**section, "name": name}, *numbers)], islands)[0]
    for path in (*section["files"], *section["held_out"]):
        Path(path).unlink()


def _print(what: str, results: Sequence[Traced], began: float) -> None:
    ratios = [result.ratio for result in results]
    never, several = max(result.never for result in results), max(result.several for result in results)
    of = results[0].place_count
    print(
        f"{what:32} {min(ratios):8.4f} {statistics.median(ratios):8.4f} {max(ratios):8.4f}  {never:>9,} {several:>7,} "
        f"of {of:>10,}  {time.monotonic() - began:6.0f} s",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.epochs")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=40)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--names", type=int, default=3)
    parser.add_argument("--islands", type=int, default=1)
    parser.add_argument("--sections", type=int)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    if options.sections:
        order.SECTION_BYTES = options.sections << 20
    all_results = list[Traced]()
    sizes, kinds = list(map(int, options.sizes.split(","))), options.kinds.split(",")
    names = [f"source-{number}" for number in range(options.names)]
    head = f"{options.mib} MiB, {options.islands} islands"
    print(f"{head:32} {'least':>8} {'median':>8} {'most':>8}  {'never':>9} {'several':>7}")
    for kind in kinds:
        for mean in sizes:
            began = time.monotonic()
            results = list(lines(options.folder, kind, mean, options.mib, names, options.islands))
            _print(f"{kind}, documents of {mean:,} B", results, began)
            all_results += results
        if options.alone:
            continue
        began, first, sources = time.monotonic(), 0, []
        for number, (mean, weight) in enumerate(zip(sizes[:: max(1, len(sizes) // 3)][:3], WEIGHTS, strict=False)):
            sources.append(
                corpus(options.folder, f"mixed-{number}", kind, mean, options.mib << 20, first, number, weight=weight)
            )
            first += sources[-1][2]
        for (section, *_), result in zip(sources, traced(sources, options.islands), strict=True):
            _print(f"{kind}, mixture: {section['name']}", [result], began)
            all_results.append(result)
        for section, *_ in sources:
            for path in (*section["files"], *section["held_out"]):
                Path(path).unlink()
    wrong = [one for one in all_results if not 0.9 <= one.ratio <= 1.1 or (one.several and not options.sections)]
    print(f"{len(all_results) - len(wrong)} of {len(all_results)} epochs are as long as their text")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
