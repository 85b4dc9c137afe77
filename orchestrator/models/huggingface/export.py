"""A job's merged parameters as a Hugging Face checkpoint: ``config.json``, safetensors files, and the tokenizer's files.

Tensors are read part by part from the job's safetensors file and written at once, so at most one layer of one tensor is in
memory. The caller knows where the job's file and the checkpoint's files come from.

   model.safetensors                  all tensors, if they fit into one file; otherwise
   model-00001-of-00003.safetensors   some of them, and
   model.safetensors.index.json       the file of each tensor

The tokenizer's side is the special tokens, and the files with which ``AutoTokenizer`` loads it:

   tokenizer_config.json    the class that loads it, and the tokens around a document
   tokenizer.json           that of the job; for bytes, one in which each byte is a token
   tokenizer.model          SentencePiece's, that of the job
   generation_config.json   that of the checkpoint that the job continued; generation also ends at the job's separator
   chat_template.jinja, …   those of that checkpoint

The checkpoint's tokenizer files are kept if the job has the same tokenizer. Otherwise the special tokens are those that the
job trained with: the separator ends a text if it is a control token, and the token before documents begins one. The tokens
of a text are those that the job trained on, except for control tokens: in training the content of a document was text,
whereas transformers turns a ``<|endoftext|>`` into the token itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import DataError, UnfitWeights
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import adapters, configuration, files
from orchestrator.models.huggingface.adapters import Base
from orchestrator.models.huggingface.configuration import IDS
from orchestrator.models.huggingface.files import INDEX, WHOLE
from orchestrator.models.huggingface.layout import Sources, sources_of
from orchestrator.models.huggingface.origin import CONFIG, GENERATION, OF_THE_TOKENIZER, TOKENIZER_CONFIG, Origin
from orchestrator.specification.bounds import BYTES
from orchestrator.specification.training_sections import ModelSection, TrainableSection, TrainerSection
from orchestrator.system.roots import EVERYTHING
from orchestrator.text.tokenizer_file import TokenizerFile
from orchestrator.text.tokenizer_file import read as read_tokenizer

JSON, PIECES = "tokenizer.json", "tokenizer.model"
SENTENCEPIECE_CLASS = "SentencePieceBackend"
"""transformers' other classes split by their own rules; this one uses SentencePiece."""
DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""The types of an export, with their names in safetensors."""
SHARD_BYTES = 5 * 10**9
VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that byte-level tokenizers write as the character with that number; the others follow from 256 on (GPT-2)."""


