"""Plans that the service runs: over REST, through its own death, and to a verdict, against the clockwork's jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from api.chaos.active_run import MISSED, ActiveRun
from api.chaos.runs import ChaosRuns
from api.chaos.store import ChaosRunRow, ChaosStore
from api.client import Client
from api.installation.service_restart import no_restart
from api.jobs.service import Service
from api.storage.store import CommandRow, Store
from orchestrator.chaos.runner import LATE_MAX_S
from orchestrator.core.commands import Command, Inject
from orchestrator.errors import Conflict, InvalidJobSpec, NotFound
from tests.api.clockwork import Clockwork
from tests.api.installation import Installation
from tests.api.test_restart import kill_service
from tests.chaos.plans import document
from tests.chaos.test_live import plan_file, records, submitted
from tests.waiting import wait_until

KILL_ASIA = {"kind": "kill", "target": {"name": "asia"}, "at": 0.5}
LONG_STOP = {"kind": "stop", "target": {"name": "asia"}, "at": 0, "duration": 100}
NEVER = {"kind": "kill", "target": {"name": "europe"}, "at": 190}


def settled(client: Client, job: str) -> Any:
    return wait_until(lambda: (run := client.chaos_run(job)).ended_at is not None and run)


def test_a_started_plan_is_listed_followed_and_judged_by_the_jobs_report(service: Installation) -> None:
    job = submitted(service, steps=200)
    with service.http() as http, service.client() as client:
        answer = http.post(f"/v1/jobs/{job}/chaos/runs", json={"plan": document(KILL_ASIA, NEVER, name="trial")})
        assert answer.status_code == 202, answer.text
        where = answer.headers["Location"]
        first = answer.json()
        assert (first["job"], first["plan"], first["caller"], first["fault_count"]) == (job, "trial", "local", 2)
        struck = wait_until(lambda: (r := http.get(where).json())["decisions"] and r["decisions"][0]["command"] and r)
        assert (struck["state"], struck["struck_count"], struck["spared_count"]) == ("running", 1, 0)
        (decision,) = struck["decisions"]
        assert (decision["kind"], decision["island"], decision["planned_s"]) == ("kill", "asia", 0.5)
        assert decision["command"] in [command.command for command in client.commands(job)]
        assert struck["next"]["island"] == "europe"
        assert struck["next"]["after_s"] == pytest.approx(struck["begun_after_s"] + 190)
        assert [run.run for run in client.chaos_runs(job)] == [first["run"]]
        refused = http.get(f"{where}/verdict")
        assert refused.status_code == http.get(f"{where}/report").status_code == 409
        assert "atoll watch" in refused.json()["remedy"]

        assert settled(client, job).state == "passed"
        verdict = http.get(f"{where}/verdict").json()
        assert (verdict["schema"], verdict["passed"], len(verdict["faults"])) == ("atoll-verdict/1", True, 1)
        page = http.get(f"{where}/report")
        assert page.headers["content-type"].startswith("text/html")
        assert 'class="badge">passed' in page.text
        assert http.post(f"{where}/stop").status_code == 409


def test_one_plan_runs_at_a_time_and_a_key_names_one_run(service: Installation) -> None:
    job = submitted(service)
    with service.http() as http, service.client() as client:
        path, key = f"/v1/jobs/{job}/chaos/runs", {"Idempotency-Key": f"once-{job}"}
        first = http.post(path, json={"shipped": "attrition"}, headers=key).json()
        assert http.post(path, json={"shipped": "attrition"}, headers=key).json()["run"] == first["run"]
        assert http.post(path, json={"shipped": "quiet"}, headers=key).status_code == 400
        second = http.post(path, json={"shipped": "quiet"})
        assert second.status_code == 409
        assert "attrition runs against" in second.json()["detail"]
        client.stop_chaos(job)
        assert http.post(path, json={"shipped": "quiet"}).status_code == 202
        assert [run.state.injects for run in client.chaos_runs(job)] == [True, False]
        client.cancel(job)
        assert settled(client, job).state == "failed", "a cancelled job did not complete"


def test_an_ended_plan_injects_no_further_fault_and_what_stood_still_goes_on(service: Installation) -> None:
    job = submitted(service)
    with service.client() as client:
        client.start_chaos(job, yaml.safe_dump(document(LONG_STOP, KILL_ASIA | {"at": 3})))
        wait_until(lambda: [command.state for command in client.commands(job)] == ["accepted"])
        stopped = client.stop_chaos(job)
        assert (stopped.state, stopped.reason) == ("stopped", "ended by local; asia may go on")
        assert stopped.next is None
        assert client.stop_chaos(job).ended_at == stopped.ended_at, "asked twice"
        steps = next(i.steps_total for i in client.islands(job) if i.island == "asia")
        wait_until(lambda: next(i.steps_total for i in client.islands(job) if i.island == "asia") > steps + 70)
        assert [command.kind for command in client.commands(job)] == ["stop", "continue"]
        with pytest.raises(Conflict, match="no verdict"):
            client.chaos_verdict(job)
        client.cancel(job)


def test_a_plan_that_cannot_be_used_is_refused_with_every_problem_and_starts_nothing(
    service: Installation, http: httpx.Client
) -> None:
    job = submitted(service)
    for body in (
        {"shipped": "quiet", "plan": {}},
        {},
        {"plan": "{" * 20},
        {"plan": "a: &a [1]\nb: *a"},
        {"plan": "[]"},
    ):
        assert http.post(f"/v1/jobs/{job}/chaos/runs", json=body).status_code == 422, body
    mars = {"kind": "kill", "target": {"name": "mars"}, "at": 0}
    with service.client() as client:
        with pytest.raises(InvalidJobSpec, match="'mars' is not an island of the job"):
            client.start_chaos(job, document(mars))
        with pytest.raises(InvalidJobSpec, match=r"objectives\.0"):
            client.start_chaos(job, document(objectives=["win"]))
        with pytest.raises(NotFound, match="attrition"):
            client.start_shipped_chaos(job, "no-such-plan")
        assert client.chaos_runs(job) == []
        with pytest.raises(NotFound, match="No plan has run"):
            client.chaos_run(job)
        client.cancel(job)
        wait_until(lambda: client.job(job).state == "cancelled")
        with pytest.raises(Conflict, match="faults cannot be injected into it"):
            client.start_shipped_chaos(job, "quiet")


def test_a_removed_job_takes_its_runs_with_it(stage: Stage) -> None:
    stage.begin(KILL_ASIA)
    stage.active_run().advance(stage.service.job(stage.job).model_copy(update={"after_s": 1e6}))
    stage.store.remove_job(stage.job)
    assert stage.book.runs(stage.job) == stage.book.decisions("chaos-1") == stage.book.unsettled() == []


def test_a_killed_service_goes_on_with_the_plan_and_does_not_make_up_for_what_it_missed(warm: Installation) -> None:
    job = submitted(warm)
    stops = {"kind": "stop", "target": {"name": "asia"}, "every": 1, "duration": 0.2}
    with warm.client() as client:
        begun = client.start_chaos(job, document(stops))
        wait_until(lambda: client.commands(job))
    kill_service(warm)
    time.sleep(LATE_MAX_S + 2)  # of real time: the job goes on without a service, and with it the plan's clock
    warm.up()
    with warm.client() as client:

        def injected_after_a_miss() -> bool:
            spared = [bool(one.spared) for one in client.chaos_run(job).decisions]
            return True in spared and False in spared[spared.index(True) :]

        wait_until(injected_after_a_miss)
        run = client.chaos_run(job)
        assert (run.run, run.state, run.begun_after_s is not None) == (begun.run, "running", True)
        missed = [n for n, one in enumerate(run.decisions) if one.spared.startswith("missed")]
        again = next(n for n, one in enumerate(run.decisions) if n > missed[0] and not one.spared)
        assert [n for n in missed if n < again] == list(range(missed[0], again)), (
            "while nobody looked, and then no more"
        )
        client.stop_chaos(job)
        run = client.chaos_run(job)
        struck = {one.command for one in run.decisions if not one.spared}
        assert struck == {command.command for command in client.commands(job) if command.kind == "stop"}
        assert len(struck) == run.struck_count
        told = [fault["command"] for fault in records(warm, job, "FaultInjected") if fault["kind"] == "stop"]
        assert sorted(told) == sorted(struck)


def injected_once(shown: str) -> str:
    return shown if "1 of 2 faults injected" in shown else ""


def test_the_command_line_starts_shows_and_ends_a_plan(service: Installation) -> None:
    job = submitted(service)
    assert "2 faults planned" in service.atoll("chaos", "start", job, plan_file(service, KILL_ASIA, NEVER))
    assert "runs against" in service.atoll("chaos", "start", job, "quiet", code=1)
    shown = wait_until(lambda: injected_once(service.atoll("chaos", "status", job)), "the first fault")
    assert "kill asia" in shown
    assert "next kill europe at" in shown
    assert "is running" in service.atoll("chaos", "verdict", job, code=1)
    assert "the plan is ended by local" in service.atoll("chaos", "end", job)
    assert [run["state"] for run in json.loads(service.atoll("chaos", "runs", job, "--json"))] == ["stopped"]
    service.atoll("cancel", job)


def test_the_command_line_judges_a_plan_that_has_ended(service: Installation) -> None:
    job = submitted(service, steps=200)
    with service.client() as client:
        client.start_chaos(job, document(KILL_ASIA, name="trial"))
        settled(client, job)
    watched = service.atoll("chaos", "status", job, "--watch")
    assert "kill asia" in watched
    assert "is passed" in watched
    page = service.folder / "verdict.html"
    assert "passed" in service.atoll("chaos", "verdict", job, "--report", str(page))
    assert "trial" in page.read_text()


def test_shipped_plans_are_told_in_words(http: httpx.Client) -> None:
    plans = {plan["name"]: plan for plan in http.get("/v1/chaos/plans").json()["plans"]}
    attrition = plans["attrition"]
    assert attrition["faults"] == ["kill 1 of all islands, at random, every 60 s on average from 10 s on"]
    assert attrition["about"] == "islands die at random, one a minute on average, like spot machines."
    assert attrition["keeps"] == 2
    assert "bystander_gap_max_s < 2" in attrition["objectives"]
    assert yaml.safe_load(attrition["text"])["name"] == "attrition"


# ── without a process: the instants at which one may die ──────────────────────────────────────────────────────────────


class Death(BaseException):
    """The process ends here, as by a SIGKILL: nobody catches this."""


class Mortal(Clockwork):
    """Dies once where it is told to."""

    dies = ""

    def submit(self, job_id: str, command_id: str, caller: str, command: Command) -> None:
        if not isinstance(command, Inject):
            super().submit(job_id, command_id, caller, command)
            return
        self.die("before the job has it")
        super().submit(job_id, command_id, caller, command)
        self.die("when the job has it")

    def die(self, where: str) -> None:
        if self.dies == where:
            self.dies = ""
            raise Death


class MortalStore(Store):
    """Dies with its port before a command is stored."""

    port: Mortal

    def add_command(self, row: CommandRow) -> CommandRow:
        self.port.die("before anything is stored")
        return super().add_command(row)


class Stage:
    """A job and a plan's run, whose conductor is built anew whenever it is asked for."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        (folder / "clockwork").mkdir()
        self.control, self.store = Mortal(folder / "clockwork"), MortalStore(f"sqlite:///{folder}/store.sqlite")
        self.store.port = self.control
        self.service, self.book = Service(self.control, self.store, folder / "runs"), ChaosStore(self.store.engine)
        self.job = self.service.submit(spec, "me", None).job
        wait_until(lambda: self.service.job(self.job).islands_training == 4)

    def begin(self, *faults: dict[str, Any]) -> None:
        islands = [[i.island, i.node_group, i.region, i.accelerator_count] for i in self.service.job(self.job).islands]
        about = {"run": "chaos-1", "job": self.job, "plan": "trial", "caller": "me", "requested_at": 1.0}
        self.book.add(ChaosRunRow(**about, text=yaml.safe_dump(document(*faults)), fleet=islands, holds=self.job))

    def active_run(self) -> ActiveRun:
        row = self.book.run(self.job, "chaos-1")
        assert row is not None
        return ActiveRun(row, self.service, self.store, self.book, no_restart)

    def faults_on_the_tape(self) -> int:
        return len(self.service.job(self.job).statistics["faults"])


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, Installation(tmp_path).spec())
    yield stage
    stage.store.close()


