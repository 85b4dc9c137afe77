"""Files of tokens that are already there: NumPy's ``.npy``, Megatron's ``.bin`` with its ``.idx``, and Parquet.

    .npy         integers, of one dimension (one long document) or two (each row is a document)
    .bin, .idx   documents one after another, as Megatron-LM's ``IndexedDataset`` writes them; the index has the same name
    .parquet     a column of lists of integers; each row is a document

This module reads headers, and says why a file is not read. Islands read the tokens (``learners.streaming.tokens``); the
service reads a few of them at submission (``beyond``), and of Parquet the statistics (``table_problem``). Files are
untrusted: a header has a maximum size and is parsed, never evaluated, and must account for every byte of its file. Formats:
NumPy's NEP 1; the layout of ``.idx`` is that of Megatron-LM, version 1. An island keeps a copy of the tokens of Parquet in
that layout (``write_documents``), because samples begin anywhere and Parquet is compressed.
"""

from __future__ import annotations

import ast
import os
import re
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

from orchestrator.text import parquet_bytes

ARRAY, MEGATRON, INDEX = ".npy", ".bin", ".idx"
TABLES = (".parquet", ".parq", ".pq")
DIGEST_KEY = "tokenizer_digest"
"""The key of a Parquet file's own metadata that may say the digest of the tokenizer, as ``data.tokenizer_digest`` has it."""
_NUMPY = b"\x93NUMPY"
HEADER_BYTES_MAX = 1 << 16
_MEGATRON = b"MMIDIDX\x00\x00"
_COUNTS = struct.Struct("<QBQQ")
INDEX_HEADER_BYTES = len(_MEGATRON) + _COUNTS.size
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
_CODES = {"u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i", "u8": "Q", "i8": "q"}
"""What `memoryview` calls the integers that a file may have."""
BLOCKS, BLOCK_TOKENS = 16, 1 << 14
"""How many places of a file are looked at for tokens beyond the vocabulary, and how many tokens in each."""


class NotTokens(ValueError):
    """The reason why a file is not read as tokens, as a clause about it, and what to do."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"it {message}. {remedy}")
        self.message, self.remedy = message, remedy


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """A file has ``count`` tokens, integers of NumPy's ``dtype``, from byte ``begin`` on.

    ``row_length`` is the length of each document of an array; None if an index has the documents.
    """

    dtype: str
    count: int
    begin: int
    row_length: int | None

    @property
    def token_bytes(self) -> int:
        return int(self.dtype[-1])


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """The header of an ``.idx``: the tokens' ``dtype``, and how many documents there are."""

    dtype: str
    count: int

    @property
    def lengths_at(self) -> int:
        """The documents' lengths in tokens begin at this byte: (count,) little-endian int32."""
        return INDEX_HEADER_BYTES

    @property
    def places_at(self) -> int:
        """The documents' first bytes in the ``.bin`` are listed from this byte on: (count,) little-endian int64."""
        return self.lengths_at + 4 * self.count


def refusal(path: str) -> NotTokens | None:
    """Return why no file with this name is read as tokens; None if it may be."""
    if "://" in path:
        return NotTokens("is in a store, but tokens are read from disks only", "Copy the file to the nodes.")
    ending = _ending(path)
    if ending == INDEX:
        return NotTokens("is the index of a .bin file", "Name the .bin; its .idx is found beside it.")
    if ending not in (ARRAY, MEGATRON, *TABLES):
        remedy = "Name .npy, .bin or .parquet files, or set data.source to streamed for text."
        return NotTokens("is neither .npy, .bin nor .parquet, and data.source is tokens", remedy)
    return None


def is_table(path: str) -> bool:
    return _ending(path) in TABLES


def has_index(path: str) -> bool:
    return _ending(path) == MEGATRON


def index_of(path: str) -> str:
    """Return the path of the index of a ``.bin`` file."""
    return path[: -len(MEGATRON)] + INDEX


def files_of(path: str) -> tuple[str, ...]:
    """Return all files that are read for a data file: a ``.bin`` file and its index, or the file alone."""
    return (path, index_of(path)) if has_index(path) else (path,)


