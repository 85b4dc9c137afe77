"""Limits on connections, in number and in time, before any request is read; and the certificate that they are shown.

    accepted ──▶ too many of its address, or in all? ──▶ an idle connection is closed for it, or it is refused
        └──▶ TLS handshake ──▶ head of a request ──▶ answer ──▶ head of the next …
              HANDSHAKE_S        HEAD_S                WRITE_S for what the client does not read

Keeps unknown clients from shutting others out. Connections are counted from the moment they are accepted, in all and by
address. A client that does not finish its handshake or its request's head, or does not read the answer, is disconnected.
Beyond the limit, the connection that has been idle longest is closed for the new one, so that a flood of idle or half open
connections displaces itself. Refusals are logged once a minute, with counts.

uvicorn speaks HTTP (``H11Protocol``), but accepts without counting and waits for heads and slow readers without limit.
Bodies have their own limits (``api.http.guard``).

``ServedCertificate`` reads the certificate again when its files have changed. Established connections are not affected; the
next handshake uses the new one. If the two files do not match, as between the writes of a renewal, the old one stays.

Source: RFC 9112, section 9.8; nginx's client_header_timeout, send_timeout and limit_conn, and its reuse of idle connections.
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

HANDSHAKE_S = 10.0
HEAD_S = 10.0
WRITE_S = 30.0
"""How long a client may leave its answer unread. At most one piece of a download is waiting for it."""
CLOSING_S = 5.0
POLL_EVERY_S = 1.0
LOG_EVERY_S = 60.0
HEAD_BYTES_MAX = 32 << 10
WIRE_BYTES_MAX = 3 << 20
"""The limit of one request on the wire: a body of 1 MiB may be chunked, but not into chunks of one byte."""
BACKLOG = 1024

CONNECTIONS_MAX = 512
DESCRIPTORS_MAX = 1 << 16
DESCRIPTORS_APART = 64
"""Descriptors left for the database, the cluster, the log and other files of the process."""

_OF_UVICORN = logging.getLogger("uvicorn.error.connection")
_OF_UVICORN.setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The numbers of connections allowed at a time, in all and from one address."""

    total: int
    each: int


