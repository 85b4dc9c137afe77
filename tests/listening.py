"""What listens, by ``ss``, held against the table of ports in docs/guide/security.md."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.api.installation import ROOT
from tests.programs import required

PAGE = ROOT / "docs" / "guide" / "security.md"
HEADING = "| process | listens for | port | where | guard |"
EVERYWHERE, OWN, LOOPBACK = "all", "its own", "loopback"
"""Kinds of addresses, as the table has them: of all interfaces, of its node, of the machine itself."""
PROGRAMS = {
    "-m api.serve": "service",
    "runtime_env/agent": "agent of runtime environments",
    "dashboard/agent": "dashboard's agent",
}
"""By a part of their command lines."""


@dataclass(frozen=True, slots=True)
class Row:
    """Of the table."""

    process: str
    where: str
    guard: str


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that takes connections, or datagrams."""

    protocol: str
    pid: int
    process: str
    host: str
    port: int

    @property
    def where(self) -> str:
        if self.host in ("*", "0.0.0.0", "[::]"):
            return EVERYWHERE
        address = ipaddress.ip_address(self.host.strip("[]").partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        return LOOPBACK if address.is_loopback else OWN


def documented() -> list[Row]:
    """The rows of the table."""
    lines = PAGE.read_text().splitlines()
    rows = []
    for line in lines[lines.index(HEADING) + 2 :]:
        if not line.startswith("|"):
            break
        processes, _, _, where, guard = (cell.strip() for cell in line.strip("|").split("|"))
        rows += [Row(process.strip(" `"), where, guard) for process in processes.split(",")]
    return rows


def listeners(pids: Iterable[int], enter: Sequence[str] = ()) -> list[Listener]:
    """Those of these processes, in the network that ``enter`` is of."""
    wanted = frozenset(pids)
    command = [*enter, required("ss"), "-H", "-l", "-t", "-u", "-n", "-p"]
    found = []
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        protocol, _, _, _, address, *_ = line.split()
        host, _, port = address.rpartition(":")
        for pid in {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & wanted:
            with suppress(psutil.NoSuchProcess):
                found.append(Listener(protocol, pid, process_name(psutil.Process(pid)), host, int(port)))
    return found


def process_name(process: psutil.Process) -> str:
    """As the table calls it: Ray's processes by their programs, workers by the class of their actor."""
    command = " ".join(process.cmdline())
    if command.startswith("ray::"):
        return command.removeprefix("ray::").partition(".")[0].split()[0]
    if not process.name().startswith("python"):  # a raylet's command line has those of its agents in it
        return process.name()
    return next((name for part, name in PROGRAMS.items() if part in command), process.name())


def undocumented(seen: Iterable[Listener], *, on_loopback: bool = False) -> list[Listener]:
    """Those that the table does not list, or that are more than it lists for a process of their kind.

    ``on_loopback`` is for a cluster all of which listens there, whatever the table says of others.
    """
    rows = Counter((row.process, LOOPBACK if on_loopback else row.where) for row in documented())
    extra = []
    of_process: Counter[tuple[int, str]] = Counter()
    for one in seen:
        of_process[one.pid, one.where] += 1
        if one.protocol != "tcp" or of_process[one.pid, one.where] > rows[one.process, one.where]:
            extra.append(one)
    return extra


def guards(one: Listener) -> set[str]:
    """What the table says to guard a listener of this kind."""
    return {row.guard for row in documented() if (row.process, row.where) == (one.process, one.where)}
