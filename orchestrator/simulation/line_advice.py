"""Advice on H, τ, P and the codec for measured lines: the smallest change with which every fragment returns in time.

The formulas are those of ``bandwidth``. A job of this project never waits, so its utilisation says nothing about a line.
Instead the advice computes the compute utilisation u that a system which does wait (``streaming-diloco``) would have on the
same line: it measures how much of the fragments' slack the line leaves. ``UTILISATION_MIN`` is enough.

The settings, from the cheapest to change to the most expensive: the codec (its residue is fed back), P (more and smaller
merges), τ (older parameters are merged), H (islands drift further between merges). Among the sufficient combinations, the
advice changes H least, then τ, then P. How the lines were measured is up to the caller.

``meeting`` covers what the formulas do not: the grace window and the τ with which islands contribute to the same merges
although their fragments take time to travel. It was found by simulation, not derived:
docs/decisions/0163-a-short-grace-window-excludes-islands-on-slow-lines.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.core.vocabulary import Schedule
from orchestrator.parameters.codec.registry import CodecName, codec
from orchestrator.simulation.bandwidth import Traffic, exchange_of, needed, utilisation
from orchestrator.specification.sections import SynchroniserSection

UTILISATION_MIN = 0.95
COMPARED: tuple[CodecName, ...] = ("float32", "int8", "int4")
FEWER_BITS: tuple[CodecName, ...] = ("float32", "bfloat16", "int8", "int4")
FRAGMENTS_MAX, INTERVAL_MAX = 64, 1024
SYSTEM = "streaming-diloco"
WAY_STEPS_MAX, WAY_SLOTS_MAX = 1.0, 0.8
"""The longest travel times for which the simulated islands met in merges: in steps, and relative to the time between two
due fragments."""
TOLERANCE_STEPS = 0.1
"""A fragment may take this much longer than a whole number of steps there and back without needing a longer window."""
_SAMPLE = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """A measured line between the synchroniser and a node group."""

    name: str
    round_trip_s: float
    bits_per_second: float
    """The speed of the slower direction. Both directions carry the same amount."""


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """The settings that the advice can change: H, τ, P, and one codec for both directions.

    It leaves the period of routers as it is, if they are a fragment of their own. ``router_parameters`` are 0 if they are
    not known, before a job of a package's model has run.
    """

    interval_steps: int
    overlap_steps: int
    fragments: int
    codec: CodecName
    router_interval_steps: int | None = None
    router_parameters: float = 0.0

    @classmethod
    def of(cls, section: SynchroniserSection, router_parameters: float = 0.0) -> SyncSettings:
        """Return the settings of a specification. The codec is that of the direction with more bits."""
        codec = max((section.wire.up, section.wire.down), key=bits_of)
        return cls(
            section.interval_steps,
            section.overlap_steps,
            section.fragments,
            codec,
            section.router_interval_steps,
            router_parameters,
        )

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.fragments, self.interval_steps, self.router_interval_steps)

    def apart(self, parameters: float) -> float:
        """Return how many of so many parameters are in routers that have a fragment of their own."""
        return 0.0 if self.router_interval_steps is None else min(self.router_parameters, parameters)

    def fragment_parameters(self, parameters: float) -> float:
        """Return the size of each of the fragments that share H."""
        return (parameters - self.apart(parameters)) / self.schedule.shared_count

    def mean_interval_steps(self, parameters: float) -> float:
        """Return the steps between two due points of a parameter, as a mean over all of them."""
        part = self.apart(parameters) / parameters
        return (1.0 - part) * self.interval_steps + part * (self.router_interval_steps or 0)


@dataclass(frozen=True, slots=True)
class Demand:
    """The size of the model, the inner step time, and the number of islands that share each line."""

    parameters: float
    step_s: float
    islands: Mapping[str, int]
    """The number of islands by line. A line that is not listed has one."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The smallest grace window and τ with which islands meet in merges if a fragment travels for ``way_steps`` each way."""

    line: str
    way_steps: float
    grace_cap_steps: int
    overlap_steps: int


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice for one job on its lines."""

    utilisations: dict[str, float]
    """Utilisation by line with the current settings."""
    settings: SyncSettings | None
    """Settings that are sufficient on every line, or None if nothing that can be advised is."""
    reached: dict[str, float]
    """Utilisation by line with ``settings``."""
    slowest: str
    """The line with the lowest utilisation, which decides."""
    needed_bits_per_second: float
    """The speed that this line would need for the current settings."""
    meeting: Meeting | None
    """The windows needed on this line with ``settings``. None if a fragment travels for longer than was simulated."""

    def changes(self, current: SyncSettings) -> dict[str, Any]:
        """Return the settings to change, by their names in a specification. Empty if all is well or nothing helps."""
        if self.settings is None:
            return {}
        names = {
            "interval_steps": "interval_steps",
            "overlap_steps": "overlap_steps",
            "fragments": "fragments",
            "codec": "wire",
        }
        return {
            name: getattr(self.settings, field)
            for field, name in names.items()
            if getattr(self.settings, field) != getattr(current, field)
        }


def bits_of(name: CodecName) -> float:
    """Return the bits per parameter, scales included."""
    return 8.0 * codec(name).data_bytes(_SAMPLE) / _SAMPLE


def utilisation_on(line: Line, demand: Demand, settings: SyncSettings) -> float:
    """Return u of the module's docstring."""
    return utilisation(exchange_of(SYSTEM, traffic_of(line, demand, settings)), _share(line, demand))


