"""The values of an installation on Kubernetes, validated as a whole before anything is rendered.

    name: atoll
    image: atoll:0.1.0
    clusters:
      - {name: home, region: us-east1, head: {}}
      - {name: far, region: us-east5, head_address: "head.example:6379"}
    groups:
      - {name: us-east, nodes: 2, cpus: 4, memory_gib: 16}
      - {name: slices, cluster: far, nodes: 8, cpus: 24, memory_gib: 200, accelerators: 4,
         tpu: {accelerator: tpu-v6e-slice, topology: 4x4, hosts: 4}, spot: gke}

All problems are reported at once, with field, value and remedy. The JSON schema of ``Values`` is
deploy/kubernetes/values.schema.json, for editors and for Helm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from orchestrator.errors import PROBLEMS_MAX, ConfigurationError, InvalidJobSpec, Problem
from orchestrator.runtime.settings import ray_environment
from orchestrator.specification.bounds import (
    PRINTABLE,
    AcceleratorCount,
    CpuCount,
    Location,
    MemoryGib,
    Name,
    NodeCount,
    Section,
)
from orchestrator.specification.documents import read_document
from orchestrator.specification.validation import (
    collected,
    omitted_count,
    one_of,
    problems_of,
    right_part,
    wrong_places,
)
from orchestrator.system.roots import LOCAL, place_of

CONTROL = "control"
STATE = "/var/lib/atoll"
"""The state folder in the image."""
NODE_FOLDERS = ("cluster", "authority", "certificates", "head", "home", "runs", "database")
OWN_FOLDERS = (*(f"{STATE}/{name}" for name in NODE_FOLDERS), "/tmp", "/dev", "/proc", "/sys", "/etc", "/opt", "/usr")
"""Folders of the image, or volumes of the manifests. Nothing can be mounted at them, in them or above them."""
OWN_VOLUMES = frozenset({"tmp", "shm", *NODE_FOLDERS})
OWN_LABELS = ("app.kubernetes.io/part-of", "app.kubernetes.io/component")
OWN_PREFIXES = ("atoll/", "ray.io/", "leaderworkerset.sigs.k8s.io/")
OWN_VARIABLES = frozenset(
    {"HOME", "XDG_CACHE_HOME", "POD_IP", "ATOLL_DATABASE", "ATOLL_PACKAGES", "ATOLL_NOTICES"}
    | ray_environment(Path(STATE), head_storage=Path(STATE), certificates=Path(STATE)).keys()
)
MODULE_PREFIXES = ("PYTHON", "LD_PRELOAD", "LD_AUDIT")
OWN_OPTIONS = frozenset(
    [
        *("--home", "--runs", "--host", "--port", "--control", "--listener", "--certificate", "--key", "--insecure"),
        *("--data", "--checkpoints", "--allow", "--packages", "--jobs-max", "--database"),
        *("--retention-days", "--retention-failed-days", "--retention-bytes"),
    ]
)
"""Options of the service that the manifests set, or that have a value of their own."""
LWS_NAME_MAX = 49
"""LeaderWorkerSet appends the numbers of slice and host, and names are labels."""
SOURCES = (
    *("awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "configMap", "csi", "downwardAPI", "emptyDir"),
    *("ephemeral", "fc", "hostPath", "image", "iscsi", "nfs", "persistentVolumeClaim", "projected", "rbd", "secret"),
)
"""The kinds of volumes of a pod in Kubernetes 1.31."""

LabelName = Annotated[str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
LabelValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
Text = Annotated[str, Field(max_length=10_000, pattern=PRINTABLE)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
PackageName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)]
Folder = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._@+-]+)+$", max_length=4096)]
Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,253}:[0-9]{1,5}$")]
Image = Annotated[str, Field(pattern=r"^[a-z0-9][A-Za-z0-9._/:@-]{0,511}$")]
Cidr = Annotated[str, Field(pattern=r"^([0-9]{1,3}\.){3}[0-9]{1,3}/[0-9]{1,2}$|^[0-9a-f:]+/[0-9]{1,3}$")]
StorageClass = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Gib = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Cores = Annotated[float, Field(ge=0.01, le=10_000)]
Seconds = Annotated[int, Field(strict=True, ge=10, le=86_400)]
UserId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Topology = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}$")]
Cloud = Literal["gke", "eks", "aks"]


class Disk(Section):
    """A volume that outlives pods. Without ``storage_class`` it has that of the values, or the cluster's default."""

    gib: Gib
    storage_class: StorageClass | None = None


