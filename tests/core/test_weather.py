"""A link's weather: how long nothing passes, what bytes cost, what becomes of the next payloads, and that all of it ends."""

from __future__ import annotations

import pytest

from orchestrator.core.vocabulary import Dose
from orchestrator.core.weather import Fate, LinkFault, Weather


def struck(kind: str, now: float = 100.0, **dose: float) -> Weather:
    weather = Weather()
    weather.strike(LinkFault(kind), Dose(**dose), now)
    return weather


def test_fair_weather_costs_nothing():
    weather = Weather()
    assert (weather.cut_s(1.0), weather.carriage_s(10**9, 1.0), weather.slow(1.0), weather.fate()) == (
        0.0,
        0.0,
        False,
        None,
    )


def test_a_cut_ends_by_itself_and_a_shorter_one_does_not_shorten_it():
    weather = struck("cut", duration=8.0)
    assert weather.cut_s(103.0) == 5.0
    weather.strike(LinkFault.CUT, Dose(duration=2.0), 101.0)
    assert weather.cut_s(103.0) == 5.0
    assert weather.cut_s(108.0) == 0.0


@pytest.mark.parametrize(
    ("size_bytes", "now", "seconds"),
    [(500, 100.0, 5.0), (500, 105.0, 5.0), (500, 107.0, 3.0), (500, 110.0, 0.0), (10**9, 100.0, 10.0)],
)
def test_a_slow_link_takes_its_time_but_not_beyond_its_end(size_bytes, now, seconds):
    assert struck("slow", duration=10.0, bytes_per_second=100.0).carriage_s(size_bytes, now) == seconds


def test_each_fate_is_met_once_in_the_order_it_was_struck():
    weather = struck("corrupt", payloads=1)
    weather.strike(LinkFault.DELAY, Dose(duration=2.0, payloads=2), 100.0)
    assert [weather.fate() for _ in range(4)] == [
        Fate(LinkFault.CORRUPT),
        Fate(LinkFault.DELAY, 2.0),
        Fate(LinkFault.DELAY, 2.0),
        None,
    ]


def test_cleared_weather_is_fair():
    weather = struck("cut", duration=8.0)
    weather.strike(LinkFault.SLOW, Dose(duration=8.0, bytes_per_second=1.0), 100.0)
    weather.strike(LinkFault.DROP, Dose(payloads=3), 100.0)
    weather.clear()
    assert (weather.cut_s(101.0), weather.carriage_s(100, 101.0), weather.fate()) == (0.0, 0.0, None)
