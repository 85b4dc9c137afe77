"""The FastAPI application: routes, problem documents, authentication and the origin guard, wired together.

``create_app`` gets everything it needs as arguments, so that tests and the service build the same app.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from api.auth.middleware import AuthMiddleware
from api.auth.permissions import OWN_PACKAGES, Role
from api.auth.tokens import AccessStore, AuditRow, Tokens
from api.chaos.runs import ChaosRuns
from api.http import problems
from api.http.guard import Bodies, Guard, SecurityHeaders
from api.http.streams import Seats
from api.installation.service_restart import RestartService, no_restart
from api.jobs.autopilot import Autopilots
from api.jobs.background_loop import BackgroundLoop
from api.jobs.control import ControlPort
from api.jobs.cordons import BAD_NODE_RULE, NodeCordons
from api.jobs.cordons import ROUND_EVERY_S as CORDON_ROUND_EVERY_S
from api.jobs.dispatcher import JOBS_MAX
from api.jobs.job_list import RETENTION_EVERY_S, JobList, Retainer
from api.jobs.overseer import RESTART_SILENT_AFTER_MIN, Overseer
from api.jobs.parameters import Parameters
from api.jobs.service import NOTHING_MORE, Service
from api.jobs.status_cache import Readiness
from api.metrics.exposition import Metrics, RequestMetrics
from api.openapi import document
from api.routes import chaos, events, islands, jobs, page, tokens
from api.run.explanations import AllExplanations
from api.storage.store import Store
from orchestrator.specification.sections import PriceSection
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import Retention

DESCRIPTION = """Elastic orchestration of Decoupled DiLoCo training.

Changes are commands: the answer is 202 with a command id, and the outcome is listed under the job's `commands`. Errors are
RFC 9457 problem documents with a remedy. With an `Idempotency-Key` a request can be repeated safely. `latest` names the
newest job."""


def create_app(
    control: ControlPort,
    store: Store,
    runs_dir: Path,
    *,
    packages: tuple[str, ...] = OWN_PACKAGES,
    loopback: bool = True,
    jobs_max: int = JOBS_MAX,
    restart_service: RestartService = no_restart,
    taken_down: Path | None = None,
    roots: AllowedRoots = NOTHING_MORE,
    retention: Retention = Retention(),  # noqa: B008  (it is frozen)
    certificate: Path | None = None,
    restart_silent_after_min: float = RESTART_SILENT_AFTER_MIN,
    prices: Mapping[str, PriceSection] | None = None,
    cordon_bad_nodes: bool = False,
) -> FastAPI:
    """Return the REST API for this control port and store. Jobs write below ``runs_dir``.

    Jobs may name code of ``packages``, and files below ``roots`` and in ``runs_dir``. ``loopback``: the API can be reached
    only from this machine. At most ``jobs_max`` jobs run at a time; the others are queued. ``restart_service`` carries out
    the fault ``kill_api``. ``taken_down`` is the file that exists after the installation was stopped on purpose.
    ``certificate`` is the file of the service's own one, whose expiry the metrics show. A synchroniser that does not answer
    for ``restart_silent_after_min`` is restarted; 0: never. Jobs get the ``prices`` of node groups that they do not name.
    ``cordon_bad_nodes`` has the service cordon nodes by a rule.
    """
    access = AccessStore(store.engine)
    node_cordons = NodeCordons(control, store, by_rule=cordon_bad_nodes, audit=partial(audit_rule, access))
    service = Service(control, store, runs_dir, packages, jobs_max, roots, prices, node_cordons)
    overseer = Overseer(
        control, store, service.cordons, service.record, service.roots, taken_down, restart_silent_after_min
    )
    job_list = JobList(service, store, control, runs_dir)
    retainer = Retainer(store, job_list, retention)
    autopilots = Autopilots(service, store)
    plans = ChaosRuns(service, store, restart_service)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(service.resume)
        await run_in_threadpool(plans.threads.resume)
        loop = BackgroundLoop(service.tend)
        loop.start()
        removing = BackgroundLoop(retainer.round, "retention", RETENTION_EVERY_S)
        removing.start()
        cordoning = BackgroundLoop(node_cordons.round, "cordons of nodes", CORDON_ROUND_EVERY_S)
        cordoning.start()
        overseer.begin()
        service.queue.begin()
        job_list.begin()
        autopilots.begin()
        yield
        await run_in_threadpool(autopilots.close)
        await run_in_threadpool(job_list.close)
        await run_in_threadpool(overseer.close)
        await run_in_threadpool(service.queue.close)
        await run_in_threadpool(loop.stop)
        await run_in_threadpool(removing.stop)
        await run_in_threadpool(cordoning.stop)
        await run_in_threadpool(plans.threads.close)

    app = FastAPI(
        title="atoll",
        version="1",
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url=None,  # /openapi.json and /docs are our own
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.chaos = plans
    app.state.access = access
    app.state.tokens = Tokens(access)
    folders = [runs_dir, *([taken_down.parent] if taken_down else []), Path(tempfile.gettempdir())]
    app.state.metrics = Metrics(service, store, certificate, folders)
    app.state.job_list = job_list
    app.state.retainer = retainer
    app.state.parameters = Parameters(service, control)
    app.state.seats = Seats()
    app.state.readiness = Readiness(service.ready)
    app.state.explanations = AllExplanations()
    app.state.open_pages = page.OpenPages()
    problems.install(app)
    routers = (
        jobs.router,
        islands.router,
        jobs.commands_router,
        events.router,
        events.logs_router,
        events.merges_router,
        jobs.parameters_router,
        islands.fleet_router,
        page.health_router,
        page.metrics_router,
        tokens.router,
        page.router,
        page.open_pages_router,
        jobs.checkpoints_router,
        jobs.retention_router,
        chaos.router,
        chaos.runs_router,
    )
    for router in routers:
        app.include_router(router)
    document.install(app)
    app.add_middleware(AuthMiddleware, tokens=app.state.tokens, store=access)
    app.add_middleware(Guard, loopback=loopback)
    app.add_middleware(problems.ErrorHandler)  # outside these two, to answer what they raise
    app.add_middleware(Bodies)  # outside everything that refuses, to handle the rest of the body
    app.add_middleware(SecurityHeaders)
    # outermost: refusals are measured too
    app.add_middleware(RequestMetrics, seconds=app.state.metrics.request_seconds)
    return app


def audit_rule(access: AccessStore, path: str) -> None:
    """Record in the audit trail that the rule for bad nodes did what a request to ``path`` does."""
    row = AuditRow(
        at=time.time(), caller=BAD_NODE_RULE, role=Role.OPERATOR.value, address="service", method="POST", path=path
    )
    access.end_audit(access.begin_audit(row), 202)
