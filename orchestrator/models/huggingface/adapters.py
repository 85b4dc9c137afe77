"""A job's low-rank adapters as PEFT has them, and the whole tensors of a job that trained a part of its model.

    adapter_config.json          LoRA's settings, and the checkpoint that the adapters belong to
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, (rank, inputs), and lora_B,
                                 (outputs, rank), for each layer: the transposes of ours

Where transformers has several of our matrices in one, their adapters become one of as many times the rank, with as many
times the alpha: A has their rows one below the other, and B has each in its own rows and columns. So it is with queries,
keys and values of Phi 3, and with gates and ups of a mixture of experts, whose experts are a parameter and no modules
(``target_parameters``). Its A is (experts · rank, inputs), and its B (outputs, rank · experts), the experts innermost.

Ours are described in ``models.trainable``. A whole tensor is the trained one, or that of the base plus alpha / rank · A · B
if it has an adapter. It is computed layer by layer, so that at most one layer is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import DataError, UnfitWeights
from orchestrator.models.decoder import DecoderSection
from orchestrator.models.huggingface import configuration, files
from orchestrator.models.huggingface.files import TensorFile
from orchestrator.models.huggingface.layout import Sources, sources_of
from orchestrator.models.huggingface.origin import CONFIG, Origin
from orchestrator.models.trainable import A, B, selected
from orchestrator.specification.training_sections import LoraSection, ModelSection, TrainableSection, TrainerSection

ADAPTER_CONFIG, ADAPTER_MODEL = "adapter_config.json", "adapter_model.safetensors"
PREFIX, OF_DEFAULT = "base_model.model.", ".default."
"""What PEFT writes before a tensor's name, and leaves out of it: the adapter's own name."""
EXPERTS_DOWN = "layers.experts.down"
EXPERTS: Mapping[str, str] = {
    "layers.experts.gate": "gate_up_proj",
    "layers.experts.up": "gate_up_proj",
    EXPERTS_DOWN: "down_proj",
}
"""The parameters of transformers 5 that are our matrices of all experts of a layer.

