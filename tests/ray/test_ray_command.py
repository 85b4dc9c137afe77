"""The program ``ray`` of a cluster's nodes: how long it waits for a node, and which processes become lighter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime import ray_command, ray_worker

NODE = {"node_manager_port": 1}


class Registry:
    """A head that knows the node at the ``nth`` question."""

    def __init__(self, nth: int) -> None:
        self.questions, self.nth = 0, nth

    def get_node(self, gcs_address: str, node_id: str) -> dict[str, Any]:
        self.questions += 1
        if self.questions < self.nth:
            raise RuntimeError("no such node")
        return NODE


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_command, "POLL_S", 0.0)


def test_a_node_is_waited_for_while_its_raylet_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_command, "raylet_runs", lambda: True)
    registry = Registry(nth=5)
    assert ray_command.patient(registry.get_node)("address", "node") is NODE
    assert registry.questions == 5


def test_a_node_whose_raylet_ended_is_not_waited_for() -> None:
    assert not ray_command.raylet_runs()
    with pytest.raises(ChildProcessError):
        ray_command.patient(Registry(nth=2).get_node)("address", "node")


def test_a_node_that_never_registers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_command, "raylet_runs", lambda: True)
    monkeypatch.setattr(ray_command, "NODE_PATIENCE_S", 0.0)
    with pytest.raises(RuntimeError):
        ray_command.patient(Registry(nth=1 << 30).get_node)("address", "node")


def test_only_agents_leave_the_dashboards_modules_out() -> None:
    command_of = ray_command.without_modules(lambda component, folder, unbuffered=True: ["python"])
    assert command_of("dashboard_agent", "folder") == ["python", "-m", ray_command.MODULE, ray_command.AGENT]
    assert command_of("raylet", "folder", unbuffered=False) == ["python"]


# ── a worker's first program ──────────────────────────────────────────────────────────────────────────────────────────

WORKER = ["/ray/default_worker.py", "--node-ip-address=127.0.0.1", "--startup-token=3"]


def test_a_worker_becomes_the_program_that_it_is_given() -> None:
    context = '--serialized-runtime-env-context={"command_prefix": [], "env_vars": {}, "py_executable": "/python"}'
    assert ray_worker.command_of(["--language=PYTHON", context, *WORKER]) == ["/python", *WORKER]
    assert ray_worker.command_of([*WORKER, "--language=PYTHON"]) == [sys.executable, *WORKER]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--language=JAVA"],
        ["--language=PYTHON", '--serialized-runtime-env-context={"env_vars": {"A": "1"}}'],
        ["--language=PYTHON", '--serialized-runtime-env-context={"command_prefix": ["nice"]}'],
    ],
)
def test_what_asks_for_more_is_left_to_rays_own_program(arguments: list[str]) -> None:
    python, program, *rest = ray_worker.command_of([*WORKER, *arguments])
    assert (python, rest) == (sys.executable, [*WORKER, *arguments])
    assert Path(program).is_file()
