"""A folder of files, on this machine or wherever fsspec reaches: the only place of this package that touches files.

Responsible for a file being there whole and durably, or not at all, under its name: locally by a draft, fsync and rename;
elsewhere by one request, which object stores carry out whole or not. Refuses to know what files mean.

``fsspec`` comes with Ray. Paths without a protocol are local.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import fsspec

from orchestrator.errors import ConfigurationError

CHUNK_BYTES = 4 << 20


class Folder:
    """``url`` is a path, or a URL as fsspec has them; ConfigurationError if not. Every method raises OSError if it fails."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise ConfigurationError(detail=f"{url!r} is no folder that fsspec can reach here: {error}") from error
        self.local = Path(self._root) if "file" in _protocols(self._files) else None

    def sub(self, name: str) -> Folder:
        return Folder(f"{self.url}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Afterwards the file is there with this content, also after a loss of power."""
        if self.local is None:
            self._files.pipe_file(f"{self._root}/{name}", content)
            return
        path = self.local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".draft")
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _sync(path.parent)

    def sync(self) -> None:
        """What others wrote below this folder survives a loss of power."""
        if self.local is not None:
            for here, _, names in os.walk(self.local):
                for name in (*names, ""):
                    _sync(Path(here) / name)
            _sync(self.local.parent)

    def upload(self, source: Path) -> None:
        """Everything below the local folder ``source`` is here afterwards."""
        for name in Folder(str(source)).names():
            self._files.pipe_file(f"{self._root}/{name}", (source / name).read_bytes())

    def download(self, target: Path) -> None:
        """Everything here is below the local folder ``target`` afterwards."""
        for name in self.names():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(self.read(name))

    def read(self, name: str) -> bytes:
        content: bytes = self._files.cat_file(f"{self._root}/{name}")
        return content

    def fingerprint(self, name: str) -> tuple[int, str]:
        """Size and digest of a file, read in chunks."""
        size, digest = 0, blake2b(digest_size=16)
        for chunk in self.chunks(name):
            size += len(chunk)
            digest.update(chunk)
        return size, digest.hexdigest()

    def chunks(self, name: str) -> Iterator[bytes]:
        """A file's content, without holding all of it."""
        with self._files.open(f"{self._root}/{name}", "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def names(self) -> list[str]:
        """Every file below this folder, by its path from here; none if there is no such folder."""
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            return sorted(path.removeprefix(self._root).lstrip("/") for path in self._files.find(self._root))
        return []

    def folders(self) -> list[str]:
        """The folders right below this one, by name."""
        return sorted({name.partition("/")[0] for name in self.names() if "/" in name})

    def remove(self, name: str) -> None:
        """A file is gone afterwards, if it was there."""
        with suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")
            if self.local is not None:
                _sync((self.local / name).parent)

    def remove_all(self) -> None:
        """The folder is gone afterwards."""
        with suppress(FileNotFoundError):
            self._files.rm(self._root, recursive=True)


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
