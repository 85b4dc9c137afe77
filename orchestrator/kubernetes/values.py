"""The values of an installation on Kubernetes, validated as a whole before anything is rendered.

    name: atoll
    image: atoll:0.1.0
    clusters:
      - {name: home, head: {}}
      - {name: far, head_address: "head.example:6379"}
    groups:
      - {name: us-east, region: us-east1, nodes: 2, cpus: 4, memory_gib: 16}
      - {name: slices, region: us-east5, nodes: 8, cpus: 24, memory_gib: 200, accelerators: 4,
         tpu: {accelerator: tpu-v6e-slice, topology: 4x4, hosts: 4}, spot: gke}

All problems are reported at once, with field, value and remedy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from orchestrator.errors import InvalidJobSpec, Problem
from orchestrator.specification.bounds import AcceleratorCount, CpuCount, MemoryGib, Name, NodeCount, Section
from orchestrator.specification.config import read_document
from orchestrator.specification.validation import omitted_count, problems_of

CONTROL = "control"
LabelName = Annotated[str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,253}:[0-9]{1,5}$")]
Image = Annotated[str, Field(pattern=r"^[a-z0-9][A-Za-z0-9._/:@-]{0,511}$")]
Cidr = Annotated[str, Field(pattern=r"^([0-9]{1,3}\.){3}[0-9]{1,3}/[0-9]{1,2}$|^[0-9a-f:]+/[0-9]{1,3}$")]
Gib = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Seconds = Annotated[int, Field(strict=True, ge=10, le=86_400)]
Topology = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}$")]


class Disk(Section):
    """A volume that outlives pods. Without ``storage_class`` it has the cluster's default."""

    gib: Gib
    storage_class: Name | None = None


class Head(Section):
    """The pod of the Ray head, of synchronisers and of controllers. ``disk`` keeps Ray's state across restarts."""

    cpus: CpuCount = 4
    memory_gib: MemoryGib = 16.0
    disk: Disk = Disk(gib=10)


class Cluster(Section):
    """A Kubernetes cluster: the one with ``head``, or one whose machines join that head over ``head_address``."""

    name: Name
    head: Head | None = None
    head_address: Address | None = None


class Tpu(Section):
    """A TPU slice, as GKE names it: ``cloud.google.com/gke-tpu-accelerator`` and ``-topology``; ``hosts`` of one slice."""

    accelerator: LabelValue
    topology: Topology
    hosts: NodeCount = 1


class Group(Section):
    """A node group: pods that are Ray nodes. ``nodes`` counts pods, of all slices; the amounts are of one pod.

    ``spot`` names the cloud whose labels and taints of spot machines apply. ``grace_s`` is a pod's termination grace period.
    """

    name: Name
    region: Name
    cluster: Name | None = None
    nodes: Annotated[int, Field(strict=True, ge=0, le=1000)] = 1
    cpus: CpuCount
    memory_gib: MemoryGib
    accelerators: AcceleratorCount = 0
    gpu: LabelValue | None = None
    tpu: Tpu | None = None
    spot: Literal["gke", "eks", "aks"] | None = None
    grace_s: Seconds = 120
    selector: dict[LabelName, LabelValue] = Field(default_factory=dict)
    tolerate: tuple[LabelName, ...] = ()


class Service(Section):
    """The REST service. Beyond its own namespace, only pods of the namespaces ``allow_from`` can reach it."""

    memory_gib: MemoryGib = 4.0
    disk: Disk = Disk(gib=10)
    allow_from: tuple[Name, ...] = ()


class Monitoring(Section):
    """The settings of prometheus-operator: the namespace of Prometheus, and the labels by which it finds its monitors."""

    namespace: Name
    labels: dict[LabelName, LabelValue] = Field(default_factory=dict)


class Values(Section):
    """``secret`` holds the cluster's token, ``metrics_secret`` that of a viewer; both under the key ``token``.

    ``authority_secret`` holds the files of an authority's folder (``atoll certificates authority``); each pod is issued its
    own certificate at its start. With ``insecure`` nothing is encrypted, for a network that encrypts itself.

    ``runs`` is the folder of all jobs, which head, service and islands share: a volume that several nodes may write.
    ``join_from`` are the addresses of machines outside that may join. ``partition_tolerance_s`` is the cluster's.
    """

    name: Name = "atoll"
    namespace: Name = "atoll"
    image: Image
    pull_secret: Name | None = None
    ray_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")] = "2.60.0"
    secret: Name = "atoll-cluster"
    metrics_secret: Name = "atoll-metrics"
    authority_secret: Name = "atoll-authority"
    insecure: bool = False
    clusters: Annotated[tuple[Cluster, ...], Field(min_length=1, max_length=100)]
    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=1000)]
    service: Service = Service()
    runs: Disk = Disk(gib=100)
    monitoring: Monitoring | None = None
    join_from: tuple[Cidr, ...] = ()
    partition_tolerance_s: Annotated[float, Field(ge=3.0, le=1e6)] = 600.0

    @property
    def home(self) -> Cluster:
        """The cluster with the head."""
        return next(cluster for cluster in self.clusters if cluster.head is not None)

    def groups_of(self, cluster: str) -> list[Group]:
        return [group for group in self.groups if (group.cluster or self.home.name) == cluster]


