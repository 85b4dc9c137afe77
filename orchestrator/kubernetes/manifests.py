"""The manifests of an installation: plain documents for ``kubectl apply --filename -``.

    the cluster with the head   RayCluster (KubeRay): the head, a worker group for every node group; its address as `head`;
                                service, volumes, NetworkPolicy, PodMonitor
    any other                   a Deployment for every node group, whose pods join the head (``atoll join``); NetworkPolicy

All nodes form one Ray cluster: a job's islands, in all regions, have one synchroniser. Every pod runs as the image's
unprivileged user with a read-only root, and drains its islands before it ends. Ray's state is kept on the head's volume, and
a head is killed, never stopped gracefully, as in deploy/compose.yaml and for the same reason.

All connections use TLS: a pod's init container issues a certificate for the pod's address, and only that container sees the
authority's key. All pods have the same Ray settings (``runtime.settings``), probes that work in this image, and the
selectors and tolerations of their cloud. Secrets are named, not created.

Sources: KubeRay 1.6's RayCluster (ray.io/v1); GKE, "Deploy TPU workloads" and "Spot VMs"; EKS, "Managed node groups"; AKS,
"Add an Azure Spot node pool".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.kubernetes.values import Cluster, Disk, Group, Head, Monitoring, Values
from orchestrator.runtime.settings import CONTROL_GROUP, GROUP_LABEL, REGION_LABEL, ray_environment

Manifest = dict[str, Any]

STATE = "/var/lib/atoll"
TOKEN_FOLDER = f"{STATE}/cluster"
HEAD_STORAGE = f"{STATE}/head/storage"
AUTHORITY_FOLDER, CERTIFICATES_FOLDER = f"{STATE}/authority", f"{STATE}/certificates"
CLUSTER_DOMAIN = "svc.cluster.local"
USER = 10001
"""The user id in the image."""
GCS_PORT, SERVICE_PORT = 6379, 8470
NODE_PROGRAM = ("python", "-I", "-u", "/opt/atoll/deploy/node.py")
PART, COMPONENT = "app.kubernetes.io/part-of", "app.kubernetes.io/component"
NODE_TYPE = "ray.io/node-type"
LEAVING_S = 5
"""The part of a pod's termination grace that is left for its processes after its islands have drained."""
TPU_RESOURCE, GPU_RESOURCE = "google.com/tpu", "nvidia.com/gpu"
GKE_TPU, GKE_TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
GKE_GPU = "cloud.google.com/gke-accelerator"
SPOT = {
    "gke": ("cloud.google.com/gke-spot", "true"),
    "eks": ("eks.amazonaws.com/capacityType", "SPOT"),
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),
}
"""Label and value of spot machines. If they have a taint, it is the same."""
NOTICES = {"gke": "gce", "eks": "aws", "aks": "azure"}
PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
KILL_HEAD = "import psutil; [p.kill() for p in psutil.process_iter() if p.name() in ('raylet', 'gcs_server')]"


def rendered(values: Values, cluster: Cluster) -> list[Manifest]:
    """Return all manifests of one Kubernetes cluster, in the order of their creation."""
    if cluster.head is None:
        nodes = [joining(values, cluster, group) for group in values.groups_of(cluster.name)]
        return [*nodes, network_policy(values, "nodes", [], within(values))]
    return [
        claim(values, "runs", values.runs, "ReadWriteMany"),
        claim(values, "head", cluster.head.disk, "ReadWriteOnce"),
        claim(values, "home", values.service.disk, "ReadWriteOnce"),
        ray_cluster(values, cluster.head, values.groups_of(cluster.name)),
        head_service(values),
        service(values),
        service_address(values),
        *network_policies(values),
        *([pod_monitor(values, values.monitoring)] if values.monitoring else []),
    ]


# ── the Ray cluster ───────────────────────────────────────────────────────────────────────────────────────────────


