"""The files that a job leaves: RUN_DIR/{tape.jsonl, status.json, report.json, report.html, merged.safetensors}.

``status.json`` is written last: once it is there, all of the job is. Refuses to compute figures (``accounting``) or
pages (``report``).

What a follower gets of a job (``updates``) is a line of JSON, and for every fragment, in order, another line and its
payloads (``wire_format``). A last line shows that it is whole:

    {"format": "atoll-updates-1", "job": "…", "ended": false}
    {"version": 12, "digest": "…", "since": 9, "sizes": [1064, 1064, 1064]}   three updates, from version 9 to 12
    {"version": 7, "digest": "…", "since": null, "sizes": [8224]}             the values
    {"version": 3, "digest": "…", "since": 3, "sizes": []}                    held already
    {"end": true}
"""

from __future__ import annotations

import html
import importlib
import json
import logging
import math
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import DataError, NotFound, in_words
from orchestrator.parameters import wire_format
from orchestrator.parameters.pieces import Piece, Shape, piece_named, whole_shapes
from orchestrator.status import JobStatus
from orchestrator.system.disk import LocalDisk, discarded_on_error
from orchestrator.system.plain import brief, finite
from orchestrator.system.run_folder import PARAMETERS, REPORT, REPORT_PAGE, STATUS

log = logging.getLogger(__name__)

Array = NDArray[np.float32]
ITEM_BYTES = 4
FRAGMENTS = "fragments"
"""The fragments of Θ in the metadata of its file, as ``FragmentRow``."""
UPDATES = "atoll-updates-1"
LINE_BYTES_MAX = 1 << 20
HELD_CHARACTERS_MAX = 1 << 12
"""For the versions in a follower's request, some 800: percent-encoded, they still fit into the head of a request."""
UNKNOWN = -1
"""The version of a fragment of which a follower holds nothing."""
HEADER_ALIGNMENT = 8
"""Of a file of safetensors: values begin at a multiple of it."""
RENDERER = "orchestrator.report.html"


def write_parameters(
    run_dir: Path,
    shapes: Mapping[str, Shape],
    parts: Iterable[Mapping[str, Array]],
    facts: Mapping[str, str],
    name: str = PARAMETERS,
) -> None:
    """Write Θ in whole tensors of float32, with ``facts`` in the file's metadata. One part at a time is in memory.

        shapes  of all pieces, by name
        parts   the pieces themselves, each in one of the parts

    Raises OSError, and leaves no draft then.
    """
    tensors = whole_shapes(shapes)
    sizes = [ITEM_BYTES * math.prod(shape) for shape in tensors.values()]
    starts = dict(zip(tensors, accumulate(sizes, initial=0), strict=False))
    table = {
        tensor: {"dtype": "F32", "shape": tensors[tensor], "data_offsets": [start, start + size]}
        for (tensor, start), size in zip(starts.items(), sizes, strict=True)
    }
    header = json.dumps({"__metadata__": dict(facts), **table}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    with _drafted(run_dir / name) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        first = file.tell()
        file.truncate(first + sum(sizes))
        for part in parts:
            for name_of_piece, array in part.items():
                piece = piece_named(name_of_piece)
                _put(file, piece, array, first + starts[piece.tensor], tensors[piece.tensor])


@contextmanager
def _drafted(path: Path) -> Iterator[BinaryIO]:
    """Yield a draft that becomes the file at the end. Nothing of it stays after an error."""
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)  # what was left there; a link would lead elsewhere
    with discarded_on_error(draft):
        with open(draft, "xb") as file:
            yield file
        os.replace(draft, path)


def _put(file: BinaryIO, piece: Piece, array: Array, start: int, shape: Shape) -> None:
    """Write a piece of the tensor that begins at ``start`` and has this shape to its place in the file."""
    axis, begin, _ = piece.bounds or (0, 0, shape[0] if shape else 1)
    rows = np.ascontiguousarray(array, "<f4").reshape(math.prod(shape[:axis]), -1)
    inner = ITEM_BYTES * math.prod(shape[axis + 1 :])
    stride = inner * (shape[axis] if shape else 1)
    for number, row in enumerate(rows if rows.size else ()):
        file.seek(start + number * stride + begin * inner)
        file.write(row.data)


@dataclass(frozen=True, slots=True)
class FragmentRow:
    """A fragment in a file of Θ: its version, the digest of its parameters, and the names of its pieces."""

    version: int
    digest: str
    pieces: list[str]

    def row(self) -> list[Any]:
        return [self.version, self.digest, self.pieces]


@dataclass(frozen=True, slots=True)
class FragmentUpdate:
    """The payloads that lead from a fragment's version ``since`` to ``version``, or with None the one of its values.

    Empty if the receiver holds the version. After them the parameters have the digest.
    """

    version: int
    digest: str
    since: int | None
    payloads: Sequence[bytes | memoryview]


def updates(job: str, fragments: Iterable[FragmentUpdate], *, ended: bool = False) -> Iterator[bytes | memoryview]:
    """Yield what a follower gets, for ``read_updates``."""
    yield _line({"format": UPDATES, "job": job, "ended": ended})
    for one in fragments:
        sizes = [len(payload) for payload in one.payloads]
        yield _line({"version": one.version, "digest": one.digest, "since": one.since, "sizes": sizes})
        yield from one.payloads
    yield _line({"end": True})


