"""Embedded clusters that this machine runs, and whether somebody still knows them: what `atoll doctor` asks.

    python -m orchestrator.runtime.leftovers --home .atoll      one JSON object on stdout

Responsible for telling a home's own processes, those of another home's cluster, and those that nobody can end with
`atoll down` any more, because the files of their cluster are gone. Refuses to end any.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CLUSTER_MARKER

TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"


def census(home: Path) -> dict[str, object]:
    """``own``, ``elsewhere`` and ``orphaned`` pids; ``answers`` says whether the home's head does, None without one."""
    cluster = ClusterFile.find(home)
    pids: dict[str, list[int]] = {"own": [], "elsewhere": [], "orphaned": []}
    for pid, mark, token in _marked():
        if cluster is not None and mark == cluster.id:
            pids["own"].append(pid)
        else:
            pids["elsewhere" if Path(token).is_file() else "orphaned"].append(pid)
    return {**pids, "answers": cluster.answers() if cluster is not None else None}


def _marked() -> Iterator[tuple[int, str, str]]:
    """Every live process with a cluster's mark: its pid, the mark, and where its cluster keeps its token."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            environment = process.environ()
            if CLUSTER_MARKER in environment and process.status() != psutil.STATUS_ZOMBIE:
                yield process.pid, environment[CLUSTER_MARKER], environment.get(TOKEN_VARIABLE, "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Embedded clusters on this machine, as JSON.")
    parser.add_argument("--home", type=Path, required=True)
    print(json.dumps(census(parser.parse_args(arguments).home)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
