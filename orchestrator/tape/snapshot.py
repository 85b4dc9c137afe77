"""What a synchroniser knew at one step of its tape, so that the next one need not go through all that came before.

    {"schema": "atoll-snapshot/1", "build": …, "at": …, "count": …, "size": …, "tape": …, "digest": …}
    the core and the folds, pickled

Responsible for: a snapshot that is damaged, of another build or of another tape being none, for the tape tells all of it;
and for making nothing of its bytes but what atoll's own pure packages define. Refuses to know: files (``storage``), and
when one is due (``runtime.snapshots``). The names of a pickle's classes are those of the build, so ``build`` is compared.
"""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import Instant
from orchestrator.errors import DataError
from orchestrator.tape.driver import Fold
from orchestrator.tape.schema import Mark

SCHEMA = "atoll-snapshot/1"
PACKAGES = ("orchestrator.core.", "orchestrator.accounting.", "orchestrator.tape.")
PLAIN = frozenset({("collections", "deque"), ("collections", "Counter"), ("collections", "defaultdict")})
BUILTINS = frozenset({"dict", "float", "frozenset", "int", "list", "set", "tuple"})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``core`` and ``folds`` as they stood at ``mark``, ``at`` that instant."""

    mark: Mark
    at: Instant
    core: Synchroniser
    folds: tuple[Fold, ...]


def encode(snapshot: Snapshot, build: str) -> bytes:
    body = pickle.dumps((snapshot.core, snapshot.folds), protocol=pickle.HIGHEST_PROTOCOL)
    mark = snapshot.mark
    header = {
        "schema": SCHEMA,
        "build": build,
        "at": snapshot.at,
        "count": mark.count,
        "size": mark.size,
        "tape": mark.digest,
    }
    return json.dumps({**header, "digest": _digest(header, body)}).encode() + b"\n" + body


def decode(raw: bytes, build: str) -> Snapshot:
    """Raises DataError, with the reason, unless these bytes are whole and were made by ``build``."""
    line, _, body = raw.partition(b"\n")
    try:
        header = json.loads(line)
        digest = header.pop("digest")
        sound = digest == _digest(header, body)
    except (ValueError, KeyError, AttributeError) as error:
        raise DataError(detail="the snapshot has no header.") from error
    if not sound:
        raise DataError(detail="the snapshot is damaged: its digest does not fit.")
    if (header["schema"], header["build"]) != (SCHEMA, build):
        raise DataError(detail="the snapshot was made by another build.")
    core, folds = _Unpickler(io.BytesIO(body)).load()
    return Snapshot(Mark(header["count"], header["size"], header["tape"]), header["at"], core, folds)


def _digest(header: dict[str, Any], body: bytes) -> str:
    told = blake2b(json.dumps(header).encode(), digest_size=16)
    told.update(body)
    return told.hexdigest()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = module.startswith(PACKAGES) or (module, name) in PLAIN or (module == "builtins" and name in BUILTINS)
        if not known:
            raise DataError(
                detail=f"the snapshot names {module}.{name}, which is no part of what a synchroniser knows."
            )
        return super().find_class(module, name)
