"""HTTP by hand: what clients do that libraries would not."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import psutil

from tests.api.installation import Installation
from tests.waiting import PATIENCE_S


class Wire:
    """One connection to the service, from an address of this machine that may be chosen."""

    def __init__(self, service: Installation, source: str = "127.0.0.1", receive_bytes: int | None = None) -> None:
        address = service.home.address()
        assert address is not None
        where = urlsplit(address.url)
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.bind((source, 0))
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect((where.hostname or "", where.port or 0))
        self.host = where.netloc

    def send(self, text: str | bytes) -> Wire:
        self.socket.sendall(text.encode() if isinstance(text, str) else text)
        return self

    def ask(self, method: str, path: str, token: str = "", body: bytes = b"", **headers: str) -> Wire:
        """A whole request, or as much of it as ``body`` is, where the headers promise more."""
        given = {"Host": self.host} | ({"Authorization": f"Bearer {token}"} if token else {})
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        if body and "Content-Length" not in given and "Transfer-Encoding" not in given:
            given["Content-Length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer: its status, its headers by lower-case name, and its body, which must have a length."""
        head = b""
        while b"\r\n\r\n" not in head:
            piece = self.socket.recv(1)
            assert piece, f"the connection ended after {head!r}"
            head += piece
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = b""
        while len(body) < int(headers.get("content-length", 0)):
            piece = self.socket.recv(65536)
            assert piece, "the body is shorter than was said"
            body += piece
        return int(first.split()[1]), headers, body

    def is_closed(self) -> bool:
        """Whether the service has closed it. What it sent before is read and thrown away."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(65536):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        finally:
            self.socket.settimeout(PATIENCE_S)
        return True

    def is_answered(self) -> bool:
        """Whether an answer has come already, so that nobody takes more."""
        self.socket.setblocking(False)
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.socket.settimeout(PATIENCE_S)

    def close(self) -> None:
        self.socket.close()


def process_of(service: Installation) -> psutil.Process:
    address = service.home.address()
    assert address is not None
    return psutil.Process(address.pid)


def log_of(service: Installation) -> str:
    return (service.home.path / "service.log").read_text()
