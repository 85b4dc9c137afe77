"""One island's training in PyTorch: a causal language model, its optimizer and its data position, in one process.

Implements ``contract.Trainer``. Knows nothing of fragments, versions, the synchroniser or Ray. The
module comes from ``learners.torch_model``.

Parameters that require a gradient are the job's tensors, by the module's own names, in float32. Frozen parameters and
buffers do not travel, so every process must create them alike: from the folder, or from the specification and its seed.
Computation in bfloat16 is ``torch.autocast``'s.

The optimizer follows ``training.inner_optimizer``. AdamW and Muon are torch's, which agree with optax's up to rounding.
A factory names a class of optimizers, such as ``torch.optim:NAdam``, or a function. The schedule multiplies the
learning rate that each parameter group was created with.

An exported state has the parameters and what the optimizer keeps for each: tensors, and numbers such as a count of
steps. The optimizer creates these at its first step, so a state may be without them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from learners.contract import Arrays, Batch, HeldOutLoss, HeldPart, HostCopy, StepResult
from learners.factories import called, guarded, imported
from learners.island_spec import Document, IslandSpec
from learners.optimizer_settings import DescentCheck, Remedies, learning_rate, settings_of
from learners.resharding import Draw
from learners.text import Text
from learners.torch_model import (
    MODEL,
    auxiliary_of,
    checkpoint_activations,
    device_type,
    documents_of,
    held_of,
    hold_frozen_in,
    local,
    local_part,
    logits_of,
    losses_of,
    module_of,
    process_of_island,
    require_causal,
    require_documents,
    roles_of,
    rows_of,
    sharded,
    slope_of,
    trained_parameters,
    weighted_mean,
    with_others,
)
from orchestrator.errors import ConfigurationError, DataError
from orchestrator.parameters.pieces import Piece, Roles, joined, piece_named, taken
from orchestrator.specification.training_sections import InnerOptimizerSection

PARAMETERS, OPTIMIZER, OF_GROUP = "parameters/", "optimizer/", "optimizer-group/"
"""Prefixes of the names in an exported state."""
FACTORY = "training.inner_optimizer.factory"
EVALUATION_BATCH_MAX = 32
FAULTS = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of a device or its memory, after which another start may succeed."""
NOT_GIVEN = ("beta1", "beta2", "momentum", "weight_decay")
"""Settings of ``training.inner_optimizer`` that a class of optimizers does not get."""
TORCH = Remedies(
    ascends="Subtract the gradient: `maximize` of torch's optimizers must be false.",
    still="Name one that changes them, such as torch.optim:AdamW, and let it step at once.",
)


def create(spec: Document, shard_index: int, shard_count: int) -> TorchTrainer:
    """Return the trainer of shard ``shard_index`` of ``shard_count``. Its model is on the CPU, and no text is read yet."""
    parsed = IslandSpec.of(spec)
    if threads := os.environ.get("NPROC"):  # set with the variables that JAX reads; torch reads others
        torch.set_num_threads(int(threads))
    return TorchTrainer(parsed, shard_index, shard_count)


