"""Islands, seen from outside: one process at a time, rising incarnations, and the dead are not listened to.

Responsible for: where every island is in its life, worked out anew from events and effects (neither the core's records
nor the accounting's are asked), and what docs/architecture.md says of an island's states. Refuses to know: fragments
and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import get_args

from orchestrator.core import commands
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Drained, Flushed
from orchestrator.core.vocabulary import Incarnation, IslandId, JobPolicy, NodeGroupId
from tests.swarm.checkers.timers import FLUSH, ROUNDING, Timers, backoff, departure, suspect
from tests.swarm.checkers.violation import require

_SPOKEN = get_args(e.IslandEvent)


class Stage(Enum):
    PLACING = auto()
    STARTING = auto()
    CATCHING_UP = auto()
    TRAINING = auto()
    STANDBY = auto()
    OVER = auto()


@dataclass(slots=True)
class IslandStatus:
    """``failures`` are lives in a row that ended without a contribution, ``quarantines`` those since an operator wanted it.

    ``given_up`` once there were too many of either. ``taken``: its process was a standby's. ``departing``: it drains because
    its node goes, and not because somebody wants it away. ``waiting``: its node group has no node for it.
    """

    stage: Stage = Stage.OVER
    incarnation: Incarnation = Incarnation(0)
    silent: bool = False
    flushed: bool = False
    draining: bool = False
    departing: bool = False
    wanted: bool = True
    failures: int = 0
    quarantines: int = 0
    given_up: bool = False
    taken: bool = False
    kill_pending: bool = False
    waiting: bool = False
    flushes_again: bool = False  # once it answers: what it gave last may be lost with a synchroniser

    @property
    def live(self) -> bool:
        """Somebody a round may wait for."""
        return self.stage is Stage.TRAINING and not self.silent and not self.flushed

    @property
    def trains_perhaps(self) -> bool:
        """It does not answer, and is not known to have stopped."""
        return self.stage is Stage.TRAINING and self.silent and not self.draining

    def speaks(self, incarnation: Incarnation) -> bool:
        return self.stage is not Stage.OVER and incarnation == self.incarnation


class Islands:
    """``live`` is whom a round may wait for; ``changed`` says whether that is not as it was before this event.

    ``taken`` are the standbys, with their incarnations, whose processes became islands'.
    """

    def __init__(self, policy: JobPolicy, timers: Timers) -> None:
        plans = (*policy.islands, *policy.standbys)
        self.all = {plan.island: IslandStatus() for plan in plans}
        self.standbys = [plan.island for plan in policy.standbys]
        self.taken: set[tuple[IslandId, Incarnation]] = set()
        self.live: frozenset[IslandId] = frozenset()
        self.seeded = self.ending = self.finished = self.changed = False
        self.cordoned: set[NodeGroupId] = set()
        self.paused = False
        self._sent_away: set[IslandId] = set()
        self._policy = policy
        self._timers = timers
        self._groups = {plan.island: plan.node_group for plan in plans}
        self._kinds = {plan.island: (plan.node_group, plan.accelerator_count) for plan in plans}

    @property
    def leaving(self) -> frozenset[IslandId]:
        """Those that drain and answer, once nobody else trains."""
        if self.live or self.ending:
            return frozenset()
        return frozenset(island for island, status in self.all.items() if status.live and status.draining)

    def held(self, island: IslandId) -> bool:
        """Whether it is away, and its node group cordoned."""
        return self.all[island].stage is Stage.OVER and self._groups[island] in self.cordoned

    def contributed(self, island: IslandId, incarnation: Incarnation) -> None:
        """Work of the island's present incarnation is in a version: it is healthy."""
        if self.all[island].incarnation == incarnation:
            self.all[island].failures = 0

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if isinstance(event, _SPOKEN):
            status = self.all[event.island]
            if status.speaks(event.incarnation):
                self._spoke(event, status, effects)
            else:
                stop = {(event.island, event.incarnation)}
                only = all(isinstance(x, f.StopIsland) and {(x.island, x.incarnation)} == stop for x in effects)
                require(only, "an incarnation that is over is not listened to", (event, effects))
        elif isinstance(event, e.OuterStateSeeded):
            self.seeded = True
        elif isinstance(event, e.CommandRequested):
            self._commanded(event.request, effects)
        elif isinstance(event, e.SynchroniserRestarted):
            for status in self.all.values():
                status.flushes_again = status.flushed
        elif self._timers.rang == FLUSH and not self.finished:
            for status in self.all.values():
                status.flushed = status.flushed or status.live  # also of one that drains
        for effect in effects:
            self._effect(event, effect, effects)
        for island, status in self.all.items():
            if status.silent and not self.ending and not self.finished:
                require(self._timers.awaits(suspect(island)), "a silent island has a deadline", (island, status))
        if not self.ending and not self.finished:
            self._nobody_waits_beside_a_standby()
        live = frozenset(i for i, status in self.all.items() if status.live and (self.ending or not status.draining))
        before, self.live = self.live, live
        self.changed = before != self.live

    def _nobody_waits_beside_a_standby(self) -> None:
        for standby in self.standbys:
            there = self.all[standby]
            if there.stage is not Stage.STANDBY or there.silent or there.kill_pending:
                continue
            for island, status in self.all.items():
                away = status.stage is Stage.OVER or status.waiting
                waits = away and status.wanted and status.incarnation and not status.given_up
                of_its_kind = self._kinds[island] == self._kinds[standby] and island not in self.standbys
                waits = waits and of_its_kind and self._groups[island] not in self.cordoned
                require(not waits, "no island waits while a standby of its kind stands by", (island, standby))

    def _spoke(self, event: e.IslandEvent, status: IslandStatus, effects: tuple[f.Effect, ...]) -> None:
        match event:
            case e.IslandPlaced() if status.stage is Stage.PLACING:
                status.stage, status.silent, status.waiting = Stage.STARTING, False, False
            case e.PlacementDelayed() if status.stage is Stage.PLACING:
                only = all(isinstance(x, (f.StopIsland, f.PlaceIsland)) for x in effects)  # a standby takes its place
                require(only, "an island that waits for a node has not failed", (event, effects))
                status.waiting = not status.kill_pending
            case e.ConnectionLost(dead=False):
                status.silent = True
            case e.ConnectionRestored():
                status.silent = False
            case e.IslandReported(report=Flushed()):
                status.flushed = True
            case e.NoticeReceived() if status.stage is Stage.TRAINING and not (self.ending or status.draining):
                status.draining = status.departing = True
            case e.IslandReported(report=Drained()):
                status.flushed = status.flushed or self.ending
            case e.ConnectionLost() | e.PlacementFailed():
                self._end(event.island, status, event, effects)

    def _commanded(self, request: commands.OperatorCommand, effects: tuple[f.Effect, ...]) -> None:
        if not any(isinstance(x, f.ResolveCommand) and x.accepted for x in effects):
            return  # refused, or said again
        if isinstance(request, commands.Cordon):
            self.cordoned.add(request.node_group)
        elif isinstance(request, commands.Uncordon):
            self.cordoned.discard(request.node_group)
        elif isinstance(request, commands.Pause):
            self.paused = True  # the core says itself whom it wants, but not of standbys
            self._sent_away = {i for i in self.standbys if self.all[i].wanted and not self.all[i].given_up}
            for standby in self._sent_away:
                self.all[standby].wanted = False
        elif isinstance(request, commands.Continue):
            self.paused = False
            for standby in self._sent_away:
                self._anew(self.all[standby], wanted=True)
        elif isinstance(request, commands.IslandCommand):
            self._island_commanded(request, self.all[request.island])

    def _island_commanded(self, request: commands.IslandCommand, status: IslandStatus) -> None:
        kill = isinstance(request, commands.Kill)
        status.kill_pending = status.kill_pending or kill
        status.wanted = request.restart if isinstance(request, commands.Kill) else isinstance(request, commands.Readd)
        status.wanted = status.wanted and not self.paused
        if self.paused and isinstance(request, commands.Kill) and request.island in self.standbys:
            self._sent_away = self._sent_away - {request.island} | ({request.island} if request.restart else set())
        if isinstance(request, commands.Drain):
            others = [i for i in self.live if i != request.island]
            quorum_stays = status.live and not status.draining and len(others) >= self._policy.quorum
            require(quorum_stays, "an island is drained only where its work will merge", (request, self.live))
        status.draining = isinstance(request, commands.Drain) or (status.draining and kill)
        status.departing = status.departing and kill
        if status.stage is Stage.OVER:
            status.failures = status.quarantines = 0
            status.given_up = False

    def _effect(self, event: e.Event, effect: f.Effect, effects: tuple[f.Effect, ...]) -> None:
        match effect:
            case f.PlaceIsland() if isinstance(event, e.SynchroniserRestarted):
                status = self.all[effect.island]
                pending = status.stage is Stage.PLACING and status.incarnation == effect.incarnation
                require(pending, "only who is being placed is placed again after the synchroniser's death", effect)
            case f.PlaceIsland():
                if effect.standby is not None:
                    self._take(effect, *effect.standby)
                self._place(effect)
            case f.WantIsland():
                self._want(effect)
            case f.HoldIsland():
                status, group = self.all[effect.island], self._groups[effect.island]
                right = status.stage is Stage.OVER and group == effect.node_group and group in self.cordoned
                require(right, "only who would be placed on a cordoned node group is held", (effect, status))
            case f.StopIsland() if self.all[effect.island].speaks(effect.incarnation):
                self._end(effect.island, self.all[effect.island], event, effects)
            case f.KillIsland():
                status = self.all[effect.island]
                require(status.speaks(effect.incarnation), "only the present incarnation is killed", (effect, status))
            case f.BeginCatchUp():
                self._catch_up(effect)
            case f.StandBy():
                status = self.all[effect.island]
                held = status.stage is Stage.CATCHING_UP and effect.island in self.standbys
                require(held and status.speaks(effect.incarnation), "a standby stands by once it holds a state", effect)
                status.stage, status.silent, status.failures = Stage.STANDBY, False, 0
            case f.StartTraining() | f.FlushIsland():
                require(effect.island not in self.standbys, "a standby trains nothing", effect)
                status = self.all[effect.island]
                held = status.stage in (Stage.CATCHING_UP, Stage.TRAINING) and status.speaks(effect.incarnation)
                require(held, "an island trains and flushes only after it has caught up", (effect, status))
                flushes = isinstance(effect, f.FlushIsland)
                begins = any(isinstance(x, f.SetTimer) and x.timer == FLUSH for x in effects)
                require(flushes == (self.ending or begins), "islands flush when the job ends, else train", effect)
                status.stage, status.silent = Stage.TRAINING, False
                status.flushed = status.flushed and not status.flushes_again
                status.flushes_again = False
            case f.DrainIsland():
                status = self.all[effect.island]
                wanted = status.draining and status.speaks(effect.incarnation)
                require(
                    wanted and not self.ending,
                    "an island drains when an operator wants it to, or its node goes",
                    effect,
                )
            case f.SetTimer(timer=name) if name == FLUSH:
                self.ending = True
            case f.FinishJob():
                self.finished = True

    def _want(self, effect: f.WantIsland) -> None:
        status = self.all[effect.island]
        require(status.wanted != effect.wanted, "scaling changes only who has to change", (effect, status))
        self._anew(status, wanted=effect.wanted)

    def _anew(self, status: IslandStatus, *, wanted: bool) -> None:
        status.wanted = wanted
        status.draining = not wanted and status.stage is Stage.TRAINING
        status.departing = False
        if status.stage is Stage.OVER:
            status.failures = status.quarantines = 0
            status.given_up = False

    def _take(self, effect: f.PlaceIsland, standby: IslandId, incarnation: Incarnation) -> None:
        status = self.all[standby]
        ready = (
            status.stage is Stage.STANDBY
            and not status.silent
            and not status.kill_pending
            and status.speaks(incarnation)
        )
        fits = self._kinds[standby] == self._kinds[effect.island] and effect.island not in self.standbys
        require(ready and fits, "only who stands by takes a place, and one of its kind", (effect, status))
        status.stage = Stage.OVER
        self.taken.add((standby, incarnation))

    def _place(self, effect: f.PlaceIsland) -> None:
        status = self.all[effect.island]
        free = self._groups[effect.island] == effect.node_group and effect.node_group not in self.cordoned
        require(free, "nothing is placed on a cordoned node group", effect)
        over = status.stage is Stage.OVER
        require(
            over, "an island is placed again only once its former process is dead or told to stop", (effect, status)
        )
        require(effect.incarnation == status.incarnation + 1, "incarnations rise by one", (effect, status))
        wanted = status.wanted and not status.given_up and not self.ending and not self.finished
        require(wanted, "only an island that is wanted is placed", (effect, status))
        self.all[effect.island] = IslandStatus(
            Stage.PLACING,
            effect.incarnation,
            failures=status.failures,
            quarantines=status.quarantines,
            taken=effect.standby is not None,
        )

    def _catch_up(self, effect: f.BeginCatchUp) -> None:
        status = self.all[effect.island]
        begun = status.stage in (Stage.STARTING, Stage.CATCHING_UP) and status.speaks(effect.incarnation)
        require(begun and self.seeded, "an island catches up when it is ready and parameters exist", (effect, status))
        require(effect.held == status.taken, "only a standby's process goes on from what it holds", (effect, status))
        donors = [donor for donor in (effect.donor, *effect.helpers) if donor is not None]
        several = len({name for name, _ in donors}) == len(donors) <= self._policy.donors_max
        require(several, "donors are different islands, and no more than the policy has", effect)
        for name, incarnation in donors:
            donor = self.all[name]
            if name == effect.island:
                require(0 < incarnation < effect.incarnation, "an island continues from an earlier incarnation", effect)
                continue
            healthy = name != effect.island and donor.live and donor.incarnation == incarnation
            require(healthy, "a donor is another island, training and answering", (effect, donor))
        status.stage, status.silent = Stage.CATCHING_UP, False

    def _end(self, island: IslandId, status: IslandStatus, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        """The process is gone or was told to go: a back-off as the policy says, unless nobody wants the island back.

        An island that waits for a node has no process: it may be held, or a standby may take its place, and that is no
        failure.
        """
        waited, status.waiting = status.waiting, False
        status.stage, status.silent = Stage.OVER, False
        held = any(isinstance(x, f.HoldIsland) and x.island == island for x in effects)
        taken = any(isinstance(x, f.PlaceIsland) and x.island == island and x.standby is not None for x in effects)
        if waited and (held or taken):
            return
        finishes = any(isinstance(x, f.FinishJob) for x in effects)
        cancelled = isinstance(event, e.CommandRequested) and isinstance(event.request, commands.Cancel)
        dismissed = finishes and (self.ending or cancelled or island in self.standbys)
        drained = isinstance(e.report_of(event), Drained)
        dismissed = dismissed or drained
        departs = isinstance(event, e.NoticeReceived) or self._timers.rang == departure(island)
        departs |= drained and status.departing
        departs |= isinstance(e.report_of(event), Flushed) and not self.ending  # the order to end is forgotten
        waits = [x.due_at - event.at for x in effects if isinstance(x, f.SetTimer) and x.timer == backoff(island)]
        if departs and status.wanted and not finishes:
            require(
                waits == [0.0],
                "whose node goes is placed elsewhere at once, and no failure is counted",
                (island, waits),
            )
            return
        if not status.wanted or dismissed:
            return
        status.failures += 1
        status.quarantines += any(isinstance(x, f.QuarantineIsland) for x in effects)
        status.given_up = status.failures > self._policy.restarts_max
        status.given_up |= status.quarantines > self._policy.health.quarantines_max
        least = min(self._policy.backoff_first_s * 2.0 ** (status.failures - 1), self._policy.backoff_max_s)
        fits = all(least - ROUNDING <= wait <= 1.25 * least + ROUNDING for wait in waits)
        right = fits and len(waits) == (0 if status.given_up else 1)
        require(
            right, "a lost island waits out its back-off, or was given up after restarts_max", (island, status, waits)
        )
