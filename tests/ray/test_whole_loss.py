"""Every process of a home is gone at once, as after a loss of power: its jobs go on in the next cluster.

Beside it, on one machine and one folder of runs, is another home: nothing that befalls the one is felt by it.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from api.schemas import Job as JobSeen
from orchestrator.core import events as e
from orchestrator.errors import InfrastructureError
from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.tape.storage import read_tape
from tests.api.installation import Installation
from tests.ray.jobs import PAUSE_S, Job, assert_sound, synthetic
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
GROUP = "us-east"
ISLANDS = ("one", "two")
STEPS = 300
"""Of the job that is lost, and ends by itself after that, for each loss: far more than it takes until then."""
ENDLESS = 100_000
FRAGMENTS = 4
NEWS = 2 * FRAGMENTS
"""Two versions of every fragment: it trains."""


class Place(Installation):
    """A home with a small cluster of its own; its runs lie where those of others do."""

    def __init__(self, folder: Path, runs: Path) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.runs = runs
        self.clusters: list[ClusterFile] = []
        self.options: list[str] = []

    def start(self) -> None:
        """Each of its clusters is in another region: those of a job that goes on are what its tape says."""
        groups = self.folder / "groups.yaml"
        region = f"region-{len(self.clusters) + 1}"
        groups.write_text(f"node_groups:\n  - {{name: {GROUP}, region: {region}, cpus: 4}}\n")
        self.atoll("up", "--runs", str(self.runs), "--groups", str(groups), *self.options)
        self.find()

    def find(self) -> None:
        """Know its present cluster."""
        cluster = ClusterFile.find(self.home.path)
        assert cluster is not None
        self.clusters.append(cluster)

    def job_once(self, name: str, situation: Callable[[JobSeen], bool]) -> JobSeen:
        """As it is seen when that is so. Meanwhile its synchroniser, or the cluster, may not answer."""

        def seen() -> JobSeen | None:
            with self.client() as client, suppress(InfrastructureError):
                job = client.job(name)
                return job if situation(job) else None

        found: JobSeen = wait_until(seen, name, PAUSE_S)
        return found

    def pids(self) -> set[int]:
        """Of its cluster."""
        return {process.pid for process in processes.marked(self.clusters[-1].id)}

    def lose_cluster(self) -> None:
        """Everything of it dies by SIGKILL."""
        assert len(processes.kill_all(self.clusters[-1].id, timeout_s=60.0)) > 5
        assert not self.clusters[-1].answers()

    def lose(self) -> None:
        """Everything of it dies, and nothing is left that could tell where it was."""
        self.lose_service()
        self.lose_cluster()
        processes.remove(Path(self.clusters[-1].temp_dir))

    def lose_service(self) -> None:
        """By SIGKILL: whatever it does at its end, a loss of power does not wait for it."""
        address = self.home.address()
        assert address is not None
        os.kill(address.pid, signal.SIGKILL)
        wait_until(lambda: not self.home.running(), "the end of the service")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Place, Place]]:
    both = (Place(tmp_path / "one", tmp_path / "runs"), Place(tmp_path / "other", tmp_path / "runs"))
    yield both
    for place in both:
        place.atoll("down")
        assert [processes.marked(cluster.id) for cluster in place.clusters] == [[]] * len(place.clusters)


class Recorded(Job):
    """A job by what it leaves in its run folder, which at times is all that there is of it."""

    def __init__(self, place: Place, job: str) -> None:
        super().__init__(None, job, place.runs / job)  # type: ignore[arg-type]

    def records(self) -> list[Any]:
        path = self.run_dir / "tape.jsonl"
        return list(read_tape(path).records) if path.exists() else []

    def merges(self) -> list[e.MergeCompleted]:
        return [r.event for r in self.records() if isinstance(r.event, e.MergeCompleted) and r.effects]

    def wait_for_merges(self, count: int) -> None:
        """So many more than there are."""
        before = len(self.merges())
        self.wait_until(lambda: len(self.merges()) >= before + count, "merges")

    def versions(self) -> list[int]:
        """Of each fragment, by the tape."""
        made = self.merges()
        return [max((merge.version for merge in made if merge.fragment == n), default=0) for n in range(FRAGMENTS)]


def submitted(place: Place, steps: int = ENDLESS, islands: tuple[str, ...] = ISLANDS, **sections: Any) -> Recorded:
    document = synthetic(
        steps, islands=[{"node_group": GROUP, "name": name, "cpus": 1} for name in islands], **sections
    )
    with place.client() as client:
        return Recorded(place, client.submit(document).job)


def test_a_job_goes_on_on_another_machine_when_that_of_the_head_is_lost_with_its_disk(
    places: tuple[Place, Place], tmp_path: Path
) -> None:
    """The other machine has nothing but the store and its key: its home gets tokens, groups and jobs from there."""
    one, other = places
    other.runs = tmp_path / "other-runs"
    store = ["--store", str(tmp_path / "store")]
    one.options = store
    one.start()
    key = shutil.copy(one.home.path / "store.key", tmp_path / "key")
    job = submitted(one, STEPS, synchroniser={"durability": {"kind": "mirrored"}})
    job.wait_for_merges(NEWS)
    token = one.home.token()
    one.lose()
    merged = job.versions()
    shutil.rmtree(one.home.path)
    shutil.rmtree(one.runs)

    other.atoll("up", "--runs", str(other.runs), *store, "--store-key", str(key))
    other.find()
    assert other.home.token() == token
    job = Recorded(other, job.id)
    status = job.wait_for_end()
    assert (status["view"]["outcome"], status["view"]["epoch"]) == ("completed", 2)
    assert [island["incarnation"] for island in status["view"]["islands"]] == [2, 2]
    restart = job.restarts()[0].at
    for fragment, version in enumerate(merged):
        first = min(merge.version for merge in job.merges() if merge.fragment == fragment and merge.at > restart)
        assert first <= version + 2, f"fragment {fragment} stood at {version}, went on at {first}"
    tokens = status["goodput"]["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["discarded"]
    assert other.job_once(job.id, lambda seen: seen.state.final).state == "completed"
    assert_sound(job)


@pytest.mark.soak("half a minute, or three quarters")
@pytest.mark.parametrize("losses", [1, 2])
def test_a_homes_jobs_go_on_when_every_process_of_it_was_killed_and_another_home_feels_nothing(
    places: tuple[Place, Place], losses: int
) -> None:
    """First service and all, as when the machine loses its power; then without the service, which then is no help.

    A job beside it, with durability async, has lost what it could not know: it ends with that reason.
    """
    one, other = places
    for place in places:
        place.start()
    careless = submitted(one, islands=ISLANDS[:1], name="careless", synchroniser={"durability": {"kind": "async"}})
    spared = submitted(other, islands=ISLANDS[:1])
    for recorded in (careless, spared):
        recorded.wait_for_merges(NEWS)
    assert_apart(places, ({careless.id}, {spared.id}))
    before = other.pids()
    job = submitted(one, STEPS * losses)  # the last, for it alone has an end
    stood: list[list[int]] = []
    epochs = range(2, 2 + losses)
    for epoch in epochs:
        job.wait_for_merges(6)
        with one.client() as client:
            kill = client.kill(job.id, "two") if epoch == 3 else None
        if epoch == 2:
            one.lose_service()
        one.lose_cluster()
        spared.wait_for_merges(NEWS)
        (careless.run_dir / "boot").write_text("another start of the machine")
        stood.append(job.versions())
        if epoch == 3:
            assert_nobody_calls_it_over(one, job)
            one.lose_service()
        one.start()
        job.wait_until(lambda: len(job.restarts()) == epoch - 1, f"epoch {epoch}")  # noqa: B023
        seen = one.job_once(job.id, lambda seen: seen.after_s is not None)
        assert (seen.state, seen.epoch) == ("running", epoch)
        ended = one.job_once(careless.id, lambda seen: seen.state.final)
        assert ended.state == "failed"
        assert "The machine was restarted" in ended.reason
        with one.client() as client:
            assert {listed.job for listed in client.jobs()} == {job.id, careless.id}
            if kill is not None:
                wait_until(lambda: client.command(job.id, kill.command).state == "accepted", pause_s=PAUSE_S)  # noqa: B023
    status = job.wait_for_end()
    assert one.job_once(job.id, lambda seen: seen.state.final).state == "completed"

    one.atoll("down")
    assert one.pids() == set()
    spared.wait_for_merges(NEWS)
    seen = other.job_once(spared.id, lambda seen: seen.after_s is not None)
    assert {island.incarnation for island in seen.islands} == {1}, "no island of it has died"
    assert before <= other.pids()
    happened = [record.event for record in spared.records()]
    assert not spared.restarts()
    assert not [event for event in happened if isinstance(event, e.ConnectionLost) and event.dead]

    assert status["view"]["outcome"] == "completed"
    assert status["view"]["epoch"] == epochs[-1]
    assert all(island["incarnation"] > losses for island in status["view"]["islands"])
    assert [event.epoch for event in job.restarts()] == [*epochs]
    records = job.records()
    assert all(before.event.at <= after.event.at for before, after in pairwise(records))
    for versions, restart in zip(stood, job.restarts(), strict=True):
        after = [merge for merge in job.merges() if merge.at > restart.at]
        for fragment, version in enumerate(versions):
            first = min(merge.version for merge in after if merge.fragment == fragment)
            # one that only the journal knew of is told before the restart
            assert first in (version + 1, version + 2), f"fragment {fragment} stood at {version}, went on at {first}"
    assert_sound(job)
    tokens = status["goodput"]["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["discarded"]
    assert tokens["merged"] > 0.5 * status["view"]["token_budget"]
    assert len({cluster.id for cluster in one.clusters}) == 1 + losses, "each time another cluster"


@pytest.mark.soak("a cluster of its own, and the loss of a disk while it lives and with it")
def test_a_mirrored_job_goes_on_from_the_store_alone_when_its_run_folder_is_lost(
    places: tuple[Place, Place], tmp_path: Path
) -> None:
    """First the synchroniser dies and its disk is gone while the islands live on, then the whole cluster and the disk."""
    place, _ = places
    place.options = ["--store", str(tmp_path / "store")]
    place.start()
    job = submitted(place, STEPS, synchroniser={"durability": {"kind": "mirrored"}})
    stood = []
    for epoch in (2, 3):
        job.wait_for_merges(NEWS)
        if epoch == 3:
            place.lose_service()
            place.lose_cluster()
        stood.append(job.versions())
        for name in ("tape.jsonl", "snapshot", "clock.json"):
            (job.run_dir / name).unlink(missing_ok=True)
        for name in ("journal", "tape.sealed"):
            shutil.rmtree(job.run_dir / name, ignore_errors=True)
        if epoch == 3:
            place.options = []  # the home knows its store
            place.start()
        else:
            with place.client() as client:
                client.inject(job.id, "kill_synchroniser", None)
        job.wait_until(lambda: len(job.restarts()) == epoch - 1, f"epoch {epoch}")  # noqa: B023
        if epoch == 2:
            lost = [r.event for r in job.records() if isinstance(r.event, e.ConnectionLost)]
            assert not [event for event in lost if event.dead], "islands live on"
    status = job.wait_for_end()
    assert (status["view"]["outcome"], status["view"]["epoch"]) == ("completed", 3)
    for versions, restart in zip(stood, job.restarts(), strict=True):
        after = [merge for merge in job.merges() if merge.at > restart.at]
        for fragment, version in enumerate(versions):
            first = min(merge.version for merge in after if merge.fragment == fragment)
            assert first <= version + 2, f"fragment {fragment} stood at {version}, went on at {first}"
    assert_sound(job)


@pytest.mark.soak("a cluster of its own, and the loss of a disk with it")
def test_a_mirrored_job_of_which_no_island_has_a_process_goes_on_when_its_run_folder_is_lost(
    places: tuple[Place, Place], tmp_path: Path
) -> None:
    """No process holds its parameters then, and it has no checkpoint: the store alone does."""
    place, _ = places
    place.options = ["--store", str(tmp_path / "store")]
    place.start()
    job = submitted(place, synchroniser={"durability": {"kind": "mirrored"}})
    job.wait_for_merges(NEWS)
    with place.client() as client:
        for island in ISLANDS:
            client.kill(job.id, island, restart=False)
    place.job_once(job.id, lambda seen: {island.state for island in seen.islands} == {"stopped"})
    stood = job.versions()
    place.lose_service()
    place.lose_cluster()
    shutil.rmtree(job.run_dir)
    place.options = []  # the home knows its store
    place.start()
    job.wait_until(lambda: len(job.restarts()) == 1, "the next epoch")
    place.job_once(job.id, lambda seen: seen.state == "running" and seen.epoch == 2)
    place.job_once(job.id, lambda seen: {island.state for island in seen.islands} == {"stopped"})
    assert all(now >= before for now, before in zip(job.versions(), stood, strict=True))
    with place.client() as client:
        for island in ISLANDS:
            client.readd(job.id, island)
    job.wait_until(lambda: min(job.versions()) > max(stood), "merges of the next epoch")
    with place.client() as client:
        client.cancel(job.id)
    job.wait_for_end()
    assert_sound(job)


def assert_apart(places: tuple[Place, Place], jobs: tuple[set[str], set[str]]) -> None:
    """Each has its own address, jobs and token, and their runs lie in one folder."""
    addresses = [place.home.address() for place in places]
    assert len({address.url for address in addresses if address is not None}) == 2
    runs = {path.name for path in places[0].runs.iterdir() if path.is_dir() and not path.is_symlink()}
    assert runs == jobs[0] | jobs[1]
    for place, foreign, its, others in ((*places, *jobs), (*places[::-1], *jobs[::-1])):
        with place.http() as http:
            assert {seen["job"] for seen in http.get("/v1/jobs").json()["jobs"]} == its
            assert {http.get(f"/v1/jobs/{name}").status_code for name in others} == {404}
        with place.http(foreign.home.token()) as http:
            assert http.get("/v1/jobs").status_code == 401, "a token of one home opens no other"


def assert_nobody_calls_it_over(place: Place, job: Recorded) -> None:
    """A service that is left without a cluster does not take its silence for the job's end, nor starts it nowhere."""
    for _ in range(4):
        with place.client() as client, suppress(InfrastructureError):
            seen = client.job(job.id)
            assert not seen.state.final, seen
