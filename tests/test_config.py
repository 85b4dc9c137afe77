"""A job specification: every problem at once, each with its remedy; what reaches the core."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from orchestrator.core.vocabulary import HealthPolicy
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.models import trainable
from orchestrator.simulation import spec as simulation
from orchestrator.specification.bounds import Section
from orchestrator.specification.config import JobSpec, parse_job, read_job_document
from orchestrator.specification.training_sections import routers_of
from orchestrator.status import Facts, JobStatus
from tests.documents import DOCS, blocks

SMALLEST = {"islands": [{"node_group": "us-east"}], "budget": {"steps": 10}}
CONFIGS = sorted((Path(__file__).parent.parent / "deploy/configs").glob("*.yaml"))


def problems(document: dict) -> dict[str, str]:
    with pytest.raises(InvalidJobSpec) as caught:
        parse_job(document)
    return {problem.path: str(problem) for problem in caught.value.problems}


def test_every_problem_is_told_at_once_with_its_remedy() -> None:
    found = problems(
        {
            "nmae": "x",
            "islands": [{"node_group": "a"}, {"node_group": "a"}],
            "synchroniser": {"quorum": 5},
            "training": {"batch_size": 0},
            "budget": {},
            "data": {"source": "files"},
        }
    )
    assert set(found) == {"nmae", "training.batch_size", "budget", "islands", "synchroniser.quorum", "data.files"}
    assert "Did you mean name?" in found["nmae"]
    assert "at most 2" in found["synchroniser.quorum"]


@pytest.mark.parametrize(
    ("section", "value", "path"),
    [
        ("synchroniser", {"overlap_steps": 24}, "synchroniser.overlap_steps"),
        ("synchroniser", {"staleness_max": 1, "adoption": "rebase"}, "synchroniser.staleness_max"),
        ("islands", [{"node_group": "a", "accelerators": 2}], "islands.0.accelerators"),
        ("budget", {"steps": 1, "tokens": 1}, "budget"),
        ("islands", [{"node_group": "a", "count": 2}, {"node_group": "b", "name": "a-0"}], "islands"),
        ("name", "Not A Name", "name"),
        ("evaluation", {"on": "node_group"}, "evaluation.node_group"),
        ("evaluation", {"node_group": "a"}, "evaluation.node_group"),
        ("evaluation", {"accelerators": 1, "accelerator": "gpu"}, "evaluation.accelerators"),
        ("evaluation", {"on": "node_group", "node_group": "a", "accelerators": 1}, "evaluation.accelerators"),
    ],
)
def test_rules_between_fields(section: str, value: object, path: str) -> None:
    assert path in problems({**SMALLEST, section: value})


def test_islands_measure_only_where_they_keep_what_was_published() -> None:
    found = problems({**SMALLEST, "evaluation": {"on": "islands"}, "synchroniser": {"adoption": "replace"}})
    assert "adoption 'replace'" in found["evaluation.on"]


@pytest.mark.parametrize(
    ("shards", "evaluation", "island", "adoption", "on"),
    [
        (1, {}, {}, "rebase", "head"),
        (2, {}, {}, "rebase", "islands"),
        (2, {"sequences": 8}, {}, "rebase", "islands"),
        (2, {"on": "head"}, {}, "rebase", "head"),
        (2, {}, {"hosts": 2, "accelerator": "gpu", "accelerators": 1}, "rebase", "head"),
        (2, {}, {}, "replace", "head"),
    ],
)
def test_islands_measure_what_several_shards_share(
    shards: int, evaluation: dict, island: dict, adoption: str, on: str
) -> None:
    document = SMALLEST | {
        "islands": [{"node_group": "a", **island}],
        "evaluation": evaluation,
        "synchroniser": {"shards": shards, "adoption": adoption},
    }
    spec = parse_job(document)
    assert (spec.evaluation.on, spec.evaluation.sequences) == (on, evaluation.get("sequences", 128))
    assert parse_job(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("section", "path", "words"),
    [
        ({"shards": 9, "fragments": 8}, "synchroniser.shards", "at most 8"),
        ({"shard_groups": ["a"]}, "synchroniser.shard_groups", "Raise synchroniser.shards"),
        ({"shards": 2, "shard_groups": ["a", "b", "c"]}, "synchroniser.shard_groups", "only 2 shards to place"),
    ],
)
def test_shards_that_could_not_share_the_fragments_are_refused(
    section: dict[str, object], path: str, words: str
) -> None:
    assert words in problems({**SMALLEST, "synchroniser": section})[path]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "the job trains no routers"),
        ({"trainer": {"kind": "synthetic"}}, "the job trains no routers"),
        ({"model": {"preset": "moe-20m"}, "trainable": {"lora": {"targets": ["all-linear"]}}}, "trains no routers"),
        ({"model": {"preset": "moe-20m"}, "synchroniser": {"router_interval_steps": 4}}, "above overlap_steps (4)"),
        ({"model": {"preset": "moe-20m"}, "synchroniser": {"router_interval_steps": 24}}, "below interval_steps (24)"),
        (
            {"model": {"preset": "moe-20m"}, "synchroniser": {"router_interval_steps": 8, "fragments": 1}},
            "Raise fragments to 2",
        ),
        (
            {"model": {"preset": "moe-20m"}, "trainable": {"lora": {"rank": 4, "targets": ["router"]}}},
            "is 8, but the job trains nothing but routers. Leave it out",
        ),
    ],
)
def test_routers_that_cannot_merge_more_often_are_refused(changes: dict[str, Any], words: str) -> None:
    document = {**SMALLEST, "synchroniser": {"router_interval_steps": 8}, **changes}
    assert words in problems(document)["synchroniser.router_interval_steps"]


@pytest.mark.parametrize("targets", [None, ["router", "query"]])
def test_a_mixtures_routers_may_merge_more_often(targets: list[str] | None) -> None:
    trainable = {} if targets is None else {"trainable": {"lora": {"rank": 4, "targets": targets}}}
    document = {**SMALLEST, "model": {"preset": "moe-20m"}, "synchroniser": {"router_interval_steps": 8}, **trainable}
    spec = parse_job(document)
    assert spec.policy().schedule == spec.synchroniser.schedule == (8, 24, 8)
    assert spec.trained_shapes is not None
    of_routers = routers_of(spec.trained_shapes)
    assert set() < of_routers.keys() < spec.trained_shapes.keys()
    assert all("router" in name for name in of_routers)


def test_how_long_an_evaluation_may_take_is_by_who_stands_still_for_it() -> None:
    def ratio(**section: object) -> float | None:
        return parse_job({**SMALLEST, "evaluation": section}).policy().evaluation.time_ratio_max

    assert (ratio(), ratio(on="islands"), ratio(on="islands", time_ratio_max=0.5)) == (1.0, 0.02, 0.5)


def test_a_budget_in_steps_is_one_in_tokens() -> None:
    spec = parse_job({**SMALLEST, "islands": [{"node_group": "a", "count": 3}]})
    assert spec.token_budget == 10 * 3 * spec.tokens_per_step
    assert spec.horizon_steps == 10
    assert [plan.island for plan in spec.policy().islands] == ["a-0", "a-1", "a-2"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_shipped_configurations_are_valid(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    if "fleet" in document:
        simulation.parse(document)
    elif "node_groups" not in document:
        parse_job(document.get("job", document))


def test_text_files_are_relative_to_the_specification(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump({**SMALLEST, "data": {"source": "files", "files": ["a.txt", "/b.txt"]}}))
    assert read_job_document(spec)["data"]["files"] == [str(tmp_path.resolve() / "a.txt"), "/b.txt"]


def test_a_file_that_is_no_mapping_is_refused_without_a_traceback(tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("- a list")
    with pytest.raises(ConfigurationError, match=r"demo\.yaml"):
        read_job_document(spec)


def test_islands_up_to_count_max_have_names_but_are_not_wanted_at_first() -> None:
    spec = parse_job({**SMALLEST, "islands": [{"node_group": "a", "count_max": 3}, {"node_group": "b"}]})
    assert [plan.island for plan in spec.policy().islands] == ["a-0", "b"]
    assert [plan.island for plan in spec.policy(slots=True).islands] == ["a-0", "a-1", "a-2", "b"]
    assert (spec.island_count, spec.wanted_counts()) == (2, {"a": 1})


def test_an_entry_takes_its_own_batch_in_its_own_parts() -> None:
    islands = [{"node_group": "a", "count": 2}, {"node_group": "b", "batch_size": 24, "accumulation": 3}]
    spec = parse_job({**SMALLEST, "training": {"batch_size": 8, "accumulation": 2}, "islands": islands})
    own = [spec.island_document(section)["island"] for section in spec.islands]
    assert [(entry["batch_size"], entry["accumulation"]) for entry in own] == [(8, 2), (24, 3)]
    assert spec.tokens_per_schedule_step == (2 * 8 + 24) * spec.data.sequence_length


def test_a_batch_that_cannot_be_cut_into_its_parts_is_refused_with_what_can() -> None:
    islands = [{"node_group": "a"}, {"node_group": "b", "batch_size": 9}, {"node_group": "c", "accumulation": 2}]
    found = problems({**SMALLEST, "training": {"batch_size": 12, "accumulation": 5}, "islands": islands})
    assert set(found) == {"training.accumulation", "islands.1.accumulation"}
    assert "5, which does not divide the batch of 12" in found["training.accumulation"]
    assert "Use 4," in found["training.accumulation"]
    assert "batch of 9" in found["islands.1.accumulation"]


def test_tokens_per_step_are_shared_by_all_islands_as_their_batches() -> None:
    document = {**SMALLEST, "islands": [{"node_group": "a", "count": 3}, {"node_group": "b"}], "budget": {"steps": 10}}
    document |= {"data": {"sequence_length": 64}, "training": {"tokens_per_step": 64 * 4 * 6}}
    job = parse_job(document)
    assert (job.training.batch_size, job.tokens_per_schedule_step, job.token_budget) == (6, 64 * 24, 64 * 240)
    assert parse_job(job.model_dump(mode="json")) == job
    islands = [{"node_group": "a", "count": 4, "batch_size": 5}]
    assert (
        "is 5, but training.tokens_per_step gives each island 6"
        in problems({**document, "islands": islands}).popitem()[1]
    )
    uneven = problems({**document, "training": {"tokens_per_step": 1000}})["training.tokens_per_step"]
    assert "is 1,000, which 4 islands cannot share evenly in sequences of 64 tokens" in uneven
    assert "Set it to a multiple of 256, such as 768 or 1,024" in uneven
    both = {**document, "training": {"tokens_per_step": 64 * 24, "batch_size": 8}}
    assert set(problems(both)) == {"training.batch_size"}


@pytest.mark.parametrize(
    ("training", "path", "words"),
    [
        (
            {"batch_ramp": {"parts": 4, "tokens": 10**6}},
            "training.batch_ramp.tokens",
            "before its batch is whole. Lower it",
        ),
        ({"batch_ramp": {"parts": 3, "tokens": 9}}, "training.batch_ramp.parts", "(the nearest are 6 and 9)"),
        ({"batch_ramp": {"parts": 4, "tokens": 9}, "accumulation": 4}, "training.batch_ramp.parts", "multiple of 16"),
        ({"batch_ramp": {"parts": 1, "tokens": 9}}, "training.batch_ramp.parts", "at least 2"),
        ({"batch_ramp": {"parts": 4}}, "training.batch_ramp.tokens", "missing"),
    ],
)
def test_a_batch_ramp_that_cannot_be_is_refused(training: dict[str, Any], path: str, words: str) -> None:
    document = {**SMALLEST, "budget": {"tokens": 10**5}, "training": training}
    assert words in problems(document)[path]


def test_a_batch_ramp_is_of_the_built_in_trainer() -> None:
    document = {**SMALLEST, "budget": {"tokens": 10**5}, "training": {"batch_ramp": {"parts": 2, "tokens": 9}}}
    assert "always trains whole batches" in problems({**document, "trainer": "a.b:c"})["training.batch_ramp"]


@pytest.mark.parametrize(
    ("outer", "field", "words"),
    [
        ({"kind": "adamm"}, "kind", "Did you mean adam?"),
        ({"kind": "lion"}, "kind", "must be one of nesterov, momentum, sgd, adam"),
        ({"kind": "adam", "beta1": 1.0}, "beta1", "must be below 1"),
        ({"kind": "adam", "beta2": -0.5}, "beta2", "must be at least 0"),
        ({"kind": "adam", "epsilon": 0.0}, "epsilon", "must be at least 1e-15"),
        ({"clip_norm": 0.0}, "clip_norm", "is 0.0, but must be at least 1e-09"),
        ({"clip_norm": -1.0}, "clip_norm", "is -1.0, but must be at least 1e-09"),
        ({"b1": 0.9}, "b1", "Did you mean beta1?"),
    ],
)
def test_an_outer_optimizer_that_makes_no_sense_is_refused(outer: dict[str, Any], field: str, words: str) -> None:
    found = problems({**SMALLEST, "synchroniser": {"outer_optimizer": outer}})
    assert set(found) == {f"synchroniser.outer_optimizer.{field}"}
    assert words in found[f"synchroniser.outer_optimizer.{field}"]


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"kind": "sophia"}, "training.inner_optimizer.kind"),
        ({"kind": "muon", "factory": "a.b:c"}, "training.inner_optimizer"),
        ({"groups": [{"lr_ratio": 2.0}]}, "training.inner_optimizer.groups.0"),
        ({"groups": [{"role": "vector", "lr_ratio": -1.0}]}, "training.inner_optimizer.groups.0.lr_ratio"),
        ({"clip_norm": 0.0}, "training.inner_optimizer.clip_norm"),
    ],
)
def test_an_inner_optimizer_that_makes_no_sense_is_refused(section: dict[str, Any], path: str) -> None:
    assert set(problems({**SMALLEST, "training": {"inner_optimizer": section}})) == {path}


def test_an_entrys_batch_counts_in_what_is_too_large() -> None:
    islands = [{"node_group": "a", "batch_size": 10**6}]
    found = problems({**SMALLEST, "islands": islands, "data": {"sequence_length": 2**20}})
    assert "islands.0.batch_size" in found
    found = problems({**SMALLEST, "islands": islands, "budget": {"steps": 10**12}})
    assert "budget.steps" in found


def test_a_count_max_that_makes_no_sense_is_refused() -> None:
    below = [{"node_group": "a", "count": 3, "count_max": 2}]
    unclear = [{"node_group": "a", "count_max": 2}, {"node_group": "a", "name": "x"}]
    for islands in (below, unclear):
        assert set(problems({**SMALLEST, "islands": islands})) == {"islands.0.count_max"}


def test_what_contributions_must_be_like_reaches_the_core() -> None:
    document = {"islands": [{"node_group": "a"}], "budget": {"steps": 1}}
    assert parse_job(document).policy().health == HealthPolicy(100.0, 3, 3)
    health = {"displacement_ratio_max": None, "strikes_max": 1, "quarantines_max": 0}
    assert parse_job({**document, "health": health}).policy().health == HealthPolicy(None, 1, 0)
    with pytest.raises(InvalidJobSpec, match="displacement_ratio_max"):
        parse_job({**document, "health": {"displacement_ratio_max": 1.0}})


def test_standbys_have_names_of_their_own_and_no_shard() -> None:
    document = {
        "islands": [
            {"node_group": "a", "count": 2, "standby": 2},
            {"node_group": "b", "standby": 1, "accelerators": 0},
        ],
        "budget": {"steps": 10},
    }
    spec = parse_job(document)
    assert list(spec.standby_sections()) == ["a-standby-0", "a-standby-1", "b-standby"]
    assert spec.island_count == 3
    assert [plan.node_group for plan in spec.policy(standbys=True).standbys] == ["a", "a", "b"]
    assert spec.policy().standbys == ()
    document["islands"].append({"node_group": "b", "name": "b-standby"})
    with pytest.raises(InvalidJobSpec, match="use the name 'b-standby' twice"):
        parse_job(document)


MOE = {"preset": "moe-20m"}
GPUS = {"node_group": "a", "accelerator": "gpu", "accelerators": 4}
OF_SIXES = dict.fromkeys(("width", "layer_count", "head_count", "key_value_head_count", "head_size", "hidden_size"), 6)


@pytest.mark.parametrize(
    ("model", "island", "path", "said"),
    [
        (
            {"preset": "llama3-20m"},
            {"mesh": {"tensor": 3}},
            "mesh.tensor",
            "is 3, which does not divide embed .* divisor of",
        ),
        (
            {"preset": "nano"},
            {"mesh": {"fsdp": 5}},
            "mesh.fsdp",
            "is 5, which divides none of the remaining dimensions of",
        ),
        ({"preset": "nano"}, {"mesh": {"expert": 2}}, "mesh.expert", "splits nothing: .* named experts"),
        (
            {"preset": "nano", "vocabulary_size": 257},
            {"mesh": {"tensor": 5}},
            "mesh.tensor",
            "Leave it out: nothing divides",
        ),
        (MOE, {"mesh": {"expert": 5}}, "mesh.expert", r"does not divide layers.experts.gate \(8 of"),
        ({"preset": "nano", "vocabulary_size": 257}, {"mesh": {"tensor": 2}}, "mesh.tensor", r"embed \(257 of"),
        (MOE, {**GPUS, "hosts": 3, "mesh": {"fsdp": 2, "data": 6}, "batch_size": 12}, None, ""),
        (
            {"decoder": OF_SIXES},
            {**GPUS, "hosts": 3, "mesh": {"fsdp": 6}, "batch_size": 12},
            "mesh",
            "more than one block. Choose",
        ),
        (MOE, {**GPUS, "hosts": 2, "mesh": {"expert": 4, "fsdp": 2}}, None, ""),
        ({"factory": "a.b:c"}, {"mesh": {"tensor": 3}}, None, ""),
    ],
)
def test_a_mesh_that_does_not_divide_a_built_in_model_is_refused_before_the_job_is_taken(
    model: dict, island: dict, path: str | None, said: str
) -> None:
    document = SMALLEST | {
        "model": model,
        "training": {"batch_size": 30},
        "islands": [{"node_group": "b"}, {"node_group": "a", **island}],
    }
    if path is None:
        parse_job(document)
        return
    found = problems(document)
    assert list(found) == [f"islands.1.{path}"]
    assert re.search(said, found[f"islands.1.{path}"])


@pytest.mark.parametrize(
    ("trainer", "island", "said"),
    [
        ({}, {}, "a process that trains in JAX uses all accelerators"),
        ({"trainer": "learners.synthetic:create"}, {}, None),
        ({"trainer": "mine.trainers:create"}, GPUS, None),
        ({"trainer": "mine.trainers:create"}, GPUS | {"accelerators": 3}, "does not divide the 3 accelerators"),
        ({"trainer": "mine.trainers:create"}, GPUS | {"accelerator": "tpu"}, "all chips of a TPU host"),
    ],
)
def test_a_host_has_several_processes_only_if_they_can_share_its_accelerators(
    trainer: dict, island: dict, said: str | None
) -> None:
    document = SMALLEST | trainer | {"islands": [{"node_group": "a", "hosts": 3, "processes_per_host": 2, **island}]}
    if said is None:
        assert parse_job(document).islands[0].process_count == 6
        return
    found = problems(document)
    assert list(found) == ["islands.0.processes_per_host"]
    assert said in found["islands.0.processes_per_host"]


@pytest.mark.parametrize("name", ["a.JSON.GZ", "a.ndjson.zstd", "a.txt.zst", "a.arrayrecord", "a.pq", "README"])
def test_files_and_streamed_sources_take_files_of_the_same_names(name: str) -> None:
    parse_job(SMALLEST | {"data": {"source": "files", "files": [f"/{name}"]}})
    parse_job(SMALLEST | {"data": {"source": "streamed", "sources": [{"name": "a", "files": [f"/{name}"]}]}})


def test_what_is_no_text_by_its_name_is_refused() -> None:
    sources = [{"name": "a", "files": ["/*.parquet"], "held_out": ["/b.jsonl.xz"]}]
    found = problems(SMALLEST | {"data": {"source": "streamed", "sources": sources}})
    assert list(found) == ["data.sources.0.held_out.0"]
    assert "which is not supported" in found["data.sources.0.held_out.0"]


@pytest.mark.parametrize("base", [Section, Facts])
def test_defaults_that_are_made_without_a_validator_are_valid(base: type[BaseModel]) -> None:
    assert JobSpec in Section.__subclasses__()
    assert issubclass(JobStatus, Facts)
    kinds = base.__subclasses__()
    while inner := [kind for one in kinds for kind in one.__subclasses__() if kind not in kinds]:
        kinds += inner
    defaults = [field.default for kind in kinds for field in kind.model_fields.values()]
    made = [default for default in defaults if isinstance(default, BaseModel)]
    assert made
    assert made == [type(default).model_validate(default.model_dump(exclude_unset=True)) for default in made]


QWEN = {"model": {"preset": "qwen3-20m"}}


@pytest.mark.parametrize(
    ("part", "path", "words"),
    [
        ({"lora": {"targets": ["q_prj"]}}, "trainable.lora.targets.0", "Did you mean q_proj?"),
        (
            {"lora": {"targets": ["zzz"]}},
            "trainable.lora.targets.0",
            "Its matrices are query, key, value, output, gate",
        ),
        ({"lora": {"targets": ["embed"]}}, "trainable.lora.targets.0", "has no such matrix"),
        ({"lora": {"rank": 200}}, "trainable.lora.rank", "384 × 128, of rank 128 at most. Lower it to at most 128"),
        ({"lora": {"rank": 0}}, "trainable.lora.rank", "at least 1"),
        ({"lora": {"alpha": 0.0}}, "trainable.lora.alpha", "above 0"),
        ({"lora": {"target_modules": ["query"]}}, "trainable.lora.target_modules", "Did you mean targets?"),
        ({"lora": {"targets": []}}, "trainable.lora.targets", "at least 1"),
        ({"only": ["*.nrm"]}, "trainable.only.0", "The model's tensors are embed"),
        ({"only": ["*"]}, "trainable.only", "Leave trainable out"),
        ({}, "trainable", "exactly one of lora and only"),
        ({"lora": {}, "only": ["*norm"]}, "trainable", "exactly one of lora and only"),
    ],
)
def test_a_part_to_train_that_the_model_does_not_have_is_refused_with_what_it_has(
    part: dict[str, Any], path: str, words: str
) -> None:
    found = problems({**SMALLEST, **QWEN, "trainable": part})
    assert list(found) == [path]
    assert words in found[path]


def test_a_trainer_that_would_ignore_trainable_is_refused() -> None:
    found = problems({**SMALLEST, "trainer": "learners.synthetic:create", "trainable": {"lora": {}}})
    assert "learners.synthetic:create ignores it" in found["trainable"]


def test_targets_are_matrices_by_our_names_by_patterns_and_by_those_of_transformers() -> None:
    matrices = parse_job({**SMALLEST, **QWEN}).model.network.matrices
    own, theirs, pattern = ["query", "attention.value"], ["q_proj", "v_proj"], ["*.query", "layers.attention.v*"]
    expected = ["layers.attention.query", "layers.attention.value"]
    assert trainable.selected(own, matrices) == trainable.selected(theirs, matrices) == expected
    assert trainable.selected(pattern, matrices) == expected
    assert trainable.selected(["all-linear"], matrices) == list(matrices)
    shapes = trainable.adapter_shapes(4, own, matrices)
    assert shapes["layers.attention.query.lora_a"] == (8, 384, 4)
    assert shapes["layers.attention.value.lora_b"] == (8, 4, 128)


def test_all_linear_leaves_routers_and_experts_out() -> None:
    matrices = parse_job({**SMALLEST, "model": {"preset": "moe-20m"}}).model.network.matrices
    names = trainable.selected(["all-linear"], matrices)
    assert [name.rpartition(".")[2] for name in names] == ["query", "key", "value", "output"]
    assert trainable.selected(["experts.up", "router"], matrices) == ["layers.feedforward.router", "layers.experts.up"]


def test_one_target_needs_no_brackets_as_in_peft() -> None:
    one = parse_job({**SMALLEST, **QWEN, "trainable": {"lora": {"targets": "all-linear"}}})
    assert one == parse_job({**SMALLEST, **QWEN, "trainable": {"lora": {"targets": ["all-linear"]}}})


def test_every_whole_specification_of_the_guide_is_valid(tmp_path: Path) -> None:
    count = 0
    for page in sorted((DOCS / "guide").glob("*.md")):
        for block in blocks(page.read_text()):
            if block.kind != "yaml" or not re.search(r"^islands:", block.text, re.M) or "budget:" not in block.text:
                continue
            file = tmp_path / "job.yaml"
            file.write_text(block.text)
            parse_job(read_job_document(file))
            count += 1
    assert count >= 4
