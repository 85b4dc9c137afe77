"""What adoption keeps of an island's own work, by rule, and that an island that is cut off needs few snapshots."""

from __future__ import annotations

import pytest

from learners.contract import StepResult
from orchestrator.core.messages import MixtureFigures
from orchestrator.core.vocabulary import AllOffers, Version
from orchestrator.replica.work import (
    LOSSES_BEFORE,
    SNAPSHOTS_MAX,
    AdoptionRule,
    ExpertLoad,
    FragmentWork,
    Mix,
    Odometer,
    Rebase,
    Replace,
    Trained,
)

ADOPTED_AT = 50


def tokens(count: int) -> Trained:
    return Trained(count // 10, count)


def work(offers: int, rule: AdoptionRule, fetched_up_to: int = 1000) -> FragmentWork:
    """Version 1 was adopted after offer 10, with nothing kept; then ``offers`` more were made, each after ten tokens."""
    made = FragmentWork()
    made.adopt(Version(1), tokens(0), tokens(ADOPTED_AT), offers_before=10)
    for number in range(1, offers + 1):
        made.offered(10 + number, tokens(ADOPTED_AT + 10 * number), SNAPSHOTS_MAX[rule])
        if number <= fetched_up_to:
            made.fetched.add(10 + number)
    return made


@pytest.mark.parametrize("rule", ["replace", "mix", "rebase"])
def test_snapshots_are_bounded_however_long_nothing_is_published(rule: AdoptionRule) -> None:
    assert len(work(1000, rule).offers) == SNAPSHOTS_MAX[rule]


@pytest.mark.parametrize("rule", ["replace", "mix", "rebase"])
def test_whoever_is_cut_off_keeps_the_latest_offer_that_nobody_fetched_and_those_that_may_be_merged(
    rule: AdoptionRule,
) -> None:
    assert list(work(1000, rule, fetched_up_to=0).offers) == [1010]
    fetched = SNAPSHOTS_MAX[rule] - 1
    assert list(work(1000, rule, fetched_up_to=2).offers) == [11, 12, 1010][-1 - min(2, fetched) :]


def test_rebase_keeps_what_follows_the_merged_offer_and_all_when_none_was_merged() -> None:
    ours, now = work(3, "rebase"), tokens(ADOPTED_AT + 35)
    assert ours.since_origin(now).tokens == 35
    assert ours.load_mode(12, "rebase") == Rebase(12)
    assert ours.remaining(Rebase(12), now).tokens == 15
    for merged_before in (0, 10):
        assert ours.load_mode(merged_before, "rebase") == Rebase(None)
    assert ours.remaining(Rebase(None), now).tokens == 35


def test_rebase_on_a_merged_offer_that_was_dropped_keeps_nothing_rather_than_counting_twice() -> None:
    assert work(9, "rebase").load_mode(11, "rebase") == Replace()


@pytest.mark.parametrize("rule", ["replace", "mix", "rebase"])
def test_of_what_is_rolled_back_nothing_is_kept(rule: AdoptionRule) -> None:
    ours = work(3, rule)
    mode = ours.load_mode(AllOffers(), rule)
    assert (mode, ours.remaining(mode, tokens(500))) == (Replace(), (0, 0))


def test_mixing_keeps_what_follows_the_latest_offer_whether_it_was_merged_or_not() -> None:
    ours, now = work(3, "mix"), tokens(ADOPTED_AT + 35)
    assert (ours.load_mode(0, "mix"), ours.load_mode(13, "mix")) == (Mix(0), Mix(13))
    assert ours.remaining(Mix(), now).tokens == 5
    assert work(0, "mix").load_mode(0, "mix") == Replace(0)


def test_kept_work_is_work_on_the_new_version_and_is_not_offered_yet() -> None:
    ours, now = work(3, "rebase"), tokens(ADOPTED_AT + 35)
    ours.adopt(Version(2), ours.remaining(Rebase(12), now), now, offers_before=13)
    assert (ours.version, ours.since_origin(now).tokens, ours.unoffered_tokens(now)) == (2, 15, 15)
    assert ours.offers == {}


def test_a_report_has_the_figures_of_the_last_step_and_the_utilisation_at_the_median_step() -> None:
    odometer = Odometer()
    for seconds in (1.0, 2.0, 9.0):
        odometer.count(seconds, 0.0)
        odometer.latest = StepResult(8, seconds, learning_rate=1e-3 / 3, gradient_norm=0.1 * seconds, ideal_seconds=0.5)
    report = odometer.report(3, 3, 24)
    assert (report.loss, report.learning_rate, report.gradient_norm) == (9.0, 3.333333e-4, 0.9)
    assert report.mfu_ratio == 0.25
    odometer.latest = StepResult(8, 4.0)
    report = odometer.report(4, 4, 32)
    assert report.mixture is None
    assert (report.loss, report.learning_rate, report.gradient_norm, report.mfu_ratio) == (4.0, None, None, None)


def test_losses_around_adoptions_are_means_of_the_steps_before_and_of_the_first_step_after():
    odometer, load = Odometer(), ExpertLoad(0.5, 0.75)
    odometer.adopted()  # before any step there is nothing to compare with
    for loss in (5.0, 4.0, 3.0):
        odometer.count(1.0, 0.0, StepResult(8, loss, expert_load=load))
    assert odometer.report(3, 3, 24).mixture == MixtureFigures(0.5, 0.75)
    odometer.adopted()
    odometer.adopted()  # two fragments at one boundary are one adoption
    odometer.count(1.0, 0.0, StepResult(8, 6.0, expert_load=load))
    odometer.count(1.0, 0.0, StepResult(8, 2.0, expert_load=load))
    odometer.adopted()
    odometer.count(1.0, 0.0, StepResult(8, 3.5, expert_load=ExpertLoad(0.25, 1.0)))
    # (5 + 4 + 3) / 3 before 6, and (5 + 4 + 3 + 6 + 2) / 5 before 3.5
    assert odometer.report(6, 6, 48).mixture == MixtureFigures(0.25, 1.0, 2, 4.0, 4.75)
    assert odometer.report(6, 6, 48).mixture == MixtureFigures(0.25, 1.0), "an adoption is reported once"


def test_losses_that_are_no_numbers_and_steps_long_ago_are_not_compared():
    odometer, load = Odometer(), ExpertLoad(0.5, 0.75)
    for step in range(LOSSES_BEFORE + 3):
        odometer.count(1.0, 0.0, StepResult(8, 100.0 if step < 3 else 1.0, expert_load=load))
    odometer.adopted()
    odometer.count(1.0, 0.0, StepResult(8, 2.0, expert_load=load))
    assert odometer.report(1, 1, 8).mixture == MixtureFigures(0.5, 0.75, 1, 1.0, 2.0)
    odometer.adopted()
    odometer.count(1.0, 0.0, StepResult(8, float("nan"), expert_load=load))
    assert odometer.report(2, 2, 16).mixture == MixtureFigures(0.5, 0.75)
