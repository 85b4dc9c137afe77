"""Commands for an installation on Kubernetes: render its manifests, for `kubectl apply` or version control."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.commands.common import echo_lines
from orchestrator.errors import ConfigurationError

commands = typer.Typer(no_args_is_help=True, help="Manifests for Kubernetes.")


@commands.command()
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
) -> None:
    """Print the manifests of one Kubernetes cluster, for `kubectl apply --filename -`. The cluster is not contacted."""
    from orchestrator.kubernetes.manifests import rendered, yaml_of
    from orchestrator.kubernetes.values import read_values

    values = read_values(file)
    chosen = next((each for each in values.clusters if each.name == (cluster or values.home.name)), None)
    if chosen is None:
        there = ", ".join(each.name for each in values.clusters)
        raise ConfigurationError(detail=f"--cluster {cluster!r} is not in {file}. It has {there}.")
    echo_lines(yaml_of(rendered(values, chosen)), nl=False)


def register(app: typer.Typer) -> None:
    app.add_typer(commands, name="kubernetes", rich_help_panel="Nodes")
