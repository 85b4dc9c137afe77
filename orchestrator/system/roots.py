"""The roots below which jobs may read and write, as named when the service was started.

    --checkpoints ROOT   folders of checkpoints, read and written: `checkpoints.folder`, `resume.checkpoint`
    --data ROOT          text and what belongs to it, read: `data.files`, `data.sources`, `data.tokenizer`, `data.index`

Operators write specifications; the service's owner decides the roots. A path that a specification names is refused before it
is accessed, unless it lies below a root. Paths are compared by components, never as text: ``/data/ab`` is not below
``/data/a``. On this machine they are compared again with links resolved (``Allowed.real``) when they are used. Private
places (the service's home with its token and database) belong to no root above them; HOME/checkpoints is a root within.

This module also decides what a path, a URL and a file name may look like. ``checkpoints.folder`` and ``open_data`` access
the places. A user's own command line may read what the user may, and passes ``EVERYTHING``. Source: the confused deputy
(Hardy, 1988); capabilities as values.
"""

from __future__ import annotations

import asyncio
import errno
import io
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence
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
"""Protocols whose URLs name one place each. Others of fsspec redirect to another place (reference, dir, zip)."""
WEB = frozenset(["http", "https"])
"""Protocols of data only, since nothing can be written there."""

READ_AHEAD_BYTES = 4 << 20
WEB_PATIENCE_S, BEYOND_THE_END = 60.0, 416
URL_LENGTH_MAX, NAME_LENGTH_MAX, COMPONENT_BYTES_MAX, SHOWN_MAX = 2000, 1000, 255, 200
_PROTOCOL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_AUTHORITY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(:[0-9]{1,5})?")
_OF_URLS = re.compile(r'[%?#*\[\]{}<>|"^`@]')
"""Characters that some backend would decode, expand or cut off."""
SHARED_FOLDERS = frozenset(
    f"/{name}"
    for name in ("", "bin", "boot", "dev", "etc", "home", "lib", "lib64", "mnt", "media", "opt", "proc", "run")
) | {"/sbin", "/sys", "/tmp", "/usr", "/var", "/var/lib", "/var/tmp", "/Users"}
"""Folders of the system or of all users. A service started in one of them must not let jobs read all of it."""
OF_THE_SYSTEM = ("/dev", "/proc", "/sys", "/etc")
"""Folders that belong to no default root, and to no root above them."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder or file: its protocol, and its path as components. In a store, the first one is the bucket or host."""

    protocol: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        path = "/".join(self.parts)
        return f"/{path}" if self.protocol == LOCAL else f"{self.protocol}://{path}"

    def below(self, other: Place) -> bool:
        """Return whether this place is the other one, or inside it."""
        return self.protocol == other.protocol and self.parts[: len(other.parts)] == other.parts

    def real(self) -> Place:
        """Return the place with links resolved. Only for places on this machine."""
        return _local(os.path.realpath(str(self)))


@dataclass(frozen=True, slots=True)
class Root:
    """A root. ``hidden``: names below it that begin with a dot belong to it, too.

    The last ``made_by_jobs`` components of its path could be links that a job has created, and are not followed.
    """

    place: Place
    hidden: bool = True
    made_by_jobs: int = 0

    def real(self) -> Root:
        """Return the root with links resolved. Only for roots on this machine."""
        end = len(self.place.parts) - self.made_by_jobs
        above = Place(LOCAL, self.place.parts[:end]).real()
        return replace(self, place=Place(LOCAL, (*above.parts, *self.place.parts[end:])))


