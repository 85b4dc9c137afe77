"""The synchroniser's side of shards in processes of their own: their start, their journals, their calls, their deaths.

    ShardProcesses  starts them and has them open their journals, before the synchroniser opens the job's files
    SeveralJournals what those journals have, for the reconciliation with the tape
    RemoteShard     ``shard_worker.Shard`` by calls of ``shard_actor.ShardActor``

Bytes pass the synchroniser only one fragment at a time, for the first state, a checkpoint and an export. The order on disk
is that of one shard: the tape is made durable before a merge is sent, and the answer comes once the entry is durable.

The supervisor starts a shard again that died. It continues from its journal, on the same node. Calls raise ShardAway
meanwhile: merges of its fragments are sent again, publications and offers wait, and other shards go on. Contributions that
it held are lost, so a merge that needs them fails, and islands offer the work again.

A synchroniser ends the shards of its predecessor and starts its own.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError, RayTaskError

from orchestrator.actors import ActorHandle
from orchestrator.channel.endpoint import Carried, Endpoint, Membership
from orchestrator.channel.frames import SHARD, Address
from orchestrator.core import effects
from orchestrator.core.vocabulary import FragmentId, PayloadId, Version
from orchestrator.errors import (
    AtollError,
    ConfigurationError,
    DataError,
    InfrastructureError,
    InternalError,
    TransferCancelled,
    TransferError,
    first_line,
)
from orchestrator.host.job_context import JobContext
from orchestrator.host.job_files import JobFiles
from orchestrator.host.retry import Retrier
from orchestrator.parameters import wire_format
from orchestrator.parameters.holding import EVERYTHING, Holding
from orchestrator.parameters.journal import Content as Entry
from orchestrator.parameters.journal import Facts
from orchestrator.parameters.outer_state import FragmentState, OuterStep
from orchestrator.parameters.shard import Held, ParameterShard, StepNorms, Unusable
from orchestrator.parameters.tensors import Tensors
from orchestrator.runtime import cluster
from orchestrator.runtime.published import Content, ShardAway, Shipment
from orchestrator.runtime.settings import GROUP_LABEL, shard_name, shard_prefix
from orchestrator.runtime.shard_actor import Look, NewPublication, Opened, ShardActor, arrived_state, carried_state
from orchestrator.runtime.shard_worker import Announceable, FragmentCut, JobChannel, LocalShard, ShardWorker
from orchestrator.runtime.supervision import Helper, Supervisor
from orchestrator.specification.config import JobSpec
from orchestrator.system.disk import LocalDisk
from orchestrator.system.run_folder import SHARDS

log = logging.getLogger(__name__)
CALLS_MIN = 64
"""Calls that a shard answers at once, beside the pulls of offers."""
GONE = (ActorDiedError, ActorUnschedulableError)
"""What says that a process is gone: it died, or its node did before the process was made."""
RETRY_S = 1.0
ABANDONED_S = 0.2
"""How soon it is noticed that nobody wants an offer any more."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class SeveralJournals:
    """The journals of a job's shards, as the synchroniser sees them at its start. Only the shards write them."""

    def __init__(self, shards: Sequence[ActorHandle[ShardActor]], opened: Sequence[Opened]) -> None:
        """``shards`` has the present process of each, also after a death."""
        self._shards, self._opened = shards, opened
        self.damage = [f"shard {n}: {what}" for n, one in enumerate(opened) for what in one.damage]
        self.foreign = [f"{SHARDS}/{n}/{name}" for n, one in enumerate(opened) for name in one.foreign]
        self._facts = {p: dict(own) for one in opened for p, own in one.facts.items() if own}
        owners = [p for one in opened for p in one.facts]
        if twice := sorted({p for p in owners if owners.count(p) > 1}):
            raise DataError(detail=f"Two shards have a journal of the fragments {twice}: they are of different jobs.")

    @property
    def fragments(self) -> tuple[FragmentId, ...]:
        return tuple(sorted(self._facts))

    def newest(self, fragment: FragmentId) -> Version | None:
        return max(self._facts.get(fragment, {}), default=None)

    def facts(self, fragment: FragmentId, version: Version) -> Facts:
        return self._facts[fragment][version]

    def append(self, facts: Facts, content: Entry) -> None:
        raise InternalError(detail="The synchroniser writes no entry for a shard in another process.")

    def settle(self) -> None:
        """Do nothing: a shard makes its journal durable when it opens it."""

    def clear(self) -> None:
        ray.get([shard.call(ShardActor.clear) for shard in self._shards])
        self._facts = {}

    def drop_newest(self, fragment: FragmentId) -> str:
        shard = next(shard for shard, one in zip(self._shards, self._opened, strict=True) if fragment in one.facts)
        del self._facts[fragment][max(self._facts[fragment])]
        dropped: str = ray.get(shard.call(ShardActor.drop_newest, fragment))
        return dropped


