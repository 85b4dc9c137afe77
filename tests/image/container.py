"""A container without an engine: bubblewrap on a mounted root file system, in a network namespace that is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.image.compose import Service

UNPRIVILEGED = ("setpriv", "--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")


@dataclass(frozen=True, slots=True)
class Image:
    """A mounted root file system, ``tree``, with what the image says of itself.

    ``files`` are those of this machine that a container has beside it, read-only, by where it has them.
    """

    tree: Path
    user: str
    entrypoint: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    files: Mapping[str, str]


class Container:
    """One service; its volumes lie below ``volumes``, its network is that of ``enter``."""

    def __init__(self, service: Service, image: Image, volumes: Path, enter: Sequence[str], log: Path) -> None:
        self.service, self._image, self._log = service, image, log
        user = service.user or image.user
        self._as_user = (*UNPRIVILEGED, f"--reuid={user}", f"--regid={user}")
        self._environment = {**image.environment, **service.environment}
        reading, writing = os.pipe()
        command = [*enter, "bwrap", *self._confinement(volumes), "--info-fd", str(writing), "--", *self._as_user]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *(service.entrypoint or image.entrypoint), *service.command],
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
                env=self._environment,
                start_new_session=True,
            )
        os.close(writing)
        with os.fdopen(reading) as told:
            self.pid = self._first_process(told)

    def _confinement(self, volumes: Path) -> list[str]:
        root = ["--ro-bind" if self.service.read_only else "--bind", str(self._image.tree), "/"]
        kernel = ["--proc", "/proc", "--dev", "/dev", "--ro-bind", "/sys", "/sys"]
        shared = ("/dev/shm", *self.service.tmpfs)
        memory = [word for path in shared for word in ("--perms", "1777", "--tmpfs", path)]
        mounts = []
        for mount in self.service.mounts:
            source = mount.source if isinstance(mount.source, Path) else volumes / mount.source
            mounts += ["--ro-bind" if mount.read_only else "--bind", str(source), mount.target]
        for target, source in self._image.files.items():
            mounts += ["--ro-bind", source, target]
        spaces = [
            "--unshare-pid",
            "--unshare-ipc",
            "--unshare-uts",
            "--hostname",
            self.service.name,
            "--die-with-parent",
        ]
        return [*root, *kernel, *memory, *mounts, *spaces, "--chdir", self._image.folder]

    def _first_process(self, told: IO[str]) -> int:
        text = told.read()
        if not text:
            raise RuntimeError(f"{self.service.name} did not begin:\n{self.log()}")
        return int(json.loads(text)["child-pid"])

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """What a command prints that is run in the container, as its user."""
        inside = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--ipc", "--uts", "--root", "--wd"]
        return subprocess.run(
            [*inside, *self._as_user, *command],
            capture_output=True,
            text=True,
            env=self._environment,
            check=False,
        )

    @property
    def healthy(self) -> bool:
        """As its health check says; without one, as long as it runs."""
        if not self.running:
            raise RuntimeError(f"{self.service.name} ended with {self._process.returncode}:\n{self.log()}")
        return not self.service.health or self.run(*self.service.health).returncode == 0

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        return self._process.wait()

    def kill(self) -> None:
        """All its processes are gone afterwards: with the first one the kernel ends its namespace."""
        if self.running:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]
