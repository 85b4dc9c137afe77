"""Reports reach their keeper, few while nobody reads. Offers that died with a synchroniser reach the next one."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.messages import Adopted, Flushed, Offer, Progress, Ready
from orchestrator.core.vocabulary import Epoch
from orchestrator.errors import Fenced
from orchestrator.replica.outbox import ReliableOutbox, UnreadReports


def progress(steps: int, gap: float = 0.1) -> Progress:
    return Progress(steps, steps, steps * 8, steps * 0.1, 0.1, gap, 5.0)


def offer(fragment: int, number: int) -> Offer:
    return Offer(fragment, number, 1, 0, 1, 8, 8)


def test_reports_come_out_in_order_and_once():
    outbox = UnreadReports()
    reports = [progress(1), offer(0, 1), progress(2), Adopted(0, 1, 2, 16, 0), Flushed()]
    for report in reports:
        outbox.put(report)
    assert outbox.take() == reports
    assert outbox.take() == []


def test_neighbouring_progress_becomes_one_report_that_keeps_the_longest_gap():
    outbox = UnreadReports()
    for steps, gap in ((1, 0.1), (2, 0.9), (3, 0.2)):
        outbox.put(progress(steps, gap))
    assert outbox.take() == [progress(3, 0.9)]


def test_an_unread_offer_gives_way_to_a_newer_one_of_its_fragment():
    outbox = UnreadReports()
    for report in (progress(1), offer(0, 1), progress(2, 0.7), offer(1, 2), progress(3), offer(0, 3)):
        outbox.put(report)
    assert outbox.take() == [progress(2, 0.7), offer(1, 2), progress(3), offer(0, 3)]


@given(st.lists(st.sampled_from([0, 1, 2, 3, "progress"])))
def test_unread_it_never_grows_beyond_two_reports_a_fragment(written):
    outbox = UnreadReports()
    for number, what in enumerate(written):
        outbox.put(progress(number) if what == "progress" else offer(what, number))
    assert len(outbox.take()) <= 2 * 4 + 1


class Desk:
    """An island's reports, and the offers of it that stand."""

    def __init__(self) -> None:
        self.standing: list[Offer] = []
        self.outbox = ReliableOutbox()

    def offers(self, *offers: Offer) -> None:
        for made in offers:
            self.standing = [old for old in self.standing if old.fragment != made.fragment] + [made]
            self.outbox.put(made)

    def read(self, epoch: int, read: int = 0, acknowledged: int = 0) -> list[tuple[int, object]]:
        self.check_epoch(epoch)
        self.outbox.acknowledge(acknowledged)
        return self.outbox.read(read)

    def check_epoch(self, epoch: int) -> None:
        if self.outbox.check_epoch(Epoch(epoch)):
            self.outbox.restate(self.standing)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_report_is_kept_until_it_is_acknowledged_however_often_it_is_read(desk: Desk) -> None:
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
    assert [report for _, report in desk.read(2)] == [offer(1, 3), offer(0, 1)]
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
    desk.check_epoch(2)
    desk.outbox.put(Flushed())  # the new one asked for it, too
    reports = [report for _, report in desk.read(2)]
    assert reports[0] == offer(0, 1)
    assert set(reports[1:]) == {Flushed()}


def test_a_synchroniser_that_was_replaced_is_fenced_and_gets_nothing(desk: Desk) -> None:
    desk.read(2)
    desk.offers(offer(0, 1))
    for _ in range(2):
        with pytest.raises(Fenced, match="epoch 1 speaks, but one of epoch 2"):
            desk.read(1)
    with pytest.raises(Fenced):
        desk.check_epoch(1)
    assert [report for _, report in desk.read(2)] == [offer(0, 1)]


def test_being_fenced_can_be_told_to_another_process() -> None:
    told = pickle.loads(pickle.dumps(Fenced(detail="gone")))
    assert isinstance(told, Fenced)
    assert str(told) == "gone"


def test_the_islands_reader_hears_nothing_of_what_the_standby_wrote() -> None:
    outbox = ReliableOutbox()
    outbox.check_epoch(Epoch(1))
    outbox.put(Ready(1, 2.0))
    assert [number for number, _ in outbox.read(0)] == [1]
    outbox.put(Ready(1, 3.0))  # not even read
    outbox.forget_all()
    outbox.put(Ready(1, 0.0))
    assert [report for _, report in outbox.read(0)] == [Ready(1, 0.0)]
