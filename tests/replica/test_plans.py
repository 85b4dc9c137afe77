"""Plans are data: carried out in one process or in several, they give the values that the counters state."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.core.messages import Offer
from orchestrator.core.vocabulary import FragmentId, Schedule, Version
from orchestrator.replica.replica import AdoptVersion, BoundaryPlan, OfferFragment, Publication, Replica, ReplicaPolicy
from orchestrator.replica.work import SNAPSHOTS_MAX, AdoptionRule, Mix, Rebase, Replace

FRAGMENTS, INTERVAL, TOKENS = 2, 2, 1


@dataclass
class Values:
    """One number a fragment: how many of the island's tokens are in its parameters, and of what was published.

    A step adds one to each; a published version is a number of its own. It asserts that every snapshot it is told to use is
    one that it was told to keep.
    """

    own: dict[int, float] = field(default_factory=lambda: dict.fromkeys(range(FRAGMENTS), 0.0))
    bases: dict[int, float] = field(default_factory=lambda: dict.fromkeys(range(FRAGMENTS), 0.0))
    snapshots: dict[int, dict[int, float]] = field(default_factory=lambda: {p: {} for p in range(FRAGMENTS)})

    def step(self) -> None:
        self.own = {p: value + TOKENS for p, value in self.own.items()}

    def carry_out(self, plan: BoundaryPlan, published: dict[tuple[int, int], float]) -> None:
        for action in plan.actions:
            p = action.report.fragment if isinstance(action, AdoptVersion | OfferFragment) else 0
            if isinstance(action, OfferFragment):
                self.snapshots[p][action.report.offer] = self.own[p]
            elif isinstance(action, AdoptVersion):
                value = published[p, action.report.version]
                match action.mode:
                    case Replace():
                        self.own[p] = value
                    case Mix():
                        self.own[p] = 0.5 * self.own[p] + 0.5 * value
                    case Rebase(None):
                        self.own[p] = value + (self.own[p] - self.bases[p])
                    case Rebase(since):
                        self.own[p] = value + (self.own[p] - self.snapshots[p][since])
                self.bases[p] = value
            if isinstance(action, AdoptVersion | OfferFragment):
                self.snapshots[p] = {number: self.snapshots[p][number] for number in action.snapshots}


class Service:
    """Publishes what it likes, and knows which offer of the island was merged in it last."""

    def __init__(self) -> None:
        self.versions = dict.fromkeys(range(FRAGMENTS), 0)
        self.merged = dict.fromkeys(range(FRAGMENTS), 0)
        self.made: dict[int, list[int]] = {p: [] for p in range(FRAGMENTS)}
        self.published: dict[tuple[int, int], float] = {}

    def publish(self, fragment: int, merges: int | None) -> Publication:
        """``merges``: the offer so many before the latest is in it, unless it was merged before."""
        made = self.made[fragment]
        if merges is not None and merges < len(made):
            self.merged[fragment] = max(self.merged[fragment], made[-1 - merges])
        self.versions[fragment] += 1
        version = self.versions[fragment]
        self.published[fragment, version] = 1000.0 * version
        return Publication(FragmentId(fragment), Version(version), 0, self.merged[fragment])


EVENTS = st.lists(
    st.one_of(
        st.just("step"),
        st.just("step"),
        st.tuples(st.integers(0, FRAGMENTS - 1), st.one_of(st.none(), st.integers(0, 6))),
        st.sampled_from(["drain", "start"]),
    ),
    min_size=10,
    max_size=80,
)
LATE = ["step", "step", "step", "step", "step", (0, 1), "step", (0, 0), "step"]
"""Of a fragment's three offers the one before the latest is merged, and then none that is new."""


def replica(rule: AdoptionRule) -> Replica:
    made = Replica(ReplicaPolicy(Schedule(FRAGMENTS, INTERVAL), rule, 1, SNAPSHOTS_MAX[rule]))
    made.hold((Version(0),) * FRAGMENTS, 0)
    made.start()
    return made


Course = list[tuple[BoundaryPlan | None, list[Offer]]]
"""Boundaries, each with the offers that stand behind it; None is a step."""


def course_of(rule: AdoptionRule, events: list[object], service: Service) -> Course:
    """What a replica decides when this happens. Offers are known to the service once they are made."""
    island, course = replica(rule), Course()
    for event in events:
        match event:
            case "step":
                if island.draining or island.drained:
                    continue
                island.step_taken(TOKENS)
                course.append((None, []))
            case "drain":
                island.drain()
            case "start":
                island.start()
            case (fragment, merges):
                island.publication_arrived(service.publish(fragment, merges))
        plan = island.boundary()
        course.append((plan, island.standing_offers()))
        for report in plan.reports():
            if isinstance(report, Offer):
                service.made[report.fragment].append(report.offer)
    return course


@pytest.mark.parametrize("rule", ["replace", "rebase"])
@given(events=EVENTS)
@example(events=LATE)
def test_counters_are_of_the_work_that_is_in_the_parameters(rule: AdoptionRule, events: list[object]) -> None:
    """A second opinion by arithmetic: what an island has beyond the version it adopted is what it says it trained on it."""
    service, values = Service(), Values()
    for plan, _ in course_of(rule, events, service):
        if plan is None:
            values.step()
            continue
        values.carry_out(plan, service.published)
        for action in plan.actions:
            if isinstance(action, AdoptVersion):
                adopted = action.report
                assert adopted.kept_tokens == values.own[adopted.fragment] - 1000.0 * adopted.version
            elif isinstance(action, OfferFragment):
                offered = action.report
                assert offered.token_count == values.own[offered.fragment] - 1000.0 * offered.base_version


@pytest.mark.parametrize("rule", ["replace", "mix", "rebase"])
@given(events=EVENTS)
@example(events=LATE)
def test_the_bytes_of_an_offer_are_there_as_long_as_it_stands(rule: AdoptionRule, events: list[object]) -> None:
    service, values = Service(), Values()
    for plan, standing in course_of(rule, events, service):
        if plan is None:
            values.step()
        else:
            values.carry_out(plan, service.published)
            assert all(offer.offer in values.snapshots[offer.fragment] for offer in standing)


@pytest.mark.parametrize("rule", ["replace", "mix", "rebase"])
@given(events=EVENTS)
def test_a_follower_that_is_sent_the_plans_has_what_the_leader_has(rule: AdoptionRule, events: list[object]) -> None:
    """An island of several processes: one decides, and each carries the same plan out on the pieces that it holds."""
    service, leader, follower = Service(), Values(), Values()
    for plan, _ in course_of(rule, events, service):
        sent = pickle.loads(pickle.dumps(plan))
        assert sent == plan
        for values, what in ((leader, plan), (follower, sent)):
            if what is None:
                values.step()
            else:
                values.carry_out(what, service.published)
    assert (leader.own, leader.snapshots) == (follower.own, follower.snapshots)
