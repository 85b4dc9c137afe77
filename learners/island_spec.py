"""The job's specification as an island, or the evaluator, reads it: typed, with what the service adds to it.

    JobSpec.island_document ─▶ plain data, over Ray ─▶ IslandSpec.of ─▶ the loop, the trainers, the text
                                    └─▶ trainers and factories of a user's own package, as they are documented

The document is parsed where it enters (``IslandSpec.of``); everything in this package reads typed fields from then on. A
user's own package keeps getting the plain document. It has the job's specification and, beside it, ``island`` (the island's
own entry), ``legs`` (earlier resumptions of the job), ``roots`` (what may be read) and ``returns`` (whether the island had a
process before).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from learners.resharding import Resumptions
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
