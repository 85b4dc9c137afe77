"""The roots below which jobs of an installation may read and write: those given to ``atoll up``, or the default ones.

The same decision for ``atoll up``, which refuses a root that can be none before anything is started, and for the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.checkpoints.folder import refuse_unreachable
from orchestrator.roots import AllowedRoots, defaults

KINDS = {
    "checkpoints": "jobs may read and write checkpoints below this folder or URL (default: the working folder)",
    "data": "jobs may read text files below this folder (default: the working folder)",
}


def roots_of(
    home: Path,
    runs: Path,
    checkpoints: Sequence[str],
    data: Sequence[str],
    database: str | None = None,
    key: Path | None = None,
) -> AllowedRoots:
    """Raises ConfigurationError for a root that can be none, or is in a store for which a package is missing."""
    private = [key.resolve()] if key else []
    if database and database.startswith("sqlite"):
        file = database.partition(":///")[2].partition("?")[0]
        private += [Path(f"{file}{suffix}").resolve() for suffix in ("", "-wal", "-shm", "-journal") if file]
    roots = defaults(home.resolve(), runs.resolve(), checkpoints, data, _working_folder(home), private)
    refuse_unreachable(roots.checkpoints)
    return roots


def _working_folder(home: Path) -> Path:
    """Where it was removed, the home: that is no default root, so there is none."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return home.resolve()
