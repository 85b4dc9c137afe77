"""States that islands give each other: at a donor's boundary, whole or in pieces, from one donor or several."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from time import monotonic
from typing import Any

import numpy as np
import pytest

from learners import jax_trainer, state_transfer, synthetic
from learners.outbox import Outbox
from learners.state_transfer import (
    CatchingUp,
    CutStates,
    Donor,
    DonorReply,
    FetchedState,
    Fragments,
    HeldStates,
    Loaded,
    StateFetch,
    Throttle,
)
from orchestrator.core.messages import Adopted, Flushed, Offer
from orchestrator.errors import InfrastructureError, InternalError
from tests.learners.stepped import TOKENS, SteppedTrainer, alone, offers
from tests.waiting import PATIENCE_S, wait_until

COUNT = 5


def whole(arrays: dict[str, np.ndarray], versions: tuple[int, ...], step: int) -> FetchedState:
    return FetchedState("peer", arrays, versions, step, ())


def test_after_a_peers_state_the_first_adoption_keeps_what_was_trained_here_and_not_the_peers_work(
    new_island, make_job
):
    donor = synthetic.create(new_island().trainer_spec, 1, 2)
    for step in range(5):
        donor.step(step)
    given = donor.export_state().arrays()
    island = new_island(adoption="rebase")
    island.loop.load_peer(whole(given, (0, 0), 5), cursor=0)
    island.loop.start()
    assert island.trainer.at_gate.acquire(timeout=PATIENCE_S)
    island.steps(1)
    trained = island.own(0)
    island.loop.deliver(0, 1, 1, island.published(0, 0.5))
    assert Adopted(0, 1, 7, 2 * TOKENS, 2 * TOKENS) in island.steps(1)
    twin = SteppedTrainer(make_job())  # the same two steps, without a break
    twin.import_state(given)
    twin.permits.release(2)
    twin.step(5)
    assert all(np.array_equal(array, trained[name]) for name, array in twin.snapshot(trained).arrays().items())
    twin.step(6)
    for name, array in island.own(0).items():
        own = twin.snapshot([name]).arrays()[name] - given[name]
        np.testing.assert_allclose(array, 0.5 + own, rtol=1e-5, atol=1e-6)


def test_of_two_states_the_first_that_comes_is_the_islands(new_island):
    island = new_island()
    states = [synthetic.create(island.trainer_spec, shard, 2) for shard in (0, 1)]
    states[1].step(0)
    first, second = (trainer.export_state().arrays() for trainer in states)
    island.loop.load_peer(whole(first, (1, 1), 3), cursor=0)
    with pytest.raises(InternalError, match="was given another one"):
        island.loop.load_peer(whole(second, (2, 2), 5), cursor=0)
    assert all(np.array_equal(array, first[name]) for name, array in island.own(0).items())


def test_a_state_that_comes_twice_does_not_touch_an_island_that_trains(new_island):
    island = new_island().start()
    island.steps(2)
    before = [island.own(fragment) for fragment in (0, 1)]
    peers = synthetic.create(island.trainer_spec, 1, 2).export_state().arrays()
    with pytest.raises(InternalError, match="was given another one"):
        island.loop.load(island.published(0, 0.5) | island.published(1, 0.5), (1, 1), 8, cursor=0)
    with pytest.raises(InternalError, match="was given another one"):
        island.loop.load_peer(whole(peers, (1, 1), 8), cursor=0)
    for fragment, own in enumerate(before):
        for name, array in island.own(fragment).items():
            np.testing.assert_array_equal(array, own[name])


def test_a_draining_island_gives_no_state_once_it_has_ended(new_island):
    island = new_island().start()
    island.loop.drain()
    island.trainer.permits.release()
    island.letters_until(Offer)
    island.loop.flush()
    island.letters_until(Flushed)
    with pytest.raises(InfrastructureError, match=r"ended|does not train"):
        island.loop.export_state(5)


def test_a_donors_state_is_of_one_boundary_and_costs_it_no_more_than_that(new_island, make_job):
    donor = new_island().start(step=10, versions=(2, 3))
    donor.steps(2)
    got: list = []
    asker = threading.Thread(target=lambda: got.append(donor.loop.export_state(timeout_s=PATIENCE_S)))
    asker.start()
    while asker.is_alive():  # the state comes with some next boundary
        donor.steps(1)
        asker.join(0.01)
    (state,) = got
    assert state.versions == (2, 3)
    taken_after = state.step - 10
    assert 2 <= taken_after <= 2 + donor.trainer.cursor()
    expected = alone(make_job(), taken_after)
    assert all(np.array_equal(state.arrays()[name], expected[name]) for name in expected)

    peer = new_island()
    peer.loop.load_peer(whole(state.arrays(), state.versions, state.step), cursor=40)
    peer.loop.start()
    assert peer.trainer.at_gate.acquire(timeout=PATIENCE_S)
    assert peer.trainer.cursor() == 40
    (first, *_) = offers(peer.steps(4))
    assert first.base_version in (2, 3)
    assert first.tokens_total == first.token_count <= 4 * TOKENS


def test_an_island_that_does_not_train_gives_no_state(new_island):
    waiting = new_island()
    with pytest.raises(InfrastructureError, match="does not train"):
        waiting.loop.export_state(1)
    slow = new_island().start()
    with pytest.raises(InfrastructureError, match=r"within 0\.01 s"):
        slow.loop.export_state(0.01)
    slow.loop.flush()
    slow.trainer.permits.release()
    slow.letters_until(Flushed)
    slow.loop.stop()
    with pytest.raises(InfrastructureError, match="does not train"):
        slow.loop.export_state(1)


def test_the_real_trainers_pieces_make_its_whole_state(make_job):
    trainer = jax_trainer.create(make_job(), 0, 2)
    trainer.warm_up()
    trainer.step(0)
    state = trainer.export_state().arrays()
    names = sorted(trainer.tensor_shapes())
    parts = [trainer.export_state(part).arrays() for part in (names[0::2], names[1::2])]
    shared = parts[0].keys() & parts[1].keys()
    assert (parts[0] | parts[1]).keys() == state.keys()
    assert 0 < len(shared) < 4  # counters, and no array of the size of a tensor
    assert all(state[name].size == 1 for name in shared)
    assert len(parts[0]) - len(shared) == 3 * len(names[0::2])  # the parameter and Adam's two moments
    peer = jax_trainer.create(make_job(), 1, 2)
    peer.import_state(parts[0] | parts[1])
    assert all(np.array_equal(array, state[name]) for name, array in peer.export_state().arrays().items())


class Giver:
    """A donor that hands over a piece when told to, or fails."""

    def __init__(self, name: str, step: int, versions: tuple[int, ...] = (1,) * COUNT) -> None:
        self.name, self.step, self.versions = name, step, versions
        self.asked: SimpleQueue[Fragments] = SimpleQueue()
        self.answers: SimpleQueue[Exception | None] = SimpleQueue()
        self.spoilt = False

    def give(self, fragments: Fragments) -> DonorReply:
        self.asked.put(fragments)
        if (error := self.answers.get(timeout=PATIENCE_S)) is not None:
            raise error
        value = np.nan if self.spoilt else self.step
        arrays = {f"tensor-{p}": np.full(2, value, np.float32) for p in fragments or range(COUNT)}
        return DonorReply({**arrays, "count": np.array(self.step)}, self.versions, self.step)

    def gives(self) -> Fragments:
        """What it is asked for next, which it then gives."""
        asked = self.asked.get(timeout=PATIENCE_S)
        self.answers.put(None)
        return asked


class Receiver:
    """``unfit`` donors give what it cannot take."""

    def __init__(self, of_one_boundary: bool = False, unfit: str = "") -> None:
        self.unfit = unfit
        self.got: SimpleQueue[FetchedState] = SimpleQueue()
        self.failures: SimpleQueue[tuple[str, BaseException]] = SimpleQueue()
        self.fetch = StateFetch(
            COUNT, of_one_boundary=of_one_boundary, take=self.take, failed=lambda *told: self.failures.put(told)
        )

    def take(self, state: FetchedState) -> None:
        if self.unfit in (state.donor, *state.sources):
            raise ValueError("of another model")
        self.fetch.close()
        self.got.put(state)

    def asks(self, *givers: Giver) -> None:
        self.fetch.ask({f"{giver.name}.1": Donor(giver.name, giver.give) for giver in givers})

    def state(self) -> FetchedState:
        state = self.got.get(timeout=PATIENCE_S)
        assert self.got.empty()
        return state


def ended(left: int) -> None:
    """Until no more than so many threads gather."""
    wait_until(lambda: sum(thread.name == "fetch" for thread in threading.enumerate()) <= left, pause_s=0.005)


def test_several_donors_give_a_fragment_each_at_a_time_and_the_quicker_more():
    quick, slow, receiver = Giver("quick", 7, (1, 2, 3, 4, 5)), Giver("slow", 9, (6, 7, 8, 9, 9)), Receiver()
    receiver.asks(quick, slow)
    assert slow.asked.get(timeout=PATIENCE_S) in ((0,), (1,))
    given = [quick.gives() for _ in range(COUNT - 1)]
    slow.answers.put(None)
    state = receiver.state()
    (left,) = set(range(COUNT)) - {p for fragments in given for p in fragments}
    assert given == [(p,) for p in range(COUNT) if p != left]
    assert (state.donor, state.step, int(state.arrays["count"])) == ("slow", 9, 9)
    for p in range(COUNT):
        giver = slow if p == left else quick
        assert (state.sources[p], state.versions[p]) == (giver.name, giver.versions[p])
        assert (state.arrays[f"tensor-{p}"] == giver.step).all()


def test_when_a_donor_dies_what_it_gave_is_kept_and_the_other_gives_the_rest():
    dies, lives, receiver = Giver("dies", 7), Giver("lives", 8), Receiver()
    receiver.asks(dies, lives)
    first = dies.gives()
    second = dies.asked.get(timeout=PATIENCE_S)
    held = lives.asked.get(timeout=PATIENCE_S)
    gone = ConnectionError("gone")
    dies.answers.put(gone)
    assert receiver.failures.get(timeout=PATIENCE_S) == ("dies", gone)
    lives.answers.put(None)
    rest = [lives.gives() for _ in range(COUNT - 2)]
    state = receiver.state()
    assert second in rest  # nobody asked for it again but the gathering itself
    assert sorted([first, held, *rest]) == [(p,) for p in range(COUNT)]
    assert state.sources.count("dies") == 1


def test_a_donor_that_is_replaced_is_asked_for_nothing_more_and_its_work_is_not_lost():
    silent, other, receiver = Giver("silent", 7), Giver("other", 8), Receiver()
    receiver.asks(silent)
    first = silent.gives()
    silent.asked.get(timeout=PATIENCE_S)  # and there it stops
    receiver.asks(other)
    given = [other.gives() for _ in range(COUNT - 2)]
    owed = other.asked.get(timeout=PATIENCE_S)
    silent.answers.put(None)  # it goes on, while a piece is still owed
    ended(1)
    assert silent.asked.empty()
    other.answers.put(None)
    state = receiver.state()
    assert first not in (*given, owed)
    assert state.sources.count("silent") == 1
    assert receiver.failures.empty()


def test_a_piece_that_holds_no_numbers_is_refused_with_its_donor_and_another_gives_it():
    sick, well, receiver = Giver("sick", 7), Giver("well", 8), Receiver()
    sick.spoilt = True
    receiver.asks(sick)
    refused = sick.gives()
    name, error = receiver.failures.get(timeout=PATIENCE_S)
    assert (name, "contains NaN or Inf in tensor-0" in str(error)) == ("sick", True)
    receiver.asks(well)
    assert refused in [well.gives() for _ in range(COUNT)]
    assert set(receiver.state().sources) == {"well"}


def test_versions_of_another_job_are_refused():
    stranger, receiver = Giver("stranger", 7, versions=(1, 2)), Receiver()
    receiver.asks(stranger)
    stranger.gives()
    assert "2 versions arrived for 5 fragments" in str(receiver.failures.get(timeout=PATIENCE_S)[1])


def test_one_donor_gives_all_of_one_boundary_fragment_by_fragment() -> None:
    donor, receiver = Giver("donor", 7), Receiver(of_one_boundary=True)
    receiver.asks(donor)
    assert [donor.gives() for _ in range(COUNT)] == [(p,) for p in range(COUNT)]
    state = receiver.state()
    assert (state.donor, state.step, state.sources) == ("donor", 7, ())


def test_another_donor_goes_on_at_the_fragment_at_which_the_first_one_died() -> None:
    dies, lives, receiver = Giver("dies", 7), Giver("lives", 8), Receiver(of_one_boundary=True)
    receiver.asks(dies)
    dies.gives()
    assert dies.asked.get(timeout=PATIENCE_S) == (1,)
    dies.answers.put(ConnectionError("gone"))
    receiver.failures.get(timeout=PATIENCE_S)
    receiver.asks(lives)
    assert [lives.gives() for _ in range(COUNT - 1)] == [(p,) for p in range(1, COUNT)]
    assert receiver.state().sources == ("dies", *["lives"] * (COUNT - 1))


def test_a_held_state_is_of_one_boundary_until_its_receiver_has_it_or_asks_no_more() -> None:
    now, boundaries = [0.0], iter(range(100))

    def cut() -> list[tuple[int, int]]:
        boundary = next(boundaries)
        return [(boundary, p) for p in range(3)]

    held = HeldStates(cut, lambda: 10.0, lambda: now[0])
    assert [held.give("a", p) for p in (0, 1, 1)] == [(0, 0), (0, 1), (0, 1)]  # an answer got lost
    assert held.give("b", 0) == (1, 0)
    now[0] = 8.0
    assert held.give("a", 2) == (0, 2)
    now[0] = 17.0
    assert held.give("b", 1) == (2, 1)  # what was held for b is gone, and a's is not
    assert held.give("a", 2) == (0, 2)


def test_what_a_process_gives_of_a_boundary_is_kept_until_it_was_fetched_or_nobody_comes() -> None:
    now = [0.0]
    kept: CutStates[str] = CutStates(lambda: 10.0, lambda: now[0])
    kept.keep("1.1", 0, "first")
    kept.keep("1.1", 1, "second")
    assert [kept.state("1.1", p, 0.0) for p in (0, 0, 1)] == ["first", "first", "second"]
    kept.forget("1.1", 0)
    with pytest.raises(InfrastructureError, match=r"does not keep fragment 0 of the state 1\.1"):
        kept.state("1.1", 0, 0.0)
    waiting: list[str] = []
    late = threading.Thread(target=lambda: waiting.append(kept.state("1.2", 0, PATIENCE_S)))
    late.start()
    kept.keep("1.2", 0, "of a process that came to the boundary later")
    late.join()
    assert len(waiting) == 1
    now[0] = 9.0
    kept.keep("1.3", 0, "another")
    now[0] = 18.0
    kept.keep("1.4", 0, "a newer one")
    for cut, there in (("1.1", False), ("1.2", False), ("1.3", True)):
        if there:
            assert kept.state(cut, 0, 0.0) == "another"
        else:
            with pytest.raises(InfrastructureError, match="does not keep fragment"):
                kept.state(cut, 1, 0.0)


def test_pieces_that_cannot_be_taken_are_gathered_anew_from_whoever_is_asked_then():
    """Also from one that waited in vain for something to give."""
    strange, usual, receiver = Giver("strange", 7), Giver("usual", 8), Receiver(unfit="strange")
    receiver.asks(strange, usual)
    strange.asked.get(timeout=PATIENCE_S)
    for _ in range(COUNT - 1):
        usual.gives()
    strange.answers.put(None)
    assert str(receiver.failures.get(timeout=PATIENCE_S)[1]) == "of another model"
    receiver.asks(usual)
    assert sorted(usual.gives() for _ in range(COUNT)) == [(p,) for p in range(COUNT)]
    assert set(receiver.state().sources) == {"usual"}


def test_once_a_state_is_held_nothing_of_it_is_kept_and_nobody_is_asked():
    donor, receiver = Giver("donor", 7), Receiver()
    receiver.asks(donor)
    for _ in range(COUNT):
        donor.gives()
    receiver.state()
    assert receiver.fetch._chunks == {}
    receiver.asks(donor, Giver("another", 8))
    ended(0)
    assert donor.asked.empty()


def test_a_state_that_cannot_be_taken_is_gathered_anew_from_others():
    strange, usual, receiver = Giver("strange", 7), Giver("usual", 8), Receiver(of_one_boundary=True, unfit="strange")
    receiver.asks(strange)
    for _ in range(COUNT):
        strange.gives()
    assert str(receiver.failures.get(timeout=PATIENCE_S)[1]) == "of another model"
    receiver.asks(usual)
    for _ in range(COUNT):
        usual.gives()
    assert receiver.state().donor == "usual"


class Beginner:
    """An island without a state, and what it says."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.catching_up = CatchingUp(self.outbox)
        self.catching_up.loadable.set()
        self.loaded: list[FetchedState] = []

    def asks(self, order: tuple[int, int], *givers: Giver) -> None:
        donors = {f"{giver.name}.1": Donor(giver.name, giver.give) for giver in givers}
        self.catching_up.fetch(order, donors, COUNT, self.loaded.append, of_one_boundary=False)

    def says(self) -> list[Any]:
        return self.outbox.take(PATIENCE_S)


