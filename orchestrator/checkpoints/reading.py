"""The verified reading of checkpoints: nothing is used before its bytes have been verified.

It reports why a checkpoint is refused, and finds the newest intact one instead. How checkpoints are used is decided
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.checkpoints import blocks
from orchestrator.checkpoints.blocks import SoundFile, Window
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import MANIFEST, MANIFEST_BYTES_MAX, Manifest, decode
from orchestrator.checkpoints.writing import momentum_name, number_of, parameters_name, residue_name
from orchestrator.core.vocabulary import Version
from orchestrator.errors import DataError, OutsideRoots
from orchestrator.parameters import tensors, wire_format
from orchestrator.parameters.codec.registry import EXACT
from orchestrator.parameters.outer_state import FragmentState
from orchestrator.parameters.parts import shape_of, whole
from orchestrator.parameters.pieces import from_rows
from orchestrator.system.roots import AllowedRoots

Array = NDArray[Any]
HEAD_BYTES_MAX = 32 << 20
"""The limit of the head of a file of parameters."""


@dataclass(frozen=True, slots=True)
class SoundCheckpoint:
    """An intact checkpoint. ``refused`` says why each newer one, or the requested one, is not used."""

    folder: Folder
    manifest: Manifest
    refused: tuple[str, ...] = ()


def manifest_of(folder: Folder) -> Manifest:
    """Return the manifest. Raises DataError if it is missing or damaged. The files that it lists are not examined."""
    try:
        content = folder.read(MANIFEST, MANIFEST_BYTES_MAX)
    except FileNotFoundError as error:
        raise DataError(detail=f"{folder.url} has no complete checkpoint: {MANIFEST} is missing.") from error
    return decode(content, f"{folder.url}/{MANIFEST}")


def verified(folder: Folder) -> Manifest:
    """Verify every file of the checkpoint and return its manifest. Raises DataError with what is wrong."""
    manifest = manifest_of(folder)
    for file in manifest.files:
        blocks.verify(folder, file)
    return manifest


def listed(root: Folder) -> list[Manifest]:
    """Return the checkpoints in a job's folder, oldest first, from their manifests only; incomplete ones are skipped."""
    manifests = []
    for name, number in _numbered(root):
        try:
            manifest = manifest_of(root.sub(name))
        except (DataError, OutsideRoots):
            continue
        if manifest.number == number:  # otherwise it was copied from another
            manifests.append(manifest)
    return manifests


def newest_sound(roots: AllowedRoots, url: str) -> SoundCheckpoint:
    """Return the checkpoint at ``url``, or the newest in it; if that is damaged, the one before it, and so on.

    Raises DataError, with every reason, if there is none; OutsideRoots if jobs may not read there.
    """
    requested = Folder.within(roots, url)
    refused: list[str] = []
    for folder in _candidates(requested):
        try:
            return SoundCheckpoint(folder, verified(folder), tuple(refused))
        except DataError as error:
            refused.append(str(error))
    reasons = " ".join(refused) or "It has no checkpoint."
    raise DataError(detail=f"There is no intact checkpoint at {requested.url}. {reasons}")


def outer_states(folder: Folder, manifest: Manifest) -> Iterator[FragmentState]:
    """Yield Θ, momentum and residue, one fragment after the other. Raises DataError if a file has changed."""
    listed = {file.name for file in manifest.files}
    for p, (fragment, parameters) in enumerate(
        zip(manifest.fragments, outer_parameters(folder, manifest), strict=True)
    ):
        yield FragmentState(
            Version(fragment.version),
            parameters,
            _arrays(folder, manifest, momentum_name(p)),
            fragment.digest,
            from_rows(fragment.roles),
            _arrays(folder, manifest, residue_name(p)) if residue_name(p) in listed else {},
        )


def outer_parameters(folder: Folder, manifest: Manifest) -> Iterator[dict[str, Array]]:
    """Yield Θ, one fragment after the other. Raises as ``outer_states``."""
    for number, fragment in enumerate(manifest.fragments):
        parameters = _arrays(folder, manifest, parameters_name(number))
        if (digest := tensors.digest(parameters)) != fragment.digest:
            raise DataError(detail=f"Fragment {number} of {folder.url} has the digest {digest}, not {fragment.digest}.")
        yield parameters


def outer_windows(
    folder: Folder, manifest: Manifest, wanted: Sequence[Mapping[str, Window]] | None = None
) -> Iterator[dict[str, Array]]:
    """Yield the wanted part of Θ, one fragment after the other (None: all). Nothing else is kept.

    Raises DataError if a file has changed, or lacks what is wanted.
    """
    if wanted is not None and len(wanted) != len(manifest.fragments):
        detail = f"{folder.url} has {len(manifest.fragments)} fragments, but this island's model has {len(wanted)}."
        raise DataError(detail=detail)
    for number in range(len(manifest.fragments)):
        with blocks.opened(folder, manifest.files, parameters_name(number)) as file:
            yield _windows(file, None if wanted is None else wanted[number])


def _windows(file: SoundFile, wanted: Mapping[str, Window] | None) -> dict[str, Array]:
    if file.size < wire_format.PREFIX_BYTES:
        raise DataError(detail=f"{file.name} is not a file of parameters: it has {file.size} bytes.")
    head_bytes = wire_format.head_bytes(file.read(0, wire_format.PREFIX_BYTES))
    if head_bytes > HEAD_BYTES_MAX:
        raise DataError(detail=f"{file.name} begins with {head_bytes:,} bytes that are not parameters.")
    layout = wire_format.layout(file.read(0, head_bytes), file.size)
    if layout.codec != EXACT or layout.base is not None or any(place.part is not None for place in layout.places):
        raise DataError(detail=f"{file.name} does not contain complete values without loss.")
    places = {place.name: place for place in layout.places}
    if wanted is None:
        wanted = {name: Window(whole(place.shape), place.shape) for name, place in places.items()}
    if missing := sorted(wanted.keys() - places.keys()):
        raise DataError(detail=f"{file.name} lacks {', '.join(missing[:3])} of this island's model.")
    arrays = {}
    for name, window in wanted.items():
        window.require_of(name, places[name].shape, file.name)
        arrays[name] = np.empty(shape_of(window.bounds), np.float32)
        file.window(places[name].start, arrays[name].dtype, places[name].shape, window.bounds, arrays[name])
    return arrays


def _arrays(folder: Folder, manifest: Manifest, name: str) -> dict[str, Array]:
    size = next((file.size for file in manifest.files if file.name == name), None)
    if size is None:
        raise DataError(detail=f"The manifest of {folder.url} does not list {name}.")
    return wire_format.decode(folder.read(name, size))


def _numbered(root: Folder) -> list[tuple[str, int]]:
    """Return the folders in it that have names of checkpoints, oldest first."""
    named = ((name, number_of(name)) for name in root.folders())
    return sorted(((name, number) for name, number in named if number is not None), key=lambda each: each[1])


def _candidates(requested: Folder) -> list[Folder]:
    """Return the checkpoints to try, newest first: the folder and its older neighbours, or those in it."""
    own = number_of(requested.url.rpartition("/")[2])
    if own is not None:
        root = requested.parent()  # None outside the roots, so that there are no neighbours
        return (
            [requested, *(root.sub(name) for name, number in reversed(_numbered(root)) if number < own)]
            if root
            else [requested]
        )
    if requested.has(MANIFEST):
        return [requested]
    return [requested.sub(name) for name, _ in reversed(_numbered(requested))]
