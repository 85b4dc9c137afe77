"""A head, and the node of a service, as programs in the foreground: ``atoll head`` and ``atoll serve``.

    python -m orchestrator.runtime.head head --home HOME --address IP --port 6379 [--certificates FOLDER]
    python -m orchestrator.runtime.head serve --home HOME [--head HOST:PORT --token-file FILE …] -- COMMAND

    head    Ray's head without a node group. It runs until a signal, or until one of its processes dies (exit code 1).
    serve   COMMAND, which is the service, and the Ray node by which it is part of the cluster: the head's where the head
            is of the same home, else one of its own. Both start again once a head answers that has lost that node.

For a terminal, a systemd unit or a container, which restart what ended. Every start first ends what a killed predecessor of
this home has left, found by its marks, and continues from ``HOME/cluster`` (``clusterfile``).

A head always ends by SIGKILL, whichever signal this program gets. A raylet that shuts down gracefully unregisters its node,
and the next head would read from its storage that the actors of this node live. After a kill, Ray restarts them.
"""

from __future__ import annotations

import argparse
import fcntl
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from orchestrator.certificates import folders
from orchestrator.errors import AtollError, ConfigurationError, Conflict, DataError, Fenced, InfrastructureError
from orchestrator.runtime import dead_nodes, join, processes, ray_start
from orchestrator.runtime.cluster import disk_remedy
from orchestrator.runtime.clusterfile import (
    HEAD_STORAGE,
    SERVICE_NODE,
    TOKEN,
    ClusterFile,
    digest_of,
    made_state,
    secret_in,
    state_of,
)
from orchestrator.runtime.fork_server import RAYLET
from orchestrator.runtime.ray_command import MODULE
from orchestrator.runtime.settings import (
    CLUSTER_MARKER,
    CONTROL_GROUP,
    FOLDER_VARIABLE,
    NODE_MARKER,
    PARTITION_TOLERANCE_S,
    TOKEN_DIGEST_VARIABLE,
    ray_environment,
)
from orchestrator.system import (
    home_files,
    object_store,
    python_process,
    signals,
    socket_room,
    succession,
    user_packages,
)
from orchestrator.system.marks import BY_HEAD, BY_UP, ELSEWHERE, HOME_MARKER, mark_of
from orchestrator.system.object_store import ObjectStore
from orchestrator.system.ports import is_loopback
from orchestrator.system.python_process import built, cleaned
from orchestrator.system.socket_room import CLUSTER_PREFIX

log = logging.getLogger(__name__)
LOOK_S = 0.5
SERVICE_STOP_S = 10.0
START_TIMEOUT_S = 180.0
WAIT_S = 10.0
UNREGISTER_TIMEOUT_S = 20.0


class EndSignal:
    """The signal that asked this program to end. False before it came."""

    def __init__(self) -> None:
        self.number: int | None = None
        for number in signals.ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGTERM:
                signal.signal(number, self._set)

    def _set(self, number: int, _frame: FrameType | None) -> None:
        self.number = number

    def __bool__(self) -> bool:
        return self.number is not None


