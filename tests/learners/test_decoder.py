"""The decoder family against a plain model of it in NumPy, loop by loop, and against what its makers have published."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learners.contract import Batch
from learners.models import decoder as family
from learners.models.plain import transformer
from orchestrator.errors import ConfigurationError
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.presets import DECODERS, PLAIN, Architecture
from orchestrator.models.presets import parameter_shapes as plain_shapes
from orchestrator.parameters import fragment_map
from orchestrator.specification.config import parse_job
from orchestrator.specification.memory_budget import parameter_count_of

QUICK = {"xla_backend_optimization_level": "0"}
"""These programs run once: compiling them well costs more."""
SMALL: dict[str, Any] = {
    "vocabulary_size": 23,
    "width": 32,
    "layer_count": 3,
    "head_count": 4,
    "key_value_head_count": 2,
    "head_size": 8,
}
EVERYTHING = DecoderSection(
    **SMALL,
    hidden_size=24,
    activation="gelu",
    embedding_scale=True,
    gain_from_one=True,
    post_norms=True,
    query_key_norm=True,
    rope_theta=500.0,
    rope_scaling={"kind": "llama3", "factor": 8.0, "original_length": 16},
    window=3,
    global_every=2,
    window_rope_theta=100.0,
    attention_scale=0.3,
    attention_softcap=0.7,
    logit_softcap=2.0,
)
UNTIED = DecoderSection(**SMALL, hidden_size=24, tied_embeddings=False, window=4, global_every=2)
MIXTURE = DecoderSection(**SMALL, experts={"count": 5, "active": 2, "hidden_size": 12, "balance_weight": 0.5})


def drawn(config: DecoderSection) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    return {
        name: generator.standard_normal(shape).astype(np.float32) * (0.4 if name.endswith("norm") else 0.3)
        for name, shape in parameter_shapes(config).items()
    }


def tokens(length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 23, (2, length + 1)).astype(np.int32)


# ── the same in NumPy, one position after another ─────────────────────────────────────────────────────────────────────


def normed(config: DecoderSection, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2) + config.norm_epsilon) * (gain + config.gain_from_one)


def turned(x: np.ndarray, position: int, radians: np.ndarray) -> np.ndarray:
    """Each pair (i, i + half) of a head's dimensions as a complex number, turned."""
    half = len(x) // 2
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * position * radians)
    return np.concatenate([pairs.real, pairs.imag])


