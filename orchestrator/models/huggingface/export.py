"""A job's merged parameters as a Hugging Face checkpoint: ``config.json``, ``model.safetensors``, and the tokenizer's files.

Tensors are read part by part from the safetensors that a job leaves and written as they come, so that no more of them is in
memory than one layer of one. Refuses to know where the job's file comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.bounds import BYTES
from orchestrator.errors import DataError, UnfitWeights
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import configuration, files, tokenizer
from orchestrator.models.huggingface.files import TensorFile
from orchestrator.models.huggingface.layout import Sources, sources_of
from orchestrator.roots import EVERYTHING
from orchestrator.sections import ModelSection
from orchestrator.tokenizer_file import read as read_tokenizer


def write(source: Path, folder: Path, spec: Mapping[str, Any], tokenizer_path: Path | None = None) -> None:
    """``folder`` has the files afterwards. ``source`` are parameters of the job that ``spec`` is the specification of.

    ``tokenizer_path`` is a copy of ``data.tokenizer``, with its ending; without it a job whose tokens are no bytes is
    written without one.

    Raises UnfitWeights, before anything is written, for a model that none of transformers' is like; DataError where the
    file has not this model's tensors.
    """
    network = ModelSection.model_validate(spec["model"]).network
    if not isinstance(network, DecoderSection):
        raise UnfitWeights(
            detail="model.preset or model.factory of the job is no decoder, and transformers has no such model.",
            remedy="Export it as safetensors or orbax.",
        )
    data, tokenizer_file = spec["data"], None
    if tokenizer_path is not None:
        tokenizer_file = read_tokenizer(EVERYTHING, str(tokenizer_path.absolute()))
    end_of_text = tokenizer.end_of_text_of(tokenizer_file, data["separator"])
    document = configuration.document_of(network, data["sequence_length"], end_of_text)
    own = files.read_header(lambda: source.open("rb"))
    shapes = parameter_shapes(network)
    if shapes != {name: entry.shape for name, entry in own.entries.items()}:
        raise DataError(detail=f"{source} has not the tensors of the model that its specification describes.")
    sources = sources_of(network)
    tensors = {name: each.shape for each in sources.values() for name in each.names.values()}
    with (folder / "model.safetensors").open("xb") as file:
        files.write(file, tensors, _values(own, sources))
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    if tokenizer_file is not None or data["tokenizer"] == BYTES:
        for name, content in tokenizer.files_of(tokenizer_file, data["tokenizer"], end_of_text).items():
            (folder / name).write_bytes(content)


def _values(own: TensorFile, sources: Mapping[str, Sources]) -> Iterator[NDArray[np.float32]]:
    for name, each in sources.items():
        for index in each.names:
            part = own.read(name, index)
            yield part.T if each.turned else part
