"""The service's process: ``python -m api.serve --home HOME --runs RUNS --port N --control package.module:factory``.

Responsible for the process: one per home (a lock says so), on a loopback address, with its address in
``HOME/service.json`` while it runs. It refuses to know what runs the jobs: the control port is loaded by its dotted name
and called with the home folder. It may be killed and started again at any time; jobs do not notice.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import socket
import sys
from pathlib import Path

import uvicorn

from api.app import create_app
from api.control import ControlPort
from api.guard import is_loopback
from api.home import Home
from api.store import Store
from orchestrator.errors import AtollError, ConfigurationError, Conflict, InfrastructureError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m api.serve", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free one")
    parser.add_argument("--listener", type=int, metavar="FD", help="an inherited listening socket, instead of --port")
    parser.add_argument("--control", required=True, metavar="MODULE:FACTORY")
    parser.add_argument("--database", default=None, help="SQLAlchemy URL; default: SQLite at HOME/service.sqlite")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        listener = listen(options.host, options.port) if options.listener is None else inherited(options.listener)
        serve(options.home, options.runs, listener, options.control, options.database)
    except AtollError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError | Conflict) else 1
    return 0


def serve(home: Path, runs: Path, listener: socket.socket, control_name: str, database: str | None) -> None:
    """Serve until told to stop by SIGTERM or SIGINT."""
    home, runs = home.resolve(), runs.resolve()
    home.mkdir(parents=True, exist_ok=True)
    place = Home(home)
    with place.locked():
        control = load_control(control_name, home)
        store = Store(database or f"sqlite:///{home / 'service.sqlite'}")
        try:
            server = uvicorn.Server(uvicorn.Config(create_app(control, store, runs), log_config=None, access_log=False))
            place.write_address(url_of(listener), runs)
            server.run(sockets=[listener])
        finally:
            place.forget_address()
            control.close()
            store.close()


def inherited(descriptor: int) -> socket.socket:
    """The listening socket that whoever started us made. Raises ConfigurationError if it is open to the network."""
    listener = socket.socket(fileno=descriptor)
    refuse_network(listener.getsockname()[0])
    return listener


def refuse_network(host: str) -> None:
    if not is_loopback(host):
        raise ConfigurationError(
            detail=f"--host {host} is not a loopback address. The service has no passwords yet and would let anyone on "
            "the network run jobs; use 127.0.0.1, and a tunnel (ssh -L) from elsewhere."
        )


def listen(host: str, port: int) -> socket.socket:
    refuse_network(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        detail = f"Port {port} of {host} cannot be listened on: {error.strerror}."
        raise InfrastructureError(detail=detail, remedy="Choose another --port.") from error
    return listener


def load_control(name: str, home: Path) -> ControlPort:
    """The control port made by ``package.module:factory``, which is called with the home folder."""
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        detail = f"--control {name!r} cannot be loaded: {error}. It must be package.module:factory."
        raise ConfigurationError(detail=detail) from error
    control: ControlPort = factory(home)
    return control


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
