"""Compares a job's held-out loss with that of its baselines, on the same tokens, seeds and schedule.

    python -m orchestrator.laboratory.compare FILE --baseline data-parallel --baseline diloco [--json]

Every method is trained from each seed at each inner learning rate of a small grid, and judged at the learning rate with its
best mean loss over the seeds. Finished runs are kept in ``runs/compare-NAME/``, so Ctrl-C loses at most the current run, and
the next call continues. The file holds:

    job              a job specification
    inner_lrs        the grid of learning rates
    seeds            the seeds; by default the job's own
    step_durations   the relative inner step time of each island; by default all are equal
    speed_spread     how much single steps vary, as a ratio
    diloco           changes of ``synchroniser`` for the synchronous baseline: its own outer optimizer
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field, ValidationError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from orchestrator.errors import PROBLEMS_MAX, AtollError, ConfigurationError, InternalError
from orchestrator.laboratory import baselines
from orchestrator.laboratory.baselines import METHODS, FinishedRuns, Method, Pace, Trained, key_of, progress
from orchestrator.models.huggingface.weights import completed
from orchestrator.specification.bounds import ISLANDS_MAX, LearningRate, RatioBelowOne, Seed
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.data_check import with_found_files
from orchestrator.specification.documents import mapping, read_document
from orchestrator.specification.sections import Section
from orchestrator.system.roots import EVERYTHING

StepDuration = Annotated[float, Field(strict=True, ge=0.01, le=100, allow_inf_nan=False)]


class Settings(Section):
    """The contents of a comparison file, except its job."""

    inner_lrs: Annotated[tuple[LearningRate, ...], Field(min_length=1, max_length=100)]
    seeds: Annotated[tuple[Seed, ...], Field(max_length=100)] = ()
    step_durations: Annotated[tuple[StepDuration, ...], Field(max_length=ISLANDS_MAX)] = ()
    speed_spread: RatioBelowOne = 0.0
    diloco: Annotated[dict[str, Any], Field(max_length=100)] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """One training run of a comparison. ``key`` identifies everything that decides its result."""

    method: Method
    inner_lr: float
    key: str
    result: Trained
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A method at its own best inner learning rate. Losses are means over the seeds, except in ``of_seeds``.

    ``gap`` is decoupled's loss over this method's, minus one. ``gaps`` has it by seed.
    """

    method: Method
    inner_lr: float
    loss: float
    losses: dict[float, float]
    of_seeds: dict[int, float]
    gap: float
    gaps: dict[int, float]
    tokens: int
    goodput_ratio: float
    contributors_mean: float | None


def read(path: Path) -> tuple[JobSpec, Settings]:
    """Read a comparison file. Raises ConfigurationError (InvalidJobSpec for the job itself)."""
    document = read_document(path)
    spec = with_found_files(
        parse_job(completed(mapping(document.pop("job", {}), f"{path}: job"), EVERYTHING)), EVERYTHING
    )
    try:
        settings = Settings.model_validate(document)
        baselines.as_diloco(spec, settings.diloco)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:PROBLEMS_MAX])
        raise ConfigurationError(detail=f"{path}: {problems}. See deploy/configs/compare.yaml.") from error
    if len(set(settings.seeds)) < len(settings.seeds):
        raise ConfigurationError(detail=f"{path}: seeds has duplicates: {list(settings.seeds)}. Give each seed once.")
    if len(settings.step_durations) not in (0, spec.island_count):
        raise ConfigurationError(
            detail=f"{path}: step_durations has {len(settings.step_durations)} values, but the job has "
            f"{spec.island_count} islands. Give one value for each, or none."
        )
    return spec, settings


