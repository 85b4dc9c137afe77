"""``HOME/cluster.json``: how to join the Ray cluster of a home folder. Written by who starts it, read by who joins it."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.errors import DataError
from orchestrator.system import home_files


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
            cluster = cls(**json.loads(home_files.read(path)))
            cluster.require_sense()
            return cluster
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                detail=f"{path} is damaged, and is no cluster file any more ({error}). The cluster is known by the marks of "
                "its processes: `atoll up` finds it by these and writes the file again, `atoll down` ends it."
            ) from error

    def require_sense(self) -> None:
        """Raises ValueError for fields that no cluster has."""
        if not all(isinstance(text, str) and text for text in (self.id, self.address, self.temp_dir)):
            raise ValueError("id, address and temp_dir are texts")
        if not (self.address.rpartition(":")[2].isdecimal() and Path(self.temp_dir).is_absolute()):
            raise ValueError("address ends with a port, and temp_dir is absolute")
        pairs = (text for pair in self.environment.items() for text in pair)
        if not all(isinstance(text, str) and "\0" not in text for text in pairs):
            raise ValueError("environment maps names to texts")

    def write(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        path = self.path(home)
        if path.is_dir() and not path.is_symlink():
            set_aside(path)
        home_files.replace(path, json.dumps(asdict(self), indent=1) + "\n")

    def answers(self) -> bool:
        """Return whether a process listens at the head's port."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True


def set_aside(path: Path) -> Path:
    """Rename the file so that its name says that it is damaged. Returns the new path."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:4]}")
    os.rename(path, aside)
    return aside
