"""Fleet events as lines of the one tape schema, fast enough for the flat loop.

Responsible for: writing what ``tape.schema.encode_record`` would write for the same event and effects, to the letter,
without making them (a test and every replay compare). Refuses to decide anything, and to touch a disk: lines go to a sink in
blocks (``tape.storage.TapeWriter``).

A record comes to about 120 bytes; making the messages and encoding them would cost several times as much as these lines.
"""

from __future__ import annotations

from typing import Protocol

from orchestrator.core.vocabulary import Instant
from orchestrator.elastic.jobs import AWAIT, GROW, NOTHING, RESTART, SHRINK, STALLS
from orchestrator.simulation.fleet import FleetPlan
from orchestrator.tape.schema import FleetHeader

_BLOCK_MASK = 8192 - 1
"""Records per block, less one; a power of two, less one."""
_STALL = SHRINK | GROW | RESTART


class LineSink(Protocol):
    """Where blocks of encoded lines go; ``count`` is the number of the last record in them."""

    def append_lines(self, lines: bytes, count: int) -> None: ...


def fleet_header(plan: FleetPlan, seed: int) -> FleetHeader:
    return FleetHeader(f"fleet-{plan.system}-{seed}", plan.policy(), plan.plain(), seed)


class FleetTape:
    """Collects records and hands them on in blocks. ``flush`` at the end."""

    def __init__(self, plan: FleetPlan, sink: LineSink) -> None:
        learner_count = plan.policy().learner_count
        self.count = 0
        self._sink = sink
        self._lines: list[str] = []
        self._after_await = _stalls(learner_count, ",")
        self._alone = _stalls(learner_count, "")

    def failed(self, at: Instant, index: int, decided: int, learner: int) -> None:
        self.count = n = self.count + 1
        begin = f'{{"n":{n},"event":{{"type":"SliceFailed","at":{at!r},"slice":{index}}},"effects":['
        if decided & AWAIT:
            stall = self._after_await[decided & _STALL][learner]
            self._lines.append(f'{begin}{{"type":"AwaitSlice","slice":{index}}}{stall}]}}\n')
        else:
            self._lines.append(f"{begin}{self._alone[decided & _STALL][learner]}]}}\n")
        if not n & _BLOCK_MASK:
            self.flush()

    def returned(self, at: Instant, index: int, decided: int, learner: int) -> None:
        self.count = n = self.count + 1
        stall = self._alone[decided & _STALL][learner]
        self._lines.append(
            f'{{"n":{n},"event":{{"type":"SliceReturned","at":{at!r},"slice":{index}}},"effects":[{stall}]}}\n'
        )
        if not n & _BLOCK_MASK:
            self.flush()

    def ended(self, at: Instant, learner: int) -> None:
        self.count = n = self.count + 1
        self._lines.append(
            f'{{"n":{n},"event":{{"type":"StallEnded","at":{at!r},"learner":{learner}}},"effects":[]}}\n'
        )
        if not n & _BLOCK_MASK:
            self.flush()

    def visited(self, at: Instant, block: int, decided: int, learner: int, *, arrived: bool) -> None:
        kind = "BlockArrived" if arrived else "BlockLeft"
        stall = self._alone[decided & _STALL][learner]
        self.count += 1
        self._lines.append(
            f'{{"n":{self.count},"event":{{"type":"{kind}","at":{at!r},"block":{block}}},"effects":[{stall}]}}\n'
        )

    def flush(self) -> None:
        """Hand on what has been collected. Safe to call at any time."""
        if self._lines:
            self._sink.append_lines("".join(self._lines).encode(), self.count)
            self._lines.clear()


def _stalls(learner_count: int, separator: str) -> dict[int, list[str]]:
    """The effect that begins a stall, by its code and its learner; nothing for the code of none."""
    begun = {
        code: [f'{separator}{{"type":"BeginStall","learner":{n},"stall":"{stall}"}}' for n in range(learner_count)]
        for code, stall in STALLS.items()
    }
    return {NOTHING: [""] * learner_count, **begun}
