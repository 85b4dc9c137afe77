"""Hold rendered manifests and charts against the real schemas, and against Helm: ``make kubernetes-check``.

    python tests/kubernetes/check.py [--crd PATH]... MANIFESTS.yaml...

    Kubernetes' own kinds    the schemas of its release, strictly: kubernetes-validate (a package of the environment aside)
    everything else          the CRD, given by --crd (a file, or a folder of them) or else downloaded from its project
    their pods               the same as Kubernetes' own, as a Pod of each template
    PodMonitor               without its CRD, the model of prometheus-operator (cloudcoil-models-prometheus-operator)
    charts                   Helm itself (helm-python-sdk): lint, the same manifests as those printed, refusals.
                             The chart of MANIFESTS.yaml is in the folder MANIFESTS

Without a kind's CRD and without internet the check says so. Fields that a schema does not have are faults, although a server
would drop them.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

VERSION = "1.31"
RELEASED = "the schemas of Kubernetes " + VERSION
GITHUB = "https://raw.githubusercontent.com"
CRDS = {
    "RayCluster": "ray-project/kuberay/v1.7.0/helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml",
    "LeaderWorkerSet": "kubernetes-sigs/lws/v0.9.0/config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
    **{
        kind: "prometheus-operator/prometheus-operator/v0.93.0/example/prometheus-operator-crd/"
        f"monitoring.coreos.com_{kind.lower()}s.yaml"
        for kind in ("PodMonitor", "PrometheusRule")
    },
    **{
        kind: f"GoogleCloudPlatform/prometheus-engine/v0.9.1-rc.3/charts/operator/crds/monitoring.googleapis.com_{name}.yaml"
        for kind, name in (("PodMonitoring", "podmonitorings"), ("Rules", "rules"))
    },
}
"""Where each project keeps its CRD, in the release that is checked against."""
DOWNLOAD_S = 20
POD_TEMPLATES = (
    ("template",),
    ("headGroupSpec", "template"),
    ("workerGroupSpecs", "template"),
    ("leaderWorkerTemplate", "workerTemplate"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--crd", type=Path, action="append", default=[])
    parser.add_argument("manifests", type=Path, nargs="+")
    options = parser.parse_args()
    files = [file for path in options.crd for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    crds = {crd["spec"]["names"]["kind"]: crd for file in files for crd in documents(file)}
    read = [(path, manifest) for path in options.manifests for manifest in documents(path)]
    for kind in sorted({manifest["kind"] for _, manifest in read} & CRDS.keys() - crds.keys()):
        if crd := downloaded(kind):
            crds[kind] = crd
    problems, without = [], set()
    for path, manifest in read:
        named = f"{path.name}: {manifest['kind']} {manifest['metadata']['name']}"
        by, found = checked(manifest, crds)
        problems += [f"{named}: {problem}" for problem in found]
        if by is None:
            without.add(manifest["kind"])
        print(f"{named}: {'not checked as a whole' if by is None else by}")
    for kind in sorted(without):
        print(f"No schema of {kind} is at hand: give its CRD with --crd. Its pods were checked.")
    for folder in (path.with_suffix("") for path in options.manifests):
        found = list(of_chart(folder, documents(folder.with_suffix(".yaml"))))
        problems += [f"chart {folder.name}: {problem}" for problem in found]
        print(f"chart {folder.name}: {len(found)} problems by Helm")
    print("\n".join(problems) or "No problem was found.")
    sys.exit(bool(problems))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def downloaded(kind: str) -> dict[str, Any] | None:
    """The kind's CRD from its project, or None without internet."""
    try:
        with urllib.request.urlopen(f"{GITHUB}/{CRDS[kind]}", timeout=DOWNLOAD_S) as answer:
            return dict(yaml.safe_load(answer.read()))
    except OSError:
        return None


def checked(manifest: dict[str, Any], crds: dict[str, dict[str, Any]]) -> tuple[str | None, list[str]]:
    """By what it was held, if by anything as a whole, and what is wrong with it."""
    kind = manifest["kind"]
    if kind not in CRDS:
        return RELEASED, of_kubernetes(manifest)
    of_pods = [problem for pod in pods_of(manifest) for problem in of_kubernetes(pod)]
    if kind in crds:
        return "its CRD", of_crd(manifest, crds[kind]) + of_pods
    if kind == "PodMonitor":
        return "the model of prometheus-operator", of_pod_monitor(manifest)
    return None, of_pods


