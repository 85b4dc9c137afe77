"""The published tables whose cells are trainings: ``quality`` against M, H and size, and ``ablations``.

    python -m orchestrator.laboratory.trained_tables TABLE… [--size 0.1M] [--only TEXT] [--into DIR] [--estimate]

`atoll reproduce quality` runs this and draws what it writes. A cell needs one or more trainings in virtual time, and
cells share them. The cost is announced first, from the measured speed of a step. Each finished training is a line of
DIR/runs.jsonl at once, so Ctrl-C loses only the one in progress, and the same command goes on. DIR/TABLE.json holds every
cell whose trainings are finished, whichever call did them.

The tables follow the papers where a small model allows it: 20 tokens per parameter, a cosine schedule, one batch of the same
tokens for every M, β2 = 0.99. What they tuned for each model is here one value for all, chosen at the smallest size
(decision 0259). Published figures are in ``simulation.published``. Sources: arXiv:2503.09799, arXiv:2604.21428.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID

from learners import jax_trainer
from orchestrator.errors import AtollError, ConfigurationError, InternalError
from orchestrator.laboratory import baselines
from orchestrator.laboratory.baselines import Advance, FinishedRuns, Trained, key_of, progress
from orchestrator.laboratory.multiplex import MultiplexedJob, exact_channel
from orchestrator.laboratory.train_tape import warm_trainer
from orchestrator.laboratory.variants import CUTS, ONE_BIT, LossyChannel, by_failures, scavenging
from orchestrator.parameters.codec.registry import EXACT
from orchestrator.simulation import published
from orchestrator.simulation.published import DATA_PARALLEL, LEARNER_COUNTS, Cell, Unit, by_learners
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.system.disk import LocalDisk
from orchestrator.system.roots import EVERYTHING


@dataclass(frozen=True, slots=True)
class Size:
    """A decoder over bytes, and the sequences of a step of all learners together."""

    width: int
    layer_count: int
    hidden_size: int
    sequence_length: int
    sequences: int

    @property
    def parameters(self) -> int:
        layer = 4 * self.width**2 + 3 * self.width * self.hidden_size
        return 256 * self.width + self.layer_count * layer

    @property
    def tokens(self) -> int:
        return TOKENS_PER_PARAMETER * self.parameters


TOKENS_PER_PARAMETER = 20
SIZES: Mapping[str, Size] = {
    "0.01M": Size(16, 2, 48, 32, 8),
    "0.03M": Size(32, 2, 96, 64, 8),
    "0.1M": Size(48, 3, 128, 64, 16),
    "0.3M": Size(80, 4, 208, 128, 16),
    "1M": Size(128, 5, 344, 128, 32),
    "3M": Size(192, 7, 512, 128, 64),
}
SMALLEST = next(iter(SIZES))
HEAD_SIZE = 16
Kind = Literal["adamw", "muon"]
KINDS: tuple[Kind, ...] = ("adamw", "muon")
Method = Literal["data-parallel", "diloco", "decoupled", "failures", "calm"]
STEADY: Method = "data-parallel"
LR_AT_32 = 0.02
LR_MAX: Mapping[Kind, float] = {"adamw": 0.02, "muon": 0.04}
"""The best inner learning rates of data-parallel at width 32 and 16. Wider models have as many times smaller ones."""
OUTER = {"kind": "nesterov", "lr": 0.9, "momentum": 0.3}
"""The best of four at the smallest size with AdamW and M = 4. The papers' momentum of 0.9 needs hundreds of rounds."""
SPEED_GAP, SPREAD = published.SPEED_GAP, published.SPREAD
GPU_STEP_S, GPU_FLOPS = 0.002, 5e13
"""Assumed for the announcement: a step takes a GPU as long as the launches of its kernels, and its arithmetic besides."""


