"""The list of all jobs: shown page by page, and cleared of those that ended.

Responsible for filters and pages, and for leaving nothing of a job that was removed. What is removed is gone for good: the
row, its commands, and the run's folder with tape, report and merged parameters. It refuses to remove what lives.
"""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

from api.jobs.service import Service
from api.jobs.status_cache import refuse_outdated
from api.schemas import ALIVE, Jobs, JobState
from api.storage.store import Store
from orchestrator.errors import Conflict, InfrastructureError, NotFound


class JobList:
    def __init__(self, service: Service, store: Store) -> None:
        self._service = service
        self._store = store

    def page(self, state: JobState | None, name: str | None, limit: int, cursor: str | None) -> Jobs:
        """The newest ``limit`` jobs of this state and name, or those that follow the job ``cursor``."""
        last = None if cursor is None else self._store.job(cursor)
        if cursor is not None and last is None:
            raise NotFound(detail=f"The cursor {cursor!r} is no job that is known.", remedy="Begin without one.")
        before = last.number if last else None
        if state is None:
            rows = self._store.jobs(name=name, before=before, limit=limit + 1)
        else:
            rows = self._store.jobs(name=name, before=before, states={state, *ALIVE})
        self._service.statuses.ask_all(rows)
        summaries = (self._service.summary(row) for row in rows)
        wanted = (job for job in summaries if state is None or job.state == state)
        page = list(islice(wanted, limit))
        more = next(wanted, None) is not None
        return Jobs(jobs=page, next_cursor=page[-1].job if more else None)

    def remove(self, job: str, if_match: str | None = None) -> None:
        """Nothing is left of this job. The folder goes first: should that fail midway, the row still says what it was."""
        if job == "latest":
            detail = "`latest` is another job once this one is removed, so that a repeated request would remove two."
            raise Conflict(detail=detail, remedy="Give the job's own id.")
        details = self._service.job(job)
        if not details.state.final:
            remedy = f"End it first with `atoll cancel {job}`."
            raise Conflict(
                detail=f"Job {job} is {details.state}; only one that has ended can be removed.", remedy=remedy
            )
        refuse_outdated(if_match, str(self._store.generation(job)), f"job {job}")
        folder = Path(details.run_dir)
        if folder.name == job:  # else the row is damaged, and names the folder of something else
            clear(folder)
        self._store.remove_job(job)


def clear(folder: Path) -> None:
    """The run's folder is gone, and ``latest`` beside it if that pointed there."""
    latest = folder.parent / "latest"
    try:
        if latest.is_symlink() and latest.resolve() == folder.resolve():
            latest.unlink()
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            folder.unlink()  # what it leads to is not the job's
        elif folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        detail = f"The run's folder {folder} cannot be removed: {error.strerror}."
        raise InfrastructureError(detail=detail, remedy="Remove it by hand, and repeat the request.") from error
