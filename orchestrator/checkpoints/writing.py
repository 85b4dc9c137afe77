"""The writing of a checkpoint: Θ, then the islands' parts, which they write themselves, and last the manifest.

Without its manifest a checkpoint does not exist, whatever files it has; so the manifest is removed first.
Which islands are waited for, and which checkpoints are kept, is decided in ``core.checkpoints``.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.checkpoints import blocks
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import (
    MANIFEST,
    NUMBER_MAX,
    PART,
    PART_BYTES_MAX,
    File,
    Fragment,
    Manifest,
    Part,
    decode_part,
    encode,
    part_digest,
)
from orchestrator.core.vocabulary import FragmentId
from orchestrator.errors import AtollError, DataError
from orchestrator.parameters import wire_format
from orchestrator.parameters.outer_state import FragmentState
from orchestrator.parameters.pieces import rows_of

PLACE = "place.mark"
"""A file of a checkpoint that is being written. No island has this name."""


@dataclass(frozen=True, slots=True)
class OuterCut:
    """Θ and momentum at a checkpoint's cut, wherever they are held.

    ``write`` writes them to the checkpoint's folder, which may take long, and returns the files. It raises OSError.
    """

    fragments: tuple[Fragment, ...]
    write: Callable[[Folder], tuple[File, ...]]


def cut_of(states: Mapping[FragmentId, tuple[FragmentState, int]]) -> OuterCut:
    """Return the cut of the fragments that this process holds, each with the step of its last merge."""
    fragments = tuple(
        Fragment(state.version, step, state.digest, rows_of(state.roles)) for state, step in states.values()
    )
    return OuterCut(fragments, lambda folder: write_outer(folder, {p: state for p, (state, _) in states.items()}))


def root_of(folder: str | None, job: str, run_dir: Path) -> str:
    """Return the root of a job's checkpoints, from its specification's ``checkpoints.folder``."""
    return str(run_dir / "checkpoints") if folder is None else f"{folder.rstrip('/')}/{job}"


def checkpoint_folder(root: Folder, number: int) -> Folder:
    return root.sub(f"{number:06d}")


def number_of(name: str) -> int | None:
    """Return the number of the checkpoint whose folder has this name; None for any other folder."""
    number = int(name) if re.fullmatch(r"[0-9]{6,10}", name) else 0
    return number if 0 < number <= NUMBER_MAX and name == f"{number:06d}" else None


def newest_number(names: Iterable[str]) -> int:
    """Return the highest number of a checkpoint whose folder has one of these names, 0 if there is none."""
    return max((number_of(name) or 0 for name in names), default=0)


def mark_place(folder: Folder) -> str:
    """Write a random text into the folder and return it. Who reads the same text sees the same folder. Raises OSError."""
    text = secrets.token_hex(16)
    folder.write(PLACE, text.encode())
    return text


def is_place(folder: Folder, text: str) -> bool:
    """Return whether this machine sees the folder in which ``mark_place`` wrote the text."""
    try:
        return folder.read(PLACE, 2 * len(text)) == text.encode()
    except (OSError, AtollError):
        return False


def parameters_name(fragment: int) -> str:
    return f"fragment-{fragment:04d}.parameters"


def momentum_name(fragment: int) -> str:
    return f"fragment-{fragment:04d}.momentum"


def residue_name(fragment: int) -> str:
    return f"fragment-{fragment:04d}.residue"


def write_outer(folder: Folder, states: Mapping[FragmentId, FragmentState]) -> tuple[File, ...]:
    """Write Θ, momentum and residue of every fragment to the folder. Raises OSError."""
    files: list[File] = []
    for fragment, state in states.items():
        # encoded one by one, so that only the largest must fit into memory
        files += blocks.write(folder, parameters_name(fragment), [wire_format.encode(state.parameters)])
        names = {momentum_name(fragment): state.momentum}
        if state.residue:
            names[residue_name(fragment)] = state.residue
        for name, arrays in names.items():
            folder.write(name, wire_format.encode(arrays))
            files.append(File(name, *folder.fingerprint(name)))
    return tuple(sorted(files, key=lambda file: file.name))


def read_part(folder: Folder, island: str, digest: str) -> tuple[Part, tuple[File, ...]]:
    """Return the island's part with this digest, and its files as the manifest lists them. Raises DataError, OSError."""
    name = f"{island}/{PART}"
    try:
        part = decode_part(folder.read(name, PART_BYTES_MAX), f"{folder.url}/{name}")
    except FileNotFoundError as error:
        raise DataError(
            detail=f"The part of {island} is not at {folder.url}, although the island has reported that it is written."
        ) from error
    if (actual := part_digest(part)) != digest:
        raise DataError(
            detail=f"The part of {island} at {folder.url} has the digest {actual}, but the island wrote {digest}."
        )
    own = File(name, *folder.fingerprint(name))
    return part, (own, *(replace(file, name=f"{island}/{file.name}") for file in part.files))


def write_manifest(folder: Folder, manifest: Manifest) -> None:
    """Write the manifest, which completes the checkpoint. Raises OSError."""
    folder.write(MANIFEST, encode(manifest))


def remove(folder: Folder) -> None:
    """Remove the checkpoint completely. Raises OSError."""
    folder.remove(MANIFEST)
    folder.remove_all()
