"""The recorded decisions as they lie beside this module: one digest a line, and tapes of jobs that were live.

plain 17 9c1185a5c402          seed 17 of the swarm
mortal 17 4f8a2c1b7d90         the same, and its synchroniser dies ``DEATHS`` times
simulated world-sick 0a1b…     a job of ``simulated.JOBS``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.golden import simulated
from tests.golden.decisions import DEATHS, of_seed

FOLDER = Path(__file__).parent
FILE = FOLDER / "decisions.txt"
SEEDS = 500
Name = tuple[str, str]
RUNS: Mapping[Name, Callable[[], str]] = {
    **{("plain", str(seed)): partial(of_seed, seed) for seed in range(SEEDS)},
    **{("mortal", str(seed)): partial(of_seed, seed, DEATHS) for seed in range(SEEDS)},
    **{("simulated", name): run for name, run in simulated.JOBS.items()},
}
"""What is recorded, and how it is run again."""


def read() -> dict[Name, str]:
    """The recorded digest of each run."""
    lines = [line.split(" ", 2) for line in FILE.read_text().splitlines()]
    return {(kind, name): digest for kind, name, digest in lines}


def write(digests: Mapping[Name, str]) -> None:
    FILE.write_text("".join(f"{kind} {name} {digest}\n" for (kind, name), digest in digests.items()))


def tapes() -> list[Path]:
    return sorted(FOLDER.glob("*.jsonl.gz"))
