"""What a PyTorch step says of itself: learning rate, gradient norm and the ideal time of its operations."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from learners.island_spec import IslandSpec
from learners.text import Text
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import EVERYTHING

torch = pytest.importorskip("torch", reason="needs torch: make torch-test has it")
WIDTH, LENGTH, BATCH = 16, 32, 4


def build(spec: Any) -> Any:
    return torch.nn.Sequential(torch.nn.Embedding(256, WIDTH), torch.nn.Linear(WIDTH, 256, bias=False))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("figured")
    vars(module)["build"] = build
    monkeypatch.setitem(sys.modules, "figured", module)
    return "figured:build"


def spec_of(named: str, **inner: Any) -> IslandSpec:
    document = {
        "islands": [{"node_group": "a", "peak_flops": 1e12}],
        "budget": {"steps": 40},
        "data": {"sequence_length": LENGTH},
        "model": {"compute_dtype": "float32"},
        "trainer": {"kind": "torch", "model": named},
        "training": {
            "batch_size": BATCH,
            "accumulation": 2,
            "inner_optimizer": {"warmup_steps": 4, "lr": 0.01} | inner,
        },
        "evaluation": {"sequences": 8},
    }
    job = parse_job(document)
    return IslandSpec.of({**job.island_document(job.islands[0]), "roots": EVERYTHING})


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_a_step_says_its_rate_and_the_norm_of_its_whole_gradient(named: str, clip_norm: float | None) -> None:
    spec = spec_of(named, clip_norm=clip_norm)
    trainer = import_module("learners.torch_trainer").TorchTrainer(spec, 0, 1)
    start = trainer.initial_parameters()
    tokens = torch.from_numpy(np.asarray(Text(spec, 256).draw(0, 1)(0)).astype(np.int64))
    module = build(spec)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(start[name]))
    loss = torch.nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = sum(float(parameter.grad.double().square().sum()) for parameter in module.parameters()) ** 0.5
    result = trainer.step(1, 0.5)
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert result.gradient_norm == pytest.approx(norm, rel=1e-4)
    assert result.learning_rate == pytest.approx(0.5 * 0.01 * 2 / 4)
    assert result.ideal_seconds == pytest.approx(6 * WIDTH * 256 * BATCH * LENGTH / 1e12), "without the embeddings"


def test_the_operations_of_a_step_are_unknown_if_a_part_is_frozen(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(spec: Any) -> Any:
        module = build(spec)
        module[0].weight.requires_grad_(False)
        return module

    vars(sys.modules["figured"])["build"] = frozen
    trainer = import_module("learners.torch_trainer").TorchTrainer(spec_of(named), 0, 1)
    assert trainer.step(0).ideal_seconds is None
