"""``RUN_DIR/status.json``: the final state that a job leaves, believed only where all of it is what it should be.

Everybody who lists jobs reads these files, so one that is damaged must be no more than the misfortune of its own job.
Responsible for: a final state, or none, or why what lies there is none; and for finding that out once, not at every read.
Refuses to know what becomes of a job whose final state is damaged.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from api.run.files import parsed, read_below
from orchestrator.actors.records import StatusRecord
from orchestrator.errors import DataError
from orchestrator.specification.bounds import FRAGMENTS_MAX, ISLANDS_MAX
from orchestrator.system.run_folder import STATUS

BYTES_MAX = 64 << 20
"""A job of 10,000 islands and as many recoveries leaves half of that."""
KEPT_MAX = 256
COUNT_MAX = 2**63 - 1
TIME_S_MAX = 1e12

Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Seconds = Annotated[float, Field(ge=-TIME_S_MAX, le=TIME_S_MAX, allow_inf_nan=False)]
Ratio = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Island(_Part):
    island: str
    node_group: str
    region: str
    accelerator_count: Count
    state: str
    reason: str
    incarnation: Count
    node: str
    pid: int | None
    step: Count
    steps_total: Count
    tokens_total: Count
    step_seconds: Seconds | None
    loss: float | None
    last_merge_at: Seconds | None
    restarts: Count
    flag: str = ""
    quarantines: Count = 0
    standby: bool = False
    overdue_s: Seconds = 0.0


class _Fragment(_Part):
    fragment: Count
    version: Count
    phase: str
    offered: list[str]
    step: Count


class _View(_Part):
    phase: Literal["running", "finishing", "finished"]
    outcome: Literal["completed", "cancelled", "failed"] | None
    reason: str
    pause_reason: str | None
    epoch: Count
    token_budget: Count
    tokens_trained: Count
    global_version: Count
    cordoned: list[str] = []
    islands: Annotated[list[_Island], Field(max_length=ISLANDS_MAX)]
    fragments: Annotated[list[_Fragment], Field(max_length=FRAGMENTS_MAX)]


class _Command(_Part):
    kind: str
    island: str | None
    caller: str
    at: Seconds
    accepted: bool | None
    detail: str


class _Goodput(_Part):
    goodput_ratio: Ratio | None = None


class _Line(_Part):
    up_payloads: Count
    up_bytes: Count
    up_busy_seconds: Seconds
    down_payloads: dict[str, Count]
    down_bytes: dict[str, Count]
    down_busy_seconds: Seconds
    queued_fragments: Count
    queued_bytes: Count
    trouble: str | None = None


class _Lines(_Part):
    islands: dict[str, _Line]
    regions: dict[str, _Line]


class _Norms(_Part):
    fragment: Count
    version: Count
    update_norm: float
    residue_norm: float


class _Status(_Part):
    job_id: str
    name: str
    started_at: Seconds
    at: Seconds
    view: _View
    goodput: _Goodput
    statistics: dict[str, Any]
    loss_curve: list[Annotated[list[float | None], Field(min_length=3, max_length=3)]]
    commands: dict[str, _Command]
    fragment_parameters: list[Count] = []
    lines: _Lines = _Lines(islands={}, regions={})
    fragment_norms: Annotated[list[_Norms], Field(max_length=FRAGMENTS_MAX)] = []
    last_known: bool = False


_SHAPE = TypeAdapter(_Status)


class StatusFile(NamedTuple):
    """``record`` is a final state; ``damage`` says why what is there is none. Neither, where nothing final is there."""

    record: StatusRecord | None = None
    damage: str = ""


class _KnownDamages:
    """The damage of the files examined last, by each file's inode, size and times."""

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
    """The final state that the job left in ``run_dir``, or its damage. A damaged file is read once, until it changes."""
    path = run_dir / STATUS
    try:
        there = os.lstat(path)
    except (OSError, ValueError):
        return StatusFile()
    mark = (str(path), there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns)
    if (damage := _KNOWN_DAMAGES.damage(mark)) is not None:
        return StatusFile(damage=damage)
    try:
        record = parsed(read_below(run_dir, STATUS, BYTES_MAX), path)
        shape = _SHAPE.validate_python(record)
        if shape.job_id != run_dir.name:
            raise DataError(detail=f"{path} is that of another job, {shape.job_id!r:.80}.")
    except FileNotFoundError:
        return StatusFile()
    except ValidationError as error:
        damage = _problem_with(path, error)
    except (DataError, RecursionError, MemoryError) as error:
        damage = str(error) or f"{path} cannot be read: {type(error).__name__}."
    else:
        over = shape.view.phase == "finished"
        return StatusFile(record=record) if over else StatusFile()  # type: ignore[arg-type]  # that is what was checked
    _KNOWN_DAMAGES.keep(mark, damage)
    return StatusFile(damage=damage)


def _problem_with(path: Path, error: ValidationError) -> str:
    first, count = error.errors(include_url=False)[0], error.error_count()
    more = f", and {count - 1} more such things" if count > 1 else ""
    place = ".".join(str(part) for part in first["loc"])[:120]
    return f"{path} lacks what a final state has: at {place}: {first['msg'][:120]}{more}."
