"""A contribution's way: how much code runs for it, there and back, in a job that does nothing else.

Two JAX islands train one small model of four fragments on a real Ray cluster of their own, without a service. Once every
fragment has merged twice, the functions of the product that run are noted for some seconds (``way_hooks``), in the process
of the synchroniser and in those of both islands. A file counts when a function of it runs. So it is the number of files that
somebody has open who follows one contribution from an inner step to its merge, and back into the island.

Files in which at most two functions run are named: one enters such a file only to leave it again.
"""

from __future__ import annotations

import json
import os
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from orchestrator.core.events import MergeCompleted
from orchestrator.runtime import embedded, ray_start
from orchestrator.runtime.control_port import RayControlPort, connect
from orchestrator.runtime.groups import DEFAULT_GROUPS
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.tape.storage import read_tape
from tests.bench import way_hooks
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options
from tests.bench.service import wait

FILES_GOAL = 80
GROUPS, FRAGMENTS, MERGES_BEFORE = DEFAULT_GROUPS[:2], 4, 2
COUNTED_S, SMALL_COUNTED_S = 12.0, 2.0
FEW_FUNCTIONS_MAX = 2
PROCESSES: Mapping[str, tuple[str, int]] = {"synchroniser": ("SynchroniserActor", 1), "island": ("Island", len(GROUPS))}
"""The class of the actor, and the number of such actors."""

Functions = dict[str, set[str]]
"""The functions that run, by file."""


class Size(NamedTuple):
    """An amount of code that runs. ``lines`` are all lines of the files."""

    files: int
    functions: int
    lines: int


def main(asked: Options) -> list[Goal]:
    by_process = measure(SMALL_COUNTED_S if asked.small else COUNTED_S)
    union = joined(by_process.values())
    sizes = {name: size_of(functions) for name, functions in {**by_process, "union": union}.items()}
    few = [file for file, functions in union.items() if len(functions) <= FEW_FUNCTIONS_MAX]
    goal = at_most("way files", sizes["union"].files, FILES_GOAL)
    if asked.as_json:
        listed = {file: {"lines": lines_of(file), "functions": sorted(union[file])} for file in union}
        figures = {name: size._asdict() for name, size in sizes.items()}
        print(json.dumps({**figures, "few_functions": few, "by_file": listed}, indent=2))
    else:
        show(sizes, few, goal)
        if asked.files:
            show_files(by_process, union)
    return [goal]


def measure(seconds: float) -> dict[str, Functions]:
    """Return which functions of the product run in this time, by kind of process."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name:
        folder = Path(name)
        with hooked_cluster(folder) as control:
            run_dir = folder / "way"
            control.start_job("way", _spec(), run_dir)
            wait(lambda: merged_often(run_dir), f"{MERGES_BEFORE} merges of every fragment")
            counting = folder / way_hooks.COUNTING
            counting.touch()
            time.sleep(seconds)
            counting.unlink()
            return {
                process: wait(lambda kind=kind, count=count: noted(folder, kind, count), f"the notes of {kind}")
                for process, (kind, count) in PROCESSES.items()
            }


@contextmanager
def hooked_cluster(folder: Path) -> Iterator[RayControlPort]:
    """Start a cluster whose workers note what runs, and end it with the block. Yield the port to its jobs."""
    home = folder / "home"
    variables = {way_hooks.FOLDER: str(folder)}
    with patch.dict(os.environ, variables), patch.object(ray_start, "MODULE", way_hooks.MODULE):
        embedded.up(home, GROUPS, passed=list(variables))
        try:
            control = connect(home)
            yield control
            control.close()
        finally:
            embedded.down(home)


def merged_often(run_dir: Path) -> bool:
    """Return whether every fragment has merged often enough: nothing is done for the first time after that."""
    tape = run_dir / "tape.jsonl"
    if not tape.exists():
        return False
    merged = [record.event.fragment for record in read_tape(tape).records if isinstance(record.event, MergeCompleted)]
    return all(merged.count(fragment) >= MERGES_BEFORE for fragment in range(FRAGMENTS))


def noted(folder: Path, kind: str, count: int) -> Functions | None:
    """Return what all processes of this kind noted, or None until all have."""
    notes = sorted(folder.glob(f"{kind}-*.json"))
    if len(notes) < count:
        return None
    return joined({file: set(functions) for file, functions in json.loads(note.read_text()).items()} for note in notes)


def joined(several: Iterable[Functions]) -> Functions:
    union: Functions = {}
    for functions in several:
        for file, names in functions.items():
            union[file] = union.get(file, set()) | names
    return dict(sorted(union.items()))


def size_of(functions: Functions) -> Size:
    return Size(len(functions), sum(map(len, functions.values())), sum(map(lines_of, functions)))


def lines_of(file: str) -> int:
    return len((way_hooks.ROOT / file).read_text().splitlines())


def show(sizes: Mapping[str, Size], few: list[str], goal: Goal) -> None:
    for name, size in sizes.items():
        told = f"   ({goal})" if name == "union" else ""
        print(
            f"way        {name:<12} {size.files:>4} files  {size.functions:>5,} functions  {size.lines:>7,} lines{told}"
        )
    print(f"way        in {len(few)} of these files at most {FEW_FUNCTIONS_MAX} functions run:")
    print(
        textwrap.fill(", ".join(few), 118, initial_indent=" " * 11, subsequent_indent=" " * 11, break_on_hyphens=False)
    )


def show_files(by_process: Mapping[str, Functions], union: Functions) -> None:
    for file, functions in union.items():
        where = ", ".join(name for name, own in by_process.items() if file in own)
        print(f"way        {file:<55} {lines_of(file):>4} lines  {len(functions):>3} functions  {where}")


def _spec() -> JobSpec:
    document: dict[str, Any] = {
        "name": "way",
        "model": {"preset": "nano", "compute_dtype": "float32"},
        "synchroniser": {"fragments": FRAGMENTS},
        "islands": [{"node_group": group.name} for group in GROUPS],
        "budget": {"steps": 1_000_000},
        "evaluation": {"every_merges": 0, "sequences": 4},
    }
    return parse_job(document)
