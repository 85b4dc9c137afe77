"""A second opinion on everything the core decides: checkers that stand outside it and see events and effects alone.

    World(policy, plan, seed, folds=(Checkers(policy, plan.calm_at, patience),))

They keep books of their own, share nothing with the core but its words, and raise ``Violation`` at the first step that
breaks a sentence. The order of the parts matters: each may ask those before it about the state after the step.

    timers ── islands ── checkpoints ── rounds ── job     and health, which asks islands and rounds about the state before it

Responsible here: liveness. Once faults are over and a quorum of islands trains, every fragment advances within
``patience``; how long that is, the one who knows the world's speeds says.
"""

from __future__ import annotations

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.vocabulary import Duration, Epoch, Instant, JobPolicy
from tests.swarm.checkers.checkpoints import CheckpointChecker
from tests.swarm.checkers.health import Health
from tests.swarm.checkers.islands import Islands
from tests.swarm.checkers.job import JobChecker
from tests.swarm.checkers.rounds import Rounds
from tests.swarm.checkers.timers import Timers
from tests.swarm.checkers.violation import require


class Checkers:
    """A fold. ``waited_max`` is the longest that a fragment was kept waiting although it could have advanced.

    ``advancing`` says whether a quorum trained undisturbed for so long that every fragment must have advanced.
    """

    def __init__(self, policy: JobPolicy, calm_at: Instant, patience: Duration, epoch: Epoch = Epoch(1)) -> None:
        self.timers = Timers(policy)
        self.islands = Islands(policy, self.timers)
        self.rounds = Rounds(policy, epoch, self.islands, self.timers)
        self.checkpoints = CheckpointChecker(policy, self.islands, self.rounds)
        self.job = JobChecker(policy, self.islands, self.rounds)
        self.health = Health(policy, self.islands, self.rounds)
        self.waited_max: Duration = 0.0
        self.advancing = False
        self._quorum = policy.quorum
        self._patience = patience
        self._able_since = calm_at

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        self.job.before(event)
        self.health.apply(event, effects)
        self.timers.apply(event, effects)
        self.islands.apply(event, effects)
        self.checkpoints.before(event, effects)
        self.rounds.apply(event, effects)
        self.checkpoints.apply(event, effects)
        self.job.apply(event, effects)
        self._advances(event.at, restarted=isinstance(event, e.SynchroniserRestarted))

    def _advances(self, now: Instant, *, restarted: bool) -> None:
        if self.islands.ending or self.islands.finished:
            return
        if restarted or self.islands.changed or self.rounds.going_back or len(self.islands.live) < self._quorum:
            self._able_since = max(self._able_since, now)
            return
        self.advancing = self.advancing or now - self._able_since > self._patience
        for fragment, merged_at in enumerate(self.rounds.merged_at):
            waited = now - max(self._able_since, merged_at)
            self.waited_max = max(self.waited_max, waited)
            require(waited <= self._patience, "every fragment advances while a quorum trains", (fragment, waited))
