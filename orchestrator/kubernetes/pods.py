"""The pods of an installation: containers, volumes, and where they may run.

Every pod runs as the image's unprivileged user with a read-only root, has the cluster's Ray settings
(``runtime.settings``), and probes that work in this image. Its first container issues a certificate for the pod's address;
only that container sees the authority's key. Selectors and tolerations are those of the pod's cloud.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.kubernetes.values import STATE, Cluster, Group, Head, Pods, RetentionLimits, Service, Values, merged
from orchestrator.runtime.settings import ray_environment
from orchestrator.system import user_packages

Manifest = dict[str, Any]

TOKEN_FOLDER = f"{STATE}/cluster"
HEAD_STORAGE = f"{STATE}/head/storage"
AUTHORITY_FOLDER, CERTIFICATES_FOLDER = f"{STATE}/authority", f"{STATE}/certificates"
DATABASE_FOLDER = f"{STATE}/database"
GCS_PORT, SERVICE_PORT = 6379, 8470
CLUSTER_DOMAIN = "svc.cluster.local"
USER = 10001
"""The user id in the image."""
NODE_PROGRAM = ("python", "-I", "-u", "/opt/atoll/deploy/node.py")
PART, COMPONENT = "app.kubernetes.io/part-of", "app.kubernetes.io/component"
WRITES_RUNS = {"atoll/runs": "writer"}
"""Of head and service: a volume that one machine mounts keeps them together."""
HOSTNAME, ZONE, REGION = "kubernetes.io/hostname", "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
LEAVING_S = 5
"""The part of a pod's termination grace that is left for its processes after its islands have drained."""
SCRATCH_GIB = 20
"""The default limit of a volume on the machine's own disk: sessions, logs, compiled steps, parts of checkpoints."""
LOGS_GIB = 1
"""What a container may write beside its volumes: the log that Kubernetes keeps."""
TPU_RESOURCE, GPU_RESOURCE = "google.com/tpu", "nvidia.com/gpu"
GKE_TPU, GKE_TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
GKE_GPU = "cloud.google.com/gke-accelerator"
SPOT = {
    "gke": ("cloud.google.com/gke-spot", "true"),
    "eks": ("eks.amazonaws.com/capacityType", "SPOT"),
    "karpenter": ("karpenter.sh/capacity-type", "spot"),
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),
}
"""Label and value of spot machines. If they have a taint, it is the same."""
NOTICES = {"gke": "gce", "eks": "aws", "karpenter": "aws", "aks": "azure"}
STAYS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Annotations that keep autoscalers from taking the pod's machine away."""
KILL_HEAD = "import psutil; [p.kill() for p in psutil.process_iter() if p.name() in ('raylet', 'gcs_server')]"


# ── the three kinds of pods ───────────────────────────────────────────────────────────────────────────────────────────


def head_pod(values: Values, head: Head) -> Manifest:
    """The head is killed at its end, never stopped gracefully, as in deploy/compose.yaml and for the same reason."""
    own = merged(values.pods, head)
    storage = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    resources = resources_of(own, head.cpus, head.memory_gib)
    container = {
        **node_container(values, own, "ray-head", resources, Path(HEAD_STORAGE), storage),
        "ports": [{"name": "gcs-server", "containerPort": GCS_PORT}],
        "lifecycle": {"preStop": {"exec": {"command": ["python", "-I", "-c", KILL_HEAD]}}},
    }
    container["volumeMounts"].append({"name": "head", "mountPath": f"{STATE}/head"})
    volumes = [volume_of(values, "runs"), volume_of(values, "head")]
    template = pod(values, own, container, "head", volumes, head.memory_gib, names=head_names(values))
    if not head.evictable:
        template["metadata"]["annotations"] = {**STAYS, **own.annotations}
    return together(values, template)


def group_pod(values: Values, group: Group, command: list[str] | None = None) -> Manifest:
    """Return the pod of a node group. With ``command`` it joins the head itself; else KubeRay starts its node."""
    own = merged(values.pods, group)
    is_far = command is not None
    name = "node" if is_far else "ray-worker"
    container = node_container(values, own, name, amounts_of(own, group), extra=environment_of(group))
    if command is None:
        container["lifecycle"] = {"preStop": {"exec": {"command": leave_command(group)}}}
    else:
        container["command"] = command
    shared = values.runs.shared and not is_far
    runs = volume_of(values, "runs") if shared else {"name": "runs", "emptyDir": {"sizeLimit": scratch(own)}}
    template = pod(values, own, container, "node", [runs], group.memory_gib)
    template["metadata"]["labels"]["atoll/group"] = group.name
    spec = template["spec"]
    spec["terminationGracePeriodSeconds"] = group.grace_s
    selector = {**implied_selector(values, group), **own.selector}
    spec["nodeSelector"] = {name: value for name, value in selector.items() if value is not None}
    spec["tolerations"] = [*spec.get("tolerations", []), *implied_tolerations(group)]
    if group.spread and group.tpu is None:
        spec["topologySpreadConstraints"] = [spread_over(values, group, key) for key in (HOSTNAME, ZONE)]
    return template


