"""The first worker of a raylet stays as a fork server: it imports what actors need, and each worker is a fork of it.

The start of a worker is mostly imports: Ray, our own modules, and JAX in an island. A new worker of Ray hands its arguments,
environment and open files over to a fork, and ends; Ray learns the process number of the fork when that registers. Where the
fork server does not answer, or was started with other code, other limits or other variables that imports read, the worker
becomes one itself. It ends with its raylet, and after five minutes without a child. It is a child of the raylet, and forks
are its children, so a raylet's descendants are what works on its node.

JAX and PyTorch are imported beforehand only once a fork that says it is ready (``python_process.say_ready``) has loaded
them: on a node whose islands do not use them they would cost memory for nothing.

Forks share the memory of what was imported until they write to it. Nothing that is imported here may start a thread of
Python's or open a device; what an import sets in the environment, forks have, too.

A request is taken only from a child of the same raylet. Any process in the same network namespace can connect.

Source: docs/decisions/0227-workers-are-forks-of-one-process-of-their-node.md; measurements are there.
"""

from __future__ import annotations

import array
import gc
import hashlib
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from orchestrator.system import python_process

TITLE = "atoll fork server"
RAYLET = "raylet"
"""The name of the process of a node that starts its workers."""
AT_ONCE = ("ray._private.workers.default_worker", "orchestrator.runtime.synchroniser_actor", "learners.island")
WHEN_USED = {
    "/jaxlib/": ("jax", "learners.jax_trainer"),
    "/tensorstore/": ("grain",),
    "/torch/lib/": ("torch", "learners.torch_trainer"),
}
"""Modules that take long and that only some workers need, by a part of the path of a library that those have loaded.

Imported one by one while no worker waits, once a fork that is ready has that library. Islands import grain, and with it
tensorstore, with their first batch.
"""
READ_BY_IMPORTS = (
    *("RAY_", "PYTHON", "LD_", "OMP_", "OPENBLAS_", "MKL_"),
    *("JAX_", "XLA_", "CUDA", "NVIDIA_", "TPU_", "LIBTPU"),
)
"""Beginnings of the names of variables that imports read: only a worker with the same values is forked.

``RAY_JOB_ID`` is one: Ray reads it when it is imported, and a raylet ends a worker that says it is of a job that has ended.
So each service that was started has fork servers of its own.
"""
ANSWER_S, CHILDLESS_S = 30.0, 300.0
_PEER, _LENGTH, _FILES = struct.Struct("3i"), struct.Struct("!I"), (0, 1, 2)


