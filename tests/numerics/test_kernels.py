"""The native kernels and their twin in NumPy have the same bits: any codec, shape, number of threads, instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.errors import InternalError
from orchestrator.parameters import kernels
from orchestrator.parameters.codec.registry import CODEC_NAMES, codec
from orchestrator.parameters.kernels import Encoded, twin
from orchestrator.parameters.outer_optimizer import Adam, Momentum, Nesterov, OuterOptimizer, Sgd, state_size
from orchestrator.parameters.outer_optimizer import step as optimizer_step

if kernels.IMPLEMENTATION == "numpy":
    assert "CI" not in os.environ or "ATOLL_KERNELS" in os.environ, (
        "CI needs the native kernels: a compiler was missing"
    )
    pytest.skip("the native kernels are not built, or switched off", allow_module_level=True)

from orchestrator.parameters.kernels import native

THREADS = st.integers(1, 8)
CODECS = st.sampled_from(CODEC_NAMES)
LOSSY = [name for name in CODEC_NAMES if name != "float32"]
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1e-45,
        -1e-40,
        2.0**-100,
        7 * 2.0**-100,
        6.9 * 2.0**-100,
        1e15,
        -3e15,
        3.4e38,
        -3.4028235e38,
        np.inf,
        np.nan,
    ],
    np.float32,
)


def _values(seed: int, count: int, special: int = 0) -> np.ndarray:
    """Random values whose sizes span a few decades, and some special ones among them."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(count, dtype=np.float32) * np.float32(10.0 ** generator.integers(-6, 3))
    if count:
        values[generator.integers(0, count, special)] = generator.choice(SPECIAL, special)
    return values


def _inputs(names: Sequence[str], count: int, seed: int, special: int = 0) -> list[tuple[str, np.ndarray]]:
    return [(name, _encoded(name, _values(seed + m, count, special))) for m, name in enumerate(names)]


