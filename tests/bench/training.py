"""One island's training against a bare loop: tokens per second, model FLOPs utilisation, the cost of a boundary, and
memory.

The island is the product's own loop, replica, outbox and trainer. A thread plays the synchroniser: it fetches every offer
and publishes it as the fragment's next version, which the island adopts. Every fragment has its turn in each round of
``INTERVAL`` steps. The bare loop runs the same compiled program on arrays of its own, draws the next batch while the
devices work, and fetches a loss only at the end of a block. The two take turns, block by block, and each pair starts with
the other one, so that a machine that slows down affects both. The ratio is the median of the pairs.

Utilisation is the model's operations per second (``Model.flops_per_token``, or six per parameter if a model does not say)
over the peak of the devices: from a table by device kind, in bfloat16 and dense, or on a processor, what a product of
matrices reaches in the same run. A real synchroniser is on another machine, so its thread has a core of its own, the
last, which neither loop uses, if there is more than one. ``--preset`` takes another model.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from learners import jax_trainer, model
from learners.contract import StepResult
from learners.island_spec import PEAK_FLOPS, Draw
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from learners.text import Text
from orchestrator.core.messages import Offer
from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.errors import InternalError
from orchestrator.parameters import fragment_map, wire_format
from orchestrator.specification.config import parse_job
from tests.bench.goals import Goal, at_least, at_most
from tests.bench.one_island import seconds_of
from tests.bench.options import Options

SPEED_GOAL, MEMORY_GOAL = 0.99, 1.1
FRAGMENTS = INTERVAL = 12
BLOCK_STEPS, BLOCKS = 2 * INTERVAL, 8
CPU_SIZES: Mapping[str, Any] = {"training": {"batch_size": 8}, "data": {"sequence_length": 128}}
ACCELERATOR_SIZES: Mapping[str, Any] = {"training": {"batch_size": 4}, "data": {"sequence_length": 2048}}
"""Sizes of a step: on an accelerator as much as a model of a billion parameters leaves room for, beside the bare loop's
own."""
PRODUCT_SIZE = 2048
"""The size of the square matrices by which a processor's peak is measured."""


class TimedTrainer(jax_trainer.JaxTrainer):
    """A trainer that measures the time of its steps, and the peak of bytes on the devices at the start of one."""

    step_seconds = 0.0
    device_bytes = 0
    counts_bytes = False
    """Counting takes longer than everything else at a boundary."""

    @property
    def tokens_per_step(self) -> int:
        return self._spec.tokens_per_step

    @property
    def flops_per_token(self) -> float:
        counted = self._model.flops_per_token
        return 6.0 * self.parameter_count if counted is None else counted(self._spec.job.data.sequence_length)

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def draw_beside(self) -> Draw:
        """Draw the batches of another shard, so that this one's own cursor stays."""
        return self._make_draw(1)

    def step(self, schedule_step: int) -> StepResult:
        if self.counts_bytes:
            self.device_bytes = max(self.device_bytes, live_bytes())
        began = perf_counter()
        result = super().step(schedule_step)
        self.step_seconds += perf_counter() - began
        return result


def main(asked: Options) -> list[Goal]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: max(1, len(cores) - 1)])  # before JAX makes its threads, which have their maker's
    try:
        return measured(asked, cores[-1:])
    finally:
        os.sched_setaffinity(0, cores)


def measured(asked: Options, synchronisers_cores: Iterable[int]) -> list[Goal]:
    spec = document(asked.preset or ("nano" if asked.small else "micro"), jax.default_backend() == "cpu")
    text = Text(spec)
    trainer = TimedTrainer(spec, model.build(spec), lambda shard: text.draw(shard, 2), text=text)
    trainer.warm_up()
    held = live_bytes()
    island = Island(trainer, synchronisers_cores)
    island.train(2 * INTERVAL)  # every program of a boundary is compiled, and every fragment was published
    bare = Bare(trainer)
    bare.train(1)
    beside = live_bytes() - held
    ratios, rates, overheads = [], [], []
    for pair in range(2 if asked.small else BLOCKS):
        trainer.step_seconds = 0.0
        took: dict[Island | Bare, float] = {}
        for one in (island, bare) if pair % 2 else (bare, island):
            took[one] = seconds_of(lambda one=one: one.train(BLOCK_STEPS))
        overheads.append((took[island] - trainer.step_seconds) / BLOCK_STEPS)
        ratios.append(took[bare] / took[island])
        rates.append(BLOCK_STEPS * trainer.tokens_per_step / took[island])
    trainer.counts_bytes = True
    island.train(INTERVAL)
    island.end()
    if island.version_total < FRAGMENTS:
        raise InternalError(detail=f"only {island.version_total} versions of {FRAGMENTS} fragments were published")
    temporary, parameters = trainer.memory_analysis().temp_size_in_bytes, trainer.parameter_count
    needed, highest = held + temporary, trainer.device_bytes - beside + temporary
    peak, kind = peak_flops()
    judged = [
        at_least("island's tokens/s over a bare loop's", median(ratios), SPEED_GOAL),
        at_most("device bytes at the highest over a bare loop's", highest / needed, MEMORY_GOAL),
    ]
    rate = median(rates)
    print(
        f"training   {spec['model']['preset']}, {parameters / 1e6:.1f}M parameters, on {trainer.device_count} x {kind}: "
        f"{rate:,.0f} tokens/s, {median(ratios):.3f} of a bare loop's ({judged[0]}; pairs {min(ratios):.3f} to "
        f"{max(ratios):.3f}); a boundary takes "
        f"{1e3 * median(overheads):.2f} ms beside a step of {1e3 * trainer.tokens_per_step / rate:.0f}; "
        f"{trainer.flops_per_token * rate / peak / trainer.device_count:.1%} of {peak / 1e12:.3g} TFLOP/s a device"
    )
    print(
        f"training   device memory at the highest {highest / parameters:.1f} bytes a parameter, {highest / needed:.3f} of "
        f"what a bare loop needs ({judged[1]})"
    )
    return judged


