"""Plans of chaos on a real cluster, by the command line: attrition passes where nobody waits for the dead, and fails where
survivors do; a node dies, and its island lives on elsewhere; the service dies and is started again.

The cluster is one of its own: it loses a node.
"""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core import events
from orchestrator.core.messages import CaughtUp
from orchestrator.runtime import embedded
from orchestrator.runtime.groups import read_groups
from orchestrator.tape.storage import read_tape
from tests.chaos.plans import injected, verdict_with_faults
from tests.harness.reports import of_kind
from tests.ray.collective import NAME, PATIENCE_S
from tests.ray.jobs import ENDLESS, STEP_S, gone, steps_between, synthetic
from tests.ray.test_service import Hands
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
ISLANDS = ("us-east", "europe", "asia")
STEPS = round(14 / STEP_S)
LOOK_S = 0.5
"""Between two looks by the command line, each of which is a process."""
OBJECTIVE = f"bystander_gap_max_s < {2 / 3 * PATIENCE_S:g}"
ATTRITION = {
    "name": "brief-attrition",
    "seed": 9,
    "duration": "9s",
    "faults": [{"kind": "kill", "target": {"random": 1}, "poisson": {"mtbf": "4s"}, "start": "2s"}],
    "blast_radius": {"keep": 2},
    "objectives": [OBJECTIVE, "recovery_s.total < 600"],
}


@pytest.fixture(scope="module")
def hands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hands]:
    installation = Hands(tmp_path_factory.mktemp("plans"))
    groups = [{"name": name, "region": name, "nodes": 1 + (name == "asia")} for name in ISLANDS]
    embedded.up(installation.home.path, read_groups(Path(installation.file("groups", {"node_groups": groups}))))
    installation.atoll("up", "--runs", str(installation.runs), "--control", "tests.ray.collective:connect")
    yield installation
    installation.atoll("down")


@pytest.fixture
def submit(hands: Hands) -> Iterator[Callable[..., str]]:
    """Starts jobs; those that did not end are cancelled, and what waiting islands left is removed."""
    jobs, seed = [], secrets.randbelow(1 << 30)

    def submit_one(name: str, steps: int) -> str:
        document = synthetic(steps, groups=ISLANDS, name=name, seed=seed)
        jobs.append(hands.json("submit", hands.file(name, document))["job"])
        return jobs[-1]

    yield submit_one
    for job in jobs:
        if hands.json("status", job)["state"] == "running":
            hands.atoll("cancel", job)
            wait_until(lambda job=job: hands.json("status", job)["state"] == "cancelled", "the end", LOOK_S)
    shutil.rmtree(Path(tempfile.gettempdir()) / f"atoll-waiting-{seed}", ignore_errors=True)


def run(hands: Hands, job: str, plan: dict[str, Any]) -> dict[str, Any]:
    """The verdict of ``atoll chaos run``."""
    said = hands.atoll("chaos", "run", job, hands.file("plan", plan), "--json", code=None)
    verdict: dict[str, Any] = json.JSONDecoder().raw_decode(said[said.index("{\n") :])[0]
    return verdict


@pytest.mark.soak("half a minute for verdicts that tests/chaos has")
def test_attrition_passes_where_nobody_waits_for_the_dead(hands: Hands, submit: Callable[..., str]) -> None:
    verdict = verdict_with_faults(lambda: run(hands, submit("quick", STEPS), ATTRITION))
    assert verdict["passed"], verdict["objectives"]
    assert injected(verdict)


@pytest.mark.soak("half a minute for verdicts that tests/chaos has")
def test_attrition_fails_where_survivors_wait_for_the_dead_and_says_which_objective_and_when(
    hands: Hands, submit: Callable[..., str]
) -> None:
    verdict = verdict_with_faults(lambda: run(hands, submit(NAME, STEPS), ATTRITION))
    job = verdict["job"]
    (failed,) = [one for one in verdict["objectives"] if not one["passed"]]
    assert failed["objective"] == OBJECTIVE
    assert failed["value"] >= PATIENCE_S
    cause = [  # the latest, if it was killed more than once
        f
        for f in injected(verdict)
        if f["at"] < failed["at"] and f"s after the kill of {f['island']}" in failed["detail"]
    ][-1]
    survivor = failed["detail"].partition(" on ")[2].partition(",")[0]
    assert survivor in set(ISLANDS) - {cause["island"]}
    page = (hands.runs / job / "chaos-brief-attrition.html").read_text()
    assert 'class="badge bad">failed' in page
    assert failed["objective"].replace("<", "&lt;") in page


def test_an_island_whose_node_dies_lives_on_on_another_node_of_its_group(
    hands: Hands, submit: Callable[..., str]
) -> None:
    job = submit("endless", ENDLESS)
    wait_until(lambda: {one["state"] for one in hands.json("islands", job)} == {"training"}, "all train", LOOK_S)
    before = hands.island(job, "asia")
    hands.atoll("chaos", "inject", job, "kill_node", "asia")
    wait_until(lambda: gone(before["pid"]), "the process dies with its node")
    wait_until(lambda: incarnation(hands, job) > before["incarnation"], "asia trains again", LOOK_S)
    records = read_tape(hands.runs / job / "tape.jsonl").records
    (struck,) = [r.event for r in records if isinstance(r.event, events.FaultInjected)]
    assert (struck.kind, struck.island, struck.incarnation) == ("kill_node", "asia", before["incarnation"])
    back = next(event for event in of_kind((r.event for r in records), CaughtUp) if event.at > struck.at)
    assert back.island == "asia"
    for island in set(ISLANDS) - {"asia"}:
        assert steps_between(records, island, struck.at, back.at) > 5, "it trains on while asia is away"


def incarnation(hands: Hands, job: str) -> int:
    """Of asia, once it trains."""
    asia = hands.island(job, "asia")
    return int(asia["incarnation"]) if asia["state"] == "training" else 0
