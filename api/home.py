"""The home folder of one installation: where its service is, and whether it runs.

Responsible for two files. ``service.json`` says where the service listens; ``service.lock`` is locked for as long as the
process lives, however it ends, so that a stale address or a reused pid never passes for a running service. Light enough
to be imported by every command.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import Conflict, InfrastructureError

DEFAULT_HOME = Path(".atoll")
DEFAULT_RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens, and its process."""

    url: str
    pid: int
    runs: Path


class Home:
    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @property
    def log(self) -> Path:
        return self.path / "service.log"

    def address(self) -> Address | None:
        """What ``service.json`` says, true or stale; None if there is none that can be read."""
        try:
            written = json.loads((self.path / "service.json").read_text())
            return Address(str(written["url"]), int(written["pid"]), Path(written["runs"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def running(self) -> bool:
        """Whether a service process holds this home."""
        try:
            with (self.path / "service.lock").open("r+") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            detail = f"The home folder {self.path} cannot be used: {error.strerror}."
            raise InfrastructureError(detail=detail, remedy="Choose another with --home.") from error
        return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """This process is the home's service until the block is left or the process ends."""
        with (self.path / "service.lock").open("w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                detail = f"A service for {self.path} runs already."
                raise Conflict(detail=detail, remedy="Use it, or end it with `atoll down`.") from error
            yield

    def write_address(self, url: str, runs: Path) -> None:
        """Say where this process listens, all at once."""
        fresh = self.path / "service.json.new"
        fresh.write_text(json.dumps({"url": url, "pid": os.getpid(), "runs": str(runs), "started_at": time.time()}))
        os.replace(fresh, self.path / "service.json")

    def forget_address(self) -> None:
        (self.path / "service.json").unlink(missing_ok=True)
