"""Processes of a job that wait before they write a file of a checkpoint, as long as a test needs to catch them in the act.

Whoever imports this module does so: islands by their trainer, the synchroniser by its class.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from learners import synthetic
from orchestrator.checkpoints.folder import Folder
from orchestrator.runtime import synchroniser_actor

PLUGS = Path(tempfile.gettempdir()) / "atoll-plugs"


def create(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> synthetic.SyntheticTrainer:
    return synthetic.create(spec, shard_index, shard_count)


class SynchroniserActor(synchroniser_actor.SynchroniserActor):
    """A synchroniser, in a process that has imported this module; processes are found by the class's name."""


def plug_of(path: Path) -> Path:
    """What lies there while whoever would write the file at ``path`` waits."""
    return PLUGS / blake2b(str(path).encode(), digest_size=16).hexdigest()


def _patient(
    write_all: Callable[[Folder, str, Iterable[bytes]], None],
) -> Callable[[Folder, str, Iterable[bytes]], None]:
    def write(folder: Folder, name: str, chunks: Iterable[bytes]) -> None:
        while folder.local is not None and plug_of(folder.local / name).exists():
            time.sleep(0.02)
        write_all(folder, name, chunks)

    return write


Folder.write_all = _patient(Folder.write_all)  # type: ignore[method-assign]
