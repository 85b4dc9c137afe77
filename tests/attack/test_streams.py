"""Answers that last: who may have how many, and that none outlives its token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import pytest
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.routing import APIRoute

from api.auth.permissions import Role
from api.http.streams import SEATS_EACH, File, Stream
from tests.api.installation import Installation
from tests.attack.routes import routes_of
from tests.attack.wire import Wire, process_of
from tests.waiting import wait_until

LARGE_BYTES = 256 << 20
"""More than all buffers on the way hold."""


@pytest.fixture(scope="module")
def jobs(service: Installation) -> Iterator[tuple[str, str]]:
    """One that trains, and one that has ended and left much to download."""
    with service.client() as client:
        ended = client.submit(service.spec(steps=1)).job
        client.wait(ended)
        for name in ("tape.jsonl", "merged.safetensors", "report.html"):  # no report.json is so long
            with (service.runs / ended / name).open("ab") as file:
                file.truncate(LARGE_BYTES)
        yield client.submit(service.spec()).job, ended


def streaming(route: APIRoute) -> bool:
    return issubclass(getattr(route.response_class, "value", route.response_class), StreamingResponse | FileResponse)


STREAMING = [route.path for route in routes_of() if streaming(route)]


def test_every_answer_that_lasts_is_of_the_kind_that_ends_with_its_token() -> None:
    assert len(STREAMING) >= 8
    for route in routes_of():
        if streaming(route):
            assert issubclass(getattr(route.response_class, "value", route.response_class), Stream | File), route.path


LIVE = ("/v1/jobs/{job}/events", "/v1/jobs/{job}/logs/{source}?follow=true")
NO_LONG_DOWNLOADS = (
    "/events",
    "/updates",
    "/logs/{source}",
    "/checkpoints/{number}",
    "/report",
    "/report.json",
    "/tokenizer",
    "/trace",
)
DOWNLOADS = [path for path in STREAMING if not path.endswith(NO_LONG_DOWNLOADS)]


def test_no_stream_outlives_its_token(service: Installation, jobs: tuple[str, str]) -> None:
    """Also a download of which a little is read now and then. Archives are streams of the same class."""
    running, ended = jobs
    with service.client() as client:
        token = client.create_token("leaver", Role.VIEWER).token
        wires = {}
        for path in (*LIVE, *DOWNLOADS):
            where = path.replace("{job}", running if path in LIVE else ended).replace("{source}", "asia")
            wires[path] = Wire(service, receive_bytes=4096).ask("GET", where, token)
            assert wires[path].socket.recv(16).startswith(b"HTTP/1.1 200")
        client.revoke_token("leaver")
    process, received = process_of(service), Counter[str]()

    def are_over() -> bool:
        """Read a little, and see whether the service still has its ends of the connections."""
        for path, wire in wires.items():
            wire.socket.settimeout(0.01)
            with suppress(OSError):
                received[path] += len(wire.socket.recv(16384))
        ports = {wire.socket.getsockname()[1] for wire in wires.values()}
        return not any(one.raddr and one.raddr.port in ports for one in process.net_connections("tcp"))

    # A stream without a length ends well, and its connection may be used again, until it has been idle for a while.
    wait_until(are_over)
    for path in DOWNLOADS:
        assert received[path] < LARGE_BYTES // 2, f"{path} was cut, and not sent to its end"
    for wire in wires.values():
        wire.close()


def test_a_viewer_takes_its_own_seats_only_and_what_does_not_follow_takes_none(
    service: Installation, jobs: tuple[str, str]
) -> None:
    job, _ = jobs
    with service.client() as client, ExitStack() as stack:
        greedy = client.create_token("greedy", Role.VIEWER).token
        modest = client.create_token("modest", Role.VIEWER).token
        paths = (f"/v1/jobs/{job}/events", f"/v1/jobs/{job}/logs/asia?follow=true")
        statuses = []
        for number in range(80):
            wire = Wire(service).ask("GET", paths[number % 2], greedy)
            stack.callback(wire.close)
            statuses.append(int(wire.socket.recv(12)[-3:]))
        assert statuses.count(200) == SEATS_EACH
        assert statuses.count(503) == 80 - SEATS_EACH
        for token in (greedy, modest, ""):
            with service.http(token or None) as http:
                assert http.get(f"/v1/jobs/{job}/logs/asia").status_code == 200
                assert http.get(f"/v1/jobs/{job}/events?follow=false").status_code == 200
        with service.http(modest) as http, http.stream("GET", paths[0]) as answer:
            assert answer.status_code == 200
            assert next(answer.iter_lines()).startswith("retry")
    with service.http(greedy) as http:
        wait_until(lambda: _status(http, paths[0]) == 200)


def _status(http: httpx.Client, path: str) -> int:
    with http.stream("GET", path) as answer:
        return answer.status_code
