"""The service is killed and started again while jobs run: nothing it answered for is forgotten."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from api.client import Client
from api.installation.home import Home
from api.jobs.service import Service, digest_of
from api.schemas import Job
from api.storage.store import JobRow, Store
from orchestrator.errors import InfrastructureError
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.specification.config import parse_job
from tests.api.clockwork import connect
from tests.api.installation import CONTROL, ROOT, Installation
from tests.waiting import PATIENCE_S, wait_until


def kill_service(installation: Installation) -> None:
    address = installation.home.address()
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    wait_until(lambda: not installation.home.running())


def test_a_killed_service_comes_back_with_its_jobs_and_commands(warm: Installation) -> None:
    job = json.loads(warm.atoll("submit", warm.spec_file(), "--json"))
    with warm.client() as client:
        command = client.kill(job["job"], "asia", restart=False)
    address = warm.home.address()
    kill_service(warm)
    assert "atoll up" in warm.atoll("jobs", code=3)

    assert "starting the service" in warm.up()
    with warm.client() as client:
        assert warm.home.address().url == address.url, "clients that know the address find it again"
        assert client.job("latest").state == "running"
        assert client.job(job["job"]).submitted_at == job["submitted_at"]
        decided = wait_until(lambda: (c := client.command(job["job"], command.command)).state != "pending" and c)
        assert decided.state == "accepted"
        assert decided.caller == "local"
        wait_until(lambda: client.job(job["job"]).islands[3].state == "stopped")


class Waiting(Client):
    """Says when it has had its first answer."""

    answered: Event

    def job(self, job: str) -> Job:
        found = super().job(job)
        self.answered.set()
        return found


def test_who_watches_and_who_waits_outlive_a_restart_of_the_service(warm: Installation) -> None:
    warm.atoll("submit", warm.spec_file(steps=300))
    with Waiting.at(warm.home.path) as client, ThreadPoolExecutor(1) as beside:
        client.answered = Event()
        ended = beside.submit(client.wait, "latest")
        client.answered.wait()
        _watch_a_restart(warm)
        assert ended.result().state == "completed"


def _watch_a_restart(warm: Installation) -> None:
    watching = subprocess.Popen(warm.command("watch", "latest"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    watching.stdout.readline()
    kill_service(warm)
    warm.up()
    rest = watching.communicate(timeout=PATIENCE_S)[0]
    assert watching.returncode == 0, rest
    assert "completed" in rest


def test_an_ended_job_is_known_after_its_run_folder_is_gone(warm: Installation) -> None:
    job = json.loads(warm.atoll("submit", warm.spec_file(steps=10), "--json"))["job"]
    with warm.client() as client:
        ended = wait_until(lambda: (j := client.job(job)).state == "completed" and j)
        shutil.rmtree(warm.runs / job)
        kill_service(warm)
        warm.up()
    with warm.client() as client:
        assert client.job(job).tokens_trained == ended.tokens_trained
        assert client.jobs()[0].state == "completed"


def test_a_job_whose_cluster_was_taken_down_is_failed_and_says_so(warm: Installation) -> None:
    job = json.loads(warm.atoll("submit", warm.spec_file(), "--json"))["job"]
    warm.atoll("down")
    connect(warm.home.path).lose(job)
    warm.up()
    with warm.client() as client:
        found = wait_until(lambda: (told := client.job(job)).state.final and told)
    assert found.state == "failed"
    assert "atoll down" in found.reason


def test_a_job_whose_whole_cluster_died_goes_on_when_there_is_a_service_again(warm: Installation) -> None:
    """Also when what is left of the installation is ended first: nothing ran any more that this would have ended."""
    job = json.loads(warm.atoll("submit", warm.spec_file(), "--json"))["job"]
    with warm.client() as client:
        before = wait_until(lambda: (told := client.job(job)).global_version > 8 and told)
    kill_service(warm)
    connect(warm.home.path).lose(job)
    warm.atoll("down")
    warm.up()
    with warm.client() as client:
        after = wait_until(lambda: (told := client.job(job)).islands_training == 4 and told)
    assert after.state == "running"
    assert after.global_version > before.global_version


@pytest.mark.parametrize("alive", [True, False])
def test_only_what_ran_was_taken_down_on_purpose(cold: Installation, alive: bool) -> None:
    """Whoever ends what is left of a cluster whose head is dead tidies up, and wants the jobs back."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        if not alive:
            head.close()
        ClusterFile("none-of-ours", address, str(cold.folder / "temp"), {}).write(cold.home.path)
        assert "stopping the embedded cluster" in cold.atoll("down")
    assert cold.home.taken_down.exists() == alive


