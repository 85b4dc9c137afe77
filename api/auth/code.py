"""The list of packages whose code a job may name; no other is imported. Pure.

``model.factory``, ``training.inner_optimizer.factory`` and ``trainer`` are ``package.module:function`` and run in every
island with the rights of the service's user. So they are taken only from packages that whoever started the service has
named (``atoll up --allow PACKAGE``); learners' own are always among them. An entry stands for a package and all within it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.errors import ConfigurationError, Problem

OWN_PACKAGES = ("learners",)

_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def code_problems(document: Mapping[str, Any], packages: Sequence[str]) -> tuple[Problem, ...]:
    """The code that this specification names and that is on no list. The specification may be wrong elsewhere."""
    named = (
        ("model.factory", _at(document, "model", "factory"), "Use a preset"),
        ("training.inner_optimizer.factory", _at(document, "training", "inner_optimizer", "factory"), "Use a kind"),
        ("trainer", document.get("trainer"), "Leave it out"),
    )
    return tuple(
        _problem(path, function, otherwise, packages)
        for path, function, otherwise in named
        if function and isinstance(function, str) and not _is_allowed(function, packages)
    )


def _at(document: Any, *path: str) -> Any:
    """What stands there in the document; None where nothing does."""
    for name in path:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def _is_allowed(function: str, packages: Sequence[str]) -> bool:
    module = function.partition(":")[0]
    return any(module == package or module.startswith(package + ".") for package in packages)


def _problem(path: str, function: str, otherwise: str, packages: Sequence[str]) -> Problem:
    package = function.partition(":")[0].partition(".")[0]
    return Problem(
        path,
        f"names {function!r}, and this service takes code from {', '.join(sorted(packages))} only.",
        f"{otherwise}; or have the service started with `atoll up --allow {package}`, if you trust that package.",
    )


def refuse_unfit(packages: Sequence[str]) -> None:
    """Raises ConfigurationError for what is no package's name."""
    for package in packages:
        if not _PACKAGE.fullmatch(package):
            raise ConfigurationError(detail=f"--allow {package!r} is no package's name; write it as in an import.")
