"""Start and stop an installation: the embedded cluster, and the service in front of it.

Starts the cluster before the service, and stops them in reverse. Idempotent, also when two commands run at once, and a
failed start leaves no process behind. Both are separate processes, so that the command line stays light and either may be
killed and started again.

    up      python -m orchestrator.runtime.embedded up --home HOME --groups FILE
            python -m api.serve --home HOME --runs RUNS --listener FD --control …     (detached)
    down    SIGTERM to the service, then `… embedded down --home HOME`
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from api.auth.permissions import refuse_unfit
from api.installation import store_history
from api.installation.binding import Binding, bound_listener
from api.installation.home import (
    CONFIGS,
    DATABASE_VARIABLE,
    Address,
    Home,
    missing_roots,
    require_runs,
    roots_of,
    start_detached,
    tail,
    working_folder,
)
from orchestrator.errors import ConfigurationError, Conflict, InfrastructureError, StoreUnavailable
from orchestrator.system import home_files, program_cache, python_process, signals, succession, user_packages
from orchestrator.system.marks import BY_UP, marked_pids, supervisor_of
from orchestrator.system.object_store import open_store, remembered
from orchestrator.system.python_process import built, refuse_unset
from orchestrator.system.run_folder import Retention
from orchestrator.system.succession import FleetStore

GROUPS = CONFIGS / "groups.yaml"
"""The node groups of a home that has had no others."""
CLUSTER_MODULE = "orchestrator.runtime.embedded"
RAY_CONTROL = "orchestrator.runtime.control_port:connect"
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0
CLUSTER_STOP_TIMEOUT_S = 60.0
PATIENCE_S = 10.0
HEAD_TIMEOUT_S = 1.0
MISTAKEN = 2
"""The exit code of a service whose options are wrong. The last line of its log says what is."""

Say = Callable[[str], None]
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Installation:
    """The options of `atoll up`. With another control port than Ray's, no cluster is started."""

    home: Home
    runs: Path
    groups: Path = GROUPS
    port: int | None = None
    control: str = RAY_CONTROL
    binding: Binding = field(default_factory=Binding)
    packages: tuple[str, ...] = ()
    """The packages whose code jobs may name, besides ``learners``."""
    package_folders: tuple[str, ...] = ()
    """Folders in which packages are found, besides the installed ones."""
    database: str | None = None
    checkpoints: tuple[str, ...] = ()
    """Roots below which jobs may read and write checkpoints; empty for the default. ``data`` likewise, for reading."""
    data: tuple[str, ...] = ()
    jobs_max: int | None = None
    """How many jobs may run at a time; None for the default."""
    new_store: bool = False
    """Start with an empty database if the home's is lost or damaged."""
    partition_tolerance_s: float | None = None
    """How long a region may be cut off without Ray ending its islands; None for the default."""
    retention: Retention = field(default_factory=Retention)
    """What the service removes of ended jobs."""
    passed: tuple[str, ...] = ()
    """Environment variables that its processes get besides those that they need."""
    store: str | None = None
    """Where the durable logs of mirrored jobs are kept; None: where they were before, if anywhere."""
    store_key: Path | None = None
    """A file with the key to a store that another home has used."""
    restart_silent_after_min: float | None = None
    """After how many silent minutes a job's synchroniser is restarted; 0: never; None for the default."""
    prices: Path | None = None
    """A file with what the machines of node groups cost."""
    cordon_bad_nodes: bool = False
    """Cordon nodes that keep failing islands."""

    @property
    def with_cluster(self) -> bool:
        return self.control == RAY_CONTROL


