"""Tapes that a command writes: one file a run, all sealed when the command is through, also after Ctrl-C.

A specification with several systems is several runs; then every tape is named after its run: out.jsonl becomes
out-decoupled.jsonl. Refuses to overwrite.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import ConfigurationError
from orchestrator.tape.schema import FleetHeader, Header
from orchestrator.tape.storage import TapeWriter


class TapeFiles:
    """``names`` are the runs to come; with one there is one file, ``path`` itself."""

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self.paths = {name: path if len(names) == 1 else path.with_stem(f"{path.stem}-{name}") for name in names}
        self._writers: list[TapeWriter] = []
        for one in self.paths.values():
            if not one.absolute().parent.is_dir():
                raise ConfigurationError(detail=f"{one} cannot be written: there is no folder {one.absolute().parent}.")
            if one.exists():
                raise ConfigurationError(detail=f"{one} is there already. Remove it, or name another tape.")

    def open(self, name: str, header: Header | FleetHeader) -> TapeWriter:
        writer = TapeWriter(self.paths[name], header)
        self._writers.append(writer)
        return writer

    def digests(self) -> dict[str, str]:
        """The digest of every tape by its path, as its footer says."""
        return {str(writer.path): writer.digest for writer in self._writers}

    def __enter__(self) -> TapeFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()
