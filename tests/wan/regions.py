"""Regions of a wide area on this machine: a network namespace each, joined by a bridge, that can be cut off for real.

Packets of a region that is cut off vanish on the bridge's port, as on a broken long line: nobody is told, nothing is
refused, connections that stood stay open until somebody gives up. (Addresses of the line are known beforehand: a machine
that asks for them in vain would tell its programs within seconds that there is no route.) Traffic inside a region goes on.
All of it is removed by ``close``; names and addresses are drawn anew each time, so that runs beside each other do not meet.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterable
from contextlib import suppress

from orchestrator.runtime.ray_start import Place
from tests.programs import missing, required

DISABLED, FORWARDING = "0", "3"
"""States of a bridge's port: it drops every frame, or passes it on."""
OUTSIDE = "02:00:00:00:00:fe"


class Regions:
    """One region a name. This process, outside of all, reaches those that are not cut off."""

    def __init__(self, names: Iterable[str]) -> None:
        self._ip = _ip_as_root()
        self._bridge = required("bridge")
        required("nsenter")
        self._mark = f"a{secrets.token_hex(3)}"
        self._net = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"  # set aside for such tests, RFC 2544
        self._names = list(names)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> dict[str, Place]:
        """Where a cluster's node of each region's name runs."""
        return {
            name: Place(self.address(name), ("nsenter", f"--net=/run/netns/{self.space(name)}")) for name in self._names
        }

    def address(self, name: str) -> str:
        return f"{self._net}.{self._names.index(name) + 1}"

    def space(self, name: str) -> str:
        """Its network namespace."""
        return f"{self._mark}-{name}"

    def cut(self, name: str) -> None:
        """From now on nothing gets into the region, or out of it."""
        self._bridge_port(name, DISABLED)

    def heal(self, name: str) -> None:
        self._bridge_port(name, FORWARDING)

    def close(self) -> None:
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                self._do("netns", "del", self.space(name))  # its end of the line goes with it, and so the other
        with suppress(subprocess.CalledProcessError):
            self._do("link", "del", self._mark)

    def _build(self) -> None:
        bridge = self._mark
        self._do("link", "add", bridge, "address", OUTSIDE, "type", "bridge")
        self._do("addr", "add", f"{self._net}.254/24", "dev", bridge)
        self._do("link", "set", bridge, "up")
        for name in self._names:
            space, line = self.space(name), self._line(name)
            self._do("netns", "add", space)
            end = ("name", "eth0", "address", self._hardware_address(name), "netns", space)
            self._do("link", "add", line, "type", "veth", "peer", *end)
            self._do("link", "set", line, "master", bridge, "up")
            self._do("-n", space, "link", "set", "lo", "up")
            self._do("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._do("-n", space, "link", "set", "eth0", "up")
            self._know(name, bridge)
            for other in self._names:
                self._know(other, "eth0", "-n", space)
            self._do("-n", space, "neigh", "replace", f"{self._net}.254", "lladdr", OUTSIDE, "dev", "eth0")

    def _bridge_port(self, name: str, state: str) -> None:
        command = [self._bridge, "link", "set", "dev", self._line(name), "state", state]
        subprocess.run(command, check=True, capture_output=True)

    def _know(self, name: str, device: str, *where: str) -> None:
        self._do(*where, "neigh", "replace", self.address(name), "lladdr", self._hardware_address(name), "dev", device)

    def _hardware_address(self, name: str) -> str:
        return f"02:00:00:00:00:{self._names.index(name) + 1:02x}"

    def _line(self, name: str) -> str:
        return f"{self._mark}p{self._names.index(name)}"

    def _do(self, *arguments: str) -> None:
        subprocess.run([self._ip, *arguments], check=True, capture_output=True, text=True)


def _ip_as_root() -> str:
    """Where ``ip`` is; the test is skipped, or fails in CI, where namespaces cannot be made."""
    program = required("ip")
    if os.geteuid() != 0:
        missing("root, which network namespaces need,")
    return program
