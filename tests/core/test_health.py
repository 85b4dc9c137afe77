"""Contributions that would spoil a merge are refused, and their island begins anew: not at the first, and not for ever."""

from __future__ import annotations

import pytest

from orchestrator.core import commands, fragment_round
from orchestrator.core.effects import (
    AdmitContribution,
    BeginCatchUp,
    Effect,
    FinishJob,
    MergeFragment,
    PlaceIsland,
    QuarantineIsland,
    RefuseContribution,
    ReleasePayload,
    SetTimer,
    StopIsland,
)
from orchestrator.core.events import ContributionArrived, ContributionUnusable, MergeFailed
from orchestrator.core.messages import CaughtUp
from orchestrator.core.vocabulary import HealthPolicy, RefusalReason, ReleaseReason
from orchestrator.tape.codec import parse_timer
from tests.harness.story import Story, all_of, inputs, the

USUAL = 2.0


def settled(islands: str = "ab", versions: int = fragment_round.VERSIONS_BEFORE_JUDGING, **policy: object) -> Story:
    """All islands train, and fragment 0 has taken some outer steps with contributions of the usual displacement."""
    story = Story(islands, **policy)
    story.starts(*islands)
    for version in range(1, versions + 1):
        for name in islands:
            gives(story, name, USUAL)
        story.merges(0, version)
    return story


def gives(story: Story, name: str, displacement: float | None, **facts: object) -> tuple[Effect, ...]:
    return story.happen(ContributionArrived, story.contribution(name, **facts), displacement)  # type: ignore[arg-type]


def sends_rubbish(
    story: Story, name: str, fragment: int = 0, reason: RefusalReason = RefusalReason.CORRUPT
) -> tuple[Effect, ...]:
    return story.happen(ContributionUnusable, story.contribution(name, fragment), reason, "rubbish")


def refused_as(effects: tuple[Effect, ...]) -> RefusalReason | None:
    refusals = all_of(RefuseContribution, effects)
    return refusals[0].reason if refusals else None


def comes_back(story: Story, name: str) -> BeginCatchUp | None:
    """After its back-off: placed and ready."""
    timer = SetTimer(
        parse_timer(f"backoff:{name}"), story.core.state.islands[name].current.timer_serial, story.now + 60.0
    )
    assert the(PlaceIsland, story.timer(timer)).island == name
    return story.is_ready(name)


def test_what_is_far_off_is_refused_and_what_is_not_is_merged() -> None:
    story = settled()
    effects = gives(story, "a", 100.1 * USUAL)
    assert refused_as(effects) is RefusalReason.EXPLODING
    assert the(ReleasePayload, effects).reason is ReleaseReason.REFUSED
    assert all_of(AdmitContribution, gives(story, "b", 99.9 * USUAL))


def test_the_first_rounds_are_not_judged() -> None:
    story = settled(versions=fragment_round.VERSIONS_BEFORE_JUDGING - 1)
    assert all_of(AdmitContribution, gives(story, "a", 1e6 * USUAL))


def test_a_bound_can_be_switched_off_and_an_old_tape_has_none() -> None:
    assert all_of(AdmitContribution, gives(settled(health=HealthPolicy(displacement_ratio_max=None)), "a", 1e6 * USUAL))
    assert all_of(AdmitContribution, gives(settled(), "a", None))


def test_more_steps_may_be_further_away() -> None:
    story = settled()  # an interval is four steps
    assert refused_as(gives(story, "a", 700.0, steps=12)) is RefusalReason.EXPLODING
    assert all_of(AdmitContribution, gives(story, "a", 700.0, steps=16))


def test_a_fragment_that_never_moved_has_no_usual_displacement() -> None:
    story = Story("ab")
    story.starts("a", "b")
    for version in range(1, 6):
        gives(story, "a", 0.0)
        gives(story, "b", 0.0)
        story.merges(0, version)
    assert all_of(AdmitContribution, gives(story, "a", 5.0))


