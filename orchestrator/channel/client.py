"""The client side of the channel: pulls a payload in ranges, over several streams, and verifies it.

    memory of this machine, if the server is on it
    else  stream 1 ──range──▶ ──range──▶ ✗ ─(another connection, maybe to another server)─▶ ──range──▶
          stream 2 ──range──▶ ──range──▶ ──range──▶              each stream takes the next missing range

Each stream requests the next range before the current one has arrived, so that a line with a long delay is never idle.
Ranges that a broken connection did not deliver are requested again by any stream that is free. A pull has no time limit
other than that of progress, to which the bytes of all its streams count. Small payloads have connections of their own and do
not wait for the byte budget, so that large ones cannot delay them.

``Hindrances`` are the addresses from which pulls get nothing, so that an operator is told before a pull gives up. What an
operator can do about them is in ``endpoint``.

Source: GridFTP (Allcock et al. 2005) for parallel streams with restart markers.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from orchestrator.certificates import Identity
from orchestrator.channel import frames
from orchestrator.channel.frames import (
    EXPRESS_BYTES,
    Address,
    Reception,
    Request,
    Status,
    Ticket,
    checksum,
    composite,
    range_checksums,
)
from orchestrator.channel.stream import (
    LOCAL_MEMORY_AVAILABLE,
    SLICE_S,
    ByteBudget,
    Guard,
    PlainStream,
    Stream,
    TlsStream,
    connect_locally,
    receive_mapping,
    wait,
)
from orchestrator.errors import (
    PayloadDamaged,
    PayloadWithdrawn,
    TransferCancelled,
    TransferError,
    TransferRefused,
    TransferStalled,
)

log = logging.getLogger(__name__)

HINDERED_S = 10.0
"""An address counts as hindered after this long without a byte."""
FORGOTTEN_S = 30.0
"""A failure is forgotten this long after the last try. It must be longer than one try and the wait after it."""
REQUESTS_AHEAD = 2
PIECE_BYTES = 1 << 20
"""Bytes received between two checks of whether the pull is still wanted. A piece is summed while it is in the cache."""
DAMAGED_RANGES_MAX = 3
BROKEN_MAX = 32
"""Give up after this many consecutive connections that broke before completing a range."""
RETRY_MIN_S, RETRY_MAX_S = 0.05, 2.0
CONNECT_S = 5.0
"""Limit of one connection attempt. TCP doubles its own waits, and would retry long after the line works again."""
NEAR_S = 0.005
"""A server that accepts a connection faster than this gets at most ``STREAMS_NEAR``: more would only compete for the CPU."""
STREAMS_NEAR = 2


@dataclass(frozen=True, slots=True)
class Hindrance:
    """An address from which nothing comes. ``is_distrust``: both ends are up but do not accept each other's certificates."""

    address: Address
    reason: str
    is_distrust: bool = False


@dataclass(frozen=True, slots=True)
class _Failures:
    """Consecutive failed connections to one address."""

    first_at: float
    last_at: float
    latest: Hindrance


