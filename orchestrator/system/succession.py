"""What a store keeps so that another machine can take the place of a fleet's head, whose disk may be gone.

    STORE/heads/NNNN      the heads of the fleet, in order, each with its address; and the files of its home, sealed
    STORE/service/…       a log (``store_log``) with a copy of the service's database and token, sealed
    STORE/sealed-with     a digest of the key, which is in no store

    HOME/store.key        the key; another machine gets a copy of it with ``--store-key``
    HOME/store.head       a random name of this home, by which it recognises that it was the head itself
    HOME/store.service    the same of its service

**One head.** A head begins by creating the name that follows the newest head's. The one before finds that name, and ends.
**One service.** A service begins by claiming the log, as a synchroniser does: the one before cannot copy another word,
confirms nothing more, and ends. No clock and no lease is needed. A home that was succeeded by another one refuses to start.

The database is copied whole, compressed, after each transaction and before its caller goes on. Transactions that wait at the
same time share a copy. A server's database (PostgreSQL) is its own business, and is not copied.

Contents are sealed with AES-256-GCM, each for its own name. The addresses of heads are not: ``atoll join`` reads them
without a key.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import secrets
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import (
    ConfigurationError,
    Conflict,
    DataError,
    Fenced,
    LogStoreUnavailable,
)
from orchestrator.system import home_files
from orchestrator.system.disk import LocalDisk
from orchestrator.system.mirror import LogWriter
from orchestrator.system.object_store import FolderObjects, ObjectStore, errors_of_option, open_store, require_usable
from orchestrator.system.ports import Reach, reach
from orchestrator.system.store_log import (
    REQUESTS_MAX,
    Files,
    content_of,
    content_or_none,
    decode,
    log_name,
    read_files,
    take_over,
)

log = logging.getLogger(__name__)
HEADS, SERVICE, SEALED_WITH = "heads", "service", "sealed-with"
HEAD_ROLE, SERVICE_ROLE, KEY = "head", "service", "store.key"
STATE, TOKEN, GROUPS, CERTIFICATES = "cluster", "token", "groups.json", "certificates"
"""Of ``HOME/cluster`` (``runtime.clusterfile``, ``runtime.embedded``); a token is in the home itself as well."""
CERTIFICATE_FILES = ("ca.crt", "tls.crt", "tls.key")
HEAD_FILES = (TOKEN, GROUPS, *(f"{CERTIFICATES}/{name}" for name in CERTIFICATE_FILES))
DATABASE = "service.sqlite.zlib"
SCHEMA = 1
WATCH_S = 2.0
RETRY_S = 1.0
BUSY_S = 10.0
START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
NONCE_BYTES = 12
_KEY = re.compile(r"[0-9a-f]{64}")
_HEAD = re.compile(rf"{HEADS}/([0-9]{{8}})")
_ADDRESS = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")


# ── sealing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Seal:
    """Seals contents with a key. A content is sealed for its name, so that no object can stand in for another."""

    def __init__(self, key: str) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # late: `atoll --help` needs no cryptography

        self._cipher = AESGCM(bytes.fromhex(key))
        self.digest = hashlib.sha256(b"atoll store key " + key.encode()).hexdigest()

    def closed(self, name: str, content: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, content, name.encode())

    def opened(self, name: str, raw: bytes) -> bytes:
        """Raises DataError for anything else than what was sealed under this name."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError) as error:
            raise DataError(
                detail=f"{name} in the store is damaged, or was not sealed with this key. Restore it from a copy."
            ) from error


class SealedObjects(FolderObjects):
    """The objects of the service in a store, sealed."""

    def __init__(self, store: ObjectStore, seal: Seal) -> None:
        super().__init__(store, SERVICE)
        self._seal = seal

    def create(self, name: str, content: bytes) -> None:
        super().create(name, self._seal.closed(self._prefix + name, content))

    def put(self, name: str, content: bytes) -> None:
        super().put(name, self._seal.closed(self._prefix + name, content))

    def get(self, name: str) -> bytes:
        return self._seal.opened(self._prefix + name, super().get(name))


