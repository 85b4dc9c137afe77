"""A story of events and effects as text for people: what happened, then what the core decided, indented.

    # Island c offers, too: every training island is in.
    at 4 s: ContributionArrived
            contribution: payload=c.1.0.1 island=c incarnation=1 …
        AdmitContribution contribution=c.1.0.1 version=1
        MergeFragment epoch=1 fragment=0 version=1 … reason=everyone_in
            inputs: payload=a.1.0.1 island=a weight=0.5
            inputs: payload=c.1.0.1 island=c weight=0.5

A record within a fact has a line of its own, so that a difference shows it alone. Fields that have their default are left
out. So is what an effect repeats of its event: a contribution is written in full where it arrives, and as its payload's id
after that.

Source of the form: the data-driven tests of etcd-io/raft (``testdata/*.txt``).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

from orchestrator.core.events import CommandRequested, IslandReported
from orchestrator.core.vocabulary import Contribution
from orchestrator.tape.codec import SCALARS, name_of
from orchestrator.tape.schema import Record

COLUMNS = 110
EFFECT, RECORD, CONTINUED = " " * 4, " " * 8, " " * 16
"""Indentation of an effect, of a record within an event or an effect, and of a line that goes on."""


def text_of(title: str, about: str, records: Iterable[Record], remarks: Mapping[int, str]) -> str:
    """Return the whole text. ``remarks`` stand before the record of their number."""
    blocks = ["\n".join([f"# {title}", "#", *_comment(about)])]
    for record in records:
        lines = _comment(remarks.get(record.n, ""))
        lines += _fact(record.event, f"at {_plain(record.event.at)} s: ", is_effect=False)
        for effect in record.effects:
            lines += _fact(effect, EFFECT, is_effect=True)
        if not record.effects:
            lines.append(f"{EFFECT}(nothing)")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent="# ", subsequent_indent="# ")


def _fact(fact: Any, before: str, *, is_effect: bool) -> list[str]:
    """Return the lines of an event or an effect: its kind with its plain fields, then the records within it."""
    plain, within = [], []
    for name, value in _told_fields(fact):
        if is_effect and isinstance(value, Contribution):
            plain.append(f"{name}={value.payload}")
        elif records := _records(value):
            within += [f"{name}: {_record(name, record)}" for record in records]
        else:
            plain.append(f"{name}={_plain(value)}")
    lines = _wrapped(" ".join([_name(fact), *plain]), before)
    return lines + [line for text in within for line in _wrapped(text, RECORD)]


def _name(fact: Any) -> str:
    return type(fact).__name__ if isinstance(fact, CommandRequested) else name_of(fact)


def _records(value: Any) -> tuple[Any, ...]:
    """Return the records that ``value`` is or holds: none for a plain value, or for a record without fields to write."""
    if is_dataclass(value):
        return (value,) if _fields(value) else ()
    return tuple(value) if isinstance(value, tuple) and value and all(map(is_dataclass, value)) else ()


def _record(name: str, record: Any) -> str:
    """Return kind and fields, without the kind where the field's name says it: ``inputs``, ``contribution``."""
    kind = type(record).__name__
    return _fields(record) if name.endswith("s") or name == kind.lower() else f"{kind} {_fields(record)}"


def _fields(record: Any) -> str:
    return " ".join(f"{name}={_plain(value)}" for name, value in _told_fields(record))


def _told_fields(fact: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(fact):
        value = getattr(fact, field.name)
        if isinstance(fact, IslandReported) and field.name == "report":
            yield from _told_fields(value)  # flat, as on a tape
        elif field.name != "at" and value != _default(field):
            yield field.name, SCALARS[type(value)](value) if type(value) in SCALARS else value


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _plain(value: Any) -> str:
    if is_dataclass(value):
        return f"{type(value).__name__}({_fields(value)})"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_plain, value))})"
    text = str(value)
    return f'"{text}"' if isinstance(value, str) and (" " in text or not text) else text


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=CONTINUED,
        break_long_words=False,
        break_on_hyphens=False,
    )
