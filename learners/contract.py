"""The trainer's contract with the island's loop: the seam between the protocol and the mathematics.

A ``Trainer`` owns parameters, inner optimizer and data cursor on this island's devices. It knows nothing of fragments'
schedules, of versions, of the synchroniser or of Ray; the loop (``learners.loop``) knows those and nothing of JAX. Two
implementations: ``learners.jax_trainer`` (real) and ``learners.synthetic`` (right sizes and timing, no JAX).

A ``Batch`` is what a trainer trains on in one step; ``learners.text`` returns it.

Parameters cross this seam as ``dict[str, numpy.ndarray]``: names of pieces (``orchestrator.parameters.pieces``) to float32
arrays. A piece is a tensor, or a part of one along an axis, as in ``embed[0:512]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from orchestrator.core.messages import Broken
from orchestrator.core.vocabulary import NO_FLAWS, DataFlaws, FailureExtent, Preference, SourceLoss
from orchestrator.errors import ConfigurationError, UnreadableData, in_words
from orchestrator.parameters.pieces import Roles
from orchestrator.replica.work import ExpertLoad

Arrays = dict[str, np.ndarray]


def broken_by(error: BaseException, step: int | None = None) -> Broken:
    """Return the report for an island's failure; ``step`` is the inner step that failed.

    A wrong specification would fail again at every start, so the report says that restarting is useless.
    """
    if not isinstance(error, ConfigurationError):
        return Broken(in_words(error) if step is None else f"{in_words(error)} (at step {step:,})")
    extent = FailureExtent.JOB if isinstance(error, UnreadableData) else FailureExtent.ISLAND
    return Broken(in_words(error), extent)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step. All arrays have the shape (rows, sequence_length + 1), and say something of the same tokens.

        tokens     int32    all but a row's last are read, all but its first are predicted
        weights    float32  how much the loss of predicting this token counts; None: 1
        segments   int32    the document of this token, counted from 1 in each row; 0: padding. A token sees only earlier
                            tokens of its own segment. None: a row is one document
        positions  int32    the place of this token in its document, from 0, for rotary or learned positions; None: the
                            place in its row

    The loss of a batch, in nats per token, is Σ w·(−ln p) / Σ w over all targets of all rows, where w is ``target_weights``.
    So a long answer counts as much as its tokens, and not as much as a short one. Works with arrays of NumPy, JAX and
    PyTorch; ``learners.models.model`` makes it a pytree of JAX.
    """

    tokens: Any
    weights: Any = None
    segments: Any = None
    positions: Any = None

    @classmethod
    def of(cls, tokens: Any) -> Batch:
        """Return tokens alone as a batch, and a batch as it is."""
        return tokens if isinstance(tokens, Batch) else cls(tokens)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def inputs(self) -> Batch:
        """All that is read: (rows, sequence_length) each."""
        return self.mapped(lambda array: array[:, :-1])

    @property
    def targets(self) -> Any:
        """The tokens to predict: (rows, sequence_length) int32."""
        return self.tokens[:, 1:]

    @property
    def target_weights(self) -> Any:
        """The weights of ``targets``, (rows, sequence_length), or None: 0 for padding and a document's first token."""
        if self.segments is None:
            return None if self.weights is None else self.weights[:, 1:]
        follows = (self.segments[:, 1:] == self.segments[:, :-1]) & (self.segments[:, 1:] > 0)
        return follows * (1.0 if self.weights is None else self.weights[:, 1:])

    def mapped(self, change: Callable[[Any], Any]) -> Batch:
        """Return the batch with ``change`` applied to each of its arrays."""
        arrays = (self.tokens, self.weights, self.segments, self.positions)
        return Batch(*(None if array is None else change(array) for array in arrays))


def stacked(batches: Sequence[np.ndarray | Batch]) -> np.ndarray | Batch:
    """Return the rows of all batches as one batch."""
    if not isinstance(batches[0], Batch):
        return np.concatenate(batches)  # type: ignore[arg-type]  # all are of one kind
    every = [Batch.of(batch) for batch in batches]
    names = (field.name for field in fields(Batch))
    columns = ([getattr(batch, name) for batch in every] for name in names)
    return Batch(*(None if column[0] is None else np.concatenate(column) for column in columns))


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one inner step. ``loss`` is in nats per token; ``flaws`` are those of all text read so far.

    A trainer may leave out the rest. ``learning_rate`` is the one that the step used, and ``gradient_norm`` the global L2
    norm of its gradient, before clipping. ``ideal_seconds`` is the shortest time in which the island's devices could do the
    operations of the model in this step (``island_spec.IslandSpec.ideal_seconds``). ``expert_load`` is that of a mixture.
    """

    token_count: int
    loss: float
    flaws: DataFlaws = NO_FLAWS
    learning_rate: float | None = None
    gradient_norm: float | None = None
    ideal_seconds: float | None = None
    expert_load: ExpertLoad | None = None


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Mean loss, in nats per token, over the first ``sequence_count`` held-out sequences, which took ``seconds``.

    ``bits_per_byte`` is the same loss per byte of text, which is comparable between tokenizers; None if the bytes of a
    token are unknown. ``sources`` has the loss of each source if the job has several. ``preference`` is there if the job
    learns from pairs; then the loss is per pair.
    """

    loss: float
    sequence_count: int
    seconds: float
    bits_per_byte: float | None = None
    sources: tuple[SourceLoss, ...] = ()
    preference: Preference | None = None


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a piece that the devices of this process hold.

    ``bounds`` are start and stop along every axis, in the piece's own indices: a block, which is empty if only other
    processes' devices hold the piece. ``processes`` have the same part, in ascending order; this one is among them.
    ``shape`` is that of the whole piece, used to refuse a checkpoint of another model; None if the trainer does not provide
    it.
    """

    bounds: tuple[tuple[int, int], ...]
    processes: tuple[int, ...]
    shape: tuple[int, ...] | None = None


class Snapshot(Protocol):
    """A copy of some pieces at the moment it was requested, on its way to host memory."""

    def arrays(self) -> Arrays:
        """Wait for the copy and return it. Any thread may call it, more than once."""
        ...


@runtime_checkable
class FirstRun(Protocol):
    """A trainer that may leave a part of ``warm_up`` to do while the island's state is on its way."""

    def first_run(self) -> None:
        """Finish what ``warm_up`` has left. Called once, before a state is loaded."""
        ...


