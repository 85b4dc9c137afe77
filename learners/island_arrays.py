"""The arrays of one process of an island: its trainer's, its offers, published versions, and what plans do to them.

It carries out a ``BoundaryPlan``: loads versions by their modes, takes snapshots, and keeps those that are needed. A plan
names arrays only by fragment, version and number of offer. So one process of an island can decide, and each carries out the
same plan on its own pieces of the tensors (``learners.group``).

Decisions are made in ``orchestrator.replica.replica``. Nothing here reports, or knows whether there are other processes. The
rules of adoption, their sources, and where they apply are in ``orchestrator.replica.work``; their arithmetic is here
(``mixed``, ``update``). Arrays are float32, by tensor name, with the same names and shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import assert_never, cast

import numpy as np

from learners.checkpointing import Cut, Needs, Restored
from learners.contract import Arrays, HeldPart, HostCopy, Snapshot, SpreadTrainer, Trainer
from learners.handed_over import PublishedFragments
from learners.outbox import OfferedFragment, PublishedVersion
from learners.state_transfer import Block, FetchedState, Fragments, blocks_of, require_numbers
from orchestrator.checkpoints.blocks import Window
from orchestrator.core.vocabulary import AllOffers, FragmentId, MergedOffer, Version
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import EXACT, CodecName
from orchestrator.parameters.holding import Holding
from orchestrator.parameters.parts import Bounds, whole
from orchestrator.parameters.pieces import Shape, piece_named
from orchestrator.replica.replica import Action, AdoptVersion, ExportState, OfferFragment, Position, overtaken
from orchestrator.replica.work import AdoptionRule, LoadMode, Mix, Rebase, Replace

Names = tuple[str, ...]
Base = OfferedFragment | Mapping[str, np.ndarray]
"""θ_since: an offer as it decodes, or the version that was adopted last."""


class HeldPieces:
    """The part of the pieces that this process holds, and the part that it offers: the lowest rank offers a shared part.

    ``pieces[p]`` are those of fragment p. ``rank`` is None if the island is one process, which holds and offers everything.
    """

    def __init__(self, trainer: Trainer, pieces: Sequence[Names], rank: int | None) -> None:
        self._trainer, self._pieces, self._rank = trainer, tuple(pieces), rank
        self._shapes = trainer.tensor_shapes()
        self.holding = Holding()
        self.fragments = self.offered = self._pieces
        if rank is None:
            return
        spread = cast(SpreadTrainer, trainer)
        held = {name: spread.held(name) for names in pieces for name in names}
        parts: list[tuple[str, Bounds]] = []
        for name, own in sorted(held.items()):
            if own.bounds != whole(self._shape(name)):
                parts.append((name, own.bounds))
        self.holding = Holding(tuple(parts))
        there = {name for name, own in held.items() if not _is_empty(own)}
        self.fragments = tuple(tuple(name for name in names if name in there) for names in self._pieces)
        mine = {name for name in there if held[name].processes[0] == rank}
        self.offered = tuple(tuple(name for name in names if name in mine) for names in self._pieces)

    @property
    def is_whole(self) -> bool:
        """True if this process holds the whole model."""
        return not self.holding.parts

    def wanted(self, fragment: FragmentId) -> dict[str, Bounds] | None:
        """Return what belongs here of a state of this fragment, by the names of its arrays; None for all of it."""
        if self.is_whole:
            return None
        held = cast(SpreadTrainer, self._trainer).held_state(self._pieces[fragment])
        return {name: own.bounds for name, own in held.items()}

    def needs(self) -> Needs:
        """Return what belongs here of a checkpoint. State is named by whole tensors, in whatever pieces it was written."""
        bounds = self.holding.bounds()
        outer = [
            {name: Window(bounds.get(name, whole(self._shape(name))), self._shape(name)) for name in names}
            for names in self.fragments
        ]
        if self.is_whole:
            return Needs(outer=outer)
        held = cast(SpreadTrainer, self._trainer).held_state(self._shapes)
        return Needs({name: Window(own.bounds, own.shape) for name, own in held.items()}, outer)

    def _shape(self, piece: str) -> Shape:
        named = piece_named(piece)
        return named.shape(self._shapes[named.tensor])

    def gives(self, fragments: Iterable[int]) -> dict[str, Bounds] | None:
        """Return what this process gives of a state of these fragments; None for all of it.

        Each block is given by one process, so state that belongs to a piece must be distributed like it.
        """
        if self.is_whole:
            return None
        held = cast(SpreadTrainer, self._trainer).held_state([name for p in fragments for name in self.offered[p]])
        return {name: own.bounds for name, own in held.items() if own.processes[0] == self._rank and not _is_empty(own)}


def _is_empty(part: HeldPart) -> bool:
    return any(start >= stop for start, stop in part.bounds)


def mixed(published: Arrays, own: Arrays, alpha: float) -> Arrays:
    """Return α·θ + (1 − α)·Θ."""
    own_share = np.float32(alpha)
    return {name: own_share * own[name] + (1 - own_share) * array for name, array in published.items()}


def update(published: Arrays, since: Arrays) -> Arrays:
    """Return Θ − θ_since, which is added to θ to keep own work: Θ + (θ − θ_since) = θ + (Θ − θ_since).

    It needs nothing from the devices, so the receiver of a publication can compute it while steps continue.
    """
    return {name: array - since[name] for name, array in published.items()}


@dataclass(frozen=True, slots=True)
class ArraysPlan:
    """``fragments[p]`` names the pieces of fragment p; ``mix_alpha`` is α, the weight of the own ones; ``codec`` is that of
    offers.

    ``rank`` is this process's rank in an island of several hosts, whose parts the trainer knows; None for a single process.
    """

    fragments: tuple[tuple[str, ...], ...]
    adoption: AdoptionRule = "replace"
    mix_alpha: float = 0.5
    codec: CodecName = EXACT
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Asks for the state of these fragments at a boundary (None: of all).

    With ``cut`` each process of the island keeps its part of them under that name, for receivers to fetch.
    """

    fragments: Fragments = None
    cut: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """The state for a peer: arrays, the versions of all fragments, and the logical step.

    ``bounds`` lists the arrays this process contributes if it holds only a part; other arrays are not sent.
    """

    snapshot: Snapshot
    versions: tuple[Version, ...]
    step: int
    bounds: Mapping[str, Bounds] | None = None
    cut: str = ""

    def arrays(self) -> Arrays:
        """Wait until the arrays are on the host, and return them."""
        arrays = self.snapshot.arrays()
        return arrays if self.bounds is None else {name: arrays[name] for name in self.bounds}

    def blocks(self) -> list[Block]:
        """Return the same arrays with their bounds."""
        return blocks_of(self.arrays(), self.bounds or {})


