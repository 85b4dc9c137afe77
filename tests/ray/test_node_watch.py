"""What the watch over nodes says between two looks."""

from __future__ import annotations

import pytest

from orchestrator.runtime import cluster, nodes
from orchestrator.runtime.nodes import NodeWatch
from orchestrator.runtime.placement import Node
from orchestrator.runtime.settings import NODE_ID_LABEL
from orchestrator.system import signals
from orchestrator.system.ports import Reach
from tests.waiting import wait_until


def test_a_look_that_was_asked_for_began_after_the_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    reaches = {"near": Reach.TAKEN, "far": Reach.TAKEN}
    looks: list[None] = []

    def node_reaches() -> dict[str, Reach]:
        looks.append(None)
        return dict(reaches)

    monkeypatch.setattr(nodes, "WATCH_S", 3600.0)  # by itself it looks once
    monkeypatch.setattr(cluster, "node_reaches", node_reaches)
    monkeypatch.setattr(cluster, "leaving_nodes", dict)
    monkeypatch.setattr(cluster, "cordoned_nodes", frozenset)
    watch = NodeWatch()
    wait_until(lambda: len(looks) == 1)
    reaches["far"] = Reach.NOTHING
    assert not watch.is_unreachable("far")

    watch.look_again()
    assert len(looks) == 2
    assert watch.is_unreachable("far")
    assert not watch.is_unreachable("near")
    assert watch.selector() == {NODE_ID_LABEL: "!in(far)"}


def test_an_island_goes_where_it_left_its_state_if_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    at = {signals.left_label("job.one"): "1"}
    there = [
        Node("first", "first", "spot", "east", {"CPU": 4.0}, {"CPU": 4.0}),
        Node("second", "second", "spot", "east", {"CPU": 4.0}, {"CPU": 2.0}, labels=at),
    ]
    monkeypatch.setattr(cluster, "node_reaches", dict)
    monkeypatch.setattr(cluster, "leaving_nodes", dict)
    monkeypatch.setattr(cluster, "cordoned_nodes", frozenset)
    monkeypatch.setattr(cluster, "nodes", lambda: there)
    watch = NodeWatch()
    assert watch.selector("job", "one", {"CPU": 2.0}) == {NODE_ID_LABEL: "second"}
    assert watch.selector("job", "one", {"CPU": 3.0}) == {}
    assert watch.selector("job", "two", {"CPU": 1.0}) == watch.selector() == {}


def test_a_look_that_fails_is_over_too_and_the_next_one_says_what_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{}, ConnectionError("the head is away"), {"far": Reach.NOTHING}])

    def node_reaches() -> dict[str, Reach]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(nodes, "WATCH_S", 3600.0)
    monkeypatch.setattr(cluster, "node_reaches", node_reaches)
    monkeypatch.setattr(cluster, "leaving_nodes", dict)
    monkeypatch.setattr(cluster, "cordoned_nodes", frozenset)
    watch = NodeWatch()
    while not watch.is_unreachable("far"):
        watch.look_again()


def test_nothing_new_is_placed_on_a_cordoned_node_and_what_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [Node(name, name, "spot", "east", {"CPU": 4.0}, {"CPU": 4.0}) for name in ("first", "second")]
    cordoned: set[str] = set()
    monkeypatch.setattr(cluster, "cordoned_nodes", lambda: frozenset(cordoned))
    monkeypatch.setattr(cluster, "node_reaches", lambda: dict.fromkeys(("first", "second"), Reach.TAKEN))
    monkeypatch.setattr(cluster, "leaving_nodes", dict)
    monkeypatch.setattr(cluster, "nodes", lambda: there)
    watch = NodeWatch()
    assert [node.id for node in watch.placeable()] == ["first", "second"]
    cordoned.add("second")
    watch.look_again()
    assert [node.id for node in watch.placeable()] == ["first"]
    assert watch.selector() == {NODE_ID_LABEL: "!in(second)"}
    assert watch.is_there("second"), "its agent may start again"
    cordoned.clear()
    watch.look_again()
    assert watch.selector() == {}
