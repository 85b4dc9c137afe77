"""Check that the functions that a submitted specification names exist in their modules, without running any of them.

A module's source is parsed for its names, so that a misspelt name is reported at submission and not by the job minutes or
hours later. If the names cannot be known (other ways of importing, compiled code, names created at run time) nothing is
reported here; ``atoll check`` and the job do.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from orchestrator.errors import Problem
from orchestrator.specification.config import JobSpec
from orchestrator.specification.validation import closest
from orchestrator.system import user_packages

SOURCE_BYTES_MAX = 1 << 20
_PARSING = threading.Lock()
"""CPython 3.11 counts the depth of ``ast.parse`` once per process: two threads that parse at once raise SystemError."""


def absent_functions(spec: JobSpec) -> list[Problem]:
    """Return a problem for each named function that its module certainly lacks."""
    named = (
        ("model.factory", spec.model.factory),
        ("training.inner_optimizer.factory", spec.training.inner_optimizer.factory),
        ("trainer", spec.trainer),
    )
    problems = []
    for path, function in named:
        module, _, name = (function or "").partition(":")
        names = _names_of(module) if function else None
        if names is not None and name not in names:
            meant = closest(name, sorted(names))
            remedy = f"Did you mean {module}:{meant}?" if meant else "Correct its name."
            problems.append(Problem(path, f"names {function!r}, but {module} has no {name!r}.", remedy))
    return problems


def _names_of(module: str) -> set[str] | None:
    """Return the names that the module has after import; None if its source does not tell."""
    try:
        source = _source_of(module)
        if source is None or source.stat().st_size > SOURCE_BYTES_MAX:
            return None
        text = source.read_bytes()
        with _PARSING:
            tree = ast.parse(text)
        names = set(_bound(tree.body))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return None if names & {"*", "__getattr__"} else names


def _source_of(module: str) -> Path | None:
    places = [*sys.path, *user_packages.folders_in(os.environ)]  # as islands look for it
    name, located = "", None
    for part in module.split("."):
        name = f"{name}.{part}".removeprefix(".")
        located = PathFinder.find_spec(name, places)
        if located is None:
            return None
        places = list(located.submodule_search_locations or ())
    origin = located.origin if located is not None and located.has_location else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that these statements bind in their module, in any branch."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and node.id in ("globals", "setattr", "exec"):
                yield "*"
