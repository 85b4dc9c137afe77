"""The synchroniser's side of shards in processes of their own: their start, their journals, their calls, their deaths.

    ShardProcesses  starts them and has them open their journals, before the synchroniser opens the job's files
    SeveralJournals what those journals have, for the reconciliation with the tape
    RemoteShard     ``shard_worker.Shard`` by calls of ``shard_actor.ShardActor``

Bytes pass the synchroniser only one fragment at a time, for the first state, a checkpoint and an export. The order on disk
is that of one shard: the tape is durable before a merge is sent, and the answer comes once the entry is durable.

The supervisor starts a shard again that died, on the node that has its journal. Calls raise ShardAway meanwhile: merges of
its fragments are sent again, publications and offers wait, and other shards go on. Contributions that it held are lost, so a
merge that needs them fails, and islands offer the work again.

    its journal has what was announced       it continues from there, whatever node it is on
    its journal is lost, or has other bytes  it takes the versions that were announced from the islands (``salvaging``)
    its node is about to go                  a process on another node takes over all that it has, and then it ends

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError, RayError

from orchestrator.actors import ActorHandle
from orchestrator.channel.endpoint import Carried, Endpoint, Membership
from orchestrator.channel.frames import Address
from orchestrator.core import effects
from orchestrator.core.saving import LostVersion, ShardMoved
from orchestrator.core.vocabulary import FragmentId, PayloadId, Version
from orchestrator.errors import (
    AtollError,
    ConfigurationError,
    Fenced,
    InfrastructureError,
    TransferCancelled,
    TransferError,
    first_line,
    in_words,
)
from orchestrator.host.job_context import JobContext, Undated
from orchestrator.host.job_files import JobFiles
from orchestrator.host.retry import Retrier
from orchestrator.parameters.holding import Holding
from orchestrator.parameters.journal import Facts, continues
from orchestrator.parameters.outer_state import FragmentState, OuterStep
from orchestrator.parameters.shard import Held, ParameterShard, StepNorms, Unusable
from orchestrator.runtime import cluster, salvaging
from orchestrator.runtime.nodes import NodeWatch
from orchestrator.runtime.placement import Leaving
from orchestrator.runtime.published import Content, RemotePublished, ShardAway
from orchestrator.runtime.settings import shard_name, shard_prefix
from orchestrator.runtime.shard_actor import (
    Look,
    NewPublication,
    Opened,
    SeveralJournals,
    ShardActor,
    answer_of,
    arrived_state,
    calls_at_once,
    carried_state,
)
from orchestrator.runtime.shard_worker import Announceable, FragmentCut, JobChannel, LocalShard, ShardWorker
from orchestrator.runtime.supervision import Helper, Supervisor
from orchestrator.specification.config import JobSpec
from orchestrator.status import Shard as ShardStatus
from orchestrator.system.disk import LocalDisk
from orchestrator.system.run_folder import SHARDS

log = logging.getLogger(__name__)
GONE = (ActorDiedError, ActorUnschedulableError)
"""What says that a process is gone: it died, or its node did before the process was made."""
RETRY_S = 1.0
MOVE_AGAIN_S = 5.0
KEPT = "kept"
"""The momentum of a shard that moved with all that it had."""
ABANDONED_S = 0.2
"""How soon it is noticed that nobody wants an offer any more."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class ShardProcesses:
    """The processes of a job's shards, each with its journal opened. Those of an earlier synchroniser are ended."""

    def __init__(
        self, job: str, spec: JobSpec, run_dir: Path, store: str | None = None, *, is_salvaged: bool = False
    ) -> None:
        """``store`` is the URL of the service's. The journals of a job that ``is_salvaged`` are cleared.

        Raises what ``ShardActor.open`` raises, ConfigurationError where a group has no node, and InfrastructureError while a
        machine is away that alone has a journal.
        """
        self._job, self._spec, self._run_dir, self._store = job, spec, run_dir, store
        cluster.end_actors_named_from(shard_prefix(job))
        self._nodes = NodeWatch(self._down, self._leaving) if spec.synchroniser.shard_groups else None
        self._shards: tuple[RemoteShard, ...] = ()
        self.node_ids: dict[int, str] = {}
        """The nodes that have the shards' journals."""
        self.chosen: dict[int, str] = {}
        """The nodes on which the present processes are, or are being made."""
        count, is_anywhere = spec.synchroniser.shards, is_salvaged or spec.synchroniser.durability.is_mirrored
        self.handles = [self.start(number, is_anywhere=is_anywhere) for number in range(count)]
        opened = [answer_of(call) for call in [handle.call(ShardActor.open) for handle in self.handles]]
        if is_salvaged:
            ray.get([handle.call(ShardActor.clear) for handle in self.handles])
            opened = [replace(one, facts={}) for one in opened]
        for number, one in enumerate(opened):
            self.note_node(number, one.node_id)
        self.journals = SeveralJournals(self.handles, opened)

    def start(self, number: int, *, is_anywhere: bool = True) -> ActorHandle[ShardActor]:
        """Have the process of a shard made. Returns at once. Raises as the constructor does.

        If not ``is_anywhere``, no other node will do than the one that has its journal.
        """
        name = shard_name(self._job, number, uuid.uuid4().hex[:8])
        options = {
            "name": name,
            "max_restarts": 0,
            "max_concurrency": calls_at_once(self._spec),
            **self._placement(number, is_anywhere),
        }
        return cluster.start_actor(ShardActor, options, self._job, self._spec, number, str(self._run_dir), self._store)

    def watch(self, shards: Sequence[RemoteShard]) -> None:
        """Inform these shards of nodes that are down or about to go, from now on."""
        self._shards = tuple(shards)

    def place(self, number: int) -> str:
        """Return where a shard is placed, for people."""
        groups = self._groups(number)
        return f"node group {groups[0]}" if groups else "the synchroniser's node"

    def note_node(self, number: int, node_id: str) -> None:
        """Note, also for the next synchroniser, that this node has the shard's journal."""
        self.node_ids[number] = self.chosen[number] = node_id
        path, name = self._run_dir / SHARDS / f"{number}.node", cluster.name_of_node(node_id)
        if name is not None and self.node_noted(number) != name:
            path.parent.mkdir(parents=True, exist_ok=True)
            LocalDisk().replace(path, name.encode())

    def node_noted(self, number: int) -> str | None:
        """Return the name of the node that has the shard's journal."""
        try:
            return (self._run_dir / SHARDS / f"{number}.node").read_text()
        except FileNotFoundError:
            return None

    def _groups(self, number: int) -> tuple[str, ...]:
        """Return the node groups of a shard, its first choice first."""
        groups = self._spec.synchroniser.shard_groups
        first = number % len(groups) if groups else 0
        return (*groups[first:], *groups[:first])

    def _placement(self, number: int, is_anywhere: bool) -> dict[str, Any]:
        """Return Ray's options for the node of a shard: the one that has its journal, or else one of its groups."""
        groups = self._groups(number)
        if self._nodes is None:
            return {**cluster.NEXT_TO_NOTHING, **cluster.on_node()}
        nodes, name = self._nodes.placeable(), self.node_noted(number)
        here = next((node for node in nodes if node.name == name and node.group in groups), None)
        if here is not None:
            self.chosen[number] = here.id
            return {**cluster.NEXT_TO_NOTHING, **cluster.on_node(here.id)}
        if name is not None and not is_anywhere:
            raise InfrastructureError(
                detail=f"Node {name}, whose disk has the journal of shard {number}, is not there.",
                remedy="Bring it back, or resume the job from a checkpoint.",
            )
        taken = Counter(node_id for other, node_id in self.chosen.items() if other != number)
        ranked = sorted(
            (node for node in nodes if node.group in groups),
            key=lambda node: (taken[node.id], groups.index(node.group), node.name),
        )
        if not any(node.group == groups[0] for node in nodes) and name is None:
            raise ConfigurationError(
                detail=f"synchroniser.shard_groups names {groups[0]!r}, but no node of that group is there. Start one with "
                f"`atoll join --group {groups[0]}`, or name another group."
            )
        if not ranked:
            raise InfrastructureError(
                detail=f"Shard {number} was on node {name}, and no other node of {' or '.join(groups)} is there.",
                remedy=f"Start one with `atoll join --group {groups[0]}`.",
            )
        best = ranked[0] if name is not None else next(node for node in ranked if node.group == groups[0])
        self.chosen[number] = best.id
        return {**cluster.NEXT_TO_NOTHING, **cluster.on_node(best.id)}

    def _down(self, nodes: frozenset[str]) -> None:
        """Have the processes on these nodes count as dead. Ray would take minutes."""
        for shard in self._shards:
            shard.node_is_down(nodes)

    def _leaving(self, nodes: Mapping[str, Leaving]) -> None:
        for shard in self._shards:
            shard.node_leaves(nodes)


