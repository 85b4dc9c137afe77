"""Repeats the training on a tape with a real model, in one process: how the tape's failures affect the model.

    python -m orchestrator.laboratory.train_tape TAPE --config FILE [--baseline no-failures] [--baseline data-parallel]

The tape, live or simulated, decides how long each island trains between which adoptions, which islands contribute to which
merge with which weight, and which are away and where they get their state from. The job specification FILE says what is
trained. The baselines of the table:

    no-failures      the same islands and policy in a simulated world without faults, with as many tokens trained
                     (``tape_without_failures``)
    data-parallel    one model, trained on every island's batch in each step, with the same token budget

A tape is one pattern of failures. A seed is another start and another order of the same data. In short runs, two runs of one
seed differ mostly by chance, so ``--seeds N`` trains from N seeds (the job's and those after it), and the table shows the
mean with its standard error.

Finished runs are kept in ``runs/train-tape-NAME/``, so Ctrl-C loses at most the current run, and the next call continues.
``--again`` repeats finished runs and says whether the parameters are bit-identical.

``match`` checks that the tape and the specification fit, and decides what is taken from which:

    from the specification    model, data, batch, inner and outer optimizer, averaging, wire, adoption, seed
    from the tape             who trained and contributed when, weights, deaths and catch-ups; and the budget, in steps

The budget is also the length of the learning-rate schedule. It is the tape's if its job reached it or the specification has
the same. A job that was interrupted, or simulated for a time instead of a number of tokens, has its trained tokens as its
budget, so that its schedule ends with it.

The tape decides, so quorum, grace and similar settings may differ; a note says so. The number of islands, P, H, and the
adoption rule must be the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import fsum, sqrt
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from learners import jax_trainer
from orchestrator.accounting.goodput import Goodput
from orchestrator.core.events import IslandReported
from orchestrator.core.messages import Progress as ProgressReport
from orchestrator.core.vocabulary import Duration, IslandId, JobPolicy
from orchestrator.errors import AtollError, InternalError, InvalidJobSpec, Problem
from orchestrator.laboratory import baselines, trace_reader
from orchestrator.laboratory.baselines import FinishedRuns, key_of, progress
from orchestrator.laboratory.tape_training import TapeTraining
from orchestrator.laboratory.trace_reader import TrainingTrace
from orchestrator.models.huggingface.weights import completed
from orchestrator.replica.work import AdoptionRule
from orchestrator.simulation.fit import fit
from orchestrator.simulation.plan import ENDLESS_TOKENS, WorldPlan
from orchestrator.simulation.world import World
from orchestrator.specification.config import JobSpec, parse_job, read_job_document
from orchestrator.specification.data_check import with_found_files
from orchestrator.specification.sections import BudgetSection
from orchestrator.system.roots import EVERYTHING
from orchestrator.system.run_folder import TAPE
from orchestrator.tape.schema import Digest, Header, Tape, encode_header, encode_record, job_steps
from orchestrator.tape.storage import read_tape

DECIDED_BY_TAPE = ("quorum", "overlap_steps", "grace_margin", "grace_cap_steps", "staleness_max")
"""Settings that only affect decisions which are already on the tape."""
FEWER_TOKENS_RATIO = 0.995
"""Below this part of the tokens of full steps, a note says that some steps were smaller."""
Method = Literal["tape", "no-failures", "data-parallel"]
METHODS: tuple[Method, ...] = ("tape", "no-failures", "data-parallel")
TWIN_SEED = 0
"""A token budget that no simulated job reaches."""


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
    if policy.router_interval_steps != (of_routers := sync.router_interval_steps):
        message = f"is {of_routers or 'absent'}, but on the tape it is {policy.router_interval_steps or 'absent'}."
        remedy = "Leave it out." if of_routers else f"Set it to {policy.router_interval_steps}."
        yield Problem("synchroniser.router_interval_steps", message, remedy)
    for index, section in enumerate(spec.islands):
        if spec.batch_size_of(section) != spec.training.batch_size:
            message = f"is {section.batch_size}, but all steps of a tape must have the same size."
            yield Problem(f"islands.{index}.batch_size", message, "Leave it out.")
    if spec.training.batch_ramp is not None:
        yield Problem(
            "training.batch_ramp", "is set, but all steps of a tape must have the same size.", "Leave it out."
        )
    if not spec.trainer.is_built_in:
        yield Problem("trainer", f"is {spec.trainer.factory}, which trains no model.", "Leave it out.")


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


@dataclass(frozen=True, slots=True)
class Run:
    """One training run. ``key`` identifies everything that decides its result, and ``digest`` the parameters bit for bit.

    ``tokens`` includes lost work. ``contributors_mean`` is per merge. ``as_recorded_count`` merges gave the digest on the
    tape (none if it was simulated). ``curve`` is (tokens, held-out loss).
    """

    method: Method
    key: str
    loss: float
    curve: tuple[tuple[int, float], ...]
    tokens: int
    goodput_ratio: float
    digest: str
    merge_count: int = 0
    contributors_mean: float = 0.0
    as_recorded_count: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A run in the table. ``gap`` is the loss by the tape over this run's loss of the same seed, minus one."""

    seed: int
    run: Run
    gap: float


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over all seeds. ``gap_stderr`` is the standard error of the mean gap."""

    method: Method
    loss: float
    gap: float
    gap_stderr: float


class TapeRuns:
    """The runs for one tape and one job specification."""

    def __init__(self, tape: Tape, match: Match, folder: Path, console: Console) -> None:
        self._tape, self._match, self._console = tape, match, console
        self._finished = FinishedRuns(folder, Run, console)
        self._finished.refuse_unwritable()

    def train(self, methods: Sequence[Method], *, again: bool) -> list[Run]:
        """Train every method in turn. Finished runs are repeated only if ``again``."""
        with progress(self._console) as shown:
            return [self._run(method, shown, again) for method in methods]

    def _run(self, method: Method, shown: Progress, again: bool) -> Run:
        spec, tape = self._match.spec, self._tape
        if method == "no-failures":
            tape = tape_without_failures(tape, self._match.trace, spec.synchroniser.adoption, spec.horizon_steps)
        # training by a tape depends on all of it, data-parallel only on the budget, which is in the specification
        decides = "" if method == "data-parallel" else digest_of(tape)
        key = key_of(method, decides, spec.model_dump_json())
        finished = self._finished.get(key)
        if finished is not None and not again:
            return finished
        task = shown.add_task(method, total=spec.token_budget)
        match method:
            case "tape":
                steps = _by_tape(method, key, tape, self._match)
            case "no-failures":
                steps = _by_tape(method, key, tape, match(tape, spec))
            case "data-parallel":
                steps = _data_parallel(key, spec)
        run = _followed(steps, lambda tokens: shown.update(task, completed=tokens))
        if finished is not None:
            same = "bit-identical to" if finished.digest == run.digest else "DIFFERENT from"
            self._console.print(f"{method}: {same} the finished run ({run.digest}, {finished.digest}).")
        return self._finished.keep(run)


def _followed(steps: Generator[int, None, Run], show: Any) -> Run:
    """Run the training to its end, showing the tokens."""
    while True:
        try:
            show(next(steps))
        except StopIteration as end:
            run: Run = end.value
            return run


def _by_tape(method: Method, key: str, tape: Tape, match: Match) -> Generator[int, None, Run]:
    training = TapeTraining(match.spec, match.trace, warm_trainer)
    for step, _ in enumerate(training.run(), start=1):
        yield step * match.spec.tokens_per_step
    trained, inputs = training.trained, [len(act.inputs) for act in match.trace.merges]
    assert trained is not None
    return Run(
        method=method,
        key=key,
        loss=trained.loss,
        curve=tuple(trained.curve),
        tokens=match.tokens_trained,
        goodput_ratio=goodput_of(tape),
        digest=trained.digest,
        merge_count=len(inputs),
        contributors_mean=sum(inputs) / len(inputs),
        as_recorded_count=trained.as_recorded_count,
    )


def _data_parallel(key: str, spec: JobSpec) -> Generator[int, None, Run]:
    result = None
    for advance in baselines.train("data-parallel", spec, baselines.Pace()):
        yield advance.tokens
        result = advance.result
    assert result is not None
    tokens = result.curve[-1][0]
    return Run("data-parallel", key, result.loss, result.curve, tokens, result.goodput_ratio, result.digest)


def warm_trainer(spec: dict[str, Any], shard_index: int, shard_count: int) -> jax_trainer.JaxTrainer:
    """Create a trainer and compile it through the persistent cache: all islands run the same program."""
    trainer = jax_trainer.create(spec, shard_index, shard_count)
    trainer.warm_up()
    return trainer


def goodput_of(tape: Tape) -> float:
    """Return the goodput as in the tape's own report: island time whose tokens reached a merge, over all island time."""
    assert isinstance(tape.header, Header)
    fold = Goodput(tape.header.policy)
    for event, effects in job_steps(tape):
        fold.apply(event, effects)
    ratio: float = fold.summary()["goodput_ratio"]
    return ratio


