"""A whole Ray cluster on this machine: a head and one node per node group, all on loopback, for one home folder.

    python -m orchestrator.runtime.embedded up --home .atoll [--groups FILE] [--dashboard]
    python -m orchestrator.runtime.embedded down --home .atoll

Responsible for: nodes with labels and capacities as the group file says; processes that outlive their starter; a
file ``HOME/cluster.json`` that says how to join, and a folder ``HOME/cluster`` that survives a restart of
the machine; that what died of a cluster is started again, while the rest trains on;
and that after ``down`` no process and no temporary file is left. Refuses to know jobs.

``ray start`` is used rather than Ray's test cluster, because its processes belong to nobody. Exit codes: 0 done, 1 the
machine failed us, 2 the settings are wrong.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from orchestrator.certificates import folders
from orchestrator.errors import AtollError, ConfigurationError, DataError, InfrastructureError, first_line
from orchestrator.runtime import processes
from orchestrator.runtime.cluster import disk_remedy
from orchestrator.runtime.clusterfile import (
    HEAD_STORAGE,
    TOKEN,
    ClusterFile,
    digest_of,
    made_state,
    secret_in,
    set_aside,
    state_of,
)
from orchestrator.runtime.dead_nodes import VERB
from orchestrator.runtime.fork_server import RAYLET
from orchestrator.runtime.groups import DEFAULT_GROUPS, NodeGroup, read_groups
from orchestrator.runtime.processes import clusters_of, leave_marks, remove
from orchestrator.runtime.ray_start import (
    Place,
    RayProgram,
    Start,
    give_packages,
    log_of,
    pass_on,
    start_head,
    start_node,
    unregister_dead,
)
from orchestrator.runtime.settings import (
    CLUSTER_MARKER,
    CONTROL_GROUP,
    FOLDER_VARIABLE,
    PARTITION_TOLERANCE_S,
    TOKEN_DIGEST_VARIABLE,
    ray_environment,
)
from orchestrator.system import printable, signals, socket_room
from orchestrator.system.marks import HOME_MARKER, is_foreign, mark_of, path_in
from orchestrator.system.ports import LOOPBACK, free_port, is_loopback
from orchestrator.system.python_process import refuse_unset
from orchestrator.system.socket_room import CLUSTER_PREFIX

START_TIMEOUT_S = 180.0
LOOPBACK_TIMEOUT_S = 5.0
ATTEMPTS = 4
AUTHORITY, CERTIFICATES, GROUPS = "authority", "certificates", "groups.json"
"""Beside the cluster's secret, and as private; the certificates are those of a cluster beyond loopback."""
HERE: Mapping[str, Place] = MappingProxyType({})