class Trainer(Protocol):
    """One island's model, inner optimizer and data.

    ``create(spec, shard_index, shard_count)`` builds it. ``spec`` is the job specification as plain data (the output of
    ``JobSpec.island_document``), which ``learners.island_spec.IslandSpec.of`` reads as typed fields. Its data is shard
    ``shard_index`` of ``shard_count`` of the training split.
    """

    @property
    def device_count(self) -> int: ...

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of all tensors, which are the same on every island."""
        ...

    def roles(self) -> Roles:
        """Return the roles of tensors whose names do not show them; the same on every island."""
        ...

    def initial_parameters(self, pieces: Iterable[str] | None = None) -> Arrays:
        """Return the tensors of version 0, whole or these pieces of them.

        They depend only on the specification and its seed.
        """
        ...

    def warm_up(self) -> None:
        """Compile what a step needs, without training."""
        ...

    def step(self, schedule_step: int) -> StepResult:
        """Take one inner step with the schedule's learning rate at ``schedule_step``. Returns when it is done."""
        ...

    def snapshot(self, pieces: Iterable[str]) -> Snapshot:
        """Start copying these pieces to the host. The next step may begin at once."""
        ...

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace these pieces. The inner optimizer's state does not change."""
        ...

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Add to these pieces in place, in float32. The inner optimizer's state does not change."""
        ...

    def export_state(self, pieces: Iterable[str] | None = None) -> Snapshot:
        """Copy everything that a peer needs to continue from here except the data cursor, by plain names.

        With ``pieces``, only what belongs to these, and what belongs to no tensor, such as a count of steps. The next step
        may begin at once. The devices never hold a copy of the whole.
        """
        ...

    def import_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a peer's state, whole or as all of its pieces. The data cursor does not change."""
        ...

    def cursor(self) -> int:
        """Return how many batches of its shard this island has drawn."""
        ...

    def seek(self, cursor: int) -> None:
        """Continue in the data as if ``cursor`` batches had been drawn."""
        ...

    def take_shard(self, index: int) -> None:
        """Draw from this shard from now on. Called on a standby that is promoted before its first step."""
        ...

    def evaluate(self, arrays: Mapping[str, np.ndarray], limit_s: float = inf) -> HeldOutLoss:
        """Return the loss of these tensors, or of all their pieces, on the held-out split; on fewer sequences if time is
        short.

        What is trained does not change. ``learners.held_out`` does the counting.
        """
        ...

    def unigram_loss(self) -> float:
        """Return the held-out loss of the best model that ignores context, which training has to beat."""
        ...


class SpreadTrainer(Trainer, Protocol):
    """A trainer for islands with several processes (``hosts`` above 1). Each process has one."""

    def held(self, piece: str) -> HeldPart:
        """Return the part of this piece that this process holds: all of it if the island is one process.

        ``snapshot`` and ``export_state`` return these parts. ``load``, ``add`` and ``import_state`` accept them, or whole
        pieces; so does ``evaluate``, but for the pieces of one tensor either all or none.
        """
        ...

    def held_state(self, pieces: Iterable[str]) -> Mapping[str, HeldPart]:
        """Return the parts that this process holds of what ``export_state`` returns for these pieces, by the names there.

        Called only if some piece is on several processes (``held``). Whole tensors count as pieces.
        """
        ...


class AdjustableTrainer(Trainer, Protocol):
    """A trainer that can step at a ratio of the schedule's learning rate, as `atoll set JOB lr=…` wants it."""

    def step(self, schedule_step: int, lr_ratio: float = 1.0) -> StepResult: ...


def take_step(trainer: Trainer, schedule_step: int, lr_ratio: float) -> StepResult:
    """Take one inner step, at this ratio of the schedule's learning rate. Only adjustable trainers get another than 1."""
    if lr_ratio == 1.0:
        return trainer.step(schedule_step)
    return cast(AdjustableTrainer, trainer).step(schedule_step, lr_ratio)


class ProfiledTrainer(Trainer, Protocol):
    """A trainer of which `atoll profile` can record a trace: ``profiler`` is "jax" or "torch", by what its steps run in."""

    profiler: str


class FragmentwiseTrainer(Trainer, Protocol):
    """A trainer that can measure Θ without having all of it on the host. Override ``evaluate`` and this method together."""

    def evaluate_fragments(self, fragments: Iterable[Mapping[str, np.ndarray]], limit_s: float = inf) -> HeldOutLoss:
        """Do the same as ``evaluate`` with tensors, or pieces of them, that arrive by fragment. Each is requested once."""
        ...


class HostCopy:
    """A ``Snapshot`` that is complete from the start."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def arrays(self) -> Arrays:
        return dict(self._arrays)
