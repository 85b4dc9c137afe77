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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from api.auth.code import OWN_PACKAGES, code_problems
from api.control import CommandKind, ControlPort, FaultKind, NodeGroupRecord, StatusRecord
from api.cordons import Cordons
from api.delivery import deliver
from api.fleet import fleet_problems, sections_of
from api.idempotency import digest_of, refuse_other_request
from api.runs import Run, has_report, prepare_run_dir, read_status
from api.schemas import Command, Island, Job, JobState, JobSummary, Scale
from api.store import AlreadyKnown, CommandRow, JobRow, Store
from api.translate import command_of, job_of, plans_of, summary_of
from orchestrator.config import JobSpec, parse_job
from orchestrator.core.vocabulary import Dose
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
        self.cordons = Cordons(control, store)
        self._inherited: set[str] = set()
        """Jobs that an earlier process was starting when it ended, and that are not settled yet."""

    def resume(self) -> None:
        """After a restart: settle jobs that were being started when the last process ended."""
        self._inherited = {row.job for row in self._store.jobs() if row.state == JobState.STARTING}
        self._settle_inherited()
        self.cordons.tell_all("the service, started again")

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
        answer = self.job(job)
        for found in answer.islands:
            if found.island == island:
                return found
        names = ", ".join(found.island for found in answer.islands)
        raise NotFound(detail=f"Job {answer.job} has no island {island!r}.", remedy=f"Its islands are {names}.")

    def submit_command(
        self,
        job: str,
        kind: CommandKind | FaultKind,
        island: str | None,
        restart: bool,
        caller: str,
        key: str | None,
        fault: Dose | None = None,
        scale: Scale | None = None,
    ) -> Command:
        """Hand a command to a living job and remember who asked. The outcome is read by ``command``.

        With ``fault`` it is one of chaos, of that dose; ``scale`` goes with the kind of that name.
        """
        row = self._row(job)
        more = [part for part in (fault and asdict(fault), scale and scale.model_dump()) if part is not None]
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
        )
        # What was asked before is answered before anything else: the job may have ended since.
        earlier = self._store.command_by_key(key) if key else None
        if earlier is None:
            state = self._answer(row).state
            if state.final:
                raise Conflict(detail=f"Job {row.job} is already {state}; there is nothing to {kind}.")
            if island is not None:
                self.island(row.job, island)
            try:
                self._store.add_command(command)
            except AlreadyKnown as known:
                earlier = known.row
        if earlier is not None:
            refuse_other_request(earlier, digest, key)
            command = earlier
        if not command.delivered:
            deliver(self._control, command, Path(row.run_dir), fault, scale)
            self._store.update_command(command.command, delivered=True)
        return self.command(row.job, command.command)

    def command(self, job: str, command: str) -> Command:
        """A command with its outcome, as far as it is known."""
        row = self._store.command(command)
        if row is None or row.job != self._row(job).job:
            raise NotFound(detail=f"Job {job} has no command {command!r}.", remedy="Commands are listed per job.")
        if row.delivered and row.accepted is None:
            self._settle_commands(row.job)
            row = self._store.command(command) or row
        return command_of(row)

    def commands(self, job: str) -> list[Command]:
        row = self._row(job)
        self._settle_commands(row.job)
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
        record = self.record(row)
        if record is None and row.summary:
            return Job.model_validate(row.summary)
        answer = job_of(row, record, *plans_of(row), report=has_report(Path(row.run_dir)))
        if answer.state.final and not row.summary:
            self._store.update_job(
                row.job, state=answer.state.value, reason=answer.reason, summary=answer.model_dump(mode="json")
            )
        return answer

    def summary(self, row: JobRow) -> JobSummary:
        if row.summary:
            return JobSummary.model_validate(row.summary)
        try:
            return summary_of(self._answer(row))
        except InfrastructureError as error:
            return summary_of(job_of(row, None, *plans_of(row), report=False)).model_copy(
                update={"reason": f"its state cannot be had right now: {error}"}
            )

    def _settle_commands(self, job: str) -> None:
        row = self._row(job)
        waiting = [command for command in self._store.commands(job) if command.delivered and command.accepted is None]
        if not waiting:
            return
        record = self.record(row)
        outcomes = record["commands"] if record else {}
        over = record is None or record["view"]["phase"] == "finished"
        for command in waiting:
            outcome = outcomes.get(command.command)
            if outcome is not None and outcome["accepted"] is not None:
                values = {"accepted": outcome["accepted"], "detail": outcome["detail"]}
                self._store.update_command(command.command, **values)
            elif over:
                self._store.update_command(
                    command.command, accepted=False, detail="the job ended before it was decided."
                )
