"""The merge worker and evaluator of the simulated world, where Θ is a list of versions and steps without tensors.

They do what ``runtime.shard_worker`` and ``runtime.evaluation`` do live. A merge of payloads that are not held is a bug of
the core and raises at once. An evaluation that runs when the islands stop stepping speeds up, if the plan says by how much.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import JobPhase, JobPolicy, PayloadId, Version
from orchestrator.errors import InternalError
from orchestrator.simulation.island import Clock, Listener, Odds


class MergeWorld(Clock, Odds, Listener, Protocol):
    """The parts of the world that merging needs. ``held`` are the payloads whose bytes are present."""

    policy: JobPolicy
    core: Synchroniser
    held: set[PayloadId]


class MergeWorker:
    """Merges and evaluates. ``outer[p]`` is fragment p's version and the highest logical step in it."""

    def __init__(self, world: MergeWorld) -> None:
        self._world = world
        self._evaluating: int | None = None
        self._hurried = False
        self.outer = [(Version(0), 0)] * world.policy.fragment_count

    def merge(self, effect: f.MergeFragment) -> None:
        world = self._world
        self.check_held(effect)
        inputs = sorted((item.payload, item.weight) for item in effect.inputs)
        digest = blake2b(repr((effect.fragment, effect.version, inputs)).encode(), digest_size=8).hexdigest()
        took = world.draw(world.plan.merge_s)

        fails = world.chance(world.plan.merge_failure)

        def completed() -> None:
            if fails:
                merged = tuple(item.payload for item in effect.inputs)
                why = "a value is not finite"
                world.unless_over(e.MergeFailed(world.now, effect.fragment, effect.version, merged, why))
                return
            self.outer[effect.fragment] = (effect.version, effect.step)
            world.unless_over(e.MergeCompleted(world.now, effect.fragment, effect.version, digest, took))

        world.while_alive(took, completed)

    def check_held(self, effect: f.MergeFragment) -> None:
        """Raise InternalError unless all inputs of the merge are held."""
        missing = [item.payload for item in effect.inputs if item.payload not in self._world.held]
        if missing:
            raise InternalError(detail=f"Fragment {effect.fragment} is to merge {missing}, which are not held.")

    def evaluate(self, global_version: int) -> None:
        world = self._world
        self._evaluating = global_version
        alone = world.plan.evaluate_alone_s
        is_alone = alone is not None and world.core.state.phase is not JobPhase.RUNNING
        takes = world.draw(alone if alone is not None and is_alone else world.plan.evaluate_s)
        world.while_alive(takes, lambda: self._answer(global_version))

    def finish_evaluation_alone(self) -> None:
        """Speed up the running evaluation: the islands stop stepping and leave the machine to it."""
        alone = self._world.plan.evaluate_alone_s
        if self._hurried or alone is None or self._evaluating is None:
            return
        self._hurried, version = True, self._evaluating
        self._world.while_alive(self._world.draw(alone), lambda: self._answer(version))

    def _answer(self, global_version: int) -> None:
        if self._evaluating != global_version:
            return  # answered already
        self._evaluating = None
        count = self._world.policy.evaluation.sequences
        loss = held_out_loss(global_version)
        self._world.unless_over(e.EvaluationCompleted(self._world.now, global_version, loss, count))


def held_out_loss(global_version: int) -> float:
    """Return a made-up loss that falls from version to version."""
    return 1.4 + 4.0 / (1.0 + global_version / 40.0)
