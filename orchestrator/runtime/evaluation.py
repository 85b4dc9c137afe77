"""Evaluation beside the islands: an actor that holds the job's model makes the initial parameters, and measures Θ.

It takes Θ as it is published and has a thread of its own, so that it holds up no merge; the evaluator pulls the bytes
by the job's channel. An evaluator on the head takes memory for a model that may be needed once an hour, so it ends when
it has measured nothing for four times as long as it took to start, and is made again for the next measurement. An
evaluator that dies is made again, on another node of its group if there is one; one that fails or hangs is ended, and
the next question makes another. While its node group has no room for it, the head measures, and each loss says why.

Every island, the first ones included, takes its state from the synchroniser or from a peer: that is the only way to begin.

Refuses to know when something is evaluated, for how long, and on which island if on one (``core.evaluation``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import isnan
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayError

from orchestrator.actors import ActorHandle, EvaluatorFactory, EvaluatorInterface, Measured, ModelOutline
from orchestrator.channel.endpoint import Membership
from orchestrator.core import effects, events
from orchestrator.core.vocabulary import NO_INCARNATION
from orchestrator.errors import InfrastructureError, in_words
from orchestrator.host.job_context import JobContext
from orchestrator.parameters.tensors import Tensors
from orchestrator.runtime import cluster
from orchestrator.runtime.nodes import NodeWatch
from orchestrator.runtime.placement import environment_of, refusal, resources_of
from orchestrator.runtime.published import AnyPayload, PublicationGone, PublishedFragment, ShardAway
from orchestrator.runtime.settings import GROUP_LABEL, evaluator_name
from orchestrator.runtime.shard_worker import ShardWorker
from orchestrator.runtime.supervision import Helper, Supervisor
from orchestrator.system.logbook import service_logbook

log = logging.getLogger(__name__)

EVALUATOR_CLASS = "learners.evaluator:Evaluator"
SEED_REMINDER_S = 300.0
EVALUATION_BASE_S = 600.0
SLOWEST_FLOPS = 1e9
"""Of one thread of a processor: an evaluator that does less than this has stopped."""
FLOPS_PER_PARAMETER_AND_TOKEN = 2
BYTES_PER_PARAMETER = 4
SLOWEST_BYTES_PER_S = 1e6
"""A line slower than this brings no Θ to an evaluator."""
HEAD_NICENESS = 15
"""On the head measuring can wait; on a shared machine it must not take the processor from islands that train."""
HEAD_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "1", "NPROC": "1"}
HEAD = ""
"""As the name of a node group: of none."""
IDLE_START_RATIO, IDLE_MIN_S = 4.0, 20.0
"""After so many times the time of its start an evaluator ends that measures nothing. Starts take a fifth of the time at
most, mostly at a low priority."""
LIVES_MAX = 2
"""Of an evaluator in one evaluation: who dies again, dies of the model."""
NO_ISLAND = "no island could measure Θ, and in a job of several shards no other process holds all of it"
REMEDY = "Look at the memory of its machine, and at native code of the job's packages."

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class IdleLimit:
    """Limits how long an evaluator stays that measures nothing. Times are of a monotonic clock."""

    def __init__(self) -> None:
        self._started_at, self._used_at = 0.0, 0.0
        self._limit_s: float | None = None

    def started(self, now: float) -> None:
        """Another evaluator is started."""
        self._started_at, self._limit_s = now, None

    def used(self, now: float) -> float:
        """The evaluator has answered. Return the time after which it may end. Its first answer says what a start costs."""
        if self._limit_s is None:
            self._limit_s = max(IDLE_MIN_S, IDLE_START_RATIO * (now - self._started_at))
        self._used_at = now
        return self._limit_s

    def is_over(self, now: float) -> bool:
        return self._limit_s is not None and now - self._used_at >= self._limit_s


class Evaluation:
    """``shard`` has Θ, and the end of the job's channel at which it is served. An evaluator that dies between two questions
    is made again by the ``supervisor``.
    """

    def __init__(self, context: JobContext, shard: ShardWorker, supervisor: Supervisor) -> None:
        self._context, self._shard, self._supervisor = context, shard, supervisor
        self._thread = ThreadPoolExecutor(1, "evaluate")
        self._evaluators: dict[str, Helper[EvaluatorInterface]] = {}
        self._memberships: dict[str, Membership] = {}
        self._evaluators_made, self._logbook_number = 0, 1
        self._idle = IdleLimit()
        self._idle_check: threading.Timer | None = None
        self._nodes = NodeWatch() if context.spec.evaluation.node_group else None
        self.unigram_loss: float | None = None
        """Held-out loss of a model that knows only how often each token occurs: a figure for the report."""

    def outline(self) -> Future[ModelOutline]:
        return self._thread.submit(self._patient, EvaluatorInterface.outline)

    def initial_pieces(self, names: Sequence[str]) -> Future[Tensors]:
        """These pieces of Θ at version 0."""
        return self._thread.submit(self._patient, EvaluatorInterface.initial_pieces, names)

    def measure_unigram(self) -> None:
        """``unigram_loss`` is there some time later, if that works."""
        self._thread.submit(self._context.guarded, self._measure_unigram)

    def evaluate(self, order: effects.Evaluate) -> None:
        """Measure Θ as it stands now; ``EvaluationCompleted`` or ``EvaluationFailed`` follows.

        A job of several shards whose islands are to measure has no other process that may hold all of Θ.
        """
        spec = self._context.spec
        if spec.evaluation.on == "islands" and spec.synchroniser.shards > 1:
            self._post(events.EvaluationFailed, order.global_version, NO_ISLAND)
            return
        published = self._shard.all_published()
        self._thread.submit(self._context.guarded, lambda: self._evaluate(order, published))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if (check := self._idle_check) is not None:
            check.cancel()

    # ── in its thread ─────────────────────────────────────────────────────────────────────────────────────────────

    def _patient(
        self,
        method: Callable[Concatenate[EvaluatorInterface, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        """However long it takes, for how large the model is only the evaluator knows. Raises what ends it."""
        began, lives = time.monotonic(), 1
        while True:
            call = self._actor(HEAD).call(method, *arguments, **named)
            while not ray.wait([call], timeout=SEED_REMINDER_S)[0]:
                log.warning("there are no initial parameters after %.0f s", time.monotonic() - began)
            try:
                return ray.get(call)
            except ActorDiedError as error:
                if lives == LIVES_MAX:
                    raise InfrastructureError(detail=self._dead("built the model"), remedy=REMEDY) from error
                log.warning("the evaluator died, and is made again: %s", in_words(error))
                self._drop_actor(HEAD, failed=True)
                lives += 1

    def _measure_unigram(self) -> None:
        try:
            call = self._actor(HEAD).call(EvaluatorInterface.unigram_loss)
            loss = ray.get(call, timeout=EVALUATION_BASE_S)
            self.unigram_loss = None if isnan(loss) else loss
        except (RayError, TimeoutError):
            self.unigram_loss = None
        if self._context.spec.evaluation.on != "head":  # its model is a copy of Θ that nobody may ever ask for
            self._drop_actor(HEAD)
        self._note_use()

    def _evaluate(self, order: effects.Evaluate, published: Sequence[PublishedFragment]) -> None:
        try:  # served for as long as they are held here
            payloads = self._shard.patiently(lambda: [one.values() for one in published])
        except PublicationGone as error:
            self._post(events.EvaluationFailed, order.global_version, in_words(error))
            return
        for life in range(1, LIVES_MAX + 1):
            group, remark = self._group()
            if remark:
                log.warning("the head measures Θ: %s", remark)
            try:
                loss, sequence_count, seconds, *by_byte = self._measured(group, order, payloads)
            except (ShardAway, PublicationGone) as error:
                self._post(events.EvaluationFailed, order.global_version, in_words(error))
            except (RayError, TimeoutError) as error:
                reason = in_words(error)
                self._drop_actor(group, failed=True)
                if isinstance(error, ActorDiedError):
                    if life < LIVES_MAX:
                        log.warning("the evaluator died, and is made again: %s", reason)
                        continue
                    reason = f"{self._dead('measured')} {REMEDY}"
                self._post(events.EvaluationFailed, order.global_version, reason)
            else:
                where = (f"node group {group}" if group else "the head", remark, None, NO_INCARNATION)
                facts = (loss, sequence_count, seconds, *where, *by_byte)
                self._post(events.EvaluationCompleted, order.global_version, *facts)
            self._note_use()
            return

    def _measured(self, group: str, order: effects.Evaluate, payloads: Sequence[AnyPayload]) -> Measured:
        """Return the answer of ``EvaluatorInterface.evaluate``. Raises RayError or TimeoutError."""
        evaluator, epoch = self._actor(group).handle, self._context.epoch
        membership = self._memberships[group]
        limit_s = self._limit_s(sum(payload.byte_count for payload in payloads))
        ray.get(evaluator.call(EvaluatorInterface.join_channel, epoch, membership), timeout=limit_s)
        carried = [payload.carried(membership.subject) for payload in payloads]
        return ray.get(evaluator.call(EvaluatorInterface.evaluate, epoch, order.limit_s, *carried), timeout=limit_s)

    def _dead(self, work: str) -> str:
        return (
            f"the evaluator's process died {LIVES_MAX} times as it {work} (`atoll logs {self._context.job} evaluator`)."
        )

    def _post(self, kind: Callable[..., events.Event], *facts: Any) -> None:
        self._context.post(lambda at: kind(at, *facts))

    def _limit_s(self, byte_count: int) -> float:
        """Return how long an evaluation of ``byte_count`` bytes of Θ may take, its transfer included."""
        spec = self._context.spec
        token_count = spec.evaluation.sequences * spec.data.sequence_length
        measuring_s = FLOPS_PER_PARAMETER_AND_TOKEN * byte_count / BYTES_PER_PARAMETER * token_count / SLOWEST_FLOPS
        rate = min(SLOWEST_BYTES_PER_S, spec.transport.bytes_per_s or SLOWEST_BYTES_PER_S)
        return EVALUATION_BASE_S + measuring_s + byte_count / rate

    def _group(self) -> tuple[str, str]:
        """The node group that measures this time, and why it is not the one that was asked for."""
        section = self._context.spec.evaluation
        if section.on == "islands":
            return HEAD, "no island could"
        if section.node_group is None or section.node_group in self._evaluators:
            return section.node_group or HEAD, ""
        nodes = self._nodes.placeable() if self._nodes else ()
        no = refusal(section.node_group, resources_of(section), nodes, "evaluation")
        if no is None:
            self._drop_actor(HEAD)  # it measured while there was no room
            return section.node_group, ""
        return HEAD, no.reason

    def _note_use(self) -> None:
        """The evaluator on the head has just done something: look again once it may end."""
        if HEAD not in self._evaluators:
            return
        wait_s = self._idle.used(time.monotonic())
        if (check := self._idle_check) is not None:
            check.cancel()
        self._idle_check = threading.Timer(wait_s, self._end_idle_soon)
        self._idle_check.daemon = True
        self._idle_check.start()

    def _end_idle_soon(self) -> None:
        with suppress(RuntimeError):  # the job ends
            self._thread.submit(self._context.guarded, self._end_idle)

    def _end_idle(self) -> None:
        if HEAD in self._evaluators and self._idle.is_over(time.monotonic()):
            log.info("the evaluator ends, for nothing is to be measured: the next measurement starts another")
            self._drop_actor(HEAD)

    def _actor(self, group: str) -> Helper[EvaluatorInterface]:
        """The evaluator there; made when it is first needed, and again after a failure."""
        if group not in self._evaluators:
            if group == HEAD:
                self._idle.started(time.monotonic())
            name = f"evaluator on {group}" if group else "evaluator"
            self._evaluators[group] = self._supervisor.add(Helper(name, lambda: self._made(group)))
        return self._evaluators[group]

    def _made(self, group: str) -> ActorHandle[EvaluatorInterface]:
        """Another evaluator there. Also called in the supervisor's thread."""
        self._evaluators_made += 1
        context, number, own = self._context, self._evaluators_made, self._context.spec.evaluation
        self._memberships[group] = self._shard.channel.evaluator_membership(number)
        evaluator_class: EvaluatorFactory = cluster.actor_class(EVALUATOR_CLASS)
        return cluster.start_actor(
            evaluator_class,
            {**self._options(evaluator_name(context.job, number, group), group), "max_restarts": 0},
            context.spec.model_dump(mode="json") | {"roots": context.roots},
            environment_of(own.accelerator, own.cpus) if group else HEAD_ENVIRONMENT,
            service_logbook(context.run_dir, "evaluator", self._logbook_number),
            0 if group else HEAD_NICENESS,
        )

    def _options(self, name: str, group: str) -> dict[str, Any]:
        """Return Ray's options of an evaluator. A restarted synchroniser finds the same evaluator by its name."""
        options = cluster.on_head(name)
        if not group:
            return options
        wanted = resources_of(self._context.spec.evaluation)
        return {
            **options,
            "num_cpus": wanted["CPU"],
            "num_gpus": wanted.get("GPU", 0),
            "resources": {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")},
            "label_selector": {GROUP_LABEL: group, **(self._nodes.selector() if self._nodes else {})},
        }

    def _drop_actor(self, group: str, *, failed: bool = False) -> None:
        """End the evaluator there. After a failure the next one begins a logbook: what this one said stays for longer."""
        self._logbook_number += failed
        if (evaluator := self._evaluators.pop(group, None)) is not None:
            cluster.end_actor(evaluator.retire())