def up(wanted: Installation, say: Say) -> Address:
    """Start the cluster and the service as far as they do not run, and return the address once both answer.

    ``say`` gets the progress. Raises Conflict while another process starts or stops something in this home. A signal is an
    exception of ``orchestrator.system.signals``; what was started by then is stopped.
    """
    wanted = replace(wanted, package_folders=user_packages.resolved(wanted.package_folders))
    refuse_unfit_options(wanted, say)
    if missing := missing_roots(wanted.data):
        raise ConfigurationError(
            detail=f"--data {missing[0]} does not exist. Create the folder, or give the one that has the text files."
        )
    if wanted.with_cluster and wanted.groups != GROUPS:
        _refuse_unfit_groups(wanted.groups)
    with signals.as_exceptions(), wanted.home.locked_for_change("up"):
        try:
            return start(wanted, say)
        except (KeyboardInterrupt, SystemExit):
            say("interrupted; everything that was started is stopped")
            raise


def down(home: Home, say: Say, *, keep_jobs: bool = False) -> None:
    """Stop all processes of this installation. Idempotent. Raises Conflict as ``up`` does.

    The jobs that run continue with the next ``up`` if ``keep_jobs``.
    """
    if not home.path.is_dir():
        say(f"nothing is running in {home.path}")
        return
    with home.locked_for_change("down"):
        end(home, say, keep_jobs=keep_jobs)


def start(wanted: Installation, say: Say) -> Address:
    """Do what ``up`` does. Requires the home to be locked."""
    home = wanted.home
    if wanted.with_cluster:
        refuse_other_supervisor(home, "up")
    if home.discovered_address() is None and home.running():
        _await(home.discovered_address, PATIENCE_S)  # it may have been started by hand a moment ago
    port = home.port_before()
    if home.running():
        # It may have been started by hand: give it time before treating it as stuck, unless its cluster has no head.
        patience_s = PATIENCE_S if not wanted.with_cluster or _head_listens(home) else 0.0
        if address := _await(lambda: _answering(home, timeout_s=PATIENCE_S), patience_s):
            from api.installation.service_restart import restore_token  # late: every command imports this module

            if wanted.with_cluster:
                # a node of it may have died
                _cluster("up", home, *groups_of(wanted), *passed_of(wanted), *folders_of(wanted), passed=wanted.passed)
            if restore_token(home, say):
                address = _await(lambda: _answering(home, timeout_s=PATIENCE_S), START_TIMEOUT_S) or address
            if changed := ", ".join(_changed_options(wanted, address.pid)):
                say(
                    f"{changed}: the running service keeps its options; to change them, run `atoll down --keep-jobs` first"
                )
            say(f"already running at {address.url} (home {home.path})")
            return address
        say("the service runs, but its cluster does not answer; restarting both")
        _end_service(home, say)
    home.require_room()
    require_runs(wanted.runs)
    bound_listener(wanted.binding, wanted.port, port).close()  # what the service would refuse only beside a cluster
    _look_for_store(wanted, say)
    _try_database(wanted)
    fleet = _fleet_of(wanted, say) if wanted.with_cluster else None
    if wanted.with_cluster and (problem := program_cache.problem(built(os.environ, wanted.passed))):
        say(f"warning: {problem}")
    had_cluster = has_cluster(home)
    try:
        if wanted.with_cluster:
            say(f"starting the embedded cluster ({wanted.groups})")
            options = [*groups_of(wanted), *tolerance_of(wanted), *passed_of(wanted), *folders_of(wanted)]
            _cluster("up", home, *options, passed=wanted.passed)
        if fleet is not None:
            succession.announce(fleet, "", "")
        address = _start_service(wanted, say, port)
        say(f"running at {address.url} (home {home.path}, runs {address.runs})")
    except BaseException:
        with signals.ignored():
            _end_service(home, say)
            if wanted.with_cluster and not had_cluster:
                _cluster("down", home)
        raise
    return address