def digest_of(tape: Tape) -> str:
    """Return the digest of the tape's records, sealed or not."""
    if tape.footer is not None:
        return tape.footer.digest
    digest = Digest()
    digest.add(encode_header(tape.header))
    for record in tape.records:
        digest.add(encode_record(record))
    return digest.hex()


def _of_seed(match: Match, seed: int) -> Match:
    """Return the same training from another start, on the same data in another order."""
    return replace(match, spec=match.spec.model_copy(update={"seed": seed}))


# ── the job without failures ──────────────────────────────────────────────────────────────────────────────────────────


def tape_without_failures(disturbed: Tape, trace: TrainingTrace, adoption: AdoptionRule, horizon_steps: int) -> Tape:
    """Simulate the tape's job without failures, with a budget of ``horizon_steps`` per island, and return its tape.

    The simulated world runs the tape's policy with islands, links and merges of the same speeds as on the tape. No island
    dies, stands still or lacks capacity, so the same number of tokens takes less time. It ends as the tape does: with a
    flush if the tape's job reached its budget, else in the middle, so that the work in flight is missing in both models or
    in neither.
    """
    tokens = horizon_steps * len(trace.policy.islands) * trace.tokens_per_step
    policy = replace(trace.policy, token_budget=tokens if trace.ended else ENDLESS_TOKENS, evaluation_every_merges=0)
    world = World(policy, _calm(disturbed, trace, adoption), TWIN_SEED, checked=False)
    for _ in world.passing(at_once=1):
        if not trace.ended and world.core.state.tokens_trained >= tokens:
            break
    return world.tape


