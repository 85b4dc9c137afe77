"""The job's parameter shard in the synchroniser's process: threads that carry out its orders, whose results are events.

``ShardWorker`` is all of the data plane that the control plane sees: it orders merges, restores and cuts, and hears of
versions and digests. Links receive contributions and send publications past it. In a job with several shards, it would hand
an order to the shard that owns the fragment. Responsible for carrying out the orders for one fragment one after another,
and for an event only once what it says is journalled and can be published. The arithmetic and the codecs are
``parameters.shard``.

``MergePool`` runs orders for different fragments at once and orders for one fragment in order. A cut, a rollback and the
initial state concern all of Θ: they run behind everything ordered before and ahead of everything ordered after. A merge's
arithmetic uses all cores by itself; the threads overlap one merge's journal entry with the next one's arithmetic.

``JobChannel`` is the synchroniser's end of the job's channel, with the authority of its certificates. Authority and secrets
live in this process alone and die with it. A successor makes its own, and every process that it connects to becomes a
member anew (``ParameterLink``). So nothing is on a disk that somebody could read, and a dead synchroniser's certificates
are trusted by nobody.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from orchestrator.actors import ModelOutline
from orchestrator.channel.endpoint import Endpoint, Membership, Payload, Terms, encrypts, rank_subject
from orchestrator.channel.frames import SHARD
from orchestrator.channel.stream import JobAuthority
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.reading import manifest_of, outer_states
from orchestrator.checkpoints.resumption import Resumption
from orchestrator.checkpoints.writing import OuterCut, cut_of
from orchestrator.core import effects, events, saving
from orchestrator.core.vocabulary import FragmentId, Life, PayloadId, Version
from orchestrator.errors import InvalidJobSpec, in_words
from orchestrator.host.job_context import JobContext
from orchestrator.host.job_files import JobFiles
from orchestrator.parameters import fragment_map
from orchestrator.parameters.holding import Holding
from orchestrator.parameters.outer_state import FragmentState, NotFinite, OuterState, OuterStep, initial_state
from orchestrator.parameters.shard import (
    Held,
    NewVersion,
    ParameterShard,
    Publication,
    StepNorms,
    Unusable,
    norms_of_update,
)
from orchestrator.parameters.tensors import Array, Tensors, digest, shapes
from orchestrator.runtime import cluster
from orchestrator.runtime.published import Published
from orchestrator.specification.memory_budget import NodeMemory, memory_problems

THREADS_MAX = 4
Result = TypeVar("Result")


class InitialModel(Protocol):
    """The model before its first step, as somebody makes it: the evaluator."""

    def outline(self) -> Future[ModelOutline]: ...

    def initial_pieces(self, names: Sequence[str]) -> Future[Tensors]: ...


class ShardWorker:
    """``context.failed`` is called when the job cannot go on: no initial parameters, no room for them, or a bug in a merge.

    ``node_memory`` is what the nodes have: a job that begins is held against it once its model is known.
    """

    def __init__(
        self,
        context: JobContext,
        shard: ParameterShard,
        channel: JobChannel,
        node_memory: Callable[[], Sequence[NodeMemory]] = tuple,
    ) -> None:
        self._context, self._shard, self.channel = context, shard, channel
        self._node_memory = node_memory
        self._pool = MergePool()
        self._published: dict[FragmentId, Published] = {}
        self._norms: dict[FragmentId, StepNorms] = {}

    # ── orders, from the pump ─────────────────────────────────────────────────────────────────────────────────────

    def seed(self, model: InitialModel) -> None:
        """Begin with this model; ``OuterStateSeeded`` follows."""
        self._pool.submit_alone(lambda: self._context.guarded(lambda: self._seed(model)))

    def resume(self, resumption: Resumption) -> None:
        """Begin with Θ and momentum of a checkpoint; ``OuterStateSeeded`` follows."""
        self._pool.submit_alone(lambda: self._context.guarded(lambda: self._resume(resumption)))

    def recover(self, files: JobFiles) -> None:
        """Go on from Θ as the journal has it."""
        assert files.outer is not None
        _require_own([files.outer.state(p) for p in files.outer.fragments])
        for publication in self._shard.recover(files.outer, files.merges):
            self._publish(publication)

    def merge(self, order: effects.MergeFragment) -> None:
        """``MergeCompleted`` follows, or ``MergeFailed`` when nothing that may be published came of it."""
        self._pool.submit(order.fragment, lambda: self._context.guarded(lambda: self._merge(order)))

    def restore(self, order: saving.RestoreFragments, folder: Callable[[int], Folder]) -> None:
        """Restore fragments behind the merges ordered so far. Posts ``FragmentRestored`` for each, or ``RollbackFailed``."""
        self._pool.submit_alone(lambda: self._context.guarded(lambda: self._restore(order, folder)))

    def cut(self) -> Future[OuterCut]:
        """Θ and momentum for a checkpoint, once the merges ordered so far are done."""
        return self._pool.submit_alone(lambda: cut_of(self._shard.states()))

    def release(self, payload: PayloadId) -> None:
        self._shard.release(payload)

    def close(self) -> None:
        self._pool.close()
        self.channel.close()

    # ── contributions and publications, from links ────────────────────────────────────────────────────────────────

    def receive(self, payload: PayloadId, fragment: FragmentId, *parts: memoryview) -> Held | Unusable:
        """Validate and hold the bytes of a contribution, one part from each process of its island."""
        return self._shard.receive(payload, fragment, *parts)

    def published(self, fragment: FragmentId) -> Published:
        return self._published[fragment]

    def whole_state(self, holdings: Sequence[Holding]) -> tuple[tuple[Version, ...], int, list[list[Payload]]]:
        """Return a state for an island: versions, logical step, and for each holding one payload per fragment."""
        published = self.all_published()
        payloads = [[p.values(holding) for p in published] for holding in holdings]
        return tuple(p.version for p in published), self._shard.step(), payloads

    def all_published(self) -> list[Published]:
        """Θ as it stands, fragment by fragment."""
        return [self._published[fragment] for fragment in sorted(self._published)]

    # ── values, for evaluation, exports and the status ────────────────────────────────────────────────────────────

    @property
    def seeded(self) -> bool:
        return self._shard.seeded

    def parameters(self) -> tuple[dict[str, Array], tuple[Version, ...]]:
        """Θ as it stands, by the names of its pieces, and the version of each fragment."""
        states = [state for state, _ in self._shard.states().values()]
        values = {name: array for state in states for name, array in state.parameters.items()}
        return values, tuple(state.version for state in states)

    def fragment_parameters(self) -> list[int]:
        """Return how many parameters each fragment has; empty while there is no Θ."""
        return list(self._shard.sizes().values())

    def norms(self) -> dict[FragmentId, StepNorms]:
        """Return the norms of each fragment's last update, if one was made in this life."""
        return dict(sorted(self._norms.copy().items()))

    # ── in the merge threads ──────────────────────────────────────────────────────────────────────────────────────

    def _seed(self, model: InitialModel) -> None:
        """One fragment is on its way at a time, and nothing before it is known that all of them have room."""
        outline, knobs = model.outline().result(), self._context.spec.synchroniser
        self._require_memory(outline.parameter_count)
        step = OuterStep.of(knobs)
        fragments = fragment_map.build(outline.shapes, knobs.fragments, outline.roles)
        states = {
            FragmentId(p): initial_state(model.initial_pieces(names).result(), step, outline.roles)
            for p, names in enumerate(fragments)
        }
        self._begin(OuterState.restored(states, step), {})

    def _require_memory(self, parameter_count: int) -> None:
        """Raises InvalidJobSpec where the fleet has too little."""
        if problems := memory_problems(self._context.spec, parameter_count, self._node_memory()):
            raise InvalidJobSpec(detail="the job does not fit the memory of its nodes", problems=problems)

    def _resume(self, resumption: Resumption) -> None:
        manifest = resumption.manifest
        states = outer_states(resumption.folder(self._context.roots), manifest)
        _require_own(states)
        steps = {FragmentId(p): fragment.step for p, fragment in enumerate(manifest.fragments)}
        fragments = {FragmentId(p): state for p, state in enumerate(states)}
        self._begin(OuterState.restored(fragments, OuterStep.of(self._context.spec.synchroniser)), steps)

    def _begin(self, outer: OuterState, steps: Mapping[FragmentId, int]) -> None:
        for version in self._shard.seed(outer, steps):
            self._publish(version.publication)
        parameters = outer.parameters()
        count, name = sum(array.size for array in parameters.values()), digest(parameters)
        self._context.post(lambda at: events.OuterStateSeeded(at, count, name))

    def _merge(self, order: effects.MergeFragment) -> None:
        began, before = time.monotonic(), self._shard.state(order.fragment).parameters
        try:
            new = self._shard.merge(order)
        except NotFinite as error:
            why, merged = error.detail, tuple(item.payload for item in order.inputs)
            self._context.post(lambda at: events.MergeFailed(at, order.fragment, order.version, merged, why))
            return
        self._publish(new.publication)
        facts, seconds = new.facts, time.monotonic() - began
        self._context.post(
            lambda at: events.MergeCompleted(
                at, order.fragment, order.version, facts.digest, seconds, facts.base_digest, new.journal_seconds
            )
        )
        after = self._shard.state(order.fragment)  # nobody waits for what is computed of it
        self._norms[order.fragment] = norms_of_update(after.version, before, after.parameters, after.residue)

    def _restore(self, order: saving.RestoreFragments, folder_of: Callable[[int], Folder]) -> None:
        number = order.checkpoint
        try:
            folder = folder_of(number)
            states = outer_states(folder, manifest_of(folder))  # all of it is read before anything is touched
        except Exception as error:  # whatever it is: the job stands where it stood
            reason = in_words(error)
            self._context.post(lambda at: saving.RollbackFailed(at, number, reason))
            return
        for fragment, version, step in order.fragments:
            new = self._shard.restore(fragment, version, step, states[fragment])
            self._publish(new.publication)
            self._context.post(_restored(number, new))

    def _publish(self, publication: Publication) -> None:
        before = self._published.get(publication.fragment)
        self._published[publication.fragment] = Published(publication, before, self.channel.endpoint)


