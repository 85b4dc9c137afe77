"""A fragment's round: quorum, grace, who is refused and why, and what the weights are."""

from __future__ import annotations

import pytest

from orchestrator.core.effects import (
    AdmitContribution,
    MergeFragment,
    PublishFragment,
    Recipient,
    RefuseContribution,
    ReleasePayload,
    SetTimer,
    StartTraining,
    StopIsland,
)
from orchestrator.core.events import ContributionArrived, ContributionUnusable
from orchestrator.core.messages import Adopted, CaughtUp, Flushed
from orchestrator.core.vocabulary import CloseReason, RefusalReason, ReleaseReason, ScheduleAnchor
from tests.harness.story import Story, all_of, inputs, the


def test_a_round_merges_at_once_when_every_training_island_is_in() -> None:
    story = Story("ab")
    story.starts("a", "b")
    assert not all_of(MergeFragment, story.offers_fragment("a"))
    merge = the(MergeFragment, story.offers_fragment("b"))
    assert merge.reason is CloseReason.EVERYONE_IN
    assert (merge.fragment, merge.version) == (0, 1)
    assert inputs(merge) == {"a": 0.5, "b": 0.5}


def test_after_quorum_a_round_waits_the_grace_window_and_no_longer() -> None:
    story = Story("ab")  # steps take 1 s; slack τ·ξ = 2 s, γ = 0.5, cap one step: a window of 1 s
    story.starts("a", "b")
    timer = the(SetTimer, story.offers_fragment("a"))
    assert timer.due_at == pytest.approx(story.now + 1.0)
    merge = the(MergeFragment, story.timer(timer))
    assert merge.reason is CloseReason.GRACE_OVER
    assert inputs(merge) == {"a": 1.0}
    assert "b" in merge.detail


def test_a_timer_of_an_earlier_round_does_nothing() -> None:
    story = Story("ab")
    story.starts("a", "b")
    timer = the(SetTimer, story.offers_fragment("a"))
    story.offers_fragment("b")
    story.merges(0, 1)
    story.offers_fragment("a")
    assert story.timer(timer) == ()


def test_below_quorum_nothing_merges_and_the_view_says_why() -> None:
    story = Story("abc", quorum=2)
    story.starts("a")
    assert not all_of(MergeFragment, story.offers_fragment("a"))
    assert "1 of the 2" in str(story.core.state.pause_reason())
    story.starts("b")
    assert story.core.state.pause_reason() is None
    assert the(MergeFragment, story.offers_fragment("b")).reason is CloseReason.EVERYONE_IN


def test_with_an_unlimited_window_a_round_waits_for_everyone() -> None:
    story = Story("ab", grace_cap_steps=None, quorum=1)
    story.starts("a", "b")
    assert all_of(SetTimer, story.offers_fragment("a")) == []
    assert the(MergeFragment, story.offers_fragment("b")).reason is CloseReason.EVERYONE_IN


def test_a_death_leaves_nobody_to_wait_for() -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.offers_fragment("a")
    assert inputs(the(MergeFragment, story.dies("b"))) == {"a": 1.0}


def test_work_offered_early_waits_for_the_round_to_be_due() -> None:
    story = Story("ab")  # H = 4: after a merge at step 4 the next round is due at 8
    story.starts("a", "b")
    timer = the(SetTimer, story.offers_fragment("a", step=4))
    story.timer(timer)
    story.merges(0, 1)
    assert not all_of(MergeFragment, story.offers_fragment("b", step=5))  # it missed the round, and offers again
    timer = the(SetTimer, story.offers_fragment("a", step=8))
    merge = the(MergeFragment, story.timer(timer))
    assert inputs(merge) == {"a": 0.5, "b": 0.5}
    assert "b" in merge.detail  # it was waited for: it might have come with more


def test_a_publication_tells_each_island_how_much_of_its_work_is_in_it() -> None:
    story = Story("abc")
    story.starts("a", "b", "c")
    window = the(SetTimer, story.offers_fragment("a", offer=3))
    story.offers_fragment("b", offer=1)
    story.timer(window)
    recipients = the(PublishFragment, story.merges(0, 1)).recipients
    assert recipients == (Recipient("a", 1, 3), Recipient("b", 1, 1), Recipient("c", 1, 0))


def test_weights_are_tokens_times_tokens_per_step() -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.offers_fragment("a", steps=10, tokens=1000)
    merge = the(MergeFragment, story.offers_fragment("b", steps=10, tokens=2000))
    assert inputs(merge) == {"a": pytest.approx(1 / 5), "b": pytest.approx(4 / 5)}


