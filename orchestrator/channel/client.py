"""The client of a process that wants payloads: pulls ranges over several streams until all are here and verified.

    memory of this machine, if the server is on it
    else  stream 1 ──range──▶ ──range──▶ ✗ ─(another connection, maybe to another server)─▶ ──range──▶
          stream 2 ──range──▶ ──range──▶ ──range──▶                         what is missing, whoever is free

Each stream has the next range asked for before one has arrived, so that a long line does not run dry between two. What a
broken connection owed is asked for anew, by whoever is free. A pull has no time limit but that of progress; bytes of all
its streams count. Small payloads have connections of their own and do not wait for the budget, so no large one delays them.

Source: GridFTP (Allcock et al. 2005) for parallel streams with restart markers.

What has arrived of one payload: a buffer, and which of its ranges are verified. It outlives the pull that began it.

A pull that breaks off leaves its reception as it is; the next one, with a new ticket for the same bytes and maybe another
server, asks for the missing ranges alone. Thread-safe.

Addresses from which nothing comes although pulls want it: what an operator must hear of, before a pull gives up.

    failed    a connection could not be made, or both ends do not trust each other; again with every try
    waiting   a stream waits for bytes, and is silent while its guard notes none
    reached   a connection stands: what failed before is forgotten

Short troubles are none: a process that ends, a line that stumbles. Refuses to know what an operator can do (``endpoint``).
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

import numpy as np

from orchestrator.channel import frames, local_memory
from orchestrator.channel.cap import ByteBudget, wait
from orchestrator.channel.frames import (
    EXPRESS_BYTES,
    Address,
    Request,
    Status,
    Ticket,
    checksum,
    composite,
    range_checksums,
)
from orchestrator.channel.stream import SLICE_S, Guard, Identity, PlainStream, Stream, TlsStream
from orchestrator.errors import (
    PayloadDamaged,
    PayloadWithdrawn,
    TransferCancelled,
    TransferError,
    TransferRefused,
    TransferStalled,
)

HINDERED_S = 10.0
"""So long nothing comes from an address that is called hindered."""
FORGOTTEN_S = 30.0
"""So long after the last try nobody wants anything from an address any more. Longer than a try and the wait after it."""


@dataclass(frozen=True, slots=True)
class Hindrance:
    """``is_distrust``: the two ends reach each other, and do not accept each other's certificates."""

    address: Address
    reason: str
    is_distrust: bool = False


@dataclass(frozen=True, slots=True)
class _Failures:
    """Of connections to one address, with none in between that stood."""

    first_at: float
    last_at: float
    latest: Hindrance


class Hindrances:
    """Of one client. Thread-safe."""

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
        """While a stream with this guard waits for bytes from there."""
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
        """Of every address that is hindered now."""
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


