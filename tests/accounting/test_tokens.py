"""Where tokens go, in stories small enough to add up by hand. Figures are means over the two fragments."""

from __future__ import annotations

import pytest

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.vocabulary import RefusalReason, ReleaseReason
from orchestrator.errors import InternalError
from orchestrator.tape.codec import parse_timer

from .dictation import Dictation


@pytest.fixture
def story():
    return Dictation().train_from(0.0)


def test_trained_tokens_are_in_flight_until_something_becomes_of_them(story):
    story.progress(1.0, tokens=100, stepping=1.0)
    assert story.tokens() == {"trained": 100, "merged": 0, "discarded": 0, "in_flight": 100}


def test_a_repeated_or_older_report_changes_nothing(story):
    story.progress(1.0, tokens=100, stepping=1.0).progress(1.1, tokens=100, stepping=1.0)
    story.progress(1.2, tokens=60, stepping=0.6)
    assert story.tokens()["trained"] == 100


def test_a_merge_of_one_of_two_fragments_merges_half(story):
    c = story.contribution(100, total=100)
    story.admit(1.0, c).close(1.1, c).merged(1.2, c)
    assert story.tokens() == {"trained": 100, "merged": 50, "discarded": 0, "in_flight": 50}


def test_a_merge_that_was_not_completed_merges_nothing(story):
    c = story.contribution(100, total=100)
    story.admit(1.0, c).close(1.1, c)
    assert story.tokens()["merged"] == 0


def test_an_adoption_overwrites_what_was_trained_since_the_offer(story):
    c = story.contribution(100, total=100)
    story.admit(1.0, c).close(1.1, c).merged(1.2, c).adopted(1.3, total=120)
    assert story.tokens() == {"trained": 120, "merged": 50, "discarded": 10, "in_flight": 60}
    assert story.goodput.summary()["discarded_tokens"] == {"overwritten": 10}


def test_an_adoption_that_keeps_local_work_discards_nothing(story):
    c = story.contribution(100, total=100)
    story.admit(1.0, c).close(1.1, c).merged(1.2, c).adopted(1.3, total=120, kept=20)
    assert story.tokens() == {"trained": 120, "merged": 50, "discarded": 0, "in_flight": 70}


def test_an_adoption_that_keeps_local_work_keeps_what_is_held_of_it(story):
    """By `rebase` a held offer is still the island's own: released, it returns, and a newer offer counts it again."""
    c = story.contribution(100, total=100)
    story.admit(1.0, c).adopted(1.3, total=120, kept=120)
    newer = story.contribution(150, total=150, offer=2, base=1)
    story.admit(2.0, newer, f.ReleasePayload(c.payload, ReleaseReason.SUPERSEDED))
    assert story.tokens() == {"trained": 150, "merged": 0, "discarded": 0, "in_flight": 150}
    assert story.goodput.ledger.accounts["east"][0].held[newer.payload].reclaimed == 0


def test_a_held_offer_does_not_return_to_an_island_that_adopted_without_it(story):
    c = story.contribution(100, total=100)
    story.admit(1.0, c).adopted(1.3, total=100)
    newer = story.contribution(30, total=130, offer=2, base=1)
    story.admit(2.0, newer, f.ReleasePayload(c.payload, ReleaseReason.SUPERSEDED))
    assert story.tokens() == {"trained": 130, "merged": 0, "discarded": 50, "in_flight": 80}


def test_an_adoption_heard_twice_discards_once(story):
    c = story.contribution(100, total=100)
    story.admit(1.0, c).close(1.1, c).merged(1.2, c).adopted(1.3, total=120)
    story.progress(1.4, tokens=200, stepping=2.0).adopted(1.5, total=120)
    assert story.tokens()["discarded"] == 10


def test_an_adoption_heard_late_leaves_what_was_trained_after_it(story):
    story.progress(1.0, tokens=150, stepping=1.5).adopted(1.1, total=100)
    assert story.tokens()["discarded"] == 50  # the 100 of one fragment; the 50 that followed stay


def test_a_superseded_offer_gives_its_tokens_to_the_newer_one(story):
    first, second = story.contribution(100, total=100), story.contribution(160, total=160, offer=2)
    story.admit(1.0, first).admit(2.0, second, f.ReleasePayload(first.payload, ReleaseReason.SUPERSEDED))
    story.close(2.1, second).merged(2.2, second)
    assert story.tokens() == {"trained": 160, "merged": 80, "discarded": 0, "in_flight": 80}


