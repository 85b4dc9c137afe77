"""Functions of somebody's package that a job specification names: their import, their call, and calls of what they return.

Whatever such code raises is the specification's fault, which is final, and not the island's, which would be started again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from learners.contract import Trainer
from learners.island_spec import IslandSpec
from orchestrator.errors import AtollError, ConfigurationError, in_words
from orchestrator.system import user_packages

OWN = "learners."
SHOWN_MAX = 5
"""Of the methods that a trainer lacks."""
REMEDY = "Try it outside of a job first, with the job's specification as plain data."


def imported(field: str, path: str) -> Callable[..., Any]:
    """The function ``package.module:function`` that stands in this field. Raises ConfigurationError where there is none."""
    module, _, name = path.partition(":")
    user_packages.put_on_path()
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # of a module as it runs, too
        raise ConfigurationError(
            detail=f"{field} {path!r} cannot be imported ({in_words(error)}). {_remedy(module)}"
        ) from error
    if not callable(factory):
        raise ConfigurationError(detail=f"{field} {path!r} is {_kind(factory)}, and must be a function. Name one.")
    return factory


def called(field: str, path: str, *arguments: Any) -> Any:
    """What the function that stands in this field returns. Raises ConfigurationError where it does not return."""
    return guarded(f"{field} {path!r}", imported(field, path))(*arguments)


def trainer_of(spec: IslandSpec, shard_index: int, shard_count: int) -> Trainer:
    """Return the trainer that the specification asks for. Raises ConfigurationError where a package's is none.

    What a package's code raises is final, but for errors of the system and lack of memory: another start may be luckier.
    """
    path, document = spec.job.trainer, spec.document
    make = imported("trainer", path)
    if path.startswith(OWN):
        built: Trainer = make(document, shard_index, shard_count)
        return built
    built = guarded(f"trainer {path!r}", make, (OSError,))(document, shard_index, shard_count)
    if lacking := sorted(name for name in vars(Trainer) if not name.startswith("_") and name not in dir(built)):
        shown, kind = ", ".join(lacking[:SHOWN_MAX]), _kind(built).removeprefix("of type ")
        raise ConfigurationError(
            detail=f"trainer {path!r} returns {kind}, which lacks {shown}{' …' if len(lacking) > SHOWN_MAX else ''}. "
            "Return a trainer, with all methods of learners.contract.Trainer."
        )
    return built


@contextmanager
def exits_as_errors(subject: str) -> Iterator[None]:
    """Raise ConfigurationError where code of a package wants to end the process, which is not its own."""
    try:
        yield
    except SystemExit as error:
        raise ConfigurationError(detail=f"{subject} raises {in_words(error)}. {REMEDY}") from error


def guarded(subject: str, function: Any, but: tuple[type[Exception], ...] = ()) -> Callable[..., Any]:
    """The function, which raises ConfigurationError, with the subject, for whatever it raises. It may be traced.

    What is short of memory is raised as it is, for the specification need not be wrong, and so are errors of ``but``.
    """
    if not callable(function):
        raise ConfigurationError(detail=f"{subject} is {_kind(function)}, and must be a function. Return another one.")

    passed: tuple[type[Exception], ...] = (AtollError, MemoryError, *but)

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except passed:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigurationError(detail=f"{subject} raises {in_words(error)}. {REMEDY}") from error

    return call


def _remedy(module: str) -> str:
    if user_packages.is_there(module, ()):
        return "Name package.module:function of a package that is installed on every node."
    return user_packages.REMEDY


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
