"""Trackers fed from tapes: each row, span and notice once, whatever is killed or down in between."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import hmac
import json
import os
import random
import signal
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tensorboardX.proto.event_pb2 import Event

from api import tracker_feed
from api.client import Client
from api.notebook import Rows
from api.run.tables import RESULT_COLUMNS
from api.tracker_feed import Follower, follow_all, followers_of, read_trackers, run_of
from api.trackers import TensorBoardSink, TraceSink, WebhookSink, _masked_crc
from api.tracking import Batch, Mark, Run, Story, TrackerUnavailable
from orchestrator.errors import ConfigurationError, Conflict
from tests.api.installation import ROOT, Installation
from tests.documents import DOCS, blocks

EVERY_S = 0.2
KILLS = 20
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def ended(client: Client, service: Installation) -> str:
    job = client.submit(service.spec(steps=60))
    return client.wait(job.job).job


def records(name: str) -> list[dict[str, Any]]:
    lines = gzip.decompress((GOLDEN / name).read_bytes()).splitlines()
    return [record for record in map(json.loads, lines) if "event" in record]


def joined(batches: list[Batch]) -> Batch:
    return Batch(
        [row for batch in batches for row in batch.rows],
        [span for batch in batches for span in batch.spans],
        [notice for batch in batches for notice in batch.notices],
        next((batch.outcome for batch in batches if batch.outcome), ""),
    )


def whole(tape: list[dict[str, Any]], cuts: frozenset[int] = frozenset()) -> Batch:
    """What came of a tape, by a process that was stopped behind the records with these numbers."""
    story, batches = Story(), []
    for record in tape:
        batches.append(story.read(record["n"], record["event"], record["effects"], EVERY_S))
        if record["n"] in cuts:
            story = Story.model_validate_json(story.model_dump_json())
    return joined(batches)


# ── the fold ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["live-calm.jsonl.gz", "live-killed.jsonl.gz", "live-everything.jsonl.gz"])
def test_a_story_that_is_stored_anywhere_goes_on_as_if_it_had_not_been(name: str) -> None:
    tape = records(name)
    numbers = [record["n"] for record in tape]
    assert whole(tape, frozenset(random.Random(1).sample(numbers, 30))) == whole(tape)


@pytest.mark.parametrize("name", ["live-calm.jsonl.gz", "live-killed.jsonl.gz", "live-everything.jsonl.gz"])
def test_every_merge_is_a_trace_of_its_contributions(name: str) -> None:
    tape = records(name)
    story = whole(tape)
    roots = {span.trace: span for span in story.spans if span.name == "merge round"}
    completed = [record["event"] for record in tape if record["event"]["type"] == "MergeCompleted"]
    merged = [effect for record in tape for effect in record["effects"] if effect["type"] == "MergeFragment"]
    assert set(roots) == {f"1/{event['fragment']}:{event['version']}" for event in completed}
    inputs = Counter({f"1/{effect['fragment']}:{effect['version']}": len(effect["inputs"]) for effect in merged})
    ways = Counter(span.trace for span in story.spans if span.name == "contribution" and not span.problem)
    assert ways == Counter({trace: inputs[trace] for trace in roots})
    assert Counter(span.name for span in story.spans)["pull"] == sum(ways.values())
    for span in story.spans:
        assert span.start <= span.end
        if span.name in ("pull", "admit", "contribution") and not span.problem:
            assert roots[span.trace].start <= span.start
            assert span.end <= roots[span.trace].end
    identities = Counter((span.trace, span.key) for span in story.spans)
    assert max(identities.values()) == 1


def test_rows_have_the_losses_of_the_tape_and_the_tokens_of_all_islands() -> None:
    tape = records("live-killed.jsonl.gz")
    story = whole(tape)
    losses = [row.values["held_out_loss"] for row in story.rows if "held_out_loss" in row.values]
    assert losses == [record["event"]["loss"] for record in tape if record["event"]["type"] == "EvaluationCompleted"]
    assert [row.number for row in story.rows] == list(range(1, len(story.rows) + 1))
    tokens = [row.tokens for row in story.rows]
    assert tokens == sorted(tokens)
    last = {}
    for record in tape:
        event = record["event"]
        if event["type"] in ("ProgressReported", "FragmentAdopted"):
            life = (event["island"], event["incarnation"])
            last[life] = max(last.get(life, 0), event["tokens_total"])
    assert tokens[-1] == sum(last.values())
    assert [notice.kind for notice in story.notices] == ["job_started", "island_lost", "island_returned", "job_ended"]


# ── kills ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Mortal:
    """A sink in whose process a SIGKILL strikes at a chosen point of a delivery."""

    def __init__(self, sink: Any, strike: int, late: bool) -> None:
        self._sink, self._left, self._late = sink, strike, late

    def deliver(self, run: Run, batch: Batch, mark: Mark, in_doubt: bool) -> Mark | None:
        self._left -= 1
        if self._left == 0 and not self._late:
            half = Batch(batch.rows[: len(batch.rows) // 2], [], batch.notices[:1])
            self._sink.deliver(run, half, mark, in_doubt)
            os.kill(os.getpid(), signal.SIGKILL)
        answer = self._sink.deliver(run, batch, mark, in_doubt)
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # before the cursor is stored
        return answer

    def close(self) -> None:
        self._sink.close()


def test_twenty_kills_lose_nothing_and_repeat_nothing(
    ended: str, service: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_feed, "RECORDS_MAX", 12)
    chance, kills = random.Random(7), 0

    def follow(strike: int, late: bool) -> None:
        sink = Mortal(TensorBoardSink(tmp_path / "tb"), strike, late)
        follower = Follower("tb", sink, service.client(), tmp_path / "state", EVERY_S, print, [ended])
        assert follow_all([follower], 0.01, once=True) == []

    while kills < KILLS:
        pid = os.fork()
        if pid == 0:
            try:
                follow(chance.randint(1, 3) if kills % 2 else 1, late=kills % 3 == 0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == -signal.SIGKILL, "the job has too few records for so many kills"
        kills += 1
    follow(0, late=False)
    with service.client() as client:
        run = run_of(client, ended)
        assert run is not None
        tape = [record.model_dump() for record in client.events(ended, follow=False)]
    expected = [
        (row.tokens, run.started_at + row.at, name, struct.unpack("f", struct.pack("f", value))[0])
        for row in whole(tape).rows
        for name, value in row.values.items()
    ]
    assert points_in(tmp_path / "tb" / ended) == expected


def points_in(folder: Path) -> list[tuple[int, float, str, float]]:
    """The points of the only event file in the folder, whose checksums are right."""
    (path,) = folder.iterdir()
    raw, at, points = path.read_bytes(), 0, []
    while at < len(raw):
        length = raw[at : at + 8]
        (size,) = struct.unpack("<Q", length)
        record = raw[at + 12 : at + 12 + size]
        assert raw[at + 8 : at + 12] == _masked_crc(length)
        assert raw[at + 12 + size : at + 16 + size] == _masked_crc(record)
        at += 16 + size
        event = Event.FromString(record)
        points += [
            (event.step, event.wall_time, value.tag, value.simple_value)
            for value in event.summary.value
            if not value.tag.startswith("_hparams_")
        ]
    return points


# ── trackers that are down ────────────────────────────────────────────────────────────────────────────────────────────


class Receiver(ThreadingHTTPServer):
    """A real HTTP server that keeps what it is posted. ``refuse`` says which status a request gets; None: no answer."""

    daemon_threads = True

    def __init__(self, refuse: Callable[[int], int | None]) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.refuse, self.count = refuse, 0
        self.bodies: list[tuple[dict[str, str], bytes]] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class Taking(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.count += 1
        status = self.server.refuse(self.server.count)
        if status is None:
            self.server.released.wait(60)
            return
        if status < 300:
            self.server.bodies.append((dict(self.headers), body))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def receiver(refuse: Callable[[int], int | None] = lambda _: 200) -> Iterator[Receiver]:
    server = Receiver(refuse)
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_collector_gets_the_way_of_every_contribution(ended: str, service: Installation, tmp_path: Path) -> None:
    with receiver(lambda count: 503 if count == 1 else 200) as collector, service.client() as client:
        follower = Follower("otel", TraceSink(collector.url), client, tmp_path, EVERY_S, print, [ended])
        with pytest.raises(TrackerUnavailable, match=r"127\.0\.0\.1 answered 503"):
            follower.turn()
        assert follower.turn()
        tape = [record.model_dump() for record in client.events(ended, follow=False)]
    sent = [
        (span, resource)
        for _, body in collector.bodies
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    expected = whole(tape).spans
    assert [span.name for span, _ in sent] == [span.name for span in expected]
    ids = {span.span_id for span, _ in sent}
    assert len(ids) == len(sent)
    assert {span.parent_span_id for span, _ in sent} - {b""} <= ids
    by_id = {span.span_id: span for span, _ in sent}
    above = {
        (span.name, by_id[span.parent_span_id].name if span.parent_span_id else "")
        for span, _ in sent
        if not span.status.message and span.name != "publish"
    }
    assert above == {
        ("merge round", ""),
        ("contribution", "merge round"),
        ("offer", "contribution"),
        ("pull", "contribution"),
        ("admit", "contribution"),
        ("merge", "merge round"),
        ("adopt", "publish"),
    }
    assert {by_id[span.parent_span_id].name for span, _ in sent if span.name == "publish" and span.parent_span_id} == {
        "merge round"
    }
    for span, _ in sent:
        assert not span.parent_span_id or by_id[span.parent_span_id].trace_id == span.trace_id
    facts = {pair.key: pair.value.string_value for pair in sent[0][1].resource.attributes}
    assert facts["atoll.job"] == ended


def test_a_webhook_is_signed_and_what_it_missed_comes_later(ended: str, service: Installation, tmp_path: Path) -> None:
    key = b"not a secret of anybody"
    secret = f"whsec_{base64.b64encode(key).decode()}"
    with receiver(lambda count: 500 if count <= 2 else 200) as hook, service.client() as client:
        sink = WebhookSink(hook.url, secret, frozenset({"job_started", "job_ended"}))
        follower = Follower("hook", sink, client, tmp_path, EVERY_S, print, [ended])
        for _ in range(2):
            with pytest.raises(TrackerUnavailable):
                follower.turn()
        assert follower.turn()
    assert [json.loads(body)["type"] for _, body in hook.bodies] == ["job_started", "job_ended"]
    for headers, body in hook.bodies:
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        signature = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
        assert headers["webhook-signature"] == f"v1,{signature}"
        assert json.loads(body)["data"]["job"] == ended


def test_a_webhook_that_never_answers_holds_up_nothing(
    ended: str, service: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", "a secret")
    with receiver(lambda _: None) as hook:
        file = tmp_path / "trackers.yaml"
        file.write_text(
            f"trackers:\n"
            f"- {{kind: webhook, url: '{hook.url}', secret_env: HOOK_SECRET}}\n"
            f"- {{kind: tensorboard, folder: {tmp_path / 'tb'}, every_s: {EVERY_S}}}\n"
        )
        monkeypatch.setattr("api.trackers.TIMEOUT_S", 0.3)
        followers = followers_of(read_trackers(file), service.client, tmp_path / "state", print, [ended])
        (problem,) = follow_all(followers, 0.01, once=True)
        assert problem == "tracker webhook: 127.0.0.1 does not answer: ReadTimeout."
    assert points_in(tmp_path / "tb" / ended)


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_command_follows_a_job_to_its_end_and_then_has_nothing_to_do(
    ended: str, service: Installation, tmp_path: Path
) -> None:
    folder = tmp_path / "tb"
    service.atoll("track", ended, "--tensorboard", str(folder))
    points = points_in(folder / ended)
    assert {"held_out_loss", "training_loss", "global_version"} <= {tag for _, _, tag, _ in points}
    service.atoll("track", ended, "--tensorboard", str(folder))
    assert points_in(folder / ended) == points


def test_two_processes_do_not_feed_one_tracker(ended: str, service: Installation, tmp_path: Path) -> None:
    with service.client() as client:
        one, two = (Follower("tb", TensorBoardSink(tmp_path), client, tmp_path, 1, print) for _ in range(2))
        with one.locked(), pytest.raises(Conflict, match="Another process feeds the tracker tb"), two.locked():
            pass


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("{kind: comet}", "trackers.0.kind: 'comet' is not a kind of tracker. Give one of tensorboard, mlflow"),
        ("{kind: mlflow, url: 'http://me:pw@x'}", "trackers.0.url"),
        ("{kind: tensorboard, folder: x, every: 3}", "trackers.0.every"),
        ("{kind: webhook, url: 'ftp://x', secret_env: A}", "'ftp://x' is no URL; begin it with http:// or https://"),
        ("{kind: webhook, url: 'http://x', secret_env: A, events: [tea]}", "trackers.0.events.0"),
    ],
)
def test_a_file_of_trackers_is_refused_with_field_value_and_remedy(tmp_path: Path, entry: str, problem: str) -> None:
    file = tmp_path / "trackers.yaml"
    file.write_text(f"trackers:\n- {entry}\n")
    with pytest.raises(ConfigurationError) as refusal:
        read_trackers(file)
    assert problem in str(refusal.value)
    assert "me:pw" not in str(refusal.value)


def test_a_secret_that_is_not_set_is_named(service: Installation, tmp_path: Path) -> None:
    file = tmp_path / "trackers.yaml"
    file.write_text("trackers:\n- {kind: slack, url_env: ATOLL_TEST_SLACK}\n")
    said = service.atoll("track", "--trackers", str(file), code=2)
    assert "The tracker slack needs a secret in the variable ATOLL_TEST_SLACK, which is not set. Set it." in said


# ── a sweep ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_on_sweeps_does_what_it_says(
    service: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "guide" / "compare-a-sweep.md").read_text()
    submit, in_pandas, _plot, in_notebook = [block.text for block in blocks(page) if block.kind == "python"]
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / ".atoll").symlink_to(service.home.path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(submit + in_pandas, names)
    table = names["table"]
    setting = "training.inner_optimizer.lr"
    assert [row[setting] for row in table] == [5e-4, 1e-3, 2e-3, 4e-3]
    assert [row["job"] for row in table] == [job.job for job in names["ended"]]
    assert {"loss", "tokens_trained", "goodput_ratio"} <= set(names["frame"].columns)
    assert set(table[0]) == {"job", "state", setting, *RESULT_COLUMNS}
    assert all(len(curve) > 1 for curve in names["curves"].values())
    shown = service.atoll("jobs", "--table", "--name", "sweep", "--json")
    assert json.loads(shown) == table[::-1]
    service.atoll("jobs", "--table", "--name", "sweep", "--csv", str(tmp_path / "sweep.csv"))
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [float(row[setting]) for row in rows] == [4e-3, 2e-3, 1e-3, 5e-4]
    exec(in_notebook, names)
    sweep = names["sweep"]
    assert [row[setting] for row in sweep.compare()] == [5e-4, 2e-3]
    assert all(job.state.final for job in sweep.wait())
    drawn = sweep._repr_html_()
    assert all(drawn.count(name) >= 2 for name in sweep.names), "in the table, and at the end of its curve"
    assert sweep.plot().curves.keys() == set(sweep.names)
    assert "<script" not in Rows([{"job": "<script>"}])._repr_html_()
    said = service.atoll("jobs", table[0]["job"], code=2)
    assert "has no effect on the list of jobs. Give --table to compare jobs" in said
