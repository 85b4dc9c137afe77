"""The image and the composition, judged by rules that are not ours: hadolint's, and the schema of the Compose specification.

What those cannot know (that a mounted file exists, that a command is one we understand) is in ``test_deploy.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.installation import ROOT
from tests.waiting import PATIENCE_S

BIN = Path(sys.executable).parent
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COMPOSE = ROOT / "deploy" / "compose.yaml"


def judged(tool: str, *arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run([BIN / tool, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


def hadolint(path: Path) -> tuple[int, str]:
    return judged("hadolint", "--no-color", "--failure-threshold", "style", path)


def schema(path: Path) -> tuple[int, str]:
    return judged("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)


def spoiled(path: Path, sound: str, fault: str, folder: Path) -> Path:
    """A copy of the shipped file with one thing changed."""
    text = path.read_text()
    assert text.count(sound) >= 1, f"{path.name} has no {sound!r} any more"
    (folder / path.name).write_text(text.replace(sound, fault, 1))
    return folder / path.name


def test_hadolint_has_nothing_to_say_of_the_image() -> None:
    assert hadolint(DOCKERFILE) == (0, "")


@pytest.mark.parametrize(
    ("sound", "fault", "rule"),
    [
        ("FROM ${PYTHON_IMAGE} AS", "FROM python:latest AS", "DL3007"),
        ("COPY pyproject.toml", "ADD pyproject.toml", "DL3020"),
        ("WORKDIR /opt/atoll", "WORKDIR opt/atoll", "DL3000"),
        ("RUN useradd", "RUN cd /tmp && useradd", "DL3003"),
        ("USER 10001", "USER root", "DL3002"),
        ('[ -n "$EXTRA" ]', "[ -n $EXTRA ]", "SC2070"),
        ("EXPOSE 8470", "EXPOSE 84700", "DL3011"),
    ],
)
def test_hadolint_refuses_a_planted_fault(tmp_path: Path, sound: str, fault: str, rule: str) -> None:
    code, said = hadolint(spoiled(DOCKERFILE, sound, fault, tmp_path))
    assert (code, rule in said) == (1, True), said


def test_the_composition_is_one_by_the_specifications_schema() -> None:
    code, said = schema(COMPOSE)
    assert code == 0, said


@pytest.mark.parametrize(
    ("sound", "fault", "told"),
    [
        ("    healthcheck:\n", "    heathcheck:\n", "heathcheck"),
        ("condition: service_healthy", "condition: service_well", "service_well"),
        ("cap_drop: [ALL]", "cap_drop: ALL", "cap_drop"),
        ("command: [head]", "command: {run: head}", "command"),
        ("volumes:\n  cluster:\n", "volumes:\n  cluster: /var/cluster\n", "volumes.cluster"),
    ],
)
def test_the_schema_refuses_a_planted_fault(tmp_path: Path, sound: str, fault: str, told: str) -> None:
    code, said = schema(spoiled(COMPOSE, sound, fault, tmp_path))
    assert (code, told in said) == (1, True), said