@dataclass(frozen=True, slots=True)
class Allowed:
    """A place that was checked to be below a root; files are accessed only through it. Created by ``AllowedRoots``."""

    place: Place
    kind: Kind
    roots: tuple[Root, ...]
    private: tuple[Place, ...]

    @property
    def local(self) -> bool:
        return self.place.protocol == LOCAL

    def sub(self, parts: Sequence[str]) -> Allowed:
        """Return the place below it. Raises OutsideRoots if that is private or hidden."""
        inner = replace(self, place=Place(self.place.protocol, (*self.place.parts, *parts)))
        inner._refuse_outside(inner.place, self.roots, self.private)
        return inner

    def parent(self) -> Allowed | None:
        """Return its parent folder; None if that is outside the roots."""
        outer = replace(self, place=Place(self.place.protocol, self.place.parts[:-1]))
        with suppress(OutsideRoots):
            outer._refuse_outside(outer.place, self.roots, self.private)
            return outer
        return None

    def real(self) -> Path:
        """Return its path with links resolved. Raises OutsideRoots if that is not below a root."""
        assert self.local, "a store has no links"
        real = self.place.real()
        roots = tuple(root.real() for root in self.roots if root.place.protocol == LOCAL)
        try:
            self._refuse_outside(real, roots, tuple(place.real() for place in self.private))
        except OutsideRoots:
            raise outside(str(self.place), self.kind, self.roots, self._link_that_leaves(roots)) from None
        return Path(str(real))

    def _link_that_leaves(self, roots: Sequence[Root]) -> str:
        """Return which link in the path leads outside the roots, and where to, revealing no more than the links' own texts.

        A link within the roots may be a link to another one: the first text that is outside is where the path leads.
        """
        path = Path("/")
        for part in self.place.parts:
            within, path = _is_below(path, roots), path / part
            if within and path.is_symlink() and not _is_below(path, roots):
                return f"{shown(str(path))} is a link to {_leads(path, roots)}, outside the allowed folders"
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
    """The places that jobs may use. ``private`` are places on this machine that are excluded from roots above them."""

    checkpoints: tuple[Root, ...] = ()
    data: tuple[Root, ...] = ()
    private: tuple[Place, ...] = ()

    @classmethod
    def only(cls, folder: Path | str) -> AllowedRoots:
        """Return roots with one folder or URL, for checkpoints and data."""
        root = Root(place_of(str(folder), "data"))
        return cls((root,), (root,))

    def with_run(self, run_dir: Path) -> AllowedRoots:
        """Return the roots with the checkpoints in a job's run folder added; the service chose that folder."""
        return self.with_checkpoints(run_dir / "checkpoints", made_by_jobs=2)

    def with_checkpoints(self, folder: Path, made_by_jobs: int = 0) -> AllowedRoots:
        root = Root(_local(os.path.abspath(folder)), made_by_jobs=made_by_jobs)
        return self if root in self.checkpoints else replace(self, checkpoints=(*self.checkpoints, root))

    def without(self, *private: Path | str) -> AllowedRoots:
        """Return the roots without these files and folders."""
        return replace(self, private=(*self.private, *(_local(os.path.abspath(path)) for path in private)))

    def checkpoint_folder(self, url: str) -> Allowed:
        """Return the allowed folder of this path or URL. Raises OutsideRoots without accessing anything."""
        return self._allowed(url, "checkpoints", self.checkpoints)

    def data_file(self, path: str) -> Allowed:
        """Return the allowed file of this path. Raises OutsideRoots without accessing anything."""
        return self._allowed(path, "data", self.data)

    def _allowed(self, url: str, kind: Kind, roots: tuple[Root, ...]) -> Allowed:
        try:
            place = place_of(url, kind)
        except ConfigurationError as error:
            raise outside(url, kind, roots, str(error)) from error
        allowed = Allowed(place, kind, roots, self.private)
        allowed._refuse_outside(place, roots, self.private)
        return allowed


EVERYTHING = AllowedRoots(
    (Root(Place(LOCAL, ())),), tuple(Root(Place(protocol, ())) for protocol in (LOCAL, *sorted(WEB)))
)
"""For a user's own command line, which may read what the user may read."""


