"""The entry point of a container of deploy/compose.yaml: ``python deploy/node.py head | island … | service | alive``.

    head      the Ray head: synchronisers, controllers and evaluators run here; it makes the cluster's secret
    island    a Ray node of one node group
    service   a Ray node without a group, for the REST service to be a driver on, and then the service itself
    alive     for health checks: whether a Ray node runs in this container

The same settings, labels and cluster file as of an embedded cluster (``orchestrator.runtime``); only that each node has a
machine of its own, so that the head has a name instead of a loopback address. The secret lies in a folder that all mount,
``/var/lib/atoll/cluster``. What Ray knows of nodes and actors lies in ``/var/lib/atoll/head``, which is the head's alone:
killed and started again, it finds it there. Each becomes the program it starts, so that signals reach it.

Ray's processes talk by TLS: with a certificate that was given, as to pods of Kubernetes; else with one that the container
issues itself, at every start, for the addresses that it has then. For that the head makes an authority beside the secret.
Whoever can read the secret can run code in every container, so the authority's key gives nobody more.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from orchestrator.certificates import folders
from orchestrator.errors import AtollError
from orchestrator.runtime import ray_command
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CONTROL_GROUP, GROUP_LABEL, REGION_LABEL, ray_environment
from orchestrator.system import python_process, user_packages

STATE = Path("/var/lib/atoll")
SECRET, HOME, RUNS = STATE / "cluster" / "token", STATE / "home", STATE / "runs"
AUTHORITY, GIVEN, OWN = STATE / "cluster" / "authority", STATE / "certificates", Path("/tmp/certificates")
HEAD_STORAGE, BOOT = STATE / "head" / "storage", Path("/proc/sys/kernel/random/boot_id")
HEAD = "head:6379"
SERVICE_PORT = 8470
DATABASE_VARIABLE = "ATOLL_DATABASE"
PATIENCE_S = 120.0
RAY = python_process.module(ray_command.MODULE, "start", "--disable-usage-stats")
SERVICE = (
    *python_process.module("api.serve", "--home", str(HOME), "--runs", str(RUNS)),
    *("--control", "orchestrator.runtime.control_port:connect", "--port", str(SERVICE_PORT)),
    *("--host", "0.0.0.0"),
)
ROOTS = {"--checkpoints": RUNS, "--data": STATE / "data"}
"""Where jobs may read and write, unless others are given: not all of STATE, which has the cluster's secret."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.what == "alive":
        sys.exit(not any(process.name() == "raylet" for process in psutil.process_iter()))
    user_packages.resolved(user_packages.folders_in(os.environ))
    if options.what == "head":
        make_secret()
        make_authority()
        forget_another_boot()
    else:
        wait_for_head(options.head)
    os.umask(0o077)
    if not certificates_given():
        issue_own(options.what)
    os.environ.update(environment_of(options.what))
    node = ray_arguments(options)
    if options.what != "service":
        python_process.become([*RAY, *node, "--block"])
    subprocess.run([*RAY, *node], env=python_process.cleaned(os.environ), check=True)
    ClusterFile(uuid.uuid4().hex, options.head, "/tmp/ray", environment_of(options.what)).write(HOME)
    os.environ.update(database_in(options.database_file))
    python_process.become([*SERVICE, *encryption(insecure=options.insecure), *service_options(options.options)])


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="deploy/node.py", description="A container of deploy/compose.yaml.")
    arguments.add_argument("--head", default=HEAD, metavar="HOST:PORT", help="the head; default: head:6379")
    what = arguments.add_subparsers(dest="what", required=True)
    for name in ("head", "alive"):
        what.add_parser(name)
    service = what.add_parser("service")
    service.add_argument("--insecure", action="store_true", help="HTTP, where nothing but this host reaches it")
    service.add_argument("--database-file", type=Path, help="file with the database's URL, so that no list shows it")
    service.add_argument("options", nargs="*", metavar="-- OPTION", help="further options of api.serve")
    island = what.add_parser("island")
    island.add_argument("--group", required=True)
    island.add_argument("--region", required=True)
    island.add_argument("--cpus", type=int, default=4, help="what jobs may reserve here")
    return arguments


