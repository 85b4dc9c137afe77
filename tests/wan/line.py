"""A region's line to the others: its rate by ``tc tbf``, its length and losses by a relay between two devices (``relay.c``).

The kernel's own delaying discipline (netem) is not everywhere. The relay is a small C program, built by gcc each time that
lines are; its devices are its own, so they vanish with it, and it ends when the process that started it does.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("relay.c")
BURST_BYTES_MIN, BURST_S = 1 << 16, 1e-3
"""What tbf lets out at once: one train of segments, or a millisecond of the line, whichever is more."""
QUEUE_S_MIN, QUEUE_BYTES_MIN = 0.05, 1 << 18
"""Of the queue before a line, as routers have it: a round trip of it, or this if that is less."""
DEVICE_QUEUE_FRAMES = 20_000
PER_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """``bits_per_second`` each way (0: no bound); ``delay_s`` one way; ``loss_ratio`` of frames each way.

    Between two regions both lines count: the round trip is twice the sum of their delays.
    """

    bits_per_second: float = 0.0
    delay_s: float = 0.0
    loss_ratio: float = 0.0

    @property
    def is_relayed(self) -> bool:
        return self.delay_s > 0.0 or self.loss_ratio > 0.0

    def shaping(self, round_trip_s: float = 0.0) -> list[str]:
        """The discipline of a device at either end of it, in ``tc``'s words; the queue is for that round trip."""
        burst_bytes = max(BURST_BYTES_MIN, round(self.bits_per_second / 8 * BURST_S))
        queue_s = max(QUEUE_S_MIN, round_trip_s, 2 * self.delay_s)
        limit_bytes = burst_bytes + max(QUEUE_BYTES_MIN, round(self.bits_per_second / 8 * queue_s))
        return [
            "tbf",
            "rate",
            f"{round(self.bits_per_second)}bit",
            "burst",
            f"{burst_bytes}",
            "limit",
            f"{limit_bytes}",
        ]

    def relay_words(self) -> list[str]:
        """Delay in microseconds and losses in a million, as the relay takes them."""
        return [f"{round(self.delay_s * 1e6)}", f"{round(self.loss_ratio * PER_MILLION)}"]


class RelayProgram:
    """The relay's program, built once for all lines of one set of regions."""

    def __init__(self, gcc: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-relay-")
        self.path = Path(self._folder.name) / "relay"
        subprocess.run([gcc, "-O2", "-o", str(self.path), str(SOURCE)], check=True, capture_output=True, text=True)

    def close(self) -> None:
        self._folder.cleanup()


class Relay:
    """One line's relay at work: two devices, which are there once this is made and gone after ``close``.

    It has a session of its own: who is ended by a terminal's Ctrl-C shall still be able to tidy up.
    """

    def __init__(self, program: RelayProgram, ends: tuple[str, str], line: Line, seed: int) -> None:
        command = [str(program.path), *ends, *line.relay_words(), str(seed)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise OSError(f"the relay of {ends[0]} ended with code {self._process.wait()}")

    def set(self, line: Line) -> None:
        """From now on frames wait and are lost by this line's figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(line.relay_words()) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
        self._process.wait()
