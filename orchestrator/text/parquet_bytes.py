"""Read the columns and page sizes of a Parquet file without decompressing anything.

It parses two structures in Thrift's compact form. The service finds the column of texts or tokens with it, and the bounds of
tokens, without a library of 50 MB.
Islands find the size of each page before decompressing it, which bounds the memory of reading. Sources:
apache/parquet-format, parquet.thrift (FileMetaData, SchemaElement, PageHeader); Thrift's compact protocol.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from orchestrator.text.tokenizer_file import read_varint

MAGIC = b"PAR1"
SCHEMA_BYTES_MAX, FOOTER_BYTES_MAX = 1 << 20, 4 << 20
"""Of a footer, which begins with the schema; and of one that is read whole, for the bounds of its row groups."""
HEADER_BYTES, HEADER_BYTES_MAX = 1 << 12, 1 << 20
DEPTH_MAX = 32
_BYTE_ARRAY, _REPEATED, _DECIMAL = 6, 2, 5
_NULL_TYPE = 11
_TYPES = ("bool", "int32", "int64", "int96", "float", "double", "binary", "fixed_size_binary")
_INTEGERS, _CONVERTED_INTEGERS = (1, 2), (None, *range(11, 19))
_LOGICAL_OTHERS = {5, 6, 7, 8}
"""Decimal, date, time and timestamp, which are stored as integers."""
_DICTIONARY_PAGE = 2
_VALUES = (5, 7, 8)
"""What a header has of its page: of a data page, of a dictionary's, of a data page of version 2."""
_ENCODING_IN_V2, _DELTA_BYTE_ARRAY = 4, 7


@dataclass(frozen=True, slots=True)
class Column:
    """A top-level column: its name, what it holds, and whether that can be text, or lists of tokens."""

    name: str
    what: str
    is_text: bool
    is_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """``byte_count`` is that of its values, decompressed. A dictionary's values stand for those of all its pages.

    ``repeats``: each value may be the one before it and more, which takes few bytes (DELTA_BYTE_ARRAY).
    """

    byte_count: int
    value_count: int
    is_dictionary: bool
    repeats: bool = False


def columns(file: IO[bytes]) -> list[Column]:
    """Return the top-level columns of a Parquet file. Raises ValueError for anything else."""
    footer = _footer(file, SCHEMA_BYTES_MAX)
    try:
        elements = _field_of(footer, 2)
        return list(_top_level(elements))
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("its schema cannot be read") from error


def bounds(file: IO[bytes], name: str) -> tuple[int, int] | None:
    """Return the smallest and the largest integer of a column by the file's statistics; None if these are incomplete.

    Raises ValueError for what is no Parquet file.
    """
    footer, least, most = _footer(file, FOOTER_BYTES_MAX), list[int](), list[int]()
    try:
        for group in _field_of(footer, 4):
            for column in (chunk[3] for chunk in group[1]):
                if column[3][0].decode(errors="replace") == name:
                    statistics = column.get(12) or {}
                    smallest, largest = (statistics.get(new, statistics.get(old)) for new, old in ((6, 2), (5, 1)))
                    if smallest is None or largest is None:
                        return None
                    least.append(int.from_bytes(smallest, "little", signed=True))
                    most.append(int.from_bytes(largest, "little", signed=True))
    except (IndexError, KeyError, TypeError, AttributeError):
        return None
    return (min(least), max(most)) if least else None


def metadata(file: IO[bytes]) -> dict[str, str]:
    """Return what the writer noted, by key; nothing if that is not readable. Raises ValueError for no Parquet file."""
    footer = _footer(file, FOOTER_BYTES_MAX)
    try:
        pairs = _field_of(footer, 5)
        return {pair[1].decode(): pair[2].decode() for pair in pairs if 2 in pair}
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError):
        return {}


def _footer(file: IO[bytes], most: int) -> bytes:
    size = file.seek(0, os.SEEK_END)
    if size < 12:
        raise ValueError(f"it has {size} bytes, too few for Parquet")
    file.seek(size - 8)
    tail = file.read(8)
    if tail[4:] != MAGIC:
        raise ValueError("its end is not that of a Parquet file; it is truncated")
    length = int.from_bytes(tail[:4], "little")
    if length > size - 12:
        raise ValueError("its footer is larger than the file")
    file.seek(size - 8 - length)
    return file.read(min(length, most))


