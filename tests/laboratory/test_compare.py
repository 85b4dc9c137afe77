"""A comparison of methods: who is trained with what, what is judged at which learning rate, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from orchestrator.core import events as e
from orchestrator.core.messages import Progress
from orchestrator.errors import ConfigurationError
from orchestrator.laboratory import compare
from orchestrator.laboratory.baselines import METHODS, Method, Trained
from orchestrator.laboratory.multiplex import MultiplexedJob
from orchestrator.tape.driver import MemorySink
from tests.laboratory.quadratic import QuadraticTrainer
from tests.laboratory.train_by_tape import job

SEEDS = (0, 7)


def _file(folder: Path, **changes: Any) -> Path:
    document = {
        "job": {
            "name": "tiny",
            "islands": [{"node_group": "here", "count": 2}],
            "budget": {"steps": 12},
            "model": {"factory": "tests.own_models:smallest"},
            "data": {"source": "builtin", "sequence_length": 16},
            "training": {"batch_size": 2, "inner_optimizer": {"warmup_steps": 5}},
            "synchroniser": {"fragments": 2, "interval_steps": 6, "overlap_steps": 2, "quorum": 1},
            "evaluation": {"sequences": 8},
        },
        "inner_lrs": [0.01],
        "seeds": list(SEEDS),
        "step_durations": [1.0, 1.5],
    }
    path = folder / "comparison.yaml"
    path.write_text(yaml.safe_dump(document | changes))
    return path


@pytest.mark.parametrize("seeds", [(7,), pytest.param(SEEDS, marks=pytest.mark.soak("six trainings"))])
def test_every_method_is_trained_from_every_seed_and_a_second_call_trains_none_again(tmp_path, capsys, seeds) -> None:
    command = [str(_file(tmp_path, seeds=list(seeds))), "--runs", str(tmp_path / "runs"), "--json"]
    command += ["--baseline", "equal-speeds", "--baseline", "data-parallel"]
    assert compare.main(command) == 0
    kept = tmp_path / "runs" / "compare-tiny" / "runs.jsonl"
    before = kept.read_text()
    runs = [json.loads(line) for line in before.splitlines()]
    methods = ("decoupled", "equal-speeds", "data-parallel")
    assert [(run["seed"], run["method"]) for run in runs] == [(seed, method) for seed in seeds for method in methods]
    losses = {(run["method"], run["seed"]): run["result"]["loss"] for run in runs}
    assert len(set(losses.values())) == len(runs)
    rows = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in rows] == list(methods)
    for row in rows:
        assert row["loss"] == pytest.approx(fmean(losses[row["method"], seed] for seed in seeds))
        for seed in seeds:
            expected = losses["decoupled", seed] / losses[row["method"], seed] - 1
            assert row["gaps"][str(seed)] == pytest.approx(expected)
    joined = {row["method"]: row["contributors_mean"] for row in rows}
    assert 1.0 < joined["decoupled"] < joined["equal-speeds"] == 2.0  # the slower island misses merges
    assert joined["data-parallel"] is None
    assert compare.main(command[:3]) == 0
    assert kept.read_text() == before
    printed = capsys.readouterr().out
    assert "by seed" in printed
    assert f"{losses['decoupled', 7]:.4f}" in printed


def _run(method: Method, lr: float, seed: int, loss: float) -> compare.Run:
    return compare.Run(method, lr, f"{method} {lr} {seed}", Trained(loss, ((100, loss),), 1.0), seed)


def test_a_method_is_judged_at_the_learning_rate_whose_mean_over_the_seeds_is_its_best() -> None:
    losses: dict[tuple[Method, float], tuple[float, float]] = {
        ("decoupled", 0.1): (1.0, 2.0),
        ("decoupled", 0.2): (1.3, 1.3),
        ("data-parallel", 0.1): (1.2, 1.2),
        ("data-parallel", 0.2): (0.9, 1.7),
    }
    runs = [
        _run(method, lr, seed, loss)
        for (method, lr), of_seeds in losses.items()
        for seed, loss in zip(SEEDS, of_seeds, strict=True)
    ]
    ours, theirs = compare.judge(runs)
    assert (ours.inner_lr, ours.loss, ours.gap) == (0.2, 1.3, 0.0)
    assert (theirs.inner_lr, theirs.loss) == (0.1, 1.2)
    assert theirs.losses == pytest.approx({0.1: 1.2, 0.2: 1.3})
    assert theirs.gap == pytest.approx(1.3 / 1.2 - 1)
    assert theirs.gaps == pytest.approx(dict.fromkeys(SEEDS, 1.3 / 1.2 - 1))
    assert set(METHODS) >= {ours.method, theirs.method}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_durations": [1.0]}, "step_durations has 1 values, but the job has 2"),
        ({"step_durations": [1.0, 0.0]}, "step_durations.1"),
        ({"seeds": [0, 0]}, "seeds"),
        ({"seeds": [-1]}, "seeds.0"),
        ({"inner_lrs": []}, "inner_lrs"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        compare.read(_file(tmp_path, **changes))


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path, capsys) -> None:
    (tmp_path / "compare-tiny").write_text("a file")
    assert compare.main([str(_file(tmp_path)), "--runs", str(tmp_path)]) == 2
    assert "or name another folder" in " ".join(capsys.readouterr().err.split())


def test_an_island_with_longer_steps_contributes_fewer_tokens() -> None:
    spec, sink = job(60, adoption="rebase"), MemorySink()
    durations = [1.0] * (spec.island_count - 1) + [2.0]
    slow = spec.policy().islands[-1].island
    recorded = MultiplexedJob(spec, QuadraticTrainer, transfer_steps=1.0, step_durations=durations, recorder=sink)
    for _ in recorded.run():
        pass
    tokens: dict[str, int] = {}
    for record in sink.records:
        if isinstance(report := e.report_of(record.event), Progress):
            tokens[record.event.island] = report.tokens_total
    others = [count for island, count in tokens.items() if island != slow]
    assert tokens[slow] == pytest.approx(fmean(others) / 2, rel=0.2)
