"""Nothing is left of a channel, whichever side closes it or is killed."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from orchestrator.channel.client import ChannelClient
from orchestrator.channel.frames import Ticket
from orchestrator.errors import PayloadWithdrawn
from tests.channel.jobs import FAR, ISLAND, NEAR, RANGE, Job, ServingProcess, connection_count, content_of
from tests.waiting import wait_until


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def is_listened_to(ticket: Ticket) -> bool:
    """Whether the server's name on this machine is there; jobs of others have their own."""
    assert ticket.local is not None
    return any(line.endswith(f"@{ticket.local}") for line in Path("/proc/net/unix").read_text().splitlines())


def test_closed_ends_leave_no_thread_no_descriptor_and_no_name(job: Job) -> None:
    gc.collect()  # of tests before
    threads, descriptors = set(threading.enumerate()), descriptor_count()
    for listening in (FAR, NEAR):
        server, client = job.server(listening), job.client()
        for number in range(5):
            server.serve(f"p{number}", content_of(RANGE + 1, seed=number))
            assert client.pull(server.ticket(f"p{number}", ISLAND)) == content_of(RANGE + 1, seed=number)
        ticket = server.ticket("p0", ISLAND)
        client.close()
        server.close()
    gc.collect()
    assert set(threading.enumerate()) - threads == set()
    assert descriptor_count() <= descriptors
    assert not is_listened_to(ticket)


def test_a_withdrawn_payload_s_memory_is_given_back(plain: Job) -> None:
    server, client = plain.server(NEAR), plain.client()
    server.serve("first", content_of(RANGE))
    client.pull(server.ticket("first", ISLAND))
    server.withdraw("first")
    descriptors = descriptor_count()
    for number in range(10):
        server.serve("theta", content_of(RANGE, seed=number))
        client.pull(server.ticket("theta", ISLAND))
    server.withdraw("theta")
    wait_until(lambda: descriptor_count() <= descriptors, "all descriptors are given back")


def test_a_killed_server_leaves_nothing_on_the_machine(job: Job) -> None:
    shared = set(os.listdir("/dev/shm"))
    serving = ServingProcess(job, 3 * RANGE, listening=NEAR)
    assert is_listened_to(serving.ticket)
    content = job.client().pull(serving.ticket)
    serving.kill()
    assert content == content_of(3 * RANGE)
    assert not is_listened_to(serving.ticket)
    assert {name for name in set(os.listdir("/dev/shm")) - shared if "atoll" in name} == set()


def test_a_pull_that_failed_leaves_no_thread_and_no_descriptor(job: Job) -> None:
    server = job.server()
    server.serve("theta", content_of(RANGE))
    ticket = server.ticket("theta", ISLAND)
    server.withdraw("theta")
    threads, descriptors = threading.active_count(), descriptor_count()
    for _ in range(5):
        client = ChannelClient(ISLAND, identity=job.identity(ISLAND))
        with pytest.raises(PayloadWithdrawn):
            client.pull(ticket)
        client.close()
    wait_until(lambda: connection_count(server) == 0, "the server has let go")
    wait_until(lambda: threading.active_count() <= threads, "threads are gone")
    wait_until(lambda: descriptor_count() <= descriptors, "descriptors are given back")


def test_private_keys_are_left_in_no_folder(secured: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    secured.authority.issue(ISLAND).context(server_side=True)
    assert list(tmp_path.iterdir()) == []
