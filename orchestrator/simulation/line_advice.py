"""Advice on H, τ, P and the codec for measured lines: which least change brings every fragment back in time.

By the formulas of ``bandwidth``. A job of ours never waits, so what counts is the part of fragments' slack that the line
leaves, for which the formulas of a system that does wait (``streaming-diloco``) have a figure: its compute utilisation u at
that bandwidth. ``UTILISATION_MIN`` of it is enough.

The knobs in the order of what changing them costs: the codec (what is lost is fed back), P (more and smaller merges), τ
(older parameters are merged), H (islands drift further between merges). The cheapest sufficient settings change the last
of these least, then the one before it, and so on. Refuses to know how lines were measured.

``meeting`` says what the formulas do not: by which grace and τ islands meet in merges although fragments travel for a
while. Simulated, not derived: docs/decisions/0163-a-slow-line-shuts-islands-out-of-merges-at-a-grace-of-one-step.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.parameters.codec.registry import CodecName, codec
from orchestrator.simulation.bandwidth import Traffic, exchange_of, needed, utilisation

UTILISATION_MIN = 0.95
COMPARED: tuple[CodecName, ...] = ("float32", "int8", "int4")
FEWER_BITS: tuple[CodecName, ...] = ("float32", "bfloat16", "int8", "int4")
FRAGMENTS_MAX, INTERVAL_MAX = 64, 1024
SYSTEM = "streaming-diloco"
WAY_STEPS_MAX, WAY_SLOTS_MAX = 1.0, 0.8
"""How long a fragment may travel, in steps and in the time between two due ones, where the simulated islands met."""
ALL_BUT_A_TENTH = 0.1
"""Of a step: so much longer than a whole step a fragment may travel there and back, and its window needs no step more."""
_SAMPLE = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """A measured line between the synchroniser's place and a node group."""

    name: str
    round_trip_s: float
    bits_per_second: float
    """Of its slower direction: each carries the same."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """What can be advised: H, τ, P, and one codec both ways."""

    interval_steps: int
    overlap_steps: int
    fragments: int
    codec: CodecName


@dataclass(frozen=True, slots=True)
class Demand:
    """What is trained: the model's size, the time of an inner step, and how many islands a line carries at once."""

    parameters: float
    step_s: float
    islands: Mapping[str, int]
    """By line; a line of none of these carries one."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The least grace and τ by which islands meet in merges, where a fragment travels for ``way_steps`` each way."""

    line: str
    way_steps: float
    grace_cap_steps: int
    overlap_steps: int


@dataclass(frozen=True, slots=True)
class Advice:
    """``settings`` are sufficient on every line, or None where none that may be advised is."""

    utilisations: dict[str, float]
    """As the job stands, by line."""
    settings: Knobs | None
    reached: dict[str, float]
    """With ``settings``, by line."""
    slowest: str
    """The line that decides."""
    needed_bits_per_second: float
    """What that line would have to carry for the job as it stands."""
    meeting: Meeting | None
    """On that line with ``settings``, or as the job stands; None where a fragment travels longer than is known."""

    def changes(self, current: Knobs) -> dict[str, Any]:
        """The knobs to turn, by their names in a specification; none where all is well, or nothing helps."""
        if self.settings is None:
            return {}
        names = {
            "interval_steps": "interval_steps",
            "overlap_steps": "overlap_steps",
            "fragments": "fragments",
            "codec": "wire",
        }
        return {
            name: getattr(self.settings, knob)
            for knob, name in names.items()
            if getattr(self.settings, knob) != getattr(current, knob)
        }


def bits_of(name: CodecName) -> float:
    """Bits per parameter, scales included."""
    return 8.0 * codec(name).data_bytes(_SAMPLE) / _SAMPLE


def utilisation_on(line: Line, demand: Demand, knobs: Knobs) -> float:
    """u of the module's docstring."""
    return utilisation(exchange_of(SYSTEM, _traffic(line, demand, knobs)), _share(line, demand))


