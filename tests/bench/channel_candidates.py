"""Compares candidates for moving bytes between processes: Arrow Flight, gRPC, sockets, TLS sockets, shared memory.

``python -m tests.bench.channel_candidates [CANDIDATE …] [MB …]`` prints a table without goals, on which decision 0143 is
based. The server is a process of its own. Each stream of the client is a thread with a connection of its own, and takes
an equal part of one payload in ranges of 4 MiB into one buffer. ``both`` is the processor time of both processes, in
seconds per GB (10⁹ bytes); ``client`` is the receiver's part of it. ``GIL`` is the longest time that a thread which wakes
every millisecond was held up in either process. There are no checksums: they cost every candidate the same.
"""

from __future__ import annotations

import multiprocessing
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from orchestrator.certificates.authority import JobAuthority
from orchestrator.channel.stream import Guard, PlainStream, TlsStream
from tests.bench.channel import LOOPBACK, Ticker, cpu_s

RANGE_BYTES = 4 << 20
BATCH_BYTES = 2 << 20
REPEATS = 3
STREAMS = (1, 2, 4)
SIZES_MB = (8, 100, 400)
Pull = Callable[[int, int, memoryview], None]
"""Fetch ``size`` bytes from ``start`` into the view."""


# ── servers, each in its process ──────────────────────────────────────────────────────────────────────────────────────


def serve(kind: str, size: int, folder: Path | None, pipe: Connection) -> None:
    payload = memoryview(np.random.default_rng(0).integers(0, 255, size, np.uint8)).cast("B")
    SERVERS[kind.removesuffix(" mTLS")](payload, folder, pipe)
    while pipe.recv() == "begin":
        before = cpu_s()
        with Ticker() as ticker:
            pipe.send("ready")
            pipe.recv()
        pipe.send((cpu_s() - before, ticker.longest_s))


def serve_streams(payload: memoryview, folder: Path | None, pipe: Connection) -> None:
    """The channel's own streams: TLS in memory, a batch of records at a time."""
    listener = socket.create_server((LOOPBACK, 0), backlog=16)

    def answer(connection: socket.socket) -> None:
        plain = PlainStream(connection, Guard(600.0, lambda: False))
        stream = TlsStream(plain, server_context(folder), server_side=True) if folder else plain
        header = memoryview(bytearray(16))
        with suppress(ConnectionError):
            while True:
                stream.receive(header)
                start, size = (int.from_bytes(header[i : i + 8], "big") for i in (0, 8))
                stream.send(payload[start : start + size])

    serve_each(listener, answer, pipe)


def serve_sockets(payload: memoryview, folder: Path | None, pipe: Connection) -> None:
    listener = socket.create_server((LOOPBACK, 0), backlog=16)
    context = server_context(folder) if folder else None

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) if context else connection as stream:
            while request := stream.recv(16):
                start, size = (int.from_bytes(request[i : i + 8], "big") for i in (0, 8))
                stream.sendall(payload[start : start + size])

    serve_each(listener, answer, pipe)


def serve_each(listener: socket.socket, answer: Callable[[socket.socket], None], pipe: Connection) -> None:
    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    pipe.send(listener.getsockname()[1])


class Source(flight.FlightServerBase):  # type: ignore[misc]
    def __init__(self, payload: memoryview, **options: Any) -> None:
        super().__init__(f"grpc{'+tls' if options else ''}://{LOOPBACK}:0", **options)
        self._whole = pa.py_buffer(payload)

    def do_get(self, _: object, ticket: flight.Ticket) -> flight.FlightDataStream:
        start, size = (int.from_bytes(ticket.ticket[i : i + 8], "big") for i in (0, 8))
        schema = pa.schema([("bytes", pa.uint8())])

        def batches() -> Iterator[pa.RecordBatch]:
            for at in range(start, start + size, BATCH_BYTES):
                part = self._whole.slice(at, min(BATCH_BYTES, start + size - at))
                yield pa.record_batch([pa.Array.from_buffers(pa.uint8(), part.size, [None, part])], schema)

        return flight.GeneratorStream(schema, batches())


