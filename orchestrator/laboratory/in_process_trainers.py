"""The trainers of all islands, and Θ, in one process.

They are built from a job specification as in the live service, so that a merge gives the same bits. ``multiplex`` (with the
core) or ``tape_training`` (with a tape) decides who trains when and what is merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from learners.contract import Arrays, Trainer
from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import FIRST_EPOCH, FragmentId, PayloadId
from orchestrator.errors import DataError
from orchestrator.parameters import fragment_map, tensors
from orchestrator.parameters.journal import Content, Facts
from orchestrator.parameters.outer_state import OuterState, OuterStep
from orchestrator.parameters.shard import ParameterShard, Unusable
from orchestrator.specification.config import JobSpec
from orchestrator.system.roots import EVERYTHING

MakeTrainer = Callable[[dict[str, Any], int, int], Trainer]
"""The ``create`` function of a trainer module. Arguments: specification as plain data, shard, number of shards."""


class InProcessTrainers:
    """``trainers[m]`` trains on data shard m, ``fragments[p]`` are fragment p's tensors, and ``shard`` merges.

    ``outer`` is Θ, at version 0 at first. Nothing is journalled: an interrupted run starts again.
    """

    def __init__(self, spec: JobSpec, make_trainer: MakeTrainer) -> None:
        sync, count = spec.synchroniser, spec.island_count
        self.trainers: Sequence[Trainer] = [
            make_trainer(spec.island_document(section) | {"roots": EVERYTHING}, index, count)
            for index, section in enumerate(spec.island_sections().values())
        ]
        shapes, roles = self.trainers[0].tensor_shapes(), self.trainers[0].roles()
        self.fragments = fragment_map.build(shapes, sync.fragments, roles)
        initial = fragment_map.pieces_of(self.trainers[0].initial_parameters(), self.fragments)
        self.outer = OuterState(initial, self.fragments, OuterStep.of(sync), roles)
        self.codec = sync.wire.up
        self.shard = ParameterShard(_Unjournalled(), FIRST_EPOCH, lambda _, work: work())
        self.shard.seed(self.outer, {})

    def receive(self, payload: PayloadId, fragment: FragmentId, content: memoryview) -> None:
        """Receive a contribution. Raises DataError if it is unusable."""
        received = self.shard.receive(payload, fragment, content)
        if isinstance(received, Unusable):
            raise DataError(detail=f"The contribution {payload} is {received.reason}: {received.detail}")

    def merge(self, order: MergeFragment) -> str:
        """Take the outer step and return the digest of the new parameters."""
        return self.shard.merge(order).facts.digest

    def published(self, fragment: FragmentId) -> Arrays:
        """Return the fragment's newest version as islands receive it."""
        return self.outer.fragment(fragment)

    def whole_state(self) -> Arrays:
        """Return Θ as an island receives it from the synchroniser."""
        return self.outer.parameters()

    def snapshot(self, island: int, fragment: FragmentId) -> Arrays:
        """Return the island's current parameters of the fragment."""
        return self.trainers[island].snapshot(self.fragments[fragment]).arrays()

    def evaluate(self) -> float:
        """Return Θ's mean loss on the held-out split, in nats per token."""
        return self.trainers[0].evaluate(self.outer.parameters()).loss

    def digest(self) -> str:
        """Return a digest that identifies Θ bit for bit."""
        return tensors.digest(self.outer.parameters())


class _Unjournalled:
    def append(self, facts: Facts, content: Content) -> None:
        """Discard the entry."""
