"""Which code counts as being on a contribution's way. ``test_small`` runs the measurement itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from orchestrator.core.fragment_round import __file__ as elsewhere
from orchestrator.core.vocabulary import Schedule
from tests.bench import way
from tests.bench.way_hooks import Notes

FILE = "orchestrator/core/vocabulary.py"


@pytest.fixture
def notes() -> Iterator[Notes]:
    """Yield notes with their hook in this thread."""
    fresh = Notes()
    before = sys.getprofile()
    sys.setprofile(fresh.hook)
    yield fresh
    sys.setprofile(before)


def names(notes: Notes) -> dict[str, set[str]]:
    return {file: {name.partition(":")[0] for name in functions} for file, functions in notes.functions().items()}


def test_a_function_is_noted_only_while_the_notes_count(notes: Notes) -> None:
    Schedule(3, 1009).next_due(0, 0)
    assert names(notes) == {}
    notes.counting = True
    Schedule(3, 1013).next_due(0, 0)
    notes.counting = False
    assert names(notes) == {FILE: {"Schedule.next_due", "Schedule.shared_count", "_places"}}


def test_a_loop_that_was_entered_before_the_counting_began_is_noted_by_its_next_call(notes: Notes) -> None:
    source = "def loop(notes):\n    notes.counting = True\n    len('')\n"
    space: dict = {}
    exec(compile(source, elsewhere, "exec"), space)  # as if it were a function of that file
    space["loop"](notes)
    notes.counting = False
    assert names(notes) == {"orchestrator/core/fragment_round.py": {"loop"}}


def test_bodies_of_modules_and_classes_are_no_functions_and_comprehensions_belong_to_theirs(notes: Notes) -> None:
    source = "class Some:\n    x = [len(c) for c in 'a']\ndef listing():\n    return [len(c) for c in 'a']\nlisting()\n"
    notes.counting = True
    exec(compile(source, elsewhere, "exec"), {})
    notes.counting = False
    assert names(notes) == {"orchestrator/core/fragment_round.py": {"listing"}}


def test_what_processes_noted_is_joined_by_function() -> None:
    union = way.joined([{FILE: {"due:1"}}, {FILE: {"due:1", "offsets:2"}, "api/app.py": {"main:3"}}])
    assert union == {"api/app.py": {"main:3"}, FILE: {"due:1", "offsets:2"}}
    assert way.size_of({FILE: union[FILE]}) == way.Size(1, 2, way.lines_of(FILE))
