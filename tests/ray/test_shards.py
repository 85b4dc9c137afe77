"""Several shards of one job: the same bits as one, and a life of their own."""

from __future__ import annotations

import fcntl
import itertools
import os
import queue
import shutil
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from orchestrator.actors import ModelOutline
from orchestrator.channel.endpoint import Endpoint, Membership, Payload, Terms
from orchestrator.channel.frames import SHARD, Ticket
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.reading import outer_states
from orchestrator.core import commands, events, saving
from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import (
    CloseReason,
    Epoch,
    FragmentId,
    IslandId,
    PayloadId,
    Version,
    WeightedPayload,
)
from orchestrator.errors import InfrastructureError, TransferError
from orchestrator.host.job_context import JobContext
from orchestrator.parameters import fragment_map, wire_format
from orchestrator.parameters.holding import EVERYTHING
from orchestrator.parameters.journal import Journal
from orchestrator.parameters.outer_state import OuterStep, initial_state
from orchestrator.parameters.shard import Held, InputsLost, ParameterShard, Unusable
from orchestrator.parameters.tensors import Tensors, digest
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.specification.config import parse_job
from orchestrator.status import Shard as ShardStatus
from orchestrator.system import object_store
from orchestrator.system.roots import AllowedRoots
from tests.ray.conftest import start_in
from tests.ray.jobs import ENDLESS, Job, assert_sound, pids_of, synthetic
from tests.ray.test_export import answer, tensors_of
from tests.waiting import PATIENCE_S

FRAGMENTS, VERSIONS = 6, 3
SPEC = parse_job(
    {
        "islands": [{"node_group": "here"}],
        "budget": {"steps": 10},
        "synchroniser": {"fragments": FRAGMENTS, "wire": "int4"},
    }
)
SHAPES = {f"w{number}": (40 + 3 * number, 16) for number in range(9)}
FIXED_MAP = fragment_map.build(SHAPES, FRAGMENTS)


class InCalls:
    """The end of a channel by which nothing travels: all of it is small enough for a call."""

    membership = Membership("job", SHARD, 1, Terms(inline_bytes_max=1 << 30))

    def payload(self, name: str, content: memoryview) -> Payload:
        return Payload(IN_CALLS, name, content)


IN_CALLS: Any = InCalls()


class Model:
    def outline(self) -> Future[ModelOutline]:
        return done(ModelOutline(SHAPES, {}))

    def initial_pieces(self, names: Sequence[str]) -> Future[Tensors]:
        generator = np.random.default_rng(1)
        whole = {name: generator.standard_normal(shape, np.float32) for name, shape in sorted(SHAPES.items())}
        return done(fragment_map.pieces_of(whole, (tuple(names),)))


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Channel:
    def close(self) -> None:
        """Nothing is open."""


def seeded(
    folder: Path,
    shard_count: int,
    before_order: Callable[[], None] = lambda: None,
    begin: Callable[[Any], None] = lambda worker: worker.seed(Model()),
    wrapped: Callable[[Any], Any] = lambda shard: shard,
) -> tuple[Any, queue.Queue[Any], list[Journal]]:
    """Return a worker with so many shards in this process, what it posts after Θ is there, and their journals."""
    from orchestrator.runtime.shard_worker import LocalShard, ShardWorker

    posted: queue.Queue[Any] = queue.Queue()
    channel: Any = Channel()
    context = JobContext(
        "job",
        SPEC,
        folder,
        AllowedRoots(),
        Epoch(1),
        lambda: 0.0,
        lambda make: posted.put(make(0.0)) or 0,
        posted.put,
        lambda: 0,
    )
    journals = [Journal(folder / str(number)) for number in range(shard_count)]
    shards = [ParameterShard(journal, Epoch(1), lambda _, work: work()) for journal in journals]
    step = OuterStep.of(SPEC.synchroniser)
    local = [wrapped(LocalShard(shard, IN_CALLS, step)) for shard in shards]
    worker = ShardWorker(context, local, channel, before_order=before_order)
    begin(worker)
    assert isinstance(posted.get(timeout=PATIENCE_S), events.OuterStateSeeded)
    return worker, posted, journals


