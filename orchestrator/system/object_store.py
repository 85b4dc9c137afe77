"""Objects by name, in a folder or a bucket: what the durable logs of jobs are kept in (``atoll up --store URL``).

    /mnt/other/atoll, file:///…     a folder of another disk, or of a file server with hard links (NFS)
    s3://BUCKET/…  gs://BUCKET/…  az://CONTAINER/…     credentials and endpoint come from the environment

The one thing that everything rests on is ``create``: of several processes that create a name, exactly one succeeds. A store
that cannot do that is recognised by trying, and refused (``admit``). ``atoll-store.json`` at the top has the format and
the fleet, so that two installations never share a store.

A draft in a folder is synced before it is linked to its name, so a name never has a part of its content. Every method raises
OSError: FileExistsError, FileNotFoundError, or one whose text names the store, what was tried, and the store's own code.
Texts of stores are not passed on, because request URLs may carry secrets.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from orchestrator.errors import ConfigurationError, InfrastructureError, LogStoreUnavailable
from orchestrator.system import home_files
from orchestrator.system.plain import has_secret
from orchestrator.system.run_folder import FLEET

HEADER = "atoll-store.json"
FORMAT = 1
REMEMBERED = "store"
"""The file in a home with the URL of its store."""
REQUEST_TIMEOUT_S = 60.0
"""For one object of at most ``mirror.PIECE_BYTES``: a line of 1.1 Mbit/s is fast enough."""
CONNECT_TIMEOUT_S = 5.0
RETRIES_MAX = 2
ALLOW_HTTP = "AWS_ALLOW_HTTP"
SCHEMES = ("s3", "gs", "az")
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
HEADER_BYTES_MAX = 4096
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"status code: (\d{3} [A-Za-z ]{1,40})")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ENDPOINT = re.compile(r"(?i)https?://([!-.0-~]*@)?([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?(/[a-z0-9._~/-]*)?")
_NO_CREDENTIALS = ("credential", "token request")
"""What the library says when it has none. Google's asks the metadata server of the machine for a token."""
_DRAFT = ".draft-"
_NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class ObjectStore(Protocol):
    """Objects by ``/``-separated names. ``url`` has no secrets. Any thread may call. Every method raises OSError."""

    @property
    def url(self) -> str: ...

    def create(self, name: str, content: bytes) -> None:
        """Make the object, durably. Raises FileExistsError if there is one of this name; after any other error it is
        unknown whether it was made."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Make or replace the object, durably."""
        ...

    def get(self, name: str) -> bytes:
        """Return the object's content. Raises FileNotFoundError."""
        ...

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return names and sizes of the objects below the folder ``prefix``, in order. The newest may be missing."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete the objects, as far as they exist."""
        ...


def open_store(url: str) -> ObjectStore:
    """Return the store at this path or URL, not yet contacted. Raises ConfigurationError for one that cannot be a store."""
    _refuse_secrets(url)
    shown = f"{url!r} " if not set("@?=;") & set(url) else ""  # with a slip, a password may be anywhere in it
    if not url.isprintable() or url != url.strip():
        raise ConfigurationError(
            detail=f"--store {shown}has spaces around it, or characters that cannot be shown. Leave them out."
        )
    scheme = _SCHEME.match(url)
    if scheme is None or scheme[1] == "file":
        path = Path(os.path.normpath(url.removeprefix("file://")))
        if not path.is_absolute() or path == Path("/") or path == Path("//"):
            raise ConfigurationError(
                detail=f"--store {shown}is no absolute path of a folder. Give a path such as /mnt/other/atoll, or a URL "
                "with s3://, gs:// or az://."
            )
        return FolderStore(path)
    if scheme[1] not in SCHEMES:
        raise ConfigurationError(
            detail=f"--store {url!r} begins with {scheme[1]}://, which is no store that atoll knows. Give a path, or a URL "
            "with s3://, gs:// or az://."
        )
    if {".", ".."} & set(url.split("/")):
        raise ConfigurationError(
            detail=f"--store {shown}has . or .. among its folders, which a bucket does not know. Write out the folder."
        )
    return Bucket(url)


def remembered(home: Path) -> str | None:
    """Return the store of this home's service, as ``remember`` wrote it. Raises ConfigurationError if that is unreadable."""
    try:
        return home_files.read(home / REMEMBERED).strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            detail=f"{home / REMEMBERED} is unreadable ({error}). Remove it, and start the service with --store URL."
        ) from error


def remember(home: Path, runs: Path, url: str) -> None:
    """Make this the store of the home's service, which it stays without the option. Raises as ``admit`` does.

    An installation that is new takes over the store's fleet, so it continues the jobs of a machine that was lost.
    """
    path = runs / FLEET
    own = path.read_text() if path.exists() else None
    fleet = admit(open_store(url), own)
    if own is None:
        runs.mkdir(parents=True, exist_ok=True)
        path.write_text(fleet)
    home_files.replace(home / REMEMBERED, f"{url}\n")


def admit(store: ObjectStore, fleet: str | None) -> str:
    """Return the fleet that the store belongs to: ``fleet``, or the store's own if the caller has none yet.

    A store without a header gets one. Raises ConfigurationError for a store of another fleet, of a newer format, or without
    conditional writes; InfrastructureError if it cannot be used just now.
    """
    with errors_of_option():
        _require_conditional_writes(store)
        wanted = fleet or secrets.token_hex(16)
        with suppress(FileExistsError):
            store.create(HEADER, json.dumps({"format": FORMAT, "fleet": wanted}).encode())
        actual = fleet_in(store)
    if fleet is not None and actual != fleet:
        raise ConfigurationError(
            detail=f"--store {store.url} belongs to the fleet {actual[:8]}…, and this service is of the fleet {fleet[:8]}…. "
            "Give another folder of the store."
        )
    return actual


def fleet_in(store: ObjectStore) -> str:
    """Return the fleet that the store's header names. Raises ConfigurationError for another header, OSError."""
    content = store.get(HEADER)
    try:
        document = json.loads(content[:HEADER_BYTES_MAX])
        number, fleet = document["format"], document["fleet"]
        is_sound = type(number) is int and isinstance(fleet, str) and fleet
    except (ValueError, KeyError, TypeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise ConfigurationError(
            detail=f"--store {store.url} has a {HEADER} that is no header of atoll ({content[:40]!r}). Give another folder."
        )
    if number > FORMAT:
        raise ConfigurationError(
            detail=f"--store {store.url} has format {number}, and this release reads formats up to {FORMAT}. Use the "
            "release that wrote it, or a later one."
        )
    return str(fleet)


def require_header(store: ObjectStore) -> None:
    """Raise OSError unless the store can be read and has its header, and ConfigurationError for another header.

    Without that, a folder whose disk is not mounted would be taken for a store in which no job has ever begun.
    """
    try:
        fleet_in(store)
    except FileNotFoundError:
        raise OSError(
            errno.EIO, f"the store {store.url} has no {HEADER}: its disk is not mounted, or it was emptied"
        ) from None


def require_usable(store: ObjectStore) -> None:
    """Raise OSError, or ConfigurationError for a store of a newer format or without conditional writes."""
    _require_conditional_writes(store)
    with suppress(FileNotFoundError):
        fleet_in(store)


def require_available(url: str) -> None:
    """Raise LogStoreUnavailable unless jobs can begin with the store at this URL, and ConfigurationError for another."""
    try:
        require_header(open_store(url))
    except OSError as error:
        raise LogStoreUnavailable(detail=f"{error.strerror or error}.", remedy=remedy_of(error)) from error


def _require_conditional_writes(store: ObjectStore) -> None:
    """Create an object twice: the second time has to fail."""
    name = f"probe/{secrets.token_hex(8)}"
    store.create(name, b"1")
    try:
        store.create(name, b"2")
    except FileExistsError:
        return
    finally:
        with suppress(OSError):
            store.delete([name])
    raise ConfigurationError(
        detail=f"--store {store.url} made the object {name} twice, so it has no conditional writes (If-None-Match), and two "
        "synchronisers could both write. Use a store that has them."
    )


class FolderObjects:
    """The objects of a store below one folder, by their names there."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        self._store, self._prefix, self.url = store, f"{folder}/", f"{store.url}/{folder}"

    def create(self, name: str, content: bytes) -> None:
        self._store.create(self._prefix + name, content)

    def put(self, name: str, content: bytes) -> None:
        self._store.put(self._prefix + name, content)

    def get(self, name: str) -> bytes:
        return self._store.get(self._prefix + name)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        listed = self._store.sizes(self._prefix + prefix)
        return {name.removeprefix(self._prefix): size for name, size in listed.items()}

    def delete(self, names: Iterable[str]) -> None:
        self._store.delete(self._prefix + name for name in names)


@contextmanager
def errors_of_option() -> Iterator[None]:
    """Raise InfrastructureError, which names the option ``--store``, where the store raises OSError."""
    try:
        yield
    except OSError as error:
        raise InfrastructureError(detail=f"--store: {error.strerror or error}.", remedy=remedy_of(error)) from error


def remedy_of(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            "Let the service read, write, list and delete there: in a folder as its user, in a bucket by credentials (for "
            "s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for gs:// GOOGLE_APPLICATION_CREDENTIALS, for az:// "
            "AZURE_STORAGE_ACCOUNT_KEY, with --pass-environment)."
        )
    if error.errno == errno.EROFS:
        return "Mount it writable, or give another store."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Make room there, or give another store."
    if error.errno in _NO_FOLDER:
        return "Give the path of a folder that exists or can be made."
    if error.errno == errno.EOPNOTSUPP:
        return "Give a folder of a file system with hard links, or a bucket."
    return (
        "Check the URL, the endpoint (AWS_ENDPOINT_URL for s3://, GOOGLE_BASE_URL for gs://, AZURE_STORAGE_ENDPOINT for "
        "az://), and that it can be reached from here."
    )


def _refuse_secrets(url: str) -> None:
    """Raise ConfigurationError, without the secret, for a URL with one: URLs are logged and shown."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(
            detail="--store is no URL. Give a path, or a URL with s3://, gs:// or az://."
        ) from error
    is_plain = not ("@" in parts.netloc or parts.query or parts.fragment)
    if _SCHEME.match(url) and (not is_plain or has_secret(url)):
        # a password with a slash is a part of the path
        shown = "" if "@" in parts.path else f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path} "
        raise ConfigurationError(
            detail=f"--store {shown}was given with a password, a key or parameters in the URL, where others can see them. "
            "Leave them out, and put credentials into the environment (such as AWS_SECRET_ACCESS_KEY)."
        )


