"""The module that a torch trainer trains: built as the specification says, and refused if it cannot be one.

``trainer.model`` is a folder that ``transformers`` reads, or a function that returns a ``torch.nn.Module``:

   module(tokens): (batch, length) int64 → (batch, length, vocabulary) logits, or an object with them as ``logits``

Rows that hold several documents are told to transformers' models by ``position_ids``, which begin at 0 in each document: the
library then masks the attention between documents. Another module gets ``positions`` and ``segments`` (``contract.Batch``).

With ``trainable`` the module's other parameters are frozen, and PEFT adds adapters to its linear layers.

Importing this module raises ConfigurationError where PyTorch is not installed. It knows nothing of steps or devices.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any

from learners.contract import Batch, HeldPart
from learners.factories import called, guarded
from learners.island_spec import IslandSpec
from learners.optimizer_settings import ROUNDING
from orchestrator.errors import ConfigurationError, InfrastructureError, InvalidJobSpec, in_words
from orchestrator.models import trainable
from orchestrator.models.huggingface.weights import folder_digest
from orchestrator.parameters.pieces import Piece, Role, role_by_name
from orchestrator.specification.training_sections import (
    INSTALL_4_BIT,
    INSTALL_TORCH,
    LoraSection,
    TrainableSection,
    is_function,
)

try:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
except ImportError as missing:
    raise ConfigurationError(
        detail=f"trainer.kind is torch, but PyTorch cannot be imported here ({missing}). {INSTALL_TORCH}"
    ) from missing

MODEL = "trainer.model"
JOINED_S = 300
"""The time for the last process of an island to arrive."""
SILENCE_S = 7 * 86_400
"""How long a process may be stopped: ``learners.group`` notices deaths, and ends the others."""
CAUSAL_TOLERANCE = 1e-3
"""Of the largest logit: how much a later token may change an earlier position's logits, by rounding."""


def module_of(spec: IslandSpec) -> nn.Module:
    """Return a new module on the CPU, as the specification and its seed determine it.

    Raises ConfigurationError if ``trainer.model`` names none, InvalidJobSpec if it lacks what is to be trained.
    """
    part = spec.job.trainable
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.job.seed)
        module = _whole(spec)
        if part is None:
            return module
        if part.base is not None and part.lora is not None:
            _quantise(module, torch.bfloat16 if spec.job.model.compute_dtype == "bfloat16" else torch.float32)
        torch.manual_seed(spec.job.seed)  # adapters do not depend on what drew numbers before
        return _adapted(module, part.lora) if part.lora is not None else _selected(module, part)


def _whole(spec: IslandSpec) -> nn.Module:
    name, settings = spec.job.trainer.model or "", spec.job.trainer.settings
    if not is_function(name):
        return _of_folder(spec, name, settings)
    module = called(MODEL, name, spec.document, settings=settings, settings_field="trainer.settings")
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            detail=f"{MODEL} {name!r} returned {type(module).__name__}; it must return a torch.nn.Module that maps "
            "tokens to logits."
        )
    return module