def meeting(line: Line, demand: Demand, settings: SyncSettings) -> Meeting | None:
    """Return the windows with which islands meet in merges on this line, or None if that is not known.

    It is not known if a fragment travels for longer than WAY_STEPS_MAX steps, or for about as long as from one due fragment
    to the next: several are then in flight at once.
    """
    bits = settings.fragment_parameters(demand.parameters) * bits_of(settings.codec)
    way_steps = (line.round_trip_s / 2 + bits / _share(line, demand)) / demand.step_s
    if way_steps > min(WAY_STEPS_MAX, WAY_SLOTS_MAX * settings.interval_steps / settings.schedule.shared_count):
        return None
    cap = math.ceil(2 * way_steps + 1 - TOLERANCE_STEPS)
    return Meeting(line.name, way_steps, cap, max(settings.overlap_steps, math.ceil(cap + 2 * way_steps)))


def travel_steps_max(grace_cap_steps: float, overlap_steps: int) -> float:
    """Return how many steps a fragment may travel each way for islands to meet in merges: the inverse of ``meeting``.

    Negative if they would not meet even if fragments travelled in no time.
    """
    return min((grace_cap_steps - 1 + TOLERANCE_STEPS) / 2, (overlap_steps - grace_cap_steps) / 2)


def table(lines: Sequence[Line], demand: Demand, current: SyncSettings) -> list[dict[str, Any]]:
    """Return a row for each line: its utilisation with each codec of COMPARED and otherwise the current settings."""
    return [
        {"line": line.name, **{name: utilisation_on(line, demand, replace(current, codec=name)) for name in COMPARED}}
        for line in lines
    ]


def advised(lines: Sequence[Line], demand: Demand, current: SyncSettings) -> Advice:
    """Return the smallest change that is sufficient on every line, or the current settings if they are sufficient."""
    before = {line.name: utilisation_on(line, demand, current) for line in lines}
    slowest = min(lines, key=lambda line: (before[line.name], _share(line, demand), line.name))
    exchange = exchange_of(SYSTEM, traffic_of(slowest, demand, current))
    for settings in _cheapest_first(current):
        after = {line.name: utilisation_on(line, demand, settings) for line in lines}
        if all(u >= UTILISATION_MIN for u in after.values()):
            meet = meeting(slowest, demand, settings)
            return Advice(before, settings, after, slowest.name, needed(exchange, UTILISATION_MIN), meet)
    return Advice(before, None, {}, slowest.name, needed(exchange, UTILISATION_MIN), None)


def least_bits_per_second(line: Line, demand: Demand, current: SyncSettings) -> tuple[float, SyncSettings]:
    """Return the least speed with which any of the advised settings suffices, and these; infinity if none ever does."""
    each = [
        (needed(exchange_of(SYSTEM, traffic_of(line, demand, settings)), UTILISATION_MIN), settings)
        for settings in _cheapest_first(current)
    ]
    return min(each, key=lambda one: one[0])


def traffic_of(line: Line, demand: Demand, settings: SyncSettings) -> Traffic:
    """Return the traffic of one island with these settings."""
    return Traffic(
        parameters=demand.parameters,
        step_s=demand.step_s,
        fragments=settings.fragments,
        interval_steps=settings.interval_steps,
        overlap_steps=float(settings.overlap_steps),
        wire_bits=bits_of(settings.codec),
        round_trip_s=line.round_trip_s,
        router_parameters=settings.apart(demand.parameters),
        router_interval_steps=settings.router_interval_steps,
    )


def _share(line: Line, demand: Demand) -> float:
    """Return the speed that one island gets if all islands of its group send at once."""
    return line.bits_per_second / max(1, demand.islands.get(line.name, 1))


def _cheapest_first(current: SyncSettings) -> Iterator[SyncSettings]:
    """Yield the current settings, then more and more expensive changes. P is at most FRAGMENTS_MAX, τ below H and N."""
    bits = bits_of(current.codec)
    codecs = [current.codec, *(name for name in FEWER_BITS if bits_of(name) < bits)]
    for interval in _doubled(current.interval_steps, INTERVAL_MAX):
        overlap_max = min(interval, current.router_interval_steps or interval) - 1
        for overlap in _doubled(max(1, current.overlap_steps), overlap_max, first=current.overlap_steps):
            for fragments in _doubled(current.fragments, min(FRAGMENTS_MAX, interval)):
                for name in codecs:
                    yield replace(
                        current, interval_steps=interval, overlap_steps=overlap, fragments=fragments, codec=name
                    )


def _doubled(start: int, most: int, first: int | None = None) -> Iterator[int]:
    """Yield ``first`` (whatever ``most`` is), then ``start`` and its doubles up to ``most``."""
    yield start if first is None else first
    value = 2 * start if first in (None, start) else start
    while value <= most:
        yield value
        value *= 2