@dataclass(frozen=True, slots=True)
class FleetStore:
    """A fleet's store, with the key that one home has to it."""

    store: ObjectStore
    seal: Seal
    home: Path

    def own_name(self, role: str) -> str | None:
        """Return the name of this home as the fleet's head or service, None if it was never that with this store."""
        try:
            document = json.loads(home_files.read(self.home / f"store.{role}"))
            return str(document["name"]) if document["url"] == self.store.url else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def note_name(self, role: str, name: str) -> None:
        document = {"name": name, "url": self.store.url}
        home_files.replace(self.home / f"store.{role}", json.dumps(document) + "\n")


def opened(url: str, home: Path, key_file: Path | None, say: Callable[[str], None]) -> FleetStore:
    """Return the store with the key of its fleet, which is in the home afterwards. ``key_file`` is a file with it.

    A store that has no key yet gets one. Raises ConfigurationError for a store or a key that cannot be used,
    InfrastructureError if the store cannot be used now.
    """
    store = open_store(url)
    key = _key_of(home, key_file)
    with errors_of_option():
        require_usable(store)
        digest = content_or_none(store, SEALED_WITH)
        if key is None:
            key = _new_key(home, store, digest)
            say(f"Keep a copy of {home / KEY} elsewhere: another machine needs it to take over from the store.")
        fleet = FleetStore(store, Seal(key), home)
        if digest is None and any(fleet.own_name(role) for role in (HEAD_ROLE, SERVICE_ROLE)):
            raise ConfigurationError(
                detail=f"--store {store.url} has nothing of this fleet, though {home} has used it: its disk is not mounted, "
                "or it was emptied. Mount it, or give another store."
            )
        with suppress(FileExistsError):
            store.create(SEALED_WITH, fleet.seal.digest.encode())
        _refuse_other_key(fleet.seal, store, f"--store-key {key_file}" if key_file else str(home / KEY))
    if _text_of(home / KEY) != key:
        home_files.replace(home / KEY, key + "\n")
    return fleet


def seal_in(file: Path, store: ObjectStore) -> Seal:
    """Return the seal of the key in this file. Raises ConfigurationError unless it is the store's, OSError."""
    seal = Seal(_key_in(file))
    _refuse_other_key(seal, store, f"--store-key {file}")
    return seal


def _refuse_other_key(seal: Seal, store: ObjectStore, where: str) -> None:
    if content_or_none(store, SEALED_WITH) != seal.digest.encode():
        raise ConfigurationError(
            detail=f"{where} is not the key of --store {store.url}, which belongs to another fleet. Give the {KEY} of a "
            "home of that fleet with --store-key, or another folder of the store."
        )


def _key_in(file: Path) -> str:
    home_files.refuse_unfit(file, "--store-key", f"Copy the {KEY} of a home of the fleet there.")
    key = _text_of(file)
    if key is None or not _KEY.fullmatch(key):
        raise ConfigurationError(
            detail=f"--store-key {file} has no key of 64 hexadecimal digits. Give a copy of {KEY}."
        )
    return key


def _key_of(home: Path, file: Path | None) -> str | None:
    own = _text_of(home / KEY)
    if file is None:
        if own is not None and not _KEY.fullmatch(own):
            raise ConfigurationError(detail=f"{home / KEY} is damaged. Replace it by a copy of the key, or remove it.")
        return own
    key = _key_in(file)
    if own is not None and own != key:
        raise ConfigurationError(
            detail=f"--store-key {file} is not the key in {home / KEY}, which this home uses. Leave the option out, or "
            "give another home."
        )
    return key


def _new_key(home: Path, store: ObjectStore, digest: bytes | None) -> str:
    if digest is not None:
        raise ConfigurationError(
            detail=f"--store {store.url} is sealed, and {home} has no key to it. Give a copy of the {KEY} of a home of its "
            "fleet with --store-key FILE."
        )
    key = secrets.token_hex(32)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    home_files.replace(home / KEY, key + "\n")
    return key


def _text_of(path: Path) -> str | None:
    try:
        return home_files.read(path).strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return ""