def serve_flight(payload: memoryview, folder: Path | None, pipe: Connection) -> None:
    options = {}
    if folder:
        pair = ((folder / "server.pem").read_bytes(), (folder / "server.key").read_bytes())
        options = {
            "tls_certificates": [pair],
            "verify_client": True,
            "root_certificates": (folder / "ca.pem").read_bytes(),
        }
    server = Source(payload, **options)
    threading.Thread(target=server.serve, daemon=True).start()
    pipe.send(server.port)


def serve_grpc(payload: memoryview, folder: Path | None, pipe: Connection) -> None:
    def give(request: bytes, _: object) -> Iterator[bytes]:
        start, size = (int.from_bytes(request[i : i + 8], "big") for i in (0, 8))
        for at in range(start, start + size, BATCH_BYTES):
            yield bytes(payload[at : min(at + BATCH_BYTES, start + size)])

    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_send_message_length", -1)])
    handler = grpc.unary_stream_rpc_method_handler(give)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("channel", {"pull": handler}),))
    if folder:
        pair = ((folder / "server.key").read_bytes(), (folder / "server.pem").read_bytes())
        credentials = grpc.ssl_server_credentials([pair], (folder / "ca.pem").read_bytes(), require_client_auth=True)
        port = server.add_secure_port(f"{LOOPBACK}:0", credentials)
    else:
        port = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    globals()["_grpc_server"] = server  # it ends when it is collected
    pipe.send(port)


def serve_shared(payload: memoryview, folder: Path | None, pipe: Connection) -> None:
    segment = shared_memory.SharedMemory(create=True, size=len(payload))
    np.copyto(np.frombuffer(segment.buf, np.uint8)[: len(payload)], np.frombuffer(payload, np.uint8))
    globals()["_segment"] = segment
    pipe.send(segment.name)


SERVERS = {
    "streams": serve_streams,
    "sockets": serve_sockets,
    "flight": serve_flight,
    "grpc": serve_grpc,
    "shared memory": serve_shared,
}


def server_context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


# ── clients ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def request(start: int, size: int) -> bytes:
    return start.to_bytes(8, "big") + size.to_bytes(8, "big")


