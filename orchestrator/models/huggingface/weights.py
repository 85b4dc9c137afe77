"""A folder of somebody's weights as the tensors of a decoder: looked at before a job begins, read once it does.

    config.json                      what model they are of
    model.safetensors                all of them; or
    model.safetensors.index.json     which file has which, and these files beside it

The folder and each file must lie below a root of data. Looking reads ``config.json``, the index and the files' headers;
every tensor must be there with its shape, and nothing else that a model computes with. Of a model that also sees, the
language model is taken, and what sees is passed over. What is wrong is UnfitWeights, with a remedy. Refuses to know who
asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from orchestrator import documents
from orchestrator.errors import AtollError, ConfigurationError, DataError, OutsideRoots, UnfitWeights
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import configuration, files
from orchestrator.models.huggingface.files import Entry, TensorFile
from orchestrator.models.huggingface.layout import Sources, sources_of, text_names
from orchestrator.parameters.pieces import Piece, piece_named
from orchestrator.roots import AllowedRoots, name_parts, open_data, shown

FIELD = "model.initial_weights"
CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CONFIG_BYTES_MAX, INDEX_BYTES_MAX = 1 << 20, 32 << 20
FILES_MAX = 1_000
IDLE = ("rotary_emb.inv_freq", "lm_head.weight")
"""Ends of names that old checkpoints have and no model needs: tables, and the embedding once more where it is tied."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in a file: ``name`` is what that file calls it."""

    file: TensorFile
    name: str

    @property
    def entry(self) -> Entry:
        return self.file.entries[self.name]

    def read(self) -> NDArray[np.float32]:
        return self.file.read(self.name)


class Weights:
    """The tensors of a decoder, which are read when they are taken; nobody holds them here."""

    def __init__(self, decoder: DecoderSection, folder: str, roots: AllowedRoots) -> None:
        """Raises UnfitWeights unless the folder has the weights of this decoder."""
        self._shapes, self._sources = parameter_shapes(decoder), sources_of(decoder)
        self._folder = folder
        document = _document(folder, roots)
        require_same(decoder, configuration.decoder_of(document))
        self._tensors = _tensors_by_name(folder, roots)
        if configuration.sees(document):
            self._tensors = _of_text(self._tensors)
        _require_tensors(self._sources, self._tensors)

    def taken(self, pieces: Iterable[str] | None = None) -> dict[str, NDArray[np.float32]]:
        """These pieces by name, or all tensors. Raises UnfitWeights where they cannot be read, or are no numbers.

        Of a stacked tensor only the layers or experts of a piece are read.
        """
        return {name: self._piece(piece_named(name)) for name in (self._shapes if pieces is None else pieces)}

    def _piece(self, piece: Piece) -> NDArray[np.float32]:
        sources, shape = self._sources[piece.tensor], self._shapes[piece.tensor]
        stacked_axes = len(shape) - len(sources.shape)
        axis, start, stop = piece.bounds or (0, 0, shape[0])
        between = axis < stacked_axes  # it is made of whole tensors of theirs
        tensor = np.empty(piece.shape(shape) if between else shape, np.float32)
        for index, theirs in sources.names.items():
            if between and not start <= index[axis] < stop:
                continue
            own = tuple(number - start * (at == axis) for at, number in enumerate(index)) if between else index
            try:
                part = self._tensors[theirs].read()
            except (OSError, DataError) as error:
                raise _unreadable(self._folder, error) from error
            tensor[own] = part.T if sources.turned else part
        if not np.isfinite(tensor).all():
            raise UnfitWeights(
                detail=f"{shown(self._folder)} has NaN or Inf in what is {piece.name} here.",
                remedy="Use sound weights.",
            )
        return tensor if between else tensor[piece.index]


def described(folder: str, roots: AllowedRoots) -> DecoderSection:
    """The decoder that the folder's ``config.json`` describes. Raises UnfitWeights."""
    return configuration.decoder_of(_document(folder, roots))


def _document(folder: str, roots: AllowedRoots) -> dict[str, Any]:
    content = _content(folder, CONFIG, roots, CONFIG_BYTES_MAX)
    try:
        return documents.mapping(documents.read_json(content, documents.REQUEST, CONFIG), CONFIG)
    except ConfigurationError as error:
        raise UnfitWeights(detail=str(error), remedy="Mend config.json.") from error


def require_same(decoder: DecoderSection, theirs: DecoderSection) -> None:
    """Raises UnfitWeights, with what to change, unless the two compute the same."""
    differing = configuration.differences(decoder, theirs)
    if differing:
        listed = "; ".join(f"{name} {other}, and not {own}" for name, own, other in differing[:4])
        changed = ", ".join(name for name, _, _ in differing[:4])
        raise UnfitWeights(
            detail=f"the weights are of another model than the specification's: it has {listed}.",
            remedy=f"Use the preset that is like it, or set model.decoder ({changed}) as its config.json says.",
        )


