"""A metadata server of one machine, as Google's, Amazon's or Microsoft's answers: the real paths, headers and codes.

What a cloud refuses is refused: a question without its header, without a token, of another version. Google's questions that
wait for a change are held until there is one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TOKEN = "AQAEAFakeTokenOfThisMachine=="


@dataclass
class MachineMetadata:
    """What one machine is told. ``asked`` are the questions so far: method and path."""

    cloud: str
    url: str = ""
    name: str = "islands_3"
    asked: list[tuple[str, str]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    preempted: bool = False
    version: int = 1
    action: dict | None = None
    rebalance: dict | None = None
    scheduled: list[dict] = field(default_factory=list)

    def preempt(self, seconds: float = 30.0) -> None:
        """Announce this machine's end, in the cloud's own words."""
        at = datetime.fromtimestamp(time.time() + seconds, UTC)
        with self.changed:
            self.preempted, self.version = True, self.version + 1
            self.action = {"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
            self.scheduled = [self.event("Preempt", format_datetime(at.replace(microsecond=0), usegmt=True))]
            self.changed.notify_all()

    def event(self, kind: str, not_before: str, *, name: str | None = None) -> dict:
        return {
            "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [name or self.name],
            "EventStatus": "Scheduled",
            "NotBefore": not_before,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }

    def answer(self, method: str, target: str, headers) -> tuple[int, dict[str, str], bytes]:
        self.asked.append((method, target))
        parts = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        return {"gce": self._google, "aws": self._amazon, "azure": self._microsoft}[self.cloud](
            method, parts.path, query, headers
        )

    def _google(self, method: str, path: str, query, headers) -> tuple[int, dict[str, str], bytes]:
        if headers.get("Metadata-Flavor") != "Google":
            return 403, {}, b"Missing Metadata-Flavor:Google header."
        about = {"Metadata-Flavor": "Google", "Content-Type": "application/text"}
        if path == "/computeMetadata/v1/instance/id":
            return 200, about, b"4520031799277581759"
        if path != "/computeMetadata/v1/instance/preempted":
            return 404, about, b""
        with self.changed:
            if query.get("wait_for_change") == "true":
                seen = query.get("last_etag", f"{self.version:x}")
                self.changed.wait_for(lambda: f"{self.version:x}" != seen, float(query.get("timeout_sec", 300)))
            return 200, about | {"ETag": f"{self.version:x}"}, b"TRUE" if self.preempted else b"FALSE"

    def _amazon(self, method: str, path: str, query, headers) -> tuple[int, dict[str, str], bytes]:
        if path == "/latest/api/token":
            if method != "PUT" or not headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdecimal():
                return 400, {}, b""
            return 200, {"Content-Type": "text/plain"}, TOKEN.encode()
        if headers.get("X-aws-ec2-metadata-token") != TOKEN:
            return 401, {}, b""
        answers = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }
        found = answers.get(path)
        return (404, {}, b"Not Found") if found is None else (200, {}, json.dumps(found).encode())

    def _microsoft(self, method: str, path: str, query, headers) -> tuple[int, dict[str, str], bytes]:
        if headers.get("Metadata") != "true" or "X-Forwarded-For" in headers or "api-version" not in query:
            return 400, {}, b'{"error": "Bad request"}'
        if path == "/metadata/instance/compute/name" and query.get("format") == "text":
            return 200, {}, self.name.encode()
        if path != "/metadata/scheduledevents":
            return 404, {}, b""
        return 200, {}, json.dumps({"DocumentIncarnation": self.version, "Events": self.scheduled}).encode()


@contextmanager
def serving(machine: MachineMetadata) -> Iterator[MachineMetadata]:
    """It answers at ``machine.url`` while this lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = machine.answer(self.command, self.path, self.headers)
            try:
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # who asked has gone

        do_PUT = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    machine.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield machine
    finally:
        server.shutdown()
        with machine.changed:
            machine.version += 1
            machine.changed.notify_all()
        server.server_close()
        thread.join()
