"""The transfer of a state from a training island to another: what a donor gives, how it is fetched, and its time limits.

   donor A ──0──▶ ──2──▶ ──3──▶ ✗ dies with 3
   donor B ──1──▶ ──────4─────▶ ──3──▶            each chunk from one boundary of its donor, with that donor's versions

``Exports`` collects requests for the state at the next boundary. An island that does not train has no state to give.
``HeldStates`` and ``CutStates`` keep what was copied until receivers have it; ``Throttle`` limits the rate.

``StateFetch`` fetches a state fragment by fragment, from one donor or several. A donor that is free gives the next fragment.
If a donor goes away, what has arrived is kept, and the others give the rest. A chunk with NaN or Inf is refused, and its
donor with it: a donor may have diverged unnoticed. With ``of_one_boundary`` all chunks of a donor are from the same
boundary, so a state from a single donor is consistent. Thread-safe; only its own threads block.

``windows`` and ``put_together`` move parts of a state between processes that divide the arrays differently, because of other
meshes or numbers of hosts. Arrays keep their types.

   giver      blocks (an array and its bounds) ─▶ windows: the parts of them that are wanted
   receiver   blocks of all givers ─▶ put_together: what is wanted, once all of it has arrived

``CatchingUp`` loads exactly one state into an incarnation, from whichever source delivers first, and reports it. Two states
are never mixed, even if several arrive at the same time: the first complete one becomes the island's state. A repeated
request gets the same report again, because a restarted synchroniser may not have it.

Time limits depend on the size: a fixed one would be too short for a large model, or make a small one wait for a dead line.
If the service notices that a donor is gone or silent, nothing waits that long.

Donors are chosen in ``core.island_record``; how they are reached is in ``peers``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from learners.contract import Arrays
from learners.outbox import Outbox
from orchestrator.core.messages import CatchUpFailure, CaughtUp, LeftState
from orchestrator.core.vocabulary import IslandId, Version
from orchestrator.errors import AtollError, DataError, InfrastructureError, in_words
from orchestrator.parameters.parts import Bounds, index_of, intersection, shape_of, tiles, whole, within

STATE_BYTES_PER_PARAMETER = 12
"""A parameter and Adam's two moments, in float32, which is what most states have. An estimate is enough here."""
BOUNDARY_S = 30.0
"""A donor reaches a boundary between two steps within this time."""
ANSWER_S = 5.0
TO_HOST_BYTES_PER_S = 100_000_000
"""A state leaves the devices faster than this. All of it must, before the first fragment of a boundary can be given."""
SLOWEST_BYTES_PER_S = 1_000_000
"""A slower line is useless: a billion parameters would take more than three hours."""
QUEUE_S, REQUESTS_AHEAD_MAX = 60.0, 4
"""For a donor with a limited rate: the queue that is acceptable anyway, and the number of requests of this size ahead."""
Selection = TypeVar("Selection")
State = TypeVar("State")
Block = tuple[str, Bounds, np.ndarray]
"""A name, a place in the array with this name, and the values there."""
log = logging.getLogger(__name__)
RequestNumber = tuple[int, int]
"""The epoch of the requester and its count of requests. A later call may arrive before an earlier one."""
Fragments = tuple[int, ...] | None
"""The fragments requested; ``None`` for all."""


def queue_s(byte_count: int, bytes_per_s: float | None) -> float:
    """Return how long a donor with this rate limit may let a request wait, including its own bytes."""
    return 0.0 if bytes_per_s is None else QUEUE_S + (REQUESTS_AHEAD_MAX + 1) * byte_count / bytes_per_s


def held_s(byte_count: int, stall_s: float, bytes_per_s: float | None) -> float:
    """Return how long a donor holds this many bytes if none of them moves.

    ``stall_s`` is the pull's limit of progress. The pull may have to wait for another of this size, at the cap of the link.
    """
    return ANSWER_S + stall_s + byte_count / min(SLOWEST_BYTES_PER_S, bytes_per_s or SLOWEST_BYTES_PER_S)


