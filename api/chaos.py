"""A chaos plan against a live job, run from here over REST: the job is looked at, the plan decides, the service strikes.

Responsible for finding plans, for striking what ``chaos.conduct`` decides, and for leaving nothing stopped behind when it
is interrupted. Should this process die all the same, a stopped island goes on by itself when its time is over. Refuses any
means that a user does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from api.client import Client
from api.schemas import Job
from api.up import DEPLOY
from orchestrator.chaos.conduct import Conduct, Decision
from orchestrator.chaos.plan import ChaosPlan, check_fleet, figures_now, parse
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
    """Sees every picture of the job (``watch.Observer``) and strikes what is due; tells what it did last."""

    def __init__(self, client: Client, job: str, plan: ChaosPlan, faults: Sequence[PlannedFault]) -> None:
        self.conduct = Conduct(plan, faults)
        self._client, self._job = client, job
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
        what = f"{fault.kind} {fault.island}{f' for {fault.duration:g} s' if fault.duration else ''}"
        when = f"{decision.at:.1f} s"
        if decision.spared:
            return f"{when}: {what} spared, {decision.spared}"
        try:
            command = self._client.strike(self._job, fault.kind, fault.island, fault.duration)
        except AtollError as error:
            self.conduct.refused(decision, str(error))
            return f"{when}: {what} failed, {error}"
        self._struck[command.command] = decision
        return f"{when}: {what}"

    def _continue_all(self) -> list[str]:
        islands = self.conduct.still_stopped(self._now)
        for island in islands:
            try:
                self._client.strike(self._job, "continue", island)
            except AtollError:
                continue  # it goes on by itself when its time is over
        return list(islands)


def write_page(path: Path, verdict: Verdict, plan: Path) -> None:
    """The verdict as a page to be shared, with the plan's file as it is."""
    path.write_text(page.render(verdict.plain(), verdict.report, plan.read_text()), encoding="utf-8")


def _figures(job: Job) -> dict[str, Any]:
    return figures_now(job.islands_training, job.goodput, job.statistics)
