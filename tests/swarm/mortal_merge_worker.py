"""The live parameter shard in the simulated world: small real tensors, merged into a real journal on a simulated disk.

It works like ``runtime.shard_worker``, except that merges take virtual time and die with their process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.saving import FragmentRestored, RestoreFragments
from orchestrator.core.vocabulary import Contribution, Epoch, FragmentId, IslandId, PayloadId, Version
from orchestrator.errors import InternalError
from orchestrator.host.retry import Result, Retrier
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import CODEC_NAMES, CodecName
from orchestrator.parameters.journal import Facts
from orchestrator.parameters.journaled_store import MergeLog
from orchestrator.parameters.outer_state import FragmentState, OuterState, OuterStep
from orchestrator.parameters.shard import Held, ParameterShard
from orchestrator.parameters.wire_format import EncodedTensors, encoded
from orchestrator.simulation.world import MergeWorker, MergeWorld
from orchestrator.specification.config import JobSpec, parse_job

SIZE = 3
"""Numbers in a fragment: the fewest that show an average, a radius and an order."""


class MortalMergeWorld(MergeWorld, Protocol):
    """The parts of the world that merging needs. ``epoch`` is the living synchroniser's, ``finished`` the end of the job."""

    epoch: Epoch
    finished: f.FinishJob | None
    up_codec: CodecName


class MortalMergeWorker(MergeWorker):
    """The merge worker of one life of the synchroniser. Merges in progress die with it."""

    def __init__(self, world: MortalMergeWorld) -> None:
        super().__init__(world)
        self._mortal = world
        self.shard: ParameterShard | None = None
        self.under_way: dict[FragmentId, f.MergeFragment] = {}
        self.completed: set[f.MergeFragment] = set()
        self.versions: dict[tuple[FragmentId, Version], tuple[FragmentState, int]] = {}
        """Every version of this life, with its step."""

    def seed(self, outer: OuterState, journal: MergeLog) -> None:
        world = self._mortal
        shard = ParameterShard(journal, world.epoch, retry_until_written, lambda: world.now)
        shard.seed(outer, {})
        for p, state_and_step in shard.states().items():
            self.versions[p, outer.version(p)] = state_and_step
        self.shard = shard
        world.tell(e.OuterStateSeeded(world.now, SIZE * world.policy.fragment_count, "0" * 32))

    def recover(self, outer: OuterState, merges: Sequence[Facts], journal: MergeLog) -> None:
        """Continue from Θ in the journal. Payloads that were held are gone."""
        world = self._mortal
        self.shard = ParameterShard(journal, world.epoch, retry_until_written, lambda: world.now)
        self.shard.recover(outer, merges)
        self.outer = [(facts.version, facts.step) for facts in merges]
        for facts in merges:
            p = FragmentId(facts.fragment)
            self.versions[p, facts.version] = (outer.state(p), facts.step)

    def receive(self, contribution: Contribution) -> None:
        """Receive a contribution, which the shard holds from now on."""
        fragment, payload = contribution.fragment, contribution.payload
        content = wire_format.written(displacement_of(contribution, self._mortal.up_codec))
        if self.shard is None or not isinstance(self.shard.receive(payload, fragment, content), Held):
            raise InternalError(detail=f"The payload {payload} cannot be held.")

    def release(self, payload: PayloadId) -> None:
        if self.shard is not None:
            self.shard.release(payload)

    def merge(self, effect: f.MergeFragment) -> None:
        world = self._mortal
        self.check_held(effect)
        self.under_way[effect.fragment] = effect
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
        assert self.shard is not None
        facts = self.shard.merge(effect).facts
        self.completed.add(effect)
        self._stands(effect.fragment, effect.version, effect.step)
        world.tell(e.MergeCompleted(world.now, effect.fragment, effect.version, facts.digest, 0.0, facts.base_digest))

    def restore(self, order: RestoreFragments, states: Sequence[FragmentState]) -> None:
        """Restore the fragments one after the other, in their order."""
        world, left = self._mortal, list(order.fragments)

        def next_one() -> None:
            fragment, version, step = left.pop(0)
            assert self.shard is not None
            facts = self.shard.restore(fragment, version, step, states[fragment]).facts
            self._stands(fragment, version, step)
            fields = (fragment, version, order.checkpoint, facts.digest, facts.base_digest)
            if left:
                world.while_alive(world.draw(world.plan.merge_s), next_one)
            world.tell(FragmentRestored(world.now, *fields))

        world.while_alive(world.draw(world.plan.merge_s), next_one)

    def _stands(self, fragment: FragmentId, version: Version, step: int) -> None:
        assert self.shard is not None
        self.outer[fragment] = (version, step)
        self.versions[fragment, version] = (self.shard.state(fragment), step)


def retry_until_written(what: str, work: Callable[[], Result]) -> Result:
    """Retry at once when the disk refuses: refusals are counted, not timed."""
    return Retrier(retry_s=0.0).until_done(what, work)


def first_outer_state(fragment_count: int, outer_step: OuterStep) -> OuterState:
    """Return Θ at version 0, always the same."""
    names = [f"fragment-{p}" for p in range(fragment_count)]
    parameters = {name: _numbers(name) for name in names}
    return OuterState(parameters, tuple((name,) for name in names), outer_step)


def displacement_of(contribution: Contribution, codec_name: CodecName) -> EncodedTensors:
    """Return a made-up displacement of an island."""
    numbers = {f"fragment-{contribution.fragment}": _numbers(str(contribution.payload))}
    return encoded(numbers, codec_name, contribution.base_version)


@lru_cache(maxsize=4096)
def _numbers(name: str) -> NDArray[np.float32]:
    """Return numbers that the name determines, read-only because they are shared."""
    drawn = np.frombuffer(blake2b(name.encode(), digest_size=4 * SIZE).digest(), np.uint32)
    numbers = (drawn / np.float64(2**32)).astype(np.float32)
    numbers.setflags(write=False)
    return numbers


def job_spec(
    merges_max: int,
    staleness_max: int,
    seed: int,
    islands: Sequence[IslandId] = (IslandId("anywhere"),),
    folder: str = "/checkpoints",
) -> JobSpec:
    """Return the specification that the job's files need: durability, outer step, codecs by the seed, islands, and the
    folder of checkpoints.
    """
    durability = {"kind": "async", "merges_max": merges_max} if merges_max else {"kind": "sync"}
    count = len(CODEC_NAMES)
    wire = {"up": CODEC_NAMES[seed % count], "down": CODEC_NAMES[seed // count % count]}
    return parse_job(
        {
            "islands": [{"node_group": "anywhere", "name": name} for name in islands],
            "budget": {"steps": 1},
            "synchroniser": {
                "durability": durability,
                "staleness_max": staleness_max,
                "adoption": "replace" if staleness_max else "rebase",
                "wire": wire,
            },
            "checkpoints": {"folder": folder},
        }
    )
