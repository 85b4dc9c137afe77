"""The actor of a shard: one process with its part of the fragments, its own journal, and its own end of the job's channel.

    islands  ──offers, pulled──▶ ShardActor ──publications, pulled──▶ islands
                                 ▲ orders   │ versions, digests, tickets: plain data
                                 synchroniser (``runtime.remote_shard``)

Bytes travel between islands and the shard directly. A version is answered once its journal entry is durable. A merge that
the journal has is answered from there. A merge whose contributions died with an earlier process fails.

Every call may come twice, the second while the first is still at work: Ray makes no promise about a call whose answer was
lost. So one order for a fragment waits for the one before.

A lock beside the journal excludes a second process that writes it. Responsible for nothing that needs the tape or the time.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayTaskError

from orchestrator.actors import ActorHandle
from orchestrator.channel.endpoint import Carried, Endpoint, Membership
from orchestrator.channel.frames import SHARD, Address
from orchestrator.checkpoints.manifest import Fragment
from orchestrator.core import effects
from orchestrator.core.vocabulary import Epoch, FragmentId, PayloadId, Version
from orchestrator.errors import AtollError, DataError, InfrastructureError, InternalError, TransferError, in_words
from orchestrator.host.job_files import mirror, versions_kept
from orchestrator.host.retry import JOURNAL_REFUSES, STORE_REFUSES, Retrier
from orchestrator.parameters import wire_format
from orchestrator.parameters.holding import Holding
from orchestrator.parameters.journal import Content as Entry
from orchestrator.parameters.journal import Facts, Journal, set_back
from orchestrator.parameters.journaled_store import (
    append_set_back,
    momentum_at_last,
    recovered,
    replace_fragment,
    state_at,
)
from orchestrator.parameters.outer_state import FragmentState, NotFinite, OuterStep, initial_state
from orchestrator.parameters.pieces import Roles, Shape, from_rows
from orchestrator.parameters.shard import Held, ParameterShard, StepNorms, Unusable, is_journalled
from orchestrator.parameters.tensors import Tensors, digest
from orchestrator.parameters.wire_format import InvalidPayload
from orchestrator.runtime import cluster
from orchestrator.runtime.published import PublicationGone, Published, ShardAway, spoiled
from orchestrator.runtime.shard_worker import Announceable, FragmentCut, LocalShard
from orchestrator.specification.config import JobSpec
from orchestrator.system import logbook
from orchestrator.system.disk import Disk, LocalDisk
from orchestrator.system.mirror import JobObjects, shard_log
from orchestrator.system.object_store import open_store
from orchestrator.system.run_folder import JOURNAL, SHARDS

log = logging.getLogger(__name__)
LOCK_TIMEOUT_S = 10.0
CALLS_MIN = 64
"""Calls that a shard answers at once, beside the pulls of offers."""
RETRY_S, LOOK_S = 0.2, 0.5
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Opened:
    """A shard's journal: the facts of each version that can be restored, by fragment. ``node_id`` is Ray's."""

    node_id: str
    facts: Mapping[FragmentId, Mapping[Version, Facts]]
    damage: tuple[str, ...]
    foreign: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NewPublication:
    """An ``Announceable`` as plain data."""

    facts: Facts
    shapes: Mapping[str, Shape]
    usual_bytes: int
    seconds: float = 0.0
    journal_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CarriedState:
    """A ``FragmentState`` on its way to another process: its arrays are pulled over the job's channel."""

    version: Version
    digest: str
    roles: Roles
    parameters: Carried
    momentum: Carried
    residue: Carried


@dataclass(frozen=True, slots=True)
class Look:
    """A shard's troubles, for operators: what blocks its pulls, by address, and what it waits for before it can journal."""

    hindrances: tuple[tuple[Address, str], ...]
    trouble: str | None


