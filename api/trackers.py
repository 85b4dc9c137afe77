"""The sinks of trackers: what each is sent of a job's rows, spans and notices, and how it recognises what it has.

    tensorboard     the cursor has the size of the event file; what was written beyond it is cut off
    mlflow          a run carries the job's id as a tag; points that its history has are left out
    wandb           the run's id is the job's, and its step is the row's number, of which the server keeps the first
    opentelemetry   a span's id is a digest of its name, so that it is the same span each time
    webhook         the header webhook-id is the same each time (standardwebhooks.com)

Client libraries are imported when a sink is made. Those of MLflow, W&B and OpenTelemetry read their own secrets from the
environment. No secret is logged.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx

from api.tracking import Batch, Mark, Notice, Run, Span, TrackerUnavailable
from orchestrator.errors import first_line

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
SPANS_MAX = 500
METRICS_MAX, PARAMS_MAX, PARAM_CHARACTERS_MAX = 1000, 100, 500
"""The limits of MLflow for one request."""
WANDB_DURABLE_EVERY_S = 300.0
"""How often a W&B run is closed, after which all rows before are on disk or with the server."""
FINAL_REFUSALS = (400, 404, 410, 413, 422)
"""Answers after which a webhook would refuse the same notice again."""


# ── TensorBoard ───────────────────────────────────────────────────────────────────────────────────────────────────────


class TensorBoardSink:
    """Writes one event file for each job. The step of a point is the tokens that all islands had trained."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def deliver(self, run: Run, batch: Batch, mark: Mark, in_doubt: bool) -> Mark:
        """Append to the event file behind the mark. Raises TrackerUnavailable if the disk refuses."""
        folder = self._folder / run.job
        path = folder / f"events.out.tfevents.{round(run.started_at)}.{run.job}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b") as file:
                size = min(int(mark.get("size", 0)), os.fstat(file.fileno()).st_size)
                file.truncate(size)
                file.seek(size)
                if size == 0:
                    file.writelines(_framed(event) for event in _beginning(run))
                file.writelines(_framed(event) for event in _scalars(run, batch))
                file.flush()
                os.fsync(file.fileno())
                return {"size": file.tell()}
        except OSError as error:
            raise TrackerUnavailable(detail=f"{path} cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        pass


def _beginning(run: Run) -> Iterable[bytes]:
    """Yield the first events of a file: its version, and the settings of the job for TensorBoard's table of them."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.summary import hparams

    yield Event(wall_time=run.started_at, file_version="brain.Event:2").SerializeToString()
    for summary in hparams(run.settings(), {"held_out_loss": None, "training_loss": None})[:2]:
        yield Event(wall_time=run.started_at, summary=summary).SerializeToString()


def _scalars(run: Run, batch: Batch) -> Iterable[bytes]:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    for row in batch.rows:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        event = Event(wall_time=run.started_at + row.at, step=row.tokens, summary=Summary(value=values))
        yield event.SerializeToString()


def _framed(record: bytes) -> bytes:
    """Return a record as a TFRecord: its length and its bytes, each with a masked CRC-32C."""
    length = struct.pack("<Q", len(record))
    return length + _masked_crc(length) + record + _masked_crc(record)


def _masked_crc(data: bytes) -> bytes:
    from crc32c import crc32c

    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


# ── MLflow ────────────────────────────────────────────────────────────────────────────────────────────────────────────

JOB_TAG = "atoll.job"
_STATUS = {"completed": "FINISHED", "cancelled": "KILLED", "failed": "FAILED"}


class MlflowSink:
    """Keeps one run for each job, recognised by its tag. The step of a point is the tokens that all islands had trained."""

    def __init__(self, url: str, experiment: str) -> None:
        os.environ.setdefault(
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"
        )  # the follower tries again, with pauses of its own
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(round(TIMEOUT_S)))
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=url)
        self._experiment = experiment

    def deliver(self, run: Run, batch: Batch, mark: Mark, in_doubt: bool) -> Mark:
        from mlflow.exceptions import MlflowException

        try:
            return self._deliver(run, batch, mark, in_doubt)
        except MlflowException as error:
            raise TrackerUnavailable(detail=f"MLflow does not take what it is sent: {first_line(error)}.") from error

    def _deliver(self, run: Run, batch: Batch, mark: Mark, in_doubt: bool) -> Mark:
        from mlflow.entities import Metric

        run_id = str(mark.get("run") or self._run_of(run))
        points = [
            Metric(name, value, round(1000 * (run.started_at + row.at)), row.tokens)
            for row in batch.rows
            for name, value in row.values.items()
        ]
        if in_doubt:
            points = self._without_known(run_id, points)
        left = iter(points)
        while some := list(islice(left, METRICS_MAX)):
            self._client.log_batch(run_id, metrics=some)
        if batch.outcome:
            ended_at = run.started_at + max((row.at for row in batch.rows), default=0.0)
            self._client.set_terminated(run_id, _STATUS.get(batch.outcome, "FINISHED"), round(1000 * ended_at))
        return {"run": run_id}

    def _run_of(self, run: Run) -> str:
        """Return the id of the job's run, which is created if there is none, with the job's settings."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            try:
                experiment_id = self._client.create_experiment(self._experiment)
            except MlflowException:  # another process created it meanwhile
                experiment = self._client.get_experiment_by_name(self._experiment)
                if experiment is None:
                    raise
                experiment_id = experiment.experiment_id
        else:
            experiment_id = experiment.experiment_id
        there = self._client.search_runs([experiment_id], f"tags.`{JOB_TAG}` = '{run.job}'", max_results=1)
        if there:
            run_id = str(there[0].info.run_id)
        else:
            tags = {JOB_TAG: run.job, "mlflow.source.name": "atoll", "mlflow.user": run.caller}
            tags |= {"atoll.resumed_from": run.resumed_from} if run.resumed_from else {}
            created = self._client.create_run(experiment_id, round(1000 * run.started_at), tags, run.job)
            run_id = str(created.info.run_id)
        settings = iter(run.settings().items())
        while some := list(islice(settings, PARAMS_MAX)):  # a setting that is there already may be sent again
            params = [Param(name, str(value)[:PARAM_CHARACTERS_MAX]) for name, value in some]
            self._client.log_batch(run_id, params=params)
        return run_id

    def _without_known(self, run_id: str, points: list[Any]) -> list[Any]:
        stored = {
            (point.key, point.timestamp, point.step)
            for name in {point.key for point in points}
            for point in self._client.get_metric_history(run_id, name)
        }
        return [point for point in points if (point.key, point.timestamp, point.step) not in stored]

    def close(self) -> None:
        pass


# ── Weights & Biases ──────────────────────────────────────────────────────────────────────────────────────────────────


class WandbSink:
    """Keeps one W&B run for each job, under the job's id. Its step is the number of the row, and ``tokens`` is a series.

    W&B sends and writes in the background, so a delivery is durable only once the run was closed. That happens every
    ``WANDB_DURABLE_EVERY_S``, and at the end of the job; the run is then opened again. Rows that were sent twice have the
    same step, and W&B takes the first.
    """

    def __init__(self, folder: Path, mode: str, project: str, entity: str | None) -> None:
        self._folder, self._mode, self._project, self._entity = folder, mode, project, entity
        self._runs: dict[str, tuple[Any, float]] = {}
        """The open runs, by job, and when each was opened."""

    def deliver(self, run: Run, batch: Batch, mark: Mark, in_doubt: bool) -> Mark | None:
        if in_doubt and run.job in self._runs:  # the follower begins again at its cursor
            self._close(run.job)
        try:
            opened, since = self._opened(run)
            for row in batch.rows:
                clock = {"_timestamp": run.started_at + row.at, "seconds": row.at}  # the job's, and not that of feeding
                opened.log({**row.values, "tokens": row.tokens, **clock}, step=row.number)
            if not batch.outcome and time.monotonic() - since < WANDB_DURABLE_EVERY_S:
                return None
            if batch.outcome:
                opened.summary["outcome"] = batch.outcome
            self._close(run.job, failed=batch.outcome == "failed")
        except Exception as error:  # its errors have many classes
            self._runs.pop(run.job, None)
            raise TrackerUnavailable(detail=f"W&B does not take what it is sent: {first_line(error)}.") from error
        return {"run": run.job}

    def _opened(self, run: Run) -> tuple[Any, float]:
        if run.job not in self._runs:
            import wandb

            self._folder.mkdir(parents=True, exist_ok=True)
            opened = wandb.init(
                project=self._project,
                entity=self._entity,
                id=run.job,
                name=run.job,
                group=run.name,
                resume="allow",
                mode=self._mode,
                dir=str(self._folder.resolve()),
                config=run.settings(),
                reinit="create_new",
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    x_disable_stats=True,
                    x_disable_meta=True,
                    init_timeout=TIMEOUT_S * 3,
                ),
            )
            opened.define_metric("*", step_metric="tokens")
            self._runs[run.job] = opened, time.monotonic()
        return self._runs[run.job]

    def _close(self, job: str, *, failed: bool = False) -> None:
        opened, _ = self._runs.pop(job)
        opened.finish(exit_code=1 if failed else 0)

    def close(self) -> None:
        for job in list(self._runs):
            self._close(job)


