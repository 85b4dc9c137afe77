"""A folder of files, on this machine or in a store that fsspec reaches: the only place of this package that touches files.

Responsible for a file being there whole and durably, or not at all, under its name: locally by a draft, fsync and rename;
elsewhere by one request, which object stores carry out whole or not. And for nothing outside the folder being read or
written: one is made through a root only (``orchestrator.system.roots``), every name, also of a listing, goes through
``roots.name_parts``, and locally no link is followed below the folder. Refuses to know what files mean.

``fsspec`` comes with Ray, and is used for stores alone. Every method raises OSError if it fails, InfrastructureError where
a store fails in a way of its own, DataError for a name or file that cannot be one of a folder's, and OutsideRoots.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from orchestrator.errors import AtollError, DataError, InfrastructureError, OutsideRoots, in_words
from orchestrator.system.roots import (
    Allowed,
    AllowedRoots,
    Root,
    name_parts,
    open_folder,
    open_regular,
    shown,
    store_of,
)

CHUNK_BYTES = 4 << 20

Between = Callable[[int, int], bytes]
"""What a file has between two offsets. Raises DataError where it ends before."""


class Folder:
    """``within`` and ``own`` make one. The place that it is made of was found below a root."""

    def __init__(self, allowed: Allowed) -> None:
        self._allowed, self.url = allowed, str(allowed.place)
        self._store: Any = None
        self._path = ""
        if not allowed.local:
            self._store, self._path = store_of(allowed)

    @classmethod
    def within(cls, roots: AllowedRoots, url: str) -> Folder:
        """The folder of this path or URL. Raises OutsideRoots, and has touched nothing then; ConfigurationError."""
        return cls(roots.checkpoint_folder(url))

    @classmethod
    def own(cls, path: Path) -> Folder:
        """A local folder that this process chose, and no specification."""
        absolute = os.path.abspath(path)
        return cls(AllowedRoots.only(absolute).checkpoint_folder(absolute))

    @property
    def local(self) -> Path | None:
        """Where it is on this machine now, for who must have a path; None in a store. Raises OutsideRoots."""
        return self._allowed.real() if self._allowed.local else None

    def sub(self, name: str) -> Folder:
        return Folder(self._allowed.sub(name_parts(name)))

    def parent(self) -> Folder | None:
        """What it lies in; None where that is below no root."""
        allowed = self._allowed.parent()
        return Folder(allowed) if allowed else None

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Afterwards the file is there with this content, also after a loss of power."""
        self.write_all(name, [content])

    def write_all(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """As ``write``, of a content in chunks."""
        if not self._allowed.local:
            path = self._stored(name)
            with self._reached(f"writing {name}"):
                self._store.pipe_file(path, b"".join(chunks))
            return
        with self._opened(name, create=True) as (folder, last):
            draft = f"{last}.draft"
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=folder)  # of one that died; a link is taken away, and not followed
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            os.rename(draft, last, src_dir_fd=folder, dst_dir_fd=folder)
            _sync(".", folder)

    def sync(self) -> None:
        """Make what others wrote below this folder survive a loss of power."""
        if not self._allowed.local:
            return
        with self._itself() as folder:
            for name, _ in _walk(folder):
                _sync(name, folder)
            _sync(".", folder)
            _sync("..", folder)

    def download(self, target: Path, names: Iterable[str]) -> None:
        """These files are below the local folder ``target`` afterwards."""
        after = Folder.own(target)
        for name in names:
            after.write_all(name, self.chunks(name))

    def read(self, name: str, bytes_max: int) -> bytes:
        """The content. Raises DataError, and has read no more, where that has more than ``bytes_max``."""
        with self._open(name) as file, self._reached(f"reading {name}"):
            content: bytes = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise DataError(
                detail=f"{self.url}/{name} has more than {bytes_max:,} bytes, and cannot be what it should."
            )
        return content

    def size(self, name: str) -> int:
        if self._allowed.local:
            with self._open(name) as file:
                return os.fstat(file.fileno()).st_size
        with self._reached(f"looking at {name}"):
            return int(self._store.size(self._stored(name)))

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        try:
            self.size(name)
        except (FileNotFoundError, DataError):
            return False
        return True

    def fingerprint(self, name: str) -> tuple[int, str]:
        """Size and digest of a file, read in chunks."""
        size, digest = 0, blake2b(digest_size=16)
        for chunk in self.chunks(name):
            size += len(chunk)
            digest.update(chunk)
        return size, digest.hexdigest()

    def chunks(self, name: str) -> Iterator[bytes]:
        """A file's content, without holding all of it."""
        with self._open(name) as file:
            while chunk := self._chunk(file, name):
                yield chunk

    @contextmanager
    def opened(self, name: str) -> Iterator[Between]:
        """Any stretch of a file, for as long as it is open, without reading the others."""
        with self._open(name) as file:

            def between(start: int, stop: int) -> bytes:
                with self._reached(f"reading {name}"):
                    file.seek(start)
                    content: bytes = file.read(stop - start)
                if len(content) != stop - start:
                    raise DataError(detail=f"{self.url}/{name} is damaged: it ends before byte {stop:,}.")
                return content

            yield between

    def names(self) -> list[str]:
        """Every file below this folder, by its path from here; none if there is no such folder."""
        if self._allowed.local:
            with suppress(FileNotFoundError), self._itself() as folder:
                return sorted("/".join(name_parts(name)) for name, is_folder in _walk(folder) if not is_folder)
            return []
        with self._reached("listing it"):
            self._store.invalidate_cache()
            with suppress(FileNotFoundError):
                return sorted(self._listed(path) for path in self._store.find(self._path))
        return []

    def folders(self) -> list[str]:
        """The folders right below this one, by name; what could be no checkpoint's is left out."""
        if self._allowed.local:
            with suppress(FileNotFoundError), self._itself() as folder, _scanned(".", folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
            return []
        with self._reached("listing it"):
            self._store.invalidate_cache()
            with suppress(FileNotFoundError):
                entries = self._store.ls(self._path, detail=True)
                return sorted(self._listed(entry["name"]) for entry in entries if entry["type"] == "directory")
        return []

    def remove(self, name: str) -> None:
        """A file is gone afterwards, if it was there."""
        with suppress(FileNotFoundError):
            if not self._allowed.local:
                with self._reached(f"removing {name}"):
                    self._store.rm_file(self._stored(name))
                return
            with self._opened(name) as (folder, last):
                os.unlink(last, dir_fd=folder)
                _sync(".", folder)

    def remove_all(self) -> None:
        """The folder is gone afterwards."""
        if not self._allowed.local:
            with self._reached("removing it"), suppress(FileNotFoundError):
                self._store.rm(self._path, recursive=True)
            return
        real = self._allowed.real()
        with suppress(FileNotFoundError), _closing(open_folder(real.parent)) as above:
            shutil.rmtree(real.name, dir_fd=above)

    # ── on this machine ───────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _opened(self, name: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """The folder that holds the file, as a descriptor, and the file's last name."""
        parts = self._below(name)
        file = (real := self._allowed.real()).joinpath(*parts)
        if file != Path(os.path.realpath(file)):
            raise DataError(detail=f"{self.url}/{name} is reached by a link, which no checkpoint holds.")
        with _closing(open_folder(real, parts[:-1], create=create)) as folder:
            yield folder, parts[-1]

    @contextmanager
    def _itself(self) -> Iterator[int]:
        """This folder as a descriptor."""
        with _closing(open_folder(self._allowed.real())) as folder:
            yield folder

    # ── in a store ────────────────────────────────────────────────────────────────────────────────────────────────

    def _stored(self, name: str) -> str:
        return "/".join((self._path.rstrip("/"), *self._below(name)))

    def _listed(self, path: object) -> str:
        """The name from here of what a store says that it holds."""
        above = self._path.rstrip("/") + "/"
        if not isinstance(path, str) or not path.rstrip("/").startswith(above):
            raise DataError(detail=f"{self.url} was listed with {shown(path)}, which does not lie in it.")
        return "/".join(name_parts(path.rstrip("/").removeprefix(above)))

    @contextmanager
    def _reached(self, doing: str) -> Iterator[None]:
        """Turn errors of a store that are neither ours nor the system's into ours, with what was tried."""
        try:
            yield
        except (AtollError, OSError):
            raise
        except Exception as error:
            detail = f"{self.url} failed at {doing}: {in_words(error)}."
            raise InfrastructureError(detail=detail, remedy="See whether it can be reached from here.") from error

    # ── either ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _below(self, name: str) -> tuple[str, ...]:
        """The components of a file's name. Raises DataError for one that lies elsewhere, or is private."""
        parts = name_parts(name)
        try:
            allowed = self._allowed.sub(parts)
            if allowed.local:
                allowed.real()
        except OutsideRoots as error:
            raise DataError(detail=f"{shown(name)} is no file of {self.url} that jobs may touch.") from error
        return parts

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        if self._allowed.local:
            with self._opened(name) as (folder, last):
                file = open_regular(folder, last)
        else:
            path = self._stored(name)
            with self._reached(f"opening {name}"):
                file = self._store.open(path, "rb")
        with file:
            yield file

    def _chunk(self, file: IO[bytes], name: str) -> bytes:
        with self._reached(f"reading {name}"):
            return file.read(CHUNK_BYTES)


def refuse_unreachable(roots: Iterable[Root]) -> None:
    """Raises ConfigurationError for a root in a store for which a package is missing here."""
    for root in roots:
        Folder(Allowed(root.place, "checkpoints", (root,), ()))


def _walk(folder: int) -> Iterator[tuple[str, bool]]:
    """Everything below, by its path from there, and whether it is a folder. Raises DataError for links and the like."""
    waiting = [""]
    while waiting:
        above = waiting.pop()
        with _scanned(above or ".", folder) as entries:
            for entry in entries:
                name = f"{above}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{name}/")
                    yield name, True
                elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                    yield name, False
                else:
                    raise DataError(detail=f"{shown(name)} is a link, a pipe or a device, which no checkpoint holds.")


@contextmanager
def _scanned(name: str, folder: int) -> Iterator[Iterator[os.DirEntry[str]]]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with _closing(os.open(name, flags, dir_fd=folder)) as descriptor, os.scandir(descriptor) as entries:
        yield entries


def _sync(name: str, folder: int) -> None:
    with _closing(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
