"""Start and end one installation: the embedded cluster, and the service before it.

Responsible for the order (cluster, then service; the reverse when ending), for doing nothing twice, also when asked twice at
once, and for leaving no process behind when a start fails. It refuses to import what it starts: both are processes of their
own, so that the command line stays light and either may be killed and started again.

    up      python -m orchestrator.runtime.embedded up --home HOME --groups FILE
            python -m api.serve --home HOME --runs RUNS --listener FD --control …     (detached)
    down    SIGTERM to the service, then `… embedded down --home HOME`
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import psutil

from api.auth.code import refuse_unfit
from api.installation import store_history
from api.installation.binding import Binding
from api.installation.detached import start_detached, working_folder
from api.installation.home import CONFIGS, DATABASE_VARIABLE, Address, Home, roots_of
from orchestrator.errors import ConfigurationError, InfrastructureError, StoreUnavailable
from orchestrator.system import home_files, program_cache, python_process, signals, user_packages
from orchestrator.system.marks import marked_pids
from orchestrator.system.python_process import built, refuse_unset

CLUSTER_MODULE = "orchestrator.runtime.embedded"
RAY_CONTROL = "orchestrator.runtime.control_port:connect"
PORT_FIRST = 8470
PORT_COUNT = 100
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0
CLUSTER_STOP_TIMEOUT_S = 60.0
PATIENCE_S = 10.0
HEAD_TIMEOUT_S = 1.0

Say = Callable[[str], None]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Installation:
    """The options of `atoll up`. With another control port than Ray's, no cluster is started."""

    home: Home
    runs: Path
    groups: Path = CONFIGS / "groups.yaml"
    port: int | None = None
    control: str = RAY_CONTROL
    binding: Binding = field(default_factory=Binding)
    packages: tuple[str, ...] = ()
    """The packages whose code jobs may name, besides learners' own."""
    package_folders: tuple[str, ...] = ()
    """Where they are looked for, besides what is installed."""
    database: str | None = None
    checkpoints: tuple[str, ...] = ()
    """Roots below which jobs may read and write checkpoints; none leaves it to the service. ``data`` likewise, to read."""
    data: tuple[str, ...] = ()
    jobs_max: int | None = None
    """The most jobs that run at a time; None leaves it to the service."""
    new_store: bool = False
    """Where the home's store is lost or damaged, begin an empty one."""
    partition_tolerance_s: float | None = None
    """The time that a region may be cut off without Ray ending its islands; None leaves it to the cluster."""
    passed: tuple[str, ...] = ()
    """The names of environment variables that its processes get besides what they need."""

    @property
    def with_cluster(self) -> bool:
        return self.control == RAY_CONTROL


def up(wanted: Installation, say: Say) -> Address:
    """The cluster and the service run and answer. Says what it does; already up is said and changes nothing.

    Raises Conflict while another process starts or ends something in this home. A signal that ends it is an exception of
    ``orchestrator.system.signals``; what was started by then is ended.
    """
    wanted.binding.refuse_if_unfit()
    refuse_unfit(wanted.packages)
    roots_of(wanted.home.path, wanted.runs, wanted.checkpoints, wanted.data)
    refuse_unset(os.environ, wanted.passed)
    wanted = replace(wanted, package_folders=user_packages.resolved(wanted.package_folders))
    for package in wanted.packages:
        if not user_packages.is_there(package, wanted.package_folders):
            say(f"--allow {package}: it cannot be found here, and jobs that name it will fail. {user_packages.REMEDY}")
            if user_packages.is_in(package, "."):
                say(f"There is a {package} in the working folder. If that is meant, add --packages .")
    with signals.as_exceptions(), wanted.home.locked_for_change("up"):
        try:
            return start(wanted, say)
        except (KeyboardInterrupt, SystemExit):
            say("interrupted; what was started by then is ended")
            raise


def down(home: Home, say: Say) -> None:
    """No process of this installation is left. Safe to call when nothing runs. Raises Conflict as ``up``."""
    if not home.path.is_dir():
        say(f"nothing is up in {home.path}")
        return
    with home.locked_for_change("down"):
        end(home, say)


def start(wanted: Installation, say: Say) -> Address:
    """``up``, for whoever has locked the home."""
    home = wanted.home
    if home.discovered_address() is None and home.running():
        _await(home.discovered_address, PATIENCE_S)  # by hand it may be starting just now
    port = home.port_before()
    if home.running():
        # It may be starting, by hand: give it time before taking it for a stuck one. Not where its cluster has no head.
        patience_s = PATIENCE_S if not wanted.with_cluster or _head_listens(home) else 0.0
        if address := _await(lambda: _answering(home, timeout_s=PATIENCE_S), patience_s):
            if wanted.with_cluster:
                # a node of it may have died
                _cluster("up", home, *passed_of(wanted), *folders_of(wanted), passed=wanted.passed)
            say(f"already up at {address.url} (home {home.path})")
            return address
        say("the service runs, but its cluster does not answer it; starting both again")
        _end_service(home, say)
    if wanted.with_cluster and not wanted.groups.is_file():
        raise ConfigurationError(detail=f"The node groups file {wanted.groups} does not exist. Give one with --groups.")
    home.require_room()
    _look_for_store(wanted, say)
    if wanted.with_cluster and (problem := program_cache.problem(built(os.environ, wanted.passed))):
        say(f"warning: {problem}")
    had_cluster = has_cluster(home)
    try:
        if wanted.with_cluster:
            say(f"starting the embedded cluster ({wanted.groups})")
            options = ["--groups", str(wanted.groups), *tolerance_of(wanted), *passed_of(wanted), *folders_of(wanted)]
            _cluster("up", home, *options, passed=wanted.passed)
        address = _start_service(wanted, say, port)
        say(f"up at {address.url} (home {home.path}, runs {address.runs})")
    except BaseException:
        with signals.ignored():
            _end_service(home, say)
            if wanted.with_cluster and not had_cluster:
                _cluster("down", home)
        raise
    return address


