"""Jobs that wait: over REST and the command line, through kills of the service at every point, and under many at once."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.client import Client
from api.jobs.service import Service
from api.jobs.status_cache import FRESH_S
from api.metrics.exposition import Metrics
from api.schemas import Job
from api.storage.store import Store
from orchestrator.core import commands
from orchestrator.errors import ConfigurationError, Conflict, InfrastructureError
from orchestrator.status import NodeGroupRecord
from tests.api.clockwork import Clockwork, connect
from tests.api.installation import ROOT, Installation
from tests.api.test_restart import kill_service
from tests.harness.simulated_job import GROUPS
from tests.waiting import PATIENCE_S, wait_until

LARGE = [{"node_group": "asia", "cpus": 3}]
SMALL = [{"node_group": "europe", "cpus": 0.5}]


@pytest.fixture
def alone(service: Installation, client: Client) -> Iterator[None]:
    """Whatever the test leaves alive is cancelled, the queued ones first, so that the next finds the fleet free."""
    yield
    for state in ("queued", "running"):
        for job in client.jobs(state=state):
            client.cancel(job.job)
    wait_until(lambda: not client.jobs(state="running"))


def test_a_job_without_room_waits_in_order_and_starts_by_itself(
    service: Installation, client: Client, alone: None
) -> None:
    first = client.submit(service.spec(islands=LARGE))
    assert (first.state, first.queue_position) == ("running", None)
    second = client.submit(service.spec(islands=LARGE))
    third = client.submit(service.spec(islands=SMALL))
    assert (second.state, second.queue_position) == ("queued", 1)
    assert second.reason == "it asks for 3 cpus on asia, where running jobs leave 1 of 4"
    assert (third.state, third.queue_position) == ("queued", 2), "it would fit, but nobody overtakes"
    assert third.reason == f"behind {second.job}: {second.reason}"
    assert [island.state for island in second.islands] == ["placing"]
    assert [job.job for job in client.jobs(state="queued")] == [third.job, second.job]
    assert not Path(second.run_dir).exists()

    client.cancel(first.job)
    for job in (second.job, third.job):
        wait_until(lambda job=job: client.job(job).islands_training)
    assert client.jobs(state="queued") == []


def test_a_higher_priority_goes_first_and_can_be_given_while_waiting(
    service: Installation, client: Client, http: httpx.Client, alone: None
) -> None:
    running = client.submit(service.spec(islands=LARGE)).job
    plain = client.submit(service.spec(islands=LARGE))
    urgent = client.submit(service.spec(islands=LARGE), priority=10)
    assert (urgent.priority, urgent.queue_position, client.job(plain.job).queue_position) == (10, 1, 2)
    late = client.submit(service.spec(islands=LARGE), priority=10).job
    assert client.job(late).queue_position == 2, "of equal ones, first come"

    assert client.prioritise(plain.job, 11).queue_position == 1
    assert "queued as number 3" in service.atoll("prioritise", plain.job, "-5")
    assert json.loads(service.atoll("prioritise", plain.job, "100", "--json"))["priority"] == 100
    for wrong in ({"priority": 101}, {"priority": "5"}, {"priority": 5, "state": "running"}, {}):
        assert http.patch(f"/v1/jobs/{plain.job}", json=wrong).status_code == 422
    assert http.post("/v1/jobs?priority=-101", json=service.spec()).status_code == 422
    assert "is running" in service.atoll("prioritise", running, "5", code=1)

    client.cancel(running)
    wait_until(lambda: client.job(plain.job).state == "running")
    assert [client.job(job).queue_position for job in (urgent.job, late)] == [1, 2]


def test_a_priority_belongs_to_what_an_idempotency_key_names(
    service: Installation, http: httpx.Client, alone: None
) -> None:
    spec, key = service.spec(), {"Idempotency-Key": "urgent"}
    first = http.post("/v1/jobs?priority=3", json=spec, headers=key)
    assert http.post("/v1/jobs?priority=3", json=spec, headers=key).json()["job"] == first.json()["job"]
    assert http.post("/v1/jobs", json=spec, headers=key).status_code == 400


def test_a_queued_job_is_cancelled_at_once_and_takes_no_other_command(
    service: Installation, client: Client, http: httpx.Client, alone: None
) -> None:
    client.submit(service.spec(islands=LARGE))
    waiting = client.submit(service.spec(islands=LARGE)).job
    with pytest.raises(Conflict, match="still queued"):
        client.kill(waiting, "asia")
    key = {"Idempotency-Key": "no more"}
    cancelled = http.post(f"/v1/jobs/{waiting}/cancel", headers=key).json()
    assert (cancelled["state"], cancelled["detail"]) == ("accepted", "the job was queued; it had not started")
    assert http.post(f"/v1/jobs/{waiting}/cancel", headers=key).json() == cancelled
    job = client.job(waiting)
    assert (job.state, job.reason, job.queue_position) == ("cancelled", "cancelled by local while it was queued", None)
    assert [island.state for island in job.islands] == ["lost"]
    assert list(client.events(waiting)) == []
    client.delete(waiting)


def test_what_could_never_fit_is_refused_at_once_also_behind_a_queue(
    service: Installation, client: Client, alone: None
) -> None:
    for _ in range(2):
        client.submit(service.spec(islands=LARGE))
    with pytest.raises(ConfigurationError, match="64 cpus"):
        client.submit(service.spec(islands=[{"node_group": "asia", "cpus": 64}]))
    assert len(client.jobs(state="queued")) == 1


def test_a_drained_island_and_a_scaled_down_job_make_room_and_a_scaled_up_one_takes_it(
    service: Installation, client: Client, alone: None
) -> None:
    spare = {"node_group": "asia", "cpus": 1.5, "count": 1, "count_max": 2}
    islands = [spare, {"node_group": "europe", "cpus": 1.5, "name": "other"}]
    holding = client.submit(service.spec(islands=islands)).job
    wait_until(lambda: client.job(holding).islands_training == 2)
    client.scale(holding, "asia", 2)
    wait_until(lambda: client.job(holding).islands_training == 3)
    waiting = client.submit(service.spec(islands=LARGE))
    assert "leave 1 of 4" in waiting.reason
    client.scale(holding, "asia", 0)
    wait_until(lambda: client.job(waiting.job).state == "running")


def test_the_command_line_shows_who_waits_and_why_and_a_watch_goes_on_by_itself(cold: Installation) -> None:
    cold.up("--jobs-max", "1")
    first = json.loads(cold.atoll("submit", cold.spec_file(), "--json"))["job"]
    said = cold.atoll("submit", cold.spec_file(steps=10, name="second"), "--priority", "7")
    assert "queued as number 1: 1 jobs are running, the limit of the service" in said
    listed = cold.atoll("jobs")
    assert "queued #1" in listed
    assert "1 jobs are running" in listed
    assert "queued as number 1" in cold.atoll("status", "latest")
    watching = subprocess.Popen(cold.command("watch", "latest"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    assert "queued as number 1" in watching.stdout.readline()
    cold.atoll("cancel", first)
    rest = watching.communicate(timeout=PATIENCE_S)[0]
    assert watching.returncode == 0, rest
    assert "completed" in rest


def test_jobs_wait_through_a_kill_of_the_service_and_take_the_room_that_was_left_meanwhile(cold: Installation) -> None:
    cold.up()
    with cold.client() as client:
        running = client.submit(cold.spec(steps=40, islands=LARGE))
        waiting = [client.submit(cold.spec(islands=LARGE), priority=priority).job for priority in (0, 5)]
    kill_service(cold)
    control = connect(cold.home.path)
    wait_until(lambda: (Path(running.run_dir) / "status.json").exists() or control.status(running.job) is None)
    cold.up()
    with cold.client() as client:
        wait_until(lambda: client.job(waiting[1]).state == "running")
        assert client.job(running.job).state == "completed"
        assert (client.job(waiting[0]).state, client.job(waiting[0]).queue_position) == ("queued", 1)


# ── in one process ────────────────────────────────────────────────────────────────────────────────────────────────────


class Killed(BaseException):
    """The process is gone: nothing is tidied up."""


class Deadly:
    """Passes everything on, until the process is killed before or after the nth step that leaves a trace."""

    STEPS = ("add_job", "move_job", "start_job")

    def __init__(self, inner: Any, steps_left: list[int], after: bool) -> None:
        self._inner, self._steps_left, self._after = inner, steps_left, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._step(found) if name in self.STEPS else found

    def _step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*arguments: Any, **named: Any) -> Any:
            self._steps_left[0] -= 1
            if self._steps_left[0] == 0 and not self._after:
                raise Killed
            done = step(*arguments, **named)
            if self._steps_left[0] == 0:
                raise Killed
            return done

        return stepped


class Counting(Clockwork):
    """Knows how many jobs it really began."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun: list[str] = []

    def start_job(self, job_id: str, *about: Any) -> None:
        with self._changing(job_id) as record:
            self.begun += [] if record else [job_id]
        super().start_job(job_id, *about)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    yield opened
    opened.close()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("steps", range(1, 9))
