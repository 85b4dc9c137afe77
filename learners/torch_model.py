"""The module that a torch trainer trains, and its optimizers: built as the specification says, or refused.

``trainer.model`` is a folder that ``transformers`` reads, or a function that returns a ``torch.nn.Module``:

   module(tokens): (batch, length) int64 → (batch, length, vocabulary) logits, or an object with them as ``logits``

Rows that hold several documents are told to transformers' models by ``position_ids``, which begin at 0 in each document: the
library then masks the attention between documents. Another module gets ``positions`` and ``segments`` (``contract.Batch``).

With ``trainable`` the module's other parameters are frozen, and PEFT adds adapters to its linear layers.

The optimizer follows ``training.inner_optimizer``. AdamW and Muon are torch's, which agree with optax's up to rounding.
A factory names a class of optimizers, such as ``torch.optim:NAdam``, or a function.

This module knows nothing of steps or devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from learners.contract import Batch
from learners.factories import called, guarded, imported
from learners.island_spec import IslandSpec
from learners.optimizer_settings import ROUNDING, settings_of
from orchestrator.errors import ConfigurationError, InvalidJobSpec, in_words
from orchestrator.models import trainable
from orchestrator.models.huggingface.configuration import headless
from orchestrator.models.huggingface.weights import ADAPTER, CONFIG, folder_digest
from orchestrator.models.huggingface.weights import FIELD as WEIGHTS
from orchestrator.parameters.pieces import Role, Roles, role_by_name
from orchestrator.specification.training_sections import (
    INSTALL_4_BIT,
    INSTALL_TORCH,
    InnerOptimizerSection,
    LoraSection,
    TrainableSection,
    is_function,
)

MODEL = "trainer.model"
FACTORY = "training.inner_optimizer.factory"
NOT_GIVEN = ("beta1", "beta2", "momentum", "weight_decay")
"""Settings of ``training.inner_optimizer`` that a class of optimizers does not get."""
CAUSAL_TOLERANCE = 1e-3
"""How much logits may differ by rounding: of what another last token changes in its own logits, which may be small."""
LOGIT_ROUNDING = 1e-5
"""The same, of the largest logit: rows of other lengths are added up in another order."""


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
    if spec.shares_decoder:
        return _of_folder(spec, WEIGHTS, spec.job.model.initial_weights or "", {})
    if not is_function(name):
        return _of_folder(spec, MODEL, name, settings)
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


def _of_folder(spec: IslandSpec, field: str, folder: str, settings: Mapping[str, Any]) -> nn.Module:
    try:
        import transformers
    except ImportError as missing:
        raise ConfigurationError(
            detail=f"{field} is the folder {folder}, but transformers cannot be imported here ({missing}). "
            f"{INSTALL_TORCH}"
        ) from missing
    place = spec.roots.data_file(folder).real()
    if not place.is_dir():
        raise ConfigurationError(detail=f"{field} {folder} is no folder. Copy the model to this path on every node.")
    for file in place.iterdir():
        spec.roots.data_file(f"{folder.rstrip('/')}/{file.name}").real()
    if (digest := spec.job.model.weights_digest) is not None and (here := folder_digest(folder, spec.roots)) != digest:
        raise ConfigurationError(
            detail=f"{field} {folder} has the digest {here} here, but {digest} where the job was submitted. Copy the same "
            "files to that path on every machine: what is trained only fits those weights."
        )
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its report of missing weights says what our error does
    if (place / ADAPTER).is_file() and not (place / CONFIG).is_file():
        raise ConfigurationError(
            detail=f"{field} {folder} has adapters ({ADAPTER}) and no model. Merge them into their base, or name the base "
            "and set trainable.lora to train new ones."
        )
    try:
        return _loaded(transformers, place, field, folder, settings)
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        raise ConfigurationError(
            detail=f"{field} {folder} cannot be loaded by transformers {transformers.__version__} ({in_words(error)}). "
            "Correct the folder, or trainer.settings."
        ) from error


def _loaded(transformers: Any, place: Path, field: str, folder: str, settings: Mapping[str, Any]) -> nn.Module:
    config, unknown = transformers.AutoConfig.from_pretrained(
        place, return_unused_kwargs=True, local_files_only=True, trust_remote_code=False, **settings
    )
    if unknown:
        raise ConfigurationError(
            detail=f"trainer.settings has {', '.join(sorted(unknown))}, but config.json of {folder} has no such field. "
            "With a folder, settings replace fields of its config.json."
        )
    if (named := headless({"architectures": config.architectures})) is not None:
        raise ConfigurationError(
            detail=f"{field} {folder} is a {named}, which has no causal head. Save a model that AutoModelForCausalLM loads."
        )
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigurationError(
            detail=f"{field} {folder} is a model of type {config.model_type}, of which transformers has no causal "
            "language model. Use one that AutoModelForCausalLM loads."
        )
    config.use_cache = False
    if (place / ADAPTER).exists():
        raise ConfigurationError(
            detail=f"{field} {folder} has {ADAPTER}: a PEFT adapter. Merge it into the weights "
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
            detail=f"{field} {folder} has no weights for {', '.join(missing[:3])}{' …' * (len(missing) > 3)}, as a "
            "model without a causal head. Save it with AutoModelForCausalLM."
        )
    if dropped := sorted(loading["unexpected_keys"]):
        raise ConfigurationError(
            detail=f"{field} {folder} has weights that the model would drop: {', '.join(dropped[:3])}"
            f"{' …' * (len(dropped) > 3)}. Correct config.json, or, if they are not needed, save the model again with "
            "AutoModelForCausalLM."
        )
    if getattr(config, "tie_word_embeddings", False) and (head := _separate_head(module)):
        raise ConfigurationError(
            detail=f"{field} {folder}: config.json has tie_word_embeddings true, but {head} differs from the embeddings. If "
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


def slope_of(moved: Iterable[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]) -> float:
    """Return the slope (``inner_step``) of a step: of each parameter, what it was, and its gradient."""
    slope = updates = sizes = 0.0
    for parameter, before, gradient in moved:
        update = parameter.detach() - before
        slope += float((update * gradient).sum())
        updates, sizes = updates + float(update.square().sum()), sizes + float(before.square().sum())
    return slope if updates > ROUNDING**2 * sizes else 0.0


# ── values of a state ─────────────────────────────────────────────────────────────────────────────────────────────────


def flops_per_token(module: nn.Module) -> float | None:
    """Return six operations for each parameter, but for tables of embeddings; None if some parameters are not trained."""
    if any(not each.requires_grad for each in module.parameters()):
        return None
    layers = (each for each in module.modules() if not isinstance(each, nn.Embedding))
    own = {id(each): each.numel() for layer in layers for each in layer.parameters(recurse=False)}
    return 6.0 * float(sum(own.values()))


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
    if differ((one - other)[:, :-1], one, other):
        raise ConfigurationError(
            detail=f"{MODEL} is not causal: the logits of a position change with later tokens. Use a causal language "
            "model, or mask the attention."
        )
    return int(one.shape[-1])


def differ(difference: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether logits differ by more than rounding. ``one`` and ``other`` are those of another last token each."""
    own = float((one - other)[:, -1].abs().max())
    return float(difference.abs().max()) > max(CAUSAL_TOLERANCE * own, LOGIT_ROUNDING * float(one.abs().max()))


