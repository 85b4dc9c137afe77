"""The job's parameter shards as the synchroniser uses them: threads that carry out orders, whose results are events.

``ShardWorker`` is all of the data plane that the control plane sees: it orders merges, restores and cuts, and hears of
versions and digests. Links receive contributions and send publications past it. It hands each order to the shard that owns
the fragment. Responsible for one order for a fragment after another, and for events only of what is journalled and can be
published. The arithmetic and the codecs are ``parameters.shard``.

A ``Shard`` has its part of the fragments, its own journal and its own end of the job's channel. ``LocalShard`` is the one
of most jobs, in this process. Several are in processes of their own (``runtime.remote_shard``).

``MergePool`` runs orders for different fragments at once and orders for one fragment in order. A rollback and the initial
state run behind everything ordered before and ahead of everything ordered after. A merge's arithmetic uses all cores by
itself; the threads overlap one merge's journal entry with the next one's arithmetic.

``JobChannel`` is the synchroniser's end of the job's channel, with the authority of its certificates. Authority and secrets
live in this process alone and die with it. A successor makes its own, and every process that it connects to becomes a
member anew (``ParameterLink``). So nothing is on a disk that somebody could read, and a dead synchroniser's certificates
are trusted by nobody.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, cast

import numpy as np

from orchestrator.actors import ModelOutline
from orchestrator.channel.endpoint import Carried, Endpoint, Membership, Terms, encrypts, rank_subject
from orchestrator.channel.frames import SHARD, Address
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import File, Fragment, Manifest
from orchestrator.checkpoints.reading import manifest_of, outer_states
from orchestrator.checkpoints.resumption import Resumption
from orchestrator.checkpoints.writing import OuterCut, parameters_name, write_outer
from orchestrator.core import effects, events, saving
from orchestrator.core.vocabulary import FragmentId, Life, PayloadId, Version
from orchestrator.errors import InvalidJobSpec, in_words
from orchestrator.host.job_context import THREADS_MAX, JobContext, MergePool, Undated
from orchestrator.host.job_files import JobFiles
from orchestrator.parameters import fragment_map
from orchestrator.parameters.holding import EVERYTHING, Holding
from orchestrator.parameters.journal import Facts
from orchestrator.parameters.outer_state import FragmentState, NotFinite, OuterState, OuterStep, initial_state
from orchestrator.parameters.pieces import Roles, Shape, from_rows, rows_of
from orchestrator.parameters.shard import (
    Held,
    InputsLost,
    NewVersion,
    ParameterShard,
    Publication,
    StepNorms,
    Unusable,
    norms_of_update,
)
from orchestrator.parameters.tensors import Tensors, digest, shapes
from orchestrator.runtime import cluster
from orchestrator.runtime.published import AnyPayload, Content, PublicationGone, Published, PublishedFragment, ShardAway
from orchestrator.specification.config import JobSpec
from orchestrator.specification.memory_budget import NodeMemory, memory_problems
from orchestrator.status import Shard as ShardStatus

log = logging.getLogger(__name__)
RETRY_S, REREAD_S = 0.2, 1.0
Result = TypeVar("Result")


class InitialModel(Protocol):
    """The model before its first step, as somebody makes it: the evaluator."""

    def outline(self) -> Future[ModelOutline]: ...

    def initial_pieces(self, names: Sequence[str]) -> Future[Tensors]: ...


@dataclass(frozen=True, slots=True)
class Announceable:
    """A version that is journalled and may be announced, with the seconds that its merge and its journal entry took.

    ``norms`` computes those of the update, once. ``shapes`` are those of the fragment's pieces.
    """

    published: PublishedFragment
    facts: Facts
    shapes: Mapping[str, Shape]
    seconds: float = 0.0
    journal_seconds: float = 0.0
    norms: Callable[[], StepNorms | None] | None = None


@dataclass(frozen=True, slots=True)
class FragmentCut:
    """A fragment as it was at a checkpoint's cut. ``state`` returns its arrays, which may travel from another process."""

    fragment: FragmentId
    facts: Fragment
    state: Callable[[], FragmentState]