@dataclass(slots=True)
class Arrival:
    """A published value. ``update`` is what it adds to own work since ``base``, if that was computed already."""

    published: Arrays
    base: Base | None = None
    update: Arrays | None = None


class IslandArrays:
    """The arrays and what happens to them.

    ``lock`` guards them against other threads, for short times; its owner may hold it.
    """

    def __init__(self, trainer: Trainer, plan: ArraysPlan, lock: threading.Condition) -> None:
        self.trainer, self._plan, self._lock = trainer, plan, lock
        self.held = HeldPieces(trainer, plan.fragments, plan.rank)
        self.published = PublishedFragments(self.held.fragments, self.held.holding)
        self._arrived: dict[FragmentId, dict[Version, Arrival]] = {}
        self._from_peers: dict[FragmentId, Mapping[str, np.ndarray]] = {}
        """Peers' values of the fragments of which no version has been adopted since."""
        self._offered: dict[FragmentId, dict[int, OfferedFragment]] = {}
        self._adopted: dict[FragmentId, PublishedVersion] = {}
        """The version of Θ on which the island is based, for the fragments whose values it has."""
        self._residues: dict[FragmentId, Arrays] = {}
        """What the codec lost of the work in Θ, if θ does not contain it by itself (``replica.work``)."""

    # ── loading a state ───────────────────────────────────────────────────────────────────────────────────────────

    def load(self, arrays: Mapping[str, np.ndarray], versions: Sequence[Version], cursor: int) -> None:
        """Begin with this process's part of the synchroniser's parameters and a fresh inner optimizer."""
        self.trainer.load(arrays)
        self.trainer.seek(cursor)
        self._stand_on([{name: arrays[name] for name in names} for names in self.held.fragments], versions)

    def load_peer(self, state: FetchedState, cursor: int) -> None:
        """Begin with a peer's state. Its work that was not contributed is not kept as this island's."""
        self.trainer.import_state(state.arrays)
        self.trainer.seek(cursor)
        if self.rebases:
            own = enumerate(self.held.fragments)
            self._from_peers = {FragmentId(p): self.trainer.snapshot(names).arrays() for p, names in own}
        for p, version in enumerate(state.versions):
            if (published := self.published.at(FragmentId(p), version)) is not None:
                self._adopted[FragmentId(p)] = published

    def load_saved(self, saved: Restored, cursor: int) -> None:
        """Begin where the checkpoint cut this island. Work that Θ already contains is overwritten; the rest is kept.

        All of ``saved`` is this process's part.
        """
        require_numbers(saved.arrays)
        self.trainer.import_state(saved.arrays)
        self.trainer.seek(cursor)
        outer = [{name: saved.outer[p][name] for name in own} for p, own in enumerate(self.held.fragments)]
        self._stand_on(outer, saved.versions)
        for fragment in overtaken(saved.position, saved.versions):
            self.trainer.load(outer[fragment])

    def promote(
        self,
        adoptions: Iterable[AdoptVersion],
        arrived: Mapping[FragmentId, Arrival],
        shard_index: int,
        cursor: int,
    ) -> None:
        """Begin as an island from a standby's state, on these versions, with the island's data."""
        for adoption in adoptions:
            self.adopt(adoption, arrived[adoption.report.fragment])
        self.trainer.take_shard(shard_index)
        self.trainer.seek(cursor)

    def _stand_on(self, outer: Sequence[Mapping[str, np.ndarray]], versions: Sequence[Version]) -> None:
        """Base the island on these fragments of Θ."""
        for p, (arrays, version) in enumerate(zip(outer, versions, strict=True)):
            fragment = FragmentId(p)
            self.published.hold(fragment, version, arrays)
            self._adopted[fragment] = PublishedVersion(version, arrays)

    def outer_values(self, payloads: Iterable[bytes | memoryview]) -> Arrays:
        """Decode what this process holds of Θ from the fragments' payloads. Raises InvalidPayload."""
        values: Arrays = {}
        for names, payload in zip(self.held.fragments, payloads, strict=True):
            values |= self.held.holding.own_values(wire_format.parse(payload), names)
        return values

    @property
    def rebases(self) -> bool:
        return self._plan.adoption == "rebase"

    # ── publications and offers ───────────────────────────────────────────────────────────────────────────────────

    def arrive(self, fragment: FragmentId, version: Version, arrays: Arrays, mode: LoadMode | None) -> None:
        """Keep a published value until the plan of a boundary adopts it or a later one.

        ``mode`` is how it would be loaded now. What that needs is computed here, to save the loop's thread the time; the
        boundary checks whether the base is still the same.
        """
        with self._lock:
            base = self._base(fragment, mode.since) if isinstance(mode, Rebase) else None
        arrival = Arrival(arrays, base)
        if base is not None:
            arrival.update = update(arrays, _arrays_of(base))
        with self._lock:
            self._arrived.setdefault(fragment, {})[version] = arrival

    def forget_older(self, fragment: FragmentId) -> None:
        """Keep only the newest arrival of the fragment, because no other will be adopted."""
        with self._lock:
            if arrivals := self._arrived.get(fragment):
                newest = max(arrivals)
                self._arrived[fragment] = {newest: arrivals[newest]}

    def ready_version(self, fragment: FragmentId) -> int:
        """Return the newest version that is ready or adopted; −1 for none.

        A version that is still being read is not ready.
        """
        with self._lock:
            adopted = self._adopted.get(fragment)
            return max([-1 if adopted is None else adopted.version, *self._arrived.get(fragment, {})])

    def take_arrived(self, actions: Iterable[Action]) -> dict[FragmentId, Arrival]:
        """Return the arrivals that these actions adopt, once, and forget earlier versions of them."""
        taken: dict[FragmentId, Arrival] = {}
        with self._lock:
            for action in actions:
                if isinstance(action, AdoptVersion):
                    fragment, version = action.report.fragment, action.report.version
                    arrivals = self._arrived.pop(fragment)
                    taken[fragment] = arrivals[version]
                    self._arrived[fragment] = {v: arrivals[v] for v in arrivals if v > version}
        return taken

    def likely_mode(self, fragment: FragmentId, merged_offer: MergedOffer) -> LoadMode | None:
        """Return how a version with the island's offers up to ``merged_offer`` would probably be loaded, as far as known."""
        with self._lock:
            if not self.rebases or not self._adopted:
                return None
            if isinstance(merged_offer, AllOffers) or merged_offer not in self._offered.get(fragment, {}):
                return Rebase(None)
            return Rebase(merged_offer)

    def _base(self, fragment: FragmentId, since: int | None) -> Base | None:
        if since is not None:
            return self._offered.get(fragment, {}).get(since)
        adopted = self._adopted.get(fragment)
        return self._from_peers.get(fragment, None if adopted is None else adopted.arrays)

    def offered(self, fragment: FragmentId, offer: int) -> OfferedFragment | None:
        """Return the offer if its snapshot is still kept. Requires the lock to be held."""
        return self._offered.get(fragment, {}).get(offer)

    # ── actions of a boundary ─────────────────────────────────────────────────────────────────────────────────────

    def adopt(self, action: AdoptVersion, arrival: Arrival) -> None:
        """Load the arrived version into the fragment."""
        fragment, version, published = action.report.fragment, action.report.version, arrival.published
        match action.mode:
            case Replace(residue):
                self.trainer.load(self._with_residue(fragment, published, residue))
            case Mix(residue):
                own, corrected = self._own(published), self._with_residue(fragment, published, residue)
                self.trainer.load(mixed(corrected, own, self._plan.mix_alpha))
            case Rebase(since):
                base = self._base(fragment, since)
                assert base is not None, f"the snapshot of offer {since} of fragment {fragment} was dropped too early"
                ready = arrival.update if arrival.base is base else None
                self.trainer.add(update(published, _arrays_of(base)) if ready is None else ready)
            case _:
                assert_never(action.mode)
        self._adopted[fragment] = PublishedVersion(version, published)
        self._from_peers.pop(fragment, None)
        self._keep_offered(fragment, self._offered.get(fragment, {}), action.snapshots)

    def _with_residue(self, fragment: FragmentId, published: Arrays, whose: int | None) -> Arrays:
        """Return Θ + e. The residue of the last adoption stays until that of a later offer replaces it."""
        if whose is None:
            self._residues.pop(fragment, None)
        elif whose:
            merged = self._offered[fragment][whose]
            merged.merge()
            if (own := merged.residue()) is not None:
                self._residues[fragment] = own
        residue = self._residues.get(fragment)
        return published if residue is None else {name: array + residue[name] for name, array in published.items()}

    def _own(self, names: Iterable[str]) -> Arrays:
        return self.trainer.snapshot(names).arrays()

    def offer(self, action: OfferFragment) -> None:
        """Take a snapshot of the fragment, of which this process offers its part."""
        fragment, number = action.report.fragment, action.report.offer
        adopted = self._adopted.get(fragment)
        base = adopted if adopted is not None and adopted.version == action.report.base_version else None
        snapshot = self.trainer.snapshot(self.held.fragments[fragment])
        parts = self.held.holding.bounds()
        own = {name: parts.get(name) for name in self.held.offered[fragment]}
        offered = OfferedFragment(snapshot, base, self._plan.codec, owned=own, residue_wanted=not self.rebases)
        self._keep_offered(fragment, {**self._offered.get(fragment, {}), number: offered}, action.snapshots)

    def _keep_offered(
        self, fragment: FragmentId, all_of_it: dict[int, OfferedFragment], needed: tuple[int, ...]
    ) -> None:
        with self._lock:
            self._offered[fragment] = {number: all_of_it[number] for number in needed}

    def cut(self, position: Position) -> Cut:
        """Copy what this process offers of the state to the host, before the next step changes it."""
        began = monotonic()
        pieces = None if self._plan.rank is None else [name for names in self.held.offered for name in names]
        snapshot = HostCopy({}) if pieces == [] else self.trainer.export_state(pieces)
        cursor = self.trainer.cursor()
        return Cut(snapshot, position, cursor, held_seconds=monotonic() - began, parts=self._parts_of(pieces or ()))

    def _parts_of(self, pieces: Sequence[str]) -> dict[str, Bounds]:
        """Return, for each exported array, the bounds of the part that this process holds."""
        if self.held.is_whole:
            return {}
        held = cast(SpreadTrainer, self.trainer).held_state(pieces)
        return {name: own.bounds for name, own in held.items()}

    def state(self, request: StateRequest, at: ExportState) -> State:
        """Return all of the fragments' state that is here, or with ``request.cut`` the part that this process gives."""
        fragments = range(len(self._plan.fragments)) if request.fragments is None else request.fragments
        if not request.cut or self.held.is_whole:
            pieces = None if request.fragments is None else [n for p in fragments for n in self._plan.fragments[p]]
            return State(self.trainer.export_state(pieces), at.versions, at.step, cut=request.cut)
        pieces = [name for p in fragments for name in self.held.offered[p]]
        return State(self.trainer.export_state(pieces), at.versions, at.step, self.held.gives(fragments), request.cut)


def _arrays_of(base: Base) -> Arrays:
    if isinstance(base, Mapping):
        return dict(base)
    base.merge()
    return base.arrays()
