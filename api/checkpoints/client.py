"""The part of ``api.client.Client`` that is about checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from api.checkpoints.schemas import Checkpoint, Checkpoints
from api.schemas import Command
from orchestrator.core import commands


class CheckpointRequests:
    """Needs the requests of a client."""

    _get: Any
    send: Any
    _download: Any

    def checkpoints(self, job: str) -> list[Checkpoint]:
        """The job's whole checkpoints, oldest first."""
        listed: Checkpoints = self._get(f"/v1/jobs/{quote(job, safe='')}/checkpoints", Checkpoints)
        return listed.checkpoints

    def download_checkpoint(self, job: str, number: int, to: Path) -> None:
        """Write one as a tar to the file ``to``. Raises NotFound when it is not kept (any more)."""
        self._download(f"/v1/jobs/{quote(job, safe='')}/checkpoints/{number}", to)

    def take_checkpoint(self, job: str) -> Command:
        """Have a running job save itself now."""
        command: Command = self.send(job, commands.Checkpoint())
        return command

    def roll_back(self, job: str, checkpoint: int | None = None) -> Command:
        """Take a running job back to a checkpoint of its own, or to the newest."""
        command: Command = self.send(job, commands.Rollback(checkpoint or 0))
        return command
