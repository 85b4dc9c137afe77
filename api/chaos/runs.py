"""The operations on chaos plans: list the shipped ones, start one against a job, see its state, end it, read its verdict.

Responsible for what is refused before any fault, and for saying how a run stands, from its rows. The routes are its
HTTP face; what happens in between is the threads' (``api.chaos.active_run``).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from api.chaos.active_run import RunThreads, key_of, planned
from api.chaos.schemas import ChaosRun, ChaosRunSummary, Decision, Fault, RunState, VerdictDocument
from api.chaos.store import ChaosDecisionRow, ChaosRunRow, ChaosStore
from api.installation.service_restart import RestartService
from api.jobs.outbox import digest_of, refuse_other_request
from api.jobs.service import Service
from api.jobs.translate import command_of
from api.schemas import Island
from api.storage.store import DuplicateKey, Store
from orchestrator.chaos.plan import LOSS_GAP, ChaosPlan, check_fleet, describe, parse
from orchestrator.chaos.runner import PlannedFault
from orchestrator.core.faults import fault_of
from orchestrator.core.vocabulary import IslandId, IslandPlan, NodeGroupId
from orchestrator.errors import ConfigurationError, Conflict, DataError, NotFound
from orchestrator.report import html
from orchestrator.specification.bounds import IslandCount, TokenCount
from orchestrator.specification.validation import problems_of

LOSS_MAX = 1e6
"""Nats per token: a model of a million words that knows nothing has 14."""
Reference = str | Mapping[str, Any] | None
"""For ``loss_gap``: a job without faults that has ended, or its report."""


class _ReferencePolicy(BaseModel):
    model_config = ConfigDict(extra="ignore")

    token_budget: TokenCount
    islands: IslandCount


class _ReferenceReport(BaseModel):
    """The part of a reference report that a verdict needs. The rest is not stored."""

    model_config = ConfigDict(extra="ignore")

    loss_final: Annotated[float, Field(strict=True, ge=-LOSS_MAX, le=LOSS_MAX, allow_inf_nan=False)]
    policy: _ReferencePolicy


class ChaosRuns:
    def __init__(self, service: Service, store: Store, restart_service: RestartService) -> None:
        self._service, self._store = service, store
        self._book = ChaosStore(store.engine)
        self.threads = RunThreads(service, store, self._book, restart_service)

    def start(
        self,
        job: str,
        text: str,
        document: Mapping[str, Any],
        reference: Reference,
        caller: str,
        key: str | None,
    ) -> ChaosRun:
        """Run a plan against a job that lives. The same key again answers with the run it made the first time.

        ``text`` is the plan as it was written, and ``document`` what that says. ``reference`` is an ended job, or the report
        of one. Raises InvalidJobSpec with every problem of the plan, also those it has with this job's islands;
        ConfigurationError where it needs a reference and has none; Conflict where the job has ended, or another plan runs.
        """
        run_of = self._service.run(job)
        digest = digest_of([run_of.job, text, *([] if reference is None else [reference])])
        if key and (earlier := self._book.by_key(key)):
            refuse_other_request(earlier, digest, key)
            return self._shown(earlier)
        plan = parse(document)
        reference_figures = self._reference_figures(plan, reference)
        target = self._service.job(run_of.job)
        if target.state.final or target.after_s is None:
            raise Conflict(detail=f"Job {target.job} is {target.state}; faults cannot be injected into it.")
        islands = [island for island in target.islands if not _is_inactive(island)]
        check_fleet(plan, list(map(_plan_of, islands)), self._service.host_counts(target.job))
        row = ChaosRunRow(
            run=f"chaos-{secrets.token_hex(6)}",
            job=target.job,
            plan=plan.name,
            text=text,
            fleet=[[i.island, i.node_group, i.region, i.accelerator_count] for i in islands],
            reference=reference_figures,
            caller=caller,
            requested_at=time.time(),
            holds=target.job,
            idempotency_key=key,
            request_digest=digest,
        )
        try:
            self._book.add(row)
        except DuplicateKey as duplicate:
            refuse_other_request(duplicate.row, digest, key)
            return self._shown(duplicate.row)
        self.threads.start_run(row)
        return self._shown(self._row(row.job, row.run))

    def list(self, job: str) -> list[ChaosRunSummary]:
        """All runs against a job, newest first."""
        rows = self._book.runs(self._service.run(job).job)
        return [ChaosRunSummary(**_summary(row, self._book.decisions(row.run))) for row in rows]

    def run(self, job: str, run: str) -> ChaosRun:
        """One run with what was decided so far; ``latest`` is the job's newest."""
        return self._shown(self._row(job, run))

    def stop(self, job: str, run: str, caller: str) -> ChaosRun:
        """End a run: inject no further fault, and continue what is stopped. A second call changes nothing.

        Raises Conflict if it has come to its verdict.
        """
        row = self._row(job, run)
        if row.verdict is not None or row.state == RunState.FAILED:
            raise Conflict(detail=f"The run {row.run} has ended already: it {row.state}.")
        if row.state != RunState.STOPPED:
            self.threads.stop(row.run, f"ended by {caller}")
        return self._shown(self._row(row.job, row.run))

    def verdict(self, job: str, run: str) -> dict[str, Any]:
        """The verdict as plain data. Raises Conflict before there is one, or if there will be none."""
        row = self._row(job, run)
        if row.verdict is not None:
            try:
                VerdictDocument.model_validate(row.verdict)
            except ValidationError as error:
                raise DataError(detail=f"The verdict of {row.run} is damaged in the store.") from error
            return row.verdict
        if row.ended_at is not None or row.state == RunState.STOPPED:
            detail = f"The run {row.run} has no verdict: it is {row.state}, {row.reason}."
            raise Conflict(detail=detail, remedy="Start the plan again.")
        remedy = f"It is judged by the job's report: follow the job with `atoll watch {row.job}`."
        raise Conflict(detail=f"The run {row.run} is {row.state}.", remedy=remedy)

    def report(self, job: str, run: str) -> str:
        """The verdict as a page to be shared. Raises Conflict as ``verdict`` does."""
        row = self._row(job, run)
        verdict = self.verdict(row.job, row.run)
        report = self._service.report(row.job)
        try:
            return html.render_verdict(verdict, report, row.text)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
            detail = f"The report of {row.job} is damaged, so it has no page ({type(error).__name__})."
            raise DataError(detail=detail) from error

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reference_figures(self, plan: ChaosPlan, reference: Reference) -> dict[str, Any] | None:
        """The figures of the reference that the verdict needs, checked before any fault is injected."""
        if reference is None:
            if any(objective.root == LOSS_GAP for objective in plan.objectives):
                detail = f"{plan.name} has an objective of {LOSS_GAP}, which needs a reference job without faults."
                raise ConfigurationError(
                    detail=f"{detail} Give its id, or its report.json, as reference (--reference)."
                )
            return None
        if isinstance(reference, str):
            reference = self._service.report(reference)
        try:
            report = _ReferenceReport.model_validate(reference)
        except ValidationError as error:
            problem_list = "; ".join(
                f"{problem.path}: {problem.message}" for problem in problems_of(error, unknown="")[:5]
            )
            detail = f"The reference is not the report of a job with a final held-out loss ({problem_list})."
            raise ConfigurationError(detail=f"{detail} Give the report.json of one that completed.") from error
        return report.model_dump()

    def _row(self, job: str, run: str) -> ChaosRunRow:
        job_id = self._service.run(job).job
        row = self._book.run(job_id, run)
        if row is None:
            detail = (
                f"No plan has run against {job_id}."
                if run == "latest"
                else f"Job {job_id} has no run {run!r} of a plan."
            )
            raise NotFound(detail=detail, remedy=f"`atoll chaos runs {job_id}` lists them.")
        return row

    def _shown(self, row: ChaosRunRow) -> ChaosRun:
        decided_rows = self._book.decisions(row.run)
        commands = {command.idempotency_key: command_of(command) for command in self._store.commands(row.job)}
        decisions = []
        for decided in decided_rows:
            fault, command = decided.decision, commands.get(key_of(row.run, decided.fault))
            decisions.append(
                Decision(
                    kind=fault["kind"],
                    island=fault["island"],
                    planned_s=fault["planned_at"],
                    duration_s=fault["duration"],
                    told=_description_of(fault),
                    after_s=decided.at,
                    spared=fault["spared"],
                    command=command.command if command else None,
                    outcome=command.state if command else None,
                )
            )
        faults = planned(row)[1]
        following = (
            faults[len(decided_rows)]
            if RunState.stored(row.state).injects and len(decided_rows) < len(faults)
            else None
        )
        return ChaosRun(
            **_summary(row, decided_rows),
            fault_count=len(faults),
            next=_fault(following, row.begun_at) if following else None,
            decisions=decisions,
        )


