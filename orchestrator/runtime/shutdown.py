"""The shutdown of a job: all of its actors end, and a job that broke leaves its story on disk first.

Responsible for nothing of a job outliving it, whichever of its actors are dead or hang. Refuses to know why it ends.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import ray

from orchestrator.actors.handle import ActorHandle
from orchestrator.actors.records import StatusRecord
from orchestrator.core.vocabulary import JobOutcome, JobPhase
from orchestrator.errors import ConfigurationError, in_words, origin
from orchestrator.host import records
from orchestrator.run_folder import CRASH
from orchestrator.runtime import cluster
from orchestrator.runtime.controller import Controller
from orchestrator.runtime.names import controller_name, synchroniser_name

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0


def end_job(job: str) -> None:
    """End all of this job, the calling synchroniser last. Where the controller is dead or hangs, that is done from here."""
    own = synchroniser_name(job)
    try:
        controller: ActorHandle[Controller] | None = cluster.actor_named(controller_name(job))
        if controller is not None:
            ray.get(controller.call(Controller.close), timeout=CLOSE_TIMEOUT_S)  # usually ends this very process
    except Exception as error:
        log.warning("the controller does not let go: %s", in_words(error))
    try:
        cluster.end_actors_of(job, but=own)
    finally:
        cluster.end_actor_named(own)


def crash(
    job: str, run_dir: Path, error: Exception, close: Iterable[Callable[[], None]], status: Callable[[], StatusRecord]
) -> None:
    """The job ends here, as failed. Islands would train on for nothing, so they are ended as well."""
    log.critical("the job cannot go on", exc_info=error)
    story = "".join(traceback.format_exception(error))

    def write_story() -> None:
        (run_dir / CRASH).write_text(story)

    def write_status() -> None:
        last = status()
        reason = (
            in_words(error) if isinstance(origin(error), ConfigurationError) else f"{in_words(error)} (see {CRASH})"
        )
        over = {"phase": JobPhase.FINISHED, "outcome": JobOutcome.FAILED, "reason": reason}
        records.write_status(run_dir, {**last, "view": {**last["view"], **over}})

    try:
        for work in (write_story, *close, write_status):
            try:
                work()
            except Exception:  # what broke the job may break one of these; the rest is still to be done
                log.exception("the end could not be recorded in full")
    finally:
        end_job(job)
