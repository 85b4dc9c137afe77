"""The end of a node whose machine or container is to go: ``atoll leave``, as a preStop of Kubernetes has it.

    python -m orchestrator.runtime.leave --grace SECONDS --cause TEXT [--name NODE]

Exit code 0: nothing works there any more. 1: the time was over first. 2: there is no such node here, or more than one.
"""

from __future__ import annotations

import argparse
import sys
import time

import psutil

from orchestrator.errors import AtollError, ConfigurationError, InfrastructureError
from orchestrator.runtime.join import LOOK_S, LocalNode, node_of

AGAIN_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.runtime.leave")
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--cause", required=True)
    parser.add_argument("--name", default="", help="of the node, where several run")
    options = parser.parse_args()
    try:
        is_empty = leave(only(options.name), options.cause, time.time() + options.grace)
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
    print(
        "No process of a job runs on this node any more."
        if is_empty
        else "The time is up, and a process of a job still runs here."
    )
    sys.exit(not is_empty)


def only(name: str = "") -> LocalNode:
    """Return this machine's node, or that of this name or id. Raises ConfigurationError unless exactly one is there."""
    nodes = [node for process in psutil.process_iter() if (node := node_of(process)) is not None]
    chosen = [node for node in nodes if not name or name in (node.name, node.id)]
    if len(chosen) == 1:
        return chosen[0]
    if not nodes:
        raise ConfigurationError(
            detail="No node of a cluster runs here. Call this where one does: on its machine, or in its container."
        )
    there = ", ".join(sorted(f"{node.name or node.id} (raylet {node.raylet})" for node in nodes))
    if not name:
        raise ConfigurationError(detail=f"{len(nodes)} nodes run here: {there}. Choose one with --name.")
    if not chosen:
        raise ConfigurationError(detail=f"--name {name!r} is no node here. Choose one of: {there}.")
    ids = ", ".join(sorted(node.id for node in chosen))
    raise ConfigurationError(detail=f"--name {name!r} is the name of {len(chosen)} nodes here. Give one's id: {ids}.")


def leave(node: LocalNode, cause: str, deadline: float) -> bool:
    """Have the node drained, and wait until nothing works there, or ``deadline``. True if nothing works there any more.

    A head that does not answer is asked again. Raises InfrastructureError where it did not answer at all.
    """
    refused: InfrastructureError | None = None
    drained = False
    while True:
        if not drained:
            try:
                node.drain(cause, deadline)
                drained = True
            except InfrastructureError as error:
                refused = error
        elif not node.works():
            return True
        left_s = deadline - time.time()
        if left_s <= 0.0:
            break
        time.sleep(min(left_s, LOOK_S if drained else AGAIN_S))
    if refused is not None and not drained:
        raise refused
    return False


if __name__ == "__main__":
    main()
