"""Imports that a worker's process leaves until they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.runtime import worker

LATE = "the_late"


def output_of(program: str, folder: Path, *arguments: str) -> str:
    """Of a program that a worker's process becomes, beside a package that says when it is imported."""
    package = folder / LATE
    package.mkdir()
    (package / "__init__.py").write_text("print('imported'); from .part import value")
    (package / "part.py").write_text("value = 1")
    (folder / "program.py").write_text(program)
    late = f"import sys, {worker.MODULE} as worker; sys.path.insert(1, {str(folder)!r}); worker.LATE = ({LATE!r},); "
    command = [sys.executable, "-c", f"{late}worker.main()", str(folder / "program.py"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "use",
    [
        f"import {LATE}; print('begins'); print({LATE}.value)",
        f"print('begins'); from {LATE} import value; print(value)",
        f"print('begins'); from {LATE}.part import value; print(value)",
        f"print('begins'); import {LATE}.part; print({LATE}.part.value)",
        f"import {LATE} as late; print('begins'); import {LATE}.part; print(late.part.value)",
    ],
)
def test_a_module_is_imported_when_it_is_used(use: str, tmp_path: Path) -> None:
    assert output_of(use, tmp_path).split() == ["begins", "imported", "1"]


def test_a_module_that_nobody_uses_is_not_imported(tmp_path: Path) -> None:
    assert output_of(f"import {LATE}; print('done')", tmp_path).split() == ["done"]


def test_the_program_has_its_own_name_and_arguments(tmp_path: Path) -> None:
    output = output_of("import sys; print(__name__, *sys.argv)", tmp_path, "--option")
    assert output.split() == ["__main__", str(tmp_path / "program.py"), "--option"]


def test_what_is_not_installed_stays_missing() -> None:
    worker.import_late("no_such_package")
    assert "no_such_package" not in sys.modules
