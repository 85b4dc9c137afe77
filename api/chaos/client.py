"""The part of ``api.client.Client`` that is about faults and the runs of plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from api.chaos.schemas import ChaosRun, ChaosRunList, ChaosRunSummary, ShownPlan, ShownPlans, VerdictDocument
from api.schemas import Command
from orchestrator.core.commands import Inject
from orchestrator.core.vocabulary import IslandId


class ChaosRequests:
    """Needs the requests of a client."""

    _get: Any
    _post: Any
    send: Any
    _request: Any

    def inject(
        self,
        job: str,
        kind: str,
        island: str | None,
        duration_s: float = 0.0,
        *,
        bytes_per_second: float = 0.0,
        payloads: int = 0,
        host: int | None = None,
    ) -> Command:
        """Let chaos strike an island (or none: kill_synchroniser), or let it ``continue`` before its time."""
        whom = IslandId(island) if island is not None else None
        command: Command = self.send(job, Inject(kind, whom, duration_s, bytes_per_second, payloads, host))
        return command

    def chaos_plans(self) -> list[ShownPlan]:
        """The plans that come with the service."""
        plans: ShownPlans = self._get("/v1/chaos/plans", ShownPlans)
        return plans.plans

    def start_chaos(
        self,
        job: str,
        plan: str | Mapping[str, Any],
        reference: str | Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> ChaosRun:
        """Run a plan, as data or as its YAML text, against a job; ``reference`` is for objectives of ``loss_gap``.

        With a ``key`` asked again, it is the run it made then. Raises InvalidJobSpec with every problem of the plan,
        Conflict while another one runs against the job.
        """
        run: ChaosRun = self._post(_runs(job), ChaosRun, {"plan": plan, "reference": reference}, key)
        return run

    def start_shipped_chaos(self, job: str, name: str) -> ChaosRun:
        """Run a plan that comes with the service."""
        run: ChaosRun = self._post(_runs(job), ChaosRun, {"shipped": name})
        return run

    def chaos_runs(self, job: str) -> list[ChaosRunSummary]:
        """All runs of plans against a job, newest first."""
        runs: ChaosRunList = self._get(_runs(job), ChaosRunList)
        return runs.runs

    def chaos_run(self, job: str, run: str = "latest") -> ChaosRun:
        chaos_run: ChaosRun = self._get(_run(job, run), ChaosRun)
        return chaos_run

    def stop_chaos(self, job: str, run: str = "latest") -> ChaosRun:
        """Nothing of the run strikes any more, and what stands still goes on."""
        stopped: ChaosRun = self._post(f"{_run(job, run)}/stop", ChaosRun)
        return stopped

    def chaos_verdict(self, job: str, run: str = "latest") -> VerdictDocument:
        """Raises Conflict while there is none."""
        verdict: VerdictDocument = self._get(f"{_run(job, run)}/verdict", VerdictDocument)
        return verdict

    def chaos_report(self, job: str, run: str = "latest") -> str:
        """The verdict's page, HTML. Raises Conflict while there is none."""
        answer: httpx.Response = self._request("GET", f"{_run(job, run)}/report")
        return answer.text


def _runs(job: str) -> str:
    return f"/v1/jobs/{quote(job, safe='')}/chaos/runs"


def _run(job: str, run: str) -> str:
    return f"{_runs(job)}/{quote(run, safe='')}"
