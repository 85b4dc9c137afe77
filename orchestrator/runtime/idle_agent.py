"""What stands for a node's agents, Ray's own programs, until somebody needs one.

    python -m orchestrator.runtime.idle_agent PROGRAM --node-id=ID --session-dir=FOLDER ...

A raylet starts two, reads their ports from files, and ends when one of them does. Each imports all of Ray, which is more
than half a second of processor time and 60 MB a node, and nothing of ours needs them:

- The dashboard's agent serves nothing in Ray's minimal installation, and says -1 for each of its ports. So does this one.
- The agent of runtime environments is called for tasks and actors that want one. This one listens in its place, and
  becomes Ray's at the first call of its raylet: it lets that one break off, and the raylet calls again. Nobody else's call
  wakes it: the raylet is on the same machine, and this is the one port of a node that Ray does not serve by TLS.

Source: ray/dashboard/agent.py and ray/_private/runtime_env/agent/main.py of Ray 2.60, as ``ray start`` calls them.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from pathlib import Path

from orchestrator.system import python_process

MODULE = "orchestrator.runtime.idle_agent"
RUNTIME_ENV_PORT = "--runtime-env-agent-port"
DASHBOARD_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NOT_SERVED = -1
POLL_S = 1.0


def main() -> None:
    options = dict(argument.partition("=")[::2] for argument in sys.argv[2:])
    raylet, folder, node_id = int(os.environ["RAY_RAYLET_PID"]), Path(options["--session-dir"]), options["--node-id"]
    if RUNTIME_ENV_PORT in options:
        port = called_port(raylet, folder, node_id, (options["--node-ip-address"], int(options[RUNTIME_ENV_PORT] or 0)))
        if port is not None:
            python_process.become(python_process.file(*sys.argv[1:], f"{RUNTIME_ENV_PORT}={port}"))
        return
    for name in DASHBOARD_PORTS:
        say_port(folder, name, node_id, NOT_SERVED)
    while os.getppid() == raylet:
        time.sleep(POLL_S)


def called_port(raylet: int, folder: Path, node_id: str, where: tuple[str, int]) -> int | None:
    """A port that is free again, once this machine has called it; None if the raylet ended before."""
    with socket.create_server(where) as listener:
        port: int = listener.getsockname()[1]
        say_port(folder, "runtime_env_agent_port", node_id, port)
        while os.getppid() == raylet:
            if select.select([listener], [], [], POLL_S)[0] and caller(listener) == where[0]:
                return port
    return None


def caller(listener: socket.socket) -> str:
    """Return the caller's address and let the caller go; empty if it has gone by itself."""
    try:
        connection, (address, *_) = listener.accept()
    except OSError:
        return ""
    connection.close()
    return str(address)


def say_port(folder: Path, name: str, node_id: str, port: int) -> None:
    """Write the port to the file that the raylet waits for. The file appears whole, because the raylet reads it at once."""
    begun = folder / f".{name}_{node_id}"
    begun.write_text(str(port))
    begun.replace(folder / f"{name}_{node_id}")


if __name__ == "__main__":
    main()
