"""A job that goes on from a checkpoint: where its fragments stand, who takes its own state, and what every token became."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.ledger import NOT_TAKEN_UP
from orchestrator.core import events, saving
from orchestrator.core.effects import BeginCatchUp, FlushIsland, MergeFragment, PublishFragment, SetTimer
from orchestrator.core.messages import CatchUpFailure, CaughtUp
from orchestrator.core.vocabulary import IslandId, Version
from tests.harness.story import Story, all_of, policy, the

KEPT = (40, 0)
RESUMED = saving.JobResumed(
    at=0.0,
    checkpoint="/somewhere/000007",
    job="before",
    versions=(Version(5), Version(4)),
    steps=(20, 18),
    tokens_trained=1_000,
    merged_tokens=(900, 800),
    islands=(saving.SavedIsland(IslandId("a"), 21, KEPT), saving.SavedIsland(IslandId("b"), 19, (10, 10))),
    refused=(),
)


class Resumed(Story):
    """The same short language; the job begins from ``RESUMED`` and every token is accounted for after every event."""

    def __init__(self, islands: str = "abc", **changed: object) -> None:
        super().__init__(islands, accounted=True, before=(RESUMED,), **changed)

    def catches_up(self, name: str, donor: str | None):
        versions = tuple(f.version for f in self.core.state.rounds)
        return self.reports(name, self.incarnation(name), CaughtUp(donor, versions, 20, 0.1))


def test_fragments_stand_where_the_checkpoint_has_them_and_the_budget_counts_on() -> None:
    story = Resumed("abc", token_budget=1_150)
    assert [f.version for f in story.core.state.rounds] == [5, 4]
    assert story.core.state.tokens_trained == 1_000
    story.is_ready("a")
    story.catches_up("a", "a")
    assert not all_of(FlushIsland, story.trains("a", tokens=100))
    assert all_of(FlushIsland, story.trains("a", tokens=50))


def test_each_island_of_the_checkpoint_takes_its_own_state_and_a_new_one_that_of_a_peer() -> None:
    story = Resumed("abc")
    for name in "ab":
        begun = story.is_ready(name)
        assert (begun.donor, begun.cursor) == ((name, 0), 0)
    assert story.is_ready("c").donor is None  # nobody trains yet
    story.catches_up("a", "a")
    failed = story.reports("b", 1, CatchUpFailure("b", "its part is damaged"))
    assert the(BeginCatchUp, failed).donor == ("a", 1)
    assert story.island("a").reason == "state taken from the checkpoint"


def test_only_the_first_life_takes_the_state_of_the_checkpoint() -> None:
    story = Resumed("ab")
    story.is_ready("a")
    backoff = the(SetTimer, story.dies("a"))
    story.timer(backoff)
    assert story.is_ready("a").donor is None
    assert story.goodput.ledger.accounts["a"][0].discarded == KEPT[0]


def test_merges_go_on_at_the_next_version_and_kept_work_merges_with_them() -> None:
    story = Resumed("ab")
    story.is_ready("a")
    assert not all_of(PublishFragment, story.catches_up("a", "a"))
    story.trains("a", tokens=100)
    offered = replace(story.contribution("a", 0, tokens=140), tokens_total=100)  # 40 of them are of its earlier life
    merging = story.happen(events.ContributionArrived, offered)
    assert the(MergeFragment, merging).version == 6
    story.merges(0, 6)
    account = story.goodput.ledger.accounts["a"][0]
    assert (account.merged, account.local, account.carried) == (140, 0, 40)
    assert story.goodput.ledger.token_totals().merged == (1_040, 800)
    assert story.goodput.ledger.token_totals().trained == 1_100


def test_every_token_before_the_checkpoint_is_merged_lost_or_kept() -> None:
    carried = Resumed("abc").goodput.ledger.carried
    assert carried.kept == (50, 10)
    assert carried.discarded == (50, 190)
    summary = Resumed("abc").goodput.summary()
    assert summary["carried"]["trained"] == 1_000


@pytest.mark.parametrize("donor", [None, "b"])
def test_work_that_an_island_does_not_take_up_is_lost_and_told(donor: str | None) -> None:
    story = Resumed("ab")
    story.is_ready("a")
    story.reports("a", 1, CatchUpFailure("a", "its part is damaged"))
    story.catches_up("a", donor)
    account = story.goodput.ledger.accounts["a"][0]
    assert account.discards == {NOT_TAKEN_UP: 40}
    story.trains("a", tokens=100)
    story.catches_up("a", donor)  # said twice
    assert account.local == 100


def test_a_beginning_that_is_told_twice_changes_nothing() -> None:
    story = Resumed("ab")
    story.is_ready("a")
    story.catches_up("a", "a")
    story.trains("a", tokens=100)
    story.offers_fragment("a", 0, tokens=140)
    story.merges(0, 6)
    assert not story.tell(RESUMED)
    assert [f.version for f in story.core.state.rounds] == [6, 4]
    assert story.core.state.tokens_trained == 1_100


def test_a_checkpoint_that_claims_more_merged_than_trained_is_found_out() -> None:
    goodput = Goodput(policy("a"))
    impossible = saving.JobResumed(0.0, "", "", (Version(1), Version(1)), (0, 0), 100, (101, 0), (), ())
    goodput.apply(impossible, ())
    with pytest.raises(Exception, match="more than was trained"):
        goodput.check()
