"""The files that a job leaves: RUN_DIR/{tape.jsonl, status.json, report.json, report.html, merged.safetensors}.

``status.json`` is written last: once it is there, all of the job is. Refuses to compute figures (``accounting``) or
pages (``report``).
"""

from __future__ import annotations

import html
import importlib
import json
import logging
import math
import os
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import in_words
from orchestrator.parameters.pieces import Piece, Shape, piece_named, whole_shapes
from orchestrator.status import JobStatus
from orchestrator.system.disk import LocalDisk
from orchestrator.system.plain import finite
from orchestrator.system.run_folder import PARAMETERS, REPORT, REPORT_PAGE, STATUS

log = logging.getLogger(__name__)

Array = NDArray[np.float32]
ITEM_BYTES = 4
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
    draft = run_dir / f"{name}.draft"
    draft.unlink(missing_ok=True)  # what was left there; a link would lead elsewhere
    tensors = whole_shapes(shapes)
    sizes = [ITEM_BYTES * math.prod(shape) for shape in tensors.values()]
    starts = dict(zip(tensors, accumulate(sizes, initial=0), strict=False))
    table = {
        tensor: {"dtype": "F32", "shape": tensors[tensor], "data_offsets": [start, start + size]}
        for (tensor, start), size in zip(starts.items(), sizes, strict=True)
    }
    header = json.dumps({"__metadata__": dict(facts), **table}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    try:
        with open(draft, "xb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            first = file.tell()
            file.truncate(first + sum(sizes))
            for part in parts:
                for name_of_piece, array in part.items():
                    piece = piece_named(name_of_piece)
                    _put(file, piece, array, first + starts[piece.tensor], tensors[piece.tensor])
    except BaseException:
        draft.unlink(missing_ok=True)  # half of it is of no use, and takes the room that others wait for
        raise
    os.replace(draft, run_dir / name)


def _put(file: BinaryIO, piece: Piece, array: Array, start: int, shape: Shape) -> None:
    """Write a piece of the tensor that begins at ``start`` and has this shape to its place in the file."""
    axis, begin, _ = piece.bounds or (0, 0, shape[0] if shape else 1)
    rows = np.ascontiguousarray(array, "<f4").reshape(math.prod(shape[:axis]), -1)
    inner = ITEM_BYTES * math.prod(shape[axis + 1 :])
    stride = inner * (shape[axis] if shape else 1)
    for number, row in enumerate(rows if rows.size else ()):
        file.seek(start + number * stride + begin * inner)
        file.write(row.data)


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
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(draft, path)
