"""What only the laboratory has, for ablations: other fragments, lossy lines, batches that grow, and simulated failures.

    CUTS             how a model is cut: equal pieces, as the product does, whole tensors, or whole layers
    LossyChannel     codes contributions on their way, with or without error feedback, down to one bit
    scavenging       data-parallel with more compute from half of the tokens on
    by_failures      training by the tape of a simulated fleet, with its failures or without

``trained_tables`` says which cells need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from learners import jax_trainer
from orchestrator.core.vocabulary import FragmentId, IslandId
from orchestrator.errors import InternalError
from orchestrator.laboratory import train_tape
from orchestrator.laboratory.baselines import Advance, Trained
from orchestrator.laboratory.tape_training import TapeTraining
from orchestrator.parameters import fragment_map, wire_format
from orchestrator.parameters.codec.registry import CODEC_NAMES, EXACT, codec
from orchestrator.parameters.pieces import Roles, Shape, cut
from orchestrator.simulation import run
from orchestrator.simulation import spec as simulated
from orchestrator.specification.config import JobSpec
from orchestrator.system.roots import EVERYTHING
from orchestrator.tape.schema import Tape


def by_tensor(shapes: Mapping[str, Shape], count: int, roles: Roles) -> fragment_map.FragmentMap:
    """Put whole tensors into fragments, each into the lightest one, the largest first."""
    loads, names = [0] * count, [list[str]() for _ in range(count)]
    for name in sorted(shapes, key=lambda name: (-math.prod(shapes[name]), name)):
        lightest = loads.index(min(loads))
        names[lightest].append(name)
        loads[lightest] += math.prod(shapes[name])
    return tuple(tuple(sorted(members)) for members in names)


def by_layer(shapes: Mapping[str, Shape], count: int, roles: Roles) -> fragment_map.FragmentMap:
    """Cut stacked tensors between layers: fragment p has as many layers as any other. Everything else is in the first."""
    pieces = [dict[str, None]() for _ in range(count)]
    for name, shape in sorted(shapes.items()):
        stacked = roles[name].stacked_axes if name in roles else 0
        if stacked and shape[0] % count == 0:
            for home, piece in zip(pieces, cut(name, shape, 0, count), strict=True):
                home[piece.name] = None
        else:
            pieces[0][name] = None
    return tuple(tuple(sorted(members)) for members in pieces)


CUTS: Mapping[str, fragment_map.CutModel] = {"pieces": fragment_map.build, "tensors": by_tensor, "layers": by_layer}


class LossyChannel:
    """Codes every contribution, and feeds back what that loses into the next one of the same island if ``feedback``.

    Islands send differences in float32 and do not know of it, as if the line lost the rest. Their adoption takes all that
    they sent for merged. The product's codecs feed back at the sender, which comes to the same sums.
    """

    def __init__(self, coding: str, feedback: bool) -> None:
        self._rounded = sign_of_blocks if coding == ONE_BIT else _by_codec(coding)
        self._feedback = feedback
        self._residues: dict[tuple[IslandId, FragmentId], dict[str, np.ndarray]] = {}

    def __call__(self, island: IslandId, fragment: FragmentId, content: memoryview) -> memoryview:
        received = wire_format.parse(content)
        if received.base is None:
            return content
        before = self._residues.get((island, fragment), {})
        exact = {name: received.decoded(name) + before.get(name, np.float32(0.0)) for name in received.tensors}
        sent = {name: self._rounded(array) for name, array in exact.items()}
        if self._feedback:
            self._residues[island, fragment] = {name: exact[name] - sent[name] for name in exact}
        return wire_format.encode(sent, EXACT, received.base)


ONE_BIT, BLOCK = "1 bit", 128


def sign_of_blocks(array: np.ndarray) -> np.ndarray:
    """Return each value's sign times the mean magnitude of its block of 128, which is the scale of least squared error."""
    flat = np.zeros(math.ceil(array.size / BLOCK) * BLOCK, np.float32)
    flat[: array.size] = array.reshape(-1)
    blocks = flat.reshape(-1, BLOCK)
    counts = np.full(len(blocks), BLOCK)
    counts[-1] = array.size - BLOCK * (len(blocks) - 1)
    scales = np.abs(blocks).sum(axis=1) / counts
    signs = np.where(blocks < 0.0, np.float32(-1.0), np.float32(1.0))
    coded: np.ndarray = (signs * scales[:, None].astype(np.float32)).reshape(-1)[: array.size]
    return coded.reshape(array.shape)


