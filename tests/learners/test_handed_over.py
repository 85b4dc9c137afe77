"""What an island hands over is served until it has arrived, is replaced, or another synchroniser comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from learners import handed_over
from learners.handed_over import HandedOver
from learners.state_transfer import held_s
from orchestrator.channel.endpoint import Carried, Endpoint, Membership, Terms
from orchestrator.channel.frames import SHARD, Ticket
from orchestrator.core.vocabulary import Epoch, FragmentId
from orchestrator.errors import PayloadWithdrawn, TransferError

LOOPBACK = "127.0.0.1"
ISLAND, PEER = "europe:1", "asia:2"
TERMS = Terms(inline_bytes_max=0, stall_s=0.5)
FIRST, SECOND = Epoch(1), Epoch(2)
FRAGMENT = FragmentId(3)


def membership(subject: str, epoch: Epoch) -> Membership:
    return Membership("job", subject, epoch, TERMS)


@pytest.fixture
def shard() -> Iterator[Endpoint]:
    endpoint = Endpoint(membership(SHARD, FIRST), LOOPBACK)
    yield endpoint
    endpoint.close()


@pytest.fixture
def island() -> Iterator[HandedOver]:
    made = HandedOver()
    made.join(membership(ISLAND, FIRST), LOOPBACK)
    yield made
    made.close()


def offered(island: HandedOver, number: int, content: bytes) -> Carried:
    return island.offer(FIRST, FRAGMENT, number, memoryview(content))


def test_an_offer_comes_as_often_as_it_is_asked_for_until_it_is_released(island: HandedOver, shard: Endpoint) -> None:
    tickets = [offered(island, 1, b"bytes") for _ in range(2)]
    assert [bytes(shard.received(ticket)) for ticket in tickets] == [b"bytes"] * 2
    island.release(FRAGMENT, 1)
    for ticket in tickets:
        with pytest.raises(PayloadWithdrawn):
            shard.received(ticket)
    assert bytes(shard.received(offered(island, 1, b"bytes"))) == b"bytes"  # it still stands


def test_a_newer_offer_takes_the_place_of_the_older_and_a_late_release_of_that_one_changes_nothing(
    island: HandedOver, shard: Endpoint
) -> None:
    older, newer = offered(island, 1, b"older"), offered(island, 2, b"newer")
    island.release(FRAGMENT, 1)
    assert bytes(shard.received(newer)) == b"newer"
    island.release(FRAGMENT, 2)
    with pytest.raises(PayloadWithdrawn):
        shard.received(older)


def test_whoever_needs_the_channel_waits_until_this_process_has_joined_it(shard: Endpoint) -> None:
    island, carried = HandedOver(), []
    payload = shard.payload("0/1", memoryview(b"published"))
    waiting = threading.Thread(target=lambda: carried.append(island.received(FIRST, payload.carried(ISLAND))))
    waiting.start()
    island.join(membership(ISLAND, FIRST), LOOPBACK)
    waiting.join()
    assert [bytes(content) for content in carried] == [b"published"]
    island.close()


def test_another_synchroniser_cancels_pulls_from_the_one_before(island: HandedOver) -> None:
    dead = Endpoint(membership(SHARD, FIRST), LOOPBACK)
    dead.server.cap(ISLAND).bytes_per_second = 1.0
    payload = dead.payload("0/1", memoryview(bytes(1 << 20)))
    ticket = payload.carried(ISLAND)
    errors: list[Exception] = []

    def pull() -> None:
        try:
            island.received(FIRST, ticket, pulling)
        except TransferError as error:
            errors.append(error)

    begun = threading.Event()

    def pulling() -> bool:
        begun.set()
        return False

    dead.server.close()
    thread = threading.Thread(target=pull)
    thread.start()
    begun.wait()
    island.join(membership(ISLAND, SECOND), LOOPBACK)
    thread.join()
    assert len(errors) == 1
    dead.close()


def test_a_publication_that_is_sent_again_ends_the_pull_from_a_shard_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would go on until no byte has come for a minute. Pulls of other fragments go on."""
    patient = Terms(inline_bytes_max=0)
    island, begun, ended = HandedOver(), threading.Semaphore(0), []
    island.join(Membership("job", ISLAND, FIRST, patient), LOOPBACK)
    dead, shard = (Endpoint(Membership("job", SHARD, FIRST, patient), LOOPBACK) for _ in range(2))
    tickets = [dead.payload(f"{p}/1", memoryview(bytes(1 << 20))).carried(ISLAND) for p in range(2)]
    dead.server.close()
    received = island.received

    def noting(*arguments: Any) -> memoryview:
        begun.release()
        return received(*arguments)

    monkeypatch.setattr(island, "received", noting)

    def pull(fragment: FragmentId) -> None:
        try:
            island.published(FIRST, fragment, [tickets[fragment]])
        except TransferError:
            ended.append(fragment)

    pulls = [threading.Thread(target=pull, args=(FragmentId(p),), daemon=True) for p in range(2)]
    for thread in pulls:
        thread.start()
        begun.acquire()
    again = shard.payload("0/1", memoryview(b"again"))
    (content,) = island.published(FIRST, FragmentId(0), [again.carried(ISLAND)])
    assert bytes(content) == b"again"
    pulls[0].join()
    assert ended == [0]
    for end in (island, dead, shard):
        end.close()
    pulls[1].join()


