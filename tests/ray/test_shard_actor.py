"""The actor of a shard by itself, and the order of what it is told: in order for one fragment, at once for several."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from orchestrator.channel.endpoint import Endpoint, Membership, Terms
from orchestrator.channel.frames import SHARD
from orchestrator.checkpoints.writing import momentum_name
from orchestrator.core.commands import UNCHANGED
from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import CloseReason, Epoch, FragmentId, IslandId, PayloadId, Version, WeightedPayload
from orchestrator.errors import DataError, Fenced
from orchestrator.host.job_context import MergePool
from orchestrator.parameters import wire_format
from orchestrator.parameters.journal import Journal, continues
from orchestrator.parameters.outer_state import OuterStep, initial_state
from orchestrator.parameters.shard import Held, InputsLost
from orchestrator.parameters.tensors import digest
from orchestrator.runtime.placement import Leaving
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import CHECKPOINTS
from tests.checkpoints.making import make
from tests.waiting import PATIENCE_S, wait_until

SPEC = parse_job(
    {
        "islands": [{"node_group": "here"}],
        "budget": {"steps": 10},
        "synchroniser": {"fragments": 6, "wire": "int4"},
    }
)
A, B = FragmentId(0), FragmentId(1)


def test_orders_for_one_fragment_are_carried_out_in_their_order_and_those_for_all_alone() -> None:
    pool, done = MergePool(), list[tuple[str, int]]()
    running: set[tuple[str, int]] = set()
    lock = threading.Lock()

    def order(kind: str, number: int) -> Callable[[], None]:
        def work() -> None:
            with lock:
                assert kind != "all" or not running
                assert not any(other in ("all", kind) for other, _ in running)
                running.add((kind, number))
            time.sleep(chance.random() * 0.002)
            with lock:
                running.discard((kind, number))
                done.append((kind, number))

        return work

    chance, futures = random.Random(3), list[Future[Any]]()
    asked: list[tuple[str, int]] = []
    for number in range(300):
        kind = chance.choice(["a", "a", "b", "b", "all"])
        asked.append((kind, number))
        work = order(kind, number)
        futures.append(pool.submit_alone(work) if kind == "all" else pool.submit(A if kind == "a" else B, work))
    assert not wait(futures, PATIENCE_S).not_done
    for future in futures:
        future.result()
    for kind in ("a", "b", "all"):
        assert [one for one in done if one[0] in (kind, "all")] == [one for one in asked if one[0] in (kind, "all")]
    pool.close()


def test_different_fragments_are_merged_at_once() -> None:
    pool, both = MergePool(), threading.Barrier(2)
    futures = [pool.submit(fragment, lambda: both.wait(PATIENCE_S)) for fragment in (A, B)]
    assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1]
    pool.close()


def test_what_failed_does_not_hold_up_what_comes_behind_it() -> None:
    pool = MergePool()
    first = pool.submit(A, lambda: 1 / 0)
    assert pool.submit(A, lambda: 7).result(PATIENCE_S) == 7
    assert pool.submit_alone(lambda: 8).result(PATIENCE_S) == 8
    assert isinstance(first.exception(), ZeroDivisionError)
    pool.close()


class Alone:
    """A shard in this process, without Ray, and an island that serves one offer for its only fragment."""

    fragment = FragmentId(0)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.island = Endpoint(Membership("job", "a:1", 1, Terms(inline_bytes_max=0)), "127.0.0.1")
        self.offer = self.island.payload(
            "offer", wire_format.encode({"w0": np.full((40, 16), 0.5, np.float32)}, "int4", Version(0))
        )
        self.keys = itertools.count(1)

    def opened(self, folder: Path | None = None) -> Any:
        """Return a shard that has opened its journal, by default that of this folder, and joined the channel."""
        actor = self.joined(folder)
        actor.open()
        return actor

    def joined(self, folder: Path | None = None) -> Any:
        from orchestrator.runtime.shard_actor import ShardActor

        actor = ShardActor("job", SPEC, 0, str(folder or self.folder))
        actor.join(Membership("job", SHARD, 1, Terms(inline_bytes_max=0)))
        return actor

    def given(self) -> Any:
        """Return a shard that was given the first state."""
        from orchestrator.runtime.shard_actor import carried_state

        actor = self.opened()
        first = initial_state({"w0": np.ones((40, 16), np.float32)}, OuterStep.of(SPEC.synchroniser))
        state, payloads = carried_state(self.island, first)
        actor.give(self.fragment, state, 0)
        del payloads
        return actor

    def begun(self) -> Any:
        actor = self.given()
        actor.begin({self.fragment})
        return actor

    def received(self, actor: Any) -> MergeFragment:
        """Return an order to merge an offer that the shard was made to hold."""
        key = next(self.keys)
        actor.pull(key, self.offer.carried(SHARD))
        assert isinstance(actor.receive(PayloadId(f"a.{key}"), self.fragment, [(key, False)]), Held)
        inputs = (WeightedPayload(PayloadId(f"a.{key}"), IslandId("a"), 1.0),)
        return MergeFragment(Epoch(1), self.fragment, Version(1), 1, inputs, CloseReason.EVERYONE_IN, "")


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Alone]:
    from orchestrator.runtime import cluster

    monkeypatch.setattr(cluster, "own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(cluster, "own_node_id", lambda: "here")
    made = Alone(tmp_path)
    yield made
    made.island.close()


def test_a_shard_that_is_asked_twice_to_open_its_journal_answers_twice(alone: Alone) -> None:
    actor = alone.begun()
    assert [list(facts) for facts in actor.open().facts.values()] == [[Version(0)]]


def test_a_shard_does_not_begin_without_what_a_process_before_it_was_given(alone: Alone) -> None:
    from orchestrator.runtime.published import ShardAway

    with pytest.raises(ShardAway, match=r"died with the first state of the fragments \[0\]"):
        alone.opened().begin({alone.fragment})


def test_bytes_that_died_with_a_shard_are_pulled_again(alone: Alone) -> None:
    from orchestrator.runtime.published import ShardAway

    with pytest.raises(ShardAway, match="died with bytes that it had pulled"):
        alone.begun().receive(PayloadId("a.7"), alone.fragment, [(7, False)])


def test_a_merge_that_is_ordered_again_while_it_is_journalled_is_made_once(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = alone.begun()
    order = alone.received(actor)
    appended, waiting, full = [], threading.Event(), threading.Event()
    append = Journal.append

    def slow(journal: Journal, facts: Any, content: Any) -> None:
        appended.append(facts)
        waiting.set()
        assert full.wait(PATIENCE_S)
        append(journal, facts, content)

    monkeypatch.setattr(Journal, "append", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(actor.merge, order)
        assert waiting.wait(PATIENCE_S)
        again = pool.submit(actor.merge, order)
        done_early, _ = wait([again], timeout=0.2)
        full.set()
        assert first.result(PATIENCE_S).facts == again.result(PATIENCE_S).facts
    assert not done_early
    assert [(facts.version, facts.base_digest != facts.digest) for facts in appended] == [(Version(1), True)]


def state_of(actor: Any) -> Any:
    """Return the fragment as the shard has it, its arrays as bytes."""
    state = actor._local.cut(FragmentId(0)).state()
    return state.version, state.digest, [{n: a.tobytes() for n, a in arrays.items()} for arrays in state.arrays()]


def merged_once(alone: Alone) -> tuple[Any, Any]:
    """Return a shard that has merged version 1, and what it answered."""
    actor = alone.begun()
    return actor, actor.merge(alone.received(actor))


def test_a_shard_that_moves_hands_over_its_bits_and_does_nothing_more(alone: Alone, tmp_path: Path) -> None:
    from orchestrator.runtime.published import ShardAway

    old, merged = merged_once(alone)
    order = alone.received(old)
    held, new = state_of(old), alone.joined(tmp_path / "elsewhere")
    assert old.hand_over(alone.fragment)[0] == merged.facts
    facts, carried = old.hand_over(alone.fragment)  # a call may come twice
    new.take_state(facts, carried)
    for call in (lambda: old.merge(order), lambda: old.receive(PayloadId("x"), alone.fragment, [])):
        with pytest.raises(ShardAway, match="moves to another node"):
            call()
    new.open()
    (there,) = new.go_on({}, Epoch(1))
    assert (there.facts, state_of(new)) == (merged.facts, held)
    assert new.merge(replace(order, version=Version(1))).facts == merged.facts, "the answer was lost, not the merge"
    with pytest.raises(InputsLost):
        new.merge(replace(order, version=Version(2)))
    old.keep()
    assert old.merge(replace(order, version=Version(2))).facts.version == 2
    assert new.open().facts[alone.fragment] == {1: merged.facts}


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_shard_without_its_journal_takes_what_was_announced_from_an_island(
    alone: Alone, tmp_path: Path, is_lost: bool
) -> None:
    old, merged = merged_once(alone)
    first = old._journal.facts(alone.fragment, Version(0))
    wanted, version = (first, 0) if is_lost else (merged.facts, 1)
    arrays = {n: np.copy(a) for n, a in old._local.published(alone.fragment).parameters().items()}
    arrays = {"w0": np.ones((40, 16), np.float32)} if is_lost else arrays
    good = alone.island.payload("outer/good", wire_format.encode(arrays))
    bad = alone.island.payload("outer/bad", wire_format.encode({"w0": arrays["w0"] + 1}))

    new = alone.opened(tmp_path / "elsewhere")
    assert not new.take_own(wanted)
    assert new.take_parameters(wanted, bad.carried(SHARD)) == "the bytes have another digest"
    momentum = alone.island.payload("momentum", wire_format.encode({"w0": np.full((40, 16), 3, np.float32)}))
    new.take_momentum(alone.fragment, momentum.carried(SHARD))
    assert new.take_parameters(wanted, good.carried(SHARD)) == ""
    (there,) = new.go_on({alone.fragment: Version(1)} if is_lost else {}, Epoch(1))
    assert (there.facts.version, there.facts.digest) == (version + 2 * is_lost, wanted.digest)
    assert new._local.cut(alone.fragment).state().momentum["w0"].max() == 3
    if is_lost:  # an order for the version whose number is taken fails, whatever was held for it
        with pytest.raises(InputsLost):
            new.merge(replace(alone.received(new), version=Version(2)))
    following = replace(alone.received(new), version=Version(there.facts.version + 1))
    assert new.merge(following).facts.base_digest == there.facts.digest


def test_a_shard_that_lost_its_last_version_has_the_one_before_in_its_own_journal(alone: Alone) -> None:
    actor, merged = merged_once(alone)
    first = actor._journal.facts(alone.fragment, Version(0))
    actor.drop_newest(alone.fragment)
    assert not continues(merged.facts, actor.open().facts[alone.fragment])
    assert actor.take_own(first)
    (there,) = actor.go_on({alone.fragment: Version(1)}, Epoch(1))
    assert (there.facts.version, there.facts.digest) == (2, first.digest)


def test_a_shard_of_a_mirrored_job_has_its_journal_wherever_it_starts(alone: Alone, tmp_path: Path) -> None:
    from orchestrator.runtime.shard_actor import ShardActor

    durability = SPEC.synchroniser.durability.model_copy(update={"kind": "mirrored"})
    spec = SPEC.model_copy(update={"synchroniser": SPEC.synchroniser.model_copy(update={"durability": durability})})
    store = tmp_path / "store"
    store.mkdir()

    def opened(folder: str) -> Any:
        actor = ShardActor("job", spec, 0, str(tmp_path / folder), str(store))
        actor.join(Membership("job", SHARD, 1, Terms(inline_bytes_max=0)))
        return actor, actor.open()

    alone.opened = lambda: opened("here")[0]  # type: ignore[method-assign]
    old, merged = merged_once(alone)
    order = replace(alone.received(old), version=Version(2))
    new, there = opened("elsewhere")
    assert there.facts[alone.fragment][Version(1)] == merged.facts
    assert continues(merged.facts, there.facts[alone.fragment])
    (recovered,) = new.recover()
    assert (recovered.facts, state_of(new)) == (merged.facts, state_of(old))
    with pytest.raises(Fenced):
        old.merge(order)


def test_a_shard_continues_only_from_the_bits_that_were_announced(alone: Alone) -> None:
    actor, merged = merged_once(alone)
    found = actor.open().facts[alone.fragment]
    first = found[Version(0)]
    assert continues(merged.facts, found)
    assert continues(first, found), "the next merge is there, and was not announced"
    assert not continues(replace(merged.facts, digest="other"), found), "a journal that another process left behind"
    assert not continues(replace(first, digest="other"), found)
    assert not continues(first, {Version(2): merged.facts, **found})
    assert not continues(merged.facts, {})


# ── deaths between journal and announcement, drawn from seeds ─────────────────────────────────────────────────────────────


class Handle:
    """A shard's process as Ray gives it. With ``dies_after`` it dies once it has done that call, before it answers."""

    def __init__(self, actor: Any) -> None:
        self._actor, self.dies_after = actor, ""

    def has(self, _: Any) -> bool:
        return True

    def die(self) -> None:
        self._actor = None

    def call(self, method: Any, *arguments: Any) -> Callable[[], Any]:
        from ray.exceptions import ActorDiedError

        def answer() -> Any:
            if self._actor is None:
                raise ActorDiedError
            result = method(self._actor, *arguments)
            if method.__name__ == self.dies_after:
                self.die()
                raise ActorDiedError
            return result

        return answer