def story(folder: Path, shard_count: int) -> tuple[Any, ...]:
    """All that a job with so many shards in this process says of a few merges, and the checkpoint after them."""
    worker, posted, journals = seeded(folder, shard_count)
    said, generator = [], np.random.default_rng(2)
    for version in range(1, VERSIONS + 1):
        for p, names in enumerate(FIXED_MAP):
            inputs = []
            for island, weight in (("a", 0.25), ("b", 0.75)):
                learned = {name: generator.standard_normal(published_shape(worker, name), np.float32) for name in names}
                payload = PayloadId(f"{island}.{p}.{version}")
                content = wire_format.encode(learned, "int4", Version(version - 1))
                assert isinstance(worker.receive(payload, FragmentId(p), content), Held)
                inputs.append(WeightedPayload(payload, IslandId(island), weight))
            everyone = (tuple(inputs), CloseReason.EVERYONE_IN, "")
            worker.merge(MergeFragment(Epoch(1), FragmentId(p), Version(version), version, *everyone))
    cut = worker.cut()
    for _ in range(VERSIONS * FRAGMENTS):
        event = posted.get(timeout=PATIENCE_S)
        assert isinstance(event, events.MergeCompleted), event
        said.append((event.fragment, event.version, event.digest, event.base_digest))
    taken = cut.result(PATIENCE_S)
    files = taken.write(Folder.own(folder / "checkpoint"))
    versions, logical_step, payloads, _ = worker.whole_state(["a:1"], [EVERYTHING])
    whole = [digest(wire_format.decode(np.asarray(payload.carried("a:1")).data)) for payload in payloads[0]]
    assert sum(len(journal.fragments) for journal in journals) == FRAGMENTS
    assert all(len(journal.fragments) >= FRAGMENTS // shard_count for journal in journals)
    sizes, norms = worker.fragment_parameters(), worker.norms()
    worker.close()
    return sorted(said), taken.fragments, files, versions, logical_step, whole, sizes, norms


class Mortal:
    """A shard of this process that is away while ``is_there`` is not set."""

    def __init__(self, shard: Any) -> None:
        self._shard, self.is_there = shard, threading.Event()
        self.is_there.set()

    def status(self, byte_counts: Mapping[FragmentId, int]) -> ShardStatus:
        facts = {"condition": "running", "reason": "", "byte_count": sum(byte_counts.values())}
        return ShardStatus(shard=0, node="", fragments=list(byte_counts), **facts)

    def __getattr__(self, name: str) -> Any:
        from orchestrator.runtime.published import ShardAway

        if name in ("merge", "cut") and not self.is_there.is_set():
            raise ShardAway(detail="It died.")
        return getattr(self._shard, name)


class Course:
    """Merges of a job, each the same in every run: one round of all fragments after another."""

    def __init__(self, worker: Any, posted: queue.Queue[Any], version: int = 0) -> None:
        self.worker, self._posted, self.version = worker, posted, version

    def order_round(self) -> None:
        self.version += 1
        for p, names in enumerate(FIXED_MAP):
            generator = np.random.default_rng([p, self.version])
            learned = {n: generator.standard_normal(self.worker.shapes()[p][n], np.float32) for n in names}
            payload = PayloadId(f"a.{p}.{self.version}")
            content = wire_format.encode(learned, "int4", Version(self.version - 1))
            assert isinstance(self.worker.receive(payload, FragmentId(p), content), Held)
            inputs = (WeightedPayload(payload, IslandId("a"), 1.0),)
            facts = (Version(self.version), self.version, inputs, CloseReason.EVERYONE_IN, "")
            self.worker.merge(MergeFragment(Epoch(1), FragmentId(p), *facts))

    def merged(self, count: int) -> set[int]:
        """Return the fragments of the next merges that are made."""
        done = [self._posted.get(timeout=PATIENCE_S) for _ in range(count)]
        assert {(type(event), event.version) for event in done} == {(events.MergeCompleted, self.version)}
        return {event.fragment for event in done}

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.order_round()
            self.merged(FRAGMENTS)


def mortal(folder: Path, shard_count: int, resumption: Any) -> tuple[Any, queue.Queue[Any], Mortal]:
    """Return a worker that begins, or resumes, what it posts, and its last shard."""
    shards: list[Mortal] = []

    def wrapped(shard: Any) -> Mortal:
        shards.append(Mortal(shard))
        return shards[-1]

    def begin(worker: Any) -> None:
        if resumption is None:
            worker.seed(Model())
        else:
            worker.resume(resumption)

    worker, posted, _ = seeded(folder, shard_count, begin=begin, wrapped=wrapped)
    return worker, posted, shards[-1]


def test_a_checkpoint_is_one_cut_while_a_shard_dies_and_is_resumed_by_any_number_of_shards(tmp_path: Path) -> None:
    worker, posted, _ = seeded(tmp_path / "whole", 1)
    Course(worker, posted).rounds(6)
    whole = worker.cut().result(PATIENCE_S).write(Folder.own(tmp_path / "whole-cut"))
    worker.close()

    resumption: Any = None
    for number, shard_count in enumerate((1, 4, 2)):
        start = 2 * number
        worker, posted, last = mortal(tmp_path / f"{shard_count}", shard_count, resumption)
        course = Course(worker, posted, start)
        course.rounds(1)
        course.order_round()
        course.merged(FRAGMENTS)
        last.is_there.clear()
        cut, away = worker.cut(), set(worker.statuses()[-1].fragments)
        if shard_count > 1:
            course.order_round()  # behind the cut: no part of it
            assert course.merged(FRAGMENTS - len(away)) == set(range(FRAGMENTS)) - away
        assert not cut.done()
        last.is_there.set()
        taken = cut.result(PATIENCE_S)
        assert {one.version for one in taken.fragments} == {start + 2}
        folder = Folder.own(tmp_path / f"cut-{number}")
        files = taken.write(folder)
        if shard_count > 1:
            assert course.merged(len(away)) == away
        worker.close()
        manifest = SimpleNamespace(fragments=taken.fragments, files=files)
        resumption = SimpleNamespace(manifest=manifest, folder=lambda _, folder=folder: folder)
    assert files == whole


def published_shape(worker: Any, name: str) -> Any:
    return next(own[name] for own in worker.shapes() if name in own)


@pytest.mark.parametrize("shard_count", [2, 3, 6])
def test_several_shards_make_the_same_bits_as_one(tmp_path: Path, shard_count: int) -> None:
    assert story(tmp_path / "several", shard_count) == story(tmp_path / "one", 1)


def test_a_rollback_is_on_the_tape_before_a_shard_has_it_and_outlives_a_folder_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.runtime import shard_worker

    journalled: list[list[int]] = []

    def sync() -> None:
        journalled.append([journal.newest(p) or 0 for journal in journals for p in journal.fragments])

    worker, posted, journals = seeded(tmp_path, 2, sync)
    cut = worker.cut().result(PATIENCE_S)
    folder = Folder.own(tmp_path / "checkpoint")
    files = cut.write(folder)
    of_cut: Any = SimpleNamespace(fragments=cut.fragments, files=files)
    states = list(outer_states(folder, of_cut))
    readings = itertools.count(1)

    def read(*_: Any) -> Iterator[Any]:
        reading = next(readings)
        for p, state in enumerate(states):
            if reading == 2 and p == 1:
                raise OSError("the folder is away")
            yield state

    monkeypatch.setattr(shard_worker, "outer_states", read)
    monkeypatch.setattr(shard_worker, "manifest_of", lambda _: of_cut)
    wanted = tuple((FragmentId(p), Version(1), 0) for p in range(FRAGMENTS))
    worker.restore(saving.RestoreFragments(Epoch(1), 1, wanted), lambda _: folder)
    restored = [posted.get(timeout=PATIENCE_S) for _ in range(FRAGMENTS)]
    assert [(event.fragment, event.version) for event in restored] == [(p, 1) for p in range(FRAGMENTS)]
    assert journalled == [[0] * FRAGMENTS]
    assert worker.trouble is None
    worker.close()


@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=40), shard_count=st.integers(1, 12))
def test_fragments_are_dealt_evenly_by_bytes_and_each_once(sizes: list[int], shard_count: int) -> None:
    hands = fragment_map.dealt(sizes, shard_count)
    assert sorted(p for hand in hands for p in hand) == list(range(len(sizes)))
    heaviest = max(sum(sizes[p] for p in hand) for hand in hands)
    # Graham 1969, "Bounds on multiprocessing timing anomalies", for any order: the mean, and the largest but for its share
    assert heaviest * shard_count <= sum(sizes) + max(sizes) * (shard_count - 1)
    if len(sizes) >= shard_count:
        assert all(hands)


