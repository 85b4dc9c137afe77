"""Commands for access: create, list and revoke tokens, and read the audit trail. For admins."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from api.auth.roles import Role
from api.commands.common import HomeOption, JsonOption, UrlOption, connect, console, echo, print_json, say
from api.installation.home import DEFAULT_HOME
from orchestrator.errors import RequestError

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


def register(app: typer.Typer) -> None:
    group.command()(create)
    group.command("list")(list_tokens)
    group.command()(revoke)
    app.add_typer(group, name="token", rich_help_panel="Service")
    app.command(rich_help_panel="Service")(audit)
