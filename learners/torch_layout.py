"""Which rows of its parameters a torch process has, and under which names and shapes its island shows them to others.

Several processes of an island split every parameter by rows, in FSDP2's way (``sharded``).

An island whose entry has ``framework: torch`` trains a decoder together with islands in JAX. Their tensors are stacks of
turned matrices, and transformers has one matrix for each layer. ``DecoderLayout`` makes the tensors of both views of the
same memory, so that neither is converted: the module computes with its own, and merges, states and the optimizer use those
of JAX. ``require_parity`` compares the losses of both before anything is trained.

How a module is made and what it computes is in ``torch_model``.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from socket import AF_INET, AF_INET6
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from learners.contract import Batch, HeldPart
from learners.factories import guarded
from learners.island_spec import IslandSpec
from orchestrator.errors import ConfigurationError, InfrastructureError, in_words
from orchestrator.models.decoder import DecoderSection
from orchestrator.models.huggingface.layout import Sources, sources_of
from orchestrator.parameters.pieces import Piece, Roles
from orchestrator.specification.training_sections import InnerOptimizerSection

MODEL = "trainer.model"
JOINED_S = 300
"""The time for the last process of an island to arrive."""
SILENCE_S = 7 * 86_400
"""How long a process may be stopped: ``learners.group`` notices deaths, and ends the others."""
PARITY_RATIO = 1e-4
"""The largest difference between the losses of JAX and PyTorch in float32, as a ratio. Rounding makes it some 1e-6."""
PARITY_ROWS = 2

# ── one of several processes ──────────────────────────────────────────────────────────────────────────────────────────


def join_processes(host: str, port: int, rank: int, size: int) -> tuple[int, ...]:
    """Make this process one of ``size`` that train one module together. Rank 0 listens on ``host``.

    Returns how many devices each has, by rank. If one lacks its GPU, none of them waits for it: they stay alone.
    """
    from datetime import timedelta

    listening = socket.create_server((host, port), family=AF_INET6 if ":" in host else AF_INET) if rank == 0 else None
    store = torch.distributed.TCPStore(
        host,
        port,
        size,
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=JOINED_S),
        master_listen_fd=None if listening is None else listening.detach(),
    )
    is_on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"  # as the island's entry says
    store.set(f"devices/{rank}", str(int(is_on_cpu or device_type() == "cuda")))
    counts = tuple(int(store.get(f"devices/{number}")) for number in range(size))
    if all(counts):
        backend, silence = "gloo" if is_on_cpu else "nccl", timedelta(seconds=SILENCE_S)
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=silence)
    return counts


def device_type() -> str:
    return "cpu" if os.environ.get("JAX_PLATFORMS") == "cpu" or not torch.cuda.is_available() else "cuda"


def process_of_island() -> tuple[int, int]:
    """Return the rank of this process, and the number of processes of its island."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


@contextmanager
def with_others() -> Iterator[None]:
    """Raise InfrastructureError where a call fails because another process of the island is gone.

    Otherwise such an error would count as one of the model, which another start would not repair. Gloo raises a plain
    RuntimeError that names its own file.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
            detail = f"another process of the island cannot be reached: {in_words(error)}."
            raise InfrastructureError(detail=detail) from error
        raise


def sharded(module: nn.Module) -> None:
    """Split the module's parameters over the island's processes by their rows, in FSDP2's way.

    A block is gathered at a time. Each goes to the process's device only when it is split, because all of the model may
    not fit there.
    """
    mesh = torch.distributed.init_device_mesh(device_type(), (process_of_island()[1],))
    split = guarded(f"splitting of the model of {MODEL}", with_others()(fully_shard))
    for block in blocks_of(module):
        split(block, mesh=mesh)
    split(module, mesh=mesh)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members with parameters of the module's outermost lists.

    Those of inner lists, such as experts, may not all run in a step, and processes that gather different ones would wait
    for each other.
    """
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (each for each in child if any(True for _ in each.parameters()))
        else:
            yield from blocks_of(child)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor that this process holds, in the tensor's own memory."""
    own: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own


