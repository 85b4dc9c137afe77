"""The calls that a job's evaluator answers, which ``learners.evaluator.Evaluator`` implements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.core.vocabulary import Epoch, SourceLoss
from orchestrator.parameters.pieces import Roles, Shape
from orchestrator.parameters.tensors import Tensors
from orchestrator.system.logbook import Logbook

if TYPE_CHECKING:
    from orchestrator.channel.endpoint import Carried, Membership


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """The shapes of a model's tensors, and their roles where the names do not say them."""

    shapes: Mapping[str, Shape]
    roles: Roles

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


Measured = tuple[float, int, float, float | None, tuple[SourceLoss, ...]]
"""Loss in nats per token, of how many sequences, the seconds taken, bits per byte, and by source."""


class EvaluatorInterface(Protocol):
    def outline(self) -> ModelOutline: ...

    def initial_pieces(self, names: Sequence[str], /) -> Tensors: ...

    def join_channel(self, epoch: Epoch, membership: Membership, /) -> None: ...

    def evaluate(self, epoch: Epoch, limit_s: float | None, /, *payloads: Carried) -> Measured: ...

    def unigram_loss(self) -> float: ...


EvaluatorFactory = Callable[[dict[str, Any], Mapping[str, str], Logbook, int], EvaluatorInterface]
"""How an evaluator's actor is made: the job's specification, its environment, its logbook, and its niceness."""
