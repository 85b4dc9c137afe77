"""After an event the core settles: it decides whatever follows from the decisions before, a bounded number of times."""

from __future__ import annotations

import pytest

from orchestrator.core import job_life
from orchestrator.core.effects import Effect, StandBy
from orchestrator.core.events import Event
from orchestrator.core.state import JobState
from orchestrator.core.synchroniser import SETTLING_PASSES_MAX
from orchestrator.core.vocabulary import Incarnation, IslandId
from orchestrator.errors import InternalError
from tests.harness.story import Story


def test_a_core_that_never_settles_fails_with_the_recent_story(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    passes = 0

    def endless(state: JobState, event: Event) -> list[Effect]:
        nonlocal passes
        passes += 1
        return [StandBy(IslandId("a"), Incarnation(1))]

    monkeypatch.setattr(job_life, "settle", endless)
    with pytest.raises(InternalError, match=r"does not settle: 8 passes .* StandBy") as raised:
        story.trains("a", tokens=100)
    assert passes == SETTLING_PASSES_MAX
    (note,) = raised.value.__notes__
    assert "while deciding on step" in note
    assert "CaughtUp" in note.split("before it:")[1], "the steps before are told as well"