class RayNode:
    """The Ray processes of one node, with the folder of their sockets and logs. Both are gone after ``kill``."""

    def __init__(self, cluster: ClusterFile, name: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.cluster, self._name = cluster, name
        folder = Path(cluster.temp_dir, socket_room.node_folder(name))
        folder.mkdir(exist_ok=True)
        self._log = Path(cluster.temp_dir, f"{name}.log")
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                python_process.module(MODULE, "start", "--block", *ray_start.node_options(folder, name), *arguments),
                env={**environment, **cluster.environment, CLUSTER_MARKER: cluster.id, NODE_MARKER: name},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                umask=0o077,
                process_group=0,  # Ctrl-C at the terminal is for this program
                # batch systems and some supervisors send SIGTERM to all processes at once; this program ends the others
                preexec_fn=signals.block,
            )

    def wait_until_it_runs(self, end_signal: EndSignal) -> None:
        """Return once its raylet runs, or a signal came. Raises InfrastructureError if it does not start."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not end_signal and join.started_by(self._process.pid) is None:
            self.refuse_ended()
            if time.monotonic() > deadline:
                raise InfrastructureError(detail=f"Ray's node {self._name!r} did not start. {self._last_words()}")
            time.sleep(LOOK_S)

    def runs(self) -> bool:
        return self._process.poll() is None

    def refuse_ended(self) -> None:
        """Raise InfrastructureError if one of its processes has died, which ends the others."""
        if not self.runs():
            remedy = disk_remedy(Path(self.cluster.temp_dir)) or disk_remedy(self.cluster.state)
            raise InfrastructureError(
                detail=f"Ray's node {self._name!r} ended with exit code {self._process.returncode}. {self._last_words()}",
                remedy=remedy or "Start it again; running jobs continue.",
            )

    def kill(self) -> None:
        processes.kill_all(self.cluster.id)
        self._process.wait()
        processes.remove(Path(self.cluster.temp_dir))

    def _last_words(self) -> str:
        return join.last_words(self._log)


@dataclass(frozen=True, slots=True)
class HeadsNode:
    """The node of a head of the same home. The service uses it, and does not end it."""

    cluster: ClusterFile
    raylet: psutil.Process

    def runs(self) -> bool:
        with suppress(psutil.Error):
            return bool(self.raylet.is_running()) and self.raylet.status() != psutil.STATUS_ZOMBIE
        return False

    def kill(self) -> None: ...


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    options = parser().parse_args(arguments)
    os.umask(0o077)
    try:
        sys.exit(run_head(options) if options.what == "head" else run_service(options))
    except AtollError as error:
        log.error("atoll: %s", error)
        sys.exit(2 if isinstance(error, ConfigurationError | Conflict) else 1)


def parser() -> argparse.ArgumentParser:
    """The options that ``atoll head`` and ``atoll serve`` have checked already."""
    arguments = argparse.ArgumentParser(prog="python -m orchestrator.runtime.head")
    what = arguments.add_subparsers(dest="what", required=True)
    head, serve = what.add_parser("head"), what.add_parser("serve")
    for each in (head, serve):
        each.add_argument("--home", type=Path, required=True)
        each.add_argument("--token-file", type=Path, help="the cluster's secret; default: HOME/cluster/token")
        each.add_argument("--certificates", type=Path, help="this machine's folder; absent: Ray talks in the clear")
        each.add_argument("--packages", action="append", default=[], help="a folder of packages that jobs may name")
        each.add_argument("--pass-environment", action="append", default=[], metavar="NAME")
        each.add_argument("--whole-environment", action="store_true", help="pass all of it, as containers do")
        each.add_argument("--partition-tolerance", type=float, default=PARTITION_TOLERANCE_S)
    head.add_argument("--address", required=True, help="IP address of this machine, as others reach it")
    head.add_argument("--port", type=int, default=6379)
    serve.add_argument("--head", dest="address", help="HOST:PORT; absent: the head of this home")
    serve.add_argument("--own-address", default="", help="of this machine, as the others see it")
    serve.add_argument("--ports", default="", help="FIRST-LAST: Ray's servers on this machine; any without it")
    serve.add_argument("--wait", type=float, default=WAIT_S, help="seconds for a head that does not answer yet")
    serve.add_argument("command", nargs="+", metavar="COMMAND", help="the service")
    return arguments


# ── the head ──────────────────────────────────────────────────────────────────────────────────────────────────────


def run_head(options: argparse.Namespace) -> int:
    """Be the head until a signal comes. Raises InfrastructureError if it dies by itself."""
    end_signal, home = EndSignal(), options.home.resolve()
    with locked(home, "head"):
        join.refuse_foreign_address("--address", options.address)
        if options.certificates is not None:
            folders.refuse_unfit(options.certificates, options.address)
        refuse_other_cluster(home, BY_HEAD)
        end_leftovers(home)
        refuse_used_port(options.address, options.port)
        with new_folder() as folder:
            cluster = head_cluster(home, folder, options)
            processes.leave_marks(cluster, home)
            cluster.write(home)
            secret = home_files.read(cluster.token_path)
            arguments = [*ray_start.head_options(options.port), "--node-ip-address", options.address]
            node = RayNode(cluster, CONTROL_GROUP, arguments, environment_of(options))
            try:
                node.wait_until_it_runs(end_signal)
                if not end_signal:
                    unregister_dead(node, options)
                    lead = Lead(home, cluster, options.certificates)
                    log.info("The head answers at %s. The cluster's secret is %s.", cluster.address, cluster.token_path)
                while not end_signal:
                    node.refuse_ended()
                    keep_secret(cluster, secret)
                    lead.refuse_succeeded()
                    time.sleep(LOOK_S)
            finally:
                node.kill()
    log.info("The head has ended. Islands train on, and jobs continue when it is started again.")
    return 0


class Lead:
    """The place of a head among those of its fleet, if its home has a store."""

    def __init__(self, home: Path, cluster: ClusterFile, certificates: Path | None) -> None:
        """Announce the head. Raises Conflict if another one was faster, InfrastructureError if the store cannot be used."""
        self._fence: Fenced | None = None
        if (url := object_store.remembered(home)) is not None:
            fleet = succession.opened(url, home, None, log.warning)
            head = succession.announce(fleet, cluster.address, cluster.id, certificates)
            threading.Thread(target=self._watch, args=(fleet.store, head), name="lead", daemon=True).start()

    def refuse_succeeded(self) -> None:
        """Raise Fenced if another head has begun."""
        if self._fence is not None:
            raise self._fence

    def _watch(self, store: ObjectStore, head: succession.Head) -> None:
        while self._fence is None:  # a store that does not answer must not keep the head from ending
            try:
                succession.refuse_succeeded(store, head)
            except Fenced as error:
                self._fence = error
            time.sleep(succession.WATCH_S)


def unregister_dead(node: RayNode, options: argparse.Namespace) -> None:
    """Have the head forget the nodes that died with its predecessor: Ray would hand them actors to place."""
    cluster = node.cluster
    command = python_process.module(MODULE, dead_nodes.VERB, cluster.address, cluster.id, cluster.temp_dir)
    try:
        answer = subprocess.run(
            command,
            env={**environment_of(options), **cluster.environment, CLUSTER_MARKER: cluster.id},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=UNREGISTER_TIMEOUT_S,
            process_group=0,
        )
    except subprocess.TimeoutExpired:
        log.warning("The head does not say which nodes it believes alive.")
        return
    if answer.returncode:
        log.warning("The head does not say which nodes it believes alive: %s", answer.stderr.strip().splitlines()[-1:])
    elif answer.stdout.strip():
        log.info("The head has forgotten nodes whose processes are dead: %s.", ", ".join(answer.stdout.split()))


def head_cluster(home: Path, folder: Path, options: argparse.Namespace) -> ClusterFile:
    """Return the cluster of this home's head, with its secret. It keeps its identity when the head starts again."""
    before, state = _found(home), made_state(state_of(home))
    token = (options.token_file or state / TOKEN).absolute()
    made_state(token.parent)
    is_same = before is not None and before.supervisor == BY_HEAD and before.token_path == token
    if before is not None and is_same:
        with suppress(InfrastructureError):  # no copy is left: the secret is a new one
            before.restore_token()
    certificates = options.certificates and options.certificates.absolute()
    settings = ray_environment(token, options.partition_tolerance, state / HEAD_STORAGE, certificates)
    return ClusterFile(
        id=before.id if before is not None and is_same else uuid.uuid4().hex,
        address=address_of(options.address, options.port),
        temp_dir=str(folder),
        environment={**settings, **marks_of(home, folder, secret_in(token))},
        supervisor=BY_HEAD,
    )


