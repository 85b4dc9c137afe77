"""What a process hands over is in the call or behind a ticket, by its size, and is served for as long as it is held."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.channel.endpoint import Endpoint, Membership, Terms, encrypts
from orchestrator.channel.frames import Ticket
from orchestrator.errors import ConfigurationError, PayloadWithdrawn, TransferRefused
from tests.channel.jobs import LOOPBACK, Job, content_of

INLINE = 1000
TERMS = Terms(inline_bytes_max=INLINE, stall_s=5.0)
Made = Callable[..., Endpoint]


@pytest.fixture
def endpoint(job: Job) -> Iterator[Made]:
    made: list[Endpoint] = []

    def make(subject: str, terms: Terms = TERMS) -> Endpoint:
        made.append(Endpoint(Membership(job.name, subject, job.epoch, terms, job.identity(subject)), LOOPBACK))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("size", [0, INLINE, INLINE + 1, 200_000])
def test_what_is_carried_is_received_and_only_small_ones_are_in_the_call(
    endpoint: Made, size: int, shared_memory: bool
) -> None:
    giver, taker = endpoint("shard", replace(TERMS, shared_memory=shared_memory)), endpoint("europe")
    content = content_of(size)
    carried = giver.payload("0/1", content).carried("europe")
    assert isinstance(carried, np.ndarray) == (size <= INLINE)
    if isinstance(carried, Ticket):
        assert (carried.local is not None) == shared_memory
        held = giver.payload("0/2", content)
        carried = held.carried("europe")
    assert taker.received(carried) == content


def test_what_nobody_holds_any_more_is_withdrawn_and_nothing_else(endpoint: Made) -> None:
    giver, taker = endpoint("shard"), endpoint("europe")
    let_go, held = (giver.payload("0/1", content_of(2 * INLINE, seed)) for seed in (1, 2))
    tickets = let_go.carried("europe"), held.carried("europe")
    del let_go
    gc.collect()
    giver.withdraw_unheld()
    with pytest.raises(PayloadWithdrawn):
        taker.received(tickets[0])
    assert taker.received(tickets[1]) == content_of(2 * INLINE, 2)


def test_a_ticket_is_for_one_receiver(endpoint: Made) -> None:
    giver, taker = endpoint("shard"), endpoint("asia")
    payload = giver.payload("0/1", content_of(2 * INLINE))
    with pytest.raises(TransferRefused, match="europe"):
        taker.received(payload.carried("europe"))


def test_every_link_has_the_cap_of_the_terms(endpoint: Made) -> None:
    assert endpoint("shard", replace(TERMS, bytes_per_s=5e6)).server.cap("europe").bytes_per_second == 5e6


@pytest.mark.parametrize(
    ("tls", "host", "encrypted"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "::1", False),
        ("auto", "10.0.0.7", True),
        ("always", "127.0.0.1", True),
        ("never", "10.0.0.7", False),
    ],
)
def test_only_loopback_goes_without_encryption_unless_it_is_said(tls: str, host: str, encrypted: bool) -> None:
    assert encrypts(Terms(tls=tls), host) is encrypted


def test_an_end_without_an_identity_does_not_listen_beyond_loopback() -> None:
    with pytest.raises(ConfigurationError, match="not encrypted"):
        Endpoint(Membership("job", "europe:1", 1, TERMS), "192.0.2.1")