def _is_inactive(island: Island) -> bool:
    """Return whether no process of the island has ever trained, so that a fault would find none."""
    return island.standby or island.spare


def _plan_of(island: Island) -> IslandPlan:
    """The island as faults are drawn for it."""
    return IslandPlan(IslandId(island.island), NodeGroupId(island.node_group), island.region, island.accelerator_count)


def _summary(row: ChaosRunRow, decided_rows: Sequence[ChaosDecisionRow]) -> dict[str, Any]:
    skipped_count = sum(bool(decided.decision["spared"]) for decided in decided_rows)
    return {
        "run": row.run,
        "job": row.job,
        "plan": row.plan,
        "caller": row.caller,
        "requested_at": row.requested_at,
        "state": RunState.stored(row.state),
        "reason": row.reason,
        "begun_after_s": row.begun_at,
        "ended_at": row.ended_at,
        "struck_count": len(decided_rows) - skipped_count,
        "spared_count": skipped_count,
    }


def _fault(fault: PlannedFault, begun_at: float | None) -> Fault:
    after_s = None if begun_at is None else begun_at + fault.at
    return Fault(
        kind=fault.kind,
        island=fault.island,
        planned_s=fault.at,
        duration_s=fault.duration,
        told=fault.description(),
        after_s=after_s,
    )


def _description_of(plain: Mapping[str, Any]) -> str:
    numbers = (plain["duration"], plain["bytes_per_second"], plain["payloads"], plain.get("host"))
    return describe(fault_of(plain["kind"], plain["island"], *numbers), plain["island"])
