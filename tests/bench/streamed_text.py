"""The cost of an island's text: seconds until its first batch, and memory, read whole and streamed, each in its own
process.

    python -m tests.bench.streamed_text FOLDER [GB] [--whole] [--index]

FOLDER gets so many GB of JSON lines of random words, unless it has files. ``--whole`` measures ``source: files`` as well,
which takes more than twice the size in memory. ``--index`` instead measures how fast the first file's tokens are counted
(`atoll data index`) by one process and by two, and by the tokenizer alone on texts in memory, with bytes and with a BPE
of 8,192 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

FILE_BYTES, BLOCKS, DOCUMENTS = 250_000_000, 64, 400
BATCHES = 1_000
ALONE_PIECES = 8


def generate(folder: Path, byte_count: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlucmfwypvbgk", k=chance.randint(2, 9))) for _ in range(20_000)]
    blocks = [
        "".join(json.dumps({"text": " ".join(chance.choices(words, k=150))}) + "\n" for _ in range(DOCUMENTS))
        for _ in range(BLOCKS)
    ]
    for number in range(max(1, int(byte_count / FILE_BYTES))):
        with open(folder / f"{number:04d}.jsonl", "w") as file:
            while file.tell() < min(FILE_BYTES, byte_count):
                file.write(chance.choice(blocks))


def measure(folder: Path, source: str) -> None:
    """Print one line about island 0 of 4, with batches of 8 sequences of 1,024 bytes."""
    import grain  # noqa: F401  an island has it already

    from learners.text import Text
    from orchestrator.specification.config import parse_job
    from orchestrator.system.roots import EVERYTHING

    files = [str(path) for path in sorted(folder.glob("*.jsonl"))]
    section = {"files": files} if source == "files" else {"sources": [{"name": "web", "files": files}]}
    document = {"islands": [{"node_group": "a", "count": 4}], "budget": {"steps": 1}}
    spec = parse_job({**document, "data": {"source": source, "sequence_length": 1024, **section}})
    before, began = _peak_mib(), time.monotonic()
    text = Text({**spec.model_dump(mode="json"), "roots": EVERYTHING})
    draw = text.draw(0, 4)
    draw(0)
    text.held_out_batches(8)
    start_s = time.monotonic() - began
    for number in range(1, BATCHES):
        draw(number)
    size = sum(map(os.path.getsize, files)) / 1e9
    print(f"{source}, {size:.1f} GB: ready after {start_s:.2f} s, {_peak_mib() - before:,.0f} MiB at most", flush=True)


def measure_index(folder: Path) -> None:
    """Print a line for each tokenizer: the library alone with one thread, and the indexing of the first file."""
    from learners import data_indexing, tokenizer
    from learners.streaming.documents import Reader, Unreadable
    from learners.tokenizer_training import train
    from orchestrator.specification.config import parse_job
    from orchestrator.system.roots import EVERYTHING

    path = sorted(folder.glob("*.jsonl"))[0]
    size, bpe = path.stat().st_size, folder / "tokenizer.json"
    pieces = max(1, size // (1 << 20))
    reader = Reader(EVERYTHING, "text", Unreadable(0))
    bpe.write_bytes(train([str(_part(path, folder))], 8_192, "text", progress=False)[0])
    for name in ("bytes", str(bpe)):
        data = {"source": "streamed", "sources": [{"name": "web", "files": [str(path)]}], "tokenizer": name}
        document = {"islands": [{"node_group": "a"}], "budget": {"steps": 1}, "data": data}
        section = parse_job(document).data
        print(f"{Path(name).name}, {size / 1e6:.0f} MB of JSON lines", flush=True)
        tokens = tokenizer.load(section, EVERYTHING)
        texts = [reader.documents(str(path), number, pieces) for number in range(min(ALONE_PIECES, pieces))]
        tokens.encode(texts[0][:1])
        began, cpu_began = time.monotonic(), _cpu_s()
        count = sum(len(one) for piece in texts for one in tokens.encode(piece))
        what = "texts in memory, the tokenizer alone, one thread"
        _print_rates(what, count, time.monotonic() - began, _cpu_s() - cpu_began)
        for process_count in (1, 2):
            output = folder / "index"
            output.unlink(missing_ok=True)
            began, cpu_began = time.monotonic(), _cpu_s()
            counts = data_indexing.make(section.model_dump(mode="json"), output, process_count, progress=False)
            assert counts is not None
            what = f"indexed by processes: {process_count}"
            _print_rates(what, counts.token_count, time.monotonic() - began, _cpu_s() - cpu_began)
        print(f"its index has {output.stat().st_size:,} bytes", flush=True)


def _print_rates(what: str, token_count: int, wall_s: float, cpu_s: float) -> None:
    """Print rates by elapsed and by processor time. A busy machine only lowers the first."""
    per_cpu_s, per_s = token_count / cpu_s / 1e6, token_count / wall_s / 1e6
    print(f"{what}: {per_cpu_s:.2f} million tokens per cpu-second, {per_s:.2f} per second", flush=True)


def _cpu_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _part(path: Path, folder: Path) -> Path:
    """Return the first megabytes, on which the tokenizer is trained."""
    part = folder / "part.txt"
    with open(path, "rb") as file:
        part.write_bytes(file.read(4 << 20))
    return part


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("gb", type=float, nargs="?", default=1.0)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--index", action="store_true")
    parser.add_argument("--source", choices=("files", "streamed"))
    options = parser.parse_args()
    if options.source:
        measure(options.folder, options.source)
        return
    if not list(options.folder.glob("*.jsonl")):
        generate(options.folder, options.gb * 1e9)
    if options.index:
        os.environ["RAYON_NUM_THREADS"] = "1"
        measure_index(options.folder)
        return
    for source in ("streamed", "files") if options.whole else ("streamed",):
        subprocess.run([sys.executable, "-m", __spec__.name, str(options.folder), "--source", source], check=True)


if __name__ == "__main__":
    main()
