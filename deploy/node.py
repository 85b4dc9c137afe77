"""The entry point of a container of deploy/compose.yaml: ``python deploy/node.py head | island … | service | alive``.

    head      the head, as `atoll head` runs one
    island    a Ray node of one node group
    service   the service, as `atoll serve` runs it, with a Ray node of its own
    alive     for health checks: whether a Ray node runs in this container

These call what the commands call (``orchestrator.runtime.head``). What is special here: the secret is in a folder that all
containers mount, ``STATE/cluster``; the head's own records are in ``STATE/head``, which only its container mounts; and all
of the environment goes to the processes, because a container's environment is given on purpose.

Ray's processes talk by TLS: with a certificate that was given in ``STATE/certificates``, as to pods of Kubernetes; else
with one that the container issues itself, at every start, for the addresses that it has then. For that the head makes an
authority beside the secret. Whoever can read the secret can run code in every container, so the authority's key gives
nobody more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from orchestrator.certificates import folders
from orchestrator.errors import AtollError
from orchestrator.runtime import join, ray_command
from orchestrator.runtime.clusterfile import HEAD_STORAGE, secret_in, state_of
from orchestrator.runtime.settings import (
    GROUP_LABEL,
    PARTITION_TOLERANCE_S,
    REGION_LABEL,
    TOLERANCE_VARIABLE,
    ray_environment,
)
from orchestrator.system import python_process, user_packages
from orchestrator.system.ports import is_loopback

PROGRAM = "orchestrator.runtime.head"
RAY = python_process.module(ray_command.MODULE, "start", "--disable-usage-stats")
STATE, HEAD = Path("/var/lib/atoll"), "head:6379"
OWN = Path("/tmp/certificates")
BOOT = Path("/proc/sys/kernel/random/boot_id")
SERVICE_PORT = 8470
DATABASE_VARIABLE = "ATOLL_DATABASE"
WAIT_S = 120.0


class Folders:
    """The folders of a container, below the one that is given with ``--state``."""

    def __init__(self, state: Path) -> None:
        self.home, self.runs, self.data, self.head = (state / name for name in ("home", "runs", "data", "head"))
        self.secret, self.authority = state / "cluster" / "token", state / "cluster" / "authority"
        self.given = state / "certificates"

    @property
    def are_certificates_given(self) -> bool:
        return (self.given / folders.CERTIFICATE).exists()

    @property
    def has_authority(self) -> bool:
        return (self.authority / folders.AUTHORITY_CERTIFICATE).exists()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.what == "alive":
        sys.exit(not any(process.name() == "raylet" for process in psutil.process_iter()))
    packages = user_packages.resolved(user_packages.folders_in(os.environ))
    place = Folders(options.state)
    if options.what == "head":
        make_authority(place)  # before the secret, for which the others wait
        place.secret.parent.mkdir(exist_ok=True)
        secret_in(place.secret)
        forget_another_boot(place)
    else:
        wait_for_secret(place)
    os.umask(0o077)
    names = [options.what, *([options.head.rpartition(":")[0]] if options.what == "head" else [])]
    certificates = certificates_of(names, place)
    if options.what == "service":
        os.environ.update(database_in(options.database_file))
    if options.what != "island":
        python_process.become(program_of(options, certificates, packages))
    join.wait_for_head(lambda: (options.head, ""), WAIT_S, lambda: False)
    os.environ.update(ray_environment(place.secret, tolerance_s(), certificates=certificates))
    python_process.become([*RAY, *ray_arguments(options), "--block"])


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="deploy/node.py", description="A container of deploy/compose.yaml.")
    arguments.add_argument("--state", type=Path, default=STATE, help="folder of volumes; default: /var/lib/atoll")
    arguments.add_argument("--head", default=HEAD, metavar="HOST:PORT", help="the head; default: head:6379")
    what = arguments.add_subparsers(dest="what", required=True)
    for name in ("head", "alive"):
        what.add_parser(name)
    service = what.add_parser("service")
    service.add_argument("--insecure", action="store_true", help="HTTP, where nothing but this host reaches it")
    service.add_argument("--database-file", type=Path, help="file with the database's URL, so that no list shows it")
    service.add_argument("options", nargs="*", metavar="-- OPTION", help="further options of api.serve")
    service.add_argument("--host", default="0.0.0.0", help="address to listen on; default: all")
    service.add_argument("--port", type=int, default=SERVICE_PORT, help="port to listen on; default: 8470")
    island = what.add_parser("island")
    island.add_argument("--group", required=True)
    island.add_argument("--region", required=True)
    island.add_argument("--cpus", type=int, default=4, help="what jobs may reserve here")
    return arguments


def ray_arguments(options: argparse.Namespace) -> list[str]:
    """Return Ray's options for an island's node."""
    labels = f"{GROUP_LABEL}={options.group},{REGION_LABEL}={options.region}"
    return ["--address", options.head, "--num-cpus", str(options.cpus), "--labels", labels]


def program_of(options: argparse.Namespace, certificates: Path | None, packages: Sequence[str]) -> list[str]:
    """Return the command line of the program that a head's or a service's container becomes."""
    place = Folders(options.state)
    shared = ["--token-file", str(place.secret), "--partition-tolerance", str(tolerance_s()), "--whole-environment"]
    shared += ["--certificates", str(certificates)] if certificates else []
    shared += [word for folder in packages for word in ("--packages", folder)]
    if options.what == "head":
        where = ["--home", str(place.head), "--address", addresses()[0], "--port", options.head.rpartition(":")[2]]
        return python_process.module(PROGRAM, "head", *where, *shared)
    where = ["--home", str(place.home), "--head", options.head, "--wait", str(WAIT_S)]
    return python_process.module(PROGRAM, "serve", *where, *shared, "--", *service_of(options, place, certificates))


def tolerance_s() -> float:
    return float(os.environ.get(TOLERANCE_VARIABLE, PARTITION_TOLERANCE_S))


def service_of(options: argparse.Namespace, place: Folders, certificates: Path | None) -> list[str]:
    """Return the service's command line: HTTPS with the certificate by which Ray's processes talk, unless ``--insecure``."""
    return [
        *python_process.module("api.serve", "--home", str(place.home), "--runs", str(place.runs)),
        *("--control", "orchestrator.runtime.control_port:connect"),
        *("--host", options.host, "--port", str(options.port)),
        *encryption(certificates, insecure=options.insecure),
        *service_options(options.options, place),
    ]


def service_options(given: Sequence[str], place: Folders) -> list[str]:
    """Return the options that were given to the service, and our roots where none are given.

    The roots are not all of STATE, which has the cluster's secret.
    """
    roots = {"--checkpoints": place.runs, "--data": place.data}
    names = {option.partition("=")[0] for option in given}
    return [*given, *(word for name, root in roots.items() if name not in names for word in (name, str(root)))]


def database_in(path: Path | None) -> dict[str, str]:
    """Return the variable with the database's URL, which this file has."""
    if path is None:
        return {}
    try:
        return {DATABASE_VARIABLE: path.read_text().strip()}
    except OSError as error:
        sys.exit(f"--database-file {path} cannot be read: {error.strerror}. Mount the secret with the database's URL.")


