"""What travelled, and how long the parts of a round took, as told by small stories."""

from __future__ import annotations

import pytest

from orchestrator.accounting.series import Histogram
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import CatchUpFailure, CaughtUp
from orchestrator.core.vocabulary import CloseReason, RefusalReason

from .dictation import Dictation


def traffic(story: Dictation) -> dict:
    return story.statistics.summary()["traffic"]


def test_a_value_belongs_to_the_first_bound_that_is_not_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.summary() == {"bounds": [1.0, 2.0], "counts": [2, 2, 1], "sum": 13.5}


def test_payloads_are_counted_each_way_and_by_fragment():
    story = Dictation().train_from(0.0).train_from(0.0, "west")
    a, b = story.contribution(10, total=10), story.contribution(10, total=10, island="west", fragment=1)
    story.admit(1.0, a).refuse(1.1, b, RefusalReason.LATE)
    published = f.PublishFragment(0, 1, 1, (f.Recipient("east", 1, 1), f.Recipient("west", 1, 0)))
    story.tell(e.MergeCompleted(1.5, 0, 1, "d", 0.01), published)
    assert traffic(story)["payloads_up"] == [1, 1]
    assert traffic(story)["payloads_down"] == [4, 2], "a whole state for each island, then one publication to both"
    assert (traffic(story)["admitted"], traffic(story)["refused"]) == ({"east": 1}, {"west": 1})


def test_a_contribution_that_was_refused_without_its_bytes_did_not_travel():
    story = Dictation().train_from(0.0)
    first, late = story.contribution(10, total=10), story.contribution(10, total=20, offer=2)
    story.tell(e.ContributionArrived(1.0, first, 0.5), f.AdmitContribution(first, 1))
    story.refuse(2.0, late, RefusalReason.LATE)
    assert traffic(story)["payloads_up"] == [1, 0]
    assert traffic(story)["refused"] == {"east": 1}


def test_bytes_that_cannot_be_merged_travelled_all_the_same():
    story = Dictation().train_from(0.0)
    c = story.contribution(0, total=0)
    refused = f.RefuseContribution(c, RefusalReason.CORRUPT, "why")
    story.tell(e.ContributionUnusable(1.0, c, RefusalReason.CORRUPT, "why"), refused)
    assert traffic(story)["payloads_up"] == [1, 0]


def test_a_contribution_on_the_present_version_is_not_stale():
    story = Dictation().train_from(0.0)
    c, behind = story.contribution(10, total=10, base=3), story.contribution(10, total=20, base=1, offer=2)
    story.admit(1.0, c)
    story.tell(e.ContributionArrived(2.0, behind), f.AdmitContribution(behind, 4))
    assert traffic(story)["staleness"]["counts"][:3] == [1, 0, 1]
    assert traffic(story)["staleness"]["sum"] == 2.0


def test_catch_ups_are_told_apart_by_who_gave_the_state():
    story = Dictation().train_from(0.0).died(1.0).place(2.0, incarnation=2)
    story.placed(2.5, incarnation=2).ready(3.0, incarnation=2)
    story.tell(
        e.IslandReported(3.5, "east", 2, CatchUpFailure("west", "gone")), f.BeginCatchUp("east", 2, None, 0, "again")
    )
    story.tell(e.IslandReported(4.0, "east", 2, CaughtUp("west", (0, 0), 0, 0.1)), f.StartTraining("east", 2))
    assert traffic(story)["catch_ups"] == {"peer": 1, "synchroniser": 1}
    assert traffic(story)["catch_up_failures"] == 1
    assert traffic(story)["payloads_down"] == [1, 1], "what a peer gives passes the synchroniser by"


def test_a_rounds_parts_lie_between_first_contribution_close_and_new_version():
    story = Dictation().train_from(0.0).train_from(0.0, "west")
    a, b = story.contribution(10, total=10), story.contribution(10, total=10, island="west")
    story.admit(1.0, a).admit(3.0, b).close(3.5, a, b, reason=CloseReason.EVERYONE_IN).merged(3.75, a, b)
    sums = {part: told["sum"] for part, told in story.statistics.summary()["round_seconds"].items()}
    assert sums == pytest.approx({"collecting": 0.0, "grace": 2.5, "merging": 0.25}), "quorum is one"
    counts = [sum(told["counts"]) for told in story.statistics.summary()["round_seconds"].values()]
    assert counts == [1, 1, 1]


def test_how_long_merges_took_to_be_durable_is_counted_where_it_was_measured():
    story = Dictation().train_from(0.0)
    for version, journal_seconds in ((1, 0.004), (2, 0.3), (3, None)):
        c = story.contribution(10, total=10 * version, offer=version)
        story.admit(version, c).close(version + 0.1, c, version=version)
        story.tell(e.MergeCompleted(version + 0.5, 0, version, "d", 0.4, journal_seconds=journal_seconds))
    told = story.statistics.summary()
    assert (told["merges"], sum(told["journal_seconds"]["counts"])) == (3, 2)
    assert told["journal_seconds"]["sum"] == pytest.approx(0.304)
