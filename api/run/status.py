"""Read ``RUN_DIR/status.json``, the final status of a job (``orchestrator.status``).

Every list of jobs reads these files, so a damaged one must not affect other jobs. A damaged file is examined once, not at
every read. What becomes of a job whose final status is damaged is decided elsewhere (``api.jobs.service``).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from pydantic import ValidationError

from api.run.files import read_below
from orchestrator.errors import DataError
from orchestrator.status import JobStatus
from orchestrator.system.run_folder import STATUS

BYTES_MAX = 64 << 20
"""A job of 10,000 islands and as many recoveries leaves half of it."""
KEPT_MAX = 256


class StatusFile(NamedTuple):
    """A final status, or what is wrong with the file. Neither is set where there is no final status."""

    status: JobStatus | None = None
    damage: str = ""


class _KnownDamages:
    """The damage of the files that were examined last, by each file's inode, size and times."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._damages: OrderedDict[tuple[str, int, int, int, int], str] = OrderedDict()

    def damage(self, mark: tuple[str, int, int, int, int]) -> str | None:
        with self._lock:
            return self._damages.get(mark)

    def keep(self, mark: tuple[str, int, int, int, int], damage: str) -> None:
        with self._lock:
            self._damages[mark] = damage
            if len(self._damages) > KEPT_MAX:
                self._damages.popitem(last=False)


_KNOWN_DAMAGES = _KnownDamages()


def examine(run_dir: Path) -> StatusFile:
    """Return the final status that the job left in ``run_dir``, or the file's damage."""
    path = run_dir / STATUS
    try:
        there = os.lstat(path)
    except (OSError, ValueError):
        return StatusFile()
    mark = (str(path), there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns)
    if (damage := _KNOWN_DAMAGES.damage(mark)) is not None:
        return StatusFile(damage=damage)
    try:
        status = JobStatus.model_validate_json(read_below(run_dir, STATUS, BYTES_MAX), strict=True)
        if status.job_id != run_dir.name:
            raise DataError(detail=f"{path} is the status of another job, {status.job_id!r:.80}.")
    except FileNotFoundError:
        return StatusFile()
    except ValidationError as error:
        damage = _problem_with(path, error)
    except (DataError, RecursionError, MemoryError) as error:
        damage = str(error) or f"{path} cannot be read: {type(error).__name__}."
    else:
        return StatusFile(status=status) if status.view.phase == "finished" else StatusFile()
    _KNOWN_DAMAGES.keep(mark, damage)
    return StatusFile(damage=damage)


def _problem_with(path: Path, error: ValidationError) -> str:
    first, count = error.errors(include_url=False)[0], error.error_count()
    more = f" There are {count - 1} more such errors." if count > 1 else ""
    place = ".".join(str(part) for part in first["loc"])[:120]
    where = f", at {place}" if place else ""
    return f"{path} is no final status{where}: {first['msg'][:120]}.{more}"