class Shard(Protocol):
    """A shard as the worker uses it. Calls may raise ShardAway while the shard's process is being started again."""

    def give(self, fragment: FragmentId, state: FragmentState, step: int) -> None:
        """Take over the first state of a fragment. ``begin`` follows once all of the shard's are there."""
        ...

    def begin(self) -> list[Announceable]:
        """Journal what was given."""
        ...

    def recover(self, files: JobFiles) -> list[Announceable]:
        """Continue from the journal."""
        ...

    def merge(self, order: effects.MergeFragment) -> Announceable:
        """Take the outer step and journal it. Raises NotFinite, and InputsLost."""
        ...

    def restore(self, fragment: FragmentId, version: Version, step: int, state: FragmentState) -> Announceable: ...

    def cut(self, fragment: FragmentId) -> FragmentCut: ...

    def pull(self, carried: Carried, abandoned: Callable[[], bool]) -> Content:
        """Pull the bytes of an offer. Raises as ``ChannelClient.pull``."""
        ...

    def receive(self, payload: PayloadId, fragment: FragmentId, *parts: Content) -> Held | Unusable: ...

    def release(self, payload: PayloadId) -> None: ...

    def hindrances(self, address: Address) -> tuple[str, ...]:
        """Return what currently blocks pulls from this address."""
        ...

    @property
    def trouble(self) -> str | None:
        """Return what the shard waits for before it can journal, if anything."""
        ...

    def when_back(self, work: Callable[[], None]) -> None: ...

    def status(self, byte_counts: Mapping[FragmentId, int]) -> ShardStatus | None:
        """Return the status of a shard with these fragments; None for one of the synchroniser's process."""
        ...


