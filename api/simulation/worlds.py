"""The world that a file describes, for simulating one job: a fitted one, or a job's specification at the speed it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from api.installation.shipped import CONFIGS
from orchestrator.config import JobSpec, parse_job, read_document
from orchestrator.core.vocabulary import JobPolicy
from orchestrator.errors import ConfigurationError
from orchestrator.memory_budget import parameter_count_of
from orchestrator.parameters.codec.registry import codec
from orchestrator.simulation import worldfile
from orchestrator.simulation.plan import Capacity, WorldPlan


def world_of(file: Path) -> tuple[JobPolicy, WorldPlan]:
    """The job's policy and the world it runs in. Raises ConfigurationError where the file is neither, or is wrong."""
    document = read_document(file)
    if "world" in document:
        fitted = worldfile.parse(document["world"])
        return fitted.policy, fitted.plan
    if "islands" not in document:
        detail = f"{file} is neither a job (deploy/configs/demo.yaml) nor a world that `atoll tape fit` wrote."
        raise ConfigurationError(detail=f"{detail} Give one of the two.")
    spec = parse_job(document)
    if spec.synchroniser.adoption == "mix":
        raise ConfigurationError(detail="Simulated islands do not know adoption mix. Use rebase or replace.")
    policy, parameters = spec.policy(_regions(), standbys=True), parameter_count_of(spec) or 0
    plan = WorldPlan(
        step_s=(spec.synthetic.step_s,) * len(policy.islands),
        step_jitter_ratio=spec.synthetic.step_jitter_ratio,
        tokens_per_step=spec.tokens_per_step,
        adoption=spec.synchroniser.adoption,
        capacity=tuple(_batches(spec)),
        payload_bytes=codec(spec.synchroniser.wire.up).data_bytes(parameters) // spec.synchroniser.fragments,
    )
    return policy, plan


def _batches(spec: JobSpec) -> Iterator[Capacity]:
    """From the beginning, for the islands whose batch is another than the job's."""
    sections = {**spec.island_sections(), **spec.standby_sections()}
    for island, section in sections.items():
        if (ratio := spec.batch_size_of(section) / spec.training.batch_size) != 1.0:
            yield Capacity(0.0, island, ratio)


def _regions() -> dict[str, str]:
    """The regions of the node groups that `atoll up` starts; any other group is a region of its own."""
    groups = read_document(CONFIGS / "groups.yaml")["node_groups"]
    return {group["name"]: group["region"] for group in groups}