def pages(file: IO[bytes], start: int, length: int) -> Iterator[Page]:
    """Yield the pages of a column chunk, which has ``length`` bytes from ``start``. Raises ValueError if damaged."""
    at, end = start, start + length
    while at < end:
        header, size = _header(file, at)
        values: dict[int, Any] = next((header[kind] for kind in _VALUES if isinstance(header.get(kind), dict)), {})
        numbers = header[1], header[2], header[3], values.get(1, 0)
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError("a page has no size")
        kind, byte_count, stored, value_count = numbers
        encoding = values.get(_ENCODING_IN_V2 if _VALUES[2] in header else 2)
        yield Page(byte_count, value_count, kind == _DICTIONARY_PAGE, encoding == _DELTA_BYTE_ARRAY)
        at += size + stored


def _header(file: IO[bytes], at: int) -> tuple[dict[int, Any], int]:
    for length in (HEADER_BYTES, HEADER_BYTES_MAX):
        file.seek(at)
        content = file.read(length)
        try:
            header, size = _struct(content, 0, 0)
            if {1, 2, 3} <= header.keys():
                return header, size
        except IndexError:
            continue
        except TypeError as error:
            raise ValueError("a page's header cannot be read") from error
        break
    raise ValueError("a page's header cannot be read")


def _top_level(elements: list[dict[int, Any]]) -> Iterator[Column]:
    at = 1  # the first is the root
    while at < len(elements):
        one = elements[at]
        children, logical = one.get(5, 0), one.get(10) or {}
        name = one[4].decode(errors="replace")
        is_plain = not children and one.get(3) != _REPEATED
        is_bytes = one.get(1) == _BYTE_ARRAY and one.get(6) != _DECIMAL and 5 not in logical
        what = _TYPES[one[1]] if not children and 0 <= one.get(1, -1) < len(_TYPES) else "a nested value"
        yield Column(name, what, is_plain and (is_bytes or _NULL_TYPE in logical), _lists_integers(elements, at))
        at = _behind(elements, at)


def _lists_integers(elements: list[dict[int, Any]], at: int) -> bool:
    """Return whether each value of the column at this element is one list of integers."""
    inner = elements[at : _behind(elements, at)]
    leaves = [one for one in inner if not one.get(5, 0)]
    if len(leaves) != 1 or sum(one.get(3) == _REPEATED for one in inner) != 1:
        return False
    (leaf,) = leaves
    is_integer = leaf.get(1) in _INTEGERS and leaf.get(6) in _CONVERTED_INTEGERS
    return is_integer and not _LOGICAL_OTHERS & (leaf.get(10) or {}).keys()


def _behind(elements: list[dict[int, Any]], at: int) -> int:
    """Return the index of the element after this one and its children."""
    waiting = 1
    while waiting and at < len(elements):
        waiting += elements[at].get(5, 0) - 1
        at += 1
    return at


def _field_of(content: bytes, wanted: int) -> Any:
    """Return one field of a struct, reading no further."""
    at, field = 0, 0
    while kind := content[at] & 15:
        field, at = _field(content, at, field)
        value, at = _value(content, at, kind, 0)
        if field == wanted:
            return value
    raise KeyError(wanted)


def _struct(content: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    if depth > DEPTH_MAX:
        raise ValueError("it is nested too deeply")
    fields, field = dict[int, Any](), 0
    while kind := content[at] & 15:
        field, at = _field(content, at, field)
        fields[field], at = _value(content, at, kind, depth + 1)
    return fields, at + 1


def _field(content: bytes, at: int, before: int) -> tuple[int, int]:
    delta, at = content[at] >> 4, at + 1
    if delta:
        return before + delta, at
    return _signed(content, at)


def _value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return content[at], at + 1
    if kind in (4, 5, 6):
        return _signed(content, at)
    if kind == 7:
        return None, _within(content, at + 8)
    if kind == 8:
        length, at = read_varint(content, at)
        end = _within(content, at + length)
        return content[at:end], end
    if kind in (9, 10):
        return _list(content, at, depth)
    if kind == 12:
        return _struct(content, at, depth)
    raise ValueError("it has a type of value that Parquet does not define")


def _list(content: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    count, kind, at = content[at] >> 4, content[at] & 15, at + 1
    if count == 15:
        count, at = read_varint(content, at)
    values = []
    for _ in range(min(count, len(content) + 1)):
        if kind in (1, 2):  # a truth value of a list has a byte of its own
            value, at = content[at] == 1, at + 1
        else:
            value, at = _value(content, at, kind, depth + 1)
        values.append(value)
    return values, at


def _within(content: bytes, end: int) -> int:
    if end > len(content):
        raise IndexError("beyond the end")
    return end


def _signed(content: bytes, at: int) -> tuple[int, int]:
    value, at = read_varint(content, at)
    return value >> 1 ^ -(value & 1), at
