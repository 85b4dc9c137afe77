"""The scan for orphaned processes of embedded clusters on this machine, for `atoll doctor`.

    python -m orchestrator.runtime.orphan_scan --home .atoll      one JSON object on stdout

Responsible for telling a home's own processes, those of another home's cluster, and those that nobody can end with
`atoll down` any more, because their home and the files of their cluster are gone. Refuses to end any.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from orchestrator.errors import DataError
from orchestrator.marks import HOME_MARKER, is_foreign, of_home, path_in
from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CLUSTER_MARKER, TOKEN_VARIABLE


def census(home: Path) -> dict[str, object]:
    """``own``, ``elsewhere`` and ``orphaned`` pids; ``answers`` says whether the home's head does, None without one.

    ``damage`` says what is wrong with the home's cluster file, if anything is; its processes are known all the same.
    """
    cluster, damage = None, ""
    try:
        cluster = ClusterFile.find(home)
    except DataError as error:
        damage = str(error)
    pids: dict[str, list[int]] = {"own": [], "elsewhere": [], "orphaned": []}
    for process, environment in processes.marked_by_any():
        mark = environment.get(HOME_MARKER, "")
        by_file = cluster is not None and environment[CLUSTER_MARKER] == cluster.id
        if of_home(home, environment, process.pid) or (by_file and not (mark and is_foreign(home, mark))):
            pids["own"].append(process.pid)
        else:
            has_owner = Path(environment.get(TOKEN_VARIABLE, "")).is_file() or (mark and path_in(mark).is_dir())
            pids["elsewhere" if has_owner else "orphaned"].append(process.pid)
    return {**pids, "answers": cluster.answers() if cluster is not None else None, "damage": damage}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Embedded clusters on this machine, as JSON.")
    parser.add_argument("--home", type=Path, required=True)
    print(json.dumps(census(parser.parse_args(arguments).home)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
