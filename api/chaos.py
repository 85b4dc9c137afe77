"""A chaos plan against a live job, run from here over REST: the job is looked at, the plan decides, the service strikes.

Responsible for finding plans, for striking what ``chaos.conduct`` decides, and for leaving nothing stopped or cut off behind
when it is interrupted. Should this process die all the same, what lasts ends by itself when its time is over. Refuses any
means that a user does not have: what strikes the service itself (``kill_api``) is done by its process id, and only to the
service of a home folder of this machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from api.client import Client
from api.home import Home
from api.schemas import Job
from api.second_life import kill_and_start_again
from api.up import DEPLOY
from orchestrator.chaos.conduct import Conduct, Decision
from orchestrator.chaos.kinds import Kind
from orchestrator.chaos.plan import LOSS_GAP, ChaosPlan, check_fleet, figures_now, parse
from orchestrator.chaos.schedule import PlannedFault, schedule
from orchestrator.chaos.verdict import Verdict
from orchestrator.config import read_document
from orchestrator.core.vocabulary import Incarnation, IslandId, IslandPlan, NodeGroupId
from orchestrator.errors import AtollError, ConfigurationError
from orchestrator.report import chaos as page

PLANS = DEPLOY.parent / "plans"


def shipped() -> list[tuple[Path, ChaosPlan]]:
    """The plans that come with atoll, by name."""
    return [(path, parse(read_document(path))) for path in sorted(PLANS.glob("*.yaml"))]


def plan_file(named: str) -> Path:
    """The file of a plan given by its path, or by the name of a shipped one. Raises ConfigurationError."""
    for path in (Path(named), PLANS / f"{named}.yaml"):
        if path.is_file():
            return path
    names = ", ".join(path.stem for path in sorted(PLANS.glob("*.yaml")))
    raise ConfigurationError(detail=f"There is no plan {named!r}. Give a file, or one of {names}.")


def load(path: Path) -> ChaosPlan:
    """The plan of a file. Raises InvalidJobSpec with every problem."""
    return parse(read_document(path))


def faults_for(plan: ChaosPlan, job: Job) -> tuple[PlannedFault, ...]:
    """When the plan strikes whom of this job. Raises InvalidJobSpec where it does not fit its islands."""
    islands = [
        IslandPlan(IslandId(i.island), NodeGroupId(i.node_group), i.region, i.accelerator_count) for i in job.islands
    ]
    check_fleet(plan, islands)
    return schedule(plan, islands)


class Conductor:
    """Sees every picture of the job (``watch.Observer``) and strikes what is due; tells what it did last.

    ``home`` is the folder of the service that ``client`` speaks to, if that is of this machine: ``kill_api`` needs it.
    """

    def __init__(
        self, client: Client, job: str, plan: ChaosPlan, faults: Sequence[PlannedFault], home: Home | None = None
    ) -> None:
        self.conduct = Conduct(plan, faults)
        self._client, self._job, self._home = client, job, home
        self._struck: dict[str, Decision] = {}
        self._now = 0.0

    def __call__(self, job: Job) -> str | None:
        if job.state != "running" or job.after_s is None or self.conduct.over:
            return None
        self._now = job.after_s
        training = {IslandId(i.island): Incarnation(i.incarnation) for i in job.islands if i.state == "training"}
        decided = self.conduct.look(job.after_s, training, lambda: _figures(job))
        told = [self._carry_out(decision) for decision in decided]
        if self.conduct.aborted is not None:
            told.append(f"aborted: {self.conduct.aborted}")
            self._continue_all()
        return "; ".join(told) or None

    def interrupt(self) -> list[str]:
        """Nothing strikes any more, and what is stopped goes on now. Returns the islands that were told to."""
        self.conduct.abort("interrupted")
        return self._continue_all()

    def settle(self) -> Conduct:
        """The job has ended: what it did not take after all did not strike."""
        for command in self._client.commands(self._job):
            if command.command in self._struck and command.state in ("refused", "undelivered"):
                self.conduct.refused(self._struck[command.command], command.detail)
        return self.conduct

    def _carry_out(self, decision: Decision) -> str:
        fault = decision.fault
        what, when = fault.told(), f"{decision.at:.1f} s"
        if decision.spared:
            return f"{when}: {what} spared, {decision.spared}"
        try:
            self._strike(decision)
        except AtollError as error:
            self.conduct.refused(decision, str(error))
            return f"{when}: {what} failed, {error}"
        return f"{when}: {what}"

    def _strike(self, decision: Decision) -> None:
        fault = decision.fault
        if fault.kind is Kind.KILL_API:
            kill_and_start_again(self._home, self._client.url)
            return
        more = {"bytes_per_second": fault.bytes_per_second, "payloads": fault.payloads}
        command = self._client.strike(self._job, fault.kind, fault.island or None, fault.duration, **more)
        self._struck[command.command] = decision

    def _continue_all(self) -> list[str]:
        islands = self.conduct.still_stopped(self._now)
        for island in islands:
            try:
                self._client.strike(self._job, "continue", island)
            except AtollError:
                continue  # it goes on by itself when its time is over
        return list(islands)


def reference_of(client: Client, plan: ChaosPlan, named: str | None) -> dict[str, Any] | None:
    """The report that ``loss_gap`` is measured against: a report.json, or that of an ended job of the service.

    Raises ConfigurationError before anything strikes where the plan asks for one that is not given, or is no use.
    """
    if named is None:
        if any(objective.root == LOSS_GAP for objective in plan.objectives):
            detail = f"{plan.name} has an objective of {LOSS_GAP}, which takes a job that nothing was done to."
            raise ConfigurationError(detail=f"{detail} Give its id, or its report.json, with --reference.")
        return None
    path = Path(named)
    try:
        report = json.loads(path.read_text()) if path.is_file() else client.report(named)
    except (OSError, ValueError) as error:
        raise ConfigurationError(detail=f"{path} is no report: {error}.") from error
    if not isinstance(report, dict) or report.get("loss_final") is None or "policy" not in report:
        raise ConfigurationError(detail=f"{named} is no report of a job with a final held-out loss (loss_final).")
    return report


def write_page(path: Path, verdict: Verdict, plan: Path) -> None:
    """The verdict as a page to be shared, with the plan's file as it is."""
    path.write_text(page.render(verdict.plain(), verdict.report, plan.read_text()), encoding="utf-8")


def _figures(job: Job) -> dict[str, Any]:
    return figures_now(job.islands_training, job.goodput, job.statistics)
