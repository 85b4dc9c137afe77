"""Evaluation: an actor that holds the job's model makes the initial parameters, and measures Θ on held-out data.

It asks the data plane for Θ as it stands and has a thread of its own, so that it holds up no merge. An evaluator that fails
or hangs is ended, and the next question makes another. Refuses to know when something is evaluated (``core``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import ray
from ray.exceptions import RayError

from orchestrator.actors.evaluator import EvaluatorFactory, EvaluatorInterface, InitialModel
from orchestrator.actors.handle import ActorHandle
from orchestrator.core import events
from orchestrator.core.vocabulary import Version
from orchestrator.errors import first_line
from orchestrator.host.job_context import JobContext
from orchestrator.logbook import service_logbook
from orchestrator.parameters.tensors import Tensors
from orchestrator.runtime import cluster
from orchestrator.runtime.names import evaluator_name

log = logging.getLogger(__name__)

EVALUATOR_CLASS = "learners.evaluator:Evaluator"
SEED_REMINDER_S = 300.0
EVALUATION_BASE_S = 600.0
SLOWEST_FLOPS = 1e9
"""Of one thread of a processor: an evaluator that does less than this has stopped."""
FLOPS_PER_PARAMETER_AND_TOKEN = 2


class Evaluation:
    """``parameters`` gives Θ as it stands, and the version of each fragment."""

    def __init__(self, context: JobContext, parameters: Callable[[], tuple[Tensors, tuple[Version, ...]]]) -> None:
        self._context, self._parameters = context, parameters
        self._thread = ThreadPoolExecutor(1, "evaluate")
        self._evaluator: ActorHandle[EvaluatorInterface] | None = None
        self._evaluators_made = 0
        self.unigram_loss: float | None = None
        """Held-out loss of a model that knows only how often each token occurs: a figure for the report."""

    def initial_model(self) -> Future[InitialModel]:
        """Θ at version 0."""
        return self._thread.submit(self._initial_model)

    def measure_unigram(self) -> None:
        """``unigram_loss`` is there some time later, if that works."""
        self._thread.submit(self._context.guarded, self._measure_unigram)

    def evaluate(self, global_version: int) -> None:
        """Measure Θ as it stands now; ``EvaluationCompleted`` or ``EvaluationFailed`` follows."""
        parameters, _ = self._parameters()
        self._thread.submit(self._context.guarded, lambda: self._evaluate(global_version, parameters))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ── in its thread ─────────────────────────────────────────────────────────────────────────────────────────────

    def _initial_model(self) -> InitialModel:
        """However long that takes, for how large the model is only the evaluator knows. Raises what ends it."""
        call = self._actor().call(EvaluatorInterface.initial_model)
        began = time.monotonic()
        while not ray.wait([call], timeout=SEED_REMINDER_S)[0]:
            log.warning("the initial parameters are not there after %.0f s", time.monotonic() - began)
        return ray.get(call)

    def _measure_unigram(self) -> None:
        try:
            call = self._actor().call(EvaluatorInterface.unigram_loss)
            self.unigram_loss = ray.get(call, timeout=EVALUATION_BASE_S)
        except (RayError, TimeoutError):
            self.unigram_loss = None

    def _evaluate(self, global_version: int, parameters: Tensors) -> None:
        try:
            call = self._actor().call(EvaluatorInterface.evaluate, parameters)
            loss = ray.get(call, timeout=self._limit_s(sum(array.size for array in parameters.values())))
        except (RayError, TimeoutError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._drop_actor()
            self._context.post(lambda at: events.EvaluationFailed(at, global_version, reason))
            return
        self._context.post(lambda at: events.EvaluationCompleted(at, global_version, loss))

    def _limit_s(self, parameter_count: int) -> float:
        """How long an evaluation of so many parameters may take: by the arithmetic that it is."""
        spec = self._context.spec
        token_count = spec.evaluation.sequences * spec.data.sequence_length
        return EVALUATION_BASE_S + FLOPS_PER_PARAMETER_AND_TOKEN * parameter_count * token_count / SLOWEST_FLOPS

    def _actor(self) -> ActorHandle[EvaluatorInterface]:
        """The evaluator; made when it is first needed, and again after a failure."""
        if self._evaluator is None:
            self._evaluators_made += 1
            context = self._context
            environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "1", "NPROC": "1"}
            evaluator_class: EvaluatorFactory = cluster.actor_class(EVALUATOR_CLASS)
            # by its name it is also that of a synchroniser that died
            options = {**cluster.on_head(evaluator_name(context.job, self._evaluators_made)), "max_restarts": 0}
            self._evaluator = cluster.start_actor(
                evaluator_class,
                options,
                context.spec.model_dump(mode="json") | {"roots": context.roots},
                environment,
                service_logbook(context.run_dir, "evaluator", self._evaluators_made),
            )
        return self._evaluator

    def _drop_actor(self) -> None:
        if self._evaluator is not None:
            cluster.end_actor(self._evaluator)
        self._evaluator = None
