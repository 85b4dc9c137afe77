"""Chaos: one fault at a time against a job. Plans of faults are ``chaos_runs``.

The service's own death (``kill_api``) cannot be asked for alone; a plan can have it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from api.http.pools import JOBS
from api.http.routing import runs_in
from api.routes.dependencies import ANONYMOUS, Caller, IdempotencyKey, ServiceHere, accepted
from api.schemas import Command
from orchestrator.bounds import PRINTABLE, BytesPerSecond, HostNumber
from orchestrator.chaos.plan import PAYLOADS_MAX
from orchestrator.core.commands import Inject
from orchestrator.core.vocabulary import IslandId

router = APIRouter(prefix="/v1/jobs/{job}/chaos", tags=["chaos"], route_class=runs_in(JOBS))

STOP_MAX_S = 3600.0
Whom = Annotated[str, Field(min_length=1, max_length=200, pattern=PRINTABLE, description="an island of the job")]
Seconds = Annotated[float, Field(strict=True, ge=0.001, le=STOP_MAX_S, allow_inf_nan=False)]
Payloads = Annotated[int, Field(strict=True, ge=1, le=PAYLOADS_MAX, description="how many of its next payloads")]


class FaultRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    island: Whom


class Kill(FaultRequest):
    """SIGKILL, no warning; the island is placed again by itself."""

    kind: Literal["kill"]


class Stop(FaultRequest):
    """SIGSTOP for ``duration_s``: the island neither steps nor answers meanwhile."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"kind": "stop", "island": "asia", "duration_s": 6.0}]})

    kind: Literal["stop"]
    duration_s: Seconds


class Cut(FaultRequest):
    """The island's link carries nothing for ``duration_s``: no letter, payload or publication. It trains on."""

    kind: Literal["cut"]
    duration_s: Seconds


class Slow(FaultRequest):
    """The island's link carries payloads and publications at this rate for ``duration_s``."""

    kind: Literal["slow"]
    duration_s: Seconds
    bytes_per_second: BytesPerSecond


class Corrupt(FaultRequest):
    """The island's next payloads arrive with flipped bits, and are refused for their checksum."""

    kind: Literal["corrupt"]
    payloads: Payloads


class Delay(FaultRequest):
    """The island's next payloads arrive ``duration_s`` late, each with all that is behind it."""

    kind: Literal["delay"]
    duration_s: Seconds
    payloads: Payloads


class Drop(FaultRequest):
    """The island's next payloads are lost on the way."""

    kind: Literal["drop"]
    payloads: Payloads


class Continue(FaultRequest):
    """SIGCONT before a stop's time is over; a link that is cut, slow or harms payloads is well again."""

    kind: Literal["continue"]


class KillNode(FaultRequest):
    """SIGKILL of the raylet of the island's node: all islands on it die, of any job, and the node does not come back."""

    kind: Literal["kill_node"]


class KillHost(FaultRequest):
    """SIGKILL of the island's process on one of its hosts. Those on its others end with it, and it is placed again."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"kind": "kill_host", "island": "asia", "host": 0}]})

    kind: Literal["kill_host"]
    host: HostNumber | None = Field(None, description="from 0; its last where none is said")


class KillSynchroniser(BaseModel):
    """SIGKILL of the job's synchroniser, once the tape says so. It strikes no island."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["kill_synchroniser"]


Fault = Annotated[
    Kill | Stop | Cut | Slow | Corrupt | Delay | Drop | Continue | KillNode | KillHost | KillSynchroniser,
    Field(discriminator="kind"),
]


@router.post("/faults", status_code=202)
def inject_fault(
    job: str,
    fault: Fault,
    response: Response,
    service: ServiceHere,
    caller: Caller = ANONYMOUS,
    idempotency_key: IdempotencyKey = None,
) -> Command:
    """Strike one island, or the synchroniser; the tape says so (``FaultInjected``). What lasts ends by itself in time."""
    return accepted(service.submit_command(job, command_of(fault), caller, idempotency_key), response)


def command_of(fault: Fault) -> Inject:
    """The command of a fault; a field that its kind lacks is zero."""
    island = None if isinstance(fault, KillSynchroniser) else IslandId(fault.island)
    fields = fault.model_dump()
    dose = (
        fields.get("duration_s", 0.0),
        fields.get("bytes_per_second", 0.0),
        fields.get("payloads", 0),
        fields.get("host"),
    )
    return Inject(fault.kind, island, *dose)
