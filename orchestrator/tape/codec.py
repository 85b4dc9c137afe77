"""The codecs of tapes and of commands: frozen dataclasses to plain data and back, by their type hints alone.

A new event, effect, command or field needs no line here. The codecs do not know what a message means, or files.

**Tapes** (``to_json``, ``decode_tagged``). Events and effects carry their name under ``type``, nested values do not need
it. Numbers keep the kind they have (an integer in a float's place stays an integer) and floats are written by ``repr``, so
that decode(encode(x)) == x. Two events are written flat, under the name of what they carry: a command that was asked for is
called after its request (``{"type": "KillRequested", …, "island": "asia", …}``), an island's report after the report
(``REPORTED``). Missing fields take their defaults, because earlier builds wrote tapes, too.

**Commands** (``encode_command``, ``decode_command``): ``{"kind": "kill", "island": "asia", …}``. Rows of the store and calls
between processes hold them, and writer and reader may be of different builds: a service is upgraded while synchronisers of
an earlier build go on. So reading is strict. A kind or a field that this build does not know, a missing field and a value
of another type are refused, each with the reason: to do something other than was asked for would be worse than to do
nothing.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from orchestrator.core.commands import Command, OperatorCommand
from orchestrator.core.effects import Effect
from orchestrator.core.events import CommandRequested, Event, IslandReported
from orchestrator.core.messages import (
    Adopted,
    CatchUpFailure,
    CaughtUp,
    Drained,
    Flushed,
    NotSaved,
    Overdue,
    Progress,
    Ready,
    Saved,
)
from orchestrator.core.saving import FromJournal, RestoredFrom
from orchestrator.core.vocabulary import (
    UNWRITTEN_DEFAULT,
    AllOffers,
    FragmentId,
    GraceTimer,
    IslandId,
    IslandTimer,
    IslandTimerKind,
    JobTimer,
    MergedOffer,
    Timer,
    offer_number,
    offer_of_number,
)
from orchestrator.elastic import FleetEffect, FleetEvent
from orchestrator.errors import DataError
from orchestrator.system.plain import brief, some_of
from orchestrator.tape.declared import coder

TAGGED: dict[str, type[Any]] = {
    kind.__name__: kind
    for union in (Event, Effect, FleetEvent, FleetEffect)
    for kind in get_args(union)
    if kind not in (CommandRequested, IslandReported)
}
"""Every message by name, of jobs and of fleets, but for the two below. The unions share no name."""
REQUESTS: dict[str, type[Any]] = {f"{kind.__name__}Requested": kind for kind in get_args(OperatorCommand)}
"""Every command by the name of the event that asks for it."""
REPORTED: dict[str, type[Any]] = {
    "ProgressReported": Progress,
    "FragmentAdopted": Adopted,
    "StepOverdue": Overdue,
    "IslandReady": Ready,
    "IslandCaughtUp": CaughtUp,
    "CatchUpFailed": CatchUpFailure,
    "IslandFlushed": Flushed,
    "IslandDrained": Drained,
    "IslandSaved": Saved,
    "IslandNotSaved": NotSaved,
}
"""Every report by the name of the event that carries it."""

_Decode = Callable[[Any], Any]
_Writer = tuple[dict[str, str], tuple[str, ...], Callable[[Any], tuple[Any, ...]], dict[str, Any]]
"""Tag, field names, all their values at once (the first again at the end: one name alone would give no tuple), and the
defaults that are left out."""
_WRITERS: dict[type[Any], _Writer] = {}
_REPORT_WRITERS: dict[type[Any], _Writer] = {}
"""By the class of the report: how the event that carries it is written."""
_REPORT_NAMES = {kind: name for name, kind in REPORTED.items()}
_ABOUT_REPORT = ("at", "island", "incarnation")


def parse_timer(text: str) -> Timer:
    """Return the timer whose text this is. Raises ValueError where no timer has it."""
    kind, _, subject = text.partition(":")
    if kind == "grace":
        return GraceTimer(FragmentId(int(subject)))
    if kind in set(IslandTimerKind):
        return IslandTimer(IslandTimerKind(kind), IslandId(subject))
    return JobTimer(text)


SCALARS: dict[type[Any], Callable[[Any], str | int]] = {
    GraceTimer: str,
    IslandTimer: str,
    AllOffers: offer_number,
    FromJournal: lambda _: 0,
}
"""Dataclasses that are written as a text or a number."""
_SCALAR_READERS: tuple[tuple[Any, _Decode], ...] = (
    (Timer, parse_timer),
    (MergedOffer, offer_of_number),
    (RestoredFrom, lambda number: number or FromJournal()),
)
"""How a field of this type is read."""
_FIELDS: dict[type[Any], tuple[tuple[str, _Decode | None], ...]] = {}


def name_of(message: Any) -> str:
    """Return the name by which a tape calls this event or effect."""
    if isinstance(message, CommandRequested):
        return f"{type(message.request).__name__}Requested"
    return _REPORT_NAMES[type(message.report)] if isinstance(message, IslandReported) else type(message).__name__


def to_json(value: Any) -> str:
    """One line of JSON. NaN and infinities are written as Python's json does (a diverged loss must not stop a tape)."""
    return _ENCODER.encode(value)


