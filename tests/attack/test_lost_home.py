"""A home whose files are damaged or lost: what runs is found, addresses stay, and a store that is gone is no beginning."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from api.client import Client
from api.installation.home import Home
from api.installation.store_history import begin_anew, had_store, note_store, refuse_lost_store
from orchestrator.errors import DataError, InfrastructureError
from orchestrator.runtime import embedded, processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.orphan_scan import census
from orchestrator.runtime.processes import START_MAX_S, START_SILENCE_S, StartWatch, is_own, leave_marks
from orchestrator.runtime.settings import CLUSTER_MARKER, FOLDER_VARIABLE, NODE_MARKER, TOKEN_VARIABLE
from orchestrator.system.marks import HOME_MARKER, is_foreign, is_of, mark_of, marked_pids
from orchestrator.system.ports import free_port
from orchestrator.system.socket_room import CLUSTER_PREFIX
from tests.api.installation import Installation
from tests.waiting import PATIENCE_S, wait_until

DAMAGES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
    "no JSON": lambda path: path.write_bytes(b"{\xff"),
    "a list": lambda path: path.write_text("[]"),
    "no fields": lambda path: path.write_text("{}"),
    "other types": lambda path: path.write_text('{"id": 5, "address": [], "temp_dir": {}, "environment": 7, "url": 1}'),
    "nesting": lambda path: path.write_text('{"id":' * 100_000),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Installation]:
    installation = Installation(tmp_path)
    yield installation
    installation.atoll("down")
    assert not installation.home.running()


def port_of(installation: Installation) -> int:
    address = installation.home.address()
    assert address is not None
    assert address.port is not None
    return address.port


# ── the service's address ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_running_service_is_found_whatever_its_address_file_is(cold: Installation) -> None:
    port = free_port()
    cold.up("--port", str(port))
    before = cold.home.address()
    path = cold.home.path / "service.json"
    for name, damage in DAMAGES.items():
        damage(path)
        with Client.at(cold.home.path) as client:
            assert client.jobs() == [], name
        assert cold.home.address() == before, f"{name}: it is written again"
    path.write_text(json.dumps({"url": "http://127.0.0.1:1", "pid": os.getpid(), "runs": "/"}))
    assert "already running" in cold.up()
    assert cold.home.address() == before, "another process's address is not taken"
    path.write_bytes(b"")
    assert "stopping the service" in cold.atoll("down")
    assert not cold.home.running()


@pytest.mark.parametrize("damage", ["emptied", "a folder"])
def test_the_port_stays_after_a_death(cold: Installation, damage: str) -> None:
    port = free_port()
    cold.up("--port", str(port))
    address = cold.home.address()
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    wait_until(lambda: not cold.home.running())
    DAMAGES[damage](cold.home.path / "service.json")
    cold.up()
    assert port_of(cold) == port


def test_the_port_stays_after_the_heads_death_and_after_a_start_that_failed(cold: Installation) -> None:
    """As the cluster's head dies: the service lives, does not answer for it, and is started again with it."""
    port = free_port()
    cold.up("--port", str(port))
    switch = cold.home.path / "clockwork" / "cluster-is-gone"
    before = cold.home.address()
    assert before is not None
    switch.touch()
    ended = subprocess.Popen(cold.command("up", "--runs", str(cold.runs), "--control", "tests.api.clockwork:connect"))
    wait_until(lambda: not psutil.pid_exists(before.pid))
    switch.unlink()
    assert ended.wait(PATIENCE_S) == 0
    assert port_of(cold) == port
    cold.atoll("down")
    failed = cold.atoll("up", "--runs", str(cold.runs), "--control", "tests.api:nothing", code=2)
    assert "cannot be loaded" in failed
    cold.up()
    assert port_of(cold) == port


