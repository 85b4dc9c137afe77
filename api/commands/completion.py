"""Shell completion: names that the service knows, asked for while somebody types.

Responsible for being quick and silent: whatever goes wrong, nothing is completed. The client is imported when a shell asks,
not when a command runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

from api.installation.home import DEFAULT_HOME
from orchestrator.errors import AtollError

if TYPE_CHECKING:
    from api.client import Client

PATIENCE_S = 2.0


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    return _beginning(incomplete, ["latest", *_ask(ctx, lambda client: (job.job for job in client.jobs()))])


def islands(ctx: typer.Context, incomplete: str) -> list[str]:
    """Those of the job that was typed before."""
    job = ctx.params.get("job") or "latest"
    return _beginning(incomplete, _ask(ctx, lambda client: (island.island for island in client.islands(job))))


def node_groups(ctx: typer.Context, incomplete: str) -> list[str]:
    return _beginning(incomplete, _ask(ctx, lambda client: (group.name for group in client.node_groups())))


def plans(incomplete: str) -> list[str]:
    """The shipped plans; the shell itself knows files."""
    from api.installation.shipped import PLANS

    return _beginning(incomplete, sorted(path.stem for path in PLANS.glob("*.yaml")))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete) and name.isprintable()]


def _ask(ctx: typer.Context, question: Callable[[Client], Iterable[str]]) -> list[str]:
    from api.client import Client

    home, url = ctx.params.get("home") or DEFAULT_HOME, ctx.params.get("url")
    try:
        with Client.at(home, url, timeout_s=PATIENCE_S) as client:
            return list(question(client))
    except AtollError:
        return []
