"""A parameter shard: the fragments of Θ that one process owns, from a contribution's bytes to the next publication.

   receive ▸ validate ▸ hold ─▶ merge ▸ journal ▸ publication
                                restore ▸ journal ▸ publication

Orders and results are plain data: fragment ids, payload ids, versions, digests, and bytes in a codec that only this package
reads. So a job may have one shard in the synchroniser's process, or several in their own processes, each with its own
journal and a part of the fragments. Which shard owns a fragment is decided by its driver.

A shard has no thread, and knows nothing of the job's time. ``receive``, ``hold``, ``release`` and everything that only reads
may be called from any thread at any time. Orders that change a fragment come one at a time, in the order in which they take
effect; those for different fragments may run at the same time. The shard does not know why a merge is ordered, who gets a
version, or how bytes travel.

``PayloadTable`` holds contributions by payload id until the core releases them. ``norms_of_update`` computes how far the
last update moved Θ, and how much of it the codec still owes; it reads all of Θ, Θ before it, and the residue once.

Source: Decoupled DiLoCo, arXiv:2604.21428 (the synchroniser is sharded by fragment).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import Epoch, FragmentId, PayloadId, RefusalReason, Version
from orchestrator.errors import DataError, InternalError
from orchestrator.parameters import wire_format
from orchestrator.parameters.holding import Holding, encoded_part
from orchestrator.parameters.journal import Facts
from orchestrator.parameters.journaled_store import JournaledStore, JournaledVersion, MergeLog, Retry
from orchestrator.parameters.outer_state import FragmentState, OuterState
from orchestrator.parameters.tensors import Array, Tensors
from orchestrator.parameters.validation import validated_parts
from orchestrator.parameters.wire_format import EncodedTensors, InvalidPayload

CHUNK = 1 << 14
"""Values processed at once: differences stay in a core's nearest caches, and no second Θ is allocated."""


@dataclass(frozen=True, slots=True)
class StepNorms:
    """The norms of the step to ``version``: ‖Θ' − Θ‖, and ‖residue'‖, what updates so far lost in their codec."""

    version: Version
    update_norm: float
    residue_norm: float


def norms_of_update(version: Version, before: Tensors, after: Tensors, residue: Tensors) -> StepNorms:
    """Compute the norms. ``before`` and ``after`` are Θ and Θ' by piece, all finite; a lossless codec has no ``residue``."""
    update = math.fsum(_squared_distance(array, after[name]) for name, array in before.items())
    owed = math.fsum(_squared_distance(array, None) for array in residue.values())
    return StepNorms(version, math.sqrt(update), math.sqrt(owed))


def _squared_distance(one: Array, other: Array | None) -> float:
    """Return ‖other − one‖², or ‖one‖² without another. Chunks are summed in float32, and their sums exactly."""
    flat = one.reshape(-1)
    room = np.empty(min(CHUNK, flat.size), np.float32)
    against = None if other is None else other.reshape(-1)
    sums = []
    for first in range(0, flat.size, CHUNK):
        part = flat[first : first + CHUNK]
        if against is not None:
            part = np.subtract(against[first : first + CHUNK], part, out=room[: part.size])
        sums.append(float(np.dot(part, part)))
    return math.fsum(sums)


class PayloadTable:
    """Held contributions by payload id. Thread-safe: links put, the merge reads, the pump releases."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[PayloadId, EncodedTensors] = {}

    def hold(self, payload: PayloadId, displacement: EncodedTensors) -> None:
        with self._lock:
            self._held[payload] = displacement

    def holds(self, payload: PayloadId) -> bool:
        with self._lock:
            return payload in self._held

    def get(self, payload: PayloadId) -> EncodedTensors:
        with self._lock:
            try:
                return self._held[payload]
            except KeyError:
                raise InternalError(detail=f"Payload {payload} is not held.") from None

    def release(self, payload: PayloadId) -> None:
        with self._lock:
            self._held.pop(payload, None)


@dataclass(eq=False, kw_only=True)
class InputsLost(DataError):
    """Contributions that a merge needs were lost with the process that held them."""


def is_journalled(newest: Facts, order: MergeFragment, holds: Callable[[PayloadId], bool]) -> bool:
    """Return whether a shard that may have died since has journalled this merge, so that it is answered from there.

    ``newest`` are the facts of its newest version of the fragment. Raises InputsLost if the merge cannot be made any more.
    """
    if newest.version == order.version and newest.contributors == tuple(
        (str(i.island), i.weight) for i in order.inputs
    ):
        return True
    # a fragment that was set back is at the version of an order that was given before
    lost = [item for item in order.inputs if not holds(item.payload)]
    if lost or newest.version == order.version:
        islands = ", ".join(item.island for item in lost or order.inputs)
        detail = f"an earlier process of the shard ended with contributions that it held ({islands})"
        raise InputsLost(detail=f"{detail}; islands offer the work again")
    return False


@dataclass(frozen=True, slots=True)
class Held:
    """A contribution is held and may enter a merge. ``update_norm`` is ‖Θ_p − θ‖, Θ_p being the version it is based on."""

    update_norm: float


@dataclass(frozen=True, slots=True)
class Unusable:
    """A contribution may not enter a merge, and is not held."""

    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True)
class Update:
    """The difference of a version from the one before, of about ``byte_count``. ``payload`` makes a holding's part of it."""

    payload: Callable[[Holding], memoryview]
    byte_count: int


