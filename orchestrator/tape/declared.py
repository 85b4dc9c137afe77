"""The codec of snapshots: objects of declared classes to plain lists and back, strictly, by their declared fields.

Responsible for: that reading can make nothing but what a declaration names. There is no name of a class in the data that
would be looked up anywhere: what is made is decided by the type hints below the root, collected before a byte is read. A
union of classes says which one it is by that class's name within the union. Every value is of exactly the declared kind: no
bool in an integer's place, no number beyond 64 bits, no field more or less. Refuses to know: bytes, files, and what any of
it means. Unlike ``codec``, which reads tapes of earlier builds and bears missing fields.

A dataclass, or a class of ours that annotates its attributes, is the list of its values in the order of the declaration;
a dictionary with text for keys is an object, any other a list of pairs. References are not kept: no object that changes may
be held in two places (``tests/tapes/test_declared.py`` looks for such).
"""

from __future__ import annotations

import dataclasses
import types
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from orchestrator.errors import DataError, InternalError

INTEGER_MAX = (1 << 63) - 1
OWN = "orchestrator."
_Convert = Callable[[Any], Any]
_Variables = Mapping[Any, Any]
_NONE: _Variables = types.MappingProxyType({})


class Coder(NamedTuple):
    """``write`` is ``None`` where JSON writes the value as it is. ``read`` raises ValueError or TypeError."""

    write: _Convert | None
    read: _Convert


def coder(hint: Any, variables: _Variables = _NONE) -> Coder:
    """Return the coder of values of the type ``hint``. Raises InternalError for a hint that does not say what is made."""
    hint = variables.get(hint, hint) if isinstance(hint, TypeVar) else hint
    hint = getattr(hint, "__supertype__", hint)  # NewType
    if hint in _PLAIN:
        return Coder(None, _PLAIN[hint])
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(arguments, variables)
    if origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        return _row(tuple, [coder(argument, variables) for argument in arguments])
    if origin in (tuple, list, set, frozenset):
        return _many(origin, coder(arguments[0], variables))
    if origin is dict:
        return _dictionary(dict, arguments[0], coder(arguments[0], variables), coder(arguments[1], variables))
    if origin is Counter:
        return _dictionary(Counter, arguments[0], coder(arguments[0], variables), coder(int))
    if isinstance(origin, type) and issubclass(origin, Enum):
        return _enumeration(origin)
    if isinstance(origin, type) and origin.__module__.startswith(OWN):
        return _object(origin, dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=True)))
    raise InternalError(detail=f"{hint!r} does not say which class is to be made, so it cannot be kept.")


# ── what JSON has ─────────────────────────────────────────────────────────────────────────────────────────────────


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError("it is neither true nor false")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -INTEGER_MAX <= value <= INTEGER_MAX:
        raise TypeError("it is not an integer of 64 bits")
    return value


