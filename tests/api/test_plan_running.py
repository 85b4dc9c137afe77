"""`atoll plan --job` and `--groups`: what a service has measured, and what a user mistypes."""

from __future__ import annotations

import json

import pytest

from orchestrator.core.events import OuterStateSeeded
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import Incarnation, IslandId
from orchestrator.errors import ConfigurationError
from orchestrator.simulation.observed import Observed, ObservedIncarnation
from orchestrator.simulation.planner import Pace, of_groups, of_running
from orchestrator.specification.config import parse_job
from tests.api.installation import Installation
from tests.waiting import wait_until


def life(asked: float, placed: float, trains: float, ended: float) -> ObservedIncarnation:
    return ObservedIncarnation(asked, placed_at=placed, training_ordered_at=trains, ended_at=ended)


def test_deaths_returns_and_starts_are_those_of_the_tape() -> None:
    """One island of two hosts dies after 90 s and is placed again 20 s later; the other lives for all 200 s."""
    spec = parse_job({"name": "p", "islands": [{"node_group": "a", "count": 2, "hosts": 2}], "budget": {"steps": 9}})
    seen = Observed()
    seen.until = 200.0
    first, second = IslandId("a-0"), IslandId("a-1")
    seen.lives = {
        (first, Incarnation(1)): life(0.0, 10.0, 14.0, 100.0),
        (first, Incarnation(2)): life(101.0, 120.0, 126.0, 200.0),
        (second, Incarnation(1)): life(0.0, 0.0, 5.0, float("inf")),
    }
    seen.crashes = [(first, 100.0, False)]
    paces = [Pace("a-0", 0.5, 100.0, 2e9), Pace("a-1", 0.7, 100.0, 1e9), Pace("a-2", None, None, None)]
    figures, settings = of_running(spec, paces, seen)
    assert figures["mtbf_host"].value == pytest.approx(2 * (90.0 + 80.0 + 200.0))
    assert figures["host_return"].value == 20.0
    assert figures["start"].value == 5.0
    assert figures["step_s"].value == pytest.approx(0.6)
    assert (figures["line"].value, figures["line"].source) == (1e9, "measured, the slower way of a-1, the slowest of 2")
    assert figures["hosts"].source == "the specification"
    assert settings.interval_steps == spec.synchroniser.interval_steps
    seen.crashes = []
    assert of_running(spec, [], seen)[0]["mtbf_host"].source.startswith("assumed, 0 deaths")
    assert "line" not in of_running(spec, [], Observed())[0]


def test_node_groups_count_as_islands_of_the_smallest() -> None:
    figures = of_groups([("a", 4, 32), ("b", 2, 16), ("empty", 0, 0)])
    assert [figures[name].value for name in ("islands", "hosts", "accelerators")] == [2, 2, 8]
    assert of_groups([("a", 3, 0)])["accelerators"].value == 1
    with pytest.raises(ConfigurationError, match="No node group of the service has a node"):
        of_groups([])


def test_a_running_job_is_planned_with_what_it_measured(service: Installation) -> None:
    job = service.atoll("submit", service.spec_file()).split()[1].rstrip(":")
    wait_until(lambda: json.loads(service.atoll("status", job, "--json"))["global_version"] > 0)
    rest = ("--line", "1Gbps", "--mtbf-host", "3d")
    told = json.loads(service.atoll("plan", "--job", job, *rest, "--json"))
    assert told["fleet"]["islands"] == 4
    assert told["fleet"]["step_s"] == pytest.approx(0.05)
    assert told["sources"]["step_s"] == "measured, the median of 4 islands"
    assert told["sources"]["line"] == "an option"
    assert told["sources"]["round_trip"] == "assumed"
    said = service.atoll("plan", "--job", "latest", *rest)
    assert "step-s: 0.05 s (measured, the median of 4 islands)" in said
    assert "line: 1 Gbps (an option)" in said
    said = service.atoll("plan", "--groups", *rest, "--parameters", "1e6", "--step-s", "1")
    assert "islands: 4 (the service's 4 node groups)" in said
    assert "--step-s" in service.atoll("plan", "--groups", code=2)
    assert "exclude each other" in service.atoll("plan", "--groups", "--job", job, code=2)
    assert "does not exist" in service.atoll("plan", "--job", "no-such", code=2)


def test_a_job_that_has_ended_is_planned_from_its_tape() -> None:
    """Its islands have no pace any more, and the specification of a PyTorch model does not say how large that is."""
    document = {"name": "p", "islands": [{"node_group": "a", "count": 2}], "budget": {"steps": 9}}
    spec = parse_job({**document, "trainer": {"kind": "torch", "model": "models/gpt2"}})
    seen = Observed()
    seen.apply(OuterStateSeeded(0.5, 1_234, "digest"), ())
    for name, seconds in (("a-0", (0.4, 0.5, 9.0)), ("a-1", (0.7,)), ("a-2", ())):
        own = seen.lives[IslandId(name), Incarnation(1)] = life(0.0, 0.0, 5.0, 200.0)
        own.reports = [(1.0, Progress(1, 1, 10, step, step, step, 2.0)) for step in seconds]
    paces = [Pace("a-0", None, 100.0, None), Pace("a-1", None, 100.0, None)]
    figures, _ = of_running(spec, paces, seen)
    assert figures["step_s"].value == pytest.approx(0.6)
    assert "2 islands" in figures["step_s"].source
    assert (figures["parameters"].value, figures["parameters"].source) == (1_234, "measured")


def test_the_routers_of_a_packages_model_are_those_of_the_tape() -> None:
    document = {"name": "p", "islands": [{"node_group": "a"}], "budget": {"steps": 9}}
    spec = parse_job({**document, "model": {"factory": "own:model"}, "synchroniser": {"router_interval_steps": 6}})
    seen = Observed()
    assert of_running(spec, [], seen)[1].router_parameters == 0
    seen.apply(OuterStateSeeded(0.5, 1_234, "digest", 34), ())
    settings = of_running(spec, [], seen)[1]
    assert settings.fragment_parameters(1_234) == 1_200 / 7