def documents_of(module: nn.Module, inputs: Batch) -> dict[str, torch.Tensor]:
    """Return the keywords that tell the module which tokens of a row are one document."""
    if inputs.segments is None:
        return {}
    if "position_ids" in signature(module.forward).parameters:
        return {"position_ids": inputs.positions}
    return {"positions": inputs.positions, "segments": inputs.segments}


def require_documents(module: nn.Module, segmented_by: str) -> None:
    """Raise ConfigurationError unless a document's logits are the same alone and behind another one in its row.

    ``segmented_by`` says because of which field.
    """
    named = signature(module.forward).parameters
    if "position_ids" not in named and not {"positions", "segments"} <= named.keys():
        raise ConfigurationError(
            detail=f"{segmented_by}, but the forward of the module of {MODEL} has no parameters positions and "
            "segments. Add them, and let a token see only its own segment."
        )
    was_training = module.training
    module.eval()
    run = guarded(f"the model of {MODEL}", lambda row: logits_of(module(row.tokens, **documents_of(module, row))))
    first, second, other = torch.tensor([[0, 1, 1]]), torch.tensor([[1, 0, 1, 0]]), torch.tensor([[1, 0, 1, 1]])
    of_first, of_second = torch.ones_like(first), torch.ones_like(second)
    row = Batch(
        torch.cat((first, second), 1),
        segments=torch.cat((of_first, 2 * of_second), 1),
        positions=torch.cat((of_first.cumsum(1) - 1, of_second.cumsum(1) - 1), 1),
    )
    alone, altered = (Batch(each, segments=of_second, positions=of_second.cumsum(1) - 1) for each in (second, other))
    with torch.no_grad():
        packed, expected, changed = run(row).float()[:, first.shape[1] :], run(alone).float(), run(altered).float()
    module.train(was_training)
    if differ(packed - expected, expected, changed):
        raise ConfigurationError(
            detail=f"{segmented_by}, but a document's logits from the model of {MODEL} change with the document before "
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
    if foreign := sum(id(each) not in own for each in members(built)):
        raise ConfigurationError(
            detail=f"{FACTORY} {path!r} returned an optimizer of {foreign} other parameters. Use those that it gets."
        )
    return built


def members(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a parameter group, except for its learning rate, which the schedule sets."""
    return {key: each for key, each in group.items() if isinstance(each, bool | int | float) and key != "lr"}