def _tensors_by_name(folder: str, roots: AllowedRoots) -> dict[str, Source]:
    """Every tensor of the folder."""
    try:
        named = _index(folder, roots)
        if named is None:
            return _tensors_of(folder, WHOLE, roots)
        opened: dict[str, dict[str, Source]] = {}
        left = files.HEADER_BYTES_MAX
        for file in sorted(set(named.values())):
            opened[file] = _tensors_of(folder, file, roots, left)
            left -= max((each.file.header_bytes for each in opened[file].values()), default=0)
    except (OSError, DataError) as error:
        raise _unreadable(folder, error) from error
    for tensor, file in named.items():
        if tensor not in opened[file]:
            raise UnfitWeights(
                detail=f"{INDEX} says that {shown(file)} has {shown(tensor)}, which it has not.", remedy="Copy it anew."
            )
    return {tensor: opened[file][tensor] for tensor, file in named.items()}


def _tensors_of(
    folder: str, file: str, roots: AllowedRoots, bytes_max: int = files.HEADER_BYTES_MAX
) -> dict[str, Source]:
    try:
        read = files.read_header(partial(_opened, folder, file, roots), bytes_max)
    except DataError as error:
        raise DataError(detail=f"{shown(file)} cannot be read: {error.detail}") from error
    return {name: Source(read, name) for name in read.entries}


def _index(folder: str, roots: AllowedRoots) -> dict[str, str] | None:
    """The file of each tensor; None if there is no index."""
    try:
        content = _content(folder, INDEX, roots, INDEX_BYTES_MAX, missing=True)
        if content is None:
            return None
        named = json.loads(content)["weight_map"]
        texts = all(isinstance(tensor, str) and isinstance(file, str) for tensor, file in named.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(detail=f"{INDEX} has no weight_map of tensors to files.") from error
    if not texts or len(set(named.values())) > FILES_MAX or any(len(name_parts(file)) > 1 for file in named.values()):
        raise DataError(detail=f"{INDEX} names files that are not beside it, or more than {FILES_MAX:,}.")
    return dict(named)


def _of_text(tensors: Mapping[str, Source]) -> dict[str, Source]:
    """The language model's, by the names that they have where it is alone. Raises UnfitWeights where one is there twice."""
    by_name = text_names(tensors)
    if twice := next((names for names in by_name.values() if len(names) > 1), None):
        raise UnfitWeights(
            detail=f"the weights have {' and '.join(map(shown, sorted(twice)))}, which are one tensor of the language "
            "model.",
            remedy="Use weights of the model that config.json describes, saved by transformers.",
        )
    return {alone: tensors[name] for alone, (name,) in by_name.items()}


def _require_tensors(sources: Mapping[str, Sources], entries: Mapping[str, Source]) -> None:
    wanted = {theirs: source.shape for source in sources.values() for theirs in source.names.values()}
    missing = [name for name in wanted if name not in entries]
    strange = [name for name in entries if name not in wanted and not name.endswith(IDLE)]
    for problem, names in (("lack", missing), ("have also", strange)):
        if names:
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            raise UnfitWeights(
                detail=f"the weights {problem} {', '.join(map(shown, sorted(names)[:3]))}{more}.",
                remedy="Use weights of the model that config.json describes, saved by transformers.",
            )
    for name, shape in wanted.items():
        entry = entries[name].entry
        if entry.shape != shape or entry.dtype not in files.TYPES:
            raise UnfitWeights(
                detail=f"the weights have {name} as {entry.shape} of {shown(entry.dtype)}; the model has {shape}, of "
                f"{', '.join(files.TYPES)}.",
                remedy="Use weights of the model that config.json describes, not quantised.",
            )


def _content(folder: str, name: str, roots: AllowedRoots, bytes_max: int, *, missing: bool = False) -> Any:
    """A small file's bytes. Raises UnfitWeights; with ``missing`` it is None where there is none."""
    try:
        with _opened(folder, name, roots) as file:
            content = file.read(bytes_max + 1)
    except FileNotFoundError as error:
        if missing:
            return None
        raise _unreadable(folder, error) from error
    except (OSError, DataError) as error:
        raise _unreadable(folder, error) from error
    if len(content) > bytes_max:
        raise UnfitWeights(
            detail=f"{name} has more than {bytes_max:,} bytes.", remedy="Use the one that was published."
        )
    return content


def _opened(folder: str, name: str, roots: AllowedRoots) -> IO[bytes]:
    try:
        return open_data(roots, f"{folder.rstrip('/')}/{name}")
    except OutsideRoots as error:
        raise UnfitWeights(detail=error.detail, remedy=error.remedy) from error
    except ConfigurationError as error:
        raise DataError(detail=f"{shown(name)} is no regular file.") from error


def _unreadable(folder: str, error: Exception) -> UnfitWeights:
    reason = error.strerror if isinstance(error, OSError) else error.detail if isinstance(error, DataError) else error
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return UnfitWeights(
        detail=f"{shown(folder)} cannot be read as weights: {str(reason).rstrip('.')}{where}.",
        remedy=f"It must have {CONFIG} and {WHOLE}, or {INDEX} and its files.",
    )


def problem_of(decoder: DecoderSection, folder: str, roots: AllowedRoots) -> UnfitWeights | None:
    """What keeps a job from beginning with these weights, before anything is started."""
    try:
        Weights(decoder, folder, roots)
    except UnfitWeights as error:
        return error
    except AtollError as error:
        return UnfitWeights(detail=str(error))
    return None
