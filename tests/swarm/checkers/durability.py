"""The checker of durability: a published version is not lost, never changes, and is the merge that it should be.

    the process dies          nothing is lost that was told, with any durability
    power is lost, sync       nothing is lost that was told
    power is lost, async      at most ``merges_max`` merges that were told are lost, and then the job ends and says so
    a disk that refuses       costs nothing

Θ, μ and residues are worked out anew, from the contributions named on the tape, by a state that never dies: they are the
same bits.
Refuses to know: files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.saving import BeginCheckpoint, FragmentRestored, FromJournal
from orchestrator.core.vocabulary import Contribution, FragmentId, PayloadId, Version
from orchestrator.parameters.outer_state import FragmentState, OuterState, OuterStep
from orchestrator.parameters.wire_format import EncodedTensors
from tests.swarm.checkers.violation import require

Arrays = Mapping[str, NDArray[np.float32]]
DisplacementOf = Callable[[Contribution], EncodedTensors]
Merged = tuple[FragmentId, tuple[str, ...], tuple[tuple[PayloadId, float], ...], float]


class DurabilityChecker:
    """Outlives the synchroniser. ``displacement_of`` says what a contribution holds."""

    def __init__(self, first: Sequence[FragmentState], outer_step: OuterStep, displacement_of: DisplacementOf):
        self.first = tuple(first)
        self.outer_step, self._displacement_of = outer_step, displacement_of
        self._published: dict[tuple[FragmentId, Version], str] = {}
        self._merged_states: dict[Merged, FragmentState] = {}

    def published(self, fragment: FragmentId, state: FragmentState) -> None:
        """Islands hear of this state."""
        before = self._published.setdefault((fragment, state.version), state.digest)
        require(before == state.digest, "a published version is one and the same for ever", (fragment, state.version))

    def forget_after(self, versions: Mapping[FragmentId, Version]) -> None:
        """Versions after these are lost with a machine and its disk: others may take their numbers."""
        self._published = {key: digest for key, digest in self._published.items() if key[1] <= versions[key[0]]}

    def newest_published(self, fragment: FragmentId) -> Version:
        return max((version for p, version in self._published if p == fragment), default=Version(0))

    def recovered(self, outer: OuterState) -> None:
        """A synchroniser goes on from this Θ, merges that only the journal knows included."""
        for p in range(len(self.first)):
            fragment = FragmentId(p)
            here, published = outer.version(fragment), self.newest_published(fragment)
            require(here >= published, "no published merge is lost", (fragment, here, published))
            digest = self._published.get((fragment, here), outer.state(fragment).digest)
            same = digest == outer.state(fragment).digest
            require(same, "a published version is one and the same for ever", (fragment, here))

    def gave_up(self, newest_journalled: Callable[[FragmentId], Version | None], merges_max: int) -> None:
        """A synchroniser does not go on, for merges that islands were told of are gone with the power."""
        gone = [
            max(0, self.newest_published(p) - (newest_journalled(p) or Version(0)))
            for p in map(FragmentId, range(len(self.first)))
        ]
        require(sum(gone) <= merges_max, "a loss of power takes no more merges than async allows", (gone, merges_max))

    def after(
        self,
        before: FragmentState,
        older: tuple[FragmentState, ...],
        order: f.MergeFragment,
        contributions: Mapping[PayloadId, Contribution],
    ) -> FragmentState:
        """What an undisturbed merge of these contributions gives. ``older`` are the states that some may count from."""
        digests = tuple(state.digest for state in (*older, before))
        merged = (
            order.fragment,
            digests,
            tuple((item.payload, item.weight) for item in order.inputs),
            order.outer_lr_ratio,
        )
        if merged not in self._merged_states:
            p = order.fragment
            alone = OuterState.restored({p: before}, self.outer_step, {p: older})
            held = ((self._displacement_of(contributions[item.payload]), item.weight) for item in order.inputs)
            inputs = [(alone.from_current(p, displacement), weight) for displacement, weight in held]
            alone.merge(p, order.version, inputs, order.outer_lr_ratio)
            self._merged_states[merged] = alone.state(p)
        return self._merged_states[merged]


class Theta:
    """A fold over one life's tape, from its beginning: what Θ and μ must be."""

    def __init__(self, durability: DurabilityChecker) -> None:
        self._durability = durability
        self._states = list(durability.first)
        self._orders: dict[FragmentId, f.MergeFragment] = {}
        self._history = [[state] for state in self._states]
        self._older: list[tuple[FragmentState, ...]] = [() for _ in self._states]
        self._contributions: dict[PayloadId, Contribution] = {}
        self._cuts: dict[int, tuple[Version, ...]] = {}
        self._oldest = [Version(0) for _ in self._states]
        """The versions before these are in no shard any more, so that displacements from them count as from the newest."""

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if isinstance(event, e.ContributionArrived):
            self._contributions[event.contribution.payload] = event.contribution
        elif isinstance(event, e.MergeCompleted) and effects:
            before, order = self._states[event.fragment], self._orders[event.fragment]
            require(event.base_digest == before.digest, "digests chain", (event, before.digest))
            older = tuple(s for s in self._older[event.fragment] if s.version >= self._oldest[event.fragment])
            after = self._states[event.fragment] = self._durability.after(before, older, order, self._contributions)
            same = (event.version, event.digest) == (after.version, after.digest)
            require(same, "Θ is that of an uninterrupted run fed the same contributions", (event, after.digest))
            self._history[event.fragment].append(after)
            staleness_max = self._durability.outer_step.staleness_max
            self._older[event.fragment] = (*older, before)[-staleness_max:] if staleness_max else ()
        elif isinstance(event, FragmentRestored) and effects:
            self._restored(event)
        for effect in effects:
            if isinstance(effect, f.MergeFragment):
                self._orders[effect.fragment] = effect
            elif isinstance(effect, BeginCheckpoint):
                self._cuts[effect.checkpoint] = effect.versions

    def _restored(self, event: FragmentRestored) -> None:
        """What the fragment was at the cut, as its next version."""
        before, number = self._states[event.fragment], event.checkpoint
        one_back = Version(before.version - 1)
        cut = one_back if isinstance(number, FromJournal) else self._cuts[number][event.fragment]
        then = self._history[event.fragment][cut]
        chains = event.base_digest in (before.digest, "") and event.version == before.version + 1
        require(chains, "digests chain, and versions rise by one, also on the way back", (event, before.digest))
        require(event.digest == then.digest, "what is restored is what the checkpoint has", (event, then.digest))
        after = replace(then, version=event.version)
        self._states[event.fragment] = after
        self._history[event.fragment].append(after)
        self._older[event.fragment] = ()

    def forget_older(self, fragment: FragmentId, version: Version) -> None:
        """A shard goes on with this version and has none before it."""
        self._oldest[fragment] = version

    def continue_with(self, fragment: FragmentId, state: FragmentState) -> None:
        """A shard goes on with these bytes of a version, and perhaps another momentum."""
        then = self._history[fragment][state.version]
        require(then.digest == state.digest, "a lost shard goes on with bytes that were published", (fragment, state))
        self._history[fragment][state.version] = state
        if self._states[fragment].version == state.version:
            self._states[fragment] = state
        self.forget_older(fragment, state.version)

    def compare(self, outer: OuterState) -> None:
        """Θ, μ and what updates lost, as the synchroniser has them."""
        for p in range(len(self._states)):
            self.compare_fragment(FragmentId(p), outer.state(FragmentId(p)))

    def compare_fragment(self, fragment: FragmentId, here: FragmentState) -> None:
        """One fragment, as a shard has it."""
        expected = self._states[fragment]
        pairs = zip(here.arrays(), expected.arrays(), strict=True)
        same = here.version == expected.version and all(_same(mine, its) for mine, its in pairs)
        require(same, "Θ, μ and residues are those of an uninterrupted run, bit for bit", (fragment, here, expected))


def _same(these: Arrays, those: Arrays) -> bool:
    return list(these) == list(those) and all(np.array_equal(these[name], those[name]) for name in these)
