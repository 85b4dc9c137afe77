"""Whatever islands send: what is admitted is near what was admitted before, and who is well is never refused for that."""

from __future__ import annotations

from statistics import median_high

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import effects as f
from orchestrator.core.fragment_round import LATEST_KEPT, VERSIONS_BEFORE_JUDGING
from orchestrator.core.vocabulary import HealthPolicy, RefusalReason
from tests.core.test_health import gives
from tests.harness.story import Story, all_of

RATIO = 10.0
DISPLACEMENTS = st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=80)


def story_of(displacements: list[float]) -> list[tuple[float, bool, int]]:
    """One island whose every admitted contribution is merged: displacement, whether it was admitted, version it was for."""
    story = Story("a", health=HealthPolicy(RATIO, strikes_max=10**6))
    story.starts("a")
    told = []
    for displacement in displacements:
        version = story.core.state.rounds[0].version
        effects = gives(story, "a", displacement)
        admitted = bool(all_of(f.AdmitContribution, effects))
        assert admitted or all_of(f.RefuseContribution, effects)[0].reason is RefusalReason.EXPLODING
        told.append((displacement, admitted, version))
        if admitted:
            story.merges(0, version + 1)
    return told


@settings(max_examples=150, deadline=None, derandomize=True)
@given(DISPLACEMENTS)
def test_what_is_admitted_is_near_what_was_admitted_before(displacements):
    before: list[float] = []
    for displacement, admitted, version in story_of(displacements):
        judged = version >= VERSIONS_BEFORE_JUDGING
        near = not judged or displacement <= RATIO * median_high(before[-LATEST_KEPT:])
        assert admitted == near
        before += [displacement] if admitted else []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.floats(1e-6, 1e6), st.lists(st.floats(1.0, RATIO), min_size=1, max_size=60))
def test_work_that_varies_within_the_bound_is_never_refused(least, factors):
    assert all(admitted for _, admitted, _ in story_of([least * factor for factor in factors]))
