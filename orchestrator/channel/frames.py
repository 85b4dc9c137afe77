"""What the two ends of a channel exchange: tickets, requests and replies, and the ranges of a payload with their checksums.

    request   magic 4 · start 8 · size 8 · epoch 8 · lengths of job, island, payload 3×1 · mac 32 · the three names
    reply     magic 4 · status 1 · checksum 4 · size 8 · the range's bytes, or the reason in UTF-8

Numbers are big-endian. A size that a peer announces is checked against its limit before memory is allocated: a name has at
most 255 bytes, a reason 1,000, a range as many as its reader has requested.

A ticket says where a payload is and what it is, and holds the credential by which one island may pull it. Tickets travel in
the job's authenticated calls. They are plain data, and their ``repr`` hides the credential.

A credential is valid for one payload, island, epoch and job. It is an HMAC-SHA256 over the four names, with a secret that
the job's servers share. It does not cover the content; the ticket's checksum does. So a server that replaces another can
serve the same ticket. Under TLS the server also requires that the island is the subject of the client's certificate.

A payload has a crc32c for each range, and one composite: the crc32c of the ranges' checksums, as object stores compute it
for multipart uploads. A client that has verified the ranges, in any order and from several servers, need not read the whole
again.
"""

from __future__ import annotations

import hmac
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from crc32c import crc32c

from orchestrator.channel.stream import Stream
from orchestrator.errors import PayloadDamaged, TransferRefused

MIB = 1 << 20
RANGE_BYTES_MIN = 4 * MIB
RANGE_BYTES_MAX = 16 * MIB
RANGES_WANTED = 64
"""Enough for eight streams if one of them is slow. Larger payloads have larger ranges instead of more."""
EXPRESS_BYTES = 64 << 10
"""Payloads up to this size overtake larger ones: they have connections of their own and are exempt from the cap."""
SHARD = "shard"
"""The subject of the process that holds a job's fragments. No island has this name: theirs contain a colon."""
NAME_BYTES_MAX = 255
MAC_BYTES = 32
MAGIC = b"aTc1"
REASON_BYTES_MAX = 1000
_REQUEST = struct.Struct(f"!4sQQQBBB{MAC_BYTES}s")
_REPLY = struct.Struct("!4sBIQ")


