"""Every row of the failure matrix that a simulated world can express, named as there, each at several moments or doses.

The world is that of the swarm: the real core, tape, journal and recovery on a simulated disk, and all checkers (every
payload held or released and never both, no token merged twice, versions rise by one, digests chain, who is over is not
listened to, every fragment advances while a quorum trains). A row adds what is its own, from the tape and the islands'
own records.

Not here, for no simulated world has them: the API server, the Ray head, nodes apart from the processes on them, and job
specifications that are refused (``tests/ray``, ``tests/api``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import CaughtUp, Progress
from orchestrator.core.vocabulary import IslandId, IslandState, JobOutcome, RefusalReason
from orchestrator.host.state_view import core_status
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.tape.replay import replay
from tests.harness.reports import of_kind
from tests.swarm.checkers import Checkers
from tests.swarm.disk import DiskFault
from tests.swarm.mortal_world import MortalWorld
from tests.swarm.mortality import Death, Mortality, Refusal
from tests.swarm.rough_world import EventFaults

EUROPE, ASIA = IslandId("europe"), IslandId("asia")
STEP_S = 0.05
LASTS_S = 10.0
PATIENCE_S = 5.0
GAP_S = 0.2
"""How much longer than a step a bystander's longest gap may be."""


IMMORTAL = Mortality((), (), 0)


@dataclass(frozen=True)
class Scenario:
    """What strikes a job of four islands, and how the job differs from the usual one, whose steps take ``step_s``."""

    faults: tuple[Fault, ...] = ()
    mortality: Mortality = IMMORTAL
    policy: tuple[tuple[str, Any], ...] = ()
    plan: tuple[tuple[str, Any], ...] = ()
    step_s: float = STEP_S
    lasts_s: float = LASTS_S

    def run(self) -> MortalWorld:
        policy = replace(sample_policy(4, steps=round(self.lasts_s / self.step_s)), **dict(self.policy))
        plan = WorldPlan(step_s=(self.step_s,) * 4, adoption="rebase", faults=self.faults, **dict(self.plan))
        patience = PATIENCE_S * self.step_s / STEP_S

        def checkers() -> Checkers:
            return Checkers(policy, max([fault.at + fault.duration for fault in self.faults], default=0.0), patience)

        world = MortalWorld(policy, plan, 7, EventFaults(), self.mortality, checkers)
        world.run(until=100 * self.lasts_s)
        assert world.finished is not None
        assert world.finished.outcome is JobOutcome.COMPLETED
        assert replay(world.tape).exact
        tokens = world.goodput.summary()["tokens"]
        assert tokens["in_flight"] == 0.0
        assert tokens["merged"] + tokens["discarded"] == pytest.approx(tokens["trained"])
        assert tokens["trained"] <= sum(host.process.replica.tokens_total for host in world.hosts.values())
        return world


# ── what a tape says ──────────────────────────────────────────────────────────────────────────────────────────────


def told(world: MortalWorld, kind: type, island: IslandId | None = None) -> list[Any]:
    events = of_kind((record.event for record in world.sink.records), kind)
    return [event for event in events if island is None or event.island == island]


def asked(world: MortalWorld, kind: type) -> list[Any]:
    return [x for record in world.sink.records for x in record.effects if isinstance(x, kind)]


def merged_payloads(world: MortalWorld) -> set[str]:
    """Of merges that came to be: what was decided on and died with the synchroniser is in none."""
    decided: dict[tuple[int, int], f.MergeFragment] = {}
    merged: set[str] = set()
    for record in world.sink.records:
        if isinstance(record.event, e.MergeCompleted) and record.effects:
            inputs = [item.payload for item in decided[record.event.fragment, record.event.version].inputs]
            assert not merged & set(inputs), "a contribution is in one version only"
            merged |= set(inputs)
        decided |= {(x.fragment, x.version): x for x in record.effects if isinstance(x, f.MergeFragment)}
    return merged


def incarnations(world: MortalWorld, island: IslandId) -> set[int]:
    return {placed.incarnation for placed in told(world, e.IslandPlaced, island)}


