"""One island's training in JAX: parameters, AdamW state and data position on this process's devices.

Implements ``contract.Trainer``. Knows nothing of fragments, versions, the synchroniser or Ray. Parameters, gradients and
optimizer state are sharded on the island's mesh (``learners.mesh``) and are read and written shard by shard
(``learners.shards``).

Three things keep steps back to back. Parameters and optimizer state are donated to the step, so it updates them in place. A
snapshot is a copy on the device, whose transfer to the host overlaps the following steps. The original cannot be
transferred, because the pending transfer of a donated array fails, and a NumPy view of it silently prevents donation on CPU.
And the next batch is drawn while the devices work.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from learners import compilation_cache, inner_step, mesh, model, optimizer_settings, optimizers, shards
from learners.contract import Arrays, Batch, HeldOutLoss, HeldPart, HostCopy, StepResult
from learners.island_spec import Document, Draw, IslandSpec
from learners.models.model import pairs
from learners.optimizer_settings import DescentCheck
from learners.outbox import LOWEST_NICENESS, lower_priority
from learners.text import Text
from orchestrator.core.vocabulary import Preference
from orchestrator.errors import DataError
from orchestrator.parameters.pieces import Piece, Roles, Shape, joined, piece_named, taken
from orchestrator.replica.work import ExpertLoad

PARAMETERS, OPTIMIZER = "parameters/", "optimizer/"
"""Prefixes of the names in an exported state."""
EVALUATION_BATCH_MAX = 32
HEAP_STEPS = 5
"""On CPU, a process allocates the buffers of this many inner steps before its first step."""
HEAP_BYTES_MAX = 512 << 20
"""The limit of that memory. Larger models have longer steps, for which it makes no difference."""
Program = Callable[..., tuple[Any, ...]]
"""A compiled ``inner_step.InnerStep``."""


def create(spec: Document, shard_index: int, shard_count: int) -> JaxTrainer:
    """Return the trainer of shard ``shard_index`` of ``shard_count``. Nothing is read, allocated or compiled yet."""
    parsed = IslandSpec.of(spec)
    built = model.build(parsed)
    text = Text(parsed, built.vocabulary_size)
    return JaxTrainer(parsed, built, lambda index: text.draw(index, shard_count), shard_index=shard_index, text=text)


class JaxTrainer:
    """See ``contract.Trainer``. ``draw`` creates the source of a shard's batches when the first one is needed.

    Not thread-safe: one thread at a time. Any thread may read snapshots.
    """

    profiler = "jax"

    def __init__(
        self,
        spec: IslandSpec | Document,
        built: model.Model,
        draw: Callable[[int], Draw],
        *,
        shard_index: int = 0,
        text: Text | None = None,
    ) -> None:
        self._spec = spec = IslandSpec.of(spec)
        self._model = built
        self._make_draw, self._shard_index = draw, shard_index
        self.text = text or Text(spec)
        model.require_batches(built, spec)
        self._inner, self._horizon_steps = spec.job.training.inner_optimizer, spec.job.horizon_steps
        self._optimizer = optimizers.build(self._inner, built.roles)
        self._devices = jax.devices() if spec.process_count > 1 else jax.local_devices()
        self._mesh = mesh.of_island(spec, self._devices)
        self._ramp = spec.job.batch_ramp
        self._makers: dict[str, Any] = {}
        self._to_host = ThreadPoolExecutor(1, "to-host")
        factory = self._inner.factory
        self._inner_step = inner_step.build(
            built,
            self._optimizer,
            z_loss=spec.job.training.z_loss,
            accumulation=spec.accumulation,
            measures_slope=factory is not None,
        )
        self._descent = DescentCheck(factory, self._horizon_steps) if factory is not None else None
        self._steps: dict[int, Program] = {}
        self._loss: Any = None
        self._parameters: dict[str, jax.Array] = {}
        self._state: Any = None
        self._cursor = 0
        self._draw: Draw | None = None
        self._drawn: tuple[int, np.ndarray | Batch] | None = None

    @property
    def device_count(self) -> int:
        return len(self._devices)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def roles(self) -> Roles:
        return self._model.roles

    def initial_parameters(self, pieces: Iterable[str] | None = None) -> Arrays:
        if self._model.initial_weights is not None:
            return dict(self._model.initial_weights(pieces))
        if pieces is None or not self._model.traceable:
            return dict(self._initial) if pieces is None else taken(self._initial, pieces)
        names = tuple(pieces)
        return taken({name: self._made_on_host(name) for name in {piece_named(n).tensor for n in names}}, names)

    def warm_up(self) -> None:
        """Compile the step, for each size that a growing batch has, and run it once on zeros, because the first run loads
        libraries and starts threads.

        This comes before anything is allocated, so the devices never hold more than a step needs. The text is read at the
        same time: XLA compiles without Python's lock. On CPU the heap grows now to the size that later steps need
        (``_grow_heap``). If the job waits for this island, the heap grows beside its first steps, and ``first_run`` has
        the first run.
        """
        with ThreadPoolExecutor(1) as beside:
            batch = beside.submit(self._batch)
            with compilation_cache.exclusive():
                self._steps = {part: self._compiled_step(part) for part in range(1, self._ramp.parts)}
                self._steps[self._ramp.parts] = self._compiled_step()
            batch.result()
        if not self._runs_later:
            self._run_once()

    def first_run(self) -> None:
        """Run the step once on zeros, if ``warm_up`` has not. See ``contract.FirstRun``."""
        if self._runs_later:
            self._run_once()

    @property
    def _runs_later(self) -> bool:
        """Return whether ``first_run`` has the first run: not in one of several processes, which run together."""
        return self._spec.returns and self._spec.process_count == 1

    def _run_once(self) -> None:
        on_cpu = self._devices[0].platform == "cpu"
        if on_cpu and not self._spec.returns:
            _grow_heap(self._steps[self._ramp.parts])
        zeros = jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._outline),
            out_shardings=self._sharded,
        )
        tokens = self.on_devices(jax.tree.map(np.zeros_like, self._batch()))
        jax.block_until_ready(self.program(*zeros(), tokens, np.float32(0)))
        self._allocate()
        if self._spec.job.evaluation.on == "islands":
            self._held_out_loss()  # compiling it at a boundary would stop the island
        if on_cpu and self._spec.returns:
            whole = (self._steps[self._ramp.parts],)
            threading.Thread(target=_grow_heap_beside, args=whole, name="heap", daemon=True).start()

    @property
    def program(self) -> Program:
        """The compiled inner step of parameters, state, ``on_devices(batch)`` and scale. It consumes the first two."""
        return self._program(self._ramp.parts)

    def _program(self, part: int) -> Program:
        step, frozen = self._steps.get(part, self._traced), self._frozen
        return (lambda *arguments: step(*arguments, frozen)) if frozen else step

    def on_devices(self, tokens: np.ndarray | Batch) -> Any:
        """Put a batch on the devices as ``program`` expects it."""
        return self._placed_batch(tokens, mesh.batch_sharding(self._mesh, len(Batch.of(tokens).targets)))

    @staticmethod
    def _placed_batch(tokens: np.ndarray | Batch, sharding: NamedSharding) -> Any:
        return jax.tree.map(lambda array: shards.batch_placed(array, sharding), tokens)

    def arrays_on_devices(self) -> tuple[Mapping[str, jax.Array], Any]:
        """Return the parameters and the optimizer's state, which the next step will change in place."""
        self._allocate()
        return self._parameters, self._state

    def arrays_frozen(self) -> Mapping[str, jax.Array]:
        """Return the tensors on the devices that are not trained."""
        return self._frozen

    def memory_analysis(self) -> Any:
        """Compile the step and return XLA's figures of its memory on one device, in bytes. Nothing is allocated."""
        return self._compiled_step().memory_analysis()

    def step(self, schedule_step: int, lr_ratio: float = 1.0) -> StepResult:
        self._allocate()
        part = self._ramp.part(schedule_step)
        count = self._batch_shape(part)[0]
        batch = self.on_devices(jax.tree.map(lambda rows: rows[:count], self._batch()))
        scale = np.float32(lr_ratio * optimizer_settings.update_scale(self._inner, self._horizon_steps, schedule_step))
        self._parameters, self._state, *figures = self._program(part)(self._parameters, self._state, batch, scale)
        self._cursor += 1
        self._batch()  # draw the next batch while the devices work
        loss, slope, gradient_norm, *loads = jax.device_get(figures)  # the device is awaited here only
        if self._descent is not None:
            self._descent.judge(float(slope))
        ideal_seconds = None if self._ideal_seconds is None else self._ideal_seconds * part / self._ramp.parts
        return StepResult(
            math.prod(Batch.of(batch).targets.shape),
            float(loss),
            self.text.flaws(),
            optimizer_settings.known_rate(self._inner, float(scale)),
            float(gradient_norm),
            ideal_seconds,
            ExpertLoad(*loads[0].tolist()) if loads else None,
        )

    def held(self, piece: str) -> HeldPart:
        named = piece_named(piece)
        return shards.held_part(self._shardings[named.tensor], self._shapes[named.tensor], named)

    def snapshot(self, pieces: Iterable[str]) -> shards.DeviceCopy:
        self._allocate()
        named = [piece_named(name) for name in pieces]
        copy = shards.DeviceCopy({piece.name: shards.taken(self._parameters[piece.tensor], piece) for piece in named})
        self._to_host.submit(copy.arrays)  # it leaves the devices even if nothing reads it
        return copy

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._change(arrays, added=False)

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._change(arrays, added=True)

    def export_state(self, pieces: Iterable[str] | None = None) -> HostCopy:
        """Copy the state to the host one array at a time: the devices never hold more than one array, or piece, extra.

        The copy is complete when this returns, because the next step changes the state in place.
        """
        self._allocate()
        return HostCopy(
            {
                name: self._on_host(array, piece)
                for name, array, piece in self._state_of(self._parameters if pieces is None else pieces)
            }
        )

    def held_state(self, pieces: Iterable[str]) -> dict[str, HeldPart]:
        self._allocate()
        return {
            name: shards.held_part(shards.named(array), array.shape, piece)
            for name, array, piece in self._state_of(pieces)
        }

    def _state_of(self, pieces: Iterable[str]) -> Iterable[tuple[str, jax.Array, Piece]]:
        """Yield every array of the state that belongs to these pieces, or to no tensor, with the piece of it that does."""
        wanted: dict[str | None, list[Piece]] = defaultdict(list, {None: [Piece("")]})
        for piece in map(piece_named, pieces):
            wanted[piece.tensor].append(piece)
        for name, (array, tensor) in self._named_state().items():
            for piece in wanted.get(tensor, ()):
                yield replace(piece, tensor=name).name, array, piece

    def import_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a peer's state. Raises DataError, and changes nothing, if it belongs to another model or optimizer.

        Each old array is released before the next new one is placed, so the devices never hold more than one extra.
        """
        self._allocate()
        state = joined(state)
        own = {name: array for name, (array, _) in self._named_state().items()}
        if own.keys() != state.keys():
            differing = sorted(own.keys() ^ state.keys())
            raise DataError(
                detail=f"a peer's state does not fit this island's model: only one of them has {differing[:4]}"
            )
        for name, array in own.items():
            shards.require_fitting(np.asarray(state[name]), array)
        del own, array
        for name in self._parameters:
            current = self._parameters[name]
            self._parameters[name] = shards.put_in_place_of(current, np.asarray(state[PARAMETERS + name]))
        if self._descent is not None:
            self._descent.state_was_imported()
        leaves, tree = jax.tree_util.tree_flatten_with_path(self._state)
        self._state, values = None, dict(leaves)
        del leaves
        for path in values:
            values[path] = shards.put_in_place_of(values[path], np.asarray(state[state_name(path)]))
        self._state = jax.tree_util.tree_unflatten(tree, values.values())

    def cursor(self) -> int:
        return self._cursor

    def seek(self, cursor: int) -> None:
        self._cursor = cursor

    def take_shard(self, index: int) -> None:
        self._shard_index, self._draw, self._drawn = index, None, None

    def evaluate(self, arrays: Mapping[str, np.ndarray], limit_s: float = math.inf) -> HeldOutLoss:
        """Measure whole parameters, which take as much memory on the devices as a step's gradient."""
        return self._measured(self._on_mesh(arrays), limit_s)

    def evaluate_fragments(
        self, fragments: Iterable[Mapping[str, np.ndarray]], limit_s: float = math.inf
    ) -> HeldOutLoss:
        """Do the same as ``evaluate``. A tensor is on the host only until all of it has arrived."""
        return self._measured(self._brought(fragments), limit_s)

    def _measured(self, parameters: Mapping[str, jax.Array], limit_s: float) -> HeldOutLoss:
        compiled, figures = self._held_out_loss(), list[tuple[float, tuple[float, ...]]]()

        def loss_of(tokens: np.ndarray | Batch) -> float:
            result = compiled(parameters, self._placed_batch(tokens, self._held_out_sharding), self._frozen)
            loss, *of_pairs = map(float, result)
            if of_pairs:
                figures.append((pair_count(tokens), tuple(of_pairs)))
            return loss

        def pair_count(tokens: Any) -> float:
            return float(jnp.sum(pairs(tokens)))

        if self._model.preferences is None:
            return self.text.measure(loss_of, self._held_out_max, limit_s)
        measured = self.text.measure(loss_of, self._held_out_max, limit_s, pair_count)
        used = figures[: measured.sequence_count // len(self.text.held_out_batches(self._held_out_max)[0])]
        total = math.fsum(count for count, _ in used) or 1.0
        accuracy, margin = (math.fsum(count * of_pairs[at] for count, of_pairs in used) / total for at in range(2))
        return replace(measured, preference=Preference(accuracy, margin))

    def unigram_loss(self) -> float:
        """Return what ``Text.unigram_loss`` does, or NaN for an objective of pairs, which has no such thing."""
        return self.text.unigram_loss() if self._model.preferences is None else math.nan

    @property
    def _held_out_max(self) -> int:
        return min(EVALUATION_BATCH_MAX, self._spec.batch_size)  # its activations need no more memory than a step's

    @property
    def _held_out_sharding(self) -> NamedSharding:
        return mesh.batch_sharding(self._mesh, len(self.text.held_out_batches(self._held_out_max)[0]))

    def _held_out_loss(self) -> Any:
        """The compiled loss of a held-out batch."""
        if self._loss is None:
            tokens = self.text.held_out_batches(self._held_out_max)[0]
            sharding = self._held_out_sharding
            batch = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding), tokens)
            (parameters, _), frozen = self._abstract, self._abstract_frozen
            with compilation_cache.exclusive():
                self._loss = jax.jit(self._on_this_mesh(self._whole_loss)).lower(parameters, batch, frozen).compile()
        return self._loss

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def _ideal_seconds(self) -> float | None:
        """The shortest time of a step of a whole batch; None if the model's operations or the devices' peak are unknown."""
        count, length = self._model.flops_per_token, self._spec.job.data.sequence_length
        flops = None if count is None else self._spec.tokens_per_step * count(length)
        return self._spec.ideal_seconds(flops, self._devices[0].device_kind, len(self._devices))

    @cached_property
    def _initial(self) -> Arrays:
        """The initial parameters on the host. If the model can be traced, all devices create one tensor after another."""
        if not self._model.traceable:
            return dict(self._model.initialise(self._spec.job.seed))
        return {name: self._made_on_host(name) for name in self._shapes}

    def _made_on_host(self, name: str) -> np.ndarray:
        return shards.taken(self._made(name), Piece(name)).on_host()

    def _made(self, name: str) -> jax.Array:
        if name not in self._makers:  # a tensor of several fragments is made once for each
            self._makers[name] = jax.jit(
                lambda: self._model.initialise(self._spec.job.seed)[name], out_shardings=self._shardings[name]
            )
        array: jax.Array = self._makers[name]()
        return array

    @cached_property
    def _shapes(self) -> Mapping[str, Shape]:
        """The shapes of the parameters. Raises InvalidJobSpec if a mesh does not divide them (this island's, or any)."""
        initialise = partial(self._model.initialise, self._spec.job.seed)
        tensors = jax.eval_shape(initialise) if self._model.traceable else self._initial
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if (frozen := self._model.frozen) is None:
            mesh.require_division(self._spec, shapes, self._model.axes, self._model.roles)
        else:
            mesh.require_division(self._spec, frozen.model, frozen.axes, frozen.roles)
        return shapes

    @cached_property
    def _shardings(self) -> dict[str, NamedSharding]:
        mesh.require_boxes(self._mesh)
        return mesh.shardings(self._mesh, self._shapes, self._model.axes, self._model.roles)

    @cached_property
    def _outline(self) -> tuple[dict[str, Any], Any]:
        """The shapes and types of the parameters and of the optimizer's state."""
        parameters = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in self._shapes.items()}
        return parameters, jax.eval_shape(self._optimizer.init, parameters)

    @cached_property
    def _sharded(self) -> tuple[dict[str, NamedSharding], Any]:
        """The shardings of the parameters and of the optimizer's state."""
        return self._shardings, mesh.like_parameters(self._outline[1], self._shapes, self._shardings, self._mesh)

    @property
    def _abstract(self) -> tuple[dict[str, Any], Any]:
        """The outline with its shardings."""

        def lying(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        abstract: tuple[dict[str, Any], Any] = jax.tree.map(lying, self._outline, self._sharded)
        return abstract

    @cached_property
    def _abstract_frozen(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The outline of the tensors that are not trained, with their shardings."""
        frozen = self._model.frozen
        if frozen is None:
            return {}
        shardings = mesh.shardings(self._mesh, frozen.shapes, frozen.axes, frozen.roles)
        return {
            name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=shardings[name])
            for name, tensor in frozen.outline.items()
        }

    @cached_property
    def _frozen(self) -> dict[str, jax.Array]:
        """The tensors that are not trained, put on the devices one by one when they are first needed."""
        frozen = self._model.frozen
        if frozen is None:
            return {}

        def on_devices(name: str, outline: jax.ShapeDtypeStruct) -> jax.Array:
            if frozen.traceable:
                program: Any = jax.jit(lambda: frozen.value(name).astype(outline.dtype), out_shardings=outline.sharding)
                drawn: jax.Array = program()
                return drawn
            sharding: Any = outline.sharding
            return shards.placed(np.asarray(frozen.value(name)), sharding, outline.shape, outline.dtype)

        return {name: on_devices(name, outline) for name, outline in self._abstract_frozen.items()}

    def _whole_loss(self, parameters: Any, tokens: jax.Array, frozen: Any) -> tuple[jax.Array, ...]:
        """Return the loss, with accuracy and margin for an objective of pairs."""
        tensors, measured = inner_step.with_frozen(parameters, frozen), self._model.preferences
        return (self._model.loss(tensors, tokens),) if measured is None else measured(tensors, Batch.of(tokens))

    @cached_property
    def _traced(self) -> Any:
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        step = self._on_this_mesh(self._inner_step)
        figures = [everywhere] * (3 if self._model.measured is None else 4)
        return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*self._sharded, *figures))

    def _on_this_mesh(self, traced: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function so that ``mesh.constrained`` knows the mesh while it is traced."""

        def on_mesh(*arguments: Any) -> Any:
            with use_abstract_mesh(self._mesh.abstract_mesh):
                return traced(*arguments)

        return on_mesh

    def trace(self, part: int | None = None) -> Any:
        """Lower the inner step for XLA, which reveals what a model cannot do. Nothing is compiled or allocated.

        ``part`` is that of a growing batch; all of it if absent.
        """
        shape = self._batch_shape(self._ramp.parts if part is None else part)
        sharding = mesh.batch_sharding(self._mesh, shape[0])
        tokens: Any = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
        data = self._spec.job.data
        if data.has_segments:
            weights = jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
            tokens = Batch(tokens, weights if data.has_conversations else None, tokens, tokens)
        frozen = (self._abstract_frozen,) if self._abstract_frozen else ()
        return self._traced.lower(*self._abstract, tokens, jax.ShapeDtypeStruct((), np.float32), *frozen)

    def _compiled_step(self, part: int | None = None) -> Any:
        return self.trace(part).compile()

    def _batch_shape(self, part: int) -> tuple[int, int]:
        return self._spec.batch_size * part // self._ramp.parts, self._spec.job.data.sequence_length + 1

    def _allocate(self) -> None:
        """Put parameters and optimizer state on the devices, unless they are there. The evaluator never needs this."""
        if self._state is None:
            if self._model.traceable:
                initialise = partial(self._model.initialise, self._spec.job.seed)
                program: Any = jax.jit(initialise, out_shardings=self._shardings)
                self._parameters = dict(program())
            else:
                self._parameters = {name: self._placed(self._initial[name], name) for name in self._shapes}
                del self._initial  # frees the host's memory; it can be computed again
            self._state = jax.jit(self._optimizer.init, out_shardings=self._sharded[1])(self._parameters)

    def _placed(self, array: np.ndarray, tensor: str) -> jax.Array:
        return shards.placed(array, self._shardings[tensor], self._shapes[tensor], np.float32)

    def _change(self, arrays: Mapping[str, np.ndarray], *, added: bool) -> None:
        self._allocate()
        for name, array in arrays.items():
            piece = piece_named(name)
            current = self._parameters[piece.tensor]
            self._parameters[piece.tensor] = shards.changed(current, piece, array, added=added)

    def _on_mesh(self, arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Put these tensors, or all their pieces, on the devices one by one. They may still share the caller's memory."""
        of_tensor: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
        for name, array in arrays.items():
            of_tensor[piece_named(name).tensor][name] = array
        return {
            tensor: shards.placed(
                joined(pieces)[tensor], self._shardings[tensor], self._shapes[tensor], np.float32, owned=False
            )
            for tensor, pieces in of_tensor.items()
        }

    def _brought(self, fragments: Iterable[Mapping[str, np.ndarray]]) -> dict[str, jax.Array]:
        """Put each tensor on the devices as soon as it is complete. Raises DataError if one is incomplete at the end."""
        brought: dict[str, jax.Array] = {}
        incomplete: dict[str, np.ndarray] = {}
        missing_counts = {tensor: math.prod(shape) for tensor, shape in self._shapes.items()}

        def take(piece: Piece, array: np.ndarray) -> None:
            tensor, shape = piece.tensor, self._shapes[piece.tensor]
            if array.shape != piece.shape(shape):
                raise DataError(detail=f"{piece.name} has the shape {array.shape}, expected {piece.shape(shape)}.")
            if piece.bounds is not None:
                if tensor not in incomplete:
                    incomplete[tensor] = np.empty(shape, np.float32)
                incomplete[tensor][piece.index] = array
                array = incomplete[tensor]
            missing_counts[tensor] -= math.prod(piece.shape(shape))
            if missing_counts[tensor] == 0:
                brought[tensor] = shards.placed(array, self._shardings[tensor], shape, np.float32, owned=False)
                incomplete.pop(tensor, None)

        for arrays in fragments:
            for name in arrays:
                take(piece_named(name), arrays[name])
            del arrays  # before the next ones arrive
        if missing := sorted(tensor for tensor, count in missing_counts.items() if count):
            raise DataError(detail=f"Parts of {', '.join(missing[:3])} are missing, so it cannot be measured.")
        return brought

    def _on_host(self, array: jax.Array, piece: Piece) -> np.ndarray:
        """Copy the piece of ``array`` to the host, where no later step changes it, and wait for it."""
        part = shards.taken(array, piece, copied=False).on_host()
        return np.array(part) if self._devices[0].platform == "cpu" and not part.flags.owndata else part

    def _batch(self) -> np.ndarray | Batch:
        """Return the batch at the cursor. It is drawn once."""
        if self._draw is None:
            self._draw = self._make_draw(self._shard_index)
        if self._drawn is None or self._drawn[0] != self._cursor:
            self._drawn = (self._cursor, self._draw(self._cursor))
        return self._drawn[1]

    def _named_state(self) -> dict[str, tuple[jax.Array, str | None]]:
        """Return every array by its name, with the tensor that it belongs to."""
        leaves = jax.tree_util.tree_leaves_with_path(self._state)
        named = {PARAMETERS + name: (array, name) for name, array in self._parameters.items()}
        return named | {
            state_name(path): (leaf, mesh.tensor_of(path, leaf.shape, self._shapes)) for path, leaf in leaves
        }


def state_name(path: Any) -> str:
    return OPTIMIZER + jax.tree_util.keystr(path)


def _grow_heap(compiled: Any) -> None:
    """Take from the kernel now the memory that steps of this program will need later.

    A step's buffers get other addresses whenever a snapshot occupies those of the last step, and the first touch of that
    many new pages made single steps three times as long. Memory freed here stays with the process under the allocator's
    settings of ``orchestrator.runtime.settings``; with other settings this has no effect.
    """
    needed = compiled.memory_analysis()
    step_bytes = needed.temp_size_in_bytes + needed.output_size_in_bytes
    np.ones(min(HEAP_STEPS * step_bytes, HEAP_BYTES_MAX), np.uint8)


def _grow_heap_beside(compiled: Any) -> None:
    """Grow the heap while cores are idle: at the priority of training, the island's first steps took half as long again."""
    lower_priority(LOWEST_NICENESS)
    _grow_heap(compiled)
