"""What ``deploy/compose.yaml`` says of each service, as far as a container without an engine can have it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.image.build import ROOT

FILE = ROOT / "deploy" / "compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
UNDERSTOOD = {
    *("image", "build", "entrypoint", "command", "environment", "user", "volumes", "tmpfs", "read_only", "cap_drop"),
    *("network_mode", "depends_on", "healthcheck", "init", "security_opt", "restart"),
    *("stop_signal", "ports", "mem_limit", "pids_limit", "shm_size"),
}
"""Those of the last line are an engine's to keep: nothing here bounds memory."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume by its name, or a file or folder of the repository by its path, and where the container has it."""

    source: str | Path
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Service:
    """``entrypoint`` is empty where it is the image's. ``network`` is the service whose network it has, by default its own.

    ``after`` are the services that it waits for, each with the condition. One that ``restarts`` is begun again when it ends.
    """

    name: str
    image: str
    ours: bool
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    tmpfs: tuple[str, ...]
    read_only: bool
    network: str
    user: str | None
    health: tuple[str, ...]
    after: Mapping[str, str]
    restarts: bool


def services(variables: Mapping[str, str]) -> dict[str, Service]:
    """All services by name, in the file's order. Raises AssertionError at a field that would be passed over."""
    document = yaml.safe_load(FILE.read_text())
    found = {}
    for name, section in document["services"].items():
        assert set(section) <= UNDERSTOOD, f"{name}: {sorted(set(section) - UNDERSTOOD)} would be passed over here"
        assert section["cap_drop"] == ["ALL"], name
        found[name] = _service(name, _filled(section, variables))
    return found


def _service(name: str, section: Mapping[str, Any]) -> Service:
    health = section.get("healthcheck", {})
    after = section.get("depends_on", {})
    return Service(
        name=name,
        image=section["image"],
        ours="build" in section,
        entrypoint=tuple(section.get("entrypoint", ())),
        command=tuple(section.get("command", ())),
        environment={key: str(value) for key, value in section.get("environment", {}).items()},
        mounts=tuple(_mount(text) for text in section.get("volumes", ())),
        tmpfs=tuple(section.get("tmpfs", ())),
        read_only=section["read_only"],
        network=section.get("network_mode", f"service:{name}").removeprefix("service:"),
        user=section.get("user"),
        health=() if health.get("disable") else tuple(health.get("test", ())[1:]),
        after={other: about["condition"] for other, about in after.items()},
        restarts=section.get("restart", "no") != "no",
    )


def _mount(text: str) -> Mount:
    source, target, *options = text.split(":")
    place: str | Path = (FILE.parent / source).resolve() if source.startswith(".") else source
    return Mount(place, target, options == ["ro"])


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    """The value with its variables replaced, as Compose does it."""
    if isinstance(value, dict):
        return {key: _filled(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, variables) for inner in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        name, kind, text = match.groups()
        assert name in variables or kind == "-", f"{name}: {text}"
        return variables.get(name, text or "")

    return VARIABLE.sub(fill, value)
