"""The front page of the core: its example runs, and the tests that it names exist."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path

from orchestrator import core

TESTS = Path(__file__).parents[1]


def test_the_example_runs() -> None:
    result = doctest.testmod(core)
    assert result.attempted > 5
    assert result.failed == 0


def test_every_test_that_the_page_names_exists() -> None:
    assert core.__doc__ is not None
    named = set(re.findall(r"``(test_\w+)``", core.__doc__))
    trees = (ast.parse(path.read_text()) for path in TESTS.rglob("test_*.py"))
    there = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert len(named) > 20
    assert not named - there
