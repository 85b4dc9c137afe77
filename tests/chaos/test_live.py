"""Chaos from the command line and over REST, against a service of real processes and the clockwork's jobs."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import psutil
import pytest
import yaml

from api.installation.home import Home
from api.installation.service_restart import kill_and_start_again
from orchestrator.chaos.plan import parse
from orchestrator.chaos.runner import schedule
from orchestrator.core.vocabulary import IslandId, IslandPlan, NodeGroupId
from orchestrator.errors import ConfigurationError, RequestError
from tests import forked
from tests.api.installation import ROOT, Installation, environment, interruptible
from tests.chaos.plans import document, injected, verdict_with_faults
from tests.waiting import PATIENCE_S, wait_until

KILL_ASIA = {"kind": "kill", "target": {"name": "asia"}, "at": 0.5}

SHIPPED = ("quiet", "attrition", "region-loss", "flapping", "slow-links", "coordinator-loss")


def plan_file(installation, *faults, **changes):
    path = installation.folder / "plan.yaml"
    path.write_text(yaml.safe_dump(document(*faults, name="trial", **changes)))
    return str(path)


def submitted(installation, **changes):
    job = installation.client().submit(installation.spec(**changes)).job
    wait_until(lambda: all(i.state == "training" for i in installation.client().islands(job)))
    return job


def verdict(installation, plan):
    """The verdict of this plan on a job of twelve seconds."""
    said = installation.atoll("chaos", "run", submitted(installation, steps=240), plan, "--json", code=None)
    return json.JSONDecoder().raw_decode(said[said.index("{\n") :])[0]


def records(installation, job, kind):
    """What the tape says of ``kind`` events, by the installation's own command."""
    return [r.event for r in installation.client().events(job, follow=False) if r.event["type"] == kind]


def test_a_plan_that_passes_strikes_when_the_seed_says_and_ends_with_0(service: Installation) -> None:
    faults = (KILL_ASIA, {"kind": "stop", "target": {"random": 1}, "at": 1.5, "duration": 0.5})
    said = verdict_with_faults(lambda: verdict(service, plan_file(service, *faults, seed=2)))
    assert said["passed"], said
    job = said["job"]
    islands = service.client().islands(job)
    fleet = [IslandPlan(IslandId(i.island), NodeGroupId(i.node_group), i.region, 1) for i in islands]
    planned = [(f.at, f.kind, f.island) for f in schedule(parse(document(*faults, seed=2)), fleet)]
    assert [(f["planned_at"], f["kind"], f["island"]) for f in said["faults"]] == planned
    assert all(f["spared"].startswith("missed") for f in said["faults"] if f["spared"])  # a machine too busy to look
    carried_out = [(f["kind"], f["island"]) for f in injected(said)]
    assert carried_out
    assert [(f["kind"], f["island"]) for f in records(service, job, "FaultInjected")] == carried_out
    report = service.client().report(job)
    assert [fault["kind"] for fault in report["faults"]] == [kind for kind, _ in carried_out]
    page = (service.runs / job / "chaos-trial.html").read_text()
    assert 'class="badge">passed' in page


def test_a_plan_that_fails_or_is_aborted_says_so_strikes_nobody_any_more_and_ends_with_1(service: Installation) -> None:
    job = submitted(service, steps=240)
    asked = plan_file(
        service, KILL_ASIA, abort=["islands_training <= 4"], objectives=["bystander_gap_max_s < 1", "merges > 1e9"]
    )
    said = service.atoll("chaos", "run", job, asked, code=1)
    assert "aborted: islands_training <= 4 (it is 4)" in said
    assert "FAILED  the plan is not aborted" in said
    assert "held    bystander_gap_max_s < 1" in said
    assert "FAILED  merges > 1e9" in said
    assert "too little" in said
    assert service.client().commands(job) == []


def test_a_bad_plan_ends_with_2_and_strikes_nobody(service: Installation) -> None:
    job = submitted(service)
    mars = {"kind": "kill", "target": {"name": "mars"}, "at": 0}
    assert "'mars' is not an island of the job" in service.atoll("chaos", "run", job, plan_file(service, mars), code=2)
    assert "is no comparison" in service.atoll("chaos", "run", job, plan_file(service, objectives=["win"]), code=2)
    assert "attrition" in service.atoll("chaos", "run", job, "no-such-plan", code=2)
    assert service.client().commands(job) == []
    service.atoll("cancel", job)


