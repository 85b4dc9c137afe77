"""Who stood still and had no reason to: gaps of islands that nothing happened to, and the faults beside them."""

from __future__ import annotations

from orchestrator.accounting.statistics import Bystanders
from orchestrator.core import events as e
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import CommandId, Incarnation, IslandId

ASIA, EUROPE = (IslandId("asia"), Incarnation(1)), (IslandId("europe"), Incarnation(1))


def report(at, who, gap):
    return e.IslandReported(at, *who, Progress(1, 1, 512, 0.1, 0.1, gap, 2.0))


def fault(at, kind, who, duration=0.0):
    return e.FaultInjected(at, CommandId("c"), "somebody", kind, *who, duration)


def told(*events):
    fold = Bystanders()
    for event in events:
        fold.apply(event)
    return fold.summary()


def test_the_longest_gap_of_a_bystander_is_told_with_when_and_who():
    found = told(report(1.0, ASIA, 0.1), report(2.0, EUROPE, 0.7), report(3.0, ASIA, 0.2))
    assert found["bystander_gap"] == {"seconds": 0.7, "at": 2.0, "island": "europe"}
    assert found["bystander_gap_max_s"] == 0.7


def test_a_stopped_islands_own_gap_is_no_bystanders_also_when_an_older_report_comes_first():
    stopped = [fault(5.0, "stop", ASIA, 3.0), report(8.01, ASIA, 0.1), report(8.1, ASIA, 3.1)]
    assert told(report(4.0, ASIA, 0.2), *stopped)["bystander_gap_max_s"] == 0.2
    after = [report(10.1, ASIA, 0.1), report(10.6, ASIA, 1.5)]
    assert told(report(4.0, ASIA, 0.2), *stopped, *after)["bystander_gap"]["at"] == 10.6


def test_an_island_told_to_continue_early_is_a_bystander_early():
    early = [fault(5.0, "stop", ASIA, 100.0), fault(6.0, "continue", ASIA), report(8.5, ASIA, 1.1)]
    assert told(*early, report(9.0, ASIA, 0.3))["bystander_gap"] == {"seconds": 0.3, "at": 9.0, "island": "asia"}


def test_a_silent_island_is_none_until_it_is_heard_again_and_has_settled():
    silent = [e.ConnectionLost(5.0, *ASIA, False, "no answer"), report(5.5, ASIA, 9.0)]
    back = [e.ConnectionRestored(9.0, *ASIA), report(9.1, ASIA, 4.0), report(11.2, ASIA, 0.1), report(12.0, ASIA, 0.4)]
    assert told(*silent, *back)["bystander_gap_max_s"] == 0.4


def test_another_incarnation_begins_as_a_bystander():
    stop = fault(5.0, "stop", ASIA, 100.0)
    again = (IslandId("asia"), Incarnation(2))
    assert told(stop, e.IslandPlaced(20.0, *again, "node", 1), report(21.0, again, 0.3))["bystander_gap_max_s"] == 0.3


def test_faults_are_listed_and_their_ends_are_not():
    found = told(fault(5.0, "stop", ASIA, 3.0), fault(6.0, "continue", ASIA), fault(7.0, "kill", EUROPE))
    assert [(one["at"], one["kind"], one["island"], one["duration"]) for one in found["faults"]] == [
        (5.0, "stop", "asia", 3.0),
        (7.0, "kill", "europe", 0.0),
    ]
    assert found["bystander_gap_max_s"] is None