def test_a_refused_offer_is_discarded_at_the_next_adoption_under_its_reason(story):
    story.refuse(1.0, story.contribution(100, total=100), RefusalReason.LATE)
    assert story.tokens()["discarded"] == 0
    story.adopted(1.2, total=130)
    assert story.goodput.summary()["discarded_tokens"] == {
        "refused: late": 50,
        "overwritten": 15,
    }


def test_a_held_offer_of_an_island_that_died_still_merges(story):
    c = story.contribution(100, total=100)
    story.admit(1.0, c).progress(1.5, tokens=150, stepping=1.5).died(1.6)
    assert story.tokens() == {"trained": 150, "merged": 0, "discarded": 100, "in_flight": 50}
    story.close(1.7, c).merged(1.8, c)
    assert story.tokens() == {"trained": 150, "merged": 50, "discarded": 100, "in_flight": 0}


def test_a_held_offer_of_an_island_that_died_does_not_return_to_it(story):
    c = story.contribution(100, total=100)
    story.admit(1.0, c).died(1.5).train_from(2.0, incarnation=2)
    newer = story.contribution(40, total=40, incarnation=2)
    story.admit(3.0, newer, f.ReleasePayload(c.payload, ReleaseReason.SUPERSEDED))
    assert story.tokens() == {"trained": 140, "merged": 0, "discarded": 100, "in_flight": 40}


def test_an_offer_that_turns_up_after_its_island_was_lost_is_reclaimed(story):
    c = story.contribution(100, total=100)
    story.progress(1.0, tokens=100, stepping=1.0).died(1.1)
    assert story.tokens()["discarded"] == 100
    story.admit(1.2, c).close(1.3, c).merged(1.4, c)
    assert story.tokens() == {"trained": 100, "merged": 50, "discarded": 50, "in_flight": 0}


def test_what_an_island_in_quarantine_had_not_contributed_is_discarded_under_that_name(story):
    held = story.contribution(60, total=60, fragment=1)
    story.admit(1.0, held)
    bad = story.contribution(100, total=100)
    story.tell(
        e.ContributionUnusable(2.0, bad, RefusalReason.NON_FINITE, "why"),
        f.RefuseContribution(bad, RefusalReason.NON_FINITE, "why"),
        f.QuarantineIsland("east", 1, RefusalReason.NON_FINITE, "why"),
        f.StopIsland("east", 1, "why"),
        f.SetTimer(parse_timer("backoff:east"), 1, 3.0),
    )
    assert story.goodput.summary()["discarded_tokens"] == {"quarantined": 70.0}
    assert story.tokens()["in_flight"] == 30
    assert story.statistics.summary()["traffic"]["quarantines"] == {"east": 1}
    story.train_from(4.0, incarnation=2).progress(5.0, tokens=30, stepping=0.3, incarnation=2)
    story.adopted(5.1, total=30, incarnation=2)
    assert story.goodput.summary()["discarded_tokens"] == {"quarantined": 70.0, "overwritten": 15.0}


def test_work_of_a_merge_that_failed_goes_back_to_its_islands(story):
    c = story.contribution(100, total=100)
    story.admit(1.0, c).close(1.1, c)
    failed = e.MergeFailed(1.2, 0, 1, (c.payload,), "why")
    story.tell(failed, f.ReleasePayload(c.payload, ReleaseReason.ABANDONED))
    assert story.tokens() == {"trained": 100, "merged": 0, "discarded": 0, "in_flight": 100}
    again = story.contribution(120, total=120, offer=2)
    story.admit(2.0, again).close(2.1, again).merged(2.2, again)
    assert story.tokens() == {"trained": 120, "merged": 60, "discarded": 0, "in_flight": 60}
    told = story.statistics.summary()
    assert (told["merges"], told["traffic"]["merge_failures"]) == (1, 1)


def test_a_replaced_process_that_trains_on_trains_in_vain(story):
    story.progress(1.0, tokens=100, stepping=1.0).died(1.5).train_from(2.0, incarnation=2)
    story.progress(2.5, tokens=30, stepping=0.3, incarnation=2)
    story.progress(2.6, tokens=180, stepping=1.8, incarnation=1)
    assert story.tokens() == {"trained": 210, "merged": 0, "discarded": 180, "in_flight": 30}


def test_at_the_end_nothing_is_in_flight(story):
    c = story.contribution(100, total=100)
    story.admit(1.0, c).finish(2.0, f.ReleasePayload(c.payload, ReleaseReason.ABANDONED))
    assert story.tokens() == {"trained": 100, "merged": 0, "discarded": 100, "in_flight": 0}


def test_tokens_that_were_never_trained_are_noticed(story):
    c = story.contribution(100, total=60)
    with pytest.raises(InternalError, match="east, fragment 0: trained 60 is not"):
        story.admit(1.0, c)
