"""What a client asks about checkpoints: the part of ``api.client.Client`` that is about them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from api.checkpoints.schemas import Checkpoint, Checkpoints
from api.schemas import Command


class CheckpointRequests:
    """Needs the requests of a client."""

    _get: Any
    _post: Any

    def checkpoints(self, job: str) -> list[Checkpoint]:
        """The job's whole checkpoints, oldest first."""
        found: Checkpoints = self._get(f"/v1/jobs/{quote(job, safe='')}/checkpoints", Checkpoints)
        return found.checkpoints

    def take_checkpoint(self, job: str) -> Command:
        """Have a running job save itself now."""
        command: Command = self._post(f"/v1/jobs/{quote(job, safe='')}/checkpoints", Command)
        return command