class RemoteShard:
    """``shard_worker.Shard`` in another process, which ``supervisor`` makes again when it died.

    ``on_moved`` is called once the shard is on another node or disk, before calls are answered again: with what the tape
    is to have of it, and the fragments whose last version was lost.
    """

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
        self._announced: dict[FragmentId, tuple[Facts, ...]] = {}
        """The last two versions of each fragment, oldest first."""
        self._unheld_versions: queue.SimpleQueue[tuple[FragmentId, Version]] = queue.SimpleQueue()
        self._unheld_pulls: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._waiting: list[Callable[[], None]] = []
        self._moving, self._move_again_at, self._trouble = False, 0.0, ""
        self.on_moved: Callable[[Undated, Sequence[Announceable]], None] = lambda moved, lost: None
        first = [processes.handles[number]]
        self.serving: ActorHandle[ShardActor] | None = first[0]
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
        versions = [self._announceable(new) for new in self._ask(ShardActor.recover)]
        self._announced = {p: self._processes.journals.last_two(p) for p in self._announced}
        return versions

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
        if (shard := self.serving) is not None:
            shard.call(ShardActor.release, payload)

    def hindrances(self, address: Address) -> tuple[str, ...]:
        seen = self._helper.said
        return tuple(words for own, words in seen.hindrances if own == address) if isinstance(seen, Look) else ()

    @property
    def trouble(self) -> str | None:
        seen = self._helper.said
        trouble = self._trouble or (seen.trouble if isinstance(seen, Look) else None)
        return f"shard {self._number}: {trouble}" if trouble else None

    def status(self, byte_counts: Mapping[FragmentId, int]) -> ShardStatus:
        is_moving, is_away = self._moving, self.serving is None
        return ShardStatus(
            shard=self._number,
            node=self._processes.node_noted(self._number) or "",
            fragments=list(byte_counts),
            byte_count=sum(byte_counts.values()),
            condition="moving" if is_moving else "starting" if is_away else "running",
            reason=(self.trouble or "").removeprefix(f"shard {self._number}: "),
        )

    def when_back(self, work: Callable[[], None]) -> None:
        """Do the work once the process is there again, which may be now."""
        with self._lock:
            if self.serving is None:
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
        with self._served_by(self.serving):
            return self._endpoint.received(carried)

    def unheld(self, fragment: FragmentId, version: Version) -> None:
        """Nobody holds this version any more. The garbage collector calls it, in any thread."""
        self._unheld_versions.put((fragment, version))

    def unheld_content(self, key: int) -> None:
        """Nobody holds what was pulled under this key. The garbage collector calls it, in any thread."""
        self._unheld_pulls.put(key)

    # ── calls, and the process's deaths ───────────────────────────────────────────────────────────────────────────

    def _present(self) -> ActorHandle[ShardActor]:
        if (shard := self.serving) is None:
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
            if shard is not None and self.serving is shard:
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
                if self.serving is shard:
                    self.serving = None
            raise ShardAway(detail=f"The process of shard {self._number} died.") from error
        except Fenced as error:
            if self._helper.handle is shard:
                raise  # by another synchroniser
            raise ShardAway(detail=f"Shard {self._number} goes on in another process.") from error
        except ActorUnavailableError as error:  # its machine does not answer for a moment; calls may be made twice
            raise ShardAway(detail=f"The process of shard {self._number} does not answer.") from error

    def _made(self) -> None:
        """Have the new process continue. Called in the supervisor's thread, which does not wait for it."""
        self._in_thread(self._continue, self._helper.handle)

    def _in_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        guarded, name = partial(self._context.guarded, work, *arguments), f"shard-{self._number}"
        threading.Thread(target=guarded, name=name, daemon=True).start()

    def _continue(self, shard: ActorHandle[ShardActor]) -> None:
        """Continue in the new process, however long it cannot have its journal. Raises DataError if nobody has a version."""
        with self._lock:
            self.serving = None
        while not self._continued(shard):
            if self._helper.handle is not shard:
                return  # it died, too
            time.sleep(RETRY_S)
        self._serve(shard)

    def _serve(self, shard: ActorHandle[ShardActor]) -> None:
        self._processes.handles[self._number] = shard
        with self._lock:
            self.serving, self._trouble = shard, ""
            waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    def _continued(self, shard: ActorHandle[ShardActor]) -> bool:
        try:
            opened = answer_of(shard.call(ShardActor.open))
            if not self._announced:  # there is no Θ yet, and all of it is given again
                answer_of(shard.call(ShardActor.clear))
            answer_of(shard.call(ShardActor.join, self._membership))
            if self._announced:
                self._go_on(shard, opened)
            self._processes.note_node(self._number, opened.node_id)
        except (*GONE, ActorUnavailableError, InfrastructureError) as error:
            log.warning("shard %d does not continue yet: %s", self._number, first_line(error))
            return False
        return True

    def _go_on(self, shard: ActorHandle[ShardActor], opened: Opened) -> None:
        """Go on from the journal, and from what islands hold where that has other versions than were announced."""
        node, before = cluster.name_of_node(opened.node_id) or "", self._processes.node_noted(self._number)
        # a merge that was not announced counts in the journal of the last stay alone: another's may have failed since
        is_last = node == before or self._context.spec.synchroniser.durability.is_mirrored
        newest = {p: (one[-1], opened.facts.get(p, {})) for p, one in sorted(self._announced.items())}
        lacking = [p for p, compared in newest.items() if not continues(*compared, with_next=is_last)]
        if not lacking:
            answer_of(shard.call(ShardActor.recover))
            if node != before:
                self.on_moved(self._moved(node, "its journal", KEPT, (), f"node {before} is gone"), ())
            return
        self._trouble = f"the journal of the fragments {lacking} is lost; they are taken from islands"
        taken = salvaging.salvage_shard(self._context, shard, {p: self._announced[p] for p in lacking}, self._endpoint)
        lost = {one.fragment: one.version for one in taken.lost}
        versions = answer_of(shard.call(ShardActor.go_on, lost, self._context.epoch))
        self._announced |= {p: self._announced[p][:1] for p in lost}  # islands have that, and not the lost version
        restored = [self._announceable(new) for new in versions if new.facts.fragment in lost]
        why = f"node {before} is gone" if node != before else "its journal lacks what was announced"
        source = "its journal and what islands hold" if len(lacking) < len(self._announced) else "what islands hold"
        self.on_moved(self._moved(node, source, taken.momentum, taken.lost, why), restored)

    def _moved(self, node: str, source: str, momentum: str, lost: Sequence[LostVersion], reason: str) -> Undated:
        facts = (self._number, node, tuple(sorted(self._announced)), source, momentum, tuple(lost), reason)
        return lambda at: ShardMoved(at, *facts)

    # ── its node ──────────────────────────────────────────────────────────────────────────────────────────────────

    def node_is_down(self, nodes: frozenset[str]) -> None:
        """Have the process count as dead if it was on one of these nodes."""
        if self._processes.chosen.get(self._number) in nodes:
            cluster.end_actor(self._helper.handle)

    def node_leaves(self, nodes: Mapping[str, Leaving]) -> None:
        """Move to another node if the process is on one of these, which are about to go. Idempotent."""
        leaving = nodes.get(self._processes.node_ids.get(self._number, ""))
        with self._lock:
            is_due = time.monotonic() >= self._move_again_at and self.serving is not None
            if leaving is None or self._moving or not is_due or not self._announced:
                return
            self._moving = True
        self._in_thread(self._move, leaving.cause)

    def _move(self, cause: str) -> None:
        """Hand all fragments over to a process on another node, one after another, then go on there. No version is lost.

        If that fails before this process is ended, it goes on.
        """
        old, new, is_kept = self.serving, None, True
        if old is None:
            self._moving = False
            return
        try:
            new = self._processes.start(self._number)
            answer_of(new.call(ShardActor.join, self._membership))
            for fragment in sorted(self._announced):
                facts, state = answer_of(old.call(ShardActor.hand_over, fragment))
                answer_of(new.call(ShardActor.take_state, facts, state))
            with self._lock:
                self.serving, is_kept = None, False
            self._helper.exchange(new)
            cluster.end_actor(old)  # the two may see the same folder, which one process at a time writes
            opened = answer_of(new.call(ShardActor.open))
            answer_of(new.call(ShardActor.go_on, {}, self._context.epoch))
            self._processes.note_node(self._number, opened.node_id)
            node = cluster.name_of_node(opened.node_id) or ""
            self.on_moved(self._moved(node, "the process before", KEPT, (), cause), ())
            self._serve(new)
        except (RayError, AtollError) as error:
            self._trouble = f"its node is about to go ({cause}), and it cannot move: {in_words(error)}"
            log.warning("shard %d: %s", self._number, self._trouble)
            if new is not None:
                cluster.end_actor(new)  # the supervisor makes another if it was exchanged
            if is_kept:
                self._processes.chosen[self._number] = self._processes.node_ids[self._number]
                with suppress(RayError):
                    ray.get(old.call(ShardActor.keep))
        finally:
            self._moving, self._move_again_at = False, time.monotonic() + MOVE_AGAIN_S

    def _announceable(self, new: NewPublication) -> Announceable:
        fragment, facts = FragmentId(new.facts.fragment), new.facts
        versions = [one for one in self._announced.get(fragment, ()) if one.version < facts.version]
        self._announced[fragment] = (*versions[-1:], facts)
        published = RemotePublished(self, fragment, facts.version, facts.digest, new.usual_bytes)

        def norms() -> StepNorms | None:
            return self._ask(ShardActor.norms, fragment)

        return Announceable(published, facts, new.shapes, new.seconds, new.journal_seconds, norms)


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
    is_async = context.spec.synchroniser.durability.kind == "async"  # then the tape may lose what a journal has
    before_order = (lambda: None) if is_async else sync_tape
    worker = ShardWorker(context, remote, channel, cluster.node_memory, before_order)
    for shard in remote:
        shard.on_moved = partial(worker.moved, shard)
    processes.watch(remote)
    return worker
