"""The texts or tokens of some rows of a Parquet file, within a memory budget that does not depend on the file.

Reading needs one page, decompressed, and one batch of rows. A page's size is read before the page (``text.parquet_bytes``),
and a batch has few rows if they are large. A dictionary stays encoded: its values are taken one by one, because a file of
two kilobytes may refer to a value of 48 MiB in each of a million rows. Texts are read as bytes and decoded one by one,
because Parquet does not guarantee that they are UTF-8.

Two other encodings make much of few bytes. In DELTA_BYTE_ARRAY a value may repeat the one before it, so each value of a page
counts as all bytes of the page. A run of a million equal tokens, or of nulls, takes a few bytes, so each value of a list
counts as at least ``LISTED_BYTES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from orchestrator.text import parquet_bytes
from orchestrator.text.text_records import CONVERSATION_KINDS, NotText, utf8

PAGE_BYTES_MAX = 512 << 20
"""The limit of a page, decompressed.

Writers make pages of 1 MiB; for documents of 400 KB, some make a thousand times that.
"""
BATCH_BYTES, ROWS = 32 << 20, 256
"""The limits of a batch."""
RECORD_BYTES_MAX = 64 << 20
"""The limit of the texts in one conversation."""
LISTED_BYTES = 16
"""What a value of a list needs at least: itself, its levels, and a copy."""
VALUE_BYTES = 128
"""What a value of a conversation needs as Python's object. It counts towards ``RECORD_BYTES_MAX``."""
RUN_VALUES, VALUES_PER_BYTE_MAX = 1 << 20, 64
"""The limit of the values in a list's row group, which may all be of one row: so many, or so many per byte."""
BLOCK_BYTES = 1 << 20
MAGIC_BYTES = 4
METADATA_BYTES_MAX = 256 << 20


class TooLarge(ValueError):
    """A part of the file needs more memory than reading may take."""


