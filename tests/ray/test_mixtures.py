"""A mixture whose routers merge more often, as a user runs it: checked, killed, advised on, saved, resumed, reported."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import yaml

from api.client import Client
from api.schemas import Job
from orchestrator.accounting.goodput import Goodput
from orchestrator.core.effects import MergeFragment
from orchestrator.core.events import MergeCompleted, OuterStateSeeded
from orchestrator.core.saving import BeginCheckpoint, JobResumed
from orchestrator.core.vocabulary import FragmentId
from orchestrator.simulation.fit import fit, job_header
from orchestrator.simulation.line_advice import bits_of
from orchestrator.tape.replay import replay
from orchestrator.tape.schema import Tape
from orchestrator.tape.storage import read_tape
from tests.newcomer import Newcomer
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.soak("two jobs of JAX islands in turn"), pytest.mark.timeout(600)]
ISLANDS = ("us-east", "asia")
FRAGMENTS, INTERVAL, OWN = 3, 24, 6
LAYERS, WIDTH, EXPERTS = 2, 16, 4
OF_ROUTERS = LAYERS * WIDTH * EXPERTS
DOCUMENT: dict[str, Any] = {
    "name": "routers",
    "model": {
        "decoder": {
            "vocabulary_size": 256,
            "width": WIDTH,
            "layer_count": LAYERS,
            "head_count": 2,
            "key_value_head_count": 1,
            "head_size": 8,
            "experts": {"count": EXPERTS, "active": 2, "hidden_size": 8, "balance_weight": 0.01},
        },
        "compute_dtype": "float32",
    },
    "data": {"sequence_length": 64},
    "training": {"batch_size": 4, "inner_optimizer": {"lr": 0.004, "warmup_steps": 20}},
    "synchroniser": {
        "fragments": FRAGMENTS,
        "interval_steps": INTERVAL,
        "router_interval_steps": OWN,
        "overlap_steps": 4,
        "grace_cap_steps": 4.0,
    },
    "islands": [{"node_group": group} for group in ISLANDS],
    "evaluation": {"every_merges": 24, "sequences": 16},
    "budget": {"steps": 100_000},
}


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    somebody = Newcomer(tmp_path_factory.mktemp("mixtures"))
    try:
        somebody.fork_commands()
        somebody.type("atoll up")
        yield somebody
    finally:
        somebody.cancel_jobs()
        somebody.leave()


def file_of(newcomer: Newcomer, **changes: Any) -> str:
    (newcomer.folder / "mixture.yaml").write_text(yaml.safe_dump(DOCUMENT | changes))
    return "mixture.yaml"


def shown(newcomer: Newcomer, command: str) -> Any:
    return json.loads(newcomer.type(f"atoll {command} --json"))


def test_routers_merge_more_often_through_a_death_and_a_resumption_and_every_command_knows(newcomer: Newcomer) -> None:
    said = newcomer.type(f"atoll check {file_of(newcomer)}")
    assert f"every {INTERVAL} steps (H), routers every {OWN}, {FRAGMENTS} fragments (P)" in said
    assert f"but the last of {OF_ROUTERS} in routers" in said
    newcomer.type(f"atoll submit {file_of(newcomer)}")
    with Client.at(newcomer.home.path) as client:
        first = client.jobs()[0].job

        def job() -> Job:
            return client.job(first)

        wait_until(lambda: all(one.last_merge_after_s is not None for one in job().islands), "merges of both islands")
        newcomer.type(f"atoll kill {first} asia")
        wait_until(lambda: is_back(job()), "asia's second life in a merge")
        wait_until(lambda: bool(job().statistics["mixture"]["routers"]), "a merge of routers of both islands")
        commands_know(newcomer, first, job())
        newcomer.type(f"atoll checkpoint {first}")
        wait_until(lambda: bool(client.checkpoints(first)), "a checkpoint")
        newcomer.type(f"atoll cancel {first}")
        ended = client.wait(first)
        tape = sound(newcomer, ended, OWN)
        assert ended.statistics["mixture"]["islands"].keys() == set(ISLANDS)
        (saved,) = client.checkpoints(first)

        sync = {**DOCUMENT["synchroniser"], "router_interval_steps": None}
        code, said = newcomer.attempt(f"atoll submit {file_of(newcomer, synchroniser=sync)} --resume {first}")
        assert code != 0
        assert "the routers are a fragment of their own where it is set" in said
        sync["router_interval_steps"] = OWN + 2  # each fragment goes on as it is, by another period
        budget = {"tokens": saved.tokens_trained + 100 * 4 * 64}
        newcomer.type(f"atoll submit {file_of(newcomer, synchroniser=sync, budget=budget)} --resume {first}")
        last = client.wait(client.jobs()[0].job)
        assert last.state == "completed"
        assert last.schedule["router_interval_steps"] == OWN + 2
        (resumed,) = (r.event for r in sound(newcomer, last, OWN + 2).records if isinstance(r.event, JobResumed))
        assert list(resumed.versions) == versions_at_cut(tape)
        assert last.statistics["mixture"]["router_parameter_count"] == OF_ROUTERS


def is_back(job: Job) -> bool:
    (asia,) = (one for one in job.islands if one.island == "asia")
    return asia.incarnation > 1 and asia.state == "training" and "first_merge" in parts_of_recovery(job)


def parts_of_recovery(job: Job) -> dict[str, float]:
    return next((one["parts"] for one in job.statistics["recoveries"] if one["complete"]), {})


def commands_know(newcomer: Newcomer, name: str, job: Job) -> None:
    """What a person on call asks about a running job."""
    said = newcomer.type(f"atoll status {name}")
    assert "of their travel apart" in said
    assert "experts: largest share" in said
    plan = shown(newcomer, f"plan --job {name} --line 1Gbps --mtbf-host 3d")
    parameters, step_s = plan["fleet"]["parameters"], plan["fleet"]["step_s"]
    assert plan["plans"][0]["settings"]["router_parameters"] == OF_ROUTERS
    bits = bits_of("int4") * ((parameters - OF_ROUTERS) / INTERVAL + OF_ROUTERS / OWN)
    assert plan["plans"][0]["line_use"] == pytest.approx(bits / step_s / 1e9)
    subject = shown(newcomer, f"doctor --lines --job {name}")["subject"]
    assert (subject["router_interval_steps"], subject["router_parameters"]) == (OWN, OF_ROUTERS)
    assert subject["parameters"] == parameters
    diagnosis = newcomer.type(f"atoll diagnose {name}")
    assert all(island in diagnosis for island in ISLANDS)
    code, said = newcomer.attempt(f"atoll set {name} interval={OWN}")
    assert code != 0
    assert f"above synchroniser.router_interval_steps ({OWN})" in said
    assert job.schedule["router_interval_steps"] == OWN


def versions_at_cut(tape: Tape) -> list[int]:
    """The versions in the only checkpoint: of all merges that had closed before it began."""
    (cut,) = (n for n, r in enumerate(tape.records) if any(isinstance(e, BeginCheckpoint) for e in r.effects))
    closed = Counter(e.fragment for r in tape.records[:cut] for e in r.effects if isinstance(e, MergeFragment))
    return [closed[FragmentId(p)] for p in range(FRAGMENTS)]


def sound(newcomer: Newcomer, job: Job, own: int) -> Tape:
    """Return the tape of an ended job, whose routers were merged every ``own`` steps, once all that is recorded fits it."""
    folder = newcomer.folder / "runs" / job.job
    tape = read_tape(folder / "tape.jsonl")
    policy = job_header(tape).policy
    goodput = Goodput(policy)
    assert replay(tape, (goodput,)).exact
    assert policy.schedule == (FRAGMENTS, INTERVAL, own)
    (seeded,) = (record.event for record in tape.records if isinstance(record.event, OuterStateSeeded))
    assert (seeded.router_parameter_count, fit(tape).plan.router_parameter_count) == (OF_ROUTERS, OF_ROUTERS)

    steps: dict[int, list[int]] = {p: [] for p in range(FRAGMENTS)}
    for merge in (e for record in tape.records for e in record.effects if isinstance(e, MergeFragment)):
        steps[merge.fragment].append(merge.step)
    gaps = {p: Counter(after - before for before, after in pairwise(of_one)) for p, of_one in steps.items()}
    assert gaps[FRAGMENTS - 1].most_common(1)[0][0] == own
    assert len(steps[FRAGMENTS - 1]) > 1.5 * max(len(steps[p]) for p in range(FRAGMENTS - 1))

    merged = [record.event for record in tape.records if isinstance(record.event, MergeCompleted)]
    apart = [event for event in merged if event.router_distance is not None]
    assert {event.fragment for event in apart} <= {FRAGMENTS - 1}, "routers are in no other fragment"
    report = json.loads((folder / "report.json").read_text())
    mixture = report["mixture"]
    assert sum(own["merges"] for own in mixture["routers"]) == len(apart)
    for figures in mixture["islands"].values():
        assert 1 / EXPERTS <= figures["expert_share_max"] <= 1
        assert figures["adoptions"] == 0 or 0 < figures["loss_after"] < 2 * figures["loss_before"]
    assert f"the last one, with the routers, every {own} steps" in (folder / "report.html").read_text()

    part, accounts = OF_ROUTERS / seeded.parameter_count, goodput.ledger.accounts.values()
    counted = [sum(of_island[p].merged for of_island in accounts) for p in range(FRAGMENTS)]
    assert job.goodput["tokens"]["merged"] == pytest.approx(
        (1 - part) * sum(counted[:-1]) / (FRAGMENTS - 1) + part * counted[-1]
    )
    return tape
