"""The fetch of a state from peers, fragment by fragment: from one that holds a boundary still, or from several at once.

    donor A ──0──▶ ──2──▶ ──3──▶ ✗ dies with 3
    donor B ──1──▶ ──────4─────▶ ──3──▶            each chunk of one boundary of its donor, with that donor's versions

With ``of_one_boundary`` a donor gives all its chunks of the same one, and a state that one donor gave is whole.

A donor that is free takes the next fragment. What has arrived stays when a donor goes away, and the others give what it
still owed. A chunk with NaN or Inf is refused, and its donor with it. Thread-safe; blocks nobody but its own threads.

Refuses to choose donors (``core.island_record``), and to know how they are reached.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from learners.contract import Arrays
from learners.exports import require_numbers
from orchestrator.core.vocabulary import IslandId, Version
from orchestrator.errors import DataError

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