class Island:
    """The loop of an island, and a thread that merges for it: every offer is published."""

    def __init__(self, trainer: TimedTrainer, synchronisers_cores: Iterable[int]) -> None:
        fragments = fragment_map.build(trainer.tensor_shapes(), FRAGMENTS, trainer.roles())
        plan = LoopPlan(fragments, INTERVAL, "rebase", tokens_per_schedule_step=trainer.tokens_per_step)
        self._outbox, self._ending = Outbox(), threading.Event()
        self._loop = IslandLoop(trainer, plan, self._outbox)
        pieces = fragment_map.pieces_of(trainer.initial_parameters(), fragments)
        self._published = {
            FragmentId(p): {Version(0): {name: pieces[name] for name in names}} for p, names in enumerate(fragments)
        }
        self._loop.load(pieces, [Version(0)] * FRAGMENTS, 0, 0)
        self._loop.open()
        self._thread = threading.Thread(target=self._publish, args=(synchronisers_cores,), daemon=True)
        self._thread.start()

    def train(self, step_count: int) -> None:
        for _ in range(step_count):
            self._loop.advance()

    def end(self) -> None:
        self._ending.set()
        self._thread.join()

    @property
    def version_total(self) -> int:
        return sum(max(versions) for versions in self._published.values())

    def _publish(self, cores: Iterable[int]) -> None:
        os.sched_setaffinity(0, cores)  # of this thread
        while not self._ending.is_set():
            for report in self._outbox.take(0.05):
                if (
                    isinstance(report, Offer)
                    and (payload := self._loop.take(report.fragment, report.offer)) is not None
                ):
                    self._merge(report, wire_format.parse(payload))

    def _merge(self, offer: Offer, content: wire_format.EncodedTensors) -> None:
        versions = self._published[offer.fragment]
        base, version = versions[offer.base_version], Version(max(versions) + 1)
        merged = {name: base[name] - content.decoded(name) for name in content.tensors}
        self._published[offer.fragment] = {offer.base_version: base, version: merged}
        self._loop.deliver(offer.fragment, version, offer.step, merged, offer.offer)


class Bare:
    """The same compiled step in a loop that does nothing else, on arrays of its own."""

    def __init__(self, trainer: TimedTrainer) -> None:
        self._trainer, self._cursor = trainer, 0
        self._arrays = jax.tree.map(jnp.copy, trainer.arrays_on_devices())
        self._draw = trainer.draw_beside()
        self._batch = self._draw(0)

    def train(self, step_count: int) -> None:
        parameters, state = self._arrays
        for _ in range(step_count):
            batch = self._trainer.on_devices(self._batch)
            parameters, state, loss, *_ = self._trainer.program(parameters, state, batch, np.float32(1e-3))
            self._cursor += 1
            self._batch = self._draw(self._cursor)  # while the devices work
        self._arrays = parameters, state
        float(loss)


def document(preset: str, on_cpu: bool) -> dict[str, Any]:
    """Return a job. On a processor it has short sequences in float32, the arithmetic that a processor has."""
    sizes = CPU_SIZES if on_cpu else ACCELERATOR_SIZES
    model = {"preset": preset, "compute_dtype": "float32"} if on_cpu else {"preset": preset, "remat": "dots"}
    islands, budget = [{"node_group": "here"}], {"steps": 10_000}
    spec = parse_job({"islands": islands, "budget": budget, "model": model, **sizes})
    return spec.island_document(spec.islands[0])


@cache
def peak_flops() -> tuple[float, str]:
    """Return the peak operations per second of one device, and its name. Raises ValueError for a kind without an entry."""
    kind = jax.local_devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return PEAK_FLOPS[max((name for name in PEAK_FLOPS if kind.startswith(name)), key=len)], kind
    square = jnp.ones((PRODUCT_SIZE, PRODUCT_SIZE), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(square, square).block_until_ready()
    seconds = min(seconds_of(lambda: product(square, square).block_until_ready()) for _ in range(5))
    return 2 * PRODUCT_SIZE**3 / seconds, f"{kind} of {jax.local_device_count()}"


def live_bytes() -> int:
    """Return the live bytes on the devices, each buffer once: shards are arrays as well."""
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
    }
    return sum(buffers.values())
