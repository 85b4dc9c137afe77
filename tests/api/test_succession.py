"""The service and the head of a lost machine continue on another one, from the store; those before cannot go on beside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.auth.permissions import Role
from api.cli import app
from api.storage.sessions import copy_with
from api.storage.store import JobRow, Store
from orchestrator.errors import (
    AtollError,
    ConfigurationError,
    Conflict,
    DataError,
    Fenced,
    InfrastructureError,
    LogStoreUnavailable,
    StoreUnavailable,
)
from orchestrator.system import home_files
from orchestrator.system.object_store import admit, open_store
from orchestrator.system.succession import (
    Head,
    ServiceCopy,
    announce,
    newest_head,
    opened,
    prepare_to_lead,
    refuse_succeeded,
)
from tests.api.installation import Installation
from tests.programs import s3_environment, seaweedfs
from tests.swarm.disk import SimulatedStore, StoreFault
from tests.waiting import wait_until

SECRET = "5ecre7" * 10


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SimulatedStore:
    """A store in memory, at every URL."""
    store = SimulatedStore()
    monkeypatch.setattr("orchestrator.system.succession.open_store", lambda _: store)
    return store


class Machine:
    """A home with a service's database."""

    def __init__(self, folder: Path, key: Path | None = None) -> None:
        self.home, self.said, self.is_fenced = folder, [], threading.Event()
        folder.mkdir(exist_ok=True)
        self.fleet = opened("memory", folder, key, self.said.append)

    @property
    def key(self) -> Path:
        return self.home / "store.key"

    def serve(self) -> Store:
        file = self.home / "service.sqlite"
        self.copy = ServiceCopy(self.fleet, file, self.is_fenced.set)
        store = Store(f"sqlite:///{file}")
        copy_with(store.engine, self.copy.wait)
        self.copy.start()
        return store

    def lead(self, address: str = "") -> Head:
        prepare_to_lead(self.fleet)
        return announce(self.fleet, address, "cluster")


def job(name: str) -> JobRow:
    values = {"name": name, "spec": {}, "run_dir": f"/runs/{name}", "caller": "me", "submitted_at": 0.0}
    return JobRow(job=name, state="running", **values)


def names(store: Store) -> list[str]:
    return [row.job for row in store.jobs()]


def test_what_a_service_confirmed_another_machine_has_and_the_first_confirms_nothing_more(
    memory: SimulatedStore, tmp_path: Path
) -> None:
    one = Machine(tmp_path / "one")
    (one.home / "token").write_text(SECRET)
    store = one.serve()
    store.add_job(job("a"))
    store.add_job(job("b"))
    store.remove_job("a")

    two = Machine(tmp_path / "two", one.key)
    successor = two.serve()
    assert names(successor) == ["b"]
    assert home_files.read(two.home / "token") == SECRET
    successor.add_job(job("c"))
    with pytest.raises(StoreUnavailable, match=r"no current copy in its store: Another process has begun segment"):
        store.add_job(job("lost"))
    assert one.is_fenced.wait(5.0)
    with pytest.raises(Conflict, match="Another machine's service has taken over from that of"):
        Machine(one.home).serve()
    assert names(Machine(tmp_path / "three", one.key).serve()) == ["c", "b"]


def test_an_idle_service_notices_that_it_was_succeeded(memory: SimulatedStore, tmp_path: Path) -> None:
    one = Machine(tmp_path / "one")
    one.serve()
    Machine(tmp_path / "two", one.key).serve()
    assert one.is_fenced.wait(10.0)


def test_of_a_database_on_a_server_only_the_token_is_copied_and_its_service_is_fenced_as_well(
    memory: SimulatedStore, tmp_path: Path
) -> None:
    copies = []
    one = Machine(tmp_path / "one")
    (one.home / "token").write_text(SECRET)
    for machine in (one, Machine(tmp_path / "two", one.key)):
        copies.append(ServiceCopy(machine.fleet, None, machine.is_fenced.set))
        copies[-1].start()
        copies[-1].wait(5.0)
    assert [copy.is_new_home for copy in copies] == [False, True]
    assert home_files.read(tmp_path / "two" / "token") == SECRET
    assert one.is_fenced.wait(10.0)
    with pytest.raises(LogStoreUnavailable):
        copies[0].wait(5.0)


def test_a_service_starts_again_in_its_own_home_and_restores_a_database_that_was_lost_there(
    memory: SimulatedStore, tmp_path: Path
) -> None:
    one = Machine(tmp_path / "one")
    one.serve().add_job(job("a"))
    one.copy.close()
    again = Machine(one.home)
    again.serve().add_job(job("b"))
    again.copy.close()
    for path in one.home.glob("service.sqlite*"):
        path.unlink()
    assert names(Machine(one.home).serve()) == ["b", "a"]


