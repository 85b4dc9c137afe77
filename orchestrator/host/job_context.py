"""The context of a running job, which every part of its process is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import JobSpec
from orchestrator.core.vocabulary import Epoch, Instant
from orchestrator.host.posting import Post
from orchestrator.roots import AllowedRoots

Failed = Callable[[BaseException], None]
"""Called with what went wrong when the job cannot go on."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """One life of a job. ``roots`` are what it may touch; ``epoch`` is this life's; ``now`` is the job's own time.

    ``failed`` is told of our own bugs, and of Fenced when islands listen to a newer synchroniser.
    """

    job: str
    spec: JobSpec
    run_dir: Path
    roots: AllowedRoots
    epoch: Epoch
    now: Callable[[], Instant]
    post: Post
    failed: Failed
