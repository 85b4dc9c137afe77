"""Hold rendered manifests against the real schemas: ``make kubernetes-check``, in an environment aside.

    python tests/kubernetes/check.py [--crd FILE]... MANIFESTS...

    Kubernetes' own kinds    the schemas of its release, strictly: kubernetes-validate (a package of the environment aside)
    pods of a RayCluster     the same, as a Pod of each template
    PodMonitor               the model of prometheus-operator: cloudcoil-models-prometheus-operator (likewise)
    RayCluster               the CRD that KubeRay ships, given by --crd; no package has it, and without it this is said

A CRD that is given outranks a package. Fields that a schema does not have are faults, although a server would drop them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

VERSION = "1.31"
RELEASED = "the schemas of Kubernetes " + VERSION


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--crd", type=Path, action="append", default=[])
    parser.add_argument("manifests", type=Path, nargs="+")
    options = parser.parse_args()
    crds = {crd["spec"]["names"]["kind"]: crd for path in options.crd for crd in documents(path)}
    problems, without = [], set()
    for path in options.manifests:
        for manifest in documents(path):
            named = f"{path.name}: {manifest['kind']} {manifest['metadata']['name']}"
            by, found = checked(manifest, crds)
            problems += [f"{named}: {problem}" for problem in found]
            if by is None:
                without.add(manifest["kind"])
            print(f"{named}: {'not checked as a whole' if by is None else by}")
    for kind in sorted(without):
        print(f"No schema of {kind} is at hand: give its CRD with --crd. Its pods were checked.")
    print("\n".join(problems) or "No problem was found.")
    sys.exit(bool(problems))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def checked(manifest: dict[str, Any], crds: dict[str, dict[str, Any]]) -> tuple[str | None, list[str]]:
    """By what it was held, if by anything as a whole, and what is wrong with it."""
    kind = manifest["kind"]
    of_pods = [problem for pod in pods_of(manifest) for problem in of_kubernetes(pod)]
    if kind in crds:
        return "its CRD", of_crd(manifest, crds[kind]) + of_pods
    if kind == "PodMonitor":
        return "the model of prometheus-operator", of_pod_monitor(manifest)
    if kind == "RayCluster":
        return None, of_pods
    return RELEASED, of_kubernetes(manifest)


def pods_of(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if manifest["kind"] == "RayCluster":
        for group in (manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]):
            yield {"apiVersion": "v1", "kind": "Pod", **group["template"]}


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
