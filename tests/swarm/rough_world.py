"""A world with more faults than links and machines have: events are repeated, delayed, or replaced by others.

It tests what ``Synchroniser.handle`` promises to tolerate and the plain world does not try: any event repeated, even long
afterwards (except the first of a tape), a late timer, a process that runs on and reports after it was told to stop, a
payload that is not finite, a failing evaluator. All of it is random, and none happens once the plan is calm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.core import events as e
from orchestrator.core.vocabulary import Duration, Instant, JobPolicy, RefusalReason
from orchestrator.simulation.island import Host, SimulatedIsland
from orchestrator.simulation.links import OVERTAKEN_S
from orchestrator.simulation.plan import Latency, WorldPlan
from orchestrator.simulation.world import World
from orchestrator.tape.driver import Fold
from tests.swarm.residue_ledger import ResidueLedger

ECHO_S = (0.05, 8.0)
GHOST_S = (0.1, 4.0)


@dataclass(frozen=True, slots=True)
class EventFaults:
    """Probabilities per occasion. ``diverged`` makes an unusable payload one that is not finite.

    ``overload`` is no probability: from its first instant to its second, all payloads of the job pass one after the other
    through a machine that takes its third figure, in seconds, for each.
    """

    echo: float = 0.0
    ghost: float = 0.0
    late_timer: float = 0.0
    diverged: float = 0.0
    failed_evaluation: float = 0.0
    overload: tuple[Instant, Instant, Duration] | None = None


class RoughWorld(World):
    """A ``World`` with event faults. ``generation`` is the life of the synchroniser; here there is only one."""

    generation = 1

    def __init__(
        self, policy: JobPolicy, plan: WorldPlan, seed: int, event_faults: EventFaults, *, folds: tuple[Fold, ...] = ()
    ) -> None:
        super().__init__(policy, plan, seed, folds=folds)
        self._event_faults = event_faults
        self._busy_until: Instant = 0.0

    def host_of(self, process: SimulatedIsland) -> Host:
        process.observer = ResidueLedger()
        return super().host_of(process)

    def draw(self, latency: Latency) -> float:
        seconds = super().draw(latency)
        since, until, takes = self._event_faults.overload or (0.0, 0.0, 0.0)
        if not since <= self.now < until or latency not in (self.plan.pull_s, self.plan.delivery_s):
            return seconds
        self._busy_until = min(max(self._busy_until, self.now) + takes, until)
        return seconds + self._busy_until - self.now

    def tell(self, event: e.Event) -> None:
        if isinstance(event, e.TimerFired) and self.chance(self._event_faults.late_timer):
            self.links.say(event, self.draw(OVERTAKEN_S))
            return
        if isinstance(event, e.ContributionUnusable) and self.chance(self._event_faults.diverged):
            event = replace(event, reason=RefusalReason.NON_FINITE, detail="a value is not finite")
        if isinstance(event, e.EvaluationCompleted) and self.chance(self._event_faults.failed_evaluation):
            event = e.EvaluationFailed(event.at, event.global_version, "the evaluator went away")
        super().tell(event)
        if not isinstance(event, e.JobStarted) and self.chance(self._event_faults.echo):
            self.links.say(event, self.draw(ECHO_S))

    def die(self, host: Host, reason: str, *, announced: bool) -> None:
        """End a process, possibly late: it was told to stop, and nothing waits for its death.

        A restarted synchroniser may not know of the order and be connected to the process. It then hears of the death.
        """
        if not announced and host.alive and self.chance(self._event_faults.ghost):
            stopped_by = self.generation
            dies = super().die
            self.later(self.draw(GHOST_S), lambda: dies(host, reason, announced=self.generation != stopped_by))
        else:
            super().die(host, reason, announced=announced)
