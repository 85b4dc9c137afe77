"""The roots below which jobs may read and write, as whoever started the service has named them.

    --checkpoints ROOT   folders of checkpoints, read and written: `checkpoints.folder`, `resume.checkpoint`
    --data ROOT          text and what belongs to it, read: `data.files`, `data.sources`, `data.tokenizer`, `data.index`

A specification is an operator's, the roots are not: what it names is refused before anything of it is touched, unless it
lies below a root. Places are compared by their components, and never by text: ``/data/ab`` is not below ``/data/a``. On this
machine they are compared once more by where links lead (``Allowed.real``), when they are used. What is private (the home of
the service: its token, its database) lies below no root, unless the root lies within it, as HOME/checkpoints does.

Responsible for that decision, and for what a path, a URL and a file's name may look like at all. Refuses to know what lies
at a place (``checkpoints.folder`` and ``open_data`` do), and who asks. A user's own command line may read what the user may:
it gives ``EVERYTHING``. Source: the confused deputy (Hardy, 1988); capabilities as values.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal
from unicodedata import category

from orchestrator.errors import ConfigurationError, DataError, OutsideRoots, in_words
from orchestrator.system import printable

Kind = Literal["checkpoints", "data"]

LOCAL = "file"
STORES = frozenset(
    ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "hdfs", "webhdfs", "sftp", "ssh", "smb", "memory"]
)
"""Protocols whose URLs name one place each. Others of fsspec lead from one place to another (reference, dir, zip)."""

READ_AHEAD_BYTES = 4 << 20
URL_LENGTH_MAX, NAME_LENGTH_MAX, COMPONENT_BYTES_MAX, SHOWN_MAX = 2000, 1000, 255, 200
_PROTOCOL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_AUTHORITY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(:[0-9]{1,5})?")
_OF_URLS = re.compile(r'[%?#*\[\]{}<>|"^`@]')
"""What some backend would decode, expand or cut off."""
SHARED_FOLDERS = frozenset(
    f"/{name}"
    for name in ("", "bin", "boot", "dev", "etc", "home", "lib", "lib64", "mnt", "media", "opt", "proc", "run")
) | {"/sbin", "/sys", "/tmp", "/usr", "/var", "/var/lib", "/var/tmp", "/Users"}
"""Folders of the system or of everybody. A service that was started in one did not mean that jobs may read all of it."""
OF_THE_SYSTEM = ("/dev", "/proc", "/sys", "/etc")
"""What no default root ever holds, and no root that lies above."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder or file: its protocol, and its path by components. Of a store, the first one is the bucket or host."""

    protocol: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        path = "/".join(self.parts)
        return f"/{path}" if self.protocol == LOCAL else f"{self.protocol}://{path}"

    def below(self, other: Place) -> bool:
        """Whether it is the other, or lies somewhere in it."""
        return self.protocol == other.protocol and self.parts[: len(other.parts)] == other.parts

    def real(self) -> Place:
        """Where links lead today. Only for places on this machine."""
        return _local(os.path.realpath(str(self)))


@dataclass(frozen=True, slots=True)
class Root:
    """``hidden``: whether what has a name that begins with a dot somewhere below the root belongs to it.

    The last ``made_by_jobs`` components of its path could be links that a job has put there, and are not followed.
    """

    place: Place
    hidden: bool = True
    made_by_jobs: int = 0

    def real(self) -> Root:
        """Where links lead today. Only for roots on this machine."""
        end = len(self.place.parts) - self.made_by_jobs
        above = Place(LOCAL, self.place.parts[:end]).real()
        return replace(self, place=Place(LOCAL, (*above.parts, *self.place.parts[end:])))


