"""The scan for orphaned processes of embedded clusters on this machine, for `atoll doctor`.

    python -m orchestrator.runtime.orphan_scan --home .atoll      one JSON object on stdout

Responsible for telling a home's own processes, those of another home's cluster, and orphans: those that `atoll down` cannot
end any more, because their home and the files of their cluster are gone. A process is an orphan only if that is certain.
A container, or a chroot, has files that cannot be looked up here: its processes are another's. So are those of a home that
was moved, or whose disk is not mounted now. Refuses to end any.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from orchestrator.errors import DataError
from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile, state_of
from orchestrator.runtime.settings import CLUSTER_MARKER, TOKEN_VARIABLE
from orchestrator.system.marks import HOME_MARKER, is_foreign, is_of_this_system, of_home, path_in, place_in, place_of


def census(home: Path) -> dict[str, object]:
    """``own``, ``elsewhere`` and ``orphaned`` pids; ``answers`` says whether the home's head does, None without one.

    ``damage`` says what is wrong with the home's cluster file, if anything is; its processes are known all the same.
    ``secret`` says what is wrong with the file of a running cluster's secret, and ``remedy`` what starts the head again.
    """
    cluster, damage = None, ""
    try:
        cluster = ClusterFile.find(home)
    except DataError as error:
        damage = str(error)
    secret = cluster.token_problem() if cluster is not None and cluster.answers() else ""
    pids: dict[str, list[int]] = {"own": [], "elsewhere": [], "orphaned": []}
    marked = list(processes.marked_by_any())
    for process, environment in marked:
        mark = environment.get(HOME_MARKER, "")
        by_file = cluster is not None and environment[CLUSTER_MARKER] == cluster.id
        if of_home(home, environment, process.pid) or (by_file and not (mark and is_foreign(home, mark, process.pid))):
            pids["own"].append(process.pid)
        else:
            fellows = [each for each, other in marked if other[CLUSTER_MARKER] == environment[CLUSTER_MARKER]]
            pids["orphaned" if _is_orphan(process, environment, fellows) else "elsewhere"].append(process.pid)
    answers = cluster.answers() if cluster is not None else None
    remedy = cluster.head_remedy() if cluster is not None else ""
    return {**pids, "answers": answers, "damage": damage, "secret": secret, "remedy": remedy}


def _is_orphan(process: psutil.Process, environment: Mapping[str, str], fellows: Sequence[psutil.Process]) -> bool:
    """Return whether the process outlived its cluster: the cluster's files and its home are gone.

    ``fellows`` are all processes of the cluster.
    """
    token, mark = environment.get(TOKEN_VARIABLE, ""), environment.get(HOME_MARKER, "")
    files = [Path(token), *([path_in(mark)] if mark else [])]
    return (
        Path(token).is_absolute()
        and is_of_this_system(process.pid)
        and all(map(_is_gone, files))
        and not (mark and (_is_away(mark) or any(_uses(each, place_in(mark)) for each in fellows)))
        and process.is_running()  # after all that was looked up: it may have ended with its files just now
    )


def _is_gone(path: Path) -> bool:
    """Return whether the path is known not to exist. A folder that cannot be read does not count as gone."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _is_away(mark: str) -> bool:
    """Return whether a home that is not at its path may come back, or is beside it: its disk is not mounted, or it moved."""
    parent = next((each for each in path_in(mark).parents if os.path.lexists(each)), Path("/"))
    place = place_in(mark)
    try:
        if str(parent.stat().st_dev) != place.partition(":")[0]:
            return True
        return any(os.path.isdir(state_of(folder)) and place_of(folder) == place for folder in parent.iterdir())
    except OSError:
        return True


def _uses(process: psutil.Process, place: str) -> bool:
    """Return whether the process has a file open in the folder at this place, whatever its path is now."""
    folders: set[Path] = set()
    with suppress(psutil.Error, OSError):
        folders = {folder for file in process.open_files() for folder in Path(file.path).parents}
    for folder in folders:
        with suppress(OSError):
            if place_of(folder) == place:
                return True
    return False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Embedded clusters on this machine, as JSON.")
    parser.add_argument("--home", type=Path, required=True)
    print(json.dumps(census(parser.parse_args(arguments).home)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
