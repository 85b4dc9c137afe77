"""An island whose step does not end: it is named, and ended when the step is beyond its limit; one that is slow is not."""

from __future__ import annotations

import json

import pytest

from orchestrator.core.effects import BeginCatchUp, FinishJob, SetTimer, StopIsland
from orchestrator.core.messages import Overdue, Progress
from orchestrator.core.vocabulary import IslandState, JobPhase, StepLimits
from orchestrator.tape.codec import decode, to_json
from tests.harness.story import Story, placements, policy, the

LIMIT_S = StepLimits().limit(0.05)
assert LIMIT_S is not None


def test_a_step_far_beyond_the_usual_is_named_and_costs_nothing_if_it_ends() -> None:
    story = Story("ab")
    story.starts("a", "b")
    assert story.reports("b", 1, Overdue(30.0, 0.05)) == ()
    seen = story.island("b")
    assert (seen.state, seen.overdue_s) == (IslandState.TRAINING, 30.0)
    assert seen.reason == "it hangs: 30 s where 0.05 s is usual"
    story.reports("b", 1, Progress(9, 9, 900, 9.0, 0.05, 1.0, 5.0))
    assert story.island("b").overdue_s == 0.0
    assert story.island("b").reason == "it steps again, after more than 30 s in one step"


def test_at_the_limit_the_island_is_stopped_and_placed_again() -> None:
    story = Story("ab")
    story.starts("a", "b")
    lost = story.reports("b", 1, Overdue(LIMIT_S, 0.05))
    assert the(StopIsland, lost).reason == "it hangs: 120 s where 0.05 s is usual, beyond the limit of 120 s"
    assert placements(story.timer(the(SetTimer, lost))) == [("b", 2)]
    assert story.island("b").overdue_s == 0.0
    assert story.reports("b", 1, Overdue(2 * LIMIT_S, 0.05)) == (), "its successor has nothing to do with it"


def test_who_takes_a_state_from_it_takes_it_from_another() -> None:
    story = Story("abc")
    story.starts("a", "b", "c")
    story.timer(the(SetTimer, story.offers_fragment("a")))
    story.merges(0, 1)
    story.timer(the(SetTimer, story.dies("c")))
    asked = story.is_ready("c")
    assert asked is not None
    assert asked.donor == ("a", 1)
    assert the(BeginCatchUp, story.reports("a", 1, Overdue(LIMIT_S, 0.05))).donor == ("b", 1)


@pytest.mark.parametrize(
    ("usual_s", "limit_s"),
    [(0.05, 120.0), (2.0, 120.0), (10.0, 500.0), (0.0, 1800.0)],
    ids=["short", "seconds", "long", "compiling"],
)
def test_the_limit_is_by_the_islands_own_median(usual_s: float, limit_s: float) -> None:
    story = Story("ab")
    story.starts("a", "b")
    assert story.reports("b", 1, Overdue(limit_s - 1.0, usual_s)) == ()
    assert story.reports("b", 1, Overdue(limit_s, usual_s)) != ()


def test_without_a_limit_nobody_is_ended() -> None:
    story = Story("ab", step_limits=StepLimits(limit_s=None))
    story.starts("a", "b")
    assert story.reports("b", 1, Overdue(1e6, 0.05)) == ()
    assert story.island("b").state == IslandState.TRAINING


def test_while_nothing_merges_for_want_of_it_the_reason_names_it() -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    assert story.core.state.pause_reason() is None
    story.reports("b", 1, Overdue(40.0, 0.05))
    assert story.core.state.pause_reason() == "merging waits for b (it hangs: 40 s where 0.05 s is usual)"
    story.reports("b", 1, Overdue(LIMIT_S, 0.05))
    reason = story.core.state.pause_reason()
    assert reason == "merging waits: 1 of the 2 islands that the quorum needs are training; b is lost"


def test_one_that_hangs_in_every_life_is_given_up_and_ends_the_job_if_it_is_the_last() -> None:
    story = Story("a", restarts_max=1)
    for life in (1, 2):
        story.starts("a")
        hung = story.reports("a", life, Overdue(LIMIT_S, 0.05))
        if life == 1:
            story.timer(the(SetTimer, hung))
    assert the(FinishJob, hung).reason.startswith("every island was given up (a: given up after 2 failures in a row")
    assert story.core.state.phase is JobPhase.FINISHED


def test_the_default_limits_are_on_no_tape_and_others_are_read_again() -> None:
    """So that the tape of a job without hangs is what it was."""
    assert "step_limits" not in to_json(policy("ab"))
    limited = policy("ab", step_limits=StepLimits(5.0, 3.0, 60.0))
    assert decode(type(limited), json.loads(to_json(limited))) == limited