def limit_s(byte_count: int, bytes_per_s: float | None) -> float:
    """Return how long a requester of this many bytes waits for them, from a donor with this rate limit."""
    return BOUNDARY_S + ANSWER_S + byte_count / SLOWEST_BYTES_PER_S + queue_s(byte_count, bytes_per_s)


class Exports(Generic[Selection, State]):
    """Requests for the state at the next boundary. Closed before training begins and after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[tuple[Selection, Future[State]]] = []
        self._is_open = False

    def open(self) -> None:
        with self._lock:
            self._is_open = True

    def ask(self, selection: Selection, timeout_s: float) -> State:
        """Return ``selection`` of the state at the next boundary. Raises InfrastructureError if there is none in time."""
        return self.wait(self.request(selection), timeout_s)

    def wait(self, request: Future[State], timeout_s: float) -> State:
        """Wait for a request's result. Raises InfrastructureError if it does not come in time."""
        try:
            return request.result(timeout_s)
        except TimeoutError as error:
            detail = f"no boundary between steps was reached within {timeout_s} s."
            raise InfrastructureError(detail=detail, remedy="Request it from another donor.") from error

    def request(self, selection: Selection) -> Future[State]:
        """Request ``selection`` of the state at the next boundary. The caller waits for the result. Raises as ``ask``."""
        return self.request_all([selection])[0]

    def request_all(self, selections: Sequence[Selection]) -> list[Future[State]]:
        """Request all of them at the same boundary. Raises as ``ask``."""
        futures: list[Future[State]] = [Future() for _ in selections]
        with self._lock:
            if not self._is_open:
                raise InfrastructureError(detail="this island does not train, so it has no state to give.")
            self._requests.extend(zip(selections, futures, strict=True))
        return futures

    def waiting(self) -> tuple[Selection, ...]:
        """Return the selections that have waiting requests, each once."""
        with self._lock:
            return tuple(dict.fromkeys(selection for selection, _ in self._requests))

    def answer(self, take: Callable[[Selection], State], selections: Iterable[Selection]) -> None:
        """Answer the requests for these selections, at a boundary. ``take`` is called once for each that is requested."""
        wanted = set(selections)
        with self._lock:
            requests = [request for request in self._requests if request[0] in wanted]
            self._requests = [request for request in self._requests if request[0] not in wanted]
        states = {selection: take(selection) for selection in dict.fromkeys(selection for selection, _ in requests)}
        for selection, future in requests:
            future.set_result(states[selection])

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            for _, future in self._requests:
                future.set_exception(InfrastructureError(detail="this island has just ended its training."))


class HeldStates(Generic[State]):
    """States of one boundary each, which receivers fetch fragment by fragment. Thread-safe.

    A fragment is kept until its receiver requests another, which shows that it has arrived. States that nothing requests are
    dropped after ``idle_s``, at the next request of any receiver.
    """

    def __init__(
        self, cut: Callable[[], Sequence[State]], idle_s: Callable[[], float], clock: Callable[[], float] = monotonic
    ) -> None:
        self._cut, self._idle_s, self._clock = cut, idle_s, clock
        self._lock = threading.Lock()
        self._states: dict[str, dict[int, State]] = {}
        self._latest: dict[str, tuple[int, float]] = {}

    def give(self, receiver: str, fragment: int) -> State:
        """Return the fragment at the boundary of this receiver's first request; at a new one if that has been dropped."""
        with self._lock:
            now, idle_s = self._clock(), self._idle_s()
            for idle in [name for name, (_, at) in self._latest.items() if now - at > idle_s]:
                del self._latest[idle], self._states[idle]
            latest, _ = self._latest.get(receiver, (fragment, now))
            if latest != fragment:
                self._states[receiver].pop(latest, None)
            if fragment not in self._states.get(receiver, {}):
                self._states[receiver] = dict(enumerate(self._cut()))
            self._latest[receiver] = (fragment, now)
            return self._states[receiver][fragment]


