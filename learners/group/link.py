"""The link between the processes of an island of many hosts: a TCP connection between rank 0 and each of the others.

    rank 0 ── orders ──▶ rank i        frame: size (u32) · HMAC-SHA256 of (direction, rank, number, message) · message
    rank 0 ◀─ answers ── rank i        message: pickled frozen data (``messages``)

The key is the incarnation's own. It comes by the service's calls, and is never on a disk; a frame that nobody who has it
made is not unpickled, and one that comes twice or out of turn is not either. What is said is not secret: it names arrays,
and carries no more of them than JAX's collectives on the same line do.

Messages go one way each, beside steps: nobody waits for an answer to one (``leader``). A connection's end is how the death
of a process is known to the others within a round trip, whatever becomes of the service.
Refuses to know what messages mean.

What the processes of an island of many hosts say to each other.

Rank 0 says what is to be done, and the others what they hold and how it went. All of it is frozen data; arrays are named,
not carried, but for payloads so small that any call of the service would carry them too.

The devices of an island of many hosts as one: JAX's distributed runtime, begun before any of its devices is used.

Source: JAX 0.10.2, as measured: its preemption notifier swallows SIGTERM, and its own way of noticing a death takes its
heartbeat's timeout and then hangs or aborts. So the one is off, the other as good as: who dies is noticed by the link
(``link``), and a process that is merely stopped for a while must not end the others.
"""

from __future__ import annotations

import hmac
import pickle
import socket
import struct
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from learners.island_spec import IslandSpec
from orchestrator.actors.island import Rank
from orchestrator.channel.endpoint import Carried
from orchestrator.checkpoints.manifest import File
from orchestrator.core.messages import Broken
from orchestrator.core.vocabulary import Epoch, IslandId, Version
from orchestrator.errors import InfrastructureError, InvalidJobSpec, Problem
from orchestrator.replica.replica import Action, AdoptVersion
from orchestrator.system.logbook import Logbook

INITIALISED_S = 300
"""For the last process to come: it may have to import JAX on a busy machine. A death before that ends all by the link."""
HEARTBEAT_S = 7 * 86_400
JOIN_S = 60.0
"""So long after rank 0 has begun the others must have joined; each does so before it imports anything large."""
HELLO_S = 5.0
MESSAGE_BYTES_MAX = 64 << 20
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
"""Seconds, seconds, probes: a host that lost its power says nothing more, and is gone after 40 s."""
_SIZE = struct.Struct("<I")
_NUMBER = struct.Struct("<BIQ")
_DIGEST = "sha256"
_DIGEST_BYTES = 32
FROM_RANK_0, TO_RANK_0 = 0, 1


def join(rank: Rank) -> tuple[int, ...]:
    """Make this process one of the island's; return how many devices are on each of its hosts, by rank."""
    import jax

    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    place = f"[{rank.place.host}]" if ":" in rank.place.host else rank.place.host
    address = f"{place}:{rank.place.devices_port}"
    jax.distributed.initialize(
        address,
        coordinator_bind_address=address if rank.number == 0 else None,  # by default it listens on all interfaces
        num_processes=rank.size,
        process_id=rank.number,
        initialization_timeout=INITIALISED_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
    )
    counts = Counter(device.process_index for device in jax.devices())
    return tuple(counts[number] for number in range(rank.size))


def require_promised(spec: IslandSpec, device_counts: Sequence[int]) -> None:
    """Raises InvalidJobSpec where a host of this island has fewer devices than its entry promises. Counts are by rank."""
    promised = spec.accelerator_count
    short = [f"host {number} has {count}" for number, count in enumerate(device_counts) if count < promised]
    if short:
        few = ", ".join(short) if len(device_counts) > 1 else f"{socket.gethostname()} has {device_counts[0]}"
        raise InvalidJobSpec(
            problems=(
                Problem(
                    f"{spec.path}.accelerators",
                    f"promises {promised} devices of each host, and {few}.",
                    "Lower accelerators, or repair the host: its drivers, or what else uses its devices.",
                ),
            )
        )


# ── from rank 0 ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Beat:
    """Boundary ``number``: carry these out, say what you hold, and take the step behind it; None: none follows."""

    number: int
    actions: tuple[Action, ...]
    cuts: tuple[Hashable, ...]
    schedule_step: int | None


@dataclass(frozen=True, slots=True)
class TakeOuter:
    """Begin from the synchroniser's parameters: one payload a fragment, of what this process holds."""

    epoch: Epoch
    versions: tuple[Version, ...]
    step: int
    cursor: int
    payloads: tuple[Carried, ...]


@dataclass(frozen=True, slots=True)
class TakeSaved:
    """Begin from the state that the checkpoint in ``folder`` has of this island."""

    folder: str
    cursor: int


