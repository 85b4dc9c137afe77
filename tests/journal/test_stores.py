"""Stores: what they promise, and which are refused, by name and without their secrets."""

from __future__ import annotations

import errno
import threading
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

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


class Telling(BaseHTTPRequestHandler):
    """A server whose refusals have what no log may have."""

    def do_PUT(self) -> None:
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b"<Error><Code>AccessDenied</Code><StringToSign>hunter2</StringToSign></Error>")

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def test_a_refusal_is_shown_without_the_text_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Telling)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    for name, value in {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(InfrastructureError, match="AccessDenied") as refused:
        admit(open_store("s3://bucket/x"), None)
    server.shutdown()
    server.server_close()
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))