class CutStates(Generic[State]):
    """States by the name of their boundary and by fragment, for receivers to fetch. Thread-safe.

    They are kept until ``forget``. States that nothing fetches are dropped after ``idle_s``, at the next request.
    """

    def __init__(self, idle_s: Callable[[], float], clock: Callable[[], float] = monotonic) -> None:
        self._idle_s, self._clock = idle_s, clock
        self._changed = threading.Condition()
        self._states: dict[str, dict[int, State]] = {}
        self._touched_at: dict[str, float] = {}

    def keep(self, cut: str, fragment: int, state: State) -> None:
        with self._changed:
            self._touch(cut)
            self._states.setdefault(cut, {})[fragment] = state
            self._changed.notify_all()

    def state(self, cut: str, fragment: int, timeout_s: float) -> State:
        """Wait for the state with this name and return it. Raises InfrastructureError if it does not come in time."""
        with self._changed:
            self._touch(cut)
            if not self._changed.wait_for(lambda: fragment in self._states.get(cut, {}), timeout_s):
                detail = f"this process does not keep fragment {fragment} of the state {cut}."
                raise InfrastructureError(detail=detail, remedy="Request a new one.")
            return self._states[cut][fragment]

    def forget(self, cut: str, fragment: int) -> None:
        with self._changed:
            left = self._states.get(cut, {})
            left.pop(fragment, None)
            if not left:
                self._states.pop(cut, None)
                self._touched_at.pop(cut, None)

    def _touch(self, cut: str) -> None:
        """Note the use of a state, and drop idle ones. Requires the lock to be held."""
        now, idle_s = self._clock(), self._idle_s()
        for idle in [name for name, at in self._touched_at.items() if now - at > idle_s]:
            del self._touched_at[idle]
            self._states.pop(idle, None)
        self._touched_at[cut] = now


class Throttle:
    """Limits the bytes per second, on average over all requests, in their order; ``None`` is no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size: int, timeout_s: float) -> None:
        """Wait until these bytes may be sent. Raises InfrastructureError at once if that takes longer than ``timeout_s``."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now = monotonic()
            free_at = max(now, self._free_at) + size / self.bytes_per_s
            if free_at - now > timeout_s:
                detail = f"{size} bytes would have to wait {free_at - now:.0f} s at {self.bytes_per_s:.0f} bytes/s."
                raise InfrastructureError(
                    detail=detail, remedy="Raise recovery.donor_bytes_per_s, or synchroniser.fragments."
                )
            self._free_at = free_at
        sleep(free_at - now)


def require_numbers(state: Mapping[str, np.ndarray]) -> None:
    """Raise DataError, naming tensors, if a peer's state contains NaN or Inf."""
    if not_finite := sorted(name for name, array in state.items() if not np.isfinite(array).all()):
        raise DataError(detail=f"the peer's state contains NaN or Inf in {', '.join(not_finite[:3])}.")


def blocks_of(arrays: Mapping[str, np.ndarray], bounds: Mapping[str, Bounds]) -> list[Block]:
    """Return these arrays as blocks; those without bounds are whole. Raises DataError if a shape contradicts its bounds."""
    blocks = [(name, bounds.get(name, whole(array.shape)), array) for name, array in arrays.items()]
    for name, own, array in blocks:
        if shape_of(own) != array.shape:
            raise DataError(detail=f"{name} is announced as the part {own}, but has the shape {array.shape}.")
    return blocks


def windows(blocks: Iterable[Block], wanted: Mapping[str, Bounds] | None) -> list[Block]:
    """Return the parts of these blocks that are wanted, as views; None wants all of them."""
    if wanted is None:
        return list(blocks)
    cut = []
    for name, bounds, array in blocks:
        if name in wanted and (common := intersection(bounds, wanted[name])) is not None:
            cut.append((name, common, _cut(array, within(common, bounds))))
    return cut