class ShardActor:
    """The actor that Ray makes. ``open`` and ``join`` come first, then ``recover``, ``give`` and ``begin``, or ``go_on``."""

    def __init__(self, job: str, spec: JobSpec, number: int, run_dir: str, store: str | None = None) -> None:
        """``store`` is the URL of the service's, in which a shard of a mirrored job has its journal, too."""
        logbook.keep(logbook.service_logbook(Path(run_dir), "shard", number + 1))
        self._job, self._spec, self._number, self._store = job, spec, number, store
        self._folder = Path(run_dir) / SHARDS / str(number)
        self._outer_step = OuterStep.of(spec.synchroniser)
        self._retrier = Retrier()
        self._endpoint: Endpoint
        self._journal: Journal
        self._opening = threading.Lock()
        self._lock: Any = None
        self._ordering: dict[FragmentId, threading.Lock] = {}
        self._given: set[FragmentId] = set()
        self._pulled: dict[int, memoryview] = {}
        self._abandoned: set[int] = set()
        self._newest: dict[FragmentId, NewPublication] = {}
        self._published: dict[tuple[FragmentId, Version], Published] = {}
        self._norms: dict[FragmentId, Callable[[], StepNorms | None]] = {}
        self._cuts: dict[FragmentId, FragmentCut] = {}
        self._served: dict[FragmentId, list[Any]] = {}
        self._taken: dict[FragmentId, tuple[Facts, FragmentState]] = {}
        self._momenta: dict[FragmentId, Tensors] = {}
        self._handed_over: dict[FragmentId, list[Any]] = {}
        """The fragments that another process is to go on with: nothing is done with them here any more."""

    def open(self) -> Opened:
        """Open the journal once no other process writes it. Raises InfrastructureError, DataError."""
        with self._opening:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._lock or _locked(self._folder / "lock")
            try:
                if not hasattr(self, "_journal"):
                    self._journal = self._opened_journal()
                    if hasattr(self, "_endpoint"):
                        self._serve()
            except OSError as error:
                raise DataError(detail=f"The journal in {self._folder} cannot be read: {error}.") from error
            journal = self._journal
            self._retrier.until_done(JOURNAL_REFUSES, journal.settle)
        facts = {p: {version: journal.facts(p, version) for version in journal.versions(p)} for p in journal.fragments}
        log.info("shard %d of %s has the fragments %s", self._number, self._job, sorted(facts))
        return Opened(cluster.own_node_id(), facts, tuple(journal.damage), tuple(journal.foreign))

    def _opened_journal(self) -> Journal:
        durability, own = self._spec.synchroniser.durability, LocalDisk()
        disk: Disk = own
        if durability.is_mirrored:
            assert self._store is not None
            objects = JobObjects(open_store(self._store), shard_log(self._job, self._number))
            disk = self._retrier.until_done(STORE_REFUSES, lambda: mirror(self._folder, objects, own))
        return Journal(
            self._folder / JOURNAL,
            versions_kept=versions_kept(self._spec.synchroniser.staleness_max),
            merges_max=durability.merges_max if durability.kind == "async" else 0,
            disk=disk,
        )

    def clear(self) -> None:
        self._journal.clear()

    def set_back(self, fragment: FragmentId, lost: Version, epoch: Epoch) -> Facts:
        """Put the version before the lost one in the place of that, as the next one. Returns the facts of the entry."""
        with self._opening:
            if self._journal.newest(fragment) == lost - 1:
                append_set_back(self._journal, fragment, epoch, self._outer_step)
            return self._journal.facts(fragment, Version(lost + 1))

    def drop_newest(self, fragment: FragmentId) -> str:
        return self._journal.drop_newest(fragment)

    def join(self, membership: Membership) -> None:
        """Join the channel of this synchroniser."""
        if hasattr(self, "_endpoint"):
            self._endpoint.close()
        self._endpoint = Endpoint(membership, cluster.own_address())
        if hasattr(self, "_journal"):
            self._serve()

    def _serve(self) -> None:
        epoch = Epoch(self._endpoint.membership.epoch)
        self._shard = ParameterShard(self._journal, epoch, self._retrier.until_done)
        self._local = LocalShard(self._shard, self._endpoint, self._outer_step)

    def look(self) -> Look:
        """Return what is in the way."""
        hindered = self._endpoint.client.hindrances.current() if hasattr(self, "_endpoint") else ()
        addresses = dict.fromkeys(one.address for one in hindered)
        words = tuple((address, text) for address in addresses for text in self._endpoint.hindrances(address))
        time.sleep(LOOK_S)  # the call is made again at once
        return Look(words, self._retrier.trouble)

    # ── the first Θ, and orders ───────────────────────────────────────────────────────────────────────────────────

    def give(self, fragment: FragmentId, state: CarriedState, step: int) -> None:
        self._local.give(fragment, self._arrived(state), step)
        self._given.add(fragment)

    def begin(self, fragments: Collection[FragmentId]) -> list[NewPublication]:
        """Journal these fragments. Raises ShardAway if some were given to a process before this one."""
        with self._opening:
            if lost := set(fragments) - self._given:
                raise ShardAway(
                    detail=f"Shard {self._number} died with the first state of the fragments {sorted(lost)}."
                )
            self._given.clear()
            return [self._plain(one) for one in self._local.begin()]

    def recover(self) -> list[NewPublication]:
        outer, merges = recovered(self._journal, self._journal.fragments, self._outer_step)
        return [self._plain(one) for one in self._local.recover_from(outer, merges)]

    def merge(self, order: effects.MergeFragment) -> NewPublication:
        """Take the outer step and journal it. A merge that is in the journal is answered from there."""
        with self._order_for(order.fragment):
            newest = self._newest[order.fragment]
            if is_journalled(newest.facts, order, self._shard.holds):
                return newest
            return self._plain(self._local.merge(order))

    def restore(self, fragment: FragmentId, version: Version, step: int, state: CarriedState) -> NewPublication:
        with self._order_for(fragment):
            newest = self._newest[fragment]
            if newest.facts.version != version:
                return self._plain(self._local.restore(fragment, version, step, self._arrived(state)))
            if newest.facts.digest != state.digest:  # it was set back meanwhile, to the same version
                facts = replace(newest.facts, step=step, digest=state.digest)
                self._taken[fragment] = (facts, self._arrived(state))
                self.go_on({}, facts.epoch)
            return self._newest[fragment]

    def norms(self, fragment: FragmentId) -> StepNorms | None:
        """Return the norms of the last update, once."""
        norms = self._norms.pop(fragment, None)
        return norms() if norms is not None else None

    def cut(self, fragment: FragmentId) -> Fragment:
        """Keep the fragment as it is, until the next cut."""
        cut = self._cuts[fragment] = self._local.cut(fragment)
        return cut.facts

    def cut_state(self, fragment: FragmentId, version: Version) -> CarriedState:
        """Serve the arrays of a cut. Raises InfrastructureError if a process before this one made it, and it has passed."""
        cut = self._cuts.get(fragment)
        if cut is None or cut.facts.version != version:
            cut = self._local.cut(fragment)
        if cut.facts.version != version:
            detail = f"shard {self._number} died with version {version} of fragment {fragment} before it was saved"
            raise InfrastructureError(detail=detail)
        carried, self._served[fragment] = carried_state(self._endpoint, cut.state())
        return carried

    def saved(self, fragment: FragmentId) -> None:
        """Forget the cut of a fragment."""
        self._cuts.pop(fragment, None)
        self._served.pop(fragment, None)
        self._endpoint.withdraw_unheld()

    # ── fragments from elsewhere ──────────────────────────────────────────────────────────────────────────────────

    def hand_over(self, fragment: FragmentId) -> tuple[Facts, CarriedState]:
        """Do nothing with the fragment any more, and serve its newest version to the process that goes on with it."""
        with self._ordering.setdefault(fragment, threading.Lock()):
            state = self._local.cut(fragment).state()
            carried, self._handed_over[fragment] = carried_state(self._endpoint, state)
            return self._newest[fragment].facts, carried

    def keep(self) -> None:
        """Go on with the fragments that were handed over: nobody took them."""
        self._handed_over.clear()
        self._endpoint.withdraw_unheld()

    def take_state(self, facts: Facts, state: CarriedState) -> None:
        """Pull a fragment as another process of this shard hands it over. ``go_on`` follows."""
        self._taken[FragmentId(facts.fragment)] = (facts, self._arrived(state))

    def take_momentum(self, fragment: FragmentId, carried: Carried) -> None:
        """Pull a fragment's momentum as a checkpoint has it, for the parameters that ``take_parameters`` brings."""
        self._momenta[fragment] = wire_format.decode(self._endpoint.received(carried))

    def take_parameters(self, facts: Facts, carried: Carried) -> str:
        """Pull the parameters of a version, which an island has. ``go_on`` follows. Return why not; empty if it was done.

        Momentum is the journal's own, if that has an earlier version, else that of a checkpoint, else zero.
        """
        fragment = FragmentId(facts.fragment)
        try:
            arrays = wire_format.parse(self._endpoint.received(carried)).all_decoded()
            if digest(arrays) != facts.digest:
                return "the bytes have another digest"
            first = initial_state(arrays, self._outer_step, from_rows(facts.roles))
        except (TransferError, InvalidPayload, NotFinite) as error:
            return in_words(error)
        own = momentum_at_last(self._journal, fragment, self._outer_step) or self._momenta.pop(fragment, {})
        momentum = own if own.keys() == first.momentum.keys() else first.momentum
        self._taken[fragment] = (facts, replace(first, version=facts.version, momentum=momentum))
        return ""

    def take_own(self, facts: Facts) -> bool:
        """Take a version from the own journal, which lacks later ones. ``go_on`` follows. Return whether it is there."""
        fragment = FragmentId(facts.fragment)
        try:
            if self._journal.facts(fragment, facts.version).digest != facts.digest:
                return False
            self._taken[fragment] = (facts, state_at(self._journal, fragment, facts.version, self._outer_step))
        except (DataError, OSError):
            return False
        return True

    def go_on(self, lost: Mapping[FragmentId, Version], epoch: Epoch) -> list[NewPublication]:
        """Journal what was taken in the place of what the journal has of these fragments, and continue from the journal.

        Fragments in ``lost`` have an earlier version than that one, which is lost, and take the number after it.
        """
        with self._opening:
            taken, self._taken = self._taken, {}
            for fragment, (facts, state) in taken.items():
                entry = set_back(facts, lost[fragment], epoch) if fragment in lost else facts
                replace_fragment(self._journal, entry, state, self._retrier.until_done)
            self._retrier.until_done(JOURNAL_REFUSES, self._journal.settle)
            self._serve()
            return self.recover()

    # ── contributions ─────────────────────────────────────────────────────────────────────────────────────────────

    def pull(self, key: int, carried: Carried) -> int:
        """Pull the bytes of an offer and keep them under ``key``. Returns how many they are."""
        try:
            content = self._local.pull(carried, lambda: key in self._abandoned)
        finally:
            self._abandoned.discard(key)
        self._pulled[key] = content
        return len(content)

    def abandon(self, key: int) -> None:
        """End the pull with this key, if it is under way."""
        self._abandoned.add(key)

    def receive(self, payload: PayloadId, fragment: FragmentId, parts: Sequence[tuple[int, bool]]) -> Held | Unusable:
        """Validate and hold what was pulled under these keys; those with True are spoiled first, by chaos.

        Raises ShardAway if a process before this one pulled some of it.
        """
        if fragment in self._handed_over:
            raise ShardAway(detail=f"Shard {self._number} moves to another node.")
        if any(key not in self._pulled for key, _ in parts):
            raise ShardAway(detail=f"Shard {self._number} died with bytes that it had pulled for {payload}.")
        contents = [
            spoiled(self._pulled.pop(key)) if is_spoiled else self._pulled.pop(key) for key, is_spoiled in parts
        ]
        return self._local.receive(payload, fragment, *contents)

    def release(self, payload: PayloadId) -> None:
        self._local.release(payload)

    # ── publications ──────────────────────────────────────────────────────────────────────────────────────────────

    def digest_of(self, fragment: FragmentId, version: Version, holding: Holding) -> str:
        return self._version(fragment, version).digest_of(holding)

    def values(self, fragment: FragmentId, version: Version, holding: Holding) -> tuple[str, int]:
        payload = self._version(fragment, version).values(holding)
        return payload.name, payload.byte_count

    def since(
        self, fragment: FragmentId, version: Version, held: Version | None, holding: Holding
    ) -> tuple[Version | None, list[tuple[str, int]]]:
        shipment = self._version(fragment, version).since(held, holding)
        return shipment.since, [(payload.name, payload.byte_count) for payload in shipment.payloads]

    def ticket(self, name: str, receiver: str) -> Carried:
        return self._endpoint.server.ticket(name, receiver)

    def let_go(self, versions: Sequence[tuple[FragmentId, Version]], pulled: Sequence[int]) -> None:
        """Nobody needs these versions and pulled bytes any more. The newest version of a fragment stays."""
        for fragment, version in versions:
            if self._newest[fragment].facts.version != version:
                self._published.pop((fragment, version), None)
        for key in pulled:
            self._pulled.pop(key, None)
        self._endpoint.withdraw_unheld()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _order_for(self, fragment: FragmentId) -> Iterator[None]:
        """Do one order for a fragment after another. Raises ShardAway for one that another process goes on with."""
        with self._ordering.setdefault(fragment, threading.Lock()):
            if fragment in self._handed_over:
                raise ShardAway(detail=f"Shard {self._number} moves to another node.")
            yield

    def _version(self, fragment: FragmentId, version: Version) -> Published:
        published = self._published.get((fragment, version))
        if published is None:
            raise PublicationGone(detail=f"Shard {self._number} has no version {version} of fragment {fragment}.")
        return published

    def _plain(self, one: Announceable) -> NewPublication:
        fragment, published = FragmentId(one.facts.fragment), self._local.published(FragmentId(one.facts.fragment))
        new = NewPublication(one.facts, one.shapes, published.usual_bytes, one.seconds, one.journal_seconds)
        self._published[fragment, published.version] = published
        self._newest[fragment] = new
        if one.norms is not None:
            self._norms[fragment] = one.norms
        return new

    def _arrived(self, state: CarriedState) -> FragmentState:
        return arrived_state(self._endpoint, state)


