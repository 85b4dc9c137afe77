"""One process's end of its job's channel: a server for the payloads it gives, and a client for those it receives.

    Payload(content) ─▶ carried ─┬─ small: the bytes themselves, in the call that hands the payload over
                                 └─ else: a ticket, with which the receiver pulls them ─▶ received

A payload is served as long as its ``Payload`` object is alive. Each process signs its tickets with a secret that never
leaves it. A process joins with a ``Membership``, which travels in the job's authenticated calls.
"""

from __future__ import annotations

import ipaddress
import itertools
import queue
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from orchestrator.certificates import Identity
from orchestrator.channel.client import ChannelClient, Hindrance, Pulling
from orchestrator.channel.frames import Address, Ticket
from orchestrator.channel.server import ChannelServer, Listening
from orchestrator.errors import ConfigurationError

Carried = NDArray[np.uint8] | Ticket
"""A payload as a call carries it: its bytes, or a ticket."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings of a job's channel. The fields are those of the specification's section ``transport``."""

    streams: int = 8
    ports: tuple[int, int] = (0, 0)
    stall_s: float = 60.0
    bytes_per_s: float | None = None
    inline_bytes_max: int = 64 << 10
    shared_memory: bool = True
    tls: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, slots=True)
class Membership:
    """The data with which a process joins its job's channel. ``identity`` is None if the channel is not encrypted."""

    job: str
    subject: str
    epoch: int
    terms: Terms
    identity: Identity | None = field(default=None, repr=False)


def rank_subject(subject: str, rank: int) -> str:
    """Return the channel's name for the process with this rank, in an island whose rank 0 is ``subject``."""
    return f"{subject}/{rank}" if rank else subject


class Payload:
    """Content to hand over to any number of receivers. It must not change. ``Endpoint.payload`` creates one."""

    def __init__(self, endpoint: Endpoint, name: str, content: memoryview) -> None:
        self.byte_count = len(content)
        self.inline = self.byte_count <= endpoint.membership.terms.inline_bytes_max
        self.name, self.content, self._endpoint = name, content, endpoint

    def carried(self, receiver: str) -> Carried:
        """Return the bytes, or a ticket for ``receiver``. Raises PayloadWithdrawn once the endpoint is closed."""
        if self.inline:
            return np.frombuffer(self.content, np.uint8)
        return self._endpoint.server.ticket(self.name, receiver)


class Endpoint:
    """Serves and pulls until ``close``. It listens on ``host``, the address of this node.

    Raises ConfigurationError if payloads would leave the machine unencrypted and the terms do not permit it.
    """

    def __init__(self, membership: Membership, host: str) -> None:
        terms, identity = membership.terms, membership.identity
        if identity is None and encrypts(terms, host):
            detail = f"{membership.subject} is at {host}, but the channel of job {membership.job} is not encrypted"
            raise ConfigurationError(detail=f"{detail}. Set transport.tls to always, or to never to permit it.")
        self.membership = membership
        self.server = ChannelServer(
            Listening(
                host,
                terms.ports,
                stall_s=terms.stall_s,
                bytes_per_second=terms.bytes_per_s,
                local_memory=terms.shared_memory,
            ),
            job=membership.job,
            epoch=membership.epoch,
            secret=secrets.token_bytes(32),
            identity=identity,
        )
        self.client = ChannelClient(
            membership.subject, identity=identity, pulling=Pulling(streams=terms.streams, stall_s=terms.stall_s)
        )
        self._serial = itertools.count(1)
        self._unheld: queue.SimpleQueue[str] = queue.SimpleQueue()

    def payload(self, name: str, content: memoryview) -> Payload:
        """Make this content available to receivers. ``name`` appears in messages."""
        self.withdraw_unheld()
        own_name = f"{name}#{next(self._serial)}"
        payload = Payload(self, own_name, content)
        if not payload.inline:
            self.server.serve(own_name, content)
            # the garbage collector may call it in any thread, even one that holds the server's lock, so it only uses a queue
            weakref.finalize(payload, self._unheld.put, own_name).atexit = False
        return payload

    def withdraw_unheld(self) -> None:
        """Withdraw payloads whose ``Payload`` object is gone."""
        while True:
            try:
                self.server.withdraw(self._unheld.get_nowait())
            except queue.Empty:
                return

    def received(self, carried: Carried, abandoned: Callable[[], bool] = lambda: False) -> memoryview:
        """Return the content, pulling it if needed. It may be read-only. Raises as ``ChannelClient.pull``."""
        if isinstance(carried, Ticket):
            return self.client.pull(carried, abandoned=abandoned)
        return carried.data

    def hindrances(self, address: Address | None = None) -> tuple[str, ...]:
        """Return, for operators, what currently blocks pulls from this address (None: from any), and what to do about it."""
        hindered = self.client.hindrances.current()
        return tuple(self._in_words(one) for one in hindered if address in (None, one.address))

    def _in_words(self, hindrance: Hindrance) -> str:
        host, there = self.server.address.host, hindrance.address
        if hindrance.is_distrust:
            words = f"{there} and this process at {host} do not accept each other's certificates ({hindrance.reason})"
            return f"{words}. Let the channel's connections pass unchanged: nothing in between may terminate TLS."
        first, last = self.membership.terms.ports
        name = f"transport.ports, {first} to {last}," if last else "any port (or set a range in transport.ports)"
        words = f"no bytes get from {there} to {host} ({hindrance.reason})"
        return f"{words}. Allow TCP to {there.host} on {name} and in return; `atoll doctor --lines` tests it."

    def close(self) -> None:
        self.client.close()
        self.server.close()


def encrypts(terms: Terms, host: str) -> bool:
    """Return whether the job's channel is encrypted if one of its processes has this address."""
    return terms.tls == "always" or (terms.tls == "auto" and not ipaddress.ip_address(host).is_loopback)
