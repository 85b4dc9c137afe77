"""What `/metrics` says: one registry with the jobs' own totals, this process's request times, and its memory and CPU.

    JobsCollector ── at a scrape ──▶ store (which jobs), service (how each stands) ──▶ metrics.job ──▶ Prometheus

Responsible for asking every live job once, together and in bounded time, so that one that hangs costs the scrape nothing
but its own figures; and for showing an ended job a while longer, so that its last figures are scraped. Nothing is counted
here: what a job says comes from its tape, and is the same after this process was killed.

Source: Prometheus, "Writing exporters" (a collector that reads at scrape time).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from api.clocks import Ages
from api.jobs.control import StatusRecord
from api.jobs.service import Service
from api.metrics.catalogue import FAMILIES
from api.metrics.job import Buckets, Sample, samples
from api.metrics.requests import request_seconds
from api.schemas import JobState
from api.storage.store import JobRow, Store
from orchestrator.errors import AtollError

FRESH_S = 1.0
"""Two scrapers, or a person who reloads, ask the jobs once."""
PATIENCE_S = 4.0
"""Below the scrape timeout of deploy/prometheus/prometheus.yml."""
LINGER_S = 900.0
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
        self._asked: dict[str, Future[StatusRecord | None]] = {}
        self._one_at_a_time = threading.Lock()
        self._found: list[Metric] = []
        self._found_at = float("-inf")
        self._ages, self._endings = Ages(), Ages()

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that to register is not to scrape."""
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
        queued = [self._ages.of(row.job, row.submitted_at) for row in rows if row.state == JobState.QUEUED]
        live = {row.job: row for row in rows if not JobState(row.state).final and row.state != JobState.QUEUED}
        records = self._ask(live)
        states = Counter(state_of(row, records.get(row.job)) for row in rows)
        yield from (Sample("atoll_jobs", (state.value,), states[state]) for state in JobState)
        yield Sample("atoll_queue_oldest_seconds", (), max(queued, default=0.0))
        yield Sample("atoll_queue_hopeless", (), self._service.queue.hopeless)
        yield Sample("atoll_clock_set_seconds", (), self._service.clock.look())
        for row in rows:
            if row.job in live:
                yield Sample("atoll_job_answers", (row.job,), row.job in records)
            elif self._ended_lately(row) and (record := self._service.record(row)):
                records[row.job] = record
            if row.job in records:
                yield from samples(records[row.job], row.spec)

    def _ask(self, rows: dict[str, JobRow]) -> dict[str, StatusRecord]:
        """How each of these jobs stands. One that does not answer in time is left out, and not asked again meanwhile."""
        asked = {job: self._asked.get(job) or self._pool.submit(self._record, row) for job, row in rows.items()}
        done, _ = wait(asked.values(), timeout=PATIENCE_S)
        self._asked = {job: future for job, future in asked.items() if future not in done}
        return {job: record for job, future in asked.items() if future in done and (record := future.result())}

    def _ended_lately(self, row: JobRow) -> bool:
        try:
            ended_at = (Path(row.run_dir) / "status.json").stat().st_mtime
        except OSError:
            return False  # it left no final state
        return self._endings.of(row.job, ended_at) < LINGER_S

    def _record(self, row: JobRow) -> StatusRecord | None:
        try:
            return self._service.record(row)
        except AtollError:  # told as ``atoll_job_answers``
            return None


def state_of(row: JobRow, record: StatusRecord | None) -> JobState:
    """As last known, or newer where the job itself has said so."""
    if record is None or JobState(row.state).final:
        return JobState(row.state)
    view = record["view"]
    return JobState(view["outcome"] if view["phase"] == "finished" else view["phase"])


def families_of(found: Iterable[Sample]) -> list[Metric]:
    """The samples by family, in the order of the catalogue. Raises KeyError for a sample that is not in it."""
    made: dict[str, Any] = {}
    for family in FAMILIES.values():
        made[family.name] = _KINDS[family.kind](family.name, family.help, labels=family.labels)
    for sample in found:
        if isinstance(sample.value, Buckets):
            bounds = [(floatToGoString(bound), count) for bound, count in sample.value.cumulative]
            made[sample.family].add_metric(sample.labels, bounds, sample.value.sum)
        else:
            made[sample.family].add_metric(sample.labels, float(sample.value))
    return [family for family in made.values() if family.samples]
