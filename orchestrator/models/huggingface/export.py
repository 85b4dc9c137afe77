"""A job's merged parameters as a Hugging Face checkpoint: ``config.json``, ``model.safetensors``, and the tokenizer's files.

Tensors are read part by part from the job's safetensors file and written at once, so at most one layer of one tensor is in
memory. Where the job's file comes from is known elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import DataError, UnfitWeights
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import configuration, files, tokenizer
from orchestrator.models.huggingface.files import TensorFile
from orchestrator.models.huggingface.layout import Sources, sources_of
from orchestrator.models.huggingface.origin import CONFIG, Origin
from orchestrator.specification.sections import BUILT_IN_TRAINER, ModelSection
from orchestrator.system.roots import EVERYTHING
from orchestrator.text.tokenizer_file import read as read_tokenizer


def write(
    source: Path,
    folder: Path,
    spec: Mapping[str, Any],
    tokenizer_path: Path | None = None,
    origin: Origin | None = None,
) -> list[str]:
    """Write the files to ``folder`` and return notes for the user, in sentences.

    ``source`` are parameters of the job with the specification ``spec``. ``tokenizer_path`` is a copy of
    ``data.tokenizer``; without it a job whose tokens are not bytes is written without a tokenizer. ``origin`` is what was
    kept of the checkpoint that the job continued.

    Raises UnfitWeights, before anything is written, if transformers has no such model; DataError if the
    file does not have this model's tensors.
    """
    if problem := not_of_transformers(spec):
        raise problem
    network = ModelSection.model_validate(spec["model"]).network
    assert isinstance(network, DecoderSection), "otherwise there is a problem"
    data, file = spec["data"], None
    if tokenizer_path is not None:
        file = read_tokenizer(EVERYTHING, str(tokenizer_path.absolute()))
    special, notes = tokenizer.special_tokens_of(file, data, origin)
    text = None if origin is None else origin.config
    document = configuration.document_of(network, data["sequence_length"], special.ids, text)
    own = files.read_header(lambda: source.open("rb"))
    shapes = parameter_shapes(network)
    if shapes != {name: entry.shape for name, entry in own.entries.items()}:
        raise DataError(detail=f"{source} does not have the tensors of the model that its specification describes.")
    sources = sources_of(network)
    tensors = {name: each.shape for each in sources.values() for name in each.names.values()}
    with (folder / "model.safetensors").open("xb") as out:
        files.write(out, tensors, _values(own, sources))
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    for name, content in special.files.items():
        (folder / name).write_bytes(content)
    if origin is not None and configuration.sees(origin.mapping(CONFIG)):
        notes.append(f"It is only the language model of {origin.folder}, a vision-language model.")
    return notes


def not_of_transformers(spec: Mapping[str, Any]) -> UnfitWeights | None:
    """Return why transformers cannot load a model of this specification; None if it may be able to."""
    section = ModelSection.model_validate(spec["model"])
    if isinstance(section.network, DecoderSection):
        return None
    if section.factory is not None:
        what = f"its model is of model.factory {section.factory}"
    elif spec["trainer"] != BUILT_IN_TRAINER:
        what = f"its trainer is {spec['trainer']}, and model.decoder is not set"
    else:
        what = f"its model is model.preset {section.preset!r}"
    return UnfitWeights(
        detail=f"The job cannot be exported for transformers: {what}, and transformers only has models like a decoder.",
        remedy="Export it as safetensors or orbax.",
    )


def _values(own: TensorFile, sources: Mapping[str, Sources]) -> Iterator[NDArray[np.float32]]:
    for name, each in sources.items():
        for index in each.names:
            part = own.read(name, index)
            yield part.T if each.turned else part
