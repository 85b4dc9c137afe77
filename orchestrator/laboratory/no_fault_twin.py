"""The no-fault twin of a tape: the same job with nothing going wrong, which the tape's failures are measured against.

The simulated world runs the tape's policy with islands as fast and as uneven as the tape's, none of which ever dies, stands
still or is short of capacity, over links and merges as slow as the tape's, until as many tokens are trained: that is shorter
in time. It ends as the tape does: with a flush if the tape's job reached its budget, else in the middle, so that neither
model has work in it that was in flight, or both have. A tape comes out, which is trained like any other.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from orchestrator.core.events import IslandReported
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import Duration, IslandId, JobPolicy
from orchestrator.laboratory.training_trace import TrainingTrace
from orchestrator.replica.work import AdoptionRule
from orchestrator.simulation.fit import fit
from orchestrator.simulation.plan import WorldPlan
from orchestrator.simulation.world import World
from orchestrator.tape.schema import Tape

SEED = 0
ENDLESS = 2**62
"""A budget that no simulated job reaches."""


def tape_of(disturbed: Tape, trace: TrainingTrace, adoption: AdoptionRule, horizon_steps: int) -> Tape:
    """The tape of the job without failures, its islands' budget ``horizon_steps`` each."""
    tokens = horizon_steps * len(trace.policy.islands) * trace.tokens_per_step
    policy = replace(trace.policy, token_budget=tokens if trace.ended else ENDLESS, evaluation_every_merges=0)
    world = World(policy, _calm(disturbed, trace, adoption), SEED, checked=False)
    for _ in world.passing(at_once=1):
        if not trace.ended and world.core.state.tokens_trained >= tokens:
            break
    return world.tape


def _calm(disturbed: Tape, trace: TrainingTrace, adoption: AdoptionRule) -> WorldPlan:
    """Speeds and latencies of the tape, and nothing else of it."""
    fitted = fit(disturbed).plan
    return WorldPlan(
        step_s=_step_s(disturbed, trace.policy),
        step_jitter_ratio=fitted.step_jitter_ratio,
        tokens_per_step=trace.tokens_per_step,
        adoption=adoption,
        letter_s=fitted.letter_s,
        pull_s=fitted.pull_s,
        delivery_s=fitted.delivery_s,
        merge_s=fitted.merge_s,
    )


def _step_s(tape: Tape, policy: JobPolicy) -> tuple[Duration, ...]:
    """Each island's median step; the median of all, where one never told."""
    steps: dict[IslandId, list[Duration]] = {}
    for record in tape.records:
        match record.event:
            case IslandReported(island=island, report=Progress() as report):
                steps.setdefault(island, []).append(report.step_seconds_median)
    overall_median = median(seconds for samples in steps.values() for seconds in samples)
    return tuple(median(steps.get(plan.island, [overall_median])) for plan in policy.islands)