class Comparison:
    """The runs of one file. Finished runs are kept on disk."""

    def __init__(self, spec: JobSpec, settings: Settings, folder: Path, console: Console) -> None:
        self._spec, self._settings, self._console = spec, settings, console
        self._finished = FinishedRuns(folder, Run, console)
        self._finished.refuse_unwritable()

    def train(self, methods: Sequence[Method]) -> list[Run]:
        """Train every method at every learning rate from every seed, one seed after the other."""
        seeds = self._settings.seeds or (self._spec.seed,)
        plan = [(seed, method, lr) for seed in seeds for method in methods for lr in self._settings.inner_lrs]
        with progress(self._console) as shown:
            return [self._run(method, lr, seed, shown) for seed, method, lr in plan]

    def _run(self, method: Method, lr: float, seed: int, shown: Progress) -> Run:
        spec = baselines.with_inner_lr(self._spec, lr).model_copy(update={"seed": seed})
        if method == "diloco":
            spec = baselines.as_diloco(spec, self._settings.diloco)
        pace = Pace()
        if method == "decoupled":
            pace = Pace(self._settings.step_durations, self._settings.speed_spread)
        key = key_of(method, pace.spread, *pace.step_durations, spec.model_dump_json())
        if (finished := self._finished.get(key)) is not None:
            return finished
        task = shown.add_task(f"{method} at {lr:g}, seed {seed}", total=spec.token_budget)
        result = None
        for step in baselines.train(method, spec, pace):
            shown.update(task, completed=step.tokens)
            result = step.result
        assert result is not None
        return self._finished.keep(Run(method, lr, key, result, seed))


def judge(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each method, decoupled first. All must be trained at each learning rate from the same seeds."""
    ours = _best([run for run in runs if run.method == "decoupled"])[1]
    rows = []
    for method in METHODS:
        own = [run for run in runs if run.method == method]
        if own:
            lr, of_seeds = _best(own)
            of_lr = {run.inner_lr: run.result for run in own}
            one = of_lr[lr]
            rows.append(
                Row(
                    method=method,
                    inner_lr=lr,
                    loss=fmean(of_seeds.values()),
                    losses={each: fmean(_of_seeds(own, each).values()) for each in of_lr},
                    of_seeds=of_seeds,
                    gap=fmean(ours.values()) / fmean(of_seeds.values()) - 1,
                    gaps={seed: ours[seed] / loss - 1 for seed, loss in of_seeds.items()},
                    tokens=one.curve[-1][0],
                    goodput_ratio=one.goodput_ratio,
                    contributors_mean=one.contributors_mean,
                )
            )
    return rows


def _best(runs: Sequence[Run]) -> tuple[float, dict[int, float]]:
    """Return the learning rate with the lowest mean loss, and its losses by seed."""
    lr = min({run.inner_lr for run in runs}, key=lambda lr: (fmean(_of_seeds(runs, lr).values()), lr))
    return lr, _of_seeds(runs, lr)


def _of_seeds(runs: Sequence[Run], lr: float) -> dict[int, float]:
    return {run.seed: run.result.loss for run in runs if run.inner_lr == lr}


def table(spec: JobSpec, rows: Sequence[Row]) -> Table:
    sync = spec.synchroniser
    drawn = Table(
        title=f"{spec.name}: {spec.model.preset}, {spec.island_count} islands × {spec.horizon_steps} steps × "
        f"{spec.training.batch_size} × {spec.data.sequence_length} bytes; H = {sync.interval_steps}, P = {sync.fragments}",
        caption="held-out loss in nats per byte, mean over the seeds; gap: decoupled's loss relative to the method's, "
        "each at its best learning rate",
    )
    for column in (
        "method",
        "best inner lr",
        "loss",
        "gap",
        "by seed",
        "losses on the grid",
        "goodput",
        "islands/merge",
    ):
        drawn.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        grid = "  ".join(f"{lr:g}: {loss:.4f}" for lr, loss in row.losses.items())
        gap, gaps = "", "  ".join(f"{seed}: {loss:.4f}" for seed, loss in row.of_seeds.items())
        if row.method != "decoupled":
            gap, gaps = f"{row.gap:+.2%}", "  ".join(f"{seed}: {each:+.2%}" for seed, each in row.gaps.items())
        joined = "" if row.contributors_mean is None else f"{row.contributors_mean:.2f}"
        goodput = f"{row.goodput_ratio:.1%}"
        drawn.add_row(row.method, f"{row.inner_lr:g}", f"{row.loss:.4f}", gap, gaps, grid, goodput, joined)
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="atoll compare", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--baseline", action="append", choices=METHODS[1:], default=[])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    folder = options.runs
    try:
        spec, settings = read(options.file)
        folder = options.runs / f"compare-{spec.name}"
        rows = judge(Comparison(spec, settings, folder, console).train(("decoupled", *dict.fromkeys(options.baseline))))
    except KeyboardInterrupt:
        console.print(f"Stopped. Finished runs are kept in {folder}. Run the same command again to continue.")
        return 130
    except AtollError as error:
        console.print(str(error), style="red", markup=False)
        return 1 if isinstance(error, InternalError) else 2
    if options.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=2)
        print()
    else:
        Console().print(table(spec, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
