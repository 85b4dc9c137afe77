"""A follower: a folder that is kept at the newest merged parameters of a job, from the updates that islands get.

    FOLDER/current ─▶ versions/000000000042-0c1d2e3f   the newest version, replaced by a rename: no reader sees half of one
    FOLDER/versions/000000000042-0c1d2e3f              a Hugging Face folder, or else safetensors and the specification
    FOLDER/.follow/fragment-0003-00000014              the parameters of a fragment at a version (``wire_format``)
    FOLDER/.follow/manifest.json                       the job, and version and digest of each fragment

A follower polls the service with the versions that it holds. The answer is one consistent Θ: each fragment at a published
version, all of the same moment. A fragment is used only if its parameters have the published digest; otherwise it is fetched
whole. Each one is on the disk, and then in the manifest, before the next is read: a follower that was killed continues from
there. The number of a version is the sum of its fragments' versions, so it rises by one with each merge.

Followers are readers of the service. The job does not know them, so none counts in a quorum or delays a merge.
``orchestrator.host.records`` defines the bytes; ``api.client.Client`` brings them.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from orchestrator.errors import (
    ConfigurationError,
    Conflict,
    DataError,
    InfrastructureError,
    NotFound,
    RequestError,
    UnfitWeights,
    disk_remedy,
)
from orchestrator.host import records
from orchestrator.host.records import HELD_CHARACTERS_MAX, UNKNOWN, FragmentUpdate
from orchestrator.models.huggingface import adapters
from orchestrator.models.huggingface import export as huggingface
from orchestrator.models.huggingface import origin as origins
from orchestrator.models.huggingface.origin import Origin
from orchestrator.parameters import tensors, wire_format
from orchestrator.parameters.tensors import Array
from orchestrator.parameters.wire_format import InvalidPayload
from orchestrator.specification.bounds import BYTES
from orchestrator.system.disk import LocalDisk

CURRENT, VERSIONS, OWN, MANIFEST = "current", "versions", ".follow", "manifest.json"
DISK = LocalDisk()
EVERY_S = 1.0
AWAY_MAX_S = 60.0
"""With ``once``: the longest time without an answer. Otherwise a follower waits for the service for any time."""
DAMAGED_MAX = 3
"""A fragment that does not have its digest so often in succession, although it came whole, never will."""


class Source(Protocol):
    """The calls of ``api.client.Client`` that a follower makes."""

    def updates(self, job: str, held: Iterable[int]) -> AbstractContextManager[Iterator[bytes]]: ...

    def specification(self, job: str) -> Any: ...

    def download_tokenizer(self, job: str, to: Path) -> None: ...

    def download_origin(self, job: str, to: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Followed:
    """A version that ``current`` now names. ``bytes_count`` is what arrived for it; ``ended``: it is the final one."""

    job: str
    number: int
    path: Path
    versions: tuple[int, ...]
    bytes_count: int
    ended: bool
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Held:
    version: int
    digest: str


@dataclass(slots=True)
class Manifest:
    """The record of what the folder holds: a fragment's file is in place before its row. ``ended``: the rows are final."""

    job: str
    specification: dict[str, Any]
    fragments: list[Held | None] = field(default_factory=list)
    ended: bool = False