def end(home: Home, say: Say, *, keep_jobs: bool = False) -> None:
    """Do what ``down`` does. Requires the home to be locked.

    The next service continues the jobs that ran if ``keep_jobs``, and otherwise lists them as failed.
    """
    refuse_other_supervisor(home, "down")
    had_cluster, lived = has_cluster(home), _head_listens(home)
    ran = _end_service(home, say)
    ended_otherwise = not lived and (had_cluster or not ran)  # as by a loss of power: the jobs resume
    if not (keep_jobs or ended_otherwise):
        try:
            home.taken_down.touch()
        except OSError as error:
            say(f"cannot write {home.taken_down} ({error.strerror}): the running jobs will resume with the next `up`")
    if had_cluster:
        say("stopping the embedded cluster")
        _cluster("down", home)
        ran = True
    say("stopped" if ran else f"nothing is running in {home.path}")


# ── the service ───────────────────────────────────────────────────────────────────────────────────────────────────


def _look_for_store(wanted: Installation, say: Say) -> None:
    """Raise InfrastructureError if the home's database is lost, before anything is started; or move it aside if asked."""
    if wanted.new_store:
        aside = store_history.begin_anew(wanted.home, wanted.database)
        say(f"starting with an empty database; the old one is {aside}" if aside else "there is no damaged database")
    store_history.refuse_lost_store(wanted.home, wanted.database, is_copied=store_of(wanted) is not None)


def store_of(wanted: Installation) -> str | None:
    """Return the URL of the store: the given one, or that which the home remembers."""
    return wanted.store or remembered(wanted.home.path)


def _fleet_of(wanted: Installation, say: Say) -> FleetStore | None:
    """Return the fleet's store, after a new home has got what the head before left there; None without a store."""
    url = store_of(wanted)
    if url is None:
        return None
    wanted.home.make()
    fleet = succession.opened(url, wanted.home.path, wanted.store_key, say)
    if (before := succession.prepare_to_lead(fleet)) is not None:
        say(f"taking the place of head {before.number} of {url}")
    return fleet


def _try_database(wanted: Installation) -> None:
    """Raise AtollError if the given database cannot be used, before anything is started."""
    if wanted.database:
        from api.storage.store import upgrade, url_of  # late: few commands need a database

        upgrade(url_of(wanted.database), had_tables=store_history.had_store(wanted.home, wanted.database))


def _start_service(wanted: Installation, say: Say, before: int | None) -> Address:
    home = wanted.home
    home.forget_address()
    command = python_process.module("api.serve", "--home", str(home.path), "--runs", str(wanted.runs.resolve()))
    with bound_listener(wanted.binding, wanted.port, before) as listener:
        command += ["--listener", str(listener.fileno()), "--control", wanted.control, *options_of(wanted)]
        say(f"starting the service on port {listener.getsockname()[1]} (log {home.log})")
        log_start = home.log.stat().st_size if home.log.exists() else 0
        database = {DATABASE_VARIABLE: wanted.database} if wanted.database else {}  # all users can see argv
        environment = built(os.environ, wanted.passed) | database
        # until it holds the home, only this process can end it
        with _begun(
            lambda: start_detached(command, home, environment=environment, listener=listener), STOP_TIMEOUT_S
        ) as process:
            listener.close()
            return _answer_of(process, home, log_start)


def _answer_of(process: subprocess.Popen[bytes], home: Home, log_start: int) -> Address:
    """Return the address of the service that runs in this process, once it answers. Raises InfrastructureError.

    The service's log was ``log_start`` bytes long before it.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() == MISTAKEN:
            raise ConfigurationError(detail=tail(home.log, count=1, start=log_start).strip())
        if process.poll() is not None:
            detail = (
                f"The service exited while starting (exit code {process.returncode}). End of its log:\n"
                f"{tail(home.log, start=log_start)}"
            )
            raise InfrastructureError(detail=detail, remedy=f"\nThe whole log is {home.log}.")
        address = home.address()
        if address and address.pid == process.pid and (ready := _answering(home, timeout_s=START_TIMEOUT_S)):
            return ready
        time.sleep(0.05)
    words = tail(home.log, start=log_start)
    detail = f"The service did not answer within {START_TIMEOUT_S:.0f} s. End of its log:\n{words}"
    raise InfrastructureError(detail=detail, remedy=f"\nThe whole log is {home.log}.")


@contextmanager
def _begun(begin: Callable[[], subprocess.Popen[bytes]], timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process that ``begin`` starts. An exception in the block ends it: SIGTERM, then SIGKILL after this time."""
    process = None
    try:
        with signals.held():
            process = begin()
        yield process
    except BaseException:
        if process is not None:
            with signals.ignored():
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout_s)
                process.kill()
                process.wait()
        raise


