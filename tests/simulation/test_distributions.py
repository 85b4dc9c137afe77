"""Distributions come from plain data, draw what they say from a seed, and say what is wrong with what they cannot read."""

from __future__ import annotations

import math
from random import Random

import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.simulation.distributions import Constant, Empirical, Exponential, LogNormal, Uniform, duration, parse

EXAMPLES = (
    (90, Constant(90.0)),
    ("90s", Constant(90.0)),
    ("250ms", Constant(0.25)),
    (" 30 min ", Constant(1800.0)),
    ("2h", Constant(7200.0)),
    ("1y", Constant(365.25 * 86400.0)),
    ({"exponential": "30min"}, Exponential(1800.0)),
    ({"uniform": ["1min", 300]}, Uniform(60.0, 300.0)),
    ({"lognormal": {"median": "10min", "sigma": 0.8}}, LogNormal(600.0, 0.8)),
    ({"samples": [18, "22.5s", "1min"]}, Empirical((18.0, 22.5, 60.0))),
)


@pytest.mark.parametrize(("plain", "expected"), EXAMPLES, ids=[str(plain) for plain, _ in EXAMPLES])
def test_plain_data_is_read_and_comes_back(plain, expected):
    assert parse(plain) == expected
    assert parse(expected.plain()) == expected
    assert parse(expected) is expected


@pytest.mark.parametrize(("plain", "expected"), EXAMPLES, ids=[str(plain) for plain, _ in EXAMPLES])
def test_draws_have_the_mean_that_is_claimed_and_follow_the_seed(plain, expected):
    random = Random(7)
    draws = [expected.draw(random) for _ in range(20_000)]
    mean = math.fsum(draws) / len(draws)
    spread = math.sqrt(math.fsum((draw - mean) ** 2 for draw in draws) / len(draws))
    assert abs(mean - expected.mean) <= 4.0 * spread / math.sqrt(len(draws)) + 1e-9
    assert min(draws) >= 0.0
    again = Random(7)
    assert [expected.draw(again) for _ in range(5)] == draws[:5]


def test_an_exponential_has_the_median_and_spread_of_one():
    random = Random(3)
    draws = sorted(Exponential(100.0).draw(random) for _ in range(20_000))
    assert draws[10_000] == pytest.approx(100.0 * math.log(2.0), rel=0.04)
    assert math.fsum(d * d for d in draws) / len(draws) == pytest.approx(2.0 * 100.0**2, rel=0.06)


def test_a_lognormal_has_its_median_and_quantiles():
    random = Random(3)
    draws = sorted(LogNormal(600.0, 0.8).draw(random) for _ in range(20_000))
    assert draws[10_000] == pytest.approx(600.0, rel=0.04)
    assert draws[int(0.8413 * 20_000)] == pytest.approx(600.0 * math.exp(0.8), rel=0.05)


def test_draws_that_pass_a_logarithm_are_whole_microseconds():
    """So that a digest does not hang on the last bit of a machine's mathematical library."""
    random = Random(11)
    for kind in (Exponential(1800.0), LogNormal(600.0, 0.8)):
        for draw in (kind.draw(random) for _ in range(200)):
            assert draw == round(draw, 6)


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ("30 minutes", "one of the units"),
        ("soon", "not a duration"),
        (True, "not a duration"),
        (None, "not a duration"),
        (-5, "a number from 0 to"),
        (float("nan"), "a number from 0 to"),
        ({}, "has 0 distributions"),
        ({"exponential": 1, "uniform": [1, 2]}, "has 2 distributions"),
        ({"weibull": 3}, "'weibull' is not a distribution"),
        ({"exponential": 0}, "must be more than 0"),
        ({"uniform": [5, 1]}, "smaller duration first"),
        ({"uniform": "1s"}, "Write two durations"),
        ({"lognormal": {"median": 5}}, "exactly median and sigma"),
        ({"lognormal": {"median": 5, "sigma": "1s"}}, "from 0 to 5"),
        ({"samples": []}, "not a list of durations"),
        ({"samples": [1, "soon"]}, "'soon' is not a duration"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_remedy(plain, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        parse(plain)
    assert "Write" in str(caught.value) or "must be" in str(caught.value)


def test_a_bare_number_in_text_is_seconds():
    assert duration("12.5") == 12.5
    assert duration("1e3 s") == 1000.0
