"""The checks of `atoll doctor`: can this machine run atoll? Each check gives one result with its remedy.

Nothing is changed. Ray and JAX are imported in short-lived child processes, all at the same time, because this process
never imports them. A check that fails to run has a result, too.

Two checks are of this machine's clock: is it synchronised, and how far is it from a service's? Clocks are never set. No time
server is contacted, because nothing here may need the internet. The kernel knows whether its clock is synchronised
(adjtimex(2), read only). A service's answer names the second in which it was written, so the offset is known as an interval,
and its end nearer to zero is reported.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path

from api.installation.binding import PORT_COUNT, PORT_FIRST, trusting
from api.installation.home import DATABASE_VARIABLE, Home
from api.installation.service_restart import token_problem
from api.installation.store_history import refuse_lost_store
from orchestrator.errors import AtollError, ConfigurationError, InfrastructureError
from orchestrator.specification.documents import read_document
from orchestrator.specification.memory_budget import (
    EVALUATOR_BYTES,
    island_bytes_per_parameter,
    shard_bytes_per_parameter,
)
from orchestrator.system import home_files, program_cache, python_process, release, socket_room
from orchestrator.system.marks import BY_UP, supervisor_of
from orchestrator.system.object_store import remembered
from orchestrator.system.python_process import built

LOCK = Path(__file__).resolve().parents[2] / "requirements.lock"
AHEAD_MAX_S = 5.0
OFFSET_MAX_S = 2.0
DATE_AGE_MAX_S = 2.0
"""A Date header is truncated to seconds, and servers renew it about once a second."""
ANSWER_TIMEOUT_S = 5.0
STA_UNSYNC = 0x0040
KEEP = "Synchronise it: systemctl enable --now systemd-timesyncd, or chrony; for a container, on its host."
PROBE_TIMEOUT_S = 60.0
PYTHON_MIN = (3, 11)
GIB = 1 << 30
DISK_WRONG_BYTES, DISK_WARNING_BYTES = 1 * GIB, 5 * GIB
SHARED_MEMORY_BYTES = 1 * GIB
"""Ray keeps its object stores in shared memory; with less it falls back to files, which is slow."""
ISLANDS, FRAGMENTS = 4, 8
"""The job for which the memory check estimates the largest model."""
SERVICE_TIMEOUT_S = 5.0
FOLDERS = "--runs, --home, and TMPDIR for Ray's files"
PROBES = {
    "ray": "import ray; print(ray.__version__)",
    "memory": "from ray._private.utils import estimate_available_memory; print(int(estimate_available_memory()))",
    "jax": "import jax; print(', '.join(f'{d.platform}:{d.id}' for d in jax.devices()))",
}


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: str
    state: State
    detail: str
    remedy: str = ""


def examine(home: Home, runs: Path, groups: Path, url: str | None = None) -> list[CheckResult]:
    """Run all checks, in the order in which to fix problems. ``url``: another service to compare clocks with."""
    probes = {name: _python(python_process.code(code)) for name, code in PROBES.items()}
    probes["processes"] = _python(python_process.module("orchestrator.runtime.orphan_scan", "--home", str(home.path)))
    local: list[Callable[[], CheckResult]] = [
        _interpreter,
        _versions,
        lambda: _ports(home),
        lambda: _disk(runs, home.path, *_cluster_folder(home)),
        lambda: own_clock(synchronised(), LOCK, time.time()),
        lambda: _service_clock(home, url),
        lambda: _builds(home, url),
        lambda: home_folder(home),
        lambda: compiled_programs(built(os.environ)),
        temporary_files,
        lambda: shared_memory(Path("/dev/shm")),
        lambda: _cores(groups, os.cpu_count() or 1),
    ]
    findings = [check() for check in local]
    findings += [
        memory(*_answer(probes["memory"])),
        _imported("ray", probes["ray"]),
        _imported("jax", probes["jax"]),
        _processes(probes["processes"]),
    ]
    return findings


# ── Python and its packages ───────────────────────────────────────────────────────────────────────────────────────────


def _interpreter() -> CheckResult:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON_MIN:
        return CheckResult("python", State.WRONG, version, "Use Python 3.11 or newer: make install PYTHON=python3.11.")
    return CheckResult("python", State.OK, f"{version} in {sys.prefix}")


def _versions() -> CheckResult:
    """Compare the installed versions with the lock file, if this checkout has one."""
    if not LOCK.is_file():
        return CheckResult("versions", State.OK, "no lock file to compare with")
    different = [difference for difference in map(_difference, locked(LOCK.read_text()).items()) if difference]
    if different:
        shown = ", ".join(different[:5]) + (f" and {len(different) - 5} more" if len(different) > 5 else "")
        return CheckResult("versions", State.WARNING, shown, "Install the locked versions: make install.")
    return CheckResult("versions", State.OK, "as requirements.lock says")


def locked(text: str) -> dict[str, str]:
    """Return the names and versions in a lock file."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", text, re.MULTILINE))