@dataclass(frozen=True, slots=True)
class Allowed:
    """A place that was found below a root: what files are reached through. ``AllowedRoots`` makes one; others come of it."""

    place: Place
    kind: Kind
    roots: tuple[Root, ...]
    private: tuple[Place, ...]

    @property
    def local(self) -> bool:
        return self.place.protocol == LOCAL

    def sub(self, parts: Sequence[str]) -> Allowed:
        """What lies below it. Raises OutsideRoots where that is private, or hidden."""
        inner = replace(self, place=Place(self.place.protocol, (*self.place.parts, *parts)))
        inner._refuse_outside(inner.place, self.roots, self.private)
        return inner

    def parent(self) -> Allowed | None:
        """What it lies in; None where that is outside."""
        outer = replace(self, place=Place(self.place.protocol, self.place.parts[:-1]))
        with suppress(OutsideRoots):
            outer._refuse_outside(outer.place, self.roots, self.private)
            return outer
        return None

    def real(self) -> Path:
        """Where it is on this machine, links followed, and still below a root. Raises OutsideRoots if it is not."""
        assert self.local, "a store has no links"
        real = self.place.real()
        roots = tuple(root.real() for root in self.roots if root.place.protocol == LOCAL)
        try:
            self._refuse_outside(real, roots, tuple(place.real() for place in self.private))
        except OutsideRoots:
            raise outside(str(self.place), self.kind, self.roots, self._link_that_leaves(roots)) from None
        return Path(str(real))

    def _link_that_leaves(self, roots: Sequence[Root]) -> str:
        """Say which link on the way leads out of the roots, and of what lies outside no more than the link itself says."""
        path = Path("/")
        for part in self.place.parts:
            path /= part
            if not path.is_symlink():
                continue
            led_to = Place(LOCAL, Path(os.path.realpath(path)).parts[1:])
            if not any(led_to.below(root.place) for root in roots):
                return f"{shown(str(path))} is a link to {shown(os.readlink(path))}, which is outside"
        return ""

    def _refuse_outside(self, place: Place, roots: Sequence[Root], private: Sequence[Place]) -> None:
        for root in roots:
            if not place.below(root.place):
                continue
            within = place.parts[len(root.place.parts) :]
            if not root.hidden and any(part.startswith(".") for part in within):
                continue
            if any(place.below(secret) and not _strictly_below(root.place, secret) for secret in private):
                continue
            return
        raise outside(str(self.place), self.kind, self.roots)


@dataclass(frozen=True, slots=True)
class AllowedRoots:
    """What jobs may touch. ``private`` are places on this machine that no root above them holds."""

    checkpoints: tuple[Root, ...] = ()
    data: tuple[Root, ...] = ()
    private: tuple[Place, ...] = ()

    @classmethod
    def only(cls, folder: Path | str) -> AllowedRoots:
        """All of one folder or URL, for checkpoints and data."""
        root = Root(place_of(str(folder)))
        return cls((root,), (root,))

    def with_run(self, run_dir: Path) -> AllowedRoots:
        """With the checkpoints in a job's own run folder, wherever that is: the service chose it."""
        return self.with_checkpoints(run_dir / "checkpoints", made_by_jobs=2)

    def with_checkpoints(self, folder: Path, made_by_jobs: int = 0) -> AllowedRoots:
        root = Root(_local(os.path.abspath(folder)), made_by_jobs=made_by_jobs)
        return self if root in self.checkpoints else replace(self, checkpoints=(*self.checkpoints, root))

    def without(self, *private: Path | str) -> AllowedRoots:
        """Nothing of these files and folders."""
        return replace(self, private=(*self.private, *(_local(os.path.abspath(path)) for path in private)))

    def checkpoint_folder(self, url: str) -> Allowed:
        """The folder of this path or URL. Raises OutsideRoots, and has touched nothing then."""
        return self._allowed(url, "checkpoints", self.checkpoints)

    def data_file(self, path: str) -> Allowed:
        """The file of this path. Raises OutsideRoots, and has touched nothing then."""
        return self._allowed(path, "data", self.data)

    def _allowed(self, url: str, kind: Kind, roots: tuple[Root, ...]) -> Allowed:
        try:
            place = place_of(url)
        except ConfigurationError as error:
            raise outside(url, kind, roots, str(error)) from error
        allowed = Allowed(place, kind, roots, self.private)
        allowed._refuse_outside(place, roots, self.private)
        return allowed


EVERYTHING = AllowedRoots((Root(Place(LOCAL, ())),), (Root(Place(LOCAL, ())),))
"""For a user's own command line: it reads what the user may read, and no rights are crossed."""