class Supervised:
    """``supervision.Helper`` that restarts when the test says so."""

    def __init__(self, _: str, make: Callable[[], Handle], on_made: Callable[[], None], ask: Any) -> None:
        self._make, self._on_made, self.handle, self.said = make, on_made, make(), None

    def exchange(self, handle: Handle) -> None:
        self.handle = handle

    def restart(self) -> None:
        self.handle.die()
        self.handle = self._make()
        self._on_made()


class Story:
    """One shard of one fragment, on one of two machines, and an island that has versions of it.

    Checked: numbers rise by one, the bytes of a version are those that were announced, a merge is made once or its
    contributions are offered again, and a version is lost only if the island did not have it.
    """

    fragment = FragmentId(0)

    def __init__(self, folder: Path, seed: int) -> None:
        from orchestrator.runtime.remote_shard import RemoteShard

        membership = Membership("job", SHARD, 1, Terms(inline_bytes_max=0))
        self.random, self.folder, self.machine, self.noted = random.Random(seed), folder, "x", "x"
        self.endpoint = Endpoint(membership, "127.0.0.1")
        self.island = Endpoint(Membership("job", "a:1", 1, Terms(inline_bytes_max=0)), "127.0.0.1")
        self.held: tuple[int, Any, Any] = (-1, None, None)
        self.versions: list[tuple[int, str]] = []
        self.lost_count = self.move_count = 0
        self.keys = itertools.count(1)
        self.back, self.failure = threading.Event(), cast(Exception | None, None)
        self.handles = [self.start(0)]
        self.journals: Any = None
        self.chosen, self.node_ids = {0: "x"}, {0: "x"}
        context: Any = SimpleNamespace(
            job="job", spec=SPEC, epoch=Epoch(1), run_dir=folder, roots=AllowedRoots(), guarded=self._guarded
        )
        supervisor: Any = SimpleNamespace(add=self._add)
        self.shard = RemoteShard(context, 0, cast(Any, self), membership, self.endpoint, supervisor)
        self.handles[0].call(actor_class().open)()
        self.shard.on_moved = self._moved
        first = initial_state({"w0": np.ones((40, 16), np.float32)}, OuterStep.of(SPEC.synchroniser))
        self.shard.give(self.fragment, first, 0)
        (new,) = self.shard.begin()
        self.announced(new)
        self.adopt()

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self.failure = error
            self.back.set()

    def _add(self, helper: Any) -> Any:
        self.helper = helper
        return helper

    def start(self, number: int) -> Handle:
        return Handle(actor_class()("job", SPEC, number, str(self.folder / self.machine)))

    def place(self, number: int) -> str:
        return "a machine"

    def note_node(self, number: int, node_id: str) -> None:
        self.noted = self.node_ids[0] = self.machine

    def node_noted(self, number: int) -> str:
        return self.noted

    def give_outer(self, version: Version) -> Any:
        """Answer as the island does."""
        return self.held[2].carried(SHARD) if self.held[0] == version else None

    def announced(self, new: Any) -> None:
        version, self.newest = new.facts.version, new.published
        assert version == (self.versions[-1][0] + 1 if self.versions else 0), "numbers rise by one"
        self.versions.append((version, new.facts.digest))

    def check(self) -> None:
        from orchestrator.runtime.published import PublicationGone

        try:
            there = digest(self.newest.parameters())
        except PublicationGone:
            there = "gone"
        assert there == self.versions[-1][1], "the bytes are those that were announced"

    def adopt(self) -> None:
        arrays = {name: np.copy(array) for name, array in self.newest.parameters().items()}
        served = self.island.payload("outer", wire_format.encode(arrays))
        self.held = (self.versions[-1][0], arrays, served)

    def _moved(self, moved: Any, lost: Any) -> None:
        event = moved(0.0)
        self.move_count += 1
        for one, new in zip(event.lost, lost, strict=True):
            assert self.held[0] < self.versions[-1][0] == one.version, "an island had it"
            assert new.facts.digest == digest(self.held[1]), "the version before goes on"
            self.announced(new)
            self.lost_count += 1

    def die(self, fate: str) -> None:
        """Have the process made again: on its disk, without it, or on the other machine."""
        from orchestrator.runtime.published import ShardAway

        self.helper.handle.die()
        with pytest.raises(ShardAway):
            self.shard.ticket("nothing", "a:1")
        if fate == "disk":
            shutil.rmtree(self.folder / self.machine)
        if fate == "elsewhere":
            self.machine = "y" if self.machine == "x" else "x"
        self.shard.when_back(self.back.set)
        self.helper.restart()
        assert self.back.wait(PATIENCE_S)
        self.back.clear()
        assert self.failure is None, self.failure

    def leave(self) -> None:
        """Drain the machine."""
        old, self.machine = self.machine, "y" if self.machine == "x" else "x"
        shutil.rmtree(self.folder / self.machine, ignore_errors=True)
        moves = self.move_count
        self.shard.node_leaves({old: Leaving("a drain", None)})
        wait_until(lambda: self.move_count > moves and self.shard.status({}).condition == "running", "the move")

    def merge(self, fate: str) -> None:
        """Order a merge. With a fate, the process dies once it has journalled it."""
        from orchestrator.runtime.published import ShardAway

        version, name = self.versions[-1][0], PayloadId(f"a.{next(self.keys)}")
        learned = {"w0": np.full((40, 16), self.random.random(), np.float32)}
        offer = self.island.payload("offer", wire_format.encode(learned, "int4", Version(version)))
        content = self.shard.pull(offer.carried(SHARD), lambda: False)
        assert isinstance(self.shard.receive(name, self.fragment, content), Held)
        facts = (Version(version + 1), version + 1, (WeightedPayload(name, IslandId("a"), 1.0),))
        order = MergeFragment(Epoch(1), self.fragment, *facts, CloseReason.EVERYONE_IN, "")
        self.helper.handle.dies_after = "merge" if fate else ""
        try:
            self.announced(self.shard.merge(order))
        except ShardAway:
            self.die(fate)
            try:
                self.announced(self.shard.merge(order))
            except InputsLost:
                assert fate != "process", "it was journalled, and is answered from there"

    def run(self) -> None:
        for _ in range(14):
            kind = self.random.choice(("merge", "merge", "merge", "die", "leave", "adopt"))
            fate = self.random.choice(("process", "disk", "elsewhere"))
            if kind == "merge":
                self.adopt()  # a contribution builds on the version before
                self.merge(fate if self.random.random() < 0.5 else "")
            elif kind == "die":
                self.die(fate)
            else:
                getattr(self, kind)()
            self.check()
        self.endpoint.close()
        self.island.close()


