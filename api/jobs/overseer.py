"""Running jobs run: one of which the cluster knows nothing any more is started again, and goes on from its run folder.

    running ──▶ starting ──▶ running    it remembers, with the next epoch, and its islands are placed anew
       │  ▲        │  └────▶ failed     after ``TRIES_MAX`` in vain, or when its own files say that it cannot go on
       │  └────────┘ not this time
       └──▶ failed                      nothing of it is left, or the installation was taken down while it ran

A cluster that lost its power, or every process of which was killed, is followed by one that knows no job; tape and journal
outlive it. Responsible for each of these arrows being taken once, whoever is killed when, as the dispatcher is for its own:
who dies while it starts a job leaves it ``starting``, which the next process settles. Silence is no loss: a job that does
not answer, or whose synchroniser Ray makes again, is left alone. Refuses to know what a job does with its files.

``taken_down`` is there since somebody ended the installation on purpose, and until the jobs that ran then have been failed:
nobody who ends all expects that to be undone by the next start.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from api.checkpoints.finding import checkpoints_of
from api.jobs.control import ControlPort, StatusRecord
from api.jobs.cordons import Cordons
from api.jobs.places import refuse_outside
from api.jobs.tending import Tending
from api.run.folder import Run, read_status
from api.schemas import JobState
from api.storage.store import JobRow, Store
from orchestrator.config import JobSpec
from orchestrator.errors import AtollError
from orchestrator.roots import AllowedRoots

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
TRIES_MAX = 3
CLOSE_TIMEOUT_S = 5.0
TAKEN_DOWN = "it ran when the installation was taken down (`atoll down`)."
NOTHING_LEFT = "nothing of it runs any more, and it left neither a final state nor a tape."
THE_SERVICE = "the service, which started it again"


class Overseer:
    """``record`` says how a job stands, None for one of which nothing runs and nothing is known to have ended."""

    def __init__(
        self,
        control: ControlPort,
        store: Store,
        cordons: Cordons,
        record: Callable[[JobRow], StatusRecord | None],
        roots: AllowedRoots,
        taken_down: Path | None = None,
    ) -> None:
        self._roots = roots
        self._control, self._store, self._cordons, self._record = control, store, cordons, record
        self._taken_down = taken_down
        self._pool = ThreadPoolExecutor(8, "overseer")
        self._looking = Tending(self.look, "overseer", LOOK_EVERY_S)
        self._closing = False
        self._tries: Counter[str] = Counter()

    def begin(self) -> None:
        """From here on it looks by itself, at once for the first time."""
        self._looking.start()

    def close(self) -> None:
        """Start nothing more. A start under way that does not end soon is left to the next process."""
        self._closing = True
        self._looking.stop(CLOSE_TIMEOUT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def look(self) -> None:
        """Every job that should run and does not is started again, or has failed with the reason."""
        on_purpose = self._taken_down is not None and self._taken_down.exists()
        rows = self._store.jobs(states={JobState.RUNNING})
        found = list(self._pool.map(self._there, rows))
        for row, there in zip(rows, found, strict=True):
            if there:
                self._tries.pop(row.job, None)
            elif there is False and on_purpose:
                self._fail(row, JobState.RUNNING, TAKEN_DOWN)
            elif there is False:
                self._go_on(row)
        if on_purpose and None not in found and self._taken_down is not None:
            self._taken_down.unlink(missing_ok=True)

    def _there(self, row: JobRow) -> bool | None:
        """Whether anything is known of the job; None while the cluster does not say."""
        try:
            return self._record(row) is not None
        except AtollError:
            return None

    def _go_on(self, row: JobRow) -> None:
        if not Run(row.job, Path(row.run_dir), False).tape.exists():
            self._fail(row, JobState.RUNNING, NOTHING_LEFT)
            return
        if self._closing or not self._store.move_job(row.job, JobState.RUNNING, JobState.STARTING):
            return
        logger.warning("nothing of job %s runs any more; it is started again from its run folder", row.job)
        try:
            spec, cordoned = JobSpec.model_validate(row.spec), self._cordons.callers()
            refuse_outside(spec, self._roots, begun=True)
            self._control.start_job(row.job, spec, Path(row.run_dir), cordoned, self._roots)
        except Exception as error:
            if not self._closing:  # else the cluster was left meanwhile; the next process sees what became of it
                self._missed(row, error)
            return
        self._store.move_job(row.job, JobState.STARTING, JobState.RUNNING)
        self._cordons.tell(row.job, THE_SERVICE)

    def _missed(self, row: JobRow, error: Exception) -> None:
        """Its own final state, if it left one, says more of the reason than we can; and then another try is none."""
        logger.warning("job %s could not be started again: %s", row.job, error)
        self._tries[row.job] += 1
        if self._tries[row.job] < TRIES_MAX and read_status(Path(row.run_dir)) is None:
            self._store.move_job(row.job, JobState.STARTING, JobState.RUNNING)
            return
        reason = f"nothing of it ran any more, and it could not be started again: {error}"
        self._fail(row, JobState.STARTING, reason)

    def _fail(self, row: JobRow, before: JobState, reason: str) -> None:
        self._tries.pop(row.job, None)
        try:
            resume = (
                f" with `--resume {row.job}`, from its newest checkpoint" if checkpoints_of(row, self._roots) else ""
            )
        except AtollError:
            resume = ""  # whether there is one is not known
        self._store.move_job(row.job, before, JobState.FAILED, reason=f"{reason} Submit it again{resume}.")