def _encoded(name: str, values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.frombuffer(b"".join(codec(name).encode(values)), np.uint8)


def _decoded(name: str, data: np.ndarray, count: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return codec(name).decode(data.data, count).astype(np.float64)


def _same_bits(left: np.ndarray, right: np.ndarray) -> None:
    """Bit for bit, but that one NaN is as good as another."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    if left.dtype.kind == "f":
        numbers = ~(np.isnan(left) & np.isnan(right))
        left, right = left[numbers], right[numbers]
    assert left.tobytes() == right.tobytes()


OPTIMIZERS = (Sgd(0.3), Momentum(0.7, 0.6), Nesterov(0.7, 0.9), Adam(0.01, 0.9, 0.999, 1e-8))


@given(CODECS, st.integers(1, 20_000), st.integers(0, 2**20), st.integers(0, 8), st.booleans(), THREADS)
@example("int4", 128 * 512 + 1, 0, 0, False, 5)
@settings(deadline=None)
def test_encode_and_decode(name: str, count: int, seed: int, special: int, based: bool, threads: int) -> None:
    values, base = _values(seed, count, special), _values(seed + 1, count) if based else None
    written = [np.full(codec(name).data_bytes(count), 77, np.uint8) for _ in range(2)]
    with np.errstate(all="ignore"):
        native.encode(name, values, base, written[0], threads)
        twin.encode(name, values, base, written[1], 1)
        assert written[1].tobytes() == _encoded(name, values if base is None else base - values).tobytes()
        if name == "bfloat16":
            _same_bits(written[0].view(np.uint16) & 0x7FFF, written[1].view(np.uint16) & 0x7FFF)  # the sign of a NaN
        else:
            assert written[0].tobytes() == written[1].tobytes()
        read = [np.empty(count, np.float32) for _ in range(2)]
        native.decode(name, written[1], base, read[0], threads)
        twin.decode(name, written[1], base, read[1], 1)
    _same_bits(*read)


@given(CODECS, st.integers(0, 2**20), st.integers(1, 4_000))
@settings(deadline=None)
def test_any_bytes_decode_alike(name: str, seed: int, count: int) -> None:
    """Scales and codes that no encoder writes: a shard reads what an island says."""
    data = np.random.default_rng(seed).integers(0, 256, codec(name).data_bytes(count), np.uint8)
    read = [np.empty(count, np.float32) for _ in range(2)]
    with np.errstate(all="ignore"):
        native.decode(name, data, None, read[0], 2)
        twin.decode(name, data, None, read[1], 1)
    _same_bits(*read)
    _examined_alike(name, data, count, 3)


def _examined_alike(name: str, data: np.ndarray, count: int, threads: int) -> tuple[float, float]:
    largest, square_norm, checksum = native.examine(name, data, count, 77, threads)
    its_largest, its_norm, its_checksum = twin.examine(name, data, count, 77, 1)
    _same_bits(np.float32([largest]), np.float32([its_largest]))
    _same_bits(np.float64([square_norm]), np.float64([its_norm]))
    assert checksum == its_checksum == crc32c(data.data, 77)
    _same_bits(np.float32([native.examine(name, data, count, None, threads)[0]]), np.float32([largest]))
    return largest, square_norm


@given(CODECS, st.integers(1, 300_000), st.integers(0, 2**20), st.integers(0, 3), THREADS)
@settings(deadline=None, max_examples=50)
def test_examine(name: str, count: int, seed: int, special: int, threads: int) -> None:
    data = _encoded(name, _values(seed, count, special))
    largest, square_norm = _examined_alike(name, data, count, threads)
    values = _decoded(name, data, count)
    if np.isfinite(values).all() and np.abs(values).max() < 1e15:
        assert largest == np.abs(values).max()
        assert square_norm == pytest.approx(float(values @ values), rel=1e-4)


PIECES = st.one_of(
    st.tuples(st.just(1), st.integers(1, 40_000)),
    st.tuples(st.integers(2, 40), st.integers(1, 700)),
    st.tuples(st.integers(2, 5), st.sampled_from([128, 4096, 5000, 8192])),
    st.tuples(st.integers(1, 2), st.integers(262_100, 262_200)),
)
"""Number and length of the matrices of a piece: whole, small ones that begin anywhere, on and across chunks, and slabs."""


@given(st.lists(CODECS, min_size=1, max_size=16), PIECES, st.integers(0, 2**20), st.integers(0, 1), THREADS)
@example(["int4"] * 8, (3, 4096 * 16), 0, 0, 3)
@settings(deadline=None, max_examples=60)
def test_gram(names: list[str], piece: tuple[int, int], seed: int, special: int, threads: int) -> None:
    matrices, length = piece
    count = matrices * length
    inputs = _inputs(names if count < 100_000 else names[:3], count, seed, special)
    products = native.gram(inputs, count, matrices, threads)
    _same_bits(products, twin.gram(inputs, count, matrices, 1))
    values = np.stack([_decoded(name, data, count) for name, data in inputs])
    if np.isfinite(values).all() and np.abs(values).max() < 1e15:
        cut = values.reshape(len(inputs), matrices, length)
        exact = np.einsum("iml,jml->mij", cut, cut)
        norms = np.sqrt(np.einsum("mii->mi", exact))
        assert (np.abs(products - exact) <= 1e-4 * norms[:, :, None] * norms[:, None, :] + 1e-30).all()


@given(
    st.lists(CODECS, min_size=1, max_size=16),
    PIECES,
    st.sampled_from(CODEC_NAMES),
    st.sampled_from(OPTIMIZERS),
    st.booleans(),
    st.integers(0, 2**20),
    st.integers(0, 1),
    THREADS,
)
@settings(deadline=None, max_examples=80)
def test_step(
    names: list[str],
    piece: tuple[int, int],
    down: str,
    optimizer: OuterOptimizer,
    lost: bool,
    seed: int,
    special: int,
    threads: int,
) -> None:
    matrices, length = piece
    count = matrices * length
    inputs = _inputs(names if count < 100_000 else names[:3], count, seed, special)
    generator = np.random.default_rng(seed)
    mixing = generator.random((matrices, len(inputs)), np.float32)
    anchor, first, residue, second = (_values(seed + k, count) for k in (100, 101, 102, 103))
    moments = np.stack((first, np.abs(second)))[: optimizer.moment_count] if optimizer.moment_count else None
    rule, lossy = optimizer.rule(seed % 7), down != "float32"

    def taken(module, threads: int) -> tuple[float, list[np.ndarray | None]]:  # type: ignore[no-untyped-def]
        made = [
            np.empty(count, np.float32),
            None if moments is None else np.empty_like(moments),
            np.empty(count, np.float32) if lossy else None,
            np.full(codec(down).data_bytes(count), 77, np.uint8) if lossy else None,
        ]
        before = (moments, residue if lost else None)
        largest = module.step(inputs, mixing, rule, down, anchor, *before, *made, threads)
        return largest, made

    (largest, ours), (its_largest, its) = taken(native, threads), taken(twin, 1)
    _same_bits(np.float32([largest]), np.float32([its_largest]))
    for left, right in zip(ours, its, strict=True):
        if left is not None and right is not None and (left.dtype != np.uint8 or not np.isnan(largest)):
            _same_bits(left, right)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_step_is_that_of_the_optimizer(optimizer: OuterOptimizer) -> None:
    anchor, gradient = (_values(seed, 10_000) for seed in (1, 2))
    momentum = np.abs(_values(3, state_size(optimizer, 10_000)))
    if optimizer.counts_steps:
        momentum[-1] = 41
    taken = kernels.step(
        anchor,
        momentum,
        None,
        [Encoded("float32", gradient.view(np.uint8), gradient.size)],
        np.ones((1, 1), np.float32),
        optimizer,
    )
    decrement, next_momentum = optimizer_step(optimizer, gradient, momentum)
    assert not optimizer.counts_steps or next_momentum[-1] == 42
    _same_bits(taken.parameters, anchor - decrement)
    _same_bits(taken.momentum, next_momentum)
    assert taken.largest == np.abs(taken.parameters).max()


@pytest.mark.parametrize("down", LOSSY)
def test_nothing_is_lost_on_a_lossy_way_down(down: str) -> None:
    """Θ' is exactly Θ and the decoded update, and update and residue make up the whole step."""
    anchor, gradient, residue = (_values(seed, 5_000) for seed in (1, 2, 3))
    taken = kernels.step(
        anchor,
        np.empty(0, np.float32),
        residue,
        [Encoded("float32", gradient.view(np.uint8), gradient.size)],
        np.ones((1, 1), np.float32),
        Sgd(0.5),
        down,
    )
    assert taken.update is not None
    assert taken.residue is not None
    encoded = Encoded(down, taken.update, anchor.size)
    _same_bits(taken.parameters, kernels.decode(encoded, anchor))
    whole = residue.astype(np.float64) - 0.5 * gradient
    largest = np.abs(whole).max()
    assert np.abs(kernels.decode(encoded) + taken.residue.astype(np.float64) - whole).max() <= 1e-6 * largest
    # what was fed back is made up for: without it the same step leaves another update
    assert np.abs(taken.residue).max() < largest


def test_no_values_at_all() -> None:
    empty = np.empty(0, np.float32)
    nothing = Encoded("int4", b"", 0)
    assert kernels.encode("int4", empty).size == 0
    assert kernels.decode(nothing).size == 0
    assert kernels.examine(nothing, 7) == (0.0, 0.0, 7)
    assert not kernels.gram([nothing, nothing], 3).any()
    assert kernels.step(empty, empty, None, [nothing], np.ones((1, 1)), Nesterov(0.7, 0.9)).largest == 0.0


def test_sizes_that_do_not_fit_are_refused() -> None:
    values = _values(0, 300)
    sound = Encoded("int4", kernels.encode("int4", values), 300)
    with pytest.raises(InternalError, match="not 155"):
        kernels.examine(Encoded("int4", kernels.encode("int4", values)[:-1], 300))
    with pytest.raises(InternalError, match="all must have the same number"):
        kernels.gram([sound, Encoded("float32", values[:200].view(np.uint8), 200)])
    with pytest.raises(InternalError, match="not 7 matrices"):
        kernels.gram([sound], 7)
    with pytest.raises(InternalError, match="do not fit their piece"):
        kernels.step(values[:200], values, None, [sound], np.ones((1, 1)), Nesterov(0.7, 0.9))
    with pytest.raises(InternalError, match="300 values of the optimizer's state are not the 601 of its piece"):
        kernels.step(values, values, None, [sound], np.ones((1, 1)), Adam(0.1, 0.9, 0.99, 1e-8))
    with pytest.raises(InternalError, match="combined"):
        kernels.decode(sound, values[:10])


def test_data_may_begin_at_any_address() -> None:
    """A piece's data begins where the one before it ends."""
    values = _values(3, 9_000)
    for name in CODEC_NAMES:
        data = kernels.encode(name, values)
        moved = np.zeros(data.size + 1, np.uint8)
        moved[1:] = data
        there, here = Encoded(name, moved[1:], 9_000), Encoded(name, data, 9_000)
        assert kernels.examine(there, 7) == kernels.examine(here, 7)
        _same_bits(kernels.gram([there, here]), kernels.gram([here, there]))
        _same_bits(kernels.decode(there), kernels.decode(here))


_DIGEST = """
import numpy as np
from orchestrator.parameters import kernels
from orchestrator.parameters.codec.registry import CODEC_NAMES
from orchestrator.parameters.kernels import Encoded
from orchestrator.parameters.outer_optimizer import Adam, Nesterov
from orchestrator.parameters.tensors import digest
generator = np.random.default_rng(0)
anchor, momentum, residue = (generator.standard_normal(70_000, dtype=np.float32) for _ in range(3))
made = {}
for name in CODEC_NAMES:
    values = [generator.standard_normal(70_000, dtype=np.float32) for _ in range(5)]
    inputs = [Encoded(name, kernels.encode(name, each), each.size) for each in values]
    products = kernels.gram(inputs, 7)
    lost = None if name == "float32" else residue
    state = np.concatenate([momentum, np.abs(momentum), [np.float32(3)]])
    step = kernels.step(anchor, momentum, lost, inputs, products[:, 0] * 1e-5, Nesterov(0.7, 0.9), name)
    adam = kernels.step(anchor, state, lost, inputs, products[:, 0] * 1e-5, Adam(0.01, 0.9, 0.999, 1e-8), name)
    made[name + " adam"] = np.concatenate([adam.parameters, adam.momentum])
    made[name] = np.concatenate([products.reshape(-1).view(np.float32), step.parameters, step.momentum])
    made[name + " examined"] = np.array(kernels.examine(inputs[0], 7)).view(np.float32)
    if step.update is not None:
        made[name + " update"], made[name + " residue"] = step.update, step.residue
print(kernels.IMPLEMENTATION, digest(made), sep="|")
"""


def test_instruction_sets_have_the_same_bits() -> None:
    digests = {}
    for wanted in ("", "avx2", "baseline", "numpy"):
        environment = {**os.environ, "ATOLL_KERNELS": wanted}
        run = subprocess.run(
            [sys.executable, "-c", _DIGEST],
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        implementation, _, digest = run.stdout.strip().partition("|")
        digests[implementation] = digest
        if wanted == "numpy":
            assert implementation == "numpy"
            assert "computed by NumPy" in run.stderr
    assert len(digests) > 1
    assert len(set(digests.values())) == 1, digests
