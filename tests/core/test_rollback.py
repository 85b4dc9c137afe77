"""Back to a checkpoint in a running job: versions rise, values return, and what was merged since is told as undone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.accounting.ledger import ROLLED_BACK
from orchestrator.core import commands, events, invariants, saving
from orchestrator.core.effects import (
    AdmitContribution,
    FinishJob,
    FlushIsland,
    MergeFragment,
    PublishFragment,
    RefuseContribution,
    ResolveCommand,
)
from orchestrator.core.messages import Adopted, Saved
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import AllOffers, RefusalReason
from tests.core.test_resuming import Resumed
from tests.harness.story import Story, all_of, the


class Kept(Story):
    """Two islands, one checkpoint at version 1 of fragment 0, one more merge behind it; every token accounted for."""

    def __init__(self, islands: str = "ab", **changed: object) -> None:
        super().__init__(islands, accounted=True, **{"grace_margin": 0.0, **changed})  # no round waits for the other
        self.starts(*islands)
        self.merge_alone("a", 1)
        self.command("c1", commands.Checkpoint())
        for name in islands:
            self.reports(name, 1, Saved(1, "digest", 100, 0.0))
        self.happen(saving.CheckpointTaken, 1, 1000, 0.1)
        self.reports("a", 1, Adopted(0, 1, 4, 100, 0))
        self.trains("a", 100)
        self.merge_alone("a", 2)

    def merge_alone(self, name: str, version: int) -> None:
        total = self.tokens[name, 1]
        self.happen(events.ContributionArrived, replace(self.contribution(name, 0, tokens=100), tokens_total=total))
        self.merges(0, version)

    def back(self, checkpoint: int = 0, command: str = "r1"):
        return self.command(command, commands.Rollback(checkpoint))

    def restored(self, fragment: int, version: int, checkpoint: int = 1):
        return self.happen(saving.FragmentRestored, fragment, version, checkpoint, "then", "now")

    @property
    def versions(self) -> list[int]:
        return [f.version for f in self.core.state.rounds]


def test_every_fragment_becomes_its_next_version_and_everybody_adopts_it_whole() -> None:
    story = Kept()
    asked = story.back()
    assert the(ResolveCommand, asked).detail == "the job goes back to checkpoint 1"
    assert the(saving.RestoreFragments, asked).fragments == ((0, 3, 8), (1, 1, 0))
    published = the(PublishFragment, story.restored(0, 3))
    assert {(r.island, r.merged_offer) for r in published.recipients} == {("a", AllOffers()), ("b", AllOffers())}
    story.restored(1, 1)
    assert story.versions == [3, 1]
    assert story.core.state.rollback is None


def test_what_was_merged_since_is_undone_in_the_accounts_and_what_was_before_is_not() -> None:
    story = Kept()
    account = story.goodput.ledger.accounts["a"][0]
    assert account.merged == 200
    story.back()
    story.restored(0, 3)
    story.restored(0, 3)  # told twice
    assert (account.merged, account.discards[ROLLED_BACK]) == (100, 100)


def test_it_waits_for_the_merge_under_way_and_no_round_closes_meanwhile() -> None:
    story = Kept()
    assert all_of(MergeFragment, story.offers_fragment("b", 0))
    assert not all_of(saving.RestoreFragments, story.back())
    held = story.offers_fragment("b", 1)
    assert all_of(AdmitContribution, held)
    assert not all_of(MergeFragment, held)
    ordered = the(saving.RestoreFragments, story.merges(0, 3))
    assert ordered.fragments == ((0, 4, 12), (1, 1, 0))
    late = the(RefuseContribution, story.offers_fragment("a", 1))
    assert late.reason is RefusalReason.LATE


def test_work_built_on_what_is_undone_is_not_taken_also_where_stale_bases_are() -> None:
    story = Kept(staleness_max=3)
    story.back()
    story.restored(0, 3)
    story.restored(1, 1)
    refused = the(RefuseContribution, story.offers_fragment("b", 0, base=2, tokens=100))
    assert refused.reason is RefusalReason.ALREADY_MERGED
    assert all_of(AdmitContribution, story.offers_fragment("b", 0, base=3, tokens=100))


def test_after_the_next_merge_publications_say_again_what_is_in_them() -> None:
    story = Kept()
    story.back()
    story.restored(0, 3)
    story.restored(1, 1)
    story.offers_fragment("b", 0, base=3, tokens=100)
    published = the(PublishFragment, story.merges(0, 4))
    offers = {r.island: r.merged_offer for r in published.recipients}
    assert isinstance(offers["b"], int)
    assert offers["a"] == AllOffers()


def test_a_checkpoint_that_cannot_be_read_leaves_all_as_it_was() -> None:
    story = Kept()
    story.back()
    story.happen(saving.RollbackFailed, 1, "fragment-0001.parameters is damaged")
    assert story.versions == [2, 0]
    assert all_of(MergeFragment, story.offers_fragment("b", 0))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_synchroniser_that_dies_on_the_way_goes_on_with_what_is_left(first: int) -> None:
    story = Kept()
    story.back()
    for fragment, version in [(0, 3), (1, 1)][:first]:
        story.restored(fragment, version)
    again = story.happen(events.SynchroniserRestarted, 2)
    orders = all_of(saving.RestoreFragments, again)
    assert [order.fragments for order in orders] == [((0, 3, 8), (1, 1, 0))[first:]][: 2 - first]
    for fragment, version in [(0, 3), (1, 1)][first:]:
        story.restored(fragment, version)
    assert story.versions == [3, 1]


@pytest.mark.parametrize("fails", [False, True])
def test_a_merge_that_came_to_nothing_is_in_no_checkpoint_that_begins_before_the_next(fails: bool) -> None:
    """Its work is offered again, and is its island's until it merges: a checkpoint that counts it as merged has it twice."""
    story = Resumed("ab", quorum=2)
    story.starts("a", "b")
    for name in "ab":
        story.trains(name, tokens=100)
    before = story.goodput.ledger.token_totals().merged[0]
    inputs = [story.contribution(name, offer=1) for name in "ab"]
    ordered = [all_of(MergeFragment, story.happen(events.ContributionArrived, given)) for given in inputs]
    assert [len(orders) for orders in ordered] == [0, 1]
    assert story.goodput.ledger.token_totals().merged[0] == before + 200
    if fails:
        named = tuple(given.payload for given in inputs)
        story.happen(events.MergeFailed, 0, ordered[1][0].version, named, "a value is not finite")
        again = story.contribution("a", offer=2)
    else:
        story.happen(events.SynchroniserRestarted, 2)
        again = inputs[0]
    assert all_of(AdmitContribution, story.happen(events.ContributionArrived, again))
    assert story.goodput.ledger.token_totals().merged[0] == before


