"""The verified reading of checkpoints: nothing is believed before every byte of it was checked.

Responsible for the reason why one is refused, and for the newest sound one that is there instead. Refuses to know what a
checkpoint is used for.
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
"""Of what a file of parameters says of them."""


@dataclass(frozen=True, slots=True)
class SoundCheckpoint:
    """A sound checkpoint. ``refused`` says of each newer one, or of the one that was asked for, why it is not used."""

    folder: Folder
    manifest: Manifest
    refused: tuple[str, ...] = ()


def manifest_of(folder: Folder) -> Manifest:
    """Raises DataError when there is none, or it is damaged. The files it lists are not looked at."""
    try:
        content = folder.read(MANIFEST, MANIFEST_BYTES_MAX)
    except FileNotFoundError as error:
        raise DataError(detail=f"{folder.url} holds no whole checkpoint: {MANIFEST} is missing.") from error
    return decode(content, f"{folder.url}/{MANIFEST}")


def verified(folder: Folder) -> Manifest:
    """The manifest, every file of which was read and is what it says. Raises DataError with what is wrong."""
    manifest = manifest_of(folder)
    for file in manifest.files:
        blocks.verify(folder, file)
    return manifest


def listed(root: Folder) -> list[Manifest]:
    """The checkpoints of a job's folder, oldest first, by their manifests alone; what is not whole is left out."""
    manifests = []
    for name, number in _numbered(root):
        try:
            manifest = manifest_of(root.sub(name))
        except (DataError, OutsideRoots):
            continue
        if manifest.number == number:  # else it is another's, copied
            manifests.append(manifest)
    return manifests


def newest_sound(roots: AllowedRoots, url: str) -> SoundCheckpoint:
    """The checkpoint at ``url``, or the newest of a folder of them; if that is damaged, the one before it, and so on.

    Raises DataError, with every reason, when there is none; OutsideRoots where jobs may not look.
    """
    requested = Folder.within(roots, url)
    refused: list[str] = []
    for folder in _candidates(requested):
        try:
            return SoundCheckpoint(folder, verified(folder), tuple(refused))
        except DataError as error:
            refused.append(str(error))
    reasons = " ".join(refused) or "There is none."
    raise DataError(detail=f"No sound checkpoint is at {requested.url}. {reasons}")


def outer_states(folder: Folder, manifest: Manifest) -> list[FragmentState]:
    """Θ, momentum and residue of every fragment. Raises DataError where a file is not what it was."""
    listed = {file.name for file in manifest.files}
    return [
        FragmentState(
            Version(fragment.version),
            parameters,
            _arrays(folder, manifest, momentum_name(p)),
            fragment.digest,
            from_rows(fragment.roles),
            _arrays(folder, manifest, residue_name(p)) if residue_name(p) in listed else {},
        )
        for p, (fragment, parameters) in enumerate(
            zip(manifest.fragments, outer_parameters(folder, manifest), strict=True)
        )
    ]


def outer_parameters(folder: Folder, manifest: Manifest) -> Iterator[dict[str, Array]]:
    """Θ of one fragment after the other. Raises as ``outer_states``."""
    for number, fragment in enumerate(manifest.fragments):
        parameters = _arrays(folder, manifest, parameters_name(number))
        if (digest := tensors.digest(parameters)) != fragment.digest:
            raise DataError(detail=f"Fragment {number} of {folder.url} is {digest}, and should be {fragment.digest}.")
        yield parameters


def outer_windows(
    folder: Folder, manifest: Manifest, wanted: Sequence[Mapping[str, Window]] | None = None
) -> Iterator[dict[str, Array]]:
    """Of Θ what is wanted of each fragment, one fragment after the other; None: all. Nothing else is kept.

    Raises DataError where a file is not what it was, or has not what is wanted.
    """
    if wanted is not None and len(wanted) != len(manifest.fragments):
        detail = f"{folder.url} has {len(manifest.fragments)} fragments, and this island's model {len(wanted)}."
        raise DataError(detail=detail)
    for number in range(len(manifest.fragments)):
        with blocks.opened(folder, manifest.files, parameters_name(number)) as file:
            yield _windows(file, None if wanted is None else wanted[number])


def _windows(file: SoundFile, wanted: Mapping[str, Window] | None) -> dict[str, Array]:
    if file.size < wire_format.PREFIX_BYTES:
        raise DataError(detail=f"{file.name} is no file of parameters: it has {file.size} bytes.")
    head_bytes = wire_format.head_bytes(file.read(0, wire_format.PREFIX_BYTES))
    if head_bytes > HEAD_BYTES_MAX:
        raise DataError(detail=f"{file.name} begins with {head_bytes:,} bytes that are no parameters.")
    layout = wire_format.layout(file.read(0, head_bytes), file.size)
    if layout.codec != EXACT or layout.base is not None or any(place.part is not None for place in layout.places):
        raise DataError(detail=f"{file.name} holds no whole parameters, exactly.")
    places = {place.name: place for place in layout.places}
    if wanted is None:
        wanted = {name: Window(whole(place.shape), place.shape) for name, place in places.items()}
    if missing := sorted(wanted.keys() - places.keys()):
        raise DataError(detail=f"{file.name} has no {', '.join(missing[:3])}, which this island's model has.")
    arrays = {}
    for name, window in wanted.items():
        window.require_of(name, places[name].shape, file.name)
        arrays[name] = np.empty(shape_of(window.bounds), np.float32)
        file.window(places[name].start, arrays[name].dtype, places[name].shape, window.bounds, arrays[name])
    return arrays


def _arrays(folder: Folder, manifest: Manifest, name: str) -> dict[str, Array]:
    size = next((file.size for file in manifest.files if file.name == name), None)
    if size is None:
        raise DataError(detail=f"The manifest of {folder.url} lists no {name}.")
    return wire_format.decode(folder.read(name, size))


def _numbered(root: Folder) -> list[tuple[str, int]]:
    """The folders in it that are called as checkpoints are, oldest first."""
    named = ((name, number_of(name)) for name in root.folders())
    return sorted(((name, number) for name, number in named if number is not None), key=lambda each: each[1])


def _candidates(requested: Folder) -> list[Folder]:
    """The checkpoints to try, newest first: the folder itself and its older neighbours, or those in it."""
    own = number_of(requested.url.rpartition("/")[2])
    if own is not None:
        root = requested.parent()  # None where that is outside, so that there are no neighbours
        return (
            [requested, *(root.sub(name) for name, number in reversed(_numbered(root)) if number < own)]
            if root
            else [requested]
        )
    if requested.has(MANIFEST):
        return [requested]
    return [requested.sub(name) for name, _ in reversed(_numbered(requested))]