def client_context(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(folder / "ca.pem")
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    return context


@contextmanager
def streams(port: Any, folder: Path | None) -> Iterator[Pull]:
    plain = PlainStream(socket.create_connection((LOOPBACK, port)), Guard(600.0, lambda: False))
    stream = TlsStream(plain, client_context(folder), server_side=False) if folder else plain

    def pull(start: int, size: int, into: memoryview) -> None:
        stream.send(memoryview(request(start, size)))
        stream.receive(into)

    yield pull
    stream.close()


@contextmanager
def sockets(port: Any, folder: Path | None) -> Iterator[Pull]:
    stream = socket.create_connection((LOOPBACK, port))
    if folder:
        stream = client_context(folder).wrap_socket(stream)

    def pull(start: int, size: int, into: memoryview) -> None:
        stream.sendall(request(start, size))
        at = 0
        while at < size:
            at += stream.recv_into(into[at:], size - at)

    with stream:
        yield pull


@contextmanager
def flights(port: Any, folder: Path | None) -> Iterator[Pull]:
    options: dict[str, Any] = {"generic_options": [("grpc.use_local_subchannel_pool", 1)]}
    if folder:
        options |= {
            "tls_root_certs": (folder / "ca.pem").read_bytes(),
            "cert_chain": (folder / "client.pem").read_bytes(),
            "private_key": (folder / "client.key").read_bytes(),
            "override_hostname": "server",
        }
    client = flight.FlightClient(f"grpc{'+tls' if folder else ''}://{LOOPBACK}:{port}", **options)

    def pull(start: int, size: int, into: memoryview) -> None:
        target, at = np.frombuffer(into, np.uint8), 0
        for chunk in client.do_get(flight.Ticket(request(start, size))):
            part = np.frombuffer(chunk.data.column(0).buffers()[1], np.uint8)[: chunk.data.num_rows]
            np.copyto(target[at : at + len(part)], part)
            at += len(part)

    with client:
        yield pull


@contextmanager
def grpcs(port: Any, folder: Path | None) -> Iterator[Pull]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    if folder:
        parts = [(folder / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")]
        options += [("grpc.ssl_target_name_override", "server")]  # type: ignore[list-item]
        channel = grpc.secure_channel(f"{LOOPBACK}:{port}", grpc.ssl_channel_credentials(*parts), options)
    else:
        channel = grpc.insecure_channel(f"{LOOPBACK}:{port}", options)
    call = channel.unary_stream("/channel/pull")

    def pull(start: int, size: int, into: memoryview) -> None:
        at = 0
        for part in call(request(start, size)):
            into[at : at + len(part)] = part
            at += len(part)

    with channel:
        yield pull


@contextmanager
def shared(name: Any, folder: Path | None) -> Iterator[Pull]:
    segment = shared_memory.SharedMemory(name)

    def pull(start: int, size: int, into: memoryview) -> None:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(segment.buf, np.uint8)[start : start + size])

    yield pull
    segment.close()


CLIENTS: dict[str, Any] = {
    "streams": streams,
    "sockets": sockets,
    "flight": flights,
    "grpc": grpcs,
    "shared memory": shared,
}


def pull_all(pulls: list[Pull], target: memoryview) -> None:
    """Pull in parallel: each stream takes the ranges whose number modulo the number of streams is its own."""

    def take(number: int) -> None:
        for start in range(number * RANGE_BYTES, len(target), len(pulls) * RANGE_BYTES):
            size = min(RANGE_BYTES, len(target) - start)
            pulls[number](start, size, target[start : start + size])

    threads = [threading.Thread(target=take, args=(number,)) for number in range(len(pulls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(kind: str, size: int, folder: Path | None) -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(kind, size, folder, there), daemon=True)
    process.start()
    address = here.recv()
    target = memoryview(bytearray(size))
    for count in STREAMS if size > SIZES_MB[0] * 1_000_000 else STREAMS[:1]:
        best: tuple[float, float, float, float] | None = None
        for _ in range(REPEATS):
            clients = [CLIENTS[kind.removesuffix(" mTLS")](address, folder) for _ in range(count)]
            pulls = [client.__enter__() for client in clients]
            pull_all(pulls, target[: count * RANGE_BYTES])  # warm: connections, windows
            here.send("begin")
            here.recv()
            before, begun = cpu_s(), time.perf_counter()
            with Ticker() as ticker:
                pull_all(pulls, target)
                took = time.perf_counter() - begun
            client_cpu = cpu_s() - before
            here.send("end")
            server_cpu, server_gap = here.recv()
            for client in clients:
                client.__exit__(None, None, None)
            gb = size / 1e9
            row = (gb / took, (client_cpu + server_cpu) / gb, client_cpu / gb, 1000 * max(ticker.longest_s, server_gap))
            best = max(best, row) if best else row
        assert best
        print(f"| {kind:<16} | {size / 1e6:>4.0f} | {count} | {best[0]:5.2f} | {best[1]:5.2f} | ", end="")
        print(f"{best[2]:5.2f} | {best[3]:5.1f} |", flush=True)
    here.send("over")
    process.join()


def main(sizes_mb: list[int], kinds: list[str]) -> None:
    print(
        "| candidate        |   MB | streams | GB/s | both, cpu-s/GB | client | GIL ms |\n|---|---|---|---|---|---|---|"
    )
    authority = JobAuthority.new("candidates")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for subject in ("server", "client"):
            identity = authority.issue(subject)
            (folder / f"{subject}.pem").write_bytes(identity.certificate)
            (folder / f"{subject}.key").write_bytes(identity.private_key)
            (folder / "ca.pem").write_bytes(identity.authority)
        for size_mb in sizes_mb:
            for kind in kinds or SERVERS:
                for tls in (None,) if kind == "shared memory" else (None, folder):
                    measure(kind + (" mTLS" if tls else ""), size_mb * 1_000_000, tls)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    main(numbers or list(SIZES_MB), [argument for argument in sys.argv[1:] if argument in SERVERS])
