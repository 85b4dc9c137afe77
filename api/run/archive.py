"""A checkpoint as one tar stream, and the folder again that such a stream was of.

Responsible for a download whose size is known before it begins, and that takes no more memory than a piece of a file; and
for what comes being unpacked inside its folder only, and believed once every byte was checked.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from api.schemas import Checkpoint
from orchestrator.checkpoints.folder import CHUNK_BYTES, Folder
from orchestrator.checkpoints.manifest import MANIFEST
from orchestrator.checkpoints.reading import manifest_of, verified
from orchestrator.errors import Conflict, DataError, NotFound, OutsideRoots
from orchestrator.system.roots import AllowedRoots, name_parts, shown

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
            left = size
            for chunk in self.folder.chunks(name):
                yield chunk[:left]
                left -= min(left, len(chunk))
            if left:
                raise OSError(f"{self.folder.url}/{name} is shorter than its manifest says")
            yield bytes(_padding(size))
        yield bytes(END_BYTES)


def archive_of(checkpoints: Sequence[Checkpoint], number: int, roots: AllowedRoots) -> Archive:
    """Return the checkpoint with that number as an archive. Raises NotFound with the existing numbers, or Conflict."""
    there = ", ".join(str(one.number) for one in checkpoints) or "none"
    missing = NotFound(
        detail=f"Checkpoint {number} does not exist; existing ones: {there}.", remedy="Older ones are removed."
    )
    checkpoint = next((one for one in checkpoints if one.number == number), None)
    if checkpoint is None:
        raise missing
    try:
        folder = Folder.within(roots, checkpoint.url)
        sizes = {file.name: file.size for file in manifest_of(folder).files if file.name != MANIFEST}
        if damaged := [name for name, size in sizes.items() if folder.size(name) != size]:
            detail = f"Checkpoint {number} is damaged: the size of {damaged[0]} differs from its manifest."
            raise Conflict(detail=detail, remedy="Fetch another checkpoint.")
        return Archive(folder, {**sizes, MANIFEST: folder.size(MANIFEST)})
    except (DataError, OutsideRoots, FileNotFoundError) as error:  # it was removed a moment ago
        raise missing from error


def unpack(archive: Path, target: Path) -> None:
    """Unpack the checkpoint into the new folder ``target``, and verify every byte.

    Raises DataError if the archive is not a sound checkpoint, OSError if writing fails; ``target`` is then unusable.
    """
    folder = Folder.own(target)
    try:
        names: set[str] = set()
        with tarfile.open(archive, "r:") as packed:  # as it was sent: nothing in it is larger than itself
            for member in packed:
                name = "/".join(name_parts(member.name))
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None or name in names:
                    raise DataError(detail=f"it contains {shown(name)} twice, or not as a regular file.")
                names.add(name)
                content = packed.extractfile(member)
                assert content is not None
                folder.write_all(name, iter(partial(content.read, CHUNK_BYTES), b""))
        expected = {MANIFEST, *(file.name for file in verified(folder).files)}
        if strangers := sorted(set(folder.names()) - expected):
            raise DataError(detail=f"it contains {strangers[0]!r}, which its manifest does not list.")
    except (DataError, tarfile.TarError) as error:
        raise DataError(detail=f"{archive} is not an archive of a sound checkpoint: {error}") from error
    folder.sync()


def _head(name: str, size: int) -> bytes:
    about = tarfile.TarInfo(name)
    about.size = size
    return about.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> int:
    """Return the number of bytes up to a whole block."""
    return -size % BLOCK_BYTES
