"""What the two ends of a stream say to each other: one request, one reply, each with a fixed head.

    request   magic 4 · start 8 · size 8 · epoch 8 · lengths of job, island, payload 3×1 · mac 32 · the three names
    reply     magic 4 · status 1 · checksum 4 · size 8 · the range's bytes, or the reason in UTF-8

Numbers are big-endian. Nothing that a peer announces is allocated before it is known to be within its limit: names are at
most 255 bytes, a reason 1,000, a range what its reader has asked for.

Tickets: where a payload is, what it is, and the credential by which one island may pull it.

A credential is valid for one payload, island, epoch and job: an HMAC-SHA256 over the four names under a secret that the
job's servers share. It says nothing of which bytes: those the ticket's checksum names, so that a server that took the place
of another is as good as the first. Under TLS the server also demands that the island is the subject of the client's
certificate.

Tickets travel by the job's authenticated calls. They are plain data, and their text hides the credential.

Checksums of a payload: crc32c of each range, and of all of them one composite.

The composite is the crc32c of the ranges' own checksums, as object stores compute it for uploads in parts: whoever has
verified the ranges, in any order and from several servers, has verified the whole without reading it a second time.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from crc32c import crc32c

from orchestrator.channel.stream import Stream
from orchestrator.errors import TransferRefused

MIB = 1 << 20
RANGE_BYTES_MIN = 4 * MIB
RANGE_BYTES_MAX = 16 * MIB
RANGES_WANTED = 64
"""Enough for eight streams of which one is slow; beyond it ranges grow."""


def range_bytes_of(size: int) -> int:
    """The size of a range in a payload of this size, a multiple of 1 MiB."""
    return min(RANGE_BYTES_MAX, max(RANGE_BYTES_MIN, size // RANGES_WANTED // MIB * MIB))


def checksum(content: memoryview, before: int = 0) -> int:
    """The crc32c of these bytes, after those that have the checksum ``before``."""
    return crc32c(content, before)


def range_checksums(content: memoryview, range_bytes: int) -> tuple[int, ...]:
    """Of each range in order; an empty payload has one empty range."""
    return tuple(checksum(content[at : at + range_bytes]) for at in range(0, max(1, len(content)), range_bytes))


def composite(checksums: Sequence[int]) -> int:
    return crc32c(struct.pack(f"!{len(checksums)}I", *checksums))


EXPRESS_BYTES = 64 << 10
"""Payloads up to this size go ahead of larger ones: on connections of their own, and past the cap."""
SHARD = "shard"
"""The subject of the process that holds a job's fragments. No island is called so: theirs have a colon."""
NAME_BYTES_MAX = 255
MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Credential:
    """``island`` is who may pull; ``epoch`` is that of the server that issued it."""

    job: str
    epoch: int
    island: str
    payload: str
    mac: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ticket:
    """All that ``ChannelClient.pull`` needs. ``addresses`` are tried in turn; ``local`` is a name on the server's machine.

    ``checksum`` is the composite of ranges of ``range_bytes``. ``tls`` says what the server speaks.
    """

    addresses: tuple[Address, ...]
    payload: str
    size: int
    range_bytes: int
    checksum: int
    credential: Credential
    tls: bool
    local: str | None = None

    def also_at(self, other: Ticket) -> Ticket:
        """The same payload at the addresses of both. Raises ValueError if they are not of the same bytes."""
        if (self.size, self.range_bytes, self.checksum) != (other.size, other.range_bytes, other.checksum):
            raise ValueError(f"{self.payload} and {other.payload} are different bytes")
        if self.credential != other.credential or self.tls != other.tls:
            raise ValueError(f"the tickets of {self.payload} are not of one job, epoch and island")
        return replace(self, addresses=tuple(dict.fromkeys((*self.addresses, *other.addresses))))


def issue(secret: bytes, *, job: str, epoch: int, island: str, payload: str) -> Credential:
    """A credential for one island and payload."""
    return Credential(job, epoch, island, payload, _mac(secret, job, epoch, island, payload))


