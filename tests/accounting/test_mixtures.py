"""What is recorded of mixtures of experts, as told by small stories."""

from __future__ import annotations

import pytest

from orchestrator.core import events as e
from orchestrator.core.messages import MixtureFigures, Progress

from .dictation import Dictation


def report(story: Dictation, steps: int, figures: MixtureFigures | None, incarnation: int = 1) -> None:
    progress = Progress(steps, steps, 10 * steps, 1.0, 0.1, 0.1, 3.0, mixture=figures)
    story.tell(e.IslandReported(float(steps), "east", incarnation, progress))


def merge(story: Dictation, version: int, distance: float | None, travel: float | None, fragment: int = 1) -> None:
    figures = {"router_distance": distance, "router_travel": travel}
    story.tell(e.MergeCompleted(float(version), fragment, version, "d", 0.1, **figures))


def test_losses_around_adoptions_are_means_over_all_of_them_and_a_repeated_report_counts_once():
    story = Dictation().train_from(0.0)
    first = MixtureFigures(0.5, 0.75, 1, 3.0, 4.0)
    for steps, figures in ((4, first), (4, first), (8, MixtureFigures(0.5, 0.5)), (4, first)):
        report(story, steps, figures)
    report(story, 2, MixtureFigures(0.25, 1.0, 3, 2.0, 2.0), incarnation=2)
    assert story.statistics.summary()["mixture"]["islands"] == {
        "east": {
            "expert_share_max": 0.25,
            "expert_entropy_ratio": 1.0,
            "adoptions": 4,
            "loss_before": pytest.approx((3.0 + 3 * 2.0) / 4),
            "loss_after": pytest.approx((4.0 + 3 * 2.0) / 4),
        }
    }


def test_routers_have_their_last_merge_of_several_islands_and_the_mean_of_all():
    story = Dictation()
    merge(story, 1, 3.0, 2.0)
    merge(story, 2, None, None)  # of one contribution
    merge(story, 3, 1.0, 4.0)
    merge(story, 1, None, None, fragment=0)
    mixture = story.statistics.summary()["mixture"]
    assert mixture["routers"] == [
        {"fragment": 1, "merges": 2, "distance": 1.0, "travel": 4.0, "distance_mean": 2.0, "travel_mean": 3.0}
    ]
    assert mixture["router_curve"] == [[1.0, 3.0, 2.0], [3.0, 1.0, 4.0]]
    assert mixture["islands"] == {}


def test_the_size_of_routers_apart_is_known_before_the_first_merge():
    seeded = Dictation().tell(e.OuterStateSeeded(0.0, 1000, "d", 60))
    assert seeded.statistics.summary()["mixture"] == {
        "router_parameter_count": 60,
        "routers": [],
        "router_curve": [],
        "islands": {},
    }


def test_other_models_have_no_such_figures():
    story = Dictation().train_from(0.0)
    report(story, 1, None)
    story.tell(e.OuterStateSeeded(1.0, 1000, "d"))
    merge(story, 1, None, None)
    assert "mixture" not in story.statistics.summary()