def test_a_job_that_is_cancelled_on_the_way_back_ends_with_that() -> None:
    story = Kept()
    story.back()
    story.restored(0, 3)
    over = story.command("x", commands.Cancel())
    assert isinstance(over[-1], FinishJob)
    assert not all_of(saving.RestoreFragments, over)
    assert not story.restored(1, 1)


def test_a_job_that_ends_goes_the_rest_of_the_way_back_also_over_the_synchronisers_death() -> None:
    story = Kept(token_budget=1000)
    story.back()
    story.restored(0, 3)
    assert all_of(FlushIsland, story.trains("a", 1000))
    assert the(saving.RestoreFragments, story.happen(events.SynchroniserRestarted, 2)).fragments == ((1, 1, 0),)
    story.restored(1, 1)
    assert story.versions == [3, 1]


def test_a_way_back_that_a_job_ends_before_it_is_begun_is_called_off_and_what_waited_for_it_merges() -> None:
    story = Kept("a", token_budget=1000)
    story.trains("a", 100)
    merging = story.offers_fragment("a", 0)
    story.back()
    assert not all_of(MergeFragment, story.offers_fragment("a", 1))
    ending = story.trains("a", 1000)
    assert all_of(FlushIsland, ending)
    assert [order.fragment for order in all_of(MergeFragment, merging)] == [0]
    assert [order.fragment for order in all_of(MergeFragment, ending)] == [1]
    story.merges(0, 3)
    assert story.versions == [3, 0]


def test_only_a_kept_checkpoint_is_gone_back_to_once_at_a_time_and_none_is_taken_meanwhile() -> None:
    story = Kept()
    refused = the(ResolveCommand, story.back(7, "r0"))
    assert not refused.accepted
    assert "there are the checkpoints 1" in refused.detail
    story.back(1)
    assert "already" in the(ResolveCommand, story.back(1, "r2")).detail
    assert "goes back to checkpoint 1" in the(ResolveCommand, story.command("c2", commands.Checkpoint())).detail
    none = Story("a")
    none.starts("a")
    assert "(none)" in the(ResolveCommand, none.command("r", commands.Rollback(0))).detail


def test_a_tape_with_a_rollback_is_replayed_to_the_same_decisions() -> None:
    story = Kept()
    story.offers_fragment("b", 0)
    story.back()
    story.merges(0, 3)
    story.restored(0, 4)
    story.restored(1, 1)
    again = Synchroniser(story.policy)
    for record in story.records:
        assert again.handle(record.event) == record.effects
        invariants.check(again.state)


def test_a_version_that_the_journal_lost_is_replaced_by_the_one_before_and_only_its_merge_is_undone() -> None:
    story = Kept()
    before = story.goodput.summary()["tokens"]["merged"]
    published = the(PublishFragment, story.restored(0, 3, saving.FromJournal()))
    assert {(r.island, r.merged_offer) for r in published.recipients} == {("a", AllOffers()), ("b", AllOffers())}
    assert story.versions == [3, 0]
    tokens = story.goodput.summary()["tokens"]
    assert before - tokens["merged"] == pytest.approx(100 / 2)  # of one of two fragments
    assert story.goodput.summary()["discarded_tokens"][ROLLED_BACK] == pytest.approx(100 / 2)
    assert story.restored(0, 3, saving.FromJournal()) == ()
    assert story.restored(0, 5, saving.FromJournal()) == ()
    story.merge_alone("a", 4)
    assert story.versions == [4, 0]