def test_the_usual_displacement_follows_those_admitted_and_no_other() -> None:
    story = settled()
    for version in range(5, 40):
        gives(story, "a", 50 * USUAL)
        gives(story, "b", 50 * USUAL)
        story.merges(0, version)
    assert story.core.state.update_norms[0].median == 50 * USUAL
    assert len(story.core.state.update_norms[0].latest) == fragment_round.LATEST_KEPT
    gives(story, "a", 1e9)
    assert story.core.state.update_norms[0].median == 50 * USUAL


def test_an_island_is_flagged_at_once_and_quarantined_when_it_goes_on() -> None:
    story = settled()
    for _ in range(2):
        assert not all_of(QuarantineIsland, gives(story, "b", 1e6))
    assert "exploding contribution to fragment 0" in story.island("b").flag
    assert story.island("b").state == "training"
    effects = gives(story, "b", 1e6)
    assert the(QuarantineIsland, effects).reason is RefusalReason.EXPLODING
    assert the(StopIsland, effects).incarnation == 1
    assert story.island("b").state == "lost"
    assert story.island("b").reason.startswith("quarantined: exploding")
    assert refused_as(gives(story, "b", USUAL)) is RefusalReason.NOT_CAUGHT_UP  # whatever else was on its way


def test_others_do_not_wait_for_an_island_in_quarantine() -> None:
    story = settled()
    gives(story, "a", USUAL)
    effects = sends_rubbish(story, "b", reason=RefusalReason.NON_FINITE)
    assert inputs(the(MergeFragment, effects)) == {"a": 1.0}


def test_good_work_in_between_is_no_row_but_only_of_the_same_fragment() -> None:
    story = settled("abc")
    sends_rubbish(story, "a")
    sends_rubbish(story, "a")
    gives(story, "a", USUAL)
    for _ in range(2):
        assert not all_of(QuarantineIsland, sends_rubbish(story, "a"))
    gives(story, "a", USUAL, fragment=1)
    assert all_of(QuarantineIsland, sends_rubbish(story, "a"))


def test_the_same_rubbish_told_again_is_one_strike() -> None:
    story = settled()
    bad, far = story.contribution("a"), story.contribution("b")
    for _ in range(5):
        assert not all_of(QuarantineIsland, story.happen(ContributionUnusable, bad, RefusalReason.CORRUPT, "cut"))
        assert not all_of(QuarantineIsland, story.happen(ContributionArrived, far, 1e6))


def test_what_holds_no_numbers_ends_its_island_at_once() -> None:
    story = settled()
    effects = sends_rubbish(story, "b", reason=RefusalReason.NON_FINITE)
    assert refused_as(effects) is RefusalReason.NON_FINITE
    assert all_of(QuarantineIsland, effects)
    assert all_of(StopIsland, effects)


def test_it_comes_back_with_a_healthy_state_and_the_flag_goes_when_its_work_is_merged() -> None:
    story = settled("abc")
    sends_rubbish(story, "a")  # may be no donor now, though it is first by name
    sends_rubbish(story, "c", reason=RefusalReason.NON_FINITE)
    catch_up = comes_back(story, "c")
    assert catch_up is not None
    assert catch_up.donor == ("b", 1)
    assert (story.island("c").flag, story.island("c").quarantines) != ("", 0)
    versions = tuple(f.version for f in story.core.state.rounds)
    story.reports("c", 2, CaughtUp("b", versions, 20, 0.1))
    for name in "abc":
        gives(story, name, USUAL)
    story.merges(0, 5)
    assert [story.island(name).flag for name in "abc"] == ["", "", ""]
    assert story.island("c").quarantines == 1


def test_an_island_that_goes_on_sending_rubbish_is_given_up_until_it_is_re_added() -> None:
    story = settled(health=HealthPolicy(quarantines_max=2), restarts_max=1000)
    for life in range(1, 4):
        assert story.island("b").state == "training"
        effects = sends_rubbish(story, "b", reason=RefusalReason.NON_FINITE)
        assert len(all_of(SetTimer, effects)) == (1 if life < 3 else 0)
        if life < 3:
            comes_back(story, "b")
            versions = tuple(f.version for f in story.core.state.rounds)
            story.reports("b", life + 1, CaughtUp("a", versions, 20, 0.1))
    assert story.island("b").state == "failed"
    assert "given up after 3 quarantines" in story.island("b").reason
    assert the(PlaceIsland, story.command("again", commands.Readd("b"))).incarnation == 4
    assert story.island("b").quarantines == 0


