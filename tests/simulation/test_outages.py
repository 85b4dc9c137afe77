"""The one failure trace: seeded, in time order, Poisson, and the same for every system."""

from __future__ import annotations

import math
from itertools import islice, pairwise, takewhile
from random import Random

import pytest

from orchestrator.simulation.distributions import UNITS, Constant, Exponential
from orchestrator.simulation.fleet import FleetPlan, System
from orchestrator.simulation.fleet_world import FleetTape, FleetWorld, draw_outages, fleet_header
from orchestrator.tape.schema import decode_line
from tests.simulation.fleet_tapes import TextSink

MINUTE = Constant(60.0)


def _trace(seed, count, return_time=MINUTE):
    return list(islice(draw_outages(586, 150_000, UNITS["y"], return_time, Random(seed)), count))


def test_the_seed_decides_the_trace_and_a_longer_one_begins_alike():
    assert _trace(1, 500) == _trace(1, 900)[:500]
    assert _trace(1, 500) != _trace(2, 500)


def test_outages_come_in_time_order_and_end_after_they_began():
    trace = _trace(5, 5_000, Exponential(1800.0))
    assert all(before.at < after.at for before, after in pairwise(trace))
    assert all(outage.back_at >= outage.at for outage in trace)
    assert sum(outage.back_at - outage.at for outage in trace) / 5_000 == pytest.approx(1800.0, rel=0.06)


def test_interruptions_are_poisson_at_chips_over_mtbi():
    """Counts in windows of ten mean gaps: mean and variance both 10."""
    trace = _trace(9, 40_000)
    gap = UNITS["y"] / 150_000
    counts = [0] * 3_900
    for outage in takewhile(lambda o: o.at < 3_900 * 10 * gap, trace):
        counts[int(outage.at / (10 * gap))] += 1
    mean = sum(counts) / len(counts)
    variance = math.fsum((count - mean) ** 2 for count in counts) / len(counts)
    assert mean == pytest.approx(10.0, rel=0.02)
    assert variance == pytest.approx(10.0, rel=0.1)


def test_every_slice_is_hit_equally_often():
    hits = [0] * 586
    for outage in _trace(4, 58_600):
        hits[outage.slice] += 1
    chi_squared = sum((count - 100) ** 2 / 100 for count in hits)
    assert chi_squared < 585 + 4 * math.sqrt(2 * 585)


def test_all_systems_are_struck_by_the_same_outages():
    def struck(system, learners):
        plan = FleetPlan(300_000, 40_000.0, system, learners)
        sink = TextSink(fleet_header(plan, 3))
        for _ in FleetWorld(plan, 3, tape=FleetTape(plan, sink)).batches():
            pass
        records = [decode_line(line) for line in sink.sealed().splitlines()[1:-1]]
        return [(r.event.at, r.event.slice) for r in records if type(r.event).__name__ == "SliceFailed"]

    first = struck(System.DATA_PARALLEL, 1)
    assert len(first) > 300
    for system in System:
        assert struck(system, 4) == first
