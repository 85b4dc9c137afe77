"""A control port that fails in the ways that a cluster can: it hangs, or raises what nobody has foreseen.

Files below the home's folder ``clockwork`` are the switches. A call that hangs does so until its switch is gone, as a Ray
whose head is dead waits for a day; a silent job answers with what the real port raises after its ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import InfrastructureError
from orchestrator.status import NodeGroupRecord, StatusDocument
from tests.api.clockwork import Clockwork

CONTROL = "tests.attack.ports:connect"
ANSWER_TIMEOUT_S = 10.0


def connect(home: Path) -> Troubled:
    return Troubled(home / "clockwork")


class Troubled(Clockwork):
    def node_groups(self) -> list[NodeGroupRecord]:
        while (self._folder / "head-hangs").exists():
            time.sleep(0.05)
        if (self._folder / "head-raises").exists():
            raise RuntimeError("nobody has foreseen this")
        return super().node_groups()

    def status(self, job_id: str) -> StatusDocument:
        asked_at = time.monotonic()
        while (self._folder / f"{job_id}.silent").exists():
            if time.monotonic() - asked_at > ANSWER_TIMEOUT_S:
                raise InfrastructureError(detail="The synchroniser does not answer.", remedy="Try again.")
            time.sleep(0.05)
        return super().status(job_id)

    def save_parameters(self, job_id: str, held: Sequence[int] | None = None) -> str:
        if (self._folder / "disk-is-full").exists():
            raise OSError(28, "No space left on device")
        with (self._folder / "pictures").open("a") as count:
            count.write("one\n")
        return super().save_parameters(job_id, held)
