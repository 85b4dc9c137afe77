"""Connections that get nowhere: half heads, trickles, slow readers, floods, handshakes without end."""

from __future__ import annotations

import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from api.http.connections import CONNECTIONS_MAX, limits_of, network_of
from tests.api.installation import CONTROL, ROOT, Installation
from tests.attack.wire import Wire, log_of, process_of
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture(autouse=True, scope="module")
def descriptors() -> Iterator[None]:
    """As many as a flood needs on this side."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_well(service: Installation, source: str) -> bool:
    """Whether /healthz is answered to a newcomer from this address."""
    wire = Wire(service, source).ask("GET", "/healthz")
    try:
        return wire.answer()[0] == 200
    finally:
        wire.close()


def test_a_flood_of_half_requests_keeps_neither_its_neighbours_nor_its_own_address_out(service: Installation) -> None:
    with ExitStack() as stack:
        for _ in range(800):
            wire = Wire(service)
            stack.callback(wire.close)
            wire.send("GET /healthz HTTP/1.1\r\nHost: x\r\nX-Half: ")
        assert is_well(service, "127.0.0.2")
        assert is_well(service, "127.0.0.1")
        assert process_of(service).num_fds() < 400, "as many as one address may have, and not 800"
    assert "connections were closed" in log_of(service)
    assert log_of(service).count("connections were closed") < 5, "once a minute, with a count"


def test_a_flood_from_many_addresses_does_not_keep_others_out(service: Installation) -> None:
    with ExitStack() as stack:
        for number in range(CONNECTIONS_MAX + 200):
            wire = Wire(service, f"127.0.1.{number % 100 + 1}")
            stack.callback(wire.close)
            wire.send("GET /")
        assert is_well(service, "127.0.0.2")
        assert process_of(service).num_fds() < CONNECTIONS_MAX + 150


def test_whoever_gets_nowhere_is_let_go(service: Installation) -> None:
    """All at once, since each takes its time: silence, half a head, a head byte by byte, no body, no reading."""
    token = service.home.token() or ""
    with service.client() as client:
        job = client.submit(service.spec(steps=1)).job
        client.wait(job)
    tape = service.runs / job / "tape.jsonl"
    with tape.open("ab") as file:
        file.truncate(64 << 20)
    silent, half, trickling = Wire(service), Wire(service).send("GET / HT"), Wire(service).send("GET / HTTP/1.1\r\nA: ")
    used = Wire(service).ask("GET", "/healthz")
    assert used.answer()[0] == 200
    used.send("G")
    slow_body = Wire(service).ask("POST", "/v1/jobs", token, Content_Length="1000")
    unread = Wire(service, receive_bytes=4096).ask("GET", f"/v1/jobs/{job}/tape", token)
    request = f"GET /openapi.json HTTP/1.1\r\nHost: {used.host}\r\n\r\n"
    endless_answers = Wire(service, receive_bytes=4096).send(request * 200)
    gone: dict[str, bool] = {}
    before = time.monotonic()

    def all_gone() -> bool:
        if not gone.get("trickling") and time.monotonic() - before < 60:
            try:
                trickling.send("a")
            except OSError:
                gone["trickling"] = True
        for name, wire in (("silent", silent), ("half", half), ("used", used)):
            gone[name] = gone.get(name, False) or wire.is_closed()
        return all(gone.get(name) for name in ("silent", "half", "used", "trickling"))

    wait_until(all_gone)
    status, headers, body = slow_body.answer()
    assert (status, headers["connection"]) == (408, "close")
    assert b"did not arrive within" in body
    ports = {wire.socket.getsockname()[1] for wire in (unread, endless_answers)}
    process = process_of(service)
    wait_until(lambda: not any(c.raddr and c.raddr.port in ports for c in process.net_connections("tcp")))
    assert is_well(service, "127.0.0.1")
    for wire in (silent, half, trickling, used, slow_body, unread, endless_answers):
        wire.close()


def test_a_pipelined_flood_is_answered_in_turn_and_takes_no_memory(service: Installation) -> None:
    process = process_of(service)
    before = process.memory_info().rss
    wire = Wire(service)
    request = f"GET /healthz HTTP/1.1\r\nHost: {wire.host}\r\n\r\n"
    wire.socket.settimeout(1.0)
    sent = 0
    with suppress(TimeoutError, ConnectionError):  # nobody reads the answers, so that in time nothing more is taken
        while sent < 1_000_000:
            wire.send(request * 500)
            sent += 500
    assert sent < 1_000_000
    assert is_well(service, "127.0.0.1")
    assert process.memory_info().rss - before < 64 << 20
    wire.close()


def test_what_is_no_http_is_answered_as_a_problem_and_the_connection_ends(service: Installation) -> None:
    for nonsense in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n", b"GET /" + b"a" * 70_000):
        wire = Wire(service).send(nonsense)
        status, headers, body = wire.answer()
        assert (status, headers["connection"], headers["content-type"]) == (400, "close", "application/problem+json")
        assert b"no traceback" not in body
        wait_until(wire.is_closed)
        wire.close()


def test_strangers_do_not_fill_the_disk_by_the_log(service: Installation) -> None:
    """What is no HTTP is counted, and told once a minute. Before, each such request was a line."""
    before = len(log_of(service))
    for number in range(200):
        wire = Wire(service).send(("nonsense\r\n\r\n", b"\x16\x03\x01" + bytes(60) + b"\r\n\r\n")[number % 2])
        assert wire.answer()[0] == 400
        wire.close()
    assert len(log_of(service)) - before < 4096


FLOODS = {
    "open pages": "GET /docs HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "the document": "GET /openapi.json HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "guesses": "GET /v1/jobs HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer atoll_{guess}\r\n\r\n",
    "long paths": "GET /v1/{long} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer atoll_{guess}\r\n\r\n",
    "long heads": "GET /v1/jobs HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {long}{guess}\r\n\r\n",
    "readiness": "GET /readyz HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "no token": "POST /v1/tokens HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\n\r\n{{}}",
}
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


@pytest.mark.parametrize(
    "kind",
    [
        "open pages",
        "long paths",
        *(
            pytest.param(kind, marks=pytest.mark.soak("another of its kind"))
            for kind in ("the document", "no token", "guesses", "long heads", "readiness")
        ),
    ],
)
def test_strangers_take_no_thread_that_an_admin_needs_and_do_not_fill_the_log(
    service: Installation, http: httpx.Client, kind: str
) -> None:
    """300 connections from three addresses, each with thirty requests on their way, and a third of them reset."""
    before, answers = len(log_of(service)), []
    with ExitStack() as stack:
        for number in range(300):
            wire = Wire(service, ADDRESSES[number % 3])
            stack.callback(wire.close)
            with suppress(OSError):  # a refused one is closed at once
                one = FLOODS[kind].format(host=wire.host, guess=f"{number:043}", long="%01" * 9_000)
                wire.send(one * (3 if len(one) > 20_000 else 30))
            if number % 3 == 0:
                wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                wire.close()
            if number % 30 == 0:
                name = f"flood-{kind.replace(' ', '-')}-{number}"
                answers += [
                    http.post("/v1/tokens", json={"name": name, "role": "viewer"}).status_code,
                    http.get("/v1/tokens").status_code,
                    http.post(f"/v1/tokens/{name}/revoke").status_code,
                    http.get("/v1/audit").status_code,
                ]
    assert answers == [201, 200, 200, 200] * 10
    assert len(log_of(service)) - before < 16_384


def test_no_other_protocol_is_spoken(service: Installation) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec_WebSocket_Key": "AA==",
        "Sec_WebSocket_Version": "13",
    }
    wire = Wire(service).ask("GET", "/healthz", "", b"", **upgrade)
    assert wire.answer()[0] == 200, "as if it had not been asked"
    wire.ask("GET", "/v1/jobs", "", b"", **upgrade)
    assert wire.answer()[0] == 401
    wire.close()


def test_limits_follow_from_the_descriptors_that_there_are() -> None:
    for descriptors in (64, 256, 1024, 20_000):
        limits = limits_of(descriptors)
        assert limits.total * 2 <= max(descriptors, 16)
        assert 4 <= limits.each <= limits.total // 2
    assert limits_of(20_000).total == CONNECTIONS_MAX
    assert limits_of(20_000).each >= 128, "all users of a machine are one address"
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1")
    assert network_of("2001:db8::1") == network_of("2001:db8::2") != network_of("2001:db8:0:1::1")


def test_a_process_that_was_given_few_descriptors_takes_what_the_system_allows() -> None:
    code = (
        "import resource; h = resource.getrlimit(7)[1]; resource.setrlimit(7, (200, h));"
        "from api.http.connections import raise_descriptor_limit as up; n = up();"
        "assert n == resource.getrlimit(7)[0] > 200, n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_handshakes_without_end_keep_nobody_out_and_browsers_are_told_to_stay_with_tls(
    cold: Installation, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-out", str(certificate), "-keyout", str(key)]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run(["openssl", "req", "-x509", *kind, *subject, *files], check=True, capture_output=True)
    tls = ["--host", "127.0.0.1", "--certificate", str(certificate), "--key", str(key)]
    cold.atoll("up", "--runs", str(cold.runs), "--control", CONTROL, *tls)
    address = cold.home.address()
    assert address is not None
    port = httpx.URL(address.url).port or 0
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    answer = httpx.get(f"https://127.0.0.1:{port}/healthz", verify=False, timeout=PATIENCE_S)
    assert answer.status_code == 200
    assert answer.headers["strict-transport-security"] == "max-age=31536000"
    assert process_of(cold).num_fds() < 400

    def is_over(one: socket.socket) -> bool:
        one.setblocking(False)
        try:
            return one.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    wait_until(lambda: all(map(is_over, silent)))
    for one in silent:
        one.close()