def test_a_job_whose_start_was_cut_short_is_settled_at_the_next_start(cold: Installation) -> None:
    """What had begun goes on, what had not begins, and what had begun and is gone goes on from its tape."""
    cold.home.path.mkdir()
    store = Store(f"sqlite:///{cold.home.path / 'service.sqlite'}")
    for job in ("late-aaaaa", "kept-bbbbb", "gone-ccccc"):
        spec = cold.spec()
        run_dir = cold.runs / job
        row = JobRow(
            job=job, name=job, spec=spec, run_dir=str(run_dir), caller="me", submitted_at=1.0, state="starting"
        )
        store.add_job(row)
    store.close()
    (cold.runs / "kept-bbbbb").mkdir(parents=True)
    (cold.runs / "gone-ccccc").mkdir()
    control = connect(cold.home.path)
    for job in ("kept-bbbbb", "gone-ccccc"):
        control.start_job(job, parse_job(cold.spec()), cold.runs / job)
    began_at = control.status("gone-ccccc")["started_at"]
    control.lose("gone-ccccc")
    cold.up()
    with cold.client() as client:
        assert client.job("kept-bbbbb").state == "running"
        wait_until(lambda: client.job("late-aaaaa").state == "running")
        gone = wait_until(lambda: (told := client.job("gone-ccccc")).islands_training == 4 and told)
    assert (gone.state, gone.started_at) == ("running", began_at)


def test_a_job_that_ended_while_no_service_was_up_keeps_its_idempotency_key(cold: Installation) -> None:
    store, control, spec = being_started(cold, "ended-aaaaa"), connect(cold.home.path), cold.spec(steps=10)
    (cold.runs / "ended-aaaaa").mkdir(parents=True)
    control.start_job("ended-aaaaa", parse_job(spec), cold.runs / "ended-aaaaa")
    wait_until(lambda: control.status("ended-aaaaa")["view"]["phase"] == "finished")

    service = Service(control, store, cold.runs)
    service.resume()
    again = service.submit(spec, "me", "key")
    assert (again.job, again.state) == ("ended-aaaaa", "completed")
    assert len(service.jobs()) == 1
    store.close()


def test_a_job_whose_start_was_cut_short_is_settled_once_the_cluster_answers(cold: Installation) -> None:
    store, control, spec = being_started(cold, "lost-aaaaa"), connect(cold.home.path), cold.spec(steps=10)
    silent = cold.home.path / "clockwork" / "jobs-are-silent"
    silent.touch()
    service = Service(control, store, cold.runs)
    service.resume()
    (listed,) = service.jobs()
    assert (listed.state, "currently unknown" in listed.reason, listed.islands_training) == ("starting", True, None)
    with pytest.raises(InfrastructureError):
        service.submit(spec, "me", "key")

    silent.unlink()
    service.queue.dispatch()
    again = wait_until(
        lambda: answered(lambda: service.submit(spec, "me", "key"))
    )  # a silence is remembered for a moment
    assert again.job == "lost-aaaaa"
    assert again.state in ("running", "completed"), "nothing of the first attempt ever ran"
    assert len(service.jobs()) == 1
    store.close()