class Runs(Disk):
    """The folder of all jobs. Only head and service write it, and run on one machine, unless it is ``shared``.

    ``shared`` needs a class whose volumes several machines may write (ReadWriteMany). Islands then mount it too.
    """

    gib: Gib = 100
    shared: bool = False


class ServiceAccount(Section):
    """The identity of pods towards their cloud, by annotations (IRSA, Workload Identity). Created unless it exists."""

    name: Name
    annotations: dict[LabelName, Text] = Field(default_factory=dict)
    create: bool = True


class Volume(Section):
    """A volume of pods: where it is mounted, and its source as in a pod's specification, such as ``nfs: {server: …}``."""

    name: Name
    mount: Folder
    source: dict[str, dict[str, Any]]
    read_only: bool = True


class Requests(Section):
    """The scheduler reserves these amounts for a pod, where they are less than what the pod may use."""

    cpus: Cores | None = None
    memory_gib: MemoryGib | None = None


class Pods(Section):
    """These options apply to pods: the top-level ``pods`` to all of them. Head, service and groups add to them.

    A ``selector`` entry overrides the label that other values imply; null removes it. ``scratch_gib`` limits each volume
    on the machine's own disk, and ``shm_gib`` the shared memory (default: half of the memory). ``run_as_user`` 0 is for
    devices that only root may open.
    """

    labels: dict[LabelName, LabelValue] = Field(default_factory=dict)
    annotations: dict[LabelName, Text] = Field(default_factory=dict)
    priority_class: LabelValue | None = None
    service_account: ServiceAccount | None = None
    environment: dict[VariableName, Text] = Field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    selector: dict[LabelName, LabelValue | None] = Field(default_factory=dict)
    tolerate: tuple[LabelName, ...] = ()
    requests: Requests = Requests()
    scratch_gib: Gib | None = None
    shm_gib: MemoryGib | None = None
    run_as_user: UserId | None = None


class Head(Pods):
    """The pod of the Ray head, of synchronisers and of controllers. ``disk`` keeps Ray's state across restarts.

    Draining a machine waits for somebody to delete the head's pod, unless it is ``evictable``.
    """

    cpus: CpuCount = 4
    memory_gib: MemoryGib = 16.0
    disk: Disk = Disk(gib=10)
    evictable: bool = False


class Cluster(Section):
    """A Kubernetes cluster: the one with ``head``, or one whose machines join that head over ``head_address``.

    ``region`` is that of its groups; ``cloud`` decides which labels select accelerators.
    """

    name: Name
    region: Name | None = None
    cloud: Cloud | None = None
    head: Head | None = None
    head_address: Address | None = None


class Tpu(Section):
    """A TPU slice, as GKE names it: ``cloud.google.com/gke-tpu-accelerator`` and ``-topology``; ``hosts`` of one slice."""

    accelerator: LabelValue
    topology: Topology
    hosts: NodeCount = 1


class Group(Pods):
    """A node group: pods that are Ray nodes. ``nodes`` counts pods, of all slices; the amounts are of one pod.

    ``spot`` names the cloud, or the autoscaler, whose labels and taints of spot machines apply. ``grace_s`` is a pod's
    termination grace period. Draining machines takes at most ``unavailable_max`` islands (slices) away at a time.
    ``spread`` prefers machines and zones with few pods of the group.
    """

    name: Name
    region: Name | None = None
    cluster: Name | None = None
    nodes: Annotated[int, Field(strict=True, ge=0, le=1000)] = 1
    cpus: CpuCount
    memory_gib: MemoryGib
    accelerators: AcceleratorCount = 0
    gpu: LabelValue | None = None
    tpu: Tpu | None = None
    spot: Literal["gke", "eks", "karpenter", "aks"] | None = None
    grace_s: Seconds = 120
    unavailable_max: NodeCount = 1
    spread: bool = True

    @property
    def hosts(self) -> int:
        """The number of pods of one island at full size."""
        return self.tpu.hosts if self.tpu else 1