def put_together(blocks: Iterable[Block], wanted: Mapping[str, Bounds] | None) -> Arrays:
    """Put together what is wanted from these blocks; None: whole arrays, with all names. Repeated blocks count once.

    Raises DataError unless the blocks cover it exactly once.
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
        raise DataError(detail=f"The parts of {name} that arrived, {sorted(own)}, do not cover {wanted} exactly once.")
    together = np.empty(shape_of(wanted), next(iter(own.values())).dtype)
    for bounds, array in own.items():
        together[index_of(within(bounds, wanted))] = array
    return together


def _cut(array: np.ndarray, bounds: Bounds) -> np.ndarray:
    """Return a view, also of an array without axes."""
    return array[index_of(bounds)] if bounds else array


def _hull(own: Iterable[Bounds]) -> Bounds:
    """Return the smallest bounds from the origin that contain all of these."""
    stops = zip(*([stop for _, stop in bounds] for bounds in own), strict=True)
    return tuple((0, max(each)) for each in stops)


@dataclass(frozen=True, slots=True)
class DonorReply:
    """Fragments of a state, with the versions of all fragments and the step at their boundary.

    ``chunk`` is the name of these fragments' parts in the other processes of an island, which have them by then.
    """

    arrays: Arrays
    versions: tuple[Version, ...]
    step: int
    chunk: str = ""


@dataclass(frozen=True, slots=True)
class Donor:
    """A peer to fetch from. ``give`` returns these fragments, or raises."""

    island: IslandId
    give: Callable[[tuple[int, ...]], DonorReply]


@dataclass(frozen=True, slots=True)
class FetchedState:
    """A complete state. ``donor`` is the one with the latest step; ``sources`` is by fragment, empty if of one boundary.

    ``chunks`` are the chunks that form it, in the order in which later ones take precedence.
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
    """Fetches a state from donors. ``take`` gets the whole; if it raises, everything is requested again.

    ``failed`` is called with each donor that gave nothing. Call ``close`` once the state is taken.
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
        """Fetch the rest from these donors, named by their processes. Other donors get no more requests."""
        with self._changed:
            new = {} if self._over else {name: donor for name, donor in donors.items() if name not in self._donors}
            self._donors = {} if self._over else {name: self._donors.get(name, donors[name]) for name in donors}
            self._fetching = {p: name for p, name in self._fetching.items() if name in donors}
            self._changed.notify_all()
        for name, donor in new.items():
            threading.Thread(target=self._fetch, args=(name, donor), name="fetch", daemon=True).start()

    def close(self) -> None:
        """Stop requesting, and drop what has arrived."""
        with self._changed:
            self._over = True
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Drop everything and start again. Requires the lock to be held."""
        self._donors, self._fetching, self._chunks = {}, {}, {}
        self._changed.notify_all()

    def _fetch(self, name: str, donor: Donor) -> None:
        try:
            while wanted := self._next(name, donor):
                self._keep(name, wanted, self._chunk_of(donor, wanted))
        except BaseException as error:  # a dead donor, for example; the service chooses another
            with self._changed:
                if self._donors.get(name) is donor:
                    del self._donors[name]
                self._fetching = {p: other for p, other in self._fetching.items() if other != name}
                self._changed.notify_all()
                if self._over:
                    return
            self._failed(donor.island, error)

    def _next(self, name: str, donor: Donor) -> tuple[int, ...]:
        """Return the fragments to request from this donor, none if it is not needed.

        Waits while all missing are requested.
        """
        with self._changed:
            while self._donors.get(name) is donor:  # otherwise it was dropped, or another thread serves it
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
            raise DataError(detail=f"{len(reply.versions)} versions arrived for {self._count} fragments.")
        require_numbers(reply.arrays)
        return _Chunk(donor.island, reply)

    def _keep(self, name: str, wanted: tuple[int, ...], chunk: _Chunk) -> None:
        """Keep the chunk, unless its fragments are here. The thread with the last chunk calls ``take``, or raises."""
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
            except BaseException:
                with self._changed:
                    self._begin_anew()
                raise

    def _whole(self) -> FetchedState:
        chunks = [self._chunks[p] for p in range(self._count)]
        in_order = sorted(chunks, key=lambda chunk: chunk.reply.step)
        arrays: Arrays = {}
        for chunk in in_order:
            arrays.update(chunk.reply.arrays)  # every chunk has what belongs to no tensor: the latest donor's remains
        furthest = max(chunks, key=lambda chunk: chunk.reply.step)
        donors = tuple(chunk.donor for chunk in chunks)
        sources = () if self._of_one_boundary and len(set(donors)) == 1 else donors
        versions = tuple(chunk.reply.versions[p] for p, chunk in enumerate(chunks))
        names = tuple(dict.fromkeys(chunk.reply.chunk for chunk in in_order if chunk.reply.chunk))
        return FetchedState(furthest.donor, arrays, versions, furthest.reply.step, sources, names)


