"""The English of the source as tests: docstrings are sentences, and the idioms of an earlier dialect do not return.

CONTRIBUTING.md and docs/how-to-change/README.md say how to write. A test can hold only what a pattern can see.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("orchestrator", "learners", "api", "dashboards", "deploy", "docs")
FRAGMENT = re.compile(
    r"^(Of|Whether|Where|Who|Whose|Whom|Those|That|What|Which|As|So|Such|How|If|Because|For|With|Without|From|In|To|By"
    r"|Behind|Asked|Until|At)\b"
)
"""First words of a docstring that begin no sentence. "Return whether …" says the same as a sentence."""
DIALECT = re.compile(
    r"\b((?<!there )(is|are|was) none|be told of|is told of|nobody's|so long as that|as far as it goes|whoever|of whom"
    r"|no matter of|is no news|lies there|the same way round)\b"
)
PRIVATE = re.compile(r"\b(heed(s|ed)?|doses?|hopeless|warden(?!:))\b")
"""Words that only this project used where the field has its own: check, fault, unschedulable, agent."""


def sources() -> list[Path]:
    files = (path for name in SOURCES for path in sorted((ROOT / name).rglob("*.py")))
    return [path for path in files if "migrations" not in path.parts]


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")]


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text:
                yield node.name, text


def test_docstrings_are_sentences() -> None:
    fragments = [
        f"{path.relative_to(ROOT)}: {name}: {text.splitlines()[0]}"
        for path in sources()
        for name, text in docstrings(ast.parse(path.read_text()))
        if FRAGMENT.match(text)
    ]
    assert fragments == [], "begin with an imperative verb, or with a noun and a verb"


def test_idioms_of_the_dialect_do_not_return() -> None:
    idioms = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*sources(), *pages()]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DIALECT.search(line) or PRIVATE.search(line)
    ]
    assert idioms == []
