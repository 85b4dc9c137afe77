"""Advice for measured lines: sufficient by the closed forms, and by the cheapest change that is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from orchestrator.simulation import protocol
from orchestrator.simulation.line_advice import (
    UTILISATION_MIN,
    Demand,
    Line,
    SyncSettings,
    advised,
    bits_of,
    meeting,
    table,
    utilisation_on,
)
from orchestrator.simulation.world import World

SETTINGS = SyncSettings(interval_steps=24, overlap_steps=2, fragments=8, codec="float32")
DEMAND = Demand(1e9, 1.0, {})


def line(bits_per_second: float, round_trip_s: float = 0.05, name: str = "europe") -> Line:
    return Line(name, round_trip_s, bits_per_second)


def test_a_good_line_changes_nothing() -> None:
    advice = advised([line(1e11)], DEMAND, SETTINGS)
    assert advice.settings == SETTINGS
    assert advice.changes(SETTINGS) == {}


def test_fewer_bits_come_first() -> None:
    """1e9 parameters in 8 fragments, one every 3 s with 1.95 s of slack: 4 Gbit at 1 Gbit/s are late, 2 Gbit are not."""
    advice = advised([line(1e9)], DEMAND, SETTINGS)
    assert advice.utilisations["europe"] == pytest.approx(3.0 / (3.0 + 4.0 - 1.95))
    assert advice.changes(SETTINGS) == {"wire": "bfloat16"}
    assert advice.reached["europe"] >= UTILISATION_MIN


def test_routers_add_their_bits_and_keep_the_overlap_below_their_period() -> None:
    routers = replace(SETTINGS, fragments=9, router_interval_steps=6, router_parameters=0.01 * DEMAND.parameters)
    plain, apart = (utilisation_on(line(1e9), DEMAND, settings) for settings in (SETTINGS, routers))
    assert apart < plain, "the others are as large as before, and routers come in addition"
    few = replace(routers, router_parameters=0.0)
    assert utilisation_on(line(1e9), DEMAND, few) == pytest.approx(plain)
    advice = advised([line(6e7, round_trip_s=0.5)], DEMAND, routers)
    assert advice.settings is not None
    assert advice.settings.overlap_steps < 6
    assert advice.settings.router_interval_steps == 6


def test_the_slowest_line_decides_and_is_named() -> None:
    advice = advised([line(1e11, name="us-east"), line(2e8, name="asia")], DEMAND, SETTINGS)
    assert advice.slowest == "asia"
    assert advice.changes(SETTINGS)
    assert min(advice.reached.values()) >= UTILISATION_MIN


def test_islands_of_one_group_share_its_line() -> None:
    alone, crowded = (utilisation_on(line(2e9), Demand(1e9, 1.0, {"europe": n}), SETTINGS) for n in (1, 4))
    assert crowded < alone


def test_where_the_model_is_too_large_for_the_line_nothing_is_advised() -> None:
    advice = advised([line(1e3)], DEMAND, SETTINGS)
    assert advice.settings is None
    assert advice.changes(SETTINGS) == {}
    assert advice.needed_bits_per_second > 1e9


def test_the_interval_is_the_last_to_change() -> None:
    """Whatever is advised with a longer interval could not be had with the shorter ones and the fewest bits."""
    slow = line(1e7)
    advice = advised([slow], DEMAND, SETTINGS)
    assert advice.settings is not None
    assert advice.settings.interval_steps > SETTINGS.interval_steps
    shorter = replace(advice.settings, interval_steps=advice.settings.interval_steps // 2)
    for overlap in range(1, shorter.interval_steps):
        for fragments in (8, 16, 32, 64):
            other = replace(shorter, overlap_steps=overlap, fragments=fragments, codec="int4")
            assert utilisation_on(slow, DEMAND, other) < UTILISATION_MIN


@given(
    megabits=st.floats(1.0, 1e5),
    round_trip_s=st.floats(0.0, 0.5),
    parameters=st.floats(1e6, 1e10),
    step_s=st.floats(0.01, 10.0),
    interval=st.integers(2, 200),
    codec=st.sampled_from(["float32", "bfloat16", "int8", "int4"]),
)
def test_advice_is_sufficient_and_never_more_bits_shorter_rounds_or_less_overlap(
    megabits: float, round_trip_s: float, parameters: float, step_s: float, interval: int, codec: str
) -> None:
    current = SyncSettings(interval, 1, 8, codec)  # type: ignore[arg-type]  # it is one of them
    demand, slow = Demand(parameters, step_s, {}), line(1e6 * megabits, round_trip_s)
    advice = advised([slow], demand, current)
    assume(advice.settings is not None)
    settings = advice.settings
    assert settings is not None
    assert utilisation_on(slow, demand, settings) >= UTILISATION_MIN
    assert bits_of(settings.codec) <= bits_of(current.codec)
    assert settings.interval_steps >= interval
    assert settings.fragments >= 8
    assert 1 <= settings.overlap_steps < settings.interval_steps


@pytest.mark.parametrize(("way_steps", "cap", "overlap"), [(0.01, 1, 2), (0.25, 2, 3), (0.5, 2, 3), (0.8, 3, 5)])
def test_the_least_grace_and_overlap_by_which_islands_meet_do_so_in_the_simulated_world(
    way_steps: float, cap: int, overlap: int
) -> None:
    """Four islands whose speeds differ by five per cent each, and a fragment due every third step."""
    megabytes = 1.0
    demand = Demand(8 * megabytes * 1e6 / 4, 1.0, {})
    met = meeting(line(8e6 * megabytes / way_steps, round_trip_s=0.0), demand, SETTINGS)
    assert met is not None
    assert (met.way_steps, met.grace_cap_steps, met.overlap_steps) == (pytest.approx(way_steps), cap, overlap)

    def contributors_mean(grace_cap_steps: float, overlap_steps: int) -> float:
        policy = protocol.policy(4, fragments=8, overlap_steps=overlap_steps, grace_cap_steps=grace_cap_steps)
        plan = protocol.plan(
            [1 + 0.05 * index for index in range(4)],
            step_jitter_ratio=0.05,
            payload_bytes=round(1e6 * megabytes),
            bandwidth_bytes_per_s=(1e6 * megabytes / way_steps,) * 4,
        )
        return protocol.run(World(policy, plan, 0, checked=False), 100.0, 300.0, lambda *_: 1.0).contributors_mean

    if cap > 1:
        assert contributors_mean(float(cap), overlap) > 3.9
        assert contributors_mean(float(cap - 1), overlap) < 3.5
        assert contributors_mean(float(cap), overlap - 1) < 3.5


def test_of_a_fragment_that_travels_longer_than_is_known_nothing_is_said() -> None:
    assert meeting(line(1e8), DEMAND, SETTINGS) is None


def test_the_table_has_the_utilisation_of_each_codec() -> None:
    (row,) = table([line(5e8)], DEMAND, SETTINGS)
    assert row["line"] == "europe"
    assert row["float32"] < row["int8"] <= row["int4"] <= 1.0
    assert bits_of("int4") == pytest.approx(4.125, abs=0.5)