# ── heads ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Head:
    """A head of the fleet. ``address`` is empty for one that no other machine can reach.

    ``cluster`` stays the same while a head starts again from its own disk. Nodes of another cluster have to join anew.
    """

    number: int
    address: str
    cluster: str
    home: str
    sealed_files: bytes

    @property
    def object_name(self) -> str:
        return _head_name(self.number)

    def described(self, store: ObjectStore) -> str:
        return f"{self.address or 'another machine'} (head {self.number} in {store.url})"

    def encoded(self) -> bytes:
        document = {
            "schema": SCHEMA,
            "address": self.address,
            "cluster": self.cluster,
            "home": self.home,
            "files": base64.b64encode(self.sealed_files).decode(),
        }
        return json.dumps(document).encode()


def newest_head(store: ObjectStore, after: int = 0) -> Head | None:
    """Return the fleet's head, None if there is none after this number. Raises OSError, DataError, ConfigurationError.

    The listing is only where the search begins: the newest head is the one whose successor does not exist.
    """
    listed = (match for name in store.sizes(HEADS) if (match := _HEAD.fullmatch(name))) if not after else ()
    number = max((int(match[1]) for match in listed), default=after)
    raw = content_or_none(store, _head_name(number)) if number > after else None
    while (later := content_or_none(store, _head_name(number + 1))) is not None:
        number, raw = number + 1, later
    return _head_in(store, number, raw) if raw is not None else None


def _head_name(number: int) -> str:
    return f"{HEADS}/{number:08d}"


def _head_in(store: ObjectStore, number: int, raw: bytes) -> Head:
    try:
        document = json.loads(raw)
        if document["schema"] > SCHEMA:
            raise ConfigurationError(
                detail=f"{_head_name(number)} in {store.url} has format {document['schema']}, and this release reads "
                f"formats up to {SCHEMA}. Use the release that wrote it, or a later one."
            )
        texts = [document[name] for name in ("address", "cluster", "home", "files")]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("its fields are texts")
        address, cluster, home, files = texts
        if address and not _ADDRESS.fullmatch(address):
            raise ValueError(f"{address!r} is no address")
        return Head(number, address, cluster, home, base64.b64decode(files, validate=True))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            detail=f"{_head_name(number)} in {store.url} is damaged ({error!r}). Restore it from a copy."
        ) from error


def _heads_before(store: ObjectStore, head: Head) -> Iterator[Head]:
    for number in range(1, head.number):
        if (raw := content_or_none(store, _head_name(number))) is not None:
            yield _head_in(store, number, raw)


def _files_for_successor(fleet: FleetStore, before: Head) -> dict[str, str]:
    """Return the files of the head before, which was another home's. Raises Conflict if it has succeeded this home."""
    files: dict[str, str] = json.loads(fleet.seal.opened(before.object_name, before.sealed_files))
    own = fleet.own_name(HEAD_ROLE)
    has_led = own is not None and any(head.home == own for head in _heads_before(fleet.store, before))
    if has_led or _text_of(fleet.home / STATE / TOKEN) not in (None, files.get(TOKEN)):
        raise Conflict(
            detail=f"The head of this fleet is {before.described(fleet.store)}, and the home {fleet.home} is not that of a "
            "new machine.",
            remedy="Let it be a node (`atoll join`). To make this machine the head again, give an empty --home.",
        )
    return files


def prepare_to_lead(fleet: FleetStore, *, take_over: bool = False) -> Head | None:
    """Give a new home the files of the head before, and return that. None if this home was the head itself, or the first.

    Raises Conflict if another head has succeeded this home, or still answers at its address.
    """
    with errors_of_option():
        before, own = newest_head(fleet.store), fleet.own_name(HEAD_ROLE)
        if before is None or before.home == own:
            return None
        files = _files_for_successor(fleet, before)
        if before.address and not take_over and _answers(before.address):
            raise Conflict(
                detail=f"The head of this fleet, {before.described(fleet.store)}, still answers.",
                remedy="Stop it first, or end it from here with --take-over.",
            )
    for name in HEAD_FILES:
        if name in files:
            path = fleet.home / STATE / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            home_files.replace(path, files[name])
    return before


