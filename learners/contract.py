"""The trainer's contract with the island's loop: the seam between the protocol and the mathematics.

A ``Trainer`` owns parameters, inner optimizer and data cursor on this island's devices. It knows nothing of fragments'
schedules, of versions, of the synchroniser or of Ray; the loop (``learners.loop``) knows those and nothing of JAX. Two
implementations: ``learners.jax_trainer`` (real) and ``learners.synthetic`` (right sizes and timing, no JAX).

Parameters cross this seam as ``dict[str, numpy.ndarray]``: names of pieces (``orchestrator.parameters.pieces``) to float32
arrays. A piece is a tensor, or a part of one along an axis, as in ``embed[0:512]``.

A snapshot that is in host memory when it is taken, whole.

What an island's own failure is the end of, by its kind. Decides nothing else, and what follows is the core's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np

from orchestrator.core.messages import Broken
from orchestrator.core.vocabulary import NO_FLAWS, DataFlaws, FailureExtent, SourceLoss
from orchestrator.errors import ConfigurationError, UnreadableData, in_words
from orchestrator.parameters.pieces import Roles

Arrays = dict[str, np.ndarray]


def broken_by(error: BaseException, step: int | None = None) -> Broken:
    """Return what the island reports; ``step`` is the inner step that failed.

    A wrong specification is wrong at every start, so no further one is worth its while.
    """
    if not isinstance(error, ConfigurationError):
        return Broken(in_words(error) if step is None else f"{in_words(error)} (at step {step:,})")
    extent = FailureExtent.JOB if isinstance(error, UnreadableData) else FailureExtent.ISLAND
    return Broken(in_words(error), extent)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One inner step, finished. ``loss`` is the training loss in nats per token, ``flaws`` those of all text read so far."""

    token_count: int
    loss: float
    flaws: DataFlaws = NO_FLAWS


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Mean loss, in nats per token, over the first ``sequence_count`` held-out sequences, which took ``seconds``.

    ``bits_per_byte`` is the same loss for a byte of text, by which tokenizers compare; None where nobody knows how many
    bytes a token has. ``sources`` is by source, where the job has several.
    """

    loss: float
    sequence_count: int
    seconds: float
    bits_per_byte: float | None = None
    sources: tuple[SourceLoss, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a piece that the devices of this process have.

    ``bounds`` are start and stop along every axis, in the piece's own indices: a block, which is empty where the piece lies
    on other processes' devices. ``processes`` have the same part, in ascending order; this one is among them. ``shape`` is
    that of the whole piece, by which a checkpoint of another model is refused; None where the trainer does not say it.
    """

    bounds: tuple[tuple[int, int], ...]
    processes: tuple[int, ...]
    shape: tuple[int, ...] | None = None


class Snapshot(Protocol):
    """A copy of some pieces as they were when it was taken, on its way to host memory."""

    def arrays(self) -> Arrays:
        """Wait for the copy and return it; safe to call from another thread, more than once."""
        ...


class Trainer(Protocol):
    """One island's model, inner optimizer and data.

    Built by ``create(spec, shard_index, shard_count)``: ``spec`` is the job specification as plain data (the output of
    ``JobSpec.island_document``; ``learners.island_spec.IslandSpec.of`` reads it typed); shard ``shard_index`` of
    ``shard_count`` of the training split is its data.
    """

    @property
    def device_count(self) -> int: ...

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors; the same on every island."""
        ...

    def roles(self) -> Roles:
        """What the tensors are for, where their names do not say it; the same on every island."""
        ...

    def initial_parameters(self, pieces: Iterable[str] | None = None) -> Arrays:
        """The tensors of version 0, whole, or these pieces of them: a function of the specification and its seed alone."""
        ...

    def warm_up(self) -> None:
        """Compile what a step needs, without training."""
        ...

    def step(self, schedule_step: int) -> StepResult:
        """Take one inner step with the learning rate of the schedule at ``schedule_step``. Returns when it is done."""
        ...

    def snapshot(self, pieces: Iterable[str]) -> Snapshot:
        """Start copying these pieces to the host; the next step may begin at once."""
        ...

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace these pieces. The inner optimizer's state stays."""
        ...

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Add to these pieces, in float32, where they are. The inner optimizer's state stays."""
        ...

    def export_state(self, pieces: Iterable[str] | None = None) -> Snapshot:
        """Everything a peer needs to go on from here but the data cursor, by plain names.

        With ``pieces`` only what belongs to these, and what belongs to no tensor, such as a count of steps. The next step
        may begin at once; on the devices there was never a copy of the whole.
        """
        ...

    def import_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a peer's state, whole or all of its pieces. The data cursor stays this island's own."""
        ...

    def cursor(self) -> int:
        """How many batches of its shard this island has drawn."""
        ...

    def seek(self, cursor: int) -> None:
        """Go on in the data as if ``cursor`` batches had been drawn."""
        ...

    def take_shard(self, index: int) -> None:
        """From here on the data is that of this shard; for a standby that is promoted before its first step."""
        ...

    def evaluate(self, arrays: Mapping[str, np.ndarray], limit_s: float = inf) -> HeldOutLoss:
        """The loss of these tensors, or all their pieces, on the held-out split: of fewer sequences where time is short.

        What is trained stays as it is. ``learners.held_out`` does the counting.
        """
        ...

    def unigram_loss(self) -> float:
        """Loss on the held-out split of the best model that ignores context: what training has to beat."""
        ...


class SpreadTrainer(Trainer, Protocol):
    """A trainer of islands of several processes (``hosts`` above 1), each of which has one."""

    def held(self, piece: str) -> HeldPart:
        """The part of this piece that this process has, of an island of several: all of it where the island is one process.

        Arrays that ``snapshot`` and ``export_state`` give are these parts. ``load``, ``add`` and ``import_state`` take
        them, or whole pieces; so does ``evaluate``, but for pieces of one tensor either all or none.
        """
        ...

    def held_state(self, pieces: Iterable[str]) -> Mapping[str, HeldPart]:
        """The parts that this process has of what ``export_state`` gives of these pieces, by the names there.

        Asked only where some piece lies on several processes (``held``). Whole tensors are pieces, too.
        """
        ...


class FragmentwiseTrainer(Trainer, Protocol):
    """A trainer that needs not all of Θ on the host to measure it. Who overrides ``evaluate`` of one overrides both."""

    def evaluate_fragments(self, fragments: Iterable[Mapping[str, np.ndarray]], limit_s: float = inf) -> HeldOutLoss:
        """As ``evaluate``, of tensors, or pieces of them, that come fragment by fragment; none is asked for twice."""
        ...


class HostCopy:
    """A ``contract.Snapshot`` that was complete from the start."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def arrays(self) -> Arrays:
        return dict(self._arrays)