class RetentionLimits(Section):
    """Ended jobs are removed after so many days, and the oldest that have not failed while all take more than ``gib``."""

    days: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    failed_days: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    gib: Gib | None = None


class Service(Pods):
    """The REST service. Beyond its own namespace, only pods of the namespaces ``allow_from`` can reach it.

    ``data`` and ``checkpoints`` are the roots below which jobs may read data and keep checkpoints: URLs of stores, or
    folders of ``volumes``. ``allow`` are packages that jobs may name. ``database_secret`` holds a database's URL under the
    key ``url``; without it the service keeps SQLite on ``disk``. ``retention`` limits what ended jobs keep (default: all).
    ``arguments`` are further options of ``api.serve``.
    """

    cpus: CpuCount = 1
    memory_gib: MemoryGib = 4.0
    disk: Disk = Disk(gib=10)
    allow_from: tuple[Name, ...] = ()
    data: tuple[Location, ...] = ()
    checkpoints: tuple[Location, ...] = ()
    allow: tuple[PackageName, ...] = ()
    jobs_max: Annotated[int, Field(strict=True, ge=1, le=10_000)] | None = None
    retention: RetentionLimits = RetentionLimits()
    database_secret: Name | None = None
    arguments: tuple[Text, ...] = ()


class Monitoring(Section):
    """Prometheus scrapes the service. ``namespace`` is that of the scraper.

    ``kind`` is prometheus-operator, which finds its monitors and rules by ``labels``, or Google's managed service. The
    alerts and the dashboards are rendered too, for an operator and for a Grafana that loads ConfigMaps with these labels.
    """

    kind: Literal["prometheus-operator", "google"] = "prometheus-operator"
    namespace: Name
    labels: dict[LabelName, LabelValue] = Field(default_factory=dict)
    rules: bool = True
    dashboards: bool = True
    dashboard_labels: dict[LabelName, LabelValue] = Field(default_factory=lambda: {"grafana_dashboard": "1"})


class Values(Section):
    """``secret`` holds the cluster's token, ``metrics_secret`` that of a viewer; both under the key ``token``.

    ``authority_secret`` holds the files of an authority's folder (``atoll certificates authority``); each pod is issued its
    own certificate at its start. With ``insecure`` nothing is encrypted, for a network that encrypts itself.

    Regions are labels of ours. With ``region_selector`` pods also run only on machines whose label
    ``topology.kubernetes.io/region`` says so. ``packages`` are folders of ``pods.volumes`` with packages that jobs may name.
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
    pods: Pods = Pods()
    service: Service = Service()
    runs: Runs = Runs()
    storage_class: StorageClass | None = None
    region_selector: bool = False
    packages: tuple[Folder, ...] = ()
    monitoring: Monitoring | None = None
    join_from: tuple[Cidr, ...] = ()
    partition_tolerance_s: Annotated[float, Field(ge=3.0, le=1e6)] = 600.0

    @property
    def home(self) -> Cluster:
        """The cluster with the head."""
        return next(cluster for cluster in self.clusters if cluster.head is not None)

    def cluster_of(self, group: Group) -> Cluster:
        name = group.cluster or self.home.name
        return next(cluster for cluster in self.clusters if cluster.name == name)

    def groups_of(self, cluster: str) -> list[Group]:
        return [group for group in self.groups if (group.cluster or self.home.name) == cluster]

    def region_of(self, group: Group) -> str:
        """Return the region of the group. Validation has made sure that there is one."""
        region = group.region or self.cluster_of(group).region
        assert region is not None
        return region


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of pod: where its values are in the document, and the values."""

    path: str
    own: Any

    def volumes(self, common: Pods) -> tuple[Volume, ...]:
        return (*common.volumes, *self.own.volumes)


