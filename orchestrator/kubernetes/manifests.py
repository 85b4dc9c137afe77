"""The manifests of an installation: plain documents, written as YAML for ``kubectl apply --filename -`` or as a Helm chart.

    the cluster with the head   RayCluster (KubeRay): the head, a worker group for every node group; its address;
                                service, volumes, NetworkPolicies, disruption budgets, and what monitoring needs
    any other                   pods of every node group that join the head (``atoll join``): a Deployment, or for
                                slices of several hosts a LeaderWorkerSet, which replaces a slice's pods together

All nodes form one Ray cluster: a job's islands, in all regions, have one synchroniser. ``pods`` describes the pods. Secrets
are named, not created. Alerts and dashboards are those that atoll ships (``Shipped``).

A chart is made for one file of values and one Kubernetes cluster. Its templates are the rendered manifests, in which only
``LIVE`` values are read when Helm installs it. Its values.yaml holds all values and values.schema.json describes them. If
another value differs from what was rendered, the chart refuses to install and says how to render it again. So the manifests
have one source, and no second one in Go's templates.

Sources: KubeRay's RayCluster (ray.io/v1); LeaderWorkerSet 0.7; GKE, "Deploy TPU workloads", "Spot VMs", "Managed service for
Prometheus"; EKS, "Managed node groups"; AKS, "Add an Azure Spot node pool"; prometheus-operator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.kubernetes.pods import (
    COMPONENT,
    GCS_PORT,
    PART,
    SERVICE_PORT,
    Manifest,
    group_pod,
    head_pod,
    head_service_name,
    join_command,
    labels_of,
    service_pod,
)
from orchestrator.kubernetes.values import Cluster, Disk, Group, Head, Monitoring, Values, merged
from orchestrator.runtime.settings import CONTROL_GROUP, GROUP_LABEL, REGION_LABEL

GMP_NAMESPACE, GMP_ACCOUNT = "gmp-system", "collector"
"""Where Google's collectors run, and as whom they read secrets."""
PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
LIVE = ("image", "secret", "metrics_secret", "authority_secret")
"""Values that Helm may change without rendering again (`--set image=…`): texts that stand in manifests as they are."""
OURS = "atoll/rendered"
"""The annotation in Chart.yaml of a folder that may be written again."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """The alerts (the document of deploy/prometheus/alerts.yml) and the dashboards by their names, as atoll ships them."""

    alerts: Mapping[str, Any] = field(default_factory=lambda: {"groups": []})
    dashboards: Mapping[str, str] = field(default_factory=dict)


def rendered(values: Values, cluster: Cluster, shipped: Shipped) -> list[Manifest]:
    """Return all manifests of one Kubernetes cluster, in the order of their creation."""
    groups = values.groups_of(cluster.name)
    budgets = [each for group in groups if (each := group_budget(values, group))]
    accounts = list(service_accounts(values, cluster))
    if cluster.head is None:
        nodes = [joining(values, cluster, group) for group in groups]
        return [*accounts, *nodes, *budgets, network_policy(values, "nodes", [], within(values))]
    runs = "ReadWriteMany" if values.runs.shared else "ReadWriteOnce"
    return [
        *accounts,
        claim(values, "runs", values.runs, runs),
        claim(values, "head", cluster.head.disk, "ReadWriteOnce"),
        claim(values, "home", values.service.disk, "ReadWriteOnce"),
        ray_cluster(values, cluster.head, groups),
        head_service(values),
        service(values),
        service_address(values),
        *([] if cluster.head.evictable else [head_budget(values)]),
        *budgets,
        *network_policies(values),
        *(monitoring(values, values.monitoring, shipped) if values.monitoring else []),
    ]


# ── nodes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def worker_group(values: Values, group: Group) -> Manifest:
    """Return a worker group with one replica for each slice. KubeRay creates and deletes a slice's pods together."""
    replicas = group.nodes // group.hosts
    return {
        "groupName": group.name,
        "replicas": replicas,
        "minReplicas": replicas,
        "maxReplicas": max(1, replicas),
        "numOfHosts": group.hosts,
        "rayStartParams": {"num-cpus": str(group.cpus)},
        "labels": {GROUP_LABEL: group.name, REGION_LABEL: values.region_of(group)},
        "template": group_pod(values, group),
    }