def write(
    source: Path,
    folder: Path,
    spec: Mapping[str, Any],
    tokenizer_path: Path | None = None,
    origin: Origin | None = None,
    base: Base | None = None,
    *,
    dtype: str = "float32",
    shard_bytes: float = SHARD_BYTES,
) -> list[str]:
    """Write the files to ``folder`` and return notes for the user, in sentences.

    ``source`` are parameters of the job with the specification ``spec``. ``tokenizer_path`` is a copy of
    ``data.tokenizer``; without it a job whose tokens are not bytes is written without a tokenizer. ``origin`` is what was
    kept of the checkpoint that the job continued. ``base`` has the whole tensors that a job with ``trainable`` began with.
    Tensors are rounded to ``dtype``, and a file has at most ``shard_bytes`` of them, or one tensor.

    Raises UnfitWeights, before anything is written, if transformers has no such model; DataError if the
    file does not have this model's tensors, or a value is too large for ``dtype``.
    """
    if problem := not_of_transformers(spec):
        raise problem
    trainer = TrainerSection.model_validate(spec["trainer"])
    if trainer.folder is not None:
        return _write_as_found(source, folder, trainer, spec["data"], tokenizer_path, origin, dtype, shard_bytes)
    network = ModelSection.model_validate(spec["model"]).network
    assert isinstance(network, DecoderSection), "otherwise there is a problem"
    data, file = spec["data"], None
    if tokenizer_path is not None:
        file = read_tokenizer(EVERYTHING, str(tokenizer_path.absolute()))
    special, notes = special_tokens_of(file, data, origin)
    text = None if origin is None else origin.config
    document = configuration.document_of(network, data["sequence_length"], special.ids, text)
    own = files.read_header(lambda: source.open("rb"))
    shapes = parameter_shapes(network)
    whole: Base = own
    if spec.get("trainable") is not None:
        section = TrainableSection.model_validate(spec["trainable"])
        adapters.require_own(own, section, network, source)
        assert base is not None, "what is not trained comes from there"
        whole = adapters.Merged(own, section, base)
    elif shapes != {name: entry.shape for name, entry in own.entries.items()}:
        raise DataError(detail=f"{source} does not have the tensors of the model that its specification describes.")
    sources = sources_of(network, document["model_type"])
    tensors = {name: each.shape for each in sources.values() for name in each.names.values()}
    _write_tensors(folder, tensors, lambda names: _values(whole, sources, names), dtype, shard_bytes)
    document["torch_dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    for name, content in special.files.items():
        (folder / name).write_bytes(content)
    if origin is not None and configuration.sees(origin.mapping(CONFIG)):
        notes.append(f"It is only the language model of {origin.folder}, a vision-language model.")
    return notes


def _write_as_found(
    source: Path,
    folder: Path,
    trainer: TrainerSection,
    data: Mapping[str, Any],
    tokenizer_path: Path | None,
    origin: Origin | None,
    dtype: str,
    shard_bytes: float,
) -> list[str]:
    """Write a torch trainer's model, which keeps the names and the ``config.json`` of the folder that it was loaded from."""
    if origin is None:
        raise UnfitWeights(
            detail=f"The job cannot be exported for transformers: nothing is known of config.json of {trainer.folder}.",
            remedy="Export it as safetensors, and add the folder's config.json.",
        )
    file = None if tokenizer_path is None else read_tokenizer(EVERYTHING, str(tokenizer_path.absolute()))
    special, notes = special_tokens_of(file, data, origin)
    document = {**origin.mapping(CONFIG), **trainer.settings, **special.ids, "dtype": dtype}
    document.pop("torch_dtype", None)
    own = files.read_header(lambda: source.open("rb"))
    shapes = {name: entry.shape for name, entry in own.entries.items()}
    _write_tensors(folder, shapes, lambda names: map(own.read, names), dtype, shard_bytes)
    (folder / "config.json").write_text(json.dumps(document, indent=2) + "\n")
    for name, content in special.files.items():
        (folder / name).write_bytes(content)
    return notes


def _write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    values_of: Callable[[Sequence[str]], Iterable[NDArray[np.float32]]],
    dtype: str,
    shard_bytes: float,
) -> None:
    """Write the tensors to one file, or to several with an index."""
    item_bytes = np.dtype(files.TYPES[DTYPES[dtype]]).itemsize
    sizes = {name: item_bytes * math.prod(shape) for name, shape in shapes.items()}
    named = _files(sizes, shard_bytes)
    for file_name, names in named.items():
        with (folder / file_name).open("xb") as out:
            files.write(out, {name: shapes[name] for name in names}, values_of(names), DTYPES[dtype])
    if WHOLE not in named:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: file_name for file_name, names in named.items() for name in names},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def not_of_transformers(spec: Mapping[str, Any]) -> UnfitWeights | None:
    """Return why transformers cannot load a model of this specification; None if it may be able to."""
    section, trainer = ModelSection.model_validate(spec["model"]), TrainerSection.model_validate(spec["trainer"])
    if trainer.folder is not None or (trainer.kind is None and isinstance(section.network, DecoderSection)):
        return None
    if section.factory is not None:
        what = f"its model is of model.factory {section.factory}"
    elif trainer.kind == "torch":
        what = f"its model is of trainer.model {trainer.model}"
    elif not trainer.is_built_in:
        what = f"its trainer is {trainer.factory}, and model.decoder is not set"
    else:
        what = f"its model is model.preset {section.preset!r}"
    return UnfitWeights(
        detail=f"The job cannot be exported for transformers: {what}, and transformers only has models like a decoder.",
        remedy="Export it as safetensors or orbax.",
    )


