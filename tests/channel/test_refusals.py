"""Tickets that are not valid are refused with a reason; who is not of the job gets no bytes at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.certificates.authority import JobAuthority
from orchestrator.channel.client import ChannelClient, Pulling
from orchestrator.channel.frames import Ticket, issue
from orchestrator.errors import ConfigurationError, TransferRefused
from tests.channel.jobs import FAR, ISLAND, NEAR, Job, content_of

FORGED = b"f" * 32


def reissued(ticket: Ticket, secret: bytes, **changes: object) -> Ticket:
    """The ticket with a credential that somebody with this secret has issued."""
    names = {"job": "job", "epoch": 1, "island": ISLAND, "payload": "theta"} | changes
    return replace(ticket, credential=issue(secret, **names))  # type: ignore[arg-type]


WRONG = {
    "of another job": ({"job": "other"}, b"s" * 32, "it is for job other, but this is job job"),
    "of an older epoch": ({"epoch": 0}, b"s" * 32, "it is for epoch 0, but the server is in epoch 1"),
    "of a later epoch": ({"epoch": 2}, b"s" * 32, "it is for epoch 2, but the server is in epoch 1"),
    "forged": ({}, FORGED, "not issued by a server of this job"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("listening", [FAR, NEAR], ids=["network", "memory"])
def test_a_wrong_ticket_is_refused_and_the_reason_arrives(job: Job, listening: object, kind: str) -> None:
    changes, secret, reason = WRONG[kind]
    server, client = job.server(listening), job.client()  # type: ignore[arg-type]
    server.serve("theta", content_of(10))
    with pytest.raises(TransferRefused, match=reason):
        client.pull(reissued(server.ticket("theta", ISLAND), secret, **changes))  # type: ignore[arg-type]


def test_a_ticket_of_one_payload_opens_no_other(plain: Job) -> None:
    server, client = plain.server(), plain.client()
    server.serve("theta", content_of(10))
    server.serve("secret", content_of(10))
    ticket = server.ticket("theta", ISLAND)
    other = replace(ticket, payload="secret", credential=replace(ticket.credential, payload="secret"))
    with pytest.raises(TransferRefused, match="not issued by a server of this job"):
        client.pull(other)


def test_names_that_run_together_have_different_credentials() -> None:
    assert issue(b"s", job="a", epoch=1, island="bc", payload="d").mac != (
        issue(b"s", job="a", epoch=1, island="b", payload="cd").mac
    )


def test_a_client_uses_no_ticket_of_another_island(plain: Job) -> None:
    server = plain.server()
    server.serve("theta", content_of(10))
    with pytest.raises(TransferRefused, match="was issued to europe, but this is asia"):
        plain.client("asia").pull(server.ticket("theta", ISLAND))


def test_a_server_knows_by_the_certificate_who_shows_another_island_s_ticket(secured: Job) -> None:
    server = secured.server()
    server.serve("theta", content_of(10))
    thief = ChannelClient(ISLAND, identity=secured.authority.issue("asia"))
    with pytest.raises(TransferRefused, match="it was issued to europe, but asia presented it"):
        thief.pull(server.ticket("theta", ISLAND))
    thief.close()


def test_tickets_of_an_epoch_that_has_passed_are_refused(job: Job) -> None:
    server, client = job.server(), job.client()
    server.serve("theta", content_of(10))
    before = server.ticket("theta", ISLAND)
    server.advance(2)
    with pytest.raises(TransferRefused, match="it is for epoch 1, but the server is in epoch 2"):
        client.pull(before)
    assert client.pull(server.ticket("theta", ISLAND)) == content_of(10)


def test_a_client_with_another_authority_s_certificate_gets_nothing(secured: Job) -> None:
    server = secured.server()
    server.serve("theta", content_of(10))
    stranger = JobAuthority.new("job").issue(ISLAND)
    own = secured.authority.issue(ISLAND)
    trusting = ChannelClient(ISLAND, identity=replace(stranger, authority=own.authority))
    with pytest.raises(TransferRefused, match="do not accept each other's certificates"):
        trusting.pull(replace(server.ticket("theta", ISLAND), local=None))
    trusting.close()


def test_a_server_with_another_authority_s_certificate_is_asked_for_nothing(secured: Job) -> None:
    impostor = Job(tls=True, authority=JobAuthority.new("job"))
    server = impostor.server()
    server.serve("theta", content_of(10))
    with pytest.raises(TransferRefused, match="do not accept each other's certificates"):
        secured.client().pull(server.ticket("theta", ISLAND))
    impostor.close()


@pytest.mark.parametrize("server_tls", [True, False])
def test_tls_on_one_side_alone_is_told_at_once(server_tls: bool) -> None:
    served, pulled = Job(tls=server_tls), Job(tls=not server_tls)
    server = served.server()
    server.serve("theta", content_of(10))
    with pytest.raises(TransferRefused, match="Give both ends an identity of the job, or neither"):
        pulled.client().pull(server.ticket("theta", ISLAND))
    pulled.close()
    served.close()


def test_a_tls_server_gives_plain_text_no_answer(secured: Job) -> None:
    server = secured.server()
    server.serve("theta", content_of(10))
    plain = ChannelClient(ISLAND, pulling=Pulling(stall_s=0.5))
    with pytest.raises(Exception, match="No byte of theta has arrived"):
        plain.pull(replace(server.ticket("theta", ISLAND), tls=False))
    plain.close()


def test_a_name_that_no_request_holds_is_refused_where_it_is_served(plain: Job) -> None:
    with pytest.raises(ConfigurationError, match="too long"):
        plain.server().serve("é" * 128, content_of(1))


def test_secrets_are_in_no_text(secured: Job) -> None:
    server = secured.server()
    server.serve("theta", content_of(1))
    ticket, identity = server.ticket("theta", ISLAND), secured.authority.issue(ISLAND)
    assert str(ticket.credential.mac) not in repr(ticket)
    assert b"PRIVATE" in identity.private_key
    assert "PRIVATE" not in repr(identity)
