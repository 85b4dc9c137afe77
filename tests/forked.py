"""``atoll`` as a process of its own, forked from one that has imported it already.

A command's process costs its imports first, and tests run hundreds of commands. So a server is started once for each
process of pytest: it imports the command line and forks for each command, which then runs as ``atoll`` does:
with its own arguments, environment, folder, output and exit code. Only ``/proc/PID/environ`` and ``/proc/PID/cmdline`` tell
it from another. Tests that look there, or send signals, start a process themselves. A service that a command starts is
forked as well (``tests/forked_service.py``).

    request   two files, for output and errors; then a line of JSON {arguments, environment, folder, niceness}
    answer    a line with the exit code, negative for a signal, as of subprocess
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from orchestrator.system import python_process
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = "api.cli"
REQUEST_BYTES_MAX = 1 << 20


def atoll(
    *arguments: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What ``atoll ARGUMENTS`` printed, and its exit code. Raises TimeoutError after ``PATIENCE_S``."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        files = (output.fileno(), errors.fileno())
        code = exit_code(server(), files, arguments, str(folder), os.environ if environment is None else environment)
        output.seek(0)
        errors.seek(0)
        command = [PROGRAM, *arguments]
        return subprocess.CompletedProcess(command, code, output.read().decode(), errors.read().decode())


def shell_function() -> str:
    """The text of ``atoll`` as a function of bash, for a shell whose Python finds this module. A command may take long."""
    program = f"import os, sys; from {__name__} import exit_code as run; "
    program += "sys.exit(run(sys.argv[1], (1, 2), sys.argv[2:], os.getcwd(), os.environ, None))"
    return f'atoll() {{ {shlex.join([sys.executable, "-S", "-c", program, server()])} "$@"; }}'


def exit_code(
    path: str,
    files: tuple[int, int],
    arguments: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    patience_s: float | None = PATIENCE_S,
) -> int:
    """Of a command that the server at ``path`` has carried out, with these files for its output and errors."""
    request = {
        "arguments": arguments,
        "environment": dict(environment),
        "folder": folder,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(patience_s)
        line.connect(path)
        socket.send_fds(line, [b"\0"], files)
        line.sendall(json.dumps(request).encode() + b"\n")
        with line.makefile("rb") as answers:
            return int(answers.readline())


@cache
def server() -> str:
    """Where the server of this process listens. It ends with this process."""
    folder = tempfile.mkdtemp(prefix="atoll-forked-")  # a socket's path is short
    path = f"{folder}/socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    ours, theirs = socket.socketpair()  # its end is ours
    process = subprocess.Popen(
        python_process.module("tests.forked", str(listener.fileno()), str(theirs.fileno())),
        cwd=ROOT,
        env=python_process.cleaned(os.environ),
        pass_fds=(listener.fileno(), theirs.fileno()),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    listener.close()
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()
        os.unlink(path)
        os.rmdir(folder)

    atexit.register(end)
    return path


def serve(listener: socket.socket, owner: socket.socket) -> dict[str, Any] | None:
    """Returns each request in a process of its own, which is to carry it out, and None here when the owner has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with selectors.DefaultSelector() as selector:
        for one in (listener, owner):
            selector.register(one, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if owner in ready:
                return None
            line, _ = listener.accept()
            if os.fork() == 0:
                break
            line.close()
    listener.close()
    owner.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, (output, errors), _, _ = socket.recv_fds(line, 1, 2)
    with line.makefile("rb") as lines:
        request: dict[str, Any] = json.loads(lines.readline(REQUEST_BYTES_MAX))
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        with suppress(OSError):  # nobody waits any more
            line.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    line.close()
    for source, target in ((output, 1), (errors, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdout, sys.stderr = _reopened(sys.stdout, 1), _reopened(sys.stderr, 2)
    return request


def _reopened(stream: TextIO, descriptor: int) -> TextIO:
    """A stream for what the descriptor is now: the old one remembers whether it could seek in the file of before."""
    line_buffered = 1 if descriptor == 2 else -1
    return open(descriptor, "w", buffering=line_buffered, encoding=stream.encoding, errors=stream.errors, closefd=False)


def become(request: Mapping[str, Any]) -> None:
    """This process carries out the command, and ends with it."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    with suppress(PermissionError):  # only root may raise it
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    program = sys.modules["__main__"] = sys.modules[PROGRAM]  # whom it names in its help
    sys.argv = [str(program.__file__), *request["arguments"]]
    program.main()


def preload() -> None:
    """What commands import and build at their beginning, or on their way."""
    import typer.main

    import api.cli
    import api.client
    import api.installation.up
    from tests import forked_service

    api.installation.up.start_detached = forked_service.start_detached
    typer.main.get_command = cache(typer.main.get_command)
    typer.main.get_command(api.cli.app)
    gc.freeze()  # what is shared with each command stays so


def main(arguments: Sequence[str]) -> None:
    preload()
    listener, owner = (socket.socket(fileno=int(number)) for number in arguments)
    request = serve(listener, owner)
    if request is not None:
        become(request)


if __name__ == "__main__":
    main(sys.argv[1:])
