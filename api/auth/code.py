"""The packages whose code a job may name; no others are imported. Pure.

``model.factory``, ``training.inner_optimizer.factory``, ``data.source`` and ``trainer`` may be ``package.module:function``,
which runs in every island with the rights of the service's user. Such code is accepted only from the packages named when the
service was started (``atoll up --allow PACKAGE``), from ``learners`` and from ``torch.optim``. An entry allows a package and
everything in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.errors import ConfigurationError, Problem

OWN_PACKAGES = ("learners", "torch.optim")

_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def code_problems(document: Mapping[str, Any], packages: Sequence[str]) -> tuple[Problem, ...]:
    """Return a problem for each function that the specification names and no allowed package has.

    The specification may have other problems.
    """
    source = _at(document, "data", "source")
    named = (
        ("data.source", source if isinstance(source, str) and ":" in source else None, "Use files"),
        ("model.factory", _at(document, "model", "factory"), "Use a preset"),
        ("training.inner_optimizer.factory", _at(document, "training", "inner_optimizer", "factory"), "Use a kind"),
        ("trainer", document.get("trainer"), "Leave it out"),
        ("trainer.factory", _at(document, "trainer", "factory"), "Leave it out"),
        ("trainer.model", _function(_at(document, "trainer", "model")), "Name a folder"),
    )
    return tuple(
        _problem(path, function, otherwise, packages)
        for path, function, otherwise in named
        if function and isinstance(function, str) and not _is_allowed(function, packages)
    )


def _at(document: Any, *path: str) -> Any:
    """Return the value at this path of the document, or None."""
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _function(model: Any) -> str | None:
    """Return what ``trainer.model`` names, if it is no folder."""
    from orchestrator.specification.training_sections import is_function  # brings pydantic

    return model if isinstance(model, str) and is_function(model) else None


def _is_allowed(function: str, packages: Sequence[str]) -> bool:
    module = function.partition(":")[0]
    return any(module == package or module.startswith(package + ".") for package in packages)


def _problem(path: str, function: str, otherwise: str, packages: Sequence[str]) -> Problem:
    package = function.partition(":")[0].partition(".")[0]
    return Problem(
        path,
        f"names {function!r}, but this service allows code only from {', '.join(sorted(packages))}.",
        f"{otherwise}; or restart the service with `atoll up --allow {package}`, if you trust that package.",
    )


def refuse_unfit(packages: Sequence[str]) -> None:
    """Raise ConfigurationError for an entry that is not a package's name."""
    for package in packages:
        if not _PACKAGE.fullmatch(package):
            raise ConfigurationError(detail=f"--allow {package!r} is not a package name. Write it as in an import.")