def refuse_used_port(address: str, port: int) -> None:
    """Raise ConfigurationError if another program listens on this port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for host in (address, "") if not is_loopback(address) else (address,):  # beyond loopback Ray listens on all
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                raise ConfigurationError(
                    detail=f"--port {port}: {error.strerror} at {address}. Give another port, or stop the program that "
                    f"listens there (`ss -ltnp sport = :{port}` names it)."
                ) from error


def refuse_other_cluster(home: Path, supervisor: str) -> None:
    """Raise Conflict if something else runs a cluster in this home, or keeps one there."""
    cluster = _found(home)
    if cluster is None or cluster.supervisor == supervisor:
        return
    if cluster.supervisor == BY_UP and not processes.marked(cluster.id):
        return
    remedy = "End it with `atoll down`, or choose" if cluster.supervisor == BY_UP else "Choose"
    runner = {BY_UP: "`atoll up`", BY_HEAD: "`atoll head`", ELSEWHERE: "`atoll serve --head`"}[cluster.supervisor]
    raise Conflict(
        detail=f"The home {home} belongs to a cluster of {runner}, at {cluster.address}.",
        remedy=f"{remedy} another home with --home.",
    )


# ── the service ───────────────────────────────────────────────────────────────────────────────────────────────────


def run_service(options: argparse.Namespace) -> int:
    """Be the service until a signal comes, or until it ends by itself. Returns its exit code."""
    end_signal, home = EndSignal(), options.home.resolve()
    with locked(home, "serve"):
        wait_s = options.wait
        while not end_signal:
            node = joined(home, options, wait_s, end_signal)
            if node is None:
                break
            try:
                code = serve(node, options, end_signal)
            finally:
                node.kill()
            if code is not None:
                return code
            log.info("The node by which the service was part of the cluster has died. Both start again.")
            wait_s = math.inf
    return 0


def joined(home: Path, options: argparse.Namespace, wait_s: float, end_signal: EndSignal) -> HeadsNode | RayNode | None:
    """Return the node by which the service is part of the cluster; None if a signal came first."""
    cluster = _found(home)
    if cluster is not None and cluster.supervisor == BY_HEAD and options.address in (None, cluster.address):
        return heads_node(home, cluster, wait_s, end_signal)
    if options.address is None:
        raise ConfigurationError(
            detail=f"--head is missing, and no head has run in the home {home}. Give the head's HOST:PORT, or start one "
            "here with `atoll head`."
        )
    refuse_other_cluster(home, ELSEWHERE)
    end_leftovers(home)
    if options.own_address:
        join.refuse_foreign_address("--own-address", options.own_address)
    join.wait_for_head(lambda: (options.address, ""), wait_s, lambda: bool(end_signal))
    if end_signal:
        return None
    options.own_address = join.own_address(options)
    join.refuse_foreign_address("--own-address", options.own_address)
    join.refuse_unfit_certificates(options)
    join.refuse_wrong_head(options, wait_s, lambda: bool(end_signal))
    if end_signal:
        return None
    with new_folder() as folder:
        return own_node(home, folder, options, end_signal)


def heads_node(home: Path, cluster: ClusterFile, wait_s: float, end_signal: EndSignal) -> HeadsNode | None:
    """Return the node of the head of this home, once it runs. Raises InfrastructureError if it does not."""
    join.wait_for_head(lambda: (cluster.address, ""), wait_s, lambda: bool(end_signal))
    deadline = time.monotonic() + START_TIMEOUT_S
    while not end_signal and time.monotonic() < deadline:
        cluster = _found(home) or cluster  # its folder is another one after each start
        for process in processes.marked(cluster.id, CONTROL_GROUP):
            with suppress(psutil.Error):
                if process.name() == RAYLET:
                    return HeadsNode(cluster, process)
        time.sleep(LOOK_S)
    if end_signal:
        return None
    raise InfrastructureError(
        detail=f"The head at {cluster.address} has no node on this machine.", remedy=f"{cluster.head_remedy()}."
    )


def own_node(home: Path, folder: Path, options: argparse.Namespace, end_signal: EndSignal) -> RayNode:
    """Return a node of the service's own: without CPUs, and in no group. The home's file then says how to use it."""
    token = options.token_file.absolute()
    certificates = options.certificates and options.certificates.absolute()
    settings = ray_environment(token, options.partition_tolerance, certificates=certificates)
    secret = home_files.read(token).strip()
    environment = {**settings, **marks_of(home, folder, secret)}
    cluster = ClusterFile(uuid.uuid4().hex, options.address, str(folder), environment, ELSEWHERE)
    processes.leave_marks(cluster, home)
    cluster.write(home)
    arguments = ["--address", options.address, "--num-cpus", "0", "--node-ip-address", options.own_address]
    node = RayNode(cluster, SERVICE_NODE, [*arguments, *join.ports_of(options.ports)], environment_of(options))
    try:
        node.wait_until_it_runs(end_signal)
    except BaseException:
        node.kill()
        raise
    return node


def serve(node: HeadsNode | RayNode, options: argparse.Namespace, end_signal: EndSignal) -> int | None:
    """Run the service. Return its exit code, 0 after a signal, and None once a head answers that has lost the node."""
    with signals.held():
        service = subprocess.Popen(
            options.command,
            env=environment_of(options),
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=signals.end_with_parent,  # if this program is killed, the next one needs the home and the port
        )
    try:
        while service.poll() is None and not end_signal:
            if not node.runs() and node.cluster.answers():
                return None
            time.sleep(LOOK_S)
        return 0 if end_signal else service.returncode
    finally:
        service.terminate()
        with suppress(subprocess.TimeoutExpired):
            service.wait(SERVICE_STOP_S)
        service.kill()
        service.wait()


# ── what both need ────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def locked(home: Path, command: str) -> Iterator[None]:
    """Hold the home for this command. Raises Conflict while another process does."""
    made_state(home)
    with home_files.open_lock(home / f"{command}.lock", create=True) as held:
        try:
            fcntl.flock(held.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(
                detail=f"`atoll {command}` is running in {home} already.",
                remedy="Stop it first, or choose another home with --home.",
            ) from error
        yield


def end_leftovers(home: Path) -> None:
    """End what a killed predecessor has left of this home's Ray processes, and remove their folders."""
    for left in processes.clusters_of(home):
        if left.pids:
            log.info("%d processes that an earlier command of this home has left are ended.", len(left.pids))
            processes.kill_all(left.id)
        for folder in left.temp_dirs:
            processes.remove(folder)


