"""The page `/metrics`: one registry with the jobs' own totals, this process's request times, and its memory and CPU.

    JobsCollector ── at a scrape ──▶ store (which jobs), service (how each stands) ──▶ metrics.job ──▶ Prometheus

Responsible for asking every live job once, together and in bounded time, so that one that hangs costs the scrape nothing
but its own figures; and for showing an ended job a while longer, so that its last figures are scraped. Nothing is counted
here: what a job says comes from its tape, and is the same after this process was killed.

Source: Prometheus, "Writing exporters" (a collector that reads at scrape time).

The durations of requests: a middleware around the whole application, and its histogram.

A request's time ends where its answer begins: a stream of events that lasts for hours is no slow request. Labels are the
route's template, never the path, and what matches no route is one label together, so that nobody who asks for nonsense
fills the registry. These figures are of this process and start anew with it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.clocks import Ages
from api.jobs.background_loop import ProblemLog, reason_of
from api.jobs.service import Service
from api.metrics.catalogue import FAMILIES
from api.metrics.job import Buckets, Sample, samples
from api.schemas import ALIVE, JobState
from api.storage.store import JobRow, Store
from orchestrator.status import JobStatus
from orchestrator.system.run_folder import STATUS

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
NO_ROUTE = "(none)"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def request_seconds(registry: CollectorRegistry) -> Histogram:
    family = FAMILIES["atoll_api_request_seconds"]
    return Histogram(family.name, family.help, family.labels, registry=registry, buckets=BOUNDS_S)


class RequestMetrics:
    """Middleware: observe every HTTP request. ``status`` is the class of its answer, 2xx to 5xx."""

    def __init__(self, app: ASGIApp, seconds: Histogram) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        answered = False

        def observe(status: int) -> None:
            nonlocal answered
            answered = True
            method = scope["method"] if scope["method"] in METHODS else "other"
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._seconds.labels(method, route, f"{status // 100}xx").observe(time.perf_counter() - began)

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                observe(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        except Exception:
            if not answered:
                observe(500)
            raise


logger = logging.getLogger(__name__)

FRESH_S = 1.0
"""Two scrapers, or a person who reloads, cause one request to each job."""
PATIENCE_S = 4.0
"""Below the scrape timeout of deploy/prometheus/prometheus.yml."""
LINGER_S = 900.0
BUILD = (importlib.metadata.version("atoll"), platform.python_version(), importlib.metadata.version("ray"))
"""The labels of ``atoll_build_info``."""
SAMPLES_MAX = 500_000
"""The limit for one job: some thirty samples for each of at most 10,000 islands."""
_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Metrics:
    """The registry of one service process."""

    def __init__(self, service: Service, store: Store) -> None:
        self.registry = CollectorRegistry()
        self.request_seconds = request_seconds(self.registry)
        self.registry.register(JobsCollector(service, store))
        ProcessCollector(registry=self.registry)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class JobsCollector(Collector):
    def __init__(self, service: Service, store: Store) -> None:
        self._service, self._store = service, store
        self._pool = ThreadPoolExecutor(8, "metrics")
        self._questions: dict[str, Future[JobStatus | None]] = {}
        self._one_at_a_time = threading.Lock()
        self._problem_log = ProblemLog(logger)
        self._found: list[Metric] = []
        self._found_at = float("-inf")
        self._ages, self._endings = Ages(), Ages()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        with self._one_at_a_time:
            if time.monotonic() - self._found_at > FRESH_S:
                self._found = families_of(self._samples())
                self._found_at = time.monotonic()
            return self._found

    def _samples(self) -> Iterator[Sample]:
        rows = self._store.jobs()
        for ages in (self._ages, self._endings):
            ages.forget_all_but(row.job for row in rows)
        waiting = (row for row in rows if row.state == JobState.QUEUED and is_time(row.submitted_at))
        queued = [self._ages.of(row.job, row.submitted_at) for row in waiting]
        live = {row.job: row for row in rows if row.state in ALIVE}
        records = self._ask(live)
        samples_by_job = {row.job: self._samples_of(row, record) for row in rows if (record := records.get(row.job))}
        states = Counter(state_of(row, records.get(row.job)) for row in rows)
        yield Sample("atoll_build_info", BUILD, 1)
        yield from (Sample("atoll_jobs", (state.value,), states[state]) for state in JobState)
        yield Sample("atoll_queue_oldest_seconds", (), max(queued, default=0.0))
        yield Sample("atoll_queue_unschedulable", (), self._service.queue.unschedulable)
        yield Sample("atoll_clock_set_seconds", (), self._service.clock.check())
        for row in rows:
            if row.job in live:
                yield Sample("atoll_job_answers", (row.job,), samples_by_job.get(row.job) is not None)
            elif self._ended_lately(row) and (record := self._record(row)):
                samples_by_job[row.job] = self._samples_of(row, record)
            yield from samples_by_job.get(row.job) or ()
        self._problem_log.keep(f"job {row.job}" for row in rows)

    def _samples_of(self, row: JobRow, record: JobStatus) -> list[Sample] | None:
        """Return all samples of the record, or None if it is damaged, so that other jobs keep their metrics."""
        try:
            checked_samples = [checked(sample) for sample in islice(samples(record, row.spec), SAMPLES_MAX + 1)]
            if len(checked_samples) > SAMPLES_MAX:
                raise ValueError(f"it has more than {SAMPLES_MAX} samples, the limit for one job")
        except Exception as error:
            self._problem_log.note(f"job {row.job}", f"its metrics cannot be computed: {reason_of(error)}")
            return None
        self._problem_log.settle(f"job {row.job}")
        return checked_samples

    def _ask(self, rows: dict[str, JobRow]) -> dict[str, JobStatus]:
        """Return the status records of these jobs. A job that does not answer in time is left out until it does."""
        questions = {job: self._questions.get(job) or self._pool.submit(self._record, row) for job, row in rows.items()}
        done, _ = wait(questions.values(), timeout=PATIENCE_S)
        self._questions = {job: future for job, future in questions.items() if future not in done}
        return {job: record for job, future in questions.items() if future in done and (record := future.result())}

    def _ended_lately(self, row: JobRow) -> bool:
        try:
            ended_at = (Path(row.run_dir) / STATUS).stat().st_mtime
        except (OSError, ValueError):
            return False  # it left no final state
        return self._endings.of(row.job, ended_at) < LINGER_S

    def _record(self, row: JobRow) -> JobStatus | None:
        try:
            return self._service.record(row)
        except Exception:  # reported as ``atoll_job_answers``; the job's status says why
            return None


def state_of(row: JobRow, record: JobStatus | None) -> JobState:
    """Return the job's state as last known, or as the job itself reported it since."""
    try:
        stored = JobState(row.state)
        if record is None or stored.final:
            return stored
        view = record.view
        return JobState(view.outcome or "failed") if view.phase == "finished" else JobState(view.phase)
    except ValueError:  # a damaged job does nothing
        return JobState.FAILED


def checked(sample: Sample) -> Sample:
    """Return the sample. Raises ValueError or TypeError if it cannot be exposed."""
    if len(sample.labels) != len(FAMILIES[sample.family].labels):
        raise ValueError(f"{sample.family} has other labels")
    for label in sample.labels:
        label.encode()
    if not isinstance(sample.value, Buckets):
        float(sample.value)
        return sample
    for bound, count in sample.value.cumulative:
        float(bound), float(count)
    float(sample.value.sum)
    return sample


def is_time(value: object) -> bool:
    return isinstance(value, float | int)


def families_of(samples: Iterable[Sample]) -> list[Metric]:
    """Return the samples by family, in the order of the catalogue. Raises KeyError for an unknown family."""
    families: dict[str, Any] = {}
    for family in FAMILIES.values():
        families[family.name] = _KINDS[family.kind](family.name, family.help, labels=family.labels)
    for sample in samples:
        if isinstance(sample.value, Buckets):
            bounds = [(floatToGoString(bound), count) for bound, count in sample.value.cumulative]
            families[sample.family].add_metric(sample.labels, bounds, sample.value.sum)
        else:
            families[sample.family].add_metric(sample.labels, float(sample.value))
    return [family for family in families.values() if family.samples]