def defaults(
    home: Path,
    runs: Path,
    checkpoints: Sequence[str],
    data: Sequence[str],
    working_folder: Path,
    private: Sequence[Path],
) -> AllowedRoots:
    """Return the roots of the service of ``home``: the named ones, or the defaults.

    They always include the home's own folders and the checkpoints of jobs in ``runs``. The default is ``working_folder``
    without hidden files. Raises ConfigurationError for an unusable root.
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


def place_of(url: str, kind: Kind = "checkpoints") -> Place:
    """Return the place of an absolute path or a URL, for use as this kind. Raises ConfigurationError with what is wrong."""
    if not isinstance(url, str) or not url or len(url) > URL_LENGTH_MAX:
        raise ConfigurationError(detail=f"a path or URL must have 1 to {URL_LENGTH_MAX:,} characters")
    if problem := _unfit(url):
        raise ConfigurationError(detail=problem)
    if "::" in url:
        raise ConfigurationError(detail="chained protocols (`::`) are not supported")
    matched = _PROTOCOL.fullmatch(url)
    protocol, path = matched.groups() if matched else (LOCAL, url)
    if matched and _OF_URLS.search(path):
        raise ConfigurationError(detail='a URL must not contain % ? # * [ ] { } < > | " ^ ` @ here')
    if protocol == LOCAL and not path.startswith("/"):
        raise ConfigurationError(detail="it is neither an absolute path nor a URL")
    if protocol not in STORES and protocol != LOCAL and not (protocol in WEB and kind == "data"):
        raise ConfigurationError(detail=f"{protocol!r} is not a supported protocol")
    path = path.removeprefix("/") if protocol == LOCAL else path
    parts = tuple(path.removesuffix("/").split("/")) if path.removesuffix("/") else ()
    if any(part in ("", ".", "..") for part in parts):
        raise ConfigurationError(detail="it contains an empty component, `.` or `..`")
    if any(len(part.encode()) > COMPONENT_BYTES_MAX for part in parts):
        raise ConfigurationError(detail=f"a component exceeds {COMPONENT_BYTES_MAX} bytes")
    if protocol != LOCAL and not (parts and _AUTHORITY.fullmatch(parts[0])):
        raise ConfigurationError(
            detail="a URL must begin with the plain name of a bucket or host, without user and password"
        )
    return Place(protocol, parts)


def name_parts(name: object) -> tuple[str, ...]:
    """Return the components of a file name in a folder, manifest, part or archive. Raises DataError.

    A name is relative and without `..`, so that it stays below any folder that it is joined to. Decided only here.
    """
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH_MAX:
        raise DataError(
            detail=f"{shown(name)} is not a file name, which is a text of 1 to {NAME_LENGTH_MAX:,} characters."
        )
    parts = tuple(name.split("/"))
    problem = _unfit(name) or ("it is absolute or leads upwards" if {"", ".", ".."} & set(parts) else "")
    if not problem and any(len(part.encode()) > COMPONENT_BYTES_MAX for part in parts):
        problem = f"a component exceeds {COMPONENT_BYTES_MAX} bytes"
    if problem:
        raise DataError(detail=f"{shown(name)} is not a valid file name below a folder: {problem}.")
    return parts


def open_data(roots: AllowedRoots, path: str) -> IO[bytes]:
    """Open the regular data file at ``path`` for reading. Raises OutsideRoots, ConfigurationError, OSError.

    A file in a store is read on demand, some megabytes ahead.
    """
    allowed = roots.data_file(path)
    if not allowed.local:
        if allowed.place.protocol in WEB:
            return _open_web(allowed)
        store, place = store_of(allowed)
        file: IO[bytes] = store.open(place, "rb", block_size=READ_AHEAD_BYTES, cache_type="readahead")
        return file
    real = allowed.real()
    folder = open_folder(real.parent)
    try:
        return open_regular(folder, real.name)
    except DataError as error:
        raise ConfigurationError(detail=f"data: {path} is not a regular file.") from error
    finally:
        os.close(folder)


def data_bytes(roots: AllowedRoots, path: str) -> int:
    """Return the size of the data file at ``path``. Raises as ``open_data`` does."""
    allowed = roots.data_file(path)
    if not allowed.local:
        if allowed.place.protocol in WEB:
            return _web_bytes(*_web(allowed))
        store, place = store_of(allowed)
        return int(store.size(place))
    with open_data(roots, path) as file:
        return os.fstat(file.fileno()).st_size


def store_of(allowed: Allowed) -> tuple[Any, str]:
    """Return fsspec's file system of a place in a store, and the path in it. Raises ConfigurationError."""
    import fsspec  # a sixth of what the command line would import, and most jobs use no store

    try:
        store, path = fsspec.core.url_to_fs(str(allowed.place))
    except Exception as error:
        detail = f"{allowed.place} cannot be reached: {in_words(error)}."
        if isinstance(error, ImportError):
            detail += " For s3:// and gs://, run `pip install 'atoll[stores]'` on every node."
        raise ConfigurationError(detail=detail) from error
    return store, str(path)


# ── files on web servers ──────────────────────────────────────────────────────────────────────────────────────────────


class Unanswered(OSError):
    """A web server does not give a file. aiohttp's own exceptions quote the URL, which may be signed, and are logged."""

    def __init__(self, status: int) -> None:
        super().__init__(errno.EIO, f"the server answers {status}")
        self.status = status


