"""One connection as a stream of bytes, plain, under mutual TLS, or within a machine, and what paces it.

``send`` and ``receive`` have one time limit: progress. They raise if no byte moves for the guard's ``stall_s``, or if the
transfer is abandoned, which they check every ``SLICE_S``. One thread at a time uses a stream; several streams may share a
guard.

TLS is done in memory and not by ``ssl.SSLSocket``, which makes two system calls for each record of 16 KiB. In memory a batch
of records is encrypted at once and sent with one call. ``tests/bench/channel_candidates.py`` compares the two.

Each process of an encrypted job has a ``certificates.Identity``. Only processes of this job have certificates of the job's
authority, so a connection that both ends have verified is within the job. The names in a certificate are those of islands,
not of hosts, because islands move between hosts.

Processes on one machine pass payloads as an anonymous file in memory. The file has no name, so the kernel frees it with
the last descriptor or mapping, however the processes end. It is sealed, so that neither end can change or shorten it.
The server listens under an abstract name of 128 random bits, which exists in its own network namespace only and ends with
its socket. A client must run as the same user and present the same credential as over the network.

A ``Cap`` limits the bytes per second of all streams of one link; a ``ByteBudget`` limits what a client has in flight.

Sources: mutual TLS as in RFC 8446 section 4.4.2. memfd_create(2) and unix(7) (SCM_RIGHTS, SO_PEERCRED, abstract sockets) on
Linux; other systems use the network. The cap is the virtual-scheduling form of the leaky bucket (ITU-T I.371): each batch of
bytes is due when the time of the one before it has passed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import ssl
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.errors import TransferCancelled, TransferRefused, TransferStalled

BURST_S = 0.05
BATCH_S = 0.05
BATCH_BYTES_MIN, BATCH_BYTES_MAX = 4 << 10, 1 << 20
SLICE_S = 0.1
"""A waiting stream notices within this time that its transfer is abandoned."""
BATCH_BYTES = 256 << 10
"""Bytes encrypted at once. They and their ciphertext fit into a level-2 cache."""
RECEIVE_BYTES = 1 << 20
PATIENCE_S = 20
"""A connection is closed after this long without an acknowledgement, and its user opens a new one.

TCP alone doubles its waits: after a cut of one minute it would retry up to a minute after the line works again.
"""
PATIENCE_OPTIONS = (
    {
        socket.TCP_KEEPIDLE: PATIENCE_S // 2,
        socket.TCP_KEEPINTVL: PATIENCE_S // 4,
        socket.TCP_KEEPCNT: 2,
        socket.TCP_USER_TIMEOUT: PATIENCE_S * 1000,
    }
    if sys.platform == "linux"
    else {}
)
READY = memoryview(b"\x01")
"""The first byte that a server sends. In TLS 1.3 a client's handshake ends before the server has verified the client's
certificate. A client that sends a request before that may lose the alert that its certificate was refused."""
LOCAL_MEMORY_AVAILABLE = hasattr(os, "memfd_create")
NAME_PREFIX = "atoll-channel-"
_PEER = struct.Struct("3i")
WRITE_BYTES = 64 << 20


class Cap:
    """Limits the bytes per second of all callers of ``take`` together. None is no limit. It may be changed at any time."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._lock = threading.Lock()
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        return self._bytes_per_second

    @bytes_per_second.setter
    def bytes_per_second(self, bytes_per_second: float | None) -> None:
        with self._lock:
            self._bytes_per_second, self._free_at = bytes_per_second, 0.0

    def batch_bytes(self) -> int:
        """Return how many bytes to send at once: few on a slow link, for an even flow, many on a fast one, for few calls."""
        rate = self._bytes_per_second
        return BATCH_BYTES_MAX if rate is None else int(min(BATCH_BYTES_MAX, max(BATCH_BYTES_MIN, rate * BATCH_S)))

    def take(self, size: int, now: float, *, ahead: bool = False) -> float:
        """Count these bytes and return how long to wait before sending them. Bytes sent ``ahead`` never wait."""
        with self._lock:
            if self._bytes_per_second is None:
                return 0.0
            begins_at = max(now - BURST_S, self._free_at)
            self._free_at = begins_at + size / self._bytes_per_second
            return 0.0 if ahead else max(0.0, begins_at - now)


class ByteBudget:
    """Limits the bytes held at once to ``bytes_max``, first come, first served. A larger request is served alone."""

    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max
        self._used = 0
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()

    @property
    def used(self) -> int:
        return self._used

    @contextmanager
    def hold(self, size: int, abandoned: Callable[[], bool], slice_s: float) -> Iterator[bool]:
        """Wait for room and hold it. Yields False, holding nothing, if ``abandoned`` returns True first."""
        share, turn = min(size, self._max), object()
        with self._changed:
            self._queue.append(turn)
            while (self._queue[0] is not turn or self._used + share > self._max) and not abandoned():
                self._changed.wait(slice_s)
            held = self._queue[0] is turn and self._used + share <= self._max
            self._queue.remove(turn)
            self._used += share if held else 0
            self._changed.notify_all()
        try:
            yield held
        finally:
            if held:
                with self._changed:
                    self._used -= share
                    self._changed.notify_all()


