"""A folder of files, on this machine or in a store that fsspec reaches. Only this module of the package touches files.

A file appears under its name completely and durably, or not at all: locally by a draft, fsync and rename; elsewhere by one
request, which object stores carry out as a whole or not. Nothing outside the folder is read or written: a folder is only
created through a root (``orchestrator.system.roots``), every name, including those of a listing, passes
``roots.name_parts``, and locally no link is followed below the folder. The meaning of files is known elsewhere.

``fsspec`` comes with Ray, and is only used for stores. Every method raises OSError if it fails, InfrastructureError if
a store fails in its own way, DataError for an impossible name or file, and OutsideRoots.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Protocol

from orchestrator.errors import AtollError, DataError, InfrastructureError, OutsideRoots, in_words
from orchestrator.system.roots import (
    Allowed,
    AllowedRoots,
    Place,
    Root,
    name_parts,
    open_folder,
    open_regular,
    place_of,
    shown,
    store_of,
)

CHUNK_BYTES = 4 << 20

Between = Callable[[int, int], bytes]
"""Returns the bytes of a file between two offsets. Raises DataError if it ends before."""


class FileTarget(Protocol):
    """Takes files, one after another: a ``Folder``, or the way to one on another machine. Each method raises OSError."""

    def sub(self, name: str, /) -> FileTarget: ...

    def write(self, name: str, content: bytes | memoryview, /) -> None: ...

    def write_all(self, name: str, chunks: Iterable[bytes | memoryview], /) -> None: ...

    def sync(self) -> None: ...


class RemoteStore(Protocol):
    """The files of a folder on another machine, by ``/``-separated paths from its root. They are only read."""

    def open(self, path: str, mode: str, /) -> IO[bytes]: ...

    def size(self, path: str, /) -> int: ...


HEAD = "head"
"""The protocol in the URL of a folder that ``Folder.through`` opened. No store has it."""


class Folder:
    """A folder below a root. ``within``, ``own`` and ``through`` create one."""

    def __init__(self, allowed: Allowed, remote: RemoteStore | None = None) -> None:
        self._allowed, self.url, self._remote = allowed, str(allowed.place), remote
        self._store: Any = remote
        self._path = "/".join(allowed.place.parts)
        if remote is None and not allowed.local:
            self._store, self._path = store_of(allowed)

    @classmethod
    def within(cls, roots: AllowedRoots, url: str) -> Folder:
        """Return the folder with this path or URL. Raises OutsideRoots before touching anything; ConfigurationError."""
        return cls(roots.checkpoint_folder(url))

    @classmethod
    def own(cls, path: Path) -> Folder:
        """Return a local folder that this process chose itself, not a specification."""
        absolute = os.path.abspath(path)
        return cls(AllowedRoots.only(absolute).checkpoint_folder(absolute))

    @classmethod
    def through(cls, store: RemoteStore, path: str) -> Folder:
        """Return the folder with this path on the machine that ``store`` reads from."""
        place = Place(HEAD, place_of(path).parts)
        return cls(Allowed(place, "checkpoints", (Root(place),), ()), store)

    @property
    def is_local(self) -> bool:
        """Return whether it is a path, not a store that every machine reaches by the same name."""
        return self._allowed.local

    @property
    def local(self) -> Path | None:
        """Return its current path on this machine, for callers that need one; None in a store. Raises OutsideRoots."""
        return self._allowed.real() if self._allowed.local else None

    def sub(self, name: str) -> Folder:
        return Folder(self._allowed.sub(name_parts(name)), self._remote)

    def parent(self) -> Folder | None:
        """Return the folder that contains it; None if that is below no root."""
        allowed = self._allowed.parent()
        return Folder(allowed) if allowed else None

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file with this content, durably."""
        self.write_all(name, [content])

    def write_all(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Do the same as ``write`` for content in chunks."""
        if not self._allowed.local:
            path = self._stored(name)
            with self._reached(f"writing {name}"):
                self._store.pipe_file(path, b"".join(chunks))
            return
        with self._opened(name, create=True) as (folder, last):
            draft = f"{last}.draft"
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=folder)  # left by a process that died; a link is removed, not followed
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder)
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            os.rename(draft, last, src_dir_fd=folder, dst_dir_fd=folder)
            _sync(".", folder)

    def sync(self) -> None:
        """Make durable what others wrote below this folder. A draft that its writer renames meanwhile is passed over."""
        if not self._allowed.local:
            return
        with self._itself() as folder:
            for name, _ in _walk(folder):
                with suppress(FileNotFoundError):
                    _sync(name, folder)
            _sync(".", folder)
            _sync("..", folder)

    def download(self, target: Path, names: Iterable[str]) -> None:
        """Copy these files to the local folder ``target``."""
        after = Folder.own(target)
        for name in names:
            after.write_all(name, self.chunks(name))

    def read(self, name: str, bytes_max: int) -> bytes:
        """Return the content. Raises DataError, without reading more, if it has more than ``bytes_max``."""
        with self._open(name) as file, self._reached(f"reading {name}"):
            content: bytes = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise DataError(
                detail=f"{self.url}/{name} has more than {bytes_max:,} bytes, so it is not the expected file."
            )
        return content

    def size(self, name: str) -> int:
        if self._allowed.local:
            with self._open(name) as file:
                return os.fstat(file.fileno()).st_size
        with self._reached(f"looking at {name}"):
            return int(self._store.size(self._stored(name)))

    def has(self, name: str) -> bool:
        """Return whether the file exists."""
        try:
            self.size(name)
        except (FileNotFoundError, DataError):
            return False
        return True

    def fingerprint(self, name: str) -> tuple[int, str]:
        """Return size and digest of a file, read in chunks."""
        size, digest = 0, blake2b(digest_size=16)
        for chunk in self.chunks(name):
            size += len(chunk)
            digest.update(chunk)
        return size, digest.hexdigest()

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield a file's content without holding all of it."""
        with self._open(name) as file:
            while chunk := self._chunk(file, name):
                yield chunk

    @contextmanager
    def opened(self, name: str) -> Iterator[Between]:
        """Open a file and yield a function that reads any range of it."""
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
        """Return every file below this folder, by its path from here; none if the folder does not exist."""
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
        """Return the names of the folders directly below this one, except those that no checkpoint can have."""
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
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError):
            if not self._allowed.local:
                with self._reached(f"removing {name}"):
                    self._store.rm_file(self._stored(name))
                return
            with self._opened(name) as (folder, last):
                os.unlink(last, dir_fd=folder)
                _sync(".", folder)

    def remove_all(self) -> None:
        """Remove the folder and everything in it."""
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
        """Open the folder that contains the file, as a descriptor, and yield it with the file's last name."""
        parts = self._below(name)
        file = (real := self._allowed.real()).joinpath(*parts)
        if file != Path(os.path.realpath(file)):
            raise DataError(detail=f"{self.url}/{name} is reached through a link, which checkpoints do not contain.")
        with _closing(open_folder(real, parts[:-1], create=create)) as folder:
            yield folder, parts[-1]

    @contextmanager
    def _itself(self) -> Iterator[int]:
        """Open this folder as a descriptor."""
        with _closing(open_folder(self._allowed.real())) as folder:
            yield folder

    # ── in a store ────────────────────────────────────────────────────────────────────────────────────────────────

    def _stored(self, name: str) -> str:
        return "/".join((self._path.rstrip("/"), *self._below(name)))

    def _listed(self, path: object) -> str:
        """Return the name, relative to this folder, of an entry of a store's listing."""
        above = self._path.rstrip("/") + "/"
        if not isinstance(path, str) or not path.rstrip("/").startswith(above):
            raise DataError(detail=f"{self.url} was listed with {shown(path)}, which is not in it.")
        return "/".join(name_parts(path.rstrip("/").removeprefix(above)))

    @contextmanager
    def _reached(self, doing: str) -> Iterator[None]:
        """Turn a store's own errors into ours, with what was tried."""
        try:
            yield
        except (AtollError, OSError):
            raise
        except Exception as error:
            detail = f"{self.url} failed at {doing}: {in_words(error)}."
            raise InfrastructureError(detail=detail, remedy="Check that it can be reached from here.") from error

    # ── either ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _below(self, name: str) -> tuple[str, ...]:
        """Return the components of a file's name. Raises DataError if it is elsewhere, or private."""
        parts = name_parts(name)
        try:
            allowed = self._allowed.sub(parts)
            if allowed.local:
                allowed.real()
        except OutsideRoots as error:
            raise DataError(detail=f"{shown(name)} is not a file of {self.url} that jobs may use.") from error
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
    """Raise ConfigurationError for a root in a store whose package is missing here."""
    for root in roots:
        Folder(Allowed(root.place, "checkpoints", (root,), ()))


def _walk(folder: int) -> Iterator[tuple[str, bool]]:
    """Yield everything below by its path, and whether it is a folder. Raises DataError for links and the like.

    Another process may write there: a file that vanishes meanwhile is left out.
    """
    waiting = [""]
    while waiting:
        above = waiting.pop()
        with _scanned(above or ".", folder) as entries:
            for entry in entries:
                name = f"{above}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{name}/")
                    yield name, True
                    continue
                try:
                    mode = entry.stat(follow_symlinks=False).st_mode
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(mode):
                    yield name, False
                else:
                    raise DataError(
                        detail=f"{shown(name)} is a link, a pipe or a device, which checkpoints do not contain."
                    )


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
