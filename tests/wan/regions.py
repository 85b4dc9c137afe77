"""Regions of a wide area on this machine: a network namespace each, joined by a bridge, that can be cut off for real.

Each has a line of a rate, a length and losses of its own (``line``); without one it is as fast as the machine.

Packets of a region that is cut off vanish on the bridge's port, as on a broken long line: nobody is told, nothing is
refused, connections that stood stay open until somebody gives up. (Addresses of the line are known beforehand: a machine
that asks for them in vain would tell its programs within seconds that there is no route.) Traffic inside a region goes on.
All of it is removed by ``close``; names and addresses are drawn anew each time, so that runs beside each other do not meet.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from orchestrator.runtime.ray_start import Place
from tests.programs import missing, required
from tests.wan.line import DEVICE_QUEUE_FRAMES, Line, Relay, RelayProgram

DISABLED, FORWARDING = "0", "3"
"""States of a bridge's port: it drops every frame, or passes it on."""
FIREWALL = ("priority", "1", "blackhole")
"""Behind the rule by which traffic inside a region finds its way."""
OUTSIDE = "02:00:00:00:00:fe"
NO_LINES: Mapping[str, Line] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a region's device has counted since it was made. An uncut train of segments counts its headers once."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes)


class Regions:
    """One region a name. This process, outside of all, reaches those that are not cut off.

    ``lines`` are the regions' own, by name. One that is to be given a delay or losses later must have some from the
    beginning. ``window_bytes`` is the most that each of a connection's buffers may hold in these regions, which bounds its
    rate over a long line; by default it is the machine's own. ``net`` is the beginning of all addresses, if they are to be
    those of a document.
    """

    def __init__(
        self,
        names: Iterable[str],
        lines: Mapping[str, Line] = NO_LINES,
        window_bytes: int | None = None,
        net: str | None = None,
    ) -> None:
        self._ip = _ip_as_root()
        self._bridge = required("bridge")
        self._tc = required("tc") if lines else ""
        required("nsenter")
        relayed = any(line.is_relayed for line in lines.values())
        self._program = RelayProgram(required("gcc")) if relayed else None
        self._relays: dict[str, Relay] = {}
        self._lines = dict(lines)
        self._window_bytes = window_bytes
        self._mark = f"a{secrets.token_hex(3)}"
        self._net = (
            net or f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"
        )  # set aside for such tests, RFC 2544
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

    def close_ports(self, name: str, first: int, last: int) -> None:
        """As a firewall at the region's edge: TCP to these ports does not get out of it, nor answers from them."""
        for side in ("dport", "sport"):
            self._do("-n", self.space(name), "rule", "add", "ipproto", "tcp", side, f"{first}-{last}", *FIREWALL)

    def open_ports(self, name: str) -> None:
        for _ in ("dport", "sport"):
            self._do("-n", self.space(name), "rule", "del", *FIREWALL)

    def set_line(self, name: str, line: Line) -> None:
        """From now on the region's line is this one; what is on its way stays on it."""
        assert line.is_relayed <= (name in self._relays), "a line without a relay can have neither delay nor losses"
        self._lines[name] = line
        if name in self._relays:
            self._relays[name].set(line)
        self._shape(name)

    def traffic(self, name: str) -> Traffic:
        """By the counters of the region's own device."""
        told = json.loads(self._do("-n", self.space(name), "-json", "-statistics", "link", "show", "dev", "eth0"))
        counted = told[0]["stats64"]
        return Traffic(counted["tx"]["bytes"], counted["rx"]["bytes"])

    def close(self) -> None:
        for relay in self._relays.values():
            relay.close()  # its devices go with it
        if self._program is not None:
            self._program.close()
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
            self._connect(name)
            self._do("link", "set", line, "master", bridge, "up")
            self._do("-n", space, "link", "set", "lo", "up")
            self._do("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._do("-n", space, "link", "set", "eth0", "up")
            self._know(name, bridge)
            for other in self._names:
                self._know(other, "eth0", "-n", space)
            self._do("-n", space, "neigh", "replace", f"{self._net}.254", "lladdr", OUTSIDE, "dev", "eth0")
            self._shape(name)
            self._widen(name)

    def _widen(self, name: str) -> None:
        if self._window_bytes is None:
            return
        settings = [f"/proc/sys/net/ipv4/tcp_{kind}mem" for kind in "rw"]
        for path in settings:
            least, usual, _ = Path(path).read_text().split()
            words = f"{least} {usual} {self._window_bytes}"
            command = [*self.places[name].enter, "sh", "-c", f'echo "{words}" > {path}']
            subprocess.run(command, check=True, capture_output=True, text=True)

    def _connect(self, name: str) -> None:
        """The two ends of the region's line: one on this side, and ``eth0`` in the region."""
        near, far = (
            self._line(name),
            ("name", "eth0", "address", self._hardware_address(name), "netns", self.space(name)),
        )
        line = self._lines.get(name, Line())
        if not line.is_relayed:
            self._do("link", "add", near, "type", "veth", "peer", *far)
            return
        assert self._program is not None
        other = f"{near}r"
        self._relays[name] = Relay(self._program, (near, other), line, seed=1 + self._names.index(name))
        self._do("link", "set", near, "txqueuelen", f"{DEVICE_QUEUE_FRAMES}")
        self._do("link", "set", other, "txqueuelen", f"{DEVICE_QUEUE_FRAMES}")
        self._do("link", "set", other, *far)

    def _shape(self, name: str) -> None:
        """The line's rate, at both its ends: of what leaves the region, and of what enters it."""
        line = self._lines.get(name, Line())
        if line.bits_per_second <= 0.0:
            return
        shaping = line.shaping(round_trip_s=2 * max(one.delay_s for one in self._lines.values()) + 2 * line.delay_s)
        for where in (["dev", self._line(name)], ["-n", self.space(name), "dev", "eth0"]):
            space, device = where[:-2], where[-2:]
            command = [self._tc, *space, "qdisc", "replace", *device, "root", *shaping]
            subprocess.run(command, check=True, capture_output=True, text=True)

    def _bridge_port(self, name: str, state: str) -> None:
        command = [self._bridge, "link", "set", "dev", self._line(name), "state", state]
        subprocess.run(command, check=True, capture_output=True)

    def _know(self, name: str, device: str, *where: str) -> None:
        self._do(*where, "neigh", "replace", self.address(name), "lladdr", self._hardware_address(name), "dev", device)

    def _hardware_address(self, name: str) -> str:
        return f"02:00:00:00:00:{self._names.index(name) + 1:02x}"

    def _line(self, name: str) -> str:
        return f"{self._mark}p{self._names.index(name)}"

    def _do(self, *arguments: str) -> str:
        return subprocess.run([self._ip, *arguments], check=True, capture_output=True, text=True).stdout


def _ip_as_root() -> str:
    """Where ``ip`` is; the test is skipped, or fails in CI, where namespaces cannot be made."""
    program = required("ip")
    if os.geteuid() != 0:
        missing("root, which network namespaces need,")
    return program
