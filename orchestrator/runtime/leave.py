"""The end of a node whose machine or container is to go: ``atoll leave``, as a preStop of Kubernetes has it.

    python -m orchestrator.runtime.leave --grace SECONDS --cause TEXT [--name NODE]

Exit code 0: nothing works there any more. 1: the time was over first. 2: there is no such node here, or more than one.
"""

from __future__ import annotations

import argparse
import sys
import time

from orchestrator.errors import AtollError, ConfigurationError
from orchestrator.runtime import join


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.runtime.leave")
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--cause", required=True)
    parser.add_argument("--name", default="", help="of the node, where several run")
    options = parser.parse_args()
    try:
        is_empty = join.leave(join.only(options.name), options.cause, time.time() + options.grace)
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigurationError) else 1)
    print(
        "No process of a job runs on this node any more."
        if is_empty
        else "The time is up, and a process of a job still runs here."
    )
    sys.exit(not is_empty)


if __name__ == "__main__":
    main()
