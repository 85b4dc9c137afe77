"""What a replica decides at its boundaries: due offers, adoptions, cuts, flushing, draining, promotion."""

from __future__ import annotations

import pytest

from orchestrator.core.messages import Adopted, Drained, Flushed, Offer
from orchestrator.core.vocabulary import NO_ANCHOR, AllOffers, FragmentId, Schedule, ScheduleAnchor, Version
from orchestrator.errors import InternalError
from orchestrator.replica.replica import (
    AdoptVersion,
    BoundaryPlan,
    Continuation,
    CutState,
    ExportState,
    OfferFragment,
    Publication,
    Replica,
    ReplicaPolicy,
)
from orchestrator.replica.work import SNAPSHOTS_MAX, AdoptionRule, Replace

TOKENS = 8
ISLANDS = 2


def replica(adoption: AdoptionRule = "replace", interval: int = 4, fragments: int = 2, step: int = 0) -> Replica:
    """It holds version 0 of everything, and was let train."""
    made = idle(adoption, interval, fragments)
    made.hold((Version(0),) * fragments, step)
    made.start()
    return made


def idle(adoption: AdoptionRule = "replace", interval: int = 4, fragments: int = 2) -> Replica:
    return Replica(ReplicaPolicy(Schedule(fragments, interval), adoption, ISLANDS * TOKENS, SNAPSHOTS_MAX[adoption]))


def publish(
    to: Replica, fragment: int, version: int, step: int = 0, merged: int = 0, fix: ScheduleAnchor = NO_ANCHOR
) -> bool:
    return to.publication_arrived(Publication(FragmentId(fragment), Version(version), step, merged, fix))


def steps(of: Replica, count: int) -> list[BoundaryPlan]:
    """So many inner steps, each with the boundary behind it."""
    plans = []
    for _ in range(count):
        of.step_taken(TOKENS)
        plans.append(of.boundary())
    return plans


def reports(plans: list[BoundaryPlan]) -> list[object]:
    return [report for plan in plans for report in plan.reports()]


def offers(plans: list[BoundaryPlan]) -> list[Offer]:
    return [report for report in reports(plans) if isinstance(report, Offer)]


def test_fragments_are_offered_when_due_with_what_was_trained_since_adoption() -> None:
    island = replica()  # H = 4, P = 2: fragment 0 at 4, 8, …; fragment 1 at 2, 6, …
    assert offers(steps(island, 1)) == []
    assert offers(steps(island, 1)) == [Offer(1, 1, 2, 0, 2, 2 * TOKENS, 2 * TOKENS)]
    assert offers(steps(island, 2)) == [Offer(0, 2, 4, 0, 4, 4 * TOKENS, 4 * TOKENS)]
    assert offers(steps(island, 2)) == [Offer(1, 3, 6, 0, 6, 6 * TOKENS, 6 * TOKENS)]


def test_an_offer_stands_until_it_is_replaced_or_its_work_is_in_an_adopted_version() -> None:
    island = replica()
    steps(island, 6)
    assert not island.stands(FragmentId(1), 1)
    assert [(offer.fragment, offer.offer) for offer in island.standing_offers()] == [(1, 3), (0, 2)]
    publish(island, 1, 1, 6, merged=1)
    steps(island, 1)
    assert island.stands(FragmentId(1), 3)  # what was merged was the one before
    publish(island, 1, 2, 6, merged=3)
    steps(island, 1)
    assert not island.stands(FragmentId(1), 3)
    publish(island, 0, 1, 6, merged=AllOffers())
    steps(island, 1)
    assert [offer.fragment for offer in island.standing_offers()] == []


def test_only_the_newest_of_several_published_versions_is_adopted_and_older_ones_never() -> None:
    island = idle()
    island.hold((Version(3), Version(3)), 0)
    island.start()
    assert [publish(island, 0, version, 1) for version in (5, 7, 6, 7)] == [True, True, False, False]
    publish(island, 1, 3, 1)
    adopted = [report for report in reports(steps(island, 1)) if isinstance(report, Adopted)]
    assert adopted == [Adopted(0, 7, 1, TOKENS, 0)]


def test_a_version_is_adopted_before_the_fragment_is_offered_on_it() -> None:
    island = replica(adoption="rebase")
    steps(island, 1)
    publish(island, 1, 1)
    (plan,) = steps(island, 1)
    assert [type(action) for action in plan.actions] == [AdoptVersion, OfferFragment]
    assert offers([plan]) == [Offer(1, 1, 2, 1, 2, 2 * TOKENS, 2 * TOKENS)]


def test_a_fragment_from_further_on_raises_the_clock_and_what_it_passes_is_offered() -> None:
    island = replica(interval=12, fragments=4)  # due at 12, 3, 6, 9
    steps(island, 1)
    publish(island, 0, 1, step=7)
    assert [(o.fragment, o.step, o.step_count) for o in offers(steps(island, 1))] == [(1, 7, 2), (2, 7, 2)]
    assert [(o.fragment, o.step) for o in offers(steps(island, 2))] == [(3, 9)]


def test_the_schedule_follows_what_the_job_has_trained_and_not_the_clock() -> None:
    island = replica(interval=12, fragments=4)
    steps(island, 3)
    publish(island, 0, 1, step=9, fix=ScheduleAnchor(ISLANDS * TOKENS * 2, 9))
    assert island.schedule_step == 3
    island.boundary()
    assert (island.step, island.schedule_step) == (9, 2)
    publish(island, 1, 1, step=8, fix=ScheduleAnchor(ISLANDS * TOKENS * 6, 10))
    steps(island, 2)
    assert island.schedule_step == 7
    publish(island, 1, 2, step=8, fix=ScheduleAnchor(ISLANDS * TOKENS * 5, 9))  # no news
    steps(island, 1)
    assert (island.anchor, island.schedule_step) == (ScheduleAnchor(ISLANDS * TOKENS * 6, 10), 8)