class Replica:
    """The follower's part of the folder. One process has it at a time. Methods raise OSError if the disk fails."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.bytes_count = 0
        paths = {self._path(p, held.version) for p, held in enumerate(manifest.fragments) if held}
        for path in (folder / OWN).glob("fragment-*"):
            if path not in paths:  # left by a process that was killed
                path.unlink()

    @property
    def held(self) -> tuple[int, ...]:
        """The version of each fragment, as the service is asked for what is newer."""
        return tuple(UNKNOWN if held is None else held.version for held in self.manifest.fragments)

    @property
    def name(self) -> str | None:
        """The name of the version that the fragments are together: number and digest. None if one is missing."""
        digests = [held.digest for held in self.manifest.fragments if held]
        if not digests or UNKNOWN in self.held:
            return None
        return f"{sum(self.held):012d}-{blake2b(''.join(digests).encode(), digest_size=4).hexdigest()}"

    def take(self, content: Iterator[bytes]) -> bool:
        """Take an answer of the service; return whether it had anything. Raises DataError if a fragment is damaged.

        Fragments that came before an interruption are kept.
        """
        file = io.BufferedReader(_Counted(content, self._count))
        if not file.peek(1):
            return False
        job, ended, fragments = records.read_updates(file)
        if job != self.manifest.job:
            raise DataError(detail=f"The service sent parameters of job {job}, not of {self.manifest.job}.")
        count = 0
        for p, update in enumerate(fragments):
            count = p + 1
            if p == len(self.manifest.fragments):
                self.manifest.fragments.append(None)
            held = self.manifest.fragments[p]
            if held is None or (update.version, update.digest) != (held.version, held.digest):
                self._advance(p, held, update)
        del self.manifest.fragments[count:]
        self.manifest.ended = ended
        self._note()
        return True

    def arrays(self, p: int) -> dict[str, Array]:
        """Return the parameters of a fragment. Raises DataError, and forgets them, if they are not those that were held."""
        held = self.manifest.fragments[p]
        assert held is not None
        try:
            values = wire_format.decode(self._path(p, held.version).read_bytes())
        except (InvalidPayload, FileNotFoundError):
            values = {}
        if tensors.digest(values) != held.digest:
            self._forget(p)
            raise DataError(detail=f"Fragment {p} in {self.folder / OWN} is damaged, so it is fetched again.")
        return values

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all pieces."""
        shapes: dict[str, tuple[int, ...]] = {}
        for p, version in enumerate(self.held):
            shapes |= wire_format.unverified(self._path(p, version).read_bytes())[0].shapes()
        return shapes

    def _advance(self, p: int, held: Held | None, update: FragmentUpdate) -> None:
        if not update.payloads:  # the same version with another digest: it was replaced before it was announced
            self._forget(p)
            raise DataError(detail=f"Fragment {p} was published with another digest, so it is fetched again.")
        if update.since is None:
            (payload,) = update.payloads
            values = wire_format.decode(payload)
        elif held is None or held.version < update.since:
            raise DataError(detail=f"The updates of fragment {p} begin at version {update.since}, which is not held.")
        else:
            values = self.arrays(p)
            for payload in update.payloads[held.version - update.since :]:
                values = wire_format.parse(payload).added_to(values)
        if tensors.digest(values) != update.digest:
            self._forget(p)
            raise DataError(detail=f"Fragment {p} does not have the digest of version {update.version}.")
        DISK.replace(self._path(p, update.version), wire_format.encode(values))
        self.manifest.fragments[p] = Held(update.version, update.digest)
        self._note()
        if held is not None and held.version != update.version:
            self._path(p, held.version).unlink(missing_ok=True)

    def _forget(self, p: int) -> None:
        self.manifest.fragments[p] = None
        self.manifest.ended = False
        self._note()

    def _note(self) -> None:
        DISK.replace(self.folder / OWN / MANIFEST, json.dumps(asdict(self.manifest)).encode())

    def _path(self, p: int, version: int) -> Path:
        return self.folder / OWN / f"fragment-{p:04d}-{version:08d}"

    def _count(self, size: int) -> None:
        self.bytes_count += size