def _adapted(module: nn.Module, section: LoraSection) -> nn.Module:
    """Add adapters to the module's layers that the section names, in float32, and freeze everything else."""
    try:
        import peft
    except ImportError as missing:
        detail = f"trainable.lora is set, but peft cannot be imported here ({missing}). {INSTALL_TORCH}"
        raise ConfigurationError(detail=detail) from missing
    matrices = dict(_matrices(module))
    if problems := tuple(trainable.adapter_problems(section.rank, section.targets, matrices)):
        raise InvalidJobSpec(problems=problems)
    config = peft.LoraConfig(
        r=section.rank,
        lora_alpha=section.scale * section.rank,
        target_modules=trainable.selected(section.targets, matrices),
        lora_dropout=0.0,
        bias="none",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT sets fan_in_fan_out for GPT-2's layers itself, and says so
        adapted: nn.Module = guarded("trainable.lora", peft.inject_adapter_in_model)(config, module)
    for name, each in adapted.named_parameters():
        each.requires_grad_("lora_" in name)
        if each.requires_grad:
            each.data = each.data.float()
    return adapted


def _matrices(module: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield inputs and outputs of the linear layers, by the module's name: transformers' of GPT-2, too; not the head's."""
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear) and each is not head:
            yield name, (each.in_features, each.out_features)
        elif type(each).__name__ == "Conv1D" and hasattr(each, "nf"):
            yield name, (each.nx, each.nf)


def _quantise(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Hold the matrices of the module's linear layers in four bits (NF4), except those of the head. Norms stay as they are.

    Source: QLoRA, arXiv:2305.14314.
    """
    try:
        import bitsandbytes
    except ImportError as missing:
        detail = f"trainable.base is nf4, but bitsandbytes cannot be imported here ({missing}). {INSTALL_4_BIT}"
        raise ConfigurationError(detail=detail) from missing
    layers = {
        name: each for name in dict(_matrices(module)) if isinstance(each := module.get_submodule(name), nn.Linear)
    }
    if not layers:
        detail = "trainable.base is nf4, but the model has no layers of torch.nn.Linear besides its head. Leave it out."
        raise ConfigurationError(detail=detail)
    for name, each in layers.items():
        quantised = bitsandbytes.nn.Linear4bit(
            each.in_features, each.out_features, bias=False, compute_dtype=compute_dtype, quant_type="nf4"
        )
        quantised.weight = bitsandbytes.nn.Params4bit(each.weight.data, requires_grad=False, quant_type="nf4")
        quantised.bias = each.bias
        # otherwise the first evaluation packs the weights anew for a kernel that only some CPUs and sizes have
        quantised.support_avx512bf16_for_cpu = False
        module.set_submodule(name, quantised.to("cpu"))  # which quantises


def _selected(module: nn.Module, section: TrainableSection) -> nn.Module:
    """Freeze the parameters whose names match no pattern of the section."""
    names = [name for name, _ in module.named_parameters()]
    if problems := tuple(trainable.pattern_problems(section.only, names)):
        raise InvalidJobSpec(problems=problems)
    wanted = set(trainable.trained(section.only, names))
    for name, each in module.named_parameters():
        each.requires_grad_(name in wanted)
    return module


def merged(spec: IslandSpec, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters of the job's model with these trained ones, adapters merged, as arrays by name."""
    module = module_of(spec)
    own = trained_parameters(module)
    if own.keys() != arrays.keys():
        raise ConfigurationError(detail="The parameters are not those that the job's specification trains.")
    with torch.no_grad():
        for name, each in own.items():
            each.copy_(torch.from_numpy(arrays[name]))
        for each in module.modules():
            if hasattr(each, "lora_A"):
                each.merge()
    return {
        name.replace(".base_layer.", "."): each.detach().float().numpy()
        for name, each in module.named_parameters()
        if ".lora_" not in name
    }


def hold_frozen_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold the frozen matrices of linear layers in the type to which the computation casts them anyway."""
    shared = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    for each in module.modules():
        if not isinstance(each, nn.Linear) or id(each.weight) in shared:
            continue
        if each.weight.dtype == torch.float32 and not any(own.requires_grad for own in each.parameters(recurse=False)):
            each.to(dtype)


def _of_folder(spec: IslandSpec, folder: str, settings: Mapping[str, Any]) -> nn.Module:
    try:
        import transformers
    except ImportError as missing:
        raise ConfigurationError(
            detail=f"{MODEL} is the folder {folder}, but transformers cannot be imported here ({missing}). "
            f"{INSTALL_TORCH}"
        ) from missing
    place = spec.roots.data_file(folder).real()
    if not place.is_dir():
        raise ConfigurationError(detail=f"{MODEL} {folder} is no folder. Copy the model to this path on every node.")
    for file in place.iterdir():
        spec.roots.data_file(f"{folder.rstrip('/')}/{file.name}").real()
    if (digest := spec.job.model.weights_digest) is not None and (here := folder_digest(folder, spec.roots)) != digest:
        raise ConfigurationError(
            detail=f"{MODEL} {folder} has the digest {here} here, but {digest} where the job was submitted. Copy the same "
            "files to that path on every machine: what is trained only fits those weights."
        )
    transformers.utils.logging.disable_progress_bar()
    try:
        return _loaded(transformers, place, folder, settings)
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        raise ConfigurationError(
            detail=f"{MODEL} {folder} cannot be loaded by transformers {transformers.__version__} ({in_words(error)}). "
            "Correct the folder, or trainer.settings."
        ) from error


def _loaded(transformers: Any, place: Path, folder: str, settings: Mapping[str, Any]) -> nn.Module:
    config, unknown = transformers.AutoConfig.from_pretrained(
        place, return_unused_kwargs=True, local_files_only=True, trust_remote_code=False, **settings
    )
    if unknown:
        raise ConfigurationError(
            detail=f"trainer.settings has {', '.join(sorted(unknown))}, but config.json of {folder} has no such field. "
            "With a folder, settings replace fields of its config.json."
        )
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigurationError(
            detail=f"{MODEL} {folder} is a model of type {config.model_type}, of which transformers has no causal "
            "language model. Use one that AutoModelForCausalLM loads."
        )
    config.use_cache = False
    if (place / "adapter_config.json").exists():
        raise ConfigurationError(
            detail=f"{MODEL} {folder} has adapter_config.json: a PEFT adapter. Merge it into the weights "
            "(merge_and_unload of peft) and save them, or remove it from the folder."
        )
    if not any(place.glob("*.safetensors")):
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return module
    module, loading = transformers.AutoModelForCausalLM.from_pretrained(
        place, config=config, dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
    )
    if missing := sorted(loading["missing_keys"]):
        raise ConfigurationError(
            detail=f"{MODEL} {folder} has no weights for {', '.join(missing[:3])}{' …' * (len(missing) > 3)}, as a "
            "model without a causal head. Save it with AutoModelForCausalLM."
        )
    if dropped := sorted(loading["unexpected_keys"]):
        raise ConfigurationError(
            detail=f"{MODEL} {folder} has weights that the model would drop: {', '.join(dropped[:3])}"
            f"{' …' * (len(dropped) > 3)}. Correct config.json, or, if they are not needed, save the model again with "
            "AutoModelForCausalLM."
        )
    if getattr(config, "tie_word_embeddings", False) and (head := _separate_head(module)):
        raise ConfigurationError(
            detail=f"{MODEL} {folder}: config.json has tie_word_embeddings true, but {head} differs from the embeddings. If "
            "the model has a separate head, set tie_word_embeddings to false in config.json; otherwise save the weights "
            "again without it."
        )
    return module


def _separate_head(module: Any) -> str:
    """Return the name of the head's weight if transformers did not tie it to the embeddings, because it differs."""
    weight = getattr(module.get_output_embeddings(), "weight", None)
    name = next((name for name, each in module.named_parameters() if each is weight), "")
    embeddings = module.get_input_embeddings()
    return name if name in (module._tied_weights_keys or ()) and weight is not embeddings.weight else ""


def slope_of(before: Iterable[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]) -> float:
    """Return the inner product of a step's update and gradient; 0 if the update is no larger than rounding."""
    slope = update_square = parameter_square = 0.0
    for parameter, value, gradient in before:
        update = parameter.detach().to("cpu") - value
        slope += float((update * gradient).sum(dtype=torch.float64))
        update_square += float(update.square().sum(dtype=torch.float64))
        parameter_square += float(value.square().sum(dtype=torch.float64))
    return slope if update_square > ROUNDING**2 * parameter_square else 0.0


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name; shared ones once. Raises ConfigurationError if they cannot travel."""
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if not parameters:
        raise ConfigurationError(
            detail=f"{MODEL} has no parameters that require a gradient, so nothing would train. Unfreeze some."
        )
    for name, each in parameters.items():
        if isinstance(each, nn.parameter.UninitializedParameter) or each.is_meta:
            raise ConfigurationError(
                detail=f"{MODEL}: {name} is not initialised. Initialise the module in the factory."
            )
        if each.dtype != torch.float32 or not each.numel():
            what = f"of {each.dtype}" if each.numel() else "empty"
            raise ConfigurationError(
                detail=f"{MODEL}: {name} is {what}, but parameters that train are merged and sent in float32. Return "
                "module.float(); model.compute_dtype sets the type of computation. Frozen parameters may have any type."
            )
    return parameters


def roles_of(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Role]:
    """Return the roles of the parameters: by the module that has them, and of heads by name, as for other models."""
    looked_up = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    scored = {id(getattr(head, "weight", None))}

    def role(name: str, each: nn.Parameter) -> Role:
        embedding = id(each) in looked_up | scored or role_by_name(name, each.ndim).embedding
        stacked = each.ndim - 2 if each.ndim > 2 and "expert" in name else 0
        return Role(embedding, stacked, decays=each.ndim >= 2 and id(each) not in looked_up)

    return {name: role(name, each) for name, each in parameters.items()}


def require_causal(module: nn.Module) -> int:
    """Return the number of tokens that the module scores.

    Raises ConfigurationError unless it maps tokens to logits, and a token's logits do not depend on later tokens.
    """
    was_training = module.training
    module.eval()
    run = guarded(f"the model of {MODEL}", lambda tokens: logits_of(module(tokens)))
    with torch.no_grad():
        one, other = (run(torch.tensor([[0, 1, 0, last]])).float() for last in (0, 1))
    module.train(was_training)
    if one.ndim != 3 or one.shape[:2] != (1, 4):
        raise ConfigurationError(
            detail=f"{MODEL} maps tokens (1, 4) to {tuple(one.shape)}; it must return logits, one for each token of "
            "the vocabulary, for each position."
        )
    if float((one - other)[:, :-1].abs().max()) > CAUSAL_TOLERANCE * max(1.0, float(one.abs().max())):
        raise ConfigurationError(
            detail=f"{MODEL} is not causal: the logits of a position change with later tokens. Use a causal language "
            "model, or mask the attention."
        )
    return int(one.shape[-1])


def documents_of(module: nn.Module, inputs: Batch) -> dict[str, torch.Tensor]:
    """Return the keywords that tell the module which tokens of a row are one document."""
    if inputs.segments is None:
        return {}
    if "position_ids" in signature(module.forward).parameters:
        return {"position_ids": inputs.positions}
    return {"positions": inputs.positions, "segments": inputs.segments}


def require_documents(module: nn.Module) -> None:
    """Raise ConfigurationError unless a document's logits are the same alone and behind another one in its row."""
    named = signature(module.forward).parameters
    if "position_ids" not in named and not {"positions", "segments"} <= named.keys():
        raise ConfigurationError(
            detail=f"data.format is chat, but the forward of the module of {MODEL} has no parameters positions and "
            "segments. Add them, and let a token see only its own segment."
        )
    was_training = module.training
    module.eval()
    run = guarded(f"the model of {MODEL}", lambda row: logits_of(module(row.tokens, **documents_of(module, row))))
    first, second = torch.tensor([[0, 1, 1]]), torch.tensor([[1, 0, 1, 0]])
    of_first, of_second = torch.ones_like(first), torch.ones_like(second)
    row = Batch(
        torch.cat((first, second), 1),
        segments=torch.cat((of_first, 2 * of_second), 1),
        positions=torch.cat((of_first.cumsum(1) - 1, of_second.cumsum(1) - 1), 1),
    )
    alone = Batch(second, segments=of_second, positions=of_second.cumsum(1) - 1)
    with torch.no_grad():
        packed, expected = run(row).float()[:, first.shape[1] :], run(alone).float()
    module.train(was_training)
    if float((packed - expected).abs().max()) > CAUSAL_TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ConfigurationError(
            detail=f"data.format is chat, but a document's logits from the model of {MODEL} change with the document before "
            "it in its row. Mask the attention between segments, or use a model of transformers that does, by position_ids."
        )


def logits_of(result: Any) -> torch.Tensor:
    logits = getattr(result, "logits", result)
    if not isinstance(logits, torch.Tensor):
        raise ConfigurationError(
            detail=f"{MODEL} returns {type(result).__name__} for tokens; it must return a tensor of logits, or an "
            "object with `logits`."
        )
    return logits


def losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each target in nats."""
    each = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return each.view(targets.shape)


def weighted_mean(values: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return Σ w·x / Σ w, 0 if all weights are 0; without weights the plain mean."""
    if weights is None:
        return values.mean()
    total = weights.sum()
    return (weights * values).sum() / torch.where(total > 0, total, 1.0)


def auxiliary_of(result: Any, module: nn.Module) -> Any:
    """Return what the objective adds to the loss: the balance of experts, if transformers computes it."""
    balance = getattr(result, "aux_loss", None)
    coefficient = getattr(getattr(module, "config", None), "router_aux_loss_coef", None)
    return coefficient * balance if isinstance(balance, torch.Tensor) and coefficient else 0.0


def checkpoint_activations(module: nn.Module, name: str) -> None:
    enable = getattr(module, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ConfigurationError(
            detail=f"model.remat is full, but the model of {MODEL} {name!r} has no gradient_checkpointing_enable. Set "
            "it to none and use torch.utils.checkpoint in the module."
        )
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


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