def test_a_state_that_arrives_before_the_trainer_can_take_it_is_loaded_afterwards():
    island, donor = Beginner(), Giver("donor", 7)
    island.catching_up.loadable.clear()
    island.asks((1, 1), donor)
    for _ in range(COUNT):
        donor.gives()
    assert island.loaded == []
    island.catching_up.loadable.set()
    assert [told.donor for told in island.says()] == ["donor"]
    assert len(island.loaded) == 1


def test_whoever_asks_again_for_a_state_that_is_held_is_told_the_same():
    island, donor = Beginner(), Giver("donor", 7)
    island.asks((1, 1), donor)
    for _ in range(COUNT):
        donor.gives()
    (told,) = island.says()
    assert (told.donor, told.step, set(told.sources)) == ("donor", 7, {"donor"})
    island.asks((2, 1), donor)
    island.catching_up.take(None, lambda: pytest.fail("it holds one"))
    assert island.says() == [told, told]
    assert len(island.loaded) == 1
    island.catching_up.forget()
    island.catching_up.take(None, lambda: Loaded((3,) * COUNT, 9))
    assert [(letter.versions, letter.step) for letter in island.says()] == [((3,) * COUNT, 9)]


def test_of_two_requests_the_later_counts_whichever_comes_last():
    island, later, earlier = Beginner(), Giver("later", 7), Giver("earlier", 8)
    island.asks((1, 2), later)
    island.asks((1, 1), earlier)
    for _ in range(COUNT):
        later.gives()
    assert island.says()[0].donor == "later"
    assert earlier.asked.empty()


