"""The recorded stories are what this build decides. A failure shows the difference, and the command that records it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core import commands
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.synchroniser import Synchroniser
from tests.golden import stories
from tests.golden.stories import STORIES

LINES = range(20, 81)
"""A story is short enough to be read, and long enough to show something."""


def unlike_the_record(name: str) -> str:
    """Return how this build's story differs from the recorded one, or an empty text."""
    changed = stories.difference(name, STORIES[name]().text)
    return changed and f"This build decides otherwise:\n{changed}\nIf that is meant: {stories.COMMAND}"


@pytest.mark.parametrize("name", STORIES)
def test_a_story_is_the_recorded_one(name: str) -> None:
    if difference := unlike_the_record(name):
        pytest.fail(difference, pytrace=False)


def test_every_recorded_story_is_of_this_build_and_short() -> None:
    lengths = {path.stem: len(path.read_text().splitlines()) for path in stories.FOLDER.iterdir()}
    assert lengths.keys() == STORIES.keys()
    assert {name: length for name, length in lengths.items() if length not in LINES} == {}


def test_the_stories_show_what_matters_in_a_job() -> None:
    records = [record for tell in STORIES.values() for record in tell().records]
    requests = {type(record.event.request) for record in records if isinstance(record.event, e.CommandRequested)}
    assert {commands.Drain, commands.Readd, commands.Scale, commands.Checkpoint, commands.Rollback} <= requests
    seen = {type(effect) for record in records for effect in record.effects}
    assert {f.MergeFragment, f.RefuseContribution, f.QuarantineIsland, f.BeginCatchUp, f.StandBy} <= seen


def test_a_changed_rule_is_shown_as_a_difference_that_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Synchroniser.handle

    def sooner(core: Synchroniser, event: e.Event) -> tuple[f.Effect, ...]:
        effects = rule(core, event)
        return tuple(replace(x, due_at=x.due_at - 0.5) if isinstance(x, f.SetTimer) else x for x in effects)

    monkeypatch.setattr(Synchroniser, "handle", sooner)
    shown = unlike_the_record("grace-window").splitlines()
    assert "-    SetTimer timer=grace:0 serial=1 due_at=5.5" in shown
    assert "+    SetTimer timer=grace:0 serial=1 due_at=5" in shown
    assert shown[-1] == f"If that is meant: {stories.COMMAND}"
    assert unlike_the_record("scaling") == ""  # sets no timer


def test_recording_writes_what_was_changed_and_removes_what_is_no_story(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stories, "FOLDER", tmp_path)
    monkeypatch.setattr(stories, "STORIES", {"drain": stories.drain})
    (tmp_path / "older.txt").write_text("of an earlier build\n")
    stories.main()
    assert [path.name for path in tmp_path.iterdir()] == ["drain.txt"]
    assert "+    DrainIsland island=c incarnation=1" in capsys.readouterr().out.splitlines()
    stories.main()
    assert "drain" not in capsys.readouterr().out
