"""Notices of three clouds, asked of a server with their real paths; and answers that nobody should believe."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.system import notices
from orchestrator.system.notices import Metadata, Notice, Unanswered, address, cloud_of, settings, watch
from tests.metadata import MachineMetadata, serving
from tests.waiting import PATIENCE_S

CLOUDS = ("gce", "aws", "azure")


def asked_of(machine: MachineMetadata, sources: str = "auto") -> notices.Settings:
    return settings({"ATOLL_NOTICES": sources, "ATOLL_METADATA_URL": machine.url})


@contextmanager
def watching(machine: MachineMetadata, sources: str = "auto") -> Iterator[Callable[[], Notice]]:
    """Until the first notice; what is given waits for that."""
    heard: list[Notice] = []
    thread = threading.Thread(
        target=watch, args=(asked_of(machine, sources), heard.append, lambda _: time.sleep(0.02)), daemon=True
    )
    thread.start()

    def notice() -> Notice:
        thread.join(PATIENCE_S)
        (only,) = heard
        return only

    yield notice


@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.parametrize("sources", ["auto", "the cloud itself"])
def test_a_machine_hears_of_its_end_and_how_long_it_has(cloud: str, sources: str) -> None:
    with (
        serving(MachineMetadata(cloud)) as machine,
        watching(machine, cloud if sources != "auto" else sources) as notice,
    ):
        while len(machine.asked) < 2:
            time.sleep(0.01)
        at = time.time()
        machine.preempt(45.0)
        found = notice()
    assert -2.0 < found.deadline - at - (30.0 if cloud == "gce" else 45.0) < 20.0
    assert {"gce": "Google", "aws": "Amazon", "azure": "Azure"}[cloud] in found.cause


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_machine_that_goes_already_when_it_is_first_asked(cloud: str) -> None:
    machine = MachineMetadata(cloud)
    machine.preempt()
    with serving(machine), watching(machine, cloud) as notice:
        assert notice().deadline - time.time() < 31.0


def test_google_is_not_asked_again_and_again_but_held_until_there_is_a_change() -> None:
    with serving(MachineMetadata("gce")) as machine, watching(machine, "gce") as notice:
        while len(machine.asked) < 2:
            time.sleep(0.01)
        time.sleep(0.3)
        held = [target for _, target in machine.asked[1:]]
        machine.preempt()
        notice()
    assert held == ["/computeMetadata/v1/instance/preempted?wait_for_change=true&timeout_sec=60&last_etag=1"]


def test_advice_to_rebalance_counts_only_where_it_is_wanted() -> None:
    machine = MachineMetadata("aws", rebalance={"noticeTime": "2026-10-27T08:22:00Z"})
    with serving(machine), watching(machine, "aws,aws-rebalance") as notice:
        assert "recommends" in notice().cause
        assert notices.AwsQuestion(Metadata(*address(machine.url)))() is None


def test_the_events_of_other_machines_of_the_set_and_a_freeze_are_nothing_to_this_one() -> None:
    soon = "Mon, 19 Sep 2016 18:29:47 GMT"
    with serving(MachineMetadata("azure")) as machine:
        machine.scheduled = [machine.event("Preempt", soon, name="islands_4"), machine.event("Freeze", soon)]
        question = notices.AzureQuestion(Metadata(*address(machine.url)))
        assert question() is None
        machine.scheduled.append(machine.event("Reboot", soon))
        found = question()
    assert found is not None
    assert "Reboot" in found.cause
    assert abs(found.deadline - time.time()) < 20.0  # what is past is now


@pytest.mark.parametrize(
    "action",
    [
        {"action": "terminate", "time": "no time at all"},
        {"action": "stop"},
        {"action": "hibernate", "time": 12},
        {"action": "terminate", "time": "9999-12-31T23:59:59Z"},
    ],
)
def test_a_notice_without_a_sensible_time_is_a_notice_all_the_same(action: dict) -> None:
    with serving(MachineMetadata("aws", action=action)) as machine:
        found = notices.AwsQuestion(Metadata(*address(machine.url)))()
    assert found is not None
    assert 0.0 < found.deadline - time.time() <= notices.NOTICE_MAX_S


@pytest.mark.parametrize(
    "action", [{"action": "\x1b[2Jdance", "time": "2026-10-27T08:22:00Z"}, {"action": ["terminate"]}, {}]
)
def test_what_no_cloud_says_is_no_notice(action: dict) -> None:
    with serving(MachineMetadata("aws", action=action)) as machine:
        assert notices.AwsQuestion(Metadata(*address(machine.url)))() is None


# ── answers that nobody should believe ────────────────────────────────────────────────────────────────────────────


@contextmanager
def raw(*pieces: bytes, pause_s: float = 0.0) -> Iterator[Metadata]:
    """Whoever connects is sent this, piece by piece, for as long as it listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=send, args=(peer,), daemon=True).start()

        def send(peer: socket.socket) -> None:
            with peer:
                try:
                    peer.recv(65536)
                    for piece in pieces:
                        peer.sendall(piece)
                        time.sleep(pause_s)
                except OSError:
                    pass

        threading.Thread(target=serve, daemon=True).start()
        yield Metadata("127.0.0.1", listener.getsockname()[1])


