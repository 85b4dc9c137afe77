"""The job as a whole, seen from outside: commands are answered once, and it ends when its tokens are trained, and once.

Responsible for: the token budget by the islands' own reports, evaluations, operators' commands, and silence after the end.
Refuses to know: fragments, and where an island is in its life (``islands`` says so).
"""

from __future__ import annotations

from orchestrator.core import commands
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import CarriedReport, CaughtUp, Progress
from orchestrator.core.vocabulary import CommandId, Incarnation, IslandId, JobOutcome, JobPolicy
from tests.swarm.checkers.islands import Islands, Stage
from tests.swarm.checkers.rounds import Rounds
from tests.swarm.checkers.timers import FLUSH
from tests.swarm.checkers.violation import require

_EVALUATED = (e.EvaluationCompleted, e.EvaluationFailed)
_AFTER_THE_END = (f.RefuseContribution, f.ReleasePayload, f.StopIsland, f.ResolveCommand)


class JobChecker:
    """``trained`` is what the islands' reports add up to; ``finished`` the job's last effect."""

    def __init__(self, policy: JobPolicy, islands: Islands, rounds: Rounds) -> None:
        self.finished: f.FinishJob | None = None
        self._policy, self._islands, self._rounds = policy, islands, rounds
        self._reported: dict[tuple[IslandId, Incarnation], int] = {}
        self._commands: set[CommandId] = set()
        self._upgrades: set[CommandId] = set()
        self._evaluating: f.Evaluate | None = None
        self._evaluated: int | None = None
        self._ending = self._finished_early = False
        self._at = 0.0

    @property
    def trained(self) -> int:
        return sum(self._reported.values())

    def before(self, event: e.Event) -> None:
        """What is to be known of the event before its effects have changed who may speak."""
        require(event.at >= self._at, "time does not run backwards", (event, self._at))
        self._at = event.at
        if isinstance(event, e.IslandReported):
            self._reported_by(event.island, event.incarnation, event.report)
        elif isinstance(event, _EVALUATED) and self._evaluates(event.global_version):
            self._evaluating, self._evaluated = None, event.global_version

    def _reported_by(self, island: IslandId, incarnation: Incarnation, report: CarriedReport) -> None:
        if isinstance(report, Progress) and self._islands.all[island].speaks(incarnation):
            key = island, incarnation
            self._reported[key] = max(self._reported.get(key, 0), report.tokens_total)
        elif isinstance(report, CaughtUp) and report.left is not None and self._islands.all[island].speaks(incarnation):
            key = island, report.left.incarnation
            self._reported[key] = max(self._reported.get(key, 0), report.left.tokens_total)

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if self.finished is not None:
            quiet = all(isinstance(effect, _AFTER_THE_END) for effect in effects)
            require(quiet, "nothing is begun after the job's end", (event, effects))
        if isinstance(event, e.SynchroniserRestarted) and effects:
            self._evaluating = None  # it died with the synchroniser
        self._answered(event, effects)
        begins = any(isinstance(x, f.SetTimer) and x.timer == FLUSH for x in effects) and not self._ending
        if isinstance(e.report_of(event), Progress) and self.finished is None and not self._ending:
            due = self.trained >= self._policy.token_budget
            require(begins == due, "a job ends when its tokens are trained", (self.trained, self._policy.token_budget))
        else:
            right = not begins or (isinstance(event, e.CommandRequested) and isinstance(event.request, commands.Finish))
            require(right, "a job ends when its tokens are trained, or an operator finishes it", event)
        self._ending = self._ending or begins
        for n, effect in enumerate(effects, start=1):
            if isinstance(effect, f.Evaluate):
                require(self._evaluating is None or self._deserted(), "one evaluation at a time", effect)
                version = sum(current.version for current in self._rounds.all)
                require(effect.global_version == version, "what is evaluated is the present version", (effect, version))
                self._evaluating = effect
                require(not self._deserted(), "who is to measure trains", effect)
            elif isinstance(effect, f.FinishJob):
                require(
                    n == len(effects) and self.finished is None, "a job ends once, and that is its last effect", effects
                )
                self._ends(effect, event)

    def _evaluates(self, version: int) -> bool:
        return self._evaluating is not None and self._evaluating.global_version == version

    def _deserted(self) -> bool:
        """Whether the island that is to measure is not there to do it."""
        if self._evaluating is None or self._evaluating.island is None:
            return False
        status = self._islands.all[self._evaluating.island]
        there = status.stage is Stage.TRAINING and not status.silent and not status.draining
        return not there or status.incarnation != self._evaluating.incarnation

    def _answered(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        """An upgrade is answered once its checkpoint is whole or has failed, any other command at once."""
        answers = [x.command for x in effects if isinstance(x, f.ResolveCommand)]
        expected: list[CommandId] = []
        if isinstance(event, e.CommandRequested) and event.command not in self._commands:
            self._commands.add(event.command)
            if isinstance(event.request, commands.Upgrade):
                self._upgrades.add(event.command)
            else:
                expected = [event.command]
            accepted = any(isinstance(x, f.ResolveCommand) and x.accepted for x in effects)
            self._finished_early |= accepted and isinstance(event.request, commands.Finish)
        later = [command for command in answers if command in self._upgrades]
        self._upgrades -= set(later)
        at_once = [command for command in answers if command not in later]
        require(at_once == expected and len(later) <= 1, "a command is answered once", (event, answers))

    def _ends(self, effect: f.FinishJob, event: e.Event) -> None:
        self.finished = effect
        require(not self._upgrades, "no upgrade is left unanswered", self._upgrades)
        statuses = self._islands.all
        left = [island for island, status in statuses.items() if status.stage is not Stage.OVER]
        require(not left, "no process outlives the job", left)
        version = sum(current.version for current in self._rounds.all)
        spent = self.trained >= self._policy.token_budget or self._finished_early
        match effect.outcome:
            case JobOutcome.CANCELLED:
                right = isinstance(event, e.CommandRequested) and isinstance(event.request, commands.Cancel)
            case JobOutcome.COMPLETED:
                right = spent and version > 0 and self._evaluated == version
                right = right and not any(current.inputs for current in self._rounds.all)
            case JobOutcome.FAILED:
                of_islands = [statuses[plan.island] for plan in self._policy.islands]
                expected = [status for status in of_islands if status.wanted or status.incarnation]
                right = all(status.given_up for status in expected) or (spent and version == 0)
        require(right, "a job's outcome is what happened", (effect, self.trained, version, self._evaluated))
        require(not self._rounds.held, "nothing is held after the job's end", self._rounds.held)
