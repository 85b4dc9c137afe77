"""The start of a synchroniser, its restart after a death, and the shutdown of its job.

    files ─ replayed core, Θ ─▶ first events ─▶ timers ─▶ links to all that live ─▶ orphans are ended

Responsible for everything of recovery that touches Ray or a clock. The core decides what is asked again: that comes as
effects of ``SynchroniserRestarted``. At the end of a job all of its actors end, whichever of them are dead or hang, and a
job that broke leaves its story on disk first.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from orchestrator.checkpoints.resumption import Resumption, begun
from orchestrator.core.island_record import PLACED, WITH_PROCESS, Island
from orchestrator.core.saving import HandOver
from orchestrator.core.vocabulary import (
    FIRST_EPOCH,
    Epoch,
    Instant,
    IslandId,
    IslandState,
    JobOutcome,
    JobPhase,
    JobPolicy,
)
from orchestrator.errors import (
    ConfigurationError,
    Conflict,
    DataError,
    Fenced,
    FilesElsewhere,
    InfrastructureError,
    first_line,
    in_words,
    origin,
)
from orchestrator.host import job_files, records
from orchestrator.host.job_context import Timers
from orchestrator.host.job_files import HandOverNote, JobFiles, ShardJournals, mirror, open_files
from orchestrator.host.last_known import last_known
from orchestrator.host.retry import STORE_REFUSES, Retrier
from orchestrator.host.state_view import StateView
from orchestrator.runtime import cluster, controllers, salvaging
from orchestrator.runtime.controller import Controller
from orchestrator.runtime.controllers import JobController
from orchestrator.runtime.head_copies import bring
from orchestrator.runtime.interpreter import Interpreter
from orchestrator.runtime.salvaging import Survey
from orchestrator.runtime.settings import synchroniser_name
from orchestrator.runtime.supervision import Helper, SynchroniserFacts
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.policy_source import continued
from orchestrator.status import JobStatus
from orchestrator.system import release
from orchestrator.system.disk import Disk, LocalDisk
from orchestrator.system.mirror import JobObjects, MirroredDisk
from orchestrator.system.object_store import open_store, require_header
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import CRASH, RESUMED, SPECIFICATION, TAPE
from orchestrator.system.store_log import has_log
from orchestrator.tape.driver import Fold
from orchestrator.tape.replay import Recovered
from orchestrator.tape.schema import Header, decode_header
from orchestrator.tape.storage import beginning

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 30.0
UNLOCK_TIMEOUT_S = 10.0
HAND_OVER_TIMEOUT_S = 10.0
ENDED_WITHIN_S = 30.0
LIVES_TIMEOUT_S = 60.0
Result = TypeVar("Result")


def end_job(job: str, note: Callable[[str], None] = lambda _: None) -> None:
    """End all of this job, the calling synchroniser last. Where the controller is dead or hangs, that is done from here.

    Waits until the head has all that this synchroniser has left, if that is on another machine, and notes why it has not.
    """
    own, missing = synchroniser_name(job), ""
    try:
        controller = controllers.controller_here(job)
        while controller is not None:
            before, missing = missing, ray.get(controller.call(Controller.close), timeout=CLOSE_TIMEOUT_S) or ""
            if not missing:  # usually this very process is ended by then
                break
            if missing != before:
                log.warning("the job has ended, but its run folder is not on the head: %s", missing)
            note(missing)
    except Exception as error:
        log.warning("the controller does not let go: %s", in_words(error))
    try:
        controllers.let_go(job)
        cluster.end_actors_of(job, but=own)
    finally:
        cluster.end_actor_named(own)


def crash(
    job: str, run_dir: Path, error: Exception, close: Iterable[Callable[[], None]], status: Callable[[], JobStatus]
) -> None:
    """The job ends here, as failed. Islands would train on for nothing, so they are ended as well."""
    log.critical("the job cannot continue", exc_info=error)
    story = "".join(traceback.format_exception(error))

    def write_story() -> None:
        (run_dir / CRASH).write_text(story)

    def write_status() -> None:
        last = status()
        reason = (
            in_words(error) if isinstance(origin(error), ConfigurationError) else f"{in_words(error)} (see {CRASH})"
        )
        over = {"phase": JobPhase.FINISHED.value, "outcome": JobOutcome.FAILED.value, "reason": reason}
        records.write_status(run_dir, last.with_view(**over))

    try:
        for work in (write_story, *close, write_status):
            try:
                work()
            except Exception:  # what broke the job may break one of these; the rest is still to be done
                log.exception("the end could not be recorded in full")
    finally:
        end_job(job)


def crash_at_start(job: str, spec: JobSpec, policy: JobPolicy, run_dir: Path, error: Exception) -> None:
    """``crash`` for a job whose files cannot be gone on from. Its status is what they still say of how far it was.

    A job that is being handed over does not end by that: the release before goes on from the same files.
    """
    if is_handed_over(run_dir, error):
        return
    crash(job, run_dir, error, (), lambda: last_known(run_dir, policy, time.time()).status(job, spec.name))


def is_handed_over(run_dir: Path, error: Exception) -> bool:
    """Return whether another release may go on where this one failed. What failed is noted for it."""
    note = job_files.hand_over_noted(run_dir)
    if note is None:
        return False
    log.critical("the job cannot be taken over", exc_info=error)
    if note.build == str(release.own()):
        job_files.note_hand_over(run_dir, replace(note, failure=in_words(error)))
    return True


def resumption_of(spec: JobSpec, run_dir: Path, roots: AllowedRoots) -> Resumption | None:
    """The checkpoint that the job goes on from, as it was chosen at its beginning. Raises DataError when none is sound."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if spec.synchroniser.node_groups and spec.resume is not None:
        bring(run_dir, spec.resume.checkpoint)
    return begun(roots, run_dir, spec.model_dump(mode="json"))


