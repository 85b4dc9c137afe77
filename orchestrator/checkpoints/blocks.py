"""Files with a digest of each block, so that a reader of a part reads only that part and knows that it is intact.

   NAME           the file
   NAME.blocks    sealed: the size of a block, and the digests of all of them, in order

Of a file without such a list, as earlier builds wrote them, every byte is read and verified before any is used. The content
of files is not interpreted, except that it may be arrays, row-major (``SoundFile.window``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from orchestrator.checkpoints.folder import Between, FileTarget, Folder
from orchestrator.checkpoints.manifest import File, seal, unseal
from orchestrator.errors import DataError
from orchestrator.parameters.parts import Bounds, index_of, whole
from orchestrator.parameters.pieces import Shape

BLOCK_BYTES = 1 << 20
BLOCK_BYTES_MAX = 64 << 20
SUFFIX = ".blocks"


def write(folder: FileTarget, name: str, chunks: Iterable[bytes | memoryview]) -> tuple[File, File]:
    """Write the file and the list of its blocks. Raises OSError.

    Digests are computed from the given content, not from what is on the disk.
    """
    digests = _Digests(BLOCK_BYTES)
    folder.write_all(name, digests.passing(chunks))
    document = seal({"block_bytes": BLOCK_BYTES, "digests": digests.finish()})
    folder.write(name + SUFFIX, document)
    listed = File(name + SUFFIX, len(document), blake2b(document, digest_size=16).hexdigest())
    return File(name, digests.size, digests.whole.hexdigest()), listed


@dataclass(frozen=True, slots=True)
class Window:
    """The wanted part of an array of ``shape``; of any shape if that is None."""

    bounds: Bounds
    shape: Shape | None = None

    def require_of(self, name: str, shape: Shape, where: str) -> None:
        """Raise DataError unless it is a window of an array of this shape."""
        own = self.shape or tuple(stop for _, stop in self.bounds)
        fits = shape == self.shape or (self.shape is None and len(shape) == len(own))
        if not fits or any(extent < stop for extent, stop in zip(shape, own, strict=True)):
            detail = f"{name} has the shape {list(shape)} in {where}, but {list(own)} in this island's model."
            raise DataError(detail=detail)


@contextmanager
def opened(folder: Folder, files: Sequence[File], name: str) -> Iterator[SoundFile]:
    """Open a listed file by its name. Raises DataError if it is missing or has changed."""
    by_name = {file.name: file for file in files}
    if name not in by_name:
        raise DataError(detail=f"The manifest of {folder.url} does not list {name}.")
    file, blocks = by_name[name], by_name.get(name + SUFFIX)
    block_bytes, digests = BLOCK_BYTES, None
    if blocks is None:
        verify(folder, file)
    else:
        require_size(folder, file)
        block_bytes, digests = _listed_blocks(folder, file, blocks)
    with folder.opened(name) as between:
        yield SoundFile(f"{folder.url}/{name}", file.size, between, block_bytes, digests)


class SoundFile:
    """A file of ``size`` bytes whose reads are verified against digests; ``name`` is for messages.

    It holds at most one block besides what is read. Not thread-safe.
    """

    def __init__(self, name: str, size: int, between: Between, block_bytes: int, digests: Sequence[str] | None) -> None:
        self.name, self.size = name, size
        self._between, self._block_bytes, self._digests = between, block_bytes, digests
        self._last: tuple[int, bytes] = (-1, b"")

    def read(self, start: int, stop: int) -> bytes:
        """Return these bytes. Raises DataError if they are damaged, or beyond the end."""
        if not 0 <= start <= stop <= self.size:
            raise DataError(detail=f"{self.name} has {self.size:,} bytes, and cannot be read up to byte {stop:,}.")
        content = bytearray(stop - start)
        self._into(memoryview(content), start)
        return bytes(content)

    def window(self, start: int, dtype: np.dtype[Any], shape: Shape, bounds: Bounds, into: NDArray[Any]) -> None:
        """Read the part within ``bounds`` of the array that begins at ``start``, to ``into``, which has its shape.

        Raises DataError if it is damaged, or ends beyond the file.
        """
        if start + math.prod(shape) * dtype.itemsize > self.size:
            raise DataError(detail=f"{self.name} has {self.size:,} bytes, which is too short for what it lists.")
        if into.size:
            self._window(start, shape, bounds, into)

    def forget(self) -> None:
        """Drop the block that is held."""
        self._last = (-1, b"")

    def _window(self, start: int, shape: Shape, bounds: Bounds, into: NDArray[Any]) -> None:
        """Read runs of at least a block directly to their place; of shorter ones, a block's worth of rows at a time."""
        row_bytes = math.prod(shape[1:]) * into.itemsize
        first, last = bounds[0] if bounds else (0, 1)
        if bounds[1:] == whole(shape[1:]) and into.flags.c_contiguous:
            self._into(_bytes_of(into), start + first * row_bytes)
        elif row_bytes >= self._block_bytes:
            for row in range(first, last):
                self._window(start + row * row_bytes, shape[1:], bounds[1:], into[row - first])
        else:
            step = max(1, self._block_bytes // row_bytes)
            inner = (slice(None), *index_of(bounds[1:]))
            for row in range(first, last, step):
                rows = np.empty((min(step, last - row), *shape[1:]), into.dtype)
                self._into(_bytes_of(rows), start + row * row_bytes)
                into[row - first : row - first + len(rows)] = rows[inner]

    def _into(self, target: memoryview, at: int) -> None:
        while target:
            number, offset = divmod(at, self._block_bytes)
            part = memoryview(self._block(number))[offset : offset + len(target)]
            target[: len(part)] = part
            target, at = target[len(part) :], at + len(part)

    def _block(self, number: int) -> bytes:
        if self._last[0] != number:
            start = number * self._block_bytes
            content = self._between(start, min(start + self._block_bytes, self.size))
            if self._digests is not None and (digest := _digest(content)) != self._digests[number]:
                detail = f"{self.name} is damaged: its digest from byte {start:,} on is {digest}"
                raise DataError(detail=f"{detail}, not {self._digests[number]}.")
            self._last = (number, content)
        return self._last[1]


def verify(folder: Folder, file: File) -> None:
    """Read the file and compare it with its entry. Raises DataError with what is wrong."""
    require_size(folder, file)
    if (digest := folder.fingerprint(file.name)[1]) != file.digest:
        raise DataError(detail=f"{folder.url}/{file.name} is damaged: its digest is {digest}, not {file.digest}.")


def require_size(folder: Folder, file: File) -> None:
    """Raise DataError if the file is missing, or has another size than it had."""
    try:
        size = folder.size(file.name)
    except FileNotFoundError as error:
        raise DataError(detail=f"The checkpoint {folder.url} lacks {file.name}.") from error
    if size != file.size:
        detail = f"{folder.url}/{file.name} has {size} bytes, but had {file.size} when the checkpoint was taken."
        raise DataError(detail=f"{detail} It was cut or overwritten, so it is damaged.")


class _Digests:
    """The digests of passing bytes: of the whole, as ``Folder.fingerprint``, and of each block."""

    def __init__(self, block_bytes: int) -> None:
        self.size, self.whole = 0, blake2b(digest_size=16)
        self._block_bytes, self._block, self._digests = block_bytes, blake3(), list[str]()

    def passing(self, chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
        for chunk in filter(len, chunks):
            view = memoryview(chunk).cast("B")
            yield view
            self.whole.update(view)
            while view:
                part = view[: self._block_bytes - self.size % self._block_bytes]
                self._block.update(part)
                self.size, view = self.size + len(part), view[len(part) :]
                if self.size % self._block_bytes == 0:
                    self._digests.append(self._block.hexdigest(length=16))
                    self._block = blake3()

    def finish(self) -> list[str]:
        last = [self._block.hexdigest(length=16)] if self.size % self._block_bytes else []
        return self._digests + last


def _listed_blocks(folder: Folder, file: File, blocks: File) -> tuple[int, list[str]]:
    """Return the block size and digests. Raises DataError unless the list is intact and belongs to this file."""
    require_size(folder, blocks)
    content = folder.read(blocks.name, blocks.size)
    if (digest := blake2b(content, digest_size=16).hexdigest()) != blocks.digest:
        raise DataError(detail=f"{folder.url}/{blocks.name} is damaged: its digest is {digest}, not {blocks.digest}.")
    document = unseal(content, f"{folder.url}/{blocks.name}")
    block_bytes, digests = document.get("block_bytes"), document.get("digests")
    if type(block_bytes) is not int or not 0 < block_bytes <= BLOCK_BYTES_MAX or not isinstance(digests, list):
        raise DataError(detail=f"{folder.url}/{blocks.name} is not a list of blocks of this build.")
    if len(digests) != -(-file.size // block_bytes):
        raise DataError(detail=f"{folder.url}/{blocks.name} lists {len(digests)} blocks, which do not cover the file.")
    return block_bytes, digests


def _digest(content: bytes) -> str:
    return blake3(content).hexdigest(length=16)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
