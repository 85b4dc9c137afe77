"""One process's end of its job's channel: the server of what it hands over, and the client of what it is handed.

    Payload(content) ─▶ carried ─┬─ small: the bytes themselves, inside the call that hands them over
                                 └─ else: a ticket, by which the receiver pulls them ─▶ received

A payload is served for as long as somebody holds its ``Payload``. Each process signs its own tickets with a secret that
never leaves it; what it is handed to become a member (``Membership``) travels by the job's authenticated calls.
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

from orchestrator.channel.client import ChannelClient, Hindrance, Pulling
from orchestrator.channel.frames import Address, Ticket
from orchestrator.channel.server import ChannelServer, Listening
from orchestrator.channel.stream import Identity
from orchestrator.errors import ConfigurationError

Carried = NDArray[np.uint8] | Ticket
"""A payload as a call carries it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How the processes of a job serve and pull; the specification's section ``transport`` says what each is."""

    streams: int = 8
    ports: tuple[int, int] = (0, 0)
    stall_s: float = 60.0
    bytes_per_s: float | None = None
    inline_bytes_max: int = 64 << 10
    shared_memory: bool = True
    tls: Literal["auto", "always", "never"] = "auto"


@dataclass(frozen=True, slots=True)
class Membership:
    """What makes a process a member of its job's channel. ``identity`` is None where nothing is encrypted."""

    job: str
    subject: str
    epoch: int
    terms: Terms
    identity: Identity | None = field(default=None, repr=False)


def rank_subject(subject: str, rank: int) -> str:
    """What the process of this rank is called, in an island whose rank 0 is called ``subject``."""
    return f"{subject}/{rank}" if rank else subject


class Payload:
    """Content that is handed over, to each receiver as it is wanted; it must not change. ``Endpoint.payload`` makes one."""

    def __init__(self, endpoint: Endpoint, name: str, content: memoryview) -> None:
        self.byte_count = len(content)
        self.inline = self.byte_count <= endpoint.membership.terms.inline_bytes_max
        self.name, self._endpoint = name, endpoint
        self._content = np.frombuffer(content, np.uint8) if self.inline else None

    def carried(self, receiver: str) -> Carried:
        """For a call to the process with this subject. Raises PayloadWithdrawn once the endpoint is closed."""
        return self._endpoint.server.ticket(self.name, receiver) if self._content is None else self._content


class Endpoint:
    """Until ``close``. ``host`` is the address of this node, on which it listens.

    Raises ConfigurationError where payloads would leave the machine unencrypted and the terms do not say that they may.
    """

    def __init__(self, membership: Membership, host: str) -> None:
        terms, identity = membership.terms, membership.identity
        if identity is None and encrypts(terms, host):
            detail = f"{membership.subject} is at {host}, and the channel of job {membership.job} is not encrypted"
            raise ConfigurationError(detail=f"{detail}. Set transport.tls to always, or to never if it may be so.")
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
        """Have this content ready for whoever gets it ``carried``. ``name`` is for people."""
        self.withdraw_unheld()
        own_name = f"{name}#{next(self._serial)}"
        payload = Payload(self, own_name, content)
        if not payload.inline:
            self.server.serve(own_name, content)
            # the collector may call it in any thread, also in one that has the server's lock: a queue is all it touches
            weakref.finalize(payload, self._unheld.put, own_name).atexit = False
        return payload

    def withdraw_unheld(self) -> None:
        """Let go of payloads that nobody holds any more."""
        while True:
            try:
                self.server.withdraw(self._unheld.get_nowait())
            except queue.Empty:
                return

    def received(self, carried: Carried, abandoned: Callable[[], bool] = lambda: False) -> memoryview:
        """The content, pulled if it has to be; it may be read-only. Raises as ``PayloadClient.pull``."""
        if isinstance(carried, Ticket):
            return self.client.pull(carried, abandoned=abandoned)
        return carried.data

    def hindrances(self, address: Address | None = None) -> tuple[str, ...]:
        """What is in the way of pulls from this address, or of all, at present, and what to do about it: for operators."""
        hindered = self.client.hindrances.current()
        return tuple(self._in_words(one) for one in hindered if address in (None, one.address))

    def _in_words(self, hindrance: Hindrance) -> str:
        host, there = self.server.address.host, hindrance.address
        if hindrance.is_distrust:
            words = f"{there} and this process at {host} do not trust each other ({hindrance.reason})"
            return f"{words}. Let the channel's connections through as they are: nothing may open their encryption."
        first, last = self.membership.terms.ports
        name = f"transport.ports, {first} to {last}," if last else "any port (or name a range in transport.ports)"
        words = f"nothing comes from {there} to {host} ({hindrance.reason})"
        return (
            f"{words}. Let TCP to {there.host} through, on {name} and back likewise; `atoll doctor --lines` tries it."
        )

    def close(self) -> None:
        self.client.close()
        self.server.close()


def encrypts(terms: Terms, host: str) -> bool:
    """Whether a job's channel is encrypted where this is the address of one of its processes."""
    return terms.tls == "always" or (terms.tls == "auto" and not ipaddress.ip_address(host).is_loopback)
