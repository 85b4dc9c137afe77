"""Functions of a user's package that a job specification names: importing them, calling them, and calling what they return.

An error in such code is the specification's fault. It is final, unlike an island's own failure, after which it is restarted.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import Parameter, signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from learners.contract import Trainer
from learners.loop import LoopPlan
from orchestrator.core.vocabulary import StepLimits
from orchestrator.errors import TRY_OUTSIDE, AtollError, ConfigurationError, InfrastructureError, in_words, is_interrupt
from orchestrator.system import user_packages

if TYPE_CHECKING:
    from learners.island_spec import IslandSpec

OWN = "learners."
IN_TORCH = "learners.torch_trainer:create"
NONE: Mapping[str, Any] = MappingProxyType({})
SHOWN_MAX = 5
"""The most missing methods of a trainer that a message lists."""
MORE_MEMORY = "Give its machine more memory, or make the model smaller."
log = logging.getLogger(__name__)


def imported(field: str, path: str) -> Callable[..., Any]:
    """Return the function ``package.module:function`` named in this field. Raises ConfigurationError if there is none."""
    module, _, name = path.partition(":")
    user_packages.put_on_path()
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except BaseException as error:  # the module's own code may raise anything
        if isinstance(error, AtollError) or is_interrupt(error):
            raise
        raise ConfigurationError(
            detail=f"{field} {path!r} cannot be imported ({in_words(error)}). {_remedy(module)}"
        ) from error
    if not callable(factory):
        raise ConfigurationError(detail=f"{field} {path!r} is {_kind(factory)}, but must be a function. Name one.")
    return factory


def called(
    field: str, path: str, *arguments: Any, settings: Mapping[str, Any] = NONE, settings_field: str | None = None
) -> Any:
    """Call the function named in this field and return its result. Raises ConfigurationError if it raises.

    It gets the section's ``settings`` as a keyword (``with_settings``).
    """
    where = settings_field or f"{field.removesuffix('.factory')}.settings"
    function = with_settings(where, path, imported(field, path), settings)
    return guarded(f"{field} {path!r}", function)(*arguments)


def with_settings(
    where: str, path: str, function: Callable[..., Any], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the function so that it gets its own copy of the settings as the keyword ``settings``, if it has one.

    Raises ConfigurationError if it has none and there are settings.
    """
    try:
        parameters = signature(function).parameters
    except (TypeError, ValueError):  # some functions of C have no signature
        parameters = MappingProxyType({})
    named = parameters.get("settings")
    takes_it = named is not None and named.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    if takes_it or any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return partial(function, settings=deepcopy(dict(settings)))
    if not settings:
        return function
    raise ConfigurationError(
        detail=f"{where} has {', '.join(sorted(settings)[:SHOWN_MAX])}, but {path!r} has no parameter `settings`. "
        f"Add it to the function, or remove {where}."
    )


def trainer_of(spec: IslandSpec, shard_index: int, shard_count: int) -> Trainer:
    """Return the trainer that the specification asks for. Raises ConfigurationError if a package returns none.

    Errors of a package's code are final, except system errors and lack of memory, after which another start may succeed.
    """
    section, document = spec.job.trainer, spec.document
    path = IN_TORCH if spec.shares_decoder else section.factory
    if path == IN_TORCH:
        require_torch(f"{spec.path}.framework" if spec.shares_decoder else "trainer.kind")
    make = imported("trainer", path)
    if path.startswith(OWN):  # settings of a torch trainer are for its model
        built: Trainer = make(document, shard_index, shard_count)
        return built
    make = with_settings("trainer.settings", path, make, section.settings)
    try:
        built = guarded(f"trainer {path!r}", make, (OSError,))(document, shard_index, shard_count)
    except OSError as error:
        raise InfrastructureError(detail=f"trainer {path!r} raises {in_words(error)}.", remedy=TRY_OUTSIDE) from error
    if lacking := sorted(name for name in vars(Trainer) if not name.startswith("_") and name not in dir(built)):
        shown, kind = ", ".join(lacking[:SHOWN_MAX]), _kind(built).removeprefix("of type ")
        raise ConfigurationError(
            detail=f"trainer {path!r} returns {kind}, which lacks {shown}{' …' if len(lacking) > SHOWN_MAX else ''}. "
            "Return a trainer with all methods of learners.contract.Trainer."
        )
    return built


