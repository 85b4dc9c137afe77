"""Commands on a machine that is a node of somebody's cluster, or is to be one: join, leave.

They check what is said, and become the program that does it: nothing of Ray is imported here.
"""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from api.commands.common import PackagesOption
from orchestrator.errors import ConfigurationError
from orchestrator.system import home_files, python_process, user_packages
from orchestrator.system.ports import is_host, is_loopback

JOIN_MODULE, LEAVE_MODULE = "orchestrator.runtime.join", "orchestrator.runtime.leave"
TOKEN_VARIABLE, CERTIFICATES_VARIABLE = "RAY_AUTH_TOKEN_PATH", "ATOLL_CERTIFICATES"
ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Of groups, regions and labels' values, as Ray takes them."""
LABEL_NAME = re.compile(r"([A-Za-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
DURATION = re.compile(
    r"(?:(?P<days>[0-9]{1,4})-)?(?P<hours>[0-9]{1,4}):(?P<minutes>[0-5]?[0-9]):(?P<seconds>[0-5]?[0-9])"
)
PORTS = re.compile(r"(?P<first>[0-9]{1,5})-(?P<last>[0-9]{1,5})")
PORTS_MIN = 5
"""Three of a node's own, one of its agent, and one of an island."""
EPOCH = re.compile(r"@?(?P<seconds>[0-9]{9,11})")
RESERVED = frozenset({"atoll-node-group", "region"})
AMOUNT_MAX = 1e9


def join(
    address: Annotated[str, typer.Argument(metavar="HEAD:PORT", help="The head of the cluster.")],
    group: Annotated[str, typer.Option("--group", help="The node group that this machine is of.")],
    region: Annotated[str, typer.Option("--region", help="Where it is.")],
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            envvar=TOKEN_VARIABLE,
            help="The cluster's secret: a file that nobody else may read.",
            show_default=False,
        ),
    ] = None,
    certificates: Annotated[
        Path | None,
        typer.Option(
            "--certificates",
            envvar=CERTIFICATES_VARIABLE,
            help="This machine's folder, as `atoll certificates issue` makes it: with it, all is TLS.",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Join beyond loopback in the clear, where something else encrypts.")
    ] = False,
    ports: Annotated[
        str | None,
        typer.Option(
            "--ports",
            metavar="FIRST-LAST",
            help="Where Ray listens on this machine, for a firewall: a port for each island and four. Default: any.",
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            metavar="WALLTIME",
            help="When this machine is taken away: an ISO time (of here, unless it names a zone), seconds since 1970, or a "
            "duration [DAYS-]HH:MM:SS from now, as Slurm writes them.",
            show_default=False,
        ),
    ] = None,
    lead: Annotated[
        float,
        typer.Option("--lead", metavar="SECONDS", min=1, max=86400, help="So long before that, it begins to leave."),
    ] = 120,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, max=86400, help="So long it may take after SIGTERM.")
    ] = 30,
    cpus: Annotated[int | None, typer.Option("--cpus", min=0, max=100_000, help="What jobs may book.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, max=10_000, help="The same.")] = None,
    resources: Annotated[
        list[str] | None,
        typer.Option("--resources", metavar="NAME=AMOUNT", help="More to book, such as TPU=4. Repeatable."),
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--labels", metavar="NAME=VALUE", help="More labels of this node. Repeatable.")
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option("--memory-gib", min=0.1, max=1e6, help="For processes. Default: what is free now."),
    ] = None,
    own_address: Annotated[
        str | None, typer.Option("--own-address", metavar="IP", help="This machine's, as the others see it.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The node's, for people.", show_default=False)] = None,
    packages: PackagesOption = None,
    partition_tolerance: Annotated[
        float, typer.Option("--partition-tolerance", metavar="SECONDS", min=3, max=1e6, help="That of the cluster.")
    ] = 600,
) -> None:
    """Be a node of a cluster until WALLTIME, or until SIGTERM; leave in time, with all work given away. Exit code 0 then.

    Clouds are asked for notices of this machine's end, which have the same effect (ATOLL_NOTICES=off for none).
    """
    command = [
        *("--address", checked_address(address), "--token-file", str(checked_token(token_file))),
        *("--group", named("--group", group), "--region", named("--region", region)),
        *("--resources", json.dumps(amounts(resources or []))),
        *("--labels", json.dumps(labels_of(labels or []))),
        *("--lead", str(lead), "--grace", str(grace), "--partition-tolerance", str(partition_tolerance)),
    ]
    if until is not None:
        command += ["--until", str(checked_until(until, lead, time.time()))]
    for folder in user_packages.resolved(packages or ()):
        command += ["--packages", folder]
    if own_address is not None and not is_host(own_address):
        raise ConfigurationError(
            detail=f"--own-address {own_address!r} is no address. Give one without a port: 10.0.0.7."
        )
    for option, value in (
        ("--cpus", cpus),
        ("--gpus", gpus),
        ("--memory-bytes", None if memory_gib is None else int(memory_gib * (1 << 30))),
        ("--certificates", checked_certificates(certificates, address, own_address, insecure=insecure)),
        ("--ports", None if ports is None else checked_ports(ports)),
        ("--own-address", own_address),
        ("--name", None if name is None else named("--name", name)),
    ):
        command += [] if value is None else [option, str(value)]
    python_process.become(python_process.module(JOIN_MODULE, *command))


def leave(
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, max=86400, help="When this machine or container ends.")
    ] = 30,
    cause: Annotated[
        str, typer.Option("--cause", metavar="TEXT", help="Why: operators read it, and the tape keeps it.")
    ] = "an operator takes the machine away",
) -> None:
    """Have the islands of this machine's node give their work and go on elsewhere; return when they have.

    For a preStop of Kubernetes, and before maintenance. The node itself is left for its owner to end. Exit code 1: something
    worked here still when the time was over.
    """
    if not 0 < len(cause) <= 200 or not cause.isprintable():
        raise ConfigurationError(detail=f"--cause has {len(cause)} characters: give 1 to 200 on one line.")
    python_process.become(python_process.module(LEAVE_MODULE, "--grace", str(grace), "--cause", cause))


