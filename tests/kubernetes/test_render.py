"""Manifests for Kubernetes, of the three files of values that are shipped; and values that cannot be.

What a server would say of them is asked by ``make kubernetes-check``: schemas are others' files, and not in this repository.
"""

from __future__ import annotations

import copy
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.kubernetes.manifests import rendered, yaml_of
from orchestrator.kubernetes.values import read_values
from orchestrator.runtime.settings import ray_environment

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
FILES = ("cpu", "gpu-spot", "tpu")
RAY_CLUSTER = {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
GROUP = {
    *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts"),
    *("rayStartParams", "labels", "template"),
}
"""Fields of ours that KubeRay's CRD has (helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml, of August 2026)."""


def manifests(name: str, cluster: str | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """Read back from what is printed, by kind and name."""
    values = read_values(FOLDER / f"{name}.yaml")
    chosen = next(each for each in values.clusters if each.name == (cluster or values.home.name))
    printed = yaml_of(rendered(values, chosen))
    documents = list(yaml.safe_load_all(printed))
    assert documents == [plain(each) for each in rendered(values, chosen)]  # YAML reads what was meant
    named = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(named) == len(documents)
    return named


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def templates(documents: dict[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every pod that comes of them."""
    found = [each["spec"]["template"] for (kind, _), each in documents.items() if kind == "Deployment"]
    for (kind, _), each in documents.items():
        if kind == "RayCluster":
            found += [group["template"] for group in (each["spec"]["headGroupSpec"], *each["spec"]["workerGroupSpecs"])]
    return found


def environment(template: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in template["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize(("name", "cluster"), [*((name, None) for name in FILES), ("gpu-spot", "west")])
def test_every_pod_is_confined_and_has_the_settings_of_the_cluster(name: str, cluster: str | None) -> None:
    documents = manifests(name, cluster)
    pods = templates(documents)
    assert pods
    for template in pods:
        spec, (container,) = template["spec"], template["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"] == container["resources"]["limits"]
        (issuing,) = spec["initContainers"]
        assert issuing["securityContext"] == container["securityContext"]
        mounted, before = ({each["name"] for each in one["volumeMounts"]} for one in (container, issuing))
        assert mounted | before == {each["name"] for each in spec["volumes"]}
        assert before - mounted == {"authority"}, "nobody but who issues sees the authority's key"
        settings = ray_environment(
            Path("/var/lib/atoll/cluster/token"), certificates=Path("/var/lib/atoll/certificates")
        )
        assert settings.items() <= environment(template).items()
        assert {"livenessProbe", "readinessProbe", "startupProbe"} <= container.keys()
        assert "secretKeyRef" not in str(container)  # a secret is a file, which no other process's environment shows
    assert not [kind for kind, _ in documents if kind == "Secret"]


@pytest.mark.parametrize("name", FILES)
def test_node_groups_are_worker_groups_with_the_labels_by_which_islands_are_placed(name: str) -> None:
    values, documents = read_values(FOLDER / f"{name}.yaml"), manifests(name)
    cluster = documents["RayCluster", "atoll"]["spec"]
    assert cluster.keys() <= RAY_CLUSTER
    assert cluster["headGroupSpec"]["labels"] == {"atoll-node-group": "control"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert groups.keys() == {group.name for group in values.groups_of(values.home.name)}
    for group in values.groups_of(values.home.name):
        made = groups[group.name]
        assert made.keys() <= GROUP
        assert made["labels"] == {"atoll-node-group": group.name, "region": group.region}
        assert made["replicas"] * made["numOfHosts"] == group.nodes
        spec = made["template"]["spec"]
        assert spec["nodeSelector"]["topology.kubernetes.io/region"] == group.region
        (container,) = spec["containers"]
        leaving = container["lifecycle"]["preStop"]["exec"]["command"]
        assert leaving[:3] == ["atoll", "leave", "--grace"]
        assert 0 < int(leaving[3]) < spec["terminationGracePeriodSeconds"] == group.grace_s


def test_what_the_head_knows_outlives_its_pod_and_it_is_killed_rather_than_asked_to_end() -> None:
    head = manifests("tpu")["RayCluster", "atoll"]["spec"]["headGroupSpec"]["template"]
    storage = ray_environment(Path("/t"), head_storage=Path("/var/lib/atoll/head/storage"))["RAY_gcs_storage_path"]
    assert environment(head)["RAY_gcs_storage_path"] == storage
    assert {"name": "head", "persistentVolumeClaim": {"claimName": "atoll-head"}} in head["spec"]["volumes"]
    assert ".kill()" in str(head["spec"]["containers"][0]["lifecycle"])
    assert environment(head)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"


def test_tpu_slices_are_selected_by_topology_and_come_as_a_whole() -> None:
    east, west = manifests("tpu")["RayCluster", "atoll"]["spec"]["workerGroupSpecs"]
    assert (east["replicas"], east["numOfHosts"], west["replicas"]) == (2, 4, 1)
    selector = east["template"]["spec"]["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] == "tpu-v6e-slice"
    assert selector["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert "cloud.google.com/gke-spot" not in selector
    assert west["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    for group in (east, west):
        assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["google.com/tpu"] == "4"


def test_spot_machines_are_tolerated_and_their_cloud_is_asked_for_notices() -> None:
    east, steady = manifests("gpu-spot")["RayCluster", "atoll"]["spec"]["workerGroupSpecs"]
    spec = east["template"]["spec"]
    taint = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    assert taint in spec["tolerations"]
    assert environment(east["template"])["ATOLL_NOTICES"] == "gce"
    assert "ATOLL_NOTICES" not in environment(steady["template"])
    assert taint not in steady["template"]["spec"]["tolerations"]


def test_machines_of_another_kubernetes_cluster_join_the_head_of_the_first() -> None:
    documents = manifests("gpu-spot", "west")
    assert {kind for kind, _ in documents} == {"Deployment", "NetworkPolicy"}
    spec = documents["Deployment", "atoll-a10g-west"]["spec"]
    command = spec["template"]["spec"]["containers"][0]["command"]
    assert command[:3] == ["atoll", "join", "head.east.example:6379"]
    assert command[command.index("--gpus") + 1] == "1"
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert spec["template"]["spec"]["nodeSelector"]["eks.amazonaws.com/capacityType"] == "SPOT"
    assert spec["template"]["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"] == "g5.2xlarge"


@pytest.mark.parametrize("name", FILES)
def test_nobody_reaches_a_pod_but_those_who_are_named(name: str) -> None:
    values, documents = read_values(FOLDER / f"{name}.yaml"), manifests(name)
    policies = [each["spec"] for (kind, _), each in documents.items() if kind == "NetworkPolicy"]
    chosen = [each for spec in policies for each in spec["podSelector"]["matchExpressions"]]
    covered = {component for each in chosen for component in each["values"]}
    assert covered == {
        template["metadata"]["labels"]["app.kubernetes.io/component"] for template in templates(documents)
    }
    sources = [source for spec in policies for rule in spec["ingress"] for source in rule["from"]]
    assert {source["ipBlock"]["cidr"] for source in sources if "ipBlock" in source} == set(values.join_from)
    namespaces = {
        source["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for source in sources
        if "namespaceSelector" in source
    }
    watching = {values.monitoring.namespace} if values.monitoring else set()
    assert namespaces == set(values.service.allow_from) | watching


def test_a_head_is_issued_a_certificate_for_every_name_by_which_nodes_call_it() -> None:
    head = manifests("gpu-spot")["RayCluster", "atoll"]["spec"]["headGroupSpec"]["template"]
    (issuing,) = head["spec"]["initContainers"]
    command = issuing["command"]
    names = {name for option, name in pairwise(command) if option == "--name"}
    assert command[:3] == ["atoll", "certificates", "issue"]
    of_kuberay = "atoll-head-svc.atoll.svc.cluster.local"  # its worker pods wait for the head by that one
    assert {"$(POD_IP)", "head", "head.east.example", of_kuberay} <= names
    assert issuing["env"][-1]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


@pytest.mark.parametrize(("cluster", "spoken"), [("east", "HTTP"), ("west", None)])
def test_where_the_network_encrypts_nothing_of_tls_is_rendered(
    tmp_path: Path, cluster: str, spoken: str | None
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text((FOLDER / "gpu-spot.yaml").read_text() + "insecure: true\n")
    values = read_values(path)
    documents = rendered(values, next(each for each in values.clusters if each.name == cluster))
    text = yaml_of(documents)
    assert not [word for word in ("TLS", "initContainers", "authority", "https", "HTTPS") if word in text]
    assert ("--insecure" in text, '"HTTP"' in text) == (True, spoken is not None)


def test_prometheus_reads_the_service_with_a_viewers_token() -> None:
    monitor = manifests("gpu-spot")["PodMonitor", "atoll-service"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "atoll-metrics", "key": "token"}
    trusted = endpoint["tlsConfig"]["ca"]["secret"]
    assert (endpoint["scheme"], trusted) == ("https", {"name": "atoll-authority", "key": "ca.crt"})
    assert ("PodMonitor", "atoll-service") not in manifests("cpu")


def test_what_the_guide_has_kubectl_name_is_in_the_manifests() -> None:
    guide = (FOLDER.parent.parent / "docs" / "guide" / "kubernetes.md").read_text()
    documents = manifests("gpu-spot")
    tokens = dict(re.findall(r"create secret generic (\S+) --from-literal=(\w+)=", guide))
    folders = set(re.findall(r"create secret generic (\S+) --from-file=", guide))
    assert (tokens.keys(), folders) == ({"atoll-cluster", "atoll-metrics"}, {"atoll-authority"})
    mounted = {
        each["secret"]["secretName"]
        for pod in templates(documents)
        for each in pod["spec"]["volumes"]
        if "secret" in each
    }
    (path,) = {environment(pod)["RAY_AUTH_TOKEN_PATH"] for pod in templates(documents)}
    (endpoint,) = documents["PodMonitor", "atoll-service"]["spec"]["podMetricsEndpoints"]
    scraped = endpoint["authorization"]["credentials"]
    assert mounted | {scraped["name"]} == tokens.keys() | folders
    assert tokens == {"atoll-cluster": Path(path).name, scraped["name"]: scraped["key"]}
    for deployment in re.findall(r"exec deployment/(\S+)", guide):
        template = documents["Deployment", deployment]["spec"]["template"]
        paths = {mount["mountPath"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert set(re.findall(r"(/var/lib/atoll/home)\b", guide)) <= paths


# ── values that cannot be ─────────────────────────────────────────────────────────────────────────────────────────

GROUP_OF = {"name": "one", "region": "us-east1", "nodes": 4, "cpus": 4, "memory_gib": 8}
SLICE = {"accelerators": 4, "tpu": {"accelerator": "tpu-v6e-slice", "topology": "4x4", "hosts": 4}}


def values_with(tmp_path: Path, change: dict[str, Any], **group: Any) -> Path:
    document = {"image": "atoll:1", "clusters": [{"name": "home", "head": {}}], "groups": [GROUP_OF | group], **change}
    path = tmp_path / "values.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("change", "group", "where", "says"),
    [
        ({"clusters": [{"name": "home"}]}, {}, "clusters", "exactly one"),
        ({"clusters": [{"name": "a", "head": {}}, {"name": "b"}]}, {}, "clusters.1.head_address", "'b'"),
        ({"clusters": [{"name": "a", "head": {}}] * 2}, {}, "clusters", "'a' 2 times"),
        ({"groups": [GROUP_OF] * 2}, {}, "groups", "'one' 2 times"),
        ({"imgae": "atoll:2"}, {}, "imgae", "Did you mean image"),
        ({"image": "Atoll latest"}, {}, "image", ""),
        ({"join_from": ["everywhere"]}, {}, "join_from.0", ""),
        ({}, {"name": "control"}, "groups.0.name", "another name"),
        ({}, {"cluster": "nowhere"}, "groups.0.cluster", "'nowhere'"),
        ({}, {"gpu": "nvidia-l4"}, "groups.0.accelerators", "is 0, but a kind is named"),
        ({}, {"accelerators": 2}, "groups.0.accelerators", "no kind is named"),
        ({}, {**SLICE, "gpu": "nvidia-l4"}, "groups.0", "two groups"),
        ({}, {**SLICE, "nodes": 6}, "groups.0.nodes", "multiple of 4"),
        ({}, {**SLICE, "accelerators": 8}, "groups.0.tpu", "16 chips"),
        ({}, {"spot": "gke"}, "groups.0.grace_s", "25 or less"),
        ({}, {"selector": {"a b": "c"}}, "groups.0.selector", ""),
        ({}, {"nodes": -1}, "groups.0.nodes", "-1"),
        (
            {"clusters": [{"name": "home", "head": {}}, {"name": "far", "head_address": "h:1"}]},
            {**SLICE, "cluster": "far"},
            "groups.0.cluster",
            "needs KubeRay",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_with_field_and_remedy(
    tmp_path: Path, change: dict[str, Any], group: dict[str, Any], where: str, says: str
) -> None:
    with pytest.raises(InvalidJobSpec) as refused:
        read_values(values_with(tmp_path, copy.deepcopy(change), **group))
    assert where in [problem.path[: len(where)] for problem in refused.value.problems]
    assert says in str(refused.value)
    assert all(problem.remedy for problem in refused.value.problems)


def test_a_file_that_is_not_there_or_no_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1")
    for name in ("none.yaml", "list.yaml"):
        with pytest.raises(ConfigurationError):
            read_values(tmp_path / name)


@pytest.mark.parametrize("text", ["on", "no", "0440", "1e3", "~", "a: b", "- x", '"', "ü\n", "", " "])
def test_what_is_printed_is_read_as_it_was_meant(text: str) -> None:
    document = {"a": text, text or "empty": [text, {"b": [], "c": {}, "d": [[text, 1], True, None]}]}
    assert list(yaml.safe_load_all(yaml_of([document]))) == [document]
