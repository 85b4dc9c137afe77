"""The link between the processes of an island of several hosts: a TCP connection between rank 0 and each of the others.

   rank 0 ── orders ──▶ rank i        frame: size (u32) · HMAC-SHA256 of (direction, rank, number, message) · message
   rank 0 ◀─ answers ── rank i        message: pickled frozen data, the classes below

The key belongs to the incarnation. It arrives in the service's calls and is never on a disk. A frame is unpickled only if a
holder of the key made it, and if it is the next one: repeated frames and frames out of turn are refused. Messages are not
secret: they name arrays, and carry only payloads so small that any call of the service would carry them too.

Messages are sent while steps go on, and no sender waits for an answer (``leader``). When a process dies, its connection
ends, so the others know within a round trip, whatever happens to the service.

``join_devices`` makes the devices of all hosts one set: it starts JAX's distributed runtime, or PyTorch's, before any device
is used.

Source: JAX 0.10.2, as measured: its preemption notifier swallows SIGTERM, and it notices a death only after its heartbeat's
timeout, and then hangs or aborts. So the notifier is off, and the heartbeat practically is: the link notices a death, and a
process that is stopped for a while must not end the others.
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
from typing import TYPE_CHECKING, Any

from learners.factories import require_torch
from orchestrator.actors import Rank, SavedPlace
from orchestrator.channel.endpoint import Carried
from orchestrator.checkpoints.manifest import File
from orchestrator.core.messages import Broken
from orchestrator.core.vocabulary import Epoch, IslandId, Version
from orchestrator.errors import InfrastructureError, InvalidJobSpec, Problem
from orchestrator.replica.replica import Action, AdoptVersion
from orchestrator.system.logbook import Logbook

if TYPE_CHECKING:
    from learners.island_spec import IslandSpec

INITIALISED_S = 300
"""The time for the last process to arrive, which may import JAX on a busy machine.

A death before that is seen by the link.
"""
HEARTBEAT_S = 7 * 86_400
JOIN_S = 60.0
"""The others must join within this time after rank 0 has begun. Each does so before it imports anything large."""
HELLO_S = 5.0
MESSAGE_BYTES_MAX = 64 << 20
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}
"""Seconds, seconds, probes: a host that loses its power sends nothing, and is considered gone after 40 s."""
_SIZE = struct.Struct("<I")
_NUMBER = struct.Struct("<BIQ")
_DIGEST = "sha256"
_DIGEST_BYTES = 32
FROM_RANK_0, TO_RANK_0 = 0, 1


def join_devices(rank: Rank, *, in_torch: bool = False) -> tuple[int, ...]:
    """Make this process one of the island's, in JAX or in PyTorch. Returns how many devices each host has, by rank."""
    if in_torch:
        require_torch("trainer.kind")
        from learners.torch_layout import join_processes

        return join_processes(rank.place.host, rank.place.devices_port, rank.number, rank.size)
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
    """Raise InvalidJobSpec if a host of this island has fewer devices than its entry promises. Counts are by rank."""
    promised = spec.accelerator_count
    short = [f"host {number} has {count}" for number, count in enumerate(device_counts) if count < promised]
    if short:
        few = ", ".join(short) if len(device_counts) > 1 else f"{socket.gethostname()} has {device_counts[0]}"
        raise InvalidJobSpec(
            problems=(
                Problem(
                    f"{spec.path}.accelerators",
                    f"promises {promised} devices per host, but {few}.",
                    "Lower accelerators, or repair the host: its drivers, or what else uses its devices.",
                ),
            )
        )


# ── from rank 0 ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Beat:
    """Boundary ``number``: carry out these actions, report what you hold, and take the step after it (None: no step)."""

    number: int
    actions: tuple[Action, ...]
    cuts: tuple[Hashable, ...]
    schedule_step: int | None
    lr_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class TakeOuter:
    """Begin with the synchroniser's parameters: one payload per fragment, of what this process holds."""

    epoch: Epoch
    versions: tuple[Version, ...]
    step: int
    cursor: int
    payloads: tuple[Carried, ...]