def test_wherever_the_service_is_killed_every_accepted_job_starts_exactly_once(
    tmp_path: Path, store: Store, steps: int, after: bool
) -> None:
    control, spec, left = Counting(tmp_path / "clockwork"), Installation(tmp_path).spec(islands=LARGE), [steps]
    dying = Service(Deadly(control, left, after), Deadly(store, left, after), tmp_path / "runs")  # type: ignore[arg-type]

    def live() -> None:
        """One starts, one waits, the first ends, the second starts."""
        first = dying.submit(spec | {"budget": {"steps": 2}}, "me", "first").job
        dying.submit(spec, "me", "second")
        wait_until(lambda: dying.job(first).state.final)
        dying.queue.dispatch()

    with pytest.raises(Killed):
        live()

    service = Service(control, store, tmp_path / "runs")
    service.resume()
    jobs = [service.submit(spec | {"budget": {"steps": 2}}, "me", "first"), service.submit(spec, "me", "second")]
    wait_until(lambda: service.job(jobs[0].job).state == "completed")
    service.queue.dispatch()
    assert service.job(jobs[1].job).state == "running"
    assert control.begun == [job.job for job in jobs], "each once, in order"


def test_of_many_submitted_at_once_as_many_run_as_may_and_the_others_stand_in_line(
    tmp_path: Path, store: Store
) -> None:
    control, spec = Counting(tmp_path / "clockwork"), Installation(tmp_path).spec()
    service = Service(control, store, tmp_path / "runs", jobs_max=5)
    service.queue.begin()
    try:
        with ThreadPoolExecutor(12) as pool:
            jobs: list[Job] = list(pool.map(lambda n: service.submit(spec, "me", f"key {n}"), range(12)))
        shown = [service.job(job.job) for job in jobs]
    finally:
        service.queue.close()
    assert sorted(control.begun) == sorted(job.job for job in shown if job.state == "running")
    assert len(control.begun) == 5
    assert sorted(job.queue_position for job in shown if job.state == "queued") == list(range(1, 8))