def calls_at_once(spec: JobSpec) -> int:
    """Return how many calls a shard answers at once: each process of each island may have an offer pulled, twice over while
    its island is replaced. If such pulls took all threads, those that end them would not be answered.
    """
    return CALLS_MIN + 2 * sum(section.process_count for section in spec.island_sections(slots=True).values())


def _locked(path: Path) -> Any:
    """Return the file, locked until this process ends. Raises InfrastructureError if another keeps it."""
    file, give_up_at = open(path, "ab"), time.monotonic() + LOCK_TIMEOUT_S  # noqa: SIM115  (until the process ends)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError as error:
            if time.monotonic() > give_up_at:
                raise InfrastructureError(detail=f"Another process writes the journal beside {path}.") from error
            time.sleep(RETRY_S)


def carried_state(endpoint: Endpoint, state: FragmentState) -> tuple[CarriedState, list[Any]]:
    """Serve the state's arrays. Returns the state for a call, and the payloads, which are served while they are held."""
    payloads = [endpoint.payload(f"state/{state.version}", wire_format.encode(arrays)) for arrays in state.arrays()]
    parameters, momentum, residue = (payload.carried(SHARD) for payload in payloads)
    return CarriedState(state.version, state.digest, state.roles, parameters, momentum, residue), payloads