PEFT puts the adapter of the last one around that of the other.
"""
MERGED = "Export it merged, with --format huggingface."


class Base(Protocol):
    """The tensors of a whole model by our names."""

    def read(self, name: str, index: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """Return the tensor, or its part at ``index`` along the first axes."""
        ...


class Merged:
    """The whole tensors of a job that trained a part of ``base``; a ``Base`` itself."""

    def __init__(self, own: TensorFile, section: TrainableSection, base: Base) -> None:
        self._own, self._section, self._base = own, section, base

    def read(self, name: str, index: tuple[int, ...] = ()) -> NDArray[np.float32]:
        if name in self._own.entries:
            return self._own.read(name, index)
        whole = self._base.read(name, index)
        if self._section.lora is None or name + A not in self._own.entries:
            return whole
        pair = self._own.read(name + A, index), self._own.read(name + B, index)
        return whole + np.float32(self._section.lora.scale) * (pair[0] @ pair[1])


def require_own(own: TensorFile, section: TrainableSection, network: DecoderSection, source: Path) -> None:
    """Raise DataError unless the file has what such a job trains."""
    if section.trained_shapes(network) != {name: entry.shape for name, entry in own.entries.items()}:
        raise DataError(detail=f"{source} does not have the tensors that its specification trains.")


def not_of_peft(spec: Mapping[str, Any], origin: Origin | None) -> UnfitWeights | None:
    """Return why PEFT cannot load the adapters of a job; None if it can."""
    part = spec.get("trainable")
    lora = None if part is None else TrainableSection.model_validate(part).lora
    section, trainer = ModelSection.model_validate(spec["model"]), TrainerSection.model_validate(spec["trainer"])
    remedy = MERGED
    if lora is not None and trainer.kind == "torch":
        if trainer.folder is not None:
            return None
        what, remedy = f"its base is of trainer.model {trainer.model}", "Export it as safetensors."
    elif lora is None:
        what = f"it trains {'the whole model' if part is None else 'some of its tensors'}, and no adapters"
    elif not isinstance(section.network, DecoderSection):
        what, remedy = "transformers has no model like its base", "Export it as safetensors or orbax."
    elif section.initial_weights is None:
        what = "its base was drawn from the seed, so there is no checkpoint that PEFT could load"
    elif origin is not None and configuration.sees(origin.mapping(CONFIG)):
        what = f"{origin.folder} is a vision-language model, in which the matrices have other names"
    else:
        return None
    return UnfitWeights(detail=f"The job cannot be exported for PEFT: {what}.", remedy=remedy)


def write(source: Path, folder: Path, spec: Mapping[str, Any], origin: Origin | None = None) -> list[str]:
    """Write the adapters of the job with this specification to ``folder``, and return notes for the user.

    Raises UnfitWeights, before anything is written, if PEFT cannot load them; DataError if ``source`` does not have them.
    """
    if problem := not_of_peft(spec, origin):
        raise problem
    section, model = TrainableSection.model_validate(spec["trainable"]), ModelSection.model_validate(spec["model"])
    network, lora = model.network, section.lora
    trainer = TrainerSection.model_validate(spec["trainer"])
    if lora is not None and trainer.folder is not None:
        return _write_of_torch(source, folder, lora, trainer.folder)
    assert isinstance(network, DecoderSection), "otherwise there is a problem"
    assert lora is not None, "otherwise there is a problem"
    own = files.read_header(lambda: source.open("rb"))
    require_own(own, section, network, source)
    places = _places(lora, network, _sources_of(network, origin))
    shapes: dict[str, tuple[int, ...]] = {}
    for one in places:
        ranks = lora.rank * len(one.parts) * one.expert_count
        shapes[f"{PREFIX}{one.module}.lora_A.weight"] = (ranks, one.inputs)
        shapes[f"{PREFIX}{one.module}.lora_B.weight"] = (one.outputs, ranks)
    with (folder / ADAPTER_MODEL).open("xb") as out:
        files.write(out, shapes, (array for one in places for array in one.pair(own, lora.rank)))
    modules, parameters = (sorted({one.target for one in places if one.is_parameter is kind}) for kind in (False, True))
    document = configuration_of(lora, modules, str(model.initial_weights))
    counts = {one.target.rpartition(".")[2]: len(one.parts) for one in places if len(one.parts) > 1}
    if counts:
        document["rank_pattern"] = {end: lora.rank * count for end, count in counts.items()}
        document["alpha_pattern"] = {end: document["lora_alpha"] * count for end, count in counts.items()}
    notes = [f"peft can load it on top of {model.initial_weights}."]
    if parameters:
        document["target_parameters"] = parameters
        notes.append("It adapts experts or routers, for which peft 0.17 and transformers 5 are needed, or later ones.")
    (folder / ADAPTER_CONFIG).write_text(json.dumps(document, indent=2) + "\n")
    return notes


@dataclass(frozen=True, slots=True)
class _Place:
    """A module or parameter of theirs that has an adapter, and our adapted matrices in it.

    Each part is a matrix's name, its index among our leading axes, and its first row among the ``outputs``. A parameter has
    those of all experts of a layer. ``target`` is what the configuration calls it.
    """

    module: str
    target: str
    is_parameter: bool
    inputs: int
    outputs: int
    expert_count: int
    parts: tuple[tuple[str, tuple[int, ...], int], ...]

    def pair(self, own: TensorFile, rank: int) -> Iterator[NDArray[np.float32]]:
        """Yield A (experts · rank · parts, inputs) and B (outputs, rank · parts · experts)."""
        arrays = [[own.read(name + end, index) for end in (A, B)] for name, index, _ in self.parts]
        if self.expert_count == 1:
            arrays = [[array[None] for array in pair] for pair in arrays]
        yield np.concatenate([a for a, _ in arrays], axis=2).swapaxes(1, 2).reshape(-1, self.inputs)
        whole = np.zeros((self.outputs, len(arrays) * rank, self.expert_count), np.float32)
        for number, ((_, b), (_, _, row)) in enumerate(zip(arrays, self.parts, strict=True)):
            whole[row : row + b.shape[2], number * rank : (number + 1) * rank] = b.transpose(2, 1, 0)
        yield whole.reshape(self.outputs, -1)


def _places(lora: LoraSection, network: DecoderSection, sources: Mapping[str, Sources]) -> list[_Place]:
    """Return what has adapters, in the order of our matrices and their layers."""
    by_module: dict[str, _Place] = {}
    targets = _targets(lora, network)
    holds_both = {EXPERTS_DOWN} < {name for name in targets if name in EXPERTS}
    for name in targets:
        inputs, outputs = network.matrices[name][-2:]
        if name in EXPERTS:
            layers, expert_count = network.matrices[name][:2]
            parameter = EXPERTS[name]
            row = outputs if name.endswith(".up") else 0
            rows = outputs if parameter == "down_proj" else 2 * outputs
            inner = ".base_layer" if holds_both and parameter != "down_proj" else ""
            places = [
                _Place(
                    f"model.layers.{layer}.mlp.experts{inner}", f"experts.{parameter}", True, inputs, rows,
                    expert_count, ((name, (layer,), row),),
                )
                for layer in range(layers)
            ]  # fmt: skip
        else:
            source = sources[name]
            is_router = name.endswith(".router")
            places = [
                _Place(
                    module := theirs.removesuffix(".weight").replace("block_sparse_moe", "mlp"),
                    "gate.weight" if is_router else module.rpartition(".")[2], is_router, inputs, source.shape[0], 1,
                    ((name, index, 0 if source.rows is None else source.rows[0]),),
                )
                for index, theirs in source.names.items()
            ]  # fmt: skip
        for place in places:
            before = by_module.get(place.module)
            by_module[place.module] = place if before is None else replace(before, parts=before.parts + place.parts)
    return list(by_module.values())


def _write_of_torch(source: Path, folder: Path, lora: LoraSection, base: str) -> list[str]:
    """Write the adapters of a torch trainer, which PEFT itself has made: only the adapter's own name is left out."""
    own = files.read_header(lambda: source.open("rb"))
    names = {f"{PREFIX}{name.replace(OF_DEFAULT, '.')}": name for name in own.entries}
    with (folder / ADAPTER_MODEL).open("xb") as out:
        shapes = {theirs: own.entries[name].shape for theirs, name in names.items()}
        files.write(out, shapes, map(own.read, names.values()))
    modules = sorted({name.partition(".lora_")[0] for name in own.entries})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(configuration_of(lora, modules, base), indent=2) + "\n")
    return [f"peft can load it on top of {base}."]


def _sources_of(network: DecoderSection, origin: Origin | None) -> dict[str, Sources]:
    """Return where the base, or transformers' nearest model type, has our tensors."""
    text = None if origin is None else origin.config
    return sources_of(network, configuration.document_of(network, 1, None, text)["model_type"])


def configuration_of(lora: LoraSection, modules: list[str], base: str) -> dict[str, Any]:
    """Return ``adapter_config.json``."""
    alpha = lora.scale * lora.rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _targets(lora: LoraSection, network: DecoderSection) -> list[str]:
    return selected(lora.targets, network.matrices)
