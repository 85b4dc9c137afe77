"""The fetch of a state from peers, fragment by fragment: from one that holds a boundary still, or from several at once.

    donor A ──0──▶ ──2──▶ ──3──▶ ✗ dies with 3
    donor B ──1──▶ ──────4─────▶ ──3──▶            each chunk of one boundary of its donor, with that donor's versions

With ``of_one_boundary`` a donor gives all its chunks of the same one, and a state that one donor gave is whole.

A donor that is free takes the next fragment. What has arrived stays when a donor goes away, and the others give what it
still owed. A chunk with NaN or Inf is refused, and its donor with it. Thread-safe; blocks nobody but its own threads.

Refuses to choose donors (``core.island_record``), and to know how they are reached.

Parts of a state on their way from the processes that have them to those that need them, by windows of arrays.

    giver      blocks (an array and its bounds) ─▶ windows: what of them lies in what is wanted
    receiver   blocks of all givers ─▶ put_together: what is wanted, once it is all there

Whoever gives and whoever wants may be cut differently: meshes, and numbers of hosts, may differ. Arrays keep their types.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from learners.contract import Arrays
from learners.exports import require_numbers
from orchestrator.core.vocabulary import IslandId, Version
from orchestrator.errors import DataError
from orchestrator.parameters.parts import Bounds, index_of, intersection, shape_of, tiles, whole, within

Block = tuple[str, Bounds, np.ndarray]
"""A name, where in the array of this name it lies, and the values."""


def blocks_of(arrays: Mapping[str, np.ndarray], bounds: Mapping[str, Bounds]) -> list[Block]:
    """These arrays as blocks; those without bounds are whole. Raises DataError where one has not its bounds' shape."""
    blocks = [(name, bounds.get(name, whole(array.shape)), array) for name, array in arrays.items()]
    for name, own, array in blocks:
        if shape_of(own) != array.shape:
            raise DataError(detail=f"{name} is said to be the part {own}, and has the shape {array.shape}.")
    return blocks


def windows(blocks: Iterable[Block], wanted: Mapping[str, Bounds] | None) -> list[Block]:
    """What of these blocks lies in what is wanted, as views; None wants all of them."""
    if wanted is None:
        return list(blocks)
    cut = []
    for name, bounds, array in blocks:
        if name in wanted and (common := intersection(bounds, wanted[name])) is not None:
            cut.append((name, common, _cut(array, within(common, bounds))))
    return cut


def put_together(blocks: Iterable[Block], wanted: Mapping[str, Bounds] | None) -> Arrays:
    """What is wanted, of these blocks; None: whole arrays, of all names. A block that comes twice counts once.

    Raises DataError where they are not all of it, each value once.
    """
    by_name: dict[str, dict[Bounds, np.ndarray]] = defaultdict(dict)
    for name, bounds, array in blocks:
        by_name[name][bounds] = array
    if wanted is None:
        wanted = {name: _hull(own) for name, own in by_name.items()}
    return {name: _one(name, by_name[name], bounds) for name, bounds in wanted.items()}


def _one(name: str, own: Mapping[Bounds, np.ndarray], wanted: Bounds) -> np.ndarray:
    if math.prod(shape_of(wanted)) == 0:
        return np.empty(shape_of(wanted), np.float32)
    if (array := own.get(wanted)) is not None:
        return array
    if not tiles([within(bounds, wanted) for bounds in own], shape_of(wanted)):
        raise DataError(detail=f"The parts that came of {name}, {sorted(own)}, are not all of {wanted} once.")
    together = np.empty(shape_of(wanted), next(iter(own.values())).dtype)
    for bounds, array in own.items():
        together[index_of(within(bounds, wanted))] = array
    return together


def _cut(array: np.ndarray, bounds: Bounds) -> np.ndarray:
    """A view, also of an array without axes."""
    return array[index_of(bounds)] if bounds else array


def _hull(own: Iterable[Bounds]) -> Bounds:
    """From the origin to where the last ends."""
    stops = zip(*([stop for _, stop in bounds] for bounds in own), strict=True)
    return tuple((0, max(each)) for each in stops)


log = logging.getLogger(__name__)

Fragments = tuple[int, ...] | None
"""The fragments requested; ``None`` for all."""


@dataclass(frozen=True, slots=True)
class DonorReply:
    """Fragments of a state, and the versions of all and the step at their boundary.

    ``chunk`` is what the other processes of an island call their parts of it, which they have then.
    """

    arrays: Arrays
    versions: tuple[Version, ...]
    step: int
    chunk: str = ""


@dataclass(frozen=True, slots=True)
class Donor:
    """``give`` returns these fragments, or raises whatever went wrong."""

    island: IslandId
    give: Callable[[tuple[int, ...]], DonorReply]


