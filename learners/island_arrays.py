"""The arrays of one process of an island: its trainer's, what it has offered, what was published, and what plans do to them.

Responsible for carrying out a ``BoundaryPlan``: loading versions by their modes, taking snapshots, keeping those that are
needed. A plan names arrays by fragment, version and number of offer only, so one process of an island can decide and each,
which holds other pieces of the same tensors, carries out the same plan (``learners.group``).

Refuses to decide anything (``orchestrator.replica.replica``), to report, and to know whether there are other processes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import assert_never, cast

import numpy as np

from learners.adoption import mixed, update
from learners.checkpointing import Cut, Restored
from learners.contract import Arrays, Snapshot, SpreadTrainer, Trainer
from learners.exports import require_numbers
from learners.host_copy import HostCopy
from learners.offered import OfferedFragment, PublishedVersion
from learners.published import PublishedFragments
from learners.state_fetch import FetchedState, Fragments
from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.parameters.codec.registry import EXACT, CodecName
from orchestrator.parameters.parts import Bounds, index_of, whole
from orchestrator.parameters.pieces import piece_named
from orchestrator.replica.replica import Action, AdoptVersion, ExportState, OfferFragment, Position, overtaken
from orchestrator.replica.work import AdoptionRule, LoadMode, Mix, Rebase, Replace


@dataclass(frozen=True, slots=True)
class ArraysPlan:
    """``fragments[p]`` names the pieces of fragment p; ``mix_alpha`` α weighs one's own. Offers travel in ``codec``.

    ``rank`` is this process's in an island of many hosts, of which each has what its trainer says; None: it is alone.
    """

    fragments: tuple[tuple[str, ...], ...]
    adoption: AdoptionRule = "replace"
    mix_alpha: float = 0.5
    codec: CodecName = EXACT
    rank: int | None = None


class HeldPieces:
    """What of the pieces this process has, and which of that it offers: of what several have, the first of them does."""

    def __init__(self, trainer: Trainer, plan: ArraysPlan) -> None:
        self.parts: dict[str, Bounds] = {}
        """Of the pieces of which this process has a part."""
        self.fragments = self.offered = plan.fragments
        if plan.rank is None:
            return
        spread = cast(SpreadTrainer, trainer)
        held = {name: spread.held(name) for names in plan.fragments for name in names}
        shapes = trainer.tensor_shapes()
        for name, own in held.items():
            piece = piece_named(name)
            if own.bounds != whole(piece.shape(shapes[piece.tensor])):
                self.parts[name] = own.bounds
        there = {name for name, own in held.items() if all(start < stop for start, stop in own.bounds)}
        self.fragments = tuple(tuple(name for name in names if name in there) for names in plan.fragments)
        mine = {name for name in there if held[name].processes[0] == plan.rank}
        self.offered = tuple(tuple(name for name in names if name in mine) for names in plan.fragments)

    def of(self, fragment: FragmentId, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """This process's part of a fragment that came whole."""
        return {
            name: arrays[name][index_of(self.parts[name])] if name in self.parts else arrays[name]
            for name in self.fragments[fragment]
        }


Base = OfferedFragment | Mapping[str, np.ndarray]
"""θ_since: an offer as it was decoded, or what was last adopted."""

State = tuple[Snapshot, tuple[Version, ...], int]
"""What a peer gets: arrays, the versions of all fragments, and the logical step."""


@dataclass(slots=True)
class Arrival:
    """A published value. ``update`` is what it adds to own work since ``base``, if that was worked out already."""

    published: Arrays
    base: Base | None = None
    update: Arrays | None = None


