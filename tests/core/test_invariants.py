"""Every invariant that the island record states fails when it is broken; the sentence names what is wrong."""

from __future__ import annotations

import dataclasses
from dataclasses import fields, replace
from typing import Any

import pytest

from orchestrator.core import invariants, island_record, vocabulary
from orchestrator.core.fragment_round import FragmentRound, UpdateNorms
from orchestrator.core.island_record import CurrentIncarnation, Island
from orchestrator.core.state import Checkpoints
from orchestrator.core.vocabulary import FragmentId, Incarnation, IslandId, IslandPlan, IslandState
from orchestrator.errors import InternalError
from tests.harness.story import Story

P = FragmentId(0)
ISLAND_BREAKS: list[tuple[dict[str, Any], str]] = [
    ({"plan": IslandPlan(IslandId("z"), "g", "r", 1)}, "the record of z is kept as that of a"),  # type: ignore[arg-type]
    ({"incarnation": Incarnation(0), "steps_before": 0, "tokens_before": 0}, "never placed"),
    ({"state": IslandState.LOST, "wanted": False}, "would be placed, but is not wanted"),
    ({"state": IslandState.CORDONED, "wanted": False}, "would be placed, but is not wanted"),
    ({"state": IslandState.DRAINED}, "has drained but is wanted"),
    ({"tokens_before": 7}, "totals of earlier incarnations"),
    ({"step": -1}, "negative"),
    ({"failures": 4}, "after 4 failures in a row"),
    ({"quarantines": 99}, "after 99 quarantines"),
    ({"saved": True}, "counts on a checkpoint"),
]
INCARNATION_BREAKS: list[tuple[dict[str, Any], str]] = [
    ({"ready": False}, "before it is ready"),
    ({"overdue_s": 3.0, "ready": False}, "hangs in a step before it is ready"),
    ({"state_before_suspect": IslandState.TRAINING}, "before a suspicion"),
    ({"timer_serial": 99}, "timer 99, which was never set"),
    ({"process": (IslandId("b"), Incarnation(1))}, "took over the process of b"),
    ({"donors": (IslandId("b"), IslandId("b"))}, "named twice or has failed"),
    ({"donors": (IslandId("b"),), "failed_donors": frozenset({IslandId("b")})}, "named twice or has failed"),
    ({"failed_donors": frozenset({IslandId("b")})}, "remembers donors that failed"),
    ({"last_offer": {}}, "the latest offer of a is None"),
    ({"merged_into": {P: 1}}, "a version that does not exist"),
    ({"merged_into": {P: 0}}, "the version or the offer is unknown"),
    ({"merged_into": {P: 0}, "merged_offer": {P: 9}}, "never admitted"),
    ({"behind": {P: (1, 4)}}, "lacks version 1 of fragment 0, which does not exist"),
    ({"strikes": {P: 1}}, "without a note"),
    ({"strikes": {P: 1}}, "without the offers"),
    ({"strikes": {P: 0}, "struck_offer": {P: 1}}, "has 0 strikes"),
    ({"strikes": {P: 99}, "struck_offer": {P: 1}}, "has 99 strikes"),
]


def training() -> Story:
    """Two islands that train; the first has offered fragment 0 to a round that waits for the second."""
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    story.offers_fragment("a", 0)
    return story


def breaks(story: Story, island: Island) -> str:
    story.core.state.islands[IslandId("a")] = island
    with pytest.raises(InternalError) as raised:
        invariants.check(story.core.state)
    return str(raised.value)


@pytest.mark.parametrize(("changed", "sentence"), ISLAND_BREAKS)
def test_a_broken_invariant_of_an_island_is_named(changed: dict[str, Any], sentence: str) -> None:
    story = training()
    assert sentence in breaks(story, replace(story.core.state.islands[IslandId("a")], **changed))


@pytest.mark.parametrize(("changed", "sentence"), INCARNATION_BREAKS)
def test_a_broken_invariant_of_an_incarnation_is_named(changed: dict[str, Any], sentence: str) -> None:
    story = training()
    island = story.core.state.islands[IslandId("a")]
    assert sentence in breaks(story, replace(island, current=replace(island.current, **changed)))


def test_a_process_belongs_to_an_incarnation_that_has_one() -> None:
    story = training()
    island = story.core.state.islands[IslandId("a")]
    assert "is stopped but has a process" in breaks(story, replace(island, state=IslandState.STOPPED))


def test_a_suspect_or_lost_island_waits_for_a_timer() -> None:
    story = training()
    story.falls_silent("a")
    island = story.core.state.islands[IslandId("a")]
    without = replace(island, current=replace(island.current, timer_serial=0))
    assert "is suspect, and no timer ends that" in breaks(story, without)
    lost = replace(without.current, state_before_suspect=None, pid=None)
    assert "is lost, and no timer ends that" in breaks(story, replace(without, state=IslandState.LOST, current=lost))


def test_a_record_that_was_sound_is_not_checked_again_but_its_successor_is() -> None:
    story = training()
    state, checked = story.core.state, dict[IslandId, Island]()
    invariants.check(state, checked)
    assert checked == state.islands
    island = state.islands[IslandId("a")]
    state.islands[IslandId("a")] = replace(island, step=-1)
    with pytest.raises(InternalError, match="negative"):
        invariants.check(state, checked)


def test_a_placement_leaves_nothing_of_the_incarnation_before() -> None:
    story = training()
    before = story.core.state.islands[IslandId("a")]
    after, _ = island_record.place(before, None, "again")
    fresh = CurrentIncarnation()
    assert {f.name: getattr(after.current, f.name) for f in fields(fresh)} == {
        f.name: getattr(fresh, f.name) for f in fields(fresh)
    }
    assert after.incarnation == before.incarnation + 1


@pytest.mark.parametrize(
    "before",
    [
        training().core.state.islands[IslandId("a")],
        CurrentIncarnation(),
        FragmentRound(P),
        UpdateNorms(),
        Checkpoints(),
    ],
)
def test_the_core_replaces_a_record_as_the_standard_library_does(before: Any) -> None:
    """``vocabulary.replace`` is the core's own for its speed alone."""
    for field in fields(before):
        new = object()
        after, expected = (f(before, **{field.name: new}) for f in (vocabulary.replace, dataclasses.replace))
        assert type(after) is type(before)
        assert all(getattr(after, other.name) is getattr(expected, other.name) for other in fields(before))
    assert vocabulary.replace(before) is not before