@pytest.fixture
def started(port: object, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Starts the process of a shard with its journal in this folder. The one before it is ended."""
    from orchestrator.runtime import cluster
    from orchestrator.runtime.shard_actor import ShardActor, answer_of
    from orchestrator.runtime.shard_worker import terms_of

    spec = SPEC.model_copy(update={"synchroniser": SPEC.synchroniser.model_copy(update={"shards": 2})})
    prefix = f"{tmp_path.name}:"

    def start() -> Any:
        cluster.end_actors_named_from(prefix)
        options = {
            "name": f"{prefix}{uuid.uuid4().hex}",
            "max_concurrency": 8,
            **cluster.on_node(),
            **cluster.NEXT_TO_NOTHING,
        }
        handle = cluster.start_actor(ShardActor, options, "job", spec, 0, str(tmp_path))

        def call(method: Callable[..., Any], *arguments: Any) -> Any:
            return answer_of(handle.call(method, *arguments))

        call(ShardActor.open)
        call(ShardActor.join, Membership("job", SHARD, 1, terms_of(spec)))
        return call

    yield start
    cluster.end_actors_named_from(prefix)


@pytest.mark.ray
def test_a_shard_that_comes_back_answers_what_it_journalled_and_fails_what_it_lost(started: Callable[[], Any]) -> None:
    from orchestrator.runtime.published import PublicationGone
    from orchestrator.runtime.shard_actor import ShardActor, carried_state

    fragment, island = FragmentId(0), Endpoint(Membership("job", "a:1", 1, Terms(inline_bytes_max=0)), "127.0.0.1")
    first = initial_state({"w0": np.ones((40, 16), np.float32)}, OuterStep.of(SPEC.synchroniser))
    offer = wire_format.encode({"w0": np.full((40, 16), 0.5, np.float32)}, "int4", Version(0))
    served = island.payload("offer", offer)

    def receive(shard: Any, key: int) -> PayloadId:
        assert shard(ShardActor.pull, key, served.carried(SHARD)) == len(offer)
        assert isinstance(shard(ShardActor.receive, PayloadId(f"a.{key}"), fragment, [(key, False)]), Held)
        return PayloadId(f"a.{key}")

    def order(payload: PayloadId, version: int) -> MergeFragment:
        inputs = (WeightedPayload(payload, IslandId("a"), 1.0),)
        return MergeFragment(Epoch(1), fragment, Version(version), version, inputs, CloseReason.EVERYONE_IN, "")

    shard = started()
    state, payloads = carried_state(island, first)
    shard(ShardActor.give, fragment, state, 0)
    shard(ShardActor.begin, {fragment})
    merged_payload = receive(shard, 1)
    merged = shard(ShardActor.merge, order(merged_payload, 1))
    spoilt = shard(ShardActor.pull, 2, served.carried(SHARD))
    assert isinstance(shard(ShardActor.receive, PayloadId("spoilt"), fragment, [(2, True)]), Unusable), spoilt
    held = receive(shard, 3)

    shard = started()
    (recovered,) = shard(ShardActor.recover)
    assert recovered.facts == merged.facts
    assert shard(ShardActor.merge, order(merged_payload, 1)).facts == merged.facts
    with pytest.raises(InputsLost, match="offer the work again"):
        shard(ShardActor.merge, order(held, 2))
    with pytest.raises(PublicationGone):
        shard(ShardActor.values, fragment, Version(0), EVERYTHING)
    name, byte_count = shard(ShardActor.values, fragment, Version(1), EVERYTHING)
    values = island.received(shard(ShardActor.ticket, name, "a:1"))
    assert (len(values), digest(wire_format.decode(values))) == (byte_count, merged.facts.digest)
    assert shard(ShardActor.merge, order(receive(shard, 4), 2)).facts.base_digest == merged.facts.digest
    island.close()
    del payloads


class Process:
    """What Ray gives of a shard's process. Each call is answered by ``answer``."""

    def __init__(self) -> None:
        self.answer: Callable[[], Any] = lambda: None

    def has(self, _: Any) -> bool:
        return True

    def call(self, *_: Any) -> Callable[[], Any]:
        return lambda: self.answer()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Process, Endpoint]]:
    """A shard in another process as its synchroniser has it, that process, and the synchroniser's end of the channel."""
    from orchestrator.runtime import remote_shard

    monkeypatch.setattr(remote_shard, "answer_of", lambda call: call())
    membership = Membership("job", SHARD, 1, Terms(inline_bytes_max=0, stall_s=0.2))
    endpoint, process, nothing = Endpoint(membership, "127.0.0.1"), Process(), cast(Any, None)
    processes: Any = SimpleNamespace(handles=[process], place=lambda number: "a node")
    supervisor: Any = SimpleNamespace(add=lambda helper: helper)
    yield remote_shard.RemoteShard(nothing, 0, processes, membership, endpoint, supervisor), process, endpoint
    endpoint.close()