@dataclass(frozen=True, slots=True)
class WebSessions:
    """Opens sessions that follow a server's redirects to origins of the roots, and to public addresses by TLS, only.

    A server could send its readers to services that only this machine reaches. The token of the Hub is sent to the Hub, and
    aiohttp leaves it out where a redirect leads to another origin.
    """

    origins: frozenset[str]
    is_hub: bool

    async def __call__(self, **options: Any) -> Any:
        import aiohttp

        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(self._refuse_inward)
        trace.on_request_end.append(self._refuse_failures)
        patience = aiohttp.ClientTimeout(total=None, sock_connect=WEB_PATIENCE_S, sock_read=WEB_PATIENCE_S)
        headers = hub_headers() if self.is_hub else {}
        return aiohttp.ClientSession(trace_configs=[trace], timeout=patience, headers=headers, **options)

    async def _refuse_failures(self, _session: Any, _context: Any, end: Any) -> None:
        if end.response.status >= 400 and end.response.status != BEYOND_THE_END:  # which fsspec takes for no bytes
            raise Unanswered(end.response.status)

    async def _refuse_inward(self, _session: Any, _context: Any, redirect: Any) -> None:
        source = redirect.url
        target = source.join(type(source)(redirect.response.headers.get("Location", "")))
        if str(target.origin()) in {*self.origins, str(source.origin())}:
            return
        problem = "" if target.scheme == "https" else "without TLS"
        if not problem and not await _is_public(target.host or "", target.port or 443):
            problem = "at an address that is not public"
        if problem:
            detail = f"{source.origin()} redirects to {target.origin()}, {problem}."
            remedy = f"If jobs may read from there, restart the service with `atoll up --data {target.origin()}`."
            raise OutsideRoots(detail=detail, remedy=remedy)


async def _is_public(host: str, port: int) -> bool:
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return True  # the connection fails as well
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_global for *_, address in addresses)


def hub_endpoint() -> str:
    """Return the URL of the Hugging Face Hub, or of the server that has its interface (HF_ENDPOINT)."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_headers() -> dict[str, str]:
    """Return the headers of requests to the Hub, with the token of this process's environment (HF_TOKEN)."""
    token = os.environ.get("HF_TOKEN", "").strip()
    return {"Authorization": f"Bearer {token}"} if token.isascii() and token.isprintable() and token else {}


def _web(allowed: Allowed) -> tuple[Any, str]:
    import fsspec

    url, endpoint = str(allowed.place), hub_endpoint()
    origins = frozenset(f"{place.protocol}://{place.parts[0]}" for place in _web_places(allowed.roots))
    sessions = WebSessions(origins, url.startswith(f"{endpoint}/"))
    return fsspec.filesystem(allowed.place.protocol, get_client=sessions), url


def _open_web(allowed: Allowed) -> IO[bytes]:
    store, url = _web(allowed)
    size = _web_bytes(store, url)
    if not size:
        return io.BytesIO()
    file: IO[bytes] = store.open(url, "rb", block_size=READ_AHEAD_BYTES, cache_type="readahead", size=size)
    return file


def _web_places(roots: Sequence[Root]) -> Iterator[Place]:
    yield from (root.place for root in roots if root.place.protocol in WEB and root.place.parts)


def _web_bytes(store: Any, url: str) -> int:
    """Return the size of a file on a web server. Raises OSError, which is FileNotFoundError only if the server says so."""
    try:
        size = store.size(url)
    except FileNotFoundError as error:  # fsspec raises it for every failure
        cause = error.__cause__
        if isinstance(cause, OutsideRoots):
            raise cause from None
        status = getattr(cause, "status", None)
        if status in (404, 410):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
        if status in (401, 403):
            reason = f"the server answers {status}: it wants a token with access, such as HF_TOKEN for the Hub"
            raise PermissionError(errno.EACCES, reason) from None
        if isinstance(cause, Unanswered):
            raise cause from None
        raise OSError(errno.EIO, f"no answer: {type(cause).__name__}") from None
    if size is None:
        raise OSError(errno.EIO, "the server does not say the file's size")
    return int(size)


LINKS_MAX, LINKS_SHOWN_MAX = 40, 3
"""Linux follows as many links in one path, and a message shows as many."""


def _is_below(path: Path, roots: Sequence[Root]) -> bool:
    """Return whether the path is below one of these real roots once its links are resolved."""
    real = Place(LOCAL, Path(os.path.realpath(path)).parts[1:])
    return any(real.below(root.place) for root in roots)