@dataclass(frozen=True, slots=True)
class Training:
    """One training run; the fields decide its result. Defaults are those of the ablations.

    ``diloco`` is synchronous, with P = 1 and the plain mean. ``decoupled`` has all learners in each merge unless ``quorum``
    is set. ``failures`` is decoupled by the tape of a simulated fleet, of which ``calm`` has no failures. ``extra`` is how
    much more a step of data-parallel processes from half of the tokens on.
    """

    size: str
    method: Method
    learners: int = 1
    kind: Kind = "adamw"
    interval: int = 24
    fragments: int = 8
    averaging: str = "radial"
    overlap: int = 2
    quorum: int = 0
    grace: float | None = None
    adoption: str = "rebase"
    two_speeds: bool = False
    cut: str = "pieces"
    coding: str = ""
    feedback: bool = False
    extra: float = 0.0

    @property
    def name(self) -> str:
        plain = Training(self.size, self.method)
        changes = [
            f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return ", ".join([self.size, self.method, *changes])

    @property
    def flops(self) -> float:
        return 6.0 * SIZES[self.size].parameters * SIZES[self.size].tokens

    @property
    def batch(self) -> int:
        """Return the sequences of one learner's step: at least one."""
        return max(1, SIZES[self.size].sequences // self.learners)

    @property
    def steps(self) -> int:
        """Return the steps of each learner."""
        size = SIZES[self.size]
        return size.tokens // (self.batch * self.learners * size.sequence_length)

    def spec(self, seed: int, steps: int | None = None) -> JobSpec:
        """Return the job, with another length if ``steps`` is given."""
        size, steps = SIZES[self.size], steps or self.steps
        heads = size.width // HEAD_SIZE
        synchronous = self.method in ("diloco", DATA_PARALLEL)
        fragments = 1 if synchronous else self.fragments
        document = {
            "name": "trained-tables",
            "seed": seed,
            "model": {
                "decoder": {
                    "width": size.width,
                    "layer_count": size.layer_count,
                    "head_count": heads,
                    "key_value_head_count": heads,
                    "head_size": HEAD_SIZE,
                    "hidden_size": size.hidden_size,
                    "query_key_norm": True,
                },
                "compute_dtype": "float32",
            },
            "data": {"source": "builtin", "sequence_length": size.sequence_length},
            "training": {
                "batch_size": self.batch,
                "inner_optimizer": {
                    "kind": self.kind,
                    "lr": min(LR_MAX[self.kind], LR_AT_32 * 32 / size.width),
                    "beta2": 0.99,
                    "warmup_steps": steps // 20,
                },
            },
            "synchroniser": {
                "fragments": fragments,
                "interval_steps": self.interval,
                "overlap_steps": 0 if synchronous else self.overlap,
                "quorum": self.quorum or self.learners,
                "quorum_ratio": 0.0,
                "grace_cap_steps": self.grace,
                "averaging": "mean" if synchronous else self.averaging,
                "adoption": "replace" if synchronous else self.adoption,
                "outer_optimizer": OUTER,
                "wire": EXACT,
            },
            "islands": [{"node_group": "learners", "count": self.learners}],
            "budget": {"steps": steps},
            "evaluation": {"every_merges": max(1, fragments * steps // self.interval // 4), "sequences": 512},
        }
        return parse_job(document)


def train(training: Training, seed: int, steps: int | None = None) -> Iterator[Advance]:
    """Train to the end of the budget. ``steps`` makes it shorter."""
    spec = training.spec(seed, steps)
    if training.method == DATA_PARALLEL:
        if training.extra:
            return scavenging(spec, training.extra)
        return baselines.train("data-parallel", spec, baselines.Pace())
    if training.method in ("failures", "calm"):
        return by_failures(spec, seed, calm=training.method == "calm")
    return _in_virtual_time(training, spec)


def _in_virtual_time(training: Training, spec: JobSpec) -> Iterator[Advance]:
    count = training.learners
    durations = [1.0 if n < count / 2 else SPEED_GAP for n in range(count)] if training.two_speeds else []
    job = MultiplexedJob(
        spec,
        warm_trainer,
        transfer_steps=0.0 if training.method == "diloco" else float(training.overlap if training.quorum == 0 else 1),
        step_durations=durations,
        speed_spread=SPREAD if training.two_speeds else 0.0,
        cut=CUTS[training.cut],
        channel=LossyChannel(training.coding, training.feedback) if training.coding else exact_channel,
    )
    return baselines.advances_of(job)


# ── the tables ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Wanted:
    """A cell without our figure, the trainings that it needs, and how the figure follows from them."""

    cell: Cell
    trainings: tuple[Training, ...]
    figure: Callable[[Sequence[Trained]], float]

    @property
    def about(self) -> str:
        """Return the name in which ``--only`` looks for its text."""
        return f"{self.cell.row}, {self.cell.column}"


def quality(size: str, seed: int) -> Iterator[Wanted]:
    """Yield the loss of data-parallel, and how much more DiLoCo has, for each inner optimizer."""
    for kind in KINDS:
        row, is_published = f"{size}, {kind}", kind == "adamw"
        baseline = Training(size, STEADY, kind=kind)
        yield Wanted(Cell(row, DATA_PARALLEL, None, at=0.5, unit=Unit.NATS), (baseline,), _loss)
        ours = [Training(size, "diloco", learners, kind, 30, 1) for learners in LEARNER_COUNTS]
        smallest_published = next(iter(published.SCALING_TABLE_4.values()))[1:]
        for training, change in zip(ours, smallest_published, strict=True):
            cell = Cell(row, by_learners(training.learners), None, change if is_published else None, training.learners)
            yield Wanted(cell, (training, baseline), _more)
        theirs = published.EXPONENT_OF_M if is_published else None
        yield Wanted(Cell(row, "exponent of M", None, theirs, unit=Unit.EXPONENT), tuple(ours), exponent)
        for (learners, interval), change in published.STREAMING_TABLE_6.items():
            cell = Cell(row, by_learners(learners, interval), None, change if is_published else None)
            yield Wanted(cell, (Training(size, "diloco", learners, kind, interval, 1), baseline), _more)


def ablations(size: str, seed: int) -> Iterator[Wanted]:
    """Yield each setting against the one that it replaces."""

    def cell(what: str, training: Training, theirs: float | None = None, *, is_secondary: bool = True) -> Cell:
        column = f"M = {training.learners}"
        return Cell(f"{size}: {what}", column, None, theirs, training.learners, is_secondary=is_secondary)

    steady = Training(size, STEADY)
    for extra, theirs in ((0.25, 60.1 / 60.5 - 1.0), (0.5, 60.1 / 60.0 - 1.0), (1.0, 0.0)):
        grown = replace(steady, extra=extra)
        own = replace(
            cell(f"data-parallel, +{100 * extra:.0f} % from half on", grown, theirs), column=DATA_PARALLEL, at=0.5
        )
        yield Wanted(own, (grown, steady), _more)
    by_mean: tuple[tuple[int, float | None], ...] = ((4, None), (8, 55.4 / 54.1 - 1.0), (16, 54.5 / 52.7 - 1.0))
    for learners, worse in by_mean:
        radial = Training(size, "decoupled", learners)
        mean = replace(radial, averaging="mean")
        yield Wanted(cell("mean instead of radial averaging", mean, worse), (mean, radial), _more)
    base = Training(size, "decoupled", 8)
    waiting = replace(base, overlap=4)
    any_one = replace(waiting, quorum=1, grace=0.0, two_speeds=True)
    speeds: tuple[tuple[str, Training, float, float | None], ...] = (
        ("two speeds, K = 8, waiting", waiting, 0.84, None),
        ("two speeds, K = 1", any_one, 1.0, 54.4 / 51.4 - 1.0),
        ("two speeds, K = 1 with grace", replace(any_one, grace=3.0), 1.0, 54.4 / 55.3 - 1.0),
        ("two speeds, K = 1, replace", replace(any_one, adoption="replace"), 1.0, 54.4 / 51.4 - 1.0),
        (
            "two speeds, K = 1 with grace, replace",
            replace(any_one, grace=3.0, adoption="replace"),
            1.0,
            54.4 / 55.3 - 1.0,
        ),
    )
    for what, training, goodput, worse in speeds:
        own = cell(what, training, goodput)
        own = replace(own, column="goodput", at=None, unit=Unit.PERCENT)
        yield Wanted(own, (training,), _waiting(seed) if training is waiting else _goodput)
        if training is not waiting:
            yield Wanted(cell(what, training, worse), (training, waiting), _more)
    for coding, theirs in (("bfloat16", 0.0009), ("int4", 0.0009), ("int2", 0.32), (ONE_BIT, 0.83)):
        for feedback in (False, True):
            coded = replace(base, coding=coding, feedback=feedback)
            words = f"{coding} {'with' if feedback else 'without'} error feedback"
            yield Wanted(cell(words, coded, None if feedback else theirs), (coded, base), _more)
    one = replace(base, overlap=1)
    for steps in (2, 5, 10):
        later = replace(base, overlap=steps)
        yield Wanted(cell(f"τ = {steps} instead of 1", later, 0.002, is_secondary=False), (later, one), _more)
    few = replace(base, fragments=SIZES[size].layer_count)
    for pieces, cut, theirs in ((few, "layers", 55.4 / 55.3 - 1.0), (base, "tensors", 0.0)):
        whole = replace(pieces, cut=cut)
        yield Wanted(cell(f"whole {cut} instead of equal fragments", whole, theirs), (whole, pieces), _more)
    lost: tuple[tuple[int, float | None], ...] = ((8, 70.1 / 69.8 - 1.0), (16, None))
    for learners, worse in lost:
        failing = Training(size, "failures", learners, overlap=4, quorum=1, grace=3.0)
        calm = replace(failing, method="calm")
        yield Wanted(cell("failures of 150,000 chips per learner", failing, worse), (failing, calm), _more)


TABLES = {"quality": quality, "ablations": ablations}


def _loss(results: Sequence[Trained]) -> float:
    return results[0].loss


def _more(results: Sequence[Trained]) -> float:
    return results[0].loss / results[1].loss - 1.0


def _goodput(results: Sequence[Trained]) -> float:
    return results[0].goodput_ratio


def _waiting(seed: int) -> Callable[[Sequence[Trained]], float]:
    return lambda _: published.waiting_goodput(seed)


def exponent(results: Sequence[Trained]) -> float:
    """Return b of L = a · M^b, by least squares of the logarithms."""
    x = np.log(np.array(LEARNER_COUNTS, np.float64))
    y = np.log(np.array([result.loss for result in results]))
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


@dataclass(frozen=True, slots=True)
class Run:
    """A finished training. ``seconds`` is processor time. ``key`` identifies everything that decides the result."""

    key: str
    name: str
    seed: int
    tokens: int
    seconds: float
    date: str
    result: Trained


class Runs:
    """The trainings of one seed. Finished ones are in ``folder``; ``steps`` makes each shorter, as tests do."""

    def __init__(self, folder: Path, seed: int, console: Console, steps: int | None = None) -> None:
        self._finished, self.seed, self._steps = FinishedRuns(folder, Run, console), seed, steps

    def refuse_unwritable(self) -> None:
        self._finished.refuse_unwritable()

    def key(self, training: Training) -> str:
        return key_of(*asdict(training).values(), training.spec(self.seed, self._steps).model_dump_json())

    def get(self, training: Training) -> Run | None:
        return self._finished.get(self.key(training))

    def train(self, training: Training, show: Callable[[int], None]) -> Run:
        began, result, tokens = process_time(), None, 0
        for advance in train(training, self.seed, self._steps):
            tokens, result = advance.tokens, advance.result
            show(tokens)
        assert result is not None
        seconds = round(process_time() - began, 1)
        date = datetime.now(UTC).date().isoformat()
        return self._finished.keep(Run(self.key(training), training.name, self.seed, tokens, seconds, date, result))

    def cell(self, wanted: Wanted) -> Cell:
        """Return the cell, with our figure if its trainings are finished."""
        finished = [self.get(training) for training in wanted.trainings]
        results = [one.result for one in finished if one is not None]
        complete = len(results) == len(wanted.trainings)
        return replace(wanted.cell, ours=wanted.figure(results)) if complete else wanted.cell


def document(table: str, runs: Runs, rate: Rate | None) -> dict[str, Any]:
    """Return the table as plain data: our rows of sizes with a figure, and of the smallest. Notes say what is missing."""
    rows: list[Cell] = []
    notes = ["A dash is not run."]
    for size in SIZES:
        wanted = list(TABLES[table](size, runs.seed))
        cells = [runs.cell(one) for one in wanted]
        if size == SMALLEST or any(cell.ours is not None for cell in cells):
            rows += cells
        left = [training for training in _trainings(wanted) if runs.get(training) is None]
        if left and rate is not None:
            notes.append(f"Not run at {size}: {len(left)} trainings, {rate.cost(left).words}.")
    published_rows = list(published.quality_published()) if table == "quality" else []
    return published.TRAINED[table].plain([*rows, *published_rows], runs.seed, notes)


def _trainings(wanted: Sequence[Wanted]) -> list[Training]:
    return list(dict.fromkeys(training for one in wanted for training in one.trainings))


# ── the cost ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Rate:
    """The measured speed: ``step_s`` is the time of a tiny step by optimizer, and ``flops`` the FLOP/s of a large one."""

    step_s: Mapping[Kind, float]
    flops: float

    def seconds(self, training: Training) -> float:
        count = training.steps * training.learners
        return START_S + count * self.step_s[training.kind] + training.flops / self.flops

    def cost(self, trainings: Sequence[Training]) -> Cost:
        tokens = sum(SIZES[training.size].tokens for training in trainings)
        steps = sum(training.steps * training.learners for training in trainings)
        gpu_s = GPU_STEP_S * steps + sum(one.flops for one in trainings) / GPU_FLOPS
        return Cost(tokens, steps, sum(map(self.seconds, trainings)), gpu_s)


@dataclass(frozen=True, slots=True)
class Cost:
    """Says what trainings cost, in seconds of one processor like this one, or of a GPU with the assumed figures."""

    tokens: int
    steps: int
    processor_s: float
    gpu_s: float

    @property
    def words(self) -> str:
        return (
            f"{self.tokens / 1e6:,.1f}M tokens in {self.steps:,} steps, about {_span(self.processor_s)} of one processor "
            f"like this one, or {_span(self.gpu_s)} of a GPU at {1000 * GPU_STEP_S:g} ms a step (assumed, not measured)"
        )


START_S = 10.0
"""s: what a training takes before its first step."""


def _span(seconds: float) -> str:
    for unit, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2.0 * unit:
            return f"{seconds / unit:,.0f} {name}"
    return f"{max(1.0, seconds):,.0f} s"


@cache
def measured_rate() -> Rate:
    """Time a few steps: one sequence of the smallest model by each optimizer, and a step of the model of 0.3M."""
    count, large = SIZES[SMALLEST].sequences, SIZES["0.3M"]
    tiny = {kind: _step_s(Training(SMALLEST, STEADY, learners=count, kind=kind)) for kind in KINDS}
    flops = 6.0 * large.parameters * large.sequences * large.sequence_length
    return Rate(tiny, flops / _step_s(Training("0.3M", STEADY)))


def _step_s(training: Training, steps: int = 5) -> float:
    trainer = jax_trainer.create(training.spec(0).model_dump(mode="json") | {"roots": EVERYTHING}, 0, training.learners)
    trainer.step(0)
    began = perf_counter()
    for step in range(steps):
        trainer.step(step)
    return (perf_counter() - began) / steps


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="atoll reproduce", description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+", choices=list(TABLES), metavar="TABLE")
    parser.add_argument("--size", action="append", choices=[*SIZES, "all"], default=[])
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--into", type=Path, default=Path("reproduced"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--json", action="store_true", help="print the estimate as JSON")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    sizes = list(SIZES) if "all" in options.size else options.size or [SMALLEST]
    try:
        runs = Runs(options.into, options.seed, console, options.steps)
        wanted = [
            one
            for table in options.tables
            for size in SIZES
            if size in sizes
            for one in TABLES[table](size, options.seed)
            if not options.only or any(text in one.about for text in options.only)
        ]
        if not wanted:
            raise ConfigurationError(
                detail=f"--only {options.only[0]!r} is in no cell's name. Use a word of a row or column."
            )
        needed = _trainings(wanted)
        left = [one for one in needed if options.again or runs.get(one) is None]
        if left and not options.estimate:
            runs.refuse_unwritable()
        if options.estimate:
            _announce(left, len(needed), options.into, measured_rate() if left else None, console, as_json=options.json)
            return 0
        rate = measured_rate()
        _announce(left, len(needed), options.into, rate, console)
        return _trained(runs, left, options.tables, options.into, rate, console)
    except OSError as error:
        console.print(f"--into {options.into}: {error.strerror}. Name another folder.", style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted: no training has begun; the same command begins anew", highlight=False)
        return 130
    except AtollError as error:
        console.print(str(error), style="red", markup=False)
        return 1 if isinstance(error, InternalError) else 2


def _announce(
    left: Sequence[Training], count: int, into: Path, rate: Rate | None, console: Console, *, as_json: bool = False
) -> None:
    """Say what the trainings cost that are left of ``count``. ``rate`` may be None if none is."""
    cost = rate.cost(left) if rate is not None else Cost(0, 0, 0.0, 0.0)
    if as_json:
        print(json.dumps({"trainings": count, "trainings_left": len(left), **asdict(cost)}, indent=2))
    elif left:
        console.print(f"{len(left)} of {count} trainings to do: {cost.words}", markup=False, highlight=False)
    else:
        console.print(f"All {count} trainings are stored in {into}: none to do", markup=False, highlight=False)


def _trained(
    runs: Runs, left: Sequence[Training], tables: Sequence[str], into: Path, rate: Rate, console: Console
) -> int:
    """Do the trainings. The tables are stored anew after each."""
    done = 0
    _store(runs, tables, into, rate)
    try:
        with progress(console) as shown:
            for training in left:
                task = shown.add_task(training.name, total=SIZES[training.size].tokens)
                finished = runs.train(training, partial(_show, shown, task))
                done += 1
                _store(runs, tables, into, rate)
                if not console.is_terminal:
                    console.print(
                        f"{done} of {len(left)}: {training.name}: {finished.result.loss:.4f}, {finished.seconds:,.0f} s",
                        highlight=False,
                    )
    except KeyboardInterrupt:
        console.print(
            f"interrupted: {done} of {len(left)} trainings are finished and kept in {into}; the same command goes on",
            highlight=False,
        )
        return 130
    return 0


def _show(shown: Progress, task: TaskID, tokens: int) -> None:
    shown.update(task, completed=tokens)


def _store(runs: Runs, tables: Sequence[str], into: Path, rate: Rate) -> None:
    for table in tables:
        text = json.dumps(document(table, runs, rate), indent=1, ensure_ascii=False) + "\n"
        LocalDisk().replace(into / f"{table}.json", text.encode())


if __name__ == "__main__":
    sys.exit(main())
