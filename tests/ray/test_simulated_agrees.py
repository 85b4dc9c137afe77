"""One live job, and the same in simulation: as configured, and as fitted to its tape.

The demo's job (deploy/configs/demo.yaml) with synthetic islands of fixed step time; one of them is killed by the operator.
Everything compared is a ratio or a count, so a slow machine makes the test longer, not wrong. One that stands still does:
islands that lost time are late for merges. So what live job and simulation may differ by grows with the time that was lost.
"""

from __future__ import annotations

from math import fsum
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import commands, events
from orchestrator.core.messages import Progress
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.simulation.fit import fit
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan
from orchestrator.simulation.whatif import CHANGED, HAPPENED, UNCHANGED
from orchestrator.simulation.world import World
from orchestrator.specification.config import parse_job
from orchestrator.tape.replay import replay
from orchestrator.tape.schema import Tape
from orchestrator.tape.storage import read_tape
from tests.harness.reports import of_kind
from tests.ray.jobs import Job
from tests.simulation.questions import what_if

pytestmark = pytest.mark.ray
DEMO = Path(__file__).parent.parent.parent / "deploy" / "configs" / "demo.yaml"
STEP_S = 0.15
STEPS = 220
VICTIM = "asia"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    demo: dict[str, Any] = yaml.safe_load(DEMO.read_text())
    islands = [{"node_group": section["node_group"]} for section in demo["islands"]]  # a simulated job has no spares
    return demo | {
        "islands": islands,
        "trainer": "learners.synthetic:create",
        "synthetic": {"step_s": STEP_S, "start_s": 0.5},
        "budget": {"steps": STEPS},
    }


@pytest.fixture(scope="module")
def tape(port: RayControlPort, tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> Tape:
    """What the live job left. A run in which the machine stood still for others is made once more: its steps had no fixed
    time, which is the premise of a comparison."""
    folder = tmp_path_factory.mktemp("live")
    first = train(port, folder, "live-1", document)
    return first if longest_gap_s(first) < 2 * STEP_S + 0.2 else train(port, folder, "live-2", document)


def train(port: RayControlPort, folder: Path, job_id: str, document: dict[str, Any]) -> Tape:
    """The victim is killed once a fifth of the tokens are trained."""
    run_dir = folder / job_id
    port.start_job(job_id, parse_job(document), run_dir)
    job = Job(port, job_id, run_dir)
    job.wait_for_merge(VICTIM, 1)

    def under_way() -> bool:
        view = job.status()["view"]
        return bool(view["tokens_trained"] > view["token_budget"] / 5)

    job.wait_until(under_way, "a fifth of the training")
    job.command(commands.Kill(VICTIM))
    job.wait_for_merge(VICTIM, 2)
    assert job.wait_for_end()["view"]["outcome"] == "completed"
    return read_tape(run_dir / "tape.jsonl")


def lost_ratio(tape: Tape) -> float:
    """Of the time of islands that were left in peace, what they spent not stepping though nobody kept them from it."""
    there_s = stepped_s = 0.0
    for island in {report.island for report in reports_of(tape)}:
        own = [report for report in reports_of(tape) if report.island == island]
        there_s += own[-1].at - own[0].at
        stepped_s += (own[-1].steps_total - own[0].steps_total) * STEP_S
    return max(0.0, 1 - stepped_s / there_s)


def reports_of(tape: Tape) -> list[Any]:
    """Of islands that were left in peace."""
    reports = of_kind((record.event for record in tape.records), Progress)
    return [report for report in reports if report.island != VICTIM]


def longest_gap_s(tape: Tape) -> float:
    """Between two steps of an island that was left in peace, by its own clock."""
    return max(report.gap_max_seconds for report in reports_of(tape))


@pytest.fixture(scope="module")
def happened(tape: Tape) -> tuple[dict[str, Any], dict[str, Any]]:
    goodput, statistics = Goodput(tape.header.policy), Statistics(tape.header.policy)
    assert replay(tape, (goodput, statistics)).exact
    return goodput.summary(), statistics.summary()


def test_a_simulation_of_the_configuration_agrees_with_the_live_job(
    tape: Tape, happened: tuple[dict[str, Any], dict[str, Any]], document: dict[str, Any]
) -> None:
    """Speeds, policy and faults are the configuration's. What it takes to start a process, and to evaluate, is the
    machine's, so it is taken from the tape; everything else is left at the plan's defaults."""
    spec = parse_job(document)
    policy = tape.header.policy
    requests = [record.event for record in tape.records if isinstance(record.event, events.CommandRequested)]
    kills = [(event.at, event.request.island) for event in requests if isinstance(event.request, commands.Kill)]
    measured = fit(tape).plan
    plan = WorldPlan(
        step_s=(spec.synthetic.step_s,) * len(policy.islands),
        step_jitter_ratio=spec.synthetic.step_jitter_ratio,
        tokens_per_step=spec.tokens_per_step,
        adoption=spec.synchroniser.adoption,
        faults=tuple(Fault(at, FaultKind.KILL, island) for at, island in kills),
        lives=measured.lives,
        seed_s=measured.seed_s,
        kill_s=measured.kill_s,
        detect_s=measured.detect_s,
        begin_s=measured.begin_s,
        evaluate_s=measured.evaluate_s,
        evaluate_alone_s=measured.evaluate_alone_s,
    )
    world = World(policy, plan, seed=0).run()
    worth, told = world.goodput.summary(), world.statistics.summary()
    live_worth, live_told = happened
    assert len(kills) == 1
    lost = lost_ratio(tape)
    assert worth["goodput_ratio"] == pytest.approx(live_worth["goodput_ratio"], abs=0.02 + lost)
    assert told["contributors_mean"] == pytest.approx(live_told["contributors_mean"], rel=0.10 + 2 * lost)


def test_what_if_nothing_had_been_changed_reproduces_what_happened(tape: Tape) -> None:
    columns = what_if(tape, {}).summary()["columns"]
    live, again = columns[HAPPENED], columns[UNCHANGED]
    lost = lost_ratio(tape)
    assert again["goodput_ratio"] == pytest.approx(live["goodput_ratio"], abs=0.03 + lost)
    merges = [fsum(column["merges_per_fragment"]) / len(column["merges_per_fragment"]) for column in (again, live)]
    assert merges[0] == pytest.approx(merges[1], rel=0.05 + 2 * lost)


def test_what_if_everyone_were_needed_merges_less_and_with_more(tape: Tape) -> None:
    columns = what_if(tape, {"K": "4"}).summary()["columns"]
    before, after = columns[UNCHANGED], columns[CHANGED]
    assert after["merges"] < before["merges"]  # none while the island is away
    assert after["uptime_ratio"] < before["uptime_ratio"]
    assert after["contributors_mean"] == 4.0 > before["contributors_mean"]