class FolderStore:
    """A folder of this machine, or of a file server."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.url = folder, str(folder)

    def create(self, name: str, content: bytes) -> None:
        self._written(name, content, _link)

    def put(self, name: str, content: bytes) -> None:
        self._written(name, content, os.replace)

    def get(self, name: str) -> bytes:
        content: bytes = self._tried("get", name, (self._folder / name).read_bytes)
        return content

    def sizes(self, prefix: str) -> dict[str, int]:
        def walk() -> dict[str, int]:
            files = (path for path in (self._folder / prefix).rglob("*") if not path.name.startswith(_DRAFT))
            sizes = {}
            for path in files:
                with suppress(FileNotFoundError):
                    if path.is_file():
                        sizes[path.relative_to(self._folder).as_posix()] = path.stat().st_size
            return dict(sorted(sizes.items()))

        listed: dict[str, int] = self._tried("list", prefix, walk)
        return listed

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._tried("delete", name, (self._folder / name).unlink)

    def _written(self, name: str, content: bytes, move: Any) -> None:
        """Write a draft durably, then give it its name by ``move``, and make that durable."""
        path = self._folder / name
        draft = path.with_name(f"{_DRAFT}{secrets.token_hex(8)}")

        def write() -> None:
            _make_durably(path.parent)
            try:
                with draft.open("xb", buffering=0) as file:
                    rest = memoryview(content)
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(file.fileno())
                move(draft, path)
            finally:
                draft.unlink(missing_ok=True)
            _sync(path.parent)

        self._tried("write", name, write)

    def _tried(self, what: str, name: str, work: Any) -> Any:
        try:
            return work()
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            if what != "write":
                raise
            # no folder can be made there: it is not the object that is missing
            raise OSError(errno.ENOTDIR, f"the store {self.url} refuses to {what} {name}: {error.strerror}") from error
        except OSError as error:
            raise OSError(error.errno, f"the store {self.url} refuses to {what} {name}: {error.strerror}") from error


def _refuse_bad_endpoints() -> None:
    """Raise ConfigurationError for an endpoint with which the library would abort. Its value may have a password."""
    for name in ENDPOINTS:
        endpoint = os.environ.get(name)
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            shown = f" {endpoint!r}" if "@" not in endpoint else ""
            raise ConfigurationError(
                detail=f"{name}{shown} in the environment is no address of a server. Give one such as https://host:9000."
            )


class Bucket:
    """A bucket, or a folder in one, of S3, Google Cloud Storage or Azure."""

    def __init__(self, url: str) -> None:
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        _refuse_bad_endpoints()

        self._library, self._errors, self.url = obstore, BaseError, url
        seconds = {"timeout": REQUEST_TIMEOUT_S, "connect_timeout": CONNECT_TIMEOUT_S}
        options: Any = {name: timedelta(seconds=value) for name, value in seconds.items()}
        options["allow_http"] = os.environ.get(ALLOW_HTTP, "").lower() in (
            "1",
            "true",
        )  # these options replace the rest
        retries: Any = {"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=REQUEST_TIMEOUT_S)}
        try:
            self._store = from_url(url, client_options=options, retry_config=retries)
        except (BaseError, ValueError) as error:
            raise ConfigurationError(
                detail=f"--store {url} cannot be used: {str(error).splitlines()[0][:200]}. Complete the URL, or the store's "
                "settings in the environment."
            ) from error

    def create(self, name: str, content: bytes) -> None:
        self._tried("create", name, lambda: self._library.put(self._store, name, content, mode="create"))

    def put(self, name: str, content: bytes) -> None:
        self._tried("put", name, lambda: self._library.put(self._store, name, content))

    def get(self, name: str) -> bytes:
        return bytes(self._tried("get", name, lambda: self._library.get(self._store, name).bytes()))

    def sizes(self, prefix: str) -> dict[str, int]:
        def walk() -> dict[str, int]:
            listed = (entry for chunk in self._library.list(self._store, prefix) for entry in chunk)
            return dict(sorted((entry["path"], entry["size"]) for entry in listed))

        sizes: dict[str, int] = self._tried("list", prefix, walk)
        return sizes

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._tried("delete", name, lambda name=name: self._library.delete(self._store, name))

    def _tried(self, what: str, name: str, work: Any) -> Any:
        """Do the work. Errors have no cause: tracebacks, as in a job's crash.txt, would show the store's own text."""
        from obstore import exceptions

        try:
            return work()
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise OSError(errno.EIO, f"the store {self.url} has no such bucket (NoSuchBucket)") from None
            raise FileNotFoundError(errno.ENOENT, "No such object", f"{self.url}/{name}") from None
        except exceptions.AlreadyExistsError:
            raise FileExistsError(errno.EEXIST, "The object exists", f"{self.url}/{name}") from None
        except (NotImplementedError, exceptions.NotSupportedError):
            reason = "it is set up without conditional writes (such as AWS_CONDITIONAL_PUT=disabled in the environment)"
            raise OSError(errno.EINVAL, f"the store {self.url} refuses to {what} {name}: {reason}") from None
        except self._errors as error:
            code = _code_of(str(error))
            refused = isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError))
            refused |= code.startswith(("401", "403"))  # a server of tokens says it, or a proxy
            refused |= any(word in str(error).lower() for word in _NO_CREDENTIALS)
            number = errno.EACCES if refused else errno.EIO
            number = errno.ENOSPC if "Quota" in code or "507" in code or "Full" in code else number
            raise OSError(number, f"the store {self.url} refuses to {what} {name}: {code}") from None


def _code_of(text: str) -> str:
    """Return what a store answered, without the parts of its text that may have secrets."""
    status, code = _STATUS.search(text), _CODE.search(text)
    if "token request" in text:  # of a metadata server, which only machines of the cloud have
        return (
            f"it got no token with which to write ({status[1].strip() if status else 'no server of tokens answered'})"
        )
    if status or code:
        return ", ".join(match[1].strip() for match in (status, code) if match)
    if "builder error" in text:
        return f"its endpoint has no TLS, which needs {ALLOW_HTTP}=true in the environment"
    if "credential" in text.lower():
        return "there are no credentials for it"
    return "it did not answer in time" if "timed out" in text.lower() else "it cannot be reached"


def _link(draft: Path, path: Path) -> None:
    """Give the draft its name unless that exists. Raises OSError with EOPNOTSUPP where there are no hard links."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise OSError(errno.EOPNOTSUPP, "its file system makes no hard links, which conditional writes need") from error


def _make_durably(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_durably(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError as error:  # else it would be taken for an object that exists
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder)) from error
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
