"""A document of which some values are wrong, as an object: what is right can be read, and what is not raises ``Unknown``.

By it the rules between fields are checked on what is right, so that all problems are told at once, and none of them is told
because of another: a rule that reads something wrong says nothing.

    wrong = wrong_places(error, JobSpec)      from pydantic's errors
    job, problems = right_part(JobSpec, document, wrong)
    for rule in RULES:
        problems += collected(rule(job))

Sections keep their properties and rules of their own (pydantic's validators behind all fields), which pydantic leaves out
where one field is wrong. Refuses to know any one document.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, SupportsIndex

from pydantic import BaseModel, TypeAdapter, ValidationError

from orchestrator.errors import Problem
from orchestrator.validation import Location, path_of, sections_in


class Unknown(Exception):
    """A value was read that is wrong in the document."""


WRONG: Any = object()


class KnownSection:
    """A section with some wrong values. Reads as the section itself."""

    def __init__(self, model: type[BaseModel], values: Mapping[str, Any], fields_set: Collection[str]) -> None:
        self._model, self._values = model, values
        self.model_fields_set = set(fields_set)

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return _read(self._values[name])
        own = inspect.getattr_static(self._model, name, None)
        if isinstance(own, property) and own.fget is not None:
            return own.fget(self)
        if inspect.isfunction(own) and not hasattr(BaseModel, name):
            return partial(own, self)
        raise Unknown


class KnownEntries(tuple[Any, ...]):
    """A list of which some entries are wrong."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return map(_read, super().__iter__())

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return _read(super().__getitem__(index))


def right_part(
    model: type[BaseModel], document: Mapping[str, Any], wrong: Collection[Location]
) -> tuple[Any, list[Problem]]:
    """Return the document as its model reads it, but for the wrong places, and what the sections' own rules say of it."""
    reading = _Reading(frozenset(wrong), frozenset(place[:length] for place in wrong for length in range(len(place))))
    return reading.section(model, document, ()), reading.problems


def collected(problems: Iterable[Problem]) -> list[Problem]:
    """Return what a rule says, up to where it reads something wrong."""
    so_far: list[Problem] = []
    with suppress(Unknown):
        for problem in problems:
            so_far.append(problem)  # one by one: what came before is kept
    return so_far


def _read(value: Any) -> Any:
    if value is WRONG:
        raise Unknown
    return value


@dataclass
class _Reading:
    """One document's reading. ``around`` are the places that hold wrong ones."""

    wrong: frozenset[Location]
    around: frozenset[Location]
    problems: list[Problem] = field(default_factory=list)

    def section(self, model: type[BaseModel], document: Any, here: Location) -> Any:
        if not isinstance(document, Mapping):
            return WRONG
        values = {name: self._field(model, name, document, here) for name in model.model_fields}
        section = KnownSection(model, values, document.keys() & model.model_fields.keys())
        self.problems += _of_own_rules(model, section, here)
        return section

    def _field(self, model: type[BaseModel], name: str, document: Mapping[str, Any], section: Location) -> Any:
        described, here = model.model_fields[name], (*section, name)
        if here in self.wrong:
            return WRONG
        if name not in document:
            return WRONG if described.is_required() else described.get_default(call_default_factory=True)
        value = document[name]
        if here not in self.around:
            return _validated(Annotated[described.annotation, described], value)
        sections = sections_in(described.annotation)
        if len(sections) != 1:
            return WRONG
        if not isinstance(value, list | tuple):
            return self.section(sections[0], value, here)
        return KnownEntries(self._entry(sections[0], entry, (*here, index)) for index, entry in enumerate(value))

    def _entry(self, model: type[BaseModel], entry: Any, here: Location) -> Any:
        if here in self.wrong:
            return WRONG
        return self.section(model, entry, here) if here in self.around else _validated(model, entry)


def _validated(kind: Any, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return WRONG


def _of_own_rules(model: type[BaseModel], section: KnownSection, here: Location) -> Iterator[Problem]:
    for decorator in model.__pydantic_decorators__.model_validators.values():
        if decorator.info.mode == "after":
            rule: Any = inspect.getattr_static(model, decorator.cls_var_name)
            try:
                getattr(rule, "wrapped", rule)(section)
            except Unknown:
                continue
            except ValueError as error:
                yield Problem(path_of(here), f"{error}.", "")