@dataclass(frozen=True, slots=True)
class FetchPart:
    """Get from these processes of a peer, by their names, what of a fragment's state is to lie here, and keep it.

    ``cut`` is what they call the boundary that it is of, ``chunk`` what ``TakePeer`` calls it.
    """

    epoch: Epoch
    chunk: str
    fragment: int
    cut: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakePeer:
    """Begin from these chunks of a peer's state: of what is in several, the last one's stays."""

    chunks: tuple[str, ...]
    versions: tuple[Version, ...]
    step: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Begin as this island, which has this logbook, from what a standby holds and these versions."""

    island: IslandId
    book: Logbook
    adoptions: tuple[AdoptVersion, ...]
    shard_index: int
    cursor: int


StateOrder = TakeOuter | TakeSaved | FetchPart | TakePeer


Order = Beat | StateOrder | Promote


# ── to rank 0 ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Prepared:
    """The model is built, on so many devices of this host. ``process`` is what others call this process."""

    device_count: int
    process: str = ""


@dataclass(frozen=True, slots=True)
class News:
    """Boundary ``number`` is carried out; ``versions`` of all fragments lie ready here, −1 for none."""

    number: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """What rank 0 last wanted, other than a boundary, is done; ``problem`` says why it is not."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """This process's part of a cut is on the disk, in these files of the island's folder; ``problem`` says why not."""

    cut: Hashable
    files: tuple[File, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """This process cannot go on, and so the island cannot."""

    report: Broken


Answer = Prepared | News | Done | Written | Failed


class LinkEnded(InfrastructureError):
    """The process at the other end is gone, or what comes from there is not what it sent."""


class Line:
    """One connection. One thread may send while another receives. Raises LinkEnded."""

    def __init__(self, connection: socket.socket, key: bytes, rank: int, *, leads: bool) -> None:
        self._connection, self._key, self._rank = connection, key, rank
        self._outgoing, self._incoming = (FROM_RANK_0, TO_RANK_0) if leads else (TO_RANK_0, FROM_RANK_0)
        self._sent = self._received = 0
        self._sending = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux's; elsewhere the system's own patience
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Any) -> None:
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            mac = _mac(self._key, self._outgoing, self._rank, self._sent, content)
            self._sent += 1
            try:
                self._connection.sendall(_SIZE.pack(len(content)) + mac + content)
            except OSError as error:
                raise LinkEnded(detail=f"the process of rank {self._rank} cannot be reached: {error}.") from error

    def receive(self) -> Any:
        content = _frame(self._connection, MESSAGE_BYTES_MAX, self._key, self._incoming, self._rank, self._received)
        self._received += 1
        return pickle.loads(content)  # only its island's processes have the key

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def listener(host: str) -> socket.socket:
    """Rank 0's, at any free port of this address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def admitted(listening: socket.socket, size: int, key: bytes, join_s: float = JOIN_S) -> dict[int, Line]:
    """The lines to ranks 1 to ``size`` − 1, once all have joined. Who has not the key is turned away.

    Raises LinkEnded when some have not joined in time.
    """
    lines: dict[int, Line] = {}
    listening.settimeout(join_s)
    try:
        while len(lines) < size - 1:
            connection, _ = listening.accept()
            with suppress(LinkEnded, OSError):
                rank = _rank_of(connection, key)
                if 0 < rank < size and rank not in lines:
                    lines[rank] = Line(connection, key, rank, leads=True)
                    lines[rank]._received = 1  # its greeting
                    continue
            connection.close()
    except TimeoutError as error:
        missing = ", ".join(str(rank) for rank in range(1, size) if rank not in lines)
        raise LinkEnded(detail=f"the processes of the hosts {missing} have not joined within {join_s:g} s.") from error
    finally:
        listening.close()
    return lines


def joined(address: tuple[str, int], rank: int, key: bytes) -> Line:
    """The line of this rank to rank 0. Raises LinkEnded."""
    try:
        connection = socket.create_connection(address, timeout=JOIN_S)
    except OSError as error:
        raise LinkEnded(detail=f"rank 0 cannot be reached at {address[0]}:{address[1]}: {error}.") from error
    line = Line(connection, key, rank, leads=False)
    content = _NUMBER.pack(TO_RANK_0, rank, 0)
    connection.sendall(_SIZE.pack(len(content)) + _mac(key, TO_RANK_0, rank, 0, content) + content)
    line._sent = 1
    return line


def _rank_of(connection: socket.socket, key: bytes) -> int:
    """The rank that greets, which the greeting's code covers."""
    connection.settimeout(HELLO_S)
    size, mac = _head(connection)
    if size != _NUMBER.size:
        raise LinkEnded(detail="this is no greeting.")
    content = _exactly(connection, size)
    _, rank, _ = _NUMBER.unpack(content)
    if not hmac.compare_digest(mac, _mac(key, TO_RANK_0, rank, 0, content)):
        raise LinkEnded(detail="this greeting is a stranger's.")
    return int(rank)


def _frame(connection: socket.socket, bytes_max: int, key: bytes, direction: int, rank: int, number: int) -> bytes:
    size, mac = _head(connection)
    if size > bytes_max:
        raise LinkEnded(detail=f"a message of {size:,} bytes is announced, and none may be above {bytes_max:,}.")
    content = _exactly(connection, size)
    if not hmac.compare_digest(mac, _mac(key, direction, rank, number, content)):
        raise LinkEnded(detail=f"a message on the line of rank {rank} is not what was sent there.")
    return content


def _head(connection: socket.socket) -> tuple[int, bytes]:
    head = _exactly(connection, _SIZE.size + _DIGEST_BYTES)
    (size,) = _SIZE.unpack_from(head)
    return size, head[_SIZE.size :]


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(min(count - len(parts), 1 << 20))
        except OSError as error:
            raise LinkEnded(detail=f"the line broke: {error}.") from error
        if not part:
            raise LinkEnded(detail="the process at the other end is gone.")
        parts += part
    return bytes(parts)


def _mac(key: bytes, direction: int, rank: int, number: int, content: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(direction, rank, number) + content, _DIGEST)