def defaults(
    home: Path,
    runs: Path,
    checkpoints: Sequence[str],
    data: Sequence[str],
    working_folder: Path,
    private: Sequence[Path],
) -> AllowedRoots:
    """The roots of the service of ``home``: those that were named, or the defaults.

    Always the home's own folders, and the checkpoints of jobs in ``runs``. In the place of what is given stands what lies
    below ``working_folder``, without what is hidden there. Raises ConfigurationError for a root that can be none.
    """
    private_places = (_local(str(home)), *(_local(os.path.abspath(path)) for path in private))
    working_place = _local(str(working_folder))
    unusable = _too_much(working_place) or working_place.below(private_places[0])
    default = () if unusable else (Root(working_place, hidden=False),)
    of_jobs = Root(_local(str(runs)))
    return AllowedRoots(
        (Root(_local(str(home / "checkpoints"))), of_jobs, *(_roots_at(checkpoints, "checkpoints", home) or default)),
        (Root(_local(str(home / "data"))), *(_roots_at(data, "data", home) or default)),
        (*private_places, *(Place(LOCAL, (name[1:],)) for name in OF_THE_SYSTEM)),
    )


def place_of(url: str) -> Place:
    """The place of an absolute path, or of a URL. Raises ConfigurationError that says what is wrong with it."""
    if not isinstance(url, str) or not url or len(url) > URL_LENGTH_MAX:
        raise ConfigurationError(detail=f"a path or URL has 1 to {URL_LENGTH_MAX:,} characters")
    if problem := _unfit(url):
        raise ConfigurationError(detail=problem)
    if "::" in url:
        raise ConfigurationError(detail="protocols are not chained (`::`)")
    matched = _PROTOCOL.fullmatch(url)
    protocol, path = matched.groups() if matched else (LOCAL, url)
    if matched and _OF_URLS.search(path):
        raise ConfigurationError(detail='a URL has none of the characters % ? # * [ ] { } < > | " ^ ` @ here')
    if protocol == LOCAL and not path.startswith("/"):
        raise ConfigurationError(detail="it is neither an absolute path nor a URL")
    if protocol not in STORES and protocol != LOCAL:
        raise ConfigurationError(detail=f"{protocol!r} is no protocol of a store that is taken")
    path = path.removeprefix("/") if protocol == LOCAL else path
    parts = tuple(path.removesuffix("/").split("/")) if path.removesuffix("/") else ()
    if any(part in ("", ".", "..") for part in parts):
        raise ConfigurationError(detail="it has an empty component, `.` or `..`")
    if any(len(part.encode()) > COMPONENT_BYTES_MAX for part in parts):
        raise ConfigurationError(detail=f"a component has more than {COMPONENT_BYTES_MAX} bytes")
    if protocol != LOCAL and not (parts and _AUTHORITY.fullmatch(parts[0])):
        raise ConfigurationError(
            detail="a URL begins with the plain name of a bucket or host, without user and password"
        )
    return Place(protocol, parts)


def name_parts(name: object) -> tuple[str, ...]:
    """The components of a file's name, as folders, manifests, parts and archives have them. Raises DataError.

    The one place that decides it: relative, without `..`, so that what it names lies below whatever it is joined to.
    """
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH_MAX:
        raise DataError(
            detail=f"{shown(name)} is no file's name: that is a text of 1 to {NAME_LENGTH_MAX:,} characters."
        )
    parts = tuple(name.split("/"))
    problem = _unfit(name) or ("it is not relative, or goes up" if {"", ".", ".."} & set(parts) else "")
    if not problem and any(len(part.encode()) > COMPONENT_BYTES_MAX for part in parts):
        problem = f"a component has more than {COMPONENT_BYTES_MAX} bytes"
    if problem:
        raise DataError(detail=f"{shown(name)} is no name of a file below a folder: {problem}.")
    return parts


def open_data(roots: AllowedRoots, path: str) -> IO[bytes]:
    """The regular file of data at ``path``, open for reading. Raises OutsideRoots, ConfigurationError, OSError.

    One of a store is read as far as it is asked for, and some megabytes ahead.
    """
    allowed = roots.data_file(path)
    if not allowed.local:
        store, place = store_of(allowed)
        file: IO[bytes] = store.open(place, "rb", block_size=READ_AHEAD_BYTES, cache_type="readahead")
        return file
    real = allowed.real()
    folder = open_folder(real.parent)
    try:
        return open_regular(folder, real.name)
    except DataError as error:
        raise ConfigurationError(detail=f"data: {path} is no regular file, and cannot be read.") from error
    finally:
        os.close(folder)