def test_a_merge_releases_its_payloads_and_publishes_to_all_that_train() -> None:
    story = Story("abc")
    story.starts("a", "b")
    story.offers_fragment("a", step=7)
    story.offers_fragment("b", step=9)
    effects = story.merges(0, 1)
    assert [(r.payload, r.reason) for r in all_of(ReleasePayload, effects)] == [
        ("a.1.0.1", ReleaseReason.MERGED),
        ("b.1.0.1", ReleaseReason.MERGED),
    ]
    publication = the(PublishFragment, effects)
    assert publication.recipients == (Recipient("a", 1, 1), Recipient("b", 1, 1))
    assert (publication.version, publication.step) == (1, 9)
    assert story.merges(0, 1) == ()  # an answer told twice


def test_a_publication_tells_what_the_job_has_trained_whoever_trained_it_and_whether_or_not_it_was_merged() -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.trains("b", tokens=600)
    story.dies("b")
    story.trains("a", tokens=300)
    story.offers_fragment("a", tokens=400)
    assert the(PublishFragment, story.merges(0, 1)).fix == ScheduleAnchor(100 + 100 + 600 + 300, step=7)


def test_an_island_is_let_train_from_where_the_schedule_is() -> None:
    story = Story("ab")
    story.starts("a")
    story.trains("a", tokens=500)
    story.is_ready("b")
    started = the(StartTraining, story.reports("b", 1, CaughtUp("a", (0, 0), 6, 0.1)))
    assert started.fix == ScheduleAnchor(600, step=6)


def test_a_version_that_is_published_again_while_the_next_is_merged_keeps_its_step() -> None:
    story = Story("abc")
    story.starts("a", "b")
    story.is_ready("c")
    for step in (4, 8):
        story.offers_fragment("a", step=step)
        merge = the(MergeFragment, story.offers_fragment("b", step=step))
        if step == 4:
            story.merges(0, 1)
    assert (merge.version, merge.step) == (2, 8)
    missed = the(PublishFragment, story.reports("c", 1, CaughtUp(None, (0, 0), 0, 0.1)))
    assert (missed.version, missed.step) == (1, 4)


def test_a_publication_raises_clocks_to_where_the_first_at_the_due_point_is_by_now() -> None:
    story = Story("abc", overlap_steps=4)  # steps take 1 s
    story.starts("a", "b", "c")
    story.offers_fragment("a", step=4)
    story.wait(1.6)
    story.offers_fragment("b", step=4)
    story.offers_fragment("c", step=4)
    story.wait(0.6)
    publication = the(PublishFragment, story.merges(0, 1))
    assert publication.step == 4 + 2  # a was at step 4 for 2.2 s
    assert story.core.state.rounds[0].step == 4  # the merge is no later for that: the next due point is 8


def test_a_publication_raises_clocks_from_the_highest_step_and_since_that_was_heard() -> None:
    story = Story("ab", overlap_steps=4)
    story.starts("a", "b")
    story.offers_fragment("a", step=4)
    story.wait(1.6)
    story.offers_fragment("b", step=6)  # it had skipped step 4
    story.wait(0.6)
    assert the(PublishFragment, story.merges(0, 1)).step == 6 + 1


@pytest.mark.parametrize(("grace_cap_steps", "raised_to"), [(1.0, 4 + 2), (None, 4)])
def test_a_publication_raises_clocks_by_the_overlap_at_most_and_not_where_rounds_wait_for_everyone(
    grace_cap_steps: float | None, raised_to: int
) -> None:
    story = Story("ab", quorum=2, grace_cap_steps=grace_cap_steps)
    story.starts("a", "b")
    story.offers_fragment("a", step=4)
    story.wait(60.0)
    story.offers_fragment("b", step=4)
    story.wait(60.0)
    assert the(PublishFragment, story.merges(0, 1)).step == raised_to


def test_an_island_far_behind_is_sent_a_lost_publication_again_after_its_own_steps() -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    story.offers_fragment("a", step=200)  # it waited long for b, which begins anew
    story.offers_fragment("b", step=4)
    story.merges(0, 1)
    first = story.offers_fragment("b", base=0, step=8)
    assert the(RefuseContribution, first).reason is RefusalReason.ALREADY_MERGED
    assert not all_of(PublishFragment, first)  # it may be on its way
    again = the(PublishFragment, story.offers_fragment("b", base=0, step=12))
    assert (again.version, again.recipients) == (1, (Recipient("b", 1, 1),))


def refused(story: Story, name: str, **facts: object) -> RefusalReason:
    effects = story.offers_fragment(name, **facts)  # type: ignore[arg-type]
    assert not all_of(AdmitContribution, effects)
    return the(RefuseContribution, effects).reason


