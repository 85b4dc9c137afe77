"""Snapshots of a synchroniser at one step of its tape, so that the next one replays only what came after.

    {"schema": "atoll-snapshot/2", "build": …, "at": …, "count": …, "size": …, "tape": …, "digest": …}
    [the core, [[the name of a fold, what it holds], …]]

Responsible for: refusing a snapshot that is damaged, of another build or of another tape, for the tape has all of it;
and for making nothing of its bytes but what the core and the folds declare (``declared``), in bounded room. The digest has
no key: it finds damage, not forgery, and who may write here may write the tape. Refuses to know: files (``storage``),
and when one is due (``host.retry``). The fields of its lists are those of the build, so ``build`` is compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, TypeAlias

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import Instant
from orchestrator.errors import DataError
from orchestrator.tape.declared import Coder, coder
from orchestrator.tape.driver import Fold, Pending
from orchestrator.tape.schema import Mark

SCHEMA = "atoll-snapshot/2"
SNAPSHOT_FOLDS: TypeAlias = Pending | Goodput | Statistics
BYTES_MAX = 32 << 20
"""About 1,000 islands with 64 fragments; what is larger is replayed from the tape. The worst of this size that was tried
took 1.2 GB and 5 s of a processor before it was refused."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``core`` and ``folds`` as they stood at ``mark``, ``at`` that instant."""

    mark: Mark
    at: Instant
    core: Synchroniser
    folds: tuple[Fold, ...]


def encode(snapshot: Snapshot, build: str) -> bytes:
    """Raises DataError where it would be too large to be read."""
    body = _write((snapshot.core, snapshot.folds))
    mark = snapshot.mark
    header = {
        "schema": SCHEMA,
        "build": build,
        "at": snapshot.at,
        "count": mark.count,
        "size": mark.size,
        "tape": mark.digest,
    }
    raw = json.dumps({**header, "digest": _digest(header, body)}).encode() + b"\n" + body
    _refuse_too_large(len(raw))
    return raw


def decode(raw: bytes, build: str) -> Snapshot:
    """Raises DataError, with the reason, unless these bytes are whole and were made by ``build``."""
    _refuse_too_large(len(raw))
    line, _, body = raw.partition(b"\n")
    try:
        header = json.loads(line)
        digest = header.pop("digest")
        sound = digest == _digest(header, body)
        schema, build_before, mark, at = header["schema"], header["build"], *_stamp(header)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(detail="the snapshot has no header.") from error
    if not sound:
        raise DataError(detail="the snapshot is damaged: its digest does not match.")
    if (schema, build_before) != (SCHEMA, build):
        raise DataError(detail="the snapshot was made by another build.")
    core, folds = _read(body)
    return Snapshot(mark, at, core, folds)


def _refuse_too_large(size: int) -> None:
    if size > BYTES_MAX:
        raise DataError(detail=f"the snapshot has {size:,} bytes, and at most {BYTES_MAX:,} are read.")


def _stamp(header: dict[str, Any]) -> tuple[Mark, Instant]:
    integer, number, text = coder(int).read, coder(float).read, coder(str).read
    mark = Mark(integer(header["count"]), integer(header["size"]), text(header["tape"]))
    if min(mark.count, mark.size) < 0:
        raise ValueError("a place before the beginning")
    return mark, number(header["at"])


def _write(contents: tuple[Synchroniser, tuple[Fold, ...]]) -> bytes:
    write = _coder().write
    assert write is not None
    return json.dumps(write(contents), separators=(",", ":"), ensure_ascii=False, check_circular=False).encode()


def _read(body: bytes) -> tuple[Synchroniser, tuple[Fold, ...]]:
    try:
        contents: tuple[Synchroniser, tuple[Fold, ...]] = _coder().read(json.loads(body.decode()))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(detail=f"the snapshot does not hold the state of a synchroniser: {error}.") from error
    return contents


@cache
def _coder() -> Coder:
    return coder(tuple[Synchroniser, tuple[SNAPSHOT_FOLDS, ...]])


def _digest(header: dict[str, Any], body: bytes) -> str:
    digest = blake2b(json.dumps(header).encode(), digest_size=16)
    digest.update(body)
    return digest.hexdigest()