def announce(fleet: FleetStore, address: str, cluster: str, certificates: Path | None = None) -> Head:
    """Become the fleet's head, with the files of this home. Raises Conflict if another one was faster."""
    with errors_of_option():
        before, own = newest_head(fleet.store), fleet.own_name(HEAD_ROLE) or secrets.token_hex(8)
        if before is not None and before.home != own:
            _files_for_successor(fleet, before)
        number = before.number + 1 if before is not None else 1
        sealed = fleet.seal.closed(_head_name(number), json.dumps(_files_of(fleet.home, certificates)).encode())
        head = Head(number, address, cluster, own, sealed)
        fleet.note_name(HEAD_ROLE, own)  # first: it may remain unknown whether the object was made
        try:
            fleet.store.create(head.object_name, head.encoded())
        except FileExistsError:
            if content_or_none(fleet.store, head.object_name) != head.encoded():  # else an answer was lost
                raise Conflict(
                    detail=f"Another machine became head {number} of {fleet.store.url} at the same time.",
                    remedy="Look which one it is, and end this one.",
                ) from None
    return head


def _files_of(home: Path, certificates: Path | None) -> dict[str, str]:
    state = home / STATE
    folders = {name: (certificates or state / CERTIFICATES) / name for name in CERTIFICATE_FILES}
    places = {TOKEN: state / TOKEN, GROUPS: state / GROUPS, **{f"{CERTIFICATES}/{n}": p for n, p in folders.items()}}
    return {name: text for name, path in places.items() if (text := _text_of(path))}


def refuse_succeeded(store: ObjectStore, head: Head) -> None:
    """Raise Fenced if another head has begun. A store that does not answer says nothing."""
    try:
        later = newest_head(store, after=head.number)
    except (OSError, DataError) as error:
        log.debug("the store does not say whether there is another head: %s", error)
        return
    if later is not None:
        raise Fenced(
            detail=f"{later.address or 'Another machine'} is the fleet's head now (head {later.number} in {store.url}).",
            remedy="This one ends.",
        )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return reach(host.strip("[]"), int(port)) is Reach.TAKEN


# ── the service ───────────────────────────────────────────────────────────────────────────────────────────────────────