def _number(value: Any) -> float | int:
    """NaN and infinities are numbers: a loss may have been one."""
    return value if type(value) is float else _integer(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("it is not a text")
    if not value.isascii():
        value.encode()  # half a surrogate pair cannot be written anywhere
    return value


def _nothing(value: Any) -> None:
    if value is not None:
        raise TypeError("it is not null")


_PLAIN: dict[Any, _Convert] = {
    bool: _truth,
    int: _integer,
    float: _number,
    str: _text,
    type(None): _nothing,
    None: _nothing,
}


def _enumeration(kind: type[Enum]) -> Coder:
    members = {member.value: member for member in kind}

    def read(value: Any) -> Enum:
        if (member := members.get(_text(value))) is None:
            raise ValueError(f"it is no {kind.__name__}")
        return member

    return Coder(None if issubclass(kind, str) else attrgetter("value"), read)


# ── collections ───────────────────────────────────────────────────────────────────────────────────────────────────


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError("it is not a list")
    return value


def _many(kind: type[Any], each: Coder) -> Coder:
    """Any number of one type. A set must not have an element twice."""
    read_each, write_each = each.read, each.write

    def read(value: Any) -> Any:
        items = kind([read_each(item) for item in _list(value)])
        if len(items) != len(value):
            raise ValueError("it has a value twice")
        return items

    if kind in (set, frozenset):
        if write_each is not None:
            raise InternalError(detail="A set holds what JSON can write: it is written in order.")
        return Coder(sorted, read)
    if write_each is None:
        return Coder(None, read)
    return Coder(lambda value: [write_each(item) for item in value], read)


def _row(make: Callable[[list[Any]], Any], parts: list[Coder]) -> Coder:
    """Return the coder of a list with one value for each part."""
    reads = [part.read for part in parts]

    def read(value: Any) -> Any:
        if len(_list(value)) != len(reads):
            raise ValueError(f"it has {len(value)} values, not {len(reads)}")
        return make([one(item) for one, item in zip(reads, value, strict=True)])

    if all(part.write is None for part in parts):
        return Coder(None, read)
    return Coder(_writer_of_row([part.write for part in parts]), read)


def _writer_of_row(writes: list[_Convert | None]) -> _Convert:
    changed = [(place, write) for place, write in enumerate(writes) if write is not None]

    def write(values: Any) -> list[Any]:
        row = list(values)
        for place, one in changed:
            row[place] = one(row[place])
        return row

    return write


def _dictionary(kind: type[Any], key_hint: Any, key: Coder, value: Coder) -> Coder:
    read_key, read_value, write_key, write_value = key.read, value.read, key.write or _same, value.write or _same
    changes = value.write is not None

    def read_object(data: Any) -> Any:
        if type(data) is not dict:
            raise TypeError("it is not an object")
        return kind({read_key(name): read_value(item) for name, item in data.items()})

    def read_pairs(data: Any) -> Any:
        pairs = kind({read_key(name): read_value(item) for name, item in map(_list, _list(data))})
        if len(pairs) != len(data):
            raise ValueError("it has a key twice")
        return pairs

    if getattr(key_hint, "__supertype__", key_hint) is str:
        return Coder((lambda data: {k: write_value(v) for k, v in data.items()}) if changes else None, read_object)
    if key.write is None and not changes:
        return Coder(lambda data: list(data.items()), read_pairs)
    return Coder(lambda data: [(write_key(k), write_value(v)) for k, v in data.items()], read_pairs)


def _same(value: Any) -> Any:
    return value


def _union(arguments: tuple[Any, ...], variables: _Variables) -> Coder:
    """``X | None``; plain kinds that JSON tells apart; or classes of ours, each with its name before it."""
    rest = tuple(argument for argument in arguments if argument is not type(None))
    several = len(rest) > 1
    inner = (_alternatives(rest) if several else coder(rest[0], variables)) if rest else Coder(None, _nothing)
    if len(rest) == len(arguments):
        return inner
    read, write = inner.read, inner.write
    return Coder(
        None if write is None else lambda value: None if value is None else write(value),
        lambda value: None if value is None else read(value),
    )


def _alternatives(kinds: tuple[Any, ...]) -> Coder:
    if all(kind in (bool, int, float, str) for kind in kinds):
        reads: dict[type, _Convert] = {kind: _PLAIN[kind] for kind in kinds}
        if float in reads:
            reads[int] = _integer

        def read_plain(value: Any) -> Any:
            if (read := reads.get(type(value))) is None:
                raise TypeError("it is not of a kind that is allowed here")
            return read(value)

        return Coder(None, read_plain)
    coders = {kind.__name__: (kind, coder(kind)) for kind in kinds}
    names = {kind: (name, one.write or _same) for name, (kind, one) in coders.items()}

    def read(value: Any) -> Any:
        name, fields = _list(value)
        if _text(name) not in coders:
            raise ValueError(f"{name!r:.40} is not one of {', '.join(coders)}")
        return coders[name][1].read(fields)

    def write(value: Any) -> tuple[str, Any]:
        name, one = names[type(value)]
        return name, one(value)

    return Coder(write, read)


# ── classes of ours ───────────────────────────────────────────────────────────────────────────────────────────────


def _object(kind: type[Any], variables: _Variables) -> Coder:
    hints = get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        declared = dataclasses.fields(kind)
        names = tuple(field.name for field in declared)
        make: Callable[[list[Any]], Any] = lambda values: kind(*values)  # noqa: E731
        if not all(field.init and not field.kw_only for field in declared):
            raise InternalError(detail=f"{kind.__name__} is not made of its fields in their order.")
    else:
        names = tuple(hints)
        make = _maker(kind, names)
    if not names and not dataclasses.is_dataclass(kind):
        raise InternalError(detail=f"{kind.__name__} does not declare what it holds.")
    parts = [coder(hints[name], variables) for name in names]
    row = _row(make, [_named(kind, name, part) for name, part in zip(names, parts, strict=True)])
    fields = _getter(names)
    write_row = row.write or _same
    if dataclasses.is_dataclass(kind):
        return Coder(fields if row.write is None else lambda value: write_row(fields(value)), row.read)

    def write(value: Any) -> Any:
        if vars(value).keys() != hints.keys():
            odd = ", ".join(sorted(vars(value).keys() ^ hints.keys()))
            raise InternalError(detail=f"{kind.__name__} does not declare exactly what it holds: {odd}.")
        return write_row(fields(value))

    return Coder(write, row.read)


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)


def _maker(kind: type[Any], names: tuple[str, ...]) -> Callable[[list[Any]], Any]:
    def make(values: list[Any]) -> Any:
        instance = object.__new__(kind)
        vars(instance).update(zip(names, values, strict=True))
        return instance

    return make


def _named(kind: type[Any], name: str, part: Coder) -> Coder:
    """The same, whose errors say where they are."""
    read_value = part.read

    def read(value: Any) -> Any:
        try:
            return read_value(value)
        except DataError:
            raise  # it says already
        except (TypeError, ValueError) as error:
            raise DataError(detail=f"{kind.__name__}.{name} cannot be {_shown(value)}: {error}.") from error

    return Coder(part.write, read)


def _shown(value: Any) -> str:
    """Short, however long it is."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value[:40]) if isinstance(value, str) else f"{value!r:.40}"
