"""The shapes of chaos plans and their runs in the REST API. Times are as in ``api.schemas``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api.schemas import Answer, CommandState
from orchestrator.specification.bounds import Word

TEXT_CHARACTERS_MAX = 1 << 16
"""Of a plan, as text or as the JSON of its data: kept with each of its runs, and shown with the verdict."""
PLAN_FIELDS_MAX = 100
REFERENCE_FIELDS_MAX = 1000
"""A report has some sixty."""

PlanText = Annotated[str, Field(max_length=TEXT_CHARACTERS_MAX)]


class RunState(StrEnum):
    """The state of a plan's run.

        waiting ──▶ running ──▶ passed | failed      the job has ended, and was judged
           └───────────┴──────▶ aborted              a condition to abort held; judged at the job's end, as a fail
           └───────────┴──────▶ stopped              somebody ended it; there is no verdict

    Faults are injected while it waits or runs.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PASSED = "passed"
    FAILED = "failed"
    ABORTED = "aborted"
    STOPPED = "stopped"

    @property
    def injects(self) -> bool:
        return self in (RunState.WAITING, RunState.RUNNING)

    @classmethod
    def stored(cls, text: str) -> RunState:
        """Return the state of a row; a damaged one counts as failed."""
        return cls(text) if text in cls.__members__.values() else cls.FAILED


Reference = Annotated[
    Annotated[dict[str, Any], Field(max_length=REFERENCE_FIELDS_MAX)] | Word | None,
    Field(description="for an objective of `loss_gap`: an ended job without faults, or its report.json"),
]


class ShippedPlan(BaseModel):
    """A plan that comes with atoll, by its name."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"shipped": "attrition"}]})

    shipped: Word
    reference: Reference = None


class WrittenPlan(BaseModel):
    """A plan as data, or as its YAML text, which keeps its comments for readers of the verdict."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "plan": {
                        "name": "one-kill",
                        "faults": [{"kind": "kill", "target": {"name": "asia"}, "at": 20}],
                        "blast_radius": {"keep": 2},
                        "objectives": ["bystander_gap_max_s < 2"],
                    }
                }
            ]
        },
    )

    plan: Annotated[dict[str, Any], Field(max_length=PLAN_FIELDS_MAX)] | PlanText
    reference: Reference = None


PlanRequest = ShippedPlan | WrittenPlan


class ShownPlan(Answer):
    """A plan that comes with atoll."""

    name: str
    about: str = Field(description="the first sentence of the comment at the top of its file")
    faults: list[str] = Field(description="its faults in words, one entry each")
    keeps: int = Field(description="the blast radius: at least this many islands continue to train")
    objectives: list[str]
    text: str = Field(description="the plan's text, in YAML")


class ShownPlans(Answer):
    plans: list[ShownPlan]


class Fault(Answer):
    """A fault that is still to come."""

    told: str = Field(description="the fault in words")
    kind: str
    island: str = Field(description="empty for a fault that affects no island")
    planned_s: float = Field(description="seconds since the plan began")
    duration_s: float = Field(description="duration of the fault; 0 if it is instantaneous")
    after_s: float | None = Field(description="the same in job time; null while the plan waits to begin")


class Decision(Answer):
    """The outcome of a fault that came due."""

    told: str = Field(description="the fault in words")
    kind: str
    island: str
    planned_s: float
    duration_s: float
    after_s: float = Field(description="when it was decided")
    spared: str = Field(description="why it was skipped; empty if it was injected")
    command: str | None = Field(description="the job's command that injected it")
    outcome: CommandState | None


class ChaosRunSummary(Answer):
    run: str
    job: str
    plan: str
    caller: str
    requested_at: float
    state: RunState
    reason: str = Field(description="why it was aborted or stopped, or what its verdict waits for")
    begun_after_s: float | None = Field(description="null until more islands train than the plan must leave")
    ended_at: float | None = Field(description="null until the run is complete")
    struck_count: int
    spared_count: int


class ChaosRun(ChaosRunSummary):
    """One run of a plan against a job."""

    fault_count: int = Field(description="planned in all, as far as the job lasts")
    next: Fault | None = Field(description="null when nothing is to come")
    decisions: list[Decision]


class ChaosRunList(Answer):
    runs: list[ChaosRunSummary]


class Judged(Answer):
    """One objective. ``margin`` is how far the value is on the right side of the limit."""

    objective: str
    passed: bool
    value: float | None
    limit: float | None
    margin: float | None
    at: float
    detail: str


class VerdictDocument(Answer):
    """A plan's objectives against the job's report, as ``orchestrator.chaos.runner`` writes them."""

    model_config = ConfigDict(extra="allow")

    schema_: str = Field(alias="schema")
    plan: str
    seed: int
    job: str | None
    passed: bool
    aborted: str | None
    objectives: list[Judged]
    faults: list[dict[str, Any]]
    notes: list[str] = Field(default=[], description="what this run could not show")
