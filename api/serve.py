"""The service's process: ``python -m api.serve --home HOME --runs RUNS --port N --control package.module:factory``.

One process for each home (guarded by a lock), on a loopback address or with TLS, with its address in ``HOME/service.json``
and an admin token in ``HOME/token`` while it runs. The control port that runs the jobs is loaded by its dotted name and
called with the home folder. The process may be killed and restarted at any time; jobs do not notice.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import socket
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import uvicorn

from api.app import create_app
from api.auth.permissions import OWN_PACKAGES, refuse_unfit
from api.http.connections import HEAD_BYTES_MAX, Server, limits_of, raise_descriptor_limit
from api.installation import store_history
from api.installation.binding import Binding, refuse_password_in_view
from api.installation.home import DATABASE_VARIABLE, KINDS, Home, roots_of
from api.installation.service_restart import restart_of
from api.jobs.control import ControlPort
from api.jobs.dispatcher import JOBS_MAX
from api.jobs.overseer import RESTART_SILENT_AFTER_MIN
from api.storage.sessions import copy_with
from api.storage.store import Store
from orchestrator.errors import AtollError, ConfigurationError, Conflict, InfrastructureError
from orchestrator.runtime.groups import read_prices, unknown_prices
from orchestrator.specification.sections import PriceSection
from orchestrator.system import object_store, printable, succession, user_packages
from orchestrator.system.logbook import RepeatLimit, keep_output_short, write_printable
from orchestrator.system.marks import BY_UP, supervisor_of
from orchestrator.system.mirror import refuse_to_leave_logs
from orchestrator.system.ports import LOOPBACK
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import Retention
from orchestrator.system.succession import ServiceCopy


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m api.serve", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--certificate", type=Path, help="serve HTTPS with this certificate (PEM)")
    parser.add_argument("--key", type=Path, help="the certificate's key (PEM)")
    parser.add_argument("--insecure", action="store_true", help="allow HTTP beyond loopback")
    parser.add_argument("--allow", action="append", default=[], metavar="PACKAGE", help="allow jobs to name its code")
    parser.add_argument("--packages", action="append", default=[], metavar="FOLDER", help="folder with such packages")
    for kind, what in KINDS.items():
        parser.add_argument(f"--{kind}", action="append", default=[], metavar="ROOT", help=what)
    parser.add_argument(
        "--jobs-max", type=int, default=JOBS_MAX, help="most jobs that run at a time; others are queued"
    )
    parser.add_argument(
        "--restart-silent-after",
        type=float,
        default=RESTART_SILENT_AFTER_MIN,
        metavar="MINUTES",
        help="restart the synchroniser of a job that has not answered for this long; 0: never",
    )
    parser.add_argument("--retention-days", type=float, metavar="DAYS", help="remove jobs so long after their end")
    parser.add_argument("--retention-failed-days", type=float, metavar="DAYS", help="the same for failed jobs")
    parser.add_argument("--retention-bytes", type=int, metavar="N", help="remove the oldest ended jobs beyond so much")
    parser.add_argument("--prices", type=Path, metavar="FILE", help="what machines of node groups cost")
    parser.add_argument("--cordon-bad-nodes", action="store_true", help="cordon nodes that keep failing islands")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free one")
    parser.add_argument("--listener", type=int, metavar="FD", help="an inherited listening socket, instead of --port")
    parser.add_argument("--control", required=True, metavar="MODULE:FACTORY")
    parser.add_argument("--database", help="SQLAlchemy URL, or in ATOLL_DATABASE; default: SQLite in the home")
    parser.add_argument("--store", metavar="URL", help="for the logs of mirrored jobs and a copy of the database")
    parser.add_argument("--store-key", type=Path, metavar="FILE", help="the key to a store that another home has used")
    parser.add_argument(
        store_history.NEW_STORE,
        action="store_true",
        help="start with an empty database if the home's is lost or damaged",
    )
    options = parser.parse_args(arguments)
    os.umask(0o077)  # a job's tape, log and model are as private as the token
    logging.basicConfig(level=logging.INFO)
    write_printable("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(RepeatLimit())
    binding = Binding(options.host, options.certificate, options.key, options.insecure)
    try:
        binding.refuse_if_unfit()
        refuse_unfit(options.allow)
        os.environ.update(user_packages.variables(user_packages.resolved(options.packages)))
        refuse_password_in_view(options.database)
        listener = listen(binding, options.port) if options.listener is None else inherited(binding, options.listener)
        packages = (*OWN_PACKAGES, *options.allow)
        database = options.database or os.environ.get(DATABASE_VARIABLE)
        if options.new_store:
            store_history.begin_anew(Home(options.home), database)
        roots = roots_of(options.home, options.runs, options.checkpoints, options.data, database, options.key)
        retention = Retention(options.retention_days, options.retention_failed_days, options.retention_bytes)
        retention.refuse_senseless()
        if options.store is not None:
            Home(options.home).make()
            home, runs = options.home.resolve(), options.runs.resolve()
            refuse_to_leave_logs(runs, object_store.remembered(home), options.store)
            object_store.remember(home, runs, options.store)
        serve(
            options.home,
            options.runs,
            binding,
            listener,
            options.control,
            database,
            packages,
            options.jobs_max,
            roots,
            options.restart_silent_after,
            retention,
            options.store_key,
            options.prices,
            options.cordon_bad_nodes,
        )
    except AtollError as error:
        print(printable.lines(str(error)), file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError | Conflict) else 1
    except OSError as error:
        print(printable.lines(f"The service cannot start: {error}. Its home is {options.home}."), file=sys.stderr)
        return 1
    return 0


def serve(
    home: Path,
    runs: Path,
    binding: Binding,
    listener: socket.socket,
    control_name: str,
    database: str | None,
    packages: tuple[str, ...],
    jobs_max: int,
    roots: AllowedRoots,
    restart_silent_after_min: float,
    retention: Retention,
    store_key: Path | None = None,
    prices_file: Path | None = None,
    cordon_bad_nodes: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises Fenced if the service of another home takes over."""
    home, runs = home.resolve(), runs.resolve()
    place = Home(home)
    place.make()
    with place.locked():
        keep_output_short(place.log)
        copy = copy_of(place, runs, database, store_key)
        store_history.refuse_lost_store(place, database)
        control = load_control(control_name, home)
        control.begin(runs)
        prices = prices_of(prices_file, home, control)
        store = Store(
            database or f"sqlite:///{store_history.default_store(place)}",
            had_tables=store_history.had_store(place, database),
        )
        store_history.note_store(place, database)
        try:
            if copy is not None:
                if copy.is_new_home:
                    store.move_runs(runs)  # of a database on a server: its jobs may have been elsewhere
                copy_with(store.engine, copy.wait)
                copy.start()
            app = create_app(
                control,
                store,
                runs,
                packages=packages,
                loopback=binding.loopback,
                jobs_max=jobs_max,
                restart_service=restart_of(place),
                taken_down=place.taken_down,
                roots=roots,
                retention=retention,
                certificate=binding.certificate,
                restart_silent_after_min=restart_silent_after_min,
                prices=prices,
                cordon_bad_nodes=cordon_bad_nodes,
            )
            app.state.tokens.leave_first(place)
            place.write_address(binding.url(listener), runs, binding.certificate)
            server = Server(
                uvicorn.Config(
                    app,
                    log_config=None,
                    access_log=False,
                    timeout_graceful_shutdown=1,  # event streams end with their job, which may be hours away
                    proxy_headers=False,  # failures are counted by the peer's address, which headers could forge
                    server_header=False,
                    ws="none",
                    h11_max_incomplete_event_size=HEAD_BYTES_MAX,
                    ssl_certfile=binding.certificate,
                    ssl_keyfile=binding.key,
                ),
                limits_of(raise_descriptor_limit()),
            )
            server.run(sockets=[listener])
            if copy is not None and copy.fence is not None:
                raise copy.fence
        finally:
            place.forget_address()
            control.close()
            if copy is not None:
                copy.close()
            store.close()


