"""Stores: what they promise, and which are refused, by name and without their secrets."""

from __future__ import annotations

import errno
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote

import pytest

from orchestrator.errors import ConfigurationError, InfrastructureError
from orchestrator.system import object_store
from orchestrator.system.object_store import FolderStore, admit, open_store
from tests.swarm.disk import SimulatedStore, StoreFault


def test_a_folder_is_a_store_in_which_a_name_is_created_once(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "deep" / "store")
    store.create("a/b", b"one")
    with pytest.raises(FileExistsError):
        store.create("a/b", b"two")
    assert store.get("a/b") == b"one"
    store.put("a/b", b"three")
    assert store.sizes("a") == {"a/b": 5}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["b"]
    store.delete(["a/b", "a/b"])
    with pytest.raises(FileNotFoundError):
        store.get("a/b")


def test_a_fleet_finds_its_store_again_and_no_other_fleet_uses_it(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    assert admit(store, "f" * 32) == "f" * 32
    assert admit(store, None) == "f" * 32
    with pytest.raises(ConfigurationError, match="belongs to the fleet ffffffff…, and this service is of the fleet e"):
        admit(store, "e" * 32)
    store.put("atoll-store.json", b'{"format": 2, "fleet": "f"}')
    with pytest.raises(ConfigurationError, match="has format 2, and this release reads formats up to 1"):
        admit(store, None)
    store.put("atoll-store.json", b"[]")
    with pytest.raises(ConfigurationError, match="is no header of atoll"):
        admit(store, None)


def test_a_store_without_conditional_writes_is_refused_by_trying() -> None:
    class Overwriting(SimulatedStore):
        def create(self, name: str, content: bytes) -> None:
            self.put(name, content)

    store = Overwriting()
    with pytest.raises(ConfigurationError, match="has no conditional writes"):
        admit(store, None)
    assert store.objects == {}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://host/x", "begins with ftp://, which is no store"),
        ("relative/path", "is no absolute path"),
        ("/", "is no absolute path"),
        ("", "is no absolute path"),
        ("s3://user:hunter2@bucket/x", "s3://bucket/x was given with a password"),
        ("az://container/x?sig=hunter2", "az://container/x was given with a password"),
        ("s3://[hunter2/x", "is no URL"),
        ("s3:/user:hunter2@bucket/x", "--store is no absolute path"),
        ("user:hunter2@s3://bucket/x", "--store is no absolute path"),
        ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hunter2==", "--store is no absolute path"),
        ("https://bucket.host/x?X-Amz-Signature=hunter2", "https://bucket.host/x was given with a password"),
        ("/mnt/..", "is no absolute path"),
        ("//", "is no absolute path"),
        ("/mnt/store ", "has spaces around it, or characters"),
        ("/mnt/st\nore", "has spaces around it, or characters"),
        ("/mnt/\udcff", "has spaces around it, or characters"),
        ("s3://bucket/../x", "has . or .. among its folders"),
        ("s3://", "cannot be used: Generic URL error"),
        ("s3://bu cket/x", "s3://bu cket/x cannot be used: invalid domain character"),
        ("az://container/x", "cannot be used: Generic MicrosoftAzure error: Account must be specified"),
    ],
)
def test_a_url_that_cannot_be_a_store_is_refused_without_its_secret(
    url: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigurationError) as refused:
        open_store(url)
    assert problem in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_store_that_cannot_be_reached_or_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:1", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(InfrastructureError, match="its endpoint has no TLS, which needs AWS_ALLOW_HTTP=true"):
        admit(open_store("s3://bucket/x"), None)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(InfrastructureError, match=r"s3://bucket/x refuses to create probe/.*: it cannot be reached"):
        admit(open_store("s3://bucket/x"), None)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InfrastructureError, match="Not a directory"):
        admit(open_store(str(tmp_path / "file")), None)
    full = SimulatedStore(lambda _: StoreFault.DOWN)
    with pytest.raises(InfrastructureError, match="the store memory cannot be reached"):
        admit(full, None)


def test_a_path_at_which_no_folder_can_be_made_is_named_with_what_to_give_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dangling").symlink_to("/nowhere/x")
    for path in ("/proc/store", str(tmp_path / "dangling"), f"{tmp_path}/{'x' * 300}", "/dev/null"):
        with pytest.raises(
            InfrastructureError, match=rf"the store {path} refuses to write .*Give the path of a folder"
        ):
            admit(open_store(path), None)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(object_store.os, "link", refuse)
    with pytest.raises(
        InfrastructureError, match=r"makes no hard links.*Give a folder of a file system with hard links"
    ):
        admit(open_store(str(tmp_path / "no-links")), None)


