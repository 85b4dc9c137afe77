"""Manifests and charts for Kubernetes, from the shipped files of values and from others; and values that are refused.

``make kubernetes-check`` holds them against the real schemas, which are others' files and not in this repository, and has
Helm itself render the charts.
"""

from __future__ import annotations

import copy
import json
import re
import runpy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from api.commands import nodes
from api.commands.nodes import shipped_files, write_chart
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.kubernetes.manifests import LIVE, Shipped, chart, rendered, schema, yaml_of
from orchestrator.kubernetes.values import Values, read_values
from orchestrator.runtime.placement import SLICE_LABEL, TOPOLOGY_LABEL, WORKER_LABEL
from orchestrator.runtime.settings import ray_environment

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
FILES = ("cpu", "gpu-spot", "tpu")
PLACES = [*((name, None) for name in FILES), ("gpu-spot", "west"), ("tpu", "west")]
EVERYTHING = Path(__file__).parent / "everything.yaml"
"""Every value there is, with texts that are odd in a template and in YAML."""
SHIPPED = shipped_files()
NODE = SimpleNamespace(**runpy.run_path(str(FOLDER.parent / "node.py")))
RAY_CLUSTER = {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
GROUP = {
    *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts"),
    *("rayStartParams", "labels", "template"),
}
"""Fields of ours that KubeRay's CRD has (helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml, 1.6 and 1.7)."""

CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def manifests(name: str, cluster: str | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    return manifests_of(read_values(FOLDER / f"{name}.yaml"), cluster)


def manifests_of(values: Values, cluster: str | None = None) -> dict[tuple[str, str], dict[str, Any]]:
    """Read back from what is printed, by kind and name."""
    chosen = next(each for each in values.clusters if each.name == (cluster or values.home.name))
    printed = yaml_of(rendered(values, chosen, SHIPPED))
    documents = list(yaml.safe_load_all(printed))
    assert documents == [plain(each) for each in rendered(values, chosen, SHIPPED)]  # YAML reads what was meant
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
        if kind == "LeaderWorkerSet":
            found.append(each["spec"]["leaderWorkerTemplate"]["workerTemplate"])
    return found


def secrets_of(template: dict[str, Any]) -> list[dict[str, Any]]:
    return [each["secret"] for each in template["spec"]["volumes"] if "secret" in each]


def component_of(template: dict[str, Any]) -> str:
    return str(template["metadata"]["labels"]["app.kubernetes.io/component"])


def environment(template: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in template["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize(("name", "cluster"), PLACES)
def test_every_pod_is_confined_and_has_the_settings_of_the_cluster(name: str, cluster: str | None) -> None:
    documents = manifests(name, cluster)
    pods = templates(documents)
    assert pods
    for template in pods:
        spec, (container,) = template["spec"], template["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == CONFINED
        requested, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requested.keys() == limits.keys()
        assert "ephemeral-storage" in limits
        if name != "cpu":  # which reserves less, to fit a laptop
            assert all(requested[each] == limits[each] for each in requested if each != "ephemeral-storage")
        assert all("sizeLimit" in each["emptyDir"] for each in spec["volumes"] if "emptyDir" in each)
        (issuing,) = spec["initContainers"]
        assert issuing["securityContext"] == container["securityContext"]
        mounted, before = ({each["name"] for each in one["volumeMounts"]} for one in (container, issuing))
        assert mounted | before == {each["name"] for each in spec["volumes"]}
        assert before - mounted == {"authority"}, "nobody but who issues sees the authority's key"
        state = Path("/var/lib/atoll")
        settings = ray_environment(state / "cluster/token", certificates=state / "certificates")
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
        assert made["labels"] == {"atoll-node-group": group.name, "region": values.region_of(group)}
        assert made["replicas"] * made["numOfHosts"] == group.nodes
        spec = made["template"]["spec"]
        assert "topology.kubernetes.io/region" not in spec["nodeSelector"]
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
    (east,) = manifests("tpu")["RayCluster", "atoll"]["spec"]["workerGroupSpecs"]
    far = manifests("tpu", "west")["LeaderWorkerSet", "atoll-v6e-west"]["spec"]
    assert (east["replicas"], east["numOfHosts"]) == (2, 4)
    assert (far["replicas"], far["leaderWorkerTemplate"]["size"]) == (1, 4)
    assert far["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    west = far["leaderWorkerTemplate"]["workerTemplate"]
    for template in (east["template"], west):
        selector = template["spec"]["nodeSelector"]
        assert selector["cloud.google.com/gke-tpu-accelerator"] == "tpu-v6e-slice"
        assert selector["cloud.google.com/gke-tpu-topology"] == "4x4"
        assert template["spec"]["containers"][0]["resources"]["limits"]["google.com/tpu"] == "4"
        assert "topologySpreadConstraints" not in template["spec"], "a slice is in one place"
    assert "cloud.google.com/gke-spot" not in east["template"]["spec"]["nodeSelector"]
    assert west["spec"]["nodeSelector"]["cloud.google.com/gke-spot"] == "true"


def test_hosts_of_a_far_slice_have_the_labels_by_which_a_slice_is_placed() -> None:
    (template,) = templates(manifests("tpu", "west"))
    command = template["spec"]["containers"][0]["command"]
    labels = dict(value.split("=", 1) for option, value in pairwise(command) if option == "--labels")
    assert labels == {SLICE_LABEL: "$(TPU_NAME)", WORKER_LABEL: "$(TPU_WORKER_ID)", TOPOLOGY_LABEL: "4x4"}
    assert nodes.labels_of([f"{name}={value}" for name, value in labels.items() if "$" not in value])


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
    assert {kind for kind, _ in documents} == {"Deployment", "NetworkPolicy", "PodDisruptionBudget"}
    spec = documents["Deployment", "atoll-a10g-west"]["spec"]
    command = spec["template"]["spec"]["containers"][0]["command"]
    assert command[:3] == ["atoll", "join", "head.east.example:6379"]
    assert command[command.index("--gpus") + 1] == "1"
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert spec["template"]["spec"]["nodeSelector"]["karpenter.sh/capacity-type"] == "spot"
    assert "cloud.google.com/gke-accelerator" not in spec["template"]["spec"]["nodeSelector"]
    assert spec["template"]["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"] == "g5.2xlarge"


@pytest.mark.parametrize("name", FILES)
def test_nobody_reaches_a_pod_but_those_who_are_named(name: str) -> None:
    values, documents = read_values(FOLDER / f"{name}.yaml"), manifests(name)
    policies = [each["spec"] for (kind, _), each in documents.items() if kind == "NetworkPolicy"]
    chosen = [each for spec in policies for each in spec["podSelector"]["matchExpressions"]]
    covered = {component for each in chosen for component in each["values"]}
    assert covered == set(map(component_of, templates(documents)))
    sources = [source for spec in policies for rule in spec["ingress"] for source in rule["from"]]
    assert {source["ipBlock"]["cidr"] for source in sources if "ipBlock" in source} == set(values.join_from)
    selectors = [source["namespaceSelector"]["matchLabels"] for source in sources if "namespaceSelector" in source]
    namespaces = {selector["kubernetes.io/metadata.name"] for selector in selectors}
    watching = {values.monitoring.namespace} if values.monitoring else set()
    assert namespaces == set(values.service.allow_from) | watching


def test_a_head_is_issued_a_certificate_for_every_name_by_which_nodes_call_it() -> None:
    head = manifests("gpu-spot")["RayCluster", "atoll"]["spec"]["headGroupSpec"]["template"]
    (issuing,) = head["spec"]["initContainers"]
    command = issuing["command"]
    names = {name for option, name in pairwise(command) if option == "--name"}
    assert command[:3] == ["atoll", "certificates", "issue"]
    of_kuberay = "atoll-head-svc.atoll.svc.cluster.local"  # its worker pods wait for the head by that one
    assert {"$(POD_IP)", "atoll-head", "head.east.example", of_kuberay} <= names
    assert issuing["env"][-1]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


@pytest.mark.parametrize(("cluster", "spoken"), [("east", "HTTP"), ("west", None)])
def test_where_the_network_encrypts_nothing_of_tls_is_rendered(
    tmp_path: Path, cluster: str, spoken: str | None
) -> None:
    path = tmp_path / "values.yaml"
    path.write_text((FOLDER / "gpu-spot.yaml").read_text() + "insecure: true\n")
    values = read_values(path)
    documents = rendered(values, next(each for each in values.clusters if each.name == cluster), Shipped())
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
    assert (tokens.keys(), folders) == ({"atoll-cluster", "atoll-metrics"}, {"atoll-authority", "atoll-store"})
    mounted = {secret["secretName"] for pod in templates(documents) for secret in secrets_of(pod)}
    (path,) = {environment(pod)["RAY_AUTH_TOKEN_PATH"] for pod in templates(documents)}
    (endpoint,) = documents["PodMonitor", "atoll-service"]["spec"]["podMetricsEndpoints"]
    scraped = endpoint["authorization"]["credentials"]
    mounted -= {"atoll-store"}  # the example's own, of one file
    folders -= {"atoll-store"}
    assert mounted | {scraped["name"]} == tokens.keys() | folders
    assert tokens == {"atoll-cluster": Path(path).name, scraped["name"]: scraped["key"]}
    for deployment in re.findall(r"exec deployment/(\S+)", guide):
        template = documents["Deployment", deployment]["spec"]["template"]
        paths = {mount["mountPath"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert set(re.findall(r"(/var/lib/atoll/home)\b", guide)) <= paths


# ── values that cannot be ─────────────────────────────────────────────────────────────────────────────────────────

GROUP_OF = {"name": "one", "nodes": 4, "cpus": 4, "memory_gib": 8}
HOME = {"name": "home", "region": "us-east1", "head": {}}
FAR = {"name": "far", "region": "us-west1", "head_address": "h:1"}
TEXT = {"name": "text", "mount": "/data", "source": {"nfs": {"server": "10.0.0.1", "path": "/text"}}}
SLICE = {"accelerators": 4, "tpu": {"accelerator": "tpu-v6e-slice", "topology": "4x4", "hosts": 4}}
LONG = {**SLICE, "cluster": "far", "name": "x" * 40}
ACCOUNT = {"name": "a", "annotations": {"x/y": "1"}}
NO_VOLUME = "no volume of clusters.0.head, service, groups.0"


def values_with(tmp_path: Path, change: dict[str, Any], **group: Any) -> Path:
    document = {"image": "atoll:1", "clusters": [HOME], "groups": [GROUP_OF | group], **change}
    path = tmp_path / "values.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("change", "group", "where", "says"),
    [
        ({"clusters": [{"name": "home"}]}, {}, "clusters", "exactly one"),
        ({"clusters": [{"name": "a", "head": {}}, {"name": "b"}]}, {}, "clusters.1.head_address", "'b'"),
        ({"clusters": [{"name": "a", "region": "r", "head": {}}] * 2}, {}, "clusters", "'a' 2 times"),
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
        ({"clusters": [HOME, FAR], "name": "installation"}, LONG, "groups.0.name", "over 49 characters"),
        ({"clusters": [HOME, FAR | {"head_address": "h:70000"}]}, {}, "clusters.1.head_address", "1 to 65535"),
        ({"clusters": [{"name": "home", "head": {}}]}, {}, "groups.0.region", "region of the group or of its cluster"),
        ({"service": {"data": ["s3:/bucket"]}}, {}, "service.data.0", "s3://BUCKET/PREFIX"),
        ({"service": {"data": ["/data/text"]}}, {}, "service.data.0", NO_VOLUME),
        ({"service": {"checkpoints": ["ftp://x/y"]}}, {}, "service.checkpoints.0", "'ftp' is not a supported protocol"),
        (
            {"service": {"checkpoints": ["/data"]}, "pods": {"volumes": [TEXT]}},
            *({}, "service.checkpoints.0", "read_only: false"),
        ),
        ({"service": {"run_as_user": 7}}, {}, "service.run_as_user", "has the image's user"),
        ({"runs": {"shared": True}}, {"run_as_user": 0}, "groups.0.run_as_user", "pods.run_as_user"),
        ({"service": {"checkpoints": ["/data"]}}, {}, "service.checkpoints.0", "of clusters.0.head, service contains"),
        ({"packages": ["/elsewhere"], "pods": {"volumes": [TEXT]}}, {}, "packages.0", "pods.volumes"),
        ({"service": {"arguments": ["--host=0.0.0.0"]}}, {}, "service.arguments.0", "Remove --host"),
        ({"service": {"allow": ["my-package"]}}, {}, "service.allow.0", "my-package"),
        ({"pods": {"environment": {"RAY_AUTH_MODE": "none"}}}, {}, "pods.environment", "the manifests set"),
        ({"pods": {"environment": {"MALLOC_ARENA_MAX": "9"}}}, {}, "pods.environment", "the manifests set"),
        ({"pods": {"environment": {"PYTHONPATH": "/x"}}}, {}, "pods.environment", "`packages`"),
        ({"pods": {"labels": {"app.kubernetes.io/component": "x"}}}, {}, "pods.labels", "the manifests set"),
        ({"pods": {"volumes": [TEXT | {"mount": "/var/lib/atoll"}]}}, {}, "pods.volumes.0.mount", "collides"),
        ({"pods": {"volumes": [TEXT | {"mount": "/tmp/x"}]}}, {}, "pods.volumes.0.mount", "collides"),
        ({"pods": {"volumes": [TEXT | {"mount": "/a/../tmp"}]}}, {}, "pods.volumes.0.mount", "contains"),
        ({"pods": {"volumes": [TEXT | {"name": "runs"}]}}, {}, "pods.volumes.0.name", "another name"),
        ({"pods": {"volumes": [TEXT | {"source": {"nfss": {}}}]}}, {}, "pods.volumes.0.source", "Did you mean nfs"),
        ({"pods": {"volumes": [TEXT | {"source": {}}]}}, {}, "pods.volumes.0.source", "exactly one"),
        ({"pods": {"volumes": [TEXT]}}, {"volumes": [TEXT]}, "groups.0.volumes", "its own name"),
        ({"pods": {"requests": {"cpus": 64}}}, {}, "pods.requests.cpus", "at most what the pod may use"),
        ({}, {"requests": {"memory_gib": 9.0}}, "groups.0.requests.memory_gib", "more than the 8 of groups.0"),
        (
            {"service": {"service_account": ACCOUNT}},
            *({"service_account": {"name": "a"}}, "groups.0.service_account", "other values than service"),
        ),
        ({"service": {"service_account": ACCOUNT | {"create": False}}}, {}, "service", "create"),
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


def test_every_value_has_an_example() -> None:
    """The file that is held against the real schemas lacks no field, so that a new field is checked too."""
    unset = {"insecure", "ray_version", "secret", "metrics_secret", "authority_secret", "evictable", "kind"}
    unset |= {"grace_s", "rules", "dashboards"}
    values = read_values(EVERYTHING)

    def fields_set(section: Any) -> Iterator[str]:
        if isinstance(section, BaseModel):
            yield from section.model_fields_set
            for name in type(section).model_fields:
                yield from fields_set(getattr(section, name))
        elif isinstance(section, tuple):
            for each in section:
                yield from fields_set(each)

    described = json.dumps(schema())
    names = {name for section in json.loads(described)["$defs"].values() for name in section["properties"]}
    names |= set(schema()["properties"])
    assert names - set(fields_set(values)) == unset


def test_problems_of_values_and_between_values_are_reported_together(tmp_path: Path) -> None:
    change = {"imgae": "x", "clusters": [HOME, {"name": "b"}], "service": {"data": ["nowhere"]}}
    with pytest.raises(InvalidJobSpec) as refused:
        read_values(values_with(tmp_path, change, nodes="many", gpu="nvidia-l4"))
    found = {problem.path for problem in refused.value.problems}
    assert {"imgae", "clusters.1.head_address", "groups.0.nodes", "groups.0.accelerators", "service.data.0"} <= found


# ── what values make of pods ──────────────────────────────────────────────────────────────────────────────────────────


def test_cpu_yaml_needs_nothing_that_a_new_cluster_lacks_and_fits_a_laptop() -> None:
    documents = manifests("cpu")
    pods = templates(documents)
    (cluster,) = [each for (kind, _), each in documents.items() if kind == "RayCluster"]
    replicas = [1, *(group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]), 1]
    assert len(replicas) == len(pods)
    assert not [each for pod in pods for each in pod["spec"].get("nodeSelector", {})]
    assert not [each for pod in pods for each in pod["spec"].get("tolerations", [])]
    claims = [each["spec"] for (kind, _), each in documents.items() if kind == "PersistentVolumeClaim"]
    assert {tuple(each["accessModes"]) for each in claims} == {("ReadWriteOnce",)}
    assert not [each for each in claims if "storageClassName" in each]
    requested = [each["resources"]["requests"] for pod in pods for each in pod["spec"]["containers"]]
    assert sum(float(each["cpu"]) for each in requested) <= 1.0
    assert sum(int(each["memory"].removesuffix("Mi")) for each in requested) <= 3 * 1024
    first = [each["resources"]["requests"] for pod in pods for each in pod["spec"]["initContainers"]]
    assert all(float(each["cpu"]) <= 0.25 for each in first), "the largest container decides what a pod reserves"
    assert {kind for kind, _ in documents} <= {
        *("PersistentVolumeClaim", "RayCluster", "Service", "Deployment", "NetworkPolicy", "PodDisruptionBudget")
    }


def test_head_and_service_share_one_machine_unless_their_volume_is_shared(tmp_path: Path) -> None:
    for shared in (False, True):
        documents = manifests_of(read_values(values_with(tmp_path, {"runs": {"shared": shared}})))
        head, island, service = (pod["spec"] for pod in sorted(templates(documents), key=component_of))
        mode = "ReadWriteMany" if shared else "ReadWriteOnce"
        assert documents["PersistentVolumeClaim", "atoll-runs"]["spec"]["accessModes"] == [mode]
        for pod in (head, service):
            assert ("affinity" in pod) == (not shared)
        (runs,) = [each for each in island["volumes"] if each["name"] == "runs"]
        assert ("persistentVolumeClaim" in runs) == shared
    affinity = manifests("cpu")["Deployment", "atoll-service"]["spec"]["template"]["spec"]["affinity"]["podAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    wanted = term["labelSelector"]["matchLabels"].items()
    pods = templates(manifests("cpu"))
    chosen = [component_of(pod) for pod in pods if wanted <= pod["metadata"]["labels"].items()]
    assert sorted(chosen) == ["head", "service"], "each matches its own term, so the first of them can run anywhere"


def test_regions_select_machines_only_when_asked_and_a_selector_can_be_removed(tmp_path: Path) -> None:
    change = {"region_selector": True, "clusters": [HOME | {"cloud": "eks"}]}
    options = {"gpu": "nvidia-l4", "accelerators": 1, "spot": "eks"}
    path = values_with(tmp_path, change, **options, selector={"eks.amazonaws.com/capacityType": None, "pool": "gpu"})
    (group,) = manifests_of(read_values(path))["RayCluster", "atoll"]["spec"]["workerGroupSpecs"]
    selector = group["template"]["spec"]["nodeSelector"]
    assert selector == {"topology.kubernetes.io/region": "us-east1", "pool": "gpu"}


def test_options_of_all_pods_and_of_one_kind_reach_the_pods(tmp_path: Path) -> None:
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/a"}
    common = {"labels": {"team": "a"}, "annotations": {"x/y": "1"}, "priority_class": "training", "scratch_gib": 7}
    common |= {"environment": {"AWS_REGION": "us-east-1"}, "volumes": [TEXT], "tolerate": ["dedicated"]}
    common |= {"service_account": {"name": "atoll", "annotations": role}}
    own = {"labels": {"team": "b", "kueue.x-k8s.io/queue-name": "q"}, "environment": {"AWS_REGION": "eu"}}
    own |= {"run_as_user": 0, "shm_gib": 3.0, "cluster": "far"}
    change = {"pods": common, "clusters": [HOME, FAR], "packages": ["/data/lib"]}
    values = read_values(values_with(tmp_path, change, **own))
    near, far = manifests_of(values), manifests_of(values, "far")
    for pod in [*templates(near), *templates(far)]:
        (container,) = pod["spec"]["containers"]
        is_far = component_of(pod) == "node"
        assert pod["metadata"]["labels"]["team"] == ("b" if is_far else "a")
        assert pod["metadata"]["annotations"]["x/y"] == "1"
        assert pod["spec"]["priorityClassName"] == "training"
        assert pod["spec"]["serviceAccountName"] == "atoll"
        assert {"key": "dedicated", "operator": "Exists"} in pod["spec"]["tolerations"]
        assert environment(pod)["AWS_REGION"] == ("eu" if is_far else "us-east-1")
        assert environment(pod)["ATOLL_PACKAGES"] == "/data/lib"
        assert {"name": "text", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
        assert {"name": "text", "nfs": {"server": "10.0.0.1", "path": "/text"}} in pod["spec"]["volumes"]
        assert pod["spec"]["securityContext"]["runAsUser"] == (0 if is_far else 10001)
        assert pod["spec"]["securityContext"]["runAsNonRoot"] != is_far
        assert ("fsGroup" in pod["spec"]["securityContext"]) != is_far, "it would let a group read the secrets of root"
        assert [secret["defaultMode"] for secret in secrets_of(pod)] == [0o400 if is_far else 0o440] * 2
        (issuing,) = pod["spec"]["initContainers"]
        assert "AWS_REGION" not in {each["name"] for each in issuing["env"]}
    for documents in (near, far):
        assert documents["ServiceAccount", "atoll"]["metadata"]["annotations"] == role
    deployment = far["Deployment", "atoll-one"]
    assert deployment["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    command = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    assert ("--pass-environment", "AWS_REGION") in pairwise(command)
    assert ("--packages", "/data/lib") in pairwise(command)
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "3072Mi"}}
    assert shm in deployment["spec"]["template"]["spec"]["volumes"]


def test_the_service_gets_roots_packages_database_and_arguments(tmp_path: Path) -> None:
    wanted = {
        **{"data": ["s3://b/text", "/data"], "checkpoints": ["gs://c/atoll"], "allow": ["models"], "jobs_max": 3},
        **{"database_secret": "postgres", "arguments": ["--new-store"]},
        "retention": {"days": 30, "failed_days": 0.5, "gib": 1_000_000},
    }
    change = {"service": wanted, "pods": {"volumes": [TEXT]}, "packages": ["/data/lib"]}
    documents = manifests_of(read_values(values_with(tmp_path, change)))
    template = documents["Deployment", "atoll-service"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    options = NODE.parser().parse_args(container["args"])
    assert (options.what, options.head) == ("service", "atoll-head:6379")
    assert {"name": "database", "secret": {"secretName": "postgres", "defaultMode": 0o440}} in template["spec"][
        "volumes"
    ]
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(options.database_file.parent) in paths
    assert NODE.service_options(options.options, NODE.Folders(NODE.STATE)) == [
        *("--data", "s3://b/text", "--data", "/data", "--checkpoints", "gs://c/atoll", "--allow", "models"),
        *("--packages", "/data/lib", "--jobs-max", "3", "--retention-days", "30.0", "--retention-failed-days", "0.5"),
        *("--retention-bytes", str(1_000_000 << 30), "--new-store"),
    ]
    plain, state = NODE.parser().parse_args(["service"]), "/var/lib/atoll"
    by_default = ["--checkpoints", f"{state}/runs", "--data", f"{state}/data"]
    assert NODE.service_options(plain.options, NODE.Folders(NODE.STATE)) == by_default
    database = tmp_path / "url"
    database.write_text("postgresql+psycopg://atoll:secret@db/atoll\n")
    assert NODE.database_in(database) == {"ATOLL_DATABASE": "postgresql+psycopg://atoll:secret@db/atoll"}
    with pytest.raises(SystemExit, match="cannot be read"):
        NODE.database_in(tmp_path / "none")


def test_the_head_stays_and_groups_lose_few_pods_at_a_time() -> None:
    documents = manifests("tpu")
    budgets = {name: each["spec"] for (kind, name), each in documents.items() if kind == "PodDisruptionBudget"}
    assert {name: spec["minAvailable"] for name, spec in budgets.items()} == {"atoll-head": 1, "atoll-v6e-east": 4}
    for spec in budgets.values():
        chosen = spec["selector"]["matchLabels"]
        assert [pod for pod in templates(documents) if chosen.items() <= pod["metadata"]["labels"].items()]
    head = documents["RayCluster", "atoll"]["spec"]["headGroupSpec"]["template"]
    assert head["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert not [kind for kind, _ in manifests("cpu") if kind == "PodDisruptionBudget"]  # its head may be evicted


def test_alerts_and_dashboards_are_those_that_are_shipped() -> None:
    alerts = yaml.safe_load((FOLDER.parent / "prometheus" / "alerts.yml").read_text())["groups"]
    boards = {path.stem: path.read_text() for path in (FOLDER.parent.parent / "dashboards").glob("*.json")}
    for name, kind in (("gpu-spot", "PrometheusRule"), ("tpu", "Rules")):
        documents = manifests(name)
        rules = documents[kind, "atoll"]["spec"]["groups"]
        assert [{key: value for key, value in group.items() if key != "interval"} for group in rules] == alerts
        shown = {name: each for (kind, name), each in documents.items() if kind == "ConfigMap"}
        assert {each["metadata"]["labels"]["grafana_dashboard"] for each in shown.values()} == {"1"}
        assert {name.removeprefix("atoll-dashboard-"): each["data"] for name, each in shown.items()} == {
            name: {f"{name}.json": text} for name, text in boards.items()
        }


def test_googles_collectors_may_read_the_secrets_that_the_scrape_names() -> None:
    documents = manifests("tpu")
    (endpoint,) = documents["PodMonitoring", "atoll-service"]["spec"]["endpoints"]
    named = {endpoint["authorization"]["credentials"]["secret"]["name"], endpoint["tls"]["ca"]["secret"]["name"]}
    (rule,) = documents["Role", "atoll-metrics"]["rules"]
    assert (set(rule["resourceNames"]), rule["verbs"]) == (named, ["get"])
    (subject,) = documents["RoleBinding", "atoll-metrics"]["subjects"]
    assert subject["namespace"] == read_values(FOLDER / "tpu.yaml").monitoring.namespace  # type: ignore[union-attr]


# ── charts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "cluster"),
    [*((FOLDER / f"{name}.yaml", cluster) for name, cluster in PLACES), (EVERYTHING, None), (EVERYTHING, "far")],
    ids=lambda value: getattr(value, "stem", value),
)
def test_a_charts_templates_are_the_printed_manifests(path: Path, cluster: str | None) -> None:
    values = read_values(path)
    chosen = next(each for each in values.clusters if each.name == (cluster or values.home.name))
    files = chart(values, lambda given: rendered(given, chosen, SHIPPED), "1.2.3")
    given = yaml.safe_load(files["values.yaml"])
    made = {}
    for name, text in files.items():
        if name.startswith("templates/") and name != "templates/check.yaml":
            for live in LIVE:
                text = text.replace(f"{{{{ .Values.{live} | toJson }}}}", json.dumps(given[live]))
            document = yaml.safe_load(text.replace('{{ "{{" }}', "{{"))
            made[document["kind"], document["metadata"]["name"]] = document
    assert made == manifests_of(values, cluster)
    jsonschema.validate(given, json.loads(files["values.schema.json"]))


def test_a_chart_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    folder, other = tmp_path / "chart", tmp_path / "other"
    write_chart(folder, {"Chart.yaml": "annotations: {atoll/rendered: 'true'}", "templates/old.yaml": "", "a": "1"})
    write_chart(folder, {"Chart.yaml": "annotations: {atoll/rendered: 'true'}", "templates/new.yaml": "", "a": "2"})
    assert [path.name for path in (folder / "templates").iterdir()] == ["new.yaml"]
    other.mkdir()
    (other / "mine").touch()
    with pytest.raises(ConfigurationError, match="Name a new folder"):
        write_chart(other, {"Chart.yaml": ""})
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_chart(other / "mine" / "below", {"Chart.yaml": ""})


@pytest.mark.parametrize("name", FILES)
def test_the_schema_takes_the_shipped_values_and_no_unknown_field(name: str) -> None:
    document = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    jsonschema.validate(document, dict(schema()))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"imgae": "x"}, dict(schema()))


def test_a_file_that_is_not_there_or_no_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1")
    for name in ("none.yaml", "list.yaml"):
        with pytest.raises(ConfigurationError):
            read_values(tmp_path / name)


@pytest.mark.parametrize("text", ["on", "no", "0440", "1e3", "~", "a: b", "- x", '"', "ü\n", "", " "])
def test_what_is_printed_is_read_as_it_was_meant(text: str) -> None:
    document = {"a": text, text or "empty": [text, {"b": [], "c": {}, "d": [[text, 1], True, None]}]}
    assert list(yaml.safe_load_all(yaml_of([document]))) == [document]
