"""Regions of a wide area on this machine: a network namespace each, joined by a bridge, that can be cut off for real.

Packets of a region that is cut off vanish on the bridge's port, as on a broken long line: nobody is told, nothing is
refused, connections that stood stay open until somebody gives up. Traffic inside a region goes on. All of it is removed
by ``close``; names and addresses are drawn anew each time, so that runs beside each other do not meet.
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
        return {name: Place(self.address(name), ("nsenter", f"--net=/run/netns/{self._space(name)}")) for name in self._names}

    def address(self, name: str) -> str:
        return f"{self._net}.{self._names.index(name) + 1}"

    def cut(self, name: str) -> None:
        """From now on nothing gets into the region, or out of it."""
        self._bridge_port(name, DISABLED)

    def heal(self, name: str) -> None:
        self._bridge_port(name, FORWARDING)

    def close(self) -> None:
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                self._do("netns", "del", self._space(name))  # its end of the line goes with it, and so the other
        with suppress(subprocess.CalledProcessError):
            self._do("link", "del", self._mark)

    def _build(self) -> None:
        bridge = self._mark
        self._do("link", "add", bridge, "type", "bridge")
        self._do("addr", "add", f"{self._net}.254/24", "dev", bridge)
        self._do("link", "set", bridge, "up")
        for name in self._names:
            space, line = self._space(name), self._line(name)
            self._do("netns", "add", space)
            self._do("link", "add", line, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._do("link", "set", line, "master", bridge, "up")
            self._do("-n", space, "link", "set", "lo", "up")
            self._do("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._do("-n", space, "link", "set", "eth0", "up")

    def _bridge_port(self, name: str, state: str) -> None:
        command = [self._bridge, "link", "set", "dev", self._line(name), "state", state]
        subprocess.run(command, check=True, capture_output=True)

    def _space(self, name: str) -> str:
        return f"{self._mark}-{name}"

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
