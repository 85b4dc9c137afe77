"""A simulation's specification: what is right is read, what is wrong is told at once, and the same seed gives the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator.errors import InvalidJobSpec
from orchestrator.simulation import run, spec
from orchestrator.simulation.distributions import Exponential
from orchestrator.simulation.fleet import System
from tests.hash_seeds import said_under

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {"duration": "6h", "fleet": {"chips": 100_000, "learners": 4, "mtbi_chip": "30d"}}


def test_the_example_is_read_with_units_and_defaults():
    parsed = spec.parse(yaml.safe_load((ROOT / spec.EXAMPLE).read_text()))
    assert parsed.duration == 6 * 3600.0
    assert parsed.fleet.return_time == Exponential(1800.0)
    assert (parsed.links.bandwidth, parsed.links.latency, parsed.links.parameters) == (5e9, 0.03, 12_000_000_000)
    plan = run.fleet_plan(parsed, System.DECOUPLED)
    assert (plan.chips, plan.learners, plan.step_s, plan.fragments) == (1_200_000, 8, 5.0, 24)


@pytest.mark.parametrize(
    ("said", "bits"), [("5Gbps", 5e9), ("800 Mbps", 8e8), ("1.5Gbit/s", 1.5e9), (1000, 1000.0), ("2.5e9", 2.5e9)]
)
def test_bandwidths_have_units(said, bits):
    assert spec.parse({**SMALL, "links": {"bandwidth": said}}).links.bandwidth == bits


def _problems(document):
    with pytest.raises(InvalidJobSpec) as caught:
        spec.parse(document)
    return {problem.path: str(problem) for problem in caught.value.problems}


def test_every_problem_is_told_at_once_with_a_remedy():
    problems = _problems(
        {
            "name": "not a name!",
            "colour": "red",
            "duration": "soon",
            "level": "both",
            "systems": ["diloco"],
            "fleet": {"chips": 12.5, "mtbi_chip": 0, "stall_down": {"gamma": 3}, "return_time": "3 parsecs"},
            "links": {"bandwidth": "fast"},
            "synchroniser": {"interval_steps": 4, "overlap_steps": 4},
        }
    )
    assert set(problems) == {
        "name",
        "colour",
        "duration",
        "level",
        "fleet.chips",
        "fleet.mtbi_chip",
        "fleet.stall_down",
        "fleet.return_time",
        "links.bandwidth",
        "synchroniser.overlap_steps",
    }
    for said in problems.values():
        assert any(word in said for word in ("Write", "Remove", "Change", "Add", "Lower")), said


@pytest.mark.parametrize(
    ("changes", "path", "remedy"),
    [
        ({"fleet": {"chips": 1000, "learners": 8}}, "fleet.chips", "at least 2048 chips"),
        ({"steps": {"speed_classes": [{"learners": 3}]}}, "steps.speed_classes", "add up to 4"),
        ({"synchroniser": {"quorum": 5}}, "synchroniser.quorum", "at most 4"),
        ({"synchroniser": {"adoption": "rebase", "staleness_max": 1}}, "synchroniser.staleness_max", "Set it to 0"),
        ({"synchroniser": {"adoption": "mix"}}, "synchroniser.adoption", "rebase or replace"),
        ({"synchroniser": {"router_interval_steps": 6}}, "synchroniser.router_interval_steps", "Leave it out"),
        ({"duration": "60d", "level": "both"}, "duration", "level: fleet"),
        ({"steps": {"step_time": 0}, "level": "both"}, "steps.step_time", "more than 0"),
        ({"world": {"job": "x"}}, "world", "Give only one"),
        (
            {"fleet": {**SMALL["fleet"], "scavenged": [{"chips": 512, "from": 9, "until": 5}]}},
            "fleet.scavenged.0",
            "later",
        ),
        (
            {"fleet": {**SMALL["fleet"], "scavenged": [{"chips": 1, "until": 5}]}},
            "fleet.scavenged.0.chips",
            "one slice",
        ),
    ],
)
def test_what_does_not_go_together_is_told(changes, path, remedy):
    assert remedy in _problems({**SMALL, **changes})[path]


def test_a_specification_of_nothing_says_what_it_needs():
    assert set(_problems({})) == {"duration", "fleet"}


def test_all_systems_are_simulated_under_the_same_failures():
    rows = {row["system"]: row for row in run.simulate(spec.parse(SMALL)).rows}
    goodput = {system: row["goodput"] for system, row in rows.items()}
    assert goodput["data-parallel"] < goodput["elastic-data-parallel"] < goodput["decoupled"]
    assert goodput["diloco"] < goodput["decoupled"]
    for row in rows.values():
        assert row["goodput"] + sum(row["badput"].values()) == pytest.approx(1.0)
    away = {system: row["badput"]["slice away"] for system, row in rows.items() if system != "data-parallel"}
    assert len({rows[s]["badput"]["stalled: shrinking"] for s in ("diloco", "streaming-diloco")}) == 1
    assert max(away.values()) < 2 * min(away.values()), "the same slices are away, whichever island misses them"


def test_an_interruption_leaves_all_systems_at_the_same_instant():
    def stop(ratio, _what):
        if ratio > 0.5:
            raise KeyboardInterrupt

    result = run.simulate(spec.parse(SMALL), stop)
    assert result.partial
    assert 0.4 * 21600.0 < result.simulated_s < 0.6 * 21600.0
    assert len(result.rows) == 5
    assert all(0.0 < row["goodput"] < 1.0 for row in result.rows)


def test_an_interruption_at_protocol_level_keeps_the_fleets_rows():
    def stop(_ratio, what):
        if what == "protocol":
            raise KeyboardInterrupt

    document = {**SMALL, "duration": "600s", "level": "both", "systems": ["elastic-data-parallel", "decoupled"]}
    result = run.simulate(spec.parse(document), stop)
    assert result.partial
    assert [row["level"] for row in result.rows] == ["fleet", "fleet"]


DIGESTS = """
from orchestrator.simulation import run, spec
from tests.simulation.fleet_tapes import DigestSink
from orchestrator.tape.driver import DigestSink as RecordDigest
from orchestrator.tape.schema import FleetHeader

