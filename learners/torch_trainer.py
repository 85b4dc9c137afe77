"""One island's training in PyTorch: a causal language model, its optimizer and its data position, in one process.

Implements ``contract.Trainer``. Knows nothing of fragments, versions, the synchroniser or Ray. The
module comes from ``learners.torch_model``.

Parameters that require a gradient are the job's tensors, by the module's own names, in float32. Frozen parameters and
buffers do not travel, so every process must create them alike: from the folder, or from the specification and its seed.
Computation in bfloat16 is ``torch.autocast``'s.

The schedule multiplies the learning rate that each parameter group was created with.

An exported state has the parameters and what the optimizer keeps for each: tensors, and numbers such as a count of
steps. The optimizer creates these at its first step, so a state may be without them.

An island whose entry has ``framework: torch``, in a job that trains a decoder in JAX, has the tensors and the state of
JAX (``torch_layout.DecoderLayout``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from learners.contract import Arrays, Batch, HeldOutLoss, HeldPart, HostCopy, StepResult
from learners.factories import guarded
from learners.island_spec import Document, Draw, IslandSpec
from learners.optimizer_settings import OF_TORCH, DescentCheck, learning_rate
from learners.text import Text
from learners.torch_layout import (
    DecoderLayout,
    device_type,
    held_of,
    local,
    local_part,
    process_of_island,
    rows_of,
    sharded,
    with_others,
)
from learners.torch_model import (
    MODEL,
    auxiliary_of,
    checkpoint_activations,
    documents_of,
    flops_per_token,
    hold_frozen_in,
    logits_of,
    losses_of,
    members,
    module_of,
    numbers_of,
    optimizers_of,
    require_causal,
    require_documents,
    roles_of,
    slope_of,
    trained_parameters,
    weighted_mean,
)
from orchestrator.errors import ConfigurationError, DataError
from orchestrator.parameters.pieces import Piece, Roles, joined, piece_named, taken

PARAMETERS, OPTIMIZER, OF_GROUP = "parameters/", "optimizer/", "optimizer-group/"
"""Prefixes of the names in an exported state."""
EVALUATION_BATCH_MAX = 32
FAULTS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of a device or its memory, after which another start may succeed."""


def create(spec: Document, shard_index: int, shard_count: int) -> TorchTrainer:
    """Return the trainer of shard ``shard_index`` of ``shard_count``. Its model is on the CPU, and no text is read yet."""
    parsed = IslandSpec.of(spec)
    if threads := os.environ.get("NPROC"):  # set with the variables that JAX reads; torch reads others
        torch.set_num_threads(int(threads))
    return TorchTrainer(parsed, shard_index, shard_count)