def joining(values: Values, cluster: Cluster, group: Group) -> Manifest:
    """Return what runs a group in another cluster. Its pods join the head, and share no volume with it."""
    template = group_pod(values, group, join_command(values, cluster, group))
    labels = {**labels_of(values, "node"), "atoll/group": group.name}
    if group.hosts > 1:
        manifest = slices(values, group, template)
    else:
        manifest = document(values, "apps/v1", "Deployment", f"{values.name}-{group.name}", "node")
        manifest["spec"] = {
            "replicas": group.nodes,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": template,
        }
    manifest["metadata"]["labels"] = {**merged(values.pods, group).labels, **labels}
    return manifest


def slices(values: Values, group: Group, template: Manifest) -> Manifest:
    """Return the slices of a group: each one's pods are replaced together, and all run in one node pool of GKE."""
    manifest = document(values, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", f"{values.name}-{group.name}", "node")
    manifest["metadata"]["annotations"] = {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    manifest["spec"] = {
        "replicas": group.nodes // group.hosts,
        "leaderWorkerTemplate": {
            "size": group.hosts,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "workerTemplate": template,
        },
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
        },
    }
    return manifest


def head_service(values: Values) -> Manifest:
    """The head by a name of ours. KubeRay's own Service is called after the cluster."""
    ports = [{"name": "gcs-server", "port": GCS_PORT, "targetPort": GCS_PORT}]
    return {
        **document(values, "v1", "Service", head_service_name(values), "head"),
        "spec": {"clusterIP": "None", "selector": labels_of(values, "head"), "ports": ports},
    }


# ── the service ───────────────────────────────────────────────────────────────────────────────────────────────────────


def service(values: Values) -> Manifest:
    """One replica, ended before the next begins: its store is a file, and jobs do not notice that it is away."""
    return {
        **document(values, "apps/v1", "Deployment", f"{values.name}-service", "service"),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels_of(values, "service")},
            "template": service_pod(values, values.service),
        },
    }


def service_address(values: Values) -> Manifest:
    ports = [{"name": "http", "port": SERVICE_PORT, "targetPort": "http"}]
    return {
        **document(values, "v1", "Service", values.name, "service"),
        "spec": {"selector": labels_of(values, "service"), "ports": ports},
    }


# ── identities, volumes, disruptions, and who may talk to whom ────────────────────────────────────────────────────────


def service_accounts(values: Values, cluster: Cluster) -> Iterator[Manifest]:
    """Yield the service accounts of this cluster's pods that are to be created."""
    here = [cluster.head, values.service] if cluster.head else []
    named = [merged(values.pods, each).service_account for each in (*here, *values.groups_of(cluster.name))]
    accounts = {each.name: each for each in named if each is not None and each.create}
    for name, account in sorted(accounts.items()):
        manifest = document(values, "v1", "ServiceAccount", name, "identity")
        if account.annotations:
            manifest["metadata"]["annotations"] = dict(account.annotations)
        yield {**manifest, "automountServiceAccountToken": False}


def claim(values: Values, name: str, disk: Disk, access: str) -> Manifest:
    chosen = disk.storage_class or values.storage_class
    return {
        **document(values, "v1", "PersistentVolumeClaim", f"{values.name}-{name}", "storage"),
        "spec": {
            "accessModes": [access],
            "resources": {"requests": {"storage": f"{disk.gib}Gi"}},
            **({"storageClassName": chosen} if chosen else {}),
        },
    }


def head_budget(values: Values) -> Manifest:
    """Nothing evicts the head. `kubectl drain` waits until somebody deletes its pod, at a time that suits."""
    return budget(values, "head", labels_of(values, "head"), 1)


def group_budget(values: Values, group: Group) -> Manifest | None:
    """Return the budget of a group; None if all of it may be evicted at once."""
    available_count = group.nodes - group.unavailable_max * group.hosts
    chosen = {**labels_of(values, "node"), "atoll/group": group.name}
    return budget(values, group.name, chosen, available_count) if available_count > 0 else None


