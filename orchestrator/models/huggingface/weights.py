"""A folder of published weights as the tensors of a decoder: checked before a job begins, read when it does.

   config.json                      the model that they belong to
   model.safetensors                all of them; or
   model.safetensors.index.json     which file has which, and these files beside it

The folder and each file must be below a root of data. The check reads ``config.json``, the index and the files' headers.
Every tensor must be there with its shape, and nothing else that the model computes with: a tensor that would be dropped is
refused by its name. Only tables that follow from the configuration (``TABLES``) are ignored, and the vision part of a
vision-language model, which the log mentions. With tied embeddings, ``lm_head.weight`` must equal the embeddings. Problems
are UnfitWeights, with a remedy.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from orchestrator.errors import (
    AtollError,
    ConfigurationError,
    DataError,
    InvalidJobSpec,
    OutsideRoots,
    Problem,
    UnfitWeights,
)
from orchestrator.models.decoder import DecoderSection, parameter_shapes
from orchestrator.models.huggingface import configuration, files
from orchestrator.models.huggingface.files import INDEX, WHOLE, Entry, TensorFile
from orchestrator.models.huggingface.layout import WHOLE as WHOLE_TENSORS
from orchestrator.models.huggingface.layout import Sources, sources_of, text_names
from orchestrator.parameters.pieces import Piece, piece_named
from orchestrator.specification import documents
from orchestrator.specification.config import JobSpec
from orchestrator.specification.training_sections import BUILT_IN_TRAINER, ModelSection
from orchestrator.system.roots import AllowedRoots, name_parts, open_data, shown

FIELD = "model.initial_weights"
CONFIG = "config.json"
CONFIG_BYTES_MAX, INDEX_BYTES_MAX = 1 << 20, 32 << 20
FILES_MAX = 1_000
AS_DESCRIBED = "Use weights of the model that config.json describes, saved by transformers."
TABLES = re.compile(
    r"(?:model\.(?:layers\.\d+\.self_attn\.)?rotary_emb(?:_local)?\.(?:\w*inv_freq|cos_cached|sin_cached)|model\.embed_tokens\.embed_scale)"
)
"""Tensors of old checkpoints that follow from their ``config.json``."""
SIGHT = re.compile(r"(?:model\.)?(?:vision_tower\.|multi_modal_projector\.|image_newline$)")
"""The prefixes of the vision part, in the supported types."""
ADAPTER = "adapter_config.json"
EMBED, HEAD = WHOLE_TENSORS["embed"], WHOLE_TENSORS["unembed"]
COMPARED_BYTES, COMPARED_BLOCKS = 64 << 20, 64
"""The part of a head that is compared with the embeddings when a job is submitted; all of it is before step 1."""
BLOCK_BYTES = 16 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in a file; ``name`` is its name there."""

    file: TensorFile
    name: str

    @property
    def entry(self) -> Entry:
        return self.file.entries[self.name]

    def read(self, rows: tuple[int, int] | None = None) -> NDArray[np.float32]:
        return self.file.read(self.name) if rows is None else self.file.rows(self.name, *rows)


