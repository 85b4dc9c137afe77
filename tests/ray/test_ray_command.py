"""The program ``ray`` of a cluster's nodes: how long it waits for a node, and which processes become lighter."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.runtime import idle_agent, ray_command

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


def test_only_dashboard_agents_are_idle() -> None:
    command_of = ray_command.with_idle_agent(lambda component, folder, unbuffered=True: ["python"])
    assert command_of("dashboard_agent", "folder") == ["python", "-m", idle_agent.MODULE]
    assert command_of("raylet", "folder", unbuffered=False) == ["python"]
