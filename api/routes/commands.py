"""The commands given to a job: who asked for each, and what became of it."""

from __future__ import annotations

from fastapi import APIRouter

from api.http.pools import JOBS
from api.http.routing import runs_in
from api.routes.dependencies import ServiceHere
from api.schemas import Command, Commands

router = APIRouter(prefix="/v1/jobs/{job}/commands", tags=["commands"], route_class=runs_in(JOBS))


@router.get("")
def list_commands(job: str, service: ServiceHere) -> Commands:
    """All commands of a job, oldest first."""
    return Commands(commands=service.commands(job))


@router.get("/{command}")
def get_command(job: str, command: str, service: ServiceHere) -> Command:
    """One command. ``pending`` until the job has decided."""
    return service.command(job, command)