def actor_class() -> Any:
    from orchestrator.runtime.shard_actor import ShardActor

    return ShardActor


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Story]:
    """Run the story of a seed with the synchroniser's own code, its calls made in this process."""
    from orchestrator.runtime import cluster, remote_shard, salvaging, shard_actor

    monkeypatch.setattr(shard_actor, "_locked", lambda path: path)  # a process that died keeps nothing locked
    made: list[Story] = []
    calls = {"wait": lambda calls, timeout: (calls, []), "get": lambda call, timeout=None: call()}
    for module in (remote_shard, salvaging):
        monkeypatch.setattr(module, "answer_of", lambda call: call())
        monkeypatch.setattr(module, "ray", SimpleNamespace(**calls))
        monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(salvaging, "SETTLE_S", 0.0)
    monkeypatch.setattr(salvaging, "PATIENCE_S", 1.0)
    monkeypatch.setattr(remote_shard, "MOVE_AGAIN_S", 0.0)
    monkeypatch.setattr(remote_shard, "Helper", Supervised)
    monkeypatch.setattr(cluster, "own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(cluster, "own_node_id", lambda: made[-1].machine if made else "x")
    monkeypatch.setattr(cluster, "name_of_node", lambda node: node)
    monkeypatch.setattr(cluster, "end_actor", lambda handle: handle.die())
    monkeypatch.setattr(cluster, "islands_of", lambda job: {("a", 1): "a"})
    island = SimpleNamespace(call=lambda method, epoch, fragment, version: lambda: made[-1].give_outer(version))
    monkeypatch.setattr(cluster, "actor_named", lambda name: island)

    def tell(seed: int) -> Story:
        made.append(Story(tmp_path / str(seed), seed))
        made[-1].run()
        return made[-1]

    return tell


SEEDS = 12


def test_no_death_of_a_shard_changes_what_was_announced(told: Callable[[int], Story]) -> None:
    stories = [told(seed) for seed in range(SEEDS)]
    assert sum(one.lost_count for one in stories) > 0
    assert sum(one.move_count for one in stories) > SEEDS


def by_numbers_alone(announced: Any, entries: Any, *, with_next: bool) -> bool:
    """Continue from any journal with the right numbers."""
    return max(entries, default=None) in (announced.version, announced.version + 1)


def with_every_next(announced: Any, entries: Any, *, with_next: bool) -> bool:
    """Continue from a merge that was not announced, whichever stay made it."""
    return continues(announced, entries)


@pytest.mark.parametrize("bug", [by_numbers_alone, with_every_next])
def test_planted_bugs_of_a_lost_shard_are_found(
    told: Callable[[int], Story], monkeypatch: pytest.MonkeyPatch, bug: Callable[..., bool]
) -> None:
    from orchestrator.runtime import remote_shard

    monkeypatch.setattr(remote_shard, "continues", bug)
    with pytest.raises(AssertionError, match=r"that were announced|rise by one|is answered from there"):
        list(map(told, range(SEEDS)))


def test_momentum_is_that_of_the_newest_checkpoint_on_the_head_and_none_that_is_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is asked, because the synchroniser's own machine and disk are lost."""
    from orchestrator.runtime import salvaging

    monkeypatch.setattr(salvaging, "head_of", lambda _: lambda function, *arguments: function(*arguments))
    with pytest.raises(DataError, match="the head has no checkpoint of this job"):
        salvaging._momentum_on_head(tmp_path)
    for number in (999_999, 1_000_000):
        make(tmp_path / CHECKPOINTS, number, islands=("a",))
    newest = tmp_path / CHECKPOINTS / "1000000"
    momentum, place, changed = salvaging._momentum_on_head(tmp_path)
    assert changed == UNCHANGED
    assert place == str(newest)
    assert list(momentum) == [0, 1]
    file = newest / momentum_name(1)
    whole = file.read_bytes()
    for content in (whole[:-1] + bytes([whole[-1] ^ 1]), None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(DataError, match=f"{file.name} of the newest checkpoint on the head is damaged or missing"):
            salvaging._momentum_on_head(tmp_path)
        file.write_bytes(whole)
