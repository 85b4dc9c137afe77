"""The mirrored log: machines are lost with their disks at any put, stores refuse, writers take over from each other.

What comes after is what would have come, bit for bit, from the store alone.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api.cli import app
from orchestrator.errors import ConfigurationError, DataError, Fenced, InfrastructureError, LogStoreUnavailable
from orchestrator.host import retry
from orchestrator.host.job_files import mirror
from orchestrator.host.retry import store_status
from orchestrator.system import mirror as mirroring
from orchestrator.system.disk import LocalDisk
from orchestrator.system.mirror import JobObjects, LogWriter, delete_log, mirrored, refuse_to_leave_logs, shard_log
from orchestrator.system.object_store import FolderStore, ObjectStore, admit, open_store, require_available
from orchestrator.system.run_folder import TAPE
from orchestrator.system.store_log import (
    Operation,
    Piece,
    Segment,
    decode,
    encode,
    examine,
    read_files,
    size_of,
    superfluous,
)
from tests.harness.lives import Lives
from tests.harness.shell import Fate, spec
from tests.journal.test_crash_points import STEPS, assert_sound
from tests.programs import s3_environment, seaweedfs
from tests.swarm.disk import AtOnce, SimulatedDisk, SimulatedStore, StoreFault
from tests.waiting import wait_until

MIRRORED = {"durability": {"kind": "mirrored", "snapshot_every_records": 40}}
EACH_PUT = int(os.environ.get("ATOLL_MIRROR_PUTS", "5"))
"""How many of the puts of a job a machine is lost at; ``make soak`` takes all."""


def use_small_objects(patch: pytest.MonkeyPatch) -> None:
    """Bases come often, contents are large early, and a process dies with the thread that writes its snapshots."""
    patch.setattr(LogWriter, "base_after_bytes", 6000)
    patch.setattr(mirroring, "INLINE_BYTES_MAX", 1500)
    patch.setattr(mirroring, "PIECE_BYTES", 1000)
    patch.setattr(retry, "ThreadPoolExecutor", lambda *_: AtOnce())


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_objects(monkeypatch)


def run(store: ObjectStore, disk: SimulatedDisk, after_death: Callable[[], None] = lambda: None) -> Lives:
    lives = Lives(Path("/run"), Fate(), disk, after_death, store, **MIRRORED)
    lives.step(STEPS)
    lives.adopt()
    return lives


class Faults:
    """The fault of the put with this number, from 1. All puts are counted."""

    def __init__(self, fault: StoreFault | None = None, numbers: Callable[[int], bool] = lambda _: False) -> None:
        self.names: list[str] = []
        self._fault, self._numbers = fault, numbers

    def __call__(self, name: str) -> StoreFault | None:
        self.names.append(name)
        return self._fault if self._numbers(len(self.names)) else None


@cache
def undisturbed() -> tuple[Any, list[str]]:
    faults = Faults()
    with pytest.MonkeyPatch.context() as patch:
        use_small_objects(patch)
        lives = run(SimulatedStore(faults), SimulatedDisk())
    assert_sound(lives, Path("/run"))
    return lives.bits(), faults.names


def test_an_undisturbed_job_writes_every_kind_of_object() -> None:
    bits, names = undisturbed()
    assert [version for version, *_ in bits] == [2, 2, 2]
    assert {name.partition("/")[0] for name in names} == {"log", "objects", "base", "next", "newest"}


@pytest.mark.parametrize("fault", [StoreFault.BEFORE, StoreFault.AFTER])
def test_a_machine_lost_with_its_disk_at_any_put_changes_no_bit(fault: StoreFault) -> None:
    bits, names = undisturbed()
    for number in range(1, len(names) + 1, max(1, len(names) // EACH_PUT)):
        disk = SimulatedDisk()
        faults = Faults(fault, lambda n, number=number: n == number)
        lives = run(SimulatedStore(faults), disk, disk.lose_everything)
        late = len(faults.names) < number  # islands tell of their progress by the clock, so there may be fewer puts
        assert lives.deaths == (0 if late else 1), number
        assert not late or number > len(names) // 2
        assert lives.bits() == bits, number
        assert_sound(lives, Path("/run"))


@pytest.mark.parametrize("fault", [StoreFault.DOWN, StoreFault.UNANSWERED])
def test_any_single_put_that_is_refused_or_not_answered_changes_no_bit_and_ends_no_life(fault: StoreFault) -> None:
    bits, names = undisturbed()
    for number in range(2, len(names) + 1, max(1, len(names) // EACH_PUT)):
        lives = run(SimulatedStore(Faults(fault, lambda n, number=number: n == number)), SimulatedDisk())
        assert (lives.deaths, lives.bits()) == (0, bits), number
        assert_sound(lives, Path("/run"))


@pytest.mark.parametrize("seed", range(4))
def test_many_machines_lost_one_after_another_change_no_bit(seed: int) -> None:
    chance, disk = random.Random(seed), SimulatedDisk()
    kinds = [StoreFault.BEFORE, StoreFault.AFTER, StoreFault.DOWN, StoreFault.UNANSWERED]

    def fault(_: str) -> StoreFault | None:
        return chance.choice(kinds) if chance.random() < 0.1 else None

    def after_death() -> None:
        if chance.random() < 0.5:
            disk.lose_everything()
        elif chance.random() < 0.5:
            disk.lose_power(chance)

    lives = run(SimulatedStore(fault, stale_count=5), disk, after_death)
    assert lives.deaths > 0
    assert lives.bits() == undisturbed()[0]
    assert_sound(lives, Path("/run"))


@pytest.mark.parametrize("fault", [StoreFault.DOWN, StoreFault.UNANSWERED])
def test_a_store_that_refuses_for_a_while_costs_no_bit_and_no_life(fault: StoreFault) -> None:
    store = SimulatedStore(Faults(fault, lambda n: n % 3 == 2 and n > 2))
    lives = run(store, SimulatedDisk())
    assert lives.deaths == 0
    assert store.refused > 3
    assert lives.bits() == undisturbed()[0]
    assert_sound(lives, Path("/run"))


def test_while_the_store_is_down_nothing_is_announced_and_the_reason_is_given() -> None:
    down = [False]
    store = SimulatedStore(lambda _: StoreFault.DOWN if down[0] else None)
    disk = mirrored(store, SimulatedDisk(), Path("/run"), AtOnce(), lambda work: work())
    path = Path("/run/file")
    disk.append(path, [b"one"])
    disk.sync(path)
    down[0] = True
    for _ in range(5):  # as the journal repeats an append
        disk.append(path, [b"two"])
        with pytest.raises(OSError, match="the store memory cannot be reached"):
            disk.sync(path)
        disk.truncate(path, 3)
    assert files_of(store) == {"file": b"one"}
    down[0] = False
    disk.append(path, [b"three"])
    disk.sync(path)
    assert files_of(store) == {"file": b"onethree"}


def objects_of(store: SimulatedStore) -> set[str]:
    return {name for name in store.objects if name.startswith("objects/")}


@pytest.mark.parametrize("refuses", ["store", "disk"])
def test_what_is_put_for_an_operation_that_fails_is_removed_again(
    refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, below, path = SimulatedStore(), SimulatedDisk(), Path("/run/file")
    disk = mirrored(store, below, Path("/run"), AtOnce(), lambda work: work())
    with monkeypatch.context() as patch:
        if refuses == "store":
            store.fault_source = Faults(StoreFault.UNANSWERED, lambda number: number % 3 == 0)
        else:
            patch.setattr(below, "append", raiser(OSError(errno.ENOSPC, "No space left on device")))
        for _ in range(5):  # as the journal repeats an append
            with pytest.raises(OSError, match=r"did not answer|No space"):
                disk.append(path, [b"x" * 3500])
    assert len(objects_of(store)) > 5
    store.fault_source = lambda _: None
    for _ in range(20):
        disk.replace(path, b"y" * 1400)
        disk.sync(path)
    assert objects_of(store) == read_files(store, AtOnce()).objects()


def raiser(error: OSError) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise error

    return refuse


def test_contents_that_are_replaced_do_not_pile_up_while_segments_are_small() -> None:
    store, path = SimulatedStore(), Path("/run/file")
    disk = mirrored(store, SimulatedDisk(), Path("/run"), AtOnce(), lambda work: work())
    disk.writer.base_after_bytes = 1 << 30
    for _ in range(300):
        disk.replace(path, b"x" * 2000)
        disk.sync(path)
        assert len(objects_of(store)) <= 2 * mirroring.BASE_AFTER_OBJECTS


@pytest.mark.parametrize("size", [3, 5000])
def test_a_put_that_takes_long_is_reported_whatever_it_puts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "SLOW_S", 0.0)
    began, answered = threading.Event(), threading.Event()

    def slow(_: str) -> None:
        began.set()
        answered.wait()

    store, path = SimulatedStore(), Path("/run/file")
    disk = mirrored(store, SimulatedDisk(), Path("/run"), AtOnce(), lambda work: work())
    assert disk.trouble is None
    store.fault_source = slow
    writing = threading.Thread(target=lambda: (disk.append(path, [b"x" * size]), disk.sync(path)))
    writing.start()
    began.wait()
    assert disk.trouble == "the store memory has not answered for 0 s"
    answered.set()
    writing.join()
    assert disk.trouble is None


def files_of(store: SimulatedStore) -> dict[str, bytes]:
    """Return what a recovery from the store alone would give now, without one."""
    disk, copy = SimulatedDisk(), SimulatedStore()
    copy.objects = dict(store.objects)
    mirrored(copy, disk, Path("/other"), AtOnce(), lambda work: work())
    return {name: disk.read(Path("/other", name)) for name in disk.files(Path("/other"))}


def test_a_writer_that_was_replaced_writes_not_one_more_word() -> None:
    store, told = SimulatedStore(), []
    first = mirrored(store, SimulatedDisk(), Path("/run"), AtOnce(), lambda work: work())
    first.writer.on_fenced = told.append
    first.append(Path("/run/file"), [b"one"])
    first.sync(Path("/run/file"))
    first.append(Path("/run/file"), [b"two"])
    second = mirrored(store, SimulatedDisk(), Path("/run"), AtOnce(), lambda work: work())
    for _ in range(2):
        with pytest.raises(Fenced, match="Another process has begun segment 3"):
            first.sync(Path("/run/file"))
    assert len(told) == 1
    second.append(Path("/run/file"), [b"three"])
    second.sync(Path("/run/file"))
    assert files_of(store) == {"file": b"onethree"}


def test_a_writer_that_is_replaced_while_it_restores_is_fenced_and_not_told_of_damage() -> None:
    store = SimulatedStore()
    first = mirrored(store, SimulatedDisk(), Path("/run"), AtOnce(), lambda work: work())
    first.append(Path("/run/file"), [b"old" * 1000])
    first.sync(Path("/run/file"))

    class Replacing(SimulatedStore):
        """A store in which a successor claims the log and removes an object just before that is read."""

        def get(self, name: str) -> bytes:
            if name.startswith("objects/"):
                self.objects["log/000000000004"] = encode(Segment(4, "successor", is_claim=True))
                del self.objects[name]
            return super().get(name)

    replacing = Replacing()
    replacing.objects = store.objects
    with pytest.raises(Fenced, match="Another process has begun segment 4"):
        mirrored(replacing, SimulatedDisk(), Path("/run"), AtOnce(), lambda work: work())


def test_a_synchroniser_that_is_fenced_at_its_start_leaves_the_job_to_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.runtime import restart

    ended: list[str] = []
    monkeypatch.setattr(restart, "end_job", ended.append)
    job, store = spec(**MIRRORED), SimulatedStore()
    policy = job.policy()
    disk = mirror(tmp_path, store, LocalDisk(), AtOnce(), lambda work: work())
    mirror(tmp_path / "elsewhere", store, LocalDisk(), AtOnce(), lambda work: work())
    with pytest.raises(Fenced):
        restart.files_of("job", job, policy, tmp_path, (), disk)
    assert ended == []
    assert not (tmp_path / "status.json").exists()
    assert not (tmp_path / "crash.txt").exists()


@pytest.mark.parametrize("fault", [StoreFault.DOWN, StoreFault.UNANSWERED])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_job_begins_although_the_store_refuses_while_its_files_are_made(
    fault: StoreFault, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.runtime import restart

    ended: list[str] = []
    monkeypatch.setattr(restart, "end_job", ended.append)
    monkeypatch.setattr(restart, "Retrier", lambda: retry.Retrier(0.0))
    monkeypatch.setattr(mirroring, "INLINE_BYTES_MAX", 100)
    job, store = spec(**MIRRORED), SimulatedStore()
    (tmp_path / "specification.yaml").write_bytes(b"x" * 300)
    disk = mirror(tmp_path, store, LocalDisk(), AtOnce(), lambda work: work())
    store.fault_source = Faults(fault, lambda n: number <= n < number + 3)
    restart.keep_inputs(disk, tmp_path)
    files = restart.files_of("job", job, job.policy(), tmp_path, (), disk)
    store.fault_source = lambda _: None
    files.tape.sync()
    files.tape.let_go()
    assert store.refused > 0
    assert ended == []
    assert not (tmp_path / "crash.txt").exists()
    assert files_of(store)["tape.jsonl"] == (tmp_path / TAPE).read_bytes()


# ── what is refused, and what is not lost ─────────────────────────────────────────────────────────────────────────────


def test_a_damaged_or_missing_object_is_named_and_nothing_starts_over() -> None:
    store = SimulatedStore()
    run(store, SimulatedDisk())
    for name in [n for n in store.objects if n.startswith(("objects/", "log/", "base/"))]:
        for damage in ("bits", "gone"):
            broken = SimulatedStore()
            broken.objects = dict(store.objects)
            if damage == "bits":
                broken.objects[name] = broken.objects[name][:-1] + bytes([broken.objects[name][-1] ^ 1])
            else:
                del broken.objects[name]
            needed = needs(store, name)
            if damage == "gone" and needed and name == newest_of(store):
                continue  # nothing shows that there was one more
            disk = SimulatedDisk()
            if needed:
                with pytest.raises(DataError, match=name.partition("/")[0]):
                    mirror(Path("/run"), broken, disk, AtOnce(), lambda work: work())
            else:
                mirror(Path("/run"), broken, disk, AtOnce(), lambda work: work())


def test_a_store_is_not_exchanged_while_a_job_has_its_log_in_it(tmp_path: Path) -> None:
    runs, old, new = tmp_path / "runs", str(tmp_path / "old"), str(tmp_path / "new")
    for job in ("mirrored", "plain"):
        (runs / job).mkdir(parents=True)
    mirror(runs / "mirrored", JobObjects(open_store(old), "mirrored"), LocalDisk(), AtOnce(), lambda work: work())
    refuse_to_leave_logs(runs, None, new)
    refuse_to_leave_logs(runs, old, old)
    with pytest.raises(
        ConfigurationError, match=r"new has no log of mirrored, which has not ended and has its log in .*old"
    ):
        refuse_to_leave_logs(runs, old, new)
    shutil.copytree(old, new)
    refuse_to_leave_logs(runs, old, new)
    shutil.rmtree(new)
    (runs / "mirrored" / "status.json").touch()
    refuse_to_leave_logs(runs, old, new)


def test_a_store_whose_disk_is_not_mounted_is_waited_for_and_not_begun_anew(tmp_path: Path) -> None:
    url, elsewhere = str(tmp_path / "store"), tmp_path / "unmounted"
    admit(open_store(url), "f" * 32)
    require_available(url)
    Path(url).rename(elsewhere)
    with pytest.raises(LogStoreUnavailable, match=r"has no atoll-store.json: its disk is not mounted"):
        require_available(url)
    elsewhere.rename(url)
    require_available(url)


@pytest.mark.parametrize("number", range(1, 12))
def test_a_segment_that_is_missing_anywhere_before_the_end_is_not_taken_for_the_end(number: int) -> None:
    store = SimulatedStore()
    disk = mirrored(store, SimulatedDisk(), Path("/run"), AtOnce(), lambda work: work())
    for word in range(11):
        disk.append(Path("/run", f"file-{word}"), [b"x"])
        disk.sync(Path("/run", f"file-{word}"))
    del store.objects[f"log/{number:012d}"]
    before = dict(store.objects)
    assert f"log/{number:012d} " in " ".join(examine(store, AtOnce(), lambda *_: None).problems)
    with pytest.raises(DataError, match=f"log/{number:012d} in memory is missing"):
        mirrored(store, SimulatedDisk(), Path("/run"), AtOnce(), lambda work: work())
    assert store.objects == before


OBJECT = Piece("objects/a-000001", 1, "d", 1)


@pytest.mark.parametrize(
    "operation",
    [
        Operation("append", "../elsewhere", 0, (b"x",)),
        Operation("append", "/elsewhere", 0, (b"x",)),
        Operation("append", "a//b", 0, (b"x",)),
        Operation("remove", ""),
        Operation("append", "file", 0, (replace(OBJECT, name="../../elsewhere"),)),
        Operation("append", "file", 0, (replace(OBJECT, name="objects/../../b-1"),)),
        Operation("append", "file", 0, (replace(OBJECT, used=2),)),
        Operation("append", "file", 0, (replace(OBJECT, used=-1),)),
    ],
)
def test_a_log_that_names_what_is_outside_of_it_is_refused(operation: Operation) -> None:
    good = Segment(1, "w", operations=(Operation("append", "sub/file", 0, (OBJECT, b"x")),))
    assert decode("log/1", encode(good)) == good
    with pytest.raises(DataError, match="log/1 in the store is no segment"):
        decode("log/1", encode(Segment(1, "w", operations=(operation,))))


def needs(store: SimulatedStore, name: str) -> bool:
    """Return whether a recovery reads this object."""
    read: set[str] = set()

    class Watched(SimulatedStore):
        def get(self, name: str) -> bytes:
            read.add(name)
            return super().get(name)

    watched = Watched()
    watched.objects = dict(store.objects)
    mirror(Path("/run"), watched, SimulatedDisk(), AtOnce(), lambda work: work())
    return name in read


def newest_of(store: SimulatedStore) -> str:
    return max(name for name in store.objects if name.startswith("log/"))


def test_a_store_that_has_lost_the_log_is_no_reason_to_start_over() -> None:
    disk = SimulatedDisk()
    run(SimulatedStore(), disk)
    disk.lose_process()
    before = disk.read(Path("/run") / TAPE)
    with pytest.raises(DataError, match="the store was emptied or exchanged"):
        mirror(Path("/run"), SimulatedStore(), disk, AtOnce(), lambda work: work())
    assert disk.read(Path("/run") / TAPE) == before


def test_a_store_that_was_emptied_while_the_machine_was_lost_does_not_begin_the_job_anew() -> None:
    with pytest.raises(DataError, match="has nothing of this job, but it has run before: the store was emptied"):
        mirror(Path("/run"), SimulatedStore(), SimulatedDisk(), AtOnce(), lambda work: work(), has_begun=True)
    mirror(Path("/run"), SimulatedStore(), SimulatedDisk(), AtOnce(), lambda work: work())  # a job that begins


def test_a_deleted_job_leaves_a_mark_and_what_comes_late_is_collected_with_it(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    admit(store, None)
    for job in ("deleted", "kept"):
        run(JobObjects(store, job), SimulatedDisk())
    kept = store.sizes("jobs/kept")
    delete_log(store, "deleted")
    delete_log(store, "deleted")  # it may be repeated
    assert list(store.sizes("jobs/deleted")) == ["jobs/deleted/deleted"]
    JobObjects(store, "deleted").create("log/000000000099", b"of a synchroniser that was believed dead")
    checked = CliRunner().invoke(app, ["store", "check", str(tmp_path), "--json"])
    assert list(json.loads(checked.stdout)["jobs"]) == ["kept"]
    collected = CliRunner().invoke(app, ["store", "gc", str(tmp_path), "--json"])
    assert json.loads(collected.stdout)["jobs"]["deleted"]["objects"] == 2
    assert store.sizes("jobs/deleted") == {}
    assert store.sizes("jobs/kept").keys() <= kept.keys()
    assert CliRunner().invoke(app, ["store", "check", str(tmp_path)]).exit_code == 0


def test_what_the_folder_has_already_is_not_read_again() -> None:
    store, disk = SimulatedStore(), SimulatedDisk()
    run(store, disk)
    disk.lose_process()
    files = read_files(store, AtOnce())
    assert any(size_of(extents) > 1000 for extents in files.files.values())
    read: list[str] = []

    class Watched(SimulatedStore):
        def get(self, name: str) -> bytes:
            read.append(name)
            return super().get(name)

    watched = Watched()
    watched.objects = store.objects
    mirror(Path("/run"), watched, disk, AtOnce(), lambda work: work())
    assert not [name for name in read if name.startswith("objects/")]


# ── check, gc, and a real server ──────────────────────────────────────────────────────────────────────────────────────


def with_leftovers() -> SimulatedStore:
    """Return the log of a job whose synchronisers died often, most of them with puts half done."""
    chance, disk = random.Random(7), SimulatedDisk()
    store = SimulatedStore(lambda _: StoreFault.AFTER if chance.random() < 0.05 else None)
    run(store, disk, disk.lose_everything)
    store.fault_source = lambda _: None
    for name in ("log/000000000003", "base/000000000002"):
        store.objects.setdefault(name, b"left by a writer that could not delete it")
    return store


def test_gc_removes_what_dead_writers_left_and_nothing_that_a_recovery_needs() -> None:
    store = with_leftovers()
    before, sound = files_of(store), examine(store, AtOnce(), lambda *_: None)
    assert sound.problems == ()
    garbage = superfluous(store, AtOnce())
    assert {name.partition("/")[0] for name in garbage} >= {"log", "base", "objects"}
    store.delete(garbage)
    assert files_of(store) == before
    assert examine(store, AtOnce(), lambda *_: None) == sound
    assert superfluous(store, AtOnce()) == {}


def test_gc_beside_living_writers_removes_nothing_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each put of a writer, whatever gc finds then is removed."""
    store = SimulatedStore()
    plain = store._put

    def collecting(name: str, content: bytes, *, may_exist: bool) -> None:
        if store.objects:
            store.delete(superfluous(store, AtOnce()))
        plain(name, content, may_exist=may_exist)

    monkeypatch.setattr(store, "_put", collecting)
    chance, disk = random.Random(3), SimulatedDisk()
    store.fault_source = lambda _: StoreFault.AFTER if chance.random() < 0.05 else None
    lives = run(store, disk, disk.lose_everything)
    assert lives.deaths > 0
    assert lives.bits() == undisturbed()[0]