class Weights:
    """The tensors of a decoder, read when they are taken, and not kept."""

    def __init__(
        self, decoder: DecoderSection, folder: str, roots: AllowedRoots, expected_digest: str | None = None
    ) -> None:
        """Check the folder. Raises UnfitWeights unless it has weights of this decoder, with this digest if one is given."""
        self._folder = folder
        document = _document(folder, roots)
        require_same(decoder, configuration.decoder_of(document))
        self._shapes = parameter_shapes(decoder)
        self._sources = sources_of(decoder, configuration.text_type(document))
        _refuse_adapter(folder, roots)
        self._tensors = _tensors_by_name(folder, roots)
        if configuration.sees(document):
            self._tensors = _of_text(self._tensors)
        _require_tensors(self._sources, self._tensors)
        self._uncompared = decoder.tied_embeddings and HEAD in self._tensors
        if self._uncompared:
            self._require_equal_head(COMPARED_BYTES)
        if expected_digest is not None and (digest := self.digest()) != expected_digest:
            raise UnfitWeights(
                detail=f"{shown(folder)} has other weights than the job was submitted with: their digest is {digest}, not "
                f"{expected_digest}.",
                remedy="Copy the same files to that path on every machine: what is trained only fits those weights.",
            )

    def digest(self) -> str:
        """Return what tells these weights from others: of names, types, shapes and values (``TensorFile.sampled``)."""
        return _digest_of(self._tensors, self._folder)

    def taken(self, pieces: Iterable[str] | None = None) -> dict[str, NDArray[np.float32]]:
        """Return these pieces by name, or all tensors. Raises UnfitWeights if they cannot be read, or are not finite.

        Of a stacked tensor only the layers or experts of a piece are read.
        """
        if self._uncompared:
            self._require_equal_head()
            self._uncompared = False
        return {name: self._piece(piece_named(name)) for name in (self._shapes if pieces is None else pieces)}

    def read(self, name: str, index: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """Return a tensor, or the one at this index of the axes that number layers and experts. Raises UnfitWeights."""
        sources = self._sources[name]
        try:
            part = self._tensors[sources.names[index]].read(sources.rows)
        except (OSError, DataError) as error:
            raise _unreadable(self._folder, error) from error
        return part.T if sources.turned else part

    def _require_equal_head(self, bytes_max: float = math.inf) -> None:
        """Raise UnfitWeights if ``lm_head.weight`` differs from the embeddings in ``bytes_max`` of each."""
        embed, head = self._tensors[EMBED], self._tensors[HEAD]
        try:
            row = _differing_row(embed, head, bytes_max)
        except (OSError, DataError) as error:
            raise _unreadable(self._folder, error) from error
        if row is not None:
            raise UnfitWeights(
                detail=f"config.json has tie_word_embeddings true, but {HEAD} differs from {EMBED} in row {row:,}. A tied "
                "model would drop it.",
                remedy="If the model has a separate head, set tie_word_embeddings to false in config.json and "
                "tied_embeddings to false in model.decoder; otherwise save the weights again without it.",
            )

    def _piece(self, piece: Piece) -> NDArray[np.float32]:
        sources, shape = self._sources[piece.tensor], self._shapes[piece.tensor]
        stacked_axes = len(shape) - len(sources.shape)
        axis, start, stop = piece.bounds or (0, 0, shape[0])
        between = axis < stacked_axes  # the piece consists of whole tensors of theirs
        tensor = np.empty(piece.shape(shape) if between else shape, np.float32)
        for index, theirs in sources.names.items():
            if between and not start <= index[axis] < stop:
                continue
            own = tuple(number - start * (at == axis) for at, number in enumerate(index)) if between else index
            try:
                part = self._tensors[theirs].read(sources.rows)
            except (OSError, DataError) as error:
                raise _unreadable(self._folder, error) from error
            tensor[own] = part.T if sources.turned else part
        if not np.isfinite(tensor).all():
            raise UnfitWeights(
                detail=f"{shown(self._folder)} has NaN or Inf in the tensor that is {piece.name} here.",
                remedy="Use intact weights.",
            )
        return tensor if between else tensor[piece.index]


def folder_digest(folder: str, roots: AllowedRoots) -> str:
    """Return the digest of any model's weights, as ``Weights.digest`` has it. Raises UnfitWeights."""
    return _digest_of(_tensors_by_name(folder, roots), folder)


def _digest_of(tensors: Mapping[str, Source], folder: str) -> str:
    digest = blake2b(digest_size=16)
    try:
        for name, source in sorted(tensors.items()):
            digest.update(json.dumps([name, source.entry.dtype, *source.entry.shape]).encode())
            for block in source.file.sampled(source.name):
                digest.update(block)
    except (OSError, DataError) as error:
        raise _unreadable(folder, error) from error
    return digest.hexdigest()


def described(folder: str, roots: AllowedRoots) -> DecoderSection:
    """Return the decoder that the folder's ``config.json`` describes. Raises UnfitWeights."""
    return configuration.decoder_of(_document(folder, roots))


def completed(document: Mapping[str, Any], roots: AllowedRoots) -> Mapping[str, Any]:
    """Return a job's document in which the decoder is spelt out, if only the folder of its weights describes the model.

    Any other document is returned unchanged, valid or not. Raises InvalidJobSpec if the folder describes no decoder.
    """
    model = document.get("model")
    if document.get("trainer", BUILT_IN_TRAINER) != BUILT_IN_TRAINER or not isinstance(model, Mapping):
        return document
    try:
        section = ModelSection.model_validate(model)
    except ValidationError:
        return document
    if section.initial_weights is None or not section.is_described_by_weights:
        return document
    try:
        decoder = described(section.initial_weights, roots)
    except UnfitWeights as error:
        raise InvalidJobSpec(problems=(Problem(FIELD, error.detail, error.remedy),)) from error
    return {**document, "model": {**model, "decoder": decoder.model_dump(mode="json")}}


def problems_of(spec: JobSpec, roots: AllowedRoots) -> tuple[Problem, ...]:
    """Return why the job cannot begin with its initial weights. A resumed job reads only those that are frozen."""
    folder, network = spec.model.initial_weights, spec.model.network
    is_read = spec.resume is None or spec.trainable is not None
    if folder is None or not isinstance(network, DecoderSection) or not is_read:
        return ()
    unfit = problem_of(network, folder, roots)
    return () if unfit is None else (Problem(FIELD, unfit.detail, unfit.remedy),)


@dataclass(frozen=True, slots=True)
class Inspection:
    """The inspection says what a folder of weights has. Numbers are None if its safetensors files cannot be read.

    ``decoder`` is None if ``config.json`` describes none that is supported; ``problem`` says why a job cannot continue the
    weights, and is None if it can. ``dtypes`` are the types of the stored tensors, as safetensors names them.
    """

    model_type: str | None
    architectures: tuple[str, ...]
    context_length: int | None
    decoder: DecoderSection | None
    problem: UnfitWeights | None
    parameter_count: int | None
    tensor_count: int | None
    dtypes: tuple[str, ...]
    stored_bytes: int | None


def inspected(folder: str, roots: AllowedRoots) -> Inspection:
    """Look at the folder without reading a tensor. Raises UnfitWeights if it has no readable ``config.json``."""
    document = _document(folder, roots)
    decoder = problem = None
    tensors: Mapping[str, Source] | None = None
    try:
        decoder = configuration.decoder_of(document)
        problem = problem_of(decoder, folder, roots)
    except UnfitWeights as error:
        problem = error
    with suppress(UnfitWeights):
        tensors = _tensors_by_name(folder, roots)
    entries = None if tensors is None else [source.entry for source in tensors.values()]
    stored = None if entries is None else sum(math.prod(entry.shape) for entry in entries)
    architectures = document.get("architectures")
    kind = document.get("model_type")
    return Inspection(
        model_type=kind if isinstance(kind, str) else None,
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        context_length=configuration.context_length(configuration.text_document(document)),
        decoder=decoder,
        problem=problem,
        parameter_count=stored if decoder is None else decoder.parameter_count,
        tensor_count=None if entries is None else len(entries),
        dtypes=() if entries is None else tuple(sorted({entry.dtype for entry in entries})),
        stored_bytes=None if entries is None else sum(entry.nbytes for entry in entries),
    )


def _document(folder: str, roots: AllowedRoots) -> dict[str, Any]:
    if _is_there(folder, ADAPTER, roots) and not _is_there(folder, CONFIG, roots):
        raise UnfitWeights(
            detail=f"{shown(folder)} has adapters ({ADAPTER}) and no model.",
            remedy="Merge them into their base, or name the base and set trainable.lora to train new ones.",
        )
    content = _content(folder, CONFIG, roots, CONFIG_BYTES_MAX)
    try:
        return documents.mapping(documents.read_json(_finite(content), documents.REQUEST, CONFIG), CONFIG, None)
    except ConfigurationError as error:
        raise UnfitWeights(detail=str(error), remedy="Correct config.json.") from error


def _finite(content: bytes) -> bytes | str:
    """Return the document with strings instead of NaN and Infinity, which Python writes into JSON.

    If nothing depends on such a field, it does no harm; otherwise the string is refused with the field's name.
    """
    if b"NaN" not in content and b"Infinity" not in content:
        return content
    try:
        return json.dumps(json.loads(content, parse_constant=str))
    except (ValueError, RecursionError):
        return content


def require_same(decoder: DecoderSection, theirs: DecoderSection) -> None:
    """Raise UnfitWeights, with what to change, unless both compute the same."""
    differing = configuration.differences(decoder, theirs)
    if differing:
        listed = "; ".join(f"{name} {other}, not {own}" for name, own, other in differing[:4])
        changed = ", ".join(name for name, _, _ in differing[:4])
        raise UnfitWeights(
            detail=f"the weights belong to another model than the specification's: it has {listed}.",
            remedy=f"Use the matching preset, or set model.decoder ({changed}) as in its config.json.",
        )


def _tensors_by_name(folder: str, roots: AllowedRoots) -> dict[str, Source]:
    """Return every tensor of the folder."""
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
                detail=f"{INDEX} says that {shown(file)} has {shown(tensor)}, but it does not.", remedy="Copy it again."
            )
    if WHOLE not in opened and _is_there(folder, WHOLE, roots):
        raise UnfitWeights(
            detail=f"{shown(folder)} has both {WHOLE} and an {INDEX} of other files: two sets of weights, one of which "
            "would be dropped.",
            remedy="Remove the one that is not wanted.",
        )
    unnamed = {tensor: source for tensors in opened.values() for tensor, source in tensors.items()}
    return {**unnamed, **{tensor: opened[file][tensor] for tensor, file in named.items()}}