class Rows:
    """An open Parquet file. Raises what pyarrow raises for an invalid or damaged one."""

    def __init__(self, file: IO[bytes], field: str, *, look_at_pages: bool, is_tokens: bool = False) -> None:
        from pyarrow.parquet import ParquetFile  # imported here because it takes 0.1 s and few jobs need it

        options = {"pre_buffer": False, "buffer_size": BLOCK_BYTES}
        options |= {"thrift_string_size_limit": METADATA_BYTES_MAX}
        self._file, self._field, self._look = file, field, look_at_pages
        self._parquet = ParquetFile(file, **options)
        names = self._parquet.schema_arrow.names
        is_chat = field in CONVERSATION_KINDS
        self._fields = [name for name in CONVERSATION_KINDS[field][0] if name in names] if is_chat else [field]
        self.problem = "" if is_chat else _unfit(self._parquet.schema_arrow, field, is_tokens)
        paths = [self._parquet.schema.column(at).path for at in range(len(self._parquet.schema))]
        wanted = [(name, f"{name}.") for name in self._fields]
        self._columns = [
            at for at, path in enumerate(paths) if any(path == name or path.startswith(inner) for name, inner in wanted)
        ]
        encoded = [] if is_tokens or self.problem else [paths[at] for at in self._columns if self._has_dictionary(at)]
        if encoded:
            self._parquet = ParquetFile(file, metadata=self._parquet.metadata, read_dictionary=encoded, **options)
        self.row_count = self._parquet.metadata.num_rows

    @property
    def group_count(self) -> int:
        return int(self._parquet.metadata.num_row_groups)

    def texts(self, first: int, last: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield the rows from ``first`` to before ``last``: the number of each, and its bytes, which may not be text.

        Raises TooLarge.
        """
        for at, batch in self._batches(first, last):
            yield from enumerate(_values(batch.column(0), 0, len(batch)), at)

    def records(self, first: int, last: int) -> Iterator[tuple[int, Callable[[], dict[str, Any]]]]:
        """Yield the rows from ``first`` to before ``last``: the number of each, and a function for its fields.

        The function raises NotText for a row that is not UTF-8, or is too large. Raises TooLarge.
        """
        for at, batch in self._batches(first, last) if self._fields else ():
            for number in range(len(batch)):
                yield at + number, lambda batch=batch, number=number: _Record().of(batch, number)  # type: ignore[misc]

    def tokens(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all rows in batches: the lengths of the rows, (rows,) int64, and their tokens joined, (tokens,) int32.

        Raises TooLarge, and ValueError for what is no token.
        """
        import pyarrow.compute

        for at, batch in self._batches(0, self.row_count):
            column = batch.column(0)
            lengths = pyarrow.compute.fill_null(pyarrow.compute.list_value_length(column), 0)
            values = column.flatten()
            if values.null_count:
                raise ValueError(f"a row from {at:,} on has a null instead of a token")
            tokens = values.to_numpy(zero_copy_only=False)
            if len(tokens) and not (tokens.min() >= 0 and tokens.max() < 1 << 31):
                wrong = tokens[(tokens < 0) | (tokens >= 1 << 31)][0]
                raise ValueError(f"a row from {at:,} on has {int(wrong):,}, which is no token")
            yield lengths.to_numpy(zero_copy_only=False).astype(np.int64), tokens.astype(np.int32)

    def _batches(self, first: int, last: int) -> Iterator[tuple[int, Any]]:
        """Yield these rows in batches, each with the number of its first one."""
        row = 0
        for group in range(self.group_count):
            rows = self._parquet.metadata.row_group(group).num_rows
            if first < row + rows and row < last:
                at = row
                for batch in self._parquet.iter_batches(
                    self._batch_rows(group), row_groups=[group], columns=self._fields
                ):
                    end = max(0, min(len(batch), last - at))
                    begin = min(end, max(0, first - at))
                    if begin < end:
                        yield at + begin, batch.slice(begin, end - begin)
                    at += len(batch)
                    if at >= last:
                        break
            row += rows

    def _has_dictionary(self, column: int) -> bool:
        return any(self._chunk(group, column).has_dictionary_page for group in range(self.group_count))

    def _chunk(self, group: int, column: int) -> Any:
        return self._parquet.metadata.row_group(group).column(column)

    def _batch_rows(self, group: int) -> int:
        """Return how many rows of a group are read at once. Raises TooLarge for a page that needs too much memory."""
        rows = self._parquet.metadata.row_group(group).num_rows
        return min(self._batch_rows_of(column, group, rows) for column in self._columns)

    def _batch_rows_of(self, column: int, group: int, rows: int) -> int:
        chunk, is_listed = self._chunk(group, column), self._parquet.schema.column(column).max_repetition_level > 0
        least, byte_count, value_count = LISTED_BYTES * is_listed, chunk.total_uncompressed_size, chunk.num_values
        value_bytes = max(least, byte_count / max(1, value_count))
        if self._look:
            byte_count = value_count = 0
            start = min(at for at in (chunk.dictionary_page_offset, chunk.data_page_offset) if at is not None)
            for page in parquet_bytes.pages(self._file, start, chunk.total_compressed_size):
                self._refuse_large(group, max(page.byte_count, least * page.value_count))
                if is_listed and page.repeats:
                    self._refuse(
                        group, "lists in the encoding DELTA_BYTE_ARRAY", "Write the file again with another one"
                    )
                byte_count += page.byte_count
                if not page.is_dictionary:
                    value_count += page.value_count
                    value_bytes = max(value_bytes, page.byte_count / (1 if page.repeats else max(1, page.value_count)))
        if is_listed and value_count > max(RUN_VALUES, VALUES_PER_BYTE_MAX * byte_count):
            what = f"{value_count:,} values in {byte_count:,} bytes"
            self._refuse(group, what, "Write the file again without its long runs of one value")
        values_per_row = max(1.0, value_count / max(1, rows))
        return max(1, min(ROWS, int(BATCH_BYTES / max(1.0, value_bytes * values_per_row))))

    def _refuse_large(self, group: int, page_bytes: int) -> None:
        if page_bytes > PAGE_BYTES_MAX:
            raise TooLarge(
                f"row group {group} has a page of {page_bytes >> 20:,} MiB in {self._field!r}, decompressed; the maximum is "
                f"{PAGE_BYTES_MAX >> 20} MiB. Write the file again with fewer rows in a row group"
            )

    def _refuse(self, group: int, what: str, remedy: str) -> None:
        raise TooLarge(
            f"row group {group} has {what} in {self._field!r}, which may need any amount of memory. {remedy}"
        )


class _Record:
    """Takes the fields of one row as Python's values, with at most ``RECORD_BYTES_MAX`` of text."""

    def __init__(self) -> None:
        self._left = RECORD_BYTES_MAX

    def of(self, batch: Any, row: int) -> dict[str, Any]:
        """Return the row's fields by their names. Raises NotText."""
        return {name: self._plain(batch.column(at)[row]) for at, name in enumerate(batch.schema.names)}

    def _plain(self, value: Any) -> Any:
        import pyarrow as pa

        self._take(VALUE_BYTES)
        if not value.is_valid:
            return None
        if isinstance(value, pa.StructScalar):
            return {name: self._plain(value[at]) for at, name in enumerate(value)}
        if isinstance(value, pa.MapScalar):
            return [(self._plain(entry["key"]), self._plain(entry["value"])) for entry in value.values]
        if isinstance(value, pa.ListScalar):
            return [self._plain(value[at]) for at in range(len(value))]
        if isinstance(value, (pa.DictionaryScalar, pa.ExtensionScalar)):
            return self._plain(value.value)
        if isinstance(value, pa.BinaryScalar):
            text = value.as_buffer()
            self._take(text.size)
            return utf8(text.to_pybytes()).decode()
        return value.as_py()

    def _take(self, byte_count: int) -> None:
        self._left -= byte_count
        if self._left < 0:
            raise NotText(f"has more than {RECORD_BYTES_MAX >> 20} MiB of text")


def _unfit(schema: Any, field: str, is_tokens: bool) -> str:
    """Return why a Parquet file's column cannot be read as texts, or as tokens; empty if it can."""
    if (count := schema.names.count(field)) != 1:
        return f"has {f'{count} columns' if count else 'no column'} {field!r} among {schema.names[:20]}"
    return (_not_tokens if is_tokens else _not_text)(schema.field(field).type, field)


def _not_tokens(column: Any, field: str) -> str:
    from pyarrow import types

    is_list = types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column)
    is_tokens = is_list and types.is_integer(column.value_type)
    return "" if is_tokens else f"has {column} in the column {field!r}, not lists of integers"