def prices_of(file: Path | None, home: Path, control: ControlPort) -> dict[str, PriceSection]:
    """Return the prices in the file. Raises ConfigurationError for a group that the cluster of `atoll up` does not have.

    The groups of other clusters come and go with their machines, so an unknown one is only logged.
    """
    if file is None:
        return {}
    prices = read_prices(file)
    unknown = unknown_prices(file, prices, [group["name"] for group in control.node_groups()])
    if unknown and supervisor_of(home) == BY_UP:
        raise ConfigurationError(detail=unknown)
    if unknown:
        logging.getLogger(__name__).warning("%s", unknown)
    return prices


def copy_of(home: Home, runs: Path, database: str | None, store_key: Path | None) -> ServiceCopy | None:
    """Return the copy of the service in the home's store, which this process claims; None without a store.

    A new home gets the database and the token of the service before it.
    """
    url = object_store.remembered(home.path)
    if url is None:
        return None
    fleet = succession.opened(url, home.path, store_key, logging.getLogger(__name__).warning)

    def adapt(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE jobs SET run_dir = ? || job", (f"{runs}{os.sep}",))

    file = store_history.file_of(home, database)
    return ServiceCopy(fleet, file, lambda: os.kill(os.getpid(), signal.SIGTERM), adapt)


def inherited(binding: Binding, descriptor: int) -> socket.socket:
    """Return the inherited listening socket. Raises ConfigurationError if its address is not allowed by ``binding``."""
    listener = socket.socket(fileno=descriptor)
    replace(binding, host=listener.getsockname()[0]).refuse_if_unfit()
    return listener


def listen(binding: Binding, port: int) -> socket.socket:
    listener = binding.listen([port])
    if listener is None:
        detail = f"Port {port} of {binding.host} is in use by another program."
        raise InfrastructureError(detail=detail, remedy="Choose another --port.")
    return listener


def load_control(name: str, home: Path) -> ControlPort:
    """Return the control port from ``package.module:factory``, called with the home folder."""
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        detail = f"--control {name!r} cannot be loaded: {error}. Write package.module:factory."
        raise ConfigurationError(detail=detail) from error
    control: ControlPort = factory(home)
    return control


if __name__ == "__main__":
    sys.exit(main())
