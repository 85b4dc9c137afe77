"""A line between client and server that counts, breaks, and flips bits of what the server sends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from orchestrator.channel.frames import Address

PIECE_BYTES = 64 << 10


class Line:
    """Forwards to ``target``. ``down`` sees what the server sends: connection's number, offset in it, bytes.

    It returns what the client gets; None breaks the connection.
    """

    def __init__(self, target: Address, down: Callable[[int, int, bytes], bytes | None] | None = None) -> None:
        self._target, self._down = target, down or (lambda _number, _offset, content: content)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.down_bytes = 0
        self.connection_count = 0
        self._lock = threading.Lock()
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for end in self._sockets:
            _shut(end)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._target.host, self._target.port))
            except OSError:
                return
            with self._lock:
                number, self.connection_count = self.connection_count, self.connection_count + 1
                self._sockets += [near, far]
            threading.Thread(target=self._forward, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._forward, args=(far, near, number), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, number: int | None) -> None:
        offset = 0
        with suppress(OSError):
            while content := source.recv(PIECE_BYTES):
                passed: bytes | None = content
                if number is not None:
                    passed = self._down(number, offset, content)
                    with self._lock:
                        self.down_bytes += len(passed or b"")
                offset += len(content)
                if passed is None:
                    break
                target.sendall(passed)
        for end in (source, target):
            _shut(end)


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
