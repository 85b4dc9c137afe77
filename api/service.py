"""What the service can be asked: submit, look, command. The routes are its HTTP face.

Responsible for the order in which things become true: a row before the job, the job before the answer, so that a
SIGKILL at any point leaves nothing that cannot be explained after a restart. It refuses to know HTTP, Ray and threads.

A job's state comes from the control port while it lives, from ``RUN_DIR/status.json`` once it has ended, and from its
row's last summary should the run folder be gone.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from api.auth.code import OWN_PACKAGES, code_problems
from api.control import CommandKind, ControlPort, FaultKind, NodeGroupRecord, StatusRecord
from api.cordons import Cordons
from api.fleet import fleet_problems, sections_of
from api.idempotency import digest_of, refuse_other_request
from api.looks import Look, Looks, refuse_outdated
from api.outbox import Outbox
from api.runs import Run, has_report, prepare_run_dir, read_status
from api.schemas import Command, Island, Job, JobState, JobSummary, Scale
from api.store import AlreadyKnown, CommandRow, JobRow, Store
from api.translate import command_of, island_in, job_of, plans_of, summary_of
from orchestrator.config import JobSpec, parse_job
from orchestrator.errors import AtollError, Conflict, InfrastructureError, InvalidJobSpec, NotFound

logger = logging.getLogger(__name__)

SUFFIX_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
"""Without the characters that are read as one another."""


class Service:
    def __init__(
        self, control: ControlPort, store: Store, runs_dir: Path, packages: tuple[str, ...] = OWN_PACKAGES
    ) -> None:
        self._control = control
        self._store = store
        self._runs_dir = runs_dir
        self._packages = packages
        self.looks = Looks(self.record, store.generation)
        self.outbox = Outbox(control, store, lambda row: self.looks.fresh(row).record)
        self.cordons = Cordons(control, store, self.outbox)
        self._inherited: set[str] = set()
        """Jobs that an earlier process was starting when it ended, and that are not settled yet."""
        self._adding = Lock()
        """Nothing is asked between a precondition and what is asked under it."""

    def resume(self) -> None:
        """After a restart: settle jobs that were being started when the last process ended."""
        self._inherited = {row.job for row in self._store.jobs() if row.state == JobState.STARTING}
        self._settle_inherited()
        self.cordons.tell_all("the service, started again")

    def tend(self) -> None:
        """One round of what nobody asks for: what a job that did not answer has missed is handed to it now."""
        self._settle_inherited()
        self.cordons.tell_missed()
        self.outbox.turn()

    def node_groups(self) -> list[NodeGroupRecord]:
        return self._control.node_groups()

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, document: Mapping[str, Any], caller: str, key: str | None) -> Job:
        """Validate, remember and start a job. The same key again answers with the job it made the first time.

        Raises InvalidJobSpec with every problem of the specification and of the fleet; nothing was started then.
        """
        digest = digest_of(document)
        self._settle_inherited()
        # What was done before is answered before anything else: the fleet may have changed since.
        if key and (earlier := self._store.job_by_key(key)):
            refuse_other_request(earlier, digest, key)
            return self._answer(earlier)
        spec = self._validated(document)
        job = f"{spec.name}-{''.join(secrets.choice(SUFFIX_ALPHABET) for _ in range(5))}"
        run_dir = self._runs_dir / job
        row = JobRow(
            job=job,
            name=spec.name,
            spec=spec.model_dump(mode="json"),
            run_dir=str(run_dir),
            caller=caller,
            submitted_at=time.time(),
            state=JobState.STARTING.value,
            idempotency_key=key,
            request_digest=digest,
        )
        try:
            self._store.add_job(row)
        except AlreadyKnown as known:
            refuse_other_request(known.row, digest, key)
            return self._answer(known.row)
        try:
            prepare_run_dir(run_dir, row.spec)
            cordoned = self.cordons.callers()
            self._control.start_job(job, spec, run_dir, cordoned)
        except Exception as error:
            # The key is freed: whoever tries again under it wants a job, not this failure once more.
            values = {"state": JobState.FAILED.value, "reason": f"could not be started: {error}"}
            self._store.update_job(job, **values, idempotency_key=None)
            raise
        self._store.update_job(job, state=JobState.RUNNING.value)
        if self.cordons.callers() != cordoned:
            self.cordons.tell(job, caller)
        return self.job(job)

    def jobs(self) -> list[JobSummary]:
        """All jobs, newest first. One whose state cannot be had right now is shown as last known, with the reason."""
        self._settle_inherited()
        return [self.summary(row) for row in self._store.jobs()]

    def job(self, job: str) -> Job:
        return self._answer(self._row(job))

    def look(self, job: str) -> Look:
        """The job as it stands, with its version."""
        return self._look(self._row(job))

    def run(self, job: str) -> Run:
        """Where the job writes. Asks the store and the disk only, so that it is cheap and works without the cluster."""
        row = self._row(job)
        return Run(row.job, Path(row.run_dir), JobState(row.state).final)

    def result_path(self, job: str, name: str) -> Path:
        """Where a file lies that a job leaves at its end. Raises Conflict before that."""
        row = self._row(job)
        path = Path(row.run_dir) / name
        if not path.is_file():
            state = self._answer(row).state
            if state.final:
                raise NotFound(
                    detail=f"Job {row.job} is {state} and left no {path.name}.", remedy=f"See {row.run_dir}."
                )
            remedy = f"Follow it with `atoll watch {row.job}`; {path.name} is written when it ends."
            raise Conflict(detail=f"Job {row.job} is still {state}.", remedy=remedy)
        return path

    # ── islands and commands ──────────────────────────────────────────────────────────────────────────────────

    def island(self, job: str, island: str) -> Island:
        return island_in(self.job(job), island)

    def submit_command(
        self,
        job: str,
        kind: CommandKind | FaultKind,
        island: str | None,
        restart: bool,
        caller: str,
        key: str | None,
        fault_s: float | None = None,
        scale: Scale | None = None,
        if_match: str | None = None,
    ) -> Command:
        """Remember a command to a living job and who asked, and hand it over. The outcome is read by ``command``.

        With ``fault_s`` it is a fault of chaos, of that duration; ``scale`` goes with the kind of that name. Once it is
        stored it is as good as handed over: should the job not answer for it, the outbox goes on trying. With ``if_match``
        it is refused if something else was asked of the job since the caller's look.
        """
        row = self._row(job)
        more = [part for part in (fault_s, scale and scale.model_dump()) if part is not None]
        digest = digest_of([row.job, kind, island, restart, *more])
        command = CommandRow(
            command=f"{kind}-{secrets.token_hex(6)}",
            job=row.job,
            kind=kind,
            island=island,
            restart=restart,
            caller=caller,
            requested_at=time.time(),
            idempotency_key=key,
            request_digest=digest,
            fault_s=fault_s,
            node_group=scale and scale.node_group,
            count=scale and scale.count,
        )
        # What was asked before is answered before anything else: the job may have ended since.
        earlier = self._store.command_by_key(key) if key else None
        if earlier is None:
            answer = self._answer(row)
            if answer.state.final:
                raise Conflict(detail=f"Job {row.job} is already {answer.state}; there is nothing to {kind}.")
            if island is not None:
                island_in(answer, island)
            try:
                with self._adding:
                    refuse_outdated(if_match, str(self._store.generation(row.job)), f"job {row.job}")
                    self._store.add_command(command)
            except AlreadyKnown as known:
                earlier = known.row
        if earlier is not None:
            refuse_other_request(earlier, digest, key)
            command = earlier
        self.outbox.push(row.job)
        return self.command(row.job, command.command)

    def command(self, job: str, command: str) -> Command:
        """A command with its outcome, as far as it is known."""
        row = self._store.command(command)
        if row is None or row.job != self._row(job).job:
            raise NotFound(detail=f"Job {job} has no command {command!r}.", remedy="Commands are listed per job.")
        if row.delivered and row.accepted is None:
            self.outbox.settle(row.job)
            row = self._store.command(command) or row
        return command_of(row)

    def commands(self, job: str) -> list[Command]:
        row = self._row(job)
        self.outbox.settle(row.job)
        return [command_of(command) for command in self._store.commands(row.job)]

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────

    def _validated(self, document: Mapping[str, Any]) -> JobSpec:
        groups, foreign = self._control.node_groups(), code_problems(document, self._packages)
        try:
            spec = parse_job(document)
        except InvalidJobSpec as error:
            more = fleet_problems(sections_of(document), groups)
            raise InvalidJobSpec(problems=(*error.problems, *more, *foreign)) from error
        if problems := (*fleet_problems(spec.islands, groups), *foreign):
            raise InvalidJobSpec(problems=problems)
        return spec

    def _settle_inherited(self) -> None:
        """Decide what became of inherited jobs. One whose cluster does not answer is tried again at the next look."""
        for job in list(self._inherited):
            row = self._store.job(job)
            try:
                # ``record`` asks the run folder first: the job may have ended while no service was up.
                if row and self.record(row):
                    self._store.update_job(job, state=JobState.RUNNING.value)
                elif row:
                    reason = "the service ended while it was starting this job. Submit it again."
                    self._store.update_job(job, state=JobState.FAILED.value, reason=reason, idempotency_key=None)
            except AtollError as error:
                logger.warning("job %s: %s", job, error)
            else:
                self._inherited.discard(job)

    def _row(self, job: str) -> JobRow:
        self._settle_inherited()
        row = self._store.job(job)
        if row is None:
            detail = "No job was submitted yet." if job == "latest" else f"There is no job {job!r}."
            raise NotFound(detail=detail, remedy="`atoll jobs` lists them.")
        return row

    def record(self, row: JobRow) -> StatusRecord | None:
        """What is known of the job: its final state if it left one, else the live one; None if there is neither."""
        if record := read_status(Path(row.run_dir)):
            return record
        if JobState(row.state).final:
            return None
        try:
            return self._control.status(row.job)
        except NotFound:
            return read_status(Path(row.run_dir))  # it may have ended between the two looks

    def _answer(self, row: JobRow) -> Job:
        return self._look(row).answer

    def _look(self, row: JobRow) -> Look:
        look = self.looks.recent(row)
        if look.answer is None and look.record is None and row.summary:
            look.answer = Job.model_validate(row.summary)
        elif look.answer is None:
            look.answer = job_of(row, look.record, *plans_of(row), report=has_report(Path(row.run_dir)))
            if look.answer.state.final and not row.summary:
                values = {"reason": look.answer.reason, "summary": look.answer.model_dump(mode="json")}
                self._store.update_job(row.job, state=look.answer.state.value, **values)
        return look

    def summary(self, row: JobRow) -> JobSummary:
        if row.summary:
            return JobSummary.model_validate(row.summary)
        try:
            return summary_of(self._answer(row))
        except InfrastructureError as error:
            return summary_of(job_of(row, None, *plans_of(row), report=False)).model_copy(
                update={"reason": f"its state cannot be had right now: {error}"}
            )