def read_updates(file: IO[bytes]) -> tuple[str, bool, Iterator[FragmentUpdate]]:
    """Return the job, whether it has ended, and its fragments as they arrive. Raises DataError unless it is whole."""
    head = _read_line(file)
    if head.get("format") != UPDATES:
        raise DataError(detail=f"The service sent {brief(head)} where updates of parameters begin.")
    return str(head["job"]), bool(head["ended"]), _fragments(file)


def _fragments(file: IO[bytes]) -> Iterator[FragmentUpdate]:
    while "end" not in (row := _read_line(file)):
        try:
            version, digest, since, sizes = (row[name] for name in ("version", "digest", "since", "sizes"))
        except KeyError as error:
            raise DataError(detail=f"A fragment's line lacks {error}.") from error
        payloads = [file.read(size) for size in sizes]
        if [len(payload) for payload in payloads] != sizes:
            raise DataError(detail="The updates of parameters were cut short.")
        yield FragmentUpdate(version, digest, since, payloads)


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _read_line(file: IO[bytes]) -> dict[str, Any]:
    line = file.readline(LINE_BYTES_MAX)
    try:
        document = json.loads(line)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise DataError(detail="The updates of parameters were cut short, or are something else.")
    return document


def versions_of(held: Sequence[int], count: int) -> list[int]:
    """Return the versions held of ``count`` fragments. A follower whose first answer broke off names fewer."""
    return [*held[:count], *[UNKNOWN] * (count - len(held))]


def write_updates(path: Path, content: Iterable[bytes | memoryview]) -> None:
    """Write a file of ``updates``. Raises OSError, and leaves no draft then."""
    with _drafted(path) as file:
        file.writelines(content)


def final_updates(file: BinaryIO, held: Sequence[int]) -> Iterator[bytes | memoryview]:
    """Return what leads from the versions ``held`` to the Θ in this file of an ended job. Raises DataError.

    The fragments that are not held as they are come as values: the updates ended with the job.
    """
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(length))
        facts = header.pop("__metadata__")
        rows = [FragmentRow(*row) for row in json.loads(facts.get(FRAGMENTS, "[]"))]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(detail=f"The file of the job's parameters is damaged ({error!r}).") from error
    if not rows:
        detail = f"The parameters of job {facts.get('job')} were written by a release that has no followers."
        raise NotFound(detail=detail, remedy="Export them with `atoll export`.")
    versions = versions_of(held, len(rows))

    def fragment(row: FragmentRow, version: int) -> FragmentUpdate:
        if version == row.version:
            return FragmentUpdate(row.version, row.digest, row.version, ())
        arrays = {name: _piece_in(file, 8 + length, header, piece_named(name)) for name in row.pieces}
        return FragmentUpdate(row.version, row.digest, None, [wire_format.encode(arrays)])

    return updates(facts["job"], map(fragment, rows, versions), ended=True)


def _piece_in(file: BinaryIO, data: int, header: Mapping[str, Any], piece: Piece) -> Array:
    entry = header[piece.tensor]
    start, stop = entry["data_offsets"]
    file.seek(data + start)
    whole = np.frombuffer(file.read(stop - start), "<f4").reshape(entry["shape"])
    return whole[piece.index]


def write_report(run_dir: Path, report: dict[str, Any]) -> None:
    """Write the report for programs, then for people. A page that cannot be made says why."""
    _write(run_dir / REPORT, to_json(report))
    try:
        # its drawing library takes a second to import, which no job should wait for at its start
        page: str = importlib.import_module(RENDERER).render(report)
    except Exception as error:  # this does no harm to the job, and its figures are written
        log.exception("the report's page cannot be made")
        reason = html.escape(in_words(error))
        page = (
            f"<!doctype html><title>No report</title><p>This page could not be made ({reason}); see report.json.</p>\n"
        )
    _write(run_dir / REPORT_PAGE, page)


def write_status(run_dir: Path, status: JobStatus) -> None:
    """Write the status last, after everything else in the folder is durable. If it exists, the rest is complete."""
    disk = LocalDisk()
    for name in disk.files(run_dir):
        with suppress(FileNotFoundError):  # what the service put there for a download goes again
            disk.sync(run_dir / name)
    _write(run_dir / STATUS, to_json(status.document()))
    disk.sync(run_dir / STATUS)


def ended_as(run_dir: Path, job: str) -> bool:
    """Return whether the job's final state is there and whole. A damaged one counts as missing, and is written again."""
    try:
        status = JobStatus.model_validate_json(LocalDisk().read(run_dir / STATUS))
    except (OSError, ValueError):
        return False
    return status.job_id == job and status.view.phase == "finished" and status.view.outcome is not None


def to_json(document: Any) -> str:
    """Return the document as JSON. A value that is not a number (a loss before the first step) becomes null."""
    return json.dumps(finite(document), indent=1, allow_nan=False) + "\n"


def _write(path: Path, text: str) -> None:
    """Write the file whole. Anything in its place is moved aside or replaced, and links are not followed."""
    draft = path.with_name(path.name + ".draft")
    for place in (draft, path):
        if place.is_dir() and not place.is_symlink():
            os.rename(place, place.with_name(f"{place.name}.{uuid.uuid4().hex[:8]}.aside"))
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    with discarded_on_error(draft):
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