def end(home: Home, say: Say) -> None:
    """``down``, for whoever has locked the home. Jobs that ran are over: the next service does not start them again."""
    had_cluster, lived = has_cluster(home), _head_listens(home)
    ran = _end_service(home, say)
    if lived or (ran and not had_cluster):  # else a loss of power, or whatever it was, ended them, and they go on
        try:
            home.taken_down.touch()
        except OSError as error:
            say(
                f"{home.taken_down} cannot be written ({error.strerror}): jobs that ran now will go on with the next `up`"
            )
    if had_cluster:
        say("ending the embedded cluster")
        _cluster("down", home)
        ran = True
    say("down" if ran else f"nothing is up in {home.path}")


# ── the service ───────────────────────────────────────────────────────────────────────────────────────────────────


def _look_for_store(wanted: Installation, say: Say) -> None:
    """Raises InfrastructureError where the home's store is lost, before anything is started; or has it begun anew."""
    if wanted.new_store:
        aside = store_history.begin_anew(wanted.home, wanted.database)
        say(f"an empty store is begun; what was there is {aside}" if aside else "no damaged store lies there")
    store_history.refuse_lost_store(wanted.home, wanted.database)


def _start_service(wanted: Installation, say: Say, before: int | None) -> Address:
    home = wanted.home
    home.forget_address()
    command = python_process.module("api.serve", "--home", str(home.path), "--runs", str(wanted.runs.resolve()))
    with bound_listener(wanted.binding, wanted.port, before) as listener:
        command += ["--listener", str(listener.fileno()), "--control", wanted.control, *options_of(wanted)]
        say(f"starting the service on port {listener.getsockname()[1]} (log {home.log})")
        database = {DATABASE_VARIABLE: wanted.database} if wanted.database else {}  # argv is seen by all
        environment = built(os.environ, wanted.passed) | database
        # until it holds the home, only this process knows of it
        with _begun(
            lambda: start_detached(command, home, environment=environment, listener=listener), STOP_TIMEOUT_S
        ) as process:
            listener.close()
            return _answer_of(process, home)


def _answer_of(process: subprocess.Popen[bytes], home: Home) -> Address:
    """The address of the service that this process is, once it answers. Raises InfrastructureError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            detail = (
                f"The service ended while starting (exit code {process.returncode}). Its last words:\n{tail(home.log)}"
            )
            raise InfrastructureError(detail=detail, remedy=f"\nThe whole log is {home.log}.")
        address = home.address()
        if address and address.pid == process.pid and (ready := _answering(home, timeout_s=START_TIMEOUT_S)):
            return ready
        time.sleep(0.05)
    detail = f"The service did not answer within {START_TIMEOUT_S:.0f} s. Its last words:\n{tail(home.log)}"
    raise InfrastructureError(detail=detail, remedy=f"\nThe whole log is {home.log}.")


@contextmanager
def _begun(begin: Callable[[], subprocess.Popen[bytes]], timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """The process that ``begin`` starts. An exception of the block ends it: by SIGTERM, after this time by SIGKILL."""
    process = None
    try:
        with signals.held():
            process = begin()
        yield process
    except BaseException:
        if process is not None:
            with signals.ignored():
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout_s)
                process.kill()
                process.wait()
        raise


def _end_service(home: Home, say: Say) -> bool:
    """The service process is gone, and its address with it. True if there was one."""
    if not home.running():
        home.forget_address()
        return False
    address = _await(lambda: _of_living(home), timeout_s=STOP_TIMEOUT_S)  # it may be starting just now
    if address is None:
        if not home.running():
            return False
        raise InfrastructureError(
            detail=f"A process holds {home.path}/service.lock, and none can be seen that serves this home.",
            remedy="It may be another user's, or another container's: find it with `fuser` on that file, and try again.",
        )
    say(f"ending the service (pid {address.pid})")
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(address.pid, number)
        except ProcessLookupError:
            break
        if _await(lambda: not home.running() and not _lives(address.pid), timeout_s=STOP_TIMEOUT_S):
            break
    home.forget_address()
    return True


def _lives(pid: int) -> bool:
    """Also while its last threads end: it holds the home no more, and is still a process of this installation."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _of_living(home: Home) -> Address | None:
    """Not what one that was killed has left behind."""
    address = home.discovered_address()
    return address if address is not None and _lives(address.pid) else None