def contributed(world: MortalWorld, island: IslandId, incarnation: int) -> bool:
    return any(payload.startswith(f"{island}.{incarnation}.") for payload in merged_payloads(world))


def others_never_stalled(world: MortalWorld, *struck: IslandId) -> None:
    step_s = max(world.plan.step_s)
    reports = [report for report in told(world, Progress) if report.island not in struck]
    assert max(report.gap_max_seconds for report in reports) <= 1.05 * step_s + GAP_S


def counters_are_right(world: MortalWorld, island: IslandId) -> None:
    """What the job counts of the island is what its processes trained, to the token."""
    true = sum(host.process.replica.tokens_total for (name, _), host in world.hosts.items() if name == island)
    assert world.goodput.ledger.trained[island] == true


def is_back(world: MortalWorld, *struck: IslandId) -> None:
    for island in struck:
        assert incarnations(world, island) == {1, 2}
        assert contributed(world, island, 2)
    others_never_stalled(world, *struck)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def came_back_from_a_peer(world: MortalWorld) -> None:
    is_back(world, ASIA)
    assert told(world, CaughtUp, ASIA)[-1].donor in {"us-east", "us-west", "europe"}


def both_came_back(world: MortalWorld) -> None:
    is_back(world, EUROPE, ASIA)


def resumed(world: MortalWorld) -> None:
    assert incarnations(world, ASIA) == {1}
    assert len(told(world, e.ConnectionRestored, ASIA)) == 1
    silent = told(world, e.ConnectionRestored, ASIA)[0].at
    assert any(c.contribution.payload in merged_payloads(world) for c in _offers(world, ASIA) if c.at > silent)
    assert max(report.gap_max_seconds for report in told(world, Progress, ASIA)) > 7.9
    others_never_stalled(world, ASIA)


def trained_on_and_contributed_again(world: MortalWorld) -> None:
    others_never_stalled(world)  # the island among them: its own records say that it never stood still
    assert incarnations(world, ASIA) == {1}
    healed = told(world, e.ConnectionRestored, ASIA)[0].at
    back = [c.at for c in _offers(world, ASIA) if c.at > healed and c.contribution.payload in merged_payloads(world)]
    assert back[0] - healed < 30.0
    counters_are_right(world, ASIA)


def was_replaced_and_fenced(world: MortalWorld) -> None:
    assert incarnations(world, ASIA) == {1, 2}
    lost = next(x.at for x in told(world, e.TimerFired) if str(x.timer) == f"suspect:{ASIA}")
    assert (ASIA, 1) in {(x.island, x.incarnation) for x in asked(world, f.StopIsland)}
    assert not world.hosts[ASIA, 1].alive
    late = [c.contribution.payload for c in _offers(world, ASIA) if c.at > lost and c.contribution.incarnation == 1]
    assert not set(late) & merged_payloads(world)
    assert contributed(world, ASIA, 2)


def went_on_from_its_files(world: MortalWorld) -> None:
    epochs = [event.epoch for event in told(world, e.SynchroniserRestarted)]
    assert epochs
    assert epochs == list(range(2, 2 + len(epochs)))
    others_never_stalled(world)
    for island in world.goodput.ledger.trained:
        assert contributed(world, island, 1)
        counters_are_right(world, island)


def took_another_donor(world: MortalWorld) -> None:
    donors = [x.donor[0] for x in asked(world, f.BeginCatchUp) if x.island == ASIA and x.incarnation == 2 and x.donor]
    assert len(set(donors)) >= 2
    assert told(world, CaughtUp, ASIA)[-1].donor == donors[-1]
    assert contributed(world, ASIA, 2)


def was_refused(reason: RefusalReason) -> Callable[[MortalWorld], None]:
    def holds(world: MortalWorld) -> None:
        refused = {x.contribution.payload for x in asked(world, f.RefuseContribution) if x.reason is reason}
        assert refused
        assert not refused & merged_payloads(world)
        assert any(contributed(world, ASIA, n) for n in incarnations(world, ASIA))
        others_never_stalled(world, ASIA)

    return holds


def cost_nothing(world: MortalWorld) -> None:
    assert world.disk.refused > 0
    assert not told(world, e.SynchroniserRestarted)
    others_never_stalled(world)


