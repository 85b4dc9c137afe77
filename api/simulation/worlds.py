"""The world that a file describes, for simulating one job: a fitted one, or a job's specification at the speed it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from api.installation.shipped import CONFIGS
from orchestrator.config import JobSpec, parse_job, read_document
from orchestrator.core.vocabulary import JobPolicy
from orchestrator.errors import ConfigurationError
from orchestrator.parameters.codec.registry import codec
from orchestrator.simulation import worldfile
from orchestrator.simulation.plan import Capacity, WorldPlan

PARAMETERS: Mapping[str, int] = {"nano": 851_968, "micro": 9_994_240, "small": 126_353_408}
"""Of the built-in models: what a fragment weighs, where chaos makes a link slow. Without it a simulation needs no JAX."""


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
    policy = spec.policy(_regions(), standbys=True)
    plan = WorldPlan(
        step_s=(spec.synthetic.step_s,) * len(policy.islands),
        step_jitter_ratio=spec.synthetic.step_jitter_ratio,
        tokens_per_step=spec.tokens_per_step,
        adoption=spec.synchroniser.adoption,
        capacity=tuple(_batches(spec)),
        payload_bytes=codec(spec.synchroniser.wire.up).data_bytes(parameters_of(spec)) // spec.synchroniser.fragments,
    )
    return policy, plan


def _batches(spec: JobSpec) -> Iterator[Capacity]:
    """From the beginning, for the islands whose batch is another than the job's."""
    sections = {**spec.island_sections(), **spec.standby_sections()}
    for island, section in sections.items():
        if (ratio := spec.batch_size_of(section) / spec.training.batch_size) != 1.0:
            yield Capacity(0.0, island, ratio)


def parameters_of(spec: JobSpec) -> int:
    """The number of parameters of the job's model; 0 where only its own code knows."""
    if spec.trainer.startswith("learners.synthetic"):
        return spec.synthetic.parameters
    own = spec.model.factory or not spec.trainer.startswith("learners.jax_trainer:")
    return 0 if own else PARAMETERS[spec.model.preset]


def _regions() -> dict[str, str]:
    """The regions of the node groups that `atoll up` starts; any other group is a region of its own."""
    groups = read_document(CONFIGS / "groups.yaml")["node_groups"]
    return {group["name"]: group["region"] for group in groups}
