"""Commands for access: tokens and the audit trail, for admins; and the certificates of machines, `atoll certificates`.

The latter work on folders and need no service.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from api.auth.permissions import Role
from api.commands.common import HomeOption, JsonOption, UrlOption, connect, console, echo, print_json, say
from api.installation.home import DEFAULT_HOME
from orchestrator.certificates import AUTHORITY_DAYS, MACHINE_DAYS
from orchestrator.errors import ConfigurationError, RequestError
from orchestrator.system.ports import is_host

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The token's name.", show_default=False)]

group = typer.Typer(no_args_is_help=True, help="Create, list and revoke tokens. For admins.")


def create(
    name: NameArgument,
    role: Annotated[
        Role, typer.Option("--role", help="A viewer reads, an operator also changes, an admin also manages tokens.")
    ],
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="TIME", help="Lifetime, such as 30d, 12h or 90m. Default: never expires."),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a token and print it. It is shown only once."""
    expires_in_s = seconds_of(expires) if expires else None
    with connect(home, url) as client:
        created = client.create_token(name, role, expires_in_s=expires_in_s)
    if as_json:
        print_json(created)
        return
    ends = f"until {local_time(created.expires_at)}" if created.expires_at else "until it is revoked"
    say(f"the {created.role} token {created.name!r}, valid {ends}; it is shown only once:")
    echo(created.token)


def list_tokens(home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List all tokens, also revoked and expired ones, without their secrets."""
    with connect(home, url) as client:
        tokens = client.tokens()
    if as_json:
        print_json(tokens)
        return
    from api.terminal.listing import Listing

    table = Listing("token", "role", "valid", "created", "by", "expires", "revoked")
    for token in tokens:
        created, expires = local_time(token.created_at), local_time(token.expires_at)
        revoked = local_time(token.revoked_at) if token.revoked_at else ""
        valid = "yes" if token.valid else "no"
        table.add_row(token.name, token.role, valid, created, token.created_by, expires, revoked)
    console().print(table)


def revoke(
    name: NameArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Revoke a token permanently."""
    with connect(home, url) as client:
        token = client.revoke_token(name)
    if as_json:
        print_json(token)
    else:
        say(f"the token {token.name!r} is revoked")


def audit(
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="Show at most this many.")] = 50,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List changing requests with caller, time and status, newest first."""
    with connect(home, url) as client:
        entries = client.audit(limit=limit).entries
    if as_json:
        print_json(entries)
        return
    from api.terminal.listing import Listing

    table = Listing("when", "who", "role", "from", "request", "answer", prose=("request",))
    for entry in entries:
        answer = "none" if entry.status is None else str(entry.status)
        table.add_row(
            local_time(entry.at), entry.caller, entry.role, entry.address, f"{entry.method} {entry.path}", answer
        )
    console().print(table)


def seconds_of(text: str) -> float:
    """Return a duration such as ``30d`` in seconds. Raises RequestError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None:
        raise RequestError(
            detail=f"--expires {text!r} is not a duration.", remedy="Write a number and s, m, h or d, such as 30d."
        )
    return float(int(match[1]) * SECONDS[match[2]])


def local_time(at: float | None) -> str:
    return "for ever" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


# ── certificates ──────────────────────────────────────────────────────────────────────────────────────────────────

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
    group.command()(create)
    group.command("list")(list_tokens)
    group.command()(revoke)
    app.add_typer(group, name="token", rich_help_panel="Service")
    app.command(rich_help_panel="Service")(audit)
    app.add_typer(commands, name="certificates", rich_help_panel="Nodes")