def data_bytes(roots: AllowedRoots, path: str) -> int:
    """The size of the file of data at ``path``. Raises as ``open_data``."""
    allowed = roots.data_file(path)
    if not allowed.local:
        store, place = store_of(allowed)
        return int(store.size(place))
    with open_data(roots, path) as file:
        return os.fstat(file.fileno()).st_size


def store_of(allowed: Allowed) -> tuple[Any, str]:
    """fsspec's file system of a place that is not on this machine, and the path in it. Raises ConfigurationError."""
    import fsspec  # a sixth of what the command line imports, and most jobs have no store

    try:
        store, path = fsspec.core.url_to_fs(str(allowed.place))
    except Exception as error:
        detail = f"{allowed.place} cannot be reached from here: {in_words(error)}."
        raise ConfigurationError(detail=detail) from error
    return store, str(path)


def open_folder(real: Path, parts: Sequence[str] = (), *, create: bool = False) -> int:
    """A descriptor of a folder, no component of whose path is a link. The caller closes it.

    ``real`` is a path without links; a link that has taken a component's place since is not followed. Raises DataError
    where a component is one, or no folder; FileNotFoundError.
    """
    descriptor = os.open("/", _FOLDER)
    for part in (*real.parts[1:], *parts):
        try:
            inner = _open_inner(descriptor, part, create)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise DataError(detail=f"{shown(part)} is a link or a file, where a folder should be.") from error
            raise
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def open_regular(folder: int, name: str) -> IO[bytes]:
    """The regular file of that name in the folder, open for reading. Raises DataError for a link, a pipe, a device.

    It is looked at before it is opened, for opening some of these waits or does something, and again afterwards.
    """
    if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise DataError(detail=f"{shown(name)} is a link, a folder, a pipe or a device, and no regular file.")


def outside(url: str, kind: Kind, roots: Sequence[Root], reason: str = "") -> OutsideRoots:
    """The same answer whatever lies there, or does not."""
    named = ", ".join(f"{root.place}" for root in roots) or "nothing"
    refusal = f"{shown(url)} is no place for {kind} of jobs here" + (f" ({reason})" if reason else "")
    remedy = (
        f"Use a place below one of them; or have the service started with `atoll up --{kind} ROOT`, if jobs may "
        f"{'read and write' if kind == 'checkpoints' else 'read'} everything in ROOT."
    )
    return OutsideRoots(detail=f"{refusal}. They may use what lies below: {named}.", remedy=remedy)


def shown(value: object) -> str:
    """A value of anybody's, for a message: in its own script, on one line, and short."""
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    text = printable.line(value[:SHOWN_MAX]).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'" if len(value) <= SHOWN_MAX else f"'{text}'…"


def _roots_at(urls: Sequence[str], kind: Kind, home: Path) -> tuple[Root, ...]:
    """The roots that were named when the service was started; a local path may be relative to where that was."""
    own = _local(str(home))
    return tuple(Root(_root_place(url, kind, own)) for url in urls)


def _root_place(url: str, kind: Kind, home: Place) -> Place:
    local = re.match(r"[^/]*:", url) is None  # what is written as a URL is one, or wrong
    try:
        place = place_of(os.path.abspath(url) if local and url else url)
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(detail=f"--{kind} {shown(url)} cannot be a root: {error}.") from error
    if place.protocol == LOCAL and place.real().below(home):
        own = Place(LOCAL, (*home.parts, kind))
        if not place.real().below(own):
            detail = f"--{kind} {shown(url)} lies in the home folder {home}, which is private but for {own}."
            raise ConfigurationError(detail=detail)
    return place


def _open_inner(folder: int, name: str, create: bool) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    with suppress(FileExistsError):  # another made it in this instant
        os.mkdir(name, dir_fd=folder)
    return os.open(name, _FOLDER, dir_fd=folder)


def _too_much(folder: Place) -> bool:
    return str(folder) in SHARED_FOLDERS or any(folder.parts[:1] == (name[1:],) for name in OF_THE_SYSTEM)


def _strictly_below(root: Place, secret: Place) -> bool:
    return root.below(secret) and root != secret


def _unfit(text: str) -> str:
    if any(category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
        return "it has a character that is none of a name (NUL, another control character, half a surrogate pair)"
    return "it has a backslash" if "\\" in text else ""


def _local(path: str) -> Place:
    return Place(LOCAL, tuple(part for part in path.split("/") if part))


_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