def require_valid(credential: Credential, secret: bytes, *, job: str, epoch: int, subject: str | None) -> None:
    """Raise TransferRefused unless the credential is of this job and epoch, of the subject's island, and genuine.

    ``subject`` is None on connections that prove none.
    """
    expected = _mac(secret, credential.job, credential.epoch, credential.island, credential.payload)
    if credential.job != job:
        raise _refused(f"it is of job {credential.job}, and this is {job}.")
    if not hmac.compare_digest(expected, credential.mac):
        raise _refused("it was not issued by a server of this job.")
    if credential.epoch != epoch:
        raise _refused(f"it is of epoch {credential.epoch}, and the server's is {epoch}.")
    if subject is not None and credential.island != subject:
        raise _refused(f"it was issued to {credential.island}, and {subject} shows it.")


def _refused(detail: str) -> TransferRefused:
    return TransferRefused(detail=f"The ticket is not valid: {detail}", remedy="Ask for a new one.")


def _mac(secret: bytes, job: str, epoch: int, island: str, payload: str) -> bytes:
    names = [name.encode() for name in (job, str(epoch), island, payload)]
    return hmac.digest(secret, b"".join(len(name).to_bytes(4, "big") + name for name in names), "sha256")


MAGIC = b"aTc1"
REASON_BYTES_MAX = 1000
_REQUEST = struct.Struct(f"!4sQQQBBB{MAC_BYTES}s")
_REPLY = struct.Struct("!4sBIQ")


class Status(IntEnum):
    CONTENT = 0
    REFUSED = 1
    WITHDRAWN = 2


class NotOfThisProtocol(ConnectionError):
    """The peer speaks something else; the connection is of no more use."""


@dataclass(frozen=True, slots=True)
class Request:
    """One range of the payload that the credential names."""

    credential: Credential
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Reply:
    """``checksum`` is that of the ``size`` bytes that follow."""

    status: Status
    checksum: int
    size: int


def names_fit(*names: str) -> bool:
    return all(len(name.encode()) <= NAME_BYTES_MAX for name in names)


def send_request(stream: Stream, request: Request) -> None:
    credential = request.credential
    names = [name.encode() for name in (credential.job, credential.island, credential.payload)]
    lengths = [len(name) for name in names]
    head = _REQUEST.pack(MAGIC, request.start, request.size, credential.epoch, *lengths, credential.mac)
    stream.send(memoryview(head + b"".join(names)))


def receive_request(stream: Stream) -> Request:
    """Wait for the next request. Raises NotOfThisProtocol if what comes is none."""
    magic, start, size, epoch, *lengths, mac = _REQUEST.unpack(_received(stream, _REQUEST.size))
    if magic != MAGIC:
        raise NotOfThisProtocol("the peer's first bytes are no request")
    names = _received(stream, sum(lengths))
    job_end, island_end = lengths[0], lengths[0] + lengths[1]
    try:
        job, island, payload = (
            part.decode() for part in (names[:job_end], names[job_end:island_end], names[island_end:])
        )
    except UnicodeDecodeError as error:
        raise NotOfThisProtocol("a name in a request is no text") from error
    return Request(Credential(job, epoch, island, payload, mac), start, size)


def send_head(stream: Stream, reply: Reply) -> None:
    stream.send(memoryview(_REPLY.pack(MAGIC, reply.status, reply.checksum, reply.size)))


def send_reason(stream: Stream, status: Status, reason: str) -> None:
    text = reason.encode()[:REASON_BYTES_MAX]
    stream.send(memoryview(_REPLY.pack(MAGIC, status, 0, len(text)) + text))


def receive_head(stream: Stream) -> Reply:
    magic, status, checksum, size = _REPLY.unpack(_received(stream, _REPLY.size))
    if magic != MAGIC or status not in set(Status):
        raise NotOfThisProtocol("the server's bytes are no reply")
    return Reply(Status(status), checksum, size)


def receive_reason(stream: Stream, reply: Reply) -> str:
    if reply.size > REASON_BYTES_MAX:
        raise NotOfThisProtocol(f"a reason of {reply.size:,} bytes")
    return _received(stream, reply.size).decode(errors="replace")


def _received(stream: Stream, size: int) -> bytes:
    content = bytearray(size)
    stream.receive(memoryview(content))
    return bytes(content)
