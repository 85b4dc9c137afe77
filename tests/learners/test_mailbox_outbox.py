from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learners.mailbox import Mail, Mailbox
from learners.outbox import Outbox
from orchestrator.core.messages import Adopted, Flushed, Offer, Progress
from tests.waiting import PATIENCE_S


def mail(fragment: int, version: int) -> Mail:
    return Mail(fragment, version, step=0, arrays={"embed": np.zeros(1)})


def progress(steps: int, gap: float = 0.1) -> Progress:
    return Progress(steps, steps, steps * 8, steps * 0.1, 0.1, gap, 5.0)


def offer(fragment: int, number: int) -> Offer:
    return Offer(fragment, number, 1, 0, 1, 8, 8)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9))))
def test_the_newest_version_of_each_fragment_wins_in_any_order_of_arrival(arrivals):
    mailbox = Mailbox()
    for fragment, version in arrivals:
        mailbox.put(mail(fragment, version))
    newest = {fragment: max(v for f, v in arrivals if f == fragment) for fragment, _ in arrivals}
    assert [(m.fragment, m.version) for m in mailbox.take_all()] == sorted(newest.items())
    assert mailbox.take_all() == []


def test_letters_come_out_in_order_and_once():
    outbox = Outbox()
    letters = [progress(1), offer(0, 1), progress(2), Adopted(0, 1, 2, 16, 0), Flushed()]
    for letter in letters:
        outbox.put(letter)
    assert outbox.take(0) == letters
    assert outbox.take(0) == []


def test_neighbouring_progress_becomes_one_report_that_keeps_the_longest_gap():
    outbox = Outbox()
    for steps, gap in ((1, 0.1), (2, 0.9), (3, 0.2)):
        outbox.put(progress(steps, gap))
    assert outbox.take(0) == [progress(3, 0.9)]


def test_an_unread_offer_gives_way_to_a_newer_one_of_its_fragment():
    outbox = Outbox()
    for letter in (progress(1), offer(0, 1), progress(2, 0.7), offer(1, 2), progress(3), offer(0, 3)):
        outbox.put(letter)
    assert outbox.take(0) == [progress(2, 0.7), offer(1, 2), progress(3), offer(0, 3)]


@given(st.lists(st.sampled_from([0, 1, 2, 3, "progress"])))
def test_unread_it_never_grows_beyond_two_letters_a_fragment(written):
    outbox = Outbox()
    for number, what in enumerate(written):
        outbox.put(progress(number) if what == "progress" else offer(what, number))
    assert len(outbox.take(0)) <= 2 * 4 + 1


def test_a_reader_that_waits_is_woken_by_the_first_letter():
    outbox, got = Outbox(), []
    reader = threading.Thread(target=lambda: got.extend(outbox.take(30)))
    reader.start()
    outbox.put(Flushed())
    reader.join(PATIENCE_S)
    assert got == [Flushed()]
