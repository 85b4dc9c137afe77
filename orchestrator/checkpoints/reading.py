"""The verified reading of checkpoints: nothing is believed before every byte of it was checked.

Responsible for the reason why one is refused, and for the newest sound one that is there instead. Refuses to know what a
checkpoint is used for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import MANIFEST, MANIFEST_BYTES_MAX, File, Manifest, decode
from orchestrator.checkpoints.writing import momentum_name, number_of, parameters_name, residue_name
from orchestrator.core.vocabulary import Version
from orchestrator.errors import DataError, OutsideRoots
from orchestrator.parameters import tensors, wire_format
from orchestrator.parameters.outer_state import FragmentState
from orchestrator.parameters.roles import from_rows
from orchestrator.roots import AllowedRoots

Array = NDArray[Any]


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
        verify(folder, file)
    return manifest


def verify(folder: Folder, file: File) -> None:
    """The file was read and is what is said of it. Raises DataError with what is wrong."""
    try:
        size = folder.size(file.name)
        digest = folder.fingerprint(file.name)[1] if size == file.size else ""
    except FileNotFoundError as error:
        raise DataError(detail=f"The checkpoint {folder.url} lacks {file.name}.") from error
    if size != file.size:
        detail = f"{folder.url}/{file.name} has {size} bytes, and had {file.size} when the checkpoint was taken."
        raise DataError(detail=f"{detail} It was cut or overwritten: it is damaged.")
    if digest != file.digest:
        raise DataError(detail=f"{folder.url}/{file.name} is damaged: its digest is {digest}, not {file.digest}.")


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
