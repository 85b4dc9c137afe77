"""What is read of files, but for documents and the lists of blocks: by stretches, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from orchestrator.checkpoints.folder import Between, Folder


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The sizes of the stretches that are read meanwhile, one after another."""
    stretches: list[int] = []
    opened = Folder.opened

    @contextmanager
    def noted(folder: Folder, name: str) -> Iterator[Between]:
        with opened(folder, name) as between:

            def reading(start: int, stop: int) -> bytes:
                stretches.append(stop - start)
                return between(start, stop)

            yield reading

    with patch.object(Folder, "opened", noted):
        yield stretches