class ShardWorker:
    """``context.failed`` is called when the job cannot go on: no initial parameters, no room for them, or a bug in a merge.

    ``node_memory`` is what the nodes have: a job that begins is held against it once its model is known. ``before_order``
    makes durable the order for a new version that another machine is about to journal.
    """

    def __init__(
        self,
        context: JobContext,
        shards: Sequence[Shard],
        channel: JobChannel,
        node_memory: Callable[[], Sequence[NodeMemory]] = tuple,
        before_order: Callable[[], None] = lambda: None,
    ) -> None:
        self._context, self._shards, self.channel = context, tuple(shards), channel
        self._node_memory, self._before_order = node_memory, before_order
        # an order for a shard that is away keeps its thread until the shard is back, and others need one meanwhile
        several = context.spec.synchroniser.fragments + THREADS_MAX
        self._pool = MergePool() if len(self._shards) == 1 else MergePool(several)
        self._joining = ThreadPoolExecutor(1, "cut")
        self._owners: dict[FragmentId, Shard] = {}
        self._holders: dict[PayloadId, Shard] = {}
        self._published: dict[FragmentId, PublishedFragment] = {}
        self._shapes: dict[FragmentId, Mapping[str, Shape]] = {}
        self._steps: dict[FragmentId, int] = {}
        self._norms: dict[FragmentId, StepNorms] = {}
        self._unreadable: str | None = None
        """The checkpoint that cannot be read on, with the reason, while a rollback waits for it."""
        self._closed = threading.Event()

    # ── orders, from the pump ─────────────────────────────────────────────────────────────────────────────────────

    def seed(self, model: InitialModel) -> None:
        """Begin with this model; ``OuterStateSeeded`` follows."""
        self._pool.submit_alone(lambda: self._context.guarded(lambda: self.patiently(lambda: self._seed(model))))

    def resume(self, resumption: Resumption) -> None:
        """Begin with Θ and momentum of a checkpoint; ``OuterStateSeeded`` follows."""
        self._pool.submit_alone(lambda: self._context.guarded(lambda: self.patiently(lambda: self._resume(resumption))))

    def take_over(self, outer: OuterState, steps: Mapping[FragmentId, int]) -> Future[None]:
        """Begin with Θ as the islands of a lost synchroniser hold it; ``OuterStateSeeded`` was posted when this is done."""
        return self._pool.submit_alone(lambda: self._context.guarded(lambda: self._take_over(outer, steps)))

    def recover(self, files: JobFiles) -> None:
        """Continue from Θ as the journal has it. Raises DataError unless it is cut as this build cuts it."""
        recovered = [(shard, shard.recover(files)) for shard in self._shards]
        versions = sorted((one.facts.fragment, one) for _, own in recovered for one in own)
        self._require_own([(one.shapes, from_rows(one.facts.roles)) for _, one in versions])
        for shard, own in recovered:
            self._announce(shard, own)

    def merge(self, order: effects.MergeFragment) -> None:
        """``MergeCompleted`` follows, or ``MergeFailed`` when nothing that may be published came of it."""
        self._pool.submit(order.fragment, lambda: self._context.guarded(lambda: self._merge(order)))

    def restore(self, order: saving.RestoreFragments, folder: Callable[[int], Folder]) -> None:
        """Restore fragments behind the merges ordered so far. Posts ``FragmentRestored`` for each, or ``RollbackFailed``."""
        self._pool.submit_alone(lambda: self._context.guarded(lambda: self._restore(order, folder)))

    def cut(self) -> Future[OuterCut]:
        """Θ and momentum for a checkpoint: each fragment behind its merges ordered so far, so none waits for another."""
        cuts = [self._pool.submit(p, partial(self._cut, p)) for p in sorted(self._owners)]
        return self._joining.submit(lambda: _outer_cut([cut.result() for cut in cuts], self.patiently))

    def release(self, payload: PayloadId) -> None:
        holder = self._holders.pop(payload, None)
        for shard in self._shards if holder is None else (holder,):
            shard.release(payload)

    def close(self) -> None:
        self._closed.set()
        self._pool.close()
        self._joining.shutdown(wait=False, cancel_futures=True)
        self.channel.close()

    # ── contributions and publications, from links ────────────────────────────────────────────────────────────────

    def pull(self, fragment: FragmentId, carried: Carried, abandoned: Callable[[], bool]) -> Content:
        """Pull the bytes of an offer to where its fragment is. Raises as ``ChannelClient.pull``, and ShardAway."""
        return self._owners[fragment].pull(carried, abandoned)

    def receive(self, payload: PayloadId, fragment: FragmentId, *parts: Content) -> Held | Unusable:
        """Validate and hold the bytes of a contribution, one part from each process of its island. Raises ShardAway."""
        shard = self._holders[payload] = self._owners[fragment]
        return shard.receive(payload, fragment, *parts)

    def when_back(self, fragment: FragmentId, work: Callable[[], None]) -> None:
        """Do the work once the process that owns the fragment is there again."""
        self._owners[fragment].when_back(work)

    def hindrances(self, address: Address) -> tuple[str, ...]:
        """Return, for operators, what currently blocks pulls from this address."""
        return tuple(dict.fromkeys(words for shard in self._shards for words in shard.hindrances(address)))

    def published(self, fragment: FragmentId) -> PublishedFragment:
        return self._published[fragment]

    def whole_state(
        self, subjects: Sequence[str], holdings: Sequence[Holding]
    ) -> tuple[tuple[Version, ...], int, list[list[AnyPayload]], list[list[Carried]]]:
        """Return a state for the processes of an island: versions, logical step, and one payload per process and fragment.

        The payloads come as objects, which are to be held until they have arrived, and as a call carries them.
        """
        while True:
            published = self.all_published()
            try:
                payloads = [[p.values(holding) for p in published] for holding in holdings]
                carried = [
                    [payload.carried(subject) for payload in own]
                    for subject, own in zip(subjects, payloads, strict=True)
                ]
            except PublicationGone:
                if self._closed.wait(RETRY_S):  # until the newer version is announced
                    raise
            else:
                return tuple(p.version for p in published), max(self._steps.values()), payloads, carried

    def all_published(self) -> list[PublishedFragment]:
        """Θ as it stands, fragment by fragment."""
        return [self._published[fragment] for fragment in sorted(self._published)]

    # ── for evaluation, exports and the status ────────────────────────────────────────────────────────────────────

    @property
    def seeded(self) -> bool:
        return len(self._published) == self._context.spec.synchroniser.fragments

    @property
    def trouble(self) -> str | None:
        """Return what shards in other processes, or a rollback that has begun, wait for, if anything."""
        troubles = (self._unreadable, *(shard.trouble for shard in self._shards))
        return "; ".join(trouble for trouble in troubles if trouble) or None

    def statuses(self) -> list[ShardStatus]:
        """Return the status of each shard in a process of its own."""
        owners, shapes = self._owners.copy(), self._shapes.copy()
        sizes = {p: 4 * sum(map(math.prod, shapes[p].values())) for p in sorted(owners)}
        own = [{p: size for p, size in sizes.items() if owners[p] is shard} for shard in self._shards]
        return [one for shard, part in zip(self._shards, own, strict=True) if (one := shard.status(part)) is not None]

    def shapes(self) -> list[Mapping[str, Shape]]:
        """Return the shapes of each fragment's pieces."""
        return [self._shapes[fragment] for fragment in sorted(self._shapes)]

    def fragment_parameters(self) -> list[int]:
        """Return how many parameters each fragment has; empty while there is no Θ."""
        shapes = self._shapes.copy() if self.seeded else {}
        return [sum(map(math.prod, shapes[fragment].values())) for fragment in sorted(shapes)]

    def norms(self) -> dict[FragmentId, StepNorms]:
        """Return the norms of each fragment's last update, if one was made in this life."""
        return dict(sorted(self._norms.copy().items()))

    def patiently(self, work: Callable[[], Result]) -> Result:
        """Do the work, again once a shard that was away is back. Raises ShardAway when the worker is closed."""
        while True:
            try:
                return work()
            except ShardAway:
                if self._closed.wait(RETRY_S):
                    raise

    # ── in the merge threads ──────────────────────────────────────────────────────────────────────────────────────

    def _seed(self, model: InitialModel) -> None:
        """One fragment is on its way at a time, and nothing before it is known that all of them have room."""
        outline, knobs = model.outline().result(), self._context.spec.synchroniser
        self._require_memory(outline.parameter_count)
        step = OuterStep.of(knobs)
        fragments = fragment_map.build(outline.shapes, knobs.fragments, outline.roles, knobs.routers_apart)
        owners = self._dealt(fragment_map.sizes(fragments, outline.shapes))
        for p, names in enumerate(fragments):
            state = initial_state(model.initial_pieces(names).result(), step, outline.roles)
            owners[p].give(FragmentId(p), state, 0)
        self._begin()

    def _require_memory(self, parameter_count: int) -> None:
        if problems := memory_problems(self._context.spec, parameter_count, self._node_memory()):
            raise InvalidJobSpec(detail="the job does not fit the memory of its nodes", problems=problems)

    def _resume(self, resumption: Resumption) -> None:
        manifest, folder = resumption.manifest, resumption.folder(self._context.roots)
        byte_counts = {file.name: file.size for file in manifest.files}
        count = len(manifest.fragments)
        owners = self._dealt([byte_counts.get(parameters_name(p), 0) for p in range(count)])
        outlines = []
        for p, state in enumerate(outer_states(folder, manifest)):
            outlines.append((shapes(state.parameters), state.roles))
            owners[p].give(FragmentId(p), state, manifest.fragments[p].step)
        self._require_own(outlines)
        self._begin()

    def _take_over(self, outer: OuterState, steps: Mapping[FragmentId, int]) -> None:
        states = {p: outer.state(p) for p in outer.fragments}
        self._require_own([(shapes(state.parameters), state.roles) for state in states.values()])
        sizes = [sum(array.nbytes for array in state.parameters.values()) for state in states.values()]
        for shard, (p, state) in zip(self._dealt(sizes), states.items(), strict=True):
            shard.give(p, state, steps[p])
        self._begin()

    def _require_own(self, outlines: Sequence[tuple[Mapping[str, Shape], Roles]]) -> None:
        """Raises DataError unless Θ, with these shapes and roles of each fragment, is cut as this build cuts it."""
        roles = {tensor: role for _, own in outlines for tensor, role in own.items()}
        apart = self._context.spec.synchroniser.routers_apart
        fragment_map.require_own([of_pieces for of_pieces, _ in outlines], roles, apart)

    def _dealt(self, sizes: Sequence[int]) -> list[Shard]:
        """Return the shard of each fragment."""
        hands = fragment_map.dealt(sizes, len(self._shards))
        owner_of = {p: shard for shard, own in zip(self._shards, hands, strict=True) for p in own}
        return [owner_of[FragmentId(p)] for p in range(len(sizes))]

    def _begin(self) -> None:
        for shard in self._shards:
            self._announce(shard, shard.begin())
        sizes, published = self.fragment_parameters(), self.all_published()
        of_routers = sizes[-1] if self._context.spec.synchroniser.routers_apart else 0
        if len(self._shards) == 1:
            name = digest({name: array for one in published for name, array in one.parameters().items()})
        else:  # no process has all of Θ
            of_fragments = {str(p): one.digest_of(EVERYTHING) for p, one in enumerate(published)}
            name = digest({p: np.frombuffer(bytes.fromhex(own), np.uint8) for p, own in of_fragments.items()})
        self._context.post(lambda at: events.OuterStateSeeded(at, sum(sizes), name, of_routers))

    def _merge(self, order: effects.MergeFragment) -> None:
        shard = self._owners[order.fragment]
        self._before_order()
        try:
            new = self.patiently(lambda: shard.merge(order))
        except (NotFinite, InputsLost) as error:
            why, merged = error.detail, tuple(item.payload for item in order.inputs)
            self._context.post(lambda at: events.MergeFailed(at, order.fragment, order.version, merged, why))
            return
        self._announce(shard, [new])
        facts = new.facts
        figures = (facts.gradient_norm, facts.router_distance, facts.router_travel)
        outcome = (facts.digest, new.seconds, facts.base_digest, new.journal_seconds, *figures)
        self._context.post(lambda at: events.MergeCompleted(at, order.fragment, order.version, *outcome))
        if new.norms is not None:  # nothing waits for what is computed of it
            with suppress(ShardAway):
                if (norms := new.norms()) is not None:
                    self._norms[order.fragment] = norms

    def _restore(self, order: saving.RestoreFragments, folder_of: Callable[[int], Folder]) -> None:
        number = order.checkpoint
        try:
            folder = folder_of(number)
            manifest = manifest_of(folder)
            if len(self._shards) == 1:
                read = list(outer_states(folder, manifest))  # all of it is read before anything is touched
            else:  # no process has all of Θ, so what is verified here is read again below
                for _ in outer_states(folder, manifest):
                    pass
        except Exception as error:  # whatever it is: the job stands where it stood
            self._context.post(partial(saving.RollbackFailed, checkpoint=number, reason=in_words(error)))
            return
        self._before_order()
        wanted = {fragment: (version, step) for fragment, version, step in order.fragments}
        for p, state in enumerate(read) if len(self._shards) == 1 else self._read_on(folder, manifest, number):
            if (fragment := FragmentId(p)) in wanted:
                shard = self._owners[fragment]
                new = self.patiently(partial(shard.restore, fragment, *wanted[fragment], state))
                self._announce(shard, [new])
                self._context.post(_restored(number, new))

    def _read_on(self, folder: Folder, manifest: Manifest, number: int) -> Iterator[tuple[int, FragmentState]]:
        """Yield each fragment of the checkpoint once, however long it cannot be read: some are restored already."""
        count, states = 0, enumerate(outer_states(folder, manifest))
        while count < len(manifest.fragments):
            try:
                state = next(state for p, state in states if p == count)
            except Exception as error:
                self._unreadable = f"checkpoint {number} cannot be read, and the job goes back to it: {in_words(error)}"
                log.warning("%s", self._unreadable)
                if self._closed.wait(REREAD_S):
                    raise
                states = enumerate(outer_states(folder, manifest))
                continue
            self._unreadable = None
            yield count, state
            count += 1

    def _cut(self, fragment: FragmentId) -> FragmentCut:
        return self.patiently(lambda: self._owners[fragment].cut(fragment))

    def moved(self, shard: Shard, moved: Undated, lost: Sequence[Announceable]) -> None:
        """Have the tape know that a shard moved, and which of its fragments have the version before the last one for it."""
        self._context.post(moved)
        self._announce(shard, lost)
        for one in lost:
            self._context.post(_restored(saving.FromJournal(), one))

    def _announce(self, shard: Shard, versions: Sequence[Announceable]) -> None:
        for one in versions:
            fragment = FragmentId(one.facts.fragment)
            self._owners[fragment], self._shapes[fragment] = shard, one.shapes
            self._steps[fragment], self._published[fragment] = one.facts.step, one.published


