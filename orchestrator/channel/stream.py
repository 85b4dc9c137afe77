"""One connection as a stream of bytes, plain or under mutual TLS, whose only time limit is one of progress.

``send`` and ``receive`` wait as long as bytes move. Where none moves for the guard's ``stall_s``, or nobody wants them any
more (read every ``SLICE_S``), they raise. A stream is used by one thread at a time; several may have one guard.

TLS goes through memory and not through ``ssl.SSLSocket``, which makes two system calls for each record of 16 KiB: in memory
a batch of records is encrypted at once and leaves with one call. ``tests/bench/channel_candidates.py`` has both.

The certificates of one job: an authority made in memory, and an identity for each process of the job.

The authority's private key never leaves the process that made it; an identity's key goes to its own process only,
with the job's own authenticated calls, and is written to no disk that outlives the call (``Identity.context``). Nobody but
the processes of this job has a certificate of this authority, so a connection that both ends have verified is one within
the job. Names in a certificate say for whom it was issued; they are no host names, because islands move between hosts.

Source: mutual TLS as in RFC 8446 section 4.4.2.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.x509.oid import NameOID

from orchestrator.certificates.authority import Authority, new_key, pem_of_certificates, pem_of_key
from orchestrator.errors import TransferCancelled, TransferStalled

LIFETIME = datetime.timedelta(days=3650)
"""Longer than any job: a certificate dies with its job's authority, not by a date in the middle of a run."""
ANY_NAME = "server"
"""Stands where others have a host's name, which nobody compares here."""


@dataclass(frozen=True, slots=True)
class Identity:
    """PEM texts: the own certificate and private key, and the authority's certificate, by which peers are verified."""

    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        """A context that shows this identity, and accepts only peers whose certificate the same authority has issued."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the authority vouches for the job; hosts have no names in it
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode("ascii"))
        with tempfile.TemporaryDirectory(prefix="atoll-identity-") as folder:  # the module takes file names only
            chain = Path(folder) / "identity.pem"
            descriptor = os.open(chain, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.private_key + self.certificate)
            context.load_cert_chain(chain)
        return context


class JobAuthority:
    """The authority of one job, for as long as its process lives. ``new`` makes one."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    @classmethod
    def new(cls, job: str) -> JobAuthority:
        return cls(Authority.new(f"atoll job {job}", LIFETIME))

    def issue(self, subject: str) -> Identity:
        """A new key and certificate for one process, which may both serve and pull."""
        private_key = new_key()
        certificate = self._authority.issue(subject, [ANY_NAME], private_key.public_key(), LIFETIME)
        own = pem_of_certificates([self._authority.certificate])
        return Identity(own, pem_of_certificates([certificate]), pem_of_key(private_key))


SLICE_S = 0.1
"""How soon a waiting stream notices that it is abandoned."""
BATCH_BYTES = 256 << 10
"""Encrypted at once; a level-2 cache holds it and what becomes of it."""
RECEIVE_BYTES = 1 << 20
PATIENCE_S = 20
"""A connection on which nothing is acknowledged for so long is given up, and made anew by who needs it. TCP alone doubles
its waits: after a cut of a minute it would try again a minute after the line is whole."""
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
"""What the server sends first. In TLS 1.3 a client's handshake is over before the server has looked at its certificate;
whoever asks before that may lose the alert which says that it is not trusted.
"""


@dataclass(slots=True)
class Guard:
    """When a stream is to stop waiting. ``moved_at`` is when a byte last moved on any stream with this guard."""

    stall_s: float
    abandoned: Callable[[], bool]
    moved_at: float = field(default_factory=time.monotonic)


class Stream(Protocol):
    """Bytes there and back. Whoever uses the stream next sets its guard."""

    guard: Guard

    @property
    def peer(self) -> str | None:
        """The subject of the peer's verified certificate; None where there is none."""
        ...

    def send(self, content: memoryview) -> None: ...

    def receive(self, into: memoryview) -> None:
        """Fill all of ``into``. Raises ConnectionError if the peer ends before."""
        ...

    def close(self) -> None: ...


class PlainStream:
    """A socket whose calls end by progress."""

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
        """Between one byte and all that fit."""
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
            raise TransferCancelled(detail="A newer payload has taken its place, or its user has closed.")
        if time.monotonic() - moved_at >= self.guard.stall_s:
            raise TransferStalled(stall_s=self.guard.stall_s)


class TlsStream:
    """The same under TLS. The handshake is over when the constructor returns."""

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
                self._flush()  # the alert, which tells the peer what was wrong
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
                written += self._tls.write(batch[written:])  # one record a call
            self._flush()

    def receive(self, into: memoryview) -> None:
        received = 0
        while received < len(into):
            try:
                count = int(self._tls.read(len(into) - received, into[received:]))  # a number, where a buffer is passed
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
    certificate = tls.getpeercert(binary_form=True)
    if certificate is None:
        return None
    names = x509.load_der_x509_certificate(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else None