def ray_cluster(values: Values, head: Head, groups: Iterable[Group]) -> Manifest:
    """Return the RayCluster. The head offers no resources and has a group of its own: no island is placed there."""
    return {
        **document(values, "ray.io/v1", "RayCluster", values.name, "ray"),
        "spec": {
            "rayVersion": values.ray_version,
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                "rayStartParams": {"num-cpus": "0", "include-dashboard": "false", "no-monitor": "true"},
                "labels": {GROUP_LABEL: CONTROL_GROUP},
                "template": head_pod(values, head),
            },
            "workerGroupSpecs": [worker_group(values, group) for group in groups],
        },
    }


def head_pod(values: Values, head: Head) -> Manifest:
    storage = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    container = {
        **node_container(values, "ray-head", amounts(head.cpus, head.memory_gib), Path(HEAD_STORAGE), storage),
        "ports": [{"name": "gcs-server", "containerPort": GCS_PORT}],
        "lifecycle": {"preStop": {"exec": {"command": ["python", "-I", "-c", KILL_HEAD]}}},
    }
    container["volumeMounts"] += [{"name": "head", "mountPath": f"{STATE}/head"}]
    volumes = [volume_of(values, "runs"), volume_of(values, "head")]
    return pod(values, container, "head", volumes, names=head_names(values))


def worker_group(values: Values, group: Group) -> Manifest:
    """Return a worker group with one replica for each slice. KubeRay creates and deletes a slice's pods together."""
    hosts = group.tpu.hosts if group.tpu else 1
    replicas = group.nodes // hosts
    container = {
        **node_container(values, "ray-worker", amounts_of(group), extra=environment_of(group)),
        "lifecycle": {"preStop": {"exec": {"command": leave_command(group)}}},
    }
    return {
        "groupName": group.name,
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": max(1, replicas),
        "numOfHosts": hosts,
        "rayStartParams": {"num-cpus": str(group.cpus)},
        "labels": {GROUP_LABEL: group.name, REGION_LABEL: group.region},
        "template": pod(values, container, "node", [volume_of(values, "runs")], group),
    }


def joining(values: Values, cluster: Cluster, group: Group) -> Manifest:
    """Return the Deployment of a group in another cluster. Its pods join the head, and share no volume with it."""
    assert cluster.head_address is not None
    command = [
        *("atoll", "join", cluster.head_address, "--token-file", f"{TOKEN_FOLDER}/token"),
        *("--group", group.name, "--region", group.region, "--cpus", str(group.cpus)),
        *(["--insecure"] if values.insecure else ["--certificates", CERTIFICATES_FOLDER]),
        *("--grace", str(group.grace_s - LEAVING_S), "--partition-tolerance", f"{values.partition_tolerance_s:g}"),
    ]
    if group.gpu:
        command += ["--gpus", str(group.accelerators)]
    if group.tpu:
        command += ["--resources", f"TPU={group.accelerators}"]
    container = node_container(values, "node", amounts_of(group), extra=environment_of(group))
    labels = {**labels_of(values, "node"), "atoll/group": group.name}
    return {
        **document(values, "apps/v1", "Deployment", f"{values.name}-{group.name}", "node"),
        "spec": {
            "replicas": group.nodes,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {
                **pod(values, {**container, "command": command}, "node", [{"name": "runs", "emptyDir": {}}], group),
                "metadata": {"labels": labels},
            },
        },
    }


# ── pods ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def node_container(
    values: Values,
    name: str,
    resources: Mapping[str, str],
    head_storage: Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> Manifest:
    """Return a Ray node's container. Its probes check the raylet; KubeRay's need dashboard agents, which do not run here."""
    probe = {"exec": {"command": [*NODE_PROGRAM, "alive"]}, "timeoutSeconds": 10, "periodSeconds": 15}
    return {
        **container(values, name, {**ray_settings(values, head_storage), **(extra or {})}, resources),
        "startupProbe": {**probe, "failureThreshold": 40},
        "livenessProbe": {**probe, "failureThreshold": 4},
        "readinessProbe": {**probe, "failureThreshold": 2},
        "volumeMounts": [*mounts(values), {"name": "runs", "mountPath": f"{STATE}/runs"}],
    }