class ServiceCopy:
    """The copy of one service's database and token in a store, which this process alone may change from now on.

    ``database`` is the file of an SQLite database, None for one on a server. ``on_fenced`` is called once another service
    has claimed the copy.
    """

    def __init__(
        self,
        fleet: FleetStore,
        database: Path | None,
        on_fenced: Callable[[], None],
        adapt: Callable[[sqlite3.Connection], None] = lambda _: None,
    ) -> None:
        """Claim the copy, and give a home without a database that of the service before.

        ``is_new_home``: the service before was another home's. ``adapt`` changes its database for this one.

        Raises Conflict if another home's service has succeeded this one's, InfrastructureError, DataError.
        """
        self._objects, self._database = SealedObjects(fleet.store, fleet.seal), database
        self._token, self.url = fleet.home / TOKEN, fleet.store.url
        self._readers = ThreadPoolExecutor(REQUESTS_MAX, "service-copy")
        self._changed = threading.Condition()
        self._wanted = self._copied = 0
        self.trouble, self._is_closing = "", False
        self.fence: Fenced | None = None
        self._on_fenced, self._adapt = on_fenced, adapt
        self._digests: dict[str, bytes] = {}
        with errors_of_option():
            self.is_new_home, self._writer = self._claimed(fleet)
        self._thread = threading.Thread(target=self._run, name="service-copy", daemon=True)

    def _claimed(self, fleet: FleetStore) -> tuple[bool, LogWriter]:
        """Return whether another home's service had the copy before, and what writes it from now on."""
        own = fleet.own_name(SERVICE_ROLE)
        files = read_files(self._objects, self._readers)
        before = self._writer_of(files.claims)
        is_own = not before or (own is not None and before.startswith(own))
        has_database = self._database is not None and os.path.lexists(self._database)
        has_served = own is not None and any(self._writer_of([claim]).startswith(own) for claim in files.claims)
        if not is_own and (has_served or has_database):
            raise Conflict(
                detail=f"Another machine's service has taken over from that of {fleet.home} (segment {files.claims[-1]} in "
                f"{self._objects.url}). Its jobs and tokens are newer.",
                remedy="Leave this one stopped. To make this machine the service again, give an empty --home.",
            )
        name = own or secrets.token_hex(8)
        fleet.note_name(SERVICE_ROLE, name)  # first: it may remain unknown whether the claim was made
        writer = f"{name}{secrets.token_hex(8)}"
        files = take_over(self._objects, writer, self._readers)
        if self._writer_of(files.claims[:-1]) != before:
            raise Conflict(
                detail=f"Another service claimed {self._objects.url} at the same time.", remedy="End one of the two."
            )
        if before and not has_database:
            self._restore(files)
        background = ThreadPoolExecutor(1, "service-bases").submit
        return not is_own, LogWriter(self._objects, files, writer, self._readers, background)

    def _writer_of(self, claims: Sequence[int]) -> str:
        """Return who claimed the log last; empty if it has not begun."""
        if not claims:
            return ""
        name = log_name(claims[-1])
        return decode(name, self._objects.get(name)).writer

    def _restore(self, files: Files) -> None:
        if TOKEN in files.files and not self._token.exists():
            home_files.replace(self._token, content_of(files, TOKEN, self._objects, self._readers).decode())
        if DATABASE in files.files and self._database is not None:
            image = zlib.decompress(content_of(files, DATABASE, self._objects, self._readers))
            with closing(sqlite3.connect(":memory:")) as connection:
                connection.deserialize(image[:18] + b"\1\1" + image[20:])  # no WAL: in memory there is none
                self._adapt(connection)
                connection.commit()
                LocalDisk().replace(self._database, connection.serialize())
            log.warning("%s is restored from the copy in %s", self._database, self.url)

    def start(self) -> None:
        """Copy what there is, and begin to copy in the background. Raises LogStoreUnavailable."""
        self._thread.start()
        self.wait(START_TIMEOUT_S)

    def wait(self, timeout_s: float) -> None:
        """Return once all that is committed now is in the store. Raises LogStoreUnavailable."""
        give_up_at = time.monotonic() + timeout_s
        with self._changed:
            self._wanted += 1
            wanted = self._wanted
            self._changed.notify_all()
            while self._copied < wanted:
                if self.fence is not None:
                    raise LogStoreUnavailable(detail=str(self.fence))
                left_s = give_up_at - time.monotonic()
                if left_s <= 0.0:
                    waited = f"the store {self.url} has not answered for {timeout_s:.0f} s."
                    raise LogStoreUnavailable(detail=self.trouble or waited)
                self._changed.wait(left_s)

    def close(self) -> None:
        """Copy what is not copied yet, if the store takes it within a few seconds, and stop."""
        with suppress(LogStoreUnavailable):
            if self._thread.is_alive():
                self.wait(CLOSE_TIMEOUT_S)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._copied == self._wanted and not self._is_closing:
                    self._changed.wait(WATCH_S)
                if self._is_closing:
                    return
                wanted = self._wanted
            try:
                if self._copied < wanted:
                    self._copy()
                else:
                    self._writer.refuse_fenced()
                trouble = ""
            except Fenced as error:
                with self._changed:
                    self.fence = error
                    self._changed.notify_all()
                self._on_fenced()
                return
            except (OSError, sqlite3.Error, DataError) as error:
                trouble = f"{getattr(error, 'strerror', None) or error}."
            if trouble != self.trouble:
                log.warning("the copy of the service in %s: %s", self.url, trouble or "the store takes it again")
            with self._changed:
                self.trouble = trouble
                if not trouble:
                    self._copied = wanted
                    self._changed.notify_all()
                else:
                    self._changed.wait(RETRY_S)

    def _copy(self) -> None:
        self._writer.flush()  # what an attempt before has noted
        token = _text_of(self._token)
        contents = {TOKEN: token.encode()} if token else {}
        if self._database is not None:
            contents[DATABASE] = image_of(self._database)
        for name, content in contents.items():
            digest = hashlib.sha256(content).digest()
            if self._digests.get(name) != digest:
                self._writer.note("write", name, self._writer.content_of([content]))
                self._digests[name] = digest
        self._writer.flush()


def image_of(database: Path) -> bytes:
    """Return the whole database as one transaction left it, compressed."""
    with closing(sqlite3.connect(database, timeout=BUSY_S)) as connection:
        return zlib.compress(connection.serialize(), level=1)
