"""Closed forms for the traffic of each system between datacentres: bits on the wire, their slack, and the cost of waiting.

At a due point, every system sends a part of the model and gets the merged part back. One set of formulas holds for all, per
datacentre and direction (links are full duplex):

    S = c·N·b/P         bits of one exchange: N parameters, b bits each, P fragments
    g = H·T/P           seconds from one due point to the next: interval H, inner step T
    d = (τ + e)·T − L   seconds that an exchange may take without waiting: overlap τ, early part e, round trip L
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

If routers are a fragment of their own that is due every N steps (τ < N < H), P counts the others, and S has the bits of
routers that are due in g on the average: S = b·((n − r)/P + r·g/(N·T)) for r of n parameters.

The early part e is the part of a step that is left when a fragment can be sent. With e = 2/3 a fragment leaves during the
backward pass, as gradients of data-parallel do. That gives 72 of the 75 cells of Streaming DiLoCo's Table 4 within the step
of its grid, and e = 0 gives 30 (``TABLE_4``). In this project e = 0: the inner step is one compiled program, and parameters
exist when it ends. So the advice on lines (``line_advice``) and the laboratory use e = 0. It makes no difference if
H/P ≤ τ, because then a line is needed all the time.

The published figures are 198 : 0.84 Gbps for 8 datacentres (arXiv:2604.21428; a ratio of 236, and about 61 without 4-bit).
With P = H = 24 and u = 0.98 these formulas give 237 and 61. Our assumptions, which are not published, are the two thirds, u,
and the block of 128: u = 0.90 gives 209 and 54, u = 0.99 gives 241 and 62; without overlap for data-parallel, u = 0.90 gives
1466. Absolute figures need N/T, which is not published either: 198 Gbps is 4.86e9 parameters per second of step time, for
example 5B at 1.03 s. "12B over four regions, 2 to 5 Gbps" is a 12B model with 16 bits at T = 1.6 to 4 s, or with 4 bits at
0.4 to 1.03 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from orchestrator.core.vocabulary import Duration, Schedule

SYSTEMS = ("data-parallel", "diloco", "streaming-diloco", "decoupled")
BACKWARD_RATIO = 2.0 / 3.0
"""The part of an inner step during which gradients are ready to be sent: backward is twice forward."""
FOUR_BITS = 4.0 + 16.0 / 128.0
PUBLISHED = {"data_parallel_gbps": 198.0, "decoupled_gbps": 0.84, "ratio": 198.0 / 0.84, "ratio_without_4_bit": 61.0}
GIGA = 1e9

# Table 4 of Streaming DiLoCo (arXiv:2501.18512): Gbps for each utilisation, two datacentres, H = 100, fragments of 3 layers.
TABLE_4_UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
TABLE_4_GRID = 10.0 ** (4.0 / 49.0)
"""The ratio of two neighbours among the 50 bandwidths from 0.1 to 1,000 Gbps of which each cell is one."""
TABLE_4: Mapping[str, tuple[float, Duration, int, Mapping[str, tuple[float, ...]]]] = {
    "1B": (
        1e9,
        0.1,
        8,
        {
            "data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
            "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
            "streaming-diloco": (1.4, 5.2, 9.1, 16.0, 28.1),
            "overlapped": (1.4, 4.3, 6.2, 9.1, 11.0),
            "overlapped, 4 bits": (0.4, 0.9, 1.7, 2.0, 3.0),
        },
    ),
    "10B": (
        1e10,
        0.8,
        16,
        {
            "data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
            "diloco": (1.7, 7.5, 16.0, 33.9, 104.8),
            "streaming-diloco": (1.7, 5.2, 9.1, 13.3, 19.3),
            "overlapped": (1.7, 3.6, 5.2, 6.2, 7.5),
            "overlapped, 4 bits": (0.4, 0.9, 1.4, 1.4, 1.7),
        },
    ),
    "100B": (
        1e11,
        4.9,
        36,
        {
            "data-parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
            "diloco": (3.0, 11.0, 23.3, 49.4, 184.2),
            "streaming-diloco": (2.4, 6.2, 9.1, 11.0, 19.3),
            "overlapped": (1.7, 3.6, 4.3, 5.2, 5.2),
            "overlapped, 4 bits": (0.5, 0.9, 1.1, 1.1, 1.4),
        },
    ),
}
"""By model: its parameters, seconds a step, fragments, and the published row of each system."""


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
    early_steps: float = 0.0
    router_parameters: float = 0.0
    router_interval_steps: int | None = None


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
        slack = t.early_steps * t.step_s - t.round_trip_s
        return Exchange(ring * t.parameters * t.gradient_bits, t.interval_steps * t.step_s, slack)
    count = Schedule(t.fragments, t.interval_steps, t.router_interval_steps).shared_count
    gap = t.interval_steps * t.step_s / count
    of_routers = t.router_parameters * t.interval_steps / count / (t.router_interval_steps or t.interval_steps)
    slack = (t.overlap_steps + t.early_steps) * t.step_s - t.round_trip_s
    bits = ((t.parameters - t.router_parameters) / count + of_routers) * t.wire_bits
    return Exchange(bits, gap, slack, waits=system != "decoupled")


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


def table_4(early_steps: float = BACKWARD_RATIO) -> Iterator[tuple[str, str, float, float, float]]:
    """Yield model, system, utilisation, and our and the published Gbps, for each cell of Streaming DiLoCo's Table 4."""
    for model, (parameters, step_s, fragments, published) in TABLE_4.items():
        for name, gbps in published.items():
            overlapped = name.startswith("overlapped")
            system = "streaming-diloco" if overlapped else name
            traffic = Traffic(
                parameters,
                step_s,
                learners=2,
                fragments=fragments,
                interval_steps=100,
                overlap_steps=1.0 if overlapped else 0.0,
                wire_bits=4.0 if name.endswith("4 bits") else 16.0,
                early_steps=early_steps,
            )
            for wanted, theirs in zip(TABLE_4_UTILISATIONS, gbps, strict=True):
                yield model, name, wanted, needed(exchange_of(system, traffic), wanted) / GIGA, theirs
