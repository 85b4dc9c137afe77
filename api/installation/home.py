"""The home folder of one installation: where its service is, whether it runs, and the token that it left there.

Responsible for six files. ``service.json`` says where the service listens, and ``port`` where the last one did, so that the
next one does, too; ``service.lock`` is locked for as long as the
process lives, however it ends, so that a stale address or a reused pid never passes for a running service; ``change.lock``
is held by whoever starts or ends what runs here, and says who that is; ``token`` is an admin's, for whoever may read this
folder as its owner; ``taken-down`` says that what ran here was ended on purpose, until the next service has seen to the jobs
that this concerns. Light enough to be imported by every command.

The files that come with atoll: sample jobs, node groups, chaos plans. In a checkout they lie in ``deploy``.

An installed wheel has them in the package itself (``pyproject.toml``, force-include): who runs that has no checkout.

The roots below which jobs of an installation may read and write: those given to ``atoll up``, or the default ones.

The same decision for ``atoll up``, which refuses a root that can be none before anything is started, and for the service.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from orchestrator.checkpoints.folder import refuse_unreachable
from orchestrator.errors import Conflict, InfrastructureError, disk_remedy
from orchestrator.system import home_files
from orchestrator.system.roots import AllowedRoots, defaults

KINDS = {
    "checkpoints": "jobs may read and write checkpoints below this folder or URL (default: the working folder)",
    "data": "jobs may read text files below this folder (default: the working folder)",
}


def roots_of(
    home: Path,
    runs: Path,
    checkpoints: Sequence[str],
    data: Sequence[str],
    database: str | None = None,
    key: Path | None = None,
) -> AllowedRoots:
    """Raises ConfigurationError for a root that can be none, or is in a store for which a package is missing."""
    private = [key.resolve()] if key else []
    if database and database.startswith("sqlite"):
        file = database.partition(":///")[2].partition("?")[0]
        private += [Path(f"{file}{suffix}").resolve() for suffix in ("", "-wal", "-shm", "-journal") if file]
    roots = defaults(home.resolve(), runs.resolve(), checkpoints, data, _working_folder(home), private)
    refuse_unreachable(roots.checkpoints)
    return roots


def _working_folder(home: Path) -> Path:
    """Where it was removed, the home: that is no default root, so there is none."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return home.resolve()


_PACKAGE = Path(__file__).resolve().parents[1]
FOLDER = _PACKAGE / "deploy" if (_PACKAGE / "deploy").is_dir() else _PACKAGE.parent / "deploy"
CONFIGS = FOLDER / "configs"
PLANS = FOLDER / "plans"


