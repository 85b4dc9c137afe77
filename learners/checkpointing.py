"""An island's part of a checkpoint: its state at one boundary, written while it trains and read by its next incarnation.

Each process of an island writes the arrays that it owns, in plain safetensors files (``plain_arrays``). Rank 0 writes the
part's document, with the digest of every file, once all of them are on disk.

Each process of the next incarnation reads only the state and the Θ that its own devices need. The number of hosts and the
mesh may differ.

Builds before ``plain_arrays`` wrote arrays with Orbax, each whole, from one process. They are read with TensorStore, which
Orbax uses for writing: Orbax itself would synchronise all processes of the island. An array is one chunk, so it is in memory
as a whole for a moment even if only a window of it is wanted.

When checkpoints are taken, and who takes part, is decided elsewhere. Nothing here uses Ray.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from learners import plain_arrays
from learners.contract import Arrays, Snapshot
from learners.plain_arrays import require_same_names
from orchestrator.checkpoints import blocks
from orchestrator.checkpoints.blocks import Window
from orchestrator.checkpoints.folder import FileTarget, Folder
from orchestrator.checkpoints.manifest import PART, File, Part, encode_part
from orchestrator.checkpoints.reading import manifest_of, outer_windows
from orchestrator.core.vocabulary import Incarnation, IslandId, Version
from orchestrator.errors import DataError, first_line
from orchestrator.parameters.parts import Bounds, index_of, whole
from orchestrator.replica.replica import Position

_OUTLINE = "/.zarray"
STEM = "arrays"
ORBAX = STEM
"""The folder of arrays that an earlier build wrote."""


def read_orbax(path: Path, wanted: Mapping[str, Window] | None) -> Arrays:
    """Read the wanted arrays of this folder, one after another (None: all). Raises DataError as ``plain_arrays`` does."""
    import tensorstore  # rarely needed

    store = {"driver": "ocdbt", "base": f"file://{path.resolve()}"}
    try:
        keys = tensorstore.KvStore.open(store).result().list().result()
        names = [key.decode().removesuffix(_OUTLINE) for key in keys if key.endswith(_OUTLINE.encode())]
        arrays = {
            name: tensorstore.open({"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}, read=True).result()
            for name in names
        }
        if wanted is not None:
            require_same_names(wanted, arrays, str(path))
        return {name: _window(name, array, wanted, path) for name, array in arrays.items()}
    except ValueError as error:
        raise DataError(detail=f"{path} is not a folder of arrays: {first_line(error)}.") from error


def _window(name: str, array: Any, wanted: Mapping[str, Window] | None, path: Path) -> np.ndarray:
    shape = tuple(map(int, array.shape))
    window = Window(whole(shape)) if wanted is None else wanted[name]
    window.require_of(name, shape, str(path))
    if not shape:
        return np.asarray(array.read().result())
    return np.asarray(array[index_of(window.bounds)].read().result())


@dataclass(frozen=True, slots=True)
class Cut:
    """The state at a boundary. ``snapshot`` is a copy on the host; ``cursor`` is that of ``Part``.

    ``held_seconds`` is how long it stopped the loop. ``parts`` has the bounds of arrays of which this process has only a
    part.
    """

    snapshot: Snapshot
    position: Position
    cursor: int
    held_seconds: float
    parts: Mapping[str, Bounds] = field(default_factory=dict)


def write(
    cut: Cut,
    folder: FileTarget,
    island: IslandId,
    incarnation: Incarnation,
    *,
    others: Callable[[], tuple[File, ...]] = tuple,
) -> Part:
    """Write the island's part durably and return it. Raises OSError, or what ``others`` raises.

    ``others`` waits for the files of the island's other processes.
    """
    own = folder.sub(island)
    files = plain_arrays.write(own, STEM, cut.snapshot.arrays(), cut.parts)
    files += others()
    own.sync()
    part = Part(
        island=island,
        incarnation=incarnation,
        step=cut.position.step,
        asked_step=cut.position.offered_step,
        steps_total=cut.position.steps_total,
        tokens_total=cut.position.tokens_total,
        cursor=cut.cursor,
        versions=cut.position.versions,
        step_counts=cut.position.step_counts,
        token_counts=cut.position.token_counts,
        files=tuple(sorted(files, key=lambda file: file.name)),
    )
    own.write(PART, encode_part(part))
    return part


def write_rank(cut: Cut, folder: FileTarget, island: IslandId, rank: int) -> tuple[File, ...]:
    """Write the arrays that this process owns durably; nothing if it owns none. Raises OSError."""
    arrays = cut.snapshot.arrays()
    if not arrays:
        return ()
    own = folder.sub(island)
    files = plain_arrays.write(own, f"{STEM}-{rank}", arrays, cut.parts)
    own.sync()
    return tuple(files)


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of one process of an island: state by the names of its arrays, and Θ by fragment and piece.

    None stands for everything.
    """

    state: Mapping[str, Window] | None = None
    outer: Sequence[Mapping[str, Window]] | None = None


EVERYTHING = Needs()


@dataclass(frozen=True, slots=True)
class Restored:
    """An island's state as read from a checkpoint, and Θ at the cut, by fragment, at ``versions``."""

    part: Part
    arrays: Arrays
    versions: tuple[Version, ...]
    outer: tuple[Mapping[str, np.ndarray], ...]

    @property
    def position(self) -> Position:
        """The replica's position at the cut."""
        return Position(
            step=self.part.step,
            offered_step=self.part.asked_step,
            steps_total=self.part.steps_total,
            tokens_total=self.part.tokens_total,
            versions=tuple(map(Version, self.part.versions)),
            step_counts=self.part.step_counts,
            token_counts=self.part.token_counts,
        )


def restored(folder: Folder, island: IslandId, needs: Needs = EVERYTHING) -> Restored:
    """Read what is needed of the island's state and of Θ. Raises DataError if it is missing or damaged."""
    manifest = manifest_of(folder)
    part = next((part for part in manifest.parts if part.island == island), None)
    if part is None:
        raise DataError(detail=f"The checkpoint {folder.url} has no state of {island}.")
    outer = tuple(outer_windows(folder, manifest, needs.outer))
    versions = tuple(Version(fragment.version) for fragment in manifest.fragments)
    return Restored(part, read(folder, part, needs.state), versions, outer)


def read(folder: Folder, part: Part, wanted: Mapping[str, Window] | None = None) -> Arrays:
    """Return the arrays of the part, or the wanted ones. Raises DataError if a file has changed since it was written."""
    own = folder.sub(part.island)
    plain = [file.name for file in part.files if "/" not in file.name and file.name.endswith(plain_arrays.SUFFIX)]
    if not plain:
        return _read_orbax(own, part, wanted)
    with ExitStack() as stack:
        files = [stack.enter_context(blocks.opened(own, part.files, name)) for name in plain]
        return plain_arrays.read((array for file in files for array in plain_arrays.stored(file)), wanted, own.url)


def _read_orbax(own: Folder, part: Part, wanted: Mapping[str, Window] | None) -> Arrays:
    for file in part.files:
        blocks.verify(own, file)
    listed = {file.name for file in part.files}
    if own.local is not None:
        if strangers := [name for name in own.names() if name.startswith(f"{ORBAX}/") and name not in listed]:
            raise DataError(detail=f"{own.url}/{strangers[0]} is not a file of the checkpoint. Remove it.")
        return read_orbax(own.local / ORBAX, wanted)
    with tempfile.TemporaryDirectory() as here:
        own.download(Path(here), sorted(listed))
        return read_orbax(Path(here) / ORBAX, wanted)
