"""What the commands of an installation refuse before they start anything, each in one sentence.

`up`, `head`, `serve`, `join`, `install-units`, `leave`, `store`: files that are damaged, addresses that are not of this
machine, disks that are full, and options that contradict each other.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from api.installation.home import Home
from orchestrator.certificates import authority as authorities
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
BEGUN = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a head sends first: an empty frame of settings, RFC 9113."""
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


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ATOLL_"))}


def refused(tmp_path: Path, *words: str, code: int = 2) -> str:
    """The one sentence or two with which the command refuses. Nothing of it is left."""
    own = [] if "--home" in words or words[0] == "join" else ["--home", str(tmp_path / "home")]
    done = forked.atoll(*words, *own, folder=tmp_path, environment=clean_environment())
    text = " ".join(done.stderr.split())
    assert done.returncode == code, text
    assert "Traceback" not in text
    assert not re.search(r"ray (stop|start|init)|ray\.init", text), "this is Ray's advice"
    assert not (tmp_path / "home" / "cluster" / "head-storage").exists()
    return text


def expired(folder: Path) -> None:
    folders.renew(folder.parent / "fleet", folder, days=0)


def issued_ahead(folder: Path) -> None:
    """Its clock is two days ahead of ours."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(authorities, "CLOCK_SKEW", timedelta(days=-2))
        folders.renew(folder.parent / "fleet", folder)


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
    assert "--own-address 127.0.0.1 has no effect without --head HOST:PORT" in refused(
        tmp_path, "serve", "--own-address", HERE
    )
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
    for command in (("head", "--address", HERE), ("up",), ("demo",)):
        said = refused(tmp_path, *command, "--home", token_in(tmp_path), code=1)
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
    assert "Read-only file system. Mount it writable, or give another store." in refused(tmp_path, *at, code=1)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "WATCH_S", 0.05)
    monkeypatch.setattr(join, "SELDOM_S", 3600.0)
    with (
        served(socket.create_server((HERE, 0)), BEGUN) as taken,
        served(socket.create_server((HERE, 0)), BEGUN) as other,
    ):
        looks_for_another(tmp_path, taken, other, monkeypatch)


def looks_for_another(tmp_path: Path, taken: int, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = store_with_head(tmp_path, f"{HERE}:{taken}")
    options = join.parser().parse_args(["--store", store, "--token-file", "t", "--group", "g", "--region", "r"])
    node, waiting = join.Heads(options), join.Heads(options)
    assert node.wait_for_one(0.0, lambda: False) == f"{HERE}:{taken}"
    fleet = succession.opened(store, tmp_path / "former", None, lambda _: None)
    again = succession.announce(fleet, f"{HERE}:{taken}", "cluster")
    assert not node.are_lost(), "it has only started again"
    succession.announce(fleet, f"{HERE}:1", "another")
    succession.announce(fleet, address := f"{HERE}:{other}", "another")
    assert waiting.wait_for_one(0.0, lambda: False) == address
    node.watch()
    assert not node.is_gone, "its head answers"
    monkeypatch.setattr(join, "SELDOM_S", 0.0)
    wait_until(lambda: node.is_gone, "the node that looks again")
    node.close()
    assert again.number == 2


# ── certificates ──────────────────────────────────────────────────────────────────────────────────────────────────


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "an empty certificate": (
        "tls.crt",
        lambda path: path.write_bytes(b""),
        "tls.crt is not a certificate in PEM format.",
    ),
    "garbage": ("tls.crt", lambda path: path.write_bytes(b"\xff" * 99), "tls.crt is not a certificate in PEM format."),
    "a pipe": ("tls.crt", piped, "tls.crt: it is not a regular file."),
    "no certificate": ("tls.crt", Path.unlink, "tls.crt: No such file or directory."),
    "a folder": ("tls.crt", lambda path: (path.unlink(), path.mkdir()), "tls.crt: Is a directory."),
    "an empty key": ("tls.key", lambda path: path.write_bytes(b""), "tls.key is empty or not a file."),
    "a key of garbage": (
        "tls.key",
        lambda path: path.write_bytes(b"x"),
        "tls.key is not a key in PEM format without a",
    ),
    "a pipe as key": ("tls.key", piped, "tls.key is empty or not a file."),
    "another key": (
        "tls.key",
        lambda path: path.write_bytes(authorities.pem_of_key(authorities.new_key())),
        "is not the key",
    ),
    "a public key file": ("tls.key", lambda path: path.chmod(0o644), "has mode 0644, so other users can read it."),
    "authorities of garbage": (
        "ca.crt",
        lambda path: path.write_bytes(b"x"),
        "ca.crt is not a certificate in PEM format.",
    ),
    "no authorities": ("ca.crt", lambda path: path.write_bytes(b""), "ca.crt is not a certificate in PEM format."),
    "an end in the past": ("", expired, "tls.crt expired on "),
    "a beginning to come": ("", issued_ahead, "tls.crt is valid only from "),
}


IN_SHORT = ("a pipe", "a pipe as key", "another key", "a beginning to come")
"""The others are refused by what `tests/test_certificates.py` tries."""


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(name, marks=[] if name in IN_SHORT else [pytest.mark.soak("one of fourteen damages")])
        for name in DAMAGES
    ],
)
def test_a_damaged_folder_of_certificates_is_named_by_all_who_need_it(tmp_path: Path, damage: str) -> None:
    file, harm, says = DAMAGES[damage]
    folder = issued(tmp_path, HERE)
    harm(folder / file)
    head = ("head", "--address", HERE, "--certificates", str(folder))
    said = refused(tmp_path, *head)
    assert says in said
    assert said.startswith("atoll: ")
    token = ("--token-file", token_in(tmp_path), "--wait", "0", "--certificates", str(folder))
    if file != "ca.crt":  # which a service does without
        pair = ("--certificate", str(folder / "tls.crt"), "--key", str(folder / "tls.key"))
        if "mode" not in says:
            assert re.search(r"PEM|expired|valid only|Give --certificate and --key", refused(tmp_path, "up", *pair))
        assert says in refused(tmp_path, "join", f"{HERE}:1", "--group", "g", "--region", "r", *token)
    assert says in refused(tmp_path, "serve", "--head", f"{HERE}:1", *token)


def test_an_expired_authority_is_told_from_a_foreign_one(tmp_path: Path) -> None:
    authority, key, folder = authorities.Authority.new("old", timedelta(0)), authorities.new_key(), tmp_path / "machine"
    leaf = authority.issue(HERE, [HERE], key.public_key(), timedelta(days=1))
    folder.mkdir()
    (folder / "tls.crt").write_bytes(authorities.pem_of_certificates([leaf]))
    (folder / "ca.crt").write_bytes(authorities.pem_of_certificates([authority.certificate]))
    (folder / "tls.key").write_bytes(authorities.pem_of_key(key))
    (folder / "tls.key").chmod(0o600)
    said = refused(tmp_path, "head", "--address", HERE, "--certificates", str(folder))
    assert f"The authority in {folder / 'ca.crt'} has expired" in said


# ── what listens there is no head ─────────────────────────────────────────────────────────────────────────────────


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(listener: socket.socket, answer: bytes | None) -> Iterator[int]:
    """The port at which each caller is answered so and left alone; with None it is hung up on."""
    held = []

    def serve() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            if answer is None:
                line.close()
            else:
                line.sendall(answer)
                held.append(line)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for line in held:
        line.close()


@contextmanager
def website(context: ssl.SSLContext | None = None) -> Iterator[int]:
    with ThreadingHTTPServer((HERE, 0), Page) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(
    "kind",
    [
        "silent",
        "HTTP",
        *(
            pytest.param(kind, marks=pytest.mark.soak("one of five"))
            for kind in ("closing", "another protocol", "HTTPS")
        ),
    ],
)
def test_a_port_at_which_something_else_listens_is_told_from_a_head(tmp_path: Path, kind: str) -> None:
    folder = issued(tmp_path, HERE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    listener = socket.create_server((HERE, 0))
    listening, says = {
        "silent": (served(listener, b""), "something listens at that port and says nothing within 2 s"),
        "closing": (served(listener, None), "what listens at that port closes the connection"),
        "another protocol": (
            served(listener, b"SSH-2.0-x\r\n"),
            "another program listens at that port, which says 'SSH-2.0",
        ),
        "HTTP": (website(), "an HTTP server listens at that port, such as a service of atoll"),
        "HTTPS": (website(context), "an HTTPS server listens at that port, such as a service of atoll"),
    }[kind]
    token = ("--token-file", token_in(tmp_path), "--wait", "0")
    with listening as port:
        for tls in ((), ("--certificates", str(folder))):
            said = refused(tmp_path, "join", f"{HERE}:{port}", "--group", "g", "--region", "r", *token, *tls, code=1)
            assert f"The head at {HERE}:{port} does not answer: {says}" in said
        assert says in refused(
            tmp_path, "serve", "--port", str(free_port()), "--head", f"{HERE}:{port}", *token, code=1
        )
    listener.close()


# ── options ───────────────────────────────────────────────────────────────────────────────────────────────────────

JOIN = ("join", f"{HERE}:1", "--group", "g", "--region", "r", "--token-file", "TOKEN")
SERVE = ("serve", "--port", "FREE")
HEAD = ("head", "--address", HERE)
UNIT = ("install-units", "--root", "FOLDER")
OPTIONS: list[tuple[tuple[str, ...], str]] = [
    (("up", "--home", ""), "--home is empty, as from an unset variable. Give a path"),
    (("up", "--runs="), "--runs is empty"),
    (("up", "--groups", ""), "--groups is empty"),
    (("up", "--groups", "FOLDER"), "is no file. Give one with --groups."),
    (("up", "--groups", "FOLDER/none"), "does not exist. Give one with --groups."),
    (("up", "--runs", "FOLDER/home"), "is the home folder, the secrets of which jobs must not read"),
    (("up", "--certificate", "TOKEN"), "--certificate and --key belong together"),
    (
        ("up", "--certificate", "TOKEN", "--key", "TOKEN", "--insecure"),
        "--certificate and --insecure contradict each other",
    ),
    (("up", "--certificate", "TOKEN", "--key", "TOKEN"), "is not a certificate in PEM format"),
    (
        ("up", "--host", "nosuch.invalid", "--insecure"),
        "cannot be resolved: Name or service not known. Give an address",
    ),
    (("up", "--host", "0.0.0.0"), "--host 0.0.0.0 is not a loopback address"),
    (("up", "--host", "127.0.0.1:80"), "is not an address. Give one of this machine's without a port"),
    (("up", "--allow", ""), "--allow '' is not a package name"),
    (("up", "--packages", "TOKEN"), "the folder does not exist"),
    (("up", "--checkpoints", "http://x/y"), "'http' is not a supported protocol"),
    (("up", "--checkpoints", ""), "a path or URL must have 1 to 2,000 characters"),
    (("up", "--data", "FOLDER/home"), "is in the home folder"),
    (("up", "--jobs-max", "0"), "--jobs-max '0' is not a whole number from 1 to 10,000. Give one."),
    ((*SERVE, "--jobs-max", "1.5"), "--jobs-max '1.5' is not a whole number from 1 to 10,000."),
    (("up", "--restart-silent-after", "nan"), "--restart-silent-after 'nan' is not a number from 0 to 100,000."),
    (("up", "--partition-tolerance", "1"), "--partition-tolerance '1' is not a number from 3 to 1,000,000."),
    (("up", "--data", "FOLDER/none"), "--data FOLDER/none does not exist. Create the folder, or give"),
    (("up", "--groups", "FOLDER/binary"), "FOLDER/binary: its encoding is UTF-16 (at byte 1). Save it as UTF-8."),
    (
        ("up", "--groups", "FOLDER/list.yaml"),
        "instead of a mapping of fields to values; see deploy/configs/groups.yaml",
    ),
    (("up", "--groups", "FOLDER/half.yaml"), "node_groups.0.region: is missing. Add it."),
    (("up", "--groups", "FOLDER/half.yaml"), "node_groups.0.cpus: is 0, but must be at least 1."),
    (
        ("up", "--control", "nosuch.control:connect"),
        "'nosuch.control:connect' is in no package that is installed. Give",
    ),
    (("up", "--retention-days", "inf"), "--retention-days is inf, but must be a finite number above 0."),
    (("up", "--runs", "s3://b/x"), "--runs 's3://b/x' is a URL. Give the path of a file or folder on this machine."),
    (("up", "--home=gs://b/x"), "--home 'gs://b/x' is a URL. Give the path of a file or folder on this machine."),
    (("up", "--checkpoints", "TOKEN"), "--checkpoints TOKEN is a file. Give a folder, or the URL of one."),
    (("up", "--control", "os"), "--control 'os' is not of the form MODULE:FACTORY. Give one such as"),
    (("up", "--store-key", "TOKEN"), "--store-key TOKEN has no effect without --store URL, and the home"),
    (("up", "--retention-days", "0"), "--retention-days is 0, but must be a finite number above 0"),
    (("up", "--retention-failed-days", "nan"), "--retention-failed-days is nan, but must be a finite number above 0"),
    (("up", "--retention-bytes", "5X"), "'5X' is not an amount of bytes"),
    (("up", "--database", ""), "--database is empty"),
    (("up", "--database", "postgresql://a:b@h/x"), "--database contains a password"),
    (("up", "--database", "x"), "The database URL is invalid: "),
    (("up", "--database", "oracle://h/x"), "The database's driver 'oracledb' is not installed"),
    (("up", "--store", ""), "is no absolute path of a folder"),
    (("up", "--store", "http://h/x"), "which is no store that atoll knows"),
    (
        ("up", "--store", "FOLDER/home/x"),
        "is in --home FOLDER/home, and would be lost with it. Give a folder of another disk",
    ),
    (("up", "--runs", "FOLDER/r", "--store", "FOLDER/r/x"), "is in --runs FOLDER/r, and would be lost with it"),
    (("up", "--pass-environment", "NOT_SET_HERE"), "NOT_SET_HERE: the variable is not set"),
    (("up", "--pass-environment", "A=B"), "is not the name of a variable"),
    ((*HEAD, "--certificates", ""), "--certificates is empty"),
    ((*HEAD, "--port", "70000"), "--port '70000' is not a whole number from 1 to 65,535. Give one."),
    ((*HEAD, "--take-over"), "--take-over has no effect without --store URL"),
    ((*HEAD, "--store-key", "TOKEN"), "--store-key TOKEN has no effect without --store URL"),
    ((*HEAD, "--packages", "FOLDER/none"), "the folder does not exist"),
    ((*HEAD, "--pass-environment", "NOT_SET_HERE"), "the variable is not set"),
    ((*SERVE, "--ports", "21000-21099"), "--ports 21000-21099 has no effect without --head HOST:PORT. Give"),
    ((*SERVE, "--token-file", "TOKEN"), "--token-file TOKEN has no effect without --head HOST:PORT. Give --head"),
    ((*SERVE, "--store-key", "TOKEN"), "--store-key TOKEN has no effect without --store URL"),
    ((*SERVE, "--data", "FOLDER/none"), "warning: --data FOLDER/none does not exist on this machine"),
    ((*SERVE, "--head", "nohost", "--token-file", "TOKEN"), "'nohost' is not an address of the form HEAD:PORT"),
    ((*SERVE, "--head", f"{HERE}:1"), "The cluster's secret is missing. Give its file with --token-file"),
    ((*SERVE, "--head", f"{HERE}:1", "--token-file", "TOKEN", "--ports", "9-1"), "is not a range of at least 5 ports"),
    ((*SERVE, "--head", "203.0.113.9:1", "--token-file", "TOKEN"), "is not on loopback, and without TLS"),
    ((*SERVE, "--key", "TOKEN"), "--certificate and --key belong together"),
    ((*SERVE, "--database", "x"), "The database URL is invalid"),
    ((*SERVE, "--store", "FOLDER/home/x"), "and would be lost with it"),
    ((*JOIN[:-1], ""), "--token-file is empty"),
    ((*JOIN[:-1], "FOLDER"), "Is a directory"),
    ((*JOIN[:-1], "FOLDER/pipe"), "is empty or not a file"),
    ((*JOIN[:-1], "FOLDER/binary"), "does not hold a secret, which is one line of text"),
    ((*JOIN, "--certificates", "FOLDER", "--insecure"), "--certificates and --insecure contradict each other"),
    ((*JOIN, "--until", "soon"), "is not a time"),
    ((*JOIN, "--until", "00:01:00", "--lead", "90"), "Give a later time, or a shorter --lead"),
    ((*JOIN, "--ports", "30000-30001"), "is not a range of at least 5 ports"),
    ((*JOIN, "--resources", "CPU=4"), "CPU has an option of its own"),
    ((*JOIN, "--resources", "TPU=4", "--resources", "TPU=8"), "TPU is 4 already. Leave one out."),
    ((*JOIN, "--labels", "a=1", "--labels", "a=2"), "a is 1 already. Leave one out."),
    ((*JOIN, "--labels", "region=x"), "--group and --region set region"),
    ((*JOIN, "--lead", "5"), "--lead 5.0 has no effect without --until WALLTIME. Give --until WALLTIME with it"),
    ((*JOIN, "--cpus", "-1"), "--cpus '-1' is not a whole number from 0 to 100,000."),
    ((*JOIN, "--memory-gib", "nan"), "--memory-gib 'nan' is not a number from 0.1 to 1,000,000."),
    ((*JOIN, "--own-address", "a:1"), "is not an address. Give one without a port"),
    (("join", "x", *JOIN[2:]), "'x' is not an address of the form HEAD:PORT"),
    ((*UNIT, "head"), "Missing option '--address'"),
    ((*UNIT, "head", "--", "--address", "x"), "--address 'x' is not an IP address"),
    ((*UNIT, "head", "--", "--address", "1.2.3.4 5"), "is not an IP address"),
    ((*UNIT, "head", "--", "--address", HERE, "--home", "a b"), "'a b' has a space or one of"),
    ((*UNIT, "nope"), "'nope' is not one of 'head', 'service', 'join'"),
    (("leave", "--cause", ""), "--cause has 0 characters"),
    (("leave", "--name", ""), "--name '' is not a valid name"),
    (("leave", "--grace", "nan"), "--grace 'nan' is not a number from 0 to 86,400."),
    (("doctor", "--ports", "1", "99999"), "--ports '99999' is not a whole number from 0 to 65,535."),
    (("doctor", "--step-s", "inf"), "--step-s 'inf' is not a number from "),
    (("doctor", "--ports", "9", "1"), "--ports 9 1 ends before it begins. Give the lower port first."),
    (("doctor", "--lines", "--runs", "FOLDER"), "--runs has no effect on lines (--lines)."),
    (("jobs", "--url", "nope"), "The service's URL 'nope' is not of the form https://HOST:PORT. Correct --url"),
    (("jobs", "--url", "http://x:99999"), "The service's URL 'http://x:99999' is not of the form"),
    ((*JOIN, "--until", "2020-01-01"), "--until 2020-01-01 is not in the future. Give a later time"),
    (("store", "check", "x"), "is no absolute path of a folder"),
    (("store", "check", "FOLDER"), "is no store of atoll"),
    (("store", "gc", "FOLDER", "--dry-run"), "is no store of atoll"),
]


def test_values_that_are_wrong_or_contradict_each_other_are_named_with_a_remedy(tmp_path: Path) -> None:
    values = {"TOKEN": token_in(tmp_path), "FOLDER": str(tmp_path), "FREE": str(free_port())}
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 32)
    (tmp_path / "binary").chmod(0o600)
    (tmp_path / "list.yaml").write_text("- a")
    (tmp_path / "half.yaml").write_text("node_groups: [{name: a, cpus: 0}]")

    def filled(text: str) -> str:
        for name, value in values.items():
            text = text.replace(name, value)
        return text

    for words, says in OPTIONS:
        typed = tuple(map(filled, words))
        own = [] if "--home" in words or words[0] not in ("up", "head", "serve") else ["--home", str(tmp_path / "home")]
        done = forked.atoll(*typed, *own, folder=tmp_path, environment=clean_environment())
        text = re.sub(r"[│╭╮╰╯─\s]+", " ", done.stderr)
        assert done.returncode == 2, (words, text)
        assert filled(says) in text, (words, text)
        assert "Traceback" not in text, words
        assert "starting" not in text, words


def test_the_service_says_in_a_sentence_why_it_cannot_load_a_control(tmp_path: Path) -> None:
    said = refused(tmp_path, "up", "--control", "tests.api:nosuch", "--port", str(free_port()))
    assert said.endswith(
        "atoll: --control 'tests.api:nosuch' cannot be loaded: module 'tests.api' has no attribute 'nosuch'. Write "
        "package.module:factory."
    )


def test_what_only_a_try_shows_is_tried_before_anything_starts(tmp_path: Path, full: Path) -> None:
    token = token_in(tmp_path)
    (full / "ballast").write_bytes(bytes(60_000))
    for words, says in (
        (("up", "--host", "224.0.0.1", "--insecure"), "Cannot listen on port"),
        (("up", "--host", "2001:db8::1", "--insecure"), "Cannot listen on port"),
        (("up", "--database", f"postgresql://{HERE}:1/x"), "Connection refused. Check that it runs"),
        (("up", "--database", f"sqlite:///{tmp_path}/none/x"), "unable to open database file. Check"),
        (("up", "--store", token), "Not a directory. Give the path of a folder"),
        (("up", "--store", str(full / "s")), "No space left on device. Make room there"),
        (
            ("install-units", "--root", token, "head", "--", "--address", HERE),
            "cannot be written: Not a directory. Move",
        ),
        (("store", "check", token), "Not a directory. Give the path of a folder"),
    ):
        own = ["--home", str(tmp_path / "home")] if words[0] == "up" else []
        done = forked.atoll(*words, *own, folder=tmp_path, environment=clean_environment())
        assert done.returncode == 1, (words, done.stderr)
        assert says in done.stderr, (words, done.stderr)
        assert "Traceback" not in done.stderr
        assert "starting" not in done.stderr, words


# ── another fleet ─────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "api.cli", *words],
        env={**clean_environment(), "PYTHONPATH": str(forked.ROOT)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stderr=(folder / f"{words[0]}.log").open("wb"),
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.soak("a head and a service with TLS, which take half a minute")
def test_a_fleet_refuses_the_certificates_of_another_and_says_so(tmp_path: Path) -> None:
    own, foreign = issued(tmp_path, HERE), issued(tmp_path, HERE, fleet="other")
    home, port, served_at = tmp_path / "fleet-home", free_port(), free_port()
    at = ("--home", str(home), "--certificates", str(own))
    with running(tmp_path, "head", "--address", HERE, "--port", str(port), *at):
        wait_until(lambda: "answers at" in (tmp_path / "head.log").read_text())
        token = str(home / "cluster" / "token")
        node = ("join", f"{HERE}:{port}", "--group", "g", "--region", "r", "--wait", "2")
        service = ("serve", "--head", f"{HERE}:{port}", "--port", str(free_port()), "--wait", "2")
        for command in (node, service):
            given = ("--token-file", token, "--certificates")
            assert "it is another cluster, or someone" in refused(tmp_path, *command, *given, str(foreign))
            assert "speaks TLS, and this machine was given no" in refused(tmp_path, *command, *given[:2])
            given = ("--token-file", token_in(tmp_path), "--certificates", str(own))
            assert "is not the cluster's secret" in refused(tmp_path, *command, *given)
        with running(tmp_path, "serve", "--port", str(served_at), *at):
            wait_until(lambda: (home / "service.json").exists())
            token_text = str(Home(home).token())
            url = f"https://{HERE}:{served_at}"
            for trusted, code, says in (
                (foreign, 3, f"The service at {url} has a certificate that is not trusted here (unable to get local"),
                (own, 0, ""),
            ):
                environment = {
                    **clean_environment(),
                    "SSL_CERT_FILE": str(trusted / "ca.crt"),
                    "ATOLL_TOKEN": token_text,
                }
                done = forked.atoll("jobs", "--url", url, folder=tmp_path, environment=environment)
                assert (done.returncode, says in done.stderr) == (code, True), done.stderr
            with pytest.raises(ssl.SSLCertVerificationError):
                folders.context_of(foreign, server_side=False).wrap_socket(
                    socket.create_connection((HERE, served_at)), server_hostname=HERE
                )
            said = refused(tmp_path, *node[:1], f"{HERE}:{served_at}", *node[2:], *given, code=1)
            assert "an HTTPS server listens at that port, such as a service of atoll" in said
