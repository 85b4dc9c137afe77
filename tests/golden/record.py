"""Record the golden decisions of this build. Run it on a build that is known to decide rightly, and commit what it writes.

python -m tests.golden.record            seeds and simulated jobs: some ten minutes
python -m tests.golden.record --live     three live jobs, on a cluster of their own: some three minutes

A change that is to change no decision must not record anything anew. One that changes decisions says in its message which
and why. Where words on the tape are renamed, digests change with them: then the live tapes must still replay, and the
digests are recorded anew in a commit that does nothing else.

They lie beside this module: one digest a line, and tapes of jobs that were live.

plain 17 9c1185a5c402          seed 17 of the swarm
mortal 17 4f8a2c1b7d90         the same, and its synchroniser dies ``DEATHS`` times
simulated world-sick 0a1b…     a job of ``simulated.JOBS``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.golden import simulated
from tests.golden.decisions import DEATHS, of_seed

FOLDER = Path(__file__).parent
FILE = FOLDER / "decisions.txt"
SEEDS = 500
PROGRESS_EVERY = 50
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


def record_digests() -> None:
    digests: dict[Name, str] = {}
    for count, (name, run) in enumerate(RUNS.items(), start=1):
        digests[name] = run()
        if count % PROGRESS_EVERY == 0:
            print(f"{count} of {len(RUNS)}", flush=True)
    write(digests)
    failures = [f"{' '.join(name)}: {digest}" for name, digest in digests.items() if " " in digest]
    print("\n".join([f"{len(digests)} recorded, {len(failures)} of them fail", *failures]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__.split("\n")[0])
    parser.add_argument("--live", action="store_true", help="record the live tapes, and no digests")
    if parser.parse_args().live:
        from tests.golden import live

        live.record(FOLDER)
    else:
        record_digests()


if __name__ == "__main__":
    main()