def pods_of(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in POD_TEMPLATES:
        found = [manifest["spec"]]
        for name in path:
            found = [each for one in found for each in as_list(one.get(name))]
        yield from ({"apiVersion": "v1", "kind": "Pod", **template} for template in found)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def of_chart(folder: Path, printed: list[dict[str, Any]]) -> Iterator[str]:
    """What Helm says of the chart, and what differs from the manifests that were printed."""
    import helm_python

    (namespace,) = {manifest["metadata"]["namespace"] for manifest in printed}
    result = helm_python.lint(str(folder), namespace=namespace)
    yield from (f"lint: {message}" for message in problems_of_lint(result))
    with helm_python.Chart.load(str(folder)) as chart:
        rendered = made_by(chart, {}, namespace)
        for manifest in printed:
            if manifest not in rendered:
                yield f"{manifest['kind']} {manifest['metadata']['name']} differs from what is printed"
        if len(rendered) != len(printed):
            yield f"gives {len(rendered)} manifests instead of {len(printed)}"
        image = "elsewhere/atoll:9.9.9"
        if json.dumps(made_by(chart, {"image": image}, namespace)) != json.dumps(rendered).replace(
            json.dumps(chart.values["image"]), json.dumps(image)
        ):
            yield "does not render another image in place of its own"
        for given, place, words in (
            ({"partition_tolerance_s": 30}, namespace, "partition_tolerance_s differs"),
            ({"runs": {"gib": 77}}, namespace, "runs differs"),
            ({}, "elsewhere", "was rendered for"),
            ({"imgae": "x"}, namespace, "imgae"),
            ({"image": 7}, namespace, "image"),
        ):
            try:
                made_by(chart, given, place)
                yield f"accepts {given} in the namespace {place}"
            except helm_python.HelmError as error:
                if words not in str(error):
                    yield f"refuses {given} with other words: {error}"


def problems_of_lint(result: Any) -> list[str]:
    messages = result["messages"] if isinstance(result, dict) else result.messages
    return [str(message) for message in messages if "icon is recommended" not in str(message)]


def made_by(chart: Any, given: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    """The manifests that Helm makes of the chart with these values."""
    chart.validate_schema(given)
    texts = chart.render(given, name="check", namespace=namespace).values()
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def of_kubernetes(manifest: dict[str, Any]) -> list[str]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def of_pod_monitor(manifest: dict[str, Any]) -> list[str]:
    from cloudcoil.models.prometheus_operator.v1 import PodMonitor
    from pydantic import ValidationError

    try:
        model = PodMonitor.model_validate(manifest)
    except ValidationError as error:
        return [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
    kept = model.model_dump(by_alias=True, exclude_none=True, exclude_unset=True, mode="json")
    return [
        f"{path}: prometheus-operator has no such field" for path in dropped(manifest["spec"], kept["spec"], "spec")
    ]


def dropped(document: Any, kept: Any, path: str) -> Iterator[str]:
    if isinstance(document, dict):
        for name, value in document.items():
            if not isinstance(kept, dict) or name not in kept:
                yield f"{path}.{name}"
            else:
                yield from dropped(value, kept[name], f"{path}.{name}")
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from dropped(value, kept[index] if index < len(kept) else None, f"{path}.{index}")


def of_crd(manifest: dict[str, Any], crd: dict[str, Any]) -> list[str]:
    from jsonschema import Draft202012Validator

    version = manifest["apiVersion"].partition("/")[2]
    schema = next(each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == version)
    top = {**schema["properties"], "metadata": {"type": "object"}}
    closed_schema = closed({**schema, "properties": top})
    return [
        f"{'.'.join(map(str, error.path))}: {error.message[:300]}"
        for error in Draft202012Validator(closed_schema).iter_errors(manifest)
    ]


def closed(schema: Any) -> Any:
    """The schema without room for fields that it does not have, but where it says that it keeps them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(each) for name, each in schema.items()}
    properties = schema.get("properties")
    open_by_itself = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(properties, dict) and schema.get("type") == "object" and not open_by_itself:
        made["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        made = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return made


if __name__ == "__main__":
    main()
