"""The operations of the service: submit a job, read it, command it. The routes are its HTTP face.

Stores a row before the job exists; the dispatcher starts the job when it is its turn (``api.jobs.dispatcher``). A SIGKILL at
any point thus leaves a state from which a restarted service continues. Knows neither HTTP nor Ray nor threads.

A job's state comes from the control port while it lives, from ``RUN_DIR/status.json`` once it has ended, and from its
row's last summary should the run folder be gone.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import IO, Any, BinaryIO, TypeVar

from api.auth.permissions import OWN_PACKAGES
from api.clocks import ClockWatch
from api.jobs.checkpoints import checkpoints_of, origin_of
from api.jobs.control import ControlPort
from api.jobs.cordons import Cordons, NodeCordons
from api.jobs.dispatcher import JOBS_MAX, Dispatcher
from api.jobs.dispatcher import sections_of as sections_of_row
from api.jobs.outbox import Outbox, digest_of, refuse_other_request, row_of
from api.jobs.path_check import tokenizer_of
from api.jobs.status_cache import PATIENCE_S, StatusCache, StatusSnapshot, refuse_outdated
from api.jobs.submission import Checks
from api.jobs.translate import (
    command_of,
    island_in,
    job_of,
    plans_of,
    readable,
    state_of,
    status_in,
    still_writing,
    summary_of,
    unreadable,
)
from api.run.archive import Archive, archive_of
from api.run.folder import Run, damage_of_status, has_report, open_below, parsed, read_status
from api.schemas import (
    ALIVE,
    FINAL,
    Checkpoint,
    Command,
    Island,
    Job,
    JobState,
    JobSummary,
    Profile,
    Restart,
    Specification,
)
from api.storage.store import DuplicateKey, JobRow, Store
from orchestrator.core import commands
from orchestrator.core.vocabulary import Incarnation, IslandId, IslandState, Life
from orchestrator.errors import Conflict, DataError, InfrastructureError, NotFound, in_words
from orchestrator.models.huggingface.origin import Origin
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.specification.sections import PriceSection
from orchestrator.status import CertificateRecord, JobStatus, NodeGroupRecord
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import REPORT

logger = logging.getLogger(__name__)

REPORT_BYTES_MAX = 64 << 20
TRAINING = IslandState.TRAINING.value
LIST_PATIENCE_S = 1.5
"""How long a list waits for slow jobs; all are queried at the same time."""
QUEUE_PATIENCE_S = 10.0
"""How long a submission waits for others that are being started; then it is answered as queued."""

NOTHING_MORE = AllowedRoots()
SUFFIX_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
"""Without characters that are easily confused."""


Summary = TypeVar("Summary", bound=JobSummary)


def summary_in(row: JobRow, kind: type[Summary]) -> Summary | None:
    """Return the last summary in the row, or None if there is no readable one."""
    try:
        return kind.model_validate(row.summary)
    except ValueError:
        return None


class Service:
    """Jobs may use files below ``roots``, and the checkpoints of jobs in ``runs_dir``. ``prices`` is by node group."""

    def __init__(
        self,
        control: ControlPort,
        store: Store,
        runs_dir: Path,
        packages: tuple[str, ...] = OWN_PACKAGES,
        jobs_max: int = JOBS_MAX,
        roots: AllowedRoots = NOTHING_MORE,
        prices: Mapping[str, PriceSection] | None = None,
        node_cordons: NodeCordons | None = None,
    ) -> None:
        self.roots = roots.with_checkpoints(runs_dir)
        self._control = control
        self._store = store
        self._runs_dir = runs_dir
        self._packages = packages
        self._prices = prices or {}
        self.statuses = StatusCache(self.record, store.generations, self._summarised)
        self.outbox = Outbox(control, store, lambda row: self.statuses.fresh(row).record)
        self.cordons = Cordons(control, store, self.outbox, node_cordons or NodeCordons(control, store))
        self.queue = Dispatcher(
            control, store, self.cordons, self.statuses, self._answer, self.record, jobs_max, self.roots
        )
        self.clock = ClockWatch()
        self._adding = Lock()
        """Serialises checking If-Match and storing the command."""

    def resume(self) -> None:
        """Settle jobs that the last process was starting when it ended."""
        self.queue.inherit()
        self.cordons.tell_all("the service, started again")

    def tend(self) -> None:
        """Do one round of the background loop: send jobs the commands that they missed while they did not answer."""
        self.clock.check()
        self.cordons.tell_missed()
        self.outbox.turn()

    def ready(self) -> int:
        """Return the number of node groups. Raises InfrastructureError if the store or the cluster does not answer."""
        self._store.check()
        return len(self.node_groups())

    def node_groups(self) -> list[NodeGroupRecord]:
        return self._control.node_groups()

    def certificates(self) -> list[CertificateRecord]:
        return self._control.certificates()

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, document: Mapping[str, Any], caller: str, key: str | None, priority: int = 0) -> Job:
        """Validate and store a job, and start it if it is its turn. A repeated key returns the same job.

        Raises InvalidJobSpec with every problem of the specification and of the fleet, and then queues nothing. Raises
        InfrastructureError if the job could not be started.
        """
        digest = digest_of([document, priority] if priority else document)
        # Answer a repeated request before anything else: the fleet may have changed since.
        if key and (earlier := self._store.job_by_key(key)):
            refuse_other_request(earlier, digest, key)
            return self._answer(earlier)
        spec = self.check(document)
        job = f"{spec.name}-{''.join(secrets.choice(SUFFIX_ALPHABET) for _ in range(5))}"
        run_dir = self._runs_dir / job
        row = JobRow(
            job=job,
            name=spec.name,
            spec=spec.model_dump(mode="json"),
            run_dir=str(run_dir),
            caller=caller,
            submitted_at=time.time(),
            state=JobState.QUEUED.value,
            priority=priority,
            idempotency_key=key,
            request_digest=digest,
        )
        try:
            self._store.add_job(row)
        except DuplicateKey as duplicate:
            refuse_other_request(duplicate.row, digest, key)
            return self._answer(duplicate.row)
        self.queue.count_anew()
        if not self.queue.is_behind(row):
            self.queue.dispatch(QUEUE_PATIENCE_S)
        row = self._row(job)
        if row.state == JobState.FAILED:
            raise InfrastructureError(detail=f"Job {job} {row.reason}")
        return self._answer(row)

    def prioritise(self, job: str, priority: int) -> Job:
        """Change the priority of a queued job. Raises Conflict if it is no longer queued."""
        row = self._row(job)
        if not self._store.move_job(row.job, JobState.QUEUED, JobState.QUEUED, priority=priority):
            state = self._answer(row).state
            raise Conflict(detail=f"Job {row.job} is {state}; only the priority of a queued job can be changed.")
        self.queue.dispatch(QUEUE_PATIENCE_S)
        return self.job(row.job)

    def jobs(self) -> list[JobSummary]:
        """Return all jobs, newest first. A job that does not answer is shown as last known, with the reason."""
        return list(self.summaries(self._store.jobs()))

    def job(self, job: str) -> Job:
        return self._answer(self._row(job))

    def snapshot(self, job: str) -> StatusSnapshot:
        """Return the job's current status, with its version."""
        return self._snapshot(self._row(job))

    def specification(self, job: str) -> Specification:
        """Return the job's specification as it is stored; empty if its row is damaged."""
        row = readable(self._row(job))
        return Specification(job=row.job, specification=row.spec)

    def host_counts(self, job: str) -> dict[IslandId, int]:
        """Return the number of hosts of each island and standby, from the specification."""
        return {
            island: section.process_count for island, section in sections_of_row(self._row(job), slots=True).items()
        }

    def run(self, job: str) -> Run:
        """Return the job's run folder. Uses only the store and the disk, so it is cheap and works without the cluster."""
        row = self._row(job)
        return Run(row.job, Path(row.run_dir), row.state in FINAL)

    def result(self, job: str, name: str) -> BinaryIO:
        """Open a file that a job writes at its end. Raises Conflict before that, NotFound if the job left none."""
        row = self._row(job)
        try:
            return open_below(Path(row.run_dir), name)
        except FileNotFoundError:
            why = "."
        except OSError as error:
            why = f" that can be read: {error.strerror}."
        answer = self._answer(row)
        if (state := answer.state).final:
            reason = f" It ended: {answer.reason.rstrip('.')}." if answer.reason else ""
            detail = f"Job {row.job} is {state} and left no {name}{why}{reason}"
            raise NotFound(detail=detail, remedy=f"See {row.run_dir}.")
        remedy = f"Watch it with `atoll watch {row.job}`; {name} is written when it ends."
        raise Conflict(detail=f"Job {row.job} is still {state}.", remedy=remedy)

    def report(self, job: str) -> dict[str, Any]:
        """Return the report of an ended job. Raises as ``result`` does, and DataError if it is damaged."""
        with self.result(job, REPORT) as file:
            content = file.read(REPORT_BYTES_MAX + 1)
        path = Path(self._row(job).run_dir) / REPORT
        if len(content) > REPORT_BYTES_MAX:
            raise DataError(detail=f"{path} exceeds {REPORT_BYTES_MAX >> 20} MiB, so it is not a job's report.")
        return parsed(content, path)

    def tokenizer(self, job: str) -> tuple[IO[bytes], int]:
        """Open the job's tokenizer; return the file and its size. Raises NotFound if it has none, Conflict if it is gone."""
        row = self._row(job)
        return tokenizer_of(row.job, Path(row.run_dir), row.spec, self.roots)

    def origin(self, job: str) -> Origin:
        """Return what exports keep of the job's initial checkpoint. Raises NotFound and Conflict as ``origin_of`` does."""
        row = self._row(job)
        return origin_of(row.job, Path(row.run_dir), row.spec, self.roots)

    # ── islands and commands ──────────────────────────────────────────────────────────────────────────────────

    def island(self, job: str, island: str) -> Island:
        return island_in(self.job(job), island)

    def profile(self, job: str, island: str, profile: str, steps: int | None, caller: str = "") -> Profile:
        """Begin a trace of the island's inner steps under this name, with None return how far it is, or with 0 cancel it.

        Raises Conflict unless the island trains, and as ``ControlPort.profile`` does.
        """
        row, life = self._life(job, island, is_begun=not steps)
        record = self._control.profile(row.job, life, profile, steps)
        if steps == 0:
            logger.info("job %s: the trace of %s is cancelled (by %s)", row.job, island, caller)
        elif steps is not None:
            logger.info("job %s: a trace of %d steps of %s is recorded (asked by %s)", row.job, steps, island, caller)
        return Profile(job=row.job, island=life[0], incarnation=life[1], **record)

    def trace(self, job: str, island: str, profile: str) -> tuple[Profile, Iterator[bytes]]:
        """Return a complete trace and its zip. Raises Conflict while it is not complete, or if there is none."""
        state = self.profile(job, island, profile, None)
        if state.byte_count is None:
            why = state.problem or f"It has {state.steps_taken} of {state.steps} steps so far."
            raise Conflict(detail=f"The trace {profile} of island {island} is not complete. {why}")
        return state, self._windows(state, state.byte_count)

    def _windows(self, state: Profile, byte_count: int) -> Iterator[bytes]:
        start, life = 0, (IslandId(state.island), Incarnation(state.incarnation))
        while start < byte_count:
            window = self._control.read_profile(state.job, life, state.profile, start, byte_count)
            yield window
            start += len(window)

    def _life(self, job: str, island: str, *, is_begun: bool) -> tuple[JobRow, Life]:
        """Return the island's current incarnation. Raises Conflict if it does not train, unless its trace ``is_begun``."""
        row = self._row(job)
        answer = self._answer(row)
        own = island_in(answer, island)
        if answer.state.final:
            raise Conflict(detail=f"Job {row.job} is already {answer.state}; its islands train no more.")
        if own.state != TRAINING and not is_begun:
            state = "a spare" if own.spare else own.state
            raise Conflict(
                detail=f"Island {island} of job {row.job} is {state}, not training, so it takes no steps to trace.",
                remedy=f"`atoll islands {row.job}` shows which islands train.",
            )
        return row, (IslandId(island), Incarnation(own.incarnation))

    def submit_command(
        self,
        job: str,
        command: commands.Command,
        caller: str,
        key: str | None = None,
        if_match: str | None = None,
    ) -> Command:
        """Store a command to a living job with its caller, and hand it over. ``command`` returns its outcome.

        A stored command is certain to be handed over: if the job does not answer, the outbox keeps trying. With ``if_match``
        it is refused if the job got another command since the caller read it.
        """
        row = self._row(job)
        stored = row_of(row.job, caller, command)
        digest = digest_of([row.job, stored.request])
        stored.idempotency_key, stored.request_digest = key, digest
        kind, island = commands.kind_of(command), commands.island_of(command)
        # Answer a repeated request before anything else: the job may have ended since.
        earlier = self._store.command_by_key(key) if key else None
        if earlier is None:
            answer = self._answer(row)
            if answer.state.final:
                raise Conflict(detail=f"Job {row.job} is already {answer.state}; there is nothing to {kind}.")
            if answer.state is JobState.QUEUED and not isinstance(command, commands.Cancel):
                detail = f"Job {row.job} is still queued; there is nothing to {kind}."
                raise Conflict(detail=detail, remedy="Wait until it starts, or cancel it.")
            if island is not None:
                island_in(answer, island)
            try:
                with self._adding:
                    refuse_outdated(if_match, str(self._store.generation(row.job)), f"job {row.job}")
                    self._store.add_command(stored)
            except DuplicateKey as duplicate:
                earlier = duplicate.row
        if earlier is not None:
            refuse_other_request(earlier, digest, key)
            stored = earlier
        needs_look = row.state != JobState.QUEUED or not self.queue.is_behind(row)
        self.outbox.push(row.job)
        self.queue.count_anew()
        if needs_look:
            self.queue.wake()  # the command may have freed capacity
        return self.command(row.job, stored.command)

    def upgrade(self, job: str, caller: str, key: str | None = None, if_match: str | None = None) -> Command:
        """Have a running job's synchroniser go on in the release of this service, once a checkpoint is complete.

        Raises Conflict with the reason if that is not possible.
        """
        row = self._row(job)
        if key and (earlier := self._store.command_by_key(key)):
            refuse_other_request(earlier, digest_of([row.job, earlier.request]), key)
            return self.command(row.job, earlier.command)
        state = self._answer(row).state
        if state is not JobState.RUNNING:
            remedy = "" if state.final else "Wait until it runs."
            raise Conflict(detail=f"Job {row.job} is {state}; only a running job is upgraded.", remedy=remedy)
        try:
            command = self._control.upgrade_of(row.job, parse_job(row.spec), Path(row.run_dir))
        except NotFound as error:
            raise Conflict(
                detail=f"No synchroniser of job {row.job} runs right now.",
                remedy="Wait a moment: the service starts one from the run folder by itself.",
            ) from error
        return self.submit_command(row.job, command, caller, key, if_match)

    def restart(self, job: str, caller: str) -> Restart:
        """End the synchroniser's process of a running job, even one that hangs. A new one continues from its files.

        Raises Conflict if the job is queued or starting, or has ended.
        """
        row = self._row(job)
        state = JobState(row.state)
        if record := read_status(Path(row.run_dir)):
            state = state_of(record.view)
        if state.final:
            detail = f"Job {row.job} is already {state}; it has no synchroniser to restart."
            raise Conflict(detail=detail, remedy=f"To continue its work, submit it with `--resume {row.job}`.")
        if state in (JobState.QUEUED, JobState.STARTING):
            raise Conflict(
                detail=f"Job {row.job} is still {state}; it has no synchroniser to restart.",
                remedy="Wait until it runs, or cancel it.",
            )
        try:
            detail = self._control.restart_job(row.job)
        except NotFound as error:
            raise Conflict(
                detail=f"No synchroniser of job {row.job} runs right now.",
                remedy="Wait a moment: the service starts one from the run folder by itself.",
            ) from error
        logger.warning("job %s: %s (asked by %s)", row.job, detail, caller)
        return Restart(job=row.job, detail=detail)

    def command(self, job: str, command: str) -> Command:
        """Return a command with its outcome, if that is known."""
        row = self._store.command(command)
        if row is None or row.job != self._row(job).job:
            raise NotFound(
                detail=f"Job {job} has no command {command!r}.",
                remedy=f"List its commands with GET /v1/jobs/{job}/commands.",
            )
        if row.delivered and row.accepted is None:
            self.outbox.settle(row.job)
            row = self._store.command(command) or row
        return command_of(row)

    def commands(self, job: str) -> list[Command]:
        row = self._row(job)
        self.outbox.settle(row.job)
        return [command_of(command) for command in self._store.commands(row.job)]

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, document: Mapping[str, Any]) -> JobSpec:
        """Return the specification as it would be accepted, with what the service fills in. Nothing is queued.

        Raises InvalidJobSpec with every problem of the specification and of the fleet.
        """
        return Checks(self._control, self._packages, self.roots, self._store.job, self._prices).accepted(document)

    def checkpoints(self, job: str) -> list[Checkpoint]:
        """Return the job's complete checkpoints, oldest first."""
        return checkpoints_of(self._row(job), self.roots)

    def checkpoint_archive(self, job: str, number: int) -> Archive:
        """Return one of them as a tar stream. Raises NotFound with the existing ones."""
        row = self._row(job)
        roots = self.roots.with_run(Path(row.run_dir))
        return archive_of(checkpoints_of(row, self.roots), number, roots)

    def _row(self, job: str) -> JobRow:
        row = self._store.job(job)
        if row is None:
            detail = "No job has been submitted yet." if job == "latest" else f"Job {job!r} does not exist."
            raise NotFound(detail=detail, remedy="`atoll jobs` lists all jobs.")
        return row

    def record(self, row: JobRow) -> JobStatus | None:
        """Return the job's status record: the final one if it is on disk, else the live one; None if there is neither.

        A job has ended once its final state is on the disk, which is written after the report. Until then its record says
        that it is finishing, whatever the job has decided.
        """
        if record := read_status(Path(row.run_dir)):
            return record
        if row.state not in ALIVE:
            return None
        try:
            live = status_in(row.job, self._control.status(row.job))
        except NotFound:
            return read_status(Path(row.run_dir))  # it may have ended between the two reads
        if not live.view.has_decided:
            return live
        return read_status(Path(row.run_dir)) or still_writing(live)

    def _answer(self, row: JobRow, patience_s: float = PATIENCE_S) -> Job:
        answer = self._snapshot(row, patience_s).answer
        assert answer is not None, "a snapshot has an answer"
        return answer

    def _snapshot(self, row: JobRow, patience_s: float = PATIENCE_S) -> StatusSnapshot:
        return self._built(row, self.statuses.recent(row, patience_s))

    def _built(self, row: JobRow, snapshot: StatusSnapshot) -> StatusSnapshot:
        """Return the snapshot with its answer."""
        if snapshot.answer is None and snapshot.record is None and row.summary and (summary := summary_in(row, Job)):
            snapshot.answer = summary
        elif snapshot.answer is None:
            snapshot.answer = self._job_of(row, snapshot.record)
            if snapshot.answer.state is JobState.QUEUED:
                waits = {"queue_position": self._store.queue_position(row), "reason": self.queue.why(row.job)}
                snapshot.answer = snapshot.answer.model_copy(update=waits)
            elif snapshot.answer.state.final and not row.summary:
                values = {"reason": snapshot.answer.reason, "summary": snapshot.answer.model_dump(mode="json")}
                self._store.update_job(row.job, state=snapshot.answer.state.value, **values)
                if row.state != JobState.CANCELLED:  # a job cancelled while queued frees no capacity
                    self.queue.wake()
        return snapshot

    def _job_of(self, row: JobRow, record: JobStatus | None) -> Job:
        """Return the answer for any row and record. Raises InfrastructureError if the job's own answer is invalid."""
        row = readable(row)
        run_dir = Path(row.run_dir)
        try:
            job = job_of(row, record, *plans_of(row), report=has_report(run_dir))
            if not job.state.final:
                groups = {island.node_group for island in job.islands}
                job.cordoned_nodes = [one for one in self.cordons.nodes.latest() if one.node_group in groups]
            job.model_dump_json()  # find out here whether it can be sent, so that lists do not fail
        except Exception as error:
            if record is not None and read_status(run_dir) is None:
                detail = f"The status of job {row.job} is invalid ({in_words(error)})."
                raise InfrastructureError(detail=detail, remedy="See its log (`atoll logs`).") from error
            return unreadable(row, error)
        if record is None and job.state.final and (damage := damage_of_status(run_dir)):
            job.reason = f"{job.reason} {damage}".strip() if damage not in job.reason else job.reason
        return job

    def summaries(self, rows: Sequence[JobRow]) -> Iterator[JobSummary]:
        """Yield the summary of any row, also of a damaged one, so that listing jobs never fails.

        A job that does not answer at once is shown as last known, with the reason.
        """
        shown = self.statuses.listed(rows)
        return (self._summary(row, shown.get(row.job)) for row in rows)

    def _summary(self, row: JobRow, shown: StatusSnapshot | None) -> JobSummary:
        if row.summary and (summary := summary_in(row, JobSummary)):
            return summary
        if row.state == JobState.QUEUED:
            return self._outlined(row, {"queue_position": self.queue.place(row.job), "reason": self.queue.why(row.job)})
        try:
            return self._summarised(row, shown or self.statuses.recent(row, LIST_PATIENCE_S))
        except InfrastructureError as error:
            return self._outlined(
                row, {"silent": True, "islands_training": None, "reason": f"its state is currently unknown: {error}"}
            )
        except Exception as error:
            return summary_of(unreadable(row, error))

    def _summarised(self, row: JobRow, snapshot: StatusSnapshot) -> JobSummary:
        """Return the snapshot's summary. Raises InfrastructureError if the job's own answer is invalid."""
        if snapshot.summary is None:
            answer = self._built(row, snapshot).answer
            assert answer is not None, "a snapshot has an answer"
            snapshot.summary = summary_of(answer)
        return snapshot.summary

    def _outlined(self, row: JobRow, more: dict[str, Any]) -> JobSummary:
        """Return the summary of a job without querying it or parsing its specification again."""
        try:
            outline = self.queue.outlines.of(row.job, lambda: row.spec)
            job = job_of(row, None, [], outline.token_budget, report=False)
            return summary_of(job).model_copy(update={"island_count": outline.island_count, **more})
        except Exception as error:
            return summary_of(unreadable(row, error))
