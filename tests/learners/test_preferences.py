"""Pairs of answers: their rows, the loss of DPO against trl's formula in NumPy, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learners import inner_step, jax_trainer, model
from learners.contract import Batch
from learners.models.decoder import logits
from orchestrator.errors import InvalidJobSpec, UnreadableData
from orchestrator.specification.config import parse_job
from orchestrator.specification.memory_budget import frozen_bytes_of
from orchestrator.system.roots import AllowedRoots
from orchestrator.text.text_records import PREFERENCE, NotText, text_of
from tests.learners.test_conversations import QWEN, said

BETA = 0.3
DECODER = {
    "vocabulary_size": 260, "width": 8, "layer_count": 2, "head_count": 2, "key_value_head_count": 1, "head_size": 4,
    "hidden_size": 12,
}  # fmt: skip
MODEL = {"decoder": DECODER, "compute_dtype": "float32"}
GOOD, BAD = [{"role": "assistant", "content": "yes, of course"}], [{"role": "assistant", "content": "no!"}]
ROWS = [{"prompt": said(f"{n}?", system="s"), "chosen": GOOD, "rejected": BAD} for n in range(60)]
Make = Callable[..., dict[str, Any]]


@pytest.fixture
def make(make_job: Any, tmp_path: Path) -> Make:
    """Returns the document of a job that learns from these pairs."""
    tokenizer = QWEN.write(tmp_path)

    def document(
        rows: list[dict[str, Any]] = ROWS,
        part: Any = None,
        data: Any = None,
        trainer: Any = None,
        model: Any = MODEL,
        **training: Any,
    ) -> dict[str, Any]:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = make_job(
            data={"source": "files", "files": [str(path)], "format": "preference", "sequence_length": 191,
                  "held_out_ratio": 0.2, "tokenizer": str(tokenizer), **(data or {})},
            model=model,
            training={"batch_size": 4, "objective": {"kind": "dpo", "beta": BETA},
                      "inner_optimizer": {"lr": 0.03, "warmup_steps": 0}, **training},
            evaluation={"sequences": 8},
            trainable=part,
            **({} if trainer is None else {"trainer": trainer}),
        )  # fmt: skip
        return {**spec, "roots": AllowedRoots.only(tmp_path)}

    return document


def as_trl_has_it(
    document: dict[str, Any], parameters: Any, reference: Any, batch: Batch
) -> tuple[float, float, float]:
    """Return loss, accuracy and margin, pair by pair: each answer alone, without packing, weights or segments."""
    decoder = parse_job({name: value for name, value in document.items() if name != "roots"}).model.network

    length = batch.tokens.shape[1]
    scores_of = jax.jit(lambda tensors, tokens: logits(decoder, jnp.float32, tensors, tokens))

    def sum_of(tensors: Any, row: int, segment: int) -> float:
        own = batch.segments[row] == segment
        tokens, learned = batch.tokens[row][own], batch.weights[row][own]
        padded = np.pad(tokens, (0, length - len(tokens)))[None]
        scores = np.asarray(scores_of(tensors, padded), np.float64)[0, : len(tokens) - 1]
        of_targets = scores[np.arange(len(tokens) - 1), tokens[1:]] - np.log(np.exp(scores).sum(axis=-1))
        return float(np.sum(of_targets * learned[1:]))

    margins = []
    for row in range(len(batch)):
        for first in range(1, int(batch.segments[row].max()), 2):
            chosen, rejected = (
                sum_of(parameters, row, number) - sum_of(reference, row, number) for number in (first, first + 1)
            )
            margins.append(BETA * (chosen - rejected))
    assert len(margins) > len(batch), "several pairs share a row"
    losses = [float(np.log1p(np.exp(-margin))) for margin in margins]
    return float(np.mean(losses)), float(np.mean(np.array(margins) > 0)), float(np.mean(margins))


ANOTHER = pytest.mark.soak("another of its kind")


@pytest.mark.parametrize(
    "part",
    [
        {"lora": {"rank": 2}},
        pytest.param(None, marks=ANOTHER, id="all"),
        pytest.param({"only": ["*.value", "embed"]}, marks=ANOTHER, id="some"),
    ],
)
def test_the_loss_is_that_of_trl_and_the_reference_is_what_training_began_with(make: Make, part: Any) -> None:
    document = make(part=part)
    trainer = jax_trainer.create(document, 0, 1)
    frozen = {name: np.array(tensor) for name, tensor in trainer.arrays_frozen().items()}
    before = trainer.evaluate(trainer.initial_parameters())
    assert before.loss == pytest.approx(np.log(2), abs=1e-6)
    assert (before.preference.accuracy, before.preference.margin) == (0.0, pytest.approx(0.0, abs=1e-6))
    begun = dict(trainer.initial_parameters())
    for step in range(4):
        trainer.step(step)
    own = trainer.snapshot(trainer.tensor_shapes()).arrays()
    after = trainer.evaluate(own)
    assert after.loss < before.loss - 0.05
    assert after.preference.accuracy == 1.0
    assert after.preference.margin > 0.1

    batch = trainer._batch()
    built = model.build(document)
    assert built.preferences is not None
    found = jax.jit(built.preferences)({**frozen, **own}, batch)
    is_adapted = part is not None and "lora" in part
    plain = {name: tensor for name, tensor in frozen.items() if not name.startswith(model.REFERENCE)}
    scaled = {name: tensor * (2.0 if name.endswith("lora_b") else 1.0) for name, tensor in own.items()}
    reference = plain if is_adapted else {**plain, **begun}
    expected = as_trl_has_it(document, {**plain, **scaled}, reference, batch)
    np.testing.assert_allclose([float(each) for each in found], expected, atol=2e-5)
    assert not is_adapted or not any(name.startswith(model.REFERENCE) for name in frozen), "no second copy"
    held = sum(tensor.nbytes for tensor in frozen.values())
    spec = parse_job({name: value for name, value in document.items() if name != "roots"})
    assert frozen_bytes_of(spec) == held
    np.testing.assert_equal({name: np.array(tensor) for name, tensor in trainer.arrays_frozen().items()}, frozen)


@pytest.mark.soak("two more trainers")
def test_a_step_in_parts_is_the_whole_step_although_parts_have_other_numbers_of_pairs(make: Make) -> None:
    rows = [*ROWS[:40], *({**row, "chosen": [{"role": "assistant", "content": "y" * 70}]} for row in ROWS[40:])]
    whole = jax_trainer.create(make(rows), 0, 1)
    parts = jax_trainer.create(make(rows, accumulation=4), 0, 1)
    counts = {int(segments.max()) for segments in whole._batch().segments}
    assert len(counts) > 1
    for trainer in (whole, parts):
        trainer.step(0)
    names = list(whole.tensor_shapes())
    ours, theirs = (trainer.snapshot(names).arrays() for trainer in (whole, parts))
    for name in names:
        np.testing.assert_allclose(ours[name], theirs[name], atol=2e-3, err_msg=name)


def test_all_forms_of_a_pair_are_the_same_pair() -> None:
    asked = said("a?", system="s")
    forms: list[dict[str, Any]] = [
        {"prompt": asked, "chosen": GOOD, "rejected": BAD},
        {"chosen": [*asked, *GOOD], "rejected": [*asked, *BAD]},
        {"prompt": "a?", "chosen": [*asked, *GOOD], "rejected": [*asked, *BAD]},
    ]
    assert len({text_of(json.dumps(form).encode(), PREFERENCE) for form in forms}) == 1
    texts = text_of(json.dumps({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}).encode(), PREFERENCE)
    assert json.loads(texts or b"")["rejected"] == {"prompt": "1 + 1 =", "completion": " 3"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": said("a", "b")}, "has no fields 'chosen' and 'rejected'; it has 'messages'"),
        ({"prompt": "a", "chosen": "a"}, "has no fields 'chosen' and 'rejected'; it has 'prompt', 'chosen'"),
        ({"chosen": "a", "rejected": "b"}, "no text in the field 'prompt'"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "has the same answer"),
        ({"chosen": said("a", "b"), "rejected": said("a")}, "no messages in the field 'completion'"),
        ({"prompt": said("a"), "chosen": GOOD, "rejected": 3}, "has a number in the field 'rejected', not a list"),
        ({"prompt": None, "chosen": GOOD, "rejected": BAD}, "has null in the field 'prompt', not a list"),
    ],
)
def test_a_row_without_a_pair_says_why(row: dict[str, Any], words: str) -> None:
    with pytest.raises(NotText) as refused:
        text_of(json.dumps(row).encode(), PREFERENCE)
    assert words in str(refused.value)


def test_a_pair_that_is_too_long_is_refused_or_skipped(make: Make) -> None:
    rows = [*ROWS, {"prompt": "why?", "chosen": "because " * 40, "rejected": "no"}]
    with pytest.raises(UnreadableData, match=r"begins with 'why\?'.* tokens, more than a row of 192"):
        jax_trainer.create(make(rows), 0, 1).step(0)
    jax_trainer.create(make(rows, data={"long_conversations": "skip"}), 0, 1).step(0)


@pytest.mark.parametrize(
    ("data", "training", "more", "words"),
    [
        (
            {"format": "chat"},
            {},
            {},
            "is dpo, which learns from pairs, but data.format is chat",
        ),
        ({}, {"objective": None}, {}, "is preference, but no objective learns from pairs"),
        (
            {},
            {},
            {"trainer": {"kind": "torch", "model": "/x"}, "model": {}},
            "has no such objective. Use the built-in trainer",
        ),
        ({}, {"z_loss": 0.1}, {}, "is 0.1, but training.objective.kind is dpo"),
        ({"long_conversations": "cut"}, {}, {}, "would leave no pair; set it to skip"),
        ({}, {"objective": {"kind": "dpo", "beta": 0}}, {}, "training.objective.beta"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(
    make: Make, data: Any, training: Any, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidJobSpec) as refused:
        make(data=data, **training, **more)
    assert words in str(refused.value)


def test_a_model_without_likelihoods_is_refused(make: Make) -> None:
    document = make()
    document["model"] = {"factory": "tests.learners.test_preferences:silent"}
    with pytest.raises(Exception, match=r"has no log_likelihoods\. Use a preset"):
        inner_step.build(model.build(document), Any, z_loss=0.0, accumulation=1)  # type: ignore[arg-type]


def silent(_: dict[str, Any]) -> model.Model:
    """Return a model of a user's own that tells a loss alone."""
    return model.Model(lambda seed: {"x": np.ones(3, np.float32)}, lambda own, _: own["x"].sum(), takes_batches=True)