def test_a_shard_with_a_dead_node_is_away_like_one_that_died(remote: tuple[Any, Process, Endpoint]) -> None:
    from ray.exceptions import ActorUnschedulableError

    from orchestrator.runtime.published import ShardAway

    shard, process, _ = remote

    def fail() -> None:
        raise ActorUnschedulableError("the node is dead")

    process.answer = fail
    with pytest.raises(ShardAway):
        shard.digest_of(FragmentId(0), Version(0), EVERYTHING)
    waits: list[bool] = []
    shard.when_back(lambda: waits.append(False))
    assert not waits


def test_a_read_that_ends_with_its_shard_is_made_again_and_one_from_a_shard_that_lives_fails(
    remote: tuple[Any, Process, Endpoint],
) -> None:
    from ray.exceptions import ActorDiedError

    from orchestrator.runtime.published import ShardAway

    shard, process, endpoint = remote
    served = Endpoint(endpoint.membership, "127.0.0.1")
    payload = served.payload("values", wire_format.encode({"w0": np.ones((40, 16), np.float32)}))
    ticket = replace(cast(Ticket, payload.carried(SHARD)), local=None)
    served.close()
    with pytest.raises(TransferError):
        shard.arrived(ticket)

    def fail() -> None:
        raise ActorDiedError

    process.answer = fail
    with pytest.raises(ShardAway):
        shard.digest_of(FragmentId(0), Version(0), EVERYTHING)
    with pytest.raises(ShardAway, match="died while it was read"):
        shard.arrived(ticket)


