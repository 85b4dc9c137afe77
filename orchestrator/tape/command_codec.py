"""The codec of commands: to their one plain form, ``{"kind": "kill", "island": "asia", …}``, and back, strictly.

Rows of the store and calls between processes hold commands like this, since who wrote one and who reads it may be of
different builds: a service is upgraded while synchronisers of an earlier build go on. So nothing is guessed. A kind that
this build does not know, a field that it does not know, one that is missing and a value of another type are refused, each
with the reason; to do something else than was asked for would be worse than to do nothing. The tape has the same fields,
flat, beside who asked and when (``codec``).

Kind and fields are read off the classes of ``core.commands``, so that a new command needs no line here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

from orchestrator.core.commands import Command
from orchestrator.errors import DataError
from orchestrator.plain import brief, some_of
from orchestrator.tape.declared import coder

KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Command)}
GROWN: Mapping[str, Mapping[str, Any]] = {"inject": {"host": None}}
"""What commands grew since services and synchronisers of different builds talk, and what stands for its absence."""


def encode(command: Command) -> dict[str, Any]:
    """A field that its kind grew is left out where it says nothing: an earlier build knows the command, and its digest."""
    kind, grown = type(command).__name__.lower(), GROWN.get(type(command).__name__.lower(), {})
    fields = dataclasses.asdict(command)
    return {"kind": kind} | {name: value for name, value in fields.items() if name not in grown or value != grown[name]}


def decode(document: object) -> Command:
    """Raises DataError, with the reason, for what this build has no command for.

    A field with a default may be missing: a command that grew one can still be read from rows of an earlier build.
    """
    if not isinstance(document, Mapping):
        raise DataError(detail=f"a command is a mapping of its kind and fields, not {brief(document)}.")
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise DataError(
            detail=f"no command of the kind {brief(kind)} is known to this build; it has {', '.join(KINDS)}."
        )
    fields = _fields_of(kind)
    if strange := sorted(map(brief, document.keys() - fields.keys() - {"kind"})):
        raise DataError(detail=f"{kind} says {some_of(strange, 5)}, and this build does not know what that means.")
    values = {}
    for name, field in fields.items():
        if name in document:
            try:
                values[name] = field.read(document[name])
            except (TypeError, ValueError) as error:
                detail = f"{kind}.{name} cannot be {brief(document[name])}: {error}."
                raise DataError(detail=detail) from error
        elif field.required:
            raise DataError(detail=f"{kind} lacks {name}.")
    command: Command = KINDS[kind](**values)
    return command


class _Field(NamedTuple):
    read: Callable[[Any], Any]
    required: bool


@cache
def _fields_of(kind: str) -> dict[str, _Field]:
    """By name. Lists of commands decode one row after another, and what hints mean takes longer than what rows say."""
    hints = get_type_hints(KINDS[kind])
    return {
        field.name: _Field(coder(hints[field.name]).read, field.default is dataclasses.MISSING)
        for field in dataclasses.fields(KINDS[kind])
    }