def service_pod(values: Values, service: Service) -> Manifest:
    own = merged(values.pods, service)
    probed = {"port": "http", "scheme": "HTTP" if values.insecure else "HTTPS"}
    ready = {"httpGet": {"path": "/readyz", **probed}, "timeoutSeconds": 5, "periodSeconds": 10}
    alive = {"httpGet": {"path": "/healthz", **probed}, "timeoutSeconds": 5, "periodSeconds": 10}
    resources = resources_of(own, service.cpus, service.memory_gib)
    service_container = container(
        values, "service", {**environment_with(values, own), **ray_settings(values)}, resources
    )
    service_container |= {
        "args": service_arguments(values, service),
        "ports": [{"name": "http", "containerPort": SERVICE_PORT}],
        "startupProbe": {**alive, "failureThreshold": 30},
        "livenessProbe": {**alive, "failureThreshold": 6},
        "readinessProbe": {**ready, "failureThreshold": 3},
        "volumeMounts": [
            *mounts(values, own),
            {"name": "runs", "mountPath": f"{STATE}/runs"},
            {"name": "home", "mountPath": f"{STATE}/home"},
        ],
    }
    volumes = [volume_of(values, "runs"), volume_of(values, "home")]
    if service.database_secret:
        service_container["volumeMounts"].append({"name": "database", "mountPath": DATABASE_FOLDER, "readOnly": True})
        volumes.append(secret_volume("database", service.database_secret, user_of(own)))
    names = service_names(values, values.name)
    return together(values, pod(values, own, service_container, "service", volumes, service.memory_gib, names=names))


def service_arguments(values: Values, service: Service) -> list[str]:
    """Return the arguments of deploy/node.py: its own, and after ``--`` those of ``api.serve``."""
    options = [
        *(word for kind in ("data", "checkpoints") for root in getattr(service, kind) for word in (f"--{kind}", root)),
        *(word for package in service.allow for word in ("--allow", package)),
        *(word for folder in values.packages for word in ("--packages", folder)),
        *(["--jobs-max", str(service.jobs_max)] if service.jobs_max else []),
        *retention_arguments(service.retention),
        *service.arguments,
    ]
    return [
        *("--head", f"{head_service_name(values)}:{GCS_PORT}", "service"),
        *(["--insecure"] if values.insecure else []),
        *(["--database-file", f"{DATABASE_FOLDER}/url"] if service.database_secret else []),
        *(["--", *options] if options else []),
    ]


def retention_arguments(limits: RetentionLimits) -> list[str]:
    size = None if limits.gib is None else limits.gib << 30
    named = {"days": limits.days, "failed-days": limits.failed_days, "bytes": size}
    return [word for name, value in named.items() if value is not None for word in (f"--retention-{name}", str(value))]


# ── containers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def node_container(
    values: Values,
    own: Pods,
    name: str,
    resources: Manifest,
    head_storage: Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> Manifest:
    """Return a Ray node's container. Its probes check the raylet; KubeRay's need dashboard agents, which do not run here."""
    probe = {"exec": {"command": [*NODE_PROGRAM, "alive"]}, "timeoutSeconds": 10, "periodSeconds": 15}
    environment = {**environment_with(values, own), **ray_settings(values, head_storage), **(extra or {})}
    return {
        **container(values, name, environment, resources),
        "startupProbe": {**probe, "failureThreshold": 40},
        "livenessProbe": {**probe, "failureThreshold": 4},
        "readinessProbe": {**probe, "failureThreshold": 2},
        "volumeMounts": [*mounts(values, own), {"name": "runs", "mountPath": f"{STATE}/runs"}],
    }


