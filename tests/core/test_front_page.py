"""The front page of the core: its example runs, and the tests that it names exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from orchestrator import core

TESTS = Path(__file__).parents[1]
TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)


def test_the_example_runs() -> None:
    result = doctest.testmod(core)
    assert result.attempted > 5
    assert result.failed == 0


def test_every_test_that_the_page_names_exists() -> None:
    assert core.__doc__ is not None
    named = set(re.findall(r"``(test_\w+)``", core.__doc__))
    there = {name for path in TESTS.rglob("test_*.py") for name in TEST.findall(path.read_text())}
    assert len(named) > 20
    assert not named - there
