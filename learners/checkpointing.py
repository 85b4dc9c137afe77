"""An island's part of a checkpoint: its state at one boundary, written while it trains and read by its next incarnation.

Each process of an island writes the arrays that it owns, in plain safetensors files (``plain_arrays``). Rank 0 writes the
part's document, with the digest of every file, once all of them are on disk.

Each process of the next incarnation reads only the state and the Θ that its own devices need. The number of hosts and the
mesh may differ.

Builds before ``plain_arrays`` wrote arrays with Orbax, each whole, from one process. They are read with TensorStore, which
Orbax uses for writing: Orbax itself would synchronise all processes of the island. An array is one chunk, so it is in memory
as a whole for a moment even if only a window of it is wanted.

When checkpoints are taken, and who takes part, is decided elsewhere. Nothing here uses Ray.

An island whose node ends leaves the same in a folder of its machine (``LeftStates``), and its next incarnation there
continues from it. Whether work in it may still be merged is decided in ``core.island_life``.

   FOLDER/JOB.ISLAND.INCARNATION/left.json         sealed: what it belongs to, and the digest of the part
   FOLDER/JOB.ISLAND.INCARNATION/ISLAND/…          as in a checkpoint
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from learners import plain_arrays
from learners.contract import Arrays, Snapshot
from learners.plain_arrays import require_same_names
from orchestrator.checkpoints import blocks
from orchestrator.checkpoints.blocks import Window
from orchestrator.checkpoints.folder import FileTarget, Folder
from orchestrator.checkpoints.manifest import (
    PART,
    PART_BYTES_MAX,
    File,
    Part,
    decode_part,
    encode_part,
    part_digest,
    seal,
    unseal,
)
from orchestrator.checkpoints.reading import manifest_of, outer_windows
from orchestrator.core.messages import IslandHoldings, LeftState, NotSaved, Saved
from orchestrator.core.vocabulary import Epoch, Incarnation, IslandId, Life, Version
from orchestrator.errors import AtollError, DataError, first_line, in_words
from orchestrator.parameters.parts import Bounds, index_of, whole
from orchestrator.parameters.tensors import digest
from orchestrator.replica.replica import Position, overtaken
from orchestrator.system import release, signals
from orchestrator.system.logbook import Logbook, job_of

log = logging.getLogger(__name__)
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


def saved_or_not(
    cut_taken: Future[Cut],
    target: AbstractContextManager[FileTarget],
    checkpoint: int,
    life: Life,
    others: Callable[[], tuple[File, ...]],
) -> Saved | NotSaved:
    """Wait for the cut, write the part of this life, and return what to report. Training continues in any case."""
    try:
        cut = cut_taken.result()
        with target as folder:
            part = write(cut, folder, *life, others=others)
    except Exception as error:  # a full disk, for example
        log.exception("this island's part of checkpoint %d is not written", checkpoint)
        return NotSaved(checkpoint, in_words(error))
    log.info("saved for checkpoint %d, at step %d", checkpoint, cut.position.step)
    return Saved(checkpoint, part_digest(part), cut.position.tokens_total, cut.held_seconds)


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


LEFT = "left.json"
LEFT_AGE_MAX_S = 86_400.0
"""An older state is not used: its job has gone on without it, or is over."""
FREE_RATIO_MIN = 0.05
"""The share of the disk that stays free. Ray starts no process on a disk that is fuller."""
BOUNDARY_MAX_S = 60.0
_DOCUMENT = {
    "job": str,
    "island": str,
    "incarnation": int,
    "epoch": int,
    "build": str,
    "left_at": float,
    "stepping_seconds": float,
    "part": str,
    "outer": list,
}


class Training(Protocol):
    """An island's loop, as it leaves its state."""

    def holdings(self, island: IslandId, incarnation: Incarnation) -> IslandHoldings | None: ...

    def request_cut(self, of: Hashable) -> Future[Cut]: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A state in ``folder``, of which every document was checked, but not the arrays. ``outer`` are digests of Θ."""

    folder: Path
    part: Part
    epoch: Epoch
    stepping_seconds: float
    outer: tuple[str, ...]

    @property
    def left(self) -> LeftState:
        part, versions = self.part, tuple(map(Version, self.part.versions))
        totals = (part.steps_total, part.tokens_total, self.stepping_seconds)
        return LeftState(Incarnation(part.incarnation), versions, part.step, *totals, part.token_counts)


class LeftStates:
    """The states that incarnations of one island leave in a folder of their machine, if that has such a folder."""

    def __init__(self, folder: Path | None, job: str, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._job, self._clock = folder, job, clock
        self._found: Found | None = None

    @classmethod
    def of_node(cls, book: Logbook, leave: Callable[[], None]) -> LeftStates:
        """Return those of the node that this process is on, and listen to requests to leave one."""
        folder = os.environ.get(signals.LEFT_STATES_VARIABLE)
        try:
            if folder is not None:
                signals.Listener(Path(folder), leave)
        except OSError as error:
            log.warning("this island will not leave its state on its machine: %s", in_words(error))
            folder = None
        return cls(None if folder is None else Path(folder), job_of(book))

    def leave(self, loop: Training, island: IslandId, incarnation: Incarnation, epoch: Epoch) -> None:
        """Write the state of the next boundary, as a whole or not at all, if there is unmerged work in it."""
        try:
            holdings = loop.holdings(island, incarnation) if self._folder is not None else None
            if holdings is None or not any(holdings.kept_tokens):
                return
            cut = loop.request_cut(LEFT).result(BOUNDARY_MAX_S)
            self.write(cut, holdings, epoch)
        except Exception as error:  # a full disk, for example; the process ends in any case
            log.warning("this island's state is not left on its machine: %s", in_words(error))
            return
        log.info("left the state of step %d on this machine, with unmerged work", cut.position.step)

    def write(self, cut: Cut, holdings: IslandHoldings, epoch: Epoch) -> None:
        """Write this state under the island's name. Raises OSError, and then leaves nothing."""
        assert self._folder is not None
        island, incarnation = holdings.life
        size = sum(array.nbytes for array in cut.snapshot.arrays().values())
        disk = shutil.disk_usage(self._folder)
        if disk.free - size < FREE_RATIO_MIN * disk.total:
            raise OSError(errno.ENOSPC, f"{size:,} bytes do not fit on the disk of {self._folder}")
        digests = {(int(held.fragment), held.version): held.digest for held in holdings.held}
        draft = Path(tempfile.mkdtemp(prefix=".", dir=self._folder))
        try:
            folder = Folder.own(draft)
            part = write(cut, folder, island, incarnation)
            document = {
                "job": self._job,
                "island": island,
                "incarnation": incarnation,
                "epoch": epoch,
                "build": release.own().release,
                "left_at": self._clock(),
                "stepping_seconds": holdings.stepping_seconds,
                "part": part_digest(part),
                "outer": [digests.get((p, v), "") for p, v in enumerate(cut.position.versions)],
            }
            folder.write(LEFT, seal(document))
            for path in draft.rglob("*.*"):
                path.chmod(0o600)
            target = self._folder / f"{self._job}.{island}.{incarnation}"
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def find(self, island: IslandId, incarnation: Incarnation) -> LeftState | None:
        """Return the state of the latest earlier incarnation that left one. Remove what is damaged, foreign or too old."""
        candidates: list[Found] = []
        for folder in sorted(self._folder.iterdir()) if self._folder is not None and self._folder.is_dir() else ():
            is_own = folder.name.rpartition(".")[0] == f"{self._job}.{island}"
            try:
                if is_own:
                    candidates.append(self._read(folder, island, incarnation))
                elif folder.is_dir() and self._clock() - folder.stat().st_mtime > LEFT_AGE_MAX_S:
                    _remove(folder, "it is older than a day")
            except (OSError, AtollError) as error:
                _remove(folder, in_words(error))
        *older, self._found = [None, *sorted(candidates, key=lambda each: each.part.incarnation)]
        for each in older:
            if each is not None:
                _remove(each.folder, "a later incarnation left its state, too")
        return None if self._found is None else self._found.left

    def _read(self, folder: Path, island: IslandId, incarnation: Incarnation) -> Found:
        """Raises DataError with the reason if this is not a state of an earlier incarnation that can be used."""
        here = Folder.own(folder)
        document = unseal(here.read(LEFT, PART_BYTES_MAX), LEFT)
        if document.keys() != _DOCUMENT.keys() or any(type(document[n]) is not kind for n, kind in _DOCUMENT.items()):
            raise DataError(detail=f"{LEFT} has other fields than this build writes.")
        part = decode_part(here.sub(island).read(PART, PART_BYTES_MAX), PART)
        age_s = self._clock() - document["left_at"]
        for is_wrong, reason in (
            (document["job"] != self._job, f"it belongs to the job {document['job']}"),
            (document["island"] != island, f"it belongs to the island {document['island']}"),
            (not part.incarnation == document["incarnation"] < incarnation, "no earlier incarnation left it"),
            (part_digest(part) != document["part"], "its parts are not of one state"),
            (document["build"] != release.own().release, f"the build {document['build']} left it"),
            (not 0 <= age_s <= LEFT_AGE_MAX_S, f"it was left {age_s:.0f} s ago"),
            (len(document["outer"]) != len(part.versions), "it has other fragments"),
        ):
            if is_wrong:
                raise DataError(detail=f"{reason}.")
        outer = tuple(map(str, document["outer"]))
        return Found(folder, part, Epoch(document["epoch"]), document["stepping_seconds"], outer)

    def restored(
        self,
        epoch: Epoch,
        versions: tuple[Version, ...],
        values: Mapping[str, np.ndarray],
        fragments: Sequence[Sequence[str]],
        needs: Needs = EVERYTHING,
    ) -> tuple[Restored, LeftState]:
        """Read the state that was found, to continue from it where Θ is what it was based on.

        ``values`` is Θ at ``versions``, by pieces of which ``fragments`` has the names. A version with other bytes than the
        island knew counts as a later one. Returns the state, and what of it was kept. Raises DataError if it is damaged.
        """
        outer = tuple({name: values[name] for name in names} for names in fragments)
        state = self._found
        if state is None:
            raise DataError(detail="no state was left on this machine.")
        if state.epoch > epoch:
            raise DataError(detail=f"the state was left in epoch {state.epoch}, and this is epoch {epoch}.")
        same = [digest(arrays) == before for arrays, before in zip(outer, state.outer, strict=True)]
        based_on = tuple(v if is_same else -1 for v, is_same in zip(state.part.versions, same, strict=True))
        part = replace(state.part, versions=based_on)
        arrays = read(Folder.own(state.folder), state.part, needs.state)
        restored = Restored(part, arrays, versions, outer)
        lost = overtaken(restored.position, versions)
        kept_tokens = tuple(0 if p in lost else tokens for p, tokens in enumerate(part.token_counts))
        return restored, replace(state.left, kept_tokens=kept_tokens)

    def forget(self, reason: str) -> None:
        """Remove the state that was found, if there is one."""
        if self._found is not None:
            _remove(self._found.folder, reason)
            self._found = None


def _remove(folder: Path, reason: str) -> None:
    log.info("removing the state in %s: %s", folder, reason)
    shutil.rmtree(folder, ignore_errors=True)