FLEET = {"chips": 100_000, "learners": 4, "mtbi_chip": "30d", "return_time": {"lognormal": {"median": "9min", "sigma": 1}}}

for seed in (7, 8):
    sinks = {}

    def open_tape(name, header):
        sinks[name] = (DigestSink if isinstance(header, FleetHeader) else RecordDigest)(header)
        return sinks[name]

    for level, duration in (("fleet", "6h"), ("both", "300s")):
        document = {"seed": seed, "duration": duration, "level": level, "fleet": FLEET}
        run.simulate(spec.parse({**document, "systems": ["data-parallel", "decoupled"]}), open_tape=open_tape)
    print(*(f"{name}={sink.digest.hex()}" for name, sink in sorted(sinks.items())))
"""


def _digests(hash_seed):
    return said_under(hash_seed, "-c", DIGESTS)


def test_the_same_seed_gives_the_same_tapes_whatever_the_hash_seed():
    first = _digests("0")
    one, other = first.splitlines()
    assert [tape.split("=")[0] for tape in one.split()] == ["data-parallel", "decoupled", "decoupled-protocol"]
    assert not set(one.split()) & set(other.split()), "another seed is another run"
    assert first == _digests("1") == _digests("4242")


def test_a_fleet_with_a_price_has_its_cost_in_every_row_and_spot_chips_that_are_away_are_free():
    document = {
        "duration": "30min",
        "systems": ["data-parallel", "decoupled"],
        "level": "both",
        "fleet": {"chips": 2048, "learners": 4, "mtbi_chip": "3d", "price": {"chip_hour": 2.0, "currency": "EUR"}},
        "steps": {"step_time": "5s", "tokens_per_step": 4096},
    }
    spot = {(row["system"], row["level"]): row for row in run.simulate(spec.parse(document)).rows}
    document["fleet"]["price"]["kind"] = "reserved"
    reserved = {(row["system"], row["level"]): row for row in run.simulate(spec.parse(document)).rows}
    assert len(spot) == 3
    for key, row in spot.items():
        cost, all_paid = row["cost"], reserved[key]["cost"]
        assert cost["currency"] == "EUR"
        assert all_paid["so_far"] == pytest.approx(2.0 * row["chips"] * 0.5)
        away = row["badput"].get("slice away", 0.0) + row["badput"].get("there, but of no use to this system", 0.0)
        assert cost["so_far"] == pytest.approx(all_paid["so_far"] * (1 - away))
        assert cost["so_far"] >= sum(cost["badput"].values())
        tokens = row["goodput"] * 1800 / 5 * 4096 * 4
        assert cost["per_merged_million_tokens"] == pytest.approx(cost["so_far"] / tokens * 1e6)
    assert any(row["badput"].get("slice away") for row in spot.values())


def test_a_price_of_nodes_is_refused_because_a_fleet_has_only_chips():
    with pytest.raises(
        InvalidJobSpec, match=r"fleet\.price\.node_hour: is 3, but a simulated fleet has chips"
    ) as refusal:
        spec.parse({"duration": "1h", "fleet": {"chips": 2048, "price": {"node_hour": 3.0}}})
    assert "Give fleet.price.chip_hour" in str(refusal.value)
