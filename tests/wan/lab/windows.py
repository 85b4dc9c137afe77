"""One window of a fleet on its lines: steps, bytes by the devices' own counters, and what the formulas say of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from orchestrator.simulation.bandwidth import Exchange, exchange_of, utilisation
from tests.wan.lab.fleets import Fleet, lines_of
from tests.wan.lab.plan import MEGA, OURS, Plan
from tests.wan.line import Line
from tests.wan.regions import Traffic

HEADERS_RATIO = 1514 / 1448
"""What TCP, IP and Ethernet add to a full packet's payload."""


@dataclass(frozen=True, slots=True)
class Window:
    """``sent_`` and ``received_bytes_per_token``: over a region's line, by the tokens of that region's island.

    ``hub_bytes_per_token`` is what the synchroniser's region sends, by all tokens; all-reduces have none.
    ``merged_ratio``: tokens that reached the common parameters, of those trained meanwhile.
    """

    method: str
    megabits: float
    round_trip_s: float
    seconds: float
    steps: float
    tokens_per_s: float
    utilisation: float
    formula_utilisation: float
    sent_bytes_per_token: float
    received_bytes_per_token: float
    hub_bytes_per_token: float | None
    formula_bytes_per_token: float
    merged_ratio: float
    frame_loss_ratio: float = 0.0

    @property
    def merged_tokens_per_s(self) -> float:
        """Of what was trained in the window, at most: a backlog of an earlier one is not counted to it."""
        return self.tokens_per_s * min(1.0, self.merged_ratio)

    @property
    def line_bytes_per_token(self) -> float:
        """The mean of both directions, as the formulas have it."""
        return (self.sent_bytes_per_token + self.received_bytes_per_token) / 2


def window(fleet: Fleet, plan: Plan, megabits: float, round_trip_s: float, frame_loss_ratio: float = 0.0) -> Window:
    """Set the lines, let the exchanges that began before end, and count for a while."""
    for name, line in lines_of(plan, megabits, round_trip_s, frame_loss_ratio).items():
        fleet.regions.set_line(name, line)
    began = fleet.boundary(_settling(fleet.method, plan))
    before, tokens_before = counted(fleet, plan), fleet.tokens()
    ended = fleet.boundary(1)
    while ended - began < plan.window_s:
        ended = fleet.boundary(1)
    traffic = {name: after - before[name] for name, after in counted(fleet, plan).items()}
    tokens = fleet.tokens()
    seconds = ended - began
    steps = fleet.step_count(began, ended)
    own_tokens = steps * plan.tokens_per_step
    trained = max(1.0, tokens.trained - tokens_before.trained)
    hub = traffic.get(fleet.hub) if fleet.hub else None
    exchange = exchange_for(fleet.method, plan, round_trip_s)
    return Window(
        method=fleet.method,
        megabits=megabits,
        round_trip_s=round_trip_s,
        seconds=seconds,
        steps=steps,
        tokens_per_s=own_tokens * plan.regions / seconds,
        utilisation=steps * plan.step_s / seconds,
        formula_utilisation=utilisation(exchange, megabits * MEGA / HEADERS_RATIO),
        sent_bytes_per_token=fmean(traffic[name].sent_bytes for name in plan.names) / own_tokens,
        received_bytes_per_token=fmean(traffic[name].received_bytes for name in plan.names) / own_tokens,
        hub_bytes_per_token=None if hub is None else hub.sent_bytes / (own_tokens * plan.regions),
        formula_bytes_per_token=exchange.bits / 8 / (exchange.gap / plan.step_s) / plan.tokens_per_step,
        merged_ratio=(tokens.merged - tokens_before.merged) / trained,
        frame_loss_ratio=frame_loss_ratio,
    )


def exchange_for(method: str, plan: Plan, round_trip_s: float) -> Exchange:
    """The formulas' exchange. A ring's 2(M − 1) stages wait half a round trip each, one after the other.

    Of Streaming DiLoCo by a ring, which sends more than a link to a synchroniser does.
    """
    if method.startswith(OURS):
        return exchange_of("decoupled", plan.traffic(method, round_trip_s))
    exchange = exchange_of(method, plan.traffic(method, (plan.regions - 1) * round_trip_s))
    ring = 2.0 * (plan.regions - 1) / plan.regions
    return replace(exchange, bits=exchange.bits * ring) if method == "streaming-diloco" else exchange


def window_s_by_formula(method: str, plan: Plan, megabits: float, round_trip_s: float) -> float:
    """How long the shortest window of this method would take, with the exchange before it."""
    exchange = exchange_for(method, plan, round_trip_s)
    ratio = utilisation(exchange, megabits * MEGA / HEADERS_RATIO)
    return 2 * exchange.gap / ratio


def _settling(method: str, plan: Plan) -> int:
    """How many boundaries away what began on the former line has ended: for the service half an interval, one is τ steps."""
    if method.startswith(OURS):
        return plan.interval_steps // (2 * plan.overlap_steps)
    return plan.overlap_steps + 2 if method == "streaming-diloco" else 1


@dataclass(frozen=True, slots=True)
class Bystanders:
    """One region's line is cut, or nearly: what the other islands did meanwhile, and beforehand."""

    method: str
    what: str
    seconds: float
    steps_per_s_before: float
    steps_per_s: float
    longest_gap_s: float

    @property
    def pace_ratio(self) -> float:
        return self.steps_per_s / self.steps_per_s_before


def bystanders(fleet: Fleet, plan: Plan, megabits: float, *, cut: bool) -> Bystanders:
    """Strike the last region's line for a window, heal it, and wait until steps are made again."""
    for name, line in lines_of(plan, megabits, plan.round_trip_s).items():
        fleet.regions.set_line(name, line)
    victim = plan.names[-1]
    fleet.boundary(1)
    times = [time.monotonic()]
    time.sleep(plan.window_s)
    times.append(time.monotonic())
    if cut:
        fleet.regions.cut(victim)
    else:
        narrow = Line(megabits * MEGA * plan.narrow_ratio, plan.round_trip_s / 4)
        fleet.regions.set_line(victim, narrow)
    time.sleep(plan.window_s)
    times.append(time.monotonic())
    if cut:
        fleet.regions.heal(victim)
    fleet.regions.set_line(victim, Line(megabits * MEGA, plan.round_trip_s / 4))
    fleet.boundary(1)
    pace_before, pace = (
        fmean(len(ends) for ends in fleet.steps(since, until)[:-1]) / (until - since)
        for since, until in pairwise(times)
    )
    gaps = [
        max(after - before for before, after in pairwise([times[1], *ends, times[2]]))
        for ends in fleet.steps(times[1], times[2])[:-1]
    ]
    what = "cut" if cut else f"at {plan.narrow_ratio:.0%} of its rate"
    return Bystanders(fleet.method, what, times[2] - times[1], pace_before, pace, max(gaps))


def counted(fleet: Fleet, plan: Plan) -> Mapping[str, Traffic]:
    names = (*plan.names, fleet.hub) if fleet.hub else plan.names
    return {name: fleet.regions.traffic(name) for name in names}