def merged(common: Pods, own: Pods) -> Pods:
    """Return the options of pods with ``own`` values, which add to the common ones and override them."""
    return Pods(
        labels={**common.labels, **own.labels},
        annotations={**common.annotations, **own.annotations},
        priority_class=own.priority_class or common.priority_class,
        service_account=own.service_account or common.service_account,
        environment={**common.environment, **own.environment},
        volumes=(*common.volumes, *own.volumes),
        selector={**common.selector, **own.selector},
        tolerate=(*common.tolerate, *own.tolerate),
        requests=Requests(
            cpus=own.requests.cpus or common.requests.cpus,
            memory_gib=own.requests.memory_gib or common.requests.memory_gib,
        ),
        scratch_gib=own.scratch_gib or common.scratch_gib,
        shm_gib=own.shm_gib or common.shm_gib,
        run_as_user=common.run_as_user if own.run_as_user is None else own.run_as_user,
    )


def read_values(path: Path) -> Values:
    """Read the values of this file. Raises InvalidJobSpec with every problem, ConfigurationError for an unreadable file."""
    document = read_document(path)
    omitted, problems, values = 0, [], None
    try:
        values = Values.model_validate(document)
        readable: Any = values
    except ValidationError as error:
        problems = problems_of(error, unknown="Remove it, or see docs/guide/kubernetes.md for its name.", model=Values)
        omitted = omitted_count(error, Values)
        readable, _ = right_part(Values, document, wrong_places(error, Values))
    for rule in RULES:
        problems += collected(rule(readable))
    if values is None or problems:
        omitted += max(0, len(problems) - PROBLEMS_MAX)
        detail = f"the values in {path} are invalid"
        raise InvalidJobSpec(detail=detail, problems=tuple(problems[:PROBLEMS_MAX]), omitted_count=omitted)
    return values


# ── rules between fields: each is a generator, and stops at a value that is invalid on its own ────────────────────────


def _names(values: Values) -> Iterator[Problem]:
    heads = [cluster.name for cluster in values.clusters if cluster.head is not None]
    if len(heads) != 1:
        named = ", ".join(heads) or "none"
        yield Problem("clusters", f"has {len(heads)} with a head ({named}).", "Give `head` to exactly one cluster.")
    yield from _twice("clusters", [cluster.name for cluster in values.clusters])
    yield from _twice("groups", [group.name for group in values.groups])


def _addresses(values: Values) -> Iterator[Problem]:
    for index, cluster in enumerate(values.clusters):
        path = f"clusters.{index}.head_address"
        if cluster.head is None and cluster.head_address is None:
            message = f"is missing: {cluster.name!r} has neither a head nor the address of one."
            yield Problem(path, message, "Give the name and port under which its pods reach the head.")
        if cluster.head is not None and cluster.head_address is not None:
            message = f"is {cluster.head_address!r}, but {cluster.name!r} has the head itself."
            yield Problem(path, message, "Leave it out: pods of this cluster know the head.")
        if cluster.head_address is not None and not 0 < int(cluster.head_address.rpartition(":")[2]) < 65536:
            yield Problem(path, f"is {cluster.head_address!r}, whose port cannot be.", "Give a port from 1 to 65535.")


def _groups(values: Values) -> Iterator[Problem]:
    clusters = {cluster.name: cluster for cluster in values.clusters}
    heads = [cluster.name for cluster in values.clusters if cluster.head is not None]
    for index, group in enumerate(values.groups):
        path = f"groups.{index}"
        if group.name == CONTROL:
            yield Problem(f"{path}.name", f"is {CONTROL!r}, which is reserved for the head.", "Choose another name.")
        if group.cluster is not None and group.cluster not in clusters:
            there = ", ".join(sorted(clusters))
            yield Problem(f"{path}.cluster", f"is {group.cluster!r}, which is not a cluster.", f"Give one of {there}.")
        name = group.cluster or (heads[0] if heads else "")
        if group.region is None and name in clusters and clusters[name].region is None:
            message = f"is missing, and its cluster {name!r} has no region."
            yield Problem(f"{path}.region", message, "Give the region of the group or of its cluster.")
        yield from _accelerators(path, group)
        if group.tpu is not None:
            yield from _slices(path, group, group.tpu)
            if name in clusters and name not in heads and len(f"{values.name}-{group.name}") > LWS_NAME_MAX:
                message = f"is {group.name!r}, and {values.name}-{group.name} has over {LWS_NAME_MAX} characters."
                yield Problem(f"{path}.name", message, "Choose a shorter name.")
        if group.spot == "gke" and group.grace_s > 25 and group.tpu is None:
            message = f"is {group.grace_s}, but a spot machine of GKE ends 30 s after its notice."
            yield Problem(f"{path}.grace_s", message, "Set it to 25 or less.")


