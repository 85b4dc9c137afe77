"""Bodies that are too large, too slow, or never read; and the connection after an answer that went wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.auth.permissions import Role
from api.http.guard import BODY_BYTES_MAX, limit_of
from tests.api.installation import Installation
from tests.attack.ports import CONTROL
from tests.attack.wire import Wire, log_of, process_of
from tests.waiting import PATIENCE_S, wait_until

HUGE = 300 << 20


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    installation = Installation(tmp_path_factory.mktemp("troubled"))
    installation.up("--control", CONTROL)
    yield installation
    installation.atoll("down")


def changing_paths(service: Installation) -> list[tuple[str, str]]:
    """Every operation that a body could be sent to, and two paths that are no operation."""
    with service.http("") as http:
        paths = http.get("/openapi.json").json()["paths"]
    fill = {"{job}": "a", "{island}": "a", "{name}": "a", "{run}": "a", "{node_group}": "a"}
    found = [(method.upper(), path) for path, operations in paths.items() for method in operations if method != "get"]
    for before, after in fill.items():
        found = [(method, path.replace(before, after)) for method, path in found]
    return [*found, ("POST", "/v1/nothing"), ("GET", "/v1/jobs")]


def test_a_specification_to_be_checked_may_be_as_long_as_one_that_is_submitted() -> None:
    assert limit_of("POST", "/v1/jobs/check") == limit_of("POST", "/v1/jobs") > BODY_BYTES_MAX


def test_no_route_takes_more_than_its_limit_and_says_so_before_it_reads(troubled: Installation) -> None:
    token, process = troubled.home.token() or "", process_of(troubled)
    before = process.memory_info().rss
    for method, path in changing_paths(troubled):
        wire = Wire(troubled).ask(method, path, token, Content_Length=str(HUGE), Content_Type="application/json")
        status, headers, body = wire.answer()
        assert (status, headers["connection"]) == (413, "close"), (method, path)
        assert headers["content-type"] == "application/problem+json"
        assert b"exceeds the limit of" in body
        wire.close()
    assert process.memory_info().rss - before < 32 << 20


@pytest.mark.parametrize(("method", "path"), [("PATCH", "/v1/jobs/a"), ("POST", "/v1/tokens"), ("POST", "/v1/jobs")])
def test_a_body_of_no_said_length_is_counted_as_it_comes(troubled: Installation, method: str, path: str) -> None:
    token, process = troubled.home.token() or "", process_of(troubled)
    before = process.memory_info().rss
    wire = Wire(troubled).ask(method, path, token, Transfer_Encoding="chunked", Content_Type="application/json")
    piece, sent = b"10000\r\n" + b" " * 0x10000 + b"\r\n", 0
    try:
        while sent < HUGE and not wire.is_answered():
            wire.send(piece)
            sent += 0x10000
    except OSError:
        pass
    assert sent < 64 << 20, "it was not read to its end"
    status, headers, _ = wire.answer()
    assert (status, headers["connection"]) == (413, "close")
    assert process.memory_info().rss - before < 32 << 20
    wire.close()


def test_a_stranger_is_refused_before_the_body_and_knows_what_becomes_of_the_connection(troubled: Installation) -> None:
    wire = Wire(troubled).ask("POST", "/v1/jobs", "wrong", b'{"a": 1}')
    status, headers, _ = wire.answer()
    assert status == 401
    assert "connection" not in headers, "a small body was thrown away, and the connection goes on"
    assert wire.ask("GET", "/healthz").answer()[0] == 200
    wire.close()
    wire = Wire(troubled).ask("POST", "/v1/jobs", "wrong", b"{" * 10, Content_Length="60000")
    status, headers, _ = wire.answer()
    assert (status, headers["connection"]) == (401, "close")
    wait_until(wire.is_closed)
    wire.close()
    wire = Wire(troubled).ask("POST", "/v1/jobs", "wrong", Content_Length="60000", Expect="100-continue")
    assert wire.answer()[0] == 401, "and it was not told to go on"
    wire.close()


def test_after_an_answer_that_was_our_fault_the_connection_goes_on(troubled: Installation) -> None:
    token, switch = troubled.home.token() or "", troubled.home.path / "clockwork" / "head-raises"
    body = json.dumps(troubled.spec()).encode()
    switch.touch()
    try:
        wire = Wire(troubled)
        for method, path, sent in (
            ("GET", "/v1/node-groups", b""),
            ("POST", "/v1/jobs", body),
            ("GET", "/v1/whoami", b""),
        ):
            status, headers, told = wire.ask(method, path, token, sent, Content_Type="application/json").answer()
            assert status == (200 if path == "/v1/whoami" else 500)
            assert "connection" not in headers
            assert headers["content-type"] != "text/plain"
            assert b"Traceback" not in told
        wire.close()
    finally:
        switch.unlink()
    assert "nobody has foreseen this" in log_of(troubled)


def test_a_client_that_leaves_before_its_request_is_whole_is_no_failure_of_ours(troubled: Installation) -> None:
    token, before = troubled.home.token() or "", log_of(troubled)
    for path in ("/v1/jobs", "/v1/tokens"):
        wire = Wire(troubled).ask("POST", path, token, b"{", Content_Length="10", Content_Type="application/json")
        wire.close()
    with troubled.http() as http:
        wait_until(lambda: all(entry["status"] for entry in http.get("/v1/audit").json()["entries"][:2]))
        assert [entry["status"] for entry in http.get("/v1/audit").json()["entries"][:2]] == [400, 400]
    assert "Traceback" not in log_of(troubled)[len(before) :]


def test_a_body_that_is_long_to_read_holds_up_nobody(troubled: Installation) -> None:
    body = b"a: [" + b"1," * (120 << 10) + b"1]"  # as long as YAML may be: of a longer one nothing would be read
    statuses: list[int] = []

    def submit() -> None:
        with troubled.http() as http:
            answer = http.post(
                "/v1/jobs", content=body, headers={"Content-Type": "application/yaml"}, timeout=PATIENCE_S
            )
            statuses.append(answer.status_code)

    thread = threading.Thread(target=submit)
    thread.start()
    answered_meanwhile = 0
    with troubled.http("") as http:
        while thread.is_alive():
            assert http.get("/healthz", timeout=PATIENCE_S).status_code == 200
            answered_meanwhile += 1
    thread.join()
    assert statuses == [422]
    print(f"{answered_meanwhile} answers while the body was read")
    assert answered_meanwhile > 4, "of those who waited until it was read one came before it, one behind it"


def test_the_audit_trail_holds_no_control_characters(troubled: Installation, tmp_path: Path) -> None:
    with troubled.client() as client:
        token = client.create_token("painter", Role.OPERATOR).token
    Wire(troubled).ask("POST", "/v1/jobs/%1b]0;PWNED%07%1b[31mfake%0aadmin-line%e2%80%ae%25/cancel", token).answer()
    with troubled.http() as http:
        paths = [entry["path"] for entry in http.get("/v1/audit").json()["entries"] if entry["caller"] == "painter"]
    assert paths == ["/v1/jobs/%1B]0;PWNED%07%1B[31mfake%0Aadmin-line%E2%80%AE%25/cancel"]


def test_nested_and_numeric_json_of_small_routes_is_refused_as_the_users_mistake(troubled: Installation) -> None:
    with troubled.http() as http:
        for body in (b"[" * 60_000, b'{"name": ' + b"9" * 5000 + b"}", b'{"name": "\\ud800"}', b"\xff\xfe", b"nan"):
            answer: httpx.Response = http.post("/v1/tokens", content=body, headers={"Content-Type": "application/json"})
            assert 400 <= answer.status_code < 500, body[:20]
