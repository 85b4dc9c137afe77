"""Checkpoints and ways back, seen from outside: a cut is what it says, a number is used once, and all of one is restored.

    before    what a rollback did to the fragments, so that ``rounds`` looks at what they are now
    apply     what was decided about checkpoints, which rests on what ``rounds`` knows after the step

Refuses to know: files and Θ (``durability``, and the world that has the disk).
"""

from __future__ import annotations

from orchestrator.core import commands
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.saving import (
    BeginCheckpoint,
    CheckpointTaken,
    DropCheckpoint,
    FragmentRestored,
    FromJournal,
    HandOver,
    RestoreFragments,
    RollbackFailed,
    SealCheckpoint,
)
from orchestrator.core.vocabulary import AllOffers, FragmentId, JobPolicy, Version
from tests.swarm.checkers.islands import Islands, Stage
from tests.swarm.checkers.rounds import Rounds
from tests.swarm.checkers.violation import require


class CheckpointChecker:
    """``cuts`` are the versions of every checkpoint that was begun."""

    def __init__(self, policy: JobPolicy, islands: Islands, rounds: Rounds) -> None:
        self.cuts: dict[int, tuple[Version, ...]] = {}
        self._policy, self._islands, self._rounds = policy, islands, rounds
        self._open: int | None = None
        self._taken: list[int] = []
        self._left: set[FragmentId] = set()

    def before(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        every = {current.fragment for current in self._rounds.all}
        if isinstance(event, e.CommandRequested) and isinstance(event.request, commands.Rollback):
            accepted = any(isinstance(x, f.ResolveCommand) and x.accepted for x in effects)
            self._left = every if accepted else self._left
        elif isinstance(event, FragmentRestored) and effects:
            self._restored(event, effects)
        elif isinstance(event, RollbackFailed) or self._islands.finished:
            stuck = any(current.restoring for current in self._rounds.all)
            self._left = set() if stuck or self._islands.finished else self._left
        anew = isinstance(event, e.SynchroniserRestarted) and event.epoch > self._rounds.epoch
        if anew or isinstance(event, RollbackFailed):
            for current in self._rounds.all:
                current.restoring = False
        if self._islands.ending and self._left == every and not any(r.restoring for r in self._rounds.all):
            self._left = set()  # a job that ends does not set out
        self._rounds.going_back = bool(self._left)

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if isinstance(event, CheckpointTaken) and event.checkpoint == self._open:
            self._taken.append(event.checkpoint)
            self._open = None
        for n, effect in enumerate(effects, start=1):
            match effect:
                case BeginCheckpoint():
                    self._begins(effect, {x.fragment for x in effects[n:] if isinstance(x, f.MergeFragment)})
                case SealCheckpoint():
                    require(effect.checkpoint == self._open, "only the open checkpoint is sealed", effect)
                    require(bool(effect.parts), "a checkpoint has the state of an island", effect)
                case DropCheckpoint():
                    self._drops(effect)
                case RestoreFragments():
                    self._restores(effect)
                case HandOver():
                    whole = isinstance(event, CheckpointTaken) and event.checkpoint in self._taken
                    require(whole, "a synchroniser hands over at a checkpoint that is whole", effect)
        require(
            len(self._taken) <= self._policy.checkpoints.keep, "no more checkpoints are kept than wanted", self._taken
        )

    def _begins(self, effect: BeginCheckpoint, merged_after: set[FragmentId]) -> None:
        require(self._open is None and not self._left, "one checkpoint at a time, and none on the way back", effect)
        require(effect.checkpoint == max(self.cuts, default=0) + 1, "checkpoints are numbered in their order", effect)
        every = self._rounds.all
        cut = tuple(Version(r.version + (bool(r.inputs) and r.fragment not in merged_after)) for r in every)
        require(
            effect.versions == cut, "a cut has the merges under way, and nothing that is only offered", (effect, cut)
        )
        trains = [name for name, n in effect.islands if not self._islands.all[name].speaks(n)]
        require(not trains, "only who is there is asked for its state", (effect, trains))
        self.cuts[effect.checkpoint], self._open = effect.versions, effect.checkpoint

    def _drops(self, effect: DropCheckpoint) -> None:
        if effect.checkpoint == self._open:
            self._open = None
        elif effect.checkpoint in self._taken:
            oldest = effect.checkpoint == min(self._taken) and len(self._taken) > self._policy.checkpoints.keep
            require(oldest, "only the oldest of too many checkpoints goes", (effect, self._taken))
            self._taken.remove(effect.checkpoint)

    def _restores(self, effect: RestoreFragments) -> None:
        require(effect.checkpoint in self._taken, "only a kept checkpoint is gone back to", (effect, self._taken))
        require({p for p, _, _ in effect.fragments} == self._left, "all of it is restored", (effect, self._left))
        for fragment, version, step in effect.fragments:
            current = self._rounds.all[fragment]
            next_one = version == current.version + 1 and step == current.step and not current.inputs
            require(next_one, "what is restored is the next version, and nothing merges", (effect, current))
            current.restoring = True

    def _restored(self, event: FragmentRestored, effects: tuple[f.Effect, ...]) -> None:
        """The fragment's tokens are those of the cut; what its islands offered is over."""
        current, p = self._rounds.all[event.fragment], event.fragment
        number = event.checkpoint
        follows = (current.restoring or isinstance(number, FromJournal)) and event.version == current.version + 1
        require(follows, "versions rise by one, also on the way back", (event, current))
        source = Version(current.version - 1) if isinstance(number, FromJournal) else self.cuts[number][p]
        tokens = current.merged.get(source, {})
        for island, counts in self._rounds.merged_tokens.items():
            counts[p] = tokens.get(island, 0)
        current.version, current.restoring = event.version, False
        current.merged[event.version] = dict(tokens)
        self._rounds.merged_at[p] = event.at
        for name, status in self._islands.all.items():
            record = self._rounds.offer_record(name, status.incarnation, p)
            record.merged_into, record.merged_offer = event.version, AllOffers()
        self._left.discard(p)
        recipients = {x.island for shown in effects if isinstance(shown, f.PublishFragment) for x in shown.recipients}
        training = {island for island, status in self._islands.all.items() if status.stage is Stage.TRAINING}
        require(training <= recipients, "everybody who trains hears of what was restored", training - recipients)