def _accelerators(path: str, group: Group) -> Iterator[Problem]:
    if group.gpu and group.tpu:
        yield Problem(path, f"has both gpu ({group.gpu!r}) and tpu.", "Make two groups.")
    if bool(group.accelerators) != bool(group.gpu or group.tpu):
        yield Problem(
            f"{path}.accelerators",
            f"is {group.accelerators}, but {'a kind is' if group.gpu or group.tpu else 'no kind is'} named.",
            "Give `gpu` or `tpu` and the number for one pod; or neither, and 0.",
        )


def _slices(path: str, group: Group, tpu: Tpu) -> Iterator[Problem]:
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


def _pods(values: Values) -> Iterator[Problem]:
    yield from _pod_options("pods", values.pods)
    for role in roles(values):
        yield from _pod_options(role.path, role.own)
        yield from _requests(values.pods, role)
        yield from _twice(f"{role.path}.volumes", [volume.name for volume in role.volumes(values.pods)])
        yield from _twice(f"{role.path}.volumes", [volume.mount for volume in role.volumes(values.pods)], "mount")


def _pod_options(path: str, pods: Pods) -> Iterator[Problem]:
    for name in [*pods.labels, *pods.annotations]:
        if name in OWN_LABELS or name.startswith(OWN_PREFIXES):
            yield Problem(f"{path}.labels", f"has {name!r}, which the manifests set.", "Remove it.")
    for name in pods.environment:
        if name in OWN_VARIABLES or name.startswith("RAY_"):
            yield Problem(f"{path}.environment", f"has {name!r}, which the manifests set.", "Remove it.")
        if name.startswith(MODULE_PREFIXES):
            message = f"has {name!r}, which would change where programs find their code."
            yield Problem(f"{path}.environment", message, "Remove it; `packages` adds folders with packages.")
    for index, volume in enumerate(pods.volumes):
        yield from _volume(f"{path}.volumes.{index}", volume)


def _volume(path: str, volume: Volume) -> Iterator[Problem]:
    if volume.name in OWN_VOLUMES:
        yield Problem(f"{path}.name", f"is {volume.name!r}, a volume of the manifests.", "Choose another name.")
    if ".." in volume.mount.split("/") or "." in volume.mount.split("/"):
        yield Problem(f"{path}.mount", f"is {volume.mount!r}, which contains . or ...", "Write the path without them.")
    for folder in OWN_FOLDERS:
        if _within(volume.mount, folder) or _within(folder, volume.mount):
            message = f"is {volume.mount!r}, which collides with {folder} of the image."
            yield Problem(f"{path}.mount", message, f"Mount it elsewhere, such as at {STATE}/{volume.name}.")
    if len(volume.source) != 1:
        kinds = ", ".join(volume.source) or "none"
        yield Problem(f"{path}.source", f"has {len(volume.source)} kinds ({kinds}).", "Give exactly one.")
    for kind in volume.source:
        if kind not in SOURCES:
            yield Problem(f"{path}.source", *one_of(kind, SOURCES))


def _requests(common: Pods, role: Role) -> Iterator[Problem]:
    for field in ("cpus", "memory_gib"):
        limit, own, shared = (getattr(each, field) for each in (role.own, role.own.requests, common.requests))
        if (own or shared or 0) > limit:
            path = f"{role.path}.requests.{field}" if own else f"pods.requests.{field}"
            message = f"is {own or shared:g}, more than the {limit:g} of {role.path}.{field}."
            yield Problem(path, message, "Request at most what the pod may use.")