def limits_of(descriptor_count: int) -> ConnectionLimits:
    """Return the limits for a process with so many descriptors. Each connection may have a file open as well.

    On loopback all users share one address, so the limit of an address has room for all event streams twice over.
    """
    total = max(8, min(CONNECTIONS_MAX, (descriptor_count - DESCRIPTORS_APART) // 2))
    return ConnectionLimits(total, max(4, total // 4))


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors as far as the system allows, up to a bound; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else soft


class Connection(H11Protocol):
    """uvicorn's protocol, which also records since when it waits for its client."""

    def __init__(self, config: uvicorn.Config, server: uvicorn.Server, refusals: RefusalLog) -> None:
        super().__init__(config, server.server_state, server.lifespan.state)
        self.logger = _OF_UVICORN  # an unknown client could fill the disk with its warnings; ``refusals`` counts them
        self._refusals = refusals
        self._asks_nothing_since = time.monotonic()
        self._unread_since: float | None = None
        self._closing_since: float | None = None
        self._wire_bytes = 0
        self.on_lost: Callable[[], None] = lambda: None

    @property
    def asks_nothing_since(self) -> float | None:
        """Since when there is no request on the connection; None while there is one."""
        return self._asks_nothing_since if self.cycle is None or self.cycle.response_complete else None

    def late(self, now: float) -> str | None:
        """Return the reason to close the connection now, or None."""
        if self.transport.is_closing():
            self._closing_since = self._closing_since or now
            return "did not read the rest of their answer" if now - self._closing_since > CLOSING_S else None
        if self._unread_since is not None and now - self._unread_since > WRITE_S:
            return "did not read their answer"
        if (since := self.asks_nothing_since) is not None and now - since > HEAD_S:
            return "did not complete the head of a request"
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._wire_bytes += len(data)
        if self._wire_bytes > WIRE_BYTES_MAX:
            self._refusals.note("exceeded the size limit of a request", str(self.client and self.client[0]))
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
        """Answer with a problem document, as every other refusal does. uvicorn would answer with text."""
        self._refusals.note("did not send HTTP", str(self.client and self.client[0]))
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(problem_of(400, "The request is not valid HTTP, or its head is too long."))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore requests to switch protocols without a log entry. uvicorn would log two lines for each."""


class RefusalLog:
    """Counts refused connections and logs the counts: the first at once, then once a minute."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._last_address = ""
        self._logged_at = float("-inf")

    def note(self, what: str, address: str) -> None:
        """Count a connection from this address that was closed for the reason ``what``."""
        self._counts[what] += 1
        self._last_address = address
        self.tell()

    def tell(self) -> None:
        """Log the counts, if the last log entry is old enough."""
        now = time.monotonic()
        if self._counts and now - self._logged_at > LOG_EVERY_S:
            counts = "; ".join(f"{count} {what}" for what, count in self._counts.items())
            logger.warning("connections were closed: %s (the last from %s)", counts, self._last_address)
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
    """Accepts and counts connections. Takes the place of uvicorn's ``asyncio.Server``."""

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
        """Stop accepting. uvicorn closes the established connections."""
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is free, or the client disconnected at once
                self._refusals.note(f"could not be accepted: {error.strerror}", "an unknown address")
                await asyncio.sleep(0.05)
                continue
            self._admit(accepted, str(peer[0]))

    def _admit(self, accepted: socket.socket, address: str) -> None:
        network = network_of(address)
        full = ""
        if len(self._clients.get(network, ())) >= self._limits.each:
            full = f"exceeded the limit of {self._limits.each} for one address"
            has_room = self._make_room([self._clients[network]])
        elif sum(map(len, self._clients.values())) >= self._limits.total:
            full = f"exceeded the limit of {self._limits.total} in all"
            has_room = self._make_room(sorted(self._clients.values(), key=len, reverse=True))
        if full and not has_room:
            self._refusals.note(full, address)
            if self._server.config.ssl is None:
                with suppress(OSError):
                    accepted.send(problem_of(503, "The service has too many connections."))
            accepted.close()
            return
        if full:
            self._refusals.note(f"were idle and {full}", address)
        client = ClientConnection(network, address, time.monotonic())
        self._clients.setdefault(network, set()).add(client)
        client.shaking_hands = asyncio.create_task(self._shake_hands(accepted, client))

    def _make_room(self, networks: list[set[ClientConnection]]) -> bool:
        """Close the longest idle connection of the first network that has one. Return False if there is none."""
        for clients in networks:
            idle = [(since, client) for client in clients if (since := client.asks_nothing_since) is not None]
            if idle:
                _, longest = min(idle, key=lambda pair: pair[0])
                longest.end()
                self._forget(longest)
                return True
        return False

    async def _shake_hands(self, accepted: socket.socket, client: ClientConnection) -> None:
        """Hand the connection to uvicorn, with TLS after the handshake."""

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
    """uvicorn's server with ``Acceptor`` in front."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        acceptors: list[Any] = [Acceptor(listener, self, self._limits) for listener in sockets or ()]
        self.servers = acceptors
        for acceptor in acceptors:
            acceptor.open()


class ServedCertificate:
    """The certificate of a context that is in use."""

    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path) -> None:
        self._context, self._files = context, (certificate, key)
        self._read = self._refused = self._seen()

    def refresh(self) -> None:
        """Load the files into the context if they have changed and are valid."""
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
        logger.info("the certificate %s has changed and is used for new connections", self._files[0])

    def _seen(self) -> tuple[tuple[int, ...], ...]:
        """Return what tells whether the files changed; empty for a missing file."""
        return tuple(_state(path) for path in self._files)


def _state(path: Path) -> tuple[int, ...]:
    try:
        about = path.stat()
    except OSError:
        return ()
    return (about.st_ino, about.st_mtime_ns, about.st_size)


def network_of(address: str) -> str:
    """Return the network that counts as one address: with IPv6 every client has 2**64 addresses."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:  # a name, as tests have
        return address
    if not isinstance(ip, IPv6Address):
        return str(ip)
    return str(ip.ipv4_mapped or int(ip) >> 64)


def problem_of(status: int, detail: str) -> bytes:
    """Return the bytes of an answer to a request that could not be parsed. The connection closes after it."""
    body = refused(status, detail).model_dump_json(exclude_defaults=True).encode()
    reason = {400: "Bad Request", 503: "Service Unavailable"}[status]
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
