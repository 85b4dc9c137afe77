"""The trainer of docs/how-to-change/trainer.md keeps the contract, word for word as it stands there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from learners.contract import Trainer
from orchestrator.specification.config import parse_job
from tests.documents import DOCS, blocks

SPEC = parse_job(
    {
        "trainer": "mypackage.bigrams:create",
        "islands": [{"node_group": "asia"}],
        "budget": {"steps": 10},
        "training": {"inner_optimizer": {"lr": 0.1}},
    }
).model_dump(mode="json")


@pytest.fixture
def bigrams() -> Any:
    (text,) = [b.text for b in blocks((DOCS / "how-to-change" / "trainer.md").read_text()) if b.kind == "python"]
    module = ModuleType("bigrams")
    exec(compile(text, "trainer.md", "exec"), vars(module))
    return module


def test_it_has_every_method_of_the_contract(bigrams: Any) -> None:
    wanted = {name for name in vars(Trainer) if not name.startswith("_")}
    assert {name for name in wanted if not hasattr(bigrams.create(SPEC, 0, 1), name)} == set()


def test_it_learns_and_beats_a_model_without_context(bigrams: Any) -> None:
    trainer = bigrams.create(SPEC, 0, 1)
    for step in range(100):
        trainer.step(step)
    assert trainer.evaluate(trainer.snapshot(trainer.tensor_shapes()).arrays()).loss < trainer.unigram_loss() - 0.8


def test_whoever_takes_its_state_goes_on_bit_for_bit(bigrams: Any) -> None:
    one, other = bigrams.create(SPEC, 0, 2), bigrams.create(SPEC, 1, 2)
    for step in range(5):
        one.step(step)
    other.import_state(one.export_state().arrays())
    other.take_shard(0)
    other.seek(one.cursor())
    for trainer in (one, other):
        trainer.step(5)
    mine, theirs = (trainer.snapshot(trainer.tensor_shapes()).arrays() for trainer in (one, other))
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_a_snapshot_is_not_changed_by_the_next_step(bigrams: Any) -> None:
    trainer = bigrams.create(SPEC, 0, 1)
    snapshot = trainer.snapshot(["rows[96:128]"])
    trainer.step(0)
    assert not snapshot.arrays()["rows[96:128]"].any()
    assert trainer.snapshot(["rows[96:128]"]).arrays()["rows[96:128]"].any()


def test_loading_a_piece_replaces_that_and_nothing_else(bigrams: Any) -> None:
    trainer = bigrams.create(SPEC, 0, 1)
    trainer.step(0)
    expected = trainer.snapshot(["rows"]).arrays()["rows"]
    expected[96:128] = 7.0
    trainer.load({"rows[96:128]": np.full((32, 256), 7.0, np.float32)})
    assert np.array_equal(trainer.snapshot(["rows"]).arrays()["rows"], expected)
