"""Commands about the certificates of machines: `atoll certificates`. They work on folders, and ask no service."""

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
AuthorityDays = Annotated[int, typer.Option("--days", min=1, max=DAYS_MAX, help="How long it lasts.")]
MachineDays = Annotated[
    int | None,
    typer.Option(
        "--days",
        min=1,
        max=DAYS_MAX,
        help=f"How long it lasts: longer than the machine's node runs. Default: {MACHINE_DAYS}, or what its authority has "
        "left.",
        show_default=False,
    ),
]

commands = typer.Typer(no_args_is_help=True, help="Certificates of machines, for TLS between them.")


@commands.command()
def authority(
    folder: AuthorityArgument,
    name: Annotated[
        str, typer.Option("--name", help="What it is of: a fleet, or one job that has a cluster to itself.")
    ] = "atoll fleet",
    days: AuthorityDays = AUTHORITY_DAYS,
) -> None:
    """Make an authority: whoever holds a certificate of it can be a machine of the fleet. Keep its folder to yourself."""
    from orchestrator.certificates import folders

    if not 0 < len(name) <= 40 or not name.isprintable():
        raise ConfigurationError(detail=f"--name has {len(name)} characters: give 1 to 40 on one line.")
    folders.make_authority(folder, name, days)
    say(f"{folder} can issue certificates; whoever reads its {folders.AUTHORITY_KEY} can, too")


@commands.command()
def issue(
    authority: AuthorityArgument,
    folder: MachineArgument,
    names: Annotated[
        list[str],
        typer.Option(
            "--name", help="A name or an address by which others call the machine. Repeatable.", show_default=False
        ),
    ],
    days: MachineDays = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Whatever the folder held is lost, as for a pod that begins again.")
    ] = False,
) -> None:
    """Make a machine's folder: its key, its certificate, and whom it trusts. Copy it there, for its user alone."""
    from orchestrator.certificates import folders

    for each in names:
        if not is_host(each):
            raise ConfigurationError(detail=f"--name {each!r} is no host's name or address. Give one without a port.")
    days = folders.usual_days(authority) if days is None else days
    folders.issue(authority, folder, names, days, replace=replace)
    say(f"{folder} is for {', '.join(names)}, for {days} days")


@commands.command()
def renew(
    authority: AuthorityArgument,
    folders_: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Machines' folders.", show_default=False)],
    days: MachineDays = None,
) -> None:
    """Have certificates last again, with their keys and names, and trust whom the authority says now."""
    from orchestrator.certificates import folders

    days = folders.usual_days(authority) if days is None else days
    for folder in folders_:
        folders.renew(authority, folder, days)
        say(f"{folder} lasts {days} days from now; processes that begin from now on show it")


@commands.command()
def rotate(authority: AuthorityArgument, days: AuthorityDays = AUTHORITY_DAYS) -> None:
    """Have a new authority issue from now on. Machines that know only the former one take its certificates, too."""
    from orchestrator.certificates import folders

    folders.rotate(authority, days)
    say("a new authority issues from now on; renew and restart the machines one by one, then retire the former one")


@commands.command()
def retire(authority: AuthorityArgument) -> None:
    """Stop trusting the former authority, once every machine has a certificate of the new one and was restarted."""
    from orchestrator.certificates import folders

    folders.retire(authority)
    say("the former authority is trusted by no machine that is renewed and restarted from now on")


@commands.command()
def show(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A folder of either kind, or a file.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Say whose certificates these are, and how long they last. Exit code 1: one of them is not valid now."""
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
