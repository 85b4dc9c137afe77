"""The match of a tape with a job specification: whether they fit, what is trained then, and what is taken from which.

    from the specification    model, data, batch, inner and outer optimizer, averaging, wire, adoption, seed
    from the tape             who trained and contributed when, weights, deaths and catch-ups; and the budget, in steps

The budget is also the length of the learning-rate schedule: the tape's, if its job reached it or the specification has the
same. A job that was broken off, or was simulated for a time and not for tokens, has the tokens it trained for a budget, so
that its schedule ends when it does.

The tape decides, so quorum, grace and their like may differ; whoever asks is told. What must be the same: the number of
islands, P, H, and how islands adopt. Nothing is trained here.
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
"""Knobs of a policy that only decide what the tape has decided already."""
FEWER_TOKENS_RATIO = 0.995
"""Below this part of full steps' tokens, people are told that some steps were smaller."""


@dataclass(frozen=True, slots=True)
class Match:
    """``spec`` with the tape's budget, the ``trace`` to train, and what a reader of the result should know."""

    spec: JobSpec
    trace: TrainingTrace
    notes: tuple[str, ...]

    @property
    def tokens_trained(self) -> int:
        """What the tape's islands trained, lost work too, in tokens here."""
        return round(self.trace.tokens_trained / self.trace.tokens_per_step * self.spec.tokens_per_step)


def match(tape: Tape, spec: JobSpec) -> Match:
    """Raises InvalidJobSpec with every reason why the tape cannot be trained with this specification."""
    if not isinstance(tape.header, Header):
        message = "is a fleet's: its failures are on it, but no steps, merges or versions."
        remedy = "Simulate with level: protocol, which makes the tape of a job."
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
        message = f"are {spec.island_count}, but the tape is of a job with {islands}."
        yield Problem("islands", message, f"List {islands} islands.")
    if policy.fragment_count != sync.fragments:
        message = f"is {sync.fragments}, but on the tape the parameters are cut into {policy.fragment_count} fragments."
        yield Problem("synchroniser.fragments", message, f"Set it to {policy.fragment_count}.")
    if policy.sync_interval_steps != sync.interval_steps:
        message = (
            f"is {sync.interval_steps}, but on the tape a fragment is due every {policy.sync_interval_steps} steps."
        )
        yield Problem("synchroniser.interval_steps", message, f"Set it to {policy.sync_interval_steps}.")
    for index, section in enumerate(spec.islands):
        if spec.batch_size_of(section) != spec.training.batch_size:
            message = f"is {section.batch_size}, and a tape is followed by steps of one size."
            yield Problem(f"islands.{index}.batch_size", message, "Leave it out.")
    if not spec.trainer.startswith("learners.jax_trainer:"):
        yield Problem("trainer", f"is {spec.trainer}, which trains no model.", "Leave it out.")


def _notes(tape: Tape, trace: TrainingTrace, spec: JobSpec, steps: int) -> Iterator[str]:
    policy, sync = trace.policy, spec.synchroniser
    if tape.torn:
        yield f"The tape is torn: {tape.torn}."
    named = [plan.island for plan in policy.islands]
    if named != list(spec.island_sections()):
        yield f"Islands are matched by their order: the tape's {named[0]} trains the first shard, and so on."
    differing = [
        f"{knob} is {getattr(policy, knob)} on the tape ({getattr(sync, knob)} in the job)"
        for knob in DECIDED_BY_TAPE
        if getattr(policy, knob) != getattr(sync, knob)
    ]
    if differing:
        yield f"The tape's decisions stand: {'; '.join(differing)}."
    if trace.tokens_per_step != spec.tokens_per_step:
        yield (
            f"A full step has {trace.tokens_per_step:,} tokens on the tape and {spec.tokens_per_step:,} here: the tape is "
            "followed by steps, and the token budget with it."
        )
    if not trace.ended:
        yield "The tape ends before its job: what its islands had not contributed by then is not in the model."
    if steps != spec.horizon_steps:
        yield f"The budget is the tape's {steps:,} steps of each island, not the job's {spec.horizon_steps:,}."
    full = trace.tokens_trained / trace.tokens_per_step
    if full < FEWER_TOKENS_RATIO * trace.steps_trained:
        yield (
            f"On the tape {trace.steps_trained:,} steps trained as much as {full:,.0f} full ones (islands short of "
            "capacity); here each step is a full one, and there are so many fewer."
        )
    if trace.inferred_count:
        yield (
            f"{trace.inferred_count} adoptions were told by no letter (their islands died); they are put where another "
            "island took the state that shows them."
        )