def test_a_job_whose_every_island_is_given_up_has_failed() -> None:
    story = settled("a", health=HealthPolicy(quarantines_max=0))
    end = the(FinishJob, sends_rubbish(story, "a", reason=RefusalReason.NON_FINITE))
    assert "every island was given up" in end.reason


def test_a_sick_island_that_is_being_drained_stays_away() -> None:
    story = settled("abc")
    story.command("drain", commands.Drain("c"))
    effects = sends_rubbish(story, "c", reason=RefusalReason.NON_FINITE)
    assert all_of(QuarantineIsland, effects)
    assert not all_of(SetTimer, effects)
    assert story.island("c").state == "stopped"


@pytest.mark.parametrize("again", [1, 3])
def test_a_merge_that_is_not_finite_leaves_the_fragment_as_it_was(again: int) -> None:
    story = settled()
    gives(story, "a", USUAL)
    order = the(MergeFragment, gives(story, "b", USUAL))
    named = tuple(item.payload for item in order.inputs)
    effects = story.happen(MergeFailed, 0, order.version, named, "a value is not finite")
    assert [(x.payload, x.reason) for x in all_of(ReleasePayload, effects)] == [
        (payload, ReleaseReason.ABANDONED) for payload in named
    ]
    assert story.core.state.rounds[0].version == order.version - 1
    gives(story, "a", USUAL)
    second = the(MergeFragment, gives(story, "b", USUAL))
    assert second.version == order.version
    for _ in range(again):  # a late word on the first attempt says nothing of the second
        assert story.happen(MergeFailed, 0, order.version, named, "a value is not finite") == ()
    assert story.merges(0, order.version)


@pytest.mark.parametrize(
    ("islands", "ill", "reason", "remedy"),
    [
        ("abc", "b", RefusalReason.NON_FINITE, "the other islands are well: look at its machine"),
        (
            "abc",
            "ab",
            RefusalReason.NON_FINITE,
            "2 of the 3 islands diverged, so the cause is no machine: lower training",
        ),
        (
            "ab",
            "ba",
            RefusalReason.NON_FINITE,
            "2 of the 2 islands diverged, so the cause is no machine: lower training",
        ),
        ("a", "a", RefusalReason.NON_FINITE, "lower training.inner_optimizer.lr; if that changes nothing, look at"),
        ("abc", "bc", RefusalReason.CORRUPT, "look at its machine, and its line"),
    ],
)
def test_one_island_that_diverges_has_a_machine_to_look_at_and_several_have_a_learning_rate(
    islands: str, ill: str, reason: RefusalReason, remedy: str
) -> None:
    story = settled(islands, quorum=1, health=HealthPolicy(strikes_max=1, quarantines_max=0))
    for name in ill:
        story.happen(ContributionUnusable, story.contribution(name), reason, "head holds 2e+15.")
    last = story.island(ill[-1]).reason
    assert f"fragment 0: head holds 2e+15; {remedy}" in last


def test_an_island_that_was_ill_and_is_well_again_is_no_witness_against_the_learning_rate() -> None:
    story = settled("ab", health=HealthPolicy(quarantines_max=1))
    sends_rubbish(story, "a", reason=RefusalReason.NON_FINITE)
    assert comes_back(story, "a")
    versions = tuple(f.version for f in story.core.state.rounds)
    story.reports("a", 2, CaughtUp("b", versions, 20, 0.1))
    for name in "ab":
        gives(story, name, USUAL)
    story.merges(0, 5)
    assert (story.island("a").flag, story.island("a").quarantines) == ("", 1)
    for life in (1, 2):
        sends_rubbish(story, "b", reason=RefusalReason.NON_FINITE)
        if life == 1:
            assert comes_back(story, "b")
            story.reports("b", 2, CaughtUp("a", versions, 20, 0.1))
    assert "the other islands are well" in story.island("b").reason
