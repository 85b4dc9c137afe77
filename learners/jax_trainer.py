"""One island's training in JAX: parameters, AdamW state and data position on this process's devices.

Implements ``contract.Trainer``. Knows nothing of fragments, versions, the synchroniser or Ray. Every device of this
process holds all parameters; a batch is split between them when it divides evenly, else each computes all of it.

Three things keep steps back to back. Parameters and optimizer state are donated to the step, so it updates in place. A
snapshot is a copy on the device, whose transfer to the host overlaps the steps that follow; the original cannot be used
for that, because a donated array's pending transfer fails, and a NumPy view of it silently prevents donation on CPU. And
the next batch is drawn while the devices work.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from learners import compilation_cache, inner_optimizer, model
from learners.contract import Arrays, HeldOutLoss, StepResult, batch_size_of
from learners.data import Draw
from learners.host_copy import HostCopy
from learners.text import Text
from orchestrator.errors import DataError
from orchestrator.parameters.pieces import Piece, joined, piece_named
from orchestrator.parameters.roles import Roles

PARAMETERS, OPTIMIZER = "parameters/", "optimizer/"
"""Prefixes of the names in an exported state."""
EVALUATION_BATCH_MAX = 32
HEAP_STEPS = 5
"""For how many inner steps' buffers a process on CPU takes memory before its first."""
HEAP_BYTES_MAX = 512 << 20
"""But no more than this: larger models have longer steps, in which it does not matter."""