def array_layout(file: IO[bytes]) -> TokenLayout:
    """Return the layout of an ``.npy`` file. Raises NotTokens."""
    file.seek(0)
    preamble = file.read(12)
    if not preamble.startswith(_NUMPY) or len(preamble) < 12:
        raise NotTokens(f"is no .npy file (it begins with {preamble[:8]!r})", "Write it with numpy.save.")
    wide = preamble[6] >= 2
    begin = 12 if wide else 10
    length = struct.unpack("<I" if wide else "<H", preamble[8:begin])[0]
    if preamble[6] not in (1, 2, 3) or length > HEADER_BYTES_MAX:
        raise NotTokens(
            "has a header of a version or size that NumPy does not write", "Write it again with numpy.save."
        )
    file.seek(begin)
    dtype, is_columns, shape = _described(file.read(length))
    kind = dtype.lstrip("<|=")
    if kind not in _CODES or dtype.startswith(">"):
        message = f"has numbers of dtype {dtype!r}, and tokens are little-endian integers"
        raise NotTokens(message, "Convert it: numpy.save(NEW, numpy.load(OLD).astype('<u2')), or '<i4'.")
    if len(shape) not in (1, 2):
        message = f"has the shape {shape}, but tokens have one dimension, or two (documents, tokens)"
        raise NotTokens(message, "Reshape it.")
    if is_columns and len(shape) == 2:
        raise NotTokens("is stored by columns", "Write it with numpy.save(NEW, numpy.ascontiguousarray(array)).")
    count = shape[0] * (shape[1] if len(shape) == 2 else 1)
    layout = TokenLayout(f"<{kind}", count, begin + length, shape[-1])
    _require_bytes(file, layout)
    return layout


def _described(header: bytes) -> tuple[str, bool, tuple[int, ...]]:
    try:
        described = ast.literal_eval(header.decode("latin-1").strip())
        dtype, is_columns, shape = (described[name] for name in ("descr", "fortran_order", "shape"))
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise NotTokens("has a damaged .npy header", "Write it again with numpy.save.") from error
    if not isinstance(dtype, str):
        raise NotTokens("has records, and tokens are integers", "Save the field with the tokens.")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise NotTokens("has a damaged .npy header", "Write it again with numpy.save.")
    return re.sub(r"[^\w<>|=]", "?", dtype)[:40], bool(is_columns), shape


def _require_bytes(file: IO[bytes], layout: TokenLayout) -> None:
    size, wanted = file.seek(0, os.SEEK_END), layout.begin + layout.count * layout.token_bytes
    if size != wanted:
        message = f"has {size:,} bytes, but its header says {wanted:,}"
        raise NotTokens(message, "It may be incomplete: copy or write it again.")


def index_layout(file: IO[bytes]) -> IndexLayout:
    """Return the layout of an ``.idx`` file. Raises NotTokens."""
    again = "Write .bin and .idx again with Megatron-LM's tools/preprocess_data.py."
    file.seek(0)
    head = file.read(INDEX_HEADER_BYTES)
    if not head.startswith(_MEGATRON) or len(head) < INDEX_HEADER_BYTES:
        raise NotTokens(f"is no index of Megatron-LM (it begins with {head[:9]!r})", again)
    version, code, count, boundary_count = _COUNTS.unpack(head[len(_MEGATRON) :])
    if version != 1:
        raise NotTokens(f"is of version {version:,} of Megatron-LM's index, but version 1 is read", again)
    dtype = _DTYPES.get(code)
    if dtype is None or dtype.startswith("f"):
        message = f"says dtype code {code}{f' ({dtype})' if dtype else ''}, and tokens are integers"
        raise NotTokens(message, again)
    size = file.seek(0, os.SEEK_END)
    least = INDEX_HEADER_BYTES + 12 * count + 8 * boundary_count
    if size not in (least, least + count):  # with the modes of multimodal sequences, a byte each
        raise NotTokens(f"has {size:,} bytes, but {least:,} for the {count:,} documents of its header", again)
    return IndexLayout(f"<{dtype}", count)