def encryption(certificates: Path | None, *, insecure: bool) -> list[str]:
    if insecure or certificates is None:
        return ["--insecure"] if insecure else []
    return ["--certificate", str(certificates / folders.CERTIFICATE), "--key", str(certificates / folders.KEY)]


def make_authority(place: Folders) -> None:
    """The authority of this composition exists, unless certificates come from elsewhere. A half made one is made anew."""
    if not place.are_certificates_given and not place.has_authority:
        shutil.rmtree(place.authority, ignore_errors=True)
        folders.make_authority(place.authority, "atoll composition")


def certificates_of(names: Sequence[str], place: Folders) -> Path | None:
    """Return the folder of this container's certificates; None where something else encrypts, and there is no authority.

    One that this container issues is for the addresses that it has now, and lasts as long as its authority.
    """
    if place.are_certificates_given:
        return place.given
    if not place.has_authority:
        return None
    shutil.rmtree(OWN, ignore_errors=True)
    folders.issue(place.authority, OWN, [*names, socket.gethostname(), *addresses()], days=None)
    return OWN


def addresses() -> list[str]:
    """Return the addresses of this container, loopback last."""
    listed = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address
    ]
    return sorted(listed, key=lambda address: (is_loopback(address), ":" in address))


def forget_another_boot(place: Folders) -> None:
    """Remove the head's records if they are from an earlier boot of the machine.

    All containers are on this machine, so the nodes of that time died with it. Ray would consider them alive for the whole
    partition tolerance, and start no synchroniser before that. Without them, the service restarts the jobs at once.
    """
    noted, boot = place.head / "boot", BOOT.read_text()
    if not noted.exists() or noted.read_text() != boot:
        shutil.rmtree(state_of(place.head) / HEAD_STORAGE, ignore_errors=True)
        place.head.mkdir(parents=True, exist_ok=True)
        noted.write_text(boot)


def wait_for_secret(place: Folders) -> None:
    """Return once the head has made the secret."""
    deadline = time.monotonic() + WAIT_S
    while not place.secret.exists():
        if time.monotonic() > deadline:
            sys.exit(f"There was no {place.secret} within {WAIT_S:.0f} s. Look at the log of the head's container.")
        time.sleep(0.5)


if __name__ == "__main__":
    try:
        main()
    except AtollError as error:  # certificates that cannot be issued: the container's log says why, and what to do
        print(error, file=sys.stderr)
        sys.exit(2)