def _tensors_of(
    folder: str, file: str, roots: AllowedRoots, bytes_max: int = files.HEADER_BYTES_MAX
) -> dict[str, Source]:
    try:
        read = files.read_header(partial(_opened, folder, file, roots), bytes_max)
    except DataError as error:
        raise DataError(detail=f"{shown(file)} cannot be read: {error.detail}") from error
    return {name: Source(read, name) for name in read.entries}


def _index(folder: str, roots: AllowedRoots) -> dict[str, str] | None:
    """Return the file of each tensor; None if there is no index."""
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
    """Return the language model's tensors, by the names that they have on its own.

    Raises UnfitWeights if one is there twice, or one belongs neither to the language model nor to the vision part.
    """
    by_name = text_names(tensors)
    others = set(tensors).difference(*by_name.values())
    if strange := [name for name in others if not SIGHT.match(name)]:
        raise _strange(strange)
    log.warning("%d tensors of the vision part are ignored: only the language model is trained", len(others))
    if twice := next((names for names in by_name.values() if len(names) > 1), None):
        raise UnfitWeights(
            detail=f"the weights have {' and '.join(map(shown, sorted(twice)))}, which are the same tensor of the language "
            "model.",
            remedy="Use weights of the model that config.json describes, saved by transformers.",
        )
    return {alone: tensors[name] for alone, (name,) in by_name.items()}