# ── what is said, checked ─────────────────────────────────────────────────────────────────────────────────────────


def checked_address(text: str) -> str:
    """HOST:PORT. Raises ConfigurationError otherwise, as the others below do for what they check."""
    match = ADDRESS.fullmatch(text)
    if match is None or not is_host(match["host"].strip("[]")) or not 0 < int(match["port"]) < 1 << 16:
        raise ConfigurationError(
            detail=f"The head's address {text!r} is none. Give its name or number and port: head:6379."
        )
    return text


def checked_token(path: Path | None) -> Path:
    """A file that this user can read, and nobody else."""
    if path is None:
        raise ConfigurationError(
            detail=f"No secret of the cluster was named. Give its file with --token-file, or in {TOKEN_VARIABLE}."
        )
    home_files.refuse_unfit(path, "--token-file", "Copy the cluster's secret there, for this user alone.")
    return path


def checked_certificates(folder: Path | None, head: str, own_address: str | None, *, insecure: bool) -> Path | None:
    """A folder by which this machine can talk to others of its fleet; None where it may join in the clear."""
    if folder is not None and insecure:
        raise ConfigurationError(detail="--certificates and --insecure contradict each other. Leave one of them out.")
    if folder is None:
        if insecure or is_loopback(head.rpartition(":")[0]):
            return None
        raise ConfigurationError(
            detail=f"The head {head} is beyond loopback, and without TLS whoever is on the way could read and change what "
            "is said. Give this machine's folder of certificates with --certificates, or in "
            f"{CERTIFICATES_VARIABLE} (`atoll certificates issue` makes one); or, where something else encrypts, --insecure."
        )
    from orchestrator.certificates import folders  # late: `atoll --help` needs no cryptography

    folders.refuse_unfit(folder, own_address)
    return folder


def checked_ports(text: str) -> str:
    match = PORTS.fullmatch(text)
    first, last = (int(match["first"]), int(match["last"])) if match else (0, 0)
    if not 1024 <= first <= last - PORTS_MIN + 1 or last >= 1 << 16:
        raise ConfigurationError(
            detail=f"--ports {text!r} is no range of at least {PORTS_MIN} ports between 1024 and 65535. Give 21000-21099."
        )
    return text


def checked_until(text: str, lead_s: float, now: float) -> float:
    """Seconds since 1970, further off than the time that leaving takes."""
    until = moment(text, now)
    if until - now <= lead_s:
        raise ConfigurationError(
            detail=f"--until {text} is {until - now:.0f} s from now, and leaving begins {lead_s:.0f} s before it (--lead): "
            "the node would leave before it had done anything. Give a later time, or a shorter --lead."
        )
    return until


def moment(text: str, now: float) -> float:
    """Seconds since 1970. A time without a zone is of here; a time of day counts hours from now, as Slurm's limits do."""
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
            detail=f"--until {text!r} is no time. Give 2026-05-01T18:00:00 (of here, or with Z or +02:00), seconds since "
            "1970 as in SLURM_JOB_END_TIME, or a duration as 1-06:30:00."
        ) from error


def named(option: str, text: str) -> str:
    if not NAME.fullmatch(text):
        raise ConfigurationError(
            detail=f"{option} {text!r} is no name: give letters, digits, '.', '_' and '-', 63 at most, with a letter or "
            "digit at both ends."
        )
    return text


def labels_of(texts: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not LABEL_NAME.fullmatch(name) or not NAME.fullmatch(value):
            raise ConfigurationError(
                detail=f"--labels {text!r} is no NAME=VALUE of letters, digits, '.', '_' and '-': give rack=a7."
            )
        if name in RESERVED:
            raise ConfigurationError(detail=f"--labels {text!r}: {name} is set by --group and --region. Use these.")
        labels[name] = value
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
                detail=f"--resources {text!r} is no NAME=AMOUNT with a number above 0: give TPU=4."
            )
        if name.upper() in ("CPU", "GPU", "MEMORY"):
            raise ConfigurationError(
                detail=f"--resources {text!r}: {name} has an option of its own. Use --cpus, --gpus or --memory-gib."
            )
        resources[name] = number
    return resources


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Nodes")(join)
    app.command(rich_help_panel="Nodes")(leave)
