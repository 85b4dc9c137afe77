"""An island without JAX: tensors of the right sizes, steps of the right length, a loss that falls. For tests and drills.

"Training" moves each parameter towards a hidden target, with noise that depends on the shard, so islands drift apart and a
merge of their parameters is better than any of them. A step lasts ``synthetic.step_s`` by a deadline clock, including its
arithmetic. Time lost to other processes (while this one is stopped) is not made up for.

It must not import JAX, even indirectly: its processes start in a tenth of a second and need little memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

import numpy as np

from learners.contract import Arrays, HeldOutLoss, HeldPart, HostCopy, StepResult
from learners.held_out import measure
from learners.island_spec import Document, IslandSpec, origin
from orchestrator.errors import DataError
from orchestrator.parameters.pieces import BY_NAME, Roles, joined, piece_named, taken

PULL = 0.02
"""The fraction of the distance to its target that a parameter covers in one step."""
NOISE = 0.01
BLOCK_MAX = 1 << 20
"""A step touches at most this many parameters, so that large models keep short steps."""
LOSS_FIRST, LOSS_LAST = math.log(256), 1.0


def create(spec: Document, shard_index: int, shard_count: int) -> SyntheticTrainer:
    """Return the synthetic trainer of shard ``shard_index``. ``shard_count`` matters to a resumed job."""
    return SyntheticTrainer(spec, shard_index, shard_count)


class SyntheticTrainer:
    """See ``contract.Trainer``."""

    device_count = 1

    def __init__(self, spec: IslandSpec | Document, shard_index: int, shard_count: int = 1) -> None:
        spec = IslandSpec.of(spec)
        section = spec.job.synthetic
        self._step_s, self._jitter, self._start_s = section.step_s, section.step_jitter_ratio, section.start_s
        self._shapes = _shapes(section.parameters, spec.job.synchroniser.fragments)
        self._seed, self._shard_index, self._shard_count = spec.job.seed, shard_index, shard_count
        self._resumptions = spec.resumptions
        self._batch_size, self._tokens_per_step, self._tokens_of = spec.batch_size, spec.tokens_per_step, spec.tokens_of
        self._target = self._random(1)
        self._parameters = self._random(0)
        self._process_count = spec.process_count
        self._sequence_count = spec.job.evaluation.sequences
        self._steps = 0
        self._cursor = 0
        self._deadline = 0.0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def roles(self) -> Roles:
        return BY_NAME

    def initial_parameters(self, pieces: Iterable[str] | None = None) -> Arrays:
        tensors = self._random(0)
        return tensors if pieces is None else taken(tensors, pieces)

    def warm_up(self) -> None:
        time.sleep(self._start_s)

    def step(self, schedule_step: int) -> StepResult:
        first = self._cursor * self._batch_size
        shard, sequence = origin(self._resumptions, self._shard_index, self._shard_count, first)
        batch = sequence // self._batch_size
        generator = np.random.default_rng([self._seed, shard, batch])
        names = sorted(self._shapes)
        touched = 0
        for offset in range(len(names)):
            name = names[(batch + offset) % len(names)]
            touched += math.prod(self._shapes[name])
            if touched > BLOCK_MAX and offset:
                break
            parameters = self._parameters[name]
            noise = generator.standard_normal(parameters.shape, np.float32)
            moved = parameters + np.float32(PULL) * (self._target[name] - parameters) + np.float32(NOISE) * noise
            self._parameters[name] = moved.astype(np.float32, copy=False)
        self._steps += 1
        self._cursor += 1
        tokens = self._tokens_of(schedule_step)
        self._wait(generator.uniform(-1, 1), tokens / self._tokens_per_step)
        return StepResult(token_count=tokens, loss=self._loss({name: self._parameters[name]}))

    def held(self, piece: str) -> HeldPart:
        named = piece_named(piece)
        shape = named.shape(self.tensor_shapes()[named.tensor])
        return HeldPart(tuple((0, size) for size in shape), tuple(range(self._process_count)))

    def snapshot(self, pieces: Iterable[str]) -> HostCopy:
        # a step creates new arrays, so the present ones can be given away as they are
        return HostCopy(taken(self._parameters, pieces))

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, part in self._renewed(arrays).items():
            part[...] = arrays[name]

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, part in self._renewed(arrays).items():
            part += arrays[name]

    def export_state(self, pieces: Iterable[str] | None = None) -> HostCopy:
        parameters = self._parameters if pieces is None else taken(self._parameters, pieces)
        return HostCopy({**parameters, "steps": np.array(self._steps)})

    def held_state(self, pieces: Iterable[str]) -> Mapping[str, HeldPart]:
        return {
            "steps": HeldPart((), tuple(range(self._process_count))),
            **{piece: self.held(piece) for piece in pieces},
        }

    def import_state(self, state: Mapping[str, np.ndarray]) -> None:
        tensors = joined(state)
        self.load({name: tensors[name] for name in self._shapes})
        self._steps = int(state["steps"])

    def cursor(self) -> int:
        return self._cursor

    def seek(self, cursor: int) -> None:
        self._cursor = cursor

    def take_shard(self, index: int) -> None:
        self._shard_index = index

    def evaluate(self, arrays: Mapping[str, np.ndarray], limit_s: float = math.inf) -> HeldOutLoss:
        tensors = joined(arrays)
        return measure([tensors], self._sequence_count, self._loss, limit_s)

    def unigram_loss(self) -> float:
        return LOSS_FIRST * 0.9

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _renewed(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """Return views of the present values of these pieces, in memory that no snapshot shares."""
        pieces = [piece_named(name) for name in arrays]
        for piece in pieces:
            shape = piece.shape(self._shapes[piece.tensor])
            if arrays[piece.name].shape != shape:
                actual = arrays[piece.name].shape
                raise DataError(detail=f"{piece.name}: shape {actual} cannot replace {shape}")
        self._parameters |= {tensor: self._parameters[tensor].copy() for tensor in {piece.tensor for piece in pieces}}
        return taken(self._parameters, arrays)

    def _random(self, stream: int) -> Arrays:
        generator = np.random.default_rng([self._seed, 1 << 20, stream])
        return {name: generator.standard_normal(shape, np.float32) for name, shape in self._shapes.items()}

    def _loss(self, arrays: Mapping[str, np.ndarray]) -> float:
        """Map the mean squared distance to a loss, from ln 256 at a random place to LOSS_LAST at the target."""
        squares = math.fsum(float(np.vdot(d := arrays[name] - self._target[name], d)) for name in sorted(arrays))
        distance = squares / sum(array.size for array in arrays.values())
        return LOSS_LAST + (LOSS_FIRST - LOSS_LAST) * distance / 2  # two standard normals are √2 apart

    def _wait(self, jitter: float, batch_ratio: float) -> None:
        """Sleep until the step's deadline: one step after the last, unless that has long passed."""
        now = time.monotonic()
        length = self._step_s * (1 + self._jitter * jitter) * batch_ratio
        self._deadline += length
        if not now <= self._deadline <= now + length:
            self._deadline = now + (length if self._deadline > now else 0)
        time.sleep(max(0.0, self._deadline - now))


def _shapes(parameter_count: int, fragment_count: int) -> dict[str, tuple[int, ...]]:
    """Return two matrices per fragment and an embedding, with ``parameter_count`` parameters up to rounding."""
    count = 2 * fragment_count
    columns = 8 if parameter_count >= 16 * (count + 1) else 1
    rows = max(1, parameter_count // (count + 1) // columns)
    return {"embed": (rows, columns), **{f"blocks.{index}.weight": (rows, columns) for index in range(count)}}