def meeting(line: Line, demand: Demand, knobs: Knobs) -> Meeting | None:
    """None where a fragment travels for longer than WAY_STEPS_MAX steps, or as long as from one due fragment to the next:
    more are on their way then, and what helps is not known.
    """
    bits = demand.parameters / knobs.fragments * bits_of(knobs.codec)
    way_steps = (line.round_trip_s / 2 + bits / _share(line, demand)) / demand.step_s
    if way_steps > min(WAY_STEPS_MAX, WAY_SLOTS_MAX * knobs.interval_steps / knobs.fragments):
        return None
    cap = math.ceil(2 * way_steps + 1 - ALL_BUT_A_TENTH)
    return Meeting(line.name, way_steps, cap, max(knobs.overlap_steps, math.ceil(cap + 2 * way_steps)))


def way_steps_max(grace_cap_steps: float, overlap_steps: int) -> float:
    """How long a fragment may travel each way, in steps, for islands to meet in merges: ``meeting`` the other way round.

    Negative where they do not meet although it takes no time.
    """
    return min((grace_cap_steps - 1 + ALL_BUT_A_TENTH) / 2, (overlap_steps - grace_cap_steps) / 2)


def table(lines: Sequence[Line], demand: Demand, current: Knobs) -> list[dict[str, Any]]:
    """A row for each line: its utilisation with each codec of COMPARED, the other knobs as they are."""
    return [
        {"line": line.name, **{name: utilisation_on(line, demand, replace(current, codec=name)) for name in COMPARED}}
        for line in lines
    ]


def advised(lines: Sequence[Line], demand: Demand, current: Knobs) -> Advice:
    """The least change that is sufficient on every line; the settings as they are where these are."""
    before = {line.name: utilisation_on(line, demand, current) for line in lines}
    slowest = min(lines, key=lambda line: (before[line.name], _share(line, demand), line.name))
    exchange = exchange_of(SYSTEM, _traffic(slowest, demand, current))
    for knobs in _cheapest_first(current):
        after = {line.name: utilisation_on(line, demand, knobs) for line in lines}
        if all(u >= UTILISATION_MIN for u in after.values()):
            meet = meeting(slowest, demand, knobs)
            return Advice(before, knobs, after, slowest.name, needed(exchange, UTILISATION_MIN), meet)
    return Advice(before, None, {}, slowest.name, needed(exchange, UTILISATION_MIN), None)


def _traffic(line: Line, demand: Demand, knobs: Knobs) -> Traffic:
    return Traffic(
        parameters=demand.parameters,
        step_s=demand.step_s,
        fragments=knobs.fragments,
        interval_steps=knobs.interval_steps,
        overlap_steps=float(knobs.overlap_steps),
        wire_bits=bits_of(knobs.codec),
        round_trip_s=line.round_trip_s,
    )


def _share(line: Line, demand: Demand) -> float:
    """What one island gets of the line where all of its group send at once."""
    return line.bits_per_second / max(1, demand.islands.get(line.name, 1))


def _cheapest_first(current: Knobs) -> Iterator[Knobs]:
    """The current settings, then those that differ from them by more and more expensive knobs. P divides the model no finer
    than FRAGMENTS_MAX, and τ stays below H.
    """
    bits = bits_of(current.codec)
    codecs = [current.codec, *(name for name in FEWER_BITS if bits_of(name) < bits)]
    for interval in _doubled(current.interval_steps, INTERVAL_MAX):
        for overlap in _doubled(max(1, current.overlap_steps), interval - 1, first=current.overlap_steps):
            for fragments in _doubled(current.fragments, min(FRAGMENTS_MAX, interval)):
                for name in codecs:
                    yield Knobs(interval, overlap, fragments, name)


def _doubled(start: int, most: int, first: int | None = None) -> Iterator[int]:
    """``first``, then ``start`` and its doubles up to ``most``. At least the first, whatever ``most`` is."""
    yield start if first is None else first
    value = 2 * start if first in (None, start) else start
    while value <= most:
        yield value
        value *= 2
