"""One record of a data file: its text, or precisely why it has none.

A record is a line of JSON Lines or of plain text, a row of Parquet or a record of ArrayRecord. The service checks the first
lines of a file with these functions, and islands read every record with them, so both report the same.
"""

from __future__ import annotations

import json
from typing import Any

NAMES_MAX, NAME_LENGTH_MAX = 8, 40
"""How many fields a message names, and their length."""
_BOM = "\ufeff"
_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


class NotText(ValueError):
    """A record that has no text to train on. Its message is a clause about the record: ``has no field 'text'``."""


class NotUtf8(NotText):
    """A record that is not valid UTF-8."""


def utf8(record: bytes) -> bytes:
    """Return the record. Raises NotText if it is not UTF-8."""
    _decoded(record)
    return record


def plain_line(line: bytes) -> bytes:
    """Return a line of plain text. Raises NotText if it is not UTF-8, or has a NUL byte."""
    if b"\0" in line:
        raise NotText(f"has a NUL byte (its byte {line.index(0):,}), so it is not text")
    return utf8(line)


def text_of(line: bytes, field: str) -> bytes | None:
    """Return the text of a line's object; None if it is empty or null. Raises NotText with the reason."""
    fields = object_of(line)
    if field not in fields:
        raise NotText(f"has no field {field!r} (text_field){_named(fields)}")
    value = fields[field]
    if value is None:
        return None
    if not isinstance(value, str):
        raise NotText(f"has {_kind_of(value)} in the field {field!r}, not text")
    try:
        return value.encode() or None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise NotText(
            f"has half of a surrogate pair, {half}, in the field {field!r}, which is not a character"
        ) from error


def object_of(line: bytes) -> dict[str, Any]:
    """Return the line's JSON object. Raises NotText."""
    try:
        # floats, because an id of thousands of digits is no int for Python, and is not trained on
        value = json.loads(_decoded(line).removeprefix(_BOM), parse_int=float)
    except json.JSONDecodeError as error:
        raise NotText(f"is not JSON ({error.msg.removesuffix(' at')}, at character {error.pos:,})") from error
    except RecursionError as error:
        raise NotText("is JSON that is nested too deeply") from error
    if not isinstance(value, dict):
        raise NotText(f"is {_kind_of(value)}, not a JSON object")
    return value


def _decoded(record: bytes) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        raise NotUtf8(f"is not UTF-8 (its byte {error.start:,} is 0x{record[error.start]:02x})") from error


def _kind_of(value: Any) -> str:
    return _KINDS.get(type(value), "a number")


def _named(one: dict[str, Any]) -> str:
    if not one:
        return "; it has no fields"
    names = ", ".join(repr(name[:NAME_LENGTH_MAX]) for name in list(one)[:NAMES_MAX])
    return f"; it has {names}{', …' if len(one) > NAMES_MAX else ''}"
