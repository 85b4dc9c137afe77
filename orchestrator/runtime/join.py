"""A machine that joins a cluster as a node for a limited time: ``atoll join``.

    python -m orchestrator.runtime.join --address HEAD:PORT --token-file FILE --group NAME --region NAME [--until SECONDS] …

    joined ──time is nearly up, SIGTERM or SIGINT──▶ draining ──nothing works here, or the time is up──▶ ended, exit code 0
       │  └──drained by somebody else, as at a cloud's notice: its raylet ends by itself──────────────▶ ended, exit code 0
       └──its raylet dies──▶ exit code 1

For elements of a queue's job array, spot machines, or a desk at night. Responsible for the node's processes, which are
children of this one and end with it, and for draining in time. The core decides what its islands do meanwhile.

``LocalNode`` is the Ray node of this machine or container, seen from a process that is not part of it. It finds the node by
its raylet, has the head drain it, and knows when nothing works there any more. It ends no process.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType

import psutil

from orchestrator.certificates import folders, peer
from orchestrator.errors import AtollError, ConfigurationError, DataError, InfrastructureError, first_line
from orchestrator.runtime import cluster, processes
from orchestrator.runtime.fork_server import RAYLET
from orchestrator.runtime.node_agent import workers_of
from orchestrator.runtime.ray_command import MODULE
from orchestrator.runtime.settings import (
    CONTROL_GROUP,
    GROUP_LABEL,
    PARTITION_TOLERANCE_S,
    REGION_LABEL,
    ray_environment,
)
from orchestrator.system import notices, program_cache, python_process, release, signals, socket_room, user_packages
from orchestrator.system.object_store import open_store
from orchestrator.system.ports import Reach, reach, refuse_uncallable
from orchestrator.system.python_process import built
from orchestrator.system.signals import LEFT_STATES_VARIABLE, left_labels
from orchestrator.system.socket_room import JOIN_PREFIX, LEFT_PREFIX
from orchestrator.system.succession import WATCH_S, Head, newest_head

log = logging.getLogger(__name__)
LOOK_S = 0.5
RAY_PREFIX = "RAY_"
ENDED_S = 4.0
"""How long a raylet has to sign off at the head. A queue kills what is left five seconds after the grace of join.sbatch."""
GONE_S = 3.0
"""``ray start --block`` ends within a second of a raylet that died, and never after one that went by itself."""
LEAVE_S = 120.0
"""How long islands may take to write their states before the node ends. A state of 12 GB needs half a minute or so."""
WAIT_S = 10.0
"""For the head, which may be beginning."""
CONNECT_S = 2.0
SELDOM_S = 30.0
RAY_LOG, RAY_ADVICE = "ray.log", re.compile(r"\bINFO \w+\.py:\d+ -- ")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
FOLDER_MARKER = "ATOLL_JOIN_FOLDER"
"""In the environment of every process of the node, for it to be found by, whichever of them started it."""
DRAIN_BY_RAY_S = 1
"""Ray drains again when its raylet is to end; by then this has been done."""


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    options = parser().parse_args(arguments)
    try:
        notices.settings(os.environ)
        sys.exit(Joined(options).run())
    except AtollError as error:
        log.error("atoll: %s", error)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)


def parser() -> argparse.ArgumentParser:
    """The options that ``atoll join`` has checked already."""
    arguments = argparse.ArgumentParser(prog="python -m orchestrator.runtime.join")
    for name in ("--token-file", "--group", "--region"):
        arguments.add_argument(name, required=True)
    arguments.add_argument("--address", default="", help="of the head; absent: the newest that the store names")
    arguments.add_argument("--store", default="", help="where heads of the fleet are announced")
    arguments.add_argument("--certificates", type=Path, help="this machine's folder; absent: it joins in the clear")
    arguments.add_argument("--ports", default="", help="FIRST-LAST: Ray's servers on this machine; any without it")
    arguments.add_argument("--name", default="", help="of the node; default: what Ray calls it")
    arguments.add_argument("--cpus", type=int, default=None)
    arguments.add_argument("--gpus", type=int, default=None)
    arguments.add_argument("--memory-bytes", type=int, default=None)
    arguments.add_argument("--resources", default="{}", help="JSON: amounts by name")
    arguments.add_argument("--labels", default="{}", help="JSON: texts by name")
    arguments.add_argument("--packages", action="append", default=[], help="a folder of packages that jobs may name")
    arguments.add_argument("--pass-environment", action="append", default=[], help="a variable that islands get")
    arguments.add_argument("--own-address", default="", help="of this machine, as the others see it")
    arguments.add_argument("--until", type=float, default=None, help="seconds since 1970")
    arguments.add_argument("--lead", type=float, default=120.0, help="seconds of draining before that")
    arguments.add_argument("--grace", type=float, default=30.0, help="seconds of draining after SIGTERM")
    arguments.add_argument("--partition-tolerance", type=float, default=PARTITION_TOLERANCE_S)
    arguments.add_argument("--wait", type=float, default=WAIT_S, help="seconds for a head that does not answer yet")
    return arguments


class Joined:
    """One node, from its beginning to its end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._signal: int | None = None
        self._deadline: float | None = None
        self._cause = ""

    def run(self) -> int:
        """Returns the exit code, when nothing of the node is left."""
        for number in signals.ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGTERM:
                signal.signal(number, self._told_to_end)
        room = socket_room.for_join()
        for note in (room.note, socket_room.note()):
            if note:
                log.warning("%s", note)
        if self._options.group == CONTROL_GROUP:
            raise ConfigurationError(detail=f"--group {CONTROL_GROUP} is the head's own group. Choose another name.")
        if self._options.own_address:
            refuse_foreign_address("--own-address", self._options.own_address)
        own, wait_s = self._options.own_address, self._options.wait
        self._left = tempfile.TemporaryDirectory(prefix=LEFT_PREFIX, dir=room.folder, ignore_cleanup_errors=True)
        while True:
            heads = Heads(self._options)
            self._options.address = heads.wait_for_one(wait_s, lambda: self._signal is not None)
            if self._signal is not None:
                return 0
            self._options.own_address = own or own_address(self._options)
            heads.watch()
            try:
                code = self._be_a_node(heads, room)
            finally:
                heads.close()
            if code is not None:
                return code
            wait_s = math.inf

    def _be_a_node(self, heads: Heads, room: socket_room.Room) -> int | None:
        """Return the exit code, or None if there is or will be another head, which this machine should join."""
        refuse_unfit_certificates(self._options)
        refuse_wrong_head(self._options, self._options.wait, lambda: self._signal is not None)
        if self._signal is not None:
            return 0
        if problem := program_cache.problem(environment(self._options)):
            log.warning("%s", problem)
        with ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix=JOIN_PREFIX, dir=room.folder, ignore_cleanup_errors=True)
            folder = stack.enter_context(temporary)
            output = stack.enter_context(Path(folder, RAY_LOG).open("wb"))  # it advises to use commands of Ray's
            process = subprocess.Popen(
                ray_start(self._options, Path(folder), left_labels(Path(self._left.name))),
                env={**environment(self._options), FOLDER_MARKER: folder, LEFT_STATES_VARIABLE: self._left.name},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                umask=0o077,
                process_group=0,
                preexec_fn=signals.block,  # a queue, for one, signals all of them; this process drains first
            )
            try:
                return self._until_it_ends(process, Path(folder, RAY_LOG), heads)
            finally:
                if heads.is_gone and signals.ask_to_leave(Path(self._left.name), LEAVE_S):
                    log.warning("Not all islands left their states within %.0f s.", LEAVE_S)
                node = None if heads.is_gone else started_by(process.pid)  # nothing can be asked of a head that is gone
                end(process, Path(folder), node)
                shutil.rmtree(folder, ignore_errors=True)

    def _told_to_end(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number

    def _until_it_ends(self, process: subprocess.Popen[bytes], ray_log: Path, heads: Heads) -> int | None:
        node, gone_at, is_drained = None, None, False
        while process.poll() is None:
            present = started_by(process.pid)
            if node is None and present is not None:
                log.info("This machine is a node of %s, in the group %s.", present.head, self._options.group)
            node = present or node
            gone_at = None if present is not None or node is None else gone_at or time.monotonic()
            if gone_at is not None and time.monotonic() - gone_at > GONE_S:
                log.info("The node was drained and has left.")
                return 0
            self._decide(time.time())
            if self._deadline is None and heads.is_gone:
                log.info("The head at %s is gone, and there is another one. The node ends and joins it.", heads.address)
                return None
            if self._deadline is not None and present is not None and not is_drained:
                is_drained = self._drain(present, self._deadline)
            if self._deadline is not None and self._is_over(present, is_drained, self._deadline):
                return 0
            time.sleep(LOOK_S)
        log.error("The node ended by itself, with exit code %d. %s", process.returncode, last_words(ray_log))
        if self._deadline is None and heads.are_lost():
            log.info("The head at %s is gone. The node joins the next one.", heads.address)
            return None
        return 0 if self._deadline is not None else 1

    def _decide(self, now: float) -> None:
        """Decide from when on the node drains, and until when. A signal may shorten a drain that ``--until`` has begun.

        Another SIGTERM or SIGHUP prolongs nothing and ends nothing sooner: queues repeat them. Another Ctrl-C ends the node
        at once.
        """
        until: float | None = self._options.until
        if self._signal is not None:
            at_once = self._signal == signal.SIGINT and self._deadline is not None
            deadline = now if at_once else now + self._options.grace
            self._leave(f"{signal.Signals(self._signal).name} was sent to its machine", deadline)
            self._signal = None
        elif until is not None and self._deadline is None and now >= until - self._options.lead:
            self._leave("its time on this machine is nearly up", until)

    def _leave(self, cause: str, deadline: float) -> None:
        self._cause = self._cause or cause
        self._deadline = min(deadline, self._deadline or deadline, self._options.until or deadline)
        log.info("This node is leaving: %s. Its islands have %.0f s.", cause, self._deadline - time.time())

    def _drain(self, node: LocalNode, deadline: float) -> bool:
        try:
            node.drain(self._cause, deadline)
        except AtollError as error:
            log.warning("%s", error)
            return False
        return True

    def _is_over(self, node: LocalNode | None, is_drained: bool, deadline: float) -> bool:
        if node is None or (is_drained and not node.works()):
            log.info("No process of a job runs here any more.")
            return True
        if time.time() >= deadline:
            log.warning("The time is up, and a process of a job still runs here.")
            return True
        return False


class Heads:
    """The head that this machine joins: at a given address, or where the store says, which may change.

    Once the machine is a node, a thread looks whether the head has moved: a store that does not answer must not keep the
    node from draining. It asks the store often while the head does not answer, else seldom.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises ConfigurationError for a URL that is no store."""
        self._store = open_store(options.store) if options.store else None
        self._head: Head | None = None
        self.address: str = options.address if self._store is None else ""
        self.is_gone, self._is_over = False, threading.Event()

    def wait_for_one(self, wait_s: float, is_told: Callable[[], bool]) -> str:
        """Return the address of a head that answers; any if ``is_told``. Raises InfrastructureError after ``wait_s``."""
        wait_for_head(self._address_now, wait_s, is_told)
        return self.address

    def watch(self) -> None:
        """Set ``is_gone`` once another head has begun, until ``close``."""
        if self._store is not None:
            threading.Thread(target=self._watch, name="heads", daemon=True).start()

    def close(self) -> None:
        self._is_over.set()

    def are_lost(self) -> bool:
        """Return whether a node that ended has to look for another head: its own does not answer, or is another one."""
        if self._store is not None and not self.is_gone:
            self.is_gone = reach(*head_of(self.address)) is not Reach.TAKEN or self._has_moved()
        return self.is_gone

    def _watch(self) -> None:
        asked_at, often_until = time.monotonic(), 0.0
        while not self._is_over.wait(WATCH_S):
            if reach(*head_of(self.address)) is not Reach.TAKEN:
                often_until = time.monotonic() + SELDOM_S  # a head listens a moment before it is announced
            if time.monotonic() < often_until or time.monotonic() - asked_at > SELDOM_S:
                asked_at = time.monotonic()
                if self._has_moved():
                    self.is_gone = True
                    return

    def _has_moved(self) -> bool:
        """Return whether there is another head. One that started again from its own disk has its nodes still."""
        try:
            later = self._newer_head()
        except (OSError, AtollError) as error:
            log.debug("the store does not say whether there is another head: %s", error)
            return False
        before, self._head = self._head, later or self._head
        return later is not None and (
            before is None or (later.cluster, later.address) != (before.cluster, before.address)
        )

    def _newer_head(self) -> Head | None:
        """Return the newest head in the store, None if that is known already. Raises as ``newest_head``."""
        assert self._store is not None
        return newest_head(self._store, self._head.number if self._head is not None else 0)

    def _address_now(self) -> tuple[str, str]:
        """Return the head's address, or none and the reason."""
        if self._store is None:
            return self.address, ""
        try:
            self._head = self._newer_head() or self._head
        except (OSError, DataError) as error:
            return self.address, "" if self.address else str(getattr(error, "strerror", None) or error)
        if self._head is None or not self._head.address:
            return "", f"{self._store.url} names no head that other machines can reach"
        self.address = self._head.address
        return self.address, ""


@dataclass(frozen=True, slots=True)
class LocalNode:
    """``environment`` are its own settings of Ray, which give the cluster's token to callers of its head."""

    raylet: int
    id: str
    name: str
    head: str
    environment: Mapping[str, str]

    def drain(self, cause: str, deadline: float) -> None:
        """Its islands are to give their work and go on elsewhere until ``deadline``, in seconds since 1970.

        Raises InfrastructureError when the head does not answer.
        """
        os.environ.update(self.environment)
        try:
            cluster.drain(cluster.client_of(self.head), self.id, cause, deadline)
        except Exception as error:  # whatever Ray raises where its head is away
            raise InfrastructureError(
                detail=f"The head at {self.head} does not drain this node: {first_line(error)}.",
                remedy="You can still end the node, but work that its islands have not handed over by then is lost.",
            ) from error

    def end(self) -> None:
        """Have the head end the raylet, and wait until it has: a head never learns of one that is killed, for minutes.

        SIGTERM would do as much, but is blocked there. A head that is away changes nothing.
        """
        os.environ.update(self.environment)
        try:
            cluster.end_node(cluster.client_of(self.head), self.id)
            psutil.Process(self.raylet).wait(ENDED_S)
        except psutil.NoSuchProcess:
            return
        except Exception as error:  # whatever Ray raises where its head is away, and a raylet that takes its time
            log.warning("The head did not end the node, which is killed: %s.", first_line(error))

    def works(self) -> bool:
        """Return whether an island or another actor has a process on the node."""
        return bool(workers_of(self.raylet))


def started_by(pid: int) -> LocalNode | None:
    """The node that this process, or one that it started, has begun; None before that, and once its raylet has ended."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return None
    return next((node for child in children if (node := node_of(child)) is not None), None)


def node_of(process: psutil.Process) -> LocalNode | None:
    """Return the node whose raylet this process is, or None."""
    with suppress(psutil.Error):
        if process.name() != RAYLET or process.status() == psutil.STATUS_ZOMBIE:
            return None
        words = [word.lstrip("-").replace("-", "_", 1).partition("=") for word in process.cmdline()[1:]]
        options = {name.replace("-", "_"): value for name, equals, value in words if equals}
        environment = {name: value for name, value in process.environ().items() if name.startswith(RAY_PREFIX)}
        if options.get("node_id") and options.get("gcs_address"):
            name = options.get("node_name", "")
            return LocalNode(process.pid, options["node_id"], name, options["gcs_address"], environment)
    return None


def refuse_unfit_certificates(options: argparse.Namespace) -> None:
    """Raises ConfigurationError where head and machine would not understand, or not trust, each other."""
    host, port = head_of(options.address)
    if options.certificates is not None:
        folders.refuse_unfit(options.certificates, options.own_address)
        peer.refuse_foreign(host, port, options.certificates)
    elif peer.speaks_tls(host, port):
        raise ConfigurationError(
            detail=f"The head at {options.address} speaks TLS, and this machine was given no certificates. Give its folder "
            "with --certificates (`atoll certificates issue` makes one); nothing was started here."
        )


def wait_for_head(address_now: Callable[[], tuple[str, str]], wait_s: float, is_told: Callable[[], bool]) -> None:
    """Return once a head listens at the head's address, or ``is_told`` returns True.

    ``address_now`` returns the address, or none and the reason. Raises InfrastructureError with the reason after ``wait_s``.
    """
    until, logged = time.monotonic() + wait_s, ""
    while not is_told():
        address, reason = address_now()
        if address:
            reason = _unreachable(*head_of(address))
            if not reason:
                return
        which = f"The head at {address} does not answer" if address else "There is no head to join"
        if time.monotonic() >= until:
            raise InfrastructureError(
                detail=f"{which}: {reason}.",
                remedy="Start it with `atoll head` on its machine, or correct the address; nothing was started here.",
            )
        if reason != logged:
            patience = "" if math.isinf(wait_s) else f" for up to {wait_s:.0f} s"
            log.info("%s yet: %s. Waiting%s.", which, reason, patience)
            logged = reason
        time.sleep(LOOK_S)


def _unreachable(host: str, port: int) -> str:
    """Return why no head can be reached there; empty if what listens may be one."""
    try:
        return peer.why_no_head(host, port, CONNECT_S)
    except ConnectionRefusedError:
        return "it refuses connections, so no head listens at that port"
    except TimeoutError:
        return f"no answer within {CONNECT_S:.0f} s, so it is off or a firewall drops the packets"
    except socket.gaierror as error:
        return f"its name cannot be resolved ({error.strerror})"
    except OSError as error:
        return error.strerror or str(error)


def last_words(path: Path) -> str:
    """Return the end of a log of ``ray start``, as a sentence."""
    try:
        text = ANSI.sub("", path.read_text(errors="replace"))
    except OSError:
        text = ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not RAY_ADVICE.search(line)]
    return f"Its last words: {' | '.join(lines[-3:]) or '(none)'}"


def head_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def own_address(options: argparse.Namespace) -> str:
    """This machine's, as the others are told: what was said, or that by which it reaches the head."""
    if options.own_address:
        return str(options.own_address)
    family, _, _, _, head = socket.getaddrinfo(*head_of(options.address), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:  # nothing is sent
        way.connect(head)
        return str(way.getsockname()[0])


def refuse_foreign_address(option: str, address: str) -> None:
    """Raise ConfigurationError unless this is an address of this machine that another can call."""
    here = ", ".join(sorted(own_addresses())) or "none"
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError as error:
        raise ConfigurationError(
            detail=f"{option} {address!r} is not an IP address. Give one of this machine's, which are {here}."
        ) from error
    try:
        if parsed.is_unspecified:
            raise OSError("it means all addresses")
        refuse_uncallable(address)
    except OSError as error:
        raise ConfigurationError(
            detail=f"{option} {address} is not an address of this machine. Give one of {here}."
        ) from error


def own_addresses() -> set[str]:
    """Return the addresses of this machine that other machines may reach."""
    listed = (each for interface in psutil.net_if_addrs().values() for each in interface)
    families = (socket.AF_INET, socket.AF_INET6)
    return {each.address for each in listed if each.family in families and "%" not in each.address} - {
        "127.0.0.1",
        "::1",
    }


def refuse_wrong_head(options: argparse.Namespace, wait_s: float, is_told: Callable[[], bool]) -> None:
    """Raise ConfigurationError where the head does not take the token, or has a build that this one may not join.

    Raises InfrastructureError if it answers no call within ``wait_s``. Returns early once ``is_told`` returns True.
    """
    command, until = python_process.module(cluster.__name__, options.address), time.monotonic() + wait_s
    while True:
        check = subprocess.run(command, env=environment(options), stdin=subprocess.DEVNULL, capture_output=True)
        if is_told():
            return
        if check.returncode in (0, cluster.TOKEN_REFUSED):
            break
        if time.monotonic() >= until:
            raise InfrastructureError(
                detail=f"What listens at {options.address} answers no call of a node: it is no head, or one that hangs.",
                remedy="Give the port that the head was started with, or restart the head; nothing was started here.",
            )
        log.info("The head at %s answers no call yet. Waiting.", options.address)
    if check.returncode == cluster.TOKEN_REFUSED:
        raise ConfigurationError(
            detail=f"The head at {options.address} refuses this machine: --token-file {options.token_file} is not the "
            "cluster's secret. Copy the file that the head was started with; nothing was started here."
        )
    head = release.Build.parse(check.stdout.decode(errors="replace").strip())
    if head is None:
        log.warning("The head at %s does not say which build of atoll it has.", options.address)
    elif reason := release.refusal(release.own(), head):
        raise ConfigurationError(
            detail=f"This machine cannot join {options.address}: {reason} Nothing was started here."
        )
    elif head != release.own():
        log.warning("The head has atoll %s, and this machine %s.", head.release, release.own().release)


def ray_start(options: argparse.Namespace, folder: Path, more: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """The command that begins the node, and stays with it. Its own folder: several may join on one machine."""
    labels = {GROUP_LABEL: options.group, REGION_LABEL: options.region, **json.loads(options.labels), **more}
    command = [
        *python_process.module(MODULE, "start", "--block", "--disable-usage-stats"),
        *("--address", options.address, "--temp-dir", str(folder), "--include-log-monitor", "false"),
        *("--labels", ",".join(f"{name}={value}" for name, value in labels.items())),
        *("--resources", options.resources, "--dashboard-agent-listen-port", "0"),
        *ports_of(options.ports),
        *socket_room.options(folder),
    ]
    for option, value in (
        ("--num-cpus", options.cpus),
        ("--num-gpus", options.gpus),
        ("--memory", options.memory_bytes),
        ("--node-name", options.name),
        ("--node-ip-address", options.own_address),
    ):
        command += [option, str(value)] if value not in (None, "") else []
    return command


def ports_of(text: str) -> list[str]:
    """Ray's options for its servers: the first two ports are the raylet's, the next is an agent's, the others workers'."""
    if not text:
        return ["--min-worker-port", "0", "--max-worker-port", "0"]
    first, last = map(int, text.split("-"))
    return [
        *("--node-manager-port", str(first), "--object-manager-port", str(first + 1)),
        *("--runtime-env-agent-port", str(first + 2)),
        *("--min-worker-port", str(first + 3), "--max-worker-port", str(last)),
    ]


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a node's processes. Clouds are asked for notices unless this environment says otherwise."""
    passed = {name: os.environ[name] for name in (notices.SOURCES_VARIABLE, notices.URL_VARIABLE) if name in os.environ}
    return {
        **built(os.environ, options.pass_environment),
        **ray_environment(
            Path(options.token_file).resolve(),
            options.partition_tolerance,
            certificates=options.certificates and options.certificates.resolve(),
        ),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(DRAIN_BY_RAY_S),
        notices.SOURCES_VARIABLE: notices.AUTO,
        **passed,
        **user_packages.variables(options.packages),
    }


def end(process: subprocess.Popen[bytes], folder: Path, node: LocalNode | None) -> None:
    """End the node, then kill all that it started: other signals are blocked there. ``folder`` marks its processes."""
    if node is not None:
        node.end()
    process.kill()
    process.wait()
    processes.kill_marked(FOLDER_MARKER, str(folder))


if __name__ == "__main__":
    main()