def follow(
    connect: Callable[[], Source],
    job: str,
    folder: Path,
    *,
    once: bool = False,
    dtype: str = "float32",
    keep: int = 2,
    every_s: float = EVERY_S,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Followed]:
    """Keep ``folder`` at the job's newest parameters; yield each version once ``current`` names it.

    Ends with the final version of an ended job, or with ``once`` after the newest. ``keep`` is the number of versions that
    stay. ``connect`` is called again after a failure; while the service is away or the job has no parameters, the follower
    waits and tells ``say``. Raises ConfigurationError for a folder of something else, NotFound for a deleted job.
    """
    if keep < 1:
        raise ConfigurationError(detail=f"keep is {keep}, but the current version stays. Set it to 1 or more.")
    source = connect()
    specification = source.specification(job)
    with _explained(folder), _opened(folder, specification.job, specification.specification) as replica:
        troubles: str | None = None
        answered_at, damaged = time.monotonic(), 0
        while True:
            if len(",".join(map(str, replica.held))) > HELD_CHARACTERS_MAX:
                count = len(replica.held)
                raise ConfigurationError(
                    detail=f"Job {replica.manifest.job} has {count} fragments, too many to name in a request, so it cannot "
                    "be followed further. Export it with `atoll export`."
                )
            try:
                with source.updates(replica.manifest.job, replica.held) as content:
                    replica.take(content)
                if (name := replica.name) is not None and name != _current(folder):
                    notes = _publish(source, replica, name, dtype, keep)
                    yield _followed(replica, name, notes)
                answered_at, damaged = time.monotonic(), 0
                if troubles:
                    say(f"{folder} is followed again")
                troubles = None
            except (InfrastructureError, Conflict) as error:
                if once and (isinstance(error, Conflict) or time.monotonic() - answered_at > AWAY_MAX_S):
                    raise
                troubles = _said(error, troubles, say)
                source = _again(connect, source)
            except DataError as error:
                if (damaged := damaged + 1) > DAMAGED_MAX:
                    raise
                troubles = _said(error, troubles, say)
            else:
                if replica.manifest.ended or once:
                    return
            time.sleep(every_s)


def write_for_transformers(
    source: Source,
    job: str,
    parameters: Path,
    draft: Path,
    spec: Mapping[str, Any],
    tokenizer: Path,
    **settings: Any,
) -> list[str]:
    """Write a Hugging Face folder and return notes. ``tokenizer`` is downloaded unless it is there."""
    if problem := huggingface.not_of_transformers(spec):
        raise problem
    notes: list[str] = []
    if spec["data"]["tokenizer"] != BYTES and not tokenizer.exists():
        try:
            source.download_tokenizer(job, tokenizer)
        except RequestError as error:
            tokenizer.unlink(missing_ok=True)
            notes.append(f"The export has no tokenizer: {error}")
    origin = origin_of(source, job, parameters.with_name("origin"), notes)
    return notes + huggingface.write(
        parameters, draft, spec, tokenizer if tokenizer.exists() else None, origin, **settings
    )


def origin_of(source: Source, job: str, path: Path, notes: list[str]) -> Origin | None:
    """Return what the service kept of the job's initial checkpoint, if it has one; add a note if that cannot be read."""
    try:
        source.download_origin(job, path)
        return origins.parsed(path.read_bytes(), "the service's record of the checkpoint")
    except NotFound:
        return None
    except RequestError as error:
        notes.append(f"The export has no settings of the job's initial checkpoint: {error}")
        return None