def test_a_store_is_checked_and_cleaned_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = FolderStore(tmp_path)
    admit(store, "f" * 32)
    objects, log = JobObjects(store, "job-1"), with_leftovers()
    of_shard = JobObjects(store, shard_log("job-1", 0))
    for name, content in log.objects.items():
        objects.put(name, content)
        of_shard.put(name, content)

    def atoll(*arguments: str) -> tuple[int, Any]:
        result = CliRunner().invoke(app, ["store", *arguments, "--json"])
        return result.exit_code, json.loads(result.stdout)

    code, answer = atoll("check", str(tmp_path))
    assert (code, answer["jobs"]["job-1"]["problems"]) == (0, [])
    garbage = superfluous(log, AtOnce())
    expected = {"objects": len(garbage), "bytes": sum(garbage.values())}
    assert (
        answer["jobs"].keys()
        == {"job-1", "job-1/shards/0"}
        == atoll("check", str(tmp_path), "--job", "job-1")[1]["jobs"].keys()
    )
    assert atoll("gc", str(tmp_path), "--dry-run")[1]["jobs"]["job-1"] == expected
    assert atoll("gc", str(tmp_path))[1]["jobs"] == {"job-1": expected, "job-1/shards/0": expected}
    assert atoll("gc", str(tmp_path))[1]["jobs"]["job-1"] == {"objects": 0, "bytes": 0}
    needed = next(name for name in objects.sizes("objects") if needs(log, name))
    store.put(f"jobs/job-1/{needed}", b"damaged")
    code, answer = atoll("check", str(tmp_path))
    assert code == 1
    assert needed in answer["jobs"]["job-1"]["problems"][0]


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with seaweedfs(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def bucket(s3_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return a store on the server, once that answers."""
    for name, value in s3_environment(s3_server[0]).items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://bucket/deep/folder")

    def is_up() -> bool:
        with suppress(InfrastructureError):
            return admit(store, "f" * 32) == "f" * 32
        return False

    wait_until(is_up, "SeaweedFS")
    return store


def test_a_job_goes_on_from_a_real_s3_server_alone_and_bad_credentials_are_refused(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, disk = bucket, SimulatedDisk()
    lives = Lives(Path("/run"), Fate("after keep", 4), disk, disk.lose_everything, JobObjects(store, "job"), **MIRRORED)
    lives.step(STEPS)
    lives.adopt()
    assert lives.deaths == 1
    assert lives.bits() == undisturbed()[0]
    assert superfluous(JobObjects(store, "job"), AtOnce()) is not None
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(
        InfrastructureError, match=r"SignatureDoesNotMatch.*Let the service read, write, list and delete there"
    ):
        admit(open_store("s3://bucket/deep/folder"), None)


def test_a_server_that_stops_answering_is_reported_until_it_answers_again(
    bucket: ObjectStore, s3_server: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "SLOW_S", 0.3)
    disk = mirrored(JobObjects(bucket, "slow"), LocalDisk(), tmp_path)
    disk.append(tmp_path / TAPE, [b"one"])
    disk.sync(tmp_path / TAPE)
    before = store_status(disk)
    assert (before.puts, before.trouble) == (1, None)
    os.kill(s3_server[1], signal.SIGSTOP)
    try:
        disk.append(tmp_path / TAPE, [b"two"])
        waiting = threading.Thread(target=disk.sync, args=(tmp_path / TAPE,))
        waiting.start()
        wait_until(lambda: "has not answered for" in (store_status(disk).trouble or ""), "the report")
    finally:
        os.kill(s3_server[1], signal.SIGCONT)
    waiting.join()
    after = store_status(disk)
    assert (after.puts, after.trouble) == (2, None)
    assert after.put_bytes > before.put_bytes
    assert after.put_seconds - before.put_seconds > 0.3


def test_a_store_that_refuses_is_reported_until_it_accepts(tmp_path: Path) -> None:
    class Full(SimulatedStore):
        is_full = False

        def create(self, name: str, content: bytes) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left in the store")
            super().create(name, content)

    store = Full()
    disk = mirrored(store, LocalDisk(), tmp_path, AtOnce(), lambda work: work())
    disk.append(tmp_path / TAPE, [b"one"])
    store.is_full = True
    with pytest.raises(OSError, match="No space left in the store"):
        disk.sync(tmp_path / TAPE)
    assert store_status(disk).trouble == "No space left in the store"
    store.is_full = False
    disk.sync(tmp_path / TAPE)
    assert store_status(disk).trouble is None