def _not_text(column: Any, field: str) -> str:
    from pyarrow import types

    kind = column.value_type if types.is_dictionary(column) else column
    kinds = (
        *(types.is_string, types.is_large_string, types.is_string_view),
        *(types.is_binary, types.is_large_binary, types.is_binary_view),
    )
    is_text = types.is_null(kind) or any(fits(kind) for fits in kinds)
    return "" if is_text else f"has {column} in the column {field!r}, not text"


def _values(column: Any, first: int, last: int) -> Iterator[bytes | None]:
    """Yield the column's entries as their bytes, because a string of a file may not be UTF-8."""
    import pyarrow

    wanted = column.slice(first, last - first)
    if pyarrow.types.is_dictionary(column.type):
        values = _as_bytes(wanted.dictionary)
        for index in wanted.indices.to_pylist():
            yield None if index is None else values[index].as_py()
    else:
        for value in _as_bytes(wanted):
            yield value.as_py()


def _as_bytes(column: Any) -> Any:
    import pyarrow

    if pyarrow.types.is_string(column.type):
        return column.cast(pyarrow.binary())
    if pyarrow.types.is_large_string(column.type):
        return column.cast(pyarrow.large_binary())
    if pyarrow.types.is_string_view(column.type):
        return column.cast(pyarrow.binary_view())
    return column