def _require_tensors(sources: Mapping[str, Sources], entries: Mapping[str, Source]) -> None:
    wanted = {theirs: source.shape for source in sources.values() for theirs in source.names.values()}
    missing = [name for name in wanted if name not in entries]
    if missing:
        raise UnfitWeights(detail=f"the weights lack {_listed(missing)}.", remedy=AS_DESCRIBED)
    if HEAD not in wanted and HEAD in entries:
        wanted = {**wanted, HEAD: wanted[EMBED]}  # a copy of the embeddings
    if strange := [name for name in entries if name not in wanted and not TABLES.fullmatch(name)]:
        raise _strange(strange)
    for name, shape in wanted.items():
        entry = entries[name].entry
        if entry.shape != shape or entry.dtype not in files.TYPES:
            raise UnfitWeights(
                detail=f"the weights have {name} as {entry.shape} of {shown(entry.dtype)}, but the model has {shape}, of "
                f"{', '.join(files.TYPES)}.",
                remedy="Use weights of the model that config.json describes, not quantised.",
            )


def _strange(names: Sequence[str]) -> UnfitWeights:
    return UnfitWeights(
        detail=f"the weights also have {_listed(names)}, which the model would drop.",
        remedy=AS_DESCRIBED,
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{', '.join(map(shown, sorted(names)[:3]))}{more}"


def _differing_row(one: Source, other: Source, bytes_max: float) -> int | None:
    """Return the first row in which two matrices of one shape differ, among blocks of rows with ``bytes_max`` of each.

    If their types differ, the finer is rounded to the coarser.
    """
    rows, width = one.entry.shape
    row_bytes = 4 * max(1, width)
    step = max(1, min(rows, BLOCK_BYTES // row_bytes))
    starts: Iterable[int] = range(0, rows, step)
    if rows * row_bytes > bytes_max:
        step = max(1, int(bytes_max) // COMPARED_BLOCKS // row_bytes)
        starts = sorted({round(at * (rows - step) / (COMPARED_BLOCKS - 1)) for at in range(COMPARED_BLOCKS)})
    coarser = min((one, other), key=lambda source: np.dtype(files.TYPES[source.entry.dtype]).itemsize)
    dtype = files.TYPES[coarser.entry.dtype]
    for start in starts:
        with np.errstate(over="ignore"):
            own, theirs = (
                each.file.rows(each.name, start, min(start + step, rows)).astype(dtype).astype(np.float32)
                for each in (one, other)
            )
        same = (own == theirs) | (np.isnan(own) & np.isnan(theirs))
        if not same.all():
            return start + int(np.flatnonzero(~same.all(axis=1))[0])
    return None


def _refuse_adapter(folder: str, roots: AllowedRoots) -> None:
    if _is_there(folder, ADAPTER, roots):
        raise UnfitWeights(
            detail=f"{shown(folder)} has {ADAPTER}: a PEFT adapter, which would be dropped.",
            remedy="Merge it into the weights (merge_and_unload of peft) and save them, or remove it from the folder.",
        )


def _is_there(folder: str, name: str, roots: AllowedRoots) -> bool:
    try:
        _opened(folder, name, roots).close()
    except FileNotFoundError:
        return False
    except (OSError, DataError, UnfitWeights):
        return True
    return True


def _content(folder: str, name: str, roots: AllowedRoots, bytes_max: int, *, missing: bool = False) -> Any:
    """Return a small file's bytes. Raises UnfitWeights; with ``missing`` it returns None for a missing file."""
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
        raise UnfitWeights(detail=f"{name} has more than {bytes_max:,} bytes.", remedy="Use the published one.")
    return content


def _opened(folder: str, name: str, roots: AllowedRoots) -> IO[bytes]:
    try:
        return open_data(roots, f"{folder.rstrip('/')}/{name}")
    except OutsideRoots as error:
        raise UnfitWeights(detail=error.detail, remedy=error.remedy) from error
    except ConfigurationError as error:
        raise DataError(detail=f"{shown(name)} is not a regular file.") from error


def _unreadable(folder: str, error: Exception) -> UnfitWeights:
    reason = error.strerror if isinstance(error, OSError) else error.detail if isinstance(error, DataError) else error
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return UnfitWeights(
        detail=f"{shown(folder)} cannot be read as weights: {str(reason).rstrip('.')}{where}.",
        remedy=f"It must have {CONFIG} and {WHOLE}, or {INDEX} and its files.",
    )


def problem_of(decoder: DecoderSection, folder: str, roots: AllowedRoots) -> UnfitWeights | None:
    """Return why a job cannot begin with these weights, before anything is started."""
    try:
        Weights(decoder, folder, roots)
    except UnfitWeights as error:
        return error
    except AtollError as error:
        return UnfitWeights(detail=str(error))
    return None