def _difference(pinned: tuple[str, str]) -> str | None:
    """Return a description of the difference, or None. Packages that are not installed may be development tools."""
    name, version = pinned
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return None if installed == version else f"{name} {installed} instead of {version}"


def _python(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**built(os.environ), "TF_CPP_MIN_LOG_LEVEL": "2"},
    )


def _answer(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the last line of its output, and the reason if it failed."""
    try:
        out, err = process.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "", f"no answer within {PROBE_TIMEOUT_S:.0f} s"
    last = [text.strip().splitlines()[-1] if text.strip() else "" for text in (out, err)]
    return last[0], "" if process.returncode == 0 else last[1] or f"exit code {process.returncode}"


def _imported(name: str, process: subprocess.Popen[str]) -> CheckResult:
    output, failed = _answer(process)
    if failed:
        return CheckResult(
            name, State.WRONG, failed, f"Reinstall it (make install), and try `python -c 'import {name}'`."
        )
    return CheckResult(name, State.OK, output)


# ── the machine ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _ports(home: Home) -> CheckResult:
    address = home.address()
    if address is not None and home.running():
        return CheckResult("ports", State.OK, f"the service of this home listens at {address.url}")
    free = next((port for port in range(PORT_FIRST, PORT_FIRST + PORT_COUNT) if _free(port)), None)
    if free is None:
        taken = f"all ports from {PORT_FIRST} to {PORT_FIRST + PORT_COUNT - 1} are in use"
        return CheckResult("ports", State.WRONG, taken, "Give `atoll up` another port with --port.")
    return CheckResult("ports", State.OK, f"{free} is free")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _disk(*wanted: Path) -> CheckResult:
    """Check the disks of these folders: report one that cannot be written, else the fullest."""
    places = []
    for path in wanted:
        with suppress(FileNotFoundError):  # a relative path in a working folder that was removed
            places.append(next(at for at in (path.absolute(), *path.absolute().parents) if at.is_dir()))
    for place in places:
        try:
            with tempfile.TemporaryFile(dir=place):  # a disk that failed is read-only, whatever room it has
                pass
        except OSError as error:
            detail = f"{place} cannot be written: {error.strerror}"
            return CheckResult("disk", State.WRONG, detail, f"Fix that, or give `atoll up` other folders: {FOLDERS}.")
    free, place = min((shutil.disk_usage(place).free, place) for place in places)
    state = State.WRONG if free < DISK_WRONG_BYTES else State.WARNING if free < DISK_WARNING_BYTES else State.OK
    remedy = "" if state is State.OK else f"Free some space, or give `atoll up` other folders: {FOLDERS}."
    return CheckResult("disk", state, f"{free / GIB:.1f} GiB free in {place}", remedy)


def _cluster_folder(home: Home) -> list[Path]:
    """Return Ray's folder for logs and sockets, if a cluster is up: without space there, no process of a job starts."""
    try:
        return [Path(json.loads(home_files.read(home.path / "cluster.json"))["temp_dir"])]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _service_clock(home: Home, url: str | None) -> CheckResult:
    """Compare with the clock of the service at ``url``, or of the home's service, which may run in a container."""
    address = home.address()
    if address is not None and url in (None, address.url) and home.running():
        return service_clock(address.url, address.certificate)
    if url is not None:
        return service_clock(url, None)
    return CheckResult("service's clock", State.OK, "no service to compare with (give one with --url)")


def _builds(home: Home, url: str | None) -> CheckResult:
    """Compare this installation's build of atoll with those of the service and of the nodes."""
    from api.client import Client

    own = str(release.own())
    if home.address() is None and url is None:
        return CheckResult("builds", State.OK, f"{own}; no service to compare with (give one with --url)")
    try:
        with Client.at(home.path, url, timeout_s=SERVICE_TIMEOUT_S) as client:
            there = {"the service": client.health().build or release.UNKNOWN}
            groups = {group.name: ", ".join(group.builds) or release.UNKNOWN for group in client.node_groups()}
    except AtollError as error:
        return CheckResult("builds", State.OK, f"{own}; the others are not known: {error}")
    different = {name: build for name, build in (there | groups).items() if build != own}
    if not different:
        return CheckResult("builds", State.OK, f"{own} everywhere")
    listed = ", ".join(f"{name} has {build}" for name, build in different.items())
    remedy = "Upgrade what is older, in the order of docs/guide/upgrade.md."
    return CheckResult("builds", State.WARNING, f"this is {own}; {listed}", remedy)


def home_folder(home: Home) -> CheckResult:
    problems = list(_home_problems(home.path))
    if problems:
        details, remedies = ("; ".join(parts) for parts in zip(*problems, strict=True))
        return CheckResult("home", State.WRONG, details, remedies)
    return CheckResult("home", State.OK, f"{home.path}{'' if home.path.is_dir() else ' (created by `atoll up`)'}")


def _home_problems(path: Path) -> Iterator[tuple[str, str]]:
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield f"{place} cannot be written", f"Change its owner (chown), or choose another home with --home: {place}"
    elif place == path and path.stat().st_mode & stat.S_IWOTH:
        yield f"{path} is writable by all users", f"chmod o-w {path}"
    try:
        is_copied = remembered(path) is not None
        refuse_lost_store(Home(path), os.environ.get(DATABASE_VARIABLE), is_copied=is_copied)
    except InfrastructureError as error:
        yield error.detail, error.remedy
    token = path / "token"
    if token.is_file() and token.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield f"{token} is readable by other users", f"chmod 600 {token}, and revoke the token: others may have it"
    if problem := token_problem(Home(path)):
        is_ours = supervisor_of(path) == BY_UP
        how = "`atoll up`" if is_ours else "A restart of the service (with systemd: `systemctl restart atoll-service`)"
        yield problem, f"{how} has another one written; jobs train on"


def compiled_programs(environment: Mapping[str, str]) -> CheckResult:
    """Check whether islands with this environment can keep their compiled programs."""
    if problem := program_cache.problem(environment):
        return CheckResult("compiled programs", State.WARNING, problem.detail, problem.remedy)
    return CheckResult("compiled programs", State.OK, "kept; islands reuse them when they restart")


def temporary_files() -> CheckResult:
    """Check that there is a folder for Ray's files, with a path short enough for its sockets."""
    try:
        room = socket_room.for_cluster()
    except ConfigurationError as error:
        return CheckResult("temporary files", State.WRONG, error.detail, "Set TMPDIR to another folder.")
    if room.note:
        return CheckResult(
            "temporary files",
            State.WARNING,
            room.note,
            "No change is needed if that disk has room; otherwise set TMPDIR.",
        )
    return CheckResult("temporary files", State.OK, f"in {room.folder}")


def shared_memory(place: Path) -> CheckResult:
    if not place.is_dir():
        return CheckResult("shared memory", State.OK, f"this system has no {place}")
    if note := socket_room.note(place):
        return CheckResult("shared memory", State.WARNING, note, f"Mount {place} writable.")
    free = shutil.disk_usage(place).free
    if free < SHARED_MEMORY_BYTES:
        remedy = "Mount a larger one; for a container: --shm-size=2g."
        return CheckResult("shared memory", State.WARNING, f"{free / GIB:.2f} GiB free in {place}", remedy)
    return CheckResult("shared memory", State.OK, f"{free / GIB:.1f} GiB free in {place}")


def _cores(groups: Path, cores: int) -> CheckResult:
    try:
        listed = read_document(groups)["node_groups"]
        nodes = sum(int(group.get("nodes", 1)) for group in listed)
    except (AtollError, KeyError, TypeError, ValueError, AttributeError) as error:
        remedy = "Give a file of node groups such as deploy/configs/groups.yaml."
        return CheckResult("cores", State.WRONG, f"{groups} is not a file of node groups: {error}", remedy)
    detail = f"{cores} for {nodes} nodes of {groups.name}"
    if cores < nodes:
        remedy = (
            "Enough for a demo: islands share cores, and steps take longer. For speed, use fewer groups or more cores."
        )
        return CheckResult("cores", State.WARNING, detail, remedy)
    return CheckResult("cores", State.OK, detail)


def memory(available: str, failed: str) -> CheckResult:
    """Report the memory that a node on this machine would offer. ``specification.memory_budget`` refuses jobs by it."""
    if not failed and not available.isdecimal():
        failed = f"the answer is not a number: {available}"
    if failed:
        return CheckResult("memory", State.WARNING, f"could not be measured: {failed}", "See the check of ray.")
    free = int(available)
    shard = shard_bytes_per_parameter(ISLANDS, FRAGMENTS, "int4", "int4") + EVALUATOR_BYTES
    island = island_bytes_per_parameter(on_cpu=True, saves=False)
    largest = free / (shard + ISLANDS * island)
    return CheckResult(
        "memory",
        State.OK,
        f"{free / GIB:.1f} GiB free: enough for {ISLANDS} islands on CPU and the head with a model of {largest / 1e6:,.0f}M "
        f"parameters ({island:.0f} bytes per parameter for each island, {shard:.0f} for the head)",
    )


def _processes(process: subprocess.Popen[str]) -> CheckResult:
    output, failed = _answer(process)
    if failed:
        return CheckResult("processes", State.WARNING, f"could not be listed: {failed}", "List them with ps.")
    census = json.loads(output)
    if pids := census["orphaned"]:
        detail = f"{len(pids)} belong to a cluster whose files were removed"
        return CheckResult(
            "processes",
            State.WRONG,
            detail,
            f"`atoll down` no longer finds them. End them: kill {' '.join(map(str, pids))}",
        )
    if census["damage"]:
        detail = f"{len(census['own'])} of this home, whose cluster.json is damaged"
        return CheckResult(
            "processes", State.WRONG, detail, "`atoll up` writes it again; `atoll down` ends the processes."
        )
    if census["answers"] is False:
        return CheckResult("processes", State.WRONG, "this home's cluster does not answer", f"{census['remedy']}.")
    if census["secret"]:
        remedy = "Without it no island can start. `atoll up` writes it again; a running service does so by itself."
        return CheckResult("processes", State.WRONG, census["secret"], remedy)
    return CheckResult(
        "processes", State.OK, f"{len(census['own'])} of this home, {len(census['elsewhere'])} of other homes"
    )


class _Timex(ctypes.Structure):
    """The beginning of adjtimex(2)'s structure, and room for the rest. Without modes it only reads."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


def synchronised() -> bool | None:
    """Return whether the kernel considers its clock synchronised; None if it cannot tell."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    timex = _Timex()
    if adjtimex(ctypes.byref(timex)) < 0:  # some sandboxes forbid the call
        return None
    return not timex.status & STA_UNSYNC


def own_clock(is_synchronised: bool | None, older: Path, now: float) -> CheckResult:
    """Check that the clock is synchronised, and not behind the time of ``older``, an existing file."""
    utc = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    ahead = older.stat().st_mtime - now if older.is_file() else 0.0
    if ahead > AHEAD_MAX_S:
        return CheckResult(
            "clock", State.WRONG, f"{utc}, but {older.name} was written {ahead:.0f} s later", f"Set the clock. {KEEP}"
        )
    if is_synchronised is False:
        return CheckResult("clock", State.WARNING, f"{utc}, not synchronised", KEEP)
    return CheckResult("clock", State.OK, utc + (", synchronised" if is_synchronised else ""))


def service_clock(url: str, certificate: Path | None) -> CheckResult:
    """Compare this machine's clock with that of the service at ``url``, by the date of an answer."""
    import httpx

    check = "service's clock"
    try:
        verify = trusting(certificate) if certificate else True
        with httpx.Client(verify=verify, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            asked_at = time.time()
            date = client.get(f"{url.rstrip('/')}/healthz").headers["date"]
            offset_s = offset(parsedate_to_datetime(date).timestamp(), asked_at, time.time())
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return CheckResult(
            check, State.WARNING, f"{url} does not answer: {error}", "Check that it runs; `atoll jobs` says more."
        )
    except ConfigurationError as error:
        return CheckResult(check, State.WARNING, f"{url} is not trusted here", error.detail)
    except (KeyError, ValueError):
        return CheckResult(
            check, State.WARNING, f"{url} does not send its time", "Check that an atoll service has that address."
        )
    if abs(offset_s) > OFFSET_MAX_S:
        detail = f"{url} is at least {abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} this machine"
        return CheckResult(
            check, State.WARNING, detail, f"One of the two is wrong. On that machine: {KEEP[0].lower()}{KEEP[1:]}"
        )
    return CheckResult(check, State.OK, f"no difference to {url}")


def offset(date: float, asked_at: float, answered_at: float) -> float:
    """Return by how many seconds the clock that wrote ``date`` is at least ahead; negative if behind, 0 if it may agree.

    The date was written between ``asked_at`` and ``answered_at`` on our clock. The other clock then showed between ``date``
    and DATE_AGE_MAX_S later.
    """
    if date > answered_at:
        return date - answered_at
    return min(0.0, date + DATE_AGE_MAX_S - asked_at)