# ── the store ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def corrupted(path: Path) -> None:
    """Pages in the middle are overwritten."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(min(size - 4096, 40_960)))


STORES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
    "no database": lambda path: path.write_bytes(b"x" * 8192),
    "cut in the middle": lambda path: os.truncate(path, path.stat().st_size // 2),
    "other pages": corrupted,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a new one": lambda path: (
        path.unlink(),
        sqlite3.connect(path).executescript("VACUUM; CREATE VIEW v AS SELECT 1;"),
    ),
}


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """A home of a service that had a job, and was taken down."""
    installation = Installation(tmp_path_factory.mktemp("used"))
    installation.up()
    with installation.client() as client:
        client.submit(installation.spec(steps=5))
    installation.atoll("down")
    return installation


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("damage", STORES)
def test_a_lost_store_is_refused_and_not_begun_anew_until_somebody_says_so(
    used: Installation, tmp_path: Path, damage: str, old: bool
) -> None:
    home = Home(Path(shutil.copytree(used.home.path, tmp_path / "home")))
    for beside in home.path.glob("service.sqlite-*"):
        beside.unlink()
    if old:  # from before homes noted their stores
        (home.path / "stores.json").unlink()
    refuse_lost_store(home, None)
    store = home.path / "service.sqlite"
    STORES[damage](store)
    for _ in range(2):
        with pytest.raises(InfrastructureError, match="--new-store") as refused:
            refuse_lost_store(home, None)
        assert str(store) in refused.value.detail
    aside = begin_anew(home, None)
    assert (aside is None) == (damage == "removed")
    assert aside is None or os.path.lexists(aside)
    refuse_lost_store(home, None)
    assert not os.path.lexists(store)


def test_up_refuses_a_lost_store_before_it_starts_anything_and_goes_on_where_told(
    used: Installation, tmp_path: Path
) -> None:
    installation = Installation(tmp_path)
    shutil.copytree(used.home.path, installation.home.path)
    store = installation.home.path / "service.sqlite"
    for beside in installation.home.path.glob("service.sqlite-*"):
        beside.unlink()
    store.write_bytes(b"")
    options = ("up", "--runs", str(installation.runs), "--control", "tests.api.clockwork:connect")
    said = installation.atoll(*options, code=1)
    assert "is empty, though this home had one" in said
    assert "atoll up --new-store" in said
    assert "starting the service" not in said
    serve = [sys.executable, "-m", "api.serve", "--home", str(installation.home.path)]
    done = subprocess.run([*serve, *options[3:]], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, "Traceback" in done.stderr, "is empty" in done.stderr) == (1, False, True)
    try:
        assert "the old one is" in installation.atoll(*options, "--new-store")
        with installation.client() as client:
            assert client.jobs() == []
            client.submit(installation.spec(steps=5))
        installation.atoll("down")
        installation.atoll(*options, "--new-store")
        with installation.client() as client:
            assert len(client.jobs()) == 1, "a sound store stays, however often this is said"
    finally:
        installation.atoll("down")


def test_a_fresh_home_begins_beside_any_runs(used: Installation, tmp_path: Path) -> None:
    home = Home(tmp_path / "fresh")
    home.path.mkdir()
    assert any(used.runs.iterdir())
    refuse_lost_store(home, None)
    (home.path / "service.sqlite").touch()  # a first start that was killed at once
    refuse_lost_store(home, None)
    assert not had_store(home, None)


def test_another_database_is_another_store(tmp_path: Path) -> None:
    home = Home(tmp_path)
    first, second = "postgresql://atoll:secret@db/atoll", "postgresql://atoll@other/atoll"
    note_store(home, first)
    assert had_store(home, "postgresql+psycopg://atoll:changed@db/atoll")
    assert not had_store(home, second)
    assert "secret" not in (tmp_path / "stores.json").read_text()
    begin_anew(home, first)
    assert not had_store(home, first)


def test_a_database_that_was_emptied_is_no_beginning_either(tmp_path: Path) -> None:
    from api.storage.store import Store

    url = f"sqlite:///{tmp_path / 'other.sqlite'}"
    Store(url).close()
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            connection.execute(f'DROP TABLE "{table}"')
        connection.commit()
    with pytest.raises(InfrastructureError, match="is empty, though a service of this home has used it"):
        Store(url, had_tables=True)
    Store(url).close()


# ── the cluster ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Marked:
    """A cluster of two processes that do nothing, as ``embedded`` leaves one; its real one is in tests/ray/test_embedded."""

    def __init__(self, home: Path) -> None:
        home.mkdir(exist_ok=True)
        self.home, self.temp_dir = home, Path(tempfile.mkdtemp(prefix=CLUSTER_PREFIX))
        (self.temp_dir / "token").write_text("x")
        environment = {TOKEN_VARIABLE: str(self.temp_dir / "token"), HOME_MARKER: mark_of(home)}
        self.file = ClusterFile(f"cluster-{home.name}-{os.getpid()}", "127.0.0.1:1", str(self.temp_dir), environment)
        leave_marks(self.file, home)
        self.file.write(home)
        marks = {**os.environ, **environment, CLUSTER_MARKER: self.file.id, NODE_MARKER: "control"}
        self.processes = [subprocess.Popen(["/bin/sleep", "600"], env=marks) for _ in range(2)]
        wait_until(lambda: len(processes.marked(self.file.id)) == 2)

    @property
    def alive(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Marked]:
    made = Marked(tmp_path / "home")
    yield made
    made.end()


def test_a_start_is_waited_for_as_long_as_a_process_of_it_works(cluster: Marked) -> None:
    """Of a job's actor, the process of which is new on its node, or was idle and has the actor's name by now."""

    def watch(before: frozenset[int], name: str = "job-1:synchroniser") -> StartWatch:
        return StartWatch(cluster.file.id, "control", name, 0.0, before)

    idle = watch(frozenset())
    assert idle.given_up(0.0) == idle.given_up(START_SILENCE_S) == ""
    assert idle.given_up(START_SILENCE_S + 1) == "no process of it did anything for 60 s"

    marks = {**os.environ, **cluster.file.environment, CLUSTER_MARKER: cluster.file.id, NODE_MARKER: "control"}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass", "ray::job-1:synchroniser"], env=marks)
    try:
        wait_until(lambda: len(processes.marked(cluster.file.id)) == 3)
        at = 0.0
        for watched in (watch(frozenset()), watch(frozenset({busy.pid}))):
            for _ in range(5):
                used = psutil.Process(busy.pid).cpu_times().user
                assert watched.given_up(at) == ""
                wait_until(lambda used=used: psutil.Process(busy.pid).cpu_times().user > used)  # type: ignore[misc]
                at += START_SILENCE_S
            assert watched.given_up(START_MAX_S + 1) == "it was not ready after 600 s"
            at = 0.0
        other = watch(frozenset({busy.pid}), "job-2:synchroniser")
        assert other.given_up(START_SILENCE_S + 1) == "no process of it did anything for 60 s", "another job's works"
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.parametrize("damage", DAMAGES)
def test_down_ends_the_cluster_of_the_home_whatever_its_file_is(cluster: Marked, damage: str) -> None:
    DAMAGES[damage](ClusterFile.path(cluster.home))
    assert set(census(cluster.home)["own"]) == {process.pid for process in cluster.processes}  # type: ignore[call-overload]
    assert set(marked_pids(cluster.home)) == {process.pid for process in cluster.processes}
    assert embedded.down(cluster.home) == 2
    wait_until(lambda: not cluster.alive)
    assert not cluster.temp_dir.exists()
    assert not os.path.lexists(ClusterFile.path(cluster.home))


@pytest.mark.parametrize("damage", DAMAGES)
def test_up_finds_the_cluster_of_the_home_again(cluster: Marked, damage: str) -> None:
    DAMAGES[damage](ClusterFile.path(cluster.home))
    assert embedded._current(cluster.home) == cluster.file
    assert ClusterFile.find(cluster.home) == cluster.file
    assert cluster.alive


def test_a_cluster_that_nobody_can_join_any_more_is_ended(cluster: Marked) -> None:
    for path in (ClusterFile.path(cluster.home), ClusterFile.path(cluster.temp_dir)):
        path.write_bytes(b"")
    assert embedded._current(cluster.home) is None
    wait_until(lambda: not cluster.alive)
    assert not cluster.temp_dir.exists()
    assert not ClusterFile.path(cluster.home).exists()
    assert len(list(cluster.home.glob("cluster.json.damaged-*"))) == 1


def test_a_process_with_the_mark_of_another_cluster_does_not_cost_this_one_its_folder(cluster: Marked) -> None:
    """Some process that was started with most of the environment of this cluster has an id of its own."""
    marks = {
        **os.environ,
        **cluster.file.environment,
        FOLDER_VARIABLE: str(cluster.temp_dir),
        CLUSTER_MARKER: "another",
    }
    stray = subprocess.Popen(["/bin/sleep", "600"], env=marks)
    try:
        wait_until(lambda: len(processes.marked("another")) == 1)
        assert embedded._current(cluster.home) == cluster.file
        assert stray.poll() is not None, "it was ended"
        assert cluster.alive
        assert (cluster.temp_dir / "token").exists()
    finally:
        stray.kill()
        stray.wait()


def test_the_copy_of_a_home_does_not_end_the_cluster_of_the_first(cluster: Marked, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(cluster.home, tmp_path / "copy"))
    assert embedded.down(copy) == 0
    assert cluster.alive
    assert cluster.temp_dir.exists()
    assert census(copy)["own"] == []


def test_a_cluster_file_names_no_folder_that_is_removed_but_a_clusters(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    home = tmp_path / "home"
    ClusterFile("nobody", "127.0.0.1:1", str(precious), {}).write(home)
    assert embedded.down(home) == 0
    assert precious.is_dir()
    link = tmp_path / f"{CLUSTER_PREFIX}link"
    link.symlink_to(precious)
    assert not is_own(link)


def test_the_advice_makes_no_orphans(tmp_path: Path) -> None:
    ClusterFile.path(tmp_path).write_bytes(b"")
    with pytest.raises(DataError) as told:
        ClusterFile.find(tmp_path)
    assert "remove" not in str(told.value)
    assert "atoll down" in str(told.value)


def test_a_mark_is_of_one_folder(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    mark = mark_of(one)
    assert is_of(one, mark, os.getpid())
    assert not is_of(two, mark, os.getpid())
    assert is_foreign(two, mark)
    shutil.rmtree(two)
    one.rename(two)
    assert not is_foreign(two, mark), "it was moved"
    for odd in ("", "x", "1:2", "::", "1:2:relative"):
        assert not is_of(one, odd, os.getpid())


def test_groups_that_cannot_be_read_give_way_to_those_given(cluster: Marked) -> None:
    from orchestrator.runtime.groups import DEFAULT_GROUPS

    for raw in (b"", b"{}", b"[5]", b"\xff"):
        (cluster.temp_dir / "groups.json").write_bytes(raw)
        assert embedded._remembered_groups(cluster.file, DEFAULT_GROUPS) in (DEFAULT_GROUPS, ())