def radians_of(config: DecoderSection, is_global: bool) -> np.ndarray:
    theta = config.rope_theta if is_global else config.window_rope_theta
    radians = np.array([theta ** (-2 * pair / config.head_size) for pair in range(config.head_size // 2)])
    scaling = config.rope_scaling
    if scaling is None or not is_global:
        return radians
    for pair, each in enumerate(radians):
        waves = scaling.original_length * each / (2 * math.pi)
        share = min(1.0, max(0.0, (waves - 1) / (4 - 1)))
        radians[pair] = share * each + (1 - share) * each / scaling.factor
    return radians


def softmax(x: np.ndarray) -> np.ndarray:
    odds = np.exp(x - x.max())
    return odds / odds.sum()


def gated(config: DecoderSection, x: np.ndarray) -> np.ndarray:
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference(config: DecoderSection, p: dict[str, np.ndarray], sequence: np.ndarray) -> np.ndarray:
    """Logits (length, vocabulary) of one sequence."""
    p = {name: array.astype(np.float64) for name, array in p.items()}
    stream = p["embed"][sequence] * (math.sqrt(config.width) if config.embedding_scale else 1.0)
    scale = config.attention_scale or config.head_size**-0.5
    groups = config.head_count // config.key_value_head_count
    for layer in range(config.layer_count):
        own = {name.removeprefix("layers."): a[layer] for name, a in p.items() if name.startswith("layers.")}
        is_global = config.is_global(layer)
        radians = radians_of(config, is_global)
        heads: dict[str, list[np.ndarray]] = {"query": [], "key": [], "value": []}
        for position, row in enumerate(stream):
            x = normed(config, row, own["attention.norm"])
            for name, rows in heads.items():
                each = (x @ own[f"attention.{name}"]).reshape(-1, config.head_size)
                if name != "value":
                    if config.query_key_norm:
                        each = np.stack([normed(config, head, own[f"attention.{name}_norm"]) for head in each])
                    each = np.stack([turned(head, position, radians) for head in each])
                rows.append(each)
        after = []
        for position, row in enumerate(stream):
            first = 0 if is_global else max(0, position + 1 - config.window)
            mixed = []
            for head in range(config.head_count):
                pair = head // groups
                scores = np.array(
                    [heads["query"][position][head] @ heads["key"][at][pair] for at in range(first, position + 1)]
                )
                scores = scores * scale
                if config.attention_softcap:
                    scores = config.attention_softcap * np.tanh(scores / config.attention_softcap)
                weights = softmax(scores)
                mixed.append(sum(w * heads["value"][first + at][pair] for at, w in enumerate(weights)))
            x = np.concatenate(mixed) @ own["attention.output"]
            after.append(row + (normed(config, x, own["attention.post_norm"]) if config.post_norms else x))
        stream = np.stack(after)
        for position, row in enumerate(stream):
            x = hidden(config, own, normed(config, row, own["feedforward.norm"]))
            stream[position] = row + (normed(config, x, own["feedforward.post_norm"]) if config.post_norms else x)
    matrix = p["embed" if config.tied_embeddings else "unembed"]
    scores = np.stack([normed(config, row, p["final_norm"]) for row in stream]) @ matrix.T
    return config.logit_softcap * np.tanh(scores / config.logit_softcap) if config.logit_softcap else scores


def hidden(config: DecoderSection, own: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    def one(gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return (gated(config, x @ gate) * (x @ up)) @ down

    if config.experts is None:
        return one(*(own[f"feedforward.{name}"] for name in ("gate", "up", "down")))
    chances = softmax(x @ own["feedforward.router"])
    best = np.argsort(-chances)[: config.experts.active]
    total = chances[best].sum() if config.experts.normalised else 1.0
    return sum(chances[e] / total * one(*(own[f"experts.{name}"][e] for name in ("gate", "up", "down"))) for e in best)


# ── comparisons ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("config", [EVERYTHING, UNTIED, MIXTURE], ids=["everything", "untied", "mixture"])
def test_logits_and_loss_are_those_of_the_plain_model(config: DecoderSection) -> None:
    parameters, batch = drawn(config), tokens(9)

    def both(p: Any, t: Any) -> Any:
        return family.logits(config, jnp.float32, p, t[:, :-1]), family.decoder(config, "float32").loss(p, t)

    logits, loss = jax.jit(both, compiler_options=QUICK)(parameters, batch)
    expected = np.stack([reference(config, parameters, sequence[:-1]) for sequence in batch])
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)
    surprise = [-np.log(softmax(expected[s, t])[batch[s, t + 1]]) for s in range(2) for t in range(9)]
    assert float(loss) == pytest.approx(np.mean(surprise), rel=1e-4)


def test_stretches_and_recomputation_change_neither_loss_nor_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecoderSection(**{**SMALL, "layer_count": 2}, hidden_size=24)
    parameters, batch = drawn(config), tokens(10)

    def measured(remat: family.Remat) -> Any:
        return jax.jit(jax.value_and_grad(family.decoder(config, "float32", remat).loss), compiler_options=QUICK)(
            parameters, batch
        )

    loss, gradient = measured("none")
    monkeypatch.setattr(family, "LOGITS_MAX", 4 * config.vocabulary_size)  # stretches of 4, 4 and 2 positions
    other_loss, other = measured("full")
    assert float(other_loss) == pytest.approx(float(loss), rel=1e-6)
    for name in gradient:
        np.testing.assert_allclose(other[name], gradient[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(UNTIED, id="dense"),
        pytest.param(MIXTURE, id="mixture", marks=pytest.mark.soak("as long again as without experts")),
    ],
)
def test_bfloat16_computes_over_float32_masters(config: DecoderSection) -> None:
    """Layers are scanned and computed again; matrices multiply in bfloat16, and what is trained and its gradient do not."""
    parameters, batch = drawn(config), tokens(9)

    def measured(dtype: str) -> Any:
        built = family.decoder(config, dtype, "full")
        step = jax.value_and_grad(built.objective or built.loss, has_aux=built.objective is not None)
        traced = str(jax.make_jaxpr(step)(parameters, batch))
        value, gradient = jax.jit(step, compiler_options=QUICK)(parameters, batch)
        return traced, float(value[1] if isinstance(value, tuple) else value), gradient

    program, loss, gradient = measured("bfloat16")
    plain_program, plain_loss, plain = measured("float32")
    layers, width = config.layer_count, config.width
    assert "scan[" in program
    assert "bf16[" in program
    assert "bf16[" not in plain_program
    assert f"bf16[{layers},{width}," not in program  # of the stacked masters one layer is cast at a time
    assert loss == pytest.approx(plain_loss, rel=0.02)
    assert loss != plain_loss
    for name, array in gradient.items():
        assert array.dtype == np.float32, name
        apart = np.linalg.norm(array - plain[name]) / np.linalg.norm(plain[name])
        assert 0 < apart < 0.2, f"{name} is {apart:.3f} apart"


def test_the_loss_in_stretches_holds_a_part_of_the_logits_and_dots_keep_matrix_products_only() -> None:
    config = DecoderSection(**{**SMALL, "vocabulary_size": 2**16}, hidden_size=24)
    parameters = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in parameter_shapes(config).items()}
    batch = jax.ShapeDtypeStruct((1, 1025), jnp.int32)
    text = str(jax.make_jaxpr(jax.grad(family.decoder(config, "float32", "dots").loss))(parameters, batch))
    assert "[1,512,65536]" in text
    assert "[1,1024,65536]" not in text


def test_experts_are_balanced_by_the_objective_and_not_by_the_loss() -> None:
    built, parameters, batch = family.decoder(MIXTURE, "float32"), drawn(MIXTURE), tokens(9)
    parameters["layers.feedforward.router"][:] = 0.0  # every expert is as likely, and the first two are chosen
    objective, loss = jax.jit(built.objective, compiler_options=QUICK)(parameters, batch)
    # E Σ f p: of 5 experts two have all choices, one each per token, at a probability of 1/5
    assert float(objective - loss) == pytest.approx(0.5 * 5 * (1 + 1) / 5, rel=1e-5)


@pytest.mark.parametrize("at_once", [2**25, 5 * 23])
def test_the_z_loss_is_the_mean_of_log_z_squared(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(family, "LOGITS_MAX", at_once)  # the second: in two stretches
    built, parameters, batch = family.decoder(UNTIED, "float32", z_loss=0.25), drawn(UNTIED), tokens(9)
    assert built.objective is not None
    objective, loss = jax.jit(built.objective, compiler_options=QUICK)(parameters, batch)
    scores = family.logits(UNTIED, jnp.dtype("float32"), parameters, jnp.asarray(batch[:, :-1]))
    log_z = np.log(np.exp(np.asarray(scores, np.float64)).sum(axis=-1))
    assert float(objective - loss) == pytest.approx(0.25 * np.mean(log_z**2), rel=1e-4)
    assert float(loss) == pytest.approx(float(built.loss(parameters, batch)), rel=1e-6)


def test_operations_of_a_token_are_counted_by_what_its_masks_leave() -> None:
    heads = 4 * 8
    matrices = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 24) + 23 * 32
    seen = [(1 + 2 + 3 + 4 + 4 + 4) / 6, (1 + 2 + 3 + 4 + 5 + 6) / 6, (1 + 2 + 3 + 4 + 4 + 4) / 6]
    assert family.flops_per_token(UNTIED, 6) == pytest.approx(6 * matrices + 12 * heads * sum(seen))
    active = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 32 * 5 + 2 * 3 * 32 * 12) + 23 * 32
    assert family.flops_per_token(MIXTURE, 6) == pytest.approx(6 * active + 12 * heads * 3 * 3.5)


# ── presets ───────────────────────────────────────────────────────────────────────────────────────────────────────────

PUBLISHED = {
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}
"""Parameters of the models that others have published under these names."""


@pytest.mark.parametrize("name", [*PLAIN, *DECODERS])
def test_parameters_are_counted_without_jax_as_the_model_makes_them(name: str) -> None:
    spec = parse_job({"islands": [{"node_group": "here"}], "budget": {"steps": 1}, "model": {"preset": name}})
    network = spec.model.network
    if isinstance(network, Architecture):
        shapes: dict[str, tuple[int, ...]] = dict(plain_shapes(network))
    else:
        made = jax.eval_shape(family.decoder(network, "float32").initialise, 0)
        shapes = {each: array.shape for each, array in made.items()}
        assert {array.dtype for array in made.values()} == {jnp.dtype("float32")}
        assert shapes == parameter_shapes(network)
        axes = network.dimensions
        assert {each: len(axes[each]) for each in shapes} == {each: len(shape) for each, shape in shapes.items()}
    assert parameter_count_of(spec) == sum(map(math.prod, shapes.values()))
    assert parameter_count_of(spec) == PUBLISHED.get(name, parameter_count_of(spec))


@pytest.mark.parametrize("name", [*PLAIN, *DECODERS])
@pytest.mark.parametrize("count", [8, 24])
def test_presets_cut_into_even_fragments(name: str, count: int) -> None:
    shapes: Any = parameter_shapes(DECODERS[name]) if name in DECODERS else plain_shapes(PLAIN[name])
    roles = family.roles(DECODERS[name]) if name in DECODERS else {}
    sizes = fragment_map.sizes(fragment_map.build(shapes, count, roles), shapes)
    assert max(sizes) <= fragment_map.PEAK_MAX * sum(sizes) / count


def test_initial_parameters_follow_from_the_seed_and_predict_nothing_yet() -> None:
    built = family.decoder(UNTIED, "float32")
    start = jax.jit(lambda seed: (p := built.initialise(seed), built.loss(p, tokens(6))), compiler_options=QUICK)
    first, loss = start(7)
    assert float(loss) == pytest.approx(math.log(23), abs=1e-5)
    again, other = start(7)[0], start(8)[0]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["embed"], other["embed"])


@pytest.mark.parametrize(
    ("section", "field", "message"),
    [
        ({"decoder": {**SMALL, "hidden_size": 8, "key_value_head_count": 3}}, "model.decoder", "does not divide"),
        ({"decoder": SMALL}, "model.decoder", "exactly one of hidden_size and experts"),
        (
            {"decoder": {**SMALL, "experts": {"count": 2, "active": 3, "hidden_size": 8}}},
            "model.decoder.experts",
            "active is 3, but there are 2 experts",
        ),
        ({"preset": "qwen3-20m", "decoder": {**SMALL, "hidden_size": 8}}, "model", "leave one of the two out"),
        ({"factory": "my.models:build", "vocabulary_size": 1024}, "model", "factory and vocabulary_size"),
        ({"initial_weights": "/weights", "preset": "micro"}, "model", "initial_weights and the preset 'micro'"),
        ({"decoder": {**SMALL, "hidden_size": 8, "pre_norms": False}}, "model.decoder", "neither pre_norms nor post"),
        ({"decoder": {**SMALL, "hidden_size": 8, "joint_heads_norm": True}}, "model.decoder", "without query_key_norm"),
        (
            {
                "decoder": {
                    **SMALL,
                    "hidden_size": 8,
                    "rope_scaling": {"kind": "yarn", "factor": 2.0, "beta_slow": 40.0},
                }
            },
            "model.decoder.rope_scaling",
            "beta_slow is not below beta_fast",
        ),
        (
            {
                "decoder": {
                    **SMALL,
                    "hidden_size": 8,
                    "rope_theta": 1.0,
                    "rope_scaling": {"kind": "yarn", "factor": 2.0},
                }
            },
            "model.decoder",
            "yarn needs one above 1",
        ),
        ({"preset": "gemma3-2b"}, "model.preset", "gemma3-1b"),
    ],
)
def test_a_model_that_cannot_be_is_refused_with_field_and_reason(section: Any, field: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_job({"islands": [{"node_group": "here"}], "budget": {"steps": 1}, "model": section})
    (problem,) = refused.value.problems
    assert problem.path == field
    assert message in f"{problem.message} {problem.remedy}"


def test_a_tokenizers_vocabulary_takes_the_place_of_the_presets() -> None:
    for name, before in (("nano", 851_968), ("qwen3-20m", 18_881_920)):
        spec = parse_job(
            {
                "islands": [{"node_group": "here"}],
                "budget": {"steps": 1},
                "model": {"preset": name, "vocabulary_size": 1_024},
            }
        )
        network = spec.model.network
        assert network.vocabulary_size == 1_024
        matrices, own = (2, 256) if name == "nano" else (1, 16_384)
        assert parameter_count_of(spec) == before + matrices * (1_024 - own) * network.width


# ── packed rows ───────────────────────────────────────────────────────────────────────────────────────────────────────


def packed(lengths: tuple[int, ...], length: int) -> tuple[Batch, Batch]:
    """Return one row of documents with random weights, the rest padded; and the same documents each in a row of its own."""
    generator, row = np.random.default_rng(7), np.zeros((3, length), np.int32)
    weights, at = np.zeros(length, np.float32), 0
    alone, weights_alone = np.zeros((len(lengths), length), np.int32), np.zeros((len(lengths), length), np.float32)
    for number, count in enumerate(lengths):
        tokens, own = generator.integers(0, 23, count), generator.integers(0, 3, count).astype(np.float32)
        row[:, at : at + count] = tokens, np.full(count, number + 1), np.arange(count)
        weights[at : at + count] = own
        alone[number, :count], weights_alone[number, :count] = tokens, own
        at += count
    return Batch(row[0][None], weights[None], row[1][None], row[2][None]), Batch(alone, weights_alone)


SMALL_PLAIN = Architecture(layer_count=2, width=16, head_size=8, vocabulary_size=23)


@pytest.mark.parametrize("config", [EVERYTHING, UNTIED, SMALL_PLAIN], ids=["all", "untied", "plain"])
def test_a_packed_row_has_the_loss_and_gradient_of_its_documents(
    config: DecoderSection | Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(config, Architecture):
        built, values = transformer(config, "float32"), drawn_plain(config)
    else:
        monkeypatch.setattr(family, "LOGITS_MAX", 10 * 23)  # two stretches of a row
        built, values = family.decoder(config, "float32"), drawn(config)
    row, alone = packed((5, 2, 7, 1), 18)
    step = jax.jit(jax.value_and_grad(built.loss), compiler_options=QUICK)
    (loss, gradient), (expected_loss, expected) = step(values, row), step(values, alone)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    for name in values:
        np.testing.assert_allclose(gradient[name], expected[name], rtol=1e-3, atol=1e-5)


def test_a_row_without_weights_counts_every_token_but_the_first_of_each_document() -> None:
    row, _ = packed((4, 3), 9)
    plain = Batch(row.tokens, None, row.segments, row.positions)
    np.testing.assert_array_equal(plain.target_weights, [[1, 1, 1, 0, 1, 1, 0, 0]])


def test_a_row_of_padding_has_no_loss() -> None:
    nothing = np.zeros((2, 6), np.int32)
    loss = transformer(SMALL_PLAIN, "float32").loss(
        drawn_plain(SMALL_PLAIN), Batch(nothing, nothing * 1.0, nothing, nothing)
    )
    assert float(loss) == 0.0


def drawn_plain(config: Architecture) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    return {
        name: generator.standard_normal(shape).astype(np.float32) * 0.2 for name, shape in plain_shapes(config).items()
    }