def test_each_refusal_has_its_reason() -> None:
    story = Story("abc")
    story.starts("a", "b")
    assert refused(story, "c") is RefusalReason.NOT_CAUGHT_UP
    assert refused(story, "a", incarnation=7) is RefusalReason.FENCED
    assert refused(story, "a", tokens=0) is RefusalReason.EMPTY
    assert refused(story, "a", base=3) is RefusalReason.UNKNOWN_VERSION
    story.offers_fragment("a")
    story.offers_fragment("b")
    assert refused(story, "b") is RefusalReason.LATE  # the round is merging
    story.merges(0, 1)
    assert refused(story, "a", base=0) is RefusalReason.ALREADY_MERGED


def test_work_for_a_round_that_has_merged_is_late_and_older_work_is_stale() -> None:
    story = Story("ab")
    story.starts("a", "b")
    for version in (1, 2):
        timer = the(SetTimer, story.offers_fragment("a"))
        story.timer(timer)
        story.merges(0, version)
        if version == 1:
            assert refused(story, "b", base=0) is RefusalReason.LATE
    effects = story.offers_fragment("b", base=0)
    assert the(RefuseContribution, effects).reason is RefusalReason.STALE_BASE
    assert the(PublishFragment, effects).recipients == (Recipient("b", 1, 0),)  # it is sent what it lacks


def test_staleness_max_lets_older_bases_in() -> None:
    story = Story("ab", staleness_max=1)
    story.starts("a", "b")
    story.timer(the(SetTimer, story.offers_fragment("a")))
    story.merges(0, 1)
    assert all_of(AdmitContribution, story.offers_fragment("b", base=0))


def test_the_same_offer_twice_is_held_once() -> None:
    story = Story("ab")
    story.starts("a", "b")
    offer = story.contribution("a")
    story.happen(ContributionArrived, offer)
    effects = story.happen(ContributionArrived, offer)
    assert the(RefuseContribution, effects).reason is RefusalReason.DUPLICATE
    assert all_of(ReleasePayload, effects) == []  # the round still holds these bytes


def test_a_newer_offer_of_an_island_replaces_its_older_one() -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    story.offers_fragment("a", steps=1, tokens=100)
    effects = story.offers_fragment("a", steps=2, tokens=200)
    assert the(ReleasePayload, effects).reason is ReleaseReason.SUPERSEDED
    merge = the(MergeFragment, story.offers_fragment("b"))
    assert {i.payload for i in merge.inputs} == {"a.1.0.2", "b.1.0.1"}


def test_a_contribution_of_a_replaced_process_is_fenced_and_the_process_ended() -> None:
    story = Story("ab")
    story.starts("a", "b")
    late = story.contribution("b")
    story.timer(the(SetTimer, story.dies("b")))
    effects = story.happen(ContributionArrived, late)
    assert the(RefuseContribution, effects).reason is RefusalReason.FENCED
    assert the(StopIsland, effects).incarnation == 1


def test_what_a_lost_island_sent_is_refused_and_changes_nothing_about_it() -> None:
    story = Story("ab")
    story.starts("a", "b")
    bad = story.contribution("b")
    story.dies("b")
    (refusal,) = story.happen(ContributionUnusable, bad, RefusalReason.NON_FINITE, "embed holds a NaN")
    assert isinstance(refusal, RefuseContribution)
    assert "placing again" in story.island("b").reason


def test_when_the_job_ends_a_grace_window_that_is_open_waits_for_everyone() -> None:
    story = Story("ab", token_budget=300)
    story.starts("a", "b")
    timer = the(SetTimer, story.offers_fragment("a"))
    story.trains("b", 100)
    assert story.timer(timer) == ()
    merge = the(MergeFragment, story.offers_fragment("b"))
    assert (set(inputs(merge)), merge.reason) == ({"a", "b"}, CloseReason.FINAL_FLUSH)


def test_slow_synchronisation_leaves_no_slack_to_wait_in() -> None:
    story = Story("ab")
    story.starts("a", "b")
    story.offers_fragment("a")
    story.offers_fragment("b")
    story.merges(0, 1)
    story.wait(5.0)  # far more than τ steps of 1 s
    story.reports("a", 1, Adopted(0, 1, 1, 100, 0))
    merge = the(MergeFragment, story.offers_fragment("a"))
    assert merge.reason is CloseReason.NO_GRACE_LEFT


def test_at_the_end_of_the_budget_the_last_work_is_merged_before_the_job_ends() -> None:
    story = Story("ab", token_budget=400)
    story.starts("a", "b")
    story.trains("a", 100)
    story.trains("b", 100)
    assert story.core.state.phase == "finishing"
    story.offers_fragment("a")
    story.reports("a", 1, Flushed())
    merge = the(MergeFragment, story.reports("b", 1, Flushed()))
    assert merge.reason is CloseReason.FINAL_FLUSH