def _users(values: Values) -> Iterator[Problem]:
    """Yield pods whose user differs from the head's, so that one could not write the other's folders of jobs."""
    for cluster in values.clusters:
        if cluster.head is None:
            continue
        expected = merged(values.pods, cluster.head).run_as_user
        writers: list[tuple[str, Pods]] = [("service", values.service)]
        if values.runs.shared:
            near = [(index, each) for index, each in enumerate(values.groups) if each.cluster in (None, cluster.name)]
            writers += [(f"groups.{index}", each) for index, each in near]
        for path, own in writers:
            user = merged(values.pods, own).run_as_user
            if user != expected:
                message = (
                    f"is {_user(user)}, but the head, which writes the same folder of runs, has {_user(expected)}."
                )
                yield Problem(f"{path}.run_as_user", message, "Give both the same, or set `pods.run_as_user`.")


def _user(user: int | None) -> str:
    return "the image's user" if user is None else str(user)


def _accounts(values: Values) -> Iterator[Problem]:
    first_uses: dict[str, tuple[str, ServiceAccount]] = {}
    for path, pods in (("pods", values.pods), *((role.path, role.own) for role in roles(values))):
        account = pods.service_account
        if account is None:
            continue
        first, other = first_uses.setdefault(account.name, (path, account))
        if other != account:
            message = f"is {account.name!r} with other values than {first}.service_account."
            yield Problem(f"{path}.service_account", message, "Give both the same values, or another name.")
        if not account.create and account.annotations:
            message = f"has annotations, but {account.name!r} is not created here."
            yield Problem(f"{path}.service_account", message, "Set `create: true`, or annotate it where it is created.")


def _roots(values: Values) -> Iterator[Problem]:
    for field in ("data", "checkpoints"):
        for index, root in enumerate(getattr(values.service, field)):
            path = f"service.{field}.{index}"
            try:
                place = place_of(root, "data" if field == "data" else "checkpoints")
            except ConfigurationError as error:
                remedy = "Give an absolute folder, or a URL such as s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."
                yield Problem(path, f"is {root!r}: {error.detail}.", remedy)
                continue
            if place.protocol == LOCAL and not (field == "checkpoints" and _within(root, f"{STATE}/runs")):
                yield from _mounted(values, path, root, written=field == "checkpoints")
    for index, folder in enumerate(values.packages):
        yield from _mounted(values, f"packages.{index}", folder, written=False)


def _mounted(values: Values, path: str, folder: str, *, written: bool) -> Iterator[Problem]:
    """Yield a problem if some pod does not mount this folder: of checkpoints the head and the service, of data all."""
    mounting = {
        role.path: [volume for volume in role.volumes(values.pods) if _within(folder, volume.mount)]
        for role in roles(values)
        if not (written and isinstance(role.own, Group))
    }
    if without := [each for each, volumes in mounting.items() if not volumes]:
        message = f"is {folder!r}, which no volume of {', '.join(without[:5])}{' …' * (len(without) > 5)} contains."
        yield Problem(path, message, "Add it to `pods.volumes`, or give the URL of a store.")
    if written and (
        fixed := sorted({volume.name for each in mounting.values() for volume in each if volume.read_only})
    ):
        yield Problem(
            path, f"is {folder!r}, on the read-only volume {', '.join(fixed)}.", "Set `read_only: false` there."
        )


def _service(values: Values) -> Iterator[Problem]:
    for index, argument in enumerate(values.service.arguments):
        if (name := argument.partition("=")[0]) in OWN_OPTIONS:
            message = f"is {argument!r}, which the manifests set."
            yield Problem(f"service.arguments.{index}", message, f"Remove {name}; see `service` for its values.")


RULES: tuple[Callable[[Values], Iterator[Problem]], ...] = (
    *(_names, _addresses, _groups, _pods, _users, _accounts, _roots, _service),
)


def roles(values: Values) -> Iterator[Role]:
    """Yield every kind of pod of the installation."""
    for index, cluster in enumerate(values.clusters):
        if cluster.head is not None:
            yield Role(f"clusters.{index}.head", cluster.head)
    yield Role("service", values.service)
    for index, group in enumerate(values.groups):
        yield Role(f"groups.{index}", group)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _twice(path: str, names: list[str], what: str = "name") -> Iterator[Problem]:
    for name in sorted(name for name, uses in Counter(names).items() if uses > 1):
        message = f"has the {what} {name!r} {Counter(names)[name]} times."
        yield Problem(path, message, f"Give each its own {what}.")
