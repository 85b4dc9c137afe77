"""Commands for nodes: join and leave, on a machine that is or will be one; and manifests of nodes on Kubernetes.

The first two check their options and then replace themselves with the program that does the work. Ray is not imported here.
Manifests are for `kubectl apply`, version control or Helm; no cluster is contacted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.commands.common import PackagesOption, echo_lines, refuse_without
from api.installation.home import ALERTS, DASHBOARDS
from orchestrator.errors import ConfigurationError
from orchestrator.system import home_files, python_process, user_packages
from orchestrator.system.ports import is_host, is_loopback

if TYPE_CHECKING:
    from orchestrator.kubernetes.manifests import Shipped

JOIN_MODULE, LEAVE_MODULE = "orchestrator.runtime.join", "orchestrator.runtime.leave"
TOKEN_VARIABLE, CERTIFICATES_VARIABLE = "RAY_AUTH_TOKEN_PATH", "ATOLL_CERTIFICATES"
ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Names of groups and regions, and values of labels, as Ray accepts them."""
LABEL_NAME = re.compile(r"([A-Za-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
DURATION = re.compile(
    r"(?:(?P<days>[0-9]{1,4})-)?(?P<hours>[0-9]{1,4}):(?P<minutes>[0-5]?[0-9]):(?P<seconds>[0-5]?[0-9])"
)
PORTS = re.compile(r"(?P<first>[0-9]{1,5})-(?P<last>[0-9]{1,5})")
PORTS_MIN = 5
"""Three for the node, one for its agent, and one for an island."""
EPOCH = re.compile(r"@?(?P<seconds>[0-9]{9,11})")
RESERVED = frozenset({"atoll-node-group", "region"})
AMOUNT_MAX = 1e9

kubernetes = typer.Typer(no_args_is_help=True, help="Render manifests for Kubernetes.")


PortsOption = Annotated[
    str | None,
    typer.Option(
        "--ports",
        metavar="FIRST-LAST",
        help="Ports for Ray on this machine, for a firewall: four, and one for each island. Default: any.",
        show_default=False,
    ),
]
WaitOption = Annotated[
    float,
    typer.Option("--wait", metavar="SECONDS", min=0, max=1e6, help="Longest wait for a head that does not answer yet."),
]


def join(
    context: typer.Context,
    group: Annotated[str, typer.Option("--group", help="The node group that this machine joins.")],
    region: Annotated[str, typer.Option("--region", help="The region of this machine.")],
    address: Annotated[
        str | None,
        typer.Argument(metavar="HEAD:PORT", help="The head of the cluster. Default: see --store.", show_default=False),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Join the head that this store names, and the next one if that is lost. In place of HEAD:PORT.",
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            envvar=TOKEN_VARIABLE,
            help="File with the cluster's secret, readable by this user only.",
            show_default=False,
        ),
    ] = None,
    certificates: Annotated[
        Path | None,
        typer.Option(
            "--certificates",
            envvar=CERTIFICATES_VARIABLE,
            help="This machine's folder from `atoll certificates issue`. All connections then use TLS.",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Join beyond loopback without TLS, where something else encrypts.")
    ] = False,
    ports: PortsOption = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            metavar="WALLTIME",
            help="When this machine goes away: an ISO time (local, unless it has a zone), seconds since 1970, or a "
            "duration [DAYS-]HH:MM:SS from now, as Slurm writes it.",
            show_default=False,
        ),
    ] = None,
    lead: Annotated[
        float,
        typer.Option("--lead", metavar="SECONDS", min=1, max=86400, help="Start draining this long before --until."),
    ] = 120,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, max=86400, help="Longest drain after SIGTERM.")
    ] = 30,
    cpus: Annotated[int | None, typer.Option("--cpus", min=0, max=100_000, help="CPUs that jobs may reserve.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, max=10_000, help="GPUs that jobs may reserve.")] = None,
    resources: Annotated[
        list[str] | None,
        typer.Option(
            "--resources", metavar="NAME=AMOUNT", help="Other resources to reserve, such as TPU=4. Repeatable."
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--labels", metavar="NAME=VALUE", help="Additional label of this node. Repeatable."),
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option("--memory-gib", min=0.1, max=1e6, help="Memory for processes. Default: what is free now."),
    ] = None,
    own_address: Annotated[
        str | None,
        typer.Option("--own-address", metavar="IP", help="This machine's address, as other machines reach it."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the node, for display.", show_default=False)
    ] = None,
    packages: PackagesOption = None,
    pass_environment: Annotated[
        list[str] | None,
        typer.Option(
            "--pass-environment",
            metavar="NAME",
            help="Pass this variable to islands, such as a store's credentials. Repeatable.",
        ),
    ] = None,
    partition_tolerance: Annotated[
        float,
        typer.Option(
            "--partition-tolerance", metavar="SECONDS", min=3, max=1e6, help="The cluster's partition tolerance."
        ),
    ] = 600,
    wait: WaitOption = 10,
) -> None:
    """Join a cluster as a node until WALLTIME or SIGTERM, then drain and leave. Exit code 0 after a complete drain.

    Preemption notices of clouds have the same effect as SIGTERM (ATOLL_NOTICES=off ignores them).
    """
    if (address is None) == (store is None):
        what = "Both HEAD:PORT and --store are given" if address is not None else "HEAD:PORT is missing"
        raise ConfigurationError(
            detail=f"{what}. Give the head's address, or with --store URL the store of a fleet that names its head."
        )
    where = address if address is not None else announced(str(store))
    command = [
        *(("--address", checked_address(address)) if address is not None else ("--store", str(store))),
        *("--token-file", str(checked_token(token_file))),
        *("--group", named("--group", group), "--region", named("--region", region)),
        *("--resources", json.dumps(amounts(resources or []))),
        *("--labels", json.dumps(labels_of(labels or []))),
        *("--lead", str(lead), "--grace", str(grace), "--partition-tolerance", str(partition_tolerance)),
        *("--wait", str(wait)),
    ]
    if until is None:
        refuse_without(context, "--until WALLTIME", "lead")
    else:
        command += ["--until", str(checked_until(until, lead, time.time()))]
    for folder in user_packages.resolved(packages or ()):
        command += ["--packages", folder]
    python_process.refuse_unset(os.environ, pass_environment or ())
    for variable in pass_environment or ():
        command += ["--pass-environment", variable]
    if own_address is not None and not is_host(own_address):
        raise ConfigurationError(
            detail=f"--own-address {own_address!r} is not an address. Give one without a port, such as 10.0.0.7."
        )
    for option, value in (
        ("--cpus", cpus),
        ("--gpus", gpus),
        ("--memory-bytes", None if memory_gib is None else int(memory_gib * (1 << 30))),
        ("--certificates", checked_certificates(certificates, where, own_address, insecure=insecure)),
        ("--ports", None if ports is None else checked_ports(ports)),
        ("--own-address", own_address),
        ("--name", None if name is None else named("--name", name)),
    ):
        command += [] if value is None else [option, str(value)]
    python_process.become(python_process.command(JOIN_MODULE, *command))


def leave(
    grace: Annotated[
        float,
        typer.Option(
            "--grace", metavar="SECONDS", min=0, max=86400, help="Seconds until this machine or container ends."
        ),
    ] = 30,
    cause: Annotated[
        str, typer.Option("--cause", metavar="TEXT", help="The reason, shown to operators and kept on the tape.")
    ] = "an operator removes the machine",
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NODE", help="The node, by name or id, where several run.", show_default=False),
    ] = None,
) -> None:
    """Drain this machine's node: its islands hand over their work and continue elsewhere. Return when they have.

    For a Kubernetes preStop hook, and before maintenance. The node itself keeps running. Exit code 1: something still ran
    here when the time was up.
    """
    if not 0 < len(cause) <= 200 or not cause.isprintable():
        raise ConfigurationError(
            detail=f"--cause has {len(cause)} characters. Give 1 to 200 printable characters on one line."
        )
    command = ["--grace", str(grace), "--cause", cause]
    command += [] if name is None else ["--name", named("--name", name)]
    python_process.become(python_process.command(LEAVE_MODULE, *command))


# ── checks of options ─────────────────────────────────────────────────────────────────────────────────────────────


def checked_address(text: str) -> str:
    """Return HOST:PORT. Raises ConfigurationError for anything else, as the checks below do."""
    match = ADDRESS.fullmatch(text)
    if match is None or not is_host(match["host"].strip("[]")) or not 0 < int(match["port"]) < 1 << 16:
        raise ConfigurationError(
            detail=f"{text!r} is not an address of the form HEAD:PORT. Give one such as head:6379."
        )
    return text


def announced(store: str) -> str:
    """Return the address of the head that the store names, or words for it. Raises ConfigurationError for no store."""
    from orchestrator.system import object_store, succession  # late: only this option needs them

    with object_store.errors_of_option():
        head = succession.newest_head(object_store.open_store(store))
    return head.address if head is not None and head.address else f"of {store}"


def checked_token(path: Path | None) -> Path:
    """Return the path of a file that only this user can read."""
    if path is None:
        raise ConfigurationError(
            detail=f"The cluster's secret is missing. Give its file with --token-file or in {TOKEN_VARIABLE}."
        )
    remedy = "Copy the cluster's secret there, readable by this user only."
    home_files.refuse_unfit(path, "--token-file", remedy)
    try:
        secret = home_files.read(path).strip()
    except (OSError, ValueError):
        secret = ""
    if not (secret.isascii() and secret.isprintable() and secret) or " " in secret:
        raise ConfigurationError(
            detail=f"--token-file {path} does not hold a secret, which is one line of text. {remedy}"
        )
    return path


def checked_certificates(folder: Path | None, head: str, own_address: str | None, *, insecure: bool) -> Path | None:
    """Return this machine's folder of certificates, or None if it may join without TLS."""
    if folder is not None and insecure:
        raise ConfigurationError(detail="--certificates and --insecure contradict each other. Leave one out.")
    if folder is None:
        if insecure or is_loopback(head.rpartition(":")[0]):
            return None
        raise ConfigurationError(
            detail=f"The head {head} is not on loopback, and without TLS others on the network could read and change the "
            "traffic. Give this machine's folder of certificates with --certificates or in "
            f"{CERTIFICATES_VARIABLE} (`atoll certificates issue` makes one); or --insecure if something else encrypts."
        )
    from orchestrator.certificates import folders  # late: `atoll --help` needs no cryptography

    folders.refuse_unfit(folder, own_address)
    return folder


def checked_ports(text: str) -> str:
    match = PORTS.fullmatch(text)
    first, last = (int(match["first"]), int(match["last"])) if match else (0, 0)
    if not 1024 <= first <= last - PORTS_MIN + 1 or last >= 1 << 16:
        raise ConfigurationError(
            detail=f"--ports {text!r} is not a range of at least {PORTS_MIN} ports from 1024 to 65535. Give 21000-21099."
        )
    return text


def checked_until(text: str, lead_s: float, now: float) -> float:
    """Return the time in seconds since 1970. It must be further away than ``lead_s``."""
    until = moment(text, now)
    if until <= now:
        raise ConfigurationError(detail=f"--until {text} is not in the future. Give a later time, or leave it out.")
    if until - now <= lead_s:
        raise ConfigurationError(
            detail=f"--until {text} is {until - now:.0f} s from now, but draining starts {lead_s:.0f} s before it (--lead): "
            "the node would leave at once. Give a later time, or a shorter --lead."
        )
    return until


def moment(text: str, now: float) -> float:
    """Return the time in seconds since 1970. A time without a zone is local; HH:MM:SS counts from now, as in Slurm."""
    if match := EPOCH.fullmatch(text):
        return float(match["seconds"])
    if match := DURATION.fullmatch(text):
        parts = {name: int(value or 0) for name, value in match.groupdict().items()}
        hours = 24 * parts["days"] + parts["hours"]
        return now + 3600.0 * hours + 60.0 * parts["minutes"] + parts["seconds"]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise ConfigurationError(
            detail=f"--until {text!r} is not a time. Give one such as 2026-05-01T18:00:00 (local, or with Z or +02:00), "
            "seconds since 1970 as in SLURM_JOB_END_TIME, or a duration such as 1-06:30:00."
        ) from error


def named(option: str, text: str) -> str:
    if not NAME.fullmatch(text):
        raise ConfigurationError(
            detail=f"{option} {text!r} is not a valid name. Use at most 63 letters, digits, '.', '_' and '-', with a letter "
            "or digit at both ends."
        )
    return text


def labels_of(texts: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not LABEL_NAME.fullmatch(name) or not NAME.fullmatch(value):
            raise ConfigurationError(
                detail=f"--labels {text!r} is not NAME=VALUE of letters, digits, '.', '_' and '-'. Give one such as rack=a7."
            )
        if name in RESERVED:
            raise ConfigurationError(detail=f"--labels {text!r}: --group and --region set {name}. Use these options.")
        if labels.setdefault(name, value) != value:
            raise ConfigurationError(detail=f"--labels {text!r}: {name} is {labels[name]} already. Leave one out.")
    return labels


def amounts(texts: list[str]) -> dict[str, float]:
    resources: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            number = float(amount)
        except ValueError:
            number = -1.0
        if not NAME.fullmatch(name) or not 0 < number <= AMOUNT_MAX:
            raise ConfigurationError(
                detail=f"--resources {text!r} is not NAME=AMOUNT with a number above 0. Give one such as TPU=4."
            )
        if name.upper() in ("CPU", "GPU", "MEMORY"):
            raise ConfigurationError(
                detail=f"--resources {text!r}: {name} has an option of its own. Use --cpus, --gpus or --memory-gib."
            )
        if resources.setdefault(name, number) != number:
            raise ConfigurationError(
                detail=f"--resources {text!r}: {name} is {resources[name]:g} already. Leave one out."
            )
    return resources


# ── Kubernetes ────────────────────────────────────────────────────────────────────────────────────────────────────


@kubernetes.command()
def render(
    file: Annotated[
        Path, typer.Argument(metavar="VALUES", help="Values of the installation (docs/guide/kubernetes.md).")
    ],
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="NAME", help="One of its Kubernetes clusters. Default: the one with the head."
        ),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            "--chart",
            metavar="FOLDER",
            help="Write a Helm chart of the manifests to this folder, instead of printing them.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the manifests of one Kubernetes cluster, for `kubectl apply --filename -`. The cluster is not contacted."""
    from importlib.metadata import version

    from orchestrator.kubernetes import manifests
    from orchestrator.kubernetes.values import read_values

    values = read_values(file)
    chosen = next((each for each in values.clusters if each.name == (cluster or values.home.name)), None)
    if chosen is None:
        there = ", ".join(each.name for each in values.clusters)
        raise ConfigurationError(detail=f"--cluster {cluster!r} is not in {file}. Give one of {there}.")
    shipped = shipped_files()
    if chart is None:
        echo_lines(manifests.yaml_of(manifests.rendered(values, chosen, shipped)), nl=False)
        return
    files = manifests.chart(values, lambda live: manifests.rendered(live, chosen, shipped), version("atoll"))
    write_chart(chart, files)
    install = f"helm upgrade --install {values.name} {chart} --namespace {values.namespace}"
    echo_lines(f"Wrote {len(files)} files to {chart}. To install it: {install}")


def shipped_files() -> Shipped:
    """Return the alerts and the dashboards of this release."""
    from orchestrator.kubernetes.manifests import Shipped
    from orchestrator.specification.documents import read_document

    dashboards = {path.stem: path.read_text() for path in sorted(DASHBOARDS.glob("*.json"))}
    return Shipped(read_document(ALERTS), dashboards)


def write_chart(folder: Path, files: dict[str, str]) -> None:
    """Write the files of a chart, in place of an earlier one. Raises ConfigurationError for another folder with content."""
    from orchestrator.kubernetes.manifests import OURS

    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            earlier = folder / "Chart.yaml"
            if not earlier.is_file() or OURS not in earlier.read_text(errors="replace"):
                detail = f"--chart {folder} exists and is no chart that `atoll kubernetes render` wrote."
                raise ConfigurationError(detail=f"{detail} Name a new folder, or remove this one.")
            shutil.rmtree(folder / "templates", ignore_errors=True)
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        detail = f"--chart {folder} cannot be written: {error.strerror}. Name a folder that you may write."
        raise ConfigurationError(detail=detail) from error


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Nodes")(join)
    app.command(rich_help_panel="Nodes")(leave)
    app.add_typer(kubernetes, name="kubernetes", rich_help_panel="Nodes")
