"""What stands for a node's dashboard agent: it serves no port, says so, and is there for as long as its raylet.

    python -m orchestrator.runtime.idle_agent PROGRAM --node-id=ID --session-dir=FOLDER ...

A raylet starts the program that it is given as its dashboard agent, reads the ports of that from files, and ends when it
ends. Of Ray's own, which is ``PROGRAM``, nobody here uses anything, and it imports all of Ray for that: half a second of
processor time and 60 MB a node. Source: ray/dashboard/agent.py of Ray 2.60 as it is with ``--minimal``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

MODULE = "orchestrator.runtime.idle_agent"
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NOT_SERVED = "-1"
POLL_S = 1.0


def main() -> None:
    raylet = os.getppid()
    options = dict(argument.partition("=")[::2] for argument in sys.argv[2:])
    say_not_served(Path(options["--session-dir"]), options["--node-id"])
    while os.getppid() == raylet:
        time.sleep(POLL_S)


def say_not_served(folder: Path, node_id: str) -> None:
    """Whole files only: the raylet waits for each, and reads it at once."""
    for port in PORTS:
        begun = folder / f".{port}_{node_id}"
        begun.write_text(NOT_SERVED)
        begun.replace(folder / f"{port}_{node_id}")


if __name__ == "__main__":
    main()
