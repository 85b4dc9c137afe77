"""The page `/metrics`: one registry with the jobs' own totals, this process's request times, and its memory and CPU.

    JobsCollector ── at a scrape ──▶ store (which jobs), service (how each stands) ──▶ metrics.job ──▶ Prometheus

Responsible for asking every live job once, together and in bounded time, so that one that hangs costs the scrape nothing
but its own figures; and for showing an ended job a while longer, so that its last figures are scraped. What a job says
comes from its tape, and is the same after this process was killed. Only ended jobs are counted here, since this process
started.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.clocks import Ages
from api.jobs.autopilot import advice_of
from api.jobs.background_loop import ProblemLog, reason_of
from api.jobs.job_list import ended_at, uses
from api.jobs.overseer import TAKEN_DOWN
from api.jobs.service import Service
from api.metrics.catalogue import FAMILIES
from api.metrics.job import Buckets, Sample, advice_samples, samples
from api.run.folder import free_bytes, run_bytes
from api.schemas import ALIVE, FINAL, JobState
from api.storage.store import JobRow, Store
from orchestrator.certificates import folders
from orchestrator.core.vocabulary import IslandState
from orchestrator.errors import ConfigurationError
from orchestrator.status import CertificateRecord, JobStatus, NodeGroupRecord
from orchestrator.system import release
from orchestrator.system.run_folder import CRASH, STATUS, TAPE
from orchestrator.system.threads import BoundedThreads

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
HEAD_PATIENCE_S = 1.0
"""Beyond the wait for the jobs. The head answers within milliseconds, or not at all."""
LINGER_S = 900.0
SIZES_FRESH_S = 30.0
BUILD = (release.own().release, platform.python_version(), importlib.metadata.version("ray"))
"""The labels of ``atoll_build_info``."""
FAILED_SHOWN_S = 7 * 86_400.0
"""How long a failed job is named, unless it is deleted or continued before: longer than a weekend with holidays."""
NOT_WANTED = frozenset({IslandState.STOPPED.value, IslandState.DRAINED.value, IslandState.FAILED.value})
CERTIFICATE, CERTIFICATES = "the certificate of the service", "the certificates of the cluster"
Cluster = tuple[list[NodeGroupRecord], list[CertificateRecord]]
ENDINGS = (
    (JobState.COMPLETED, "token_budget"),
    (JobState.CANCELLED, "cancelled"),
    (JobState.FAILED, "job"),
    (JobState.FAILED, "crash"),
    (JobState.FAILED, "not_started"),
    (JobState.FAILED, "not_restarted"),
    (JobState.FAILED, "taken_down"),
)
"""What ends a job. ``job``: it said itself why it cannot continue, such as an error in its code. ``crash``: our own bug."""
SAMPLES_MAX = 500_000
"""The limit for one job: some thirty samples for each of at most 10,000 islands."""
_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Metrics:
    """The registry of one service process. ``certificate`` is the file of its own one, if it serves HTTPS.

    ``folders`` are those whose free space is reported.
    """

    def __init__(
        self, service: Service, store: Store, certificate: Path | None = None, folders: Sequence[Path] = ()
    ) -> None:
        self.registry = CollectorRegistry()
        self.request_seconds = request_seconds(self.registry)
        self.registry.register(JobsCollector(service, store, certificate, folders))
        ProcessCollector(registry=self.registry)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class Failure(NamedTuple):
    """When a job failed, in Unix seconds, and the reason of ``ENDINGS``."""

    at: float
    reason: str


class RunSizes:
    """The sizes of runs, measured at most every ``SIZES_FRESH_S``: a folder may have thousands of files."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[float, dict[str, int]]] = {}

    def of(self, row: JobRow) -> dict[str, int]:
        measured_at, sizes = self._sizes.get(row.job, (float("-inf"), {}))
        if time.monotonic() - measured_at > SIZES_FRESH_S:
            sizes = run_bytes(Path(row.run_dir))
            self._sizes[row.job] = (time.monotonic(), sizes)
        return sizes

    def keep(self, jobs: Iterable[str]) -> None:
        """Forget the sizes of all others."""
        there = set(jobs)
        self._sizes = {job: sizes for job, sizes in self._sizes.items() if job in there}