def test_joining_again_changes_nothing_within_an_epoch_and_an_earlier_one_is_no_way_back(
    island: HandedOver, shard: Endpoint
) -> None:
    ticket = offered(island, 1, b"bytes")
    island.join(membership(ISLAND, FIRST), LOOPBACK)
    assert bytes(shard.received(ticket)) == b"bytes"
    island.join(membership(ISLAND, SECOND), LOOPBACK)
    island.join(membership(ISLAND, FIRST), LOOPBACK)
    with pytest.raises(TransferError):
        shard.received(ticket)
    assert bytes(shard.received(offered(island, 1, b"bytes"))) == b"bytes"


@pytest.fixture
def peer() -> Iterator[HandedOver]:
    made = HandedOver()
    made.join(membership(PEER, FIRST), LOOPBACK)
    yield made
    made.close()


def comes(peer: HandedOver, ticket: Carried) -> bool:
    try:
        return bytes(peer.received(FIRST, ticket)) == b"moments"
    except PayloadWithdrawn:
        return False


def test_the_end_of_one_parts_transfer_ends_no_others(island: HandedOver, peer: HandedOver) -> None:
    released, other = (island.donate(FIRST, PEER, memoryview(b"moments")) for _ in range(2))
    assert comes(peer, released)
    assert isinstance(released, Ticket)
    island.forget_donation(released.payload)
    assert not comes(peer, released)
    assert comes(peer, other)


def test_a_part_that_nobody_asks_for_any_more_is_let_go_of(peer: HandedOver, monkeypatch: pytest.MonkeyPatch) -> None:
    donor = HandedOver()
    monkeypatch.setattr(handed_over, "held_s", lambda byte_count, stall_s, bytes_per_s: 0.0)
    donor.join(membership(ISLAND, FIRST), LOOPBACK)
    idle = donor.donate(FIRST, PEER, memoryview(b"moments"))
    donor.donate(FIRST, "somebody:1", memoryview(b"moments"))
    assert not comes(peer, idle)
    donor.close()


def test_what_is_held_is_held_by_its_size_the_terms_and_the_rate() -> None:
    small, large = held_s(1_000_000, 60.0, None), held_s(1_000_000_000, 60.0, None)
    assert 60.0 < small < 600.0 < large
    assert held_s(1_000_000_000, 60.0, 100_000.0) > 10_000.0
    assert held_s(1_000_000_000, 60.0, 1e9) == large, "a cap that is no bound changes nothing"
    assert held_s(0, 120.0, None) - held_s(0, 60.0, None) == 60.0
