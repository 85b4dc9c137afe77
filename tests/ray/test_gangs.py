"""Where an island of many hosts may be placed: a pure decision, of labels and what is free."""

from __future__ import annotations

import pytest

from orchestrator.runtime.placement import (
    SLICE_LABEL,
    TOPOLOGY_LABEL,
    WORKER_LABEL,
    Gang,
    Node,
    Refusal,
    booked,
    gang,
    refusal,
)

CHIPS = {"CPU": 1.0, "TPU": 4.0}
CORE = {"CPU": 1.0}


def host(name: str, worker: int, *, free: float = 4.0, group: str = "east", topology: str = "2x4") -> Node:
    """One of a TPU slice's: four chips."""
    labels = {SLICE_LABEL: name, TOPOLOGY_LABEL: topology, WORKER_LABEL: str(worker)}
    has = {"CPU": 8.0, "TPU": 4.0}
    return Node(f"{name}-{worker}", f"{name}-{worker}", group, "here", has, {**has, "TPU": free}, labels=labels)


def node(number: int, free: float = 4.0, group: str = "east") -> Node:
    return Node(str(number), str(number), group, "here", {"CPU": 4.0}, {"CPU": free})


def test_a_slice_is_taken_as_a_whole_with_ranks_as_its_workers():
    there = [host("b", 0), host("b", 1), host("a", 0, free=0.0), host("a", 1)]
    placed = gang("east", "tpu", CHIPS, 2, there)
    assert isinstance(placed, Gang)
    assert [(s[SLICE_LABEL], s[WORKER_LABEL]) for s in placed.selectors] == [("b", "0"), ("b", "1")]


@pytest.mark.parametrize(
    ("nodes", "final", "words"),
    [
        ([host("a", 0), host("a", 1, free=0.0)], False, "in use are a"),
        ([host("a", 0)], False, "hosts are missing: a (1 of 2 hosts)"),
        ([host("a", 0, topology="4x4"), host("a", 1, topology="4x4")], True, "a of 4 hosts"),
        ([host("a", 0, group="west"), host("a", 1, group="west")], True, "no node belongs to the node group 'east'"),
        ([node(1), node(2)], True, "whose nodes have"),
    ],
)
def test_why_no_slice_is_to_be_had_is_said(nodes, final, words):
    refused = gang("east", "tpu", CHIPS, 2, nodes)
    assert isinstance(refused, Refusal)
    assert (refused.final, words in refused.reason) == (final, True), refused.reason


def test_other_nodes_are_taken_by_count():
    assert gang("east", "cpu", CORE, 2, [node(1), node(2), node(3)]) == Gang(({}, {}))
    few = gang("east", "cpu", CORE, 3, [node(1), node(2), node(3, group="west")])
    assert isinstance(few, Refusal)
    assert few.final
    assert "asked for 3 nodes of 'east' with 1 CPU each, which has 2 such" in few.reason
    full = gang("east", "cpu", CORE, 2, [node(1), node(2, free=0.5)])
    assert isinstance(full, Refusal)
    assert not full.final
    assert "which has 1 such with that free" in full.reason


def test_a_node_with_room_for_one_has_room_for_one_of_those_that_wait():
    nodes = [node(1, free=0.5), node(2, free=1.0), node(3, free=1.0, group="west")]
    for outcome in (True, False, False):
        assert (refusal("east", CORE, nodes) is None) is outcome
        nodes = booked("east", CORE, nodes)
    assert refusal("west", CORE, nodes) is None


def test_rays_own_trainer_cannot_place_a_slice_by_labels():
    """The day it can, decision 0173 is to be thought of again."""
    from ray.train import ScalingConfig

    with pytest.raises(ValueError, match="label_selector"):
        ScalingConfig(
            num_workers=2, use_tpu=True, topology="2x4", accelerator_type="TPU-V5E", label_selector={"region": "here"}
        )
