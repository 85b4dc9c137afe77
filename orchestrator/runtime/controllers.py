"""The controllers of all jobs of a cluster, in one process on the head. It ends a minute after the last job.

    synchroniser of a ──open, place, end …──▶ Controllers ─▶ Controller of a ─▶ islands of a
    synchroniser of b ──open, place, end …──▶      │      ─▶ Controller of b ─▶ islands of b
                                                   └ one watch over the cluster's nodes

A process costs some 150 MB, most of it Ray itself, so a process for each job was what a head with many jobs had no memory
for. Each job has threads and a log of its own here: a call that hangs, or an error, is no other job's. If the process dies,
each synchroniser notices that by itself and opens its job in the next one.

Builds do not share a process, because a synchroniser gives it objects of its own. A synchroniser that was restarted by
another build than before takes its job away from the older process.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from orchestrator.actors import ActorHandle
from orchestrator.errors import NotFound, first_line
from orchestrator.runtime import cluster
from orchestrator.runtime.controller import Controller
from orchestrator.runtime.nodes import NodeWatch
from orchestrator.runtime.placement import Leaving
from orchestrator.runtime.settings import CONTROLLERS, controller_name, controllers_name
from orchestrator.specification.config import JobSpec
from orchestrator.system import logbook
from orchestrator.system.roots import AllowedRoots

log = logging.getLogger(__name__)

CALLS_MAX = 10_000
"""Of all jobs, at the same time: none waits for a call of another job."""
THREADS_MAX = 32
"""Calls of one job that are worked on at the same time."""
OPENED_WITHIN_S = 2.0
"""Ray may run ``open`` after calls that were made after it."""
IDLE_S = 60.0
LOOK_S = 5.0
LET_GO_TIMEOUT_S = 5.0

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _OpenJob:
    """A job's controller, once it is made, with the threads and the log of its calls. ``context`` is that of the log."""

    controller: Future[Controller]
    threads: ThreadPoolExecutor
    context: Context
    writer: logging.Handler

    def controller_made(self) -> Controller | None:
        is_ready = self.controller.done() and self.controller.exception() is None
        return self.controller.result() if is_ready else None

    def forget(self) -> None:
        self.threads.shutdown(wait=False)
        logging.getLogger().removeHandler(self.writer)
        self.writer.close()


