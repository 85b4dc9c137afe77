"""Whether the head of a cluster takes the token of this process's environment, and which build it has.

Asked before anything is started on a machine that joins.

    python -m orchestrator.runtime.token_check HEAD:PORT

This is a program of its own, because a process that imports Ray cannot unload it. Exit code 0: the token is the cluster's,
and the head's build, or ``unknown``, is printed. ``REFUSED``: it is not. Any other code: the head did not answer. ``ray
start`` itself would try for half a minute and then show a traceback.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from orchestrator.runtime import cluster

MODULE = "orchestrator.runtime.token_check"
REFUSED = 3


def main() -> int:
    exceptions: Any = importlib.import_module("ray.exceptions")
    try:
        print(cluster.build_of_head(cluster.client_of(sys.argv[1])))
    except exceptions.AuthenticationError:
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
