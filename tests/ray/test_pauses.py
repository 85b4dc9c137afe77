"""What keeps a job from merging pauses it, with a visible reason, while islands train on; it goes on by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from orchestrator.core import commands
from orchestrator.core.events import MergeCompleted
from orchestrator.host.retry import TAPE_REFUSES
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.system import object_store
from orchestrator.system.disk import LocalDisk
from orchestrator.system.mirror import JobObjects, mirrored
from orchestrator.tape.storage import read_tape
from tests.programs import missing, required
from tests.ray.conftest import start_in
from tests.ray.jobs import PLUGGED, Job, assert_sound, pid_of, synthetic

pytestmark = pytest.mark.ray
Start = Callable[..., Job]
ENDLESS = 100_000
BOTH = ("us-east", "asia")
PAUSED_S = 3.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The test's folder is a disk of its own, of a few megabytes. Asked for before ``start``, it outlives its jobs."""
    mount = required("mount")
    if os.geteuid() != 0:
        missing("root, which mounting a disk needs,")
    subprocess.run([mount, "-t", "tmpfs", "-o", "size=16m", "atoll-test", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run([required("umount"), "--lazy", str(tmp_path)], check=True)


def merges(job: Job, since: float = 0.0) -> int:
    records = read_tape(job.run_dir / "tape.jsonl").records
    return sum(isinstance(record.event, MergeCompleted) and record.event.at > since for record in records)


def paused(job: Job) -> str:
    return job.status()["view"]["pause_reason"] or ""


def test_a_full_disk_pauses_merging_and_nothing_is_lost_once_there_is_room_again(
    small_disk: Path, start: Start, train_on: Callable[..., None]
) -> None:
    job = start(synthetic(steps=ENDLESS, groups=BOTH), trainer=PLUGGED)
    for island in BOTH:
        job.wait_for_merge(island, 1)
    ballast = small_disk / "ballast"
    fill(ballast)
    # the journal alone may be refused at first: the tape still fills the last page that it has
    job.wait_until(lambda: f"{TAPE_REFUSES}: [Errno 28] No space left" in paused(job), "a pause for want of room")
    before = (job.run_dir / "tape.jsonl").read_bytes()
    train_on(*(job.island(island)["pid"] for island in BOTH))
    assert (job.run_dir / "tape.jsonl").read_bytes() == before
    assert "No space left" in paused(job)
    assert job.last["disk_trouble"] == paused(job)
    ballast.unlink()
    job.wait_until(lambda: not paused(job), "the end of the pause")
    at = job.status()["at"]
    job.wait_until(lambda: merges(job, since=at) >= 4, "merges after the pause")
    assert job.status()["view"]["epoch"] == 1, "nobody died of it"
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


@pytest.mark.soak("live what tests/journal/test_crash_points.py has")
def test_islands_hear_of_no_synchroniser_that_dies_before_its_epoch_is_on_the_tape(
    small_disk: Path, start: Start, home: Path
) -> None:
    """The next one has the same number, and must not be taken for it: its certificates are others."""
    by_tls = {"tls": "always", "inline_bytes_max": 0, "shared_memory": False}
    job = start(synthetic(steps=ENDLESS, groups=BOTH, transport=by_tls))
    for island in BOTH:
        job.wait_for_merge(island, 1)
    processes = [job.island(island)["pid"] for island in BOTH]
    ballast = small_disk / "ballast"
    fill(ballast)
    for _ in range(2):
        job.wait_until(lambda: TAPE_REFUSES in paused(job), "a pause for want of room")
        os.kill(job.wait_until(lambda: pid_of("SynchroniserActor", home), "a synchroniser"), signal.SIGKILL)
        job.status_once_back()
        time.sleep(PAUSED_S)  # in which it would have made islands members of its channel
    ballast.unlink()
    job.wait_until(lambda: len(job.restarts()) == 1, "one epoch of the three lives")
    back = job.restarts()[0]
    assert back.epoch == 2
    for island in BOTH:
        job.wait_until(lambda island=island: (job.island(island)["last_merge_at"] or 0.0) > back.at, "merges of both")
    assert [job.island(island)["pid"] for island in BOTH] == processes
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


@pytest.mark.soak("a job of its own for what tests/core has")
def test_with_fewer_islands_than_the_quorum_wants_merging_waits_and_goes_on_when_they_are_back(
    start: Start, train_on: Callable[..., None]
) -> None:
    job = start(synthetic(steps=ENDLESS, groups=BOTH, synchroniser={"quorum": 2}), trainer=PLUGGED)
    job.wait_for_merge("asia", 1)
    job.command(commands.Kill("asia", restart=False))
    job.wait_for_state("asia", "stopped")
    assert "1 of the 2" in job.wait_until(lambda: paused(job), "a pause for want of islands")
    train_on(job.island("us-east")["pid"])  # what was being merged is, by now
    before = merges(job)
    train_on(job.island("us-east")["pid"])
    assert merges(job) == before
    job.command(commands.Readd("asia"))
    job.wait_for_merge("asia", 2)
    job.wait_until(lambda: not paused(job), "the end of the pause")


@pytest.mark.soak("a job of its own for what tests/journal/test_mirror.py has of a writer")
def test_a_synchroniser_whose_log_another_process_claims_stops_and_says_so_until_it_is_restarted(
    port: RayControlPort, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    opened = object_store.open_store(str(store))
    object_store.admit(opened, None)
    port = RayControlPort(store=str(store))  # beside the fixture's, which has connected
    mirrored_job = synthetic(steps=ENDLESS, groups=BOTH, synchroniser={"durability": {"kind": "mirrored"}})
    job = start_in(tmp_path, port, mirrored_job, PLUGGED, {})
    for island in BOTH:
        job.wait_for_merge(island, 1)
    assert job.status()["fenced"] is None
    mirrored(JobObjects(opened, job.id), LocalDisk(), tmp_path / "elsewhere")
    job.wait_until(lambda: "replaced" in paused(job), "the synchroniser's end")
    assert "Another process has begun segment" in job.last["fenced"]
    at = job.status()["at"]
    port.restart_job(job.id)
    job.wait_until(lambda: job.status_once_back()["fenced"] is None, "another synchroniser")
    job.wait_until(lambda: merges(job, since=at) >= 4, "merges once it is restarted")
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


def fill(ballast: Path) -> None:
    """Until not a byte is left on its disk."""
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"\0" * size)