def policy_of(spec: JobSpec, regions: Mapping[str, str], run_dir: Path) -> JobPolicy:
    """Return the job's policy. A job that continues keeps what its tape has.

    Its node groups are in the tape's regions, because some may be away just now. Settings that the release which began the
    tape did not know have the values that mean what that release did, whatever the default is today.
    """
    try:
        first, _, _ = beginning(run_dir / TAPE, LocalDisk()).partition(b"\n")
        header = decode_header(first.decode(errors="replace"))
    except (OSError, DataError):  # it begins, or its files are judged when they are opened
        return spec.policy(regions, slots=True, standbys=True)
    if not isinstance(header, Header):
        return spec.policy(regions, slots=True, standbys=True)
    plans = (*header.policy.islands, *header.policy.standbys)
    begun_in: dict[str, str] = {plan.node_group: plan.region for plan in plans}
    return continued(spec.policy({**regions, **begun_in}, slots=True, standbys=True), header.policy)


def disk_of(
    job: str, spec: JobSpec, regions: Mapping[str, str], run_dir: Path, store: str | None, *, has_begun: bool
) -> Disk:
    """Return the disk for the job's files: this machine's, mirrored into ``store`` if the specification says so.

    ``has_begun`` says that the job has run before; its controller may know that, too. A mirrored job's files are in
    ``run_dir`` afterwards, wherever the synchroniser before ran, and that one is fenced. While the store cannot be used,
    this waits. A job whose log is damaged ends here, as failed, with the story.
    """
    if not spec.synchroniser.durability.is_mirrored:
        return LocalDisk()
    if store is None:
        raise ConfigurationError(
            detail="synchroniser.durability.kind is mirrored, but the service has no store. Start it with --store URL, "
            "or set durability.kind to sync."
        )
    opened = open_store(store)
    objects = JobObjects(opened, job)

    def take_over() -> Disk:
        require_header(opened)
        is_lost = not has_log(objects) and (past := salvaging.past_of(job)) is not None and past.had_theta
        return mirror(run_dir, objects, LocalDisk(), has_begun=has_begun or is_lost)

    try:
        return _once_unlocked(partial(_until_stored, take_over))
    except DataError as error:
        crash_at_start(job, spec, spec.policy(regions, slots=True, standbys=True), run_dir, error)
        raise


def files_of(
    job: str,
    spec: JobSpec,
    policy: JobPolicy,
    run_dir: Path,
    folds: Sequence[Fold],
    disk: Disk,
    journal_of_shards: ShardJournals | None = None,
    epoch: Epoch = FIRST_EPOCH,
) -> JobFiles:
    """The job's files. A job whose files cannot be gone on from ends here, as failed, with the story.

    While the store of a mirrored job refuses, this waits. Raises what ``open_files`` raises.
    """

    def open_here() -> JobFiles:
        build = str(release.own())
        return open_files(run_dir, job, spec, policy, time.time(), folds, disk, journal_of_shards, epoch, build)

    try:
        return _once_unlocked(open_here if not isinstance(disk, MirroredDisk) else partial(_until_stored, open_here))
    except InfrastructureError:
        raise  # another process writes the files, and this one has no business here
    except ConfigurationError:
        raise  # the folder is another job's, and not to be written to
    except Fenced:
        raise  # the job continues under a successor, and its actors are not this process's to end
    except Exception as error:
        crash_at_start(job, spec, policy, run_dir, error)
        raise


def keep_inputs(disk: Disk, run_dir: Path) -> None:
    """Mirror what the job was begun with, if it is mirrored. While its store refuses, this waits."""
    if isinstance(disk, MirroredDisk):
        for name in (SPECIFICATION, RESUMED):
            _until_stored(partial(disk.keep, run_dir / name))


def _until_stored(work: Callable[[], Result]) -> Result:
    return Retrier().until_done(STORE_REFUSES, work)


def _once_unlocked(work: Callable[[], Result]) -> Result:
    """Do the work, again while another writer is ending. Raises its InfrastructureError if that one lives."""
    give_up_at = time.monotonic() + UNLOCK_TIMEOUT_S
    while True:
        try:
            return work()
        except InfrastructureError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.1)


