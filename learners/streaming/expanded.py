"""Compressed text, decompressed as far as it is read, within bounds of memory and of size.

The bounds are for files of anybody: text that expands thousandfold, frames that need gigabytes, files that end too soon.
"""

from __future__ import annotations

import gzip
import io
from typing import IO, Any

from orchestrator.errors import ConfigurationError
from orchestrator.file_kinds import ZSTD_WINDOW_MAX, Compression, window_too_large

EXPANSION_MAX = 1000
"""Bytes for each that is stored: compressed text has up to a hundred."""
EXPANDED_MIN = 64 << 20
"""So much any file may have."""
FRAME_BYTES = 1 << 12
"""Of a zstd frame, decompressed at once: at most 128 MiB, if somebody means harm."""


class Expanded(io.RawIOBase):
    """Decompressed text, as long as it is not thousands of times what is stored: then somebody means harm, or erred."""

    def __init__(self, text: Any, stored_bytes: int) -> None:
        self._text, self._left = text, EXPANDED_MIN + EXPANSION_MAX * stored_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._text.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise ValueError(f"decompressed it is more than {EXPANSION_MAX:,} times its size")
        return count


def decompressed(file: IO[bytes], compression: Compression) -> Any:
    """The file's text as an unbuffered reader. Raises ConfigurationError where a library is missing."""
    if compression is Compression.GZIP:
        return gzip.GzipFile(fileobj=file)
    try:
        import zstandard
    except ImportError as error:
        detail = "The package zstandard is not installed here, which .zst needs. Install atoll[text] on every node."
        raise ConfigurationError(detail=detail) from error
    return _Zstandard(file, zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_MAX), zstandard.ZstdError)


class _Zstandard(io.RawIOBase):
    """The text of one zstd frame after another. Raises EOFError for a file that ends within one.

    The library's own reader ends there too, as if that were the text's end.
    """

    def __init__(self, file: IO[bytes], decompressor: Any, failure: type[Exception]) -> None:
        self._file, self._decompressor, self._failure = file, decompressor, failure
        self._frame: Any = None
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            stored = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            if stored or self._frame is None or self._frame.eof:
                stored = stored or self._file.read(FRAME_BYTES)
                if not stored:
                    return 0
                self._frame = self._decompressor.decompressobj()
            else:
                stored = self._file.read(FRAME_BYTES)
                if not stored:
                    raise EOFError("it ends within a zstd frame")
            try:
                self._text = memoryview(self._frame.decompress(stored))
            except self._failure as error:
                if "too much memory" in str(error):
                    message, remedy = window_too_large()
                    raise ValueError(f"it {message}. {remedy}") from error
                raise
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count