def budget(values: Values, name: str, chosen: dict[str, str], available_count: int) -> Manifest:
    """Return a budget as a number of pods that stay: the only form that works for the pods of a RayCluster."""
    return {
        **document(values, "policy/v1", "PodDisruptionBudget", f"{values.name}-{name}", "disruptions"),
        "spec": {"minAvailable": available_count, "selector": {"matchLabels": chosen}},
    }


def network_policies(values: Values) -> list[Manifest]:
    """Nodes talk to one another on any port, as Ray's do, and machines that join; the service is reached on its own."""
    outside = [{"from": [{"ipBlock": {"cidr": cidr}} for cidr in values.join_from]}] if values.join_from else []
    namespaces = [*values.service.allow_from, *([values.monitoring.namespace] if values.monitoring else [])]
    callers = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
        for name in dict.fromkeys(namespaces)
    ]
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


# ── monitoring ────────────────────────────────────────────────────────────────────────────────────────────────────────


def monitoring(values: Values, wanted: Monitoring, shipped: Shipped) -> Iterator[Manifest]:
    """Yield the scrape of the service, using a viewer's token; the alerts; and a ConfigMap for every dashboard."""
    yield from google_scrape(values) if wanted.kind == "google" else [pod_monitor(values, wanted)]
    if wanted.rules:
        yield google_rules(values, shipped) if wanted.kind == "google" else prometheus_rule(values, wanted, shipped)
    for name, text in sorted(shipped.dashboards.items()) if wanted.dashboards else []:
        manifest = document(values, "v1", "ConfigMap", f"{values.name}-dashboard-{name}", "dashboard")
        manifest["metadata"]["labels"] |= wanted.dashboard_labels
        yield {**manifest, "data": {f"{name}.json": text}}


def pod_monitor(values: Values, wanted: Monitoring) -> Manifest:
    monitor = document(values, "monitoring.coreos.com/v1", "PodMonitor", f"{values.name}-service", "service")
    monitor["metadata"]["labels"] |= wanted.labels
    endpoint: Manifest = {"port": "http", "path": "/metrics", "interval": "15s"}
    if not values.insecure:
        trusted = {"secret": {"name": values.authority_secret, "key": "ca.crt"}}
        endpoint |= {"scheme": "https", "tlsConfig": {"ca": trusted}}
    credentials = {"name": values.metrics_secret, "key": "token"}
    endpoint["authorization"] = {"type": "Bearer", "credentials": credentials}
    chosen = {"matchLabels": labels_of(values, "service")}
    return {**monitor, "spec": {"selector": chosen, "podMetricsEndpoints": [endpoint]}}


def prometheus_rule(values: Values, wanted: Monitoring, shipped: Shipped) -> Manifest:
    manifest = document(values, "monitoring.coreos.com/v1", "PrometheusRule", values.name, "alerts")
    manifest["metadata"]["labels"] |= wanted.labels
    return {**manifest, "spec": {"groups": shipped.alerts["groups"]}}


def google_scrape(values: Values) -> Iterator[Manifest]:
    """Yield the monitor of Google's managed service, and the permission with which its collectors read our secrets."""
    endpoint: Manifest = {"port": "http", "path": "/metrics", "interval": "15s"}
    secrets = [values.metrics_secret]
    if not values.insecure:
        trusted = {"secret": {"name": values.authority_secret, "key": "ca.crt"}}
        endpoint |= {"scheme": "https", "tls": {"ca": trusted}}
        secrets.append(values.authority_secret)
    credentials = {"secret": {"name": values.metrics_secret, "key": "token"}}
    endpoint["authorization"] = {"type": "Bearer", "credentials": credentials}
    chosen = {"matchLabels": labels_of(values, "service")}
    yield {
        **document(values, "monitoring.googleapis.com/v1", "PodMonitoring", f"{values.name}-service", "service"),
        "spec": {"selector": chosen, "endpoints": [endpoint]},
    }
    group, name = "rbac.authorization.k8s.io", f"{values.name}-metrics"
    yield {
        **document(values, f"{group}/v1", "Role", name, "service"),
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": secrets, "verbs": ["get"]}],
    }
    yield {
        **document(values, f"{group}/v1", "RoleBinding", name, "service"),
        "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": GMP_ACCOUNT, "namespace": GMP_NAMESPACE}],
    }


