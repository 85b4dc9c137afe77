"""Reports and tapes as tables, for other tools: CSV, or Parquet with types.

    report    a row for each figure: series, island, tokens, at_s, value
    tape      a row for each record: n, at, event, island, incarnation, fragment, version, details, effects
    jobs      a row for each job: its settings that differ among these jobs, beside its results

A table is written beside its file and takes its name once it is whole. Rows are written as they come, so that a long tape
needs no memory for its table.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigurationError, disk_remedy
from orchestrator.tape.codec import to_json
from orchestrator.tape.schema import Tape

Row = dict[str, Any]
REPORT_COLUMNS = {"series": "string", "island": "string", "tokens": "int64", "at_s": "float64", "value": "float64"}
TAPE_COLUMNS = {
    "n": "int64",
    "at": "float64",
    "event": "string",
    "island": "string",
    "incarnation": "int64",
    "fragment": "int64",
    "version": "int64",
    "details": "string",
    "effects": "string",
}
"""A column's name, and its type in Parquet. ``details`` and ``effects`` are JSON."""
RESULT_COLUMNS = {
    "loss": "float64",
    "tokens_trained": "int64",
    "global_version": "int64",
    "goodput_ratio": "float64",
    "seconds": "float64",
}
"""What a comparison of jobs says of each: ``loss`` is the newest held-out loss, ``seconds`` how long it ran."""
CURVES = {"loss_curve": "held_out_loss", "training_loss_curve": "training_loss"}
ROWS_AT_ONCE = 10_000


def report_rows(report: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the points of a report's curves, then its figures: numbers of the whole job, and of each island.

    Points have the tokens trained by all islands and the seconds since the job began. Names of figures are those of
    report.json, joined by dots.
    """
    for curve, series in CURVES.items():
        for tokens, value, at in report.get(curve, []):
            yield {"series": series, "tokens": round(tokens), "at_s": at, "value": value}
    for name, figure in report.items():
        if name == "islands":
            for island, own in figure.items():
                for path, value in _numbers(own):
                    yield {"series": path, "island": island, "value": value}
        elif not isinstance(figure, list):
            for path, value in _numbers({name: figure}):
                yield {"series": path, "value": value}


def _numbers(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}{name}", value


def tape_rows(tape: Tape) -> Iterator[Row]:
    """Yield the records of a tape, oldest first."""
    for record in tape.records:
        event: Row = json.loads(to_json(record.event))
        yield {
            "n": record.n,
            "at": event.pop("at", None),
            "event": event.pop("type"),
            **{name: event.get(name) for name in ("island", "incarnation", "fragment", "version")},
            "details": json.dumps(event),
            "effects": f"[{','.join(to_json(effect) for effect in record.effects)}]",
        }


def compared(
    jobs: Sequence[Mapping[str, Any]], specifications: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, str], list[Row]]:
    """Return columns and rows of a comparison of jobs, as the list of jobs has them, by their specifications.

    The settings are all fields in which the specifications differ, by their paths. A field that one lacks is absent there.
    """
    settings = [settings_of(specification) for specification in specifications]
    paths = dict.fromkeys(path for fields in settings for path in fields)
    differing = [path for path in paths if any(fields.get(path) != settings[0].get(path) for fields in settings)]
    kinds = {path: {_kind(fields[path]) for fields in settings if path in fields} for path in differing}
    columns = {"job": "string", "state": "string"}
    columns |= {path: kind.pop() if len(kind) == 1 else "string" for path, kind in kinds.items()}
    columns |= RESULT_COLUMNS
    rows: list[Row] = []
    for job, fields in zip(jobs, settings, strict=True):
        own = {path: fields[path] for path in differing if path in fields}
        own = {path: str(value) if columns[path] == "string" else value for path, value in own.items()}
        results = {name: job.get(name) for name in RESULT_COLUMNS}
        began, ended = job.get("started_at"), job.get("ended_at")
        results["seconds"] = ended - began if began is not None and ended is not None else None
        rows.append({"job": job["job"], "state": job["state"], **own, **results})
    return columns, rows


def settings_of(specification: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return the fields of a specification by their paths, such as ``islands.0.count``, without those that are not set."""
    return dict(_fields(specification))


def _fields(value: Any, path: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _fields(part, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _fields(part, f"{path}.{index}")
    elif value is not None:
        yield path, value if isinstance(value, str | int | float | bool) else str(value)


def _kind(value: str | int | float | bool) -> str:
    return {bool: "bool", int: "float64", float: "float64"}.get(type(value), "string")


def write_csv(path: Path, columns: Mapping[str, str], rows: Iterable[Row]) -> int:
    """Write a table as CSV, with the columns' names first. Return how many rows it has. Raises as ``write_parquet``."""
    return _written(path, lambda draft: _write_csv(draft, columns, rows))


def write_parquet(path: Path, columns: Mapping[str, str], rows: Iterable[Row]) -> int:
    """Write a table as Parquet. Return how many rows it has.

    Raises ConfigurationError if the path exists or cannot be written.
    """
    return _written(path, lambda draft: _write_parquet(draft, columns, rows))


def _written(path: Path, write: Callable[[Path], int]) -> int:
    if path.exists():
        raise ConfigurationError(detail=f"{path} already exists. Remove it, or give another name.")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            count = write(draft)
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(
            detail=f"{path} cannot be written: {error.strerror or error}. {disk_remedy(error)}."
        ) from error
    return count


def _write_csv(path: Path, columns: Mapping[str, str], rows: Iterable[Row]) -> int:
    count = 0
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        for count, row in enumerate(rows, start=1):  # noqa: B007
            writer.writerow(row)
    return count


def _write_parquet(path: Path, columns: Mapping[str, str], rows: Iterable[Row]) -> int:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in columns.items()])
    count, left = 0, iter(rows)
    with ParquetWriter(path, schema) as writer:
        while some := list(islice(left, ROWS_AT_ONCE)):
            filled = [{name: row.get(name) for name in columns} for row in some]
            writer.write_table(pyarrow.Table.from_pylist(filled, schema))
            count += len(some)
    return count


def write_all(
    csv: Path | None, parquet: Path | None, columns: Mapping[str, str], rows: Callable[[], Iterable[Row]]
) -> list[str]:
    """Write the files that were asked for, and return a line about each. Raises as ``write_parquet``."""
    files = ((csv, write_csv), (parquet, write_parquet))
    return [f"wrote {write(path, columns, rows()):,} rows to {path}" for path, write in files if path is not None]
