"""The evaluator as a Ray actor: gives the initial parameters, and the held-out loss of any parameters.

It builds a trainer like an island's and never trains. Where the process runs, and what it measures when, is decided
elsewhere.

The whole job waits for the initial parameters, but nothing waits for a measurement. So measurements run at a low priority
(``niceness``), and the initial parameters do not: at a low priority on a busy host, they would delay the start by minutes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import ray

from learners.contract import FragmentwiseTrainer, Trainer
from learners.factories import errors_in_words, trainer_of
from learners.handed_over import HandedOver
from learners.island_spec import IslandSpec
from learners.outbox import lower_priority_of_new, thread_ids
from orchestrator.actors import EvaluatorFactory, Measured, ModelOutline
from orchestrator.channel.endpoint import Carried, Membership
from orchestrator.core.vocabulary import Epoch
from orchestrator.parameters import wire_format
from orchestrator.parameters.tensors import Tensors
from orchestrator.system import logbook, python_process

log = logging.getLogger(__name__)


class Evaluator:
    def __init__(
        self, spec: dict[str, Any], environment: Mapping[str, str], book: logbook.Logbook, niceness: int
    ) -> None:
        python_process.set_variables(environment)
        logbook.keep(book)
        self._niceness, self._before = niceness, thread_ids()
        trainer = spec["trainer"]
        self._document = spec
        self._trainer_name = str(trainer.get("factory", "torch") if isinstance(trainer, Mapping) else trainer)
        self._trainer: Trainer | None = None
        self._handed_over = HandedOver()

    def outline(self) -> ModelOutline:
        """Return what determines the fragments and the memory that the job needs."""
        trainer = self._built()
        with self._own_code("tensor_shapes"):
            return ModelOutline(dict(trainer.tensor_shapes()), dict(trainer.roles()))

    def initial_pieces(self, names: Sequence[str]) -> Tensors:
        """Return these pieces of Θ at version 0."""
        trainer = self._built()
        with self._own_code("initial_parameters"):
            return trainer.initial_parameters(names)

    def join_channel(self, epoch: Epoch, membership: Membership) -> None:
        """Join the job's channel, through which this synchroniser passes Θ."""
        self._handed_over.join(membership, ray.util.get_node_ip_address())

    def evaluate(self, epoch: Epoch, limit_s: float | None, *payloads: Carried) -> Measured:
        """Return the held-out loss of Θ, one payload per fragment.

        If the trainer can, one fragment at a time is on the host.
        """
        self._give_way()
        trainer, limit = self._built(), math.inf if limit_s is None else limit_s
        fragments = (wire_format.decode(self._handed_over.received(epoch, payload)) for payload in payloads)
        with self._own_code("evaluate"):
            if hasattr(trainer, "evaluate_fragments"):
                measured = cast(FragmentwiseTrainer, trainer).evaluate_fragments(fragments, limit)
            else:
                whole = {name: array for arrays in fragments for name, array in arrays.items()}
                measured = trainer.evaluate(whole, limit)
        facts = measured.bits_per_byte, measured.sources, measured.preference
        return measured.loss, measured.sequence_count, measured.seconds, *facts

    def unigram_loss(self) -> float:
        trainer = self._built()
        with self._own_code("unigram_loss"):
            return float(trainer.unigram_loss())

    def _own_code(self, method: str) -> AbstractContextManager[None]:
        return errors_in_words(f"{method} of the trainer {self._trainer_name!r}")

    def _give_way(self) -> None:
        """Lower the priority of this thread and of every thread started here, for good."""
        if self._niceness:
            lower_priority_of_new(self._before, self._niceness)

    def _built(self) -> Trainer:
        if self._trainer is None:
            with errors_in_words(f"trainer {self._trainer_name!r}"):
                self._trainer = trainer_of(IslandSpec.of(self._document), 0, 1)
            python_process.say_ready()
        return self._trainer


_: EvaluatorFactory = Evaluator  # type checkers compare what it answers with what others call
