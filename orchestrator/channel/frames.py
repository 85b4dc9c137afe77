"""What the two ends of a stream say to each other: one request, one reply, each with a fixed head.

    request   magic 4 · start 8 · size 8 · epoch 8 · lengths of job, island, payload 3×1 · mac 32 · the three names
    reply     magic 4 · status 1 · checksum 4 · size 8 · the range's bytes, or the reason in UTF-8

Numbers are big-endian. Nothing that a peer announces is allocated before it is known to be within its limit: names are at
most 255 bytes, a reason 1,000, a range what its reader has asked for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from orchestrator.channel.stream import Stream
from orchestrator.channel.ticket import MAC_BYTES, NAME_BYTES_MAX, Credential

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
