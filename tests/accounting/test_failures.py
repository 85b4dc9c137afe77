"""Which node is bad: the rule on constructed histories, and what counts as a failure of a node."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.accounting.failures import HALF_LIFE_S, Failure, Failures, Origin, bad_nodes, failure_counts
from orchestrator.core import commands as c
from orchestrator.core import events as e
from orchestrator.core.faults import Kind as FaultKind
from orchestrator.core.vocabulary import IslandId, IslandTimer, IslandTimerKind
from tests.harness.story import Story, policy

NODES = ("good-1", "good-2", "bad")


def failure(island: str, node: str = "bad", at: float = 0.0, **facts: Any) -> Failure:
    plain = {"reason": "process died", "origin": Origin.PROCESS, "contributed": False}
    return Failure(1, at, IslandId(island), node, **(plain | facts))


def history(*islands: str, node: str = "bad", **facts: Any) -> list[Failure]:
    """Return a failure of each of these islands, ten seconds apart."""
    return [failure(island, node, 10.0 * number, **facts) for number, island in enumerate(islands)]


def bad_of(failures: list[Failure], at: float = 0.0, **nodes_of: tuple[str, ...]) -> list[str]:
    places = {"a": NODES[:1], "b": NODES[1:2]} | nodes_of
    return sorted(bad_nodes(failures, {IslandId(name): nodes for name, nodes in places.items()}, at))


def test_a_node_that_fails_several_islands_is_bad_from_the_third_failure_on() -> None:
    told = history(*"cdc")
    assert bad_of(told, c=("bad",), d=("bad",)) == ["bad"]
    assert bad_of(told[:2], c=("bad",), d=("bad",)) == []


def test_a_machine_that_loses_power_once_is_not_bad_however_many_islands_it_had() -> None:
    told = [failure(island, at=100.0 + number) for number, island in enumerate("cdef")]
    assert bad_of(told, **dict.fromkeys("cdef", ("bad",))) == []
    assert failure_counts(told, 100.0) == {"bad": 1.0}


def test_one_island_makes_a_node_bad_only_if_it_was_elsewhere_too() -> None:
    told = history(*"ccc")
    assert bad_of(told, c=("bad",)) == [], "it may be the island"
    assert bad_of(told, c=("bad", "good-1")) == ["bad"]


def test_a_node_without_another_one_to_compare_with_is_not_bad() -> None:
    assert bad_nodes(history(*"cdcdcd"), {IslandId("c"): ["bad"], IslandId("d"): ["bad"]}, 0.0) == {}


@pytest.mark.parametrize("origin", [Origin.KILL, Origin.CODE, Origin.PLACEMENT])
def test_what_is_no_nodes_fault_does_not_count(origin: Origin) -> None:
    told = history(*"cdcdcdcd", origin=origin)
    assert bad_of(told, c=("bad", "good-1"), d=("bad",)) == []
    assert failure_counts(told, 0.0) == {}


def test_the_same_error_on_several_nodes_makes_none_of_them_bad() -> None:
    told = [one for node in NODES for one in history(*"cdcdc", node=node)]
    assert bad_of(told, c=NODES, d=NODES) == []


def test_old_failures_are_forgiven() -> None:
    told = history(*"cdcd")
    assert bad_of(told, at=1.9 * HALF_LIFE_S, c=("bad",), d=("bad",)) == ["bad"]
    assert bad_of(told, at=2.1 * HALF_LIFE_S, c=("bad",), d=("bad",)) == []


class Told(Story):
    """A story whose failures are counted."""

    def __init__(self) -> None:
        self.failures, self.number = Failures(map(IslandId, "abc")), 0
        super().__init__("abc", wanted=policy("abc", restarts_max=99), folds=(self,))
        self.starts("a", "b", "c")

    def apply(self, event: Any, effects: Any) -> None:
        self.number += 1
        self.failures.apply(self.number, event, effects)

    def comes_back(self, island: str, node: str) -> None:
        state = self.core.state.islands[island]
        self.wait(10.0)
        self.happen(e.TimerFired, IslandTimer(IslandTimerKind.BACKOFF, island), state.current.timer_serial)
        self.happen(e.IslandPlaced, island, self.incarnation(island), node, 1000)

    def counts(self) -> dict[str, float]:
        return {node: round(count) for node, count in failure_counts(self.failures.all, self.now).items()}


def test_deaths_count_for_the_node_where_they_happened() -> None:
    story = Told()
    story.dies("a")
    story.comes_back("a", "rack-7")
    story.dies("a")
    assert story.counts() == {"node": 1, "rack-7": 1}
    assert story.failures.nodes()[IslandId("a")] == {"node", "rack-7"}
    assert story.failures.node_of(IslandId("a")) == "rack-7"


def test_departures_kills_and_chaos_do_not_count() -> None:
    story = Told()
    story.happen(e.NoticeReceived, "a", 1, "the spot machine is reclaimed", 30.0)
    story.dies("a")
    story.happen(e.CommandRequested, "kill-1", "operator", c.Kill("b"))
    story.dies("b")
    story.command("chaos-1", c.Kill("c"))
    story.dies("c")
    assert story.counts() == {}


def test_chaos_that_kills_a_node_is_no_failure_of_it() -> None:
    story = Told()
    story.happen(e.FaultInjected, "chaos-1", "chaos", FaultKind.KILL_NODE.value, "a", 1, 0.0)
    for island in "abc":
        story.dies(island)
    assert [one.origin for one in story.failures.all] == [Origin.KILL] * 3
    assert story.counts() == {}


def test_an_error_of_the_jobs_own_code_does_not_count() -> None:
    story = Told()
    story.happen(e.ConnectionLost, "a", 1, True, "its own code failed: KeyError: 'text'")
    assert story.counts() == {}
    assert story.failures.all[-1].origin is Origin.CODE