def _by_codec(name: str) -> Callable[[np.ndarray], np.ndarray]:
    assert name in CODEC_NAMES
    coder = codec(name)

    def rounded(array: np.ndarray) -> np.ndarray:
        data = b"".join(coder.encode(np.ascontiguousarray(array)))
        decoded: np.ndarray = coder.decode(memoryview(data), array.size)
        return decoded.reshape(array.shape)

    return rounded


def scavenging(spec: JobSpec, extra: float) -> Iterator[Advance]:
    """Train data-parallel, with batches larger by ``extra`` from half of the tokens on."""
    plain = spec.model_dump(mode="json") | {"roots": EVERYTHING}
    wide = {**plain, "training": {**plain["training"], "batch_size": round(spec.training.batch_size * (1.0 + extra))}}
    first, second = (jax_trainer.create(document, 0, 1) for document in (plain, wide))
    half, ratio = spec.horizon_steps // 2, wide["training"]["batch_size"] / spec.training.batch_size
    tokens = 0
    for step in range(half):
        tokens += first.step(step).token_count
        yield Advance(tokens)
    second.import_state(first.export_state().arrays())
    second.seek(math.ceil(half / ratio))  # behind the sequences that the first half has seen
    step = 0
    while half + step * ratio < spec.horizon_steps:
        tokens += second.step(round(half + step * ratio)).token_count
        step += 1
        yield Advance(tokens)
    loss = second.evaluate(second.snapshot(list(second.tensor_shapes())).arrays()).loss
    yield Advance(tokens, Trained(loss, ((tokens, loss),), 1.0))


def by_failures(spec: JobSpec, seed: int, *, calm: bool) -> Iterator[Advance]:
    """Train by the tape of a simulated fleet like the paper's, with its failures or without them (``calm``)."""
    tape = failing_fleet(spec, seed)
    match = train_tape.match(tape, spec)
    if calm:
        adoption = spec.synchroniser.adoption
        tape = train_tape.tape_without_failures(tape, match.trace, adoption, match.spec.horizon_steps)
        match = train_tape.match(tape, match.spec)
    by_tape = TapeTraining(match.spec, match.trace, train_tape.warm_trainer)
    tokens = 0
    for _ in by_tape.run():
        tokens += match.spec.tokens_per_step
        yield Advance(tokens)
    assert by_tape.trained is not None
    inputs = [len(act.inputs) for act in match.trace.merges]
    result = by_tape.trained
    goodput, mean = train_tape.goodput_of(tape), sum(inputs) / len(inputs)
    yield Advance(tokens, Trained(result.loss, tuple(result.curve), goodput, result.digest, mean))


def failing_fleet(spec: JobSpec, seed: int) -> Tape:
    """Return the tape of the job on 150,000 chips per learner, which fail once a year each. A step takes a second."""
    sync = spec.synchroniser
    document = {
        "name": "failures",
        "seed": seed,
        "duration": f"{spec.horizon_steps}s",
        "level": "protocol",
        "systems": ["decoupled"],
        "fleet": {
            "chips": 150_000 * spec.island_count,
            "chips_per_slice": 256,
            "learners": spec.island_count,
            "mtbi_chip": "1y",
            "return_time": {"exponential": "30min"},
            "stall_down": "13.1s",
            "stall_up": "13.1s",
        },
        "steps": {"step_time": {"uniform": ["0.9s", "1.1s"]}, "tokens_per_step": spec.tokens_per_step},
        "synchroniser": {
            "fragments": sync.fragments,
            "interval_steps": sync.interval_steps,
            "overlap_steps": sync.overlap_steps,
            "quorum": sync.quorum,
            "quorum_ratio": 0,
            "grace_cap_steps": sync.grace_cap_steps,
        },
        "links": {"bandwidth": "5Gbps", "latency": "30ms", "parameters": 1e8, "bits": 16},
    }
    sink = _Records()
    run.simulate(simulated.parse(document), open_tape=sink.open)
    assert sink.header is not None
    return Tape(sink.header, tuple(sink.records))


class _Records:
    """A tape in memory that ``run.simulate`` writes."""

    def __init__(self) -> None:
        self.header: Any = None
        self.records: list[Any] = []

    def open(self, _name: str, header: Any) -> _Records:
        self.header = header
        return self

    def append(self, record: Any) -> None:
        self.records.append(record)

    def append_lines(self, lines: bytes, count: int) -> None:
        raise InternalError(detail="A tape of protocol level has records, not lines.")
