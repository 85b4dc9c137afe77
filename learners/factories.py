"""The import of a function that a job specification names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from orchestrator.errors import ConfigurationError


def imported(field: str, path: str) -> Callable[..., Any]:
    """The function ``package.module:function`` that stands in this field. Raises ConfigurationError where there is none."""
    module, _, name = path.partition(":")
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            detail=f"{field} {path!r} cannot be imported ({error}). Name package.module:function of a package "
            "that is installed on every node."
        ) from error
    return factory
