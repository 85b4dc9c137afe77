"""Documents that share a row, and weights of tokens, in PyTorch."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from learners.factories import trainer_of
from learners.island_spec import IslandSpec
from orchestrator.errors import ConfigurationError
from tests.learners.pytorch.small_models import (
    CONFIGS,
    chat,
    llama,
    losses,
    torch,
)


@pytest.mark.parametrize("training", [{}, {"accumulation": 2, "z_loss": 0.01}], ids=["whole", "in parts"])
def test_torch_and_jax_have_the_same_loss_and_gradient_on_conversations(
    tmp_path: Path, training: dict[str, Any]
) -> None:
    folder, inner = llama(tmp_path / "llama"), {"warmup_steps": 0, "clip_norm": None, "weight_decay": 0.0}
    ours = chat(tmp_path, folder, training=training, inner_optimizer=inner)
    theirs = dict(ours.document) | {
        "model": {"initial_weights": str(folder), "compute_dtype": "float32"},
        "trainer": "learners.jax_trainer:create",
    }
    for one, other in zip(*(losses(trainer_of(IslandSpec.of(each), 0, 2)) for each in (ours, theirs)), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
def test_models_of_transformers_keep_documents_apart(tmp_path: Path, kind: str) -> None:
    config = CONFIGS[kind]()
    config.vocab_size = 260
    config.save_pretrained(tmp_path / kind)
    trainer = trainer_of(chat(tmp_path, tmp_path / kind, settings={"max_position_embeddings": 96}), 0, 2)
    before, *_, after = losses(trainer)
    assert after < before


class Documents(torch.nn.Module):
    """Averages what came before in the row, or in the document."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.embed, self.head, self.apart = torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260), apart

    def forward(self, tokens: Any, positions: Any = None, segments: Any = None) -> Any:
        visible = torch.ones(tokens.shape[1], tokens.shape[1]).tril()
        if segments is not None and self.apart:
            visible = visible * (segments[:, :, None] == segments[:, None, :])
        return self.head(visible / visible.sum(-1, keepdim=True) @ self.embed(tokens))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda spec: Documents(apart=False), "change with the document before it in its row"),
        (lambda spec: torch.nn.Sequential(torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260)), "has no parameters"),
    ],
)
def test_a_module_that_does_not_keep_documents_apart_is_refused_for_conversations(
    tmp_path: Path, mine: ModuleType, build: Any, said: str
) -> None:
    vars(mine)["build"] = lambda spec: Documents(apart=True)
    before, *_, after = losses(trainer_of(chat(tmp_path, "mine:build"), 0, 2))
    assert after < before
    vars(mine)["build"] = build
    with pytest.raises(ConfigurationError, match=f"^data.format is chat, but .*{said}"):
        trainer_of(chat(tmp_path, "mine:build"), 0, 2)