def google_rules(values: Values, shipped: Shipped) -> Manifest:
    groups = [{"interval": "30s", **group} for group in shipped.alerts["groups"]]
    return {
        **document(values, "monitoring.googleapis.com/v1", "Rules", values.name, "alerts"),
        "spec": {"groups": groups},
    }


def document(values: Values, api_version: str, kind: str, name: str, component: str) -> Manifest:
    metadata = {"name": name, "namespace": values.namespace, "labels": labels_of(values, component)}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


# ── the chart ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def schema() -> Mapping[str, Any]:
    """Return the JSON schema of the values."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of atoll on Kubernetes",
        **{name: value for name, value in Values.model_json_schema().items() if name != "title"},
    }


def chart(values: Values, manifests: Callable[[Values], list[Manifest]], version: str) -> dict[str, str]:
    """Return the files of the chart by their paths. ``manifests`` renders these values for one Kubernetes cluster."""
    chart_values = without_none(values.model_dump(mode="json", exclude_unset=True))
    chart_values |= {name: getattr(values, name) for name in LIVE}
    live = values.model_copy(update={name: _mark(name) for name in LIVE})
    files = {
        "Chart.yaml": _yaml(
            {
                **{"apiVersion": "v2", "type": "application", "name": values.name},
                **{"version": version, "appVersion": version, "kubeVersion": ">=1.29.0-0"},
                "description": "An installation of atoll, as `atoll kubernetes render --chart` wrote it",
                "annotations": {OURS: "true"},
            },
            0,
        ),
        "values.yaml": _yaml(chart_values, 0),
        "values.schema.json": json.dumps(_for_helm(schema()), indent=2) + "\n",
        "templates/check.yaml": _check(values, {name: each for name, each in chart_values.items() if name not in LIVE}),
    }
    for manifest in manifests(live):
        name = f"{manifest['kind']}-{manifest['metadata']['name']}".lower()
        files[f"templates/{name}.yaml"] = _template(_yaml(manifest, 0))
    return files


def without_none(value: Any) -> Any:
    """Return the document without nulls, which Helm takes for keys to delete."""
    if isinstance(value, Mapping):
        return {name: without_none(each) for name, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list | tuple) else value


def _template(text: str) -> str:
    """Return the text as Helm's template that gives this text, with the live values in place of their marks."""
    escaped = text.replace("{{", '{{ "{{" }}')
    for name in LIVE:
        escaped = escaped.replace(json.dumps(_mark(name)), f"{{{{ .Values.{name} | toJson }}}}")
    return escaped


def _mark(name: str) -> str:
    """Return a text that no value can have: values are printable."""
    return f"\x01{name}"


def _check(values: Values, chart_values: Mapping[str, Any]) -> str:
    """Return a template that gives nothing, and fails if Helm has other values than those of the manifests."""
    again = (
        "%s differs from the values that this chart was rendered for. Change it in the file of values, and run "
        "`atoll kubernetes render --chart` again."
    )
    named = " ".join(json.dumps(name) for name in (*LIVE, "global"))
    elsewhere = (
        f"namespace is %q, but this chart was rendered for {values.namespace!r}. Add --namespace {values.namespace}, or "
        "change `namespace` in the file of values and render the chart again."
    )
    return (
        f"{{{{- if ne .Release.Namespace {json.dumps(values.namespace)} }}}}\n"
        f"{{{{- fail (printf {json.dumps(elsewhere)} .Release.Namespace) }}}}\n"
        "{{- end }}\n"
        f"{{{{- $rendered := fromJson {json.dumps(json.dumps(chart_values), ensure_ascii=False)} }}}}\n"
        f"{{{{- $given := omit .Values {named} | toJson | fromJson }}}}\n"
        "{{- range $name := concat (keys $given) (keys $rendered) | uniq | sortAlpha }}\n"
        "{{- if ne (toJson (get $given $name)) (toJson (get $rendered $name)) }}\n"
        f"{{{{- fail (printf {json.dumps(again)} $name) }}}}\n"
        "{{- end }}\n"
        "{{- end }}\n"
    )


def _for_helm(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with the key that Helm gives to every chart below another one."""
    return {**described, "properties": {**described["properties"], "global": {"type": "object"}}}


# ── YAML ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
