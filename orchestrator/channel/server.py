"""The server side of the channel: gives a process's payloads to the other processes of its job.

    accept ─▶ unproven (few; the oldest is dropped) ─▶ TLS handshake, first valid request ─▶ proven ─▶ request, range, …

Each connection has one thread; there are at most ``connections_max``. A range is sent from the payload's own buffer in
batches that the link's cap paces, so a slow peer costs one thread and a socket's buffer. Small payloads count towards the
cap but do not wait for it. A peer without a valid ticket gets the reason and nothing else; a peer that speaks another
protocol gets no answer.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.certificates import Identity
from orchestrator.channel import frames
from orchestrator.channel.frames import (
    EXPRESS_BYTES,
    Address,
    Reply,
    Request,
    Status,
    Ticket,
    composite,
    issue,
    range_bytes_of,
    range_checksums,
    require_valid,
)
from orchestrator.channel.stream import (
    LOCAL_MEMORY_AVAILABLE,
    SLICE_S,
    Cap,
    Guard,
    PlainStream,
    Stream,
    TlsStream,
    listen_locally,
    new_local_name,
    same_user,
    sealed_copy,
    send_descriptor,
    wait,
)
from orchestrator.errors import ConfigurationError, PayloadWithdrawn, TransferError, TransferRefused

log = logging.getLogger(__name__)

BACKLOG = 128
UNPROVEN_MAX = 64
IDLE_S = 600.0
"""A client may keep a connection this long without a request."""


@dataclass(frozen=True, slots=True)
class Listening:
    """The address of a server, and its limits. ``ports`` is the first and last port of a range; (0, 0) takes any free one.

    ``advertised`` is the host in tickets if it differs from ``host``. ``stall_s`` is the longest time without progress, and
    ``bytes_per_second`` the default cap of a link.
    """

    host: str
    ports: tuple[int, int] = (0, 0)
    advertised: str | None = None
    connections_max: int = 256
    stall_s: float = 60.0
    bytes_per_second: float | None = None
    local_memory: bool = True


class _Payload:
    """One payload with its checksums, and a sealed copy once a process on this machine has requested it."""

    def __init__(self, content: memoryview) -> None:
        self.content = content.cast("B").toreadonly()
        self.range_bytes = range_bytes_of(len(self.content))
        self.checksums = range_checksums(self.content, self.range_bytes)
        self.checksum = composite(self.checksums)
        self.moved_at = time.monotonic()
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._over = False

    def send_copy(self, stream: PlainStream) -> None:
        with self._lock:
            if self._over:
                raise ConnectionError("the payload has been withdrawn")
            if self._descriptor is None:
                self._descriptor = sealed_copy(self.content)
            send_descriptor(stream, self._descriptor)

    def close(self) -> None:
        with self._lock:
            self._over = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class ChannelServer:
    """Serves payloads until ``close``.

    The servers of a job share ``secret``, which signs credentials. No identity: no TLS.
    """

    def __init__(
        self, listening: Listening, *, job: str, epoch: int, secret: bytes, identity: Identity | None = None
    ) -> None:
        self._listening, self._job, self._epoch, self._secret = listening, job, epoch, secret
        self._context = identity.context(server_side=True) if identity else None
        if self._context is not None:
            self._context.num_tickets = 0  # sessions are not resumed: connections are few and last long
        self._lock = threading.Lock()
        self._payloads: dict[str, _Payload] = {}
        self._caps: dict[str, Cap] = {}
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._unproven: dict[socket.socket, None] = {}
        self._closed = threading.Event()
        self._listeners: list[socket.socket] = [bound(listening.host, listening.ports)]
        port = self._listeners[0].getsockname()[1]
        self.address = Address(listening.advertised or listening.host, port)
        self._local = new_local_name() if listening.local_memory and LOCAL_MEMORY_AVAILABLE else None
        if self._local is not None:
            self._listeners.append(listen_locally(self._local))
        answers = (self._answer_far, self._answer_near)
        self._accepting = [
            threading.Thread(target=self._accept, args=(listener, answer), name="channel.accept", daemon=True)
            for listener, answer in zip(self._listeners, answers, strict=False)
        ]
        for thread in self._accepting:
            thread.start()

    def serve(self, payload: str, content: memoryview) -> None:
        """Serve this content under this name, replacing any other. It must not change until ``withdraw``."""
        if not frames.names_fit(payload):
            raise ConfigurationError(detail=f"The name of payload {payload[:40]}… is too long.")
        new = _Payload(content)
        with self._lock:
            before = self._payloads.get(payload)
            self._payloads[payload] = new
        if before is not None:
            before.close()

    def ticket(self, payload: str, island: str) -> Ticket:
        with self._lock:
            served, epoch = self._payloads.get(payload), self._epoch
        if served is None:
            raise PayloadWithdrawn(detail=f"This process does not serve {payload}.")
        credential = issue(self._secret, job=self._job, epoch=epoch, island=island, payload=payload)
        return Ticket(
            (self.address,),
            payload,
            len(served.content),
            served.range_bytes,
            served.checksum,
            credential,
            self._context is not None,
            self._local,
        )

    def withdraw(self, payload: str) -> None:
        with self._lock:
            served = self._payloads.pop(payload, None)
        if served is not None:
            served.close()

    def idle_s(self, payload: str) -> float:
        """Return how long no client has requested or received any of this payload; 0 if no payload has this name."""
        with self._lock:
            served = self._payloads.get(payload)
        return 0.0 if served is None else time.monotonic() - served.moved_at

    def advance(self, epoch: int) -> None:
        """Refuse tickets of other epochs from now on."""
        with self._lock:
            self._epoch = epoch

    def cap(self, island: str) -> Cap:
        """The cap of the link to this island, for all its streams together."""
        with self._lock:
            return self._caps.setdefault(island, Cap(self._listening.bytes_per_second))

    def close(self) -> None:
        """Stop serving, join all threads, and close all sockets and payloads."""
        self._closed.set()
        for listener in self._listeners:
            _shut(listener)
        for thread in self._accepting:
            thread.join()
        with self._lock:
            connections, payloads = list(self._connections), list(self._payloads.values())
            self._payloads.clear()
        for connection in connections:
            _shut(connection)
        for thread in self._threads:
            thread.join()
        for listener in self._listeners:
            listener.close()
        for payload in payloads:
            payload.close()

    # ── connections ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, listener: socket.socket, answer: Callable[[PlainStream], None]) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = listener.accept()
            except OSError as error:  # closed, or no descriptors left; others may free some
                if not self._closed.wait(SLICE_S):
                    log.warning("a connection could not be accepted: %s", error)
                continue
            thread = threading.Thread(
                target=self._attend, args=(connection, answer), name="channel.connection", daemon=True
            )
            with self._lock:
                full = len(self._connections) >= self._listening.connections_max + UNPROVEN_MAX
                full = full or self._closed.is_set()
                if not full:
                    self._connections.add(connection)
                    self._unproven[connection] = None
                    oldest = next(iter(self._unproven)) if len(self._unproven) > UNPROVEN_MAX else None
                    if oldest is not None:
                        del self._unproven[oldest]
                        _shut(oldest)
            if full:
                connection.close()
                continue
            try:
                thread.start()
                self._threads = [*(before for before in self._threads if before.is_alive()), thread]
            except RuntimeError as error:  # the system has no thread left; the peer may try again
                log.warning("no thread could be started for a connection: %s", error)
                with self._lock:
                    self._connections.discard(connection)
                    self._unproven.pop(connection, None)
                connection.close()

    def _attend(self, connection: socket.socket, answer: Callable[[PlainStream], None]) -> None:
        try:
            answer(PlainStream(connection, Guard(self._listening.stall_s, self._closed.is_set)))
        except (OSError, TransferError) as error:  # ssl.SSLError is an OSError
            log.debug("a connection ended: %s", error)
        except Exception:
            log.exception("a connection failed")
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._unproven.pop(connection, None)
            connection.close()

    def _prove(self, stream: PlainStream) -> None:
        """Mark the connection as proven after a valid request. Raises ConnectionError if there are too many."""
        with self._lock:
            if stream.connection not in self._unproven:
                return
            del self._unproven[stream.connection]
            if len(self._connections) - len(self._unproven) > self._listening.connections_max:
                raise ConnectionError(f"the server has {self._listening.connections_max} connections, its maximum")

    def _answer_far(self, below: PlainStream) -> None:
        stream: Stream = TlsStream(below, self._context, server_side=True) if self._context is not None else below
        while True:
            request = self._next_request(stream)
            served = self._permitted(request, stream)
            if served is None:
                continue
            self._prove(below)
            self._send_range(stream, served, request)

    def _answer_near(self, stream: PlainStream) -> None:
        if not same_user(stream.connection):
            return
        while True:
            request = self._next_request(stream)
            served = self._permitted(request, stream)
            if served is None:
                continue
            self._prove(stream)
            frames.send_head(stream, Reply(Status.CONTENT, served.checksum, len(served.content)))
            served.send_copy(stream)

    def _next_request(self, stream: Stream) -> Request:
        stream.guard.stall_s = IDLE_S
        request = frames.receive_request(stream)
        stream.guard.stall_s = self._listening.stall_s
        return request

    def _permitted(self, request: Request, stream: Stream) -> _Payload | None:
        """Return the payload; or send the peer the reason for the refusal and return None."""
        with self._lock:
            epoch, served = self._epoch, self._payloads.get(request.credential.payload)
        try:
            require_valid(request.credential, self._secret, job=self._job, epoch=epoch, subject=stream.peer)
            if served is not None and not _is_range(request, served):
                raise TransferRefused(detail=f"{request.size:,} bytes from {request.start:,} are not a range of it.")
        except TransferRefused as error:
            log.warning("a request was refused: %s", error)
            frames.send_reason(stream, Status.REFUSED, str(error))
            return None
        if served is not None:
            served.moved_at = time.monotonic()
        else:
            frames.send_reason(stream, Status.WITHDRAWN, "It has been withdrawn, or was never served.")
        return served

    def _send_range(self, stream: Stream, served: _Payload, request: Request) -> None:
        part = served.content[request.start : request.start + request.size]
        frames.send_head(
            stream, Reply(Status.CONTENT, served.checksums[request.start // served.range_bytes], len(part))
        )
        cap, ahead = self.cap(request.credential.island), len(served.content) <= EXPRESS_BYTES
        sent = 0
        while sent < len(part):
            batch = part[sent : sent + cap.batch_bytes()]
            if not wait(cap.take(len(batch), time.monotonic(), ahead=ahead), self._closed.is_set, SLICE_S):
                return
            stream.send(batch)
            sent += len(batch)
            served.moved_at = time.monotonic()


def _is_range(request: Request, served: _Payload) -> bool:
    size = min(served.range_bytes, len(served.content) - request.start)
    return request.start % served.range_bytes == 0 and request.size == size >= 0


def bound(host: str, ports: tuple[int, int]) -> socket.socket:
    """Listen on a free port of the range, tried in random order, at this address only."""
    numbers = list(range(ports[0], ports[1] + 1))
    random.shuffle(numbers)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in numbers:
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            last = error
    detail = f"No port from {ports[0]} to {ports[1]} can be opened at {host}: {last}. Name an address of this host"
    raise ConfigurationError(detail=f"{detail} and a range that has free ports.")


def _shut(connection: socket.socket) -> None:
    """Shut the connection down, which wakes the thread that waits for it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer has closed it already
