"""What an island trained behind a cut is counted, even if its process ends while its final reports are being read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core import events
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import Epoch, Incarnation, IslandId
from orchestrator.host.job_context import JobContext
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from tests.ray.jobs import ENDLESS, synthetic
from tests.waiting import wait_until

pytestmark = pytest.mark.ray


class EndedLink:
    """A link whose polls are answered by what ``answers`` hold, of a process that is dead after them."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.closed = answers, threading.Event()

    def get(self, poll: object, timeout_s: float) -> Any:
        from ray.exceptions import ActorDiedError

        if not self.answers:
            raise ActorDiedError
        return self.answers.pop(0)


class Anything:
    def call(self, *_: object) -> None:
        """It is answered by the link."""

    def abandon(self) -> None:
        """It carries no bytes."""


@pytest.mark.parametrize("count", [1, 2])
def test_progress_that_was_read_is_counted_though_the_process_ends_before_the_next_answer(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.runtime import report_link

    told: list[events.Event] = []
    failures = list[BaseException]()

    def post(undated: Any) -> int:
        told.append(undated(1.0))
        return len(told)

    spec, roots = parse_job(synthetic(steps=ENDLESS, groups=("asia",))), AllowedRoots.only(tmp_path)
    context = JobContext("job", spec, tmp_path, roots, Epoch(1), lambda: 0.0, post, failures.append, lambda: 0)
    trained = [[(number, Progress(number, number, 128 * number, 0.1, 0.1, 0.1, 2.0))] for number in (1, 2)]
    link, anything, unused = EndedLink(trained[:count]), Anything(), None
    poll: Any = report_link.ReportLink._poll
    monkeypatch.setattr(report_link.cluster, "address_of", lambda _: None)
    monkeypatch.setattr(report_link.ReportLink, "_poll", lambda _: None)  # until only final reports are wanted
    made: Any = report_link.ReportLink
    reports = made((IslandId("asia"), Incarnation(1)), anything, context, link, anything, unused, lost=True)
    reports.read_final_reports()
    poll(reports)
    wait_until(lambda: len(told) == count + 1)
    *progress, last = told
    assert [event.report.tokens_total for event in progress if isinstance(event, events.IslandReported)] == [
        128 * (number + 1) for number in range(count)
    ]
    assert isinstance(last, events.ConnectionLost if count == 1 else events.ConnectionRestored)
    assert failures == []
    link.closed.set()
    reports.close()
