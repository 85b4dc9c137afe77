"""The one failure trace that all systems share: which slice an interruption would hit, when, and when it would be back.

Responsible for: a trace that depends on the hardware and the seed only, so that differences between systems are the
systems' and not luck's. Refuses to know: learners, stalls, and whether anybody uses the slice at that moment. An outage
that strikes a slice out of use (missing already, or absorbed by a stall) is one that a system ignores: interruptions are
memoryless, so the rest of its trace is distributed as if that one had never been drawn.

Chips fail independently, each after an exponential time of mean MTBI; so the fleet's interruptions are a Poisson process of
rate chips/MTBI, each hitting any slice with equal probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from orchestrator.core.vocabulary import Duration, Instant
from orchestrator.simulation.distributions import Distribution


class Outage(NamedTuple):
    """At ``at`` a chip of ``slice`` is interrupted; the slice could be used again from ``back_at``."""

    at: Instant
    slice: int
    back_at: Instant


def draw_outages(
    slice_count: int, chips: int, mtbi_chip: Duration, return_time: Distribution, random: Random
) -> Iterator[Outage]:
    """Outages in time order, for ever. Take what lies before your end: a longer run sees the same ones first.

    Instants are whole microseconds, for the reason that ``distributions`` gives. One draw for the gap, one for the slice,
    then those of the return time.
    """
    gap_mean_us = mtbi_chip / chips * 1e6
    chance, log, draw = random.random, math.log, return_time.draw
    now_us = 0
    while True:
        now_us += int(-log(1.0 - chance()) * gap_mean_us) + 1
        at = now_us / 1e6
        yield Outage(at, int(chance() * slice_count), at + draw(random))
