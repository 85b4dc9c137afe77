"""``kill_api``: the service of a home folder dies as by the kernel's hand, and is started again as it was.

Nothing else would start it: whoever ran ``atoll up`` has gone home, and it is no supervisor. So this does what ``up`` would:
the same command line and environment, a listening socket on the same port. A service that something else started (a
container, a unit of systemd) is refused, for that something would start it as well.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil

from api.binding import Binding
from api.home import Address, Home
from api.up import bound_listener
from orchestrator.errors import ConfigurationError, InfrastructureError

GONE_WITHIN_S = 10.0
LISTENER, HOST = "--listener", "--host"


def kill_and_start_again(home: Home | None, url: str) -> None:
    """The service at ``url`` was ended by SIGKILL, and another one is starting; it answers within seconds.

    Raises ConfigurationError where that service is not ``home``'s, or was not started by ``atoll up``.
    """
    address = home.address() if home is not None else None
    if home is None or address is None or address.url != url or not home.running():
        raise ConfigurationError(
            detail=f"kill_api strikes a service of this machine, by its home folder; that of {url} is not known here. "
            "Run the plan where the service runs, with --home."
        )
    process = psutil.Process(address.pid)
    command, environment, folder = process.cmdline(), process.environ(), process.cwd()
    if LISTENER not in command:
        raise ConfigurationError(
            detail=f"The service (pid {address.pid}) was not started by `atoll up`: whatever started it would start it "
            "again, beside the one of kill_api. Kill it yourself, or take kill_api out of the plan."
        )
    process.kill()
    deadline = time.monotonic() + GONE_WITHIN_S
    while home.running():
        if time.monotonic() > deadline:
            raise InfrastructureError(detail=f"The service (pid {address.pid}) does not end.", remedy="See its log.")
        time.sleep(0.02)
    _start(home, address, command, environment, folder)


def _start(home: Home, address: Address, command: list[str], environment: dict[str, str], folder: str) -> None:
    binding = Binding(host=command[command.index(HOST) + 1])
    port = int(address.url.rpartition(":")[2])
    with bound_listener(binding, port, None) as listener, home.log.open("ab") as log:
        command[command.index(LISTENER) + 1] = str(listener.fileno())
        subprocess.Popen(
            command,
            cwd=Path(folder),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(listener.fileno(),),
        )
