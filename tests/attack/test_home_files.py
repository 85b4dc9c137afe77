"""Whatever lies in the place of a file of the home: nobody waits for it, it fills no memory, and nothing else is written."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from api.installation import store_history
from api.installation.home import Home
from orchestrator.errors import AtollError, DataError
from orchestrator.runtime.clusterfile import ClusterFile

SECRET = "a file beside the home, which no file of the home is"
PATIENCE_S = 60
"""Whoever waits for a pipe waits for ever."""
ROOM_BYTES = 1 << 30
WRITTEN = {"url": "http://127.0.0.1:8472", "pid": 1, "runs": "runs"}


def beside(path: Path) -> Path:
    return path.parent.parent / "secret"


def long(path: Path) -> None:
    path.touch()
    os.truncate(path, 64 << 30)


def json_of(**changes: Any) -> Callable[[Path], None]:
    return lambda path: put(path, json.dumps(WRITTEN | changes).encode())


def put(path: Path, content: bytes) -> None:
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to(beside(path)),
    "link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
    "link to itself": lambda path: path.symlink_to(path),
    "64 GiB": long,
    "no text": lambda path: put(path, b"\xff\xfe\x80" * 100),
    "zeros": lambda path: put(path, bytes(100)),
    "escapes": lambda path: put(path, b"\x1b]0;PWNED\x07\x1b[31m"),
    "not of ASCII": lambda path: put(path, "ключ".encode()),
    "deep": lambda path: put(path, b"[" * 100_000),
    "digits": lambda path: put(path, b"9" * 10_000),
    "an infinite pid": json_of(pid=float("inf")),
    "a pid that is not a number": json_of(pid=float("nan")),
    "a port that is too high": json_of(url="http://127.0.0.1:99999999"),
    "numbers": json_of(url=1, runs=2, certificate=3),
}


def enter(held: AbstractContextManager[None]) -> None:
    with held:
        pass


ASKED: dict[str, tuple[str, Callable[[Home], Any]]] = {
    "address": ("service.json", Home.address),
    "port": ("port", Home.port_before),
    "port by address": ("service.json", Home.port_before),
    "write address": ("service.json", lambda home: home.write_address("http://127.0.0.1:1", Path("runs"))),
    "write address, draft": ("service.json.new", lambda home: home.write_address("http://127.0.0.1:1", Path("runs"))),
    "forget address": ("service.json", Home.forget_address),
    "token": ("token", Home.token),
    "write token": ("token", lambda home: home.write_token("t")),
    "write token, draft": ("token.new", lambda home: home.write_token("t")),
    "running": ("service.lock", Home.running),
    "be the service": ("service.lock", lambda home: enter(home.locked())),
    "change": ("change.lock", lambda home: enter(home.locked_for_change("up"))),
    "had store": ("stores.json", lambda home: store_history.had_store(home, None)),
    "note store": ("stores.json", lambda home: store_history.note_store(home, None)),
    "note store, draft": ("stores.json.new", lambda home: store_history.note_store(home, None)),
    "lost store": ("service.sqlite", lambda home: store_history.refuse_lost_store(home, None)),
    "begin anew": ("stores.json", lambda home: store_history.begin_anew(home, None)),
    "cluster": ("cluster.json", lambda home: ClusterFile.find(home.path)),
    "write cluster": ("cluster.json", lambda home: ClusterFile("i", "h:1", "/x", {}).write(home.path)),
    "write cluster, draft": ("cluster.json.new", lambda home: ClusterFile("i", "h:1", "/x", {}).write(home.path)),
}


class Waited(Exception):
    pass


@pytest.fixture
def bounded() -> Iterator[None]:
    """A process that waits is woken, and one that reads 64 GiB finds no room."""

    def wake(*_: object) -> None:
        raise Waited

    before = signal.signal(signal.SIGALRM, wake)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("asked", ASKED)
def test_whatever_lies_there_is_read_at_once_or_refused_and_nothing_beside_is_written(
    tmp_path: Path, bounded: None, asked: str
) -> None:
    name, ask = ASKED[asked]
    (secret := tmp_path / "secret").write_text(SECRET)
    failed = []
    for number, (what, damage) in enumerate(DAMAGES.items()):
        home = Home(tmp_path / str(number))
        home.make()
        damage(home.path / name)
        signal.alarm(PATIENCE_S)
        try:
            answer = ask(home)
            if asked == "token":
                assert answer is None or (answer.isascii() and answer.isprintable())
        except AtollError:
            pass
        except BaseException as error:
            failed.append((what, repr(error)))
        finally:
            signal.alarm(0)
        if secret.read_text() != SECRET:
            failed.append((what, "wrote to what it leads to"))
            secret.write_text(SECRET)
    assert failed == []


def test_what_is_written_is_read_again_whatever_lay_there(tmp_path: Path) -> None:
    cluster = ClusterFile("i", "h:1", "/x", {"A": "b"})
    for number, (what, damage) in enumerate(DAMAGES.items()):
        home = Home(tmp_path / str(number))
        home.make()
        for name in (
            "service.json",
            "service.json.new",
            "token",
            "token.new",
            "stores.json",
            "cluster.json",
            "port.new",
        ):
            damage(home.path / name)
        home.write_address("http://127.0.0.1:8472", Path("runs"))
        home.write_token("a-token")
        store_history.note_store(home, None)
        cluster.write(home.path)
        address = home.address()
        assert (address and address.port, home.port_before(), home.token()) == (8472, 8472, "a-token"), what
        assert store_history.had_store(home, None), what
        assert ClusterFile.find(home.path) == cluster, what
        assert (home.path / "token").stat().st_mode & 0o077 == 0


def test_a_cluster_file_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    for number, what in enumerate(("pipe", "folder", "64 GiB", "no text", "deep", "link to itself")):
        (home := tmp_path / str(number)).mkdir()
        DAMAGES[what](home / "cluster.json")
        with pytest.raises(DataError):
            ClusterFile.find(home)