class TorchTrainer:
    """See ``contract.Trainer``. Not thread-safe: one thread at a time. Any thread may read snapshots."""

    profiler = "torch"

    def __init__(self, spec: IslandSpec, shard_index: int, shard_count: int) -> None:
        self._spec, self._shard_index, self._shard_count = spec, shard_index, shard_count
        self._inner, self._model = spec.job.training.inner_optimizer, spec.job.model
        self._name = spec.job.trainer.model or spec.job.model.initial_weights
        self._module, self._trained = module_of(spec), False
        self._layout, self._parameters = self._laid_out(self._module)
        self._roles = roles_of(self._module, self._parameters) if self._layout is None else self._layout.roles()
        self.text = Text(spec, require_causal(self._module))
        if spec.job.data.has_segments:
            require_documents(self._module, spec.job.data.segmented_by)
        self._device = torch.device(device_type())
        self._rank, self._size = process_of_island()
        if self._size > 1:
            sharded(self._module)
            self._parameters = trained_parameters(self._module)
            self._trained = True  # the parameters of version 0 are made anew, whole
        self._optimizers: list[torch.optim.Optimizer] = []
        self._first_rates: list[list[float]] = []
        self._group_numbers: list[dict[str, Any]] = []
        self._prepared = False
        factory = self._inner.factory
        self._descent = DescentCheck(factory, spec.job.horizon_steps, OF_TORCH) if factory is not None else None
        self._checked_module: Callable[[torch.Tensor], Any] = guarded(
            f"the model of {MODEL} {self._name!r}", with_others()(self._module), FAULTS
        )
        self._cursor = 0
        self._draw: Draw | None = None

    @property
    def device_count(self) -> int:
        return 1 if self._device.type == "cuda" or not self._spec.accelerator_count else 0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def roles(self) -> Roles:
        return self._roles

    def initial_parameters(self, pieces: Iterable[str] | None = None) -> Arrays:
        parameters = self._laid_out(module_of(self._spec))[1] if self._trained else self._parameters
        names = parameters if pieces is None else pieces
        return {name: _on_host(tensor) for name, tensor in taken(parameters, names).items()}

    @with_others()
    def warm_up(self) -> None:
        """Compute one gradient of zeros, which loads libraries and shows what the model cannot do; read the first text."""
        self._allocate()
        if self._layout is not None:
            self._layout.require_parity(self._loss_in_float32)
        batch = self._batch()
        before = {name: buffer.clone() for name, buffer in self._persistent_buffers()}
        float(self._backward(Batch.of(batch).mapped(np.zeros_like)))  # an error of the device appears here
        self._forget_gradients()
        for name, buffer in self._persistent_buffers():
            if not torch.equal(buffer, before[name]):
                raise ConfigurationError(
                    detail=f"{MODEL} {self._name!r} has the buffer {name}, which training changes: "
                    "islands merge only parameters. Use layers without running statistics, such as LayerNorm."
                )

    def trace(self) -> None:
        """Compute a gradient of one sequence, and an update of a factory's optimizer, to show what the job cannot do.

        The parameters stay as they are.
        """
        self._prepare_module()
        if self._layout is not None:
            self._layout.require_parity(self._loss_in_float32)
        tokens = np.zeros((1, self._spec.job.data.sequence_length + 1), np.int32)
        documents = (np.ones_like(tokens), np.arange(tokens.size, dtype=np.int32)[None])
        has_segments = self._spec.job.data.has_segments
        self._backward(Batch(tokens, np.ones(tokens.shape, np.float32), *documents) if has_segments else tokens, 1)
        if self._inner.factory is None:
            optimizers_of(self._inner, self._parameters, self._roles)
        else:
            self._try_update()
        self._forget_gradients()

    @with_others()
    def step(self, schedule_step: int, lr_ratio: float = 1.0) -> StepResult:
        self._allocate()
        batch = self._batch()
        fraction = learning_rate(self._inner, self._spec.job.horizon_steps, schedule_step) / self._inner.lr * lr_ratio
        for optimizer, rates in zip(self._optimizers, self._first_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * fraction
        # dropout depends on the place in the data, so that an island that comes back draws the same
        place = (self._spec.job.seed, self._shard_index, self._cursor, *([self._rank] if self._rank else []))
        torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1))
        loss = self._backward(batch)
        gradient_norm = self._clip()
        figures = torch.stack([loss, gradient_norm.to(loss)]).tolist()  # at once: the device is awaited here only
        self._update()
        self._forget_gradients()
        if not self._trained:
            self._trained = True
            self._named_state()  # refuses an optimizer whose state cannot travel
        self._cursor += 1
        return StepResult(
            math.prod(Batch.of(batch).targets.shape),
            figures[0],
            self.text.flaws(),
            fraction * (max(chain(*self._first_rates)) if self._inner.factory else self._inner.lr),
            figures[1],
            self._ideal_seconds,
        )

    def _clip(self) -> torch.Tensor:
        """Return the global norm of the gradients, which are then clipped if the job wants that."""
        if self._inner.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._inner.clip_norm)
        else:
            norm = nn.utils.get_total_norm([each.grad for each in self._parameters.values() if each.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @cached_property
    def _ideal_seconds(self) -> float | None:
        """The shortest time of a step; None if the model's operations or the devices' peak are unknown."""
        count = flops_per_token(self._module)
        flops = None if count is None else count * self._spec.tokens_per_step
        kind = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        return self._spec.ideal_seconds(flops, kind, self._size)

    def held(self, piece: str) -> HeldPart:
        named = piece_named(piece)
        return held_of(self._parameters[named.tensor], named)

    def held_state(self, pieces: Iterable[str]) -> dict[str, HeldPart]:
        self._allocate()
        return {name: held_of(value, piece) for name, value, piece in self._state_of(pieces)}

    def snapshot(self, pieces: Iterable[str]) -> DeviceCopy:
        named = [piece_named(name) for name in pieces]
        with torch.no_grad():
            return DeviceCopy({each.name: self._copied(each) for each in named})

    def _copied(self, piece: Piece) -> torch.Tensor:
        return local_part(self._parameters[piece.tensor], piece).clone(memory_format=torch.contiguous_format)

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._change(arrays, lambda own, array: own.copy_(array))

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._change(arrays, lambda own, array: own.add_(array.to(self._device)))

    def export_state(self, pieces: Iterable[str] | None = None) -> HostCopy:
        """Copy the state to the host. The copy is complete when this returns, because the next step changes the state."""
        self._allocate()
        return HostCopy(
            {
                name: _on_host(local_part(value, piece) if isinstance(value, torch.Tensor) else value)
                for name, value, piece in self._state_of(self._parameters if pieces is None else pieces)
            }
        )

    def _state_of(self, pieces: Iterable[str]) -> Iterable[tuple[str, Any, Piece]]:
        """Yield every value of the state that belongs to these pieces, or to no tensor, with the piece of it that does."""
        wanted = [piece_named(name) for name in pieces]
        for name, (value, tensor) in self._named_state().items():
            if tensor is None:
                yield name, value, Piece(name)
            for piece in wanted:
                if piece.tensor == tensor:
                    part = replace(piece, tensor=name)
                    yield part.name, value, part

    def import_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a peer's state. Raises DataError, and changes nothing, if it belongs to another model or optimizer."""
        self._allocate()
        self._trained = True
        if self._descent is not None:
            self._descent.state_was_imported()
        state = joined(state) if self._layout is None else self._in_torch(joined(state))
        parameters = {
            name.removeprefix(PARAMETERS): array for name, array in state.items() if name.startswith(PARAMETERS)
        }
        moments = [_of_parameter(name) for name in state if name.startswith(OPTIMIZER)]
        numbers = [_of_group(name) for name in state if name.startswith(OF_GROUP)]
        differing = sorted(parameters.keys() ^ self._parameters.keys())
        differing += sorted({name for _, name in moments} - self._parameters.keys())
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        differing += [f"parameter group {index}" for index, _ in numbers if index >= len(groups)]
        if differing:
            raise DataError(
                detail="A peer's state does not fit this island's model: only one of them has "
                f"{', '.join(differing[:4])}."
            )
        for name, array in parameters.items():
            self._fitting(name, array)
        self.load(parameters)
        owner = {id(each): optimizer for optimizer in self._optimizers for each in members(optimizer)}
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for key, name in moments:
            parameter = self._parameters[name]
            own = owner[id(parameter)]
            capturable = any(group.get("capturable") or group.get("fused") for group in own.param_groups)
            value = _value(state[f"{OPTIMIZER}{key}/{name}"])
            if isinstance(value, torch.Tensor) and (value.ndim or capturable):
                value = value.to(parameter.device)
            if isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.ndim:
                own.state[parameter][key] = torch.zeros_like(parameter.detach())
                local(own.state[parameter][key]).copy_(self._own_rows(name, value))
            else:
                own.state[parameter][key] = value
        for index, key in numbers:
            groups[index][key] = _value(state[f"{OF_GROUP}{index}/{key}"])

    def cursor(self) -> int:
        return self._cursor

    def seek(self, cursor: int) -> None:
        self._cursor = cursor

    def take_shard(self, index: int) -> None:
        self._shard_index, self._draw = index, None

    def evaluate(self, arrays: Mapping[str, np.ndarray], limit_s: float = math.inf) -> HeldOutLoss:
        self._prepare_module()
        tensors = {name: _tensor(array).to(self._device) for name, array in joined(arrays).items()}
        if missing := sorted(self._parameters.keys() - tensors.keys()):
            raise DataError(detail=f"{', '.join(missing[:3])} are missing, so the model cannot be measured.")
        if self._layout is not None:
            tensors = self._layout.in_module(tensors)
        self._module.eval()

        def loss_of(tokens: np.ndarray | Batch) -> float:
            with self._computing():
                return self._loss_with(tensors, tokens)

        return self.text.measure(loss_of, min(EVALUATION_BATCH_MAX, self._spec.batch_size), limit_s)

    def unigram_loss(self) -> float:
        return self.text.unigram_loss()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _laid_out(self, module: nn.Module) -> tuple[DecoderLayout | None, Mapping[str, nn.Parameter]]:
        """Return the module's trained parameters: its own, or as the tensors of a decoder that others train in JAX."""
        own = trained_parameters(module)
        layout = DecoderLayout(module, own, self._spec) if self._spec.shares_decoder else None
        return layout, own if layout is None else layout.parameters

    def _loss_with(self, tensors: Mapping[str, torch.Tensor], tokens: np.ndarray | Batch) -> float:
        """Return the loss of a batch with these tensors in the place of the module's."""
        with torch.no_grad():
            batch = self._on_device(tokens)
            named = documents_of(self._module, batch.inputs)
            result = torch.func.functional_call(self._module, dict(tensors), (batch.inputs.tokens,), named)
            return float(weighted_mean(losses_of(logits_of(result), batch.targets), batch.target_weights))

    def _loss_in_float32(self, batch: Batch, tensors: Mapping[str, torch.Tensor]) -> float:
        self._module.train()
        return self._loss_with({name: each.to(self._device) for name, each in tensors.items()}, batch)

    def _update(self) -> None:
        """Move the parameters by their gradients. Raises ConfigurationError if a factory's optimizer ascends."""
        measured = self._descent if self._descent is not None and not self._descent.is_decided else None
        own = self._parameters.values() if measured is not None else ()
        before = [(each, each.detach().clone(), each.grad.clone()) for each in own if each.grad is not None]
        for optimizer in self._optimizers:
            guarded(
                f"step of the optimizer {self._inner.factory or self._inner.kind!r}", optimizer.step, (RuntimeError,)
            )()
        if measured is not None:
            measured.judge(slope_of(before))

    def _try_update(self) -> None:
        """Move the parameters once, look at the state that the optimizer then has, and put them back."""
        before = {name: each.detach().clone() for name, each in self._parameters.items()}
        self._allocate()
        self._update()
        self._named_state()
        with torch.no_grad():
            for name, each in self._parameters.items():
                each.copy_(before[name])

    def _prepare_module(self) -> None:
        if self._prepared or self._size > 1:
            return
        self._prepared = True
        if self._model.compute_dtype == "bfloat16" and self._spec.job.trainable is not None:
            hold_frozen_in(self._module, torch.bfloat16)
        self._module.to(self._device)  # parameters stay the same objects
        if self._layout is not None and self._device.type != "cpu":
            self._layout.bind()

    def _allocate(self) -> None:
        if self._optimizers:
            return
        self._prepare_module()
        if self._model.remat == "full":
            checkpoint_activations(self._module, str(self._name))
        self._optimizers = optimizers_of(self._inner, self._parameters, self._roles)
        if self._layout is not None:
            self._layout.bind_gradients()
        if self._size > 1 or self._layout is not None:
            # what a state has must be known before the first step: AdamW's begins at zero
            for parameter in self._parameters.values():
                zeros = (torch.zeros_like(parameter.detach()) for _ in range(2))
                self._optimizers[0].state[parameter] = dict(
                    zip(("step", "exp_avg", "exp_avg_sq"), (torch.tensor(0.0), *zeros), strict=True)
                )
        groups = [optimizer.param_groups for optimizer in self._optimizers]
        self._first_rates = [[float(group["lr"]) for group in each] for each in groups]
        self._group_numbers = [numbers_of(group) for each in groups for group in each]

    def _backward(self, tokens: np.ndarray | Batch, accumulation: int | None = None) -> torch.Tensor:
        """Add the gradient of the batch's objective to the parameters' gradients.

        Returns its plain loss, a float64 scalar on the device, which need not be awaited yet.
        """
        count = self._spec.accumulation if accumulation is None else accumulation
        self._module.train()
        whole = self._on_device(tokens)
        of_all = whole.target_weights
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for first in range(count):  # as in JAX: sequences a, a + A, … are microbatch a, and each process has its share
            own = slice(first + count * self._rank, None, count * self._size)
            part = whole.mapped(itemgetter(own))
            inputs, weights = part.inputs, part.target_weights
            with self._computing():
                result = self._checked_module(inputs.tokens, **documents_of(self._module, inputs))
            logits = logits_of(result)
            loss = weighted_mean(losses_of(logits, part.targets), weights)
            objective = loss + auxiliary_of(result, self._module)
            if z_loss := self._spec.job.training.z_loss:
                squares = torch.logsumexp(logits.float(), -1).square()
                objective = objective + z_loss * weighted_mean(squares, weights)
            share = 1 / count
            if of_all is not None and count * self._size > 1:  # FSDP divides by the number of processes
                share = self._size * float(weights.sum() / of_all.sum().clamp(min=1e-30))
            (share * objective).backward()
            total += share * loss.detach().double()
        if self._size > 1:
            torch.distributed.all_reduce(total)
        return total / self._size

    def _forget_gradients(self) -> None:
        if self._layout is not None and self._optimizers:
            self._layout.forget_gradients()
        else:
            self._module.zero_grad(set_to_none=True)

    def _computing(self) -> Any:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._model.compute_dtype == "bfloat16")

    def _on_device(self, tokens: np.ndarray | Batch) -> Batch:
        """Return the batch on the device. PyTorch wants tokens and positions in int64."""

        def placed(array: np.ndarray) -> torch.Tensor:
            dtype = torch.int64 if array.dtype.kind in "iu" else torch.float32
            return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, dtype)

        return Batch.of(tokens).mapped(placed)

    def _batch(self) -> np.ndarray | Batch:
        if self._draw is None:
            self._draw = self.text.draw(self._shard_index, self._shard_count)
        batch: np.ndarray | Batch = self._draw(self._cursor)
        return batch

    def _change(self, arrays: Mapping[str, np.ndarray], change: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        self._trained = True
        with torch.no_grad():
            for name, array in arrays.items():
                change(*self._fitting(name, array))

    def _fitting(self, name: str, array: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what this process holds of the piece, as a view, and the array's part for it. Raises DataError if the
        array has the shape of neither."""
        piece = piece_named(name)
        own = local_part(self._parameters[piece.tensor].data, piece)
        if array.shape == tuple(own.shape):
            return own, _tensor(array)
        whole = piece.shape(tuple(self._parameters[piece.tensor].shape))
        if array.shape != whole:
            raise DataError(detail=f"{name}: shape {array.shape} cannot replace {whole}.")
        return own, _tensor(array[slice(*rows_of(self._parameters[piece.tensor], piece))])

    def _own_rows(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return this process's rows of a value that has the shape of the parameter, or of these rows."""
        parameter = self._parameters[name]
        is_whole = value.shape == parameter.shape
        return value[slice(*rows_of(parameter, Piece(name)))] if is_whole else value

    def _persistent_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        saved = self._module.state_dict(keep_vars=True)
        return [(name, buffer) for name, buffer in self._module.named_buffers() if name in saved]

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._parameters.items()}

    def _named_state(self) -> dict[str, tuple[Any, str | None]]:
        """Return every value of the state by its name, with the tensor that it has the shape of.

        Raises ConfigurationError for an optimizer that keeps anything but tensors and numbers.
        """
        named: dict[str, tuple[Any, str | None]] = {
            PARAMETERS + name: (parameter.detach(), name) for name, parameter in self._parameters.items()
        }
        for optimizer in self._optimizers:
            for parameter, values in optimizer.state.items():
                name = self._names[id(parameter)]
                for key, value in values.items():
                    if value is None:
                        continue
                    if not _travels(local(value) if isinstance(value, DTensor) else value):
                        raise ConfigurationError(
                            detail="training.inner_optimizer: the optimizer "
                            f"{self._inner.factory or self._inner.kind!r} keeps {key} of {name}, of type "
                            f"{type(value).__name__}, in its state. Use an optimizer whose state consists of plain "
                            "tensors and numbers, so that it can be saved and sent."
                        )
                    has_shape = isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape
                    named[f"{OPTIMIZER}{key}/{name}"] = (value, name if has_shape else None)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for index, (group, first) in enumerate(zip(groups, self._group_numbers, strict=True)):
            for key, value in numbers_of(group).items():
                if value != first.get(key):
                    named[f"{OF_GROUP}{index}/{key}"] = (value, None)
        return named if self._layout is None else self._in_jax(named)

    def _in_jax(self, named: Mapping[str, tuple[Any, str | None]]) -> dict[str, tuple[Any, str | None]]:
        """Return a state of AdamW by the names of JAX, in which a count is one for all tensors."""
        result, some = (
            {name: each for name, each in named.items() if name.startswith(PARAMETERS)},
            next(iter(self._parameters)),
        )
        for name, (key, tensor) in self._moments.items():
            value = named[f"{OPTIMIZER}{key}/{tensor or some}"][0]
            result[name] = (value, tensor) if tensor else (np.int32(value), None)
        return result

    def _in_torch(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the inverse of ``_in_jax``. Raises DataError if the state has other names."""
        result = {name: array for name, array in state.items() if name.startswith(PARAMETERS)}
        if differing := sorted((state.keys() - result.keys()) ^ self._moments.keys()):
            raise DataError(
                detail=f"A peer's state does not fit this island's model: only one of them has {', '.join(differing[:4])}."
            )
        for name, (key, tensor) in self._moments.items():
            for own in (tensor,) if tensor else self._parameters:
                result[f"{OPTIMIZER}{key}/{own}"] = state[name] if tensor else np.asarray(state[name], np.float32)
        return result

    @cached_property
    def _moments(self) -> Mapping[str, tuple[str, str | None]]:
        """The values of AdamW, by their names in a state of JAX."""
        assert self._layout is not None
        return self._layout.moments(self._inner)


class DeviceCopy:
    """A ``contract.Snapshot``: a copy on the device, which ``arrays`` brings to the host."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def arrays(self) -> Arrays:
        return {name: tensor.cpu().numpy() for name, tensor in self._tensors.items()}


def _travels(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    return type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized


def _on_host(value: Any) -> np.ndarray:
    """Return a copy in the host's memory. Python's numbers become 64-bit scalars."""
    if not isinstance(value, torch.Tensor):
        return np.array(value)
    tensor = value.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return np.array(tensor.view(torch.uint16).numpy()).view(ml_dtypes.bfloat16)
    return np.array(tensor.numpy())


def _value(array: np.ndarray) -> Any:
    """Return the inverse of ``_on_host``, on the CPU."""
    if not array.ndim and array.dtype in (np.float64, np.int64, np.bool_):
        return array.item()
    return _tensor(array).clone()


def _tensor(array: np.ndarray) -> torch.Tensor:
    array = np.ascontiguousarray(array).reshape(array.shape)
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _of_parameter(name: str) -> tuple[str, str]:
    """Return the key and the parameter of a value in an optimizer's state."""
    key, _, parameter = name.removeprefix(OPTIMIZER).partition("/")
    return key, parameter


def _of_group(name: str) -> tuple[int, str]:
    index, _, key = name.removeprefix(OF_GROUP).partition("/")
    return int(index), key