class Loaded(NamedTuple):
    """The versions and the step of a state, and what of it an earlier incarnation left."""

    versions: tuple[Version, ...]
    step: int
    left: LeftState | None = None


class CatchingUp:
    """Catches up once, when ``loadable`` is set. ``caught_up`` is the report, once the island holds a state."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._lock = threading.Lock()
        self._fetching: StateFetch | None = None
        self._latest: RequestNumber = (0, 0)
        self.caught_up: CaughtUp | None = None
        self.loadable = threading.Event()
        """Set when the trainer can take a state. A peer's is fetched before."""

    def take(self, donor: IslandId | None, load: Callable[[], Loaded]) -> None:
        """Load the state of ``donor``.

        ``load`` does it. ``CaughtUp`` or ``CatchUpFailure`` follows.
        """
        self.loadable.wait()
        with self._lock:
            began = monotonic()
            if self.caught_up is None:
                try:
                    versions, step, left = load()
                except BaseException as error:  # a package's trainer may raise anything
                    log.exception("the state of %s could not be loaded", donor or "the synchroniser")
                    self._outbox.put(CatchUpFailure(donor, reason_of(error)))
                    return
                self._has(CaughtUp(donor, versions, step, monotonic() - began, left=left))
            else:
                self._outbox.put(self.caught_up)

    def fetch(
        self,
        number: RequestNumber,
        donors: Mapping[str, Donor],
        fragment_count: int,
        load: Callable[[FetchedState], None],
        *,
        of_one_boundary: bool,
    ) -> None:
        """Fetch a state from these peers, named by their processes. ``CaughtUp`` follows.

        ``CatchUpFailure`` follows for each peer that gives nothing. A repeated request continues with these peers and keeps
        what has arrived. A request whose ``number`` is older than the latest is ignored.
        """
        with self._lock:
            if self.caught_up is not None:
                self._outbox.put(self.caught_up)
                return
            if number <= self._latest:
                return
            self._latest = number
            if self._fetching is None:
                began = monotonic()
                self._fetching = StateFetch(
                    fragment_count,
                    of_one_boundary=of_one_boundary,
                    take=lambda state: self._fetched(state, load, began),
                    failed=self._failed,
                )
            self._fetching.ask(donors)

    def forget(self) -> None:
        """Start over as another incarnation, which has not yet reported that it holds a state."""
        with self._lock:
            self.caught_up, self._fetching, self._latest = None, None, (0, 0)

    def _fetched(self, state: FetchedState, load: Callable[[FetchedState], None], began: float) -> None:
        """Load the fetched state. Raises what ``load`` raises."""
        self.loadable.wait()
        with self._lock:
            if self.caught_up is None:
                load(state)
                self._has(CaughtUp(state.donor, state.versions, state.step, monotonic() - began, state.sources))

    def _has(self, report: CaughtUp) -> None:
        source = ", ".join(sorted(set(report.sources))) or report.donor or "the synchroniser"
        if report.left is not None:
            source = f"what its incarnation {report.left.incarnation} left"
        log.info("caught up from %s, at step %d", source, report.step)
        self.caught_up = report
        if self._fetching is not None:
            self._fetching.close()
        self._outbox.put(report)

    def _failed(self, donor: IslandId, error: BaseException) -> None:
        log.warning("no state from %s: %s", donor, in_words(error))
        self._outbox.put(CatchUpFailure(donor, in_words(error)))


def reason_of(error: BaseException) -> str:
    """Return why a state that is here was not loaded. Foreign errors come from the trainer that was to load it."""
    return in_words(error) if isinstance(error, AtollError) else f"its trainer cannot load it: {in_words(error)}"