def test_an_answer_that_trickles_for_ever_ends_when_its_time_is_over() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    with raw(head, *[b"x"] * 4000, pause_s=0.05) as metadata:
        began = time.monotonic()
        with pytest.raises(Unanswered):
            metadata.ask("/", {}, limit_s=0.5)
    assert time.monotonic() - began < 100.0  # of the 200 s that all of it takes


def test_headers_that_trickle_end_as_well() -> None:
    with raw(b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n"] * 90, pause_s=2.0) as metadata:
        began = time.monotonic()
        with pytest.raises(Unanswered):
            metadata.ask("/", {}, limit_s=0.5)
    assert time.monotonic() - began < 100.0  # of the 180 s that all of them take


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (notices.ANSWER_BYTES_MAX + 2),
        b"no http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 500 + b"\r\n",
        b"",
    ],
)
def test_an_answer_that_is_too_large_or_none_is_not_read(answer: bytes) -> None:
    with raw(answer) as metadata, pytest.raises(Unanswered):
        metadata.ask("/", {})


@pytest.mark.parametrize(
    "body",
    [b"TRUE", b"[" * 60_000, b"[]", b"null", b"\xff\xfe", b'{"Events": [1, {"EventType": "Preempt"}], "action": 1}'],
)
@pytest.mark.parametrize("source", notices.SOURCES)
def test_a_server_that_is_no_clouds_says_nothing(body: bytes, source: str) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with raw(head + body) as metadata:
        question = notices.QUESTIONS[source](metadata)
        with suppress(Unanswered):
            assert question() is None


def test_a_redirection_is_not_followed() -> None:
    with serving(MachineMetadata("aws", action={"action": "terminate"})) as machine:
        moved = f"HTTP/1.1 302 Found\r\nLocation: {machine.url}/latest/api/token\r\nContent-Length: 0\r\n\r\n"
        with raw(moved.encode()) as metadata, pytest.raises(Unanswered):
            notices.AwsQuestion(metadata)()
        assert machine.asked == []


def test_where_no_cloud_answers_there_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert cloud_of(Metadata("127.0.0.1", port)) is None


# ── what is asked, and where ──────────────────────────────────────────────────────────────────────────────────────


def test_nobody_is_asked_unless_it_is_said() -> None:
    assert settings({}).sources == settings({"ATOLL_NOTICES": "off"}).sources == ()


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"ATOLL_NOTICES": "gcp"}, "'gcp' is not a source"),
        ({"ATOLL_NOTICES": "auto,aws"}, "'auto' is not a source"),
        *[
            ({"ATOLL_NOTICES": "auto", "ATOLL_METADATA_URL": url}, url)
            for url in (
                "http://10.0.0.1",
                "http://example.com",
                "http://metadata.google.internal",
                "https://169.254.169.254",
                "http://169.254.169.254/computeMetadata",
                "http://user@169.254.169.254",
                "http://169.254.169.254:99999",
                "169.254.169.254",
                "",
            )
        ],
    ],
)
def test_a_source_or_an_address_that_cannot_be_is_refused_with_its_name(
    environment: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        settings(environment)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://169.254.169.254", ("169.254.169.254", 80)),
        ("http://127.0.0.1:8123/", ("127.0.0.1", 8123)),
        ("http://[fe80::1]:80", ("fe80::1", 80)),
    ],
)
def test_a_link_local_address_or_this_machines_own_is_asked(url: str, found: tuple[str, int]) -> None:
    assert address(url) == found
