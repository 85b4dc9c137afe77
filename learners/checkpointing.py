"""An island's part of a checkpoint: its state at one boundary, written while it trains on, and read by its next incarnation.

Orbax writes the arrays of islands that have JAX in their process, plain safetensors those of synthetic ones, which must not
load it. The part's document, with the digest of every file, is written when they are all on disk.

Of an island of many hosts each process writes the arrays that it owns, plainly: Orbax would have all of them meet. Rank 0
writes the document once the others have written, and lists their files as its own.

Refuses to know: when checkpoints are taken, who else is in one, and Ray.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from learners.contract import Arrays, Snapshot
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import PART, File, Part, encode_part
from orchestrator.checkpoints.reading import manifest_of, outer_parameters, verify
from orchestrator.core.vocabulary import Incarnation, IslandId, Version
from orchestrator.errors import DataError, first_line
from orchestrator.parameters.parts import Bounds, index_of, shape_of, tiles
from orchestrator.replica.replica import Position

ORBAX, PLAIN = "arrays", "arrays.safetensors"
PARTS = "parts.json"
"""In a file of arrays, beside them: the bounds of those that are parts of others, by name."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The state at a boundary. ``snapshot`` has left the devices; ``cursor`` is that of ``Part``.

    ``held_seconds`` is how long the loop took over it. ``parts`` are the bounds of arrays of which this process has a part.
    """

    snapshot: Snapshot
    position: Position
    cursor: int
    held_seconds: float
    parts: Mapping[str, Bounds] = field(default_factory=dict)


def write(
    cut: Cut,
    folder: Folder,
    island: IslandId,
    incarnation: Incarnation,
    *,
    orbax: bool,
    others: Callable[[], tuple[File, ...]] = tuple,
) -> Part:
    """The part is on disk afterwards, whole. Raises OSError, what Orbax raises, or what ``others`` does.

    ``others`` waits for the files of the island's other processes.
    """
    own = folder.sub(island)
    if orbax:
        _write_orbax(cut.snapshot.arrays(), own)
    else:
        _write_plain(cut, own, PLAIN)
    written = {file.name: file for file in others()}
    own.sync()
    names = sorted({*own.names(), *written})
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
        files=tuple(written.get(name) or File(name, *own.fingerprint(name)) for name in names),
    )
    own.write(PART, encode_part(part))
    return part


def write_rank(cut: Cut, folder: Folder, island: IslandId, rank: int) -> tuple[File, ...]:
    """What this process of the island owns is on the disk afterwards, if it owns anything. Raises OSError."""
    own, name = folder.sub(island), f"arrays-{rank}.safetensors"
    if not cut.snapshot.arrays():
        return ()
    _write_plain(cut, own, name)
    own.sync()
    return (File(name, *own.fingerprint(name)),)


@dataclass(frozen=True, slots=True)
class Restored:
    """An island's state as the checkpoint has it, and Θ at the cut by fragment, at ``versions``."""

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


def restored(folder: Folder, island: IslandId) -> Restored:
    """The island's state in the checkpoint. Raises DataError when there is none, or it is damaged."""
    manifest = manifest_of(folder)
    part = next((part for part in manifest.parts if part.island == island), None)
    if part is None:
        raise DataError(detail=f"The checkpoint {folder.url} holds no state of {island}.")
    outer = tuple(outer_parameters(folder, manifest))
    versions = tuple(Version(fragment.version) for fragment in manifest.fragments)
    return Restored(part, read(folder, part), versions, outer)


def read(folder: Folder, part: Part) -> Arrays:
    """The arrays of the part. Raises DataError when a file is not what it was."""
    own = folder.sub(part.island)
    for file in part.files:
        verify(own, file)
    if plain := [file for file in part.files if "/" not in file.name and file.name.endswith(".safetensors")]:
        contents = [_plain(own.read(file.name, file.size), f"{own.url}/{file.name}") for file in plain]
        return _assembled(contents)
    listed = {file.name for file in part.files}
    if own.local is not None:
        if strangers := [name for name in own.names() if name.startswith(f"{ORBAX}/") and name not in listed]:
            raise DataError(detail=f"{own.url}/{strangers[0]} is no file of the checkpoint, and Orbax would read it.")
        return _read_orbax(own.local / ORBAX)
    with tempfile.TemporaryDirectory() as here:
        own.download(Path(here), sorted(listed))
        return _read_orbax(Path(here) / ORBAX)


def _write_plain(cut: Cut, own: Folder, name: str) -> None:
    arrays = {name: np.asarray(array, order="C") for name, array in cut.snapshot.arrays().items()}
    if cut.parts:
        arrays[PARTS] = np.frombuffer(json.dumps(cut.parts).encode(), np.uint8)
    own.write(name, save(arrays))


def _assembled(contents: Sequence[Arrays]) -> Arrays:
    """The arrays of all processes. Raises DataError where their parts are not whole."""
    whole, parts = Arrays(), defaultdict[str, list[tuple[Bounds, np.ndarray]]](list)
    for arrays in contents:
        bounds = _bounds_of(arrays.pop(PARTS, None))
        for name, array in arrays.items():
            if name in bounds:
                parts[name].append((bounds[name], array))
            else:
                whole[name] = array
    for name, own in parts.items():
        distinct = {bounds: array for bounds, array in own if array.shape == shape_of(bounds)}
        shape = tuple(max(stops) for stops in zip(*([stop for _, stop in bounds] for bounds in distinct), strict=True))
        if len(distinct) < len({bounds for bounds, _ in own}) or not tiles(list(distinct), shape):
            raise DataError(
                detail=f"The parts of {name} in the checkpoint, {sorted(distinct)}, are not all of it once."
            )
        whole[name] = np.empty(shape, own[0][1].dtype)
        for at, array in distinct.items():
            whole[name][index_of(at)] = array
    return whole


def _bounds_of(content: np.ndarray | None) -> dict[str, Bounds]:
    if content is None:
        return {}
    try:
        document = json.loads(content.tobytes())
        return {name: tuple((int(start), int(stop)) for start, stop in sides) for name, sides in document.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(detail=f"The bounds of parts in a checkpoint cannot be read: {first_line(error)}.") from error


def _write_orbax(arrays: Mapping[str, np.ndarray], own: Folder) -> None:
    import orbax.checkpoint as ocp  # takes seconds, which only who saves must wait for

    with ocp.StandardCheckpointer() as checkpointer:
        if own.local is not None:
            checkpointer.save((own.local / ORBAX).resolve(), dict(arrays))
            return
        with tempfile.TemporaryDirectory() as here:
            checkpointer.save(Path(here) / ORBAX, dict(arrays))
            checkpointer.wait_until_finished()
            own.upload(Path(here))


def _plain(content: bytes, name: str) -> Arrays:
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(detail=f"{name} is no file of arrays: {first_line(error)}.") from error


def _read_orbax(path: Path) -> Arrays:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path.resolve())
    return {name: np.asarray(array) for name, array in restored.items()}