class JobsCollector(Collector):
    def __init__(self, service: Service, store: Store, certificate: Path | None, folders: Sequence[Path]) -> None:
        self._service, self._store, self._certificate, self._folders = service, store, certificate, folders
        self._sizes = RunSizes()
        self._pool = ThreadPoolExecutor(8, "metrics")
        self._questions: dict[str, Future[JobStatus | None]] = {}
        self._one_at_a_time = threading.Lock()
        self._problem_log = ProblemLog(logger)
        self._found: list[Metric] = []
        self._found_at = float("-inf")
        self._ages, self._endings = Ages(), Ages()
        self._cluster_threads = BoundedThreads("the metrics of the cluster", 1)
        self._cluster: Future[Cluster] | None = None
        self._ended = {row.job for row in store.jobs(states=set(FINAL))}
        self._ended_before = frozenset(self._ended)
        self._ended_counts: Counter[tuple[str, str]] = Counter()
        self._failures: dict[str, Failure] = {}

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
        question = self._ask_cluster()
        records = self._ask(live)
        samples_by_job = {row.job: self._samples_of(row, record) for row in rows if (record := records.get(row.job))}
        states = Counter(state_of(row, records.get(row.job)) for row in rows)
        self._note_endings(rows, records)
        yield Sample("atoll_build_info", BUILD, 1)
        yield from self._of_own_certificate()
        yield from self._of_cluster(question, records.values())
        for state, reason in ENDINGS:
            yield Sample("atoll_jobs_ended", (state.value, reason), self._ended_counts[state.value, reason])
        for row in rows:
            failure = self._failures.get(row.job)
            if failure and time.time() - failure.at < FAILED_SHOWN_S and not _is_continued(row, rows):
                yield Sample("atoll_job_failed_timestamp_seconds", (row.job, failure.reason), failure.at)
        yield from (Sample("atoll_jobs", (state.value,), states[state]) for state in JobState)
        yield Sample("atoll_queue_oldest_seconds", (), max(queued, default=0.0))
        yield Sample("atoll_queue_unschedulable", (), self._service.queue.unschedulable)
        yield Sample("atoll_clock_set_seconds", (), self._service.clock.check())
        for folder in self._folders:
            if (free := free_bytes(folder)) is not None:
                yield Sample("atoll_disk_free_bytes", (str(folder),), free)
        self._sizes.keep(row.job for row in rows)
        for row in rows:
            if row.job in live or row.job in samples_by_job or self._ended_lately(row):
                yield from (
                    Sample("atoll_run_bytes", (row.job, kind), size) for kind, size in self._sizes.of(row).items()
                )
            if row.job in live:
                yield Sample("atoll_job_answers", (row.job,), samples_by_job.get(row.job) is not None)
            elif self._ended_lately(row) and (record := self._record(row)):
                samples_by_job[row.job] = self._samples_of(row, record)
            yield from samples_by_job.get(row.job) or ()
        self._problem_log.keep([CERTIFICATE, CERTIFICATES, *(f"job {row.job}" for row in rows)])

    def _note_endings(self, rows: list[JobRow], records: Mapping[str, JobStatus]) -> None:
        """Count each job once, when it is first seen ended. A deleted job stays counted.

        A job that had ended before this process started is not counted, but its failure is known.
        """
        for row in rows:
            if not (state := state_of(row, records.get(row.job))).final:
                continue
            is_new, is_failure = row.job not in self._ended, state is JobState.FAILED and row.job not in self._failures
            if not is_new and not is_failure:
                continue
            reason = ending_reason(row, state, records.get(row.job) or self._record(row))
            if is_failure:
                self._failures[row.job] = Failure(
                    ended_at(row) if row.job in self._ended_before else time.time(), reason
                )
            if is_new:
                self._ended.add(row.job)
                self._ended_counts[state.value, reason] += 1
        there = {row.job for row in rows}
        self._ended &= there
        self._failures = {job: failure for job, failure in self._failures.items() if job in there}

    def _of_own_certificate(self) -> Iterator[Sample]:
        """Yield the facts of the file, of which the first certificate is the one that clients are shown."""
        if self._certificate is None:
            return
        try:
            facts = folders.described(self._certificate)[0]
        except ConfigurationError as error:
            self._problem_log.note(CERTIFICATE, reason_of(error))
        else:
            self._problem_log.settle(CERTIFICATE)
            yield from of_certificate("service", facts.not_after.timestamp(), facts.lifetime_s)

    def _ask_cluster(self) -> Future[Cluster]:
        """Return the question to the head that is under way, or a new one."""
        if self._cluster is None or self._cluster.done():
            self._cluster = self._cluster_threads.begin(self._look)
        return self._cluster

    def _look(self) -> Cluster:
        groups = self._service.node_groups()
        try:
            return groups, self._service.certificates()
        except Exception as error:  # whatever is wrong with certificates, the head has answered
            self._problem_log.note(CERTIFICATES, reason_of(error))
            return groups, []

    def _of_cluster(self, question: Future[Cluster], records: Iterable[JobStatus]) -> Iterator[Sample]:
        """Yield what the head says of its nodes. It was asked together with the jobs, and has had as long to answer."""
        try:
            groups, certificates = question.result(HEAD_PATIENCE_S)
        except Exception:  # reported as ``atoll_head_up``; /readyz says why
            yield Sample("atoll_head_up", (), 0)
        else:
            yield Sample("atoll_head_up", (), 1)
            cordoned = Counter(one.node_group for one in self._service.cordons.nodes.latest())
            for group in groups:
                labels = (group["name"], group["region"])
                yield Sample("atoll_nodes", labels, group["nodes"])
                yield Sample("atoll_nodes_leaving", labels, group.get("nodes_leaving", 0))
                yield Sample("atoll_nodes_down", labels, group.get("nodes_down", 0))
                yield Sample("atoll_nodes_cordoned", labels, cordoned[group["name"]])
            for certificate in certificates:
                yield from of_certificate(certificate["place"], certificate["expires_at"], certificate["lifetime_s"])
        islands = [island for record in records if not record.view.has_decided for island in record.view.islands]
        wanted = Counter(island.node_group for island in islands if island.state not in NOT_WANTED)
        waiting = Counter(island.node_group for island in islands if island.state == IslandState.WAITING)
        for name, count in sorted(wanted.items()):
            yield Sample("atoll_islands_wanted", (name,), count)
            yield Sample("atoll_islands_waiting", (name,), waiting[name])

    def _samples_of(self, row: JobRow, record: JobStatus) -> list[Sample] | None:
        """Return all samples of the record, or None if it is damaged, so that other jobs keep their metrics."""
        try:
            newest_look = advice_of(Path(row.run_dir), 1)
            all_samples = chain(samples(record, row.spec), advice_samples(row.job, newest_look))
            checked_samples = [checked(sample) for sample in islice(all_samples, SAMPLES_MAX + 1)]
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


def _is_continued(row: JobRow, rows: Iterable[JobRow]) -> bool:
    """Return whether a job that was submitted later continues this one, so that somebody has seen to it."""
    return any(other.number > row.number and uses(other, row) for other in rows)


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


def of_certificate(place: str, expires_at: float, lifetime_s: float) -> Iterator[Sample]:
    yield Sample("atoll_certificate_expiry_timestamp_seconds", (place,), expires_at)
    yield Sample("atoll_certificate_lifetime_seconds", (place,), lifetime_s)


def ending_reason(row: JobRow, state: JobState, record: JobStatus | None) -> str:
    """Return the reason of ``ENDINGS`` for which the job ended."""
    if state is not JobState.FAILED:
        return next(reason for final, reason in ENDINGS if final is state)
    folder = Path(row.run_dir)
    if (folder / CRASH).exists():
        return "crash"
    if record is not None:
        return "job"
    if row.reason.startswith(TAKEN_DOWN):
        return "taken_down"
    return "not_restarted" if row.last_known or (folder / TAPE).exists() else "not_started"


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
