"""What an island's text costs: seconds until its first batch, and memory, read whole and streamed, each in its own process.

    python -m tests.bench.streamed_text FOLDER [GB] [--whole]

FOLDER gets so many GB of JSON lines of random words, unless it has files. ``--whole`` measures ``source: files`` as well,
which takes more than twice the size in memory.
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
            while file.tell() < FILE_BYTES:
                file.write(chance.choice(blocks))


def measure(folder: Path, source: str) -> None:
    """Print one line about island 0 of 4, with batches of 8 sequences of 1,024 bytes."""
    import grain  # noqa: F401  an island has it already

    from learners.text import Text
    from orchestrator.config import parse_job
    from orchestrator.roots import EVERYTHING

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


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("gb", type=float, nargs="?", default=1.0)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--source", choices=("files", "streamed"))
    options = parser.parse_args()
    if options.source:
        measure(options.folder, options.source)
        return
    if not list(options.folder.glob("*.jsonl")):
        generate(options.folder, options.gb * 1e9)
    for source in ("streamed", "files") if options.whole else ("streamed",):
        subprocess.run([sys.executable, "-m", __spec__.name, str(options.folder), "--source", source], check=True)


if __name__ == "__main__":
    main()
