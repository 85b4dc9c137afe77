"""The program ``ray`` of a cluster's nodes: how long it waits for a node, and which processes become lighter."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime import idle_agent, ray_command
from orchestrator.system import python_process, release
from tests.waiting import PATIENCE_S, wait_until

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


def test_every_node_names_its_build_whoever_starts_it() -> None:
    build = f"atoll-build={release.own()}"
    assert ray_command.with_build(["start", "--head"]) == ["start", "--head", "--labels", build]
    kuberay = ["start", "--labels=atoll-node-group=west,region=r", "--num-cpus=4", "--block"]
    named = ["start", "--num-cpus=4", "--block", "--labels", f"atoll-node-group=west,region=r,{build}"]
    assert ray_command.with_build(kuberay) == named
    assert ray_command.with_build(named) == named, "once"
    assert ray_command.with_build(["start", "--labels", "atoll-build=old_w1"])[-1] == build, "and truly"
    assert ray_command.with_build(["health-check"]) == ["health-check"]


def test_only_agents_are_idle() -> None:
    command_of = ray_command.with_idle_agents(lambda component, folder, unbuffered=True: ["python"])
    for agent in ("dashboard_agent", "runtime_env_agent"):
        assert command_of(agent, "folder") == ["python", *python_process.FLAGS, "-m", idle_agent.MODULE]
    assert command_of("raylet", "folder", unbuffered=False) == ["python"]


def agent_command(folder: Path, *options: str) -> list[str]:
    """Of an idle agent in the place of a program that prints its arguments."""
    program = folder / "program.py"
    program.write_text("import sys; print(*sys.argv[1:])")
    own = ["--node-id=n", f"--session-dir={folder}", "--node-ip-address=127.0.0.1"]
    return [sys.executable, "-u", "-m", idle_agent.MODULE, str(program), *own, *options]


def port_in(file: Path) -> int:
    wait_until(file.exists, f"{file.name}")
    return int(file.read_text())


def test_the_agent_of_runtime_environments_is_rays_once_its_own_machine_calls_it_and_nobody_else(
    tmp_path: Path,
) -> None:
    command = agent_command(tmp_path, f"{idle_agent.RUNTIME_ENV_PORT}=0")
    of_raylet = {**os.environ, "RAY_RAYLET_PID": str(os.getpid())}
    with subprocess.Popen(command, env=of_raylet, stdout=subprocess.PIPE, text=True) as agent:
        port = port_in(tmp_path / "runtime_env_agent_port_n")
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) as stranger:
                assert stranger.recv(1) == b"", "hung up on"
        socket.create_connection(("127.0.0.1", port)).close()
        arguments, _ = agent.communicate(timeout=PATIENCE_S)
    assert arguments.split() == [*command[5:], f"{idle_agent.RUNTIME_ENV_PORT}={port}"]


@pytest.mark.parametrize("options", [[], [f"{idle_agent.RUNTIME_ENV_PORT}=0"]])
def test_an_idle_agent_ends_with_its_raylet(tmp_path: Path, options: list[str]) -> None:
    raylet = "import os, subprocess, sys; os.environ['RAY_RAYLET_PID'] = str(os.getpid()); "
    raylet += "subprocess.Popen(sys.argv[1:]); sys.stdin.read()"
    command = [sys.executable, "-c", raylet, *agent_command(tmp_path, *options)]
    reader, writer = os.pipe()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writer) as process:
        os.close(writer)
        names = ["runtime_env_agent_port"] if options else idle_agent.DASHBOARD_PORTS
        ports = [port_in(tmp_path / f"{name}_n") for name in names]
        assert ports == [idle_agent.NOT_SERVED] * 3 if not options else ports[0] > 0
        process.communicate(timeout=PATIENCE_S)
    with os.fdopen(reader) as output:
        assert output.read() == "", "the end of the last process that could write"
