"""A checkpoint as one tar stream, and the folder again that such a stream was of.

Responsible for a download whose size is known before it begins, and that takes no more memory than a piece of a file; and
for what comes being unpacked inside its folder only, and believed once every byte was checked.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from api.checkpoints.schemas import Checkpoint
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import MANIFEST
from orchestrator.checkpoints.reading import manifest_of, verified
from orchestrator.errors import DataError, NotFound

BLOCK_BYTES = tarfile.BLOCKSIZE
END_BYTES = 2 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Archive:
    """``sizes`` are those of the files, by their names in the folder; the manifest comes last, as it was written."""

    folder: Folder
    sizes: dict[str, int]

    @property
    def byte_count(self) -> int:
        return END_BYTES + sum(len(_head(name, size)) + size + _padding(size) for name, size in self.sizes.items())

    def chunks(self) -> Iterator[bytes]:
        """Raises OSError when a file goes away meanwhile, as the oldest checkpoint does when a new one is there."""
        for name, size in self.sizes.items():
            yield _head(name, size)
            yield from self.folder.chunks(name)
            yield bytes(_padding(size))
        yield bytes(END_BYTES)


def archive_of(checkpoints: Sequence[Checkpoint], number: int) -> Archive:
    """The one of that number. Raises NotFound, with those there are."""
    there = ", ".join(str(one.number) for one in checkpoints) or "none"
    missing = NotFound(detail=f"There is no checkpoint {number}; there are: {there}.", remedy="Older ones are removed.")
    found = next((one for one in checkpoints if one.number == number), None)
    if found is None:
        raise missing
    folder = Folder(found.url)
    try:
        sizes = {file.name: file.size for file in manifest_of(folder).files}
        return Archive(folder, {**sizes, MANIFEST: len(folder.read(MANIFEST))})
    except (DataError, FileNotFoundError) as error:  # it went a moment ago
        raise missing from error


def unpack(archive: Path, target: Path) -> None:
    """The checkpoint is in the new folder ``target`` afterwards, every byte verified, and nothing else is.

    Raises DataError if the archive is no sound checkpoint, OSError if it cannot be written; what is there then is no use.
    """
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                path = PurePosixPath(member.name)
                if not member.isfile() or path.is_absolute() or ".." in path.parts:
                    raise DataError(detail=f"it holds {member.name!r}, which no checkpoint has.")
                content = packed.extractfile(member)
                assert content is not None
                _write(content, target / path)
        folder = Folder(str(target.absolute()))
        known = {MANIFEST, *(file.name for file in verified(folder).files)}
        if strangers := sorted(set(folder.names()) - known):
            raise DataError(detail=f"it holds {strangers[0]!r}, of which its manifest does not know.")
    except (DataError, tarfile.TarError) as error:
        raise DataError(detail=f"{archive} is no archive of a sound checkpoint: {error}") from error
    folder.sync()


def _write(content: IO[bytes], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        shutil.copyfileobj(content, file)


def _head(name: str, size: int) -> bytes:
    about = tarfile.TarInfo(name)
    about.size = size
    return about.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> int:
    """Up to a whole number of blocks."""
    return -size % BLOCK_BYTES