def _files(sizes: Mapping[str, int], bytes_max: float) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, in their order, by the file's name."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > bytes_max:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    if len(shards) == 1:
        return {WHOLE: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": names for number, names in enumerate(shards, start=1)}


def _values(own: Base, sources: Mapping[str, Sources], names: Iterable[str]) -> Iterator[NDArray[np.float32]]:
    """Yield the tensors with these names of theirs. Some consist of several of ours, one below the other."""
    parts: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, each in sources.items():
        for index, theirs in each.names.items():
            parts.setdefault(theirs, []).append((name, index))
    for theirs in names:
        pieces = [
            part.T if sources[name].turned else part
            for name, index in sorted(parts[theirs], key=lambda piece: sources[piece[0]].rows or (0, 0))
            for part in (own.read(name, index),)
        ]
        yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens for an export. ``ids`` are for config.json, which says nothing of those that are not among them.

    ``files`` are the tokenizer's files, by name.
    """

    ids: Mapping[str, Any]
    files: Mapping[str, bytes]


def special_tokens_of(
    file: TokenizerFile | None, data: Mapping[str, Any], origin: Origin | None = None
) -> tuple[SpecialTokens, list[str]]:
    """Return the tokenizer's part of an export, and notes for the user.

    ``file`` is that of the job; None if its tokens are bytes, or if it is gone. ``data`` is the job's
    section.
    """
    end, begin = end_of_text_of(file, data["separator"]), begin_of_text_of(file, data.get("begin_token"))
    ids: dict[str, Any] = {**dict.fromkeys(IDS), "eos_token_id": end, "bos_token_id": begin}
    files = files_of(file, end, begin) if file is not None or data["tokenizer"] == BYTES else {}
    if origin is None:
        return SpecialTokens(ids, files), []
    notes = [f"{name} of {origin.folder} could not be kept: {reason}." for name, reason in sorted(origin.lost.items())]
    if not _is_same(file, data, origin):
        if dropped := [name for name in origin.files if name in (GENERATION, *OF_THE_TOKENIZER)]:
            notes.append(
                f"The job's tokenizer differs from that of {origin.folder}, so {', '.join(dropped)} are left out."
            )
        return SpecialTokens(ids, files), notes
    for name in IDS:
        if (stated := origin.config.get(name)) is not None:
            ids[name] = stated
        elif ids[name] is None and name not in origin.config:
            del ids[name]  # its type's own applies, as it does in the checkpoint
    if file is not None:
        files |= {name: origin.files[name].encode() for name in OF_THE_TOKENIZER if name in origin.files}
        if file.is_sentencepiece and TOKENIZER_CONFIG in origin.files:
            files[TOKENIZER_CONFIG] = _json(
                {**origin.mapping(TOKENIZER_CONFIG), "tokenizer_class": SENTENCEPIECE_CLASS}
            )
    generation = origin.mapping(GENERATION)
    ends = generation.get("eos_token_id")
    ends = ids.get("eos_token_id") if ends is None else ends
    ends = [*ends] if isinstance(ends, list) else [ends]
    if end is not None and end not in ends:
        generation["eos_token_id"] = [*(each for each in ends if each is not None), end]
        notes.append(f"Generation also ends at token {end}, which separated the documents.")
    if generation:
        files[GENERATION] = _json(generation)
    return SpecialTokens(ids, files), notes


def files_of(file: TokenizerFile | None, end_of_text: int | None, begin_of_text: int | None = None) -> dict[str, bytes]:
    """Return the tokenizer's files by name; without a file, those for bytes.

    ``end_of_text`` and ``begin_of_text`` are the tokens around a document, if they are control tokens.
    """
    config: dict[str, Any] = {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    if file is None:
        return {TOKENIZER_CONFIG: _json(config), JSON: _json(_of_bytes())}
    if end_of_text is not None:
        config["eos_token"] = file.text_of(end_of_text)
    if begin_of_text is not None:
        config |= {"bos_token": file.text_of(begin_of_text), "add_bos_token": True}
    if file.is_sentencepiece:
        return {TOKENIZER_CONFIG: _json(config | {"tokenizer_class": SENTENCEPIECE_CLASS}), PIECES: file.content}
    return {TOKENIZER_CONFIG: _json(config), JSON: file.content}


def end_of_text_of(file: TokenizerFile | None, separator: int | None) -> int | None:
    """Return the job's separator if it is a control token: text, such as a newline, does not show that a model has ended."""
    if file is None:
        return None
    token = file.end_of_text if separator is None else separator
    return token if token in file.control_tokens else None


def begin_of_text_of(file: TokenizerFile | None, begin_token: int | str | None) -> int | None:
    """Return the token before the job's documents, if it is a control token."""
    return (
        begin_token
        if file is not None and isinstance(begin_token, int) and begin_token in file.control_tokens
        else None
    )


def _is_same(file: TokenizerFile | None, data: Mapping[str, Any], origin: Origin) -> bool:
    """Return whether the job has the checkpoint's tokenizer. If the checkpoint has none, any with its vocabulary's ids."""
    if data["tokenizer"] == BYTES:
        return False
    digest = data.get("tokenizer_digest") or (None if file is None else file.digest)
    return not origin.tokenizers or digest in origin.tokenizers.values()


def _of_bytes() -> Mapping[str, Any]:
    invisible = iter(range(256, 512))
    characters = [chr(byte if byte in VISIBLE else next(invisible)) for byte in range(256)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {text: byte for byte, text in enumerate(characters)}, "merges": []},
    }


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
