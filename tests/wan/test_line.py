"""A line is as long, as wide and as lossy as it was told to be, also when that changes, and nothing is left of it.

What is too short or too fast is a fault at once. That a line is no longer and no slower than told is waited for, for a busy
machine may delay any one packet.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tests.wan.line import Line
from tests.wan.regions import Regions

DELAY_S, LOSS_RATIO, DATAGRAMS = 0.02, 0.1, 2_000
BITS_PER_SECOND, SENT_BYTES = 20e6, 4_000_000
BURSTS_BYTES = 1 << 18
"""Of what was sent this much may come at once: the bursts of two disciplines, and the sender's buffer."""
CLONE_NEWNET = 0x40000000


@contextmanager
def two(line: Line) -> Iterator[Regions]:
    regions = Regions(("here", "there"), {"here": line, "there": line})
    try:
        yield regions
    finally:
        regions.close()


def socket_in(regions: Regions, name: str, kind: socket.SocketKind) -> socket.socket:
    """One that belongs to the region, bound to its address: made by a thread that went there, and ended."""
    made: list[socket.socket] = []

    def make() -> None:
        space = os.open(f"/run/netns/{regions.space(name)}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(space, CLONE_NEWNET) == 0:
                made.append(socket.socket(socket.AF_INET, kind))
        finally:
            os.close(space)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    made[0].bind((regions.address(name), 0))
    return made[0]


def round_trip_s(regions: Regions) -> float:
    """Of a datagram there and back."""
    with (
        socket_in(regions, "here", socket.SOCK_DGRAM) as here,
        socket_in(regions, "there", socket.SOCK_DGRAM) as there,
    ):
        began = time.monotonic()
        here.sendto(b"there", there.getsockname())
        there.sendto(b"back", there.recvfrom(16)[1])
        here.recv(16)
        return time.monotonic() - began


def stream_s(regions: Regions) -> float:
    """How long SENT_BYTES took to be there."""
    with (
        socket_in(regions, "there", socket.SOCK_STREAM) as door,
        socket_in(regions, "here", socket.SOCK_STREAM) as here,
    ):
        door.listen(1)
        here.connect(door.getsockname())
        there, _ = door.accept()
        began, left = time.monotonic(), SENT_BYTES
        sending = threading.Thread(target=here.sendall, args=(bytes(SENT_BYTES),))
        sending.start()
        with there:
            while left:
                left -= len(there.recv(left))
        sending.join()
        return time.monotonic() - began


def arrived_count(regions: Regions) -> int:
    """How many of DATAGRAMS came through."""
    with (
        socket_in(regions, "here", socket.SOCK_DGRAM) as here,
        socket_in(regions, "there", socket.SOCK_DGRAM) as there,
    ):
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        before = regions.traffic("there").received_bytes
        for _ in range(DATAGRAMS):
            here.sendto(bytes(100), there.getsockname())
        frame_bytes, settled = 100 + 8 + 20 + 14, [before]
        while len(settled) < 5 or settled[-5] != settled[-1]:  # the same for a while: nothing is under way any more
            time.sleep(2 * DELAY_S)
            settled.append(regions.traffic("there").received_bytes)
        return (settled[-1] - before) // frame_bytes


def test_a_round_trip_takes_twice_both_delays_and_as_long_as_told_anew() -> None:
    with two(Line(delay_s=DELAY_S)) as regions:
        for delay_s in (DELAY_S, 3 * DELAY_S):
            for name in ("here", "there"):
                regions.set_line(name, Line(delay_s=delay_s))
            told_s = 4 * delay_s
            assert round_trip_s(regions) >= told_s
            wait_until(lambda told_s=told_s: round_trip_s(regions) < 1.2 * told_s, "no longer than told")


@pytest.mark.parametrize("delay_s", [0.0, DELAY_S])
def test_a_stream_has_the_rate_of_its_line_and_no_more(delay_s: float) -> None:
    with two(Line(BITS_PER_SECOND, delay_s)) as regions:
        least_s = (SENT_BYTES - BURSTS_BYTES) * 8 / BITS_PER_SECOND
        assert stream_s(regions) >= least_s
        wait_until(lambda: stream_s(regions) < 1.7 * least_s, "the line filled")
        regions.set_line("there", Line(BITS_PER_SECOND / 4, delay_s))
        assert stream_s(regions) >= 4 * least_s


def test_of_many_datagrams_as_many_are_lost_as_told_and_none_where_none_is() -> None:
    with two(Line(delay_s=DELAY_S)) as regions:
        # A machine on which the relay stands still for a while loses what its buffers do not hold: then they are sent anew.
        wait_until(lambda: arrived_count(regions) == pytest.approx(DATAGRAMS, abs=5), "none lost")
        regions.set_line("there", Line(delay_s=DELAY_S, loss_ratio=LOSS_RATIO))
        spread = (DATAGRAMS * LOSS_RATIO * (1 - LOSS_RATIO)) ** 0.5
        most = DATAGRAMS * (1 - LOSS_RATIO) + 5 * spread
        wait_until(lambda: most - 10 * spread <= arrived_count(regions) <= most, "as many lost as told")


def test_the_counters_of_both_regions_say_what_went_over_the_line() -> None:
    with two(Line(delay_s=DELAY_S)) as regions:
        before = {name: regions.traffic(name) for name in ("here", "there")}
        stream_s(regions)
        there, here = (regions.traffic(name) - before[name] for name in ("there", "here"))
        assert SENT_BYTES < here.sent_bytes < 1.1 * SENT_BYTES
        assert there.received_bytes == pytest.approx(here.sent_bytes, rel=0.01)  # neighbours' greetings among them


def test_nothing_is_left_of_lines_that_were_closed() -> None:
    with two(Line(1e9, DELAY_S)) as regions:
        spaces = [regions.space(name) for name in ("here", "there")]
        mark = spaces[0].partition("-")[0]
        assert len(list(Path("/sys/class/net").glob(f"{mark}*"))) == 3  # the bridge, and a port a region
        assert all(Path(f"/run/netns/{space}").exists() for space in spaces)
    wait_until(lambda: not list(Path("/sys/class/net").glob(f"{mark}*")), "devices gone")
    assert not any(Path(f"/run/netns/{space}").exists() for space in spaces)
    told = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert mark not in told
