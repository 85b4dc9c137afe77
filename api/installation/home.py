"""The home folder of an installation: the address of its service, whether it runs, its token, and its allowed roots.

    service.json    where the service listens
    port            where the last service listened, so that the next one takes the same port
    service.lock    locked while the service's process lives, so that a stale address or a reused pid is recognised
    change.lock     locked by the command that starts or stops something here, and names it
    token           an admin token for the owner of the folder
    taken-down      the installation was stopped on purpose; removed once the next service has failed its jobs

Light enough to be imported by every command. The sample files (jobs, node groups, chaos plans), the alerts and the
dashboards are in a checkout, or in the package itself of an installed wheel (``pyproject.toml``, force-include).
``roots_of`` is used both by ``atoll up``, which refuses an unusable root before it starts anything, and by the service.

It also starts the processes that outlive their starter: the service, and what brings it back.

They are detached from the terminal: no signals, no input, and their output goes to the service's log. Nothing waits for
them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from orchestrator.checkpoints.folder import refuse_unreachable
from orchestrator.errors import ConfigurationError, Conflict, InfrastructureError, disk_remedy
from orchestrator.system import home_files
from orchestrator.system.roots import AllowedRoots, defaults

KINDS = {
    "checkpoints": "allow jobs to read and write checkpoints below this folder or URL (default: the working folder)",
    "data": "allow jobs to read text files below this folder (default: the working folder)",
}


def roots_of(
    home: Path,
    runs: Path,
    checkpoints: Sequence[str],
    data: Sequence[str],
    database: str | None = None,
    key: Path | None = None,
) -> AllowedRoots:
    """Return the roots. Raises ConfigurationError for an unusable root, or one in a store whose package is missing."""
    if files := [root for root in checkpoints if os.path.isfile(root)]:
        raise ConfigurationError(detail=f"--checkpoints {files[0]} is a file. Give a folder, or the URL of one.")
    private = [key.resolve()] if key else []
    if database and database.startswith("sqlite"):
        file = database.partition(":///")[2].partition("?")[0]
        private += [Path(f"{file}{suffix}").resolve() for suffix in ("", "-wal", "-shm", "-journal") if file]
    roots = defaults(home.resolve(), runs.resolve(), checkpoints, data, _working_folder(home), private)
    refuse_unreachable(roots.checkpoints)
    return roots


def missing_roots(roots: Sequence[str]) -> list[str]:
    """Return the roots that are paths on this machine, and do not exist."""
    return [root for root in roots if "://" not in root and not os.path.lexists(root)]


def _working_folder(home: Path) -> Path:
    """Return the working folder, or the home if it was removed. The home is never a default root."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return home.resolve()


_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = _PACKAGE / "deploy" if (_PACKAGE / "deploy").is_dir() else _PACKAGE.parent / "deploy"
CONFIGS = FOLDER / "configs"
PLANS = FOLDER / "plans"
ALERTS = FOLDER / "prometheus" / "alerts.yml"
DASHBOARDS = FOLDER / "dashboards" if (FOLDER / "dashboards").is_dir() else FOLDER.parent / "dashboards"


SERVICE_MODULE = "api.serve"
DEFAULT_HOME = Path(".atoll")
DEFAULT_RUNS = Path("runs")
LOCK_PATIENCE_S = 0.5
"""A process that checks whether a service runs holds the lock for an instant."""
HOLDER_BYTES_MAX = 200
ROOM_BYTES = 1 << 18
"""An empty new database takes about half of it."""
NOT_REMOVED = (errno.EISDIR, errno.EPERM, errno.EACCES, errno.EROFS)
TOKEN_VARIABLE = "ATOLL_TOKEN"
DATABASE_VARIABLE = "ATOLL_DATABASE"
"""Secrets may come from the environment, which only its owner sees. All users see command lines."""


@dataclass(frozen=True, slots=True)
class Address:
    """A service's URL, and its process."""

    url: str
    pid: int
    runs: Path
    certificate: Path | None = None
    """The certificate that clients on this machine may trust; None over plain HTTP."""

    @property
    def port(self) -> int | None:
        """The URL's port, or None if it has no valid one."""
        number = self.url.rpartition(":")[2]
        return _port(int(number)) if number.isascii() and number.isdecimal() and len(number) <= 5 else None


