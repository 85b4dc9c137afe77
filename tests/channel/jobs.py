"""Jobs for tests of the channel: servers and clients of one job, and a process that serves and can be killed."""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import psutil

from orchestrator.certificates import Identity
from orchestrator.certificates.authority import JobAuthority
from orchestrator.channel.client import ChannelClient, Pulling
from orchestrator.channel.frames import Address, Ticket
from orchestrator.channel.server import ChannelServer, Listening

LOOPBACK = "127.0.0.1"
ISLAND = "europe"
MIB = 1 << 20
RANGE = 4 * MIB
FAR = Listening(LOOPBACK, local_memory=False)
NEAR = Listening(LOOPBACK)


def content_of(size: int, seed: int = 0) -> memoryview:
    return memoryview(random.Random(seed).randbytes(size))


@dataclass
class Job:
    """Everything that is made is closed by ``close``, clients first."""

    tls: bool = True
    name: str = "job"
    secret: bytes = b"s" * 32
    authority: JobAuthority = field(default_factory=lambda: JobAuthority.new("job"))
    epoch: int = 1
    servers: list[ChannelServer] = field(default_factory=list)
    clients: list[ChannelClient] = field(default_factory=list)

    def identity(self, subject: str) -> Identity | None:
        return self.authority.issue(subject) if self.tls else None

    def server(self, listening: Listening = FAR) -> ChannelServer:
        server = ChannelServer(
            listening, job=self.name, epoch=self.epoch, secret=self.secret, identity=self.identity("shard")
        )
        self.servers.append(server)
        return server

    def client(self, subject: str = ISLAND, pulling: Pulling | None = None) -> ChannelClient:
        client = ChannelClient(subject, identity=self.identity(subject), pulling=pulling)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for party in (*self.clients, *self.servers):
            party.close()


def by_way_of(ticket: Ticket, *addresses: Address) -> Ticket:
    """The ticket with these addresses, over the network alone."""
    return replace(ticket, addresses=addresses, local=None)


def also_at(ticket: Ticket, other: Ticket) -> Ticket:
    """The ticket with the addresses of both servers, which serve the same payload."""
    return replace(ticket, addresses=(*ticket.addresses, *other.addresses))


def connection_count(server: ChannelServer) -> int:
    """The number of TCP connections that this process, which runs the server, holds open on the server's side."""
    port, sockets = server.address.port, psutil.Process().net_connections("tcp")
    return sum(bool(one.laddr) and one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in sockets)


class ServingProcess:
    """A process that serves one payload of the job, at ``bytes_per_second`` to the island."""

    def __init__(
        self, job: Job, size: int, *, listening: Listening = FAR, bytes_per_second: float | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        facts = (job.name, job.epoch, job.secret, job.identity("shard"), listening, size, bytes_per_second)
        self.process = context.Process(target=_serve, args=(there, facts), daemon=True)
        self.process.start()
        there.close()
        self.ticket: Ticket = self._pipe.recv()

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, facts: tuple[str, int, bytes, Identity | None, Listening, int, float | None]) -> None:
    name, epoch, secret, identity, listening, size, bytes_per_second = facts
    server = ChannelServer(listening, job=name, epoch=epoch, secret=secret, identity=identity)
    server.cap(ISLAND).bytes_per_second = bytes_per_second
    server.serve("theta", content_of(size))
    pipe.send(server.ticket("theta", ISLAND))
    try:
        pipe.recv()  # nothing comes: it ends with the process that started it
    except EOFError:
        server.close()