@dataclass(frozen=True, slots=True)
class TakeSaved:
    """Begin with this island's state in the checkpoint at ``place``."""

    epoch: Epoch
    place: SavedPlace
    cursor: int


@dataclass(frozen=True, slots=True)
class FetchPart:
    """Fetch what belongs here of a fragment's state from these processes of a peer, and keep it.

    ``cut`` is the peer's name for the boundary of the state, ``chunk`` the name that ``TakePeer`` will use.
    """

    epoch: Epoch
    chunk: str
    fragment: int
    cut: str
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakePeer:
    """Begin with these chunks of a peer's state. Of an array in several chunks, the last one counts."""

    chunks: tuple[str, ...]
    versions: tuple[Version, ...]
    step: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Become this island, with this logbook, from what the standby holds and these versions."""

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
    """The model is built, on this many devices of this host. ``process`` is this process's name for others."""

    device_count: int
    process: str = ""


@dataclass(frozen=True, slots=True)
class News:
    """Boundary ``number`` is carried out. ``versions`` of all fragments are held here, −1 for none."""

    number: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Rank 0's last order, other than a boundary, is carried out; ``problem`` says why it failed."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """This process's part of a cut is on disk, in these files of the island's folder; ``problem`` says why it is not."""

    cut: Hashable
    files: tuple[File, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """This process cannot continue, and so neither can the island."""

    report: Broken


Answer = Prepared | News | Done | Written | Failed


class LinkEnded(InfrastructureError):
    """The process at the other end is gone, or its messages are not authentic."""


class Line:
    """One connection. One thread may send while another receives. Its methods raise LinkEnded."""

    def __init__(self, connection: socket.socket, key: bytes, rank: int, *, leads: bool) -> None:
        self._connection, self._key, self._rank = connection, key, rank
        self._outgoing, self._incoming = (FROM_RANK_0, TO_RANK_0) if leads else (TO_RANK_0, FROM_RANK_0)
        self._sent = self._received = 0
        self._sending = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux only; other systems use their defaults
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
        return pickle.loads(content)  # safe: only processes of this island have the key

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def listener(host: str) -> socket.socket:
    """Listen for rank 0 at any free port of this address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def admitted(listening: socket.socket, size: int, key: bytes, join_s: float = JOIN_S) -> dict[int, Line]:
    """Return the lines to ranks 1 to ``size`` − 1, once all have joined. Connections without the key are closed.

    Raises LinkEnded if some have not joined in time.
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
        raise LinkEnded(detail=f"the processes of hosts {missing} have not joined within {join_s:g} s.") from error
    finally:
        listening.close()
    return lines


def joined(address: tuple[str, int], rank: int, key: bytes) -> Line:
    """Connect this rank to rank 0. Raises LinkEnded."""
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
    """Receive a greeting and return its rank, which the greeting's HMAC covers."""
    connection.settimeout(HELLO_S)
    size, mac = _head(connection)
    if size != _NUMBER.size:
        raise LinkEnded(detail="the peer did not send a greeting.")
    content = _exactly(connection, size)
    _, rank, _ = _NUMBER.unpack(content)
    if not hmac.compare_digest(mac, _mac(key, TO_RANK_0, rank, 0, content)):
        raise LinkEnded(detail="the greeting was not made with this island's key.")
    return int(rank)


def _frame(connection: socket.socket, bytes_max: int, key: bytes, direction: int, rank: int, number: int) -> bytes:
    size, mac = _head(connection)
    if size > bytes_max:
        raise LinkEnded(detail=f"a message of {size:,} bytes is announced; the maximum is {bytes_max:,}.")
    content = _exactly(connection, size)
    if not hmac.compare_digest(mac, _mac(key, direction, rank, number, content)):
        raise LinkEnded(detail=f"a message on the line of rank {rank} is not authentic.")
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
