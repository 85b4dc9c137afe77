"""Services on the Ray cluster of these tests, one after the other, each of which a test kills."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

from api.client import Client
from api.installation.binding import Binding
from api.installation.home import Home
from orchestrator.runtime.clusterfile import ClusterFile
from tests.api.installation import PatientHttp
from tests.ray.jobs import gone
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parent.parent.parent
CONTROL = "orchestrator.runtime.control_port:connect"
SUCCESSION = """
import os, sys, ray, uvicorn, api.serve, orchestrator.runtime.control_port
for _ in sys.stdin:
    if (service := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        sys.exit(api.serve.main(sys.argv[1:]))
    print(service, flush=True)
    os.waitpid(service, 0)
"""
"""A process that forks one service for each line on its standard input, once the service before has ended.

The modules are loaded before the fork, so a service starts at once."""


class Reign:
    """One service after the other, on one listening socket, each killed by SIGKILL."""

    def __init__(self, home: Path, folder: Path, *options: str) -> None:
        cluster = ClusterFile.find(home)
        assert cluster is not None
        self.environment = os.environ | cluster.environment  # before Ray is imported
        self.home, self.runs, self.database = Home(home), folder / "runs", folder / "service.sqlite"
        self.listener = Binding().listen([0])
        assert self.listener is not None
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.log = (folder / "service.log").open("ab")
        self.succession = self._load(options)
        self.serving = self._begin()

    def kill(self) -> None:
        os.kill(self.serving, signal.SIGKILL)

    def succeed(self) -> None:
        """Start the next service after a kill, and wait until it answers."""
        self.serving = self._begin()

    def end(self) -> None:
        if not gone(self.serving):
            self.kill()
        self.succession.communicate(timeout=PATIENCE_S)
        self.home.forget_address()
        self.listener.close()
        self.log.close()

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.home.token()}"}
        return PatientHttp(base_url=self.url, timeout=PATIENCE_S, headers=headers)

    def undelivered(self) -> int:
        """Return how many stored commands no job has been sent yet."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10)) as store:
            query = "SELECT count(*) FROM commands WHERE NOT delivered AND accepted IS NULL"
            return int(store.execute(query).fetchone()[0])

    def callers(self) -> set[str]:
        """Return the callers of all stored commands."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10)) as store:
            return {caller for (caller,) in store.execute("SELECT DISTINCT caller FROM commands")}

    def client(self) -> Client:
        """Return a client of the service that runs now."""
        return Client.at(self.home.path, timeout_s=PATIENCE_S)

    def metrics(self) -> str:
        with self.http() as http:
            return http.get("/metrics").raise_for_status().text

    def atoll(self, *words: str) -> str:
        """Return what an operator's command prints."""
        command = [sys.executable, "-m", "api.cli", *words, "--home", str(self.home.path)]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _load(self, more: tuple[str, ...]) -> subprocess.Popen[str]:
        options = ["--home", self.home.path, "--runs", self.runs, "--database", f"sqlite:///{self.database}", *more]
        command = [sys.executable, "-c", SUCCESSION, *options, "--control", CONTROL]
        number = self.listener.fileno()
        return subprocess.Popen(
            [*map(str, command), "--listener", str(number)],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            pass_fds=(number,),
            text=True,
        )

    def _begin(self) -> int:
        """Start the next service, and return its process id once it answers."""
        assert self.succession.stdin is not None
        assert self.succession.stdout is not None
        print(file=self.succession.stdin, flush=True)
        service = int(self.succession.stdout.readline())

        def listens() -> bool:
            assert not gone(service), Path(self.log.name).read_text()
            address = self.home.address()
            return address is not None and address.pid == service

        wait_until(listens, "the service is up")
        httpx.get(f"{self.url}/healthz", timeout=PATIENCE_S).raise_for_status()
        return service


@contextmanager
def reigning(home: Path, folder: Path, *options: str) -> Iterator[Reign]:
    """Run a service with these options, and its successors, until the end of the block."""
    reign = Reign(home, folder, *options)
    try:
        yield reign
    finally:
        reign.end()
