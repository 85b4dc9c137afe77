"""Where tensors are worked on: Θ and its merges in one thread, measuring Θ in another. Results return as events.

Responsible for: initial parameters, merges in the order asked, each in the journal and its bytes to publish ready before
it is reported, evaluation. Refuses to know why a merge is made, and what islands are.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.reading import manifest_of, outer_states
from orchestrator.checkpoints.resumption import Resumption
from orchestrator.config import JobSpec
from orchestrator.core import effects, events, saving
from orchestrator.core.vocabulary import Epoch, FragmentId, Version
from orchestrator.errors import Conflict, first_line
from orchestrator.host import records
from orchestrator.host.posting import Post
from orchestrator.journal.entry import Facts
from orchestrator.journal.keeper import Insist, Keeper
from orchestrator.journal.storage import Journal
from orchestrator.logbook import service_logbook
from orchestrator.merge import fragment_map, outer_optimizer, wire
from orchestrator.merge.outer_state import FragmentState, NotFinite, OuterState
from orchestrator.roots import AllowedRoots
from orchestrator.runtime import cluster
from orchestrator.runtime.names import evaluator_name
from orchestrator.runtime.payloads import PayloadTable
from orchestrator.runtime.settings import CONTROL_GROUP, GROUP_LABEL, INLINE_BYTES_MAX, NAMESPACE

EVALUATOR_CLASS = "learners.evaluator:Evaluator"
SEED_TIMEOUT_S = 300.0
EVALUATION_TIMEOUT_S = 600.0
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Published:
    """A fragment as islands are sent it: ``payload`` is its bytes, or a reference to them if they are too many for a call.

    By value costs half the cpu-seconds of a reference, for which every island's node pulls a copy into its own store.
    """

    version: Version
    payload: Any


class Workshop:
    """``failed`` is called with what went wrong when the job cannot go on: no initial parameters, or a bug in a merge."""

    def __init__(
        self,
        job: str,
        spec: JobSpec,
        run_dir: Path,
        payloads: PayloadTable,
        journal: Journal,
        epoch: Epoch,
        insist: Insist,
        post: Post,
        failed: Callable[[BaseException], None],
        roots: AllowedRoots,
    ) -> None:
        self._job, self._spec, self._run_dir = job, spec, run_dir
        self._roots = roots
        self._payloads, self._post, self._failed = payloads, post, failed
        self._journal, self._epoch, self._insist = journal, epoch, insist
        self._merging = ThreadPoolExecutor(1, "merge")
        self._measuring = ThreadPoolExecutor(1, "measure")
        self._evaluator: Any = None
        self._evaluators_made = 0
        self._keeper: Keeper | None = None
        self._published: dict[FragmentId, Published] = {}
        self._steps: dict[FragmentId, int] = {}
        self.unigram_loss: float | None = None

    # ── asked by the pump ─────────────────────────────────────────────────────────────────────────────────────────

    def seed(self, resumption: Resumption | None) -> None:
        """Make Θ, or take it from the checkpoint; ``OuterStateSeeded`` follows."""
        self._measuring.submit(self._guarded, lambda: self._seed(resumption))

    def remember(self, outer: OuterState, merges: Sequence[Facts]) -> None:
        """Go on from Θ as the journal has it; ``merges`` are the last of each fragment."""
        for facts in merges:
            fragment = FragmentId(facts.fragment)
            self._steps[fragment] = facts.step
            self._publish(fragment, facts.version, wire.encode(outer.state(fragment).parameters))
        self._keeper = Keeper(outer, self._journal, self._insist)
        self._measuring.submit(self._guarded, self._measure_unigram)

    def merge(self, order: effects.MergeFragment) -> None:
        """``MergeCompleted`` follows, or ``MergeFailed`` when nothing that may be published came of it."""
        self._merging.submit(self._guarded, lambda: self._merge(order))

    def restore(self, order: saving.RestoreFragments, folder: Callable[[int], Folder]) -> None:
        """Behind the merges ordered so far; ``FragmentRestored`` of each follows, or ``RollbackFailed``."""
        self._merging.submit(self._guarded, lambda: self._restore(order, folder))

    def evaluate(self, global_version: int) -> None:
        """Measure Θ as it stands; ``EvaluationCompleted`` or ``EvaluationFailed`` follows."""
        parameters = self.parameters()
        self._measuring.submit(self._guarded, lambda: self._evaluate(global_version, parameters))

    def take_outer(self) -> Future[list[tuple[FragmentState, int]]]:
        """Every fragment with the step of its last merge, once the merges ordered so far are done."""
        return self._merging.submit(lambda: [(self._state().state(p), self._steps[p]) for p in sorted(self._steps)])

    def published(self, fragment: FragmentId) -> Published:
        return self._published[fragment]

    def whole_state(self) -> tuple[tuple[Version, ...], int, list[Any]]:
        """For an island that takes its state from here: versions, logical step, one reference a fragment."""
        published = [self._published[fragment] for fragment in sorted(self._published)]
        return tuple(p.version for p in published), max(self._steps.values()), [p.payload for p in published]

    def fragment(self, fragment: FragmentId) -> dict[str, Array]:
        """Θ_p as it stands: what contributions are measured against."""
        return self._state().fragment(fragment)

    def fragment_parameters(self) -> list[int]:
        """How many parameters each fragment has; empty while there is no Θ."""
        if self._keeper is None:
            return []
        fragments = (self._state().fragment(FragmentId(n)) for n in range(self._spec.synchroniser.fragments))
        return [sum(array.size for array in fragment.values()) for fragment in fragments]

    def parameters(self) -> dict[str, Array]:
        return self._state().parameters()

    def save_parameters(self, run_dir: Path) -> str:
        """Write Θ as it stands into a new file of ``run_dir``; returns its name. Raises Conflict before there is Θ."""
        if self._keeper is None:
            raise Conflict(detail=f"Job {self._job} has no parameters yet.", remedy="Ask again once it trains.")
        states = [self._keeper.outer.state(FragmentId(n)) for n in range(self._spec.synchroniser.fragments)]
        parameters = {name: array for state in states for name, array in state.parameters.items()}
        versions = ",".join(str(state.version) for state in states)
        facts = {"job": self._job, "versions": versions, "spec": self._spec.model_dump_json()}
        name = f"parameters-{uuid.uuid4().hex}.safetensors"
        records.write_parameters(run_dir, parameters, facts, name)
        return name

    @property
    def seeded(self) -> bool:
        return self._keeper is not None

    def close(self) -> None:
        self._merging.shutdown(wait=False, cancel_futures=True)
        self._measuring.shutdown(wait=False, cancel_futures=True)

    # ── in the workshop's threads ─────────────────────────────────────────────────────────────────────────────────

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._failed(error)

    def _seed(self, resumption: Resumption | None) -> None:
        knobs = self._spec.synchroniser
        outer = knobs.outer_optimizer
        optimizer = outer_optimizer.create(outer.kind, outer.lr, outer.momentum)
        if resumption is not None:
            states = outer_states(resumption.folder(self._roots), resumption.manifest)
            state = OuterState.restored(states, knobs.averaging, optimizer)
            steps = [fragment.step for fragment in resumption.manifest.fragments]
        else:
            initial = ray.get(self._measurer().initial_parameters.remote(), timeout=SEED_TIMEOUT_S)
            fragments = fragment_map.build({name: array.size for name, array in initial.items()}, knobs.fragments)
            state = OuterState(initial, fragments, knobs.averaging, optimizer)
            steps = [0] * knobs.fragments
        keeper = Keeper(state, self._journal, self._insist)
        for number in range(knobs.fragments):
            made = keeper.begin(FragmentId(number), self._epoch, steps[number])
            self._steps[FragmentId(number)] = made.facts.step
            self._publish(FragmentId(number), made.facts.version, made.payload)
        self._keeper = keeper
        count = sum(array.size for array in state.parameters().values())
        digest = wire.digest(state.parameters())
        self._post(lambda at: events.OuterStateSeeded(at, count, digest))
        self._measure_unigram()

    def _measure_unigram(self) -> None:
        try:
            self.unigram_loss = ray.get(self._measurer().unigram_loss.remote(), timeout=EVALUATION_TIMEOUT_S)
        except (RayError, TimeoutError):
            self.unigram_loss = None  # a figure for the report only

    def _merge(self, order: effects.MergeFragment) -> None:
        began = time.monotonic()
        inputs = [(self._payloads.get(item.payload), item.weight) for item in order.inputs]
        assert self._keeper is not None, "a merge was asked for before Θ was seeded"
        try:
            made = self._keeper.merge(order, inputs)
        except NotFinite as error:
            why, merged = error.detail, tuple(item.payload for item in order.inputs)
            self._post(lambda at: events.MergeFailed(at, order.fragment, order.version, merged, why))
            return
        self._steps[order.fragment] = order.step
        self._publish(order.fragment, order.version, made.payload)
        facts, seconds = made.facts, time.monotonic() - began
        told = (order.fragment, order.version, facts.digest, seconds, facts.base_digest, made.journal_seconds)
        self._post(lambda at: events.MergeCompleted(at, *told))

    def _restore(self, order: saving.RestoreFragments, folder_of: Callable[[int], Folder]) -> None:
        assert self._keeper is not None, "a rollback was asked for before Θ was seeded"
        number = order.checkpoint
        try:
            folder = folder_of(number)
            states = outer_states(folder, manifest_of(folder))  # all of it is read before anything is touched
        except Exception as error:  # whatever it is: the job stands where it stood
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._post(lambda at: saving.RollbackFailed(at, number, reason))
            return
        for fragment, version, step in order.fragments:
            made = self._keeper.restore(fragment, version, step, order.epoch, states[fragment])
            self._steps[fragment] = step
            self._publish(fragment, version, made.payload)
            told = (fragment, version, number, made.facts.digest, made.facts.base_digest)
            self._post(lambda at, told=told: saving.FragmentRestored(at, *told))

    def _publish(self, fragment: FragmentId, version: Version, payload: bytes) -> None:
        """In float32 whatever the uplink: islands must stand on Θ itself, or its rounding would come back as their work."""
        inline = len(payload) <= INLINE_BYTES_MAX
        self._published[fragment] = Published(version, payload if inline else ray.put(payload))

    def _evaluate(self, global_version: int, parameters: Mapping[str, Array]) -> None:
        try:
            loss = ray.get(self._measurer().evaluate.remote(parameters), timeout=EVALUATION_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            self._drop_evaluator()
            self._post(lambda at: events.EvaluationFailed(at, global_version, reason))
            return
        self._post(lambda at: events.EvaluationCompleted(at, global_version, loss))

    def _measurer(self) -> Any:
        """The evaluator; made when first asked for, and again after a failure."""
        if self._evaluator is None:
            self._evaluators_made += 1
            environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "1", "NPROC": "1"}
            self._evaluator = (
                cluster.actor_class(EVALUATOR_CLASS)
                .options(
                    name=evaluator_name(self._job, self._evaluators_made),
                    namespace=NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,  # that of a synchroniser that died
                    num_cpus=0,
                    max_restarts=0,
                    label_selector={GROUP_LABEL: CONTROL_GROUP},
                )
                .remote(
                    self._spec.model_dump(mode="json") | {"roots": self._roots},
                    environment,
                    service_logbook(self._run_dir, "evaluator", self._evaluators_made),
                )
            )
        return self._evaluator

    def _drop_evaluator(self) -> None:
        cluster.end_actor(self._evaluator)
        self._evaluator = None

    def _state(self) -> OuterState:
        assert self._keeper is not None, "Θ was asked for before it was seeded"
        return self._keeper.outer
