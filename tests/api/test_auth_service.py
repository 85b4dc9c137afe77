"""Tokens in the hands of a user: the file in the home, the command line, TLS, and where a secret must never be found."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from api.auth.permissions import Role
from api.client import Client
from api.installation.doctor import home_folder
from api.installation.home import Home
from api.installation.service_restart import token_problem
from orchestrator.errors import Forbidden, ServiceUnreachable, TooManyFailures, Unauthenticated
from tests.api.installation import CONTROL, ROOT, Installation, environment
from tests.waiting import wait_until


def test_up_leaves_a_token_that_only_its_owner_reads_and_keeps_it(warm: Installation) -> None:
    path, token = warm.home.path / "token", warm.home.token()
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(warm.atoll("jobs", "--json"))["jobs"] == []
    warm.atoll("down")
    warm.up()
    assert warm.home.token() == token
    path.unlink()
    assert "ATOLL_TOKEN" in warm.atoll("jobs", code=2)
    warm.atoll("down")
    warm.up()
    assert [t["name"] for t in json.loads(warm.atoll("token", "list", "--json"))] == ["local", "local-2"]


def test_doctor_notices_that_the_homes_token_is_lost_and_up_restores_it(warm: Installation) -> None:
    path, pid = warm.home.path / "token", warm.home.address().pid  # type: ignore[union-attr]
    damages = {
        "is missing": path.unlink,
        "holds no token": lambda: path.write_bytes(b"\xff"),
        "holds a token that the service does not accept": lambda: path.write_text("atoll_something-else"),
    }
    for says, damage in damages.items():
        assert token_problem(warm.home) == ""
        damage()
        found = home_folder(warm.home)
        assert (found.detail, found.remedy) == (f"{path} {says}", "`atoll up` has another one written; jobs train on")
        said = warm.up()
        assert f"{path} {says}; the service is restarted, and writes another" in " ".join(said.split())
        assert "already running" in said
        assert json.loads(warm.atoll("jobs", "--json"))["jobs"] == []
        before, pid = pid, warm.home.address().pid  # type: ignore[union-attr]
        assert pid != before
    assert "restarted" not in warm.up()
    assert warm.home.address().pid == pid  # type: ignore[union-attr]


def test_a_token_from_creation_to_revocation_by_hand(service: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    made = json.loads(service.atoll("token", "create", "eve", "--role", "viewer", "--expires", "30d", "--json"))
    assert made["expires_at"] - made["created_at"] == pytest.approx(30 * 86400)
    printed = service.atoll("token", "create", "oscar", "--role", "operator").splitlines()
    assert [line.startswith("atoll_") for line in printed] == [True, False], "stdout has the token and nothing else"

    monkeypatch.setenv("ATOLL_TOKEN", made["token"])
    assert json.loads(service.atoll("jobs", "--json"))["jobs"] == []
    assert "needs the role operator" in service.atoll("submit", service.spec_file(), code=2)
    assert "needs the role admin" in service.atoll("token", "list", code=2)
    operator = [sys.executable, "-m", "api.cli", "--token", printed[0], "submit", service.spec_file(), "--json"]
    home = ["--home", str(service.home.path)]
    job = subprocess.run([*operator, *home], cwd=ROOT, capture_output=True, text=True, check=True, env=environment())
    assert json.loads(job.stdout)["caller"] == "oscar", "the token that is given goes before the one in ATOLL_TOKEN"

    monkeypatch.delenv("ATOLL_TOKEN")
    assert "revoked" in service.atoll("token", "revoke", "eve")
    listed = service.atoll("token", "list")
    assert made["token"] not in listed
    assert "eve" in listed
    monkeypatch.setenv("ATOLL_TOKEN", made["token"])
    assert "unknown, expired or revoked" in service.atoll("jobs", code=2)
    monkeypatch.delenv("ATOLL_TOKEN")
    who = [(entry["caller"], entry["path"], entry["status"]) for entry in json.loads(service.atoll("audit", "--json"))]
    assert who[:3] == [("local", "/v1/tokens/eve/revoke", 200), ("oscar", "/v1/jobs", 201), ("eve", "/v1/jobs", 403)]
    assert "POST /v1/tokens/eve/revoke" in service.atoll("audit", "--limit", "1")
    assert "30d" in service.atoll("token", "create", "x", "--role", "viewer", "--expires", "soon", code=2)


def test_the_client_raises_what_the_gate_meant(service: Installation) -> None:
    address = service.home.address()
    assert address is not None
    with Client(address.url) as stranger, pytest.raises(Unauthenticated, match="carries no token"):
        stranger.jobs()
    with service.client() as admin:
        made = admin.create_token("reader", Role.VIEWER)
        assert admin.audit(limit=1).entries[0].path == "/v1/tokens"
    with Client(address.url, token=made.token) as viewer, pytest.raises(Forbidden, match="operator"):
        viewer.cancel("latest")
    with Client(address.url, token="guess") as guesser, pytest.raises(TooManyFailures, match="Wait") as told:
        ask_often(guesser)
    assert told.value.retry_after_s > 0


def ask_often(client: Client) -> None:
    for _ in range(20):
        with suppress(Unauthenticated):
            client.jobs()


def test_no_secret_is_found_in_any_file_answer_or_document(service: Installation, http: httpx.Client) -> None:
    made = http.post("/v1/tokens", json={"name": "secret", "role": "operator"}).json()["token"]
    own, wrong = service.home.token(), "atoll_this-one-is-wrong"
    assert own is not None
    with service.http(made) as client:
        job = client.post("/v1/jobs", json=service.spec(steps=2)).json()["job"]
        said = [
            client.get(path).text for path in ("/v1/jobs", f"/v1/jobs/{job}", "/openapi.json", "/metrics", "/v1/nope")
        ]
        said += [client.post("/v1/tokens", json={"name": made, "role": made}).text]
        said += [client.post("/v1/jobs", json={"name": 3}, headers={"Idempotency-Key": "k" * 300}).text]
    with service.http(wrong) as client:
        said += [client.get("/v1/jobs").text]
    said += [http.get(path).text for path in ("/v1/tokens", "/v1/audit", f"/v1/jobs/{job}/commands")]
    kept = [path for path in service.folder.rglob("*") if path.is_file() and path != service.home.path / "token"]
    assert {"service.log", "service.sqlite", "tape.jsonl"} <= {path.name for path in kept}
    for secret in (made, own, wrong):
        assert [text for text in said if secret in text] == []
        assert [path for path in kept if secret.encode() in path.read_bytes()] == []


def test_the_openapi_document_tells_the_role_of_every_operation(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            is_open = path in ("/healthz", "/readyz")
            assert operation["security"] == ([] if is_open else [{"token": []}]), (method, path)
            assert is_open or {"401", "403", "429"} <= operation["responses"].keys(), (method, path)
    assert "role admin" in document["paths"]["/v1/tokens"]["get"]["description"]


def test_the_homes_token_goes_to_the_homes_service_and_nowhere_else(cold: Installation) -> None:
    home = cold.home
    home.path.mkdir()
    home.write_token("atoll_of-the-home")
    with listening() as (own, elsewhere, heard):
        home.write_address(own, cold.runs)
        with home.locked():
            ask(home, None, own, elsewhere)
        ask(home, own)
        with pytest.raises(ServiceUnreachable, match="has ended"):
            Client.at(home.path)
    home.forget_address()
    assert heard == ["Bearer atoll_of-the-home"] * 2 + [None] * 2, "a dead service's address is anybody's"


def ask(home: Home, *urls: str | None) -> None:
    for url in urls:
        with Client.at(home.path, url) as client:
            client.health()


@contextmanager
def listening() -> Iterator[tuple[str, str, list[str | None]]]:
    """Two names of one server that is healthy and notes who came."""
    heard: list[str | None] = []

    class Ear(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Ear)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        port = server.server_port
        yield f"http://127.0.0.1:{port}", f"http://localhost:{port}", heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--certificate"),
        (["--host", "192.0.2.1"], "--insecure"),
        (["--host", "0.0.0.0", "--certificate", "c.pem"], "belong together"),
        (["--host", "0.0.0.0", "--certificate", "no.pem", "--key", "no.pem"], "No such file"),
        (["--certificate", "README.md", "--key", "README.md"], "PEM files"),
        (["--allow", "os; rm"], "not a package name"),
        (["--host", "no such host", "--insecure"], "is not an address"),
    ],
)
def test_up_refuses_to_send_tokens_in_the_clear_before_it_starts_anything(
    cold: Installation, options: list[str], words: str
) -> None:
    assert words in cold.atoll("up", "--control", CONTROL, *options, code=2)
    assert not (cold.home.path / "service.log").exists() or (cold.home.path / "service.log").read_bytes() == b""


def test_by_force_the_service_listens_everywhere_and_still_asks_for_tokens(cold: Installation) -> None:
    cold.atoll("up", "--runs", str(cold.runs), "--control", CONTROL, "--host", "0.0.0.0", "--insecure")
    with cold.http("") as stranger:
        assert stranger.get("/v1/jobs", headers={"Host": "atoll.example.org"}).status_code == 401
        assert stranger.get("/healthz", headers={"Origin": "http://evil.example"}).status_code == 403
    assert json.loads(cold.atoll("jobs", "--json"))["jobs"] == []


def test_under_tls_the_client_of_the_home_trusts_its_certificate_and_no_other(
    cold: Installation, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-out", str(certificate), "-keyout", str(key)]
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    subprocess.run([*make, *subject, *files], check=True, capture_output=True)
    tls = ["--certificate", str(certificate), "--key", str(key)]
    cold.atoll("up", "--runs", str(cold.runs), "--control", CONTROL, "--host", "localhost", *tls)
    address = cold.home.address()
    assert address is not None
    assert address.url.startswith("https://localhost:")
    assert json.loads(cold.atoll("jobs", "--json"))["jobs"] == []
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        httpx.get(f"{address.url}/healthz")


def test_jobs_may_name_code_of_a_package_that_the_service_was_started_with(cold: Installation) -> None:
    cold.atoll("up", "--runs", str(cold.runs), "--control", CONTROL, "--allow", "ours")
    with cold.http() as http:
        foreign = http.post("/v1/jobs", json=cold.spec(model={"factory": "os:system"}, colour="red"))
        assert foreign.status_code == 422
        assert {p["path"] for p in foreign.json()["problems"]} == {"model.factory", "colour"}
        foreign = http.post("/v1/jobs", json=cold.spec() | {"trainer": "os:system"})
        assert [p["path"] for p in foreign.json()["problems"]] == ["trainer"]
        assert http.post("/v1/jobs", json=cold.spec(model={"factory": "ours.models:make"})).status_code == 201


# ── secrets in URLs ───────────────────────────────────────────────────────────────────────────────────────────────────

SECRET = "hunter2secret"
WITH_A_SECRET = (
    f"s3://reader:{SECRET}@bucket/folder",
    f"s3://reader:with/slashes/{SECRET}@bucket",
    f"s3://bucket/folder?X-Amz-Signature={SECRET}",
    f"az://container/folder?sig={SECRET}",
    f"https://{SECRET}@example.org/text",
)
MAY_BE_URLS: tuple[tuple[str, Callable[[str], dict[str, Any]]], ...] = (
    ("checkpoints.folder", lambda url: {"checkpoints": {"folder": url}}),
    ("resume.checkpoint", lambda url: {"resume": {"checkpoint": url}}),
    ("data.tokenizer", lambda url: {"data": {"source": "files", "files": ["/a"], "tokenizer": url}}),
    ("data.files[1]", lambda url: {"data": {"source": "files", "files": ["/a", url]}}),
    ("trainer", lambda url: {"trainer": url}),
)


def test_no_secret_of_a_url_or_of_the_environment_is_shown_or_stored(
    cold: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in answers and messages, nor in the files of home, runs and store, nor in the titles of processes."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    for url in WITH_A_SECRET[:3]:
        said = cold.atoll("up", "--runs", str(cold.runs), "--store", url, code=2)
        assert SECRET not in said
    cold.up("--store", str(cold.folder / "store"), "--pass-environment", "AWS_SECRET_ACCESS_KEY")
    with cold.http() as http:
        for url in WITH_A_SECRET:
            for path, section in MAY_BE_URLS:
                answer = http.post("/v1/jobs", json=cold.spec(**section(url)))
                assert answer.status_code == 422, answer.text
                assert [problem["path"] for problem in answer.json()["problems"]] == [path]
                assert SECRET not in answer.text
        specification = cold.folder / "job.yaml"
        specification.write_text(yaml.safe_dump(cold.spec(checkpoints={"folder": WITH_A_SECRET[0]})))
        for command in ("check", "submit"):
            assert SECRET not in cold.atoll(command, str(specification), code=None)
        specification.unlink()
        job = http.post("/v1/jobs", json=cold.spec(steps=20)).raise_for_status().json()["job"]
        wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "completed")
        paths = http.get("/openapi.json").json()["paths"]
        for path, methods in paths.items():
            if "get" in methods and "{" not in path.replace("{job}", "") and "events" not in path:
                assert SECRET not in http.get(path.replace("{job}", job)).text, path
    written = [path for path in cold.folder.rglob("*") if path.is_file()]
    assert {"status.json", "tape.jsonl"} <= {path.name for path in written}
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    titles = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [title for title in titles if str(cold.folder) in title], "the service is among them"
    assert [title for title in titles if str(cold.folder) in title and SECRET in title] == []
