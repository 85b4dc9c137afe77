"""The autopilot in worlds that it was not tuned on: never worse by more than 0.5 %, better by 5 % in two of four.

    for each world: record a job with the default settings ──▶ look at its tape, change what is advised, go on ──▶ ...
                    judge the settings that it ends with against the default, in the true world, under other seeds

The autopilot sees a tape only. The judge is the hidden world, whose faults, speeds and latencies are drawn anew for each of
the judge's seeds; the fitted world judges nothing. Constants of ``simulation.autopilot`` were chosen on other seeds, with
worlds of four islands. Progress is printed, because a look takes its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import fsum
from random import Random

from orchestrator.core import events as e
from orchestrator.core.vocabulary import CommandId, Duration, JobPolicy
from orchestrator.simulation.autopilot import AUTOPILOT, Limits, Pilot, command_for
from orchestrator.simulation.plan import ENDLESS_TOKENS, Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from tests.bench import goals
from tests.bench.options import Options

WORSE_MAX, BETTER_MIN, BETTER_COUNT = 0.005, 0.05, 2
LIMITS = Limits({"interval_steps": (4.0, 48.0), "quorum": (1.0, 8.0), "grace": (1.0, 6.0)})
STEP_S = 0.5
RECORDED, JUDGES = 7101, (8201, 8202, 8203)


@dataclass(frozen=True, slots=True)
class Hidden:
    """A world that nobody tells the autopilot about. Times are in seconds; ``mtbf_s`` is of one island."""

    islands: int
    mtbf_s: Duration
    slow: Mapping[int, float]
    start_s: tuple[Duration, Duration] = (1.0, 3.0)
    silences: bool = False

    def policy(self) -> JobPolicy:
        """Return the default settings of a job of so many islands."""
        by_ratio = self.islands > 4
        base = sample_policy(self.islands, fragment_count=8, interval=24, grace_cap_steps=3.0, restarts_max=1000)
        return replace(
            base,
            overlap_steps=4,
            token_budget=ENDLESS_TOKENS,
            evaluation_every_merges=0,
            quorum_ratio=0.5 if by_ratio else 0.0,
            grace_floor_steps=0.5 if by_ratio else 0.0,
        )

    def world(self, policy: JobPolicy, seed: int, until: Duration) -> World:
        """Return the world of one job, with faults drawn from the seed."""
        random = Random(f"{seed} hidden")
        faults: list[Fault] = []
        for plan in policy.islands:
            at = random.expovariate(1.0 / self.mtbf_s)
            while at < until:
                silent = self.silences and random.random() < 0.3
                kind = FaultKind.FREEZE if silent else FaultKind.CRASH
                faults.append(Fault(at, kind, plan.island, random.uniform(2.0, 8.0) if silent else 0.0))
                at += random.expovariate(1.0 / self.mtbf_s)
        steps = tuple(STEP_S * self.slow.get(n, 1.0) for n in range(self.islands))
        plan = WorldPlan(
            steps,
            step_jitter_ratio=0.1,
            adoption="rebase",
            start_s=self.start_s,
            faults=tuple(sorted(faults, key=lambda fault: (fault.at, fault.island))),
        )
        return World(policy, plan, seed, checked=False)


WORLDS: Mapping[str, Hidden] = {
    "calm": Hidden(4, 1e9, {}),
    "a straggler": Hidden(4, 900.0, {2: 2.2}),
    "preempted": Hidden(4, 55.0, {}, start_s=(2.0, 6.0)),
    "eight, preempted and silent": Hidden(8, 70.0, {1: 1.3, 5: 1.5}, silences=True),
}
SMALL: Mapping[str, Hidden] = {"preempted": Hidden(2, 40.0, {})}


def main(options: Options) -> list[goals.Goal]:
    worlds, judges = (SMALL, JUDGES[:1]) if options.small else (WORLDS, JUDGES)
    stretch, looks = (170.0, 1) if options.small else (300.0, 4)
    gains: list[float] = []
    for name, hidden in worlds.items():
        policy = piloted(hidden, stretch, looks)
        until = stretch * (looks + 1)
        pairs = [(merged(hidden, hidden.policy(), seed, until), merged(hidden, policy, seed, until)) for seed in judges]
        ratios = [after / before - 1.0 for before, after in pairs]
        gains.append(fsum(ratios) / len(ratios))
        grace = "none" if policy.grace_cap_steps is None else f"{policy.grace_cap_steps:g}"
        settings = f"H {policy.sync_interval_steps}, K {policy.quorum}, grace {grace}"
        each = ", ".join(f"{100 * ratio:+.2f}" for ratio in ratios)
        print(f"autopilot  {name}: {settings}: {100 * gains[-1]:+.2f} % merged tokens ({each})", flush=True)
    worst = goals.at_most("autopilot: most that it loses", -min(gains), WORSE_MAX)
    if options.small:
        return [worst]
    better = float(sum(gain >= BETTER_MIN for gain in gains))
    return [worst, goals.at_least("autopilot: worlds with 5 % more", better, BETTER_COUNT)]


def piloted(hidden: Hidden, stretch: Duration, looks: int) -> JobPolicy:
    """Run a job with the autopilot, and return the settings that it ends with."""
    world = hidden.world(hidden.policy(), RECORDED, stretch * (looks + 1))
    world.run(stretch)
    policy = hidden.policy()
    for look in range(looks):
        report = Pilot(world.tape, LIMITS).look()
        print(f"autopilot    look {look + 1}: {report.outcome}", flush=True)
        advice = report.advice
        if advice is not None and not advice.held_by:
            request = command_for(advice.setting, advice.after, advice.reason)
            assert request is not None, "only settings that a command changes have no holder"
            world.tell(e.CommandRequested(world.now, CommandId(f"autopilot-{look}"), AUTOPILOT, request))
            policy = world.core.state.policy
        world.resume(stretch * (look + 2))
    return policy


def merged(hidden: Hidden, policy: JobPolicy, seed: int, until: Duration) -> float:
    """Return the tokens that a job with these settings merges in the true world."""
    world = hidden.world(policy, seed, until)
    world.run(until)
    tokens: float = world.goodput.summary(until)["tokens"]["merged"]
    return tokens