class LocalShard:
    """The shard of this process: ``ParameterShard`` with what it published and this process's end of the channel."""

    def __init__(self, shard: ParameterShard, endpoint: Endpoint, outer_step: OuterStep) -> None:
        """``outer_step`` are the settings of merges from the first version on."""
        self._shard, self._endpoint, self._outer_step = shard, endpoint, outer_step
        self._first: dict[FragmentId, tuple[FragmentState, int]] = {}
        self._published: dict[FragmentId, Published] = {}
        self.trouble: str | None = None
        """The retrier of this process says what it waits for."""

    def give(self, fragment: FragmentId, state: FragmentState, step: int) -> None:
        self._first[fragment] = (state, step)

    def begin(self) -> list[Announceable]:
        first, self._first = self._first, {}
        outer = OuterState.restored({p: state for p, (state, _) in first.items()}, self._outer_step)
        steps = {p: step for p, (_, step) in first.items()}
        return [self._announceable(new, shapes(self._state(new).parameters)) for new in self._shard.seed(outer, steps)]

    def recover(self, files: JobFiles) -> list[Announceable]:
        assert files.outer is not None
        return self.recover_from(files.outer, files.merges)

    def recover_from(self, outer: OuterState, merges: Sequence[Facts]) -> list[Announceable]:
        """Continue from Θ as the journal has it; ``merges`` are the last of each fragment."""
        publications = {p.fragment: p for p in self._shard.recover(outer, merges)}
        return [
            Announceable(self._publish(publications[p]), facts, shapes(outer.state(p).parameters))
            for p, facts in ((FragmentId(facts.fragment), facts) for facts in merges)
        ]

    def merge(self, order: effects.MergeFragment) -> Announceable:
        began, before = time.monotonic(), self._shard.state(order.fragment).parameters
        new = self._shard.merge(order)
        published = self._publish(new.publication)
        seconds, after = time.monotonic() - began, self._shard.state(order.fragment)

        def norms() -> StepNorms:
            return norms_of_update(after.version, before, after.parameters, after.residue)

        return Announceable(published, new.facts, shapes(after.parameters), seconds, new.journal_seconds, norms)

    def restore(self, fragment: FragmentId, version: Version, step: int, state: FragmentState) -> Announceable:
        new = self._shard.restore(fragment, version, step, state)
        return self._announceable(new, shapes(state.parameters))

    def cut(self, fragment: FragmentId) -> FragmentCut:
        state, step = self._shard.states()[fragment]
        return FragmentCut(fragment, Fragment(state.version, step, state.digest, rows_of(state.roles)), lambda: state)

    def pull(self, carried: Carried, abandoned: Callable[[], bool]) -> memoryview:
        return self._endpoint.received(carried, abandoned)

    def receive(self, payload: PayloadId, fragment: FragmentId, *parts: Content) -> Held | Unusable:
        return self._shard.receive(payload, fragment, *cast(tuple[memoryview, ...], parts))

    def release(self, payload: PayloadId) -> None:
        self._shard.release(payload)

    def hindrances(self, address: Address) -> tuple[str, ...]:
        return self._endpoint.hindrances(address)

    def when_back(self, work: Callable[[], None]) -> None:
        """Do the work: this process is there."""
        work()

    def status(self, byte_counts: Mapping[FragmentId, int]) -> None:
        """Return nothing: the job's status is that of this process."""

    def published(self, fragment: FragmentId) -> Published:
        return self._published[fragment]

    def _state(self, new: NewVersion) -> FragmentState:
        return self._shard.state(FragmentId(new.facts.fragment))

    def _announceable(self, new: NewVersion, of_pieces: Mapping[str, Shape]) -> Announceable:
        return Announceable(self._publish(new.publication), new.facts, of_pieces, journal_seconds=new.journal_seconds)

    def _publish(self, publication: Publication) -> Published:
        before = self._published.get(publication.fragment)
        published = self._published[publication.fragment] = Published(publication, before, self._endpoint)
        return published


