"""Embedded clusters that this machine runs, and whether somebody still knows them: what `atoll doctor` asks.

    python -m orchestrator.runtime.leftovers --home .atoll      one JSON object on stdout

Responsible for telling a home's own processes, those of another home's cluster, and those that nobody can end with
`atoll down` any more, because the files of their cluster are gone. Refuses to end any.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CLUSTER_MARKER

TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"


def census(home: Path) -> dict[str, object]:
    """``own``, ``elsewhere`` and ``orphaned`` pids; ``answers`` says whether the home's head does, None without one."""
    cluster = ClusterFile.find(home)
    pids: dict[str, list[int]] = {"own": [], "elsewhere": [], "orphaned": []}
    for process, environment in processes.marked_by_any():
        if cluster is not None and environment[CLUSTER_MARKER] == cluster.id:
            pids["own"].append(process.pid)
        else:
            known = Path(environment.get(TOKEN_VARIABLE, "")).is_file()
            pids["elsewhere" if known else "orphaned"].append(process.pid)
    return {**pids, "answers": cluster.answers() if cluster is not None else None}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Embedded clusters on this machine, as JSON.")
    parser.add_argument("--home", type=Path, required=True)
    print(json.dumps(census(parser.parse_args(arguments).home)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