def environment_of(what: str) -> dict[str, str]:
    """Ray's settings for this part: the same for all, but that the head alone keeps something."""
    return ray_environment(
        SECRET, head_storage=HEAD_STORAGE if what == "head" else None, certificates=certificates_folder()
    )


def encryption(*, insecure: bool) -> list[str]:
    """The service's options: HTTPS with the certificate by which Ray's processes here talk, unless it is to be HTTP."""
    if insecure:
        return ["--insecure"]
    folder = certificates_folder()
    return ["--certificate", str(folder / folders.CERTIFICATE), "--key", str(folder / folders.KEY)]


def service_options(given: Sequence[str]) -> list[str]:
    """Return the options that were given to the service, and our roots where none are given."""
    names = {option.partition("=")[0] for option in given}
    return [*given, *(word for name, root in ROOTS.items() if name not in names for word in (name, str(root)))]


def database_in(path: Path | None) -> dict[str, str]:
    """Return the variable with the database's URL, which this file has."""
    if path is None:
        return {}
    try:
        return {DATABASE_VARIABLE: path.read_text().strip()}
    except OSError as error:
        sys.exit(f"--database-file {path} cannot be read: {error.strerror}. Mount the secret with the database's URL.")


def ray_arguments(options: argparse.Namespace) -> list[str]:
    """Ray's options for this part."""
    if options.what == "head":
        port = HEAD.rpartition(":")[2]
        head = ["--head", "--port", port, "--num-cpus", "0", "--no-monitor", "--include-dashboard", "false"]
        return [*head, "--labels", f"{GROUP_LABEL}={CONTROL_GROUP}"]
    if options.what == "service":
        return ["--address", options.head, "--num-cpus", "0"]
    labels = f"{GROUP_LABEL}={options.group},{REGION_LABEL}={options.region}"
    return ["--address", options.head, "--num-cpus", str(options.cpus), "--labels", labels]


def make_secret() -> None:
    """The cluster's secret exists, and only this user can read it."""
    if not SECRET.exists():
        draft = SECRET.with_suffix(".draft")
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_hex(32))
        draft.replace(SECRET)


def make_authority() -> None:
    """The authority of this composition exists, unless certificates come from elsewhere. A half made one is made anew."""
    if not certificates_given() and not (AUTHORITY / folders.AUTHORITY_CERTIFICATE).exists():
        shutil.rmtree(AUTHORITY, ignore_errors=True)
        folders.make_authority(AUTHORITY, "atoll composition")


def certificates_given() -> bool:
    return (GIVEN / folders.CERTIFICATE).exists()


def certificates_folder() -> Path:
    return GIVEN if certificates_given() else OWN


def issue_own(what: str) -> None:
    """A certificate for the addresses that this container has now. It lasts as long as its authority."""
    addresses = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and "%" not in address.address
    ]
    shutil.rmtree(OWN, ignore_errors=True)
    folders.issue(AUTHORITY, OWN, [what, socket.gethostname(), *addresses], days=None)


def forget_another_boot() -> None:
    """Remove the head's state if it is from an earlier boot of the machine.

    The nodes of that time most likely died with it: Ray would consider them alive for the whole partition tolerance, and
    start no synchroniser before that. Without them, the service restarts the jobs at once.
    """
    noted, boot = HEAD_STORAGE.with_name("boot"), BOOT.read_text()
    if not noted.exists() or noted.read_text() != boot:
        shutil.rmtree(HEAD_STORAGE, ignore_errors=True)
        noted.write_text(boot)


def wait_for_head(head: str) -> None:
    """The head listens, and its secret can be read."""
    deadline = time.monotonic() + PATIENCE_S
    while not (SECRET.exists() and ClusterFile("", head, "", {}).answers()):
        if time.monotonic() > deadline:
            sys.exit(f"The head at {head} did not answer within {PATIENCE_S:.0f} s.")
        time.sleep(0.5)


if __name__ == "__main__":
    try:
        main()
    except AtollError as error:  # certificates that cannot be issued: the container's log says why, and what to do
        print(error, file=sys.stderr)
        sys.exit(2)