SERVICE_MODULE = "api.serve"
DEFAULT_HOME = Path(".atoll")
DEFAULT_RUNS = Path("runs")
LOCK_PATIENCE_S = 0.5
"""Whoever asks whether a service runs holds the lock for an instant."""
HOLDER_BYTES_MAX = 200
ROOM_BYTES = 1 << 18
"""A new store takes about half of it, before anything is in it."""
NOT_REMOVED = (errno.EISDIR, errno.EPERM, errno.EACCES, errno.EROFS)
TOKEN_VARIABLE = "ATOLL_TOKEN"
DATABASE_VARIABLE = "ATOLL_DATABASE"
"""Secrets may come by the environment, which only their owner sees; a command line is seen by everybody."""


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
        """None where the URL names none that can be."""
        number = self.url.rpartition(":")[2]
        return _port(int(number)) if number.isascii() and number.isdecimal() and len(number) <= 5 else None


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
        """The folder is there, and nobody but its owner looks into it; one of an earlier build is narrowed."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_mode & 0o077:
            self.path.chmod(0o700)

    def address(self) -> Address | None:
        """The address in ``service.json``, true or stale; None if there is none that can be read."""
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
        """As ``address``, also while ``service.json`` is damaged: the service that runs here is asked of the system then.

        The file is written again with what is found. Slow where there is none, and only to be asked by whoever needs it.
        """
        address = self.address()
        if address is not None and (not self.running() or _serves(address.pid, self.path)):
            return address
        if not self.running() or (address_by_process := _address_of_service(self.path)) is None:
            return address
        self._write_address(address_by_process, time.time())
        return address_by_process

    def port_before(self) -> int | None:
        """The port of the last service of this home; None if nobody knows."""
        if address := self.address():
            return address.port
        try:
            return _port(int(home_files.read(self.path / "port")))
        except (OSError, ValueError):
            return None

    def running(self) -> bool:
        """Whether a service process holds this home."""
        try:
            with home_files.open_lock(self.path / "service.lock", create=False) as held:
                fcntl.flock(held.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            detail = f"The home folder {self.path} cannot be used: {error.strerror}."
            raise InfrastructureError(detail=detail, remedy="Choose another with --home.") from error
        return False

    def require_room(self) -> None:
        """The folder is there, and a service can begin in it. Raises InfrastructureError where nothing can be written."""
        probe = self.path / f"room-{os.getpid()}"
        try:
            self.make()
            try:
                with probe.open("wb", buffering=0) as file:
                    if file.write(bytes(ROOM_BYTES)) < ROOM_BYTES:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            detail = f"Nothing can be written in the home folder {self.path}: {error.strerror}."
            raise InfrastructureError(
                detail=detail, remedy=f"{disk_remedy(error)}, or choose another with --home."
            ) from error

    def locked(self) -> AbstractContextManager[None]:
        """This process is the home's service until the block is left or the process ends."""
        remedy = "Use it, or end it with `atoll down`."
        return self._held("service.lock", LOCK_PATIENCE_S, "A service for {home} runs already.", remedy, "")

    def locked_for_change(self, command: str) -> AbstractContextManager[None]:
        """This process alone starts or ends what runs here. Raises Conflict that names whoever does so already.

        Two that start at once would each take the other's half-started cluster for a broken one, and end it.
        """
        remedy = "Wait for its end, or stop it with Ctrl-C; or choose a home of its own with --home."
        return self._held(
            "change.lock", 0.0, "{holder} is at work in {home}.", remedy, f"`atoll {command}` ({os.getpid()})"
        )

    @contextmanager
    def _held(self, name: str, patience_s: float, detail: str, remedy: str, holder: str) -> Iterator[None]:
        self.make()
        try:
            held = home_files.open_lock(self.path / name, create=True)
        except OSError as error:
            detail = f"{self.path / name} cannot be locked: {error.strerror}."
            raise InfrastructureError(
                detail=detail, remedy="Remove what lies there, which no command of atoll left."
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
            with suppress(OSError):  # on a disk that takes nothing it is held all the same, only not by whom
                held.truncate(0)
                os.write(held.fileno(), holder.encode())
            try:
                yield
            finally:
                with suppress(OSError):
                    held.truncate(0)

    def write_address(self, url: str, runs: Path, certificate: Path | None = None) -> None:
        """Say where this process listens, all at once."""
        self._write_address(Address(url, os.getpid(), runs, certificate), time.time())

    def _write_address(self, address: Address, started_at: float) -> None:
        facts = {"url": address.url, "pid": address.pid, "runs": str(address.runs), "started_at": started_at}
        facts |= {"certificate": str(address.certificate)} if address.certificate else {}
        for name, text in (("port", str(address.port)), ("service.json", json.dumps(facts))):
            home_files.replace(self.path / name, text)

    def forget_address(self) -> None:
        """What cannot be removed is no address either: a folder in its place, or that of a process that is gone."""
        try:
            (self.path / "service.json").unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in NOT_REMOVED:
                raise

    def token(self) -> str | None:
        """The admin token left here; None if there is none, or none that this user may read."""
        try:
            token = home_files.read(self.path / "token").strip()
        except (OSError, ValueError):
            return None
        return token if token.isascii() and token.isprintable() and token else None

    def write_token(self, token: str) -> None:
        """Leave a token that nobody but the owner of this folder can read, at no instant."""
        home_files.replace(self.path / "token", token + "\n")


def _holder_in(held: IO[bytes]) -> str:
    """The holder that the lock file names."""
    return held.read(HOLDER_BYTES_MAX).decode(errors="replace").strip()


def _port(number: int) -> int | None:
    return number if 0 < number < 1 << 16 else None


def _serves(pid: int, home: Path) -> bool:
    """Whether this process is the service of that home, as far as it can be seen."""
    import psutil  # late: most commands need none of it

    try:
        command = psutil.Process(pid).cmdline()
        return not command or _home_in(command, psutil.Process(pid).cwd()) == home
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False


def _address_of_service(home: Path) -> Address | None:
    """The address of this home's running service, by its command line and its open sockets."""
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
    """The home that the command line of a service names."""
    named = dict(pairwise(command)).get("--home")
    return Path(folder, named).resolve() if SERVICE_MODULE in command and named else None