def was_cut_off_to_the_last_good_record(world: MortalWorld) -> None:
    assert world.disk.spoilt > 0
    went_on_from_its_files(world)


def paused_and_resumed(world: MortalWorld) -> None:
    away = next(x.at for x in told(world, e.CommandRequested))
    back = told(world, CaughtUp, ASIA)[-1].at
    merges = [event.at for event in told(world, e.MergeCompleted)]
    assert not [at for at in merges if away + 0.1 < at < back]
    assert [at for at in merges if at > back]
    trained = [report.steps_total for report in told(world, Progress, EUROPE) if away < report.at < back]
    assert trained[-1] - trained[0] > 0.8 * (back - away) / STEP_S
    others_never_stalled(world, ASIA)


def _offers(world: MortalWorld, island: IslandId) -> list[e.ContributionArrived]:
    return [event for event in told(world, e.ContributionArrived) if event.contribution.island == island]


def struck(kind: FaultKind, at: float, duration: float = 0.0, count: int = 0) -> tuple[Fault, ...]:
    return (Fault(at, kind, ASIA, duration, count),)


def dies(*deaths: tuple[float, int, DiskFault], power: bool = False) -> Mortality:
    return Mortality(tuple(Death(at, power, operation, fault, 0.5) for at, operation, fault in deaths), (), 0)


PATIENT = (("suspect_timeout_s", 2000.0),)
LONG = {"step_s": 1.0, "lasts_s": 780.0}
STOP_8_S = "SIGSTOP an island 8 s, then continue"
PARTITION = "partition an island's region for 10 min"
SYNCHRONISER = "kill the synchroniser, any moment, also mid-merge"
PAYLOAD = "corrupt, truncated, oversized, NaN payload"
DISK = "corrupt last journal or tape record, disk full"
AT_ONCE, BEFORE, TORN, AFTER = 0, DiskFault.BEFORE, DiskFault.TORN, DiskFault.AFTER

ROWS: list[tuple[str, str, Scenario, Callable[[MortalWorld], None]]] = [
    *(
        ("SIGKILL an island, any moment", f"at {at}", Scenario(struck(FaultKind.CRASH, at)), came_back_from_a_peer)
        for at in (1.2, 2.01, 3.7, 4.444, 6.0)
    ),
    (STOP_8_S, "resumes", Scenario(struck(FaultKind.FREEZE, 4.0, 8.0), policy=PATIENT, lasts_s=20.0), resumed),
    (STOP_8_S, "replaced", Scenario(struck(FaultKind.FREEZE, 4.0, 8.0), lasts_s=20.0), was_replaced_and_fenced),
    (
        "an island's node (raylet) dies",
        "with two islands on it",
        Scenario((*struck(FaultKind.CRASH, 4.0), Fault(4.0, FaultKind.CRASH, EUROPE))),
        both_came_back,
    ),
    (
        PARTITION,
        "waited for",
        Scenario(struck(FaultKind.CUT, 100.0, 600.0), policy=PATIENT, **LONG),
        trained_on_and_contributed_again,
    ),
    (PARTITION, "replaced", Scenario(struck(FaultKind.CUT, 100.0, 600.0), **LONG), was_replaced_and_fenced),
    *(
        (SYNCHRONISER, f"operation {n} {fault}", Scenario(mortality=dies((5.0, n, fault))), went_on_from_its_files)
        for n in (AT_ONCE, 1, 3, 7)
        for fault in ((BEFORE, TORN, AFTER) if n else (BEFORE,))
    ),
    (
        SYNCHRONISER,
        "six times",
        Scenario(mortality=dies(*((at, n, TORN) for n, at in enumerate((0.1, 0.9, 2.0, 4.0, 6.5, 8.0))))),
        went_on_from_its_files,
    ),
    (PAYLOAD, "flipped bits", Scenario(struck(FaultKind.CORRUPT, 4.0, count=2)), was_refused(RefusalReason.CORRUPT)),
    (PAYLOAD, "NaN", Scenario(struck(FaultKind.DIVERGE, 4.0)), was_refused(RefusalReason.NON_FINITE)),
    (PAYLOAD, "exploding", Scenario(struck(FaultKind.EXPLODE, 5.0)), was_refused(RefusalReason.EXPLODING)),
    (
        DISK,
        "full",
        Scenario(mortality=Mortality((), tuple(Refusal(at, 5) for at in (1.0, 3.0, 5.0, 7.0)), 0)),
        cost_nothing,
    ),
    (
        DISK,
        "torn, zeroed or flipped by losses of power",
        Scenario(mortality=dies(*((at, 4, AFTER) for at in (2.0, 3.5, 5.0, 6.5, 8.0)), power=True)),
        was_cut_off_to_the_last_good_record,
    ),
    (
        "K > live islands",
        "and one is kept away for 5 s",
        Scenario(
            struck(FaultKind.KILL_AND_KEEP_AWAY, 3.0) + struck(FaultKind.READD, 8.0),
            policy=(("quorum", 4),),
            lasts_s=16.0,
        ),
        paused_and_resumed,
    ),
]