class Hindrances:
    """The hindrances of one client: failed connections, and streams that wait without receiving. Thread-safe.

    Short interruptions, such as a process that restarts, are not hindrances.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures: dict[Address, _Failures] = {}
        self._waiting: dict[Address, list[Guard]] = {}

    def failed(self, address: Address, reason: str, *, is_distrust: bool = False) -> None:
        now, latest = self._clock(), Hindrance(address, reason, is_distrust)
        with self._lock:
            before = self._failures.get(address)
            lasts = before is not None and now - before.last_at < FORGOTTEN_S
            first_at = before.first_at if before is not None and lasts else now
            self._failures[address] = _Failures(first_at, now, latest)

    def reached(self, address: Address) -> None:
        with self._lock:
            self._failures.pop(address, None)

    @contextmanager
    def waiting(self, address: Address, guard: Guard) -> Iterator[None]:
        """Count the address as hindered if this guard sees no byte for too long while the context is open."""
        with self._lock:
            self._waiting.setdefault(address, []).append(guard)
        try:
            yield
        finally:
            with self._lock:
                guards = self._waiting[address]
                guards.remove(guard)
                if not guards:
                    del self._waiting[address]

    def current(self) -> tuple[Hindrance, ...]:
        """Return one hindrance for each address that is hindered now."""
        now = self._clock()
        with self._lock:
            self._failures = {
                address: failures
                for address, failures in self._failures.items()
                if now - failures.last_at < FORGOTTEN_S
            }
            hindered = {
                address: failures.latest
                for address, failures in self._failures.items()
                if now - failures.first_at >= HINDERED_S
            }
            for address, guards in self._waiting.items():
                if now - max(guard.moved_at for guard in guards) >= HINDERED_S:
                    hindered.setdefault(address, Hindrance(address, "it is silent"))
        return tuple(hindered.values())


@dataclass(frozen=True, slots=True)
class Pulling:
    """Settings of a client: its streams per pull (for lines with a long delay), and limits.

    ``bytes_max`` limits the bytes that all its pulls have in flight, ``payload_bytes_max`` the size in a ticket; ``stall_s``
    is the longest time without progress.
    """

    streams: int = 8
    bytes_max: int = 4 << 30
    payload_bytes_max: int = 1 << 40
    stall_s: float = 60.0


@dataclass(frozen=True, slots=True)
class _PoolKey:
    """Idle connections with the same key are interchangeable."""

    address: Address
    express: bool


class _Failed(Exception):
    """This address cannot serve the payload, now or later."""

    def __init__(self, reason: TransferError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _Pull:
    """One pull in progress, shared by its streams."""

    def __init__(self, ticket: Ticket, reception: Reception, stall_s: float, abandoned: Callable[[], bool]) -> None:
        self.ticket, self.reception = ticket, reception
        self.express = ticket.size <= EXPRESS_BYTES
        self._stall_s, self._abandoned = stall_s, abandoned
        self._moved_at = self._arrived_at = time.monotonic()
        self._broken_count = 0
        self._receiving: list[Guard] = []
        self._lock = threading.Lock()
        self._addresses = list(ticket.addresses)
        self._error: TransferError | PayloadDamaged | None = None
        self._damaged_count = 0

    @property
    def error(self) -> TransferError | PayloadDamaged | None:
        return self._error

    def unwanted(self) -> bool:
        """Return True once its streams may stop: the pull is abandoned, has failed, or is complete."""
        return self._abandoned() or self._error is not None or self.reception.complete

    def guard(self) -> Guard:
        """Return a guard for one of its streams."""
        return Guard(self._stall_s, self.unwanted)

    @contextmanager
    def receiving(self, guard: Guard) -> Iterator[None]:
        """Count bytes that this guard sees as progress while the context is open. Handshakes are no progress."""
        with self._lock:
            self._receiving.append(guard)
        try:
            yield
        finally:
            with self._lock:
                self._receiving.remove(guard)
                self._moved_at = max(self._moved_at, guard.moved_at)

    def arrived(self, number: int, checksum: int) -> None:
        self.reception.arrived(number, checksum)
        with self._lock:
            self._broken_count, self._arrived_at = 0, time.monotonic()

    def address(self, attempt: int) -> Address | None:
        with self._lock:
            return self._addresses[attempt % len(self._addresses)] if self._addresses else None

    def dismiss(self, address: Address, reason: TransferError) -> None:
        """Stop using this address. The pull fails if it was the last one."""
        with self._lock:
            if address in self._addresses:
                self._addresses.remove(address)
            if not self._addresses:
                self._error = self._error or reason

    def damaged(self, number: int) -> None:
        with self._lock:
            self._damaged_count += 1
            if self._damaged_count > DAMAGED_RANGES_MAX:
                detail = f"{self._damaged_count} ranges did not match their checksum, the last one was range {number}."
                self._error = self._error or PayloadDamaged(payload=self.ticket.payload, detail=detail)

    def broken(self, error: Exception) -> None:
        """Record a failed connection. The pull fails if no range makes progress, or all break before completing a range."""
        with self._lock:
            self._broken_count += 1
            now = time.monotonic()
            moved_at = max([self._moved_at, *(guard.moved_at for guard in self._receiving)])
            if now - moved_at >= self._stall_s:
                detail = f"No byte of {self.ticket.payload} has arrived (last error: {error})"
            elif self._broken_count > BROKEN_MAX and now - self._arrived_at >= self._stall_s:
                detail = f"{self._broken_count} connections broke before a range of {self.ticket.payload} was complete"
            else:
                return
            self._error = self._error or TransferStalled(stall_s=self._stall_s, detail=detail)


class ChannelClient:
    """Pulls payloads until ``close``, from any number of threads. ``subject`` is the island that it pulls for.

    ``hindrances`` has the addresses from which nothing comes at present.
    """

    def __init__(self, subject: str, *, identity: Identity | None = None, pulling: Pulling | None = None) -> None:
        self._subject, self._pulling = subject, pulling or Pulling()
        self._context = identity.context(server_side=False) if identity else None
        self._budget = ByteBudget(self._pulling.bytes_max)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.hindrances = Hindrances()
        self._idle: dict[_PoolKey, list[Stream]] = {}
        self._connect_s: dict[Address, float] = {}

    def pull(
        self,
        ticket: Ticket,
        into: memoryview | None = None,
        *,
        reception: Reception | None = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> memoryview:
        """Return the payload, with every range verified; in ``into``, if given, which must have its size.

        With a ``reception`` only its missing ranges are pulled, and what arrives stays in it even if the pull fails. Raises
        TransferError or PayloadDamaged, and TransferCancelled soon after ``abandoned`` returns True.
        """
        self._require_usable(ticket)
        if reception is not None:
            reception.require_same(ticket)

        def unwanted() -> bool:
            return self._closed.is_set() or abandoned()

        share = 0 if ticket.size <= EXPRESS_BYTES else ticket.size
        with self._budget.hold(share, unwanted, SLICE_S) if share else nullcontext(True) as held:
            if not held or unwanted():
                raise _cancelled(ticket)
            if reception is None and (content := self._pull_near(ticket, into, unwanted)) is not None:
                return content
            return self._pull_far(ticket, reception or Reception(ticket, into), unwanted)

    def close(self) -> None:
        """End pulls in progress with TransferCancelled, and close all connections."""
        with self._lock:
            self._closed.set()
            idle, self._idle = self._idle, {}
        for streams in idle.values():
            for stream in streams:
                stream.close()

    def _require_usable(self, ticket: Ticket) -> None:
        if ticket.credential.island != self._subject:
            detail = (
                f"The ticket of {ticket.payload} was issued to {ticket.credential.island}, but this is {self._subject}."
            )
            raise TransferRefused(detail=detail)
        if ticket.tls is not (self._context is not None):
            sides = ("only the server uses", "only the client uses")[self._context is not None]
            raise TransferRefused(detail=f"{sides} TLS.", remedy="Give both ends an identity of the job, or neither.")
        if not 0 <= ticket.size <= self._pulling.payload_bytes_max or ticket.range_bytes <= 0 or not ticket.addresses:
            detail = f"The ticket of {ticket.payload} has {ticket.size:,} bytes in ranges of {ticket.range_bytes:,}"
            raise TransferRefused(detail=f"{detail}; the maximum is {self._pulling.payload_bytes_max:,} bytes.")

    # ── memory of this machine ────────────────────────────────────────────────────────────────────────────────────────

    def _pull_near(self, ticket: Ticket, into: memoryview | None, abandoned: Callable[[], bool]) -> memoryview | None:
        """Map the payload from the server's memory.

        Returns None if the server is on another machine or the attempt fails.
        """
        if ticket.local is None or not LOCAL_MEMORY_AVAILABLE:
            return None
        try:
            stream = PlainStream(connect_locally(ticket.local), Guard(self._pulling.stall_s, abandoned))
        except OSError:
            return None
        try:
            frames.send_request(stream, Request(ticket.credential, 0, min(ticket.size, ticket.range_bytes)))
            reply = frames.receive_head(stream)
            if reply.status is not Status.CONTENT:
                return None
            content = receive_mapping(stream, ticket.size)
        except (OSError, TransferStalled, TransferRefused) as error:
            log.info("%s is not read from this machine's memory: %s", ticket.payload, error)
            return None
        finally:
            stream.close()
        if into is not None:
            into.cast("B")[:] = content
            content = into.cast("B")
        if composite(range_checksums(content, ticket.range_bytes)) != ticket.checksum:
            raise PayloadDamaged(
                payload=ticket.payload, detail="the server sent bytes whose checksum differs from the ticket's."
            )
        return content

    # ── the network ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _pull_far(self, ticket: Ticket, reception: Reception, abandoned: Callable[[], bool]) -> memoryview:
        pull = _Pull(ticket, reception, self._pulling.stall_s, abandoned)
        others = [
            threading.Thread(target=self._work, args=(pull,), name=f"channel.pull.{number}", daemon=True)
            for number in range(1, self._stream_count(pull))
        ]
        for thread in others:
            thread.start()
        self._work(pull)
        for thread in others:
            thread.join()
        if pull.error is not None:
            raise pull.error
        if not reception.complete:
            raise _cancelled(ticket)
        reception.require_whole()
        return reception.content

    def _stream_count(self, pull: _Pull) -> int:
        """Return how many streams the line can use. The time of the first connection shows how long the line is."""
        if pull.express:
            return 1
        address = pull.ticket.addresses[0]
        if address not in self._connect_s and (stream := self._first_connection(pull, address)) is not None:
            self._put_by(_PoolKey(address, pull.express), stream)
        near = self._connect_s.get(address, NEAR_S) < NEAR_S
        missing_count = pull.reception.range_count - pull.reception.received_count
        return max(1, min(STREAMS_NEAR if near else self._pulling.streams, missing_count))

    def _first_connection(self, pull: _Pull, address: Address) -> Stream | None:
        try:
            return self._connected(_PoolKey(address, pull.express), pull.guard())
        except (OSError, TransferError):
            return None  # ``_work`` gets the same error and handles it

    def _work(self, pull: _Pull) -> None:
        """Pull ranges until every missing one has been requested by some stream."""
        attempt, retry_s = 0, RETRY_MIN_S
        while not pull.unwanted() and (address := pull.address(attempt)) is not None:
            before = pull.reception.received_count
            try:
                self._bring_ranges(pull, _PoolKey(address, pull.express))
                return
            except TransferCancelled:
                return
            except _Failed as failed:
                pull.dismiss(address, failed.reason)
                continue
            except (OSError, TransferStalled) as error:
                if _is_distrust(error):
                    detail = f"{address} and this process do not accept each other's certificates: {error}."
                    pull.dismiss(address, TransferRefused(detail=detail))
                    continue
                log.info("%s: a connection to %s failed: %s", pull.ticket.payload, address, error)
                pull.broken(error)
            attempt += 1
            retry_s = RETRY_MIN_S if pull.reception.received_count > before else min(RETRY_MAX_S, 2 * retry_s)
            wait(retry_s, pull.unwanted, SLICE_S)

    def _bring_ranges(self, pull: _Pull, key: _PoolKey) -> None:
        """Pull ranges over one connection. Requested ranges that do not arrive are given back in any case."""
        owed: deque[int] = deque()
        stream = self._stream(key, pull.guard())
        try:
            while True:
                while len(owed) < REQUESTS_AHEAD and (number := pull.reception.take()) is not None:
                    owed.append(number)
                    start, size = number * pull.ticket.range_bytes, len(pull.reception.part(number))
                    frames.send_request(stream, Request(pull.ticket.credential, start, size))
                if not owed:
                    break
                with self.hindrances.waiting(key.address, stream.guard):
                    self._receive_range(pull, stream, owed[0])
                owed.popleft()
        except BaseException:
            for number in reversed(owed):
                pull.reception.give_back(number)
            stream.close()
            raise
        self._put_by(key, stream)

    def _receive_range(self, pull: _Pull, stream: Stream, number: int) -> None:
        reply = frames.receive_head(stream)
        if reply.status is not Status.CONTENT:
            reason = f"{pull.ticket.payload}: {frames.receive_reason(stream, reply)}"
            withdrawn = reply.status is Status.WITHDRAWN
            raise _Failed(PayloadWithdrawn(detail=reason) if withdrawn else TransferRefused(detail=reason))
        part = pull.reception.part(number)
        if reply.size != len(part):
            raise frames.NotOfThisProtocol(f"{reply.size:,} bytes for a range of {len(part):,}")
        range_checksum = 0
        with pull.receiving(stream.guard):
            for start in range(0, len(part), PIECE_BYTES):
                if pull.unwanted():
                    raise _cancelled(pull.ticket)
                piece = part[start : start + PIECE_BYTES]
                stream.receive(piece)
                range_checksum = checksum(piece, range_checksum)
        if range_checksum != reply.checksum:
            pull.damaged(number)
            raise ConnectionError(f"range {number} arrived damaged")
        pull.arrived(number, reply.checksum)

    # ── connections ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _stream(self, key: _PoolKey, guard: Guard) -> Stream:
        """Return an idle connection with this key, or a new one."""
        with self._lock:
            idle = self._idle.get(key)
            stream = idle.pop() if idle else None
        if stream is None:
            return self._connected(key, guard)
        stream.guard = guard
        return stream

    def _connected(self, key: _PoolKey, guard: Guard) -> Stream:
        try:
            stream = self._opened(key.address, guard)
        except (OSError, TransferStalled) as error:
            self.hindrances.failed(key.address, _reason_of(error), is_distrust=_is_distrust(error))
            raise
        self.hindrances.reached(key.address)
        return stream

    def _opened(self, address: Address, guard: Guard) -> Stream:
        began_at = time.monotonic()
        timeout_s = min(CONNECT_S, self._pulling.stall_s)
        connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
        with self._lock:
            self._connect_s[address] = time.monotonic() - began_at
        try:
            stream = PlainStream(connection, guard)
            if self._context is None:
                return stream
            with self.hindrances.waiting(address, guard):
                return TlsStream(stream, self._context, server_side=False)
        except BaseException:
            connection.close()
            raise

    def _put_by(self, key: _PoolKey, stream: Stream) -> None:
        """Keep the connection for the next pull, unless there are enough or the client is closed."""
        with self._lock:
            idle = self._idle.setdefault(key, [])
            room = len(idle) < self._pulling.streams and not self._closed.is_set()
            if room:
                idle.append(stream)
        if not room:
            stream.close()


def _is_distrust(error: OSError | TransferStalled) -> bool:
    """Return True for a certificate problem, which a retry cannot fix. A damaged TLS record is not one."""
    if not isinstance(error, ssl.SSLError):
        return False
    reason = (error.reason or "").upper()
    signs = ("UNKNOWN_CA", "CERTIFICATE", "DECRYPT_ERROR")  # the last is TLS's word for a signature that is not valid
    return isinstance(error, ssl.SSLCertVerificationError) or any(sign in reason for sign in signs)


def _reason_of(error: OSError | TransferStalled) -> str:
    if isinstance(error, TimeoutError | TransferStalled):
        return "no answer"
    return (isinstance(error, ssl.SSLError) and error.reason) or error.strerror or str(error)


def _cancelled(ticket: Ticket) -> TransferCancelled:
    return TransferCancelled(detail=f"{ticket.payload} is no longer wanted.")