@contextmanager
def new_folder() -> Iterator[Path]:
    """Yield a new folder for sockets and logs. It is removed if the block fails; else with its node."""
    room = socket_room.for_cluster()
    for note in (room.note, socket_room.note()):
        if note:
            log.warning("%s", note)
    folder = Path(tempfile.mkdtemp(prefix=CLUSTER_PREFIX, dir=room.folder))
    try:
        yield folder
    except BaseException:
        processes.remove(folder)
        raise


def marks_of(home: Path, folder: Path, secret: str) -> dict[str, str]:
    """Return the variables by which the processes of this home are found again, and a damaged secret is recognised."""
    return {TOKEN_DIGEST_VARIABLE: digest_of(secret), FOLDER_VARIABLE: str(folder), HOME_MARKER: mark_of(home)}


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Return what the processes get of this program's environment."""
    passed = cleaned(os.environ) if options.whole_environment else built(os.environ, options.pass_environment)
    return {**passed, **user_packages.variables(options.packages)}


def keep_secret(cluster: ClusterFile, secret: str) -> None:
    """Write the cluster's secret again if its file is gone or damaged."""
    try:
        if cluster.restore_token(secret):
            log.warning("%s was missing or damaged; it is written again.", cluster.token_path)
    except InfrastructureError as error:
        log.warning("%s", error)


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _found(home: Path) -> ClusterFile | None:
    try:
        return ClusterFile.find(home)
    except DataError as error:
        log.warning("%s", error)
        return None


if __name__ == "__main__":
    main()
