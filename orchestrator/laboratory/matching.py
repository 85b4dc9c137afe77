"""Matches a tape with a job specification: checks that they fit, and decides what is taken from which.

    from the specification    model, data, batch, inner and outer optimizer, averaging, wire, adoption, seed
    from the tape             who trained and contributed when, weights, deaths and catch-ups; and the budget, in steps

The budget is also the length of the learning-rate schedule. It is the tape's if its job reached it or the specification has
the same. A job that was interrupted, or simulated for a time instead of a number of tokens, has its trained tokens as its
budget, so that its schedule ends with it.

The tape decides, so quorum, grace and similar settings may differ; a note says so. The number of islands, P, H, and the
adoption rule must be the same. Nothing is trained here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.core.vocabulary import JobPolicy
from orchestrator.errors import InvalidJobSpec, Problem
from orchestrator.laboratory import trace_reader
from orchestrator.laboratory.training_trace import TrainingTrace
from orchestrator.specification.config import JobSpec
from orchestrator.specification.sections import BudgetSection
from orchestrator.tape.schema import Header, Tape

DECIDED_BY_TAPE = ("quorum", "overlap_steps", "grace_margin", "grace_cap_steps", "staleness_max")
"""Settings that only affect decisions which are already on the tape."""
FEWER_TOKENS_RATIO = 0.995
"""Below this part of the tokens of full steps, a note says that some steps were smaller."""


@dataclass(frozen=True, slots=True)
class Match:
    """The specification with the tape's budget, the trace to train, and notes for the reader of the result."""

    spec: JobSpec
    trace: TrainingTrace
    notes: tuple[str, ...]

    @property
    def tokens_trained(self) -> int:
        """The tokens that the tape's islands trained, including lost work, in tokens of this specification."""
        return round(self.trace.tokens_trained / self.trace.tokens_per_step * self.spec.tokens_per_step)


def match(tape: Tape, spec: JobSpec) -> Match:
    """Match a tape with a specification. Raises InvalidJobSpec with all reasons why they do not fit."""
    if not isinstance(tape.header, Header):
        message = "is the tape of a fleet, which has failures but no steps, merges or versions."
        remedy = "Simulate with level: protocol, which writes the tape of a job."
        raise _misfit(spec, [Problem("tape", message, remedy)])
    reading = trace_reader.read(tape, spec.synchroniser.adoption)
    problems = [*_problems(tape.header.policy, spec), *reading.problems]
    if problems:
        raise _misfit(spec, problems)
    trace = reading.trace
    budget = trace.horizon_steps(trace.policy.token_budget)
    planned = trace.ended or budget == spec.horizon_steps
    steps = budget if planned else trace.horizon_steps(trace.tokens_trained)
    notes = tuple(_notes(tape, trace, spec, steps))
    return Match(spec.model_copy(update={"budget": BudgetSection(steps=steps)}), trace, notes)


def _misfit(spec: JobSpec, problems: list[Problem]) -> InvalidJobSpec:
    return InvalidJobSpec(detail=f"this tape cannot be trained as job {spec.name}", problems=tuple(problems))


def _problems(policy: JobPolicy, spec: JobSpec) -> Iterator[Problem]:
    islands, sync = len(policy.islands), spec.synchroniser
    if islands != spec.island_count:
        message = f"has {spec.island_count} islands, but the tape's job has {islands}."
        yield Problem("islands", message, f"List {islands} islands.")
    if policy.fragment_count != sync.fragments:
        message = f"is {sync.fragments}, but the tape's job has {policy.fragment_count} fragments."
        yield Problem("synchroniser.fragments", message, f"Set it to {policy.fragment_count}.")
    if policy.sync_interval_steps != sync.interval_steps:
        message = f"is {sync.interval_steps}, but on the tape it is {policy.sync_interval_steps}."
        yield Problem("synchroniser.interval_steps", message, f"Set it to {policy.sync_interval_steps}.")
    for index, section in enumerate(spec.islands):
        if spec.batch_size_of(section) != spec.training.batch_size:
            message = f"is {section.batch_size}, but all steps of a tape must have the same size."
            yield Problem(f"islands.{index}.batch_size", message, "Leave it out.")
    if not spec.trainer.startswith("learners.jax_trainer:"):
        yield Problem("trainer", f"is {spec.trainer}, which trains no model.", "Leave it out.")


def _notes(tape: Tape, trace: TrainingTrace, spec: JobSpec, steps: int) -> Iterator[str]:
    policy, sync = trace.policy, spec.synchroniser
    if tape.torn:
        yield f"The tape is incomplete: {tape.torn}."
    named = [plan.island for plan in policy.islands]
    if named != list(spec.island_sections()):
        yield f"Islands are matched by their order: the tape's {named[0]} trains the first shard, and so on."
    differing = [
        f"{name} is {getattr(policy, name)} on the tape ({getattr(sync, name)} in the job)"
        for name in DECIDED_BY_TAPE
        if getattr(policy, name) != getattr(sync, name)
    ]
    if differing:
        yield f"The tape's decisions apply: {'; '.join(differing)}."
    if trace.tokens_per_step != spec.tokens_per_step:
        yield (
            f"A full step has {trace.tokens_per_step:,} tokens on the tape and {spec.tokens_per_step:,} here. The tape is "
            "followed step by step, and the token budget is converted."
        )
    if not trace.ended:
        yield "The tape ends before its job. Work that its islands had not contributed by then is not in the model."
    if steps != spec.horizon_steps:
        yield f"The budget is the tape's {steps:,} steps per island, not the job's {spec.horizon_steps:,}."
    full = trace.tokens_trained / trace.tokens_per_step
    if full < FEWER_TOKENS_RATIO * trace.steps_trained:
        yield (
            f"On the tape, {trace.steps_trained:,} steps trained as much as {full:,.0f} full ones, because islands lacked "
            "capacity. Here every step is a full one, so there are fewer."
        )
    if trace.inferred_count:
        yield (
            f"{trace.inferred_count} adoptions were not reported, because their islands died. They are placed where another "
            "island took the state that shows them."
        )
