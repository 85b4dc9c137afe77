"""Draws a whole configuration from one integer: policy, world, faults and event faults, for the swarm.

Swarm testing: every seed disables a random half of all kinds of faults and features. A world in which everything goes
wrong at once rarely gets far enough for the rarer things to happen, but a hundred worlds in which different halves go
wrong do. Jobs are kept short (about a thousand events) by choosing the pace from the number of islands and fragments.

Every configuration is one that a user could ask for, and its faults end at ``calm_at``.

Source: Groce et al., "Swarm Testing", ISSTA 2012.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from orchestrator.core import commands
from orchestrator.core import events as e
from orchestrator.core.vocabulary import (
    CheckpointPolicy,
    CommandId,
    Duration,
    EvaluationPolicy,
    HealthPolicy,
    Instant,
    IslandId,
    IslandPlan,
    JobPolicy,
    NodeGroupId,
    StepLimits,
)
from orchestrator.replica.work import AdoptionRule
from orchestrator.simulation.plan import Capacity, Fault, FaultKind, Latency, WorldPlan
from tests.swarm.rough_world import EventFaults

STRANGER = IslandId("atlantis")
"""An island of no job: operators mistype."""
SILENCE_MAX_S = 4.0
OFFERS_MAX = 300
"""The approximate number of offers in a job. An offer makes three to five events."""
NEVER = 1000
"""A number of restarts that no short job reaches."""

MEMBERSHIP = {
    FaultKind.DRAIN: FaultKind.READD,
    FaultKind.CORDON: FaultKind.UNCORDON,
    FaultKind.SCALE: FaultKind.SCALE,
}
"""Features added later, with what undoes them. They use a generator of their own, so that earlier seeds still draw the
same worlds."""
SPOILT_LINKS = (FaultKind.SLOW, FaultKind.CORRUPT, FaultKind.DELAY, FaultKind.DROP)
HEALTH = (FaultKind.DIVERGE.value, FaultKind.EXPLODE.value, "failed merges")
STANDBYS = "standbys"
STANDBY_FAULTS = (FaultKind.CRASH, FaultKind.CRASH, FaultKind.KILL, FaultKind.FREEZE, FaultKind.CUT)
"""Crashes are the reason for standbys, so they are the most likely."""
SEVERAL_DONORS = "several donors"
SAVING = "checkpoints"
MEASURING_ISLANDS = "evaluations on islands"
NOTICES = FaultKind.NOTICE.value
FINISHES = FaultKind.FINISH.value
PAUSED = FaultKind.PAUSE.value
HANGS, HANGS_FROM_SEED = FaultKind.HANG.value, 1000
UPGRADES_FROM_SEED = 1000
PAUSES_FROM_SEED = 2000
QUORUM_RATIO, OVERLOAD = "quorum by ratio", "overload"
ALL_ISLANDS_DEPART = "all islands depart together"
ABSENCES = "absences"
STATES_LEFT = "states left"
ROUTERS, ROUTERS_FROM_SEED = "routers apart", 3000
"""Features added later still. Hangs, islands that all depart within one round, and groups without a node
are only in seeds above those whose decisions are recorded, pauses at a limit of cost only in seeds above those, and routers
with a period of their own only in seeds above those."""
LATER = {*MEMBERSHIP, *MEMBERSHIP.values(), *SPOILT_LINKS, *HEALTH, NOTICES, HANGS, FINISHES} - {FaultKind.READD}
LATER |= {FaultKind.PAUSE, FaultKind.CONTINUE}
FEATURES = (
    *(kind.value for kind in FaultKind if kind not in LATER),
    "corrupt payloads",
    "doubled letters",
    "reordered letters",
    "lost publications",
    "failed catch-ups",
    "failed placements",
    "echoes",
    "ghosts",
    "late timers",
    "diverged islands",
    "failed evaluations",
    "mistaken operators",
    "disasters",
    "given up",
    "capacity",
    "uneven speeds",
    "sampled steps",
    "pauses",
    "slow links",
    "payload bytes",
    "slow merges",
    "slow starts",
)


_OPERATOR = "operator"

_Request = tuple[Instant, CommandId, commands.JobCommand]


@dataclass(frozen=True, slots=True)
class CheckpointRequests:
    """The instants of an operator's requests. A rollback is to the newest checkpoint."""

    policy: CheckpointPolicy
    checkpoints: tuple[Instant, ...]
    rollbacks: tuple[Instant, ...]
    upgrades: tuple[Instant, ...]

    def commands(self) -> list[tuple[Instant, e.CommandRequested]]:
        saves: list[_Request] = [(at, CommandId(f"save-{at!r}"), commands.Checkpoint()) for at in self.checkpoints]
        backs: list[_Request] = [(at, CommandId(f"back-{at!r}"), commands.Rollback(0)) for at in self.rollbacks]
        new: list[_Request] = [(at, CommandId(f"new-{at!r}"), commands.Upgrade("next", "")) for at in self.upgrades]
        requests = sorted([*saves, *backs, *new], key=lambda request: request[0])
        return [(at, e.CommandRequested(at, command, _OPERATOR, request)) for at, command, request in requests]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One drawn job. ``patience`` is how long a fragment may go without a merge although a quorum trains and no fault
    acts.

    ``checkpoint_requests`` are for a world with a disk.
    """

    seed: int
    features: frozenset[str]
    policy: JobPolicy
    plan: WorldPlan
    event_faults: EventFaults
    patience: Duration
    checkpoint_requests: CheckpointRequests | None = None


def draw(seed: int) -> Configuration:
    """Draw the configuration of this seed. It is the same in every build."""
    return _Draw(seed).configuration()


class _Draw:
    """One drawing: the generator, the enabled features, and what was drawn so far."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(f"atoll swarm {seed}")
        self.operators = Random(f"atoll swarm {seed} operators")
        self.links = Random(f"atoll swarm {seed} links")
        self.health = Random(f"atoll swarm {seed} health")
        self.standbys = Random(f"atoll swarm {seed} standbys")
        self.donors = Random(f"atoll swarm {seed} donors")
        self.saving = Random(f"atoll swarm {seed} saving")
        self.measuring = Random(f"atoll swarm {seed} measuring")
        self.notices = Random(f"atoll swarm {seed} notices")
        self.hangs = Random(f"atoll swarm {seed} hangs")
        self.overload = Random(f"atoll swarm {seed} overload")
        self.evacuations = Random(f"atoll swarm {seed} evacuations")
        self.absences = Random(f"atoll swarm {seed} absences")
        self.leaving = Random(f"atoll swarm {seed} states left")
        self.settings = Random(f"atoll swarm {seed} settings")
        self.limits = Random(f"atoll swarm {seed} limits of cost")
        self.routers = Random(f"atoll swarm {seed} routers")
        features = {feature for feature in FEATURES if self.random.random() < 0.5}
        features |= {kind for kind in MEMBERSHIP if self.operators.random() < 0.5}
        features |= {kind for kind in SPOILT_LINKS if self.links.random() < 0.1}
        features |= {STANDBYS} if self.standbys.random() < 0.5 else set()
        features |= {SEVERAL_DONORS} if self.donors.random() < 0.5 else set()
        features |= {SAVING} if self.saving.random() < 0.5 else set()
        features |= {MEASURING_ISLANDS} if self.measuring.random() < 0.5 else set()
        features |= {NOTICES} if self.notices.random() < 0.5 else set()
        features |= {HANGS} if seed >= HANGS_FROM_SEED and self.hangs.random() < 0.5 else set()
        features |= {feature for feature in (QUORUM_RATIO, OVERLOAD) if self.overload.random() < 0.3}
        features |= {ABSENCES} if seed >= HANGS_FROM_SEED and self.absences.random() < 0.5 else set()
        features |= {STATES_LEFT} if seed >= HANGS_FROM_SEED and self.leaving.random() < 0.5 else set()
        features |= {ALL_ISLANDS_DEPART} if seed >= HANGS_FROM_SEED and self.evacuations.random() < 0.5 else set()
        features |= {FINISHES} if seed >= HANGS_FROM_SEED and self.settings.random() < 0.3 else set()
        features |= {PAUSED} if seed >= PAUSES_FROM_SEED and self.limits.random() < 0.7 else set()
        features |= {ROUTERS} if seed >= ROUTERS_FROM_SEED else set()
        self.features = frozenset(features | {feature for feature in HEALTH if self.health.random() < 0.5})
        choice, randint = self.random.choice, self.random.randint
        self.islands = [IslandId(f"island-{n}") for n in range(randint(1, 8))]
        self.fragments, self.interval = randint(1, 6), randint(3, 12)
        self.tokens = choice((1, 7, 512))
        self.step_s = self._step_s()
        self.calm_at = self.random.uniform(2.0, 6.0) + SILENCE_MAX_S
        self.round_s = self.interval * max(self.step_s)

    def configuration(self) -> Configuration:
        plan = self._plan()
        if self.on(ABSENCES):
            plan = replace(plan, absent=self.absences.uniform(0.1, 0.7), absence_s=(0.0, SILENCE_MAX_S / 2))
        if self.on(STATES_LEFT):
            plan = replace(plan, states_left=self.leaving.choice((0.5, 1.0)))
        slowest = max(max(self.step_s) * (1 + plan.step_jitter_ratio), *map(max, plan.step_samples), 0.0)
        slowest += max(plan.pause_s, default=0.0)
        carriage = plan.payload_bytes / min(plan.bandwidth_bytes_per_s, default=1.0)
        links = 2 * carriage + sum(map(_longest, (plan.pull_s, plan.delivery_s, plan.merge_s)))
        patience = 1.0 + 3 * self.interval * slowest + 5 * links
        policy = self._policy(patience)
        if self.on(SEVERAL_DONORS):
            policy = replace(policy, donors_max=self.donors.randint(2, 4))
        if self.on(HANGS):
            limits = StepLimits(
                self.hangs.uniform(0.2, SILENCE_MAX_S / 2), self.hangs.uniform(2.0, 10.0), SILENCE_MAX_S
            )
            policy = replace(policy, step_limits=limits)
        if self.on(QUORUM_RATIO):
            ratio, floor_steps = self.overload.choice((0.25, 0.5, 1.0)), self.overload.choice((0.0, 0.5, 2.0))
            policy = replace(policy, quorum_ratio=ratio, grace_floor_steps=floor_steps)
        if self.on(ALL_ISLANDS_DEPART):
            policy = replace(policy, leaving_closes=True)
        if self.on(ROUTERS):
            count, interval = max(2, self.fragments), max(4, self.interval)
            own = self.routers.randint(max(2, interval // count), interval - 1)  # links have room for that many
            policy = replace(
                policy,
                fragment_count=count,
                sync_interval_steps=interval,
                router_interval_steps=own,
                overlap_steps=min(policy.overlap_steps, own - 1),
            )
        if self.on(MEASURING_ISLANDS):
            time_ratio = self.measuring.choice((None, 0.05, 1.0))
            policy = replace(policy, evaluation=EvaluationPolicy(24, time_ratio, on_islands=True))
            patience += (self.fragments + 1) * _longest(plan.evaluate_s)  # an island that measures trains later
        if self.on(STANDBYS):
            policy, plan = _with_standbys(policy, plan, self.standbys, self.calm_at - SILENCE_MAX_S, SILENCE_MAX_S)
        upgrades = self.seed >= UPGRADES_FROM_SEED
        requests = _draw_checkpoint_requests(self.saving, self.calm_at, upgrades=upgrades) if self.on(SAVING) else None
        return Configuration(self.seed, self.features, policy, plan, self._event_faults(), patience, requests)

    def on(self, feature: str) -> bool:
        return feature in self.features

    def _probability(self, feature: str, most: float) -> float:
        """Draw a probability: 0 if the feature is disabled, and small more often than large."""
        return most * self.random.random() ** 2 if self.on(feature) else 0.0

    def _step_s(self) -> tuple[Duration, ...]:
        """Draw step times that give about the same number of events per second for every size of job."""
        events_per_second = self.random.uniform(40.0, 120.0)
        offers_per_step = min(1.0, self.fragments / self.interval)
        usual = max(0.02, 3 * len(self.islands) * offers_per_step / events_per_second)
        spread = 3.0 if self.on("uneven speeds") else 1.0
        return tuple(usual * self.random.uniform(1.0, spread) for _ in self.islands)

    def _policy(self, patience: Duration) -> JobPolicy:
        choice, uniform, count = self.random.choice, self.random.uniform, len(self.islands)
        # Half of the jobs end among faults, half go on long enough for liveness to be seen, if that is not too long.
        lasts = choice((uniform(2.0, self.calm_at), self.calm_at + 1.5 * patience))
        offers_per_second = min(1.0, self.fragments / self.interval) * sum(1.0 / step_s for step_s in self.step_s)
        lasts = min(lasts, OFFERS_MAX / offers_per_second)
        tokens_per_second = sum(self.tokens / step_s for step_s in self.step_s)
        return JobPolicy(
            islands=tuple(IslandPlan(island, NodeGroupId(island), island, choice((1, 4))) for island in self.islands),
            fragment_count=self.fragments,
            sync_interval_steps=self.interval,
            overlap_steps=self.random.randrange(self.interval),
            quorum=choice((1, count, self.random.randint(1, count))),
            grace_margin=choice((0.0, 0.8, 0.99)),
            grace_cap_steps=choice((None, 0.0, 1.0, 3.0)),
            staleness_max=choice((0, 1, 2)) if self._adoption == "replace" else 0,
            token_budget=max(1, round(tokens_per_second * lasts)),
            evaluation_every_merges=choice((0, 3, 32)),
            suspect_timeout_s=uniform(0.3, 5.0),
            backoff_first_s=uniform(0.0, 0.5),
            backoff_max_s=uniform(0.5, 2.0),
            restarts_max=choice((0, 1, 3)) if self.on("given up") else NEVER,
            flush_timeout_s=uniform(0.3, 5.0),
            moving_average_decay=choice((0.0, 0.9, 0.99)),
            health=HealthPolicy(
                strikes_max=self.health.randint(1, 2),
                quarantines_max=self.health.choice((0, 1, 3)) if self.on("given up") else NEVER,
            ),
        )

    def _plan(self) -> WorldPlan:
        choice, uniform = self.random.choice, self.random.uniform
        self._adoption: AdoptionRule = choice(("replace", "rebase"))
        # A simulated link that needs longer for a fragment than until its next offer never delivers one: leave it room.
        slow = 0.2 * self.interval * min(self.step_s) / self.fragments
        pull: Latency = (0.0, slow) if self.on("slow links") else (0.002, 0.02)
        samples: tuple[tuple[float, ...], ...] = ()
        pauses: tuple[float, ...] = ()
        bandwidth: tuple[float, ...] = ()
        if self.on("sampled steps"):
            samples = tuple(tuple(s * choice((0.5, 1.0, 1.0, 4.0)) for _ in range(5)) for s in self.step_s)
        if self.on("pauses"):
            pauses = tuple(choice((0.0, s / 2)) for s in self.step_s)
        if self.on("payload bytes"):
            bandwidth = tuple(uniform(1.0, 9.0) * 1000.0 / slow for _ in self.islands)
        return WorldPlan(
            step_s=self.step_s,
            step_jitter_ratio=choice((0.0, 0.05, 0.3)),
            tokens_per_step=self.tokens,
            adoption=self._adoption,
            faults=self._faults(),
            calm_at=self.calm_at,
            start_s=(1.0, 3.0) if self.on("slow starts") else (0.2, 1.0),
            transfer_s=(0.5, 2.0) if self.on("slow starts") else (0.05, 0.3),
            pull_s=pull,
            delivery_s=pull,
            merge_s=(0.0, self.round_s) if self.on("slow merges") else (0.002, 0.02),
            evaluate_s=choice(((0.05, 0.1), (1.0, 3.0))),
            silence_s=uniform(0.05, 1.5),
            report_every_s=uniform(0.1, 1.0),
            corrupt=self._probability("corrupt payloads", 0.5),
            duplicate=self._probability("doubled letters", 0.5),
            reorder=self._probability("reordered letters", 0.5),
            catch_up_failure=self._probability("failed catch-ups", 0.9),
            placement_failure=self._probability("failed placements", 0.7),
            publication_loss=self._probability("lost publications", 0.5),
            merge_failure=0.3 * self.health.random() if self.on("failed merges") else 0.0,
            capacity=self._capacity() if self.on("capacity") else (),
            step_samples=samples,
            pause_s=pauses,
            payload_bytes=1000 if bandwidth else 0,
            bandwidth_bytes_per_s=bandwidth,
            begin_s=choice(((0.0, 0.0), (0.0, 1.0))),
            seed_s=choice((0.1, 2.0)),
        )

    def _faults(self) -> tuple[Fault, ...]:
        """Draw faults of the enabled kinds, one by one or many at the same instant. The last ends at ``calm_at``."""
        choice, uniform = self.random.choice, self.random.uniform
        until = self.calm_at - SILENCE_MAX_S
        kinds = [kind for kind in FaultKind if kind in FEATURES and self.on(kind) and kind is not FaultKind.CANCEL]
        faults = []
        for _ in range(self.random.randint(1, 6) if kinds else 0):
            at, kind = uniform(0.0, until), choice(kinds)
            everybody = self.islands if self.on("disasters") and uniform(0, 1) < 0.3 else [choice(self.islands)]
            faults += [Fault(at, kind, island, uniform(0.1, SILENCE_MAX_S)) for island in everybody]
        back = (fault.island for fault in tuple(faults) if fault.kind is FaultKind.KILL_AND_KEEP_AWAY)
        faults += [
            Fault(uniform(until, self.calm_at), FaultKind.READD, island) for island in back if uniform(0, 1) < 0.8
        ]
        if self.on("mistaken operators"):
            faults += [Fault(uniform(0.0, until), kind, STRANGER) for kind in (FaultKind.KILL, FaultKind.READD)]
        if self.on(FaultKind.CANCEL.value) and uniform(0, 1) < 0.3:
            faults.append(Fault(uniform(0.0, 2 * self.calm_at), FaultKind.CANCEL, self.islands[0]))
        faults += self._membership(until)
        faults += self._spoilt_links(until)
        for _ in range(self.notices.randint(1, 3) if self.on(NOTICES) else 0):
            uniform = self.notices.uniform
            faults.append(
                Fault(uniform(0.0, until), FaultKind.NOTICE, self.notices.choice(self.islands), uniform(0, 4))
            )
        for _ in range(self.evacuations.randint(1, 2) if self.on(ALL_ISLANDS_DEPART) else 0):
            uniform = self.evacuations.uniform
            begun, lasts = uniform(0.0, until), uniform(0.1, SILENCE_MAX_S)
            faults += [
                Fault(begun + uniform(0.0, self.round_s), FaultKind.NOTICE, island, lasts) for island in self.islands
            ]
        for _ in range(self.hangs.randint(1, 3) if self.on(HANGS) else 0):
            # once they train, most of them
            at, lasts = self.hangs.uniform(until / 2, until), self.hangs.uniform(0.1, SILENCE_MAX_S)
            faults.append(Fault(at, FaultKind.HANG, self.hangs.choice(self.islands), lasts))
        if self.on(FINISHES):
            faults.append(Fault(self.settings.uniform(0.0, 2 * self.calm_at), FaultKind.FINISH, self.islands[0]))
        for _ in range(self.limits.randint(1, 2) if self.on(PAUSED) else 0):
            at = self.limits.uniform(0.0, until)
            faults.append(Fault(at, FaultKind.PAUSE, self.islands[0]))
            if self.limits.random() < 0.9:
                faults.append(Fault(self.limits.uniform(at, self.calm_at), FaultKind.CONTINUE, self.islands[0]))
        for kind in (FaultKind.DIVERGE, FaultKind.EXPLODE):
            for _ in range(self.health.randint(1, 3) if self.on(kind) else 0):
                faults.append(Fault(self.health.uniform(0.0, until), kind, self.health.choice(self.islands)))
        return tuple(sorted(faults, key=lambda fault: (fault.at, fault.island, fault.kind)))

    def _membership(self, until: Instant) -> Iterator[Fault]:
        """Drain islands and cordon node groups, and undo most of that."""
        choice, uniform = self.operators.choice, self.operators.uniform
        for kind, undone in MEMBERSHIP.items():
            for _ in range(self.operators.randint(1, 4) if self.on(kind) else 0):
                at, island = uniform(0.0, until), choice(self.islands)
                yield Fault(at, kind, island)
                if uniform(0, 1) < 0.8:
                    yield Fault(uniform(at, self.calm_at), undone, island, count=1)

    def _spoilt_links(self, until: Instant) -> Iterator[Fault]:
        """Impair a few payloads of an island, or slow all of them down for a while."""
        uniform, randint = self.links.uniform, self.links.randint
        for kind in SPOILT_LINKS:
            for _ in range(randint(1, 3) if self.on(kind) else 0):
                at, island = uniform(0.0, until), self.links.choice(self.islands)
                lasts = uniform(0.1, SILENCE_MAX_S) if kind is FaultKind.SLOW else uniform(0.0, 1.0)
                yield Fault(at, kind, island, lasts, randint(1, 3), bytes_per_second=uniform(100.0, 10_000.0))

    def _capacity(self) -> tuple[Capacity, ...]:
        """Remove and return slices. When the world is calm, every island has at least some capacity again."""
        choice, uniform = self.random.choice, self.random.uniform
        changes = []
        for island in self.islands:
            times = sorted(uniform(0.0, self.calm_at) for _ in range(self.random.randint(0, 4)))
            changes += [Capacity(at, island, choice((0.0, 0.0, 0.25, 0.9))) for at in times]
            changes.append(Capacity(self.calm_at, island, choice((1.0, 0.9))))
        return tuple(sorted(changes, key=lambda change: (change.at, change.island)))

    def _event_faults(self) -> EventFaults:
        return EventFaults(
            echo=self._probability("echoes", 0.3),
            ghost=self._probability("ghosts", 1.0),
            late_timer=self._probability("late timers", 0.5),
            diverged=self._probability("diverged islands", 0.5),
            failed_evaluation=self._probability("failed evaluations", 1.0),
            overload=self._overload() if self.on(OVERLOAD) else None,
        )

    def _overload(self) -> tuple[Instant, Instant, Duration]:
        """Draw when the machine is overloaded, and how long a payload takes then: there are two of them to an offer."""
        since, until = sorted(self.overload.uniform(0.0, self.calm_at) for _ in range(2))
        payloads_per_second = 2 * min(1.0, self.fragments / self.interval) * sum(1.0 / step_s for step_s in self.step_s)
        return since, until, self.overload.uniform(0.5, 4.0) / payloads_per_second


def _longest(latency: Latency) -> float:
    assert isinstance(latency, tuple), "this world draws its latencies from ranges"
    return latency[1]


def _draw_checkpoint_requests(random: Random, until: Instant, *, upgrades: bool) -> CheckpointRequests:
    """Draw requests before ``until``, with upgrades if wanted. Automatic checkpoints continue after it."""
    policy = CheckpointPolicy(
        every_merges=random.choice((0, 2, 2, 7)),
        every_s=random.choice((0.0, random.uniform(0.5, 3.0))),
        keep=random.randint(1, 3),
        timeout_s=random.uniform(0.3, 3.0),
    )
    saves = sorted(random.uniform(0.0, until) for _ in range(random.randint(0, 4)))
    backs = sorted(random.uniform(until / 4, until) for _ in range(random.randint(0, 4)))
    new = sorted(random.uniform(0.0, until) for _ in range(random.randint(0, 2))) if upgrades else []
    return CheckpointRequests(policy, tuple(saves), tuple(backs), tuple(new))


STANDBY_FAULTS = (FaultKind.CRASH, FaultKind.CRASH, FaultKind.KILL, FaultKind.FREEZE, FaultKind.CUT)
"""Crashes are the reason for standbys, so they are the most likely."""


def _with_standbys(
    policy: JobPolicy, plan: WorldPlan, random: Random, until: Instant, silence_max_s: Duration
) -> tuple[JobPolicy, WorldPlan]:
    """Add one or two standbys for some of the islands, and faults before ``until`` on the standbys and those islands."""
    chosen = [island for island in policy.islands if random.random() < 0.6]
    standbys = tuple(
        replace(island, island=IslandId(f"{island.island}-standby-{number}"))
        for island in chosen
        for number in range(random.randint(1, 2))
    )
    whom = [island.island for island in (*standbys, *chosen)]
    more = tuple(
        Fault(
            random.uniform(0.0, until),
            random.choice(STANDBY_FAULTS),
            random.choice(whom),
            random.uniform(0.1, silence_max_s),
        )
        for _ in range(random.randint(1, 6) if whom else 0)
    )
    faults = tuple(sorted((*plan.faults, *more), key=lambda fault: (fault.at, fault.island, fault.kind)))
    wait_s = random.choice((0.0, random.uniform(0.0, 3.0)))
    return replace(policy, standbys=standbys, standby_wait_s=wait_s), replace(plan, faults=faults)