def test_who_begins_is_told_where_the_schedule_is_and_who_trains_already_is_not() -> None:
    island = idle()
    island.hold((Version(0), Version(0)), 30)
    island.start(ScheduleAnchor(ISLANDS * TOKENS * 20, 29))
    island.start(ScheduleAnchor(ISLANDS * TOKENS * 50, 29))
    assert island.schedule_step == 21


def test_a_flush_offers_all_uncovered_work_then_says_so_and_no_step_follows() -> None:
    island = replica(fragments=3, interval=6)  # due at 6, 2, 4
    steps(island, 2)
    island.flush()
    (plan,) = steps(island, 1)
    assert plan.continuation is Continuation.END
    assert [(o.fragment, o.token_count) for o in offers([plan])] == [(p, 3 * TOKENS) for p in range(3)]
    assert plan.reports()[-1] == Flushed()


def test_an_offer_that_covers_everything_is_not_repeated_by_a_flush() -> None:
    island = replica()
    steps(island, 2)  # fragment 1 was offered now
    island.flush()
    assert [offer.fragment for offer in offers([island.boundary()])] == [0]


def test_draining_offers_again_what_a_version_lacks_and_says_so_once_versions_hold_all_work() -> None:
    island = replica(adoption="rebase")  # due: fragment 0 at 4, 8, …; fragment 1 at 2, 6, …
    steps(island, 3)  # fragment 1 was offered at 2, with 2 steps of what are 4 by the next boundary
    assert island.fetched(FragmentId(1), 1)
    island.drain()
    (plan,) = steps(island, 1)
    assert plan.continuation is Continuation.AWAIT_PUBLICATION
    assert [(o.fragment, o.offer, o.step_count) for o in offers([plan])] == [(0, 2, 4), (1, 3, 4)]
    publish(island, 0, 1, 4, merged=2)
    publish(island, 1, 1, 4, merged=1)  # it came too late for more than the first offer
    plan = island.boundary()
    assert offers([plan]) == [Offer(1, 4, 4, 1, 2, 2 * TOKENS, 4 * TOKENS)]
    assert plan.continuation is Continuation.AWAIT_PUBLICATION
    publish(island, 1, 2, 4, merged=4)
    plan = island.boundary()
    assert plan.continuation is Continuation.END
    assert plan.reports()[-1] == Drained()


def test_a_drain_that_is_called_off_lets_the_island_train_on() -> None:
    island = replica(adoption="rebase")
    island.step_taken(TOKENS)
    island.drain()
    assert len(offers([island.boundary()])) == 2
    island.start()
    assert island.boundary().continuation is Continuation.STEP
    assert [o.step_count for o in offers(steps(island, 1))] == [2]


def test_a_flush_goes_before_a_drain() -> None:
    island = replica()
    steps(island, 1)
    island.drain()
    island.flush()
    plan = island.boundary()
    assert (plan.continuation, plan.reports()[-1]) == (Continuation.END, Flushed())


def test_a_cut_is_of_what_the_island_is_before_it_adopts_and_an_export_of_what_it_is_after() -> None:
    island = replica(adoption="rebase")
    steps(island, 3)
    publish(island, 0, 1, step=9)
    island.step_taken(TOKENS)
    plan = island.boundary(cut=True, requests=((0, 1), None))
    cut, *_, export = plan.actions
    assert isinstance(cut, CutState)
    assert isinstance(export, ExportState)
    assert (cut.position.step, cut.position.offered_step, cut.position.versions) == (4, 3, (0, 0))
    assert cut.position.token_counts == (4 * TOKENS, 4 * TOKENS)
    assert (export.step, export.versions, export.requests) == (9, (1, 0), ((0, 1), None))


def test_an_island_goes_on_from_its_cut_where_theta_has_not_moved_past_it() -> None:
    before = replica(adoption="rebase")
    steps(before, 3)
    position = before.position
    after = idle(adoption="rebase")
    assert after.hold_saved(position, (Version(0), Version(2))) == (1,)
    after.start()
    assert (after.step, after.offered_step, after.versions) == (3, 3, (0, 2))
    made = offers(steps(after, 3))
    assert [(o.fragment, o.base_version, o.step_count, o.tokens_total) for o in made] == [(0, 0, 4, 8), (1, 2, 3, 24)]


def test_a_standby_is_promoted_on_what_was_published_since_and_reports_nothing_of_it() -> None:
    standby = idle(adoption="rebase")
    standby.hold((Version(0), Version(0)), 0)
    publish(standby, 0, 2, step=30)
    publish(standby, 0, 3, step=40)
    (adoption,) = standby.promote()
    assert (adoption.report.fragment, adoption.report.version, adoption.mode) == (0, 3, Replace())
    assert (standby.versions, standby.step, standby.offered_step) == ((3, 0), 40, 40)
    publish(standby, 1, 1)
    assert [adoption.report.fragment for adoption in standby.promote()] == [1]  # asked again before it trains
    standby.start()
    assert standby.boundary().actions == ()


def test_who_holds_no_state_or_trains_already_is_not_promoted() -> None:
    island = idle()
    with pytest.raises(InternalError, match="holds a state"):
        island.promote()
    with pytest.raises(InternalError, match="before it held a state"):
        island.start()
    island.hold((Version(0), Version(0)), 0)
    island.start()
    with pytest.raises(InternalError, match="has not trained"):
        island.promote()


def test_a_state_of_another_number_of_fragments_is_refused() -> None:
    with pytest.raises(InternalError, match="3 versions came for 2 fragments"):
        idle().hold((Version(0),) * 3, 0)