@pytest.mark.parametrize(("scenario", "holds"), [row[2:] for row in ROWS], ids=[f"{a}: {b}" for a, b, *_ in ROWS])
def test_row(scenario: Scenario, holds: Callable[[MortalWorld], None]) -> None:
    holds(scenario.run())


def test_donor_dies_during_peer_catch_up() -> None:
    """Two runs of the same world: the first says who the donor is, and when."""
    killed = Scenario(struck(FaultKind.CRASH, 4.0), plan=(("transfer_s", (1.0, 1.0)),))
    first = killed.run()
    record = next(
        r for r in first.sink.records for x in r.effects if isinstance(x, f.BeginCatchUp) and x.incarnation == 2
    )
    donor = next(x.donor[0] for x in record.effects if isinstance(x, f.BeginCatchUp))
    dies_too = (*killed.faults, Fault(record.event.at + 0.5, FaultKind.CRASH, donor))
    took_another_donor(replace(killed, faults=dies_too).run())


def test_one_of_several_donors_dies_and_what_the_other_gave_is_kept() -> None:
    several = {"policy": (("donors_max", 2),), "plan": (("transfer_s", (1.0, 1.0)),)}
    killed = Scenario(struck(FaultKind.CRASH, 4.0), **several)
    first = killed.run()
    begun = [r for r in first.sink.records for x in r.effects if isinstance(x, f.BeginCatchUp) and x.incarnation == 2]
    request = next(x for x in begun[0].effects if isinstance(x, f.BeginCatchUp))
    assert request.donor is not None
    ((helper, _),) = request.helpers
    dead = request.donor[0]
    assert set(told(first, CaughtUp, ASIA)[-1].sources) == {dead, helper}
    world = replace(killed, faults=(*killed.faults, Fault(begun[0].event.at + 0.25, FaultKind.CRASH, dead))).run()
    caught_up = next(event for event in told(world, CaughtUp, ASIA) if event.incarnation == 2)
    assert helper in caught_up.sources
    assert dead not in caught_up.sources
    asked_next = [x for x in asked(world, f.BeginCatchUp) if x.island == ASIA and x.incarnation == 2][1]
    assert asked_next.donor is not None
    assert dead not in {name for name, _ in (asked_next.donor, *asked_next.helpers)}
    assert contributed(world, ASIA, 2)


def test_while_fewer_than_k_islands_live_the_reason_can_be_seen() -> None:
    policy = replace(sample_policy(4, steps=400), quorum=4)
    plan = WorldPlan(step_s=(STEP_S,) * 4, faults=struck(FaultKind.KILL_AND_KEEP_AWAY, 3.0))
    world = MortalWorld(policy, plan, 7, EventFaults(), IMMORTAL, lambda: Checkers(policy, 3.0, PATIENCE_S))
    world.run(until=6.0)
    view = core_status(world.core.state, 6.0)
    assert view.pause_reason is not None
    assert "3" in view.pause_reason
    assert "4" in view.pause_reason
    assert [island.state for island in view.islands].count(IslandState.TRAINING) == 3