class Reception:
    """``into`` takes the bytes; without it a buffer is made. Raises ValueError if it has not the payload's size."""

    def __init__(self, ticket: Ticket, into: memoryview | None = None) -> None:
        content = np.empty(ticket.size, np.uint8).data if into is None else into.cast("B")
        if len(content) != ticket.size or content.readonly:
            raise ValueError(f"{ticket.payload} has {ticket.size:,} bytes, and the buffer takes {len(content):,}")
        self.content = content
        self._ticket = ticket
        self._lock = threading.Lock()
        self._checksums: dict[int, int] = {}
        self._missing = deque(range(max(1, -(-ticket.size // ticket.range_bytes))))
        self._range_count = len(self._missing)

    def require_same(self, ticket: Ticket) -> None:
        """Raise ValueError if the ticket is of other bytes than those that have arrived."""
        if (ticket.size, ticket.range_bytes, ticket.checksum) != (
            self._ticket.size,
            self._ticket.range_bytes,
            self._ticket.checksum,
        ):
            raise ValueError(f"{ticket.payload} is not the payload of which a part is here already")

    @property
    def complete(self) -> bool:
        with self._lock:
            return len(self._checksums) == self._range_count

    @property
    def received_count(self) -> int:
        """How many ranges are here."""
        with self._lock:
            return len(self._checksums)

    @property
    def range_count(self) -> int:
        return self._range_count

    def part(self, number: int) -> memoryview:
        start = number * self._ticket.range_bytes
        return self.content[start : min(start + self._ticket.range_bytes, self._ticket.size)]

    def take(self) -> int | None:
        """The next missing range, which is the caller's until ``give_back`` or ``arrived``; None if none is left."""
        with self._lock:
            return self._missing.popleft() if self._missing else None

    def give_back(self, number: int) -> None:
        with self._lock:
            self._missing.appendleft(number)

    def arrived(self, number: int, checksum: int) -> None:
        """The range is in the buffer and has this checksum, which was computed here."""
        with self._lock:
            self._checksums[number] = checksum

    def require_whole(self) -> None:
        """Raise PayloadDamaged, and forget all that has arrived, if the ranges together are not the ticket's payload."""
        with self._lock:
            if composite([self._checksums[number] for number in range(self._range_count)]) == self._ticket.checksum:
                return
            self._checksums.clear()
            self._missing = deque(range(self._range_count))
        detail = "its ranges are sound, but together not the bytes that the ticket names: the server has others."
        raise PayloadDamaged(payload=self._ticket.payload, detail=detail)


log = logging.getLogger(__name__)

REQUESTS_AHEAD = 2
PIECE_BYTES = 1 << 20
"""Received between two looks at whether the pull is still wanted, and checked while a cache still holds it."""
DAMAGED_RANGES_MAX = 3
BROKEN_MAX = 32
"""So many connections in a row that brought no whole range are no bad luck."""
RETRY_MIN_S, RETRY_MAX_S = 0.05, 2.0
CONNECT_S = 5.0
"""For one try: TCP alone doubles its waits, and would try again long after a line is whole."""
NEAR_S = 0.005
"""A server that answers a connection sooner needs no more than ``STREAMS_NEAR``: more only share the processor."""
STREAMS_NEAR = 2


@dataclass(frozen=True, slots=True)
class Pulling:
    """``streams`` is for lines that are long; ``bytes_max`` bounds what all pulls of this client have under way.

    ``payload_bytes_max`` bounds what a ticket may announce; ``stall_s`` is the limit of progress.
    """

    streams: int = 8
    bytes_max: int = 4 << 30
    payload_bytes_max: int = 1 << 40
    stall_s: float = 60.0


@dataclass(frozen=True, slots=True)
class _Lane:
    """Connections that may stand in for each other."""

    address: Address
    express: bool


class _Failed(Exception):
    """This address is of no use for the payload, now and later."""

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
        """True once its streams may stop: it is abandoned, has failed, or all is here."""
        return self._abandoned() or self._error is not None or self.reception.complete

    def guard(self) -> Guard:
        """For one stream."""
        return Guard(self._stall_s, self.unwanted)

    @contextmanager
    def receiving(self, guard: Guard) -> Iterator[None]:
        """While a range's bytes come with this guard: they count as progress, and handshakes do not."""
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
        """Ask there no more; the pull has failed if it was the last address."""
        with self._lock:
            if address in self._addresses:
                self._addresses.remove(address)
            if not self._addresses:
                self._error = self._error or reason

    def damaged(self, number: int) -> None:
        with self._lock:
            self._damaged_count += 1
            if self._damaged_count > DAMAGED_RANGES_MAX:
                detail = (
                    f"{self._damaged_count} times a range has arrived that differs from its checksum, last {number}."
                )
                self._error = self._error or PayloadDamaged(payload=self.ticket.payload, detail=detail)

    def broken(self, error: Exception) -> None:
        """A connection has failed. The pull fails, too, if no range moves on any, or all break before a range is whole."""
        with self._lock:
            self._broken_count += 1
            now = time.monotonic()
            moved_at = max([self._moved_at, *(guard.moved_at for guard in self._receiving)])
            if now - moved_at >= self._stall_s:
                detail = f"No byte of {self.ticket.payload} has moved (last: {error})"
            elif self._broken_count > BROKEN_MAX and now - self._arrived_at >= self._stall_s:
                detail = f"{self._broken_count} connections broke before a range of {self.ticket.payload} was whole"
            else:
                return
            self._error = self._error or TransferStalled(stall_s=self._stall_s, detail=detail)


class ChannelClient:
    """Pulls until ``close``, in as many threads as call it. ``subject`` is the island that it pulls for.

    ``hindrances`` are of the addresses from which nothing comes at present.
    """

    def __init__(self, subject: str, *, identity: Identity | None = None, pulling: Pulling | None = None) -> None:
        self._subject, self._pulling = subject, pulling or Pulling()
        self._context = identity.context(server_side=False) if identity else None
        self._budget = ByteBudget(self._pulling.bytes_max)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.hindrances = Hindrances()
        self._idle: dict[_Lane, list[Stream]] = {}
        self._connect_s: dict[Address, float] = {}

    def pull(
        self,
        ticket: Ticket,
        into: memoryview | None = None,
        *,
        reception: Reception | None = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> memoryview:
        """The payload; ``interface.PayloadClient`` says how."""
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
        """Pulls under way end with TransferCancelled; no connection is left."""
        with self._lock:
            self._closed.set()
            idle, self._idle = self._idle, {}
        for streams in idle.values():
            for stream in streams:
                stream.close()

    def _require_usable(self, ticket: Ticket) -> None:
        if ticket.credential.island != self._subject:
            detail = (
                f"The ticket of {ticket.payload} was issued to {ticket.credential.island}, and this is {self._subject}."
            )
            raise TransferRefused(detail=detail)
        if ticket.tls is not (self._context is not None):
            sides = ("only the server uses", "only the client uses")[self._context is not None]
            raise TransferRefused(detail=f"{sides} TLS.", remedy="Give both an identity of the job, or none.")
        if not 0 <= ticket.size <= self._pulling.payload_bytes_max or ticket.range_bytes <= 0 or not ticket.addresses:
            detail = f"{ticket.payload} is to have {ticket.size:,} bytes in ranges of {ticket.range_bytes:,}"
            raise TransferRefused(detail=f"{detail}; {self._pulling.payload_bytes_max:,} is the most.")

    # ── memory of this machine ────────────────────────────────────────────────────────────────────────────────────────

    def _pull_near(self, ticket: Ticket, into: memoryview | None, abandoned: Callable[[], bool]) -> memoryview | None:
        """The payload in the server's memory, or None where the server is elsewhere or it fails: the network may do."""
        if ticket.local is None or not local_memory.AVAILABLE:
            return None
        try:
            stream = PlainStream(local_memory.connect(ticket.local), Guard(self._pulling.stall_s, abandoned))
        except OSError:
            return None
        try:
            frames.send_request(stream, Request(ticket.credential, 0, min(ticket.size, ticket.range_bytes)))
            reply = frames.receive_head(stream)
            if reply.status is not Status.CONTENT:
                return None
            content = local_memory.receive_mapping(stream, ticket.size)
        except (OSError, TransferStalled, TransferRefused) as error:
            log.info("%s is not taken from this machine's memory: %s", ticket.payload, error)
            return None
        finally:
            stream.close()
        if into is not None:
            into.cast("B")[:] = content
            content = into.cast("B")
        if composite(range_checksums(content, ticket.range_bytes)) != ticket.checksum:
            raise PayloadDamaged(payload=ticket.payload, detail="the server has others than the ticket names.")
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
        """As many as the line can use; whether it is long, the first connection has shown."""
        if pull.express:
            return 1
        address = pull.ticket.addresses[0]
        if address not in self._connect_s and (stream := self._first_connection(pull, address)) is not None:
            self._put_by(_Lane(address, pull.express), stream)
        near = self._connect_s.get(address, NEAR_S) < NEAR_S
        missing_count = pull.reception.range_count - pull.reception.received_count
        return max(1, min(STREAMS_NEAR if near else self._pulling.streams, missing_count))

    def _first_connection(self, pull: _Pull, address: Address) -> Stream | None:
        try:
            return self._connected(_Lane(address, pull.express), pull.guard())
        except (OSError, TransferError):
            return None  # ``_work`` meets it again, and judges it

    def _work(self, pull: _Pull) -> None:
        """Bring ranges until none is missing that no other stream has asked for."""
        attempt, retry_s = 0, RETRY_MIN_S
        while not pull.unwanted() and (address := pull.address(attempt)) is not None:
            before = pull.reception.received_count
            try:
                self._bring_ranges(pull, _Lane(address, pull.express))
                return
            except TransferCancelled:
                return
            except _Failed as failed:
                pull.dismiss(address, failed.reason)
                continue
            except (OSError, TransferStalled) as error:
                if _is_distrust(error):
                    detail = f"{address} and this process do not trust each other: {error}."
                    pull.dismiss(address, TransferRefused(detail=detail))
                    continue
                log.info("%s: a connection to %s has failed: %s", pull.ticket.payload, address, error)
                pull.broken(error)
            attempt += 1
            retry_s = RETRY_MIN_S if pull.reception.received_count > before else min(RETRY_MAX_S, 2 * retry_s)
            wait(retry_s, pull.unwanted, SLICE_S)

    def _bring_ranges(self, pull: _Pull, lane: _Lane) -> None:
        """Over one connection. Ranges that were asked for and have not arrived are given back, whatever happens."""
        owed: deque[int] = deque()
        stream = self._stream(lane, pull.guard())
        try:
            while True:
                while len(owed) < REQUESTS_AHEAD and (number := pull.reception.take()) is not None:
                    owed.append(number)
                    start, size = number * pull.ticket.range_bytes, len(pull.reception.part(number))
                    frames.send_request(stream, Request(pull.ticket.credential, start, size))
                if not owed:
                    break
                with self.hindrances.waiting(lane.address, stream.guard):
                    self._receive_range(pull, stream, owed[0])
                owed.popleft()
        except BaseException:
            for number in reversed(owed):
                pull.reception.give_back(number)
            stream.close()
            raise
        self._put_by(lane, stream)

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
            raise ConnectionError(f"range {number} has arrived damaged")
        pull.arrived(number, reply.checksum)

    # ── connections ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _stream(self, lane: _Lane, guard: Guard) -> Stream:
        """An idle connection of this lane, or a new one."""
        with self._lock:
            idle = self._idle.get(lane)
            stream = idle.pop() if idle else None
        if stream is None:
            return self._connected(lane, guard)
        stream.guard = guard
        return stream

    def _connected(self, lane: _Lane, guard: Guard) -> Stream:
        try:
            stream = self._opened(lane.address, guard)
        except (OSError, TransferStalled) as error:
            self.hindrances.failed(lane.address, _reason_of(error), is_distrust=_is_distrust(error))
            raise
        self.hindrances.reached(lane.address)
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

    def _put_by(self, lane: _Lane, stream: Stream) -> None:
        """For the next pull, unless there are enough or the client is closed."""
        with self._lock:
            idle = self._idle.setdefault(lane, [])
            room = len(idle) < self._pulling.streams and not self._closed.is_set()
            if room:
                idle.append(stream)
        if not room:
            stream.close()


def _is_distrust(error: OSError | TransferStalled) -> bool:
    """True where certificates are the matter, which another try does not change. A damaged record is another matter."""
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
    return TransferCancelled(detail=f"{ticket.payload} is not wanted any more.")