@pytest.mark.parametrize("endpoint", ["minio:9000", "https://", "https://[bad/%zz", "http://user:hunter2@host name"])
def test_an_endpoint_that_is_no_address_is_named_without_its_password(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigurationError, match=r"^AWS_ENDPOINT_URL .*is no address of a server") as refused:
        open_store("s3://bucket/x")
    assert "hunter2" not in str(refused.value)


def test_conditional_writes_that_the_environment_switches_off_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "x")
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    with pytest.raises(InfrastructureError, match="set up without conditional writes"):
        admit(open_store("s3://bucket/x"), None)


class Quiet(BaseHTTPRequestHandler):
    """A server that prints nothing."""

    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class Telling(Quiet):
    """A server whose refusals have what no log may have."""

    def do_PUT(self) -> None:
        self.answer(403, b"<Error><Code>AccessDenied</Code><StringToSign>hunter2</StringToSign></Error>")


class GoogleXml(Quiet):
    """Google Cloud Storage as its XML API is documented: ``x-goog-if-generation-match: 0`` creates an object only once.

    No emulator that can be installed has all of it: fake-gcs-server has no PUT there, and Google's testbench no ETag, no
    listing and no DELETE. ``has_conditions`` is False for a server, or a proxy, that ignores the header.
    """

    objects: ClassVar[dict[str, tuple[int, bytes]]] = {}
    has_conditions: ClassVar[bool] = True
    making: ClassVar[threading.Lock] = threading.Lock()

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        with self.making:
            generation, _ = self.objects.get(self.path, (0, b""))
            wanted = self.headers.get("x-goog-if-generation-match")
            if self.has_conditions and wanted is not None and int(wanted) != generation:
                self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                return
            self.objects[self.path] = generation + 1, content
        self.answer(200, ETag=f'"{generation + 1}"', x_goog_generation=str(generation + 1))

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if query:
            prefix = f"{path}/{parse_qs(query)['prefix'][0]}"
            entry = "<Contents><Key>{}</Key><Size>{}</Size><LastModified>2026-11-26T00:00:00Z</LastModified></Contents>"
            rows = {unquote(name): len(content) for name, (_, content) in self.objects.items()}
            listed = [entry.format(name[len(path) + 1 :], n) for name, n in rows.items() if name.startswith(prefix)]
            self.answer(200, f"<ListBucketResult>{''.join(listed)}</ListBucketResult>".encode())
        elif path in self.objects:
            generation, content = self.objects[path]
            modified = "Thu, 26 Nov 2026 00:00:00 GMT"
            self.answer(200, content, ETag=f'"{generation}"', Last_Modified=modified)
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_DELETE(self) -> None:
        self.answer(204 if self.objects.pop(self.path, None) else 404)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run this server, and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[GoogleXml]]:
    class Served(GoogleXml):
        objects: ClassVar[dict[str, tuple[int, bytes]]] = {}

    with serving(Served) as endpoint:
        for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("GOOGLE_BASE_URL", endpoint)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "a")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        yield Served


def test_a_bucket_of_google_is_a_store_in_which_a_name_is_created_once(google: type[GoogleXml]) -> None:
    store = open_store("gs://bucket/x")
    fleet = admit(store, None)
    assert admit(store, fleet) == fleet

    def create(number: int) -> bool:
        try:
            store.create("log/000000000001", str(number).encode())
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as writers:
        made = list(writers.map(create, range(8)))
    assert sum(made) == 1
    assert store.get("log/000000000001") == str(made.index(True)).encode()
    store.put("log/000000000001", b"again")
    assert store.sizes("log") == {"log/000000000001": 5}
    store.delete(["log/000000000001", "log/000000000001"])
    with pytest.raises(FileNotFoundError):
        store.get("log/000000000001")
    assert not [name for name in google.objects if "probe" in name]


def test_a_bucket_of_google_that_ignores_conditions_is_refused(google: type[GoogleXml]) -> None:
    google.has_conditions = False
    with pytest.raises(ConfigurationError, match=r"gs://bucket/x made the object probe/.* twice"):
        admit(open_store("gs://bucket/x"), None)
    assert google.objects == {}


def test_a_bucket_of_google_without_credentials_is_named_with_what_to_set(
    google: type[GoogleXml], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # no metadata server can be asked
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    missing = r"no token with which to write \(no server of tokens answered\).*for gs:// GOOGLE_APPLICATION_CREDENTIALS"
    with pytest.raises(InfrastructureError, match=missing):
        admit(open_store("gs://bucket/x"), None)
    assert google.objects == {}


def test_a_refusal_is_shown_without_the_text_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Telling) as endpoint:
        for name, value in {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        with pytest.raises(InfrastructureError, match="AccessDenied") as refused:
            admit(open_store("s3://bucket/x"), None)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))
