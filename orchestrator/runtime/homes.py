"""The clusters of a home, found without its ``cluster.json``: by the mark of their processes, and of their folders.

    TEMP_DIR/home             the mark of the home
    TEMP_DIR/cluster.json     what HOME/cluster.json says, for the day that this one is lost

Responsible for no cluster becoming an orphan by a damaged file, and for removing nothing that is not a cluster's own.
Refuses to end processes.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator import home_files, socket_room
from orchestrator.errors import DataError
from orchestrator.marks import is_of, mark_of, of_home
from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CLUSTER_MARKER, TOKEN_VARIABLE
from orchestrator.socket_room import CLUSTER_PREFIX

MARK = "home"


@dataclass(slots=True)
class HomeCluster:
    """A cluster of a home. ``id`` is empty where only a folder that does not say it is left; ``copy`` is its own file."""

    id: str
    temp_dirs: set[Path] = field(default_factory=set)
    pids: list[int] = field(default_factory=list)
    copy: ClusterFile | None = None


def clusters_of(home: Path) -> list[HomeCluster]:
    """All of them, those with the most living processes first."""
    clusters: dict[str, HomeCluster] = {}
    for process, environment in processes.marked_by_any():
        if of_home(home, environment, process.pid):
            one = clusters.setdefault(environment[CLUSTER_MARKER], HomeCluster(environment[CLUSTER_MARKER]))
            one.pids.append(process.pid)
            if is_own(folder := Path(environment.get(TOKEN_VARIABLE, "")).parent):
                one.temp_dirs.add(folder)
    for folder in (each for place in socket_room.places() for each in place.glob(f"{CLUSTER_PREFIX}*")):
        if not is_own(folder) or not _is_marked(folder, home):
            continue
        by_process = next((one.id for one in clusters.values() if folder in one.temp_dirs), None)
        name = by_process or (copy.id if (copy := _copy_in(folder)) else "")
        clusters.setdefault(name, HomeCluster(name)).temp_dirs.add(folder)
    for one in clusters.values():
        one.copy = next((copy for folder in sorted(one.temp_dirs) if (copy := _copy_in(folder))), None)
    return sorted(clusters.values(), key=lambda one: -len(one.pids))


def leave_marks(cluster: ClusterFile, home: Path) -> None:
    """The cluster's folder says whose it is, and holds a copy of its file."""
    folder = Path(cluster.temp_dir)
    (folder / MARK).write_text(mark_of(home))
    cluster.write(folder)


def is_own(folder: Path) -> bool:
    """Whether this can be a cluster's temporary folder: a file that is damaged could name any other."""
    with suppress(OSError):
        about = folder.lstat()
        is_folder = folder.is_dir() and not folder.is_symlink()
        return (
            is_folder
            and folder.is_absolute()
            and folder.name.startswith(CLUSTER_PREFIX)
            and about.st_uid == os.geteuid()
        )
    return False


def remove(folder: Path) -> None:
    """A cluster's temporary folder is gone, if it is one."""
    if is_own(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _is_marked(folder: Path, home: Path) -> bool:
    try:
        return is_of(home, home_files.read(folder / MARK))
    except (OSError, ValueError):
        return False


def _copy_in(folder: Path) -> ClusterFile | None:
    try:
        return ClusterFile.find(folder)
    except DataError:
        return None
