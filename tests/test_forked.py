"""A forked service looks from outside like the process that would have been started."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from orchestrator.system import python_process
from orchestrator.system.python_process import built
from tests import forked
from tests.api.installation import CONTROL, ROOT, Installation
from tests.waiting import wait_until


def server() -> psutil.Process:
    """The process that this one has services forked from."""
    (started,) = (child for child in psutil.Process().children() if forked.__name__ in child.cmdline())
    return started


def memory_of(process: psutil.Process) -> set[str]:
    """Where the C library is: in another place in each process that was started."""
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {line.split()[0] for line in maps if "/libc" in line}


def test_a_forked_service_shows_the_command_line_environment_and_session_of_a_started_one(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    installation.up()
    try:
        address = installation.home.address()
        assert address is not None
        service = psutil.Process(address.pid)
        command = python_process.module("api.serve", "--home", str(installation.home.path))
        assert service.cmdline()[: len(command)] == command
        assert CONTROL in service.cmdline()
        assert service.environ() == built({**os.environ, "COLUMNS": "160", "NO_COLOR": "1"}, ())
        assert (service.cwd(), os.getsid(service.pid)) == (str(ROOT), service.pid)
        assert memory_of(service) == memory_of(server()), "it was started, which costs five times as much"
        listening = [one for one in service.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        assert len(listening) == 1
    finally:
        assert "stopping the service" in installation.atoll("down")
    wait_until(lambda: not psutil.pid_exists(service.pid))
    assert "Traceback" not in installation.home.log.read_text()
