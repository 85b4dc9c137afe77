"""The list of all jobs: filtered, page by page; and the removal of jobs that have ended.

Removal is permanent: the row, its commands, and the run's folder with tape, report and merged parameters. Jobs that have not
ended are not removed. What islands left on other machines is swept in the background, also on machines that come back later.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from threading import Event

from api.jobs.background_loop import BackgroundLoop
from api.jobs.control import ControlPort
from api.jobs.overseer import is_mirrored
from api.jobs.service import Service
from api.jobs.status_cache import refuse_outdated
from api.schemas import ALIVE, Jobs, JobState
from api.storage.store import Store
from orchestrator.errors import Conflict, InfrastructureError, NotFound
from orchestrator.system.run_folder import remove_tree

SWEEP_EVERY_S = 10.0


class JobList:
    def __init__(self, service: Service, store: Store, control: ControlPort, runs: Path) -> None:
        self._service = service
        self._store = store
        self._control, self._runs = control, runs
        self._removed = Event()
        self._loop = BackgroundLoop(self.sweep, "sweep", SWEEP_EVERY_S)

    def begin(self) -> None:
        """Start sweeping other machines in the background."""
        self._loop.start()

    def close(self) -> None:
        self._loop.stop()

    def sweep(self) -> None:
        """Remove from other machines what is left there of jobs that do not exist (any more)."""
        again = self._removed.is_set()
        self._removed.clear()
        try:
            self._control.sweep(self._runs, lambda job: self._store.job(job) is not None, again=again)
        except BaseException:
            if again:
                self._removed.set()
            raise

    def page(self, state: JobState | None, name: str | None, limit: int, cursor: str | None) -> Jobs:
        """Return the newest ``limit`` jobs of this state and name, or those after the job ``cursor``."""
        last = None if cursor is None else self._store.job(cursor)
        if cursor is not None and last is None:
            raise NotFound(detail=f"The cursor {cursor!r} does not name a job.", remedy="Start without a cursor.")
        before = last.number if last else None
        if state is None:
            rows = self._store.jobs(name=name, before=before, limit=limit + 1)
        else:
            rows = self._store.jobs(name=name, before=before, states={state, *ALIVE})
        summaries = self._service.summaries(rows)
        wanted = (job for job in summaries if state is None or job.state == state)
        page = list(islice(wanted, limit))
        more = next(wanted, None) is not None
        return Jobs(jobs=page, next_cursor=page[-1].job if more else None)

    def remove(self, job: str, if_match: str | None = None) -> None:
        """Remove the job with everything it left. The row goes last: if something fails midway, it is still there."""
        if job == "latest":
            detail = "`latest` names another job once this one is removed, so a repeated request would remove two jobs."
            raise Conflict(detail=detail, remedy="Give the job's id.")
        details = self._service.job(job)
        if not details.state.final:
            remedy = f"End it first with `atoll cancel {job}`."
            raise Conflict(detail=f"Job {job} is {details.state}; only an ended job can be removed.", remedy=remedy)
        refuse_outdated(if_match, str(self._store.generation(job)), f"job {job}")
        if is_mirrored(self._store.job(job)):
            self._control.delete_log(job)
        folder = Path(details.run_dir)
        if folder.name == job:  # else the row is damaged, and names some other folder
            clear(folder)
        self._store.remove_job(job)
        self._removed.set()
        self._loop.wake()


def clear(folder: Path) -> None:
    """Remove the run's folder, and ``latest`` beside it if that points to it."""
    latest = folder.parent / "latest"
    try:
        if latest.is_symlink() and latest.resolve() == folder.resolve():
            latest.unlink()
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            folder.unlink()  # a link's target does not belong to the job
        elif folder.exists():
            remove_tree(folder)
    except OSError as error:
        detail = f"The run's folder {folder} cannot be removed: {error.strerror}."
        raise InfrastructureError(detail=detail, remedy="Remove it by hand, and repeat the request.") from error
