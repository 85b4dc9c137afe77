"""A real PostgreSQL server on loopback, which a test may kill, stop and start again; and new databases on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from sqlalchemy import create_engine, text

from api.storage.store import url_of
from orchestrator.system.ports import free_port
from tests.programs import required_file
from tests.waiting import PATIENCE_S, wait_until


class PostgreSQL:
    """A server of Debian's package. What it answered for survives the death of its processes, as with ``fsync``."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self._data, self._log = binaries, folder / "data", folder / "log"
        self._port = free_port()
        self._user = "nobody" if os.geteuid() == 0 else None  # the server refuses to run as root
        self._process: subprocess.Popen[bytes] | None = None
        self._data.mkdir(mode=0o700)
        if self._user:
            folder.chmod(0o711)
            shutil.chown(self._data, self._user)
        options = ["-D", self._data, "-A", "trust", "-U", "atoll", "--no-sync", "-E", "UTF8"]
        subprocess.run([binaries / "initdb", *options], check=True, capture_output=True, cwd="/", user=self._user)

    @property
    def url(self) -> str:
        """Without a database."""
        return f"postgresql://atoll@127.0.0.1:{self._port}"

    def start(self) -> None:
        """It runs and answers."""
        settings = ["-h", "127.0.0.1", "-p", str(self._port), "-c", "unix_socket_directories=", "-c", "fsync=off"]
        command = [self._binaries / "postgres", "-D", self._data, *settings]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, cwd="/", user=self._user)
        wait_until(self._answers_or_ended, "PostgreSQL")
        assert self._process.poll() is None, self._log.read_text()

    def _answers_or_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None or self._answers()

    def _answers(self) -> bool:
        engine = create_engine(url_of(f"{self.url}/postgres"))
        try:
            with engine.connect():
                return True
        except Exception:
            return False
        finally:
            engine.dispose()

    def processes(self) -> list[psutil.Process]:
        """The server and those that serve its connections."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]

    def kill(self) -> None:
        """Every process of it dies at once, as by a loss of power."""
        assert self._process is not None
        for process in self.processes():
            process.kill()
        self._process.wait(timeout=PATIENCE_S)

    def shut_down(self) -> None:
        """An immediate shutdown: nothing is waited for."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=PATIENCE_S)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside the block no process of it runs, and all connections stay."""
        stopped = self.processes()
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                process.resume()

    def new_database(self) -> str:
        """Its URL."""
        name = f"test_{time.monotonic_ns()}"
        engine = create_engine(url_of(f"{self.url}/postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return f"{self.url}/{name}"


@contextmanager
def a_server() -> Iterator[PostgreSQL]:
    """One that runs, and is gone afterwards."""
    binary = required_file("usr/lib/postgresql/*/bin/postgres", "PostgreSQL")
    # Not below pytest's folder: that is closed to the user that the server runs as.
    with tempfile.TemporaryDirectory(prefix="atoll-postgres-") as folder:
        server = PostgreSQL(binary.parent, Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.shut_down()
