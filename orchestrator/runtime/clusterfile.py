"""How to join the Ray cluster of a home folder, and what the home keeps of it when the machine restarts.

    HOME/cluster.json           written by what starts the cluster, read by what joins it
    HOME/cluster/token          the cluster's secret
    HOME/cluster/head-storage   what the head knows of nodes and actors
    HOME/cluster/…              node groups, certificates and options of an embedded cluster

``HOME/cluster`` is for its owner only. Sockets, sessions and logs of Ray's processes are in ``temp_dir``, because the paths
of sockets must be short. ``temp_dir`` also holds copies of ``cluster.json`` and of the secret.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.errors import DataError, InfrastructureError
from orchestrator.runtime.settings import TOKEN_DIGEST_VARIABLE, TOKEN_VARIABLE
from orchestrator.system import home_files
from orchestrator.system.marks import BY_HEAD, BY_UP, ELSEWHERE

STATE, TOKEN, HEAD_STORAGE = "cluster", "token", "head-storage"
SERVICE_NODE = "service"
"""The name of the Ray node of a service whose head is elsewhere."""
SECRET = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """``environment`` must be that of every process that joins; ``id`` marks the cluster's own processes.

    ``supervisor`` is what runs the head: `atoll up`, `atoll head`, or something on another machine.
    """

    id: str
    address: str
    temp_dir: str
    environment: dict[str, str]
    supervisor: str = BY_UP

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
        if self.supervisor not in (BY_UP, BY_HEAD, ELSEWHERE):
            raise ValueError("supervisor is unknown")
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

    @property
    def state(self) -> Path:
        """The folder of what the cluster keeps. Clusters of earlier builds kept everything in ``temp_dir``."""
        return self.token_path.parent

    @property
    def token_path(self) -> Path:
        return Path(self.environment.get(TOKEN_VARIABLE) or Path(self.temp_dir, TOKEN))

    @property
    def driver_folder(self) -> str | None:
        """The folder of the Ray node that a driver of this home has to use; None: that of the only node, or the head's."""
        return str(Path(self.temp_dir, SERVICE_NODE)) if self.supervisor == ELSEWHERE else None

    def token_problem(self) -> str:
        """Return what is wrong with the file of the cluster's secret; empty if nothing is, or it cannot be judged."""
        path, digest = self.token_path, self.environment.get(TOKEN_DIGEST_VARIABLE)
        if not digest:
            return ""
        try:
            secret = home_files.read(path)
        except OSError as error:
            return f"{path}, the cluster's secret, cannot be read: {error.strerror}"
        except ValueError:
            secret = ""
        return "" if digest_of(secret) == digest else f"{path} is damaged: it is not the secret of the running cluster"

    def secret(self) -> str:
        """Return the cluster's secret; empty if its file is unreadable."""
        return _text_of(self.token_path).strip()

    def restore_token(self, remembered: str = "") -> bool:
        """Write the cluster's secret again if its file is missing or damaged. Return True if that was needed.

        Without the file no process of the cluster can start. ``remembered`` is the secret, if the caller has it in memory.
        Raises InfrastructureError if no copy is left, or the file cannot be written.
        """
        problem = self.token_problem()
        if not problem:
            return False
        copies = (remembered, _text_of(Path(self.temp_dir, TOKEN)))
        secret = next((copy for copy in copies if digest_of(copy) == self.environment[TOKEN_DIGEST_VARIABLE]), None)
        if secret is None:
            raise InfrastructureError(
                detail=f"{problem}. No copy of it is left.",
                remedy="Copy it from another machine of the cluster; or end the whole cluster and start it again.",
            )
        try:
            self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
            home_files.replace(self.token_path, secret)
        except OSError as error:
            raise InfrastructureError(
                detail=f"{problem}. It cannot be written again: {error.strerror}.", remedy="Make room on that disk."
            ) from error
        return True

    def head_remedy(self) -> str:
        """Return how to start the head again, as a clause that begins a sentence and needs a full stop."""
        if self.supervisor == BY_UP:
            return "`atoll up` starts it again"
        command = "`atoll head` (with systemd: `systemctl restart atoll-head`)"
        if self.supervisor == BY_HEAD:
            return f"Start it again with {command}"
        return f"Start it again on its machine, by its container or pod, or with {command}"

    def answers(self) -> bool:
        """Return whether a process listens at the head's port."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True


def state_of(home: Path) -> Path:
    """Return the folder in which the cluster of this home keeps what must survive a restart of the machine."""
    return home / STATE


def made_state(folder: Path) -> Path:
    """Create this folder for its owner only, and narrow the permissions of an existing one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def secret_in(path: Path) -> str:
    """Return the secret in this file, which is created if it is missing or holds no secret."""
    secret = _text_of(path)
    if not SECRET.fullmatch(secret):
        secret = secrets.token_hex(32)
        home_files.replace(path, secret)
    return secret


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.strip().encode()).hexdigest()


def _text_of(path: Path) -> str:
    try:
        return home_files.read(path).strip()
    except (OSError, ValueError):
        return ""


def set_aside(path: Path) -> Path:
    """Rename the file so that its name says that it is damaged. Returns the new path."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:4]}")
    os.rename(path, aside)
    return aside
