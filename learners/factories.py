"""Functions of somebody's package that a job specification names: their import, their call, and calls of what they return.

Whatever such code raises is the specification's fault, which is final, and not the island's, which would be started again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from orchestrator import user_packages
from orchestrator.errors import AtollError, ConfigurationError, first_line

REMEDY = "Try it outside of a job first, with the job's specification as plain data."


def imported(field: str, path: str) -> Callable[..., Any]:
    """The function ``package.module:function`` that stands in this field. Raises ConfigurationError where there is none."""
    module, _, name = path.partition(":")
    user_packages.put_on_path()
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # of a module as it runs, too
        raise ConfigurationError(
            detail=f"{field} {path!r} cannot be imported ({_told(error)}). {_remedy(module)}"
        ) from error
    if not callable(factory):
        raise ConfigurationError(detail=f"{field} {path!r} is {_kind(factory)}, and must be a function. Name one.")
    return factory


def called(field: str, path: str, *arguments: Any) -> Any:
    """What the function that stands in this field returns. Raises ConfigurationError where it does not return."""
    return guarded(f"{field} {path!r}", imported(field, path))(*arguments)


def guarded(subject: str, function: Any) -> Callable[..., Any]:
    """The function, which raises ConfigurationError, with the subject, for whatever it raises. It may be traced.

    What is short of memory is raised as it is: the specification need not be wrong.
    """
    if not callable(function):
        raise ConfigurationError(detail=f"{subject} is {_kind(function)}, and must be a function. Return another one.")

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except (AtollError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise ConfigurationError(detail=f"{subject} raises {_told(error)}. {REMEDY}") from error

    return call


def _remedy(module: str) -> str:
    if user_packages.is_there(module, ()):
        return "Name package.module:function of a package that is installed on every node."
    return user_packages.REMEDY


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
