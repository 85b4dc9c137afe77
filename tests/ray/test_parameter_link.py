"""When the pull of an offer is given up, and when it is tried again: against an island and a channel of plain objects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from orchestrator.channel.endpoint import Membership, Terms
from orchestrator.channel.frames import Address, Credential, Ticket
from orchestrator.core.messages import Offer
from orchestrator.core.vocabulary import NO_ANCHOR, Epoch, FragmentId, PayloadId, Version
from orchestrator.errors import ConfigurationError, PayloadDamaged, TransferCancelled, TransferError, TransferStalled
from orchestrator.host.line_traffic import LineCounter
from orchestrator.parameters.holding import EVERYTHING, Holding
from tests.waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from orchestrator.runtime.parameter_link import ParameterLink

pytestmark = pytest.mark.ray
FRAGMENT = FragmentId(0)
BYTES = memoryview(b"bytes")
SERVED_AT = Address("10.0.0.2", 42_001)
TICKET = Ticket((SERVED_AT,), "0/1", len(BYTES), 1 << 20, 0, Credential("job", 1, "shard", "0/1", b""), True)


def offer(number: int, fragment: FragmentId = FRAGMENT) -> Offer:
    return Offer(fragment, number, 16, Version(0), 16, 1000, 1000)


class Island:
    """Answers each call at once. ``offers`` are those that it was asked for."""

    def __init__(self) -> None:
        self.offers: list[int] = []
        self.troubles: tuple[str, ...] = ()
        self.refuses_to_join: Exception | None = None

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if method.__name__ == "hindrances":
            return self.troubles
        if method.__name__ == "join_channel" and self.refuses_to_join is not None:
            return self.refuses_to_join
        if method.__name__ == "take_payload":
            self.offers.append(arguments[-1])
            return np.frombuffer(BYTES, np.uint8)
        return None


class Line:
    """Passes all until it is closed; an answer is there as soon as it is called for."""

    def __init__(self, closed: threading.Event) -> None:
        self._closed = closed

    def delay(self, size_bytes: int) -> None:
        pass

    def get(self, answer: Any, timeout_s: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        if type(answer).__name__ == "ObjectRef":
            import ray  # which reads its environment then

            return ray.get(answer, timeout=timeout_s)
        return answer

    def impaired(self, content: memoryview | None) -> memoryview | None:
        return content

    def is_cut(self) -> bool:
        return False

    def wait_until_open(self) -> bool:
        return not self._closed.is_set()


class Channel:
    """What a pull does, one after the other: bytes that come, or an error. Each looks first whether it is wanted."""

    def __init__(self) -> None:
        self.outcomes: list[TransferError | PayloadDamaged] = []
        self.while_pulling: Callable[[], None] = lambda: None
        self.troubles: tuple[str, ...] = ()

    def hindrances(self, address: Address) -> tuple[str, ...]:
        return self.troubles if address == SERVED_AT else ()

    def received(self, carried: object, abandoned: Callable[[], bool]) -> memoryview:
        self.while_pulling()
        if abandoned():
            raise TransferCancelled(detail="It is abandoned.")
        if self.outcomes:
            raise self.outcomes.pop(0)
        return BYTES


@pytest.fixture
def island() -> Island:
    return Island()


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def counter() -> LineCounter:
    return LineCounter()


def made_link(
    island: Island, channel: Channel, counter: LineCounter, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ParameterLink]:
    from orchestrator.runtime import parameter_link  # imports Ray, which reads its environment then

    monkeypatch.setattr(parameter_link, "WATCH_S", 0.01)
    monkeypatch.setattr(parameter_link, "HINDERED_S", 0.0)
    closed = threading.Event()
    shard: Any = SimpleNamespace(
        pull=lambda fragment, carried, abandoned: channel.received(carried, abandoned),
        hindrances=channel.hindrances,
        receive=lambda payload, fragment, content: bytes(content),
    )
    context: Any = SimpleNamespace(epoch=Epoch(1), guarded=lambda work: work())
    ranks: Any = [(island, Membership("job", "asia:1", 1, Terms()))]
    of_job: Any = (ranks, context, Line(closed), closed, shard)
    made = parameter_link.ParameterLink("asia.1", *of_job, counter)
    yield made
    closed.set()
    made.close()


@pytest.fixture
def link(
    port: object, island: Island, channel: Channel, counter: LineCounter, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ParameterLink]:
    yield from made_link(island, channel, counter, monkeypatch)


def fetched(link: ParameterLink, number: int) -> object:
    return link.fetch(offer(number), PayloadId(f"payload-{number}"), link.request(offer(number)))


def test_an_offer_is_given_up_for_a_newer_one_but_never_two_in_a_row(link: ParameterLink) -> None:
    link.note(offer(2))
    assert fetched(link, 1) is None
    link.note(offer(3))
    assert fetched(link, 2) == BYTES
    link.note(offer(4))
    assert fetched(link, 3) is None


def test_a_newer_offer_of_another_fragment_changes_nothing(link: ParameterLink) -> None:
    link.note(offer(9, FragmentId(1)))
    assert fetched(link, 1) == BYTES


def test_a_pull_ends_with_the_process_of_its_island(link: ParameterLink, channel: Channel, island: Island) -> None:
    channel.while_pulling = link.abandon
    assert fetched(link, 1) is None
    assert island.offers == [1]


def test_an_offer_whose_transfer_fails_is_asked_for_again(
    link: ParameterLink, channel: Channel, island: Island
) -> None:
    channel.outcomes = [TransferStalled(stall_s=1.0), TransferStalled(stall_s=1.0)]
    assert fetched(link, 1) == BYTES
    assert island.offers == [1, 1, 1]


def test_an_offer_that_comes_damaged_again_and_again_is_skipped(
    link: ParameterLink, channel: Channel, island: Island
) -> None:
    channel.outcomes = [PayloadDamaged(payload="0/1", detail="it differs")]
    assert fetched(link, 1) is None
    assert island.offers == [1]


def test_what_is_in_the_way_at_either_end_is_said_while_it_is(
    link: ParameterLink, channel: Channel, island: Island, counter: LineCounter
) -> None:
    island.troubles = ("nothing comes from the synchroniser",)
    wait_until(lambda: counter.status().trouble == "nothing comes from the synchroniser")
    island.troubles, channel.troubles = (), ("nothing comes from asia",)
    wait_until(lambda: counter.status().trouble is None)
    assert link.fetch(offer(1), PayloadId("payload-1"), (TICKET,)) == BYTES  # type: ignore[arg-type]
    wait_until(lambda: counter.status().trouble == "nothing comes from asia")
    channel.troubles = ()
    wait_until(lambda: counter.status().trouble is None)


def test_an_island_that_can_take_no_part_in_the_channel_says_why(
    port: object, channel: Channel, island: Island, counter: LineCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RayTaskError

    cause = ConfigurationError(detail="No port of 24000 to 24000 can be listened on.")
    island.refuses_to_join = RayTaskError("join_channel", "", cause)
    for _ in made_link(island, channel, counter, monkeypatch):
        wait_until(lambda: "No port of 24000" in (counter.status().trouble or ""))
        island.refuses_to_join = None
        wait_until(lambda: counter.status().trouble is None)


def test_a_link_that_is_over_hinders_nothing(link: ParameterLink, island: Island, counter: LineCounter) -> None:
    island.troubles = ("nothing comes from the synchroniser",)
    wait_until(lambda: counter.status().trouble)
    link.abandon()
    wait_until(lambda: counter.status().trouble is None)


class Version1:
    """Version 1 of a fragment, served by some process of its shard."""

    version, usual_bytes, server = Version(1), 5, "first process"

    def digest_of(self, holding: Holding) -> str:
        return "digest"

    def since(self, held: Version | None, holding: Holding) -> Any:
        from orchestrator.runtime.published import Shipment

        return Shipment(None, (SimpleNamespace(byte_count=5, inline=False, carried=lambda receiver: TICKET),))


def test_publications_do_not_wait_for_a_pull_from_a_shard_whose_process_is_gone(
    link: ParameterLink, island: Island
) -> None:
    import ray

    from orchestrator.runtime.parameter_link import Delivery

    @ray.remote(num_cpus=0)
    def never() -> None:
        threading.Event().wait()

    pulling, delivered = never.remote(), []

    def call(method: Callable[..., Any], *arguments: Any) -> Any:
        if method.__name__ != "deliver":
            return EVERYTHING if method.__name__ == "holding" else None
        delivered.append(arguments[1])
        return pulling if delivered == [0] else ray.put(1)

    island.call = call  # type: ignore[method-assign]
    of_dead_shard, of_other = Version1(), Version1()
    try:
        link.publish(FragmentId(0), Delivery(of_dead_shard, 16, 0, NO_ANCHOR))
        wait_until(lambda: delivered == [0], "the delivery")
        link.publish(FragmentId(1), Delivery(of_other, 16, 0, NO_ANCHOR))
        of_dead_shard.server = "second process"
        wait_until(lambda: sorted(delivered) == [0, 0, 1], "the other fragment, and the first again")
    finally:
        ray.cancel(pulling, force=True)


@pytest.mark.parametrize(("byte_count", "under_way"), [(100 << 10, 1), (50 << 10, 2), (10 << 10, 6)])
def test_publications_in_calls_leave_room_for_reports(
    link: ParameterLink, island: Island, byte_count: int, under_way: int
) -> None:
    import ray

    from orchestrator.runtime.parameter_link import Delivery
    from orchestrator.runtime.published import Shipment

    @ray.remote(num_cpus=0)
    def until(answered: Any) -> int:
        return 1

    @ray.remote(num_cpus=0)
    def never() -> None:
        threading.Event().wait()

    class Small(Version1):
        def since(self, held: Version | None, holding: Holding) -> Any:
            return Shipment(
                None, (SimpleNamespace(byte_count=byte_count, inline=True, carried=lambda receiver: BYTES),)
            )

    pending, delivered = never.remote(), []

    def call(method: Callable[..., Any], *arguments: Any) -> Any:
        if method.__name__ != "deliver":
            return EVERYTHING if method.__name__ == "holding" else None
        delivered.append(arguments[1])
        return until.remote(pending)

    island.call = call  # type: ignore[method-assign]
    try:
        with link._outgoing_changed:  # so that one batch has them all
            for fragment in range(6):
                link._outgoing[FragmentId(fragment)] = Delivery(Small(), 16, 0, NO_ANCHOR)  # type: ignore[arg-type]
            link._outgoing_changed.notify()
        wait_until(lambda: len(delivered) >= under_way, "the first calls")
        assert delivered == list(range(under_way))
    finally:
        ray.cancel(pending, force=True)
    wait_until(lambda: len(set(delivered)) == 6, "the others, once those have ended")
    wait_until(lambda: not link._under_way, "their end")


def test_an_offer_is_let_go_only_if_its_bytes_are_still_to_be_pulled(link: ParameterLink, island: Island) -> None:
    released: list[Any] = []

    def call(method: Callable[..., Any], *arguments: Any) -> None:
        if method.__name__ == "release_payload":
            released.append(arguments)

    island.call = call  # type: ignore[method-assign]
    answers: list[Any] = [np.frombuffer(BYTES, np.uint8), None, TimeoutError()]
    assert not any(link.withdraw(offer(7), (answer,)) for answer in answers)
    assert not released
    assert link.withdraw(offer(7), (TICKET,))  # type: ignore[arg-type]
    assert released == [(FRAGMENT, 7)]


def test_what_the_island_holds_is_neither_counted_as_sent_nor_as_waiting(
    link: ParameterLink, island: Island, counter: LineCounter
) -> None:
    import ray

    from orchestrator.runtime.parameter_link import Delivery
    from orchestrator.runtime.published import Shipment

    delivered: list[Any] = []

    @ray.remote(num_cpus=0)
    def never() -> None:
        threading.Event().wait()

    class Either(Version1):
        def since(self, held: Version | None, holding: Holding) -> Any:
            return Shipment(held, ()) if held == 1 else super().since(held, holding)

    pending = never.remote()

    def call(method: Callable[..., Any], *arguments: Any) -> Any:
        if method.__name__ != "deliver":
            return EVERYTHING if method.__name__ == "holding" else None
        delivered.append(arguments[6:])
        return pending if len(delivered) == 2 else ray.put(1)

    island.call = call  # type: ignore[method-assign]
    try:
        link.publish(FRAGMENT, Delivery(Either(), 16, 0, NO_ANCHOR))
        wait_until(lambda: counter.status().down_busy_seconds, "the first one")
        first = counter.status()
        assert (first.down_payloads["values"], first.down_bytes["values"]) == (1, 5)
        link.publish(FRAGMENT, Delivery(Either(), 16, 0, NO_ANCHOR))
        wait_until(lambda: len(delivered) == 2, "the second one, whose answer does not come")
        assert delivered[1] == (1, "digest")
        again = counter.status()
        assert (again.queued_fragments, again.queued_bytes) == (0, 0)
    finally:
        ray.cancel(pending, force=True)
    wait_until(
        lambda: len(delivered) > 2 and not link._under_way and not link._outgoing, "its answer, when asked again"
    )
    assert counter.status() == first


def test_an_offer_is_behind_by_the_versions_that_were_published_since_its_own(
    link: ParameterLink, island: Island, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from orchestrator.runtime.parameter_link import Delivery

    monkeypatch.setattr(island, "call", lambda method, *_: ray.put(3) if method.__name__ == "deliver" else None)
    assert link.versions_behind(offer(16)) == 0
    published = Version1()
    published.version = Version(3)
    link.publish(FRAGMENT, Delivery(published, 16, 0, NO_ANCHOR))
    assert link.versions_behind(offer(16)) == 3
    assert link.versions_behind(offer(16, FragmentId(1))) == 0


# ── an island of two hosts ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pair(port: object, channel: Channel, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ParameterLink, list[Any]]]:
    """The link to an island of two processes, and what the shard was given, part by part."""
    from orchestrator.runtime import parameter_link

    closed, given = threading.Event(), []
    shard: Any = SimpleNamespace(
        pull=lambda fragment, carried, abandoned: channel.received(carried, abandoned),
        hindrances=channel.hindrances,
        receive=lambda payload, fragment, *parts: given.append(parts) or payload,
    )
    context: Any = SimpleNamespace(epoch=Epoch(1), guarded=lambda work: work())
    ranks: Any = [(Island(), Membership("job", f"asia:1/{rank}", 1, Terms())) for rank in range(2)]
    made = parameter_link.ParameterLink("asia.1", ranks, context, Line(closed), closed, shard, LineCounter())  # type: ignore[arg-type]
    yield made, given
    closed.set()
    made.close()


def test_the_parts_of_an_offer_are_pulled_at_once(pair: tuple[ParameterLink, list[Any]], channel: Channel) -> None:
    link, given = pair
    both = threading.Barrier(2, timeout=PATIENCE_S)
    channel.while_pulling = lambda: both.wait() and None  # one after another would break it
    assert fetched(link, 1) == "payload-1"
    assert given == [(BYTES, BYTES)]


def test_an_offer_of_parts_is_given_up_whole_and_the_next_in_none_of_them(
    pair: tuple[ParameterLink, list[Any]],
) -> None:
    link, given = pair
    link.note(offer(2))
    assert fetched(link, 1) is None
    link.note(offer(3))
    assert fetched(link, 2) == "payload-2"
    link.note(offer(4))
    assert fetched(link, 3) is None
    assert given == [(BYTES, BYTES)]


def test_what_a_process_has_is_asked_once_and_one_that_cannot_say_is_sent_all(
    pair: tuple[ParameterLink, list[Any]],
) -> None:
    link, _ = pair
    half = Holding((("w", ((0, 1),)),))
    first, second = link._ranks
    calls: list[int] = []
    first.call = lambda method, *arguments: calls.append(0) or half  # type: ignore[method-assign, assignment]
    second.call = lambda method, *arguments: TimeoutError()  # type: ignore[method-assign, assignment]
    assert link.holdings() == (half, EVERYTHING)
    second.call = lambda method, *arguments: calls.append(1) or half  # type: ignore[method-assign, assignment]
    assert link.holdings() == link.holdings() == (half, half)
    assert calls.count(1) == 1