def require_torch(field: str) -> None:
    """Raise ConfigurationError unless PyTorch, for which this field of the specification asks, can be imported here."""
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as missing:  # OSError: a library that it needs
        from orchestrator.specification.training_sections import INSTALL_TORCH  # which a specification has imported

        detail = f"{field} is torch, but PyTorch cannot be imported here ({in_words(missing)}). {INSTALL_TORCH}"
        raise ConfigurationError(detail=detail) from missing


@contextmanager
def errors_in_words(subject: str) -> Iterator[None]:
    """Raise what a package's code raises as an error that another process can receive, without its cause.

    Ray sends a traceback with the texts of all causes. A text that is not Unicode would end the process, and what is not
    an Exception would end the actor or the call without a message. The caller's log has the traceback.
    """
    try:
        yield
    except AtollError as error:
        log.exception("%s fails", subject)
        raise error from None
    except BaseException as error:
        log.exception("%s fails", subject)
        raise ConfigurationError(detail=f"{subject} raises {in_words(error)}. {TRY_OUTSIDE}") from None


def guarded(subject: str, function: Any, but: tuple[type[Exception], ...] = ()) -> Callable[..., Any]:
    """Wrap the function so that any exception becomes a ConfigurationError with the subject. JAX may trace it.

    Lack of memory becomes an InfrastructureError, because the specification need not be wrong. The errors of ``but`` are
    raised unchanged, and so is Ctrl+C.
    """
    if not callable(function):
        raise ConfigurationError(detail=f"{subject} is {_kind(function)}, but must be a function. Return another one.")

    passed: tuple[type[Exception], ...] = (AtollError, *but)

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except BaseException as error:
            if isinstance(error, passed) or is_interrupt(error):
                raise
            if isinstance(error, MemoryError):
                raise InfrastructureError(detail=f"{subject} raises {in_words(error)}.", remedy=MORE_MEMORY) from error
            raise ConfigurationError(detail=f"{subject} raises {in_words(error)}. {TRY_OUTSIDE}") from error

    return call


def _remedy(module: str) -> str:
    if user_packages.is_there(module, ()):
        return "Name package.module:function, from a package that is installed on every node."
    return user_packages.REMEDY


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def loop_plan(spec: IslandSpec, fragments: tuple[tuple[str, ...], ...], rank: int | None) -> LoopPlan:
    """Return what the specification says of an island's loop."""
    sync, recovery = spec.job.synchroniser, spec.job.recovery
    return LoopPlan(
        fragments=fragments,
        interval_steps=sync.interval_steps,
        router_interval_steps=sync.router_interval_steps,
        adoption=sync.adoption,
        mix_alpha=sync.mix_alpha,
        tokens_per_schedule_step=spec.job.tokens_per_schedule_step,
        ramp=spec.job.batch_ramp,
        codec=sync.wire.up,
        rank=rank,
        step_limits=StepLimits(recovery.step_limit_s, recovery.step_limit_ratio, recovery.first_step_limit_s),
    )


def require_spread(trainer: Trainer, spec: IslandSpec, size: int) -> None:
    """Raise ConfigurationError unless the trainer can be one of ``size`` processes of an island."""
    if not hasattr(trainer, "held"):
        raise ConfigurationError(
            detail=f"islands.hosts is {size}, but the trainer {spec.job.trainer.factory} does not report which part of a "
            f"tensor each host holds. Implement learners.contract.SpreadTrainer, or set islands.hosts to 1."
        )