def _calm(disturbed: Tape, trace: TrainingTrace, adoption: AdoptionRule) -> WorldPlan:
    """Return a plan with the speeds and latencies of the tape and nothing else."""
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
    """Return the median step time of each island, or of all islands for one that never reported."""
    steps: dict[IslandId, list[Duration]] = {}
    for record in tape.records:
        match record.event:
            case IslandReported(island=island, report=ProgressReport() as report):
                steps.setdefault(island, []).append(report.step_seconds_median)
    overall_median = median(seconds for samples in steps.values() for seconds in samples)
    return tuple(median(steps.get(plan.island, [overall_median])) for plan in policy.islands)


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def judge(seed: int, runs: Sequence[Run]) -> list[Row]:
    ours = next(run.loss for run in runs if run.method == "tape")
    return [Row(seed, run, ours / run.loss - 1) for run in runs]


def means(rows: Sequence[Row]) -> list[Mean]:
    """Return the mean of each method, or nothing for a single seed."""
    if len({row.seed for row in rows}) < 2:
        return []
    methods = [method for method in METHODS if any(row.run.method == method for row in rows)]
    return [_mean(method, [row for row in rows if row.run.method == method]) for method in methods]


def _mean(method: Method, rows: Sequence[Row]) -> Mean:
    count = len(rows)
    gap = fsum(row.gap for row in rows) / count
    variance = fsum((row.gap - gap) ** 2 for row in rows) / (count - 1)
    return Mean(method, fsum(row.run.loss for row in rows) / count, gap, sqrt(variance / count))


