"""The module that a torch trainer trains: built as the specification says, and refused if it cannot be one.

``trainer.model`` is a folder that ``transformers`` reads, or a function that returns a ``torch.nn.Module``:

   module(tokens): (batch, length) int64 → (batch, length, vocabulary) logits, or an object with them as ``logits``

Importing this module raises ConfigurationError where PyTorch is not installed. It knows nothing of steps or devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learners.factories import called, guarded
from learners.island_spec import IslandSpec
from orchestrator.errors import ConfigurationError, in_words
from orchestrator.parameters.pieces import Role, role_by_name
from orchestrator.specification.training_sections import INSTALL_TORCH, is_function

try:
    import torch
    from torch import nn
except ImportError as missing:
    raise ConfigurationError(
        detail=f"trainer.kind is torch, but PyTorch cannot be imported here ({missing}). {INSTALL_TORCH}"
    ) from missing

MODEL = "trainer.model"
CAUSAL_TOLERANCE = 1e-3
"""Of the largest logit: how much a later token may change an earlier position's logits, by rounding."""


def module_of(spec: IslandSpec) -> nn.Module:
    """Return a new module on the CPU, as the specification and its seed determine it.

    Raises ConfigurationError if ``trainer.model`` names none.
    """
    name, settings = spec.job.trainer.model or "", spec.job.trainer.settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.job.seed)
        if not is_function(name):
            return _of_folder(spec, name, settings)
        module = called(MODEL, name, spec.document, settings=settings, settings_field="trainer.settings")
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            detail=f"{MODEL} {name!r} returned {type(module).__name__}; it must return a torch.nn.Module that maps "
            "tokens to logits."
        )
    return module


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
    return module


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


def logits_of(result: Any) -> torch.Tensor:
    logits = getattr(result, "logits", result)
    if not isinstance(logits, torch.Tensor):
        raise ConfigurationError(
            detail=f"{MODEL} returns {type(result).__name__} for tokens; it must return a tensor of logits, or an "
            "object with `logits`."
        )
    return logits


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss in nats per token."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


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
