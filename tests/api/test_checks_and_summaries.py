"""Pure functions of the service: the fleet check, the code allow-list, summaries, and a job's live table."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from api.auth.permissions import OWN_PACKAGES, code_problems
from api.jobs.path_check import (
    fleet_problems,
    group_problems,
    sections_of,
    shard_problems,
    weights_problems,
    with_tokenizer,
)
from api.jobs.submission import Checks
from api.jobs.translate import job_of
from api.metrics.job import samples as samples_of
from api.storage.store import JobRow
from api.terminal.watch import line, lines_that_matter, render
from orchestrator.core.commands import Kill
from orchestrator.core.vocabulary import CommandId, IslandId
from orchestrator.errors import InvalidJobSpec, Problem
from orchestrator.specification.config import parse_job
from orchestrator.specification.sections import IslandsSection
from orchestrator.status import Helper, JobStatus, NodeGroupRecord, Shard
from orchestrator.system.plain import finite
from orchestrator.system.roots import AllowedRoots
from tests.api.clockwork import Clockwork
from tests.api.installation import Installation
from tests.harness.simulated_job import GROUPS, SimulatedJob, Taken


def test_a_mirrored_job_is_refused_by_a_service_without_a_store(tmp_path: Path) -> None:
    document = {
        "islands": [{"node_group": GROUPS[0]["name"]}],
        "budget": {"steps": 100},
        "trainer": "learners.synthetic:create",
        "synchroniser": {"quorum": 1, "durability": {"kind": "mirrored"}},
    }
    checks = Checks(Clockwork(tmp_path), ("learners",), AllowedRoots.only(tmp_path), lambda _: None)
    with pytest.raises(InvalidJobSpec) as refused:
        checks.accepted(document)
    assert list(refused.value.problems) == [
        Problem(
            "synchroniser.durability.kind",
            "is mirrored, but the service has no store for the job's log.",
            "Start the service with --store URL, or use sync.",
        )
    ]
    (tmp_path / "store").touch()
    assert checks.accepted(document).synchroniser.durability.kind == "mirrored"


def test_a_fleet_check_names_what_no_group_can_ever_give() -> None:
    sections = [
        IslandsSection(node_group="us-east", count=3, name="first"),
        IslandsSection(node_group="us-east", cpus=1.5, name="second"),
        IslandsSection(node_group="asia", accelerator="gpu", accelerators=1),
        IslandsSection(node_group="europe", cpus=4),
        IslandsSection(node_group="moon"),
    ]
    names = {"islands": [section.model_dump() for section in sections], "evaluation": {"node_group": "us_east"}}
    problems = (*fleet_problems(sections, GROUPS), *group_problems(names, GROUPS))
    told = {problem.path: problem for problem in problems}
    assert told.keys() == {"islands.cpus", "islands.2.accelerators", "islands.4.node_group", "evaluation.node_group"}
    assert "4.5 cpus" in told["islands.cpus"].message
    assert "has 4 in total" in told["islands.cpus"].message
    assert "asia, europe, us-east, us-west" in told["islands.4.node_group"].message
    assert "Use us-east, if you mean that" in told["evaluation.node_group"].remedy
    assert "which has none" in told["islands.2.accelerators"].message
    assert sections_of({"islands": "many"}) == {}
    assert sections_of({"islands": [{"node_group": "a", "count": 0}, {"node_group": "b"}]}).keys() == {1}


def test_groups_of_the_synchroniser_and_its_shards_exist_and_shards_have_a_node() -> None:
    synchroniser = {"node_groups": ["us-east", "moon"], "shard_groups": ["asia", "us_east"]}
    problems = {problem.path: problem.remedy for problem in group_problems({"synchroniser": synchroniser}, GROUPS)}
    assert problems.keys() == {"synchroniser.node_groups.1", "synchroniser.shard_groups.1"}
    assert "Use us-east, if you mean that" in problems["synchroniser.shard_groups.1"]
    assert group_problems({"synchroniser": {"shard_groups": "asia"}}, GROUPS) == ()
    empty = [NodeGroupRecord(**{**group, "nodes": 0}) if group["name"] == "asia" else group for group in GROUPS]
    assert shard_problems(("us-east", "asia"), GROUPS) == ()
    (problem,) = shard_problems(("us-east", "asia"), empty)
    assert (problem.path, "has no node now" in problem.message) == ("synchroniser.shard_groups.1", True)
    assert "atoll join --group asia" in problem.remedy


def test_an_island_must_fit_on_one_node_of_its_group() -> None:
    group = NodeGroupRecord(name="pair", region="here", nodes=2, cpus=8.0, cpus_free=8.0, accelerators=2)
    whole = IslandsSection(node_group="pair", count=2, cpus=4, accelerator="gpu", accelerators=1)
    assert fleet_problems([whole], [group]) == ()
    large = IslandsSection(node_group="pair", cpus=5, accelerator="gpu", accelerators=2)
    told = {problem.path: problem.message for problem in fleet_problems([large], [group])}
    assert told.keys() == {"islands.0.cpus", "islands.0.accelerators"}
    assert told["islands.0.cpus"] == "asks for 5 cpus on one node of 'pair', whose nodes have 4 each."


def test_nodes_that_do_not_answer_may_be_back_and_forbid_no_job() -> None:
    large = IslandsSection(node_group="pair", cpus=5)
    pair = IslandsSection(node_group="pair", cpus=4, count=2)
    facts = {"name": "pair", "region": "here", "accelerators": 0, "builds": []}
    half = NodeGroupRecord(**facts, nodes=1, nodes_down=1, cpus=4.0, cpus_free=4.0)
    assert fleet_problems([pair], [half]) == ()
    assert [problem.path for problem in fleet_problems([large], [half])] == ["islands.0.cpus"]
    down = NodeGroupRecord(**facts, nodes=0, nodes_down=2, cpus=0.0, cpus_free=0.0)
    assert fleet_problems([large], [down]) == (), "what its nodes have is not known"


def test_each_host_of_an_island_is_a_node_of_its_group() -> None:
    group = NodeGroupRecord(name="pair", region="here", nodes=2, cpus=8.0, cpus_free=8.0, accelerators=8)
    hosts = {"node_group": "pair", "accelerator": "gpu", "accelerators": 4}
    assert fleet_problems([IslandsSection(**hosts, hosts=2)], [group]) == ()
    (few,) = fleet_problems([IslandsSection(**hosts, hosts=3)], [group])
    assert (few.path, "has 2 nodes" in few.message) == ("islands.0.hosts", True)
    (many,) = fleet_problems([IslandsSection(**hosts, hosts=2, count=2)], [group])
    assert (many.path, "asks for 16 accelerators" in many.message) == ("islands.0.accelerators", True)


@pytest.mark.parametrize(
    ("factory", "taken"),
    [
        ("learners.model:build", True),
        ("ours:make", True),
        ("ours.deep.down:make", True),
        ("theirs.vision:make", True),
        ("theirs:make", False),
        ("theirs.visionary:make", False),
        ("oursish:make", False),
        ("os:system", False),
        (":make", False),
        ("no colon", False),
    ],
)
def test_code_is_taken_from_packages_on_the_list_and_no_other(factory: str, taken: bool) -> None:
    told = code_problems({"model": {"factory": factory}}, ("learners", "ours", "theirs.vision"))
    assert [problem.path for problem in told] == ([] if taken else ["model.factory"])
    assert taken or "--allow" in told[0].remedy
    inner = {"training": {"inner_optimizer": {"factory": factory}}}
    told = code_problems(inner, ("learners", "ours", "theirs.vision"))
    assert [problem.path for problem in told] == ([] if taken else ["training.inner_optimizer.factory"])
    told = code_problems({"trainer": factory}, ("learners", "ours", "theirs.vision"))
    assert [problem.path for problem in told] == ([] if taken else ["trainer"])
    told = code_problems({"trainer": {"factory": factory}}, ("learners", "ours", "theirs.vision"))
    assert [problem.path for problem in told] == ([] if taken else ["trainer.factory"])


def test_a_torch_trainer_s_function_is_judged_and_its_folder_is_no_code() -> None:
    for model, paths in (("theirs.model:build", ["trainer.model"]), ("ours.model:build", []), ("/models/gpt2", [])):
        document = {"trainer": {"kind": "torch", "model": model}}
        assert [problem.path for problem in code_problems(document, ("ours",))] == paths
    optimizer = {"training": {"inner_optimizer": {"factory": "torch.optim:NAdam"}}}
    assert code_problems(optimizer, OWN_PACKAGES) == ()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": {"architectures": ["GPT2LMHeadModel"]}, "model.safetensors": {}}, ""),
        ({}, "has no readable config.json"),
        (
            {"adapter_config.json": {}, "adapter_model.safetensors": {}},
            "has adapters (adapter_config.json) and no model",
        ),
        ({"config.json": {"architectures": ["BertForSequenceClassification"]}}, "which has no causal head"),
        ({"config.json": {"quantization_config": {"bits": 4}}}, "is quantised, but parameters that train are merged"),
        ({"config.json": {}, "pytorch_model.bin": {}}, "has only pytorch_model.bin, and loading a pickle runs code"),
    ],
)
def test_a_folder_that_no_torch_island_could_train_is_refused_at_submission(
    tmp_path: Path, files: dict[str, object], said: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    trainer = {"kind": "torch", "model": str(folder)}
    spec = parse_job({"islands": [{"node_group": "a"}], "budget": {"steps": 1}, "trainer": trainer})
    problems = weights_problems(spec, AllowedRoots.only(tmp_path))
    absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
    assert [problem.message for problem in problems if problem.path == "trainer.kind"] == [
        f"is torch, but {name} is not installed beside the service, which creates version 0." for name in absent
    ]
    of_folder = [problem.message for problem in problems if problem.path == "trainer.model"]
    assert len(of_folder) == bool(said)
    assert said in "".join(of_folder)


@pytest.mark.parametrize(
    ("config", "settings", "model_size"),
    [
        ({"vocab_size": 400}, {}, None),
        ({"vocab_size": 256}, {}, None),
        ({}, {}, None),
        ({"vocab_size": 255}, {}, 255),
        ({"vocab_size": 400}, {"vocab_size": 200}, 200),
        ({"model_type": "gemma3", "vocab_size": 400, "text_config": {"vocab_size": 100}}, {}, 100),
    ],
)
def test_a_tokenizer_is_compared_with_the_vocabulary_of_the_folder_that_torch_trains(
    tmp_path: Path, config: dict[str, object], settings: dict[str, object], model_size: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    trainer = {"kind": "torch", "model": str(tmp_path), "settings": settings}
    spec = parse_job({"islands": [{"node_group": "a"}], "budget": {"steps": 1}, "trainer": trainer})
    assert spec.vocabulary_size is None
    if model_size is None:
        with_tokenizer(spec, AllowedRoots.only(tmp_path))
        return
    with pytest.raises(InvalidJobSpec) as refused:
        with_tokenizer(spec, AllowedRoots.only(tmp_path))
    (problem,) = refused.value.problems
    assert problem.path == "data.tokenizer"
    assert problem.message.endswith(f"with 256 tokens, but the model has only {model_size}.")


def test_a_specification_that_names_no_code_or_nonsense_is_not_judged_by_it() -> None:
    for document in (
        {},
        {"model": {}},
        {"model": "nano"},
        {"model": {"factory": None}},
        {"model": {"factory": 3}},
        {"trainer": 3},
        {"training": {"inner_optimizer": "muon"}},
    ):
        assert code_problems(document, ("learners",)) == ()


def job_row(job: str) -> JobRow:
    values = {"name": "n", "spec": {}, "run_dir": "/r", "caller": "c", "submitted_at": 1.0, "priority": 0}
    return JobRow(job=job, state="running", **values)


def picture(tmp_path: Path, until: float, commands: tuple[Taken, ...] = ()):
    """A job of the clockwork world as the API would answer it."""
    document = Installation(tmp_path).spec(steps=100)
    spec = parse_job(document)
    record = SimulatedJob(spec, list(commands), until).status("trial-x", 1000.0, until)
    row = job_row("trial-x")
    row.spec = document
    return job_of(row, JobStatus.model_validate(record), [], spec.token_budget, report=False)


def test_the_live_picture_shows_every_island_and_the_job(tmp_path: Path) -> None:
    kill = Taken(1.0, CommandId("k"), "me", Kill(IslandId("asia"), restart=False))
    job = picture(tmp_path, 2.0, (kill,))
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(render(job, note="a remark"))
    text = console.export_text()
    for word in (
        "trial-x",
        "us-east",
        "us-west",
        "europe",
        "asia",
        "training",
        "stopped",
        "steps/s 20.0",
        "goodput",
        "a remark",
    ):
        assert word in text
    assert f"{job.tokens_trained:,} of {job.token_budget:,} tokens" in text
    assert f"version {job.global_version}" in line(job)
    assert "asia stopped" in line(job)
    assert "us-east training 20.0/s" in line(job)


def test_an_island_that_hangs_and_a_helper_that_is_away_are_in_the_picture_with_the_reason(tmp_path: Path) -> None:
    record = SimulatedJob(parse_job(Installation(tmp_path).spec(steps=100)), [], 2.0).status("trial-x", 1000.0, 2.0)
    hung = record["view"]["islands"][3]
    hung |= {"overdue_s": 40.0, "reason": "it hangs: 40 s where 0.05 s is usual"}
    away = "its process died: killed; it is restarted in 4 s (death 4 in a row)"
    well = Helper(name="evaluator", condition="running", reason="", restarts=0)
    record["helpers"] = [Helper(name="controller", condition="dead", reason=away, restarts=3), well]
    shard = Shard(shard=0, node="a", fragments=[0, 2], byte_count=5_000_000, condition="running", reason="")
    leaving = shard.model_copy(update={"shard": 1, "condition": "moving", "reason": "its node is about to go"})
    record["shards"] = [shard, leaving]
    job = job_of(job_row("trial-x"), JobStatus.model_validate(record), [], 1000, report=False)
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    console.print(render(job))
    text = console.export_text()
    assert "it hangs: 40 s where 0.05 s is usual" in text
    assert f"controller: {away}" in text
    assert f"controller: {away}" in line(job)
    assert "shard 0 on a: running, fragments 0, 2, 5.0 MB" in text
    assert "shard 1 on a: moving, fragments 0, 2, 5.0 MB; its node is about to go" in text
    assert job.model_dump(mode="json")["shards"][1]["condition"] == "moving"
    assert "shard 1 on node a: its node is about to go" in job.troubles
    status = JobStatus.model_validate(record)
    spec = parse_job(Installation(tmp_path).spec(steps=100)).model_dump(mode="json")
    samples = {(one.family, one.labels): one.value for one in samples_of(status, spec)}
    assert samples["atoll_shard_up", ("trial-x", "0", "a")] == 1
    assert samples["atoll_shard_up", ("trial-x", "1", "a")] == 0
    assert samples["atoll_shard_bytes", ("trial-x", "1", "a")] == 5_000_000
    assert "evaluator" not in text


def test_a_flagged_island_says_in_the_picture_what_is_wrong_though_it_trains(tmp_path: Path) -> None:
    record = SimulatedJob(parse_job(Installation(tmp_path).spec(steps=100)), [], 2.0).status("trial-x", 1000.0, 2.0)
    flagged = record["view"]["islands"][3]
    flagged |= {"flag": "corrupt contribution to fragment 2: bytes changed on the way", "quarantines": 1}
    job = job_of(job_row("trial-x"), JobStatus.model_validate(record), [], 1000, report=False)
    assert (job.islands[3].flag, job.islands[3].quarantines) == (flagged["flag"], 1)
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    console.print(render(job))
    assert "bytes changed on the way" in console.export_text()
    del flagged["flag"], flagged["quarantines"]  # as an earlier build left it
    assert job_of(job_row("trial-x"), JobStatus.model_validate(record), [], 1000, report=False).islands[3].flag == ""


def test_a_job_before_its_first_event_and_without_losses_can_be_drawn(tmp_path: Path) -> None:
    job = picture(tmp_path, -1.0)
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    console.print(render(job))
    assert job.loss is None
    assert "loss –" in line(job)


def test_what_json_cannot_say_becomes_null() -> None:
    told = finite({"a": math.nan, 1: [math.inf, 2.5], "b": ("x", None, 3)})
    assert told == {"a": None, "1": [None, 2.5], "b": ["x", None, 3]}


@pytest.mark.parametrize("recoveries", [[], [{"island": "asia"}]])
def test_three_lines_also_for_a_job_without_recovery(recoveries: list) -> None:
    report = {
        "loss_final": 1.75, "loss_unigram": 3.1, "tokens_trained": 1000, "tokens_merged": 900, "goodput_ratio": 0.9,
        "island_seconds": {"total": 100.0}, "badput_seconds": {"late": 6.0, "lost_with_the_island": 4.0},
        "recovery_s": None, "recoveries": recoveries,
    }  # fmt: skip
    loss, goodput, recovery = lines_that_matter(report)
    assert "1.750" in loss
    assert "3.100" in loss
    assert "90.0 %" in goodput
    assert "late 6.0 %" in goodput
    assert ("asia was lost" if recoveries else "no island was lost") in recovery
    assert len(lines_that_matter({})) == 3