def arrived_state(endpoint: Endpoint, state: CarriedState) -> FragmentState:
    """Pull the arrays of a state from the process that serves it."""
    carried = (state.parameters, state.momentum, state.residue)
    parameters, momentum, residue = (wire_format.decode(endpoint.received(one)) for one in carried)
    return FragmentState(state.version, parameters, momentum, state.digest, state.roles, residue)


def answer_of(call: ray.ObjectRef[Answer]) -> Answer:
    """Return the answer. Raises our own errors as they were raised there, and RayError."""
    try:
        answer: Answer = ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, AtollError):
            raise error.cause from None
        raise
    return answer


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

    def set_back(self, fragment: FragmentId, epoch: Epoch) -> None:
        shard = next(shard for shard, one in zip(self._shards, self._opened, strict=True) if fragment in one.facts)
        lost = Version(max(self._facts[fragment]) + 1)
        entry = answer_of(shard.call(ShardActor.set_back, fragment, lost, epoch))
        self._facts[fragment][entry.version] = entry

    def last_two(self, fragment: FragmentId) -> tuple[Facts, ...]:
        """Return the facts of the newest version and of the one before, as far as the journal has them, oldest first."""
        newest = max(self._facts[fragment])
        return tuple(self._facts[fragment][v] for v in (Version(newest - 1), newest) if v in self._facts[fragment])
