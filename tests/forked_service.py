"""The service, forked from the command that starts it: its imports are there already, and are most of what a start costs.

It stands for ``api.installation.home`` in ``atoll up`` as tests type it, for a service that has no Ray behind it. The
fork has what a new process would have: its session, folder, files, output, environment and command line, the last two
also as seen from outside. Where that cannot be had, it becomes the real program: where the interpreter is to
have other variables, and where the kernel refuses. ``tests/attack/test_environment.py`` starts services without a fork.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import api.serve
from api.installation import home as installation_home
from api.installation.home import Home
from tests.waiting import wait_until

PR_SET_MM, PR_SET_MM_MAP = 35, 14
STAT_FIELDS_BEFORE = 3
"""Of ``/proc/self/stat``, up to the command's name: proc(5) counts fields from 1."""
MAP_FIELDS = (26, 27, 45, 46, 47)
"""The bounds of code and data, and where the heap begins; see proc(5)."""
STACK_FIELD = 28
OF_THE_INTERPRETER = ("PYTHON", "LD_")
SERVICE = "api.serve"
STARTED_WITH = dict(os.environ)
"""The environment of the process that commands are forked from. A command's own is another, and the command adds to it."""
SHOWN: list[object] = []
"""What this process shows of itself, as long as it lives."""


class Service:
    """The part of ``subprocess.Popen`` that those who start a service use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.kill(signal.SIGTERM)

    def wait(self, timeout: float = 0.0) -> None:
        """Wait until it has ended, whatever ``timeout`` a real process would be given."""
        wait_until(lambda: self.poll() is not None, "the end of the service")


def start_detached(
    command: Sequence[str],
    home: Home,
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
    listener: socket.socket,
) -> Service | subprocess.Popen[bytes]:
    if not dict(pairwise(command))["--control"].startswith("tests."):
        return installation_home.start_detached(
            command, home, environment=environment, folder=folder, listener=listener
        )
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            detach(home, folder, listener.fileno())
            become(command, environment)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return Service(pid)


def detach(home: Home, folder: Path | None, listener: int) -> None:
    os.setsid()
    os.umask(0o077)
    with open(os.devnull, "rb") as nothing, home.log.open("ab") as log:
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source.fileno(), target)
    os.set_inheritable(listener, True)
    os.closerange(3, listener)
    os.closerange(listener + 1, os.sysconf("SC_OPEN_MAX"))
    if folder is not None:
        os.chdir(folder)


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Nothing of the command that was forked goes on: its stack is never returned to."""
    if interpreter_of(environment) != interpreter_of(STARTED_WITH) or not show(command, environment):
        os.execve(command[0], list(command), environment)
    os.environ.clear()
    os.environ.update(environment)
    sys.modules["__main__"] = api.serve
    sys.argv = [str(api.serve.__file__), *command[command.index(SERVICE) + 1 :]]
    try:
        code = api.serve.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end, and multiprocessing in its forks
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def interpreter_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read before any code runs."""
    return {name: value for name, value in environment.items() if name.startswith(OF_THE_INTERPRETER)}


def show(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """``/proc`` has this command line and this environment of us. False where the kernel does not let us: prctl(2)."""
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = mmap.mmap(-1, len(words) + len(variables), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(words + variables)
    SHOWN.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    middle, end = start + len(words), start + len(words) + len(variables)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    bounds = [int(fields[number - STAT_FIELDS_BEFORE]) for number in MAP_FIELDS]
    stack = int(fields[STACK_FIELD - STAT_FIELDS_BEFORE])
    library = ctypes.CDLL(None)
    library.sbrk.restype = ctypes.c_void_p
    no_auxiliary_vector, same_program = (0, 0), 0xFFFF_FFFF
    shown = (start, middle, middle, end)
    layout = struct.pack("=12QII", *bounds, library.sbrk(0), stack, *shown, *no_auxiliary_vector, same_program)
    zero = ctypes.c_ulong(0)
    return bool(library.prctl(PR_SET_MM, PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), zero) == 0)
