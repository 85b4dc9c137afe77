"""The systems that Decoupled DiLoCo is compared with, trained on the same tokens in the same order.

    decoupled        the job as specified: quorum, grace, token weights; its islands have the given ``Pace``
    equal-speeds     the same job, but all steps take the same time
    diloco           P = 1, K = M, τ = 0, no grace limit, plain mean: all wait at each outer step (arXiv:2311.08105)
    data-parallel    one model, every shard's batch in every step, gradients averaged at each step

Finished runs are kept on disk (``FinishedRuns``), so that an interrupted comparison continues where it was.

Islands, shards, seed, model and schedule are the same. An inner step of ``data-parallel`` takes the M batches that the
islands take in theirs. Source: arXiv:2604.21428, section on baselines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from learners import jax_trainer, model
from learners.text import Text
from orchestrator.errors import ConfigurationError, disk_remedy
from orchestrator.laboratory.multiplex import MultiplexedJob
from orchestrator.parameters import tensors
from orchestrator.specification.config import JobSpec
from orchestrator.specification.sections import SynchroniserSection
from orchestrator.system.plain import counted
from orchestrator.system.roots import EVERYTHING

Run = TypeVar("Run")
SCHEDULE = "by tokens"
"""How the schedule advances. It is part of the key, because earlier builds advanced it otherwise."""
Method = Literal["decoupled", "equal-speeds", "diloco", "data-parallel"]
TRANSFER_STEPS = 1.0
"""The time that a merged fragment takes to reach an island of the decoupled job, in inner steps. In diloco it is 0."""
METHODS: tuple[Method, ...] = ("decoupled", "equal-speeds", "diloco", "data-parallel")


@dataclass(frozen=True, slots=True)
class Pace:
    """Inner step times by island, 1 by default. Single steps vary by the ratio ``spread`` either way."""

    step_durations: tuple[float, ...] = ()
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a run: held-out ``loss`` in nats per token, and its ``curve`` of (tokens, loss).

    ``digest`` identifies the parameters bit for bit. ``contributors_mean`` is the mean number of islands in a merge, if
    there are merges. Runs kept by earlier builds have neither.
    """

    loss: float
    curve: tuple[tuple[int, float], ...]
    goodput_ratio: float
    digest: str = ""
    contributors_mean: float | None = None


@dataclass(frozen=True, slots=True)
class Advance:
    """Progress of a run: ``tokens`` trained so far, and the ``result`` at the end."""

    tokens: int
    result: Trained | None = None


def train(method: Method, spec: JobSpec, pace: Pace) -> Iterator[Advance]:
    """Train by ``method`` to the end of the budget. Only ``decoupled`` uses the pace."""
    if method == "data-parallel":
        return _data_parallel(spec)
    if method == "diloco":
        return _multiplexed(spec, transfer_steps=0.0, pace=Pace())
    return _multiplexed(spec, transfer_steps=TRANSFER_STEPS, pace=pace if method == "decoupled" else Pace())


def as_diloco(spec: JobSpec, changes: dict[str, Any]) -> JobSpec:
    """Return the same job as synchronous DiLoCo: P = 1, K = M, τ = 0. ``changes`` sets its own outer optimizer."""
    synchronous = {
        **spec.synchroniser.model_dump(),
        "fragments": 1,
        "router_interval_steps": None,
        "quorum": spec.island_count,
        "overlap_steps": 0,
        "grace_cap_steps": None,
        "averaging": "mean",
        "adoption": "replace",
        **changes,
    }
    return spec.model_copy(update={"synchroniser": SynchroniserSection.model_validate(synchronous)})


def with_inner_lr(spec: JobSpec, lr: float) -> JobSpec:
    inner = spec.training.inner_optimizer.model_copy(update={"lr": lr})
    return spec.model_copy(update={"training": spec.training.model_copy(update={"inner_optimizer": inner})})


def _multiplexed(spec: JobSpec, *, transfer_steps: float, pace: Pace) -> Iterator[Advance]:
    job = MultiplexedJob(
        spec,
        jax_trainer.create,
        transfer_steps=transfer_steps,
        step_durations=pace.step_durations,
        speed_spread=pace.spread,
    )
    return advances_of(job)


def advances_of(job: MultiplexedJob) -> Iterator[Advance]:
    """Run the job to its end."""
    tokens = 0
    for tokens in job.run():
        yield Advance(tokens)
    outcome = job.outcome
    goodput_ratio = outcome.goodput["goodput_ratio"]
    contributors_mean = outcome.statistics["contributors_mean"]
    yield Advance(tokens, Trained(outcome.loss, tuple(outcome.curve), goodput_ratio, outcome.digest, contributors_mean))