def _end_service(home: Home, say: Say) -> bool:
    """End the service process and remove its address. Return True if there was one."""
    if not home.running():
        home.forget_address()
        return False
    address = _await(lambda: _of_living(home), timeout_s=STOP_TIMEOUT_S)  # it may be starting right now
    if address is None:
        if not home.running():
            return False
        raise InfrastructureError(
            detail=f"A process holds {home.path}/service.lock, but no visible process serves this home.",
            remedy="It may belong to another user or container. Find it with `fuser` on that file, and try again.",
        )
    say(f"stopping the service (pid {address.pid})")
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(address.pid, number)
        except ProcessLookupError:
            break
        if _await(lambda: not home.running() and not _lives(address.pid), timeout_s=STOP_TIMEOUT_S):
            break
    home.forget_address()
    return True


def _lives(pid: int) -> bool:
    """Return whether the process lives. While its last threads end it no longer holds the home, but still counts."""
    import psutil  # late: every command imports this module

    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _of_living(home: Home) -> Address | None:
    """Return the address of a living service, not one that a killed service left behind."""
    address = home.discovered_address()
    return address if address is not None and _lives(address.pid) else None


def _answering(home: Home, timeout_s: float) -> Address | None:
    """Return the address of the service if it answers and its cluster answers it, else None.

    Raises StoreUnavailable if it answers that its database is unavailable.
    """
    from api.client import Client  # late: `atoll --help` needs no HTTP

    address = home.address()
    if address is None:
        return None
    with Client(address.url, timeout_s=timeout_s, certificate=address.certificate) as client:
        try:
            client.ready()
        except StoreUnavailable:
            raise  # another process would find the same database
        except InfrastructureError:
            return None
    return address


def options_of(wanted: Installation) -> list[str]:
    """Return the service's command-line options."""
    binding = wanted.binding
    options = ["--host", binding.host]
    if binding.certificate and binding.key:
        options += ["--certificate", str(binding.certificate.resolve()), "--key", str(binding.key.resolve())]
    if binding.insecure:
        options += ["--insecure"]
    for package in wanted.packages:
        options += ["--allow", package]
    options += folders_of(wanted)
    for kind, roots in (("--checkpoints", wanted.checkpoints), ("--data", wanted.data)):
        for root in roots:
            options += [kind, root]
    if wanted.store is not None:
        options += ["--store", wanted.store]
    if wanted.store_key is not None:
        options += ["--store-key", str(wanted.store_key.absolute())]
    if wanted.jobs_max is not None:
        options += ["--jobs-max", str(wanted.jobs_max)]
    if wanted.restart_silent_after_min is not None:
        options += ["--restart-silent-after", str(wanted.restart_silent_after_min)]
    if wanted.prices is not None:
        options += ["--prices", str(wanted.prices.absolute())]
    if wanted.cordon_bad_nodes:
        options += ["--cordon-bad-nodes"]
    limits = {
        "--retention-days": wanted.retention.days,
        "--retention-failed-days": wanted.retention.failed_days,
        "--retention-bytes": wanted.retention.bytes,
    }
    for option, limit in limits.items():
        options += [option, str(limit)] if limit is not None else []
    return options


