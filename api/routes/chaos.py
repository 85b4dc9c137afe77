"""Chaos: one fault at a time against a job's island. Plans of faults are ``chaos_runs``."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from api.routes.dependencies import ANONYMOUS, Caller, IdempotencyKey, ServiceHere
from api.schemas import Command

router = APIRouter(prefix="/v1/jobs/{job}/chaos", tags=["chaos"])

STOP_MAX_S = 3600.0
Whom = Annotated[str, Field(min_length=1, max_length=200, description="an island of the job")]


class Strike(BaseModel):
    model_config = ConfigDict(extra="forbid")

    island: Whom


class Kill(Strike):
    """SIGKILL, no warning; the island is placed again by itself."""

    kind: Literal["kill"]


class Stop(Strike):
    """SIGSTOP for ``duration_s``: the island neither steps nor answers meanwhile."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"kind": "stop", "island": "asia", "duration_s": 6.0}]})

    kind: Literal["stop"]
    duration_s: Annotated[float, Field(gt=0, le=STOP_MAX_S, allow_inf_nan=False)]


class Continue(Strike):
    """SIGCONT before a stop's time is over."""

    kind: Literal["continue"]


Fault = Annotated[Kill | Stop | Continue, Field(discriminator="kind")]


@router.post("/faults", status_code=202)
def inject_fault(
    job: str,
    fault: Fault,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Strike one island; the tape says so (``FaultInjected``). A stopped one goes on by itself when its time is over."""
    seconds = fault.duration_s if isinstance(fault, Stop) else 0.0
    command = service.submit_command(job, fault.kind, fault.island, True, caller, idempotency_key, seconds)
    response.headers["Location"] = f"/v1/jobs/{command.job}/commands/{command.command}"
    return command
