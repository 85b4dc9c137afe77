"""A folder for a Ray node, with a path short enough for those of its sockets.

    TMPDIR/atoll-1a2b3c4d/us-east/session_2026-11-25_13-51-32_123456_4194304/sockets/plasma_store

The path of a socket has at most ``PATH_BYTES_MAX`` bytes, and batch systems give each job a TMPDIR of half of that.
Responsible for finding another folder then, and for refusing before anything is started if there is none. Leaves making the
folder to the caller. Source: unix(7); Ray 2.60, ``Node._prepare_socket_file``.

The place of the object stores of Ray's nodes: shared memory, or a folder if that cannot be written.

Responsible for starting nodes on machines and in containers whose /dev/shm is read-only or missing.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ConfigurationError

SHARED_MEMORY = Path("/dev/shm")


def options(folder: Path, shared_memory: Path = SHARED_MEMORY) -> list[str]:
    """Return the options of ``ray start`` for a node with its files in ``folder``."""
    return ["--plasma-directory", str(folder)] if problem(shared_memory) else []


def note(shared_memory: Path = SHARED_MEMORY) -> str:
    """Return the warning for a user who starts nodes; empty if shared memory can be used."""
    reason = problem(shared_memory)
    return f"{reason}: object stores are in Ray's folder instead, which is slower on a disk" if reason else ""


def problem(shared_memory: Path = SHARED_MEMORY) -> str:
    """Return why object stores cannot be in shared memory; empty if they can."""
    try:
        with tempfile.TemporaryFile(dir=shared_memory):
            return ""
    except OSError as error:
        return f"{shared_memory} cannot be written ({error.strerror})"


PATH_BYTES_MAX = 103 if sys.platform == "darwin" else 107
SOCKET = "session_2026-11-25_13-51-32_123456_4194304/sockets/plasma_store"
"""The longest of Ray's, with a process id as long as Linux has them."""
ROOM_BYTES = 1 << 20
"""A node's first files take some hundred kilobytes."""
RANDOM_CHARACTERS = 8
"""Of ``tempfile.mkdtemp``."""
NODE_CHARACTERS_MAX = 8
CLUSTER_PREFIX, JOIN_PREFIX, LEFT_PREFIX = "atoll-", "atoll-join-", "atoll-left-"
"""Of the folder of an embedded cluster, with one for each node in it, of a node that joins, and of states left there."""
PLACES = (Path("/tmp"), Path("/var/tmp"))
"""Tried if the path of the usual folder for temporary files is too long."""


@dataclass(frozen=True, slots=True)
class Room:
    """The folder to make a temporary folder in. ``note`` says why it is not the usual one; empty if it is."""

    folder: Path
    note: str = ""


def node_folder(name: str) -> str:
    """Return the name of a node's folder: the node's name, or a short hash that cannot be the name of another node."""
    if len(name) <= NODE_CHARACTERS_MAX:
        return name
    digest = base64.b32encode(hashlib.sha256(name.encode()).digest()).decode().lower()
    return f"~{digest}"[:NODE_CHARACTERS_MAX]


def for_cluster() -> Room:
    """Return where an embedded cluster may have its folder. Raises ConfigurationError if no place is short enough."""
    return _room(CLUSTER_PREFIX, NODE_CHARACTERS_MAX + 1)


def for_join() -> Room:
    """Return where a node that joins a cluster may have its folder. Raises as ``for_cluster``."""
    return _room(JOIN_PREFIX, 0)


def places() -> list[Path]:
    """Return the folders in which temporary folders of clusters may be, the usual one first."""
    try:
        usual = [Path(tempfile.gettempdir()).absolute()]
    except OSError:  # none can be written
        usual = []
    return list(dict.fromkeys([*usual, *PLACES]))


def _room(prefix: str, below: int) -> Room:
    characters_max = PATH_BYTES_MAX - len(f"/{prefix}") - RANDOM_CHARACTERS - below - len(f"/{SOCKET}")
    wanted = os.environ.get("TMPDIR", "")
    problems = {place: _problem_of(place) for place in places() if _bytes(place) <= characters_max}
    place = next((place for place, problem in problems.items() if not problem), None)
    if _bytes(wanted) > characters_max:
        problem = f"has {_bytes(wanted)} bytes, and at most {characters_max} leave room for the sockets of Ray"
    else:
        problem = f"cannot be written ({_problem_of(Path(wanted or tempfile.gettempdir()))})"
    if place is None:
        others = " and ".join(f"{each} ({reason})" for each, reason in problems.items() if str(each) != wanted)
        raise ConfigurationError(
            detail=f"There is no folder for Ray's temporary files: TMPDIR ({wanted or 'not set'}) {problem}, and "
            f"{others or 'no other folder'} cannot be written either. Set TMPDIR to a folder that this user can write, with "
            f"{ROOM_BYTES >> 20} MiB of room and a path of at most {characters_max} bytes; nothing was started."
        )
    is_as_wanted = not wanted or place == Path(wanted) or not Path(wanted).is_absolute()
    return Room(place, "" if is_as_wanted else f"TMPDIR ({wanted}) {problem}: temporary files are in {place} instead")


def _bytes(path: Path | str) -> int:
    return len(os.fsencode(path))


def _problem_of(place: Path) -> str:
    """Return why a node cannot have its files there; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            if file.write(bytes(ROOM_BYTES)) < ROOM_BYTES:
                return os.strerror(errno.ENOSPC)
    except OSError as error:
        return error.strerror or str(error)
    return ""