def _changed_options(wanted: Installation, pid: int) -> list[str]:
    """Return the options that differ from the defaults and from those of the service in this process."""
    import psutil  # late: every command imports this module

    with suppress(psutil.Error):
        unchanged = {
            *pairwise(psutil.Process(pid).cmdline()),
            *pairwise(options_of(Installation(wanted.home, wanted.runs))),
        }
        return [
            " ".join(pair)
            for pair in pairwise(options_of(wanted))
            if pair[0].startswith("--") and pair not in unchanged
        ]
    return []


def command_of(wanted: Installation, say: Say) -> list[str]:
    """Return the service's command line, after the checks of ``up``. Raises AtollError before anything is started."""
    refuse_unfit_options(wanted, say)
    home = wanted.home
    home.require_room()
    if not wanted.new_store:
        store_history.refuse_lost_store(home, wanted.database, is_copied=store_of(wanted) is not None)
    if home.running():
        raise Conflict(
            detail=f"A service for {home.path} is already running.", remedy="Stop it first, or choose another home."
        )
    bound_listener(wanted.binding, wanted.port, None).close()
    if not wanted.new_store:
        _try_database(wanted)
    options = [*options_of(wanted), *([store_history.NEW_STORE] if wanted.new_store else [])]
    options += ["--control", wanted.control, "--port", str(wanted.port)]
    return python_process.module("api.serve", "--home", str(home.path), "--runs", str(wanted.runs.resolve()), *options)


def refuse_unfit_options(wanted: Installation, say: Say) -> None:
    """Raise ConfigurationError for options of the service that cannot be used. Warn of packages that are not found."""
    wanted.binding.refuse_if_unfit()
    if wanted.binding.certificate is not None:
        from orchestrator.certificates import folders  # late: few commands need cryptography

        # not in the service itself: one that is brought back takes a renewed certificate as soon as it is there
        folders.refuse_expired(wanted.binding.certificate)
    if wanted.store is not None:
        _refuse_store_beside(open_store(wanted.store).url, wanted)
    if wanted.runs.resolve() == wanted.home.path:
        raise ConfigurationError(
            detail=f"--runs {wanted.runs} is the home folder, the secrets of which jobs must not read. Give another folder."
        )
    refuse_unfit(wanted.packages)
    if wanted.prices is not None:
        from orchestrator.runtime.groups import read_prices  # late: few commands need pydantic

        read_prices(wanted.prices)
    if not wanted.with_cluster:
        _refuse_unfit_control(wanted)
    roots_of(wanted.home.path, wanted.runs, wanted.checkpoints, wanted.data)
    refuse_unset(os.environ, wanted.passed)
    for package in wanted.packages:
        if not user_packages.is_there(package, wanted.package_folders):
            say(f"--allow {package}: package not found, jobs that name it will fail. {user_packages.REMEDY}")
            if user_packages.is_in(package, "."):
                say(f"The working folder contains {package}. To use that, add --packages .")


def _refuse_unfit_groups(path: Path) -> None:
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise ConfigurationError(detail=f"The node groups file {path} {what}. Give one with --groups.")
    from orchestrator.runtime.groups import read_groups  # late: few commands need pydantic

    read_groups(path)


def _refuse_unfit_control(wanted: Installation) -> None:
    """Raise ConfigurationError for a text of another form, or a package that is not there. The service tries the rest."""
    module, _, factory = wanted.control.partition(":")
    is_named = factory.isidentifier() and all(part.isidentifier() for part in module.split("."))
    if not is_named or not user_packages.is_there(module, wanted.package_folders):
        what = "is in no package that is installed" if is_named else "is not of the form MODULE:FACTORY"
        raise ConfigurationError(
            detail=f"--control {wanted.control!r} {what}. Give one such as {RAY_CONTROL}, or leave the option out."
        )


