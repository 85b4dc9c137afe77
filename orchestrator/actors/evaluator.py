"""The calls that a job's evaluator answers, which ``learners.evaluator.Evaluator`` implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from orchestrator.logbook import Logbook
from orchestrator.parameters.tensors import Tensors


class EvaluatorInterface(Protocol):
    def initial_parameters(self) -> Tensors: ...

    def evaluate(self, parameters: Tensors, /) -> float: ...

    def unigram_loss(self) -> float: ...


EvaluatorFactory = Callable[[dict[str, Any], Mapping[str, str], Logbook], EvaluatorInterface]
"""How an evaluator's actor is made: the job's specification, its environment and its logbook."""