@pytest.mark.parametrize("where", ["before anything is stored", "before the job has it", "when the job has it"])
def test_a_decision_that_was_stored_strikes_once_wherever_the_process_dies(stage: Stage, where: str) -> None:
    stage.begin(KILL_ASIA | {"at": 0})
    picture = stage.service.job(stage.job)
    stage.control.dies = where
    with pytest.raises(Death):
        stage.active_run().advance(picture)
    assert len(stage.book.decisions("chaos-1")) == 1, "decided, and stored"
    for _ in range(2):
        stage.active_run().advance(stage.service.job(stage.job))
    wait_until(lambda: stage.faults_on_the_tape() == 1)
    assert len(stage.store.commands(stage.job)) == 1
    assert stage.book.decisions("chaos-1")[0].decision["spared"] == ""


def test_a_decision_that_was_not_handed_over_is_skipped_once_it_is_late(stage: Stage) -> None:
    stage.begin(KILL_ASIA | {"at": 0})
    picture = stage.service.job(stage.job)
    stage.control.dies = "before anything is stored"
    with pytest.raises(Death):
        stage.active_run().advance(picture)
    later = stage.service.job(stage.job)
    later = later.model_copy(update={"after_s": (later.after_s or 0.0) + LATE_MAX_S + 1})
    stage.active_run().advance(later)
    assert stage.store.commands(stage.job) == []
    assert stage.book.decisions("chaos-1")[0].decision["spared"] == MISSED


def test_islands_that_nobody_asked_for_yet_are_drawn_for_no_fault(tmp_path: Path) -> None:
    islands = [{"node_group": "us-east", "count_max": 9}, {"node_group": "asia"}]
    (tmp_path / "clockwork").mkdir()
    control, store = Clockwork(tmp_path / "clockwork"), Store(f"sqlite:///{tmp_path}/store.sqlite")
    service = Service(control, store, tmp_path / "runs")
    runs = ChaosRuns(service, store, no_restart)
    job = service.submit(Installation(tmp_path).spec(islands=islands), "me", None).job
    asked = document({"kind": "kill", "target": {"random": 1}, "every": 10})
    runs.start(job, yaml.safe_dump(asked), asked, None, "me", None)
    runs.threads.close()
    row = ChaosStore(store.engine).run(job, "latest")
    assert [island for island, *_ in row.fleet] == ["us-east-0", "asia"]
    store.close()
