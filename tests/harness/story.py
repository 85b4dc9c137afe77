"""A short language for tests that tells the core what happened. Every event is checked against the invariants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core import events
from orchestrator.core.effects import BeginCatchUp, Effect, MergeFragment, PlaceIsland
from orchestrator.core.messages import CarriedReport, CaughtUp, Progress, Ready
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import Contribution, IslandPlan, JobPolicy, payload_id
from orchestrator.host.state_view import core_status
from orchestrator.status import IslandStatus
from orchestrator.tape.driver import Fold
from tests.harness.job import Job

E = TypeVar("E")

POLICY: dict[str, Any] = {
    "fragment_count": 2,
    "sync_interval_steps": 4,
    "overlap_steps": 2,
    "quorum": 1,
    "grace_margin": 0.5,
    "grace_cap_steps": 1.0,
    "staleness_max": 0,
    "token_budget": 1_000_000,
    "evaluation_every_merges": 0,
    "suspect_timeout_s": 30.0,
    "backoff_first_s": 1.0,
    "backoff_max_s": 8.0,
    "restarts_max": 3,
    "flush_timeout_s": 10.0,
    "moving_average_decay": 0.9,
}


def policy(islands: str = "abc", **changed: Any) -> JobPolicy:
    plans = tuple(IslandPlan(name, f"group-{name}", f"region-{name}", 1) for name in islands)
    return JobPolicy(islands=plans, **{**POLICY, **changed})


class Story(Job):
    """A job whose islands have one-letter names.

    With ``accounted``, every offered token must have been trained, and ``goodput`` and ``statistics`` must add up; most
    stories are careless about their tokens. ``before`` happens before the job starts. ``begun`` are the first effects,
    and ``seeded`` those after Θ existed.
    """

    def __init__(
        self,
        islands: str = "abc",
        *,
        wanted: JobPolicy | None = None,
        accounted: bool = False,
        before: Iterable[events.Event] = (),
        folds: Iterable[Fold] = (),
        **changed: Any,
    ) -> None:
        wanted = wanted or policy(islands, **changed)
        self.goodput, self.statistics = Goodput(wanted), Statistics(wanted)
        super().__init__(Synchroniser(wanted), (*((self.goodput, self.statistics) if accounted else ()), *folds))
        self.tokens: dict[tuple[str, int], int] = {}
        self.offers: dict[tuple[str, int], int] = {}
        for event in before:
            self.tell(event)
        self.begun = self.happen(events.JobStarted)
        self.seeded = self.happen(events.OuterStateSeeded, 1000, "digest")

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def incarnation(self, island: str) -> int:
        return self.island(island).incarnation

    def island(self, name: str) -> IslandStatus:
        return next(view for view in core_status(self.core.state, self.now).islands if view.island == name)

    def reports(self, island: str, incarnation: int, report: CarriedReport) -> tuple[Effect, ...]:
        return self.happen(events.IslandReported, island, incarnation, report)

    def starts(self, *islands: str) -> None:
        """Tell that these islands are placed, ready and caught up, and have trained for one second at 1 s per step."""
        for name in islands:
            self.is_ready(name)
            versions = tuple(f.version for f in self.core.state.rounds)
            self.reports(name, self.incarnation(name), CaughtUp(None, versions, 0, 0.1))
            self.trains(name, tokens=100)

    def is_ready(self, name: str) -> BeginCatchUp | None:
        self.happen(events.IslandPlaced, name, self.incarnation(name), "node", 1000)
        effects = self.reports(name, self.incarnation(name), Ready(1, 0.5))
        return the(BeginCatchUp, effects) if effects else None

    def trains(self, name: str, tokens: int, steps: int = 1) -> tuple[Effect, ...]:
        key = (name, self.incarnation(name))
        self.tokens[key] = self.tokens.get(key, 0) + tokens
        total = self.tokens[key]
        return self.reports(*key, Progress(total // 100, total // 100, total, 1.0, 1.0, 1.0, 5.0))

    def contribution(self, name: str, fragment: int = 0, base: int | None = None, **facts: Any) -> Contribution:
        incarnation = facts.pop("incarnation", self.incarnation(name))
        number = facts.pop("offer", None)
        if number is None:
            number = self.offers[(name, fragment)] = self.offers.get((name, fragment), 0) + 1
        version = self.core.state.rounds[fragment].version if base is None else base
        steps, tokens = facts.pop("steps", 1), facts.pop("tokens", 100)
        name_of_payload = payload_id(name, incarnation, fragment, number)
        current = self.core.state.rounds[fragment]
        step = facts.pop("step", self.core.state.policy.schedule.next_due(fragment, current.step))
        assert not facts
        return Contribution(
            name_of_payload, name, incarnation, fragment, number, step, version, steps, tokens, tokens_total=tokens
        )

    def offers_fragment(
        self, name: str, fragment: int = 0, base: int | None = None, **facts: Any
    ) -> tuple[Effect, ...]:
        return self.happen(events.ContributionArrived, self.contribution(name, fragment, base, **facts))

    def merges(self, fragment: int, version: int) -> tuple[Effect, ...]:
        return self.happen(events.MergeCompleted, fragment, version, "digest", 0.01)

    def dies(self, name: str) -> tuple[Effect, ...]:
        return self.happen(events.ConnectionLost, name, self.incarnation(name), True, "process died")

    def falls_silent(self, name: str) -> tuple[Effect, ...]:
        return self.happen(events.ConnectionLost, name, self.incarnation(name), False, "no answer")

    def timer(self, effect: Any) -> tuple[Effect, ...]:
        self.now = max(self.now, effect.due_at)
        return self.happen(events.TimerFired, effect.timer, effect.serial)


def all_of(kind: type[E], effects: tuple[Effect, ...]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def the(kind: type[E], effects: tuple[Effect, ...]) -> E:
    """Return the only effect of this kind."""
    found = all_of(kind, effects)
    assert len(found) == 1, f"expected one {kind.__name__} in {effects}"
    return found[0]


def inputs(merge: MergeFragment) -> dict[str, float]:
    return {i.island: i.weight for i in merge.inputs}


def placements(effects: tuple[Effect, ...]) -> list[tuple[str, int]]:
    return [(e.island, e.incarnation) for e in all_of(PlaceIsland, effects)]
