"""Text whose documents share a row, in PyTorch: the losses are those of JAX, which has each document alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learners.factories import trainer_of
from learners.island_spec import IslandSpec
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from tests.learners.test_conversations import QWEN

torch = pytest.importorskip("torch", reason="needs torch: make torch-test has it")
transformers = pytest.importorskip("transformers", reason="needs transformers: make torch-test has it")


def losses(trainer: Any) -> list[float]:
    """Return held-out and training losses around a few steps, which differ with any error of mask or gradient."""
    trainer.warm_up()
    trainer.load(trainer.initial_parameters())
    before = trainer.evaluate(trainer.initial_parameters()).loss
    trained_on = [trainer.step(step).loss for step in range(3)]
    return [before, *trained_on, trainer.evaluate(trainer.snapshot(trainer.tensor_shapes()).arrays()).loss]


@pytest.mark.parametrize("is_masked", [True, False])
def test_torch_and_jax_have_the_same_losses_on_documents_of_a_row(tmp_path: Path, is_masked: bool) -> None:
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 300, "bos_token_id": None, "eos_token_id": None}
    config = transformers.LlamaConfig(**tokens, **shape, num_key_value_heads=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder := tmp_path / "llama")
    texts = [{"text": f"{n}: " + "abc"[n % 3] * (n % 37)} for n in range(200)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    data = {
        "source": "files",
        "files": [str(tmp_path / "texts.jsonl")],
        "tokenizer": str(QWEN.write(tmp_path)),
        "sequence_length": 95,
        "held_out_ratio": 0.1,
        "intra_document_masking": is_masked,
    }
    job = {
        "islands": [{"node_group": "a", "count": 2}],
        "budget": {"steps": 100},
        "data": data,
        "training": {"batch_size": 4, "inner_optimizer": {"warmup_steps": 0, "clip_norm": None, "weight_decay": 0.0}},
        "evaluation": {"sequences": 8},
    }
    ours = {"model": {"compute_dtype": "float32"}, "trainer": {"kind": "torch", "model": str(folder)}}
    theirs = {"model": {"initial_weights": str(folder), "compute_dtype": "float32"}}
    found = []
    for each in (ours, theirs):
        spec = parse_job(job | each).model_dump(mode="json")
        found.append(losses(trainer_of(IslandSpec.of({**spec, "roots": AllowedRoots.only(tmp_path)}), 0, 2)))
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
