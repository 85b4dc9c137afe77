"""Start a running service again with the same options: for the fault ``kill_api``, and for the token of its home.

``atoll up`` does not supervise the service. So the service leaves a process behind that restarts it as ``up`` would: with
the same command line, environment and port. A service that a supervisor started (a container, a systemd unit) refuses,
because the supervisor would start it as well.

A service makes sure as it starts that ``HOME/token`` holds an admin token (``auth.tokens``). So ``atoll up`` starts it again
if the file was lost or damaged; the jobs do not notice.

    python -m api.installation.service_restart HOME
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from api.installation.binding import Binding, bound_listener
from api.installation.home import Home, start_detached
from orchestrator.errors import AtollError, ConfigurationError, InfrastructureError, Unauthenticated
from orchestrator.system import python_process
from orchestrator.system.python_process import built

RestartService = Callable[[], None]
"""Ends the service soon after it returns, and starts another. Raises ConfigurationError if none would be started."""

GONE_WITHIN_S, HELD_WITHIN_S = 10.0, 60.0
ANSWER_S = 5.0
LISTENER, HOST = "--listener", "--host"


def no_restart() -> None:
    """Raise ConfigurationError: a service without a home folder is not restarted."""
    raise ConfigurationError(detail="the service was not started by `atoll up`, so atoll cannot restart it")


def restart_of(home: Home) -> RestartService:
    """Return a function that kills and restarts the service of ``home``, by a process that outlives it."""

    def begin() -> None:
        command = python_process.module("api.installation.service_restart", str(home.path))
        start_detached(command, home, environment=built(os.environ), folder=_of_up(home).folder)

    return begin


def kill_and_start_again(home: Home) -> None:
    """Kill the service of ``home`` with SIGKILL, and start it again; it answers within seconds.

    Returns once the new service holds the home, so that ``atoll down`` finds it. Raises ConfigurationError if there is no
    service, or if ``atoll up`` did not start it.
    """
    service = _of_up(home)
    with suppress(psutil.NoSuchProcess):
        service.process.kill()
    deadline = time.monotonic() + GONE_WITHIN_S
    while home.running():
        if time.monotonic() > deadline:
            raise InfrastructureError(
                detail=f"The service (pid {service.process.pid}) did not end after SIGKILL.", remedy="See its log."
            )
        time.sleep(0.02)
    _start(home, service)


def token_problem(home: Home) -> str:
    """Return what is wrong with ``HOME/token`` while the service runs; empty if the service takes it, or none answers."""
    from api.client import Client  # late: `atoll --help` needs no HTTP

    address, token, file = home.address(), home.token(), home.path / "token"
    if address is None or not home.running():
        return ""
    if token is None:
        return f"{file} {'holds no token' if file.exists() else 'is missing'}"
    with Client(address.url, token=token, timeout_s=ANSWER_S, certificate=address.certificate) as client:
        try:
            client.jobs(limit=1)
        except Unauthenticated:
            return f"{file} holds a token that the service does not accept"
        except AtollError:
            return ""
    return ""


def restore_token(home: Home, say: Callable[[str], None]) -> bool:
    """Start the service again if its home has lost its token, so that it writes another. Return True if that was needed."""
    problem = token_problem(home)
    if not problem:
        return False
    try:
        kill_and_start_again(home)
    except ConfigurationError:
        say(f"{problem}. Restart the service: it then writes another")
        return False
    say(f"{problem}; the service is restarted, and writes another")
    return True


@dataclass(frozen=True, slots=True)
class _RunningService:
    """A running service's process, and the command line, environment and folder it was started with."""

    process: psutil.Process
    url: str
    command: list[str]
    environment: dict[str, str]
    folder: Path


def _of_up(home: Home) -> _RunningService:
    address = home.address()
    if address is None or not home.running():
        raise ConfigurationError(detail=f"no service is running in {home.path}")
    try:
        process = psutil.Process(address.pid)
        service = _RunningService(process, address.url, process.cmdline(), process.environ(), Path(process.cwd()))
    except psutil.NoSuchProcess as error:
        raise ConfigurationError(detail=f"the service of {home.path} has just ended") from error
    if LISTENER not in service.command:
        raise ConfigurationError(
            detail=f"the service (pid {address.pid}) was not started by `atoll up`: its supervisor would restart it as "
            "well. Kill it yourself, or remove kill_api from the plan"
        )
    return service


def _start(home: Home, service: _RunningService) -> None:
    command = [*service.command]
    binding = Binding(host=command[command.index(HOST) + 1])
    port = int(service.url.rpartition(":")[2])
    with bound_listener(binding, port, None) as listener:
        command[command.index(LISTENER) + 1] = str(listener.fileno())
        started = start_detached(
            command, home, environment=service.environment, folder=service.folder, listener=listener
        )
    deadline = time.monotonic() + HELD_WITHIN_S
    while not home.running() and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    kill_and_start_again(Home(Path(sys.argv[1])))