def ray_settings(values: Values, head_storage: Path | None = None) -> dict[str, str]:
    certificates = None if values.insecure else Path(CERTIFICATES_FOLDER)
    return ray_environment(Path(TOKEN_FOLDER, "token"), values.partition_tolerance_s, head_storage, certificates)


def mounts(values: Values) -> list[Manifest]:
    """Return the mounts that containers of nodes and of the service share."""
    own = {"name": "certificates", "mountPath": CERTIFICATES_FOLDER, "readOnly": True}
    return [
        {"name": "cluster", "mountPath": TOKEN_FOLDER, "readOnly": True},
        *([] if values.insecure else [own]),
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def issuing(values: Values, names: Iterable[str]) -> Manifest:
    """Return the init container that issues its pod's certificate. It may run again."""
    own = container(values, "certificate", {}, amounts(1, 0.25))
    own["env"].append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    named = [word for name in ("$(POD_IP)", *names) for word in ("--name", name)]
    return {
        **own,
        "command": ["atoll", "certificates", "issue", AUTHORITY_FOLDER, CERTIFICATES_FOLDER, "--replace", *named],
        "volumeMounts": [
            {"name": "authority", "mountPath": AUTHORITY_FOLDER, "readOnly": True},
            {"name": "certificates", "mountPath": CERTIFICATES_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def head_names(values: Values) -> list[str]:
    """Return the names of the head: ours, KubeRay's, and those under which other clusters reach it."""
    outer = [each.head_address.rpartition(":")[0] for each in values.clusters if each.head_address]
    return [*service_names(values, "head"), *service_names(values, f"{values.name}-head-svc"), *outer]


def service_names(values: Values, name: str) -> list[str]:
    """Return the names of a Service within its Kubernetes cluster."""
    return [name, *(f"{name}.{values.namespace}{more}" for more in ("", ".svc", f".{CLUSTER_DOMAIN}"))]


def container(values: Values, name: str, environment: Mapping[str, str], resources: Mapping[str, str]) -> Manifest:
    settings = {"HOME": "/tmp", "XDG_CACHE_HOME": "/tmp/cache", **environment}
    return {
        "name": name,
        "image": values.image,
        "env": [{"name": each, "value": value} for each, value in sorted(settings.items())],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def pod(
    values: Values,
    container: Manifest,
    component: str,
    volumes: Iterable[Manifest],
    group: Group | None = None,
    names: Iterable[str] = (),
) -> Manifest:
    """Return a pod template. ``group`` decides where it may run and its grace period; ``names`` go into its certificate."""
    spec: Manifest = {
        "containers": [container],
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "cluster", "secret": {"secretName": values.secret, "defaultMode": 0o440}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *volumes,
        ],
    }
    if not values.insecure:
        spec["initContainers"] = [issuing(values, names)]
        spec["volumes"] += [
            {"name": "authority", "secret": {"secretName": values.authority_secret, "defaultMode": 0o440}},
            {"name": "certificates", "emptyDir": {"medium": "Memory"}},
        ]
    if values.pull_secret:
        spec["imagePullSecrets"] = [{"name": values.pull_secret}]
    if group is not None:
        spec["terminationGracePeriodSeconds"] = group.grace_s
        spec["nodeSelector"] = selector_of(group)
        spec["tolerations"] = tolerations_of(group)
    return {"metadata": {"labels": labels_of(values, component)}, "spec": spec}


def selector_of(group: Group) -> dict[str, str]:
    """Return the node selector of a group's pods. An explicit ``selector`` overrides what other values imply."""
    selector = {"topology.kubernetes.io/region": group.region}
    if group.tpu:
        selector |= {GKE_TPU: group.tpu.accelerator, GKE_TOPOLOGY: group.tpu.topology}
    if group.gpu:
        selector |= {GKE_GPU: group.gpu} if group.spot in (None, "gke") else {}
    if group.spot:
        label, value = SPOT[group.spot]
        selector[label] = value
    return selector | group.selector


def tolerations_of(group: Group) -> list[Manifest]:
    tolerations: list[Manifest] = [{"key": key, "operator": "Exists"} for key in group.tolerate]
    if group.tpu:
        tolerations.append({"key": TPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"})
    if group.gpu:
        tolerations.append({"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"})
    if group.spot:
        key, value = SPOT[group.spot]
        tolerations.append({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"})
    return tolerations


def amounts_of(group: Group) -> dict[str, str]:
    kind = TPU_RESOURCE if group.tpu else GPU_RESOURCE
    accelerators = {kind: str(group.accelerators)} if group.accelerators else {}
    return {**amounts(group.cpus, group.memory_gib), **accelerators}


def amounts(cpus: int, memory_gib: float) -> dict[str, str]:
    return {"cpu": str(cpus), "memory": f"{round(memory_gib * 1024)}Mi"}


def environment_of(group: Group) -> dict[str, str]:
    """Return the group's own variables. Clouds are queried for notices on spot machines only."""
    notices = {"ATOLL_NOTICES": NOTICES[group.spot]} if group.spot else {}
    drained = {
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1"
    }  # at SIGTERM; its preStop hook has drained the node by then
    return {**notices, **drained}


def leave_command(group: Group) -> list[str]:
    return ["atoll", "leave", "--grace", str(group.grace_s - LEAVING_S), "--cause", "Kubernetes ends the pod"]


# ── the service ───────────────────────────────────────────────────────────────────────────────────────────────────


def service(values: Values) -> Manifest:
    """One replica, ended before the next begins: its store is a file, and jobs do not notice that it is away."""
    labels = labels_of(values, "service")
    probed = {"port": "http", "scheme": "HTTP" if values.insecure else "HTTPS"}
    ready = {"httpGet": {"path": "/readyz", **probed}, "timeoutSeconds": 5, "periodSeconds": 10}
    alive = {"httpGet": {"path": "/healthz", **probed}, "timeoutSeconds": 5, "periodSeconds": 10}
    own = container(values, "service", ray_settings(values), amounts(1, values.service.memory_gib))
    volumes = [volume_of(values, "runs"), volume_of(values, "home")]
    own |= {
        "args": ["service", *(["--insecure"] if values.insecure else [])],
        "ports": [{"name": "http", "containerPort": SERVICE_PORT}],
        "startupProbe": {**alive, "failureThreshold": 30},
        "livenessProbe": {**alive, "failureThreshold": 6},
        "readinessProbe": {**ready, "failureThreshold": 3},
        "volumeMounts": [
            *mounts(values),
            {"name": "runs", "mountPath": f"{STATE}/runs"},
            {"name": "home", "mountPath": f"{STATE}/home"},
        ],
    }
    return {
        **document(values, "apps/v1", "Deployment", f"{values.name}-service", "service"),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": pod(values, own, "service", volumes, names=service_names(values, values.name)),
        },
    }


def service_address(values: Values) -> Manifest:
    ports = [{"name": "http", "port": SERVICE_PORT, "targetPort": "http"}]
    return {
        **document(values, "v1", "Service", values.name, "service"),
        "spec": {"selector": labels_of(values, "service"), "ports": ports},
    }


def head_service(values: Values) -> Manifest:
    """The head by the name that deploy/node.py looks for. KubeRay's own is called after the cluster."""
    ports = [{"name": "gcs-server", "port": GCS_PORT, "targetPort": GCS_PORT}]
    return {
        **document(values, "v1", "Service", "head", "head"),
        "spec": {"clusterIP": "None", "selector": labels_of(values, "head"), "ports": ports},
    }


# ── who may talk to whom, and what lasts ──────────────────────────────────────────────────────────────────────────


def network_policies(values: Values) -> list[Manifest]:
    """Nodes talk to one another on any port, as Ray's do, and machines that join; the service is reached on its own."""
    outside = [{"from": [{"ipBlock": {"cidr": cidr}} for cidr in values.join_from]}] if values.join_from else []
    namespaces = [*values.service.allow_from, *([values.monitoring.namespace] if values.monitoring else [])]
    callers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}} for name in namespaces]
    http: list[Manifest] = [{"from": callers, "ports": [{"port": SERVICE_PORT, "protocol": "TCP"}]}] if callers else []
    return [
        network_policy(values, "nodes", ["head", "node"], [*within(values), *outside]),
        network_policy(values, "service", ["service"], [*within(values), *http]),
    ]


def within(values: Values) -> list[Manifest]:
    return [{"from": [{"podSelector": {"matchLabels": {PART: values.name}}}]}]


def network_policy(values: Values, name: str, components: list[str], ingress: list[Manifest]) -> Manifest:
    """Return a policy that allows only ``ingress`` to pods of these components, or to all pods if none is named."""
    chosen: Manifest = {"matchLabels": {PART: values.name}}
    if components:
        chosen["matchExpressions"] = [{"key": COMPONENT, "operator": "In", "values": components}]
    return {
        **document(values, "networking.k8s.io/v1", "NetworkPolicy", f"{values.name}-{name}", "network"),
        "spec": {"podSelector": chosen, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def pod_monitor(values: Values, monitoring: Monitoring) -> Manifest:
    """Return the monitor with which Prometheus scrapes the service, using a viewer's token."""
    monitor = document(values, "monitoring.coreos.com/v1", "PodMonitor", f"{values.name}-service", "service")
    monitor["metadata"]["labels"] |= monitoring.labels
    return {
        **monitor,
        "spec": {
            "selector": {"matchLabels": labels_of(values, "service")},
            "podMetricsEndpoints": [
                {
                    "port": "http",
                    "path": "/metrics",
                    "interval": "15s",
                    **(
                        {}
                        if values.insecure
                        else {
                            "scheme": "https",
                            "tlsConfig": {"ca": {"secret": {"name": values.authority_secret, "key": "ca.crt"}}},
                        }
                    ),
                    "authorization": {"type": "Bearer", "credentials": {"name": values.metrics_secret, "key": "token"}},
                }
            ],
        },
    }


def claim(values: Values, name: str, disk: Disk, access: str) -> Manifest:
    storage_class = {"storageClassName": disk.storage_class} if disk.storage_class else {}
    return {
        **document(values, "v1", "PersistentVolumeClaim", f"{values.name}-{name}", "storage"),
        "spec": {
            "accessModes": [access],
            "resources": {"requests": {"storage": f"{disk.gib}Gi"}},
            **storage_class,
        },
    }


def volume_of(values: Values, name: str) -> Manifest:
    return {"name": name, "persistentVolumeClaim": {"claimName": f"{values.name}-{name}"}}


def document(values: Values, api_version: str, kind: str, name: str, component: str) -> Manifest:
    metadata = {"name": name, "namespace": values.namespace, "labels": labels_of(values, component)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def labels_of(values: Values, component: str) -> dict[str, str]:
    return {PART: values.name, COMPONENT: component}


def yaml_of(manifests: Iterable[Manifest]) -> str:
    """Return all manifests as one YAML stream. Texts are quoted as in JSON, so that no YAML reader takes them for others."""
    return "".join(f"---\n{_yaml(manifest, 0)}" for manifest in manifests)


def _yaml(value: Any, depth: int) -> str:
    """Return block style with keys in order. PyYAML would leave `on` and 0440 to each reader's version of YAML."""
    pad = "  " * depth
    if isinstance(value, Mapping):
        return "".join(
            f"{pad}{json.dumps(key) if _odd(key) else key}:{_nested(each, depth)}" for key, each in value.items()
        )
    lines = []
    for each in value:
        text = _yaml(each, depth + 1) if isinstance(each, Mapping | list | tuple) and each else ""
        lines.append(f"{pad}- {text[len(pad) + 2 :]}" if text else f"{pad}- {_scalar(each)}\n")
    return "".join(lines)


def _nested(value: Any, depth: int) -> str:
    if isinstance(value, Mapping | list | tuple) and value:
        return "\n" + _yaml(value, depth + 1)
    return f" {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    return json.dumps(value if not isinstance(value, tuple) else list(value), ensure_ascii=False)


def _odd(key: str) -> bool:
    return not PLAIN_KEY.fullmatch(key) or key.lower() in ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
