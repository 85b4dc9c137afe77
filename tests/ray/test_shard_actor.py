"""The actor of a shard by itself, and the order of what it is told: in order for one fragment, at once for several."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.channel.endpoint import Endpoint, Membership, Terms
from orchestrator.channel.frames import SHARD
from orchestrator.core.effects import MergeFragment
from orchestrator.core.vocabulary import CloseReason, Epoch, FragmentId, IslandId, PayloadId, Version, WeightedPayload
from orchestrator.errors import Fenced
from orchestrator.host.job_context import MergePool
from orchestrator.parameters import wire_format
from orchestrator.parameters.journal import Journal, continues
from orchestrator.parameters.outer_state import OuterStep, initial_state
from orchestrator.parameters.shard import Held, InputsLost
from orchestrator.specification.config import parse_job
from tests.waiting import PATIENCE_S

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
    (there,) = new.go_on((), Epoch(1))
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
    (there,) = new.go_on([alone.fragment] if is_lost else [], Epoch(1))
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
    (there,) = actor.go_on([alone.fragment], Epoch(1))
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