class JobChannel:
    """The job's channel for payloads, open until ``close``."""

    def __init__(self, context: JobContext) -> None:
        host = cluster.own_address()
        self._context = context
        self._terms = terms_of(context.spec)
        self._authority = None
        if encrypts(self._terms, host):
            from orchestrator.certificates.authority import JobAuthority  # a job on one machine needs no cryptography

            self._authority = JobAuthority.new(context.job)
        self.endpoint = Endpoint(self._membership(SHARD), host)

    def membership(self, process: Life, rank: int = 0) -> Membership:
        """Return the membership of an island's process, by the life that it began as."""
        island, incarnation = process
        return self._membership(rank_subject(f"{island}:{incarnation}", rank))

    def evaluator_membership(self, number: int) -> Membership:
        """Return the membership of the job's evaluator with this number."""
        return self._membership(f"evaluator {number}")

    def shard_membership(self) -> Membership:
        """Return the membership of a shard in a process of its own. To islands all shards are one."""
        return self._membership(SHARD)

    def close(self) -> None:
        self.endpoint.close()

    def _membership(self, subject: str) -> Membership:
        identity = self._authority.issue(subject) if self._authority is not None else None
        return Membership(self._context.job, subject, self._context.epoch, self._terms, identity)


def terms_of(spec: JobSpec) -> Terms:
    """Return the terms of a job's channel. With several shards no payload travels in a call of the synchroniser."""
    terms = Terms(**spec.transport.model_dump())
    return terms if spec.synchroniser.shards == 1 else replace(terms, inline_bytes_max=0)


def _outer_cut(
    cuts: Sequence[FragmentCut], patiently: Callable[[Callable[[], FragmentState]], FragmentState]
) -> OuterCut:
    """Return the cut of all fragments. One of them at a time is in memory when it is written."""

    def write(folder: Folder) -> tuple[File, ...]:
        files = [file for cut in cuts for file in write_outer(folder, {cut.fragment: patiently(cut.state)})]
        return tuple(sorted(files, key=lambda file: file.name))

    return OuterCut(tuple(cut.facts for cut in cuts), write)


def _restored(checkpoint: saving.RestoredFrom, new: Announceable) -> Callable[[float], events.Event]:
    facts = new.facts
    named = (FragmentId(facts.fragment), facts.version, checkpoint, facts.digest, facts.base_digest)
    return lambda at: saving.FragmentRestored(at, *named)
