"""Commands for the certificates of machines: `atoll certificates`. They work on folders and need no service."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from api.commands.common import JsonOption, echo, print_json, say
from orchestrator.certificates import AUTHORITY_DAYS, MACHINE_DAYS
from orchestrator.errors import ConfigurationError
from orchestrator.system.ports import is_host

DAYS_MAX = 36500

AuthorityArgument = Annotated[
    Path, typer.Argument(metavar="AUTHORITY", help="The authority's folder.", show_default=False)
]
MachineArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="The machine's folder.", show_default=False)]
AuthorityDays = Annotated[int, typer.Option("--days", min=1, max=DAYS_MAX, help="Validity in days.")]
MachineDays = Annotated[
    int | None,
    typer.Option(
        "--days",
        min=1,
        max=DAYS_MAX,
        help=f"Validity in days: longer than the machine's node runs. Default: {MACHINE_DAYS}, or what its authority has "
        "left.",
        show_default=False,
    ),
]

commands = typer.Typer(no_args_is_help=True, help="Manage the certificates of machines, for TLS between them.")


@commands.command()
def authority(
    folder: AuthorityArgument,
    name: Annotated[str, typer.Option("--name", help="Name of the authority, such as the fleet's.")] = "atoll fleet",
    days: AuthorityDays = AUTHORITY_DAYS,
) -> None:
    """Create an authority. Its certificates let machines join the fleet, so keep its folder secret."""
    from orchestrator.certificates import folders

    if not 0 < len(name) <= 40 or not name.isprintable():
        raise ConfigurationError(
            detail=f"--name has {len(name)} characters. Give 1 to 40 printable characters on one line."
        )
    folders.make_authority(folder, name, days)
    say(f"{folder} can issue certificates, and so can anyone who reads its {folders.AUTHORITY_KEY}")


@commands.command()
def issue(
    authority: AuthorityArgument,
    folder: MachineArgument,
    names: Annotated[
        list[str],
        typer.Option(
            "--name", help="A name or address under which others reach the machine. Repeatable.", show_default=False
        ),
    ],
    days: MachineDays = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the folder's content, for example for a restarted pod.")
    ] = False,
) -> None:
    """Create a machine's folder: key, certificate and trusted authority. Copy it there, readable by its user only."""
    from orchestrator.certificates import folders

    for each in names:
        if not is_host(each):
            raise ConfigurationError(detail=f"--name {each!r} is not a host name or address. Give one without a port.")
    days = folders.usual_days(authority) if days is None else days
    folders.issue(authority, folder, names, days, replace=replace)
    say(f"{folder} is for {', '.join(names)}, for {days} days")


@commands.command()
def renew(
    authority: AuthorityArgument,
    folders_: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Machines' folders.", show_default=False)],
    days: MachineDays = None,
) -> None:
    """Renew machines' certificates, with the same keys and names, and update the authorities that they trust."""
    from orchestrator.certificates import folders

    days = folders.usual_days(authority) if days is None else days
    for folder in folders_:
        folders.renew(authority, folder, days)
        say(f"{folder} is valid for {days} days from now; processes started from now on use it")


@commands.command()
def rotate(authority: AuthorityArgument, days: AuthorityDays = AUTHORITY_DAYS) -> None:
    """Start issuing from a new authority. Machines that know only the old one also accept its certificates."""
    from orchestrator.certificates import folders

    folders.rotate(authority, days)
    say("a new authority issues from now on; renew and restart the machines one by one, then retire the old one")


@commands.command()
def retire(authority: AuthorityArgument) -> None:
    """Stop trusting the old authority. Do this after every machine has a new certificate and was restarted."""
    from orchestrator.certificates import folders

    folders.retire(authority)
    say("machines that are renewed and restarted from now on no longer trust the old authority")


@commands.command()
def show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="An authority's or a machine's folder, or a certificate file.", show_default=False
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Show the names and the validity of certificates. Exit code 1 if one of them is not valid now."""
    from orchestrator.certificates import folders

    now = datetime.now(UTC)
    described = folders.described(path)
    if as_json:
        print_json(
            [
                {
                    "file": each.file,
                    "subject": each.subject,
                    "issuer": each.issuer,
                    "names": list(each.names),
                    "not_before": each.not_before.isoformat(),
                    "not_after": each.not_after.isoformat(),
                    "days_left": each.days_left(now),
                    "sha256": each.fingerprint,
                }
                for each in described
            ]
        )
    else:
        for each in described:
            echo(f"{each.file}: {each.subject}, of {each.issuer}")
            echo(
                f"  valid from {each.not_before:%Y-%m-%d} until {each.not_after:%Y-%m-%d} ({each.days_left(now)} days left)"
            )
            if each.names:
                echo(f"  for {', '.join(each.names)}")
            echo(f"  SHA-256 {each.fingerprint}")
    if not all(each.not_before <= now <= each.not_after for each in described):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.add_typer(commands, name="certificates", rich_help_panel="Nodes")
