"""Small PyTorch models, jobs of them, and their trainers, for the tests of this folder.

Importing this skips a test module where torch or transformers is missing; ``make torch-test`` has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from learners.factories import trainer_of
from learners.island_spec import IslandSpec
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import EVERYTHING
from tests.documents import DOCS, blocks
from tests.learners.test_conversations import QWEN, ROWS

torch = pytest.importorskip("torch", reason="needs torch: make torch-test has it")
transformers = pytest.importorskip("transformers", reason="needs transformers: make torch-test has it")
torch_layout: Any = import_module("learners.torch_layout")
torch_model: Any = import_module("learners.torch_model")

PAGE = (DOCS / "guide" / "pytorch.md").read_text()
MODULE, (JOB, OWN_MODULE, ADAPTERS, SEVERAL, SHARED) = (
    next(block.text for block in blocks(PAGE) if block.kind == "python"),
    [yaml.safe_load(block.text) for block in blocks(PAGE) if block.kind == "yaml"],
)
LORA = {"trainable": {"lora": {"rank": 2, "alpha": 3.0}}}
SMALL = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, **SMALL),
    "phi": lambda: transformers.PhiConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, **SMALL
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        **SMALL,
    ),
}


def saved(folder: Path, kind: str = "gpt2", weights: bool = True) -> Path:
    torch.manual_seed(3)
    config = CONFIGS[kind]()
    if weights:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def spec_of(named: Any, settings: dict[str, Any] | None = None, **changes: Any) -> IslandSpec:
    inner = {"warmup_steps": 2, "lr": 0.01} | changes.pop("inner_optimizer", {})
    training = {"batch_size": 4, "inner_optimizer": inner} | changes.pop("training", {})
    document = {
        "islands": [{"node_group": "a", "count": 2}],
        "budget": {"steps": 40},
        "data": {"sequence_length": 16},
        "model": {"compute_dtype": "float32"} | changes.pop("model", {}),
        "trainer": {"kind": "torch", "model": str(named), "settings": settings or {}},
        "training": training,
        "evaluation": {"sequences": 8},
    }
    job = parse_job(document | changes)
    return IslandSpec.of({**job.island_document(job.islands[0]), "roots": EVERYTHING})


def own(settings: dict[str, Any] | None = None, **changes: Any) -> IslandSpec:
    return spec_of("mine:build", {"width": 16, "depth": 1} if settings is None else settings, **changes)


def trained(spec: IslandSpec, steps: int = 3, shard: int = 0) -> Any:
    trainer = trainer_of(spec, shard, 2)
    for step in range(steps):
        trainer.step(step)
    return trainer


def same(one: Any, other: Any) -> bool:
    mine, theirs = (each.snapshot(each.tensor_shapes()).arrays() for each in (one, other))
    return all(np.array_equal(mine[name], theirs[name]) for name in mine)


def chat(tmp_path: Path, named: Any, **changes: Any) -> IslandSpec:
    """A job of conversations, each packed with others into rows of 96 tokens."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"source": "files", "format": "chat", "sequence_length": 95, "held_out_ratio": 0.2}
    data |= {"tokenizer": str(QWEN.write(tmp_path)), "files": [str(rows)]}
    return spec_of(named, changes.pop("settings", None), data=data, **changes)


def llama(folder: Path) -> Path:
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 260}, **shape, num_key_value_heads=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def losses(trainer: Any) -> list[float]:
    """Return held-out and training losses around a few steps, which differ with any error of mask, weight or gradient."""
    trainer.warm_up()
    trainer.load(trainer.initial_parameters())
    before = trainer.evaluate(trainer.initial_parameters()).loss
    trained_on = [trainer.step(step).loss for step in range(4)]
    return [before, *trained_on, trainer.evaluate(trainer.snapshot(trainer.tensor_shapes()).arrays()).loss]
