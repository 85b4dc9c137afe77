"""Write the dashboards as Grafana reads them: ``python -m dashboards.build``. The same source gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import goodput, islands, oncall, operations, synchroniser

FOLDER = Path(__file__).resolve().parent


def rendered() -> Iterator[tuple[Path, str]]:
    """Each file with what belongs into it."""
    for module in (oncall, goodput, synchroniser, islands, operations):
        name = module.__name__.rpartition(".")[2]
        text = JSONEncoder(sort_keys=True, indent=2).encode(module.dashboard().build())
        yield FOLDER / f"{name}.json", text + "\n"


if __name__ == "__main__":
    for path, text in rendered():
        path.write_text(text)
        print(path.relative_to(FOLDER.parent))
