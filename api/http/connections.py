"""Limits on connections: how many there may be, and for how long without getting anywhere, before any request is read.

    accepted ──▶ too many of its address, or in all? ──▶ one of those that ask nothing makes room, or it is refused
        └──▶ TLS handshake ──▶ head of a request ──▶ answer ──▶ head of the next …
              HANDSHAKE_S        HEAD_S                WRITE_S for what the client does not read

Responsible for strangers not keeping others out: connections are counted from the instant they are accepted, in all and by
address, and whoever neither finishes a handshake, nor a request's head, nor reads what is sent, is let go. Where there are
too many, the one that has waited longest without a request is closed for the new one, so that a flood of idle or half
open connections costs the flood its own. What is refused is logged, once a minute with a count.

uvicorn speaks HTTP (``H11Protocol``); it accepts without counting, and waits for heads and slow readers without end. Bodies
have their own limits (``api.http.bodies``).

Source: RFC 9112, section 9.8; nginx's client_header_timeout, send_timeout and limit_conn, and its reuse of idle connections.

The service's own certificate, read again where its files have changed: new handshakes show the new one.

Whoever renews it tells nobody, and need not: connections that are there go on, and the next one is made with what the files
hold by then. Files that do not belong together, as between the writing of two, leave the service with what it has.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.http.problems import CONTENT_TYPE, refused

logger = logging.getLogger(__name__)


class ServedCertificate:
    """Of a context that is in use."""

    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path) -> None:
        self._context, self._files = context, (certificate, key)
        self._read = self._refused = self._seen()

    def refresh(self) -> None:
        """The next handshake of the context shows what the files hold, if they are of use."""
        seen = self._seen()
        if seen in (self._read, self._refused):
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files, password="")
            self._context.load_cert_chain(*self._files, password="")
        except OSError as error:
            self._refused = seen
            logger.warning("%s and its key have changed and cannot be used: %s", self._files[0], error)
            return
        self._read = seen
        logger.info("the certificate %s has changed, and is shown from now on", self._files[0])

    def _seen(self) -> tuple[tuple[int, ...], ...]:
        """Empty for a file that is not there."""
        return tuple(_state(path) for path in self._files)


def _state(path: Path) -> tuple[int, ...]:
    try:
        about = path.stat()
    except OSError:
        return ()
    return (about.st_ino, about.st_mtime_ns, about.st_size)


HANDSHAKE_S = 10.0
HEAD_S = 10.0
WRITE_S = 30.0
"""So long a client may read nothing of what waits for it, at most one piece of a download."""
CLOSING_S = 5.0
POLL_EVERY_S = 1.0
LOG_EVERY_S = 60.0
HEAD_BYTES_MAX = 32 << 10
WIRE_BYTES_MAX = 3 << 20
"""The limit for one request as it comes: a body of 1 MiB may come in chunks, but not each byte in one."""
BACKLOG = 1024

CONNECTIONS_MAX = 512
DESCRIPTORS_MAX = 1 << 16
DESCRIPTORS_APART = 64
"""For the database, the cluster, the log, and what else the process has open."""

_OF_UVICORN = logging.getLogger("uvicorn.error.connection")
_OF_UVICORN.setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The most connections at a time, in all and of one address."""

    total: int
    each: int


