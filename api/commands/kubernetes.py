"""Commands for an installation on Kubernetes: render its manifests, for `kubectl apply`, version control or Helm."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.commands.common import echo_lines
from api.installation.home import ALERTS, DASHBOARDS
from orchestrator.errors import ConfigurationError

if TYPE_CHECKING:
    from orchestrator.kubernetes.manifests import Shipped

commands = typer.Typer(no_args_is_help=True, help="Render manifests for Kubernetes.")


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
    from orchestrator.specification.config import read_document

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
    app.add_typer(commands, name="kubernetes", rich_help_panel="Nodes")