@dataclass(frozen=True, slots=True)
class FetchedState:
    """A state to begin from. ``donor`` is whose clock was furthest; ``sources`` by fragment, empty if of one boundary.

    ``chunks`` are those that it was put together from, in the order in which the later takes precedence.
    """

    donor: IslandId
    arrays: Arrays
    versions: tuple[Version, ...]
    step: int
    sources: tuple[IslandId, ...]
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One reply of a donor, with one fragment."""

    donor: IslandId
    reply: DonorReply


class StateFetch:
    """``take`` gets the whole, and may raise: then all is to be asked for anew. ``failed`` names donors that gave nothing.

    Whoever has taken it calls ``close``.
    """

    def __init__(
        self,
        fragment_count: int,
        *,
        of_one_boundary: bool,
        take: Callable[[FetchedState], None],
        failed: Callable[[IslandId, BaseException], None],
    ) -> None:
        self._count, self._take, self._failed = fragment_count, take, failed
        self._of_one_boundary = of_one_boundary
        self._changed = threading.Condition()
        self._donors: dict[str, Donor] = {}
        self._fetching: dict[int, str] = {}
        self._chunks: dict[int, _Chunk] = {}
        self._over = False

    def ask(self, donors: Mapping[str, Donor]) -> None:
        """Take the rest from these, by the names of their processes. Who is not among them is asked for nothing more."""
        with self._changed:
            new = {} if self._over else {name: donor for name, donor in donors.items() if name not in self._donors}
            self._donors = {} if self._over else {name: self._donors.get(name, donors[name]) for name in donors}
            self._fetching = {p: name for p, name in self._fetching.items() if name in donors}
            self._changed.notify_all()
        for name, donor in new.items():
            threading.Thread(target=self._fetch, args=(name, donor), name="fetch", daemon=True).start()

    def close(self) -> None:
        """Nothing is needed any more: donors are asked for nothing, and what they gave is let go of."""
        with self._changed:
            self._over = True
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Under the lock."""
        self._donors, self._fetching, self._chunks = {}, {}, {}
        self._changed.notify_all()

    def _fetch(self, name: str, donor: Donor) -> None:
        try:
            while wanted := self._next(name, donor):
                self._keep(name, wanted, self._chunk_of(donor, wanted))
        except Exception as error:  # a dead donor is only one of the ways; the service chooses another
            with self._changed:
                if self._donors.get(name) is donor:
                    del self._donors[name]
                self._fetching = {p: other for p, other in self._fetching.items() if other != name}
                self._changed.notify_all()
                if self._over:
                    return
            self._failed(donor.island, error)

    def _next(self, name: str, donor: Donor) -> tuple[int, ...]:
        """The fragments to request from this donor, none if it is not needed; waits while all missing are on their way."""
        with self._changed:
            while self._donors.get(name) is donor:  # else it is asked for nothing, or by another thread
                missing = [p for p in range(self._count) if p not in self._chunks and p not in self._fetching]
                if missing:
                    wanted = tuple(missing[:1])
                    self._fetching.update(dict.fromkeys(wanted, name))
                    return wanted
                self._changed.wait()
            return ()

    def _chunk_of(self, donor: Donor, wanted: tuple[int, ...]) -> _Chunk:
        reply = donor.give(wanted)
        if len(reply.versions) != self._count:
            raise DataError(detail=f"{len(reply.versions)} versions came for {self._count} fragments.")
        require_numbers(reply.arrays)
        return _Chunk(donor.island, reply)

    def _keep(self, name: str, wanted: tuple[int, ...], chunk: _Chunk) -> None:
        """Keep the chunk, unless its fragments are here already. The last one's thread hands the whole over, or raises."""
        with self._changed:
            if self._over:
                return
            had = len(self._chunks)
            self._chunks = {**dict.fromkeys(wanted, chunk), **self._chunks}
            self._fetching = {p: other for p, other in self._fetching.items() if other != name}
            whole = self._whole() if had < len(self._chunks) == self._count else None
            self._changed.notify_all()
        log.info("fragment %s from %s, of its step %d", ", ".join(map(str, wanted)), chunk.donor, chunk.reply.step)
        if whole is not None:
            try:
                self._take(whole)
            except Exception:
                with self._changed:
                    self._begin_anew()
                raise

    def _whole(self) -> FetchedState:
        chunks = [self._chunks[p] for p in range(self._count)]
        in_order = sorted(chunks, key=lambda chunk: chunk.reply.step)
        arrays: Arrays = {}
        for chunk in in_order:
            arrays.update(chunk.reply.arrays)  # what belongs to no tensor is in each: the furthest donor's stays
        furthest = max(chunks, key=lambda chunk: chunk.reply.step)
        donors = tuple(chunk.donor for chunk in chunks)
        sources = () if self._of_one_boundary and len(set(donors)) == 1 else donors
        versions = tuple(chunk.reply.versions[p] for p, chunk in enumerate(chunks))
        names = tuple(dict.fromkeys(chunk.reply.chunk for chunk in in_order if chunk.reply.chunk))
        return FetchedState(furthest.donor, arrays, versions, furthest.reply.step, sources, names)
