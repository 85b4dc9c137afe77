"""The checks of `atoll doctor`: whether this machine is fit to run atoll, one result with its remedy for each.

Responsible for looking and for the remedies. Nothing is changed, and nothing is started but short-lived Pythons: Ray and
JAX are imported there, all at once, because this process never does. A check that cannot be made has a result, too.
"""

from __future__ import annotations

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
from pathlib import Path

from api.installation.clock import CheckResult, State, own_clock, service_clock, synchronised
from api.installation.home import DATABASE_VARIABLE, Home
from api.installation.store_history import refuse_lost_store
from api.installation.up import PORT_COUNT, PORT_FIRST
from orchestrator.errors import AtollError, ConfigurationError, InfrastructureError
from orchestrator.specification.config import read_document
from orchestrator.specification.memory_budget import (
    EVALUATOR_BYTES,
    island_bytes_per_parameter,
    shard_bytes_per_parameter,
)
from orchestrator.system import home_files, object_store, program_cache, python_process, socket_room
from orchestrator.system.python_process import built

LOCK = Path(__file__).resolve().parents[2] / "requirements.lock"
PROBE_TIMEOUT_S = 60.0
PYTHON_MIN = (3, 11)
GIB = 1 << 30
DISK_WRONG_BYTES, DISK_WARNING_BYTES = 1 * GIB, 5 * GIB
SHARED_MEMORY_BYTES = 1 * GIB
"""Ray keeps its object stores there; with less it falls back to files, which is slow."""
ISLANDS, FRAGMENTS = 4, 8
"""Of the job that this machine's memory is told for."""
FOLDERS = "--runs, --home, and for Ray's the variable TMPDIR"
PROBES = {
    "ray": "import ray; print(ray.__version__)",
    "memory": "from ray._private.utils import estimate_available_memory; print(int(estimate_available_memory()))",
    "jax": "import jax; print(', '.join(f'{d.platform}:{d.id}' for d in jax.devices()))",
}