def rows_of(tensor: torch.Tensor, piece: Piece) -> tuple[int, int]:
    """Return the first and the last row, counted in the piece, that this process holds of it; equal if it holds none."""
    count = tensor.shape[0] if tensor.ndim else 1
    rank, size = process_of_island() if isinstance(tensor, DTensor) else (0, 1)
    length = -(-count // size)  # as torch.chunk cuts
    first, last = min(count, rank * length), min(count, (rank + 1) * length)
    if piece.bounds is not None and piece.bounds[0] == 0:
        first, last = (min(max(row, piece.bounds[1]), piece.bounds[2]) - piece.bounds[1] for row in (first, last))
    return first, last


def held_of(tensor: torch.Tensor, piece: Piece) -> HeldPart:
    """Return the part of the piece that this process holds."""
    shape = piece.shape(tuple(tensor.shape))
    if not shape:
        return HeldPart((), tuple(range(process_of_island()[1])), shape)
    return HeldPart((rows_of(tensor, piece), *((0, size) for size in shape[1:])), (process_of_island()[0],), shape)


def local_part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return what this process holds of the piece, in the tensor's own memory."""
    own = local(tensor)
    if piece.bounds is None or piece.bounds[0] != 0 or not isinstance(tensor, DTensor):
        return own[piece.index]
    start = piece.bounds[1] - rows_of(tensor, Piece(piece.tensor))[0]
    first, last = rows_of(tensor, piece)
    return own[start + first : start + last]


# ── a decoder that other islands train in JAX ─────────────────────────────────────────────────────────────────────────────


class DecoderLayout:
    """The parameters of a module of transformers as the decoder's tensors (``parameters``), and its moments as JAX has them.

    Both share their memory. A tensor with a number of layers is a view of one storage, of which each layer's matrix in the
    module is another view; likewise their gradients.
    """

    def __init__(self, module: nn.Module, theirs: Mapping[str, nn.Parameter], spec: IslandSpec) -> None:
        self._path, decoder = spec.path, spec.job.model.network
        assert isinstance(decoder, DecoderSection), "the specification is checked"
        config: Any = module.config
        self._sources, self._theirs = sources_of(decoder, config.model_type), theirs
        expected = {name: each.shape for each in self._sources.values() for name in each.names.values()}
        there = {name: tuple(each.shape) for name, each in theirs.items()}
        if differing := sorted(name for name in expected | there if expected.get(name) != there.get(name)):
            raise ConfigurationError(
                detail=f"{self._path}.framework is torch, but a model of type {config.model_type} has other tensors in "
                f"transformers than in JAX, such as {differing[0]}. Leave it out."
            )
        self._spec, self._storages = spec, dict[tuple[str, ...], torch.Tensor]()
        self._gradients: dict[tuple[str, ...], torch.Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.bind()

    def bind(self) -> None:
        """Give all tensors their common memory, on the device where the module's are."""
        self._storages = {}
        for name, source in self._sources.items():
            whole = _view(self._storage(source), source)
            if name in self.parameters:
                self.parameters[name].data = whole
            else:
                self.parameters[name] = nn.Parameter(whole)

    def _storage(self, source: Sources) -> torch.Tensor:
        names = tuple(source.names.values())
        if names not in self._storages:
            own = [self._theirs[name] for name in names]
            self._storages[names] = storage = (
                torch.stack([each.data for each in own]) if _stacked(source) else own[0].data
            )
            if _stacked(source):
                for each, part in zip(own, storage, strict=True):
                    each.data = part
        return self._storages[names]

    def bind_gradients(self) -> None:
        """Give all gradients their common memory, to which the module's backward pass adds."""
        for name, source in self._sources.items():
            names = tuple(source.names.values())
            if names not in self._gradients:
                self._gradients[names] = zeros = torch.zeros_like(self._storages[names])
                for theirs, part in zip(names, zeros if _stacked(source) else (zeros,), strict=True):
                    self._theirs[theirs].grad = part
            self.parameters[name].grad = _view(self._gradients[names], source)

    def forget_gradients(self) -> None:
        for gradient in self._gradients.values():
            gradient.zero_()

    def roles(self) -> Roles:
        from learners.models import decoder

        network = self._spec.job.model.network
        assert isinstance(network, DecoderSection)
        return decoder.roles(network)

    def in_module(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return these tensors of the decoder by the names, and in the shapes, of the module's."""
        parts: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
        for name, source in self._sources.items():
            for index, theirs in source.names.items():
                part = tensors[name][index]
                parts[theirs].append((source.rows[0] if source.rows else 0, part.mT if source.turned else part))
        return {
            name: own[0][1] if len(own) == 1 else torch.cat([part for _, part in sorted(own, key=itemgetter(0))])
            for name, own in parts.items()
        }

    def moments(self, section: InnerOptimizerSection) -> dict[str, tuple[str, str | None]]:
        """Return AdamW's values by their names in a state of JAX: the key in torch, and the tensor (None: all of them)."""
        import jax

        from learners import mesh, optimizers
        from learners.jax_trainer import state_name

        shapes = {name: tuple(each.shape) for name, each in self.parameters.items()}
        outline = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
        state = jax.eval_shape(optimizers.build(section, self.roles()).init, outline)
        keys = {"mu": "exp_avg", "nu": "exp_avg_sq", "count": "step"}
        return {
            state_name(path): (
                next(keys[each.name] for each in path if getattr(each, "name", None) in keys),
                mesh.tensor_of(path, leaf.shape, shapes),
            )
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        }

    def require_parity(self, loss_of: Callable[[Batch, Mapping[str, torch.Tensor]], float]) -> None:
        """Raise ConfigurationError unless the module and the decoder have equal losses, in float32, of the same batch.

        ``loss_of`` computes the module's with these tensors, as in a step.
        """
        import jax

        from learners import model

        jax.config.update("jax_platforms", "cpu")  # a GPU is the module's
        plain = self._spec.job.model.model_copy(update={"compute_dtype": "float32", "remat": "none"})
        built = model.build(replace(self._spec, job=self._spec.job.model_copy(update={"model": plain})))
        assert built.initial_weights is not None, "the specification is checked"
        weights, batch = dict(built.initial_weights(None)), self._sample()
        ours = float(jax.jit(built.loss)(weights, batch))
        theirs = loss_of(batch, self.in_module({name: torch.from_numpy(array) for name, array in weights.items()}))
        if not abs(ours - theirs) <= PARITY_RATIO * abs(ours):
            raise ConfigurationError(
                detail=f"{self._path}.framework is torch, but transformers computes the loss {theirs:.6g} of a batch, and "
                f"JAX {ours:.6g}, so they are two models. Remove from config.json of "
                f"{self._spec.job.model.initial_weights} what only one of them has, such as dropout, or leave framework out."
            )

    def _sample(self) -> Batch:
        """Return a few random rows, with two documents in each if the job's rows have several."""
        network, length = self._spec.job.model.network, self._spec.job.data.sequence_length + 1
        assert isinstance(network, DecoderSection)
        drawn = np.random.default_rng(self._spec.job.seed)
        tokens = drawn.integers(network.vocabulary_size, size=(PARITY_ROWS, length), dtype=np.int32)
        if not self._spec.job.data.has_conversations:
            return Batch(tokens)
        at = np.arange(length, dtype=np.int32)
        half = length // 2
        segments, positions = np.where(at < half, 1, 2).astype(np.int32), np.where(at < half, at, at - half)
        rows = (np.tile(each, (PARITY_ROWS, 1)) for each in (segments, positions.astype(np.int32)))
        return Batch(tokens, drawn.integers(2, size=tokens.shape).astype(np.float32), *rows)


def _stacked(source: Sources) -> bool:
    return () not in source.names


def _view(storage: torch.Tensor, source: Sources) -> torch.Tensor:
    """Return the decoder's tensor in the storage of the module's: (layers, …) or one."""
    rows = slice(None) if source.rows is None else slice(*source.rows)
    part = storage[:, rows] if _stacked(source) else storage[rows]
    return part.mT if source.turned else part