def wait(seconds: float, abandoned: Callable[[], bool], slice_s: float) -> bool:
    """Sleep for ``seconds``. Returns False, at once, when ``abandoned`` returns True."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if abandoned():
            return False
        time.sleep(min(slice_s, left))
    return True


@dataclass(slots=True)
class Guard:
    """Limits the waiting of a stream. ``moved_at`` is when a byte last moved on any stream with this guard."""

    stall_s: float
    abandoned: Callable[[], bool]
    moved_at: float = field(default_factory=time.monotonic)


class Stream(Protocol):
    """A connection's bytes in both directions. Each user of a stream sets its guard first."""

    guard: Guard

    @property
    def peer(self) -> str | None:
        """The subject of the peer's verified certificate; None without TLS."""
        ...

    def send(self, content: memoryview) -> None: ...

    def receive(self, into: memoryview) -> None:
        """Fill all of ``into``. Raises ConnectionError if the peer closes the connection before."""
        ...

    def close(self) -> None: ...


class PlainStream:
    """A socket whose calls are limited by progress, not by time."""

    def __init__(self, connection: socket.socket, guard: Guard) -> None:
        connection.settimeout(SLICE_S)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in PATIENCE_OPTIONS.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = connection
        self.guard = guard

    @property
    def peer(self) -> str | None:
        return None

    @property
    def connection(self) -> socket.socket:
        return self._connection

    def send(self, content: memoryview) -> None:
        sent, moved_at = 0, time.monotonic()
        while sent < len(content):
            try:
                sent += self._connection.send(content[sent:])
                self.guard.moved_at = moved_at = time.monotonic()
            except TimeoutError:
                self._require_progress(moved_at)

    def receive(self, into: memoryview) -> None:
        received = 0
        while received < len(into):
            received += self.receive_some(into[received:])

    def receive_some(self, into: memoryview) -> int:
        """Receive at least one byte and at most ``len(into)``. Returns how many."""
        began_at = time.monotonic()
        while True:
            try:
                count = self._connection.recv_into(into)
            except TimeoutError:
                self._require_progress(began_at)
                continue
            if not count:
                raise ConnectionError("the peer has closed the connection")
            self.guard.moved_at = time.monotonic()
            return count

    def close(self) -> None:
        self._connection.close()

    def _require_progress(self, moved_at: float) -> None:
        if self.guard.abandoned():
            raise TransferCancelled(detail="A newer payload has replaced it, or its user has closed.")
        if time.monotonic() - moved_at >= self.guard.stall_s:
            raise TransferStalled(stall_s=self.guard.stall_s)


class TlsStream:
    """The same, under TLS. The constructor returns after the handshake."""

    def __init__(self, below: PlainStream, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._below = below
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._encrypted = memoryview(bytearray(RECEIVE_BYTES))
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                self._flush()  # sends the alert, which tells the peer the reason
                raise
            else:
                self._flush()
                break
        self._peer = _subject(self._tls)
        if server_side:
            self.send(READY)
        else:
            self.receive(memoryview(bytearray(len(READY))))

    @property
    def peer(self) -> str | None:
        return self._peer

    @property
    def guard(self) -> Guard:
        return self._below.guard

    @guard.setter
    def guard(self, guard: Guard) -> None:
        self._below.guard = guard

    def send(self, content: memoryview) -> None:
        for start in range(0, len(content), BATCH_BYTES):
            batch, written = content[start : start + BATCH_BYTES], 0
            while written < len(batch):
                written += self._tls.write(batch[written:])  # one record per call
            self._flush()

    def receive(self, into: memoryview) -> None:
        received = 0
        while received < len(into):
            try:
                count = int(self._tls.read(len(into) - received, into[received:]))  # with a buffer, it returns a count
            except ssl.SSLWantReadError:
                self._fill()
                continue
            except ssl.SSLZeroReturnError as error:
                raise ConnectionError("the peer has closed the connection") from error
            if not count:
                raise ConnectionError("the peer has closed the connection")
            received += count

    def close(self) -> None:
        self._below.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._below.send(memoryview(self._outgoing.read()))

    def _fill(self) -> None:
        count = self._below.receive_some(self._encrypted)
        self._incoming.write(self._encrypted[:count])


def _subject(tls: ssl.SSLObject) -> str | None:
    subject: Any = (tls.getpeercert() or {}).get("subject", ())
    names = [str(value) for part in subject for name, value in part if name == "commonName"]
    return names[0] if names else None


def new_local_name() -> str:
    return NAME_PREFIX + secrets.token_hex(16)


def listen_locally(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(64)
    return listener


def connect_locally(name: str) -> socket.socket:
    """Connect to the server with this name. Raises OSError if there is none on this machine."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect("\0" + name)
    except OSError:
        connection.close()
        raise
    return connection


def same_user(connection: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())


def sealed_copy(content: memoryview) -> int:
    """Return the descriptor of a file in memory with this content, sealed against changes. The caller closes it."""
    descriptor = os.memfd_create("atoll-payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written : written + WRITE_BYTES])
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def send_descriptor(stream: PlainStream, descriptor: int) -> None:
    socket.send_fds(stream.connection, [b"d"], [descriptor])


def receive_mapping(stream: PlainStream, size: int) -> memoryview:
    """Receive a descriptor and return its content, mapped read-only. It is freed with its last view."""
    stream.connection.settimeout(stream.guard.stall_s)
    _, descriptors, _, _ = socket.recv_fds(stream.connection, 1, 1)
    if not descriptors:
        raise ConnectionError("the server passed no descriptor")
    try:
        shrinks = not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if shrinks or os.fstat(descriptors[0]).st_size != size:
            raise TransferRefused(detail="The server's memory file is not sealed, or does not have the payload's size.")
        return memoryview(mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ)) if size else memoryview(b"")
    finally:
        os.close(descriptors[0])