def examine(home: Home, runs: Path, groups: Path, url: str | None = None) -> list[CheckResult]:
    """Every check, in the order in which one would mend things. ``url``: a service elsewhere, for its time."""
    probes = {name: _python(python_process.code(code)) for name, code in PROBES.items()}
    probes["processes"] = _python(python_process.module("orchestrator.runtime.orphan_scan", "--home", str(home.path)))
    local: list[Callable[[], CheckResult]] = [
        _interpreter,
        _versions,
        lambda: _ports(home),
        lambda: _disk(runs, home.path, *_cluster_folder(home)),
        lambda: own_clock(synchronised(), LOCK, time.time()),
        lambda: _service_clock(home, url),
        lambda: _home(home),
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
    """The installed versions against the lock file, where this is a checkout that has one."""
    if not LOCK.is_file():
        return CheckResult("versions", State.OK, "no lock file to compare with")
    different = [difference for difference in map(_difference, locked(LOCK.read_text()).items()) if difference]
    if different:
        shown = ", ".join(different[:5]) + (f" and {len(different) - 5} more" if len(different) > 5 else "")
        return CheckResult("versions", State.WARNING, shown, "Install what the lock says: make install.")
    return CheckResult("versions", State.OK, "as requirements.lock says")


def locked(text: str) -> dict[str, str]:
    """Names and versions of a lock file."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", text, re.MULTILINE))


def _difference(pinned: tuple[str, str]) -> str | None:
    """Development tools need not be there; what is there has its version."""
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
    """The last line of what it printed, and, should it have failed, of why."""
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
            name, State.WRONG, failed, f"Install it anew (make install), and try `python -c 'import {name}'`."
        )
    return CheckResult(name, State.OK, output)


# ── the machine ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _ports(home: Home) -> CheckResult:
    address = home.address()
    if address is not None and home.running():
        return CheckResult("ports", State.OK, f"the service of this home listens at {address.url}")
    free = next((port for port in range(PORT_FIRST, PORT_FIRST + PORT_COUNT) if _free(port)), None)
    if free is None:
        taken = f"{PORT_FIRST} to {PORT_FIRST + PORT_COUNT - 1} are all taken"
        return CheckResult("ports", State.WRONG, taken, "Give `atoll up` another with --port.")
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
    """One of the disks under these folders that cannot be written, else the fullest."""
    places = [next(at for at in (path.absolute(), *path.absolute().parents) if at.is_dir()) for path in wanted]
    for place in places:
        try:
            with tempfile.TemporaryFile(dir=place):  # a disk that failed is read-only, whatever room it has
                pass
        except OSError as error:
            detail = f"{place} cannot be written: {error.strerror}"
            return CheckResult("disk", State.WRONG, detail, f"Mend that, or give `atoll up` other folders: {FOLDERS}.")
    free, place = min((shutil.disk_usage(place).free, place) for place in places)
    state = State.WRONG if free < DISK_WRONG_BYTES else State.WARNING if free < DISK_WARNING_BYTES else State.OK
    remedy = "" if state is State.OK else f"Make room, or give `atoll up` other folders: {FOLDERS}."
    return CheckResult("disk", state, f"{free / GIB:.1f} GiB free in {place}", remedy)


def _cluster_folder(home: Home) -> list[Path]:
    """Where Ray keeps its logs and sockets, if a cluster is up: without room there no process of a job begins."""
    try:
        return [Path(json.loads(home_files.read(home.path / "cluster.json"))["temp_dir"])]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _service_clock(home: Home, url: str | None) -> CheckResult:
    """Against the service at ``url``, or else that of the home, which may write its answers in a container."""
    address = home.address()
    if address is not None and url in (None, address.url) and home.running():
        return service_clock(address.url, address.certificate)
    if url is not None:
        return service_clock(url, None)
    return CheckResult("service's clock", State.OK, "no service to compare with (--url names one)")


def _home(home: Home) -> CheckResult:
    problems = list(_home_problems(home.path))
    if problems:
        details, remedies = ("; ".join(parts) for parts in zip(*problems, strict=True))
        return CheckResult("home", State.WRONG, details, remedies)
    return CheckResult("home", State.OK, f"{home.path}{'' if home.path.is_dir() else ' (made by `atoll up`)'}")


def _home_problems(path: Path) -> Iterator[tuple[str, str]]:
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield f"{place} cannot be written", f"chown it, or choose another home with --home: {place}"
    elif place == path and path.stat().st_mode & stat.S_IWOTH:
        yield f"{path} may be written by everybody", f"chmod o-w {path}"
    try:
        refuse_lost_store(Home(path), os.environ.get(DATABASE_VARIABLE))
    except InfrastructureError as error:
        yield error.detail, error.remedy
    token = path / "token"
    if token.is_file() and token.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield f"{token} may be read by others", f"chmod 600 {token}, and revoke the token: others may have it"


def compiled_programs(environment: Mapping[str, str]) -> CheckResult:
    """Whether islands with this environment keep their compiled programs."""
    if problem := program_cache.problem(environment):
        return CheckResult("compiled programs", State.WARNING, problem.detail, problem.remedy)
    return CheckResult("compiled programs", State.OK, "islands find them again when they start anew")


def temporary_files() -> CheckResult:
    """Whether Ray's files, and the paths of its sockets, have a place."""
    try:
        room = socket_room.for_cluster()
    except ConfigurationError as error:
        return CheckResult("temporary files", State.WRONG, error.detail, "Set TMPDIR to another folder.")
    if room.note:
        return CheckResult("temporary files", State.WARNING, room.note, "Fine if that disk has room; or set TMPDIR.")
    return CheckResult("temporary files", State.OK, f"in {room.folder}")


def shared_memory(place: Path) -> CheckResult:
    if not place.is_dir():
        return CheckResult("shared memory", State.OK, f"there is no {place} on this system")
    if note := object_store.note(place):
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
        remedy = "Give a groups file as deploy/configs/groups.yaml is."
        return CheckResult("cores", State.WRONG, f"{groups} is no file of node groups: {error}", remedy)
    detail = f"{cores} for {nodes} nodes of {groups.name}"
    if cores < nodes:
        remedy = "Fine for a demo: islands share them, and steps take longer. For speed use fewer groups or more cores."
        return CheckResult("cores", State.WARNING, detail, remedy)
    return CheckResult("cores", State.OK, detail)


def memory(available: str, failed: str) -> CheckResult:
    """The memory that a node of this machine would offer. ``specification.memory_budget`` refuses jobs by it."""
    if not failed and not available.isdecimal():
        failed = f"the answer is no number: {available}"
    if failed:
        return CheckResult("memory", State.WARNING, f"could not be looked at: {failed}", "See what is wrong with ray.")
    free = int(available)
    shard = shard_bytes_per_parameter(ISLANDS, FRAGMENTS, "int4", "int4") + EVALUATOR_BYTES
    island = island_bytes_per_parameter(on_cpu=True, saves=False)
    largest = free / (shard + ISLANDS * island)
    return CheckResult(
        "memory",
        State.OK,
        f"{free / GIB:.1f} GiB free, for {ISLANDS} islands on CPU and the head with a model of {largest / 1e6:,.0f}M "
        f"parameters ({island:.0f} bytes a parameter each, and {shard:.0f})",
    )


def _processes(process: subprocess.Popen[str]) -> CheckResult:
    output, failed = _answer(process)
    if failed:
        return CheckResult("processes", State.WARNING, f"could not be looked at: {failed}", "Look at them with ps.")
    census = json.loads(output)
    if pids := census["orphaned"]:
        detail = f"{len(pids)} belong to a cluster whose files are gone"
        return CheckResult(
            "processes",
            State.WRONG,
            detail,
            f"`atoll down` does not find them any more: kill {' '.join(map(str, pids))}",
        )
    if census["damage"]:
        detail = f"{len(census['own'])} of this home, whose cluster.json is damaged"
        return CheckResult("processes", State.WRONG, detail, "`atoll up` writes it again; `atoll down` ends them.")
    if census["answers"] is False:
        return CheckResult("processes", State.WRONG, "this home's cluster does not answer", "Start it again: atoll up.")
    return CheckResult(
        "processes", State.OK, f"{len(census['own'])} of this home, {len(census['elsewhere'])} of other homes"
    )