def test_nothing_is_confirmed_while_the_store_is_down_and_all_is_copied_once_it_is_back(
    memory: SimulatedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.storage.sessions.ANSWER_TIMEOUT_S", 0.2)
    one = Machine(tmp_path / "one")
    store = one.serve()
    memory.fault_source = lambda _: StoreFault.DOWN
    with pytest.raises(StoreUnavailable, match="no current copy in its store: the store memory cannot be reached"):
        store.add_job(job("a"))
    assert names(store) == ["a"], "it can be read"
    memory.fault_source = lambda _: None
    wait_until(lambda: not one.copy.trouble, "the store")
    store.add_job(job("b"))
    assert names(Machine(tmp_path / "two", one.key).serve()) == ["b", "a"]


def test_an_answer_of_the_store_that_is_lost_does_not_fence_the_service(memory: SimulatedStore, tmp_path: Path) -> None:
    one = Machine(tmp_path / "one")
    store = one.serve()
    faults = iter([StoreFault.UNANSWERED])
    memory.fault_source = lambda _: next(faults, None)
    store.add_job(job("a"))
    assert not one.is_fenced.is_set()
    assert names(Machine(tmp_path / "two", one.key).serve()) == ["a"]


def test_no_object_of_the_service_or_a_head_shows_a_secret(memory: SimulatedStore, tmp_path: Path) -> None:
    one = Machine(tmp_path / "one")
    (one.home / "cluster").mkdir()
    for path in (one.home / "token", one.home / "cluster" / "token"):
        path.write_text(SECRET)
    one.serve().add_job(job("private"))
    one.lead("198.51.100.1:6379")
    key = home_files.read(one.key).strip().encode()
    for name, content in memory.objects.items():
        for secret in (SECRET.encode(), b"private", key, bytes.fromhex(key.decode()), b"SQLite format"):
            assert secret not in content, name
    name = next(name for name in memory.objects if name.startswith("service/log/"))
    memory.objects[name] = memory.objects["service/log/000000000002"]
    with pytest.raises(DataError, match="is damaged, or was not sealed with this key"):
        Machine(tmp_path / "two", one.key).serve()


def test_a_head_on_another_machine_gets_the_files_of_the_one_before_and_ends_it(
    memory: SimulatedStore, tmp_path: Path
) -> None:
    one = Machine(tmp_path / "one")
    (one.home / "cluster").mkdir()
    (one.home / "cluster" / "token").write_text(SECRET)
    (one.home / "cluster" / "groups.json").write_text("[]")
    issued = tmp_path / "certificates"
    issued.mkdir()
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (issued / name).write_text(name)
    first = announce(one.fleet, "127.0.0.1:1", "cluster", issued)
    again = announce(one.fleet, "127.0.0.1:1", "cluster", issued)
    assert newest_head(memory) == again
    with pytest.raises(Fenced):
        refuse_succeeded(memory, first)
    refuse_succeeded(memory, again)
    two = Machine(tmp_path / "two", one.key)
    second = two.lead("127.0.0.1:2")
    state = two.home / "cluster"
    assert (home_files.read(state / "token"), home_files.read(state / "groups.json")) == (SECRET, "[]")
    assert home_files.read(state / "certificates" / "tls.key") == "tls.key"
    assert (state / "certificates" / "tls.key").stat().st_mode & 0o077 == 0
    with pytest.raises(Fenced, match=r"127\.0\.0\.1:2 is the fleet's head now \(head 3 in memory\)"):
        refuse_succeeded(memory, again)
    memory.stale_count = len(memory.objects)
    assert newest_head(memory) == second, "no listing is trusted"
    for attempt in (one.lead, lambda: announce(one.fleet, "", "")):
        with pytest.raises(
            Conflict, match=r"is 127\.0\.0\.1:2 \(head 3 in memory\), and the home .* is not that of a new"
        ):
            attempt()


def test_a_head_whose_announcement_was_not_answered_starts_again(memory: SimulatedStore, tmp_path: Path) -> None:
    Machine(tmp_path / "one").lead()
    two = Machine(tmp_path / "two", tmp_path / "one" / "store.key")
    faults = iter([StoreFault.UNANSWERED])
    memory.fault_source = lambda name: next(faults, None) if name.startswith("heads/") else None
    with pytest.raises(AtollError, match="did not answer in time"):
        two.lead()
    assert two.lead().number == 3


def test_a_head_that_still_answers_is_not_succeeded_unless_that_is_asked_for(
    memory: SimulatedStore, tmp_path: Path
) -> None:
    one = Machine(tmp_path / "one")
    with socket.create_server(("127.0.0.1", 0)) as server:
        one.lead(f"127.0.0.1:{server.getsockname()[1]}")
        two = Machine(tmp_path / "two", one.key)
        with pytest.raises(Conflict, match=r"still answers\. Stop it first, or end it from here with --take-over\."):
            prepare_to_lead(two.fleet)
        assert prepare_to_lead(two.fleet, take_over=True) is not None


def test_of_two_heads_that_begin_at_once_one_leads(
    memory: SimulatedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Machine(tmp_path / "one")
    two = Machine(tmp_path / "two", one.key)
    monkeypatch.setattr("orchestrator.system.succession.newest_head", lambda *_: None)
    announce(one.fleet, "", "")
    with pytest.raises(Conflict, match="Another machine became head 1 of memory at the same time"):
        announce(two.fleet, "", "")


def test_the_copy_of_the_service_is_checked_and_cleaned_with_its_key(memory: SimulatedStore, tmp_path: Path) -> None:
    one = Machine(tmp_path / "one")
    one.serve().add_job(job("a"))
    memory.objects["atoll-store.json"] = b'{"format": 1, "fleet": "f"}'

    def told(*arguments: str, code: int = 0) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("orchestrator.system.object_store.open_store", lambda _: memory)
            result = CliRunner().invoke(app, ["store", *arguments, "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)["jobs"]

    key = ("memory", "--store-key", str(one.key))
    assert told("check", "memory") == {}
    assert told("check", *key)["(service)"]["file_count"] == 1
    assert told("gc", *key) == {"(service)": {"objects": 0, "bytes": 0}}
    del memory.objects["service/log/000000000001"]
    assert told("check", *key, code=1)["(service)"]["problems"]


def foreign_key(one: Machine, path: Path) -> None:
    path.write_text("0" * 64)


def open_key(one: Machine, path: Path) -> None:
    shutil.copy(one.key, path)
    path.chmod(0o644)


def no_key(one: Machine, path: Path) -> None:
    path.write_text("a password")


@pytest.mark.parametrize(
    ("prepared", "problem"),
    [
        (foreign_key, r"--store-key .* is not the key of --store memory, which belongs to another fleet\. Give"),
        (open_key, r"--store-key .* has mode 0644, so other users can read it\. Run chmod 600"),
        (no_key, r"--store-key .* has no key of 64 hexadecimal digits\. Give a copy of store\.key\."),
    ],
)
def test_a_key_that_cannot_be_used_is_refused(
    memory: SimulatedStore, tmp_path: Path, prepared: Callable[[Machine, Path], None], problem: str
) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    prepared(Machine(tmp_path / "one"), path)
    with pytest.raises(ConfigurationError, match=problem):
        Machine(tmp_path / "two", path)


def test_a_store_without_its_key_or_without_its_content_or_of_a_newer_format_is_refused(
    memory: SimulatedStore, tmp_path: Path
) -> None:
    one = Machine(tmp_path / "one")
    one.lead()
    with pytest.raises(ConfigurationError, match=r"is sealed, and .* has no key to it\. Give a copy of the store\.key"):
        Machine(tmp_path / "two")
    memory.objects["heads/00000002"] = b'{"schema": 2}'
    with pytest.raises(ConfigurationError, match="heads/00000002 in memory has format 2, and this release reads"):
        newest_head(memory)
    memory.objects["heads/00000002"] = b"[]"
    with pytest.raises(DataError, match="heads/00000002 in memory is damaged"):
        newest_head(memory)
    memory.objects.clear()
    with pytest.raises(
        ConfigurationError, match=r"has nothing of this fleet, though .* has used it: its disk is not mou"
    ):
        Machine(one.home)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Installation, Installation]]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    both = (Installation(tmp_path / "one"), Installation(tmp_path / "two"))
    yield both
    for place in both:
        place.atoll("down")


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The options for a store on a real S3 server."""
    (tmp_path / "seaweed").mkdir()
    with seaweedfs(tmp_path / "seaweed") as (endpoint, _):
        variables = s3_environment(endpoint)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

        def is_up() -> bool:
            with suppress(InfrastructureError):
                return bool(admit(open_store("s3://bucket/probed"), None))
            return False

        wait_until(is_up, "SeaweedFS")
        yield ["s3://bucket/fleet", *(word for name in variables for word in ("--pass-environment", name))]


@pytest.fixture
def folder(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "store")]


@pytest.mark.parametrize(
    "place", ["folder", pytest.param("s3", marks=pytest.mark.soak("the same over a real S3 server"))]
)
def test_another_machine_continues_the_service_of_one_that_was_lost_with_its_disk(
    machines: tuple[Installation, Installation], tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    store, (one, two) = request.getfixturevalue(place), machines
    one.up("--store", *store)
    assert f"Keep a copy of {one.home.path}/store.key elsewhere" in one.home.log.read_text()
    key = shutil.copy(one.home.path / "store.key", tmp_path / "key")
    with one.client() as client:
        submitted = client.submit(one.spec()).job
        token = client.create_token("reader", Role.VIEWER).token
        client.cordon("asia")
    own, address = one.home.token(), one.home.address()
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    wait_until(lambda: not one.home.running(), "the end of the service")
    shutil.rmtree(one.home.path)
    shutil.rmtree(one.runs)

    refusal = two.atoll("up", "--runs", str(two.runs), "--store", *store, code=2)
    assert "is sealed, and" in refusal
    two.up("--store", *store, "--store-key", str(key))
    assert two.home.token() == own
    with two.client() as client:
        assert [seen.job for seen in client.jobs()] == [submitted]
        assert [group.name for group in client.node_groups() if group.cordoned_by] == ["asia"]
    with two.http(token) as http:
        assert http.get("/v1/jobs").status_code == 200