def create(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> JaxTrainer:
    """Return the trainer of shard ``shard_index`` of ``shard_count``. Nothing is read, allocated or compiled yet."""
    built = model.build(spec)
    text = Text(spec, built.vocabulary_size)
    return JaxTrainer(
        spec,
        built,
        draw=lambda index: text.draw(index, shard_count),
        shard_index=shard_index,
        text=text,
    )


class DeviceCopy:
    """A ``contract.Snapshot``: device arrays of its own, never donated, on their way to the host.

    Until the arrays are asked for it holds device memory; after that only host memory.
    """

    def __init__(self, arrays: Mapping[str, jax.Array]) -> None:
        self._lock = threading.Lock()
        self._arrays: dict[str, Any] = dict(arrays)
        for array in self._arrays.values():
            array.copy_to_host_async()

    def arrays(self) -> Arrays:
        """Read-only. On CPU these are views of the device's memory, which they keep alive."""
        with self._lock:
            self._arrays = {name: np.asarray(array) for name, array in self._arrays.items()}
            return dict(self._arrays)


class JaxTrainer:
    """See ``contract.Trainer``. ``draw`` makes the source of a shard's batches when the first one is needed.

    Not thread-safe: one thread at a time. Snapshots may be read from any thread.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        built: model.Model,
        draw: Callable[[int], Draw],
        *,
        shard_index: int = 0,
        text: Text | None = None,
    ) -> None:
        self._spec = spec
        self._model = built
        self._make_draw, self._shard_index = draw, shard_index
        self._text = text or Text(spec)
        self._inner = spec["training"]["inner_optimizer"]
        self._horizon_steps = inner_optimizer.horizon_steps(spec)
        self._optimizer = inner_optimizer.build(self._inner, built.roles)
        self._devices = jax.local_devices()
        mesh = Mesh(np.array(self._devices), ("data",))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        divides = batch_size_of(spec) % len(self._devices) == 0
        self._batch_sharding = NamedSharding(mesh, PartitionSpec("data" if divides else None))
        self._copy = jax.jit(jnp.copy, out_shardings=self._replicated)
        self._take = jax.jit(_part, static_argnames=("length", "axis"), out_shardings=self._replicated)
        in_place: dict[str, Any] = {
            "static_argnames": "axis",
            "donate_argnums": 0,
            "out_shardings": self._replicated,
        }
        self._overwrite, self._increase = jax.jit(_overwritten, **in_place), jax.jit(_increased, **in_place)
        self._to_host = ThreadPoolExecutor(1, "to-host")
        self._traced = jax.jit(self._inner_step, donate_argnums=(0, 1), out_shardings=self._replicated)
        self._step: Callable[..., tuple[dict[str, jax.Array], Any, jax.Array]] = self._traced
        self._loss: Any = None
        self._parameters: dict[str, jax.Array] = {}
        self._state: Any = None
        self._cursor = 0
        self._draw: Draw | None = None
        self._drawn: tuple[int, np.ndarray] | None = None

    @property
    def device_count(self) -> int:
        return len(self._devices)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in (self._parameters or self._initial).items()}

    def roles(self) -> Roles:
        return self._model.roles

    def initial_parameters(self) -> Arrays:
        return dict(self._initial)

    def warm_up(self) -> None:
        """Compile, and run each program once on copies, because a first run loads libraries and starts threads.

        The text is read meanwhile: XLA compiles without Python's lock. On CPU the heap grows now to what later steps
        want (``_grow_heap``).
        """
        with ThreadPoolExecutor(1) as beside:
            batch = beside.submit(self._batch)
            with compilation_cache.exclusive():
                self._allocate()
                parameters, state = jax.tree.map(self._copy, (self._parameters, self._state))
                tokens = np.zeros(self._batch_shape, np.int32)
                compiled = self._traced.lower(parameters, state, self._on_devices(tokens), np.float32(0)).compile()
            self._step = compiled
            if self._devices[0].platform == "cpu":
                needed: Any = compiled.memory_analysis()
                _grow_heap(needed.temp_size_in_bytes + needed.output_size_in_bytes)
            jax.block_until_ready(compiled(parameters, state, self._on_devices(tokens), np.float32(0)))
            batch.result()
        if self._spec["evaluation"]["on"] == "islands":
            self._held_out_loss(self._parameters)  # at a boundary, the island would stand still for it

    def step(self, schedule_step: int) -> StepResult:
        self._allocate()
        batch = self._on_devices(self._batch())
        lr = np.float32(inner_optimizer.learning_rate(self._inner, self._horizon_steps, schedule_step))
        self._parameters, self._state, loss = self._step(self._parameters, self._state, batch, lr)
        self._cursor += 1
        self._batch()  # the devices are at work: draw the next one meanwhile
        return StepResult(token_count=batch.shape[0] * (batch.shape[1] - 1), loss=float(loss))

    def snapshot(self, pieces: Iterable[str]) -> DeviceCopy:
        self._allocate()
        named = [piece_named(name) for name in pieces]
        copy = DeviceCopy({piece.name: self._copied(self._parameters[piece.tensor], piece) for piece in named})
        self._to_host.submit(copy.arrays)  # it leaves the devices also if nobody ever asks for it
        return copy

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._allocate()
        for name, array in arrays.items():
            piece = piece_named(name)
            current = self._parameters[piece.tensor]
            if piece.bounds is None:
                self._parameters[name] = self._adopted(array, current)
            else:
                self._change(self._overwrite, piece, array)

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._allocate()
        for name, array in arrays.items():
            self._change(self._increase, piece_named(name), array)

    def export_state(self, pieces: Iterable[str] | None = None) -> HostCopy:
        """Each array goes to the host before the next: on the devices there is never more than one of them, or a piece.

        The state changes with every step, so what has not left the devices by then would have to be copied there: all of it.
        """
        self._allocate()
        named = self._named_state()
        wanted: dict[str | None, list[Piece]] = defaultdict(list, {None: [Piece("")]})
        for piece in map(piece_named, self._parameters if pieces is None else pieces):
            wanted[piece.tensor].append(piece)
        return HostCopy(
            {
                replace(piece, tensor=name).name: self._on_host(array, piece)
                for name, (array, tensor) in named.items()
                for piece in wanted.get(tensor, ())
            }
        )

    def import_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises DataError when the state belongs to another model or optimizer; nothing is changed then.

        Each array is let go of before the next comes: on the devices there is never more than one beside the state.
        """
        self._allocate()
        state = joined(state)
        own = {name: array for name, (array, _) in self._named_state().items()}
        if own.keys() != state.keys():
            differing = sorted(own.keys() ^ state.keys())
            raise DataError(detail=f"a peer's state does not fit this island's model: {differing[:4]} on one side only")
        for name, array in own.items():
            _require_shape(np.asarray(state[name]), array.shape)
        del own, array
        for name in self._parameters:
            current = self._parameters[name]
            self._parameters[name] = self._adopted(np.asarray(state[PARAMETERS + name]), current)
        leaves, tree = jax.tree_util.tree_flatten_with_path(self._state)
        self._state, values = None, dict(leaves)
        del leaves
        for path in values:
            values[path] = self._adopted(np.asarray(state[_state_name(path)]), values[path])
        self._state = jax.tree_util.tree_unflatten(tree, values.values())

    def cursor(self) -> int:
        return self._cursor

    def seek(self, cursor: int) -> None:
        self._cursor = cursor

    def take_shard(self, index: int) -> None:
        self._shard_index, self._draw, self._drawn = index, None, None

    def evaluate(self, arrays: Mapping[str, np.ndarray], limit_s: float = math.inf) -> HeldOutLoss:
        """4 bytes a parameter on every device, where a step has as many for its gradient."""
        parameters = {name: jax.device_put(array, self._replicated) for name, array in joined(arrays).items()}
        loss = self._held_out_loss(parameters)

        def loss_of(tokens: np.ndarray) -> float:
            return float(loss(parameters, jax.device_put(tokens, self._held_out_sharding)))

        return self._text.measure(loss_of, self._held_out_max, limit_s)

    def unigram_loss(self) -> float:
        return self._text.unigram_loss()

    @property
    def _held_out_max(self) -> int:
        return min(EVALUATION_BATCH_MAX, batch_size_of(self._spec))  # activations fit where a step's do

    @property
    def _held_out_sharding(self) -> NamedSharding:
        divides = len(self._text.held_out_batches(self._held_out_max)[0]) % len(self._devices) == 0
        return NamedSharding(self._replicated.mesh, PartitionSpec("data" if divides else None))

    def _held_out_loss(self, parameters: Mapping[str, jax.Array]) -> Any:
        """The loss of a held-out batch, compiled for parameters like these."""
        if self._loss is None:
            tokens = self._text.held_out_batches(self._held_out_max)[0]
            batch = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=self._held_out_sharding)
            with compilation_cache.exclusive():
                self._loss = jax.jit(self._model.loss).lower(parameters, batch).compile()
        return self._loss

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _initial(self) -> Arrays:
        return dict(self._model.initialise(self._spec["seed"]))

    @property
    def _batch_shape(self) -> tuple[int, int]:
        return batch_size_of(self._spec), self._spec["data"]["sequence_length"] + 1

    def _inner_step(self, parameters: Any, state: Any, tokens: jax.Array, lr: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(self._model.loss)(parameters, tokens)
        updates, state = self._optimizer.update(gradient, state, parameters)
        return jax.tree.map(lambda parameter, update: parameter - lr * update, parameters, updates), state, loss

    def _allocate(self) -> None:
        """Put parameters and optimizer state on the devices, unless they are there. The evaluator never needs them."""
        if self._state is None:
            self._parameters = {
                name: self._copy(jax.device_put(a, self._replicated)) for name, a in self._initial.items()
            }
            self._state = jax.jit(self._optimizer.init, out_shardings=self._replicated)(self._parameters)
            del self._initial  # 4 bytes a parameter of the host's memory; whoever asks for it again has it made again

    def _change(self, change: Callable[..., jax.Array], piece: Piece, array: np.ndarray) -> None:
        """Change the piece by ``array`` in the tensor's own memory."""
        current = self._parameters[piece.tensor]
        part = self._on_all(array, piece.shape(current.shape), current.dtype)
        axis, start, _ = piece.bounds or (0, 0, None)
        self._parameters[piece.tensor] = change(current, part, start, axis=axis)

    def _adopted(self, array: np.ndarray, current: jax.Array) -> jax.Array:
        """On the devices, in memory of its own: on CPU ``device_put`` may keep using the caller's."""
        on_device: jax.Array = self._copy(self._on_all(array, current.shape, current.dtype))
        return on_device

    def _on_all(self, array: np.ndarray, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """On every device, perhaps still in the caller's memory. Raises DataError unless it has this shape."""
        _require_shape(array, shape)
        on_device: jax.Array = jax.device_put(array.astype(dtype, copy=False), self._replicated)
        return on_device

    def _on_host(self, array: jax.Array, piece: Piece) -> np.ndarray:
        """The piece of ``array`` in host memory, where no later step changes it. Waits until it is there."""
        # of an array object of its own: a view that the array itself kept would keep the next step from updating it in place
        part = array.addressable_data(0) if piece.bounds is None else self._copied(array, piece)
        return np.array(part) if self._devices[0].platform == "cpu" else np.asarray(part)

    def _copied(self, array: jax.Array, piece: Piece) -> jax.Array:
        """A copy of the piece of ``array``, on the devices."""
        if piece.bounds is None:
            whole: jax.Array = self._copy(array)
            return whole
        axis, start, stop = piece.bounds
        part: jax.Array = self._take(array, start, length=stop - start, axis=axis)
        return part

    def _on_devices(self, tokens: np.ndarray) -> jax.Array:
        on_device: jax.Array = jax.device_put(tokens, self._batch_sharding)
        return on_device

    def _batch(self) -> np.ndarray:
        """The batch at the cursor, drawn once."""
        if self._draw is None:
            self._draw = self._make_draw(self._shard_index)
        if self._drawn is None or self._drawn[0] != self._cursor:
            self._drawn = (self._cursor, self._draw(self._cursor))
        return self._drawn[1]

    def _named_state(self) -> dict[str, tuple[jax.Array, str | None]]:
        """Every array by its name, with the tensor that it belongs to."""
        leaves = jax.tree_util.tree_leaves_with_path(self._state)
        named = {PARAMETERS + name: (array, name) for name, array in self._parameters.items()}
        return named | {_state_name(path): (leaf, self._tensor_of(path)) for path, leaf in leaves}

    def _tensor_of(self, path: Any) -> str | None:
        """Moments are kept in trees like that of the parameters, so the last key on the way there is a tensor's name."""
        key = getattr(path[-1], "key", None)
        return key if key in self._parameters else None


def _part(array: jax.Array, start: int, *, length: int, axis: int) -> jax.Array:
    """The start is an argument, so that all pieces of one length share one program."""
    return jax.lax.dynamic_slice_in_dim(array, start, length, axis)


def _overwritten(array: jax.Array, part: jax.Array, start: int, *, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, part, start, axis)


def _increased(array: jax.Array, part: jax.Array, start: int, *, axis: int) -> jax.Array:
    if part.ndim == 0 or part.shape == array.shape:
        return array + part
    return _overwritten(array, _part(array, start, length=part.shape[axis], axis=axis) + part, start, axis=axis)


def _require_shape(array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise DataError(detail=f"an array of shape {array.shape} cannot take the place of one of {shape}")


def _state_name(path: Any) -> str:
    return OPTIMIZER + jax.tree_util.keystr(path)


def _grow_heap(step_bytes: int) -> None:
    """Take from the kernel now the memory that steps will want later.

    A step's buffers land elsewhere whenever a snapshot lies where the last step's were, and the first touch of that
    many new pages made single steps three times as long. What is freed here stays the process's own under the
    allocator's settings of ``orchestrator.runtime.settings``; elsewhere this changes nothing.
    """
    np.ones(min(HEAP_STEPS * step_bytes, HEAP_BYTES_MAX), np.uint8)