class IslandArrays:
    """``lock`` guards what is named here against other threads, for moments only; its owner may hold it."""

    def __init__(self, trainer: Trainer, plan: ArraysPlan, lock: threading.Condition) -> None:
        self.trainer, self._plan, self._lock = trainer, plan, lock
        self.published = PublishedFragments(len(plan.fragments))
        self._held = HeldPieces(trainer, plan)
        self._arrived: dict[FragmentId, dict[Version, Arrival]] = {}
        self._from_peers: dict[FragmentId, Mapping[str, np.ndarray]] = {}
        """What peers gave, of the fragments of which no version was adopted since."""
        self._offered: dict[FragmentId, dict[int, OfferedFragment]] = {}
        self._adopted: dict[FragmentId, PublishedVersion] = {}
        """Θ as the island stands on it, of the fragments whose values it has."""
        self._residues: dict[FragmentId, Arrays] = {}
        """What coding lost of the work in Θ, where that is not in θ by itself (``replica.work``)."""

    # ── a state to begin from ─────────────────────────────────────────────────────────────────────────────────────

    def load(self, arrays: Mapping[str, np.ndarray], versions: Sequence[Version], cursor: int) -> None:
        """Begin from the synchroniser's parameters, with a fresh inner optimizer."""
        self.trainer.load(arrays)
        self.trainer.seek(cursor)
        self._stand_on([{name: arrays[name] for name in names} for names in self._plan.fragments], versions)

    @property
    def is_whole(self) -> bool:
        """Whether this process has all of the model."""
        return not self._held.parts

    def load_peer(self, state: FetchedState, cursor: int) -> None:
        """Begin from what peers gave. Their uncontributed work is not ours to keep."""
        self.trainer.import_state(state.arrays)
        self.trainer.seek(cursor)
        if self.rebases:
            own = enumerate(self._held.fragments)
            self._from_peers = {FragmentId(p): self.trainer.snapshot(names).arrays() for p, names in own}
        for p, version in enumerate(state.versions):
            if (published := self.published.at(FragmentId(p), version)) is not None:
                own_part = self._held.of(FragmentId(p), published.arrays)
                self._adopted[FragmentId(p)] = PublishedVersion(version, own_part)

    def load_saved(self, saved: Restored, cursor: int) -> None:
        """Begin where the checkpoint cut this island. Work that Θ has moved past is overwritten, the rest goes on."""
        require_numbers(saved.arrays)
        self.trainer.import_state(saved.arrays)
        self.trainer.seek(cursor)
        outer = [{name: saved.outer[p][name] for name in own} for p, own in enumerate(self._plan.fragments)]
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
        """Begin from what a standby holds, on these versions, with an island's data."""
        for adoption in adoptions:
            self.adopt(adoption, arrived[adoption.report.fragment])
        self.trainer.take_shard(shard_index)
        self.trainer.seek(cursor)

    def _stand_on(self, outer: Sequence[Mapping[str, np.ndarray]], versions: Sequence[Version]) -> None:
        """The island stands on Θ, fragment by fragment."""
        for p, (arrays, version) in enumerate(zip(outer, versions, strict=True)):
            fragment = FragmentId(p)
            self.published.hold(fragment, version, arrays)
            self._adopted[fragment] = PublishedVersion(version, self._held.of(fragment, arrays))

    @property
    def rebases(self) -> bool:
        return self._plan.adoption == "rebase"

    # ── publications and offers ───────────────────────────────────────────────────────────────────────────────────

    def arrive(self, fragment: FragmentId, version: Version, arrays: Arrays, mode: LoadMode | None) -> None:
        """Keep a published value until the plan of a boundary adopts it, or a later one.

        ``mode`` is by what it would be loaded now: what can be worked out for that is, so that the loop's thread need not;
        at the boundary it is looked whether the base is still this one.
        """
        own = self._held.of(fragment, arrays)
        with self._lock:
            base = self._base(fragment, mode.since) if isinstance(mode, Rebase) else None
        arrival = Arrival(own, base)
        if base is not None:
            arrival.update = update(own, _arrays_of(base))
        with self._lock:
            self._arrived.setdefault(fragment, {})[version] = arrival

    def forget_older(self, fragment: FragmentId) -> None:
        """Keep only the newest of what has arrived of the fragment: no other will be adopted."""
        with self._lock:
            if arrivals := self._arrived.get(fragment):
                newest = max(arrivals)
                self._arrived[fragment] = {newest: arrivals[newest]}

    def ready_version(self, fragment: FragmentId) -> int:
        """The newest version that lies ready, or was adopted; −1 for none. One that is still read does not yet."""
        with self._lock:
            adopted = self._adopted.get(fragment)
            return max([-1 if adopted is None else adopted.version, *self._arrived.get(fragment, {})])

    def take_arrived(self, actions: Iterable[Action]) -> dict[FragmentId, Arrival]:
        """What these actions adopt, which is given out once; earlier versions of that are forgotten."""
        taken: dict[FragmentId, Arrival] = {}
        with self._lock:
            for action in actions:
                if isinstance(action, AdoptVersion):
                    fragment, version = action.report.fragment, action.report.version
                    arrivals = self._arrived.pop(fragment)
                    taken[fragment] = arrivals[version]
                    self._arrived[fragment] = {v: arrivals[v] for v in arrivals if v > version}
        return taken

    def likely_mode(self, fragment: FragmentId, merged_offer: int) -> LoadMode | None:
        """By what a version with the island's offers up to ``merged_offer`` is likely loaded, as far as arrays tell."""
        with self._lock:
            if not self.rebases or not self._adopted:
                return None
            return Rebase(merged_offer if merged_offer in self._offered.get(fragment, {}) else None)

    def _base(self, fragment: FragmentId, since: int | None) -> Base | None:
        if since is not None:
            return self._offered.get(fragment, {}).get(since)
        adopted = self._adopted.get(fragment)
        return self._from_peers.get(fragment, None if adopted is None else adopted.arrays)

    def offered(self, fragment: FragmentId, offer: int) -> OfferedFragment | None:
        """Under the lock: the offer, if its snapshot is kept still."""
        return self._offered.get(fragment, {}).get(offer)

    # ── what a boundary asks for ──────────────────────────────────────────────────────────────────────────────────

    def adopt(self, action: AdoptVersion, arrival: Arrival) -> None:
        """Load the version that has arrived over the fragment."""
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
        """Θ + e. The residue of the last adoption stays until that of a later offer takes its place."""
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
        snapshot = self.trainer.snapshot(self._held.fragments[fragment])
        own = {name: self._held.parts.get(name) for name in self._held.offered[fragment]}
        offered = OfferedFragment(snapshot, base, self._plan.codec, owned=own, residue_wanted=not self.rebases)
        self._keep_offered(fragment, {**self._offered.get(fragment, {}), number: offered}, action.snapshots)

    def _keep_offered(
        self, fragment: FragmentId, all_of_it: dict[int, OfferedFragment], needed: tuple[int, ...]
    ) -> None:
        with self._lock:
            self._offered[fragment] = {number: all_of_it[number] for number in needed}

    def cut(self, position: Position) -> Cut:
        """What this process offers of the state. It has left the devices when this returns: the next step changes all."""
        began = monotonic()
        pieces = None if self._plan.rank is None else [name for names in self._held.offered for name in names]
        snapshot = HostCopy({}) if pieces == [] else self.trainer.export_state(pieces)
        cursor = self.trainer.cursor()
        return Cut(snapshot, position, cursor, held_seconds=monotonic() - began, parts=self._parts_of(pieces or ()))

    def _parts_of(self, pieces: Sequence[str]) -> dict[str, Bounds]:
        """Of what is exported of these pieces: the bounds of what this process has of it."""
        if self.is_whole:
            return {}
        held = cast(SpreadTrainer, self.trainer).held_state(pieces)
        return {name: own.bounds for name, own in held.items()}

    def state(self, fragments: Fragments, at: ExportState) -> State:
        pieces = None if fragments is None else [name for p in fragments for name in self._plan.fragments[p]]
        return self.trainer.export_state(pieces), at.versions, at.step


def _arrays_of(base: Base) -> Arrays:
    if isinstance(base, Mapping):
        return dict(base)
    base.merge()
    return base.arrays()
