"""Checkpoints found and verified: nothing is believed before every byte of it was checked.

Responsible for the reason why one is refused, and for the newest sound one that is there instead. Refuses to know what a
checkpoint is used for.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import MANIFEST, Manifest, decode
from orchestrator.checkpoints.writing import momentum_name, parameters_name
from orchestrator.core.vocabulary import Version
from orchestrator.errors import DataError
from orchestrator.merge import wire
from orchestrator.merge.outer_state import FragmentState


@dataclass(frozen=True, slots=True)
class Found:
    """A sound checkpoint. ``refused`` says of each newer one, or of the one that was asked for, why it is not used."""

    folder: Folder
    manifest: Manifest
    refused: tuple[str, ...] = ()


def manifest_of(folder: Folder) -> Manifest:
    """Raises DataError when there is none, or it is damaged. The files it lists are not looked at."""
    try:
        content = folder.read(MANIFEST)
    except FileNotFoundError as error:
        raise DataError(detail=f"{folder.url} holds no whole checkpoint: {MANIFEST} is missing.") from error
    return decode(content, f"{folder.url}/{MANIFEST}")


def verified(folder: Folder) -> Manifest:
    """The manifest, every file of which was read and is what it says. Raises DataError with what is wrong."""
    manifest = manifest_of(folder)
    for file in manifest.files:
        try:
            size, digest = folder.fingerprint(file.name)
        except FileNotFoundError as error:
            raise DataError(detail=f"The checkpoint {folder.url} lacks {file.name}.") from error
        if size != file.size:
            detail = f"{folder.url}/{file.name} has {size} bytes, and had {file.size} when the checkpoint was taken."
            raise DataError(detail=f"{detail} It was cut or overwritten.")
        if digest != file.digest:
            raise DataError(detail=f"{folder.url}/{file.name} is damaged: its digest is {digest}, not {file.digest}.")
    return manifest


def listed(root: Folder) -> list[Manifest]:
    """The checkpoints of a job's folder, oldest first, by their manifests alone; what is not whole is left out."""
    found = []
    for name in root.folders():
        try:
            found.append(manifest_of(root.sub(name)))
        except DataError:
            continue
    return sorted(found, key=lambda manifest: manifest.number)


def newest_sound(url: str) -> Found:
    """The checkpoint at ``url``, or the newest of a folder of them; if that is damaged, the one before it, and so on.

    Raises DataError, with every reason, when there is none.
    """
    asked = Folder(url)
    refused: list[str] = []
    for folder in _candidates(asked):
        try:
            return Found(folder, verified(folder), tuple(refused))
        except DataError as error:
            refused.append(str(error))
    told = " ".join(refused) or "There is none."
    raise DataError(detail=f"No sound checkpoint is at {asked.url}. {told}")


def outer_states(folder: Folder, manifest: Manifest) -> list[FragmentState]:
    """Θ and momentum of every fragment. Raises DataError where a file is not what it was."""
    states = []
    for number, fragment in enumerate(manifest.fragments):
        parameters = wire.decode(folder.read(parameters_name(number)))
        momentum = wire.decode(folder.read(momentum_name(number)))
        if (found := wire.digest(parameters)) != fragment.digest:
            raise DataError(detail=f"Fragment {number} of {folder.url} is {found}, and should be {fragment.digest}.")
        states.append(FragmentState(Version(fragment.version), parameters, momentum, fragment.digest))
    return states


def _candidates(asked: Folder) -> list[Folder]:
    """Itself if it is one, behind it older neighbours if it is called by a number; else those in it. Newest first."""
    name = asked.url.rpartition("/")[2]
    if name.isdigit():
        root = Folder(asked.url.rpartition("/")[0])
        older = [other for other in root.folders() if other.isdigit() and other < name]
        return [asked, *(root.sub(other) for other in reversed(older))]
    if MANIFEST in asked.names():
        return [asked]
    return [asked.sub(other) for other in reversed(asked.folders()) if other.isdigit()]