def _refuse_store_beside(url: str, wanted: Installation) -> None:
    """Raise ConfigurationError for a store in home or runs: it would be lost with the disk that it is to replace."""
    for option, folder in (("--home", wanted.home.path), ("--runs", wanted.runs.resolve())):
        if Path(url).is_absolute() and Path(url).resolve().is_relative_to(folder):
            raise ConfigurationError(
                detail=f"--store {url} is in {option} {folder}, and would be lost with it. Give a folder of another disk or "
                "machine, or a URL with s3://, gs:// or az://."
            )


def groups_of(wanted: Installation) -> list[str]:
    """Return the cluster's option for its node groups; none for those of before, or the default ones."""
    return [] if wanted.groups == GROUPS else ["--groups", str(wanted.groups)]


def tolerance_of(wanted: Installation) -> list[str]:
    """Return the cluster's option for its partition tolerance."""
    tolerance = wanted.partition_tolerance_s
    return [] if tolerance is None else ["--partition-tolerance-s", str(tolerance)]


def folders_of(wanted: Installation) -> list[str]:
    """Return the options of service and cluster for the folders of packages."""
    return [text for folder in wanted.package_folders for text in ("--packages", folder)]


def passed_of(wanted: Installation) -> list[str]:
    """Return the cluster's options for the variables that it gets from the caller's environment."""
    return [text for name in wanted.passed for text in ("--pass-environment", name)]


# ── the cluster ───────────────────────────────────────────────────────────────────────────────────────────────────


def _cluster(verb: str, home: Home, *options: str, passed: tuple[str, ...] = ()) -> None:
    """Start or stop the embedded cluster, which prints its own progress."""
    command = python_process.module(CLUSTER_MODULE, verb, "--home", str(home.path), *options)
    environment = built(os.environ, passed)
    with _begun(
        lambda: subprocess.Popen(
            command,
            cwd=working_folder(home),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            umask=0o077,
            start_new_session=True,  # this process passes the terminal's signals on
        ),
        CLUSTER_STOP_TIMEOUT_S,  # it ends its own children: only it knows those without a mark
    ) as process:
        code = process.wait()
    if code == 2:
        raise ConfigurationError(detail="The embedded cluster cannot start with these options; see the message above.")
    if code:
        detail = f"The embedded cluster failed to {'start' if verb == 'up' else 'stop'} (exit code {code})."
        raise InfrastructureError(detail=detail, remedy="See its messages above; `atoll down` cleans up the rest.")


def refuse_other_supervisor(home: Home, command: str) -> None:
    """Raise ConfigurationError if `atoll up` does not run the cluster of this home."""
    if supervisor_of(home.path) == BY_UP:
        return
    remedy = (
        "End them with Ctrl-C, or with `systemctl stop atoll-service atoll-head`."
        if command == "down"
        else "Start these, or choose another home with --home."
    )
    raise ConfigurationError(
        detail=f"The home {home.path} belongs to `atoll head` or `atoll serve`, which `atoll {command}` does not "
        f"{'stop' if command == 'down' else 'start'}. {remedy}"
    )


def has_cluster(home: Home) -> bool:
    """Return whether this home has a cluster, or leftovers of one, by its file and the marks of processes."""
    return os.path.lexists(home.path / "cluster.json") or bool(marked_pids(home.path))


def _head_listens(home: Home) -> bool:
    """Return whether the head accepts connections; without its address, whether any process of the cluster lives."""
    try:
        host, _, port = json.loads(home_files.read(home.path / "cluster.json"))["address"].rpartition(":")
        socket.create_connection((host, int(port)), timeout=HEAD_TIMEOUT_S).close()
    except OSError:
        return False if (home.path / "cluster.json").is_file() else bool(marked_pids(home.path))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return bool(marked_pids(home.path))
    return True


def _await(probe: Callable[[], Answer], timeout_s: float) -> Answer:
    """The answer of ``probe`` once it is true, or at the end of the time."""
    deadline = time.monotonic() + timeout_s
    while not (answer := probe()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer
