"""The FastAPI application: routes, problem documents and the guard, put together.

Responsible for wiring only. ``create_app`` is given what it needs, so that tests and the service build the same app.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from api import problems
from api.control import ControlPort
from api.guard import LoopbackOnly
from api.routes import commands, fleet, health, islands, jobs
from api.service import Service
from api.store import Store

DESCRIPTION = """Elastic orchestration of Decoupled DiLoCo training.

Changes are commands: 202 with a command id, whose outcome is read under the job's `commands`. Errors are RFC 9457 problem
documents with a remedy. Repeat a request safely by giving it an `Idempotency-Key`. `latest` stands for the newest job."""


def create_app(control: ControlPort, store: Store, runs_dir: Path) -> FastAPI:
    """The REST API over this control port and store. Runs write below ``runs_dir``."""
    service = Service(control, store, runs_dir)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(service.resume)
        yield

    app = FastAPI(title="atoll", version="1", description=DESCRIPTION, lifespan=lifespan)
    app.state.service = service
    problems.install(app)
    for routes in (jobs, islands, commands, fleet, health):
        app.include_router(routes.router)
    app.add_middleware(LoopbackOnly)
    return app
