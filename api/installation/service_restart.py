"""The fault ``kill_api``: the service is killed with SIGKILL, and is started again with the same options.

Nothing else would start it: whoever ran ``atoll up`` has gone home, and it is no supervisor. So a process that the service
leaves behind does what ``up`` would: the same command line and environment, a listening socket on the same port. A service
that something else started (a container, a unit of systemd) refuses, for that something would start it as well.

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

from api.installation.binding import Binding
from api.installation.detached import start_detached
from api.installation.home import Home
from api.installation.up import bound_listener
from orchestrator.errors import ConfigurationError, InfrastructureError
from orchestrator.system import python_process
from orchestrator.system.python_process import built

RestartService = Callable[[], None]
"""Ends the service soon after it returns; another one takes its place. Raises ConfigurationError where none would."""

GONE_WITHIN_S, HELD_WITHIN_S = 10.0, 60.0
LISTENER, HOST = "--listener", "--host"


def no_restart() -> None:
    """For a service that has no home folder of its own. Raises ConfigurationError."""
    raise ConfigurationError(detail="the service was not started by `atoll up`, so nothing here would start it again")


def restart_of(home: Home) -> RestartService:
    """Kills and restarts the service of ``home``, by a process that outlives it."""

    def begin() -> None:
        command = python_process.module("api.installation.service_restart", str(home.path))
        start_detached(command, home, environment=built(os.environ), folder=_of_up(home).folder)

    return begin


def kill_and_start_again(home: Home) -> None:
    """End the service of ``home`` with SIGKILL, and start it again; it answers within seconds.

    Returns once the new one holds the home, so that ``atoll down`` finds it.

    Raises ConfigurationError where there is none, or where it was not started by ``atoll up``.
    """
    service = _of_up(home)
    with suppress(psutil.NoSuchProcess):
        service.process.kill()
    deadline = time.monotonic() + GONE_WITHIN_S
    while home.running():
        if time.monotonic() > deadline:
            raise InfrastructureError(
                detail=f"The service (pid {service.process.pid}) does not end.", remedy="See its log."
            )
        time.sleep(0.02)
    _start(home, service)


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
        raise ConfigurationError(detail=f"no service runs in {home.path}")
    try:
        process = psutil.Process(address.pid)
        service = _RunningService(process, address.url, process.cmdline(), process.environ(), Path(process.cwd()))
    except psutil.NoSuchProcess as error:
        raise ConfigurationError(detail=f"the service of {home.path} ended just now") from error
    if LISTENER not in service.command:
        raise ConfigurationError(
            detail=f"the service (pid {address.pid}) was not started by `atoll up`: whatever started it would start it "
            "again, beside this. Kill it yourself, or take kill_api out of the plan"
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