def _leads(link: Path, roots: Sequence[Root]) -> str:
    """Return for a message where the link leads, by its text, and further as long as that is a link below the roots."""
    places = list[str]()
    while len(places) < LINKS_MAX:
        link = Path(os.path.normpath(os.path.join(os.path.realpath(link.parent), os.readlink(link))))
        places.append(shown(str(link)))
        if not _is_below(link.parent, roots) or not link.is_symlink():
            break
    if len(places) > LINKS_SHOWN_MAX:
        places = [f"{places[0]}, and over {len(places) - 2} more links to {places[-1]}"]
    return ", a link to ".join(places)


def open_folder(real: Path, parts: Sequence[str] = (), *, create: bool = False) -> int:
    """Return a descriptor of a folder without following links. The caller closes it.

    ``real`` is a path without links; a component that was replaced by a link since is not followed. Raises DataError if a
    component is a link or not a folder, or FileNotFoundError.
    """
    descriptor = os.open("/", _FOLDER)
    for part in (*real.parts[1:], *parts):
        try:
            inner = _open_inner(descriptor, part, create)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise DataError(detail=f"{shown(part)} is a link or a file, not a folder.") from error
            raise
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def open_regular(folder: int, name: str) -> IO[bytes]:
    """Open the regular file of that name in the folder for reading. Raises DataError for a link, a pipe or a device.

    Its type is checked before opening, because opening a pipe or device may block or have effects, and again afterwards.
    """
    if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    raise DataError(detail=f"{shown(name)} is not a regular file, but a link, a folder, a pipe or a device.")


def outside(url: str, kind: Kind, roots: Sequence[Root], reason: str = "") -> OutsideRoots:
    """Return the refusal of a place. It does not depend on whether something exists there."""
    named = ", ".join(f"{root.place}" for root in roots) or "nothing"
    refusal = f"{shown(url)} is not an allowed place for {kind} of jobs" + (f" ({reason})" if reason else "")
    remedy = (
        f"Use a place below one of these; or restart the service with `atoll up --{kind} ROOT`, if jobs may "
        f"{'read and write' if kind == 'checkpoints' else 'read'} everything in ROOT."
    )
    return OutsideRoots(detail=f"{refusal}. Allowed are places below: {named}.", remedy=remedy)


def shown(value: object) -> str:
    """Return a foreign value for a message: in its own script, on one line, and short."""
    if not isinstance(value, str):
        return f"a {type(value).__name__}"
    text = printable.line(value[:SHOWN_MAX]).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'" if len(value) <= SHOWN_MAX else f"'{text}'…"


def _roots_at(urls: Sequence[str], kind: Kind, home: Path) -> tuple[Root, ...]:
    """Return the roots named at the start of the service; local paths may be relative to its working folder."""
    own = _local(str(home))
    return tuple(Root(_root_place(url, kind, own)) for url in urls)


def _root_place(url: str, kind: Kind, home: Place) -> Place:
    local = re.match(r"[^/]*:", url) is None  # anything written as a URL must be a valid one
    try:
        place = place_of(os.path.abspath(url) if local and url else url, kind)
    except (ConfigurationError, ValueError) as error:
        raise ConfigurationError(detail=f"--{kind} {shown(url)} is not a valid root: {error}.") from error
    if place.protocol == LOCAL and place.real().below(home):
        own = Place(LOCAL, (*home.parts, kind))
        if not place.real().below(own):
            detail = f"--{kind} {shown(url)} is in the home folder {home}, which is private except for {own}."
            raise ConfigurationError(detail=detail)
    return place


def _open_inner(folder: int, name: str, create: bool) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    with suppress(FileExistsError):  # another process has just created it
        os.mkdir(name, dir_fd=folder)
    return os.open(name, _FOLDER, dir_fd=folder)


def _too_much(folder: Place) -> bool:
    return str(folder) in SHARED_FOLDERS or any(folder.parts[:1] == (name[1:],) for name in OF_THE_SYSTEM)


def _strictly_below(root: Place, secret: Place) -> bool:
    return root.below(secret) and root != secret


def _unfit(text: str) -> str:
    if any(category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
        return "it contains a control character or half a surrogate pair"
    return "it contains a backslash" if "\\" in text else ""


def _local(path: str) -> Place:
    return Place(LOCAL, tuple(part for part in path.split("/") if part))


_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