def decode_tagged(data: Mapping[str, Any]) -> Any:
    """The event or effect that ``data`` is the plain form of. Raises DataError if this build knows no such message."""
    name = data.get("type")
    if isinstance(name, str) and (report := REPORTED.get(name)) is not None:
        if missing := [field for field in _ABOUT_REPORT if field not in data]:
            raise DataError(detail=f"{name} needs the field {missing[0]!r}; the record has {sorted(data)}.")
        return IslandReported(data["at"], data["island"], data["incarnation"], decode(report, data))
    if isinstance(name, str) and name in REQUESTS:
        return decode(CommandRequested, {**data, "request": {**data, "type": REQUESTS[name].__name__}})
    kind = TAGGED.get(name) if isinstance(name, str) else None
    if kind is None:
        raise DataError(detail=f"{name!r} is not an event or effect of this build; another build wrote the tape.")
    return decode(kind, data)


def decode(kind: type[Any], data: Mapping[str, Any]) -> Any:
    """An instance of the dataclass ``kind``. Raises DataError naming the field that is missing or wrong.

    A field with a default may be missing: a message that grew one can still be read from older tapes.
    """
    values = {}
    for name, convert in _fields_of(kind):
        if name not in data and _has_default(kind, name):
            continue
        if name not in data:
            raise DataError(detail=f"{kind.__name__} needs the field {name!r}; the record has {sorted(data)}.")
        value = data[name]
        try:
            values[name] = value if convert is None else convert(value)
        except (TypeError, ValueError, AttributeError) as error:
            detail = f"{kind.__name__}.{name} cannot be {value!r:.80}: {error}."
            raise DataError(detail=detail) from error
    return kind(**values)


def _plain(value: Any) -> Any:
    """Called by json for what it cannot write itself: our dataclasses."""
    kind = type(value)
    if kind is CommandRequested:
        about = {"at": value.at, "command": value.command, "caller": value.caller}
        return {"type": name_of(value), **about, **_plain(value.request)}
    if kind in SCALARS:
        return SCALARS[kind](value)
    writer = _REPORT_WRITERS.get(type(value.report)) if kind is IslandReported else _WRITERS.get(kind)
    if writer is None:
        writer = _report_writer(type(value.report)) if kind is IslandReported else _writer(kind)
    tag, names, values, unwritten = writer
    plain = {**tag, **dict(zip(names, values(value), strict=False))}
    for name, default in unwritten.items():
        if plain[name] == default:
            del plain[name]
    return plain


def _writer(kind: type[Any]) -> _Writer:
    names = tuple(name for name, _ in _fields_of(kind))
    tag = {"type": kind.__name__} if kind.__name__ in TAGGED else {}
    read = attrgetter(*names, names[0]) if names else lambda _: ()
    writer = _WRITERS[kind] = (tag, names, read, _unwritten(kind))
    return writer


