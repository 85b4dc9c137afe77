"""Trackers as they are: MLflow's server, W&B's files and TensorBoard's reader get a job once, over kills and restarts.

``make trackers-test`` runs this in an environment with mlflow, wandb and tensorboard; elsewhere it skips itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from api import tracker_feed
from api.client import Client
from api.tracker_feed import Follower, follow_all, run_of
from api.trackers import MlflowSink, TensorBoardSink
from api.tracking import Run, Sink
from tests.api.installation import Installation
from tests.api.test_tracking import EVERY_S, whole
from tests.documents import DOCS, ROOT, blocks
from tests.waiting import wait_until

nbformat = pytest.importorskip("nbformat", reason="needs Jupyter: make trackers-test has it")
nbclient = pytest.importorskip("nbclient", reason="needs Jupyter: make trackers-test has it")
mlflow = pytest.importorskip("mlflow", reason="needs mlflow: make trackers-test has it")
wandb = pytest.importorskip("wandb", reason="needs wandb: make trackers-test has it")
pytestmark = pytest.mark.soak("real trackers take half a minute each")
STRIKES = (1, 2)
"""An even one comes a delivery further than the one before."""


@pytest.fixture(scope="module")
def ended(client: Client, service: Installation) -> str:
    job = client.submit(service.spec(steps=300))
    return client.wait(job.job).job


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_feed, "RECORDS_MAX", 40)


def expected(client: Client, job: str) -> tuple[Run, list[tuple[str, int, float]]]:
    """The run, and each point that a tracker is to have: series, tokens, value."""
    run = run_of(client, job)
    assert run is not None
    tape = [record.model_dump() for record in client.events(job, follow=False)]
    return run, [(name, row.tokens, value) for row in whole(tape).rows for name, value in row.values.items()]


def kill_while_feeding(
    kind: str, options: dict[str, Any], service: Installation, job: str, state: Path, kill_count: int
) -> None:
    """Feed the tracker by processes that die at one point or another of a delivery, and by a last one that does not."""
    for strike in [*islice(cycle(STRIKES), kill_count), 0]:
        child = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.api.mortal_feeder",
                kind,
                str(service.home.path),
                job,
                str(state),
                str(strike),
            ],
            env=os.environ | {"FEEDER_OPTIONS": repr(options)},
            check=False,
        )
        assert child.returncode == (-signal.SIGKILL if strike else 0)


def feed(sink: Sink, client: Client, job: str, state: Path) -> None:
    assert follow_all([Follower("it", sink, client, state, EVERY_S, print, [job])], 0.01, once=True) == []


# ── MLflow ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    places = [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    with (folder / "log").open("ab") as log:
        server = subprocess.Popen([*command, *places], stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), "MLflow's server")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).is_success
    except httpx.HTTPError:
        return False


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def test_mlflow_has_one_run_of_a_job_and_each_point_once(
    ended: str, service: Installation, client: Client, tmp_path: Path
) -> None:
    port = free_port()
    options = {"url": f"http://127.0.0.1:{port}", "experiment": "voyages"}
    with pytest.raises(AssertionError, match="MLflow does not take what it is sent"):  # it is down
        feed(MlflowSink(**options), service.client(), ended, tmp_path / "state")
    with mlflow_server(tmp_path / "server", port):
        kill_while_feeding("mlflow", options, service, ended, tmp_path / "state", 20)
    with mlflow_server(tmp_path / "server", port) as url:
        reader = mlflow.MlflowClient(url)
        experiment = reader.get_experiment_by_name("voyages")
        (run,) = reader.search_runs([experiment.experiment_id])
        facts, points = expected(client, ended)
        names = sorted({name for name, _, _ in points})
        histories = {name: reader.get_metric_history(run.info.run_id, name) for name in names}
    assert run.info.run_name == ended
    assert run.info.status == "FINISHED"
    assert run.data.params["synchroniser.fragments"] == "4"
    sent = Counter((name, point.step, point.value) for name, history in histories.items() for point in history)
    assert sent == Counter(points)
    assert facts.job == ended


def test_the_walk_compares_four_jobs_as_table_as_plot_and_in_mlflow(
    service: Installation, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "guide" / "compare-a-sweep.md").read_text()
    in_python = [block.text for block in blocks(page) if block.kind == "python"]
    (trackers,) = [block.text for block in blocks(page) if block.kind == "yaml"]
    (track,) = [line for block in blocks(page) for line in block.text.splitlines() if line.startswith("atoll track")]
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / ".atoll").symlink_to(service.home.path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    for block in in_python[:3]:  # submit, in pandas, plot
        exec(block, names)
    drawing = (tmp_path / "sweep.svg").read_text()
    assert "<svg" in drawing
    port = free_port()
    (tmp_path / "sweep.yaml").write_text(trackers.replace(":5000", f":{port}"))
    with mlflow_server(tmp_path / "server", port) as url:
        service.atoll(*(str(tmp_path / word) if word == "sweep.yaml" else word for word in track.split()[1:]))
        reader = mlflow.MlflowClient(url)
        runs = reader.search_runs([reader.get_experiment_by_name("sweep").experiment_id])
    setting = "training.inner_optimizer.lr"
    table = {row["job"]: row for row in names["table"]}
    assert {run.info.run_name for run in runs} == set(table)
    for run in runs:
        row = table[run.info.run_name]
        assert run.info.status == "FINISHED"
        assert float(run.data.params[setting]) == row[setting]
        assert run.data.metrics["held_out_loss"] == pytest.approx(row["loss"])


def test_the_notebook_of_the_guide_runs_from_its_first_cell_to_its_last(
    service: Installation, client: Client, tmp_path: Path
) -> None:
    notebook = nbformat.read(DOCS / "guide" / "compare-a-sweep.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is stored without outputs"
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / ".atoll").symlink_to(service.home.path)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    _, sweep, plot = [cell for cell in notebook.cells if cell.cell_type == "code"]
    live, table = [output["data"]["text/html"] for output in sweep.outputs]
    jobs = [job.job for job in client.jobs(name="notebook")]
    assert len(jobs) == 3
    assert all(job in live and "completed" in live and job in table for job in jobs)
    assert "training.inner_optimizer.lr" in table
    assert plot.outputs[-1]["data"]["text/html"].startswith("<svg")


# ── Weights & Biases ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_wandb_s_offline_files_have_each_row_of_a_job_in_its_one_run(
    ended: str, service: Installation, client: Client, tmp_path: Path
) -> None:
    options = {"folder": str(tmp_path / "wandb"), "mode": "offline", "project": "voyages", "entity": None}
    kill_while_feeding("wandb", options, service, ended, tmp_path / "state", 6)
    rows: dict[int, dict[str, float]] = {}
    for path in sorted(tmp_path.rglob("*.wandb")):
        assert path.stem == f"run-{ended}"
        for step, values in history(path):
            values.pop("_runtime", None)  # by the clock of the process that feeds
            assert rows.setdefault(step, values) == values, "a row that was sent twice is the same"
    _, points = expected(client, ended)
    found = [
        (name, int(values["tokens"]), value)
        for _, values in sorted(rows.items())
        for name, value in values.items()
        if name not in ("tokens", "seconds") and not name.startswith("_")
    ]
    assert Counter(found) == Counter(points)


def history(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The history of an offline file, which is a log of LevelDB. That of a process that was killed ends anywhere."""
    from wandb.proto import wandb_internal_pb2

    for data in leveldb_records(path.read_bytes()[7:]):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            yield int(items.pop("_step", record.history.step.num)), items


def leveldb_records(raw: bytes, block: int = 1 << 15, began: int = 7) -> Iterator[bytes]:
    at, parts = 0, b""
    while at + 7 <= len(raw):
        if (left := block - (at + began) % block) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", raw[at : at + 7])
        if kind == 0 or at + 7 + size > len(raw):
            return
        parts, at = parts + raw[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


# ── TensorBoard ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tensorboard_itself_reads_the_event_file(
    ended: str, service: Installation, client: Client, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feed(TensorBoardSink(tmp_path / "tb"), service.client(), ended, tmp_path / "state")
    reader = EventAccumulator(str(tmp_path / "tb" / ended), size_guidance={"scalars": 0})
    reader.Reload()
    _, points = expected(client, ended)
    assert set(reader.Tags()["scalars"]) == {name for name, _, _ in points}
    for name in reader.Tags()["scalars"]:
        assert [(event.step, pytest.approx(event.value)) for event in reader.Scalars(name)] == [
            (tokens, value) for series, tokens, value in points if series == name
        ]
