"""A service whose clock is wrong, as far as its answers tell."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from orchestrator.certificates import folders


@contextmanager
def a_service(ahead_s: float | None, machine: Path | None = None) -> Iterator[str]:
    """A real server whose clock is ahead by so much, or that does not tell its time; HTTPS with a machine's folder."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(200)
            if ahead_s is not None:
                self.send_header("Date", self.date_time_string(time.time() + ahead_s))
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if machine is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(machine / folders.CERTIFICATE, machine / folders.KEY)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"{'https' if machine else 'http'}://127.0.0.1:{server.server_address[1]}"
        finally:  # a test that fails would wait for the thread for ever
            server.shutdown()
            thread.join()
