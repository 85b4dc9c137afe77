"""Functions that a specification names and their modules have not: told when it is submitted, without running anything."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from api.jobs.submission import absent_functions
from orchestrator.specification.config import parse_job
from orchestrator.system import user_packages

SMALLEST = {"islands": [{"node_group": "a"}], "budget": {"steps": 1}}
SOURCE = """
raise SystemExit("this module is never run here")
import os as system
from json import loads
try:
    def guarded(): ...
except ImportError:
    fallback = None
class Made: ...
one, (two, three) = 1, (2, 3)
if one:
    for each in ():
        four = 4
annotated: int = 5
async def later(): ...
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mypackage"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('nor is this')")
    (folder / "models.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_a_package_in_a_folder_that_the_operator_names_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "packages" / "otherpackage").mkdir(parents=True)
    (folder / "__init__.py").write_text("def build(): ...")
    assert told("otherpackage:biuld") == []
    monkeypatch.setenv(user_packages.VARIABLE, str(folder.parent))
    assert "Did you mean otherpackage:build?" in told("otherpackage:biuld")[0]


def told(function: str) -> list[str]:
    spec = parse_job({**SMALLEST, "model": {"factory": function}})
    return [str(problem) for problem in absent_functions(spec)]


@pytest.mark.parametrize(
    "name", ["system", "loads", "guarded", "fallback", "Made", "one", "three", "each", "four", "annotated", "later"]
)
def test_whatever_a_module_binds_is_there(name: str) -> None:
    assert told(f"mypackage.models:{name}") == []


def test_a_name_that_is_misspelt_is_told_with_what_was_meant() -> None:
    assert told("mypackage.models:guardde") == [
        "model.factory: names 'mypackage.models:guardde', but mypackage.models has no 'guardde'. "
        "Did you mean mypackage.models:guarded?"
    ]
    spec = parse_job({**SMALLEST, "trainer": "learners.synthetic:creat"})
    assert ["Did you mean learners.synthetic:create?" in str(problem) for problem in absent_functions(spec)] == [True]


@pytest.mark.parametrize(
    "source", ["from json import *", "def __getattr__(name): ...", "globals()['x'] = 1", "def broken(:", "\0"]
)
def test_where_the_names_cannot_be_known_nothing_is_said(package: Path, source: str) -> None:
    (package / "odd.py").write_text(source)
    assert told("mypackage.odd:anything") == []
    assert told("nowhere.at_all:anything") == []
    assert told("mypackage.absent:anything") == []
    assert told("numpy.core._multiarray_umath:anything") == []


def test_many_submissions_at_once_are_checked_like_one(package: Path) -> None:
    """CPython 3.11 raises SystemError when two threads call ``ast.parse`` at once and switch inside it."""
    (package / "large.py").write_text(f"def build(): return [{'(1, [x, (y, z)]),' * 1500}]\n" * 3)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(_python_in_collections)  # as hypothesis has one: where threads are switched inside the parser
    try:
        with ThreadPoolExecutor(8) as pool:
            told_of = list(pool.map(lambda _: told("mypackage.large:biuld"), range(24)))
    finally:
        gc.callbacks.remove(_python_in_collections)
        sys.setswitchinterval(before)
    assert all("Did you mean mypackage.large:build?" in problems[0] for problems in told_of)


def _python_in_collections(_phase: str, _info: dict[str, int]) -> None:
    sum(range(10))
