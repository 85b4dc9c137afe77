"""The arguments of ``python -m tests.bench``: which parts to run, and how."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

KINDS = ("cold", "standby")
PARAMETERS = 100_000_000
MINUTES, SMALL_MINUTES = 10.0, 0.1


@dataclass(frozen=True, slots=True)
class Options:
    """``kinds`` are those of ``recovery``. ``small`` runs every part at its smallest size, which shows that it works and
    no speed.

    ``parameters`` is the requested number of parameters, for parts that take any. ``preset`` is the model of parts that
    take one.
    """

    kinds: tuple[str, ...] = KINDS
    as_json: bool = False
    small: bool = False
    minutes: float = MINUTES
    step_seconds: float | None = None
    parameters: int | None = None
    preset: str | None = None
    files: bool = False
    pictures: Path | None = None


def parse(arguments: Sequence[str], parts: Iterable[str], about: str | None) -> tuple[tuple[str, ...], Options]:
    """Return the parts in the given order, or all of them. Exits as argparse does."""
    parts = tuple(parts)
    parser = argparse.ArgumentParser(
        "python -m tests.bench", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", metavar="PART", help=f"{', '.join(parts)}; of recovery: {', '.join(KINDS)}")
    parser.add_argument("--json", action="store_true", help="surface, recovery, way: figures as JSON")
    parser.add_argument("--small", action="store_true", help="the smallest sizes: shows that a part runs, not how fast")
    parser.add_argument(
        "--minutes", type=float, help=f"attrition, attrition-real: how long ({MINUTES:g}; {SMALL_MINUTES:g} if small)"
    )
    parser.add_argument(
        "--step-seconds", type=float, help="journal: small's inner step, if it is not to be measured here"
    )
    parser.add_argument(
        "--parameters",
        type=lambda text: int(float(text)),
        help=f"shard, island-memory: of the model ({PARAMETERS:.0e} unless said); evaluation: about so many",
    )
    parser.add_argument("--preset", help="training: of the model (micro unless said)")
    parser.add_argument("--files", action="store_true", help="way: name every file")
    parser.add_argument("--pictures", type=Path, help="capacity, attrition-states: the folder for their curves")
    asked = parser.parse_args(arguments)
    if unknown := sorted(set(asked.part) - {*parts, *KINDS}):
        parser.error(
            f"there is no {', '.join(unknown)}; there are {', '.join(parts)}, and {', '.join(KINDS)} of recovery"
        )
    kinds = tuple(kind for kind in KINDS if kind in asked.part) or KINDS
    wanted = tuple(part for part in asked.part if part not in KINDS) or parts
    minutes = asked.minutes if asked.minutes is not None else SMALL_MINUTES if asked.small else MINUTES
    return wanted, Options(
        kinds=kinds,
        as_json=asked.json,
        small=asked.small,
        minutes=minutes,
        step_seconds=asked.step_seconds,
        parameters=asked.parameters,
        preset=asked.preset,
        files=asked.files,
        pictures=asked.pictures,
    )