# ── OpenTelemetry ─────────────────────────────────────────────────────────────────────────────────────────────────────


class TraceSink:
    """Posts spans to a collector, as OTLP over HTTP. A merge of a fragment is a trace, and so is a refused contribution.

    ``OTEL_EXPORTER_OTLP_HEADERS`` may have headers, such as an API key: ``name=value,name=value``.
    """

    def __init__(self, endpoint: str) -> None:
        headers = {"Content-Type": "application/x-protobuf"} | _headers(
            os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
        )
        self._http = httpx.Client(timeout=TIMEOUT_S, headers=headers)
        self._endpoint = endpoint

    def deliver(self, run: Run, batch: Batch, mark: Mark, in_doubt: bool) -> Mark:
        left = iter(batch.spans)
        while some := list(islice(left, SPANS_MAX)):
            _post(self._http, self._endpoint, encoded_spans(run, some), {})
        return {}

    def close(self) -> None:
        self._http.close()


def _headers(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def encoded_spans(run: Run, spans: Sequence[Span]) -> bytes:
    """Return an ExportTraceServiceRequest with these spans."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource
    from opentelemetry.proto.trace.v1 import trace_pb2

    def value(of: str | int | float) -> AnyValue:
        if isinstance(of, str):
            return AnyValue(string_value=of)
        return AnyValue(int_value=of) if isinstance(of, int) else AnyValue(double_value=of)

    def attributes(pairs: Mapping[str, str | int | float]) -> list[KeyValue]:
        return [KeyValue(key=name, value=value(of)) for name, of in pairs.items()]

    def encoded(span: Span) -> trace_pb2.Span:
        status = trace_pb2.Status()
        if span.problem:
            status = trace_pb2.Status(code=trace_pb2.Status.STATUS_CODE_ERROR, message=span.problem)
        return trace_pb2.Span(
            trace_id=_digest(16, run.job, span.trace),
            span_id=_digest(8, run.job, span.trace, span.key),
            parent_span_id=_digest(8, run.job, span.trace, span.parent) if span.parent else b"",
            name=span.name,
            kind=trace_pb2.Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=round(1e9 * (run.started_at + span.start)),
            end_time_unix_nano=round(1e9 * (run.started_at + span.end)),
            attributes=attributes(span.attributes),
            status=status,
        )

    resource = Resource(attributes=attributes({"service.name": "atoll", "atoll.job": run.job, "atoll.name": run.name}))
    scope = trace_pb2.ScopeSpans(scope=InstrumentationScope(name="atoll"), spans=[encoded(span) for span in spans])
    spans_of_job = trace_pb2.ResourceSpans(resource=resource, scope_spans=[scope])
    request: bytes = ExportTraceServiceRequest(resource_spans=[spans_of_job]).SerializeToString()
    return request


def _digest(size: int, *parts: str) -> bytes:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=size).digest()


# ── notices ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class WebhookSink:
    """Posts each notice as JSON, signed as in Standard Webhooks: HMAC-SHA256 of ``id.timestamp.body``.

    A notice that the receiver refuses for good (``FINAL_REFUSALS``) is logged and left out.
    """

    def __init__(self, url: str, secret: str, kinds: frozenset[str]) -> None:
        self._url, self._kinds = url, kinds
        self._key = base64.b64decode(secret.removeprefix("whsec_")) if secret.startswith("whsec_") else secret.encode()
        self._http = httpx.Client(timeout=TIMEOUT_S, headers={"Content-Type": "application/json"})

    def deliver(self, run: Run, batch: Batch, mark: Mark, in_doubt: bool) -> Mark:
        for notice in batch.notices:
            if notice.kind in self._kinds:
                body = json.dumps(document_of(run, notice), ensure_ascii=False).encode()
                identity, stamp = f"{run.job}-{notice.id}", str(round(time.time()))
                signed = hmac.digest(self._key, b".".join((identity.encode(), stamp.encode(), body)), "sha256")
                signature = f"v1,{base64.b64encode(signed).decode()}"
                headers = {"webhook-id": identity, "webhook-timestamp": stamp, "webhook-signature": signature}
                _post(self._http, self._url, body, headers, FINAL_REFUSALS)
        return {}

    def close(self) -> None:
        self._http.close()


class SlackSink:
    """Posts each notice to an incoming webhook of Slack, or of a chat that takes Slack's payloads."""

    def __init__(self, url: str, kinds: frozenset[str]) -> None:
        self._url, self._kinds = url, kinds
        self._http = httpx.Client(timeout=TIMEOUT_S, headers={"Content-Type": "application/json"})

    def deliver(self, run: Run, batch: Batch, mark: Mark, in_doubt: bool) -> Mark:
        for notice in batch.notices:
            if notice.kind in self._kinds:
                text = f"*{_for_slack(run.job)}*: {_for_slack(notice.text)}"
                body = json.dumps({"text": text}, ensure_ascii=False).encode()
                _post(self._http, self._url, body, {}, FINAL_REFUSALS)
        return {}

    def close(self) -> None:
        self._http.close()


def document_of(run: Run, notice: Notice) -> dict[str, Any]:
    """Return the body of a webhook."""
    at = datetime.fromtimestamp(run.started_at + notice.at, UTC).isoformat(timespec="milliseconds")
    data = {"job": run.job, "name": run.name, "caller": run.caller, "text": notice.text}
    return {"type": notice.kind, "timestamp": at, "data": data | ({"island": notice.island} if notice.island else {})}


def _for_slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _post(http: httpx.Client, url: str, body: bytes, headers: Mapping[str, str], final: Sequence[int] = ()) -> None:
    """Post a body. Raises TrackerUnavailable, whose message has no more of the URL than its host."""
    host = httpx.URL(url).host
    try:
        answer = http.post(url, content=body, headers=dict(headers))
    except httpx.HTTPError as error:
        raise TrackerUnavailable(detail=f"{host} does not answer: {type(error).__name__}.") from error
    if answer.is_success:
        return
    if answer.status_code in final:
        logger.warning("%s refused a notice for good, with status %d. It is not sent again", host, answer.status_code)
        return
    raise TrackerUnavailable(detail=f"{host} answered {answer.status_code} {answer.reason_phrase}.")
