"""The same job with nothing going wrong: what a tape's failures are to be measured against.

The simulated world runs the tape's policy with islands as fast as the tape's, none of which ever dies, stands still or is
short of capacity, over links at the world's usual latencies, until as many tokens are trained: that is shorter in time. A
tape comes out, which is trained like any other.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from learners.adoption import Rule
from orchestrator.core.events import ProgressReported
from orchestrator.core.vocabulary import Duration, IslandId
from orchestrator.laboratory.course import Course
from orchestrator.simulation.plan import WorldPlan
from orchestrator.simulation.world import World
from orchestrator.tape.schema import Tape

SEED = 0


def tape_of(disturbed: Tape, course: Course, adoption: Rule, horizon_steps: int) -> Tape:
    """The tape of the job without failures, its islands' budget ``horizon_steps`` each."""
    steps: dict[IslandId, list[Duration]] = {}
    for record in disturbed.records:
        if isinstance(record.event, ProgressReported):
            steps.setdefault(record.event.island, []).append(record.event.step_seconds_median)
    known = median(seconds for island in steps.values() for seconds in island)
    step_s = tuple(median(steps.get(plan.island, [known])) for plan in course.policy.islands)
    plan = WorldPlan(step_s=step_s, tokens_per_step=course.tokens_per_step, adoption=adoption)
    budget = horizon_steps * len(step_s) * course.tokens_per_step
    policy = replace(course.policy, token_budget=budget, evaluation_every_merges=0)
    return World(policy, plan, SEED, checked=False).run().tape
