"""``HOME/cluster.json``: how to join the Ray cluster of a home folder. Written by who starts it, read by who joins it."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.errors import DataError


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """``environment`` must be that of every process that joins; ``id`` marks the cluster's own processes."""

    id: str
    address: str
    temp_dir: str
    environment: dict[str, str]

    @staticmethod
    def path(home: Path) -> Path:
        return home / "cluster.json"

    @classmethod
    def find(cls, home: Path) -> ClusterFile | None:
        """The cluster of ``home``, up or not; ``None`` if none was started. Raises DataError for a damaged file."""
        path = cls.path(home)
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise DataError(detail=f"{path} is not readable as a cluster file ({error}); remove it.") from error

    def write(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        draft = self.path(home).with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(draft, self.path(home))

    def answers(self) -> bool:
        """Whether somebody listens at the head's port."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True