def require_runs(runs: Path) -> None:
    """Create the folder that jobs write to. Raises InfrastructureError if it cannot be one of this user.

    A full or read-only disk is no reason to refuse: it needs the service, which lists its jobs and removes them.
    """
    with _writing("runs", runs, "--runs"):
        runs.mkdir(parents=True, exist_ok=True)
        if not os.access(runs, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _writing(what: str, folder: Path, option: str) -> Iterator[None]:
    """Turn an OSError inside into an InfrastructureError that names the folder and its option."""
    try:
        yield
    except OSError as error:
        detail = f"The {what} folder {folder} cannot be written: {error.strerror}."
        raise InfrastructureError(
            detail=detail, remedy=f"{disk_remedy(error)}, or choose another with {option}."
        ) from error


def _require_room(folder: Path) -> None:
    """Raise OSError if the folder cannot take a small file."""
    probe = folder / f"room-{os.getpid()}"
    try:
        with probe.open("wb", buffering=0) as file:
            if file.write(bytes(ROOM_BYTES)) < ROOM_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        probe.unlink(missing_ok=True)


class Home:
    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @property
    def log(self) -> Path:
        return self.path / "service.log"

    @property
    def taken_down(self) -> Path:
        return self.path / "taken-down"

    def make(self) -> None:
        """Create the folder for its owner only. The permissions of an existing one are narrowed."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_mode & 0o077:
            self.path.chmod(0o700)

    def address(self) -> Address | None:
        """Return the address in ``service.json``, current or stale; None if there is no readable one."""
        try:
            written = json.loads(home_files.read(self.path / "service.json"))
            certificate = written.get("certificate")
            address = Address(
                str(written["url"]),
                int(written["pid"]),
                Path(written["runs"]),
                Path(certificate) if certificate else None,
            )
            return address if address.port and address.pid > 0 else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None

    def discovered_address(self) -> Address | None:
        """Return the address even if ``service.json`` is damaged, by searching the processes for the running service.

        The file is then repaired. The search is slow, so call this only if the address is needed.
        """
        address = self.address()
        if address is not None and (not self.running() or _serves(address.pid, self.path)):
            return address
        if not self.running() or (address_by_process := _address_of_service(self.path)) is None:
            return address
        self._write_address(address_by_process, time.time())
        return address_by_process

    def port_before(self) -> int | None:
        """Return the port of the last service of this home, or None if it is unknown."""
        if address := self.address():
            return address.port
        try:
            return _port(int(home_files.read(self.path / "port")))
        except (OSError, ValueError):
            return None

    def running(self) -> bool:
        """Return whether a service process holds this home."""
        try:
            with home_files.open_lock(self.path / "service.lock", create=False) as held:
                fcntl.flock(held.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            detail = f"The home folder {self.path} cannot be used: {error.strerror}."
            raise InfrastructureError(detail=detail, remedy="Choose another home with --home.") from error
        return False

    def require_room(self) -> None:
        """Create the folder, and check that a service can start in it. Raises InfrastructureError if it is not writable."""
        with _writing("home", self.path, "--home"):
            self.make()
            _require_room(self.path)

    def locked(self) -> AbstractContextManager[None]:
        """Hold the service's lock until the block is left or the process ends. Raises Conflict."""
        remedy = "Use it, or stop it with `atoll down`."
        return self._held("service.lock", LOCK_PATIENCE_S, "A service for {home} is already running.", remedy, "")

    def locked_for_change(self, command: str) -> AbstractContextManager[None]:
        """Hold the lock for starting and stopping. Raises Conflict that names the command that holds it.

        Two commands that start at once would each take the other's half-started cluster for a broken one, and end it.
        """
        remedy = "Wait until it has ended, or stop it with Ctrl-C; or choose another home with --home."
        return self._held(
            "change.lock", 0.0, "{holder} is running in {home}.", remedy, f"`atoll {command}` ({os.getpid()})"
        )

    @contextmanager
    def _held(self, name: str, patience_s: float, detail: str, remedy: str, holder: str) -> Iterator[None]:
        with _writing("home", self.path, "--home"):
            self.make()
        try:
            held = home_files.open_lock(self.path / name, create=True)
        except OSError as error:
            detail = f"{self.path / name} cannot be locked: {error.strerror}."
            raise InfrastructureError(
                detail=detail, remedy="Remove what is at that path; atoll did not create it."
            ) from error
        with held:
            deadline = time.monotonic() + patience_s
            while True:
                try:
                    fcntl.flock(held.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() >= deadline:
                        held.seek(0)
                        text = detail.format(home=self.path, holder=_holder_in(held) or "Another command")
                        raise Conflict(detail=text, remedy=remedy) from error
                    time.sleep(0.02)
            with suppress(OSError):  # on a full disk the lock holds all the same, without the holder's name
                held.truncate(0)
                os.write(held.fileno(), holder.encode())
            try:
                yield
            finally:
                with suppress(OSError):
                    held.truncate(0)

    def write_address(self, url: str, runs: Path, certificate: Path | None = None) -> None:
        """Write atomically where this process listens."""
        self._write_address(Address(url, os.getpid(), runs, certificate), time.time())

    def _write_address(self, address: Address, started_at: float) -> None:
        facts = {"url": address.url, "pid": address.pid, "runs": str(address.runs), "started_at": started_at}
        facts |= {"certificate": str(address.certificate)} if address.certificate else {}
        for name, text in (("port", str(address.port)), ("service.json", json.dumps(facts))):
            home_files.replace(self.path / name, text)

    def forget_address(self) -> None:
        """Remove ``service.json``. If that fails, what remains does not count as an address of a running service."""
        try:
            (self.path / "service.json").unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in NOT_REMOVED:
                raise

    def token(self) -> str | None:
        """Return the admin token, or None if there is none that this user may read."""
        try:
            token = home_files.read(self.path / "token").strip()
        except (OSError, ValueError):
            return None
        return token if token.isascii() and token.isprintable() and token else None

    def write_token(self, token: str) -> None:
        """Write the token so that only the owner of this folder can ever read it."""
        home_files.replace(self.path / "token", token + "\n")


def _holder_in(held: IO[bytes]) -> str:
    """Return the holder that the lock file names."""
    return held.read(HOLDER_BYTES_MAX).decode(errors="replace").strip()


def _port(number: int) -> int | None:
    return number if 0 < number < 1 << 16 else None


def _serves(pid: int, home: Path) -> bool:
    """Return whether this process is the service of that home; True if its command line is hidden from this user."""
    import psutil  # late: most commands do not need it

    try:
        command = psutil.Process(pid).cmdline()
        return not command or _home_in(command, psutil.Process(pid).cwd()) == home
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False


def _address_of_service(home: Path) -> Address | None:
    """Return the address of this home's running service, from its command line and open sockets."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, ValueError, IndexError):
            command = process.cmdline()
            if SERVICE_MODULE not in command or _home_in(command, process.cwd()) != home:
                continue
            options = dict(pairwise(command))
            inherited, port = options.get("--listener"), options.get("--port")
            for socket in process.net_connections("tcp"):
                ours = inherited in (None, str(socket.fd)) and port in (None, "0", str(socket.laddr.port))
                if socket.status == psutil.CONN_LISTEN and ours:
                    certificate = options.get("--certificate")
                    host = socket.laddr.ip if socket.laddr.ip not in ("0.0.0.0", "::") else "127.0.0.1"
                    host = "localhost" if certificate and host != socket.laddr.ip else host
                    host = f"[{host}]" if ":" in host else host
                    url = f"{'https' if certificate else 'http'}://{host}:{socket.laddr.port}"
                    runs = Path(process.cwd(), options.get("--runs", DEFAULT_RUNS)).resolve()
                    return Address(url, process.pid, runs, Path(process.cwd(), certificate) if certificate else None)
    return None


def _home_in(command: list[str], folder: str) -> Path | None:
    """Return the home that the command line of a service names."""
    named = dict(pairwise(command)).get("--home")
    return Path(folder, named).resolve() if SERVICE_MODULE in command and named else None


def start_detached(
    command: Sequence[str],
    home: Home,
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
    listener: socket.socket | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in ``folder`` (default: ``working_folder``) with this environment and the inherited ``listener``.

    Only its user can read the files that it creates.
    """
    with home.log.open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder or working_folder(home),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            umask=0o077,
            start_new_session=True,  # Ctrl-C in this terminal must not reach it
            pass_fds=() if listener is None else (listener.fileno(),),
        )


def working_folder(home: Home) -> Path:
    """Return the folder for processes of the installation: the working folder, or the home if that was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return home.path


def tail(path: Path, count: int = 15, start: int = 0) -> str:
    """Return the last lines of a log, at most those after ``start`` bytes unless it was rotated since."""
    try:
        with path.open(errors="replace") as lines:
            lines.seek(start if start <= path.stat().st_size else 0)
            return "".join(f"    {text}" for text in deque(lines, maxlen=count)).rstrip()
    except OSError:
        return "    (no log)"