def container(values: Values, name: str, environment: Mapping[str, str], resources: Mapping[str, Any]) -> Manifest:
    settings = {"HOME": "/tmp", "XDG_CACHE_HOME": "/tmp/cache", **environment}
    return {
        "name": name,
        "image": values.image,
        "env": [{"name": each, "value": value} for each, value in sorted(settings.items())],
        "resources": dict(resources),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def environment_with(values: Values, own: Pods) -> dict[str, str]:
    """Return the variables that the values name."""
    return {**own.environment, **user_packages.variables(values.packages)}


def ray_settings(values: Values, head_storage: Path | None = None) -> dict[str, str]:
    certificates = None if values.insecure else Path(CERTIFICATES_FOLDER)
    return ray_environment(Path(TOKEN_FOLDER, "token"), values.partition_tolerance_s, head_storage, certificates)


def environment_of(group: Group) -> dict[str, str]:
    """Return the group's own variables. Clouds are queried for notices on spot machines only."""
    notices = {"ATOLL_NOTICES": NOTICES[group.spot]} if group.spot else {}
    # at SIGTERM; its preStop hook has drained the node by then
    return {**notices, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1"}


def leave_command(group: Group) -> list[str]:
    return ["atoll", "leave", "--grace", str(group.grace_s - LEAVING_S), "--cause", "Kubernetes ends the pod"]


def join_command(values: Values, cluster: Cluster, group: Group) -> list[str]:
    """Return the command of a pod in a cluster without the head. The node's own variables are passed on by name."""
    assert cluster.head_address is not None
    command = [
        *("atoll", "join", cluster.head_address, "--token-file", f"{TOKEN_FOLDER}/token"),
        *("--group", group.name, "--region", values.region_of(group), "--cpus", str(group.cpus)),
        *(["--insecure"] if values.insecure else ["--certificates", CERTIFICATES_FOLDER]),
        *("--grace", str(group.grace_s - LEAVING_S), "--partition-tolerance", f"{values.partition_tolerance_s:g}"),
        *(word for name in sorted(merged(values.pods, group).environment) for word in ("--pass-environment", name)),
        *(word for folder in values.packages for word in ("--packages", folder)),
    ]
    if group.gpu:
        command += ["--gpus", str(group.accelerators)]
    if group.tpu:
        command += ["--resources", f"TPU={group.accelerators}"]
    if group.hosts > 1 and group.tpu:  # LeaderWorkerSet sets both variables in pods that request TPUs
        slice_labels = {"slice-name": "$(TPU_NAME)", "worker-id": "$(TPU_WORKER_ID)", "topology": group.tpu.topology}
        command += [word for name, value in slice_labels.items() for word in ("--labels", f"ray.io/tpu-{name}={value}")]
    return command


def issuing(values: Values, resources: Mapping[str, Any], names: Iterable[str]) -> Manifest:
    """Return the init container that issues its pod's certificate. It may run again."""
    limits = {"cpu": "1", "memory": "256Mi"}
    requested = {name: min(limits[name], str(resources["requests"][name]), key=quantity) for name in limits}
    init_container = container(values, "certificate", {}, {"requests": requested, "limits": limits})
    init_container["env"].append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    named = [word for name in ("$(POD_IP)", *names) for word in ("--name", name)]
    return {
        **init_container,
        "command": ["atoll", "certificates", "issue", AUTHORITY_FOLDER, CERTIFICATES_FOLDER, "--replace", *named],
        "volumeMounts": [
            {"name": "authority", "mountPath": AUTHORITY_FOLDER, "readOnly": True},
            {"name": "certificates", "mountPath": CERTIFICATES_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


# ── names, by which certificates are issued ───────────────────────────────────────────────────────────────────────────


def head_service_name(values: Values) -> str:
    return f"{values.name}-head"


def head_names(values: Values) -> list[str]:
    """Return the names of the head: ours, KubeRay's, and those under which other clusters reach it."""
    outer = [each.head_address.rpartition(":")[0] for each in values.clusters if each.head_address]
    kuberay = service_names(values, f"{values.name}-head-svc")
    return [*service_names(values, head_service_name(values)), *kuberay, *outer]


def service_names(values: Values, name: str) -> list[str]:
    """Return the names of a Service within its Kubernetes cluster."""
    return [name, *(f"{name}.{values.namespace}{more}" for more in ("", ".svc", f".{CLUSTER_DOMAIN}"))]


# ── the pod around the container ──────────────────────────────────────────────────────────────────────────────────────


def pod(
    values: Values,
    own: Pods,
    container: Manifest,
    component: str,
    volumes: Iterable[Manifest],
    memory_gib: float,
    names: Iterable[str] = (),
) -> Manifest:
    """Return a pod template with the options ``own``. ``names`` go into its certificate, beside its address."""
    user = user_of(own)
    shared = mebibytes(own.shm_gib or memory_gib / 2)
    spec: Manifest = {
        "containers": [container],
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": user != 0,
            "runAsUser": user,
            "runAsGroup": user,
            **({"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"} if user else {}),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            secret_volume("cluster", values.secret, user),
            {"name": "tmp", "emptyDir": {"sizeLimit": scratch(own)}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared}},
            *volumes,
            *({"name": volume.name, **volume.source} for volume in own.volumes),
        ],
    }
    if not values.insecure:
        spec["initContainers"] = [issuing(values, container["resources"], names)]
        spec["volumes"] += [
            secret_volume("authority", values.authority_secret, user),
            {"name": "certificates", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ]
    if values.pull_secret:
        spec["imagePullSecrets"] = [{"name": values.pull_secret}]
    if own.priority_class:
        spec["priorityClassName"] = own.priority_class
    if own.service_account:
        spec["serviceAccountName"] = own.service_account.name
    if selector := {name: value for name, value in own.selector.items() if value is not None}:
        spec["nodeSelector"] = selector
    if own.tolerate:
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in own.tolerate]
    metadata: Manifest = {"labels": {**own.labels, **labels_of(values, component)}}
    return {
        "metadata": {**metadata, **({"annotations": dict(own.annotations)} if own.annotations else {})},
        "spec": spec,
    }


def together(values: Values, template: Manifest) -> Manifest:
    """Keep this pod on the machine of the other pod that writes the folder of all jobs, unless its volume is shared."""
    if values.runs.shared:
        return template
    labels = {PART: values.name, **WRITES_RUNS}
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": HOSTNAME}
    template["metadata"]["labels"] |= WRITES_RUNS
    template["spec"]["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return template


def mounts(values: Values, own: Pods) -> list[Manifest]:
    """Return the mounts that containers of nodes and of the service share, and those of their own volumes."""
    certificates = {"name": "certificates", "mountPath": CERTIFICATES_FOLDER, "readOnly": True}
    return [
        {"name": "cluster", "mountPath": TOKEN_FOLDER, "readOnly": True},
        *([] if values.insecure else [certificates]),
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        *({"name": each.name, "mountPath": each.mount, "readOnly": each.read_only} for each in own.volumes),
    ]


def volume_of(values: Values, name: str) -> Manifest:
    return {"name": name, "persistentVolumeClaim": {"claimName": f"{values.name}-{name}"}}


def user_of(own: Pods) -> int:
    return USER if own.run_as_user is None else own.run_as_user


def secret_volume(name: str, secret: str, user: int) -> Manifest:
    """Return a volume with files of root. Other users read them by the pod's group, which a pod of root does not have."""
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440 if user else 0o400}}


def labels_of(values: Values, component: str) -> dict[str, str]:
    return {PART: values.name, COMPONENT: component}


# ── where a group may run, and what a pod gets ────────────────────────────────────────────────────────────────────────


def implied_selector(values: Values, group: Group) -> dict[str, str | None]:
    """Return the node selector that the group's values imply."""
    selector: dict[str, str | None] = {REGION: values.region_of(group)} if values.region_selector else {}
    if group.tpu:
        selector |= {GKE_TPU: group.tpu.accelerator, GKE_TOPOLOGY: group.tpu.topology}
    if group.gpu and (group.spot == "gke" or values.cluster_of(group).cloud == "gke"):
        selector[GKE_GPU] = group.gpu
    if group.spot:
        label, value = SPOT[group.spot]
        selector[label] = value
    return selector


def implied_tolerations(group: Group) -> list[Manifest]:
    tolerations: list[Manifest] = []
    if group.tpu:
        tolerations.append({"key": TPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"})
    if group.gpu:
        tolerations.append({"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"})
    if group.spot:
        key, value = SPOT[group.spot]
        tolerations.append({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"})
    return tolerations


def spread_over(values: Values, group: Group, key: str) -> Manifest:
    chosen = {"matchLabels": {PART: values.name, "atoll/group": group.name}}
    return {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": chosen}


def amounts_of(own: Pods, group: Group) -> Manifest:
    resources = resources_of(own, group.cpus, group.memory_gib, scratch_volumes=2)
    if group.accelerators:
        kind = TPU_RESOURCE if group.tpu else GPU_RESOURCE
        for amounts in resources.values():
            amounts[kind] = str(group.accelerators)
    return resources


def resources_of(own: Pods, cpus: int, memory_gib: float, scratch_volumes: int = 1) -> Manifest:
    """Return requests and limits. CPUs and memory are guaranteed, unless the values request less."""
    scratch_gib = (own.scratch_gib or SCRATCH_GIB) * scratch_volumes + LOGS_GIB
    requested = {
        "cpu": f"{own.requests.cpus or cpus:g}",
        "memory": mebibytes(own.requests.memory_gib or memory_gib),
        "ephemeral-storage": f"{LOGS_GIB}Gi",
    }
    limits = {"cpu": str(cpus), "memory": mebibytes(memory_gib), "ephemeral-storage": f"{scratch_gib}Gi"}
    return {"requests": requested, "limits": limits}


def scratch(own: Pods) -> str:
    return f"{own.scratch_gib or SCRATCH_GIB}Gi"


def mebibytes(gib: float) -> str:
    return f"{round(gib * 1024)}Mi"


def quantity(text: str) -> float:
    """Return the number in an amount of CPUs or of mebibytes."""
    return float(text.removesuffix("Mi"))
