"""Commands about the fleet: look at its node groups, and say which of them take nothing new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from api.commands.common import GroupArgument, HomeOption, JsonOption, UrlOption, connect, console, print_json, say
from api.installation.home import DEFAULT_HOME

if TYPE_CHECKING:
    from api.schemas import NodeGroupChange


def node_groups(home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """List the fleet's node groups."""
    with connect(home, url) as client:
        groups = client.node_groups()
    if as_json:
        print_json(groups)
        return
    from api.terminal.listing import Listing

    table = Listing("node group", "region", "nodes", "CPUs free", "accelerators", "takes islands")
    for group in groups:
        takes = f"no: cordoned by {group.cordoned_by}" if group.cordoned else "yes"
        cpus = f"{group.cpus_free:g} of {group.cpus:g}"
        table.add_row(group.name, group.region, str(group.nodes), cpus, str(group.accelerators), takes)
    console().print(table)


def cordon(
    group: GroupArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Place nothing new on a node group. What trains there goes on."""
    with connect(home, url) as client:
        _conclude(client.cordon(group), as_json)


def uncordon(
    group: GroupArgument, home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Place islands on a node group again, and at once those that wait for it."""
    with connect(home, url) as client:
        _conclude(client.uncordon(group), as_json)


def _conclude(change: NodeGroupChange, as_json: bool) -> None:
    if as_json:
        print_json(change)
        return
    group = change.node_group
    state = f"cordoned by {group.cordoned_by}: nothing new is placed there" if group.cordoned else "takes islands"
    jobs = ", ".join(command.job for command in change.commands) or "no running job had to be"
    say(f"{group.name} {'is ' if group.cordoned else ''}{state}; told: {jobs}")


def register(app: typer.Typer) -> None:
    for command in (node_groups, cordon, uncordon):
        app.command(rich_help_panel="Islands")(command)