class Shrinking(Clockwork):
    groups = GROUPS

    def node_groups(self) -> list[NodeGroupRecord]:
        super().node_groups()
        return self.groups


def test_a_job_whose_nodes_went_away_while_it_waited_says_so_and_starts_when_they_are_back(
    tmp_path: Path, store: Store
) -> None:
    control, spec = Shrinking(tmp_path / "clockwork"), Installation(tmp_path).spec(islands=LARGE)
    service = Service(control, store, tmp_path / "runs")
    metrics = Metrics(service, store)
    running = service.submit(spec, "me", None)
    job = service.submit(spec, "me", None).job
    submitted_at = time.time() - 100
    store.update_job(job, submitted_at=submitted_at)
    control.groups = [group for group in GROUPS if group["name"] != "asia"]
    service.queue.dispatch()
    assert service.job(job).reason == "node group asia has no nodes"
    told = metrics.exposition().decode()
    assert 'atoll_jobs{state="queued"} 1.0' in told
    assert "atoll_queue_unschedulable 1.0" in told
    oldest_s = float(told.partition("\natoll_queue_oldest_seconds ")[2].partition("\n")[0])
    assert 100 <= oldest_s <= time.time() - submitted_at
    assert f'atoll_job_answers{{atoll_job="{running.job}"}} 1.0' in told
    assert f'atoll_job_answers{{atoll_job="{job}"}}' not in told, "nobody expects it to answer"

    (tmp_path / "clockwork" / "cluster-is-gone").touch()
    service.queue.dispatch()
    assert "the cluster does not answer" in service.job(job).reason
    (tmp_path / "clockwork" / "cluster-is-gone").unlink()
    control.groups = GROUPS
    service.submit_command(running.job, commands.Cancel(), "me")
    wait_until(lambda: service.job(running.job).state.final)
    service.queue.dispatch()
    assert service.job(job).state == "running"


def answers(service: Service, job: str) -> bool:
    try:
        service.job(job)
    except InfrastructureError:
        return False
    return True


def test_a_silent_job_keeps_its_room_and_one_that_cannot_be_started_frees_the_line(
    tmp_path: Path, store: Store
) -> None:
    control, spec = Clockwork(tmp_path / "clockwork"), Installation(tmp_path).spec(islands=LARGE)
    service = Service(control, store, tmp_path / "runs")
    running = service.submit(spec, "me", None).job
    waiting = [service.submit(spec, "me", f"{n}").job for n in range(2)]
    silent, full = tmp_path / "clockwork" / "jobs-are-silent", tmp_path / "clockwork" / "no-more-jobs"
    silent.touch()
    time.sleep(2 * FRESH_S)  # else what it said of itself before is still good
    service.queue.dispatch()
    assert [store.job(job).state for job in waiting] == ["queued", "queued"]
    silent.unlink()
    wait_until(lambda: answers(service, running))  # its silence is kept for a while

    full.touch()
    service.submit_command(running, commands.Cancel(), "me")
    wait_until(lambda: service.job(running).state.final)
    service.queue.dispatch()
    first = service.job(waiting[0])
    assert (first.state, "No synchroniser could be placed" in first.reason) == ("failed", True)
    assert service.job(waiting[1]).state == "queued"
    full.unlink()
    service.queue.dispatch()
    assert service.job(waiting[1]).state == "running"
    full.touch()
    with pytest.raises(InfrastructureError, match="could not be started"):
        service.submit(Installation(tmp_path).spec(), "me", None)