def test_ctrl_c_ends_the_plan_lets_stopped_islands_go_on_and_leaves_the_job(service: Installation) -> None:
    job = submitted(service)
    stop = {"kind": "stop", "target": {"name": "asia"}, "at": 0, "duration": 100}
    running = subprocess.Popen(
        service.command("chaos", "run", job, plan_file(service, stop, KILL_ASIA | {"at": 90})),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    wait_until(lambda: any(command.kind == "stop" for command in service.client().commands(job)))
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, said
    assert "asia may go on" in said
    assert [(c.kind, c.island, c.state) for c in service.client().commands(job)] == [
        ("stop", "asia", "accepted"),
        ("continue", "asia", "accepted"),
    ]
    assert service.client().job(job).state == "running"


def test_one_fault_by_hand(service: Installation) -> None:
    job = submitted(service)
    assert "stop asia" in service.atoll("chaos", "stop", job, "asia", "--for", "0.5")
    assert "will be placed again" in service.atoll("chaos", "kill", job, "europe")
    assert "no island 'mars'" in service.atoll("chaos", "kill", job, "mars", code=2)
    found = records(service, job, "FaultInjected")
    assert [(f["kind"], f["island"], f["duration"], f["incarnation"]) for f in found] == [
        ("stop", "asia", 0.5, 1),
        ("kill", "europe", 0.0, 1),
    ]
    assert found[0]["caller"]
    service.atoll("cancel", job)


def test_every_kind_of_fault_is_on_the_tape_with_its_numbers(service: Installation) -> None:
    job = submitted(service)
    island = ("asia", 1)
    for asked, numbers in (
        (("cut", "asia", "--for", "2"), (*island, 2.0, 0.0, 0)),
        (("slow", "asia", "--for", "2", "--rate", "1000"), (*island, 2.0, 1000.0, 0)),
        (("corrupt", "asia", "--payloads", "3"), (*island, 0.0, 0.0, 3)),
        (("delay", "asia", "--payloads", "3", "--for", "0.5"), (*island, 0.5, 0.0, 3)),
        (("drop", "asia", "--payloads", "3"), (*island, 0.0, 0.0, 3)),
        (("kill_host", "asia", "--host", "0"), (*island, 0.0, 0.0, 0)),
        (("kill_node", "asia"), (*island, 0.0, 0.0, 0)),
        (("kill_synchroniser",), ("", 0, 0.0, 0.0, 0)),
    ):
        assert "accepted" in service.atoll("chaos", "inject", job, *asked)
        fault = records(service, job, "FaultInjected")[-1]
        names = ("kind", "island", "incarnation", "duration", "bytes_per_second", "payloads")
        assert tuple(fault[name] for name in names) == (asked[0], *numbers)
    service.atoll("cancel", job)


@pytest.mark.parametrize(
    ("kind", "seconds", "more"),
    [
        ("stop", 0.0, {}),
        ("kill", 3.0, {}),
        ("burn", 0.0, {}),
        ("stop", 1e9, {}),
        ("cut", 0.0, {}),
        ("slow", 3.0, {}),
        ("slow", 3.0, {"bytes_per_second": -1.0}),
        ("drop", 0.0, {}),
        ("corrupt", 3.0, {"payloads": 1}),
        ("delay", 0.0, {"payloads": 1}),
        ("kill_synchroniser", 0.0, {}),
        ("kill_api", 0.0, {}),
        ("kill_host", 0.0, {"host": -1}),
        ("kill", 0.0, {"host": 0}),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(
    service: Installation, kind: str, seconds: float, more: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="has invalid fields"):
        service.client().inject("latest", kind, "asia", seconds, **more)


def test_a_plan_kills_the_service_and_starts_it_again_as_it_was(service: Installation) -> None:
    before = service.home.address()
    assert before is not None
    command = psutil.Process(before.pid).cmdline()
    said = verdict_with_faults(lambda: verdict(service, plan_file(service, {"kind": "kill_api", "at": 0.5})))
    assert said["passed"], said
    assert [(fault["kind"], fault["spared"]) for fault in said["faults"]] == [("kill_api", "")]
    after = service.home.address()
    assert after is not None
    assert (after.url, after.pid == before.pid) == (before.url, False)
    again = psutil.Process(after.pid).cmdline()
    where = command.index("--listener") + 1
    assert [*again[:where], *again[where + 1 :]] == [*command[:where], *command[where + 1 :]]


def test_a_service_that_is_not_of_this_home_is_not_killed(service: Installation) -> None:
    with pytest.raises(ConfigurationError, match="no service is running"):
        kill_and_start_again(Home(service.folder))
    assert service.home.running()


def test_a_loss_gap_needs_a_reference_and_is_measured_against_it(service: Installation) -> None:
    asked = plan_file(service, objectives=["loss_gap < 5 %"])
    quiet = submitted(service, steps=200)
    assert "--reference" in service.atoll("chaos", "run", quiet, asked, code=2)
    wait_until(lambda: service.client().job(quiet).report_ready)
    same = submitted(service, steps=200)
    said = json.loads(service.atoll("chaos", "run", same, asked, "--reference", quiet, "--json"))
    assert (said["objectives"][-1]["objective"], said["objectives"][-1]["passed"]) == ("loss_gap < 5 %", True)
    lower = service.folder / "lower.json"
    report = service.client().report(quiet)
    lower.write_text(json.dumps(report | {"loss_final": report["loss_final"] / 2}))
    again = submitted(service, steps=200)
    assert "loss_gap is 1" in service.atoll("chaos", "run", again, asked, "--reference", str(lower), code=1)
    lower.write_text("{}")
    assert "is not the report of a job" in service.atoll(
        "chaos", "run", again, asked, "--reference", str(lower), code=2
    )


def test_shipped_plans_are_listed() -> None:
    plans = {plan["name"] for plan in json.loads(_without_home("chaos", "list", "--json"))}
    assert plans == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_plans_run_against_the_demo_in_the_simulator(name: str, tmp_path) -> None:
    told = json.loads(
        _without_home("chaos", "simulate", name, "deploy/configs/demo.yaml", "--report", f"{tmp_path}/v.html", "--json")
    )
    assert told["plan"] == name
    assert told["passed"], told["objectives"]
    assert name in (tmp_path / "v.html").read_text()


def _without_home(*arguments: str) -> str:
    done = forked.atoll(*arguments, environment=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout
