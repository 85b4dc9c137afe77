"""The program ``ray`` as the nodes of an embedded cluster run it: without what nobody here uses, and patient.

    python -m orchestrator.runtime.ray_command [--with-dashboard] start ...
    python -m orchestrator.runtime.ray_command [--with-dashboard] each
    python -m orchestrator.runtime.ray_command unregister-dead ADDRESS CLUSTER_ID TEMP_DIR      (``dead_nodes``)

With ``each`` it is imported once for several nodes, for that is most of what a start costs: every ``request`` on a line of
its standard input is carried out by a fork, whose exit code (``codes``) it prints. At the end of its input it ends.

Much of a node's start is for what only Ray's dashboard, its job server, its clients and Ray Serve use. A node started here
does without, which on two cores is seconds of ``atoll up`` (docs/decisions/0137):

- Ray Serve's commands are not imported, and Ray Client's server is not started (a port, 90 MB, a second of processor time).
- The dashboard's process is not started: Ray starts it (120 MB) also where it is told to include none.
- A node's two agents are ``idle_agent``: its raylet wants them to be there. ``--with-dashboard`` leaves them as they are.
- Workers import less (``worker``).
- 127.0.0.1 is meant: Ray takes it for a mistake and uses the machine's outer address instead, but at no other does it
  listen on loopback alone (``cluster.join`` says the same to drivers).
- Every node has a label that names its build of atoll, also one that KubeRay starts from a pod's specification.
- A node has ``NODE_PATIENCE_S`` to register, where Ray gives it 30 s, too little on a busy machine; it is given up at
  once if its raylet has ended.

There is no public switch for any of it. Source: Ray 2.60 as installed by the lock file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from orchestrator.runtime import dead_nodes, idle_agent, worker
from orchestrator.runtime.fork_server import RAYLET
from orchestrator.system import python_process, release

NODE_PATIENCE_S = 150.0
POLL_S = 0.2
MODULE = "orchestrator.runtime.ray_command"
EACH = "each"
START = "start"
AGENTS = ("dashboard_agent", "runtime_env_agent")
WITH_DASHBOARD = "--with-dashboard"


def main() -> None:
    python_process.clean()
    os.environ[worker.NODE_PYTHON] = python_process.interpreter()
    with_dashboard = WITH_DASHBOARD in sys.argv
    if with_dashboard:
        sys.argv.remove(WITH_DASHBOARD)
    sys.modules["ray.serve.scripts"] = _ABSENT
    scripts: Any = importlib.import_module("ray.scripts.scripts")
    services: Any = importlib.import_module("ray._private.services")
    services.resolve_ip_for_localhost = str
    services.get_node = patient(services.get_node)
    scripts.get_ray_client_dependency_error = not_wanted
    flags_of = services._site_flags
    # they stand before a worker's program
    services._site_flags = lambda: [*flags_of(), *python_process.running(worker.MODULE)]
    if not with_dashboard:
        importlib.import_module("ray._private.utils").get_dashboard_dependency_error = not_wanted  # type: ignore[attr-defined]
        services.start_api_server = lambda *_, **__: ("", None)
        command_of = services._build_python_executable_command_memory_profileable
        services._build_python_executable_command_memory_profileable = with_idle_agents(command_of)
    if sys.argv[1:] == [EACH] and not became_fork():
        return
    if sys.argv[1:2] == [dead_nodes.VERB]:
        dead_nodes.main(sys.argv[2:])
        return
    sys.argv[1:] = with_build(sys.argv[1:])
    scripts.main()


def with_build(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the label of this build added, if they start a node."""
    if START not in arguments[:1]:
        return list(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--labels", default="")
    options, others = parser.parse_known_args(arguments)
    labels = [pair for pair in options.labels.split(",") if pair and pair.partition("=")[0] != release.LABEL]
    return [*others, "--labels", ",".join([*labels, f"{release.LABEL}={release.own()}"])]


def request(arguments: list[str], mark: Mapping[str, str], log: Path) -> bytes:
    """The line by which a fork is wanted that has these arguments and this log, and the mark in its environment."""
    return json.dumps({"arguments": arguments, "mark": dict(mark), "log": str(log)}).encode() + b"\n"


def ended(log: str, code: int) -> bytes:
    """The line that says it of the fork with this log."""
    return json.dumps({log: code}).encode() + b"\n"


def codes(line: bytes) -> dict[str, int]:
    """The exit code by the log, as ``ended`` said it."""
    by_log: dict[str, int] = json.loads(line)
    return by_log


def became_fork() -> bool:
    """True in a process for each request, which has become what is wanted; False at the end of the input."""
    for line in sys.stdin:
        wanted = json.loads(line)
        if os.fork():
            continue
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            with suppress(BrokenPipeError):  # nobody waits any more
                os.write(sys.stdout.fileno(), ended(wanted["log"], os.waitstatus_to_exitcode(status)))
            os._exit(0)
        os.setpgid(0, 0)
        os.environ.update(wanted["mark"])
        sys.argv[1:] = wanted["arguments"]
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(wanted["log"], os.O_WRONLY | os.O_APPEND)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(nothing)
        os.close(log)
        return True
    return False


def not_wanted() -> ImportError:
    """Ray's answer where packages are missing that one of its parts needs."""
    return ImportError("not wanted")


def with_idle_agents(command_of: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """``command_of`` names the interpreter for a component's program; agents' programs become arguments of ours."""

    def command(component: str, *arguments: Any, **options: Any) -> list[str]:
        interpreter = command_of(component, *arguments, **options)
        return [*interpreter, *python_process.running(idle_agent.MODULE)] if component in AGENTS else interpreter

    return command


def patient(get_node: Callable[[str, str], dict[str, Any]]) -> Callable[[str, str], dict[str, Any]]:
    """``get_node``, which raises RuntimeError while the node has not registered, asked again until it has.

    Raises ChildProcessError as soon as no raylet of this process runs.
    """

    def get(gcs_address: str, node_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + NODE_PATIENCE_S
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:
                if not raylet_runs():
                    raise ChildProcessError("The node's raylet ended before it had registered.") from None
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    return get


def raylet_runs() -> bool:
    """Return whether this process has started a raylet that has not ended."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # another one, which has ended meanwhile
            if child.name() == RAYLET and child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


_ABSENT: ModuleType = None  # type: ignore[assignment]
"""In ``sys.modules`` it makes an import fail as that of a package which is not installed."""

if __name__ == "__main__":
    main()