def limits_of(descriptor_count: int) -> ConnectionLimits:
    """The limits for a process with so many descriptors: each connection may have a file open, too.

    On loopback all users are one address, so that it has room for all streams of events and as many again.
    """
    total = max(8, min(CONNECTIONS_MAX, (descriptor_count - DESCRIPTORS_APART) // 2))
    return ConnectionLimits(total, max(4, total // 4))


def raise_descriptor_limit() -> int:
    """As many descriptors as the system allows this process, up to a bound; returns how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft


class Connection(H11Protocol):
    """uvicorn's protocol, which notes since when it waits for whom."""

    def __init__(self, config: uvicorn.Config, server: uvicorn.Server, refusals: RefusalLog) -> None:
        super().__init__(config, server.server_state, server.lifespan.state)
        self.logger = _OF_UVICORN  # a stranger could fill the disk with its warnings; ``refusals`` are counted
        self._refusals = refusals
        self._asks_nothing_since = time.monotonic()
        self._unread_since: float | None = None
        self._closing_since: float | None = None
        self._wire_bytes = 0
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def asks_nothing_since(self) -> float | None:
        """Since when there is no request on it; None while there is one."""
        return self._asks_nothing_since if self.cycle is None or self.cycle.response_complete else None

    def late(self, now: float) -> str | None:
        """The reason to close the connection now, or None."""
        if self.transport.is_closing():
            self._closing_since = self._closing_since or now
            return "did not take what was left for them" if now - self._closing_since > CLOSING_S else None
        if self._unread_since is not None and now - self._unread_since > WRITE_S:
            return "did not read what they had asked for"
        if (since := self.asks_nothing_since) is not None and now - since > HEAD_S:
            return "did not finish the head of a request"
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._wire_bytes += len(data)
        if self._wire_bytes > WIRE_BYTES_MAX:
            self._refusals.note("sent more than any request may have", str(self.client and self.client[0]))
            self.transport.abort()
            return
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._asks_nothing_since = time.monotonic()
        self._wire_bytes = 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """As for every other refusal, a problem document. uvicorn's own is text."""
        self._refusals.note("sent what is no HTTP", str(self.client and self.client[0]))
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(problem_of(400, "The request is not HTTP, or its head is too long."))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """A request that asks for another protocol is answered as if it had not. uvicorn logs two lines for each."""


class RefusalLog:
    """Counts of refused connections, logged at once, then once a minute."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._last_address = ""
        self._logged_at = float("-inf")

    def note(self, what: str, address: str) -> None:
        """Count a connection of this address that was closed for the reason ``what``."""
        self._counts[what] += 1
        self._last_address = address
        self.tell()

    def tell(self) -> None:
        """Log the counts, if the last time is long enough ago."""
        now = time.monotonic()
        if self._counts and now - self._logged_at > LOG_EVERY_S:
            counts = "; ".join(f"{count} {what}" for what, count in self._counts.items())
            logger.warning("connections were closed: %s (the last of %s)", counts, self._last_address)
            self._counts.clear()
            self._logged_at = now


@dataclass(eq=False, slots=True)
class ClientConnection:
    """One accepted connection. ``connection`` is None during the handshake."""

    network: str
    address: str
    accepted_at: float
    shaking_hands: asyncio.Task[None] | None = None
    connection: Connection | None = None

    @property
    def asks_nothing_since(self) -> float | None:
        return self.connection.asks_nothing_since if self.connection else self.accepted_at

    def end(self) -> None:
        if self.connection is not None:
            self.connection.transport.abort()
        elif self.shaking_hands is not None:
            self.shaking_hands.cancel()


class Acceptor:
    """Accepts connections in the place of uvicorn's ``asyncio.Server``, and counts them."""

    def __init__(self, listener: socket.socket, server: uvicorn.Server, limits: ConnectionLimits) -> None:
        self._listener, self._server, self._limits = listener, server, limits
        self._clients: dict[str, set[ClientConnection]] = {}
        self._refusals = RefusalLog()
        config = server.config
        self._served = None
        if config.ssl and config.ssl_certfile and config.ssl_keyfile:
            self._served = ServedCertificate(config.ssl, Path(config.ssl_certfile), Path(config.ssl_keyfile))
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Start accepting."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._tasks = [asyncio.create_task(self._accept()), asyncio.create_task(self._close_late())]

    def close(self) -> None:
        """Nobody comes in any more. uvicorn sees to those who are in."""
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is left, or it went away again at once
                self._refusals.note(f"could not be accepted: {error.strerror}", "somebody")
                await asyncio.sleep(0.05)
                continue
            self._admit(accepted, str(peer[0]))

    def _admit(self, accepted: socket.socket, address: str) -> None:
        network = network_of(address)
        full = ""
        if len(self._clients.get(network, ())) >= self._limits.each:
            full = f"were more than the {self._limits.each} of one address"
            has_room = self._make_room([self._clients[network]])
        elif sum(map(len, self._clients.values())) >= self._limits.total:
            full = f"were more than the {self._limits.total} that the service bears"
            has_room = self._make_room(sorted(self._clients.values(), key=len, reverse=True))
        if full and not has_room:
            self._refusals.note(full, address)
            if self._server.config.ssl is None:
                with suppress(OSError):
                    accepted.send(problem_of(503, "The service has as many connections as it bears."))
            accepted.close()
            return
        if full:
            self._refusals.note(f"waited without a request and {full}", address)
        client = ClientConnection(network, address, time.monotonic())
        self._clients.setdefault(network, set()).add(client)
        client.shaking_hands = asyncio.create_task(self._shake_hands(accepted, client))

    def _make_room(self, networks: list[set[ClientConnection]]) -> bool:
        """The one that has waited longest without a request is gone, of the first network that has such. False if none."""
        for clients in networks:
            idle = [(since, client) for client in clients if (since := client.asks_nothing_since) is not None]
            if idle:
                _, longest = min(idle, key=lambda pair: pair[0])
                longest.end()
                self._forget(longest)
                return True
        return False

    async def _shake_hands(self, accepted: socket.socket, client: ClientConnection) -> None:
        """The connection is uvicorn's, after a handshake where there is TLS."""

        def new_connection() -> Connection:
            connection = Connection(self._server.config, self._server, self._refusals)
            connection.on_lost = lambda: self._forget(client)
            return connection

        tls = self._server.config.ssl
        if self._served is not None:
            self._served.refresh()
        try:
            _, connection = await asyncio.get_running_loop().connect_accepted_socket(
                new_connection, accepted, ssl=tls, ssl_handshake_timeout=HANDSHAKE_S if tls else None
            )
            client.connection = connection
        except BaseException as error:
            self._forget(client)
            if isinstance(error, asyncio.CancelledError):
                raise
            self._refusals.note("failed in the TLS handshake", client.address)

    async def _close_late(self) -> None:
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            now = time.monotonic()
            for client in [client for here in self._clients.values() for client in here]:
                if client.connection is not None and (why := client.connection.late(now)):
                    self._refusals.note(why, client.address)
                    client.end()
            self._refusals.tell()

    def _forget(self, client: ClientConnection) -> None:
        here = self._clients.get(client.network, set())
        here.discard(client)
        if not here:
            self._clients.pop(client.network, None)


class Server(uvicorn.Server):
    """uvicorn, which accepts through doors."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        acceptors: list[Any] = [Acceptor(listener, self, self._limits) for listener in sockets or ()]
        self.servers = acceptors
        for acceptor in acceptors:
            acceptor.open()


def network_of(address: str) -> str:
    """The network that counts as one address: with IPv6 everybody has 2**64 addresses."""
    ip = ip_address(address.partition("%")[0])
    if not isinstance(ip, IPv6Address):
        return str(ip)
    return str(ip.ipv4_mapped or int(ip) >> 64)


def problem_of(status: int, detail: str) -> bytes:
    """A whole answer for a connection that ends with it, and has seen no request that could be read."""
    body = refused(status, detail).model_dump_json(exclude_defaults=True).encode()
    reason = {400: "Bad Request", 503: "Service Unavailable"}[status]
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
