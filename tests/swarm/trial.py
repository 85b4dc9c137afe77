"""Runs one seed of the swarm: a whole configuration, all invariants checked after every event, one command to repeat it.

It runs what ``configurations`` draws in a ``RoughWorld`` under ``checkers``. At the end it checks what no single event
shows: that the job ended as it must, that the ledger's figures agree with the checkers', that nothing is counted that was
never trained, and that the tape replays to the bit. A failure has the seed, the broken invariant, the story and the
command.

The checkers are outside the system, with bookkeeping of their own from events and effects alone. Source: FoundationDB's
and TigerBeetle's simulators (one seed, injected faults, checkers outside the system).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from math import fsum, isclose

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import CaughtUp, Drained
from orchestrator.core.saving import FragmentRestored
from orchestrator.core.vocabulary import Incarnation, IslandId
from orchestrator.errors import InternalError
from orchestrator.simulation.world import World
from orchestrator.tape.driver import STORY_LENGTH, story_of
from orchestrator.tape.replay import replay
from tests.swarm.checkers import Checkers
from tests.swarm.checkers.violation import require
from tests.swarm.checkpointing_world import CheckpointingWorld
from tests.swarm.configurations import draw
from tests.swarm.mirrored_world import MirroredWorld
from tests.swarm.mortal_world import MortalWorld
from tests.swarm.mortality import draw_mortality
from tests.swarm.rough_world import RoughWorld

UNTIL_S = 3600.0
"""A job that has not ended by this virtual time never will: jobs are meant to last about ten seconds."""
COMMAND = "python -m tests.swarm --seed"


@dataclass(eq=False, kw_only=True)
class SwarmFailure(InternalError):
    """An invariant broke under this seed. ``detail`` says which, and ``story`` what happened before."""

    seed: int
    features: tuple[str, ...]
    story: str
    deaths: int = 0
    is_mirrored: bool = False

    @property
    def command(self) -> str:
        """The command that repeats this seed."""
        deaths = f" --deaths {self.deaths}" if self.deaths else ""
        return f"{COMMAND} {self.seed}{deaths}{' --mirrored' if self.is_mirrored else ''}"

    def __str__(self) -> str:
        return (
            f"Seed {self.seed} fails: {self.detail}\nSwitched on: {', '.join(self.features)}.\n"
            f"The last steps:\n{self.story}\nTo see it again: {self.command}"
        )


@dataclass(frozen=True, slots=True)
class Survived:
    """The outcome of a seed under which everything held.

    ``waited_ratio`` is the longest wait of a fragment, in units of patience. ``advancing`` says whether a quorum kept
    training for longer than that after all faults. ``seen`` has every kind of event, command, effect and reason on the
    tape. ``befallen`` counts what befell the store of a mirrored job and its writers.
    """

    seed: int
    events: int
    merges: int
    outcome: str
    digest: str
    waited_ratio: float
    advancing: bool
    seen: frozenset[str]
    befallen: Counter[str]

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.outcome}, {self.events} events, {self.merges} merges, longest wait "
            f"{self.waited_ratio:.2f} of what is allowed, tape {self.digest}"
        )


def run(seed: int, deaths: int = 0, *, is_mirrored: bool = False) -> Survived:
    """Run one seed's world to its end. Its synchroniser dies ``deaths`` times before the world is calm.

    ``is_mirrored`` gives the job a store, with its faults (``mirrored_world``).

    Raises ``SwarmFailure`` if an invariant breaks, on the way or at the end.
    """
    drawn = draw(seed)
    if deaths:  # who takes a place while the synchroniser is away: tests/core and tests/ray have that
        checkpoints = drawn.checkpoint_requests.policy if drawn.checkpoint_requests else drawn.policy.checkpoints
        drawn = replace(drawn, policy=replace(drawn.policy, standbys=(), checkpoints=checkpoints))
    mortality = draw_mortality(seed, deaths, drawn.plan.calm_at)

    def checkers_of() -> Checkers:
        return Checkers(drawn.policy, drawn.plan.calm_at, drawn.patience)

    checkers = checkers_of()
    world: RoughWorld | None = None
    try:
        if deaths:
            kind = MirroredWorld if is_mirrored else CheckpointingWorld
            world = mortal = kind(
                drawn.policy, drawn.plan, seed, drawn.event_faults, mortality, checkers_of, drawn.checkpoint_requests
            )
            with closing(mortal):
                mortal.run(until=UNTIL_S)
            checkers = mortal.checkers
        else:
            world = RoughWorld(drawn.policy, drawn.plan, seed, drawn.event_faults, folds=(checkers,))
            world.run(until=UNTIL_S)
        if not (isinstance(world, MortalWorld) and world.ended):
            check_end(world, checkers)
        again = replay(world.tape)
        require(again.exact, "a tape replays exactly", again.divergence)
    except Exception as error:  # whatever it is, the seed brings it back
        notes = "\n".join(getattr(error, "__notes__", ()))
        story = notes or (story_of(world.sink.records[-STORY_LENGTH:]) if world is not None else "")
        detail = f"{type(error).__name__}: {error}"
        features = (*sorted(drawn.features), *(mortality.features if deaths else ()))
        raise SwarmFailure(
            detail=detail, seed=seed, features=features, story=story, deaths=deaths, is_mirrored=is_mirrored
        ) from error
    return Survived(
        seed=seed,
        events=len(world.sink.records),
        merges=sum(current.version for current in checkers.rounds.all),
        outcome=_outcome(world),
        digest=again.digest,
        waited_ratio=checkers.waited_max / drawn.patience,
        advancing=checkers.advancing,
        seen=frozenset(_names(world)),
        befallen=world.befallen if isinstance(world, MirroredWorld) else Counter(),
    )


def _outcome(world: World) -> str:
    if isinstance(world, MortalWorld) and world.ended:
        return "lost with the power"
    return str(world.finished.outcome) if world.finished else "waiting for an operator"


def _names(world: World) -> Iterator[str]:
    for record in world.sink.records:
        yield type(record.event).__name__
        if isinstance(record.event, e.CommandRequested):
            yield type(record.event.request).__name__
        elif isinstance(record.event, e.IslandReported):
            yield type(record.event.report).__name__
        for effect in record.effects:
            yield type(effect).__name__
            if isinstance(effect, (f.RefuseContribution, f.ReleasePayload, f.MergeFragment)):
                yield str(effect.reason)


def check_end(world: World, checkers: Checkers) -> None:
    """Check liveness (the job ended, unless operators keep all islands away), and that all accounts agree."""
    statuses = {i: status for i, status in checkers.islands.all.items() if i not in checkers.islands.standbys}
    kept_away = {island for island, status in statuses.items() if not status.wanted or checkers.islands.held(island)}
    able = any(not status.given_up for island, status in statuses.items() if island not in kept_away)
    finished = world.finished
    require(finished is not None or (bool(kept_away) and not able), "a job ends once faults are over", statuses)
    for island, accounts in world.goodput.ledger.accounts.items():
        merged_tokens = [account.merged for account in accounts]
        same = merged_tokens == checkers.rounds.merged_tokens[island]
        require(same, "the ledger counts as merged what was merged", (island, merged_tokens))
        true = sum(host.process.replica.tokens_total for (name, _), host in world.hosts.items() if name == island)
        counted = world.goodput.ledger.trained[island]
        require(counted <= true, "no more is counted than was trained", (island, counted, true))
    if world.plan.adoption == "rebase":
        _check_drained(world, checkers)
    if finished is not None:
        _check_summary(world)


def _check_drained(world: World, checkers: Checkers) -> None:
    """Check that a drained island whose adoptions keep its work has all of it in versions, in every fragment.

    Work that a rollback undid meanwhile is excepted.
    """
    undone: set[tuple[IslandId, Incarnation]] = set()
    lives: set[tuple[IslandId, Incarnation]] = set()
    for record in world.sink.records:
        if isinstance(record.event, FragmentRestored):
            undone |= lives
        if not isinstance(record.event, e.IslandReported):
            continue
        life, report = (record.event.island, record.event.incarnation), record.event.report
        if isinstance(report, CaughtUp):
            lives.add(life)
        elif isinstance(report, Drained) and any(isinstance(x, f.StopIsland) for x in record.effects):
            if life in undone:
                continue
            trained, merged = world.hosts[life].process.replica.tokens_total, checkers.rounds.merged_up_to(*life)
            require(set(merged) == {trained}, "a drained island lost nothing", (life, trained, merged))


def _check_summary(world: World) -> None:
    summary = world.goodput.summary()
    seconds = dict(summary["island_seconds"])
    total, tokens = seconds.pop("total"), summary["tokens"]
    adds_up = min(seconds.values()) >= 0.0 and isclose(fsum(seconds.values()), total, rel_tol=1e-9, abs_tol=1e-9)
    require(adds_up, "classes of time add up", summary["island_seconds"])
    require(tokens["in_flight"] == 0.0, "nothing is in flight after the job's end", tokens)
    accounted = isclose(tokens["merged"] + tokens["discarded"], tokens["trained"], rel_tol=1e-9, abs_tol=1e-6)
    require(accounted, "trained tokens are merged or discarded", tokens)
