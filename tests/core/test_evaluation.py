"""When Θ is measured, within which time, and by whom."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import events, saving
from orchestrator.core.effects import Evaluate, FinishJob
from orchestrator.core.messages import CaughtUp, Flushed
from orchestrator.core.vocabulary import EvaluationPolicy
from tests.harness.story import Story, all_of, the

ISLANDS = EvaluationPolicy(sequences=24, time_ratio_max=0.1, on_islands=True)


def merged(story: Story, version: int, after: float = 0.0) -> list[Evaluate]:
    story.wait(after)
    for island in sorted(story.core.state.live):
        story.offers_fragment(island)
    return all_of(Evaluate, story.merges(0, version))


def completed(story: Story, version: int, sequence_count: int = 24, island: str | None = None) -> tuple:
    facts = (version, 2.0, sequence_count, 0.1, "somewhere", "", island, 1 if island else 0)
    return story.happen(events.EvaluationCompleted, *facts)


def test_an_evaluation_gets_its_share_of_the_time_of_the_merges_between_two() -> None:
    story = Story("ab", evaluation_every_merges=2, evaluation=EvaluationPolicy(24, 0.5))
    story.starts("a", "b")
    began = story.core.state.evaluated_at
    assert not merged(story, 1, after=10.0)
    (first,) = merged(story, 2, after=10.0)
    assert first.limit_s == 0.5 * (story.core.state.evaluated_at - began) >= 10.0
    completed(story, 2)
    assert not merged(story, 3, after=3.0)
    (second,) = merged(story, 4, after=3.0)
    assert second.limit_s == 0.5 * 6.0


def test_no_evaluation_waits_behind_another_and_what_it_overruns_is_passed_over() -> None:
    story = Story("ab", evaluation_every_merges=1, evaluation=EvaluationPolicy(24, 1.0))
    story.starts("a", "b")
    assert [e.global_version for e in merged(story, 1, after=1.0)] == [1]
    assert not merged(story, 2, after=1.0)
    assert not merged(story, 3, after=1.0)
    assert not all_of(Evaluate, completed(story, 1))
    (late,) = merged(story, 4, after=1.0)
    assert (late.global_version, late.limit_s) == (4, 1.0)  # a merge a second, whatever was passed over


def test_islands_measure_where_it_is_asked_for_and_the_one_furthest_ahead_first() -> None:
    story = Story("abc", evaluation_every_merges=1, evaluation=ISLANDS)
    story.starts("a", "b", "c")
    story.trains("b", tokens=1000)
    (evaluate,) = merged(story, 1)
    assert (evaluate.island, evaluate.incarnation, evaluate.versions) == ("b", 1, (1, 0))


def test_an_island_that_dies_while_it_measures_is_replaced_by_another_and_the_last_one_by_nobody() -> None:
    story = Story("abc", evaluation_every_merges=1, evaluation=ISLANDS)
    story.starts("a", "b", "c")
    story.trains("b", tokens=1000)
    (first,) = merged(story, 1, after=5.0)
    again = the(Evaluate, story.dies("b"))
    assert (first.island, again.island, again.limit_s) == ("b", "a", first.limit_s)
    third = the(Evaluate, story.falls_silent("a"))  # a silent island may never answer
    assert third.island == "c"
    beside = the(Evaluate, story.dies("c"))
    assert (beside.island, beside.versions) == (None, ())
    assert not all_of(Evaluate, story.happen(events.ConnectionRestored, "a", 1))


def test_an_island_that_cannot_measure_is_made_up_for_beside_the_islands() -> None:
    story = Story("ab", evaluation_every_merges=1, evaluation=ISLANDS)
    story.starts("a", "b")
    (first,) = merged(story, 1)
    assert first.island is not None
    again = the(Evaluate, story.happen(events.EvaluationFailed, 1, "out of memory"))
    assert (again.island, again.global_version) == (None, 1)
    assert not story.happen(events.EvaluationFailed, 1, "the head cannot, either")
    assert story.core.state.evaluation is None


def test_a_restarted_synchroniser_asks_an_island_again() -> None:
    story = Story("ab", evaluation_every_merges=1, evaluation=ISLANDS)
    story.starts("a", "b")
    (first,) = merged(story, 1, after=5.0)
    again = the(Evaluate, story.happen(events.SynchroniserRestarted, 2))
    assert (again.island, again.limit_s) == (first.island, first.limit_s)


def test_a_job_ends_with_an_evaluation_of_all_sequences_by_an_island_that_has_given_all_it_had() -> None:
    story = Story("a", token_budget=200, evaluation_every_merges=0, evaluation=ISLANDS)
    story.starts("a")
    story.offers_fragment("a")
    story.trains("a", 100)
    story.merges(0, 1)
    evaluate = the(Evaluate, story.reports("a", 1, Flushed()))
    assert (evaluate.island, evaluate.limit_s) == ("a", None)
    assert all_of(FinishJob, completed(story, 1, island="a"))


def test_a_part_of_the_sequences_measured_before_the_end_is_not_the_jobs_last_word() -> None:
    story = Story("a", token_budget=200, evaluation_every_merges=1, evaluation=EvaluationPolicy(24, 1.0))
    story.starts("a")
    (evaluate,) = merged(story, 1)
    assert evaluate.limit_s is not None
    story.trains("a", 100)
    story.reports("a", 1, Flushed())
    assert the(Evaluate, completed(story, 1, sequence_count=12)).limit_s is None
    assert all_of(FinishJob, completed(story, 1))


def test_what_was_seeded_is_measured_first_without_a_limit_and_islands_train_and_merge_meanwhile() -> None:
    story = Story("ab", evaluation_every_merges=1, evaluation=EvaluationPolicy(24, 0.5, at_start=True))
    first = the(Evaluate, story.seeded)
    assert (first.global_version, first.limit_s, first.island) == (0, None, None)
    story.starts("a", "b")
    assert not merged(story, 1, after=10.0)
    assert not all_of(Evaluate, completed(story, 0))
    (second,) = merged(story, 2, after=10.0)
    assert (second.global_version, second.limit_s is None) == (2, False)


def test_a_job_that_continues_a_checkpoint_measures_the_checkpoint_first() -> None:
    resumed = saving.JobResumed(0.0, "file:///run/7", "before", (3, 4), (8, 10), 700, (300, 400), (), ())
    story = Story("ab", before=[resumed], evaluation=EvaluationPolicy(24, 0.5, at_start=True))
    assert the(Evaluate, story.seeded).global_version == 7


def test_a_first_evaluation_that_fails_is_not_repeated() -> None:
    story = Story("ab", evaluation_every_merges=1, evaluation=EvaluationPolicy(24, 1.0, at_start=True))
    assert not story.happen(events.EvaluationFailed, 0, "out of memory")
    story.starts("a", "b")
    assert [e.global_version for e in merged(story, 1, after=1.0)] == [1]


def test_the_first_island_that_trains_measures_what_was_seeded_where_islands_measure() -> None:
    story = Story("ab", evaluation_every_merges=1, evaluation=replace(ISLANDS, at_start=True))
    assert not all_of(Evaluate, story.seeded)
    story.is_ready("b")
    first = the(Evaluate, story.reports("b", 1, CaughtUp(None, (0, 0), 0, 0.1)))
    assert (first.island, first.versions, first.limit_s) == ("b", (0, 0), None)


def test_a_restarted_synchroniser_measures_again_what_was_being_measured_first() -> None:
    story = Story("ab", evaluation_every_merges=1, evaluation=EvaluationPolicy(24, 1.0, at_start=True))
    assert the(Evaluate, story.happen(events.SynchroniserRestarted, 2)).global_version == 0
    completed(story, 0)
    assert not all_of(Evaluate, story.happen(events.SynchroniserRestarted, 3))