def _data_parallel(spec: JobSpec) -> Iterator[Advance]:
    """Train one model on the union of the islands' batches. Raises ConfigurationError if these differ in size."""
    for index, section in enumerate(spec.islands):
        if spec.batch_size_of(section) != spec.training.batch_size:
            raise ConfigurationError(
                detail=f"islands.{index}.batch_size is {section.batch_size}, but the data-parallel baseline splits each "
                "batch evenly. Leave it out, or compare without data-parallel."
            )
    if spec.training.batch_ramp is not None:
        raise ConfigurationError(
            detail="training.batch_ramp is set, but the data-parallel baseline trains whole batches. "
            "Leave it out, or compare without data-parallel."
        )
    plain = spec.model_dump(mode="json") | {"roots": EVERYTHING}
    count = spec.island_count
    wide = {**plain, "islands": plain["islands"][:1], "training": {**plain["training"]}}
    wide["islands"][0] = {**wide["islands"][0], "count": 1}
    wide["training"]["batch_size"] = spec.training.batch_size * count
    built = model.build(wide)
    trainer = jax_trainer.JaxTrainer(wide, built, draw=lambda _: Text(plain).union_draw(count))
    if built.initial_weights is not None:
        trainer.load(trainer.initial_parameters())
    names = list(trainer.tensor_shapes())
    evaluations = 8
    curve = []
    tokens = 0
    for step in range(spec.horizon_steps):
        tokens += trainer.step(step).token_count
        if (step + 1) % max(1, spec.horizon_steps // evaluations) == 0 or step + 1 == spec.horizon_steps:
            curve.append((tokens, trainer.evaluate(trainer.snapshot(names).arrays()).loss))
        yield Advance(tokens)
    digest = tensors.digest(trainer.snapshot(names).arrays())
    yield Advance(tokens, Trained(curve[-1][1], tuple(curve), 1.0, digest))


class FinishedRuns(Generic[Run]):
    """The finished runs of one folder, each a JSON line in ``runs.jsonl``. Only a run in progress is lost when the process
    ends. ``kind`` is a dataclass with a ``key`` that identifies everything which decides the run's result.

    Lines that cannot be read, as after a full disk, count as runs that were not finished; a note says so. Raises
    ConfigurationError if the folder cannot be read or written.
    """

    def __init__(self, folder: Path, kind: type[Run], console: Console) -> None:
        self._file = folder / "runs.jsonl"
        self._runs: dict[str, Any] = {}
        read, unread = TypeAdapter(kind), 0
        with _disk_of(self._file):
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._file.read_bytes().split(b"\n") if self._file.exists() else [b""]
        self._is_torn = bool(lines[-1])
        for line in filter(None, lines):
            try:
                run: Any = read.validate_json(line)
            except ValidationError:
                unread += 1
            else:
                self._runs[run.key] = run
        if unread:
            note = f"{self._file}: {counted(unread, 'line')} cannot be read. These trainings count as not finished."
            console.print(note, markup=False, highlight=False)

    def get(self, key: str) -> Run | None:
        return self._runs.get(key)

    def refuse_unwritable(self) -> None:
        """Raise ConfigurationError now if no run could be written, not after hours of training."""
        with _disk_of(self._file), self._file.open("ab"):
            pass

    def keep(self, run: Run) -> Run:
        """Write the run to disk. It replaces an earlier run with the same key."""
        self._runs[run.key] = run  # type: ignore[attr-defined]
        with _disk_of(self._file), self._file.open("a", encoding="utf-8") as lines:
            lines.write("\n" * self._is_torn + json.dumps(asdict(run)) + "\n")  # type: ignore[call-overload]
        self._is_torn = False
        return run


@contextmanager
def _disk_of(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"{error.strerror or error}. {disk_remedy(error)}, or name another folder."
        raise ConfigurationError(detail=f"{file} cannot be read or written: {problem}") from error


def key_of(*facts: object) -> str:
    """Return a short digest of everything that decides a run's result."""
    return hashlib.sha256(" ".join(map(str, (SCHEDULE, *facts))).encode()).hexdigest()[:16]


def progress(console: Console) -> Progress:
    """Return progress bars, one for each run, in tokens, with the remaining time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