def _publish(source: Source, replica: Replica, name: str, dtype: str, keep: int) -> list[str]:
    """Write the version that the fragments are, and have ``current`` name it. Raises DataError if one is damaged."""
    folder, job, spec = replica.folder, replica.manifest.job, replica.manifest.specification
    work, target = folder / OWN / "draft", folder / VERSIONS / name
    shutil.rmtree(work, ignore_errors=True)
    (files := work / "files").mkdir(parents=True)
    parameters = work / "parameters"
    facts = {"job": job, "versions": ",".join(map(str, replica.held)), "spec": json.dumps(spec)}
    records.write_parameters(
        work, replica.shapes(), map(replica.arrays, range(len(replica.held))), facts, parameters.name
    )
    notes: list[str] = []
    try:
        if spec.get("trainable") is not None:
            notes += adapters.write(parameters, files, spec, origin_of(source, job, work / "origin", notes))
        else:
            tokenizer = folder / OWN / "tokenizer"
            notes += write_for_transformers(source, job, parameters, files, spec, tokenizer, dtype=dtype)
    except UnfitWeights as error:
        notes.append(f"{error.detail.rstrip('.')}, so versions are float32 safetensors with the job's specification.")
        parameters.rename(files / "model.safetensors")
        (files / "config.json").write_text(json.dumps({**facts, "spec": spec}, indent=1) + "\n")
    for path in files.iterdir():
        DISK.sync(path)
    target.parent.mkdir(exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)  # of a process that was killed before it named it
    files.rename(target)
    link = folder / OWN / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(VERSIONS, target.name))
    link.replace(folder / CURRENT)
    DISK.sync(folder)
    shutil.rmtree(work, ignore_errors=True)
    for old in sorted(path for path in target.parent.iterdir() if path != target)[: -(keep - 1) or None]:
        shutil.rmtree(old, ignore_errors=True)
    return notes


def _followed(replica: Replica, name: str, notes: list[str]) -> Followed:
    manifest, count = replica.manifest, replica.bytes_count
    replica.bytes_count = 0
    path, number = replica.folder / VERSIONS / name, sum(replica.held)
    return Followed(manifest.job, number, path, replica.held, count, manifest.ended, tuple(notes))


def _current(folder: Path) -> str | None:
    """Return the name of the version that ``current`` names, if that is there."""
    try:
        path = folder / os.readlink(folder / CURRENT)
    except OSError:
        return None
    return path.name if path.is_dir() else None


@contextmanager
def _opened(folder: Path, job: str, specification: dict[str, Any]) -> Iterator[Replica]:
    """Yield the replica in the folder, locked. Raises ConfigurationError if the folder is of anything else."""
    own = folder / OWN
    if not own.is_dir() and folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(
            detail=f"{folder} is not the folder of a follower, and not empty. Name another folder."
        )
    own.mkdir(parents=True, exist_ok=True)
    with open(own / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            detail = f"Another process follows a job in {folder}. End it, or name another folder."
            raise ConfigurationError(detail=detail) from error
        yield Replica(folder, _manifest(own / MANIFEST, job, specification))


def _manifest(path: Path, job: str, specification: dict[str, Any]) -> Manifest:
    """Return the manifest, or a new one. A damaged one holds nothing: its fragments are fetched again."""
    try:
        document = json.loads(path.read_bytes())
        rows = [None if row is None else Held(row["version"], row["digest"]) for row in document["fragments"]]
        manifest = Manifest(document["job"], specification, rows)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Manifest(job, specification)
    if manifest.job != job:
        detail = f"{path.parent.parent} follows job {manifest.job}, not {job}. Name another folder, or remove this one."
        raise ConfigurationError(detail=detail)
    return manifest


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn a failure of the folder's disk into one sentence."""
    try:
        yield
    except OSError as error:
        detail = f"{folder} cannot be written ({error.strerror or error}). {disk_remedy(error)}, then follow again."
        raise ConfigurationError(detail=f"{detail} It continues from what it holds.") from error


def _again(connect: Callable[[], Source], source: Source) -> Source:
    """Return a new connection: a service that was started again may have another address."""
    with suppress(InfrastructureError):
        return connect()
    return source


def _said(error: Exception, before: str | None, say: Callable[[str], None]) -> str:
    """Say once what the follower waits for."""
    if before is None:
        say(f"{error} The follower tries again until then.")
    return str(error)


class _Counted(io.RawIOBase):
    """The chunks of an answer as a file; ``count`` hears of their sizes."""

    def __init__(self, chunks: Iterator[bytes], count: Callable[[int], None]) -> None:
        self._chunks, self._count, self._rest = chunks, count, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (chunk := next(self._chunks, None)) is None:
                return 0
            self._count(len(chunk))
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