def address_of(raylet: int, environment: Mapping[str, str]) -> str:
    """Return the abstract address of the fork server whose forks equal a worker of this raylet with this environment."""
    read = sorted((name, value) for name, value in environment.items() if name.startswith(READ_BY_IMPORTS))
    limits = [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    inherited = [os.getuid(), os.getgid(), os.nice(0), sorted(os.sched_getaffinity(0)), limits]
    identity = json.dumps([sys.prefix, sys.version, sys.flags, sys.path, _code(), read, inherited])
    return f"\0atoll-fork-{raylet}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def as_worker(arguments: list[str]) -> list[str] | None:
    """Return the arguments of the worker that this process is to be, or None if it is to end.

    It returns ``arguments`` where this process or a fork of it is that worker, those of a later worker in that one's fork,
    and None where a fork of another process has taken this one's place, or the raylet has ended.
    """
    raylet = os.getppid()
    if _name_of(raylet) != RAYLET:
        return arguments
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        address = address_of(raylet, os.environ)
        raylet_ended = os.pidfd_open(raylet)
    except (OSError, AttributeError):  # not Linux, a build that is being replaced, or a raylet that has just ended
        return arguments
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        os.close(raylet_ended)
        return None if _was_forked(address, raylet, arguments) else arguments
    return _Server(listener, raylet, raylet_ended).serve(arguments)


def _was_forked(address: str, raylet: int, arguments: list[str]) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(OSError):
        connection.settimeout(ANSWER_S)
        connection.connect(address)
        if not _is_child(connection, raylet):
            return False
        with open("/proc/self/oom_score_adj") as file:
            oom_score = file.read().strip()
        wanted = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "oom_score": oom_score,
        }
        body = json.dumps(wanted).encode()
        files = array.array("i", _FILES).tobytes()
        connection.sendmsg([_LENGTH.pack(len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        connection.sendall(body)
        return connection.recv(1) != b""
    return False


class _Server:
    def __init__(self, listener: socket.socket, raylet: int, raylet_ended: int) -> None:
        self._listener, self._raylet, self._raylet_ended = listener, raylet, raylet_ended
        self._pid, self._before = os.getpid(), dict(os.environ)
        self._ready_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        own = (*_FILES, listener.fileno(), raylet_ended, self._ready_event)
        self._inherited = {int(name) for name in os.listdir("/proc/self/fd")}.difference(own)
        self._unused, self._later = dict(WHEN_USED), deque[str]()

    def serve(self, arguments: list[str]) -> list[str] | None:
        """Fork the first worker and each later one. Return its arguments in a fork, and None once the raylet has ended."""
        self._listener.listen(128)
        for name in AT_ONCE:
            self._import(name)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a fork that has ended leaves nothing behind
        if not os.fork():
            self._leave()
            return arguments
        self._detach()
        wanted = select.poll()
        for file in (self._listener.fileno(), self._raylet_ended, self._ready_event):
            wanted.register(file, select.POLLIN)
        last_child_at = time.monotonic()
        while True:
            pause_s = 0.0 if self._later else CHILDLESS_S
            ready = {file for file, _ in wanted.poll(1e3 * pause_s)}
            if self._raylet_ended in ready:
                return None
            if self._ready_event in ready:
                os.eventfd_read(self._ready_event)
            if self._listener.fileno() not in ready:
                forks, now = self._forks(), time.monotonic()
                if forks != []:
                    last_child_at = now
                elif now >= last_child_at + CHILDLESS_S:
                    return None
                if self._later:
                    self._import(self._later.popleft())
                else:
                    self._look_at(forks or ())
                continue
            last_child_at = time.monotonic()
            connection, _ = self._listener.accept()
            with connection:
                forked = self._forked(connection)
            if forked is not None:
                return forked

    def _forked(self, connection: socket.socket) -> list[str] | None:
        """Fork for one request. Return the worker's arguments in the fork, and None in this process."""
        files: list[int] = []
        try:
            connection.settimeout(ANSWER_S)
            if not _is_child(connection, self._raylet):
                return None
            wanted, files = _received(connection)
            group = os.getpgid(_peer(connection)[0])
            if os.fork():
                return None
        except (OSError, ValueError, struct.error):
            return None  # a worker without an answer becomes one itself
        finally:
            if os.getpid() == self._pid:
                for file in files:
                    os.close(file)
        try:
            self._leave()
            self._become(wanted, files, group)
            connection.sendall(b"1")
        except BaseException:
            os._exit(1)
        arguments: list[str] = wanted["arguments"]
        return arguments

    def _look_at(self, forks: Iterable[str]) -> None:
        """Note the modules to import because one of these processes has loaded their library."""
        loaded = [_loaded_by(fork) for fork in forks] if self._unused else []
        for library in [library for library in self._unused if any(library in paths for paths in loaded)]:
            self._later += self._unused.pop(library)

    def _forks(self) -> list[str] | None:
        """Return the process numbers of the forks that live, or None if this kernel does not tell."""
        with suppress(OSError), open(f"/proc/self/task/{self._pid}/children") as file:
            return file.read().split()
        return None

    def _import(self, name: str) -> None:
        """A worker that needs what cannot be imported here fails by itself, and says so in its log."""
        with suppress(Exception):
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # a collection in a fork would write to all of it

    def _detach(self) -> None:
        """Leave title, process group and all inherited files to the first worker: a raylet waits until its pipes close."""
        os.setpgid(0, os.getpgid(self._raylet))
        for file in self._inherited:
            with suppress(OSError):
                os.close(file)
        nothing = os.open(os.devnull, os.O_RDWR)
        for place in _FILES:
            os.dup2(nothing, place)
        os.close(nothing)
        raylet: Any = sys.modules.get("ray._raylet")
        if raylet is not None:
            raylet.setproctitle(TITLE)

    def _leave(self) -> None:
        """Be a fork from now on, which has nothing of the fork server but its modules, and can tell it that it is ready."""
        python_process.ready_event = self._ready_event
        self._listener.close()
        os.close(self._raylet_ended)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()  # Python's own generator is seeded anew in every fork

    def _become(self, wanted: dict[str, Any], files: list[int], group: int) -> None:
        """Take the place of a process, also in its group: a raylet ends the group that it started when its worker dies."""
        os.setpgid(0, group)
        for file, place in zip(files, _FILES, strict=True):
            os.dup2(file, place)
            os.close(file)
        by_imports = {name: value for name, value in os.environ.items() if self._before.get(name) != value}
        os.environ.clear()
        os.environ.update(wanted["environment"] | by_imports)
        os.chdir(wanted["folder"])
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write(wanted["oom_score"])


def _code() -> list[tuple[str, int]]:
    """Return when each folder of modules was last changed, and each file of ours: a new build has a new fork server."""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    files = [
        os.path.join(folder, name)
        for package in ("orchestrator", "learners")
        for folder, _, names in os.walk(os.path.join(ours, package))
        for name in names
        if name.endswith((".py", ".so"))
    ]
    return [(path, os.stat(path).st_mtime_ns) for path in sorted([*files, *filter(os.path.isdir, sys.path)])]


def _name_of(process: int) -> str:
    with suppress(OSError), open(f"/proc/{process}/comm") as file:
        return file.read().strip()
    return ""


def _loaded_by(process: str) -> str:
    """Return the paths of the files in the memory of the process, as the kernel lists them."""
    with suppress(OSError), open(f"/proc/{process}/maps") as file:
        return file.read()
    return ""


def _is_child(connection: socket.socket, raylet: int) -> bool:
    """Return whether the process at the other end is this user's, and a child of the raylet."""
    process, user = _peer(connection)
    with open(f"/proc/{process}/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
    return bool(user == os.getuid() and parent == raylet)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    process, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return process, user


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, ancillary, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_SPACE(len(_FILES) * array.array("i").itemsize))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    (length,) = _LENGTH.unpack(head)
    body = bytearray()
    while len(body) < length and (piece := connection.recv(length - len(body))):
        body += piece
    return json.loads(body), list(files)