def test_a_state_that_comes_from_elsewhere_ends_the_gathering():
    island, slow = Beginner(), Giver("slow", 7)
    island.asks((1, 1), slow)
    slow.asked.get(timeout=PATIENCE_S)
    island.catching_up.take(None, lambda: Loaded((0,) * COUNT, 0))
    slow.answers.put(ConnectionError("too late"))
    ended(0)
    assert [letter.donor for letter in island.says()] == [None]
    assert island.loaded == []


def test_a_donor_gives_no_faster_than_it_may_to_all_who_ask_together():
    began, throttle = monotonic(), Throttle(1000.0)
    asking = [threading.Thread(target=throttle.wait, args=(100, 5.0)) for _ in range(3)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert monotonic() - began >= 0.3
    with pytest.raises(InfrastructureError, match="9000 bytes would have to wait 9 s"):
        throttle.wait(9000, 5.0)
    Throttle(None).wait(10**12, 0.0)


BILLION = 12 * 10**9


@pytest.mark.parametrize(("byte_count", "line_bytes_per_s"), [(10**7, 2e6), (BILLION, 2e6), (8 * BILLION, 125e6)])
def test_a_line_that_is_twice_as_fast_as_the_slowest_is_waited_for_whatever_the_size(
    byte_count: int, line_bytes_per_s: float
) -> None:
    assert state_transfer.limit_s(byte_count, None) > byte_count / line_bytes_per_s + state_transfer.BOUNDARY_S


@pytest.mark.parametrize("byte_count", [1000, BILLION])
def test_a_donor_never_makes_anybody_wait_for_longer_than_they_do(byte_count: int) -> None:
    rate = 50e6
    assert state_transfer.queue_s(byte_count, rate) < state_transfer.limit_s(byte_count, rate)
    assert byte_count / rate < state_transfer.queue_s(byte_count, rate)


def test_a_donor_without_a_limit_lets_nobody_wait() -> None:
    Throttle(None).wait(BILLION, state_transfer.queue_s(BILLION, None))
