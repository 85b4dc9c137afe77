"""Islands in JAX and in PyTorch train one decoder: the same tensors, losses and states, or the reason why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learners.factories import trainer_of
from learners.island_spec import IslandSpec
from learners.job_check import findings
from orchestrator.errors import ConfigurationError, DataError, InvalidJobSpec
from orchestrator.models.huggingface.configuration import decoder_of
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import EVERYTHING
from tests.learners.pytorch.small_models import SHARED, chat, torch, transformers

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "olmo2": {},
    "phi3": {},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
}


def saved(folder: Path, kind: str, **changes: Any) -> Path:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **SIZES | KINDS.get(kind, {}) | changes)
    module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, each in module.named_parameters():
            if each.ndim == 1:  # norms and biases that begin at one or zero would hide an error
                each.add_(0.1 * torch.randn_like(each))
            assert each.numel(), name
    module.save_pretrained(folder)
    return folder


def document(folder: Path, **changes: Any) -> dict[str, Any]:
    decoder = decoder_of(json.loads((folder / "config.json").read_text()))
    inner = {"warmup_steps": 2, "lr": 0.01} | changes.pop("inner_optimizer", {})
    return {
        "islands": [{"node_group": "a"}, {"node_group": "b", "framework": "torch"}],
        "budget": {"steps": 40},
        "data": {"sequence_length": 16},
        "model": {
            "initial_weights": str(folder),
            "decoder": decoder.model_dump(mode="json"),
            "compute_dtype": "float32",
            **changes.pop("model", {}),
        },
        "training": {"batch_size": 4, "inner_optimizer": inner, **changes.pop("training", {})},
        "evaluation": {"sequences": 8},
        **changes,
    }


def both(folder: Path, **changes: Any) -> tuple[Any, Any]:
    """Return the trainer of the island in JAX, and that of the one in PyTorch, both with the data of the first."""
    job = parse_job(document(folder, **changes))
    specs = [IslandSpec.of({**job.island_document(entry), "roots": EVERYTHING}) for entry in job.islands]
    one, other = (trainer_of(spec, 0, 2) for spec in specs)
    for each in (one, other):
        each.warm_up()
        each.load(one.initial_parameters())
    return one, other


def arrays_of(trainer: Any) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = trainer.snapshot(trainer.tensor_shapes()).arrays()
    return arrays


@pytest.mark.parametrize("kind", KINDS)
def test_both_have_the_same_tensors_losses_and_steps(tmp_path: Path, kind: str) -> None:
    one, other = both(saved(tmp_path / kind, kind))
    assert dict(one.tensor_shapes()) == other.tensor_shapes()
    assert dict(one.roles()) == dict(other.roles())
    start = one.initial_parameters()
    assert all(np.array_equal(start[name], array) for name, array in other.initial_parameters().items())
    assert other.evaluate(start).loss == pytest.approx(one.evaluate(start).loss, rel=1e-5)
    for step in range(4):
        assert other.step(step).loss == pytest.approx(one.step(step).loss, rel=1e-4)
    ours, theirs = arrays_of(one), arrays_of(other)
    for name, array in ours.items():
        moved = np.abs(array - start[name]).max()
        assert moved > 0
        assert np.abs(array - theirs[name]).max() < 0.05 * moved, name
        assert theirs[name].flags.c_contiguous


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"accumulation": 2, "z_loss": 0.01}},
        {"model": {"remat": "full"}},
        {"inner_optimizer": {"groups": [{"role": "embedding", "lr_ratio": 0.5}], "clip_norm": None}},
    ],
    ids=["in parts", "recomputed", "groups"],
)
def test_settings_of_a_step_mean_the_same_in_both(tmp_path: Path, changes: dict[str, Any]) -> None:
    one, other = both(saved(tmp_path / "llama", "llama"), **changes)
    for step in range(4):
        assert other.step(step).loss == pytest.approx(one.step(step).loss, rel=1e-4)


def test_conversations_have_the_same_losses_in_both(tmp_path: Path) -> None:
    data = chat(tmp_path, "a.b:c").job.model_dump(mode="json")["data"]
    one, other = both(saved(tmp_path / "llama", "llama"), data=data)
    for step in range(4):
        assert other.step(step).loss == pytest.approx(one.step(step).loss, rel=1e-4)


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_a_state_of_either_continues_in_the_other(tmp_path: Path, kind: str, cut: bool) -> None:
    """A peer's moments and counts, and its parameters: the next steps have the losses that the peer's own would have."""
    folder = saved(tmp_path / kind, kind)
    for giver, taker in (both(folder), both(folder)[::-1]):
        for step in range(3):
            giver.step(step)
        pieces = [
            part
            for name, shape in giver.tensor_shapes().items()
            for part in ([name] if shape[0] < 3 or not cut else [f"{name}[0:2]", f"{name}[2:{shape[0]}]"])
        ]
        state = giver.export_state(pieces).arrays()
        assert state.keys() == taker.export_state(pieces).arrays().keys()
        taker.import_state(state)
        taker.seek(3)
        for step in range(3, 7):
            assert taker.step(step).loss == pytest.approx(giver.step(step).loss, rel=1e-4)
        again = taker.export_state(pieces).arrays()
        assert {name: (array.dtype, array.shape) for name, array in again.items()} == {
            name: (array.dtype, array.shape) for name, array in state.items()
        }


def test_a_state_of_another_decoder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    one, _ = both(saved(tmp_path / "small", "llama", num_hidden_layers=2))
    _, other = both(saved(tmp_path / "llama", "llama"))
    before = arrays_of(other)
    with pytest.raises(DataError, match="cannot replace"):
        other.import_state(one.export_state().arrays())
    with pytest.raises(DataError, match="only one of them has"):
        other.import_state({**other.export_state().arrays(), "optimizer/mine": np.zeros(1)})
    assert all(np.array_equal(before[name], array) for name, array in arrays_of(other).items())


def test_models_that_only_look_alike_are_refused_before_a_step(tmp_path: Path) -> None:
    """Only transformers has dropout in attention: the losses of the same batch differ."""
    folder = saved(tmp_path / "llama", "llama", attention_dropout=0.5)
    said = (
        r"^islands\.1\.framework is torch, but transformers computes the loss [0-9.]+ of a batch, and JAX [0-9.]+, so"
    )
    with pytest.raises(ConfigurationError, match=said):
        both(folder)
    job = parse_job(document(folder))
    (problem,) = findings(job.island_document(job.islands[1]))["problems"]
    assert problem["path"] == "islands.1.framework"
    assert findings(job.island_document(job.islands[0]))["problems"] == []


def test_the_entries_of_the_page_share_a_decoder_and_are_checked_without_a_cluster(tmp_path: Path) -> None:
    plain = [
        {name: entry[name] for name in ("node_group", "framework") if name in entry} for entry in SHARED["islands"]
    ]
    job = parse_job(document(saved(tmp_path / "llama", "llama"), islands=plain))
    found = [findings(job.island_document(entry)) for entry in job.islands]
    assert found[0]["problems"] == found[1]["problems"] == []
    assert found[0]["model"] == found[1]["model"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inner_optimizer": {"kind": "muon"}}, "the state of the optimizer muon differs"),
        ({"inner_optimizer": {"factory": "a.b:c"}}, "the state of the optimizer a.b:c differs"),
        ({"trainable": {"lora": {"rank": 2}}}, "trainable is set"),
        ({"trainer": "a.b:c"}, "the trainer a.b:c decides itself"),
        ({"islands": [{"node_group": "a", "framework": "torch", "hosts": 2}]}, "the island has 2 processes"),
    ],
)
def test_what_they_cannot_share_is_refused_at_submission(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidJobSpec) as refused:
        parse_job(document(saved(tmp_path / "llama", "llama"), **changes))
    (problem,) = refused.value.problems
    assert problem.path.endswith(".framework")
    assert problem.message.startswith("is torch, but ")
    assert said in problem.message
    assert problem.remedy
