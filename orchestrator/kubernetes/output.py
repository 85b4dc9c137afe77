"""What is printed or written: manifests as YAML, and a Helm chart that wraps the same text.

A chart is made for one file of values and one Kubernetes cluster. Its templates are the rendered manifests, in which only
``LIVE`` values are read when Helm installs it. Its values.yaml holds all values and values.schema.json describes them. If
another value differs from what was rendered, the chart refuses to install and says how to render it again. So the manifests
have one source, which is ``manifests``, and no second one in Go's templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from orchestrator.kubernetes.pods import Manifest
from orchestrator.kubernetes.values import Values

PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
LIVE = ("image", "secret", "metrics_secret", "authority_secret")
"""Values that Helm may change without rendering again (`--set image=…`): texts that stand in manifests as they are."""
OURS = "atoll/rendered"
"""The annotation in Chart.yaml of a folder that may be written again."""


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
