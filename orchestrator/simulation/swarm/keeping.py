"""Merges of small real tensors into a real journal, on a simulated disk. As ``runtime.workshop`` does live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from orchestrator.config import JobSpec, parse_job
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.saving import FragmentRestored, RestoreFragments
from orchestrator.core.vocabulary import FragmentId, IslandId, PayloadId, Version
from orchestrator.errors import InternalError
from orchestrator.journal.entry import Facts
from orchestrator.journal.keeper import Keeper
from orchestrator.journal.storage import Journal
from orchestrator.merge import outer_optimizer
from orchestrator.merge.outer_optimizer import OuterOptimizer
from orchestrator.merge.outer_state import FragmentState, OuterState
from orchestrator.runtime.patience import Patience
from orchestrator.simulation.workshop import Workshop

if TYPE_CHECKING:
    from orchestrator.simulation.swarm.mortal_world import MortalWorld

SIZE = 3
"""Numbers in a fragment: the fewest in which an average, a radius and an order show."""


class MortalWorkshop(Workshop):
    """Merges that are under way die with the process; ``keeper`` is None until there is Θ."""

    def __init__(self, world: MortalWorld) -> None:
        super().__init__(world)
        self._mortal = world
        self.keeper: Keeper | None = None
        self.gone: set[PayloadId] = set()
        self.under_way: dict[FragmentId, Version] = {}
        self.made: dict[tuple[FragmentId, Version], tuple[FragmentState, int]] = {}
        """Every version of this life, with its step."""

    def seed(self, outer: OuterState, journal: Journal) -> None:
        world = self._mortal
        keeper = Keeper(outer, journal, insist, clock=_no_time)
        for p in map(FragmentId, range(world.policy.fragment_count)):
            keeper.begin(p, world.epoch)
            self.made[p, outer.version(p)] = (outer.state(p), 0)
        self.keeper = keeper
        world.tell(e.OuterStateSeeded(world.now, SIZE * world.policy.fragment_count, "0" * 32))

    def remember(self, outer: OuterState, merges: Sequence[Facts], journal: Journal) -> None:
        """Go on from Θ as the journal has it; the bytes of what was held are ``gone``."""
        self.keeper = Keeper(outer, journal, insist, clock=_no_time)
        self.outer = [(facts.version, facts.step) for facts in merges]
        for facts in merges:
            p = FragmentId(facts.fragment)
            self.made[p, facts.version] = (outer.state(p), facts.step)

    def merge(self, effect: f.MergeFragment) -> None:
        world = self._mortal
        self.check_held(effect)
        if lost := [item.payload for item in effect.inputs if item.payload in self.gone]:
            raise InternalError(detail=f"Fragment {effect.fragment} is to merge {lost}, which died.")
        self.under_way[effect.fragment] = effect.version
        took, fails = world.draw(world.plan.merge_s), world.chance(world.plan.merge_failure)
        world.while_alive(took, lambda: self._complete(effect, fails))

    def _complete(self, effect: f.MergeFragment, fails: bool) -> None:
        world = self._mortal
        if world.finished is not None:
            return
        del self.under_way[effect.fragment]
        if fails:
            merged = tuple(item.payload for item in effect.inputs)
            world.tell(e.MergeFailed(world.now, effect.fragment, effect.version, merged, "a value is not finite"))
            return
        assert self.keeper is not None
        inputs = [(bytes_of(effect.fragment, item.payload), item.weight) for item in effect.inputs]
        facts = self.keeper.merge(effect, inputs).facts
        self._stands(effect.fragment, effect.version, effect.step)
        world.tell(e.MergeCompleted(world.now, effect.fragment, effect.version, facts.digest, 0.0, facts.base_digest))

    def restore(self, order: RestoreFragments, states: Sequence[FragmentState]) -> None:
        """One after the other, in the order of the fragments."""
        world, left = self._mortal, list(order.fragments)

        def next_one() -> None:
            fragment, version, step = left.pop(0)
            assert self.keeper is not None
            facts = self.keeper.restore(fragment, version, step, order.epoch, states[fragment]).facts
            self._stands(fragment, version, step)
            told = (fragment, version, order.checkpoint, facts.digest, facts.base_digest)
            if left:
                world.while_alive(world.draw(world.plan.merge_s), next_one)
            world.tell(FragmentRestored(world.now, *told))

        world.while_alive(world.draw(world.plan.merge_s), next_one)

    def _stands(self, fragment: FragmentId, version: Version, step: int) -> None:
        assert self.keeper is not None
        self.outer[fragment] = (version, step)
        self.made[fragment, version] = (self.keeper.outer.state(fragment), step)


def insist(what: str, work: Callable[[], None]) -> None:
    """A disk that refuses is asked again at once: its refusals are counted, not timed."""
    Patience(retry_s=0.0).insist(what, work)


def _no_time() -> float:
    """What is measured would be the real machine's, and is in the journal: a seed would name another world each time."""
    return 0.0


def first_outer_state(fragment_count: int) -> OuterState:
    """Θ at version 0, the same whenever it is made."""
    names = [f"fragment-{p}" for p in range(fragment_count)]
    parameters = {name: _numbers(name) for name in names}
    knobs = job_spec(0).synchroniser
    return OuterState(parameters, tuple((name,) for name in names), knobs.averaging, optimizer())


def bytes_of(fragment: FragmentId, payload: PayloadId) -> Mapping[str, NDArray[np.float32]]:
    """What an island trained, as good as any."""
    return {f"fragment-{fragment}": _numbers(str(payload))}


def _numbers(name: str) -> NDArray[np.float32]:
    drawn = np.frombuffer(blake2b(name.encode(), digest_size=4 * SIZE).digest(), np.uint32)
    return (drawn / np.float64(2**32)).astype(np.float32)


def job_spec(
    merges_max: int, islands: Sequence[IslandId] = (IslandId("anywhere"),), folder: str = "/checkpoints"
) -> JobSpec:
    """What the job's files ask of a specification: durability, averaging, the outer optimizer; islands, and where its
    checkpoints are."""
    durability = {"kind": "async", "merges_max": merges_max} if merges_max else {"kind": "sync"}
    return parse_job(
        {
            "islands": [{"node_group": "anywhere", "name": name} for name in islands],
            "budget": {"steps": 1},
            "synchroniser": {"durability": durability},
            "checkpoints": {"folder": folder},
        }
    )


def optimizer() -> OuterOptimizer:
    knobs = job_spec(0).synchroniser.outer_optimizer
    return outer_optimizer.create(knobs.kind, knobs.lr, knobs.momentum)