def survey_of(job: str, spec: JobSpec, policy: JobPolicy, run_dir: Path, roots: AllowedRoots) -> Survey | None:
    """Return what the job's islands hold, if its files are lost. A job that nobody can continue ends here, as failed.

    The controller of a job that may move is opened first: it knows whether the files here are the newest.
    """
    try:
        if spec.synchroniser.node_groups:
            controllers.controller_of(job, spec, str(run_dir), roots)
        return salvaging.survey(job, run_dir, spec, roots)
    except FilesElsewhere:
        raise  # the service starts it again, where the files are
    except Exception as error:
        crash_at_start(job, spec, policy, run_dir, error)
        raise


def introduced(controller: JobController, facts: SynchroniserFacts, *, had_theta: bool) -> JobController:
    """Tell the controller what another synchroniser would need, without waiting for an answer."""
    controller.call(Controller.note_synchroniser, facts, had_theta)
    return controller


def rehearse(build: str, job: str, document: Mapping[str, Any], regions: Mapping[str, str], run_dir: str | None) -> str:
    """Return the build of this process. If it is ``build``, it has replayed the job's tape, of which nothing is changed.

    Raises DataError or ConfigurationError if this build cannot continue the job. Without ``run_dir`` nothing is read.
    """
    own = str(release.own())
    if own == build and run_dir is not None:
        job_files.rehearse(Path(run_dir), job, policy_of(parse_job(document), regions, Path(run_dir)))
    return own


def hand_over(job: str, run_dir: Path, effect: HandOver, controller: Helper[Controller]) -> None:
    """Have the controller end this process, and make one of the other release. Returns only if it cannot.

    Requires all decisions to be durable. A controller that does not answer leaves the job as it is. If this process is not
    ended in time, it ends itself, and Ray makes it again.
    """
    try:
        job_files.note_hand_over(run_dir, HandOverNote(str(release.own()), effect.build))
        call = controller.call(Controller.replace_synchroniser, effect.build, effect.python)
        ray.get(call, timeout=HAND_OVER_TIMEOUT_S)
    except (RayError, TimeoutError, OSError, Conflict) as error:
        log.warning("the synchroniser of %s does not hand over: %s", job, in_words(error))
        job_files.end_hand_over(run_dir)
        return
    time.sleep(ENDED_WITHIN_S)
    log.warning("nothing has ended this process: it ends itself")
    os.kill(os.getpid(), signal.SIGKILL)


def clock(files: JobFiles, run_dir: Path) -> tuple[float, Callable[[], Instant]]:
    """Return when the job was created (Unix seconds), and the clock of the time since then, which never runs back."""
    started_at = files.header.started_at
    elapsed = job_files.elapsed(run_dir, started_at, files.past.at if files.past is not None else None)
    zero = time.monotonic() - elapsed
    return started_at, lambda: time.monotonic() - zero


def reconnect(
    job: str,
    past: Recovered,
    state: StateView,
    interpreter: Interpreter,
    timers: Timers,
    controller: Helper[Controller],
) -> None:
    """Keep the deadlines that were set, listen to every process that lives, and have those ended that are over.

    Called before anything that is decided anew is done, and does not wait for the controller. Other builds let the job go.
    """
    controllers.take_from_others(job)
    for timer in past.pending.timers:
        timers.set(timer.timer, timer.serial, timer.due_at)
    islands = state.islands()
    for island in islands.values():
        if island.state in PLACED:
            suspect = island.state is IslandState.SUSPECT
            interpreter.reconnect(island.id, island.incarnation, island.current.process, lost=suspect)
    introduce(state, interpreter, controller)


def introduce(state: StateView, interpreter: Interpreter, controller: Helper[Controller]) -> None:
    """Have a controller that may have placed nobody know who lives, and end what it knows that is over. Returns at once."""
    islands = state.islands()
    threading.Thread(target=_end_orphans, args=(islands, interpreter, controller), name="orphans", daemon=True).start()


def _end_orphans(islands: Mapping[IslandId, Island], interpreter: Interpreter, controller: Helper[Controller]) -> None:
    """End processes of incarnations that are over, as ``islands`` knows them. Leave later incarnations alone."""
    there = [(one.id, one.incarnation) for one in islands.values() if one.state in PLACED]
    try:
        lives = ray.get(controller.call(Controller.lives, there), timeout=LIVES_TIMEOUT_S)
    except (RayError, TimeoutError) as error:
        log.warning("the controller does not report which processes are alive: %s", first_line(error))
        return
    promoted = {island.current.process for island in islands.values() if island.state in WITH_PROCESS}
    for island_id, incarnation in lives:
        if (island_id, incarnation) in promoted:
            continue  # a standby whose process is about to be an island's
        now = islands[island_id]
        if incarnation < now.incarnation or (incarnation == now.incarnation and now.state not in WITH_PROCESS):
            interpreter.end(island_id, incarnation)
