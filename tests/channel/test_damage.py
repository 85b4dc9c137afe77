"""Flipped bits are noticed and repaired, or named; bytes of another payload never pass for the ticket's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.channel.client import Pulling
from orchestrator.errors import DataError, PayloadDamaged, TransferStalled
from tests.channel.jobs import FAR, ISLAND, NEAR, RANGE, Job, by_way_of, content_of
from tests.channel.line import Line, flipped

SIZE = 3 * RANGE


def test_a_range_with_a_flipped_bit_is_asked_for_again(job: Job) -> None:
    server, client = job.server(), job.client()
    server.serve("theta", content_of(SIZE))

    def down(number: int, offset: int, content: bytes) -> bytes:
        in_the_middle = number == 0 and offset <= RANGE // 2 < offset + len(content)
        return flipped(content, RANGE // 2 - offset) if in_the_middle else content

    line = Line(server.address, down)
    assert client.pull(by_way_of(server.ticket("theta", ISLAND), line.address)) == content_of(SIZE)
    assert line.down_bytes > SIZE
    line.close()


def test_a_line_that_always_flips_a_bit_is_an_error_that_says_so(plain: Job) -> None:
    server, client = plain.server(), plain.client()
    server.serve("theta", content_of(SIZE))

    def down(_number: int, offset: int, content: bytes) -> bytes:
        return flipped(content, 1000 - offset) if offset <= 1000 < offset + len(content) else content

    line = Line(server.address, down)
    with pytest.raises(PayloadDamaged, match="theta: 4 ranges did not match their checksum"):
        client.pull(by_way_of(server.ticket("theta", ISLAND), line.address))
    line.close()


def test_under_tls_such_a_line_is_one_on_which_nothing_moves(secured: Job) -> None:
    server, client = secured.server(), secured.client(pulling=Pulling(stall_s=0.5))
    server.serve("theta", content_of(SIZE))

    def down(_number: int, offset: int, content: bytes) -> bytes:
        return flipped(content, 3 - offset) if offset <= 3 < offset + len(content) else content

    line = Line(server.address, down)
    with pytest.raises((TransferStalled, DataError)):
        client.pull(by_way_of(server.ticket("theta", ISLAND), line.address))
    line.close()


@pytest.mark.parametrize("listening", [FAR, NEAR], ids=["network", "memory"])
def test_other_bytes_under_the_same_name_are_not_the_ticket_s(job: Job, listening: object) -> None:
    server, client = job.server(listening), job.client()  # type: ignore[arg-type]
    server.serve("theta", content_of(SIZE, seed=1))
    ticket = server.ticket("theta", ISLAND)
    server.serve("theta", content_of(SIZE, seed=2))
    with pytest.raises(PayloadDamaged, match="differs from the ticket's"):
        client.pull(ticket)


def test_a_payload_that_changed_while_it_was_served_is_not_passed_on(plain: Job) -> None:
    server, client = plain.server(), plain.client()
    content = bytearray(content_of(SIZE))
    server.serve("theta", memoryview(content))
    ticket = server.ticket("theta", ISLAND)
    content[RANGE + 1] ^= 1
    with pytest.raises(PayloadDamaged):
        client.pull(ticket)


def test_a_ticket_with_another_checksum_is_not_satisfied(plain: Job) -> None:
    server, client = plain.server(), plain.client()
    server.serve("theta", content_of(SIZE))
    ticket = server.ticket("theta", ISLAND)
    with pytest.raises(PayloadDamaged):
        client.pull(replace(ticket, checksum=ticket.checksum ^ 1))
