"""SECURITY.md claims nothing without a test by name, and no finding of the attack is without one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.documents import ROOT

SECURITY, FINDINGS = ROOT / "SECURITY.md", ROOT / "tests" / "attack" / "README.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CLAIMS = re.compile(r"^## Guarantees\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
FINDING_COUNT = 19


def claims() -> list[str]:
    """The bullets below "Guarantees", each with its continuation lines."""
    (section,) = CLAIMS.findall(SECURITY.read_text())
    return re.findall(r"^- .*(?:\n  .*)*", section, re.MULTILINE)


@pytest.mark.parametrize("path", [SECURITY, FINDINGS], ids=lambda path: path.name)
def test_every_test_that_is_named_exists(path: Path) -> None:
    named = TEST.findall(path.read_text())
    assert named
    assert [f"{file}::{name}" for file, name in named if name not in functions(ROOT / file)] == []


def test_every_claim_of_the_security_document_names_a_test() -> None:
    assert claims()
    assert [claim for claim in claims() if not TEST.search(claim)] == []


def test_every_finding_of_the_attack_has_a_row_with_a_test() -> None:
    rows = {
        int(number): row for number, row in re.findall(r"^\| (\d+)\b[^|]*(\|.*)$", FINDINGS.read_text(), re.MULTILINE)
    }
    assert sorted(rows) == list(range(1, FINDING_COUNT + 1))
    assert [number for number, row in rows.items() if not TEST.search(row)] == []


def functions(path: Path) -> set[str]:
    """The names of the functions that a file defines."""
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
