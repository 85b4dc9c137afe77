"""Sections of documents derived from frozen dataclasses, so that a fact's fields are written once.

    Part = section_of(JobPolicy, bounds, omit=("islands",))        a pydantic model with the same fields and defaults
    policy = instance_of(JobPolicy, part, islands=…)               back again

A field's range comes from ``bounds``, by its path (``step_limits.ratio``). Without one it follows from its type: numbers
are finite and not negative.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import Field, StrictBool, create_model

from orchestrator.specification.bounds import DURATION_MAX_S, Section, WordOrNone

Instance = TypeVar("Instance")
Bounds = Callable[[str], Any]
"""The annotated type of the field at a path; None where its type says enough."""
ENTRIES_MAX = 10_000
COUNT_MAX = 2**63 - 1

_BY_TYPE: dict[Any, Any] = {
    bool: StrictBool,
    int: Annotated[int, Field(strict=True, ge=0, le=COUNT_MAX)],
    float: Annotated[float, Field(strict=True, ge=0, le=DURATION_MAX_S, allow_inf_nan=False)],
    str: WordOrNone,
}


def section_of(
    kind: type[Any], bounds: Bounds, /, omit: Collection[str] = (), under: str = "", **others: Any
) -> type[Section]:
    """Return the section with the dataclass's name, fields and defaults, without ``omit``.

    ``others`` are further fields, as pairs of type and default, such as the discriminator of a union.
    """
    hints = get_type_hints(kind)
    wanted = [field for field in fields(kind) if field.name not in omit]
    described: dict[str, Any] = dict(others)
    for field in wanted:
        path = f"{under}{field.name}"
        annotation = bounds(path) or _annotation(hints[field.name], bounds, path)
        default = ... if field.default is MISSING else field.default
        if is_dataclass(default):
            default = annotation()
        described[field.name] = (annotation, default)
    return create_model(kind.__name__, __base__=Section, __doc__=kind.__doc__, **described)


def instance_of(kind: type[Instance], section: Section, **others: Any) -> Instance:
    """Return the dataclass that a section derived from it holds; ``others`` are the fields that were omitted."""
    values = {name: _value(getattr(section, name), kind, name) for name in type(section).model_fields}
    return kind(**values, **others)


def _annotation(hint: Any, bounds: Bounds, path: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)  # NewType
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        choices = [None if choice is NoneType else _annotation(choice, bounds, path) for choice in arguments]
        return Union[tuple(choices)]  # noqa: UP007
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return Annotated[tuple[_annotation(arguments[0], bounds, path), ...], Field(max_length=ENTRIES_MAX)]  # type: ignore[misc]
    if isinstance(hint, type) and is_dataclass(hint):
        return section_of(hint, bounds, under=f"{path}.")
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    return _BY_TYPE[hint]


def _value(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, Section):
        return value
    return instance_of(get_type_hints(kind)[name], value)
