"""The program ``ray`` of a cluster's nodes: how long it waits for a node, and which processes become lighter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.runtime import fork_server, idle_agent, ray_command, worker
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


WORKER = """
import importlib, json, os, random, signal, sys, time
import numpy
if "LOADED" in os.environ:
    importlib.import_module(os.environ["LOADED"])
    sys.modules["orchestrator.system.python_process"].say_ready()
about = dict(
    arguments=sys.argv[1:],
    pid=os.getpid(),
    parent=os.getppid(),
    folder=os.getcwd(),
    draws=[random.random(), numpy.random.random()],
    mark=os.environ.get("MARK"),
    children=signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    ray="ray" in sys.modules,
    late="colorsys" in sys.modules,
    files=len(os.listdir("/proc/self/fd")),
)
print(json.dumps(about), flush=True)
time.sleep(600)
"""
RAYLET = """
import json, os, subprocess, sys
open("/proc/self/comm", "w").write("raylet")
reader, writer = os.pipe()
os.set_inheritable(writer, True)
for line in sys.stdin:
    wanted = json.loads(line)
    environment = {**os.environ, **wanted["environment"]}
    subprocess.Popen(wanted["command"], env=environment, cwd=wanted["folder"], process_group=0, close_fds=False)
"""


LIGHT = """
import os
from orchestrator.runtime import fork_server, worker
fork_server.AT_ONCE, fork_server.WHEN_USED = ("numpy",), {"/_lsprof.": ("colorsys",)}
fork_server.CHILDLESS_S = float(os.environ.get("CHILDLESS_S", 300))
worker.main()
"""
"""A worker whose fork server imports next to nothing."""


class StandInRaylet:
    """Starts workers as a raylet does; their program says what they are, and waits."""

    def __init__(self, folder: Path) -> None:
        self._folder, program = folder, folder / worker.RAY_PROGRAM
        program.write_text(WORKER)
        self._light = python_process.code(LIGHT, str(program))
        self._whole = python_process.module(worker.MODULE, str(program))
        command = [sys.executable, "-c", RAYLET]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, *arguments: str, light: bool = True, **environment: str) -> dict[str, Any]:
        """Return what the worker says of itself."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        command = [*(self._light if light else self._whole), *arguments]
        wanted = {"command": command, "environment": environment, "folder": str(self._folder)}
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        about: dict[str, Any] = json.loads(self.process.stdout.readline())
        return about

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[StandInRaylet]:
    stand_in = StandInRaylet(tmp_path)
    try:
        yield stand_in
    finally:
        for process in [*stand_in.descendants(), psutil.Process(stand_in.process.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        stand_in.process.communicate()


def test_a_worker_is_a_fork_with_its_own_arguments_environment_files_and_chance(
    raylet: StandInRaylet, tmp_path: Path
) -> None:
    first, *later = [raylet.start(f"--worker-id={number}", light=False, MARK=str(number)) for number in range(3)]
    server = first["parent"]
    assert psutil.Process(server).ppid() == raylet.process.pid
    assert [about["parent"] for about in later] == [server, server]
    groups = [os.getpgid(process) for process in (raylet.process.pid, *(about["pid"] for about in (first, *later)))]
    assert len(set(groups)) == len(groups), "a raylet ends the group of a worker that dies"
    assert os.getpgid(server) == groups[0]
    for number, about in enumerate([first, *later]):
        assert about["arguments"] == [f"--worker-id={number}"]
        assert about["mark"] == str(number)
        assert about["folder"] == str(tmp_path)
        assert about["ray"]
        assert about["children"], "they may have processes of their own"
        assert about["files"] <= first["files"], "nothing of the fork server is left open"
    draws = [draw for about in (first, *later) for draw in about["draws"]]
    assert len(set(draws)) == len(draws)
    wait_until(lambda: psutil.Process(server).cmdline()[0].strip() == fork_server.TITLE, "its title")
    pipes = [link for link in map(os.readlink, Path(f"/proc/{server}/fd").iterdir()) if link.startswith("pipe")]
    assert pipes == [], "a raylet waits at its end until nobody can write to its pipes"
    psutil.Process(first["pid"]).kill()
    wait_until(lambda: not psutil.pid_exists(first["pid"]), "the end of a fork, of which nothing is left")


@pytest.mark.parametrize("variable", [{"JAX_ENABLE_X64": "1"}, {"RAY_JOB_ID": "02000000"}])
def test_a_worker_that_would_import_something_else_is_no_fork_of_that_server(
    raylet: StandInRaylet, variable: dict[str, str]
) -> None:
    first, other = raylet.start(), raylet.start(**variable)
    assert other["parent"] != first["parent"]
    assert psutil.Process(other["parent"]).ppid() == raylet.process.pid


def test_what_only_some_workers_need_is_imported_beforehand_once_one_of_them_has_it(raylet: StandInRaylet) -> None:
    assert not any(raylet.start()["late"] for _ in range(5)), "looked at many times meanwhile"
    assert not raylet.start(LOADED="_lsprof")["late"]
    wait_until(lambda: raylet.start()["late"], "a worker that finds it imported")


def test_a_worker_starts_by_itself_where_the_fork_server_was_killed(raylet: StandInRaylet) -> None:
    first = raylet.start()
    psutil.Process(first["parent"]).kill()
    second = raylet.start()
    assert second["parent"] not in (first["parent"], raylet.process.pid)
    assert psutil.pid_exists(first["pid"]), "forks live on"
    psutil.Process(first["pid"]).kill()


def test_a_fork_server_without_children_ends(raylet: StandInRaylet) -> None:
    first = raylet.start(CHILDLESS_S="0.2")
    server = psutil.Process(first["parent"])
    raylet.start(CHILDLESS_S="0.2")
    assert len(server.children()) == 2
    for fork in server.children():
        fork.kill()
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "its end")


def test_a_fork_server_ends_with_its_raylet_and_refuses_everybody_else(raylet: StandInRaylet) -> None:
    server = psutil.Process(raylet.start()["parent"])
    forks = server.children()
    (address,) = [
        entry.laddr for entry in server.net_connections("unix") if str(entry.laddr).startswith(("\0atoll", "@atoll"))
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect("\0" + str(address)[1:])
        stranger.settimeout(PATIENCE_S)
        assert stranger.recv(1) == b"", "hung up on"
    assert server.children() == forks
    raylet.process.kill()
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "its end")
    for fork in forks:
        fork.kill()
