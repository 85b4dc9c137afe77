"""What a simulation's figures assume, in sentences for the reader of its table: gangs, spares, and lines.

Every sentence gives the figure that the assumption costs. Pure: specification and outcomes in, text out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from orchestrator.simulation.bandwidth import GIGA, Traffic, exchange_of, needed
from orchestrator.simulation.fleet import FleetOutcome, FleetPlan, System


def as_gangs(plan: FleetPlan) -> FleetPlan | None:
    """Return the plan with one slice a learner, as this build's islands are; None if its learners are that already."""
    return None if _slices_of_a_learner(plan) <= 1 else replace(plan, chips_per_slice=plan.chips // plan.learners)


def of_fleet(plans: Sequence[FleetPlan], gangs: FleetOutcome | None) -> Iterator[str]:
    """Say what the fleet level's rows assume. ``gangs`` is the outcome of ``as_gangs`` of the decoupled plan, if any."""
    by_system = {plan.system: plan for plan in plans}
    if (plan := by_system.get(System.DECOUPLED)) is not None and gangs is not None:
        yield (
            f"decoupled: its learners of {_slices_of_a_learner(plan)} slices shrink by a slice and train on. An island of "
            "this build does not: it is one gang, and ends until all its slices are back. With islands as gangs goodput is "
            f"{100 * gangs.goodput:.1f} %."
        )
    if (plan := by_system.get(System.DATA_PARALLEL)) is not None:
        yield (
            "data-parallel: it restarts on a spare slice after every failure, and the spares never run out. Without spares "
            f"it would train only while all {plan.slice_count:,} slices are there: {100 * _all_there(plan):.1f} % of the "
            "time."
        )


def of_lines(traffic: Traffic, bits_per_second: float, *, simulated: bool) -> str:
    """Say whether a learner's line carries what decoupled sends, by the closed forms. Bits per second each way."""
    exchange = exchange_of("decoupled", traffic)
    room = min(exchange.slack, exchange.gap)
    line = (
        f"lines: {exchange.bits / GIGA:.3g} Gbit each way every {exchange.gap:.3g} s ({traffic.wire_bits:.3g} bits a "
        f"parameter), to be through within {max(0.0, room):.3g} s; on {bits_per_second / GIGA:g} Gbps that takes "
        f"{exchange.bits / bits_per_second:.3g} s."
    )
    ratio = needed(exchange, 1.0) / bits_per_second
    if room <= 0.0:
        line += " A round trip alone takes longer than overlap_steps allows, so fragments come too late: raise it."
    elif ratio > 1.0:
        line += (
            f" The line is too thin by {ratio:.2g} times: islands miss merges, and train on what is old. Use a codec of "
            "fewer bits (synchroniser.wire), a longer interval_steps, or more overlap_steps."
        )
    return line if simulated else f"{line} The fleet level does not simulate lines: level: protocol does."


def of_bits(traffic_bits: float, codec_bits: float) -> Iterator[str]:
    """Say that ``links.bits`` and the codec of ``synchroniser.wire`` differ."""
    if abs(traffic_bits - codec_bits) > 0.5:
        yield (
            f"lines: links.bits is {traffic_bits:g}, and the codec of synchroniser.wire has {codec_bits:.3g} bits a "
            "parameter. links.bits counts here; leave it out to go by the codec."
        )


def _slices_of_a_learner(plan: FleetPlan) -> int:
    return plan.slice_count // plan.learners


def _all_there(plan: FleetPlan) -> float:
    """The part of the time in which every slice is there, each failing and returning by itself."""
    lasts_s = plan.mtbi_chip / plan.chips_per_slice
    return float((lasts_s / (lasts_s + plan.return_time.mean)) ** plan.slice_count)
