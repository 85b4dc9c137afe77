"""Closed forms for the traffic of each system between datacentres: bits on the wire, their slack, and the cost of waiting.

At a due point, every system sends a part of the model and gets the merged part back. One set of formulas holds for all, per
datacentre and direction (links are full duplex):

    S = c·N·b/P         bits of one exchange: N parameters, b bits each, P fragments
    g = H·T/P           seconds from one due point to the next: interval H, inner step T
    d = τ·T − L         seconds that an exchange may take without waiting: overlap τ, round trip L
    u = g / (g + w),    w = max(0, S/B − d, S/B − g)      compute utilisation at bandwidth B; w is the wait at a due point
    B(u) = S / (min(d, g) + g(1/u − 1))                     … and solved for B

  system              P   H   τ          c              b
  data-parallel       1   1   2/3        2(M − 1)/M     gradients' bits
  diloco              P=1 H   0          2(M − 1)/M     gradients' bits
  streaming-diloco    P   H   τ          1              wire bits
  decoupled           P   H   τ          1              wire bits; never waits, so w only says how late fragments arrive

data-parallel overlaps its all-reduce with the backward pass, two thirds of a step at the usual ratio 1 : 2 of forward and
backward. A ring all-reduce sends 2(M − 1)/M of the reduced bits. A link to the synchroniser carries each fragment once each
way. A 4-bit codec with a 16-bit scale for every 128 values has 4.125 bits.

The published figures are 198 : 0.84 Gbps for 8 datacentres (arXiv:2604.21428; a ratio of 236, and about 61 without 4-bit).
With P = H = 24 and u = 0.98 these formulas give 237 and 61. Our assumptions, which are not published, are the two thirds, u,
and the block of 128: u = 0.90 gives 209 and 54, u = 0.99 gives 241 and 62; without overlap for data-parallel, u = 0.90 gives
1466. Absolute figures need N/T, which is not published either: 198 Gbps is 4.86e9 parameters per second of step time, for
example 5B at 1.03 s. "12B over four regions, 2 to 5 Gbps" is a 12B model with 16 bits at T = 1.6 to 4 s, or with 4 bits at
0.4 to 1.03 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.core.vocabulary import Duration

SYSTEMS = ("data-parallel", "diloco", "streaming-diloco", "decoupled")
BACKWARD_RATIO = 2.0 / 3.0
"""The part of an inner step during which gradients are ready to be sent: backward is twice forward."""
FOUR_BITS = 4.0 + 16.0 / 128.0
UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
PUBLISHED = {"data_parallel_gbps": 198.0, "decoupled_gbps": 0.84, "ratio": 198.0 / 0.84, "ratio_without_4_bit": 61.0}
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Traffic:
    """A model and its training, as far as its traffic depends on them. The defaults are the paper's main setting.

    ``parameters`` and ``step_s`` are not published together. These defaults give the published 198 Gbps.
    """

    parameters: float = 5e9
    step_s: Duration = 1.03
    learners: int = 8
    fragments: int = 24
    interval_steps: int = 24
    overlap_steps: float = 2.0
    gradient_bits: float = 16.0
    wire_bits: float = FOUR_BITS
    round_trip_s: Duration = 0.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange of ``bits`` each way, due every ``gap`` seconds. No learner waits if it takes at most ``slack``."""

    bits: float
    gap: Duration
    slack: Duration
    waits: bool = True


def exchange_of(system: str, traffic: Traffic) -> Exchange:
    """Return S, g and d of the module's docstring."""
    t, ring = traffic, 2.0 * (traffic.learners - 1) / traffic.learners
    if system in ("data-parallel", "elastic-data-parallel"):
        slack = BACKWARD_RATIO * t.step_s - t.round_trip_s
        return Exchange(ring * t.parameters * t.gradient_bits, t.step_s, slack)
    if system == "diloco":
        return Exchange(ring * t.parameters * t.gradient_bits, t.interval_steps * t.step_s, -t.round_trip_s)
    gap = t.interval_steps * t.step_s / t.fragments
    slack = t.overlap_steps * t.step_s - t.round_trip_s
    return Exchange(t.parameters * t.wire_bits / t.fragments, gap, slack, waits=system != "decoupled")


def needed(exchange: Exchange, utilisation: float) -> float:
    """Return the bits per second each way for this compute utilisation, or infinity if the round trip alone prevents it.

    ``decoupled`` never waits. It needs fragments to return in time, whatever ``utilisation`` is wanted.
    """
    stretch = exchange.gap * (1.0 / utilisation - 1.0) if exchange.waits else 0.0
    seconds = min(exchange.slack, exchange.gap) + stretch
    return exchange.bits / seconds if seconds > 0.0 else float("inf")


def utilisation(exchange: Exchange, bits_per_second: float) -> float:
    """Return stepping time over total time in the steady state."""
    if not exchange.waits:
        return 1.0
    takes = exchange.bits / bits_per_second
    return exchange.gap / (exchange.gap + max(0.0, takes - exchange.slack, takes - exchange.gap))


def mean_gbps(system: str, traffic: Traffic) -> float:
    """Return the mean traffic each way while the learner steps at full speed: the bandwidth used, not needed."""
    exchange = exchange_of(system, traffic)
    return exchange.bits / exchange.gap / GIGA


def table(traffic: Traffic, utilisations: Sequence[float] = UTILISATIONS) -> list[dict[str, Any]]:
    """Return a row for each system: the Gbps per datacentre, each way, for each utilisation (None if out of reach)."""
    rows = []
    for system in SYSTEMS:
        exchange = exchange_of(system, traffic)
        gbps = {f"{u:g}": _finite(needed(exchange, u) / GIGA) for u in utilisations}
        rows.append({"system": system, "mean_gbps": mean_gbps(system, traffic), "needed_gbps": gbps})
    return rows


def ratios(traffic: Traffic, at: float = 0.98) -> dict[str, float]:
    """Return data-parallel's need over decoupled's, with the wire's bits and with the gradients' bits."""
    dense = needed(exchange_of("data-parallel", traffic), at)
    sparse = needed(exchange_of("decoupled", traffic), at)
    plain = needed(exchange_of("decoupled", replace(traffic, wire_bits=traffic.gradient_bits)), at)
    return {
        "utilisation": at,
        "data_parallel_gbps": dense / GIGA,
        "decoupled_gbps": sparse / GIGA,
        "ratio": dense / sparse,
        "ratio_without_4_bit": dense / plain,
    }


def curve(
    system: str, traffic: Traffic, low_gbps: float, high_gbps: float, points: int = 80
) -> list[tuple[float, float]]:
    """Return (Gbps, utilisation) points, evenly spaced on a logarithmic scale."""
    exchange = exchange_of(system, traffic)
    grid = [low_gbps * (high_gbps / low_gbps) ** (n / (points - 1)) for n in range(points)]
    return [(gbps, utilisation(exchange, gbps * GIGA)) for gbps in grid]


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value
