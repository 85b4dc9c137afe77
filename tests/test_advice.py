"""Advice on specifications: each piece for a job that needs it, none for jobs that do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import Problem
from orchestrator.simulation.advice import advice
from orchestrator.simulation.line_advice import Line
from orchestrator.specification.config import parse_job
from orchestrator.specification.documents import read_document

CONFIGS = Path(__file__).parent.parent / "deploy" / "configs"
SYNTHETIC = "learners.synthetic:create"
WIDE = {"overlap_steps": 4, "grace_cap_steps": 3}


def found(*lines: Line, steps: int = 1000, **sections: Any) -> tuple[Problem, ...]:
    islands = [{"node_group": "us-east"}, {"node_group": "europe"}]
    return advice(parse_job({"islands": islands, "budget": {"steps": steps}, **sections}), lines)


def paths(problems: tuple[Problem, ...]) -> list[str]:
    return [problem.path for problem in problems]


def test_a_job_of_defaults_needs_no_advice() -> None:
    assert found() == ()


@pytest.mark.parametrize("name", ["demo", "synthetic", "eight-islands", "compare", "compare-muon", "compare-speeds"])
def test_shipped_jobs_need_no_advice(name: str) -> None:
    document = read_document(CONFIGS / f"{name}.yaml")
    assert advice(parse_job(document.get("job", document))) == ()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("training.inner_optimizer.warmup_steps", 5000, "never reaches lr 0.002, only 4e-05"),
        ("training.inner_optimizer.warmup_steps", 100, "never reaches"),
        ("training.inner_optimizer.warmup_steps", 80, "rises for 80% of the job"),
        ("synchroniser.interval_steps", 500, "no fragment is merged"),
        ("synchroniser.interval_steps", 60, "merged once"),
        ("synchroniser.interval_steps", 26, "merged 3 times"),
        ("synchroniser.outer_optimizer.warmup_merges", 12, "the outer rate never reaches lr"),
        ("checkpoints.every_merges", 500, "no checkpoint is taken"),
    ],
)
def test_what_does_not_fit_into_the_budget_is_said_with_the_value_and_a_remedy(
    path: str, value: int, words: str
) -> None:
    *above, name = path.split(".")
    section: dict[str, Any] = {name: value}
    for key in reversed(above):
        section = {key: section}
    if "synchroniser" not in section:
        section["synchroniser"] = {}
    section["synchroniser"].setdefault("interval_steps", 10)
    section.setdefault("training", {"inner_optimizer": {"warmup_steps": 10}})
    (problem,) = found(steps=100, **section)
    assert problem.path == path
    assert problem.message.startswith(f"is {value:,}")
    assert words in problem.message
    assert problem.remedy


def test_a_remedy_is_a_specification_that_is_taken_and_needs_no_more_advice() -> None:
    long = {"interval_steps": 500, "outer_optimizer": {"warmup_merges": 50}}
    problems = found(steps=100, synchroniser=long, training={"inner_optimizer": {"warmup_steps": 99}})
    said = {problem.path: int(problem.remedy.split()[3].rstrip(",")) for problem in problems}
    inner = {"warmup_steps": said["training.inner_optimizer.warmup_steps"]}
    sync = {"interval_steps": said["synchroniser.interval_steps"]}
    assert found(steps=100, synchroniser=sync, training={"inner_optimizer": inner}) == ()


def test_the_papers_momentum_is_said_of_jobs_that_are_too_short_for_it() -> None:
    paper = {"outer_optimizer": {"lr": 0.7, "momentum": 0.9}}
    assert paths(found(steps=24 * 256, synchroniser=paper)) == ["synchroniser.outer_optimizer.momentum"]
    assert found(steps=24 * 257, synchroniser=paper) == ()
    assert found(synchroniser={"outer_optimizer": {"lr": 0.7, "momentum": 0.6}}) == ()
    assert found(synchroniser={"outer_optimizer": {"kind": "sgd", "lr": 0.7, "momentum": 0.9}}) == ()


def test_an_outer_rate_of_descent_is_said_to_be_long_for_adam() -> None:
    assert paths(found(synchroniser={"outer_optimizer": {"kind": "adam", "lr": 0.5}})) == [
        "synchroniser.outer_optimizer.lr"
    ]
    assert found(synchroniser={"outer_optimizer": {"kind": "adam"}}) == ()


def test_a_decay_that_begins_within_the_warm_up_is_said() -> None:
    wsd = {"schedule": "wsd", "decay_ratio": 0.8, "warmup_steps": 300}
    assert paths(found(training={"inner_optimizer": wsd})) == ["training.inner_optimizer.decay_ratio"]


def test_synthetic_islands_have_no_learning_rate_and_their_budget_has_a_duration() -> None:
    some = {"trainer": SYNTHETIC, "synthetic": {"step_s": 0.1}, "training": {"inner_optimizer": {"warmup_steps": 5000}}}
    assert found(**some) == ()
    assert paths(found(checkpoints={"every_s": 200.0}, **some)) == ["checkpoints.every_s"]


def test_windows_that_only_fit_one_machine_are_said_of_islands_in_several_node_groups() -> None:
    """Decision 0163: with a grace of one step and τ = 2 half a step each way leaves 1.3 of four islands in a merge."""
    narrow = {"overlap_steps": 2, "grace_cap_steps": 1}
    assert paths(found(synchroniser=narrow)) == ["synchroniser.grace_cap_steps"]
    assert found(synchroniser=narrow, islands=[{"node_group": "us-east", "count": 4}]) == ()
    assert found(synchroniser=narrow | {"quorum": 2}) == ()
    assert found(synchroniser=WIDE) == ()


@pytest.mark.parametrize(("margin", "is_said"), [(0.01, True), (0.2, True), (0.6, False), (0.9, False)])
def test_a_part_of_the_slack_that_leaves_nearly_no_window_is_said(margin: float, is_said: bool) -> None:
    narrow = WIDE | {"grace_margin": margin}
    assert paths(found(synchroniser=narrow)) == ["synchroniser.grace_margin"] * is_said
    assert found(synchroniser=narrow | {"grace_floor_steps": 2.0}) == ()
    assert found(synchroniser=WIDE | {"grace_margin": 0, "grace_floor_steps": 2.0}) == (), "the floor is a window"


def test_a_model_of_pytorch_has_the_same_schedule_and_gets_the_same_advice() -> None:
    torch = {"trainer": {"kind": "torch", "model": "mine:build"}}
    late = found(steps=100, training={"inner_optimizer": {"warmup_steps": 500}}, **torch)
    assert paths(late) == ["training.inner_optimizer.warmup_steps"]
    heavy = {"outer_optimizer": {"lr": 0.7, "momentum": 0.9}}
    assert paths(found(synchroniser=heavy, **torch)) == ["synchroniser.outer_optimizer.momentum"]


@pytest.mark.parametrize("name", ["overlap_steps", "grace_cap_steps", "grace_margin"])
def test_a_window_of_no_length_is_said_unless_the_quorum_is_all_islands(name: str) -> None:
    shut = WIDE | {name: 0}
    assert paths(found(synchroniser=shut)) == [f"synchroniser.{name}"]
    assert found(synchroniser=shut | {"quorum": 2}) == ()


def test_a_cap_that_is_too_thin_for_the_codec_is_said_and_the_remedy_is_enough() -> None:
    some = {
        "trainer": SYNTHETIC,
        "synthetic": {"step_s": 0.1, "parameters": 10**7},
        "transport": {"bytes_per_s": 10**7},
    }
    sync = {**WIDE, "wire": "float32"}
    (problem,) = found(synchroniser=sync, **some)  # 5 MB take 0.5 s, and one is due every 0.3 s
    assert (problem.path, "0.5 s" in problem.message, "0.3 s" in problem.message) == ("synchroniser.wire", True, True)
    assert "wire bfloat16" in problem.remedy
    assert "synchroniser.wire" not in paths(found(synchroniser=sync | {"wire": "bfloat16"}, **some))


def test_the_line_that_would_do_has_its_digits_however_thin_it_is() -> None:
    """Nothing helps nano at 1 kB/s, and no line has "0 Mbit/s"."""
    (problem,) = found(transport={"bytes_per_s": 1_000})
    needed = re.search(r"a line of ([0-9.e-]+) Mbit/s", problem.remedy)
    assert needed is not None
    assert 0.0 < float(needed[1]) < 10.0


def test_a_measured_line_counts_for_its_node_group_and_is_shared_by_its_islands() -> None:
    some: dict[str, Any] = {"trainer": SYNTHETIC, "synthetic": {"step_s": 0.1, "parameters": 10**7}}
    sync = {**WIDE, "wire": "float32"}
    assert paths(found(Line("europe", 0.05, 8e7), synchroniser=sync, **some)) == ["synchroniser.wire"]
    assert found(Line("asia", 0.05, 8e7), synchroniser=sync, **some) == ()
    assert found(Line("europe", 0.0, 8e8), synchroniser=sync, **some) == ()
    crowd = [{"node_group": "us-east"}, {"node_group": "europe", "count": 8}]
    assert paths(found(Line("europe", 0.0, 8e8), synchroniser=sync, islands=crowd, **some)) == ["synchroniser.wire"]


def test_a_line_on_which_fragments_travel_for_a_step_asks_for_windows_that_let_them() -> None:
    some: dict[str, Any] = {"trainer": SYNTHETIC, "synthetic": {"step_s": 0.1, "parameters": 10**6}}
    (problem,) = found(Line("europe", 0.16, 1e9), synchroniser=WIDE, **some)
    assert problem.path == "synchroniser.grace_cap_steps"
    assert "grace_cap_steps 3 and overlap_steps 5" in problem.remedy
    assert found(Line("europe", 0.16, 1e9), synchroniser={"overlap_steps": 5, "grace_cap_steps": 3}, **some) == ()


def test_of_a_model_whose_step_is_not_known_only_lines_are_said_that_are_surely_too_thin() -> None:
    """An 8B model over 8 Mbit/s; nothing of nano on the same line, nor of a model that only its package knows."""
    thin = {"bytes_per_s": 10**6}
    gpus = [{"node_group": "us-east", "count": 2, "accelerator": "gpu", "accelerators": 8}]
    assert paths(found(model={"preset": "llama3.1-8b"}, islands=gpus, transport=thin)) == ["synchroniser.wire"]
    assert found(transport=thin) == ()
    assert found(model={"factory": "mine.models:large"}, islands=gpus, transport=thin) == ()


def streamed(*sizes: int, **data: Any) -> dict[str, Any]:
    sources = [{"name": f"source-{number}", "files": [f"/data/{number}.txt"]} for number in range(len(sizes))]
    return {"source": "streamed", "sources": sources, "stored_bytes": list(sizes), **data}


def test_the_largest_source_whose_epochs_are_estimated_is_said_with_the_command_that_counts_it() -> None:
    (problem,) = found(data=streamed(5 << 30, 1 << 30, 6 << 30))
    assert problem.path == "data.index"
    assert "each island reads 3.0 GiB of source 'source-2'" in problem.message
    assert "atoll data index" in problem.remedy


def test_sources_that_are_counted_need_no_index() -> None:
    assert found(data=streamed(2 << 30, 0)) == ()
    assert found(data=streamed(9 << 30, index="/data/index")) == ()
