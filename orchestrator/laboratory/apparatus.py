"""What trains in the laboratory: a trainer for every island, and Θ, all in this process.

Responsible for building them from a job specification as the live service does, so that a merge gives the same bits here
and there. Refuses to know who trains when, and what is merged: ``multiplex`` asks the core, ``tape_training`` a tape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from learners.contract import Arrays, Trainer
from orchestrator.config import JobSpec
from orchestrator.core.vocabulary import FragmentId
from orchestrator.parameters import fragment_map, outer_optimizer, tensors, wire_format
from orchestrator.parameters.outer_state import OuterState
from orchestrator.roots import EVERYTHING

MakeTrainer = Callable[[dict[str, Any], int, int], Trainer]
"""``create`` of a module of trainers: specification as plain data, shard, number of shards."""


class Apparatus:
    """``trainers[m]`` trains shard m; ``fragments[p]`` names fragment p's tensors; ``outer`` is Θ at version 0."""

    def __init__(self, spec: JobSpec, make_trainer: MakeTrainer) -> None:
        plain, sync = spec.model_dump(mode="json") | {"roots": EVERYTHING}, spec.synchroniser
        count = spec.island_count
        self.trainers: Sequence[Trainer] = [make_trainer(plain, index, count) for index in range(count)]
        shapes = self.trainers[0].tensor_shapes()
        self.fragments = fragment_map.build({n: math.prod(shape) for n, shape in shapes.items()}, sync.fragments)
        optimizer = outer_optimizer.create(
            sync.outer_optimizer.kind, sync.outer_optimizer.lr, sync.outer_optimizer.momentum
        )
        self.outer = OuterState(self.trainers[0].initial_parameters(), self.fragments, sync.averaging, optimizer)
        self._wire = sync.wire

    def sent(self, arrays: Arrays) -> Arrays:
        """A contribution as it is after the wire, which may round."""
        return wire_format.decode(wire_format.encode(arrays, self._wire))

    def snapshot(self, island: int, fragment: FragmentId) -> Arrays:
        """What the island has of the fragment now."""
        return self.trainers[island].snapshot(self.fragments[fragment]).arrays()

    def evaluate(self) -> float:
        """Θ's mean loss on the held-out split, in nats per token."""
        return self.trainers[0].evaluate(self.outer.parameters())

    def digest(self) -> str:
        """Names Θ bit for bit."""
        return tensors.digest(self.outer.parameters())
