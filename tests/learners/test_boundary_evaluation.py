"""An island that measures Θ: at a boundary, of what was published and not of its own, and again when it steps no more."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import numpy as np
import pytest

from learners import loop as loop_module
from learners.contract import HeldOutLoss
from learners.loop import EvaluationRequest
from learners.state_transfer import FetchedState
from orchestrator.core.messages import Evaluated, Flushed, NotEvaluated, Progress


def request(version: int, *versions: int, limit_s: float = inf) -> EvaluationRequest:
    return EvaluationRequest(version, versions, limit_s)


def mean(arrays: Mapping[str, np.ndarray], limit_s: float = inf) -> HeldOutLoss:
    """A loss that says which parameters were measured."""
    return HeldOutLoss(float(np.mean([array.mean() for array in arrays.values()])), 24, 0.0)


def evaluated(letters: list) -> list[Evaluated]:
    return [letter for letter in letters if isinstance(letter, Evaluated | NotEvaluated)]


@pytest.fixture
def island(new_island):
    island = new_island(adoption="rebase")
    island.trainer.evaluate = mean
    return island


def test_theta_is_measured_once_it_is_here_as_it_is_wanted_and_not_ones_own_work(island):
    island.start()
    island.steps(1)
    island.loop.request_evaluation(request(2, 1, 1))
    island.loop.deliver(0, 1, 2, island.published(0, 0.5))
    assert not evaluated(island.steps(2))
    island.loop.deliver(1, 1, 2, island.published(1, 1.5))
    (report,) = evaluated(island.steps(2))
    assert (report.global_version, report.sequence_count) == (2, 24)
    assert report.loss == mean(island.published(0, 0.5) | island.published(1, 1.5)).loss


def test_a_later_request_takes_the_place_of_one_that_waits_and_an_answer_is_given_again(island):
    island.start()
    island.loop.request_evaluation(request(1, 1, 0))
    island.loop.request_evaluation(request(0, 0, 0))
    (report,) = evaluated(island.steps(2))
    assert report.global_version == 0
    island.loop.request_evaluation(request(0, 0, 0))
    assert evaluated(island.outbox.take(0)) == [report]


class Stop(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("error", [MemoryError("no room"), SystemExit("no room"), Stop("no room")])
def test_an_evaluation_that_fails_stops_no_training(island, error):
    def fail(*_: object) -> HeldOutLoss:
        raise error

    island.trainer.evaluate = fail
    island.start()
    island.loop.request_evaluation(request(0, 0, 0))
    letters = island.steps(3)
    assert evaluated(letters) == [NotEvaluated(0, f"{type(error).__name__}: no room")]
    assert letters[-1].steps_total > 1


def test_the_time_of_an_evaluation_is_no_gap_between_steps(island, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop_module, "monotonic", lambda: now[0])

    def long(arrays: Mapping[str, np.ndarray], limit_s: float = inf) -> HeldOutLoss:
        now[0] += 50.0
        return mean(arrays)

    island.trainer.evaluate = long
    island.start()
    letters = island.steps(1)
    island.loop.request_evaluation(request(0, 0, 0))
    letters += island.steps(3)
    (report,) = evaluated(letters)
    assert report.seconds == 50.0
    assert max(letter.gap_max_seconds for letter in letters if isinstance(letter, Progress)) < 50.0


def test_an_island_that_steps_no_more_measures_what_is_published_after_its_last_boundary(island):
    island.start()
    island.steps(1)
    island.loop.flush()
    island.trainer.permits.release()
    island.letters_until(Flushed)
    island.loop.request_evaluation(request(2, 1, 1))
    for fragment in (0, 1):
        island.loop.deliver(fragment, 1, 2, island.published(fragment, 0.25), merged_offer=1)
    (report,) = evaluated(island.letters_until(Evaluated))
    assert report.loss == pytest.approx(0.25)


def test_one_whose_state_came_from_a_peer_says_that_it_has_no_theta_if_none_comes(new_island, monkeypatch):
    monkeypatch.setattr(loop_module, "LAST_PUBLICATIONS_S", 0.0)
    giver = new_island(adoption="rebase").start()
    island = new_island(adoption="rebase")
    state = {name: array for p in (0, 1) for name, array in giver.own(p).items()}
    state["steps"] = np.array(0)
    island.loop.load_peer(FetchedState("giver", state, (0, 0), 0, ()), cursor=0)
    island.loop.request_evaluation(request(0, 0, 0))
    island.loop.flush()
    letters = island.letters_until(NotEvaluated)
    assert evaluated(letters) == [NotEvaluated(0, "this version of Θ did not arrive")]
