"""The job's specification as an island, or the evaluator, reads it: typed, with what the service adds to it.

    JobSpec.island_document ─▶ plain data, over Ray ─▶ IslandSpec.of ─▶ the loop, the trainers, the text
                                    └─▶ trainers and factories of a user's own package, as they are documented

The document is parsed where it enters (``IslandSpec.of``); everything in this package reads typed fields from then on. A
user's own package keeps getting the plain document. It has the job's specification and, beside it, ``island`` (the island's
own entry), ``legs`` (earlier resumptions of the job), ``roots`` (what may be read) and ``returns`` (whether the island had a
process before).

A resumed job deals the rest of its data to a different set of islands.
A stream is the data of one island, by sequence. When a job is resumed, the rest of every stream is dealt to the new islands
in blocks. A block is as many sequences as divide every old island's batch, so that each old island had drawn whole blocks.
With m old and n new streams there are lcm(m, n) substreams: each old stream is split into lcm/m of them, and each new stream
takes lcm/n, in turns. With cursors c, block k of new stream i is block

   c[j] + ℓ mod s + s·⌊k / t⌋   of old stream j = ⌊ℓ / s⌋,   where ℓ = i·t + k mod t,   s = lcm/m,   t = lcm/n

So every sequence after a cursor belongs to exactly one new stream, and none before a cursor to any, whatever the batches of
the new islands are. The rule is applied once for each resumption. Pure arithmetic. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from pydantic import ValidationError

from orchestrator.errors import InvalidJobSpec
from orchestrator.specification.config import UNKNOWN, JobSpec
from orchestrator.specification.sections import IslandsSection
from orchestrator.specification.validation import problems_of
from orchestrator.system.roots import AllowedRoots

NOWHERE = AllowedRoots()
"""No file may be read: the roots of a document that names none."""
PEAK_FLOPS: Mapping[str, float] = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 836e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L4": 121e12,
    "AMD Instinct MI250X": 191.5e12,
    "AMD Instinct MI300X": 1307e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
"""Operations per second of one device in bfloat16, without sparsity, by the longest prefix of its kind as JAX and PyTorch
name it. Sources: data sheets of NVIDIA and AMD, Google Cloud's pages of TPUs. An MI250X is two devices."""
Document = Mapping[str, Any]
Draw = Callable[[int], Any]
"""Returns the batch with a given number: (sequences, sequence_length + 1) int32 tokens, or a ``learners.contract.Batch``."""
Resumptions = Sequence[tuple[int, Sequence[int]]]
"""For each resumption, first to last: the sequences of a block, and the cursors of all streams in blocks."""


@dataclass(frozen=True, slots=True)
class IslandSpec:
    """The specification as one process of the job has it.

    job          the whole specification
    own          the island's own entry of ``islands``; None in a process of no island, such as the evaluator
    resumptions  where the data of earlier runs of a resumed job ended, first to last
    roots        the folders and stores whose files may be read
    document     all of this as plain data, for the functions of a user's own package
    returns      whether the island had a process before, so that the job has missed it since
    """

    job: JobSpec
    own: IslandsSection | None
    resumptions: Resumptions
    roots: AllowedRoots
    document: Document
    returns: bool = False

    @classmethod
    def of(cls, spec: IslandSpec | Document) -> IslandSpec:
        """Parse a document; a parsed one is returned as it is. Raises InvalidJobSpec with every problem."""
        if isinstance(spec, IslandSpec):
            return spec
        try:
            job = JobSpec.model_validate({name: spec[name] for name in JobSpec.model_fields if name in spec})
            own = IslandsSection.model_validate(spec["island"]) if "island" in spec else None
        except ValidationError as error:
            raise InvalidJobSpec(problems=tuple(problems_of(error, unknown=UNKNOWN, model=JobSpec))) from error
        return cls(job, own, spec.get("legs", ()), spec.get("roots", NOWHERE), spec, bool(spec.get("returns", False)))

    def ideal_seconds(self, flops: float | None, device_kind: str, device_count: int) -> float | None:
        """Return the shortest time in which these devices could do so many operations; None if that is unknown.

        Their peak is the island's ``peak_flops``, or else that of the kind, of which a MIG device is only a part.
        """
        if flops is None:
            return None
        if self.own is not None and self.own.peak_flops is not None:
            return flops / (self.own.peak_flops * max(1, self.own.accelerators) * self.own.hosts)
        names = [name for name in PEAK_FLOPS if device_kind.startswith(name) and " MIG " not in device_kind]
        return flops / (PEAK_FLOPS[max(names, key=len)] * device_count) if names else None

    @property
    def path(self) -> str:
        """The path of this island's entry in the specification."""
        if self.own is None:
            return "island"
        own = (self.own.node_group, self.own.mesh, self.own.name)
        entries = enumerate(self.job.islands)
        alike = [index for index, entry in entries if (entry.node_group, entry.mesh, entry.name) == own]
        return f"islands.{alike[0]}" if alike else "island"

    @property
    def shares_decoder(self) -> bool:
        """Return whether this island trains in PyTorch a decoder that other processes of the job have in JAX."""
        return self.own is not None and self.own.framework == "torch" and self.job.trainer.is_built_in

    @property
    def is_in_torch(self) -> bool:
        """Return whether this process trains in PyTorch."""
        return self.job.trainer.kind == "torch" or self.shares_decoder

    @property
    def batch_size(self) -> int:
        """Sequences of an inner step of this island."""
        return self.job.training.batch_size if self.own is None else self.job.batch_size_of(self.own)

    @property
    def accumulation(self) -> int:
        """Microbatches of an inner step of this island: a divisor of its batch size."""
        return self.job.training.accumulation if self.own is None else self.job.accumulation_of(self.own)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an inner step of this island with a whole batch."""
        return self.batch_size * self.job.data.sequence_length

    def tokens_of(self, schedule_step: int) -> int:
        """Return the tokens of an inner step of this island at this step of the schedule."""
        ramp = self.job.batch_ramp
        return self.tokens_per_step * ramp.part(schedule_step) // ramp.parts

    @property
    def process_count(self) -> int:
        """Processes of this island."""
        return 1 if self.own is None else self.own.process_count

    @property
    def accelerator_count(self) -> int:
        """Devices that the specification promises each process; 0 where it promises none."""
        return 0 if self.own is None else self.own.accelerators // self.own.processes_per_host


# ── resumptions ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def origins(
    resumptions: Resumptions, batch_size: int, shard_index: int, shard_count: int, number: int
) -> list[tuple[int, int]]:
    """Return the original shard and number, as the job was first cut, of each sequence of this island's batch ``number``."""
    return [
        origin(resumptions, shard_index, shard_count, sequence)
        for sequence in range(number * batch_size, (number + 1) * batch_size)
    ]


def origin(resumptions: Resumptions, stream: int, stream_count: int, number: int) -> tuple[int, int]:
    """Return the original shard of sequence ``number`` of this stream, and its number there."""
    for block, cursors in reversed(resumptions):
        substreams = lcm(len(cursors), stream_count)
        split, taken = substreams // len(cursors), substreams // stream_count
        number, within = divmod(number, block)
        substream = stream * taken + number % taken
        before = substream // split
        stream, stream_count = before, len(cursors)
        number = (cursors[before] + substream % split + split * (number // taken)) * block + within
    return stream, number


def first_count(resumptions: Resumptions, stream_count: int) -> int:
    """Return the number of shards that the data was cut into when the job began."""
    return len(resumptions[0][1]) if resumptions else stream_count