def range_bytes_of(size: int) -> int:
    """Return the size of the ranges of a payload with ``size`` bytes, a multiple of 1 MiB."""
    return min(RANGE_BYTES_MAX, max(RANGE_BYTES_MIN, size // RANGES_WANTED // MIB * MIB))


def checksum(content: memoryview, before: int = 0) -> int:
    """Return the crc32c of these bytes, continued from the checksum ``before`` of the bytes that precede them."""
    return crc32c(content, before)


def range_checksums(content: memoryview, range_bytes: int) -> tuple[int, ...]:
    """Return the checksum of each range, in order. An empty payload has one empty range."""
    return tuple(checksum(content[at : at + range_bytes]) for at in range(0, max(1, len(content)), range_bytes))


def composite(checksums: Sequence[int]) -> int:
    return crc32c(struct.pack(f"!{len(checksums)}I", *checksums))


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Credential:
    """``island`` may pull the payload; ``epoch`` is that of the server that issued the credential."""

    job: str
    epoch: int
    island: str
    payload: str
    mac: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Everything that ``ChannelClient.pull`` needs.

    ``addresses`` are tried in turn. ``local`` is the server's name on its own machine. ``checksum`` is the composite of
    ranges of ``range_bytes``. ``tls`` says whether the server uses TLS.
    """

    addresses: tuple[Address, ...]
    payload: str
    size: int
    range_bytes: int
    checksum: int
    credential: Credential
    tls: bool
    local: str | None = None


def issue(secret: bytes, *, job: str, epoch: int, island: str, payload: str) -> Credential:
    """Return a credential for one island and payload."""
    return Credential(job, epoch, island, payload, _mac(secret, job, epoch, island, payload))


def require_valid(credential: Credential, secret: bytes, *, job: str, epoch: int, subject: str | None) -> None:
    """Raise TransferRefused unless the credential is genuine and issued for this job, epoch and the subject's island.

    ``subject`` is None on connections without a client certificate.
    """
    expected = _mac(secret, credential.job, credential.epoch, credential.island, credential.payload)
    if credential.job != job:
        raise _refused(f"it is for job {credential.job}, but this is job {job}.")
    if not hmac.compare_digest(expected, credential.mac):
        raise _refused("it was not issued by a server of this job.")
    if credential.epoch != epoch:
        raise _refused(f"it is for epoch {credential.epoch}, but the server is in epoch {epoch}.")
    if subject is not None and credential.island != subject:
        raise _refused(f"it was issued to {credential.island}, but {subject} presented it.")


def _refused(detail: str) -> TransferRefused:
    return TransferRefused(detail=f"The ticket is not valid: {detail}", remedy="Request a new one.")


def _mac(secret: bytes, job: str, epoch: int, island: str, payload: str) -> bytes:
    names = [name.encode() for name in (job, str(epoch), island, payload)]
    return hmac.digest(secret, b"".join(len(name).to_bytes(4, "big") + name for name in names), "sha256")


class Status(IntEnum):
    CONTENT = 0
    REFUSED = 1
    WITHDRAWN = 2


class NotOfThisProtocol(ConnectionError):
    """The peer does not speak this protocol, so the connection must be closed."""


@dataclass(frozen=True, slots=True)
class Request:
    """Asks for one range of the payload that the credential names."""

    credential: Credential
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The head of a reply. ``checksum`` is that of the ``size`` bytes that follow."""

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
    """Wait for the next request. Raises NotOfThisProtocol if the peer sends anything else."""
    magic, start, size, epoch, *lengths, mac = _REQUEST.unpack(_received(stream, _REQUEST.size))
    if magic != MAGIC:
        raise NotOfThisProtocol("the peer's first bytes are not a request")
    names = _received(stream, sum(lengths))
    job_end, island_end = lengths[0], lengths[0] + lengths[1]
    try:
        job, island, payload = (
            part.decode() for part in (names[:job_end], names[job_end:island_end], names[island_end:])
        )
    except UnicodeDecodeError as error:
        raise NotOfThisProtocol("a name in a request is not UTF-8") from error
    return Request(Credential(job, epoch, island, payload, mac), start, size)


def send_head(stream: Stream, reply: Reply) -> None:
    stream.send(memoryview(_REPLY.pack(MAGIC, reply.status, reply.checksum, reply.size)))


def send_reason(stream: Stream, status: Status, reason: str) -> None:
    text = reason.encode()[:REASON_BYTES_MAX]
    stream.send(memoryview(_REPLY.pack(MAGIC, status, 0, len(text)) + text))


def receive_head(stream: Stream) -> Reply:
    magic, status, checksum, size = _REPLY.unpack(_received(stream, _REPLY.size))
    if magic != MAGIC or status not in set(Status):
        raise NotOfThisProtocol("the server's bytes are not a reply")
    return Reply(Status(status), checksum, size)


def receive_reason(stream: Stream, reply: Reply) -> str:
    if reply.size > REASON_BYTES_MAX:
        raise NotOfThisProtocol(f"the reply announces a reason of {reply.size:,} bytes")
    return _received(stream, reply.size).decode(errors="replace")


def _received(stream: Stream, size: int) -> bytes:
    content = bytearray(size)
    stream.receive(memoryview(content))
    return bytes(content)


class Reception:
    """The bytes of one payload as they arrive. Thread-safe.

    ``into`` receives the bytes; without it a buffer is allocated. Raises ValueError if its size is not the payload's.
    """

    def __init__(self, ticket: Ticket, into: memoryview | None = None) -> None:
        content = np.empty(ticket.size, np.uint8).data if into is None else into.cast("B")
        if len(content) != ticket.size or content.readonly:
            raise ValueError(f"{ticket.payload} has {ticket.size:,} bytes, but the buffer has {len(content):,}")
        self.content = content
        self._ticket = ticket
        self._lock = threading.Lock()
        self._checksums: dict[int, int] = {}
        self._missing = deque(range(max(1, -(-ticket.size // ticket.range_bytes))))
        self._range_count = len(self._missing)

    def require_same(self, ticket: Ticket) -> None:
        """Raise ValueError if the ticket is for different bytes than those received so far."""
        if (ticket.size, ticket.range_bytes, ticket.checksum) != (
            self._ticket.size,
            self._ticket.range_bytes,
            self._ticket.checksum,
        ):
            raise ValueError(f"{ticket.payload} differs from the payload of which a part has been received")

    @property
    def complete(self) -> bool:
        with self._lock:
            return len(self._checksums) == self._range_count

    @property
    def received_count(self) -> int:
        """The number of ranges received."""
        with self._lock:
            return len(self._checksums)

    @property
    def range_count(self) -> int:
        return self._range_count

    def part(self, number: int) -> memoryview:
        start = number * self._ticket.range_bytes
        return self.content[start : min(start + self._ticket.range_bytes, self._ticket.size)]

    def take(self) -> int | None:
        """Take the next missing range; None if no range is left.

        The caller must call ``arrived`` or ``give_back`` for it.
        """
        with self._lock:
            return self._missing.popleft() if self._missing else None

    def give_back(self, number: int) -> None:
        with self._lock:
            self._missing.appendleft(number)

    def arrived(self, number: int, checksum: int) -> None:
        """Record that the range is in the buffer. ``checksum`` was computed from the received bytes."""
        with self._lock:
            self._checksums[number] = checksum

    def require_whole(self) -> None:
        """Raise PayloadDamaged, and discard everything received, if the ranges do not add up to the ticket's checksum."""
        with self._lock:
            if composite([self._checksums[number] for number in range(self._range_count)]) == self._ticket.checksum:
                return
            self._checksums.clear()
            self._missing = deque(range(self._range_count))
        detail = "every range is intact, but the server sent bytes whose checksum differs from the ticket's."
        raise PayloadDamaged(payload=self._ticket.payload, detail=detail)
