"""The calls that a job's evaluator answers, which ``learners.evaluator.Evaluator`` implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.core.vocabulary import Epoch, SourceLoss
from orchestrator.logbook import Logbook
from orchestrator.parameters.roles import Roles
from orchestrator.parameters.tensors import Tensors

if TYPE_CHECKING:
    from orchestrator.channel.endpoint import Carried, Membership


@dataclass(frozen=True, slots=True)
class InitialModel:
    """The model before its first step: whole tensors, and their roles where the names do not say them."""

    parameters: Tensors
    roles: Roles


Measured = tuple[float, int, float, float | None, tuple[SourceLoss, ...]]
"""Loss in nats per token, of how many sequences, the seconds taken, bits per byte, and by source."""


class EvaluatorInterface(Protocol):
    def initial_model(self) -> InitialModel: ...

    def join_channel(self, epoch: Epoch, membership: Membership, /) -> None: ...

    def evaluate(self, epoch: Epoch, limit_s: float | None, /, *payloads: Carried) -> Measured: ...

    def unigram_loss(self) -> float: ...


EvaluatorFactory = Callable[[dict[str, Any], Mapping[str, str], Logbook, int], EvaluatorInterface]
"""How an evaluator's actor is made: the job's specification, its environment, its logbook, and its niceness."""
