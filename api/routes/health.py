"""Is the process alive, and can it do its work? Two questions, for two kinds of watchers."""

from __future__ import annotations

from fastapi import APIRouter

from api.routes.dependencies import ServiceHere
from api.schemas import Health

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers. Restart it when this fails."""
    return Health(status="ok")


@router.get("/readyz")
def readyz(service: ServiceHere) -> Health:
    """The store and the cluster answer too; 503 with the reason when one does not. Send no work here when this fails."""
    service.check_store()
    count = len(service.node_groups())
    return Health(status="ok", detail=f"{count} node groups")