class MergePool:
    """An order waits for earlier ones only, and these were started before it: nothing can wait for ever."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(min(THREADS_MAX, max(2, os.cpu_count() or 1)), "merge")
        self._lock = threading.Lock()
        self._alone: Future[Any] | None = None
        self._latest: dict[FragmentId, Future[Any]] = {}
        """By fragment, since the last order that concerned all."""

    def submit(self, fragment: FragmentId, work: Callable[[], Result]) -> Future[Result]:
        """Do the work once what was ordered before for this fragment, or for all, is over."""
        with self._lock:
            before = [one for one in (self._latest.get(fragment), self._alone) if one is not None]
            future = self._threads.submit(_after, before, work)
            self._latest[fragment] = future
            return future

    def submit_alone(self, work: Callable[[], Result]) -> Future[Result]:
        """Do the work once everything that was ordered before is over, and nothing beside it."""
        with self._lock:
            before = [*self._latest.values(), *(() if self._alone is None else (self._alone,))]
            self._alone = future = self._threads.submit(_after, before, work)
            self._latest = {}
            return future

    def close(self) -> None:
        """Stop. Work that has not begun is discarded."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class JobChannel:
    """The job's channel for payloads, open until ``close``."""

    def __init__(self, context: JobContext) -> None:
        host = cluster.own_address()
        self._context = context
        self._terms = Terms(**context.spec.transport.model_dump())
        self._authority = JobAuthority.new(context.job) if encrypts(self._terms, host) else None
        self.endpoint = Endpoint(self._membership(SHARD), host)

    def membership(self, process: Life, rank: int = 0) -> Membership:
        """Return the membership of an island's process, by the life that it began as."""
        island, incarnation = process
        return self._membership(rank_subject(f"{island}:{incarnation}", rank))

    def evaluator_membership(self, number: int) -> Membership:
        """Return the membership of the job's evaluator with this number."""
        return self._membership(f"evaluator {number}")

    def close(self) -> None:
        self.endpoint.close()

    def _membership(self, subject: str) -> Membership:
        identity = self._authority.issue(subject) if self._authority is not None else None
        return Membership(self._context.job, subject, self._context.epoch, self._terms, identity)


def _after(earlier: Iterable[Future[Any]], work: Callable[[], Result]) -> Result:
    wait(earlier)
    return work()


def _require_own(states: Sequence[FragmentState]) -> None:
    """Raises DataError unless all of Θ is cut as this build cuts it."""
    roles = {tensor: role for state in states for tensor, role in state.roles.items()}
    fragment_map.require_own([shapes(state.parameters) for state in states], roles)


def _restored(checkpoint: int, new: NewVersion) -> Callable[[float], events.Event]:
    facts = new.facts
    named = (FragmentId(facts.fragment), facts.version, checkpoint, facts.digest, facts.base_digest)
    return lambda at: saving.FragmentRestored(at, *named)