def read_values(path: Path) -> Values:
    """Read the values of this file. Raises InvalidJobSpec with every problem, ConfigurationError for an unreadable file."""
    document = read_document(path)
    detail = f"the values in {path} are invalid"
    try:
        values = Values.model_validate(document)
    except ValidationError as error:
        problems = problems_of(error, unknown="Remove it, or see docs/guide/kubernetes.md for its name.", model=Values)
        raise InvalidJobSpec(
            detail=detail, problems=tuple(problems), omitted_count=omitted_count(error, Values)
        ) from error
    if contradictions := tuple(_problems(values)):
        raise InvalidJobSpec(detail=detail, problems=contradictions)
    return values


def _problems(values: Values) -> Iterator[Problem]:
    """Yield the problems between fields."""
    heads = [cluster.name for cluster in values.clusters if cluster.head is not None]
    if len(heads) != 1:
        named = ", ".join(heads) or "none"
        yield Problem("clusters", f"has {len(heads)} with a head ({named}).", "Give `head` to exactly one cluster.")
    yield from _twice("clusters", [cluster.name for cluster in values.clusters])
    yield from _twice("groups", [group.name for group in values.groups])
    for index, cluster in enumerate(values.clusters):
        if cluster.head is None and cluster.head_address is None:
            path, remedy = (
                f"clusters.{index}.head_address",
                "Give the name and port under which its pods reach the head.",
            )
            yield Problem(path, f"is missing: {cluster.name!r} has neither a head nor the address of one.", remedy)
        if cluster.head is not None and cluster.head_address is not None:
            yield Problem(
                f"clusters.{index}.head_address",
                f"is {cluster.head_address!r}, but {cluster.name!r} has the head itself.",
                "Leave it out: pods of this cluster know the head.",
            )
    names = {cluster.name for cluster in values.clusters}
    for index, group in enumerate(values.groups):
        yield from _group_problems(f"groups.{index}", group, names, heads)


def _group_problems(path: str, group: Group, clusters: set[str], heads: list[str]) -> Iterator[Problem]:
    if group.name == CONTROL:
        yield Problem(f"{path}.name", f"is {CONTROL!r}, which is reserved for the head.", "Choose another name.")
    if group.cluster is not None and group.cluster not in clusters:
        there = ", ".join(sorted(clusters))
        yield Problem(f"{path}.cluster", f"is {group.cluster!r}, which is not a cluster.", f"Give one of {there}.")
    if group.gpu and group.tpu:
        yield Problem(path, f"has both gpu ({group.gpu!r}) and tpu.", "Make two groups.")
    if bool(group.accelerators) != bool(group.gpu or group.tpu):
        yield Problem(
            f"{path}.accelerators",
            f"is {group.accelerators}, but {'a kind is' if group.gpu or group.tpu else 'no kind is'} named.",
            "Give `gpu` or `tpu` and the number for one pod; or neither, and 0.",
        )
    if group.tpu is not None:
        yield from _tpu_problems(path, group, group.tpu, is_far=group.cluster is not None and [group.cluster] != heads)
    if group.spot == "gke" and group.grace_s > 25 and group.tpu is None:
        yield Problem(
            f"{path}.grace_s",
            f"is {group.grace_s}, but a spot machine of GKE ends 30 s after its notice.",
            "Set it to 25 or less.",
        )


def _tpu_problems(path: str, group: Group, tpu: Tpu, *, is_far: bool) -> Iterator[Problem]:
    chips = prod(map(int, tpu.topology.split("x")))
    if chips != tpu.hosts * group.accelerators:
        yield Problem(
            f"{path}.tpu",
            f"has the topology {tpu.topology} with {chips} chips, but {tpu.hosts} hosts with {group.accelerators} each have "
            f"{tpu.hosts * group.accelerators}.",
            "Correct `topology`, `hosts` or `accelerators`.",
        )
    if group.nodes % tpu.hosts:
        yield Problem(
            f"{path}.nodes",
            f"is {group.nodes}, which is not a multiple of the {tpu.hosts} hosts of a slice.",
            f"Give a multiple of {tpu.hosts}.",
        )
    if is_far and tpu.hosts > 1:
        yield Problem(
            f"{path}.cluster",
            f"is {group.cluster!r}, but a slice of {tpu.hosts} hosts needs KubeRay, which runs only in the head's cluster.",
            "Move the slices to the cluster with the head, or let their machines join (`atoll join`).",
        )


def _twice(path: str, names: list[str]) -> Iterator[Problem]:
    for name in sorted(name for name, uses in Counter(names).items() if uses > 1):
        yield Problem(path, f"has the name {name!r} {Counter(names)[name]} times.", "Give each its own name.")