def _report_writer(report: type[Any]) -> _Writer:
    names = tuple(name for name, _ in _fields_of(report))
    read = attrgetter(*_ABOUT_REPORT, *(f"report.{name}" for name in names))
    tag = {"type": _REPORT_NAMES[report]}
    writer = _REPORT_WRITERS[report] = (tag, (*_ABOUT_REPORT, *names), read, _unwritten(report))
    return writer


def _unwritten(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind) if field.metadata == UNWRITTEN_DEFAULT}


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"), ensure_ascii=False, check_circular=False)


def _fields_of(kind: type[Any]) -> tuple[tuple[str, _Decode | None], ...]:
    fields = _FIELDS.get(kind)
    if fields is None:
        hints = get_type_hints(kind)
        fields = tuple((field.name, _decoder(hints[field.name])) for field in dataclasses.fields(kind))
        _FIELDS[kind] = fields
    return fields


def _has_default(kind: type[Any], name: str) -> bool:
    field = kind.__dataclass_fields__[name]
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _decoder(hint: Any) -> _Decode | None:
    """Return how to make a value of type ``hint`` out of JSON's; ``None`` where JSON's own value is already right."""
    hint = getattr(hint, "__supertype__", hint)  # NewType
    for scalar, read in _SCALAR_READERS:
        if hint == scalar:
            return read
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        choices = tuple(choice for choice in get_args(hint) if choice is not type(None))
        convert = _decoder(choices[0]) if len(choices) == 1 else _decoder_of_one_in(choices)
        return None if convert is None else lambda value: None if value is None else convert(value)
    if origin is tuple:
        return _tuple_decoder(get_args(hint))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        nested: type[Any] = hint
        return lambda value: decode(nested, value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    return None


def _decoder_of_one_in(kinds: tuple[type[Any], ...]) -> _Decode:
    """Return the decoder of a union of dataclasses, whose values carry their class under ``type``."""
    by_name = {kind.__name__: kind for kind in kinds}

    def convert(value: Any) -> Any:
        if (name := value.get("type")) not in by_name:
            raise ValueError(f"{name!r} is not one of {', '.join(by_name)}")
        return decode(by_name[name], value)

    return convert


def _tuple_decoder(arguments: tuple[Any, ...]) -> _Decode:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        each = _decoder(arguments[0])
        return tuple if each is None else lambda value: tuple(each(item) for item in value)
    parts = [_decoder(argument) or _unchanged for argument in arguments]
    return lambda value: tuple(part(item) for part, item in zip(parts, value, strict=True))


def _unchanged(value: Any) -> Any:
    return value


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────────

KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Command)}
GROWN: Mapping[str, Mapping[str, Any]] = {"inject": {"host": None}, "set": {"reason": ""}}
"""What commands grew since services and synchronisers of different builds talk, and what stands for its absence."""


def encode_command(command: Command) -> dict[str, Any]:
    """Return the plain form, without fields that its kind grew and that say nothing: an earlier build knows the rest."""
    kind, grown = type(command).__name__.lower(), GROWN.get(type(command).__name__.lower(), {})
    fields = dataclasses.asdict(command)
    return {"kind": kind} | {name: value for name, value in fields.items() if name not in grown or value != grown[name]}


def decode_command(document: object) -> Command:
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
    fields = _fields_of_command(kind)
    if strange := sorted(map(brief, document.keys() - fields.keys() - {"kind"})):
        raise DataError(detail=f"{kind} has {some_of(strange, 5)}, which this build does not know.")
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
def _fields_of_command(kind: str) -> dict[str, _Field]:
    """Return the fields by name. They are cached: a list of commands would read the same hints for every row."""
    hints = get_type_hints(KINDS[kind])
    return {
        field.name: _Field(coder(hints[field.name]).read, field.default is dataclasses.MISSING)
        for field in dataclasses.fields(KINDS[kind])
    }