def _answering(home: Home, timeout_s: float) -> Address | None:
    """The address of the service if its process lives and its cluster answers it.

    Raises StoreUnavailable where it lives, and its database does not do its part.
    """
    from api.client import Client  # late: `atoll --help` needs no HTTP

    address = home.address()
    if address is None:
        return None
    with Client(address.url, timeout_s=timeout_s, certificate=address.certificate) as client:
        try:
            client.ready()
        except StoreUnavailable:
            raise  # another process would find the same store
        except InfrastructureError:
            return None
    return address


def options_of(wanted: Installation) -> list[str]:
    """The service's options on its command line."""
    binding = wanted.binding
    options = ["--host", binding.host]
    if binding.certificate and binding.key:
        options += ["--certificate", str(binding.certificate.resolve()), "--key", str(binding.key.resolve())]
    if binding.insecure:
        options += ["--insecure"]
    for package in wanted.packages:
        options += ["--allow", package]
    options += folders_of(wanted)
    for kind, roots in (("--checkpoints", wanted.checkpoints), ("--data", wanted.data)):
        for root in roots:
            options += [kind, root]
    if wanted.jobs_max is not None:
        options += ["--jobs-max", str(wanted.jobs_max)]
    return options


def tolerance_of(wanted: Installation) -> list[str]:
    """The cluster's option for how long a cut it has to bear."""
    tolerance = wanted.partition_tolerance_s
    return [] if tolerance is None else ["--partition-tolerance-s", str(tolerance)]


def folders_of(wanted: Installation) -> list[str]:
    """The option, of the service and of the cluster, for where packages of jobs are."""
    return [text for folder in wanted.package_folders for text in ("--packages", folder)]


def passed_of(wanted: Installation) -> list[str]:
    """The cluster's options for what it gets of the caller's environment."""
    return [text for name in wanted.passed for text in ("--pass-environment", name)]


def bound_listener(binding: Binding, port: int | None, before: int | None) -> socket.socket:
    """A socket on the port asked for; else on the one it had before, so that addresses stay; else on the first free one.

    The service inherits it: a port that was only looked at may be gone when the service wants it.
    """
    had = [before] if before else []
    listener = binding.listen([port] if port is not None else chain(had, range(PORT_FIRST, PORT_FIRST + PORT_COUNT)))
    if listener:
        return listener
    ports = f"Port {port} is" if port is not None else f"The ports {PORT_FIRST} to {PORT_FIRST + PORT_COUNT - 1} are"
    raise InfrastructureError(detail=f"{ports} taken by other programs.", remedy="Give another with --port.")


# ── the cluster ───────────────────────────────────────────────────────────────────────────────────────────────────


def _cluster(verb: str, home: Home, *options: str, passed: tuple[str, ...] = ()) -> None:
    """Let the embedded cluster be started or ended; it prints its own progress."""
    command = python_process.module(CLUSTER_MODULE, verb, "--home", str(home.path), *options)
    environment = built(os.environ, passed)
    with _begun(
        lambda: subprocess.Popen(
            command,
            cwd=working_folder(home),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            umask=0o077,
            start_new_session=True,  # signals of this terminal are for this process, which passes them on
        ),
        CLUSTER_STOP_TIMEOUT_S,  # it ends its own children: it alone knows those that have no mark yet
    ) as process:
        code = process.wait()
    if code == 2:
        raise ConfigurationError(detail="The embedded cluster cannot be started like this; see the message above.")
    if code:
        detail = f"The embedded cluster could not be {'started' if verb == 'up' else 'ended'} (exit code {code})."
        raise InfrastructureError(detail=detail, remedy="See its messages above; `atoll down` cleans up what is left.")


def has_cluster(home: Home) -> bool:
    """Whether there is anything of a cluster of this home, by its file or by the marks of its processes."""
    return os.path.lexists(home.path / "cluster.json") or bool(marked_pids(home.path))


def _head_listens(home: Home) -> bool:
    """Whether the cluster lives; without a file that says where, whether any of its processes does."""
    try:
        host, _, port = json.loads(home_files.read(home.path / "cluster.json"))["address"].rpartition(":")
        socket.create_connection((host, int(port)), timeout=HEAD_TIMEOUT_S).close()
    except OSError:
        return False if (home.path / "cluster.json").is_file() else bool(marked_pids(home.path))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return bool(marked_pids(home.path))
    return True


def tail(path: Path, count: int = 15) -> str:
    try:
        with path.open(errors="replace") as lines:
            return "".join(f"    {text}" for text in deque(lines, maxlen=count)).rstrip()
    except OSError:
        return "    (no log)"


def _await(probe: Callable[[], Answer], timeout_s: float) -> Answer:
    """The answer of ``probe`` once it is true, or at the end of the time."""
    deadline = time.monotonic() + timeout_s
    while not (answer := probe()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer
