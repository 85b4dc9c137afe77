"""An island of many processes, in threads: what rank 0 decides, all carry out at the same boundary, in the same order."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from learners import synthetic
from learners.group.link import Done, Line, LinkEnded, News, Prepared, TakeOuter, TakePeer, admitted, joined, listener
from learners.group.ranks import Follower, Leader
from learners.island_arrays import State
from learners.island_spec import IslandSpec
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from learners.state_transfer import FetchedState, put_together, windows
from orchestrator.core.messages import Adopted, Drained, Flushed, Offer
from orchestrator.core.vocabulary import Version
from orchestrator.errors import InfrastructureError
from orchestrator.parameters import wire_format
from orchestrator.parameters.holding import EVERYTHING, encoded_part
from orchestrator.parameters.tensors import digest
from orchestrator.parameters.validation import validated_parts
from orchestrator.parameters.wire_format import InvalidPayload
from orchestrator.replica.replica import Publication
from orchestrator.system.logbook import island_logbook
from tests.learners.stepped import Sliced
from tests.waiting import PATIENCE_S, wait_until

KEY = b"k" * 32
TOKENS = 4 * 32


class Rank:
    """The others: a trainer like rank 0's, and what its follower did."""

    def __init__(self, line: Line, trainer, plan: LoopPlan) -> None:
        self.trainer, self.cuts, self.ended = trainer, {}, threading.Event()
        self.gives: dict[tuple[str, int], State] = {}
        """What it gives of states, by cut and fragment."""
        self.states: dict[str, FetchedState] = {}
        """What ``TakePeer`` takes, by the name of its only chunk."""
        self.follower = Follower(
            line, trainer, plan.arrays, Prepared(1), self._take, self._give, self.cuts.__setitem__, lambda _: None
        )
        threading.Thread(target=self._run, daemon=True).start()

    def _take(self, arrays, order) -> None:
        if isinstance(order, TakePeer):
            arrays.load_peer(self.states[order.chunks[0]], order.cursor)
        else:
            own = arrays.held.holding.values_of(self.trainer.initial_parameters())
            arrays.load(own, order.versions, order.cursor)

    def _give(self, cut, fragment, state) -> None:
        self.gives[cut, fragment] = state

    def _run(self) -> None:
        try:
            self.follower.run()
        except LinkEnded:
            self.ended.set()


class Group:
    """An island of ``size`` processes that hold the same."""

    def __init__(
        self, spec, size: int = 2, adoption: str = "rebase", codec: str = "float32", sliced: bool = False
    ) -> None:
        listening = listener("127.0.0.1")
        address, ends = listening.getsockname(), {}
        threads = [
            threading.Thread(target=lambda rank=rank: ends.setdefault(rank, joined(address, rank, KEY)))
            for rank in range(1, size)
        ]
        for thread in threads:
            thread.start()
        lines = admitted(listening, size, KEY, PATIENCE_S)
        for thread in threads:
            thread.join()
        kind = Sliced if sliced else lambda spec, rank, size: synthetic.create(spec, 0, 2)
        self.trainers = [kind(spec, rank, size) for rank in range(size)]
        names = sorted(self.trainers[0].tensor_shapes())
        self.fragments = (tuple(names[::2]), tuple(names[1::2]))
        plan = LoopPlan(
            self.fragments,
            4,
            adoption,
            report_every_s=0.0,
            codec=codec,
            ramp=IslandSpec.of(spec).job.batch_ramp,
            tokens_per_schedule_step=2 * TOKENS,
        )
        self.failures, self.losses = [], []
        self.leader = Leader(lines, 2, IslandSpec.of(spec).tokens_of, self.failures.append, self.losses.append)
        self.ranks = [Rank(ends[rank], self.trainers[rank], replace(plan, rank=rank)) for rank in range(1, size)]
        self.outbox, self.offers, self.reports = Outbox(), {}, []
        self.loop = IslandLoop(self.trainers[0], replace(plan, rank=0), self.outbox, self.leader)
        self.outer = {p: self._values(p) for p in range(2)}
        self.versions = [0, 0]

    def _values(self, p: int):
        initial = self.trainers[0].initial_parameters()
        return {name: initial[name] for name in self.fragments[p]}

    def load(self) -> Group:
        assert self.leader.device_count() == len(self.ranks)
        self.leader.call(TakeOuter(1, (0, 0), 0, 0, ()))
        own = self.loop.held.holding.values_of(self.trainers[0].initial_parameters())
        self.loop.load(own, (0, 0), 0, 0)
        return self

    @property
    def receivers(self) -> list:
        return [self.loop, *(rank.follower for rank in self.ranks)]

    def until(self, kind: type, count: int = 1) -> list:
        def came() -> bool:
            self.reports += self.outbox.take(0.01)
            return sum(isinstance(report, kind) for report in self.reports) >= count

        wait_until(came, f"{count} {kind.__name__} of {self.reports}", pause_s=0.001)
        return [report for report in self.reports if isinstance(report, kind)]

    def publish(self, p: int, merged_offer: int, to: list | None = None) -> None:
        """A new version of the fragment that lies between Θ and the island, to these receivers, else to all."""
        self.versions[p] += 1
        own = {name: 0.9 * array for name, array in self.outer[p].items()}
        self.outer[p] = {name: array.astype(np.float32) for name, array in own.items()}
        for receiver in self.receivers if to is None else to:
            self.send(p, merged_offer, receiver)

    def send(self, p: int, merged_offer: int, receiver) -> None:
        publication = Publication(p, self.versions[p], 0, merged_offer)
        holding = receiver.held.holding
        receiver.receive(publication, None, holding.digest_of(self.outer[p]), [encoded_part(self.outer[p], holding)])

    def assert_equal(self) -> None:
        states = [trainer.export_state().arrays() for trainer in self.trainers]
        for other in states[1:]:
            assert all(np.array_equal(other[name], array) for name, array in states[0].items())


@pytest.fixture
def group(make_job):
    made = []

    def make(spec=None, **settings) -> Group:
        made.append(Group(spec or make_job(), **settings))
        return made[-1]

    yield make
    for one in made:
        one.leader.close()


@pytest.mark.parametrize(("adoption", "codec"), [("rebase", "float32"), ("rebase", "int4"), ("mix", "int4")])
def test_every_process_adopts_and_offers_at_the_same_boundaries(group, adoption, codec):
    island = group(size=3, adoption=adoption, codec=codec).load()
    island.loop.start()
    for count in range(1, 7):
        offer = island.until(Offer, count)[-1]
        payload = island.loop.take(offer.fragment, offer.offer)
        island.publish(offer.fragment, offer.offer if payload is not None else 0)
        island.until(Adopted, count)
    island.loop.flush()
    island.until(Flushed)
    assert not island.failures
    island.leader.refresh()
    island.assert_equal()


@pytest.mark.parametrize("codec", ["float32", "int4"])
def test_each_process_offers_what_it_has_and_together_that_is_the_island(group, codec):
    island = group(size=3, sliced=True, codec=codec).load()
    island.loop.start()
    for count in range(1, 5):
        offer = island.until(Offer, count)[-1]
        payloads = [receiver.take(offer.fragment, offer.offer) for receiver in island.receivers]
        if None in payloads:
            continue
        whole = sum(array.nbytes for array in island.outer[offer.fragment].values())
        assert max(map(len, payloads)) < 0.75 * whole
        _, norm = validated_parts(payloads, island.outer[offer.fragment], offer.base_version)
        assert norm > 0
        island.publish(offer.fragment, offer.offer)
    island.loop.flush()
    island.until(Flushed)
    island.leader.refresh()
    if codec == "float32":
        for offer in island.loop.standing_offers():  # no step came after the last of each
            outer = island.outer[offer.fragment]
            payloads = [receiver.take(offer.fragment, offer.offer) for receiver in island.receivers]
            content, _ = validated_parts(payloads, outer, offer.base_version)
            for name, anchor in outer.items():
                own = np.concatenate([one._parameters[name][one.rows(name)] for one in island.trainers])
                if island.versions[offer.fragment] == offer.base_version:
                    assert np.allclose(anchor - content.decoded(name), own, atol=1e-5)


def test_parts_that_are_missing_or_come_twice_are_refused(group):
    island = group(sliced=True).load()
    island.loop.start()
    offer = island.until(Offer)[-1]
    first, second = (one.take(offer.fragment, offer.offer) for one in (island.loop, island.ranks[0].follower))
    outer = island.outer[offer.fragment]
    for wrong in ([first, first], [first, second, second], [second, wire_format.encode({})]):
        with pytest.raises(InvalidPayload, match="not all of it once"):
            validated_parts(wrong, outer, offer.base_version)
    assert validated_parts([second, first], outer, offer.base_version)[1] > 0
    island.loop.stop()


def test_offers_are_counted_as_of_the_step_of_their_snapshots(group):
    island = group().load()
    island.loop.start()
    offers = island.until(Offer, 4)
    island.loop.flush()
    island.until(Flushed)
    # a fragment is due every four steps of its own, and each offer has all tokens up to its snapshot
    assert [offer.tokens_total for offer in offers] == [offer.step * TOKENS for offer in offers]
    assert island.trainers[0].cursor() * TOKENS == max(report.tokens_total for report in island.until(Offer))


def test_a_batch_that_grows_has_the_same_size_in_every_process_and_where_it_is_counted(group, make_job):
    ramp = {"parts": 4, "tokens": 9 * 2 * TOKENS}
    island = group(make_job(training={"batch_size": 4, "batch_ramp": ramp})).load()
    island.loop.start()
    offers = island.until(Offer, 14)
    island.loop.flush()
    island.until(Flushed)
    assert not island.failures
    # of 9 steps of the schedule 3 are in quarters of a batch (12 inner steps), 3 in halves (6) and 3 in three quarters (4)
    parts = [1] * 12 + [2] * 6 + [3] * 4 + [4] * max(offer.step for offer in offers)
    assert [offer.tokens_total for offer in offers] == [sum(parts[: offer.step]) * TOKENS // 4 for offer in offers]
    assert offers[-1].step > 22


def test_a_version_is_adopted_only_once_every_process_has_it(group):
    island = group().load()
    island.loop.start()
    island.publish(0, 0, to=[island.loop])
    island.until(Offer, 3)
    assert not any(isinstance(report, Adopted) for report in island.reports)
    island.send(0, 0, island.ranks[0].follower)
    (adopted,) = island.until(Adopted)
    assert adopted.version == 1
    island.loop.flush()
    island.until(Flushed)
    island.leader.refresh()
    island.assert_equal()


def test_a_drained_island_waits_together_and_goes_on_together(group):
    island = group().load()
    island.loop.start()
    island.until(Offer, 2)
    island.loop.drain()
    for _ in range(20):
        for offer in island.loop.standing_offers():
            if island.loop.take(offer.fragment, offer.offer) is not None:
                island.publish(offer.fragment, offer.offer)
        island.reports += island.outbox.take(0.2)
        if any(isinstance(report, Drained) for report in island.reports):
            break
    island.until(Drained)
    island.leader.refresh()
    island.assert_equal()


def test_a_standby_becomes_an_island_in_every_process_on_what_all_have(group, tmp_path):
    island = group(size=3).load()
    island.publish(0, 0)
    island.publish(1, 0, to=[island.loop, island.ranks[0].follower])
    island.leader.becomes = ("east", island_logbook(tmp_path, "east", 2))
    assert island.loop.promote(0, 5)[0] == (1, 0)
    assert [trainer.cursor() for trainer in island.trainers] == [5, 5, 5]
    island.assert_equal()
    island.loop.start()
    island.send(1, 0, island.ranks[1].follower)
    (adopted,) = island.until(Adopted)
    assert (adopted.fragment, adopted.version) == (1, 1)
    island.loop.flush()
    island.until(Flushed)
    island.leader.refresh()
    island.assert_equal()


def test_a_cut_is_made_everywhere_at_one_boundary(group):
    island = group().load()
    island.loop.start()
    island.until(Offer, 1)
    cut = island.loop.request_cut((1, "folder")).result(PATIENCE_S)
    (other,) = island.ranks
    wait_until(lambda: (1, "folder") in other.cuts, "the cut of the other")
    theirs = other.cuts[1, "folder"]
    assert (cut.position, cut.cursor) == (theirs.position, theirs.cursor)
    assert cut.snapshot.arrays()
    assert not theirs.snapshot.arrays()  # rank 0 has the same
    island.loop.stop()


def test_what_fails_in_another_process_fails_the_island(group):
    island = group().load()

    def fail(_):
        raise FloatingPointError("the loss is not a number")

    island.ranks[0].trainer.step = fail
    island.loop.start()
    wait_until(lambda: island.failures, "its failure")
    assert "host 1: FloatingPointError: the loss is not a number" in island.failures[0].detail


def test_a_process_that_is_gone_is_noticed_and_takes_the_others_along(group):
    island = group(size=3).load()
    island.loop.start()
    island.until(Offer)
    first, second = island.ranks
    first.follower._line.close()
    wait_until(lambda: island.losses, "the loss")
    island.leader.close()  # what rank 0's process does by its end
    assert second.ended.wait(PATIENCE_S)


# ── the link ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def ends(key: bytes = KEY) -> tuple[Line, Line]:
    listening = listener("127.0.0.1")
    address, lines = listening.getsockname(), []
    thread = threading.Thread(target=lambda: lines.append(joined(address, 1, key)))
    thread.start()
    admitted_lines = admitted(listening, 2, KEY, PATIENCE_S)
    thread.join()
    return admitted_lines[1], lines[0]


def test_messages_go_both_ways_in_their_order():
    leads, follows = ends()
    for number in range(3):
        leads.send(News(number, (1,)))
    follows.send(Done())
    assert [follows.receive().number for _ in range(3)] == [0, 1, 2]
    assert leads.receive() == Done()
    follows.close()
    with pytest.raises(LinkEnded, match="gone"):
        leads.receive()


def test_who_has_not_the_key_does_not_join():
    listening = listener("127.0.0.1")
    stranger = joined(listening.getsockname(), 1, b"x" * 32)
    with pytest.raises(LinkEnded, match="hosts 1 have not joined"):
        admitted(listening, 2, KEY, 0.5)
    with pytest.raises(LinkEnded):
        stranger.receive()


def test_a_frame_that_was_sent_twice_or_changed_is_not_read():
    leads, follows = ends()
    sent = []
    plain, leads._connection = leads._connection, None

    class Tap:
        def sendall(self, content: bytes) -> None:
            sent.append(content)

    leads._connection = Tap()
    leads.send(Done("first"))
    plain.sendall(sent[0])
    assert follows.receive() == Done("first")
    plain.sendall(sent[0])
    with pytest.raises(LinkEnded, match="is not authentic"):
        follows.receive()
    leads, follows = ends()
    leads.send(Done("a"))
    changed = bytearray(sent[0])
    changed[-2] ^= 1
    follows.receive()
    leads._connection.sendall(bytes(changed))
    with pytest.raises(LinkEnded, match="is not authentic"):
        follows.receive()


def test_an_announced_size_beyond_the_limit_ends_the_line():
    leads, follows = ends()
    leads._connection.sendall(b"\xff" * 40)
    with pytest.raises(LinkEnded, match="the maximum is"):
        follows.receive()


def test_what_rank_0_fails_in_beside_an_order_leaves_no_answer_of_it_behind(group):
    island = group(size=3)

    def fail() -> None:
        raise ConnectionError("the donor is gone")

    with pytest.raises(ConnectionError, match="the donor is gone"):
        island.leader.call_beside(TakeOuter(1, (0, 0), 0, 0, ()), fail)
    assert island.leader._done.keys() == {1, 2}
    island.ranks[1].trainer.load = lambda _: fail()
    with pytest.raises(InfrastructureError, match="the process of host 2 reports: ConnectionError: the donor is gone"):
        island.leader.call_beside(TakeOuter(1, (0, 0), 0, 0, ()), lambda: None)
    del island.ranks[1].trainer.load
    assert island.leader.call_beside(TakeOuter(1, (0, 0), 0, 0, ()), lambda: "both") == "both"


# ── publications and states by host ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4", "e3m0", "int2"])
def test_each_process_is_sent_its_share_of_a_publication_and_has_the_bits_of_the_whole(group, codec):
    island = group(size=2, sliced=True, adoption="replace").load()
    island.loop.start()
    for count in range(1, 4):
        offer = island.until(Offer, count)[-1]
        p, before = offer.fragment, Version(island.versions[offer.fragment])
        step = {name: 0.01 * array.astype(np.float32) for name, array in island.outer[p].items()}
        update = wire_format.encoded(step, codec, before)
        island.outer[p] = EVERYTHING.added_to(island.outer[p], update)
        island.versions[p] += 1
        for receiver in island.receivers:
            holding = receiver.held.holding
            payload = wire_format.written(holding.part_of(update))
            own_count = sum(array.size for array in holding.values_of(island.outer[p]).values())
            if codec in ("float32", "bfloat16"):  # the others' blocks do not end where rows so short do
                assert wire_format.parse(payload).value_bytes == own_count * (4 if codec == "float32" else 2)
            news = Publication(p, island.versions[p], 0, offer.offer)
            assert receiver.receive(news, before, holding.digest_of(island.outer[p]), [payload]) == island.versions[p]
        island.until(Adopted, count)
    for p, version in enumerate(island.versions):
        for receiver in island.receivers:
            own = receiver._arrays.published.at(p, version).arrays
            assert digest(own) == receiver.held.holding.digest_of(island.outer[p])
    island.loop.stop()


def test_a_part_of_a_publication_that_is_torn_or_of_another_host_is_refused_and_taken_when_it_comes_again(group):
    island = group(sliced=True).load()
    first, second = island.receivers
    news = Publication(0, 1, 0, 0)
    own, other = (encoded_part(island.outer[0], one.held.holding) for one in island.receivers)
    torn = bytearray(own)
    torn[len(torn) // 2] ^= 1
    for wrong in (torn, other):
        with pytest.raises(InvalidPayload):
            first.receive(news, None, "", [wrong])
        assert first.published.version(0) == 0
    named = first.held.holding.digest_of(island.outer[0])
    assert first.receive(news, None, named, [own]) == 1
    # updates whose bits are others are let go of, and asked for whole
    update = wire_format.encoded(island.outer[0], "int4", Version(1))
    content = wire_format.written(first.held.holding.part_of(update))
    assert first.receive(Publication(0, 2, 0, 0), 1, named, [content]) == -1
    assert second.published.version(0) == 0


def held_state(island: Group, cut: str) -> list[list]:
    """What each process gives of all fragments at one boundary, as blocks, and the versions and the step there."""
    got = []
    asker = threading.Thread(target=lambda: got.append(island.loop.export_fragments(PATIENCE_S, cut)))
    asker.start()
    asker.join()
    (states,) = got
    for rank in island.ranks:
        wait_until(lambda rank=rank: len(rank.gives) == 2, "what the others give")
    return [states, *([rank.gives[cut, p] for p in range(2)] for rank in island.ranks)]


@pytest.mark.parametrize("receiving", [1, 2, 3])
def test_hosts_of_a_peer_give_their_shards_of_one_boundary_to_the_hosts_that_need_them(group, receiving):
    donor = group(size=2, sliced=True).load()
    for rank, trainer in enumerate(donor.trainers):
        for moment in trainer.moments.values():
            moment += np.arange(moment.size, dtype=np.float16).reshape(moment.shape) % 64
            assert moment.flags.writeable, rank
    donor.loop.start()
    donor.until(Offer)
    given = held_state(donor, "1.1")
    donor.loop.stop()
    at = {(state.versions, state.step) for states in given for state in states}
    assert len(at) == 1, "all hosts, and all fragments, of one boundary"
    ((versions, step),) = at
    wholes = put_together(all_blocks(given), None)
    tensors_bytes = sum(array.nbytes for array in wholes.values() if array.ndim)
    assert sum(array.nbytes for _, _, array in all_blocks(given) if array.ndim) == tensors_bytes, "one giver for each"
    assert wholes["steps"] == step

    taker = group(size=receiving, sliced=True)
    assert taker.leader.device_count() == receiving - 1
    total = 0
    for number, receiver in enumerate(taker.receivers):
        own, came = {}, 0
        for p in range(2):
            wanted = receiver.held.wanted(p)
            blocks = [block for states in given for block in windows(states[p].blocks(), wanted)]
            came += sum(array.nbytes for _, _, array in blocks if array.ndim)
            own |= put_together(blocks, wanted)
        assert came == sum(array.nbytes for array in own.values() if array.ndim), "each pulls its share"
        total += came
        if number:
            taker.ranks[number - 1].states["chunk"] = FetchedState("donor", own, versions, step, ())
        else:
            mine = FetchedState("donor", own, versions, step, (), ("chunk",))
    assert total == tensors_bytes
    taker.leader.call(TakePeer(mine.chunks, versions, step, 3))
    taker.loop.load_peer(mine, 3)
    for trainer in taker.trainers:
        assert (trainer.cursor(), trainer._steps) == (3, step)
        for name, array in trainer._parameters.items():
            assert np.array_equal(array[trainer.rows(name)], wholes[name][trainer.rows(name)])
            assert np.array_equal(
                trainer.moments[name][trainer.rows(name)], wholes[f"moment/{name}"][trainer.rows(name)]
            )
    taker.loop.start()
    taker.until(Offer, 2)
    taker.loop.flush()
    taker.until(Flushed)
    assert not taker.failures


def all_blocks(given: list[list]) -> list:
    """Of all processes and fragments; what belongs to no tensor is in each fragment, and one process gives it."""
    return [block for states in given for state in states for block in state.blocks()]