def table(match: Match, rows: Sequence[Row]) -> Table:
    spec, sync, over_seeds = match.spec, match.spec.synchroniser, means(rows)
    caption = "held-out loss in nats per byte at the same token budget; gap: the tape's loss relative to this one"
    drawn = Table(
        title=f"{spec.name}: {spec.model.preset}, {spec.island_count} islands × {spec.horizon_steps} steps × "
        f"{spec.training.batch_size} × {spec.data.sequence_length} bytes; H = {sync.interval_steps}, P = {sync.fragments}",
        caption=caption + (", ± the standard error of its mean" if over_seeds else ""),
    )
    for column in ("seed", "trained by", "tokens", "goodput", "merges × contributors", "loss", "gap"):
        drawn.add_column(column, justify="left" if column == "trained by" else "right")
    for row in rows:
        run = row.run
        if run.method == "tape":
            drawn.add_section()
        merges = f"{run.merge_count:,} × {run.contributors_mean:.2f}" if run.merge_count else ""
        gap = "" if run.method == "tape" else f"{row.gap:+.2%}"
        goodput = f"{run.goodput_ratio:.1%}"
        drawn.add_row(str(row.seed), run.method, f"{run.tokens:,}", goodput, merges, f"{run.loss:.4f}", gap)
    drawn.add_section()
    for mean in over_seeds:
        gap = "" if mean.method == "tape" else f"{mean.gap:+.2%} ± {mean.gap_stderr:.2%}"
        drawn.add_row("mean", mean.method, "", "", "", f"{mean.loss:.4f}", gap)
    return drawn


def digests(rows: Sequence[Row]) -> str:
    """Return lines with the digests of the parameters, and how many merges gave the digest on a live job's tape."""
    lines = [f"parameters' digest, seed {row.seed}, {row.run.method}: {row.run.digest}" for row in rows]
    recorded = rows[0].run
    if recorded.as_recorded_count:
        lines.append(
            f"{recorded.as_recorded_count:,} of {recorded.merge_count:,} merges are bit-identical to the tape."
        )
    return "\n".join(lines)


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="atoll train-tape", description=__doc__.splitlines()[0])
    parser.add_argument("tape", type=Path, help="a tape.jsonl, or the folder of a run")
    parser.add_argument("--config", type=Path, required=True, help="the job specification: model, data, optimizers")
    parser.add_argument("--baseline", action="append", choices=METHODS[1:], default=[])
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="train from N seeds, starting with the job's")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--again", action="store_true", help="repeat finished runs and compare the bits")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    folder = options.runs / "train-tape"
    try:
        spec = with_found_files(parse_job(completed(read_job_document(options.config), EVERYTHING)), EVERYTHING)
        tape = read_tape(options.tape / TAPE if options.tape.is_dir() else options.tape)
        matched = match(tape, spec)
        for note in matched.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        folder = options.runs / f"train-tape-{spec.name}"
        methods: list[Method] = ["tape", *(method for method in METHODS if method in options.baseline)]
        rows = []
        for seed in range(spec.seed, spec.seed + max(1, options.seeds)):
            runs = TapeRuns(tape, _of_seed(matched, seed), folder, console).train(methods, again=options.again)
            rows += judge(seed, runs)
    except KeyboardInterrupt:
        console.print(f"Stopped. Finished runs are kept in {folder}. Run the same command again to continue.")
        return 130
    except AtollError as error:
        console.print(str(error), style="red", markup=False)
        return 1 if isinstance(error, InternalError) else 2
    if options.json:
        plain = [{**asdict(row.run), "seed": row.seed, "gap": row.gap} for row in rows]
        over_seeds = [asdict(mean) for mean in means(rows)]
        json.dump({"job": spec.name, "notes": matched.notes, "rows": plain, "means": over_seeds}, sys.stdout, indent=2)
        print()
    else:
        out = Console()
        out.print(table(matched, rows))
        out.print(digests(rows), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