class ShardProcesses:
    """The processes of a job's shards, each with its journal opened. Those of an earlier synchroniser are ended."""

    def __init__(self, job: str, spec: JobSpec, run_dir: Path) -> None:
        """Raises what ``ShardActor.open`` raises, ConfigurationError where a group has no node, and InfrastructureError
        while a machine with a journal is away.
        """
        self._job, self._spec, self._run_dir = job, spec, run_dir
        cluster.end_actors_named_from(shard_prefix(job))
        self.handles = [self.start(number) for number in range(spec.synchroniser.shards)]
        opened = [answer_of(call) for call in [handle.call(ShardActor.open) for handle in self.handles]]
        for number, one in enumerate(opened):
            self._note_node(number, one.node_id)
        self.journals = SeveralJournals(self.handles, opened)

    def start(self, number: int) -> ActorHandle[ShardActor]:
        """Have the process of a shard made. Returns at once. Raises as the constructor does."""
        name = shard_name(self._job, number, uuid.uuid4().hex[:8])
        options = {
            "name": name,
            "max_restarts": 0,
            "max_concurrency": calls_at_once(self._spec),
            **self._placement(number),
        }
        return cluster.start_actor(ShardActor, options, self._job, self._spec, number, str(self._run_dir))

    def place(self, number: int) -> str:
        """Return where a shard is placed, for people."""
        group = self._group(number)
        return f"node group {group}" if group is not None else "the synchroniser's node"

    def _group(self, number: int) -> str | None:
        groups = self._spec.synchroniser.shard_groups
        return groups[number % len(groups)] if groups else None

    def _placement(self, number: int) -> dict[str, Any]:
        """Return Ray's options for the node of a shard: in its group, and later the one whose disk has its journal."""
        group = self._group(number)
        if group is None:
            return {**cluster.NEXT_TO_NOTHING, **cluster.on_node()}
        nodes = [node for node in cluster.nodes() if node.group == group]
        name = self._node_noted(number)
        if name is None and not nodes:
            raise ConfigurationError(
                detail=f"synchroniser.shard_groups names {group!r}, but no node of that group is there. Start one with "
                f"`atoll join --group {group}`, or name another group."
            )
        if name is None:
            return {**cluster.NEXT_TO_NOTHING, "label_selector": {GROUP_LABEL: group}}
        node = next((node for node in nodes if node.name == name), None)
        if node is None:
            raise InfrastructureError(
                detail=f"Node {name}, whose disk has the journal of shard {number}, is not there.",
                remedy="Bring it back.",
            )
        return {**cluster.NEXT_TO_NOTHING, **cluster.on_node(node.id)}

    def _node_noted(self, number: int) -> str | None:
        try:
            return (self._run_dir / SHARDS / f"{number}.node").read_text()
        except FileNotFoundError:
            return None

    def _note_node(self, number: int, node_id: str) -> None:
        path, name = self._run_dir / SHARDS / f"{number}.node", cluster.name_of_node(node_id)
        if name is not None and self._node_noted(number) != name:
            path.parent.mkdir(parents=True, exist_ok=True)
            LocalDisk().replace(path, name.encode())


def calls_at_once(spec: JobSpec) -> int:
    """Return how many calls a shard answers at once: each host of each island may have an offer pulled, twice over while
    its island is replaced. If such pulls took all threads, those that end them would not be answered.
    """
    return CALLS_MIN + 2 * sum(section.hosts for section in spec.island_sections(slots=True).values())


def answer_of(call: ray.ObjectRef[Answer]) -> Answer:
    """Return the answer. Raises our own errors as they were raised there, and RayError."""
    try:
        answer: Answer = ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, AtollError):
            raise error.cause from None
        raise
    return answer


