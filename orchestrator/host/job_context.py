"""The context of a running job, which every part of its process is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.config import JobSpec
from orchestrator.core.vocabulary import Epoch, Instant
from orchestrator.host.line_traffic import JobLines
from orchestrator.host.posting import Post
from orchestrator.roots import AllowedRoots


@dataclass(frozen=True, slots=True)
class JobContext:
    """One life of a job. ``roots`` are what it may touch; ``epoch`` is this life's; ``now`` is the job's own time.

    ``failed`` is called with what went wrong when the job cannot go on: a bug of ours, or Fenced when islands listen to a
    newer synchroniser. ``lines`` counts what islands' lines carry.
    """

    job: str
    spec: JobSpec
    run_dir: Path
    roots: AllowedRoots
    epoch: Epoch
    now: Callable[[], Instant]
    post: Post
    failed: Callable[[BaseException], None]
    lines: JobLines = field(default_factory=JobLines)

    def guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do a thread's work: a bug of ours ends the job, where a thread or a pool would keep it to itself."""
        try:
            work(*arguments)
        except Exception as error:
            self.failed(error)