@dataclass(frozen=True, slots=True)
class Publication:
    """A fragment at one version, for islands.

    ``update`` is the difference from the version before, None if the codec of updates is lossless. ``values`` makes the
    payload of the values themselves, ``parameters``, about ``values_bytes``, or of a holding's part of them. After either,
    the arrays of a process with this holding have the digest of ``digest_of``, ``digest`` for the whole fragment.
    """

    fragment: FragmentId
    version: Version
    digest: str
    update: Update | None
    values: Callable[[Holding], memoryview]
    digest_of: Callable[[Holding], str]
    values_bytes: int
    parameters: Tensors


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A version that is journalled and may be announced.

    ``journal_seconds`` is how long that took, including times in which the disk failed.
    """

    facts: Facts
    journal_seconds: float
    publication: Publication


class ParameterShard:
    """The shard during one epoch. There is no Θ before ``seed`` or ``recover``."""

    def __init__(
        self,
        journal: MergeLog,
        epoch: Epoch,
        retry: Retry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``retry`` performs every write to the journal until it succeeds; ``clock`` times outer steps."""
        self._journal, self._epoch, self._retry, self._clock = journal, epoch, retry, clock
        self._payloads = PayloadTable()
        self._store: JournaledStore | None = None
        self._steps: dict[FragmentId, int] = {}

    # ── the first Θ ───────────────────────────────────────────────────────────────────────────────────────────────

    def seed(self, outer: OuterState, steps: Mapping[FragmentId, int]) -> tuple[NewVersion, ...]:
        """Journal the first versions. ``steps`` are those of their last merges in an earlier job, else 0."""
        store = JournaledStore(outer, self._journal, self._retry, self._clock)
        first = [store.begin(fragment, self._epoch, steps.get(fragment, 0)) for fragment in outer.fragments]
        self._steps = {version.facts.fragment: version.facts.step for version in first}
        self._store = store
        return tuple(map(self._new, first))

    def recover(self, outer: OuterState, merges: Sequence[Facts]) -> tuple[Publication, ...]:
        """Continue from Θ as the journal has it; ``merges`` are the last of each fragment."""
        self._steps = {FragmentId(facts.fragment): facts.step for facts in merges}
        self._store = JournaledStore(outer, self._journal, self._retry, self._clock)
        return tuple(map(self.publication, outer.fragments))

    # ── contributions ─────────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, payload: PayloadId, fragment: FragmentId, *parts: bytes | memoryview) -> Held | Unusable:
        """Validate the bytes of an island, one part from each of its processes, and hold them under this name."""
        state = self._outer.state(fragment)
        try:
            displacement, update_norm = validated_parts(parts, state.parameters, state.version)
        except InvalidPayload as error:
            return Unusable(error.reason, error.detail)
        self._payloads.hold(payload, displacement)
        return Held(update_norm)

    def holds(self, payload: PayloadId) -> bool:
        """Return whether the contribution is held."""
        return self._payloads.holds(payload)

    def release(self, payload: PayloadId) -> None:
        self._payloads.release(payload)

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────

    def merge(self, order: MergeFragment) -> NewVersion:
        """Take the outer step and journal it. Raises NotFinite if the result may not be published.

        Raises InternalError if an input is not held.
        """
        held = ((self._payloads.get(item.payload), item.weight) for item in order.inputs)
        inputs = [(self._outer.from_current(order.fragment, displacement), weight) for displacement, weight in held]
        version = self._require_store().merge(order, inputs)
        self._steps[order.fragment] = order.step
        return self._new(version)

    def restore(self, fragment: FragmentId, version: Version, step: int, state: FragmentState) -> NewVersion:
        """Replace the fragment by an earlier state, as its next version, and journal that."""
        restored = self._require_store().restore(fragment, version, step, self._epoch, state)
        self._steps[fragment] = step
        return self._new(restored)

    # ── queries ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def seeded(self) -> bool:
        return self._store is not None

    @property
    def fragments(self) -> tuple[FragmentId, ...]:
        """The fragments owned, in order; none before there is Θ."""
        return () if self._store is None else self._outer.fragments

    def state(self, fragment: FragmentId) -> FragmentState:
        return self._outer.state(fragment)

    def states(self) -> dict[FragmentId, tuple[FragmentState, int]]:
        """Return every fragment with the step of its last merge."""
        return {fragment: (self._outer.state(fragment), self._steps[fragment]) for fragment in self.fragments}

    def parameters(self) -> dict[str, Array]:
        """Return the current Θ, by the names of its pieces. Its fragments may be at different versions."""
        return self._outer.parameters()

    def sizes(self) -> dict[FragmentId, int]:
        """Return the number of parameters of each fragment."""
        return {p: sum(array.size for array in self.state(p).parameters.values()) for p in self.fragments}

    def step(self) -> int:
        """Return the highest logical step of a merge here."""
        return max(self._steps.values())

    def publication(self, fragment: FragmentId) -> Publication:
        """Return the fragment's current publication. (A merge returns its publication, too.)"""
        state = self._outer.state(fragment)
        return Publication(
            fragment,
            state.version,
            state.digest,
            None if state.update is None else _update(state.update),
            lambda holding: encoded_part(state.parameters, holding),
            lambda holding: holding.digest_of(state.parameters) if holding.parts else state.digest,
            sum(array.nbytes for array in state.parameters.values()),
            state.parameters,
        )

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _new(self, version: JournaledVersion) -> NewVersion:
        return NewVersion(version.facts, version.journal_seconds, self.publication(FragmentId(version.facts.fragment)))

    def _require_store(self) -> JournaledStore:
        if self._store is None:
            raise InternalError(detail="Θ was requested before it was seeded.")
        return self._store

    @property
    def _outer(self) -> OuterState:
        return self._require_store().outer


def _update(content: EncodedTensors) -> Update:
    """Make an update whose parts are cut from the payload, so that nothing else is kept as long as it is needed."""
    whole, _ = wire_format.unverified(wire_format.written(content))
    return Update(lambda holding: wire_format.written(holding.part_of(whole)), whole.value_bytes)