class RemoteShard:
    """``shard_worker.Shard`` in another process, which ``supervisor`` makes again when it died."""

    def __init__(
        self,
        context: JobContext,
        number: int,
        processes: ShardProcesses,
        membership: Membership,
        endpoint: Endpoint,
        supervisor: Supervisor,
    ) -> None:
        self._context, self._number, self._membership, self._endpoint = context, number, membership, endpoint
        self._processes, self._keys = processes, itertools.count(1)
        self._lock = threading.Lock()
        self._given: set[FragmentId] = set()
        self._newest: dict[FragmentId, Version] = {}
        self._unheld_versions: queue.SimpleQueue[tuple[FragmentId, Version]] = queue.SimpleQueue()
        self._unheld_pulls: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._waiting: list[Callable[[], None]] = []
        first = [processes.handles[number]]
        self._serving: ActorHandle[ShardActor] | None = first[0]
        answer_of(first[0].call(ShardActor.join, membership))
        self._helper: Helper[ShardActor] = supervisor.add(
            Helper(
                f"shard {number} on {processes.place(number)}",
                lambda: first.pop() if first else processes.start(number),
                on_made=self._made,
                ask=ShardActor.look,
            )
        )

    # ── shard_worker.Shard ────────────────────────────────────────────────────────────────────────────────────────

    def give(self, fragment: FragmentId, state: FragmentState, step: int) -> None:
        carried, payloads = carried_state(self._endpoint, state)
        self._ask(ShardActor.give, fragment, carried, step)
        self._given.add(fragment)
        del payloads

    def begin(self) -> list[Announceable]:
        return [self._announceable(new) for new in self._ask(ShardActor.begin, self._given)]

    def recover(self, files: JobFiles) -> list[Announceable]:
        return [self._announceable(new) for new in self._ask(ShardActor.recover)]

    def merge(self, order: effects.MergeFragment) -> Announceable:
        return self._announceable(self._ask(ShardActor.merge, order))

    def restore(self, fragment: FragmentId, version: Version, step: int, state: FragmentState) -> Announceable:
        carried, payloads = carried_state(self._endpoint, state)
        new = self._ask(ShardActor.restore, fragment, version, step, carried)
        del payloads
        return self._announceable(new)

    def cut(self, fragment: FragmentId) -> FragmentCut:
        facts = self._ask(ShardActor.cut, fragment)
        version = Version(facts.version)

        def state() -> FragmentState:
            with self._served_by(self._present()):
                arrived = arrived_state(self._endpoint, self._ask(ShardActor.cut_state, fragment, version))
            self._ask(ShardActor.saved, fragment)
            return arrived

        return FragmentCut(fragment, facts, state)

    def pull(self, carried: Carried, abandoned: Callable[[], bool]) -> Content:
        shard, key = self._present(), next(self._keys)
        call = shard.call(ShardActor.pull, key, carried)
        while not ray.wait([call], timeout=ABANDONED_S)[0]:
            if abandoned():
                shard.call(ShardActor.abandon, key)
        return PulledContent(self, key, self._answer(shard, call))

    def receive(self, payload: PayloadId, fragment: FragmentId, *parts: Content) -> Held | Unusable:
        pulled = [(part.key, part.is_spoiled) for part in parts if isinstance(part, PulledContent)]
        return self._ask(ShardActor.receive, payload, fragment, pulled)

    def release(self, payload: PayloadId) -> None:
        if (shard := self._serving) is not None:
            shard.call(ShardActor.release, payload)

    def hindrances(self, address: Address) -> tuple[str, ...]:
        seen = self._helper.said
        return tuple(words for own, words in seen.hindrances if own == address) if isinstance(seen, Look) else ()

    @property
    def trouble(self) -> str | None:
        seen = self._helper.said
        return f"shard {self._number}: {seen.trouble}" if isinstance(seen, Look) and seen.trouble else None

    def when_back(self, work: Callable[[], None]) -> None:
        """Do the work once the process is there again, which may be now."""
        with self._lock:
            if self._serving is None:
                self._waiting.append(work)
                return
        work()

    # ── publications, called by ``RemotePublished`` ───────────────────────────────────────────────────────────────

    def digest_of(self, fragment: FragmentId, version: Version, holding: Holding) -> str:
        return self._ask(ShardActor.digest_of, fragment, version, holding)

    def values(self, fragment: FragmentId, version: Version, holding: Holding) -> tuple[str, int]:
        return self._ask(ShardActor.values, fragment, version, holding)

    def since(
        self, fragment: FragmentId, version: Version, held: Version | None, holding: Holding
    ) -> tuple[Version | None, list[tuple[str, int]]]:
        return self._ask(ShardActor.since, fragment, version, held, holding)

    def ticket(self, name: str, receiver: str) -> Carried:
        return self._ask(ShardActor.ticket, name, receiver)

    def arrived(self, carried: Carried) -> memoryview:
        """Pull a payload of the shard into this process."""
        with self._served_by(self._serving):
            return self._endpoint.received(carried)

    def unheld(self, fragment: FragmentId, version: Version) -> None:
        """Nobody holds this version any more. The garbage collector calls it, in any thread."""
        self._unheld_versions.put((fragment, version))

    def unheld_content(self, key: int) -> None:
        """Nobody holds what was pulled under this key. The garbage collector calls it, in any thread."""
        self._unheld_pulls.put(key)

    # ── calls, and the process's deaths ───────────────────────────────────────────────────────────────────────────

    def _present(self) -> ActorHandle[ShardActor]:
        if (shard := self._serving) is None:
            raise ShardAway(detail=f"The process of shard {self._number} is being started again.")
        return shard

    @contextmanager
    def _served_by(self, shard: ActorHandle[ShardActor] | None) -> Iterator[None]:
        """Raise ShardAway where a pull fails because this process, which served it, is not there any more."""
        try:
            yield
        except TransferCancelled:
            raise
        except TransferError as error:
            if shard is not None and self._serving is shard:
                raise
            raise ShardAway(detail=f"The process of shard {self._number} died while it was read.") from error

    def _ask(
        self,
        method: Callable[Concatenate[ShardActor, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        shard = self._present()
        versions, pulls = drained(self._unheld_versions), drained(self._unheld_pulls)
        if versions or pulls:
            shard.call(ShardActor.let_go, versions, pulls)
        return self._answer(shard, shard.call(method, *arguments, **named))

    def _answer(self, shard: ActorHandle[ShardActor], call: ray.ObjectRef[Answer]) -> Answer:
        try:
            return answer_of(call)
        except GONE as error:
            with self._lock:
                if self._serving is shard:
                    self._serving = None
            raise ShardAway(detail=f"The process of shard {self._number} died.") from error
        except ActorUnavailableError as error:  # its machine does not answer for a moment; calls may be made twice
            raise ShardAway(detail=f"The process of shard {self._number} does not answer.") from error

    def _made(self) -> None:
        """Have the new process continue from the journal. Called in the supervisor's thread, which does not wait for it."""
        threading.Thread(
            target=self._context.guarded, args=(self._continue,), name=f"shard-{self._number}", daemon=True
        ).start()

    def _continue(self) -> None:
        """Continue in the new process, however long it cannot have its journal. Raises DataError if that lacks a version."""
        shard = self._helper.handle
        with self._lock:
            self._serving = None
        while not self._continued(shard):
            if self._helper.handle is not shard:
                return  # it died, too
            time.sleep(RETRY_S)
        log.warning("shard %d continues from its journal", self._number)
        self._processes.handles[self._number] = shard
        with self._lock:
            self._serving = shard
            waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    def _continued(self, shard: ActorHandle[ShardActor]) -> bool:
        try:
            opened = answer_of(shard.call(ShardActor.open))
            if not self._newest:  # there is no Θ yet, and all of it is given again
                answer_of(shard.call(ShardActor.clear))
            answer_of(shard.call(ShardActor.join, self._membership))
            if self._newest:
                self._require_announced(opened)
                answer_of(shard.call(ShardActor.recover))
        except (*GONE, ActorUnavailableError, InfrastructureError) as error:
            log.warning("shard %d does not continue yet: %s", self._number, first_line(error))
            return False
        return True

    def _require_announced(self, opened: Opened) -> None:
        for fragment, version in sorted(self._newest.items()):
            newest = max(opened.facts.get(fragment, {}), default=None)
            if newest not in (version, version + 1):
                has = "nothing" if newest is None else f"version {newest}"
                raise DataError(
                    detail=f"The journal of shard {self._number} has {has} of fragment {fragment}, but version {version} "
                    "was published: merges that islands already hold are lost. Resume from a checkpoint."
                )

    def _announceable(self, new: NewPublication) -> Announceable:
        fragment, facts = FragmentId(new.facts.fragment), new.facts
        self._newest[fragment] = facts.version
        published = RemotePublished(self, fragment, facts.version, facts.digest, new.usual_bytes)

        def norms() -> StepNorms | None:
            return self._ask(ShardActor.norms, fragment)

        return Announceable(published, facts, new.shapes, new.seconds, new.journal_seconds, norms)


class RemotePublished:
    """``published.PublishedFragment`` in another process, which keeps it as long as this object lives."""

    def __init__(
        self, shard: RemoteShard, fragment: FragmentId, version: Version, digest: str, usual_bytes: int
    ) -> None:
        self.version, self._shard, self._fragment, self._digest = version, shard, fragment, digest
        self._usual_bytes = usual_bytes
        weakref.finalize(self, shard.unheld, fragment, version).atexit = False

    @property
    def usual_bytes(self) -> int:
        return self._usual_bytes

    def digest_of(self, holding: Holding) -> str:
        return self._shard.digest_of(self._fragment, self.version, holding) if holding.parts else self._digest

    def values(self, holding: Holding = EVERYTHING) -> RemotePayload:
        return RemotePayload(self._shard, self, *self._shard.values(self._fragment, self.version, holding))

    def since(self, held: Version | None, holding: Holding = EVERYTHING) -> Shipment:
        since, payloads = self._shard.since(self._fragment, self.version, held, holding)
        return Shipment(since, [RemotePayload(self._shard, self, *payload) for payload in payloads])

    def parameters(self) -> Tensors:
        return wire_format.decode(self._shard.arrived(self.values().carried(SHARD)))


@dataclass(frozen=True, slots=True)
class RemotePayload:
    """A payload that a shard in another process serves, as long as ``published`` is held."""

    shard: RemoteShard
    published: RemotePublished
    name: str
    byte_count: int
    inline: bool = False

    def carried(self, receiver: str) -> Carried:
        return self.shard.ticket(self.name, receiver)


class PulledContent:
    """The bytes of an offer that a shard in another process has pulled. They are dropped there when nobody holds this."""

    def __init__(self, shard: RemoteShard, key: int, byte_count: int, *, is_spoiled: bool = False) -> None:
        self.key, self.is_spoiled, self._byte_count = key, is_spoiled, byte_count
        self._origin: PulledContent | None = None
        if not is_spoiled:
            weakref.finalize(self, shard.unheld_content, key).atexit = False
        self._shard = shard

    def __len__(self) -> int:
        return self._byte_count

    def spoiled(self) -> PulledContent:
        copy = PulledContent(self._shard, self.key, self._byte_count, is_spoiled=True)
        copy._origin = self
        return copy


def drained(items: queue.SimpleQueue[Answer]) -> list[Answer]:
    """Take all that is in the queue now."""
    taken: list[Answer] = []
    while True:
        try:
            taken.append(items.get_nowait())
        except queue.Empty:
            return taken


def one_shard(context: JobContext, files: JobFiles, channel: JobChannel, retrier: Retrier) -> ShardWorker:
    """Return the worker of a job whose only shard is in this process."""
    parameters = ParameterShard(files.journal, files.epoch, retrier.until_done)
    local = LocalShard(parameters, channel.endpoint, OuterStep.of(context.spec.synchroniser))
    return ShardWorker(context, [local], channel, cluster.node_memory)


def several_shards(
    context: JobContext,
    processes: ShardProcesses,
    channel: JobChannel,
    supervisor: Supervisor,
    sync_tape: Callable[[], None],
) -> ShardWorker:
    """Return the worker of shards in processes of their own."""
    remote = [
        RemoteShard(context, number, processes, channel.shard_membership(), channel.endpoint, supervisor)
        for number in range(context.spec.synchroniser.shards)
    ]
    return ShardWorker(context, remote, channel, cluster.node_memory, sync_tape)