def up(
    home: Path,
    groups: tuple[NodeGroup, ...] | None,
    *,
    dashboard: bool = False,
    partition_tolerance_s: float = PARTITION_TOLERANCE_S,
    places: Mapping[str, Place] = HERE,
    passed: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> ClusterFile:
    """Every node of the cluster of ``home`` runs and has joined. What runs already is left alone.

    A head, or a node, that died is started again; islands elsewhere train on meanwhile. A cluster that is there keeps the
    groups it was begun with. After a restart of the machine a new one has the secret of the former one, and its groups if
    ``groups`` is None. ``places`` is by node name, for those that are not on loopback.
    ``passed`` names what its processes get of our environment besides what they need. ``packages`` are folders of code that
    jobs may name.
    """
    cluster = _current(home)
    if cluster is not None and not processes.marked(cluster.id):
        remove(Path(cluster.temp_dir))  # what a machine's restart left of it
        cluster = None
    if groups is None and cluster is None:
        groups = _groups_in(state_of(home))  # of the former cluster, or of another machine's that this one succeeds
    were_given, groups = groups is not None, DEFAULT_GROUPS if groups is None else groups
    is_fresh, had_state = cluster is None, state_of(home).exists()
    try:
        if cluster is None:
            cluster = _prepare(home, groups, places, partition_tolerance_s)
        if cluster.restore_token():
            _say("the cluster's secret was missing or damaged; it is written again")
        if were_given and not is_fresh and groups != (had := _remembered_groups(cluster, groups)):
            names = ", ".join(group.name for group in had)
            _say(f"--groups: the running cluster keeps its groups ({names}); to change them, run `atoll down` first")
        pass_on(cluster, passed)
        if give_packages(cluster, packages) and not is_fresh:
            _say(
                "--packages: nodes that are already running keep their folders; to change them, run `atoll down` first"
            )
        for _ in range(ATTEMPTS - 1):
            with suppress(InfrastructureError):  # a port that was free has been taken, say
                _start_missing(cluster, _remembered_groups(cluster, groups), places, dashboard=dashboard)
                return cluster
        _start_missing(cluster, _remembered_groups(cluster, groups), places, dashboard=dashboard)
    except BaseException:
        if is_fresh:
            with signals.ignored():
                down(home, keep_state=had_state)
        raise
    return cluster


def down(home: Path, *, keep_state: bool = False) -> int:
    """End every process of the cluster and remove its files. Returns how many processes were ended; 0 if none was up.

    ``keep_state`` leaves ``HOME/cluster`` for the next one.

    Whatever became of ``cluster.json``: by it and by their marks all processes of the home are found.
    """
    cluster, marked = _read(home), clusters_of(home)
    ids, folders = {one.id for one in marked if one.pids}, {folder for one in marked for folder in one.temp_dirs}
    if cluster is not None and not _is_of_another(cluster, home):
        ids.add(cluster.id)
        folders.add(Path(cluster.temp_dir))
    count = sum(processes.end_all(name) for name in sorted(ids))
    for folder in folders:
        remove(folder)
    state = state_of(home)
    if not keep_state and state.is_dir() and not state.is_symlink():
        shutil.rmtree(state, ignore_errors=True)
    path = ClusterFile.path(home)
    if path.is_dir() and not path.is_symlink():
        set_aside(path)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        _say(f"{path} cannot be removed: its disk is read-only. It names a cluster that is gone")
    return count


def _current(home: Path) -> ClusterFile | None:
    """The cluster of the home: by its file, or where that is lost by its own copy. Any other of this home is ended."""
    cluster = _read(home)
    if cluster is not None and _is_of_another(cluster, home):
        cluster = None
    marked = clusters_of(home)
    if cluster is None:
        copies = (one.copy for one in marked if one.pids and one.copy is not None)
        if (cluster := next(copies, None)) is not None:
            _say(f"the cluster of {home} is found again by its processes; {ClusterFile.path(home)} is written anew")
            cluster.write(home)
    for one in marked:
        if cluster is not None and one.id == cluster.id:
            continue
        if one.pids:
            _say(f"a cluster of {home} that no file tells how to join is ended ({len(one.pids)} processes)")
            processes.end_all(one.id)
        for folder in one.temp_dirs:
            if cluster is None or folder != Path(cluster.temp_dir):  # a process of another may name it
                remove(folder)
    path = ClusterFile.path(home)
    if cluster is None and os.path.lexists(path):
        _say(f"nothing of the cluster in it runs; it is kept as {set_aside(path)}")
    return cluster


def _read(home: Path) -> ClusterFile | None:
    try:
        return ClusterFile.find(home)
    except DataError as error:
        _say(str(error))
        return None


def _is_of_another(cluster: ClusterFile, home: Path) -> bool:
    """Return whether the file was copied here with another home, whose cluster is not this one's."""
    for process, environment in processes.marked_by_any():
        mark = environment.get(HOME_MARKER)
        if environment[CLUSTER_MARKER] == cluster.id and mark and is_foreign(home, mark, process.pid):
            _say(f"{ClusterFile.path(home)} is that of the cluster of {path_in(mark)}, which is left alone")
            return True
    return False


def _say(text: str) -> None:
    with suppress(OSError):  # a terminal that was closed is no reason to leave processes behind
        print(text, file=sys.stderr)


def _prepare(
    home: Path, groups: tuple[NodeGroup, ...], places: Mapping[str, Place], partition_tolerance_s: float
) -> ClusterFile:
    """All that a cluster needs but its processes. A signal waits: a folder without a mark would be found by nobody."""
    with signals.held():
        return _prepared(home, groups, places, partition_tolerance_s)


def _prepared(
    home: Path, groups: tuple[NodeGroup, ...], places: Mapping[str, Place], partition_tolerance_s: float
) -> ClusterFile:
    home.mkdir(parents=True, exist_ok=True)
    room = socket_room.for_cluster()  # not under HOME, which may be deep
    for note in (room.note, socket_room.note()):
        if note:
            _say(note)
    port = _head_port()
    temp_dir = Path(tempfile.mkdtemp(prefix=CLUSTER_PREFIX, dir=room.folder))
    try:
        return _marked_cluster(home, groups, places, partition_tolerance_s, temp_dir, port)
    except BaseException:  # it may have no mark yet
        remove(temp_dir)
        raise


def _marked_cluster(
    home: Path,
    groups: tuple[NodeGroup, ...],
    places: Mapping[str, Place],
    partition_tolerance_s: float,
    temp_dir: Path,
    port: int,
) -> ClusterFile:
    """The cluster whose folder this is. The folder says whose it is, and the home's file names it."""
    state = made_state(state_of(home))
    for name in (HEAD_STORAGE, AUTHORITY, CERTIFICATES):  # all nodes of a former cluster have died with its machine
        shutil.rmtree(state / name, ignore_errors=True)
    certificates = _certificates(state, [place.address for place in places.values()])
    cluster = ClusterFile(
        id=uuid.uuid4().hex,
        address=f"{places.get(CONTROL_GROUP, Place()).address}:{port}",
        temp_dir=str(temp_dir),
        environment={
            **ray_environment(state / TOKEN, partition_tolerance_s, state / HEAD_STORAGE, certificates),
            TOKEN_DIGEST_VARIABLE: digest_of(secret_in(state / TOKEN)),
            FOLDER_VARIABLE: str(temp_dir),
            HOME_MARKER: mark_of(home),
        },
    )
    _groups_path(cluster).write_text(json.dumps([group.model_dump() for group in groups]))
    leave_marks(cluster, home)
    cluster.write(home)
    return cluster


def _head_port() -> int:
    """Raises InfrastructureError where this machine cannot reach itself."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_TIMEOUT_S).close()
        return free_port()
    except OSError as error:
        raise InfrastructureError(
            detail=f"This machine cannot reach itself at {LOOPBACK}: {error.strerror or error}.",
            remedy="Its loopback interface is down, or lacks that address: look with `ip address show lo`, and bring it up "
            "with `ip link set lo up`.",
        ) from error


def _certificates(state: Path, addresses: Sequence[str]) -> Path | None:
    """One folder for all nodes, which share a disk, beside its authority; none where nothing is beyond loopback."""
    if all(map(is_loopback, addresses)):
        return None
    authority, folder = state / AUTHORITY, state / CERTIFICATES
    folders.make_authority(authority, f"atoll cluster {uuid.uuid4().hex[:8]}")
    folders.issue(authority, folder, addresses, days=None)
    return folder


def _groups_path(cluster: ClusterFile) -> Path:
    return cluster.state / GROUPS


def _remembered_groups(cluster: ClusterFile, wanted: tuple[NodeGroup, ...]) -> tuple[NodeGroup, ...]:
    """The groups that the cluster was started with; ``wanted``, if its record of them is damaged."""
    path = _groups_path(cluster)
    try:
        return _read_groups(path)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        _say(f"{path} is damaged ({first_line(error)}); the node groups given now replace it")
        path.write_text(json.dumps([group.model_dump() for group in wanted]))
        return wanted


def _groups_in(state: Path) -> tuple[NodeGroup, ...] | None:
    try:
        return _read_groups(state / GROUPS)
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _read_groups(path: Path) -> tuple[NodeGroup, ...]:
    return tuple(NodeGroup.model_validate(group) for group in json.loads(path.read_text()))


def _start_missing(
    cluster: ClusterFile, groups: tuple[NodeGroup, ...], places: Mapping[str, Place], *, dashboard: bool
) -> None:
    """The head first, as far as its port; then all other nodes that do not run, at once. Returns when all are up."""
    deadline = time.monotonic() + START_TIMEOUT_S
    fresh = not processes.marked(cluster.id)
    running = processes.nodes_with(cluster.id, RAYLET)
    if not cluster.answers():
        running -= {CONTROL_GROUP}
    starting: dict[str, Start] = {}
    with RayProgram(cluster, dashboard=dashboard) as program:
        if CONTROL_GROUP not in running:
            processes.kill_all(cluster.id, CONTROL_GROUP)
            starting[CONTROL_GROUP] = start_head(program, places.get(CONTROL_GROUP, Place()))
            _wait_for_port(cluster, starting[CONTROL_GROUP], deadline)
        missing = [one for one in _nodes(groups) if one[0] not in running]
        for name, _, _ in missing:
            processes.kill_all(cluster.id, name)
        if not fresh and (starting or missing):
            _unregister_dead(program, places.get(CONTROL_GROUP, Place()), deadline)
        for name, group, number in missing:
            starting[name] = start_node(program, name, group, number, places.get(name, Place()))
        _wait_for_all(cluster, starting, deadline)


def _nodes(groups: tuple[NodeGroup, ...]) -> list[tuple[str, NodeGroup, int]]:
    """Every node's name, its group, and its number in that."""
    return [
        (group.name if group.nodes == 1 else f"{group.name}-{number}", group, number)
        for group in groups
        for number in range(group.nodes)
    ]


def _unregister_dead(program: RayProgram, place: Place, deadline: float) -> None:
    """The head hands nothing more to nodes whose processes are dead. Without this it would believe in them for minutes."""
    cluster = program.cluster
    start = unregister_dead(program, place)
    try:
        code = start.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        code = None
    lines = log_of(cluster, VERB).read_text(errors="replace").split("\n")
    if code != 0:
        _say(
            f"the head did not say which nodes it believes alive ({lines[-2:][0] or 'no answer'}). If some of them died, "
            f"new processes may wait for them until the partition tolerance is over"
        )
    elif names := [name for name in lines if name]:
        _say(f"the head has unregistered the dead nodes {', '.join(sorted(names))}")


def _wait_for_all(cluster: ClusterFile, starting: Mapping[str, Start], deadline: float) -> None:
    codes: dict[str, int | None] = {}
    for name, process in starting.items():
        try:
            codes[name] = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            codes[name] = None
    failed = [name for name, code in codes.items() if code != 0]
    for name in failed:  # `ray start` leaves the raylet that it waited for in vain: alive, perhaps in no cluster
        processes.kill_all(cluster.id, name)
    if failed:
        _raise_start_failure(cluster, failed[0], codes[failed[0]])


def _wait_for_port(cluster: ClusterFile, head: Start, deadline: float) -> None:
    while not cluster.answers():
        if head.poll() not in (None, 0) or time.monotonic() > deadline:
            _raise_start_failure(cluster, CONTROL_GROUP, head.poll())
        time.sleep(0.05)


def _raise_start_failure(cluster: ClusterFile, name: str, code: int | None) -> None:
    log = log_of(cluster, name).read_text(errors="replace").strip().splitlines()
    how = f"did not start within {START_TIMEOUT_S:.0f} s" if code is None else f"ended with code {code}"
    raise InfrastructureError(
        detail=f"The Ray node {name!r} {how}. Its last words: {' | '.join(log[-3:]) or '(none)'}",
        remedy=disk_remedy(Path(cluster.temp_dir))
        or disk_remedy(cluster.state)
        or "Check memory and disk, then try again.",
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.runtime.embedded", description="A local Ray cluster.")
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("--home", type=Path, required=True, help="folder that remembers the cluster")
    parser.add_argument(
        "--groups",
        type=Path,
        help="YAML file of node groups; without it those of before, else four",
    )
    parser.add_argument("--dashboard", action="store_true", help="also start Ray's own dashboard, on loopback")
    parser.add_argument("--pass-environment", action="append", default=[], metavar="NAME")
    parser.add_argument("--packages", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--partition-tolerance-s", type=float, default=PARTITION_TOLERANCE_S)
    options = parser.parse_args(arguments)
    os.umask(0o077)
    with signals.as_exceptions():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        refuse_unset(os.environ, options.pass_environment)
        if options.action == "down":
            down(options.home)
        else:
            if os.getpid() != os.getsid(0) and os.getpid() != os.getpgid(0):
                os.setsid()  # one session for the whole cluster, that no terminal ends
            groups = read_groups(options.groups) if options.groups else None
            up(
                options.home,
                groups,
                dashboard=options.dashboard,
                partition_tolerance_s=options.partition_tolerance_s,
                passed=options.pass_environment,
                packages=options.packages,
            )
    except AtollError as error:
        _say(printable.lines(str(error)))
        return 2 if isinstance(error, ConfigurationError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
