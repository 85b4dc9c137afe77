"""The command of the swarm: runs one seed, or many with progress.

python -m tests.swarm --seed N               run one seed and print its outcome
python -m tests.swarm --first N --count N    run many, with progress; Ctrl-C keeps the results so far
                               --deaths N    … with N deaths of the synchroniser in each
                               --mirrored … whose job has its log in a store that fails, and whose machines are lost
                               --lost-machines … each of which takes the machine's disk along
                               --lost-shards   … with several shards, which die, lose their disks and move
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

from tests.swarm import lost_machines, lost_shards
from tests.swarm.trial import SwarmFailure, run

World = TypeVar("World")
FAILURES_MAX = 10
"""A soak stops after this many failures, which are most likely the same bug."""
PROGRESS_LINES = 100
"""The most progress lines of one soak, and at most one for ten seeds, which take a second or two."""


def soak(first: int, count: int, deaths: int = 0, *, is_mirrored: bool = False) -> int:
    """Run many seeds and return the number of failures. Print progress, also after Ctrl-C."""
    outcomes: Counter[str] = Counter()
    befallen: Counter[str] = Counter()
    failures: list[SwarmFailure] = []
    events, advancing, waited = 0, 0, 0.0
    every = max(10, count // PROGRESS_LINES)
    try:
        for n, seed in enumerate(range(first, first + count), start=1):
            try:
                survived = run(seed, deaths, is_mirrored=is_mirrored)
            except SwarmFailure as failure:
                print(failure, file=sys.stderr)
                failures.append(failure)
                if len(failures) == FAILURES_MAX:
                    break
                continue
            outcomes[survived.outcome] += 1
            befallen += survived.befallen
            events, advancing = events + survived.events, advancing + survived.advancing
            waited = max(waited, survived.waited_ratio)
            if n % every == 0:
                print(f"{n} of {count} seeds, {events} events, {len(failures)} failures", flush=True)
    except KeyboardInterrupt:
        print("stopped; up to here:")
    outcome_counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))
    print(f"{outcomes.total()} seeds held from {first} on ({outcome_counts or 'none'}), {events} events")
    print(
        f"{advancing} of them calm for long enough to see every fragment advance; longest wait {waited:.2f} of allowed"
    )
    if befallen:
        print("; ".join(f"{what}: {n}" for what, n in sorted(befallen.items())))
    for failed in failures:
        print(f"failed: {failed.command}")
    return len(failures)


def lose_machines(first: int, count: int) -> int:
    """Run many seeds whose synchroniser loses its machine and disk, and return the number of failures."""
    held, salvages, ended = 0, 0, 0
    for world in _worlds_that_held(lost_machines.run, first, count):
        held, salvages, ended = held + 1, salvages + world.salvages, ended + bool(world.ended)
    failures = count - held
    print(
        f"{count} seeds from {first} on: {failures} failures, {salvages} salvages, {ended} jobs that no island vouched for"
    )
    return failures


def lose_shards(first: int, count: int) -> int:
    """Run many seeds whose shards die, lose their disks and move, and return the number of failures."""
    held, deaths, moves, lost, ended = 0, 0, 0, 0, 0
    for world in _worlds_that_held(lost_shards.run, first, count):
        held, deaths, moves = (
            held + 1,
            deaths + sum(shard.life for shard in world.merge_worker.shards),
            moves + world.moves,
        )
        lost, ended = lost + len(world.lost), ended + bool(world.ended)
    failures = count - held
    print(
        f"{count} seeds from {first} on: {failures} failures, {deaths} shards replaced, {moves} with another disk, {lost} "
        f"versions lost with all copies, {ended} jobs that no island could go on with"
    )
    return failures


def _worlds_that_held(run_one: Callable[[int], World], first: int, count: int) -> Iterator[World]:
    """Run the seeds one by one. Print each failure."""
    for seed in range(first, first + count):
        try:
            world = run_one(seed)
        except Exception as error:  # whatever it is, the seed brings it back
            print(f"seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        yield world


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.swarm", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--first", type=int, default=0, help="the first of many (default 0)")
    parser.add_argument("--count", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--deaths", type=int, default=0, help="how often each job's synchroniser dies (default 0)")
    parser.add_argument(
        "--mirrored", action="store_true", help="the job has its log in a store (tests.swarm.mirrored_world)"
    )
    parser.add_argument(
        "--lost-machines", action="store_true", help="each death takes machine and disk (tests.swarm.lost_machines)"
    )
    parser.add_argument(
        "--lost-shards", action="store_true", help="shards die, lose disks, move (tests.swarm.lost_shards)"
    )
    options = parser.parse_args(arguments)
    # simulated disks refuse, and tear, all the time
    logging.getLogger("orchestrator").setLevel(logging.CRITICAL + 1)
    first, count = (options.first, options.count) if options.seed is None else (options.seed, 1)
    if options.lost_machines:
        return 1 if lose_machines(first, count) else 0
    if options.lost_shards:
        return 1 if lose_shards(first, count) else 0
    if options.seed is None:
        return 1 if soak(options.first, options.count, options.deaths, is_mirrored=options.mirrored) else 0
    try:
        print(run(options.seed, options.deaths, is_mirrored=options.mirrored))
    except SwarmFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