class Controllers:
    """The actor. Its calls run in Ray's event loop, and hand over what takes time to the threads of the job."""

    def __init__(self) -> None:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True, format=logbook.FORMAT)
        self._lock = threading.Lock()
        self._jobs: dict[str, _OpenJob] = {}
        self._nodes = NodeWatch(self._declare_dead, self._announce)
        threading.Thread(target=self._end_when_idle, name="idle", daemon=True).start()

    async def open(self, job: str, spec: JobSpec, run_dir: str, roots: AllowedRoots) -> None:
        """Make the job's controller. Idempotent, unless making it has failed: then it is made again."""
        with self._lock:
            present = self._jobs.get(job)
            if present is not None and present.controller.done() and present.controller.exception() is not None:
                self._jobs.pop(job).forget()
                present = None
            if present is None:
                present = self._jobs[job] = self._opened(job, spec, Path(run_dir), roots)
        await asyncio.wrap_future(present.controller)

    def _opened(self, job: str, spec: JobSpec, run_dir: Path, roots: AllowedRoots) -> _OpenJob:
        book = logbook.service_logbook(run_dir, "controller")
        context, writer = logbook.begin_part(book)
        # each thread needs a copy: a context cannot be entered twice
        threads = ThreadPoolExecutor(THREADS_MAX, f"{job}-controller", initializer=logbook.write_part, initargs=(book,))

        def make() -> Controller:
            log.info("the controller of %s begins", job)
            return Controller(job, spec, run_dir, roots, self._nodes, lambda: self._forget(job))

        return _OpenJob(threads.submit(make), threads, context, writer)

    async def ask(self, job: str, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call the method of this job's controller. Raises NotFound where the job is not open."""
        open_job = await self._open_job(job)
        controller = await asyncio.wrap_future(open_job.controller)
        work = open_job.threads.submit(getattr(controller, method), *arguments, **named)
        return await asyncio.wrap_future(work)

    async def _open_job(self, job: str) -> _OpenJob:
        give_up_at = time.monotonic() + OPENED_WITHIN_S
        while (open_job := self._jobs.get(job)) is None:
            if time.monotonic() > give_up_at:
                raise NotFound(detail=f"Job {job} has no controller here.", remedy="Its synchroniser opens it again.")
            await asyncio.sleep(0.05)
        return open_job

    async def let_go(self, job: str) -> None:
        """Place nothing of this job from now on. Its processes run on."""
        open_job = self._jobs.get(job)
        if open_job is not None and (controller := open_job.controller_made()) is not None:
            await asyncio.wrap_future(open_job.threads.submit(controller.let_go))
        self._forget(job)

    async def jobs(self) -> list[str]:
        """Return the jobs that are open here."""
        with self._lock:
            return sorted(self._jobs)

    def _forget(self, job: str) -> None:
        with self._lock:
            open_job = self._jobs.pop(job, None)
        if open_job is not None:
            open_job.forget()

    def _each(self, call: Callable[[Controller], None]) -> None:
        with self._lock:
            jobs = dict(self._jobs)
        for job, open_job in jobs.items():
            if (controller := open_job.controller_made()) is not None:
                try:
                    open_job.context.copy().run(call, controller)
                except Exception:  # the other jobs' islands are on these nodes as well
                    log.exception("the controller of %s does not hear of nodes", job)

    def _declare_dead(self, nodes: frozenset[str]) -> None:
        self._each(lambda controller: controller.declare_dead(nodes))

    def _announce(self, leaving: Mapping[str, Leaving]) -> None:
        self._each(lambda controller: controller.announce(leaving))

    def _end_when_idle(self) -> None:
        """End this process when it has had no job for a while. A synchroniser that opens one just then makes another."""
        used_at = time.monotonic()
        while time.monotonic() - used_at < IDLE_S:
            time.sleep(LOOK_S)
            if self._jobs:
                used_at = time.monotonic()
        own: ActorHandle[Controllers] | None = cluster.actor_named(controllers_name())
        if own is not None:
            cluster.end_actor(own)


@dataclass(frozen=True, slots=True)
class JobController(ActorHandle[Controller]):
    """Calls to the controller of one job, as if it were an actor of its own."""

    job: str

    def call(
        self,
        method: Callable[Concatenate[Controller, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> ray.ObjectRef[Answer]:
        reply: ray.ObjectRef[Answer] = self.ray_handle.ask.remote(self.job, method.__name__, arguments, named)
        return reply

    def has(self, method: Callable[Concatenate[Controller, Arguments], Answer]) -> bool:
        return hasattr(Controller, method.__name__)


def controller_of(job: str, spec: JobSpec, run_dir: str, roots: AllowedRoots) -> JobController:
    """Return the job's controller: the present one, for a synchroniser whose predecessor died, or a new one.

    Returns at once. Processes of other builds have the job as well until ``take_from_others``.
    """
    options = {**cluster.on_head(controllers_name()), "max_restarts": 0, "max_concurrency": CALLS_MAX}
    shared = cluster.start_actor(Controllers, options)
    shared.call(Controllers.open, job, spec, run_dir, roots)
    return JobController(shared.ray_handle, job)


def take_from_others(job: str) -> None:
    """Have processes of other builds let the job go, which this build continues from now on. Does not wait for that."""
    cluster.end_actor_named(controller_name(job))
    for actor in _processes():
        if actor.name != controllers_name():
            actor.handle.call(Controllers.let_go, job)


def controller_here(job: str) -> JobController | None:
    """Return the job's controller in the process of this build, if there is that process."""
    shared = cluster.actor_named(controllers_name())
    return None if shared is None else JobController(shared.ray_handle, job)


def controller_of_open(job: str, timeout_s: float) -> JobController | None:
    """Return the job's controller in the process that has it open, which may be of another build. Raises GetTimeoutError."""
    for process in _processes():
        try:
            open_jobs: Any = ray.get(process.handle.call(Controllers.jobs), timeout=timeout_s)
        except RayActorError as error:  # it had no job for a while, and ends just now
            log.info("the process of the controllers cannot be asked: %s", first_line(error))
            continue
        if job in open_jobs:
            return JobController(process.handle.ray_handle, job)
    return None


def let_go(job: str) -> None:
    """Have no process place anything of this job any more. Waits a moment for each."""
    cluster.end_actor_named(controller_name(job))
    calls = [actor.handle.call(Controllers.let_go, job) for actor in _processes()]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=LET_GO_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    handle: ActorHandle[Controllers]


def _processes() -> list[_Process]:
    """Return the processes of all builds."""
    processes = []
    for name in sorted(name for name in cluster.actor_names() if name.startswith(CONTROLLERS)):
        try:
            handle = cluster.actor_named(name)
        except RayError as error:  # it ends just now
            log.info("%s cannot be asked: %s", name, first_line(error))
            continue
        if handle is not None:
            processes.append(_Process(name, handle))
    return processes
