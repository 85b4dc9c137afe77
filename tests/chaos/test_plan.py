"""A plan says every problem at once; a right one is drawn from its seed alone."""

from __future__ import annotations

from itertools import pairwise
from math import fsum
from pathlib import Path

import pytest
import yaml

from orchestrator.chaos.plan import check_fleet, parse, parse_comparison
from orchestrator.chaos.runner import schedule
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from tests.chaos.plans import FLEET, RANDOM_KILLS, document, plan

SHIPPED = sorted((Path(__file__).parents[2] / "deploy" / "plans").glob("*.yaml"))


def problems_of(told: pytest.ExceptionInfo[InvalidJobSpec]) -> dict[str, str]:
    return {problem.path: f"{problem.message} {problem.remedy}" for problem in told.value.problems}


def test_every_problem_of_a_plan_is_told_at_once_with_its_remedy():
    faults = [
        {"kind": "burn", "target": {"random": 1}, "at": 3},
        {"kind": "kill", "target": {}, "every": "1ms"},
        {"kind": "stop", "target": {"name": "asia", "random": 1}, "at": [1, 999]},
        {"kind": "kill", "target": {"random": 1}, "at": 5, "every": 5, "duration": 3},
        {"kind": "slow", "target": {"random": 1}, "at": 5, "duration": 3, "payloads": 2},
        {"kind": "delay", "target": {"random": 1}, "at": 5, "payloads": 0},
        {"kind": "kill_synchroniser", "target": {"name": "asia"}, "at": 5},
        {"kind": "corrupt", "payloads": 1, "at": 5},
        {"kind": "kill", "target": {"random": 1}, "at": 5, "host": 0},
        {"kind": "kill_host", "target": {"random": 1}, "at": 5, "host": -1},
    ]
    with pytest.raises(InvalidJobSpec) as told:
        parse(document(*faults, colour="red", abort=["luck < 1"], objectives=["goodput_ratoi > 85 %", "be well"]))
    found = problems_of(told)
    assert found.keys() == {
        *("faults.0.kind", "faults.1", "faults.1.target", "faults.2.target", "faults.2.duration", "faults.2.at"),
        *("faults.3", "faults.3.duration", "colour", "abort.0", "objectives.0", "objectives.1"),
        *("faults.4.bytes_per_second", "faults.4.payloads", "faults.5.payloads", "faults.6.target", "faults.7.target"),
        *("faults.8.host", "faults.9.host"),
    }
    assert "goodput_ratio" in found["objectives.0"]
    assert "Write a figure" in found["objectives.1"]
    assert "about 2e+05 faults" in found["faults.1"]
    assert "goes with corrupt, delay, drop only, not with slow" in found["faults.4.payloads"]
    assert "goes with kill_host only, not with kill" in found["faults.8.host"]


def test_a_plan_names_no_host_that_an_island_lacks():
    strikes = [{"kind": "kill_host", "target": target, "at": 3} for target in ({"name": "asia"}, {"random": 1})]
    hosts = {island.island: 2 for island in FLEET} | {"europe": 1}
    check_fleet(plan(strikes[0] | {"host": 1}, strikes[1] | {"host": 0}, *strikes), FLEET, hosts)
    with pytest.raises(InvalidJobSpec) as told:
        check_fleet(plan(strikes[0] | {"host": 2}, strikes[1] | {"host": 1}), FLEET, hosts)
    found = problems_of(told)
    assert "asia has 2" in found["faults.0.host"]
    assert "europe has 1" in found["faults.1.host"]
    assert "at most 0, or leave it out" in found["faults.1.host"]


def test_a_plan_that_does_not_fit_the_fleet_is_refused_with_every_reason():
    misfit = plan(
        {"kind": "kill", "target": {"name": "mars"}, "at": 3},
        {"kind": "kill", "target": {"region": "moon"}, "at": 3},
        {"kind": "kill", "target": {"random": 3, "region": "us"}, "at": 3},
        blast_radius={"keep": 4},
    )
    with pytest.raises(InvalidJobSpec) as told:
        check_fleet(misfit, FLEET)
    paths = {"blast_radius.keep", "faults.0.target.name", "faults.1.target.region", "faults.2.target.random"}
    assert problems_of(told).keys() == paths


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_plans_are_right_and_named_as_their_files(path):
    assert parse(yaml.safe_load(path.read_text())).name == path.stem


def test_the_same_seed_gives_the_same_faults_and_another_one_others():
    first = schedule(plan(RANDOM_KILLS, seed=1), FLEET)
    assert first == schedule(plan(RANDOM_KILLS, seed=1), FLEET)
    assert first != schedule(plan(RANDOM_KILLS, seed=2), FLEET)


def test_instants_do_not_depend_on_the_fleet_and_an_entry_not_on_its_neighbours():
    alone, half = schedule(plan(RANDOM_KILLS), FLEET), schedule(plan(RANDOM_KILLS), FLEET[:2])
    assert [fault.at for fault in alone] == [fault.at for fault in half]
    beside = {"kind": "stop", "target": {"region": "us"}, "at": [7, 9], "duration": 1}
    with_another = schedule(plan(RANDOM_KILLS, beside), FLEET)
    assert [fault for fault in with_another if fault.kind == "kill"] == list(alone)
    assert [(fault.at, fault.island) for fault in with_another if fault.kind == "stop"] == [
        (7.0, "us-east"),
        (7.0, "us-west"),
        (9.0, "us-east"),
        (9.0, "us-west"),
    ]


def test_poisson_faults_come_as_often_as_asked_and_strike_everybody():
    long = plan(RANDOM_KILLS | {"start": 1000, "until": 41_000}, duration=50_000)
    faults = schedule(long, FLEET)
    gaps = [after.at - before.at for before, after in pairwise(faults)]
    assert fsum(gaps) / len(gaps) == pytest.approx(20, rel=0.1)
    assert faults[0].at > 1000
    assert faults[-1].at < 41_000
    assert {fault.island for fault in faults} == {island.island for island in FLEET}


def test_every_begins_one_period_after_start_and_ends_before_until():
    regular = {"kind": "kill", "target": {"name": "asia"}, "every": "10s", "start": 5, "until": "45s"}
    assert [fault.at for fault in schedule(plan(regular), FLEET)] == [15.0, 25.0, 35.0]


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("a < 1", 0.5, True),
        ("a <= 1", 1.0, True),
        ("a > 85 %", 0.8, False),
        ("a < 1min", 61.0, False),
        ("a < 1", None, False),
    ],
)
def test_a_comparison_holds_or_not(text, value, holds):
    assert parse_comparison(text).holds(parse_comparison(text).value_in({"a": value})) is holds


def test_a_figure_may_lie_inside_another_and_text_is_none():
    assert parse_comparison("a.b < 1").value_in({"a": {"b": 0.25}}) == 0.25
    assert parse_comparison("a.b < 1").value_in({"a": None}) is None
    assert parse_comparison("a < 1").value_in({"a": "1"}) is None
    with pytest.raises(ConfigurationError, match="no limit"):
        parse_comparison("a < soon")
