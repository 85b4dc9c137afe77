"""An island whose line its own payloads fill: it counts as there, few of them are under way, and none in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.core import events
from orchestrator.core.messages import Offer
from orchestrator.core.vocabulary import Epoch, FragmentId, Incarnation, IslandId, Version
from orchestrator.host.job_context import JobContext
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from tests.ray.jobs import ENDLESS, synthetic
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.ray


def offer(number: int) -> Offer:
    return Offer(FragmentId(number), number, 16, Version(3), 16, 1000, 1000)


class Parameters:
    """A parameter link by which no bytes come before ``arrived`` is set. ``behind``: fragments that have moved on."""

    def __init__(self) -> None:
        self.requested: list[int] = []
        self.fetched: list[int] = []
        self.behind: set[int] = set()
        self.as_tickets: set[int] = set()
        self.newest = 0
        self.arrived = threading.Event()
        self.answers_left = 0

    @property
    def answered_at(self) -> float:
        """Now, until the last answer was given."""
        self.answers_left -= 1
        return time.monotonic() if self.answers_left > 0 else 0.0

    def note(self, of: Offer) -> None:
        """Each is of a fragment of its own: ``newest`` says which ones are replaced."""

    def is_replaced(self, of: Offer) -> bool:
        return of.offer < self.newest

    def withdraw(self, of: Offer, request: tuple[int]) -> bool:
        assert request == (of.offer,)
        return of.offer in self.as_tickets

    def versions_behind(self, of: Offer) -> int:
        return int(of.offer in self.behind)

    def request(self, of: Offer) -> tuple[int]:
        self.requested.append(of.offer)
        return (of.offer,)

    def fetch(self, of: Offer, payload: str, request: tuple[int]) -> Any:
        assert request == (of.offer,)
        assert self.arrived.wait(PATIENCE_S)
        self.fetched.append(of.offer)
        return SimpleNamespace(update_norm=0.5)


class Line:
    """Answers a poll with what ``answers`` hold; without any, each wait for an answer is in vain at once."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.closed, self.waits = answers, threading.Event(), 0

    def slow(self) -> bool:
        return False

    def get(self, poll: object, timeout_s: float) -> Any:
        self.waits += 1
        if self.answers:
            return self.answers.pop(0)
        self.closed.wait(0.01)
        raise TimeoutError


Begin = Callable[[Line, Parameters], list[events.Event]]


@pytest.fixture
def begin(port: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Makes a report link over these, and returns its events. Ray is imported, which reads what ``port`` has set."""
    from orchestrator.runtime import report_link

    monkeypatch.setattr("orchestrator.runtime.cluster.address_of", lambda _: None)
    closing: list[Callable[[], None]] = []

    def started(line: Line, parameters: Parameters) -> list[events.Event]:
        told: list[events.Event] = []

        def post(undated: Any) -> int:
            told.append(undated(1.0))
            return len(told)

        def failed(error: BaseException) -> None:
            raise error

        spec, roots = parse_job(synthetic(steps=ENDLESS, groups=("asia",))), AllowedRoots.only(tmp_path)
        context = JobContext("job", spec, tmp_path, roots, Epoch(1), lambda: 0.0, post, failed, lambda: 0)
        island: Any = SimpleNamespace(call=lambda *_: None)
        made: Any = report_link.ReportLink
        link = made((IslandId("asia"), Incarnation(1)), island, context, line, parameters, None, lost=False)
        closing.extend([line.closed.set, parameters.arrived.set, link.close])
        return told

    yield started
    for close in closing:
        close()


def test_an_island_that_answers_the_parameter_link_is_not_silent_until_it_answers_nothing(begin: Begin) -> None:
    parameters, line = Parameters(), Line([])
    parameters.answers_left = 10
    told = begin(line, parameters)
    wait_until(lambda: told, "the silence")
    assert line.waits >= 10 // 2  # each wait looks once or twice
    assert isinstance(told[0], events.ConnectionLost)


def test_few_offers_are_asked_for_before_their_turn_and_all_come_in_their_order(begin: Begin) -> None:
    from orchestrator.runtime.report_link import OFFERS_AHEAD

    parameters, count = Parameters(), 7
    told = begin(Line([[(number, offer(number)) for number in range(1, count + 1)]]), parameters)
    wait_until(lambda: len(parameters.requested) >= OFFERS_AHEAD, "the first requests")
    assert parameters.requested == list(range(1, OFFERS_AHEAD + 1))
    parameters.arrived.set()
    wait_until(lambda: len(parameters.fetched) == count, "all offers")
    assert parameters.requested == parameters.fetched == list(range(1, count + 1))
    wait_until(lambda: len(arrivals(told)) == count, "their events")
    assert all(arrival.displacement == 0.5 for arrival in arrivals(told))


def test_an_offer_whose_fragment_has_moved_on_is_an_event_without_its_bytes(begin: Begin) -> None:
    parameters = Parameters()
    parameters.behind, parameters.arrived = {2, 3}, threading.Event()
    parameters.arrived.set()
    told = begin(Line([[(number, offer(number)) for number in range(1, 5)]]), parameters)
    wait_until(lambda: len(arrivals(told)) == 4, "all events")
    assert parameters.requested == parameters.fetched == [1, 4]
    assert [(arrival.contribution.offer, arrival.displacement) for arrival in arrivals(told)] == [
        (1, 0.5),
        (2, None),
        (3, None),
        (4, 0.5),
    ]


def test_of_many_old_offers_of_a_fragment_only_the_newest_is_an_event(begin: Begin) -> None:
    parameters = Parameters()
    parameters.behind, parameters.newest = set(range(1, 100)), 99
    parameters.arrived.set()
    told = begin(Line([[(number, offer(number)) for number in range(1, 101)]]), parameters)
    wait_until(lambda: len(arrivals(told)) == 2, "the events")
    assert parameters.requested == parameters.fetched == [100]
    assert [(arrival.contribution.offer, arrival.displacement) for arrival in arrivals(told)] == [
        (99, None),
        (100, 0.5),
    ]


def test_an_offer_that_was_asked_for_and_is_outdated_by_its_turn_is_pulled_only_if_its_bytes_are_there(
    begin: Begin,
) -> None:
    parameters = Parameters()
    told = begin(Line([[(number, offer(number)) for number in range(1, 4)]]), parameters)
    wait_until(lambda: len(parameters.requested) == 2, "the requests")  # and the first one is waited for
    parameters.behind, parameters.as_tickets = {2, 3}, {2}
    parameters.arrived.set()
    wait_until(lambda: len(arrivals(told)) == 3, "all events")
    assert parameters.fetched == [1]
    assert [arrival.displacement for arrival in arrivals(told)] == [0.5, None, None]


def test_an_outdated_offer_whose_bytes_came_with_the_answer_is_measured(begin: Begin) -> None:
    parameters = Parameters()
    told = begin(Line([[(number, offer(number)) for number in range(1, 3)]]), parameters)
    wait_until(lambda: len(parameters.requested) == 2, "the requests")
    parameters.behind = {2}
    parameters.arrived.set()
    wait_until(lambda: len(arrivals(told)) == 2, "both events")
    assert parameters.fetched == [1, 2]


def arrivals(told: list[events.Event]) -> list[events.ContributionArrived]:
    return [event for event in told if isinstance(event, events.ContributionArrived)]