def answered(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except InfrastructureError:
        return None


def being_started(installation: Installation, job: str) -> Store:
    """What a service leaves that is killed while it starts a job of ten steps."""
    installation.home.path.mkdir()
    store, spec = Store(f"sqlite:///{installation.home.path / 'service.sqlite'}"), installation.spec(steps=10)
    values = {"spec": parse_job(spec).model_dump(mode="json"), "run_dir": str(installation.runs / job)}
    values |= {"idempotency_key": "key", "request_digest": digest_of(spec), "state": "starting"}
    store.add_job(JobRow(job=job, name=job, caller="me", submitted_at=1.0, **values))
    return store


def test_up_names_the_options_that_a_running_service_does_not_take(warm: Installation) -> None:
    assert "keeps its options" not in warm.up()
    said = " ".join(warm.up("--jobs-max", "7", "--retention-days", "3").split())
    assert (
        "--jobs-max 7, --retention-days 3.0: the running service keeps its options; to change them, run `atoll" in said
    )
    assert "already running" in said


def test_a_home_has_one_service_and_stale_addresses_are_seen_through(warm: Installation) -> None:
    second = [sys.executable, "-m", "api.serve", "--home", str(warm.home.path), "--control", CONTROL]
    refused = subprocess.run(second, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 2
    assert "already running" in refused.stderr

    kill_service(warm)
    stale = warm.home.address()
    assert stale is not None, "a killed process cannot tidy up"
    (warm.home.path / "service.json").write_text(json.dumps({"url": stale.url, "pid": os.getpid(), "runs": "runs"}))
    assert "nothing is running" in warm.atoll("down"), "this very process must not be taken for the service"
    assert Home(warm.home.path).address() is None


@pytest.mark.parametrize("word", ["up", "down"])
def test_who_starts_or_ends_an_installation_is_alone_in_it(cold: Installation, word: str) -> None:
    with cold.home.locked_for_change("demo"):
        said = cold.atoll(word, code=1)
    assert "`atoll demo`" in said
    assert "--home" in said, "the remedy"
    assert not cold.home.address()


def test_the_service_refuses_to_listen_beyond_this_machine(cold: Installation) -> None:
    command = [sys.executable, "-m", "api.serve", "--home", str(cold.home.path), "--control", CONTROL]
    for host in ("0.0.0.0", "192.0.2.1", "example.org"):
        refused = subprocess.run(
            [*command, "--host", host], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert refused.returncode == 2
        assert "--certificate" in refused.stderr
    assert not cold.home.path.exists()


def test_a_service_that_cannot_start_says_why_and_leaves_nothing(cold: Installation) -> None:
    said = cold.atoll("up", "--control", "tests.api.nosuch:connect", code=2)
    assert "'tests.api.nosuch:connect' cannot be loaded: No module named 'tests.api.nosuch'" in said
    assert not cold.home.running()


def test_a_command_restarts_the_synchroniser_of_a_running_job_and_of_no_other(warm: Installation) -> None:
    running = json.loads(warm.atoll("submit", warm.spec_file(), "--json"))["job"]
    assert "continues from tape and journal" in warm.atoll("restart", running)
    answer = json.loads(warm.atoll("restart", running, "--json"))
    assert (answer["job"], "was ended" in answer["detail"]) == (running, True)
    warm.atoll("cancel", running)
    with warm.client() as client:
        wait_until(lambda: client.job(running).state == "cancelled")
    refused = warm.atoll("restart", running, code=None)
    assert "already cancelled" in refused
    assert f"--resume {running}" in refused
    assert "does not exist" in warm.atoll("restart", "no-such-job", code=None)


def test_the_list_says_of_a_job_that_does_not_answer_that_it_is_not_known_instead_of_zeros(cold: Installation) -> None:
    cold.up()
    job = json.loads(cold.atoll("submit", cold.spec_file(), "--json"))["job"]
    with cold.client() as client:
        wait_until(lambda: client.job(job).islands_training == 4)
    answering = cold.atoll("jobs")
    assert "4/4" in answering
    assert "silent" not in answering
    (cold.home.path / "clockwork" / "jobs-are-silent").touch()
    listing = wait_until(lambda: "silent" in (shown := cold.atoll("jobs")) and shown)
    (line,) = [line for line in listing.splitlines() if f"{job} " in line and "running" in line]
    assert "running, silent" in line
    assert "?/4" in line
    assert " 0 (0 %)" not in line
    assert f"{job} does not answer" in listing
    (summary,) = json.loads(cold.atoll("jobs", "--json"))["jobs"]
    assert summary["silent"] is True