def test_pulls_from_all_hosts_at_once_leave_a_shard_threads_to_end_them() -> None:
    from orchestrator.runtime.shard_actor import calls_at_once

    islands = [{"node_group": "here", "count": 100, "hosts": 2}]
    assert calls_at_once(parse_job({"islands": islands, "budget": {"steps": 10}})) > 200


def test_no_process_beside_the_islands_measures_what_several_shards_share(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.core.effects import Evaluate
    from orchestrator.runtime.evaluation import Evaluation

    posted: list[Any] = []
    spec = parse_job(several(10))
    assert spec.evaluation.on == "islands"
    context: Any = SimpleNamespace(spec=spec, post=lambda make: posted.append(make(0.0)))
    nothing = cast(Any, None)  # neither Θ nor a process is asked for
    evaluation = Evaluation(context, nothing, nothing)
    evaluation.evaluate(Evaluate(3, None))
    (failed,) = posted
    assert isinstance(failed, events.EvaluationFailed)
    assert (failed.global_version, "no other process holds all of it" in failed.reason) == (3, True)
    evaluation.close()


Start = Callable[[dict[str, Any]], Job]


@contextmanager
def dead_shard(job: Job, home: Path) -> Iterator[int]:
    """Kill a shard, and keep its lock until the end, so that its next process waits. Yields the number of the shard."""
    with ExitStack() as opened:
        locks = [opened.enter_context(path.open("ab")) for path in sorted(job.run_dir.glob("shards/*/lock"))]
        os.kill(min(pids_of("ShardActor", home)), signal.SIGKILL)

        def freed() -> list[int]:
            return [number for number, lock in enumerate(locks) if locked(lock)]

        (number,) = job.wait_until(freed, "the end of the shard", pause_s=0.001)
        yield number


def locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def several(steps: int, **synchroniser: Any) -> dict[str, Any]:
    """A job of two islands and two shards with two fragments each."""
    return synthetic(steps, ("us-east", "asia"), synchroniser={"shards": 2, "fragments": 4, **synchroniser})


def merged_fragments(job: Job, after: float) -> set[int]:
    """The fragments that were merged after this instant."""
    merges = (record.event for record in job.records() if isinstance(record.event, events.MergeCompleted))
    return {event.fragment for event in merges if event.at > after}


def wait_for_all_fragments(job: Job) -> None:
    """Return once each of the fragments has been merged after now."""
    since = job.status()["at"]
    job.wait_until(lambda: merged_fragments(job, since) == {0, 1, 2, 3}, "a merge of each fragment")


@pytest.mark.ray
@pytest.mark.soak("a minute with three deaths")
def test_a_job_of_two_shards_checkpoints_loses_a_shard_and_its_synchroniser_and_keeps_all_of_it(
    start: Start, home: Path
) -> None:
    job = start(several(ENDLESS, wire="int8", shard_groups=["europe", "asia"]))
    wait_for_all_fragments(job)
    folders = sorted(job.run_dir.glob("shards/*/journal"))
    owned = [{name.name[9:13] for name in folder.iterdir()} for folder in folders]
    assert [len(fragments) for fragments in owned] == [2, 2]
    assert not list(job.run_dir.glob("journal/*.journal"))

    with dead_shard(job, home) as number:
        lost, since = {int(fragment) for fragment in owned[number]}, job.status()["at"]
        job.wait_until(lambda: merged_fragments(job, since) == {0, 1, 2, 3} - lost, "merges of the other shard")
        assert len(job.status()["view"]["islands"]) == 2
    wait_for_all_fragments(job)
    helpers = {helper["name"]: helper["restarts"] for helper in job.status()["helpers"] if "shard" in helper["name"]}
    assert sorted(helpers.values()) == [0, 1], helpers

    job.command(commands.Checkpoint())
    job.wait_until(lambda: list(job.run_dir.glob("checkpoints/*/manifest.json")), "a checkpoint")
    os.kill(job.pid_of_synchroniser(), signal.SIGKILL)
    job.wait_until(lambda: len(job.restarts()) == 1, "the next synchroniser")
    job.status_once_back()
    wait_for_all_fragments(job)
    job.command(commands.Rollback(0))
    wait_for_all_fragments(job)

    exported = job.port.save_parameters(job.id)
    whole = load_file(job.run_dir / exported)
    _, updates = answer(job, [])
    assert [digest(tensors_of(update, {})) for update in updates] == [update.digest for update in updates]
    assert sum(array.size for array in whole.values()) == sum(job.status()["fragment_parameters"])
    job.command(commands.Cancel())
    job.wait_for_end()
    assert load_file(job.run_dir / "merged.safetensors").keys() == whole.keys()
    assert_sound(job)


@pytest.mark.ray
@pytest.mark.soak("half a minute with a death")
def test_a_mirrored_job_loses_a_shard_with_its_disk_and_no_version_with_it(
    port: RayControlPort, home: Path, tmp_path: Path
) -> None:
    """The islands are not asked: the store has all that was announced, and the merge that was not."""
    mirrored = several(ENDLESS, wire="int8", shard_groups=["europe", "asia"], durability={"kind": "mirrored"})
    store = str(tmp_path / "store")
    (tmp_path / "store").mkdir()
    object_store.admit(object_store.open_store(store), None)
    job = start_in(tmp_path, RayControlPort(store=store), mirrored, None, {})
    wait_for_all_fragments(job)
    with dead_shard(job, home) as number:
        disk = job.run_dir / "shards" / str(number)
        lost = {int(one.name[9:13]) for one in (disk / "journal").iterdir()}
        assert len(lost) == 2
        for path in disk.iterdir():
            if path.name == "lock":  # this test keeps it, so that the next process waits
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    wait_for_all_fragments(job)
    assert {int(one.name[9:13]) for one in (disk / "journal").iterdir()} == lost
    merges: dict[int, list[int]] = {}
    for record in job.records():
        assert not isinstance(record.event, saving.FragmentRestored | saving.ShardMoved), record.event
        if isinstance(record.event, events.MergeCompleted):
            merges.setdefault(record.event.fragment, []).append(record.event.version)
    for fragment, versions in merges.items():
        assert versions == list(range(1, len(versions) + 1)), fragment
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


@pytest.mark.ray
@pytest.mark.soak("a job of its own for a sentence")
def test_a_job_whose_shards_have_no_node_does_not_start_and_says_why(port: RayControlPort, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="names 'nowhere', but no node of that group is there"):
        port.start_job("nowhere", parse_job(several(10, shard_groups=["nowhere"])), tmp_path / "nowhere")