def megatron_layout(file: IO[bytes], index: IO[bytes]) -> TokenLayout:
    """Return the layout of a ``.bin`` file by its index, whose last document must end with the file. Raises NotTokens."""
    header = index_layout(index)
    end = 0
    if header.count:
        index.seek(header.lengths_at + 4 * (header.count - 1))
        (length,) = struct.unpack("<i", index.read(4))
        index.seek(header.places_at + 8 * (header.count - 1))
        (place,) = struct.unpack("<q", index.read(8))
        end = place + length * int(header.dtype[-1])
    size = file.seek(0, os.SEEK_END)
    if end != size:
        message = f"has {size:,} bytes, but the documents of its .idx end at byte {end:,}"
        raise NotTokens(message, "Copy both files again, from the same run of preprocess_data.py.")
    return TokenLayout(header.dtype, size // int(header.dtype[-1]), 0, None)


def write_documents(batches: Iterable[tuple[Any, Any]], tokens: IO[bytes], index: IO[bytes]) -> None:
    """Write documents as a ``.bin`` and its ``.idx``.

    A batch has the documents' lengths, (documents,) int64, and their tokens one after another, int32; both are arrays of
    NumPy. Raises NotTokens for a document of 2³¹ tokens.
    """
    lengths, places, at = bytearray(), bytearray(), 0
    for counts, values in batches:
        tokens.write(values.astype("<i4").tobytes())
        if len(counts) and int(counts.max()) >= 1 << 31:
            raise NotTokens("has a row of 2³¹ tokens or more", "Split it into several rows.")
        lengths += counts.astype("<i4").tobytes()
        ends = at + 4 * counts.cumsum()
        places += (ends - 4 * counts).astype("<i8").tobytes()
        at = int(ends[-1]) if len(ends) else at
    count = len(lengths) // 4
    code = next(code for code, dtype in _DTYPES.items() if dtype == "i4")
    index.write(_MEGATRON + _COUNTS.pack(1, code, count, count + 1) + lengths + places)
    index.write(struct.pack(f"<{count + 1}q", *range(count + 1)))


def table_problem(file: IO[bytes], field: str, vocabulary_size: int, tokenizer_digest: str | None) -> NotTokens | None:
    """Return why a Parquet file's column does not have a model's tokens, by what the footer says; None if nothing is wrong.

    A ``vocabulary_size`` of 0 is unknown, and so is a digest that is None. Raises ValueError for what is no Parquet file.
    """
    digest = parquet_bytes.metadata(file).get(DIGEST_KEY)
    if None not in (digest, tokenizer_digest) and digest != tokenizer_digest:
        message = f"has tokens of another tokenizer ({DIGEST_KEY} {digest}, but data.tokenizer has {tokenizer_digest})"
        return NotTokens(message, "Name the tokenizer that made the file, or make the file again.")
    bounds = parquet_bytes.bounds(file, field)
    if bounds is not None and vocabulary_size and not 0 <= bounds[0] <= bounds[1] < vocabulary_size:
        wrong = bounds[0] if bounds[0] < 0 else bounds[1]
        return too_large(None, wrong, vocabulary_size)
    return None


def beyond(file: IO[bytes], layout: TokenLayout, vocabulary_size: int) -> tuple[int, int] | None:
    """Return place and value of a token that a model of this vocabulary lacks, if one is in the places looked at."""
    step = max(1, -(-max(0, layout.count - BLOCK_TOKENS) // (BLOCKS - 1)))
    for first in range(0, layout.count, max(step, BLOCK_TOKENS)):
        file.seek(layout.begin + first * layout.token_bytes)
        content = file.read(min(BLOCK_TOKENS, layout.count - first) * layout.token_bytes)
        tokens = memoryview(content[: len(content) // layout.token_bytes * layout.token_bytes])
        if sys.byteorder != "little":
            return None
        values = tokens.cast(_CODES[layout.dtype[1:]])  # type: ignore[call-overload]
        if len(values) and (max(values) >= vocabulary_size or min(values) < 0):
            return next((first + at, v) for at, v in enumerate(values) if not 0 <= v < vocabulary_size)
    return None


def too_large(place: int | None, token: int, vocabulary_size: int) -> NotTokens:
    """Return the refusal of a token beyond the vocabulary, at this place if it is known."""
    where = "" if place is None else f" (number {place:,})"
    message = f"has the token {token:,}{where}, but the model's vocabulary has {vocabulary_size:,}"
    return NotTokens(message, "Set model.vocabulary_size to that of the tokenizer that made the file.")


def _ending(path: str) -> str:
    return os.path.splitext(path.rpartition("/")[2])[1].lower()
