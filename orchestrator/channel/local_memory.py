"""Payloads between processes of one machine: an anonymous file in memory, whose descriptor the server passes.

The file has no name, so nothing of it can be left behind: the kernel frees it with the last descriptor or mapping, whoever
dies how. It is sealed before it leaves, so neither end can change or shorten it under the other. The server is found by an
abstract name of 128 random bits, which exists in its own network namespace only and ends with its socket; who connects must
run as the same user, and shows the same credential as over the network.

Source: memfd_create(2), unix(7) (SCM_RIGHTS, SO_PEERCRED, abstract sockets). Linux; elsewhere the network is used.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct

from orchestrator.channel.stream import PlainStream
from orchestrator.errors import TransferRefused

AVAILABLE = hasattr(os, "memfd_create")
NAME_PREFIX = "atoll-channel-"
_PEER = struct.Struct("3i")
WRITE_BYTES = 64 << 20


def new_name() -> str:
    return NAME_PREFIX + secrets.token_hex(16)


def listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(64)
    return listener


def connect(name: str) -> socket.socket:
    """Raises OSError where no such server is on this machine."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect("\0" + name)
    except OSError:
        connection.close()
        raise
    return connection


def same_user(connection: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())


def sealed_copy(content: memoryview) -> int:
    """A descriptor of a file in memory with this content, which nobody can change. The caller closes it."""
    descriptor = os.memfd_create("atoll-payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written : written + WRITE_BYTES])
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def send_descriptor(stream: PlainStream, descriptor: int) -> None:
    socket.send_fds(stream.connection, [b"d"], [descriptor])


def receive_mapping(stream: PlainStream, size: int) -> memoryview:
    """The content behind the descriptor that comes, read-only; it is freed with its last view."""
    stream.connection.settimeout(stream.guard.stall_s)
    _, descriptors, _, _ = socket.recv_fds(stream.connection, 1, 1)
    if not descriptors:
        raise ConnectionError("the server has passed no memory")
    try:
        shrinks = not fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if shrinks or os.fstat(descriptors[0]).st_size != size:
            raise TransferRefused(detail="The server's memory is not sealed, or not of the payload's size.")
        return memoryview(mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ)) if size else memoryview(b"")
    finally:
        os.close(descriptors[0])
