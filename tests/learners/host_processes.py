"""One process of an island of two hosts, of which ``test_host_processes.py`` starts both: real process groups, without Ray.

python -m tests.learners.host_processes RANK DEVICES_PORT      the last line is JSON: what came of each of ``MESHES``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from learners.group import devices
from orchestrator.actors.island import MeetingPlace, Rank

HOSTS, DEVICES = 2, 2
"""So many of each host."""
MESHES: Mapping[str, dict[str, int]] = {
    "parameters over all": {"fsdp": 4},
    "matrices over hosts": {"fsdp": 1, "data": 1, "tensor": 4},
}
STEPS = 3


def main(rank: int, port: int) -> None:
    counts = devices.join(Rank(rank, HOSTS, MeetingPlace("127.0.0.1", 0, port), b""))
    from tests.learners import meshes  # its model asks for devices, which are there from here on

    def trained(section: Mapping[str, int]) -> dict[str, Any]:
        one = meshes.trainer(section, HOSTS)
        losses = meshes.losses(one, 0, STEPS)
        parts = {name: one.held(name).bounds for name in meshes.SHAPES}
        return {"losses": losses, "held": parts}

    print(json.dumps({"counts": counts, "meshes": {name: trained(section) for name, section in MESHES.items()}}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
