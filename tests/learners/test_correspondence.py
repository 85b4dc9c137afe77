"""Letters reach whoever keeps them, and offers that died with a synchroniser reach the next one."""

from __future__ import annotations

import pickle

import pytest

from learners.correspondence import Correspondence
from learners.outbox import Outbox
from orchestrator.core.messages import Adopted, Flushed, Offer, Progress
from orchestrator.errors import Fenced


def offer(fragment: int, number: int) -> Offer:
    return Offer(fragment, number, number, 0, 1, 8, 8)


class Desk:
    """An island's letters, and the offers of it that stand."""

    def __init__(self) -> None:
        self.outbox, self.standing = Outbox(), []
        self.correspondence = Correspondence(self.outbox, lambda: self.standing)

    def offers(self, *offers: Offer) -> None:
        for made in offers:
            self.standing = [old for old in self.standing if old.fragment != made.fragment] + [made]
            self.outbox.put(made)

    def read(self, epoch: int, read: int = 0, acknowledged: int = 0) -> list[tuple[int, object]]:
        return self.correspondence.letters(epoch, read, acknowledged, 0.0)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_letter_is_kept_until_it_is_acknowledged_however_often_it_is_read(desk: Desk) -> None:
    desk.outbox.put(Adopted(0, 1, 1, 8, 0))
    desk.offers(offer(0, 1))
    first = desk.read(1)
    assert [number for number, _ in first] == [1, 2]
    assert desk.read(1, read=2) == []
    assert desk.read(1) == first  # the answer was lost
    assert desk.read(1, acknowledged=1) == first[1:]
    assert desk.read(1, acknowledged=2) == []


def test_a_new_epoch_hears_what_the_old_one_read_and_did_not_keep(desk: Desk) -> None:
    desk.outbox.put(Progress(1, 1, 8, 0.1, 0.1, 0.1, 5.0))
    desk.offers(offer(0, 1))
    unkept = desk.read(1)
    assert desk.read(2) == unkept  # once: the offer among them is not made again


def test_a_new_epoch_is_offered_again_what_the_old_one_kept_only_in_memory(desk: Desk) -> None:
    desk.offers(offer(0, 1), offer(1, 2))
    desk.read(1)
    assert desk.read(1, acknowledged=2) == []
    desk.offers(offer(1, 3))  # takes the place of the second
    assert [letter for _, letter in desk.read(2)] == [offer(1, 3), offer(0, 1)]
    assert desk.read(2, read=4, acknowledged=4) == []


def test_what_was_merged_is_not_offered_again(desk: Desk) -> None:
    desk.offers(offer(0, 1))
    desk.read(1)
    desk.read(1, acknowledged=1)
    desk.standing = []
    assert desk.read(2) == []


@pytest.mark.parametrize("was_read", [True, False])
def test_that_all_was_given_is_said_behind_what_is_given_again(desk: Desk, was_read: bool) -> None:
    desk.offers(offer(0, 1))
    desk.read(1)
    desk.outbox.put(Flushed())
    desk.read(1, read=1 if was_read else 0, acknowledged=1)
    desk.correspondence.heed(2)
    desk.outbox.put(Flushed())  # the new one asked for it, too
    letters = [letter for _, letter in desk.read(2)]
    assert letters[0] == offer(0, 1)
    assert set(letters[1:]) == {Flushed()}


def test_a_synchroniser_that_was_replaced_is_fenced_and_gets_nothing(desk: Desk) -> None:
    desk.read(2)
    desk.offers(offer(0, 1))
    for _ in range(2):
        with pytest.raises(Fenced, match="epoch 1 speaks, but one of epoch 2"):
            desk.read(1)
    with pytest.raises(Fenced):
        desk.correspondence.heed(1)
    assert [letter for _, letter in desk.read(2)] == [offer(0, 1)]


def test_being_fenced_can_be_told_to_another_process() -> None:
    told = pickle.loads(pickle.dumps(Fenced(detail="gone")))
    assert isinstance(told, Fenced)
    assert str(told) == "gone"