class TorchTrainer:
    """See ``contract.Trainer``. Not thread-safe: one thread at a time. Any thread may read snapshots."""

    def __init__(self, spec: IslandSpec, shard_index: int, shard_count: int) -> None:
        self._spec, self._shard_index, self._shard_count = spec, shard_index, shard_count
        self._inner, self._model = spec.job.training.inner_optimizer, spec.job.model
        self._module, self._trained = module_of(spec), False
        self._parameters = trained_parameters(self._module)
        self._roles = roles_of(self._module, self._parameters)
        self._text = Text(spec, require_causal(self._module))
        if spec.job.data.format == "chat":
            require_documents(self._module)
        self._device = torch.device(device_type())
        self._rank, self._size = process_of_island()
        if self._size > 1:
            sharded(self._module)
            self._parameters = trained_parameters(self._module)
            self._trained = True  # the parameters of version 0 are made anew, whole
        self._optimizers: list[torch.optim.Optimizer] = []
        self._first_rates: list[list[float]] = []
        self._group_numbers: list[dict[str, Any]] = []
        horizon_steps, factory = spec.job.horizon_steps, self._inner.factory
        self._descent = DescentCheck(factory, horizon_steps, TORCH) if factory is not None else None
        self._prepared = False
        self._checked_module: Callable[[torch.Tensor], Any] = guarded(
            f"the model of {MODEL} {spec.job.trainer.model!r}", with_others()(self._module), FAULTS
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
        parameters = trained_parameters(module_of(self._spec)) if self._trained else self._parameters
        names = parameters if pieces is None else pieces
        return {name: _on_host(tensor) for name, tensor in taken(parameters, names).items()}

    @with_others()
    def warm_up(self) -> None:
        """Compute one gradient of zeros, which loads libraries and shows what the model cannot do; read the first text."""
        self._allocate()
        batch = self._batch()
        before = {name: buffer.clone() for name, buffer in self._persistent_buffers()}
        self._backward(Batch.of(batch).mapped(np.zeros_like))
        self._forget_gradients()
        for name, buffer in self._persistent_buffers():
            if not torch.equal(buffer, before[name]):
                raise ConfigurationError(
                    detail=f"{MODEL} {self._spec.job.trainer.model!r} has the buffer {name}, which training changes: "
                    "islands merge only parameters. Use layers without running statistics, such as LayerNorm."
                )

    def trace(self) -> None:
        """Compute a gradient of one sequence, which shows what the model cannot do. Nothing is trained."""
        self._prepare_module()
        tokens = np.zeros((1, self._spec.job.data.sequence_length + 1), np.int32)
        documents = (np.ones_like(tokens), np.arange(tokens.size, dtype=np.int32)[None])
        is_chat = self._spec.job.data.format == "chat"
        self._backward(Batch(tokens, np.ones(tokens.shape, np.float32), *documents) if is_chat else tokens, 1)
        self._forget_gradients()
        optimizers_of(self._inner, self._parameters, self._roles)

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
        if self._inner.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._inner.clip_norm)
        before = self._before_step()
        for optimizer in self._optimizers:
            guarded(
                f"step of the optimizer {self._inner.factory or self._inner.kind!r}", optimizer.step, (RuntimeError,)
            )()
        self._forget_gradients()
        if self._descent is not None and before is not None:
            self._descent.judge(slope_of(before))
        if not self._trained:
            self._trained = True
            self._named_state()  # refuses an optimizer whose state cannot travel
        self._cursor += 1
        return StepResult(math.prod(Batch.of(batch).targets.shape), loss, self._text.flaws())

    def held(self, piece: str) -> HeldPart:
        named = piece_named(piece)
        return held_of(self._parameters[named.tensor], named)

    def held_state(self, pieces: Iterable[str]) -> dict[str, HeldPart]:
        self._allocate()
        return {name: held_of(value, piece) for name, value, piece in self._state_of(pieces)}

    def snapshot(self, pieces: Iterable[str]) -> DeviceCopy:
        named = [piece_named(name) for name in pieces]
        with torch.no_grad():
            return DeviceCopy({each.name: local_part(self._parameters[each.tensor], each).clone() for each in named})

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
        state = joined(state)
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
        owner = {id(each): optimizer for optimizer in self._optimizers for each in _members(optimizer)}
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
        self._module.eval()

        def loss_of(tokens: np.ndarray | Batch) -> float:
            with torch.no_grad():
                batch = self._on_device(tokens)
                inputs = batch.inputs
                named = documents_of(self._module, inputs)
                with self._computing():
                    result = torch.func.functional_call(self._module, tensors, (inputs.tokens,), named)
                return float(weighted_mean(losses_of(logits_of(result), batch.targets), batch.target_weights))

        return self._text.measure(loss_of, min(EVALUATION_BATCH_MAX, self._spec.batch_size), limit_s)

    def unigram_loss(self) -> float:
        return self._text.unigram_loss()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _prepare_module(self) -> None:
        if self._prepared or self._size > 1:
            return
        self._prepared = True
        if self._model.compute_dtype == "bfloat16" and self._spec.job.trainable is not None:
            hold_frozen_in(self._module, torch.bfloat16)
        self._module.to(self._device)  # parameters stay the same objects

    def _allocate(self) -> None:
        if self._optimizers:
            return
        self._prepare_module()
        if self._model.remat == "full":
            checkpoint_activations(self._module, str(self._spec.job.trainer.model))
        self._optimizers = optimizers_of(self._inner, self._parameters, self._roles)
        if self._size > 1:
            # each process must know what it holds of a state before its first step: AdamW's begins at zero
            for parameter in self._parameters.values():
                zeros = (torch.zeros_like(parameter.detach()) for _ in range(2))
                self._optimizers[0].state[parameter] = dict(
                    zip(("step", "exp_avg", "exp_avg_sq"), (torch.tensor(0.0), *zeros), strict=True)
                )
        groups = [optimizer.param_groups for optimizer in self._optimizers]
        self._first_rates = [[float(group["lr"]) for group in each] for each in groups]
        self._group_numbers = [_numbers_of(group) for each in groups for group in each]

    def _before_step(self) -> list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] | None:
        """Copy parameters and gradients to the host, if the step's direction is still to be judged.

        An optimizer may change both in place.
        """
        if self._descent is None or self._descent.is_decided:
            return None
        with torch.no_grad():
            return [
                (each, each.detach().to("cpu", copy=True), each.grad.to("cpu", copy=True))
                for each in self._parameters.values()
                if each.grad is not None
            ]

    def _backward(self, tokens: np.ndarray | Batch, accumulation: int | None = None) -> float:
        """Add the gradient of the batch's objective to the parameters' gradients, and return its plain loss."""
        count = self._spec.accumulation if accumulation is None else accumulation
        self._module.train()
        whole = self._on_device(tokens)
        of_all = whole.target_weights
        total = 0.0
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
            total += share * float(loss.detach())
        return self._mean_of_processes(total)

    def _mean_of_processes(self, number: float) -> float:
        if self._size == 1:
            return number
        summed = torch.tensor(number, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(summed)
        return float(summed) / self._size

    def _forget_gradients(self) -> None:
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
            self._draw = self._text.draw(self._shard_index, self._shard_count)
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
            for key, value in _numbers_of(group).items():
                if value != first.get(key):
                    named[f"{OF_GROUP}{index}/{key}"] = (value, None)
        return named


class DeviceCopy:
    """A ``contract.Snapshot``: a copy on the device, which ``arrays`` brings to the host."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def arrays(self) -> Arrays:
        return {name: tensor.cpu().numpy() for name, tensor in self._tensors.items()}


# ── the optimizer ─────────────────────────────────────────────────────────────────────────────────────────────────────


def optimizers_of(
    section: InnerOptimizerSection, parameters: Mapping[str, nn.Parameter], roles: Roles
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that together move all parameters: two for Muon, otherwise one."""
    settings = settings_of({name: each.ndim for name, each in parameters.items()}, section, roles)

    def groups(names: Iterable[str], *, decays: bool = True) -> list[dict[str, Any]]:
        by_setting: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name in names:
            own = settings[name]
            by_setting.setdefault((own.lr_ratio, own.weight_decay if decays else 0.0), []).append(parameters[name])
        return [
            {"params": members, "lr": section.lr * ratio} | ({"weight_decay": decay} if decays else {})
            for (ratio, decay), members in by_setting.items()
        ]

    def adamw(names: Iterable[str]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups(names), lr=section.lr, betas=(section.beta1, section.beta2))

    if section.factory is not None:
        return [_of_factory(section.factory, section, parameters, groups(parameters, decays=False))]
    if section.kind == "adamw":
        return [adamw(parameters)]
    if section.kind != "muon":
        raise ConfigurationError(
            detail=f"training.inner_optimizer.kind is {section.kind}, which a torch trainer does not have. Use adamw "
            "or muon, or a factory such as torch.optim:Adafactor."
        )
    matrices = [name for name, own in settings.items() if own.use == "matrix" and parameters[name].ndim == 2]
    others = [name for name in parameters if name not in set(matrices)]
    muon = [
        torch.optim.Muon(groups(matrices), lr=section.lr, momentum=section.momentum, adjust_lr_fn="match_rms_adamw")
    ]
    return [*(muon if matrices else []), *([adamw(others)] if others else [])]


def _of_factory(
    path: str, section: InnerOptimizerSection, parameters: Mapping[str, nn.Parameter], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    factory = imported(FACTORY, path)
    if isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer):
        fields = InnerOptimizerSection.model_fields
        if unread := [name for name in NOT_GIVEN if getattr(section, name) != fields[name].default]:
            raise ConfigurationError(
                detail=f"training.inner_optimizer.{unread[0]} is {getattr(section, unread[0]):g}, but {path} gets only "
                "lr and settings. Write its own arguments into training.inner_optimizer.settings."
            )
        options = {name: tuple(each) if isinstance(each, list) else each for name, each in section.settings.items()}
        built = guarded(f"{FACTORY} {path!r}", factory)(groups, lr=section.lr, **options)
    else:
        if section.groups:
            raise ConfigurationError(
                detail=f"training.inner_optimizer.groups is set, but {path!r} groups its parameters itself. Remove the "
                "groups."
            )
        document = section.model_dump(mode="json")
        built = called(FACTORY, path, list(parameters.items()), document, settings=section.settings)
    if not isinstance(built, torch.optim.Optimizer):
        raise ConfigurationError(
            detail=f"{FACTORY} {path!r} returned {type(built).__name__}; for a torch trainer it must return a "
            "torch.optim.Optimizer of the named parameters that it gets."
        )
    own = {id(each) for each in parameters.values()}
    if foreign := sum(id(each) not in own for each in _members(built)):
        raise ConfigurationError(
            detail=f"{FACTORY} {path!r} returned an optimizer of {foreign} other parameters. Use those that it gets."
        )
    return built


def _members(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter group, except for its learning rate, which the schedule sets."""
    return {key: each for key, each in group.items() if isinstance(each, bool | int | float) and key != "lr"}


# ── values of a state ─────────────────────────────────────────────────────────────────────────────────────────────────


def _travels(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    return type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized


def _on_host(value: Any) -> np.ndarray:
    """Return a copy in the host's memory. Python's numbers become 64-bit scalars."""
    if not isinstance(value, torch.Tensor):
        return np.array(value)
    tensor = value.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.array(tensor.contiguous().view(torch.uint16).numpy()).view(ml_dtypes.bfloat16)
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
