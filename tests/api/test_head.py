"""What `atoll head`, `atoll serve` and `atoll join` refuse before they start anything, each in one sentence."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.certificates import folders
from orchestrator.runtime import join
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.system import succession
from orchestrator.system.marks import BY_HEAD, ELSEWHERE
from orchestrator.system.ports import free_port
from tests import forked
from tests.programs import missing
from tests.waiting import wait_until

HERE = "127.0.0.1"
NOT_HERE = "203.0.113.9"
"""Of a network that is only for documents, RFC 5737."""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which another program listens."""
    with socket.create_server((HERE, 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        missing("root, which mounts need,")
    place = tmp_path / "full"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def refused(tmp_path: Path, *words: str, code: int = 2) -> str:
    """The one sentence or two with which the command refuses. Nothing of it is left."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ATOLL_"))}
    own = [] if "--home" in words or words[0] == "join" else ["--home", str(tmp_path / "home")]
    done = forked.atoll(*words, *own, folder=tmp_path, environment=environment)
    text = " ".join(done.stderr.split())
    assert done.returncode == code, text
    assert "Traceback" not in text
    assert not re.search(r"ray (stop|start|init)|ray\.init", text), "this is Ray's advice"
    assert not (tmp_path / "home" / "cluster" / "head-storage").exists()
    return text


def token_in(tmp_path: Path) -> str:
    token = tmp_path / "token"
    token.write_text("a" * 64)
    token.chmod(0o600)
    return str(token)


def issued(tmp_path: Path, *names: str, fleet: str = "fleet") -> Path:
    authority = tmp_path / fleet
    if not authority.exists():
        folders.make_authority(authority, fleet)
    folder = tmp_path / f"{fleet}-{'-'.join(names)}"
    folders.issue(authority, folder, names)
    return folder


def test_a_head_needs_an_address_of_this_machine_that_others_can_call(tmp_path: Path) -> None:
    for address, says in (
        (NOT_HERE, f"--address {NOT_HERE} is not an address of this machine. Give one of "),
        ("0.0.0.0", "--address 0.0.0.0 is not an address of this machine"),
        ("224.0.0.1", "--address 224.0.0.1 is not an address of this machine"),
        ("255.255.255.255", "--address 255.255.255.255 is not an address of this machine"),
        ("", "--address '' is not an IP address. Give one of this machine's"),
        ("head.example", "--address 'head.example' is not an IP address. Give one of this machine's"),
    ):
        assert says in refused(tmp_path, "head", "--insecure", "--address", address)


def test_a_port_that_another_program_has_is_named(tmp_path: Path, taken: int) -> None:
    said = refused(tmp_path, "head", "--address", HERE, "--port", str(taken))
    assert f"--port {taken}: Address already in use at {HERE}. Give another port" in said
    ClusterFile("x", f"{HERE}:1", "/tmp/atoll-x", {}, BY_HEAD).write(tmp_path / "home")
    assert f"Port {taken} is in use" in refused(tmp_path, "serve", "--port", str(taken), code=1)


def test_certificates_are_judged_before_anything_starts(tmp_path: Path) -> None:
    other = issued(tmp_path, "203.0.113.1")
    at = ("head", "--address", HERE)
    missing_folder = refused(tmp_path, *at, "--certificates", str(tmp_path / "none"))
    assert "tls.key" in missing_folder
    assert "contradict each other" in refused(tmp_path, *at, "--certificates", str(other), "--insecure")
    beyond = refused(tmp_path, "head", "--address", NOT_HERE)
    assert f"{NOT_HERE}:6379 is not on loopback" in beyond
    assert "--certificates" in beyond
    wrong = refused(tmp_path, "head", "--address", NOT_HERE, "--certificates", str(other))
    assert f"is not valid for {NOT_HERE}" in wrong
    assert "Issue one with --name" in wrong


def test_a_home_on_a_full_or_read_only_disk_is_named(tmp_path: Path, full: Path) -> None:
    (full / "ballast").write_bytes(bytes(60_000))
    home = full / "home"
    said = refused(tmp_path, "head", "--address", HERE, "--home", str(home), code=1)
    assert f"The home folder {home} cannot be written: No space left on device. Free some space" in said
    subprocess.run(["mount", "-o", "remount,ro", full], check=True)
    said = refused(tmp_path, "head", "--address", HERE, "--home", str(home), code=1)
    assert "Read-only file system" in said


def test_a_head_that_refuses_connections_is_named_within_the_wait(tmp_path: Path) -> None:
    said = refused(
        tmp_path,
        *("join", f"{HERE}:1", "--group", "g", "--region", "r", "--wait", "0"),
        "--token-file",
        token_in(tmp_path),
        code=1,
    )
    assert f"The head at {HERE}:1 does not answer: it refuses connections, so no head listens at that port." in said
    assert "Start it with `atoll head`" in said
    said = refused(
        tmp_path,
        "serve",
        "--port",
        str(free_port()),
        "--head",
        f"{HERE}:1",
        "--wait",
        "0",
        "--token-file",
        token_in(tmp_path),
        code=1,
    )
    assert "it refuses connections" in said


def test_a_service_needs_a_head_and_a_home_has_one_kind_of_cluster(tmp_path: Path) -> None:
    assert "--head is missing, and no head has run in the home" in refused(
        tmp_path, "serve", "--port", str(free_port())
    )
    assert "--own-address is for a service whose head is elsewhere" in refused(tmp_path, "serve", "--own-address", HERE)
    for supervisor in (BY_HEAD, ELSEWHERE):
        ClusterFile("x", f"{HERE}:1", "/tmp/atoll-x", {}, supervisor).write(tmp_path / "home")
        for command in ("up", "down"):
            assert "belongs to `atoll head` or `atoll serve`" in refused(tmp_path, command)
        assert "Start one with `atoll serve`" in refused(tmp_path, "jobs", code=3)
    assert "belongs to a cluster of `atoll serve --head`" in refused(tmp_path, "head", "--address", HERE)


def test_a_machine_that_joins_has_an_address_of_its_own_and_not_the_heads_group(tmp_path: Path) -> None:
    at = ("join", f"{HERE}:1", "--region", "r", "--wait", "0", "--token-file", token_in(tmp_path))
    said = refused(tmp_path, *at, "--group", "g", "--own-address", NOT_HERE)
    assert f"--own-address {NOT_HERE} is not an address of this machine. Give one of " in said
    assert "--group control is the head's own group" in refused(tmp_path, *at, "--group", "control")
    served = ("serve", "--port", str(free_port()), "--head", f"{HERE}:1", "--wait", "0")
    given = ("--token-file", token_in(tmp_path), "--own-address", NOT_HERE)
    assert f"--own-address {NOT_HERE} is not an address of this machine" in refused(tmp_path, *served, *given)
    assert "--host '' is not an address" in refused(tmp_path, *served, "--token-file", token_in(tmp_path), "--host", "")


def test_a_file_in_place_of_the_home_is_to_be_moved_away(tmp_path: Path) -> None:
    said = refused(tmp_path, "head", "--address", HERE, "--home", token_in(tmp_path), code=1)
    assert "cannot be written: File exists. Move the file away that is in place of the folder" in said


def test_an_installation_that_could_not_serve_starts_no_cluster(tmp_path: Path, taken: int) -> None:
    file = token_in(tmp_path)
    for options, says in (
        (("--host", NOT_HERE, "--insecure"), f"of {NOT_HERE}: Cannot assign requested address. Choose another --host"),
        (("--port", str(taken)), f"Port {taken} is in use by other programs. Give another with --port."),
        (("--runs", file), f"The runs folder {file} cannot be written: File exists. Move the file away"),
        (("--runs", f"{file}/runs"), "cannot be written: Not a directory. Move the file away"),
    ):
        said = refused(tmp_path, "up", *options, code=1)
        assert says in said
        assert "starting the embedded cluster" not in said


def store_with_head(tmp_path: Path, address: str) -> tuple[str, str]:
    """A store that names a head at this address, and the key to it."""
    home = tmp_path / "former"
    home.mkdir()
    fleet = succession.opened(str(tmp_path / "store"), home, None, lambda _: None)
    succession.announce(fleet, address, "cluster")
    return str(tmp_path / "store"), str(home / "store.key")


def test_a_head_does_not_take_the_place_of_one_that_answers_nor_without_the_key(tmp_path: Path, taken: int) -> None:
    store, key = store_with_head(tmp_path, f"{HERE}:{taken}")
    at = ("head", "--address", HERE, "--store")
    said = refused(tmp_path, *at, store, "--store-key", key, code=1)
    assert (
        f"The head of this fleet, {HERE}:{taken} (head 1 in {store}), still answers. Stop it first, or end it" in said
    )
    assert f"--store {store} is sealed, and" in refused(tmp_path, *at, store, "--home", str(tmp_path / "other"))
    said = refused(tmp_path, *at, "s3://user:hunter2@bucket/x")
    assert "was given with a password" in said
    assert "hunter2" not in said
    Path(key).write_text("b" * 64)
    assert "is not the key of --store" in refused(
        tmp_path, *at, store, "--store-key", key, "--home", str(tmp_path / "x")
    )


def test_a_store_that_is_full_or_read_only_takes_no_head(tmp_path: Path, full: Path) -> None:
    at = ("head", "--address", HERE, "--store", str(full / "store"))
    (full / "ballast").write_bytes(bytes(65_536))
    said = refused(tmp_path, *at, code=1)
    assert "No space left on device. Make room there, or give another store." in said
    subprocess.run(["mount", "-o", "remount,ro", full], check=True)
    assert "Read-only file system. Give the service credentials that may" in refused(tmp_path, *at, code=1)


def test_a_machine_joins_the_head_that_a_store_names(tmp_path: Path) -> None:
    store, _ = store_with_head(tmp_path, f"{HERE}:1")
    at = ("--group", "g", "--region", "r", "--wait", "0", "--token-file", token_in(tmp_path))
    said = refused(tmp_path, "join", *at, "--store", store, code=1)
    assert f"The head at {HERE}:1 does not answer: it refuses connections" in said
    said = refused(tmp_path, "join", *at, "--store", str(tmp_path / "empty"), "--insecure", code=1)
    assert f"There is no head to join: {tmp_path}/empty names no head that other machines can reach." in said
    assert "HEAD:PORT is missing. Give the head's address, or with --store URL" in refused(tmp_path, "join", *at)
    both = refused(tmp_path, "join", f"{HERE}:1", *at, "--store", store)
    assert "Both HEAD:PORT and --store are given" in both


def test_a_node_looks_for_another_head_only_while_its_own_is_gone(
    tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "WATCH_S", 0.05)
    monkeypatch.setattr(join, "SELDOM_S", 3600.0)
    store, _ = store_with_head(tmp_path, f"{HERE}:{taken}")
    options = join.parser().parse_args(["--store", store, "--token-file", "t", "--group", "g", "--region", "r"])
    node, waiting = join.Heads(options), join.Heads(options)
    assert node.wait_for_one(0.0, lambda: False) == f"{HERE}:{taken}"
    fleet = succession.opened(store, tmp_path / "former", None, lambda _: None)
    again = succession.announce(fleet, f"{HERE}:{taken}", "cluster")
    assert not node.are_lost(), "it has only started again"
    succession.announce(fleet, f"{HERE}:1", "another")
    with socket.create_server((HERE, 0)) as server:
        succession.announce(fleet, address := f"{HERE}:{server.getsockname()[1]}", "another")
        assert waiting.wait_for_one(0.0, lambda: False) == address
        node.watch()
        assert not node.is_gone, "its head answers"
        monkeypatch.setattr(join, "SELDOM_S", 0.0)
        wait_until(lambda: node.is_gone, "the node that looks again")
        node.close()
    assert again.number == 2
