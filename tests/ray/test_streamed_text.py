"""A real job on streamed text: mixed sources, a tokenizer and an index made for it, an island killed that reads on."""

from __future__ import annotations

import io
import json
import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from learners import data_indexing
from learners.corpus import builtin_documents
from learners.text import Text
from learners.tokenizer_training import main as train_tokenizer
from orchestrator.core import events
from orchestrator.core.vocabulary import Incarnation, IslandId
from orchestrator.errors import Conflict, NotFound
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.specification.config import parse_job
from orchestrator.system.roots import AllowedRoots
from tests.ray.conftest import starting
from tests.ray.jobs import Job, assert_sound

pytestmark = pytest.mark.ray
VOCABULARY, STEPS = 384, 120
STEPS_OF_SURVIVOR, STEPS_OF_FIRST_LIFE = (
    8,
    40,
)  # of the job's schedule: an island that starts late finds the rest of them
SURVIVOR, VICTIM = "us-east", "asia"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's own library as two kinds of text: modules as JSON lines behind zstd, and others as Parquet."""
    folder = tmp_path_factory.mktemp("streamed")
    modules = [text for text in _modules() if len(text) < 60_000][:240]
    for number, part in enumerate((modules[:60], modules[60:120])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part) + "{damaged\n" * (number == 0)
        (folder / f"library-{number}.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    pyarrow.parquet.write_table(pa.table({"body": modules[120:]}), folder / "other.parquet", row_group_size=16)
    few = io.StringIO()
    few.writelines(json.dumps({"text": text}) + "\n" for text in modules[:20])
    (folder / "few.jsonl").write_text(few.getvalue())
    arguments = ["--vocabulary-size", str(VOCABULARY), "--output", str(folder / "tokenizer.json"), "--json"]
    assert train_tokenizer([str(folder / "few.jsonl"), *arguments]) == 0
    return folder


def _modules() -> Iterator[str]:
    return (content.decode(errors="replace") for content in builtin_documents())


def document(folder: Path) -> dict[str, Any]:
    return {
        "name": "streamed",
        "trainer": "tests.ray.noted:create",
        "islands": [{"node_group": SURVIVOR}, {"node_group": VICTIM}],
        "model": {
            "decoder": {
                "vocabulary_size": VOCABULARY,
                "width": 32,
                "layer_count": 1,
                "head_count": 2,
                "key_value_head_count": 1,
                "head_size": 16,
                "hidden_size": 64,
            }
        },
        "data": {
            "source": "streamed",
            "sources": [
                {"name": "library", "files": [str(folder / f"library-{n}.jsonl.zst") for n in range(2)], "weight": 3},
                {"name": "other", "files": [str(folder / "other.parquet")], "text_field": "body"},
            ],
            "tokenizer": str(folder / "tokenizer.json"),
            "sequence_length": 64,
            "held_out_ratio": 0.1,
            "unreadable_max": 1,
            "index": str(folder / "index"),
        },
        "training": {"batch_size": 4},
        "budget": {"steps": STEPS},
        "evaluation": {"sequences": 16, "every_merges": 8},
        "synchroniser": {"fragments": 2, "interval_steps": 8, "overlap_steps": 2, "grace_cap_steps": 8.0},
    }


def test_an_island_that_was_killed_reads_on_and_the_outcome_has_a_loss_by_source(
    port: RayControlPort, folder: Path
) -> None:
    from tests.ray import noted  # here, because it imports JAX

    document_of_job = document(folder)
    data = parse_job(document_of_job).model_dump(mode="json")["data"]
    data_indexing.make(data, folder / "index", 2, progress=False)
    gates = [folder / f"{noted.GATE}-{shard}" for shard in range(2)]
    for gate, steps in zip(gates, (STEPS_OF_SURVIVOR, STEPS_OF_FIRST_LIFE), strict=True):
        gate.write_text(str(steps))
    with starting(port, folder) as start:
        job = start(document_of_job)
        status = _killed_and_back(job, *gates)
    assert status["view"]["outcome"] == "completed"
    assert_sound(job)

    text = Text({**parse_job(document_of_job).model_dump(mode="json"), "roots": AllowedRoots.only(folder)})
    pids = [event.pid for event in job.events(events.IslandPlaced, VICTIM)]
    for shard in range(2):
        draw, drawn = text.draw(shard, 2), _noted(folder / f"{noted.BATCHES}-{shard}")
        for _, number, batch in drawn[:: max(1, len(drawn) // 20)]:
            assert batch == noted.digest(draw(number)), "another batch than that of this number"
    numbers = [[number for pid, number, _ in drawn if pid == life] for life in pids[:2]]
    _, *trained = numbers[1]  # the first batch of a life is read before it knows where it goes on, and not trained on
    assert trained == list(range(trained[0], trained[-1] + 1)), "a life draws its batches in turn"
    assert 0 < trained[0] <= numbers[0][-1] + 1, "it begins neither anew nor with a hole"

    flaws = status["statistics"]["data_flaws"]
    assert flaws["total"]["unreadable_records"] == 3, "one in each life, for a source so small is looked through"
    assert "3 records or pieces of files could not be read" in flaws["remark"]
    assert flaws["total"]["repeated_sequences"] == flaws["total"]["omitted_sequences"] == 0, "all was counted"
    evaluations = status["statistics"]["evaluations"]
    assert [one["source"] for one in evaluations["sources"]] == ["library", "other"]
    assert evaluations["bits_per_byte"] == pytest.approx(
        sum(one["bits_per_byte"] for one in evaluations["sources"]) / 2, rel=0.3
    )
    assert status["statistics"]["loss_final"] < status["loss_curve"][0][1]


def _killed_and_back(job: Job, survivor: Path, victim: Path) -> dict[str, Any]:
    """The status at its end. Both are slow until the victim is killed, the survivor until it is back: work is left."""
    first = job.wait_for_merge(VICTIM, 1)
    job.wait_for_merge(SURVIVOR, 1)
    _trace_both(job)
    os.kill(first["pid"], signal.SIGKILL)
    with pytest.raises(NotFound, match=f"Incarnation 1 of island {VICTIM} has ended, and its trace with it"):
        job.port.profile(job.id, (IslandId(VICTIM), Incarnation(1)), "long", None)
    victim.unlink()
    job.wait_for_merge(VICTIM, 2)
    survivor.unlink()
    return job.wait_for_end()


def _trace_both(job: Job) -> None:
    """Fetch a trace of the survivor's steps while it trains, and begin one of the victim's that its end cuts off."""
    own, victim = (IslandId(SURVIVOR), Incarnation(1)), (IslandId(VICTIM), Incarnation(1))
    assert job.port.profile(job.id, victim, "long", 100)["byte_count"] is None
    job.port.profile(job.id, own, "short", 2)
    with pytest.raises(Conflict, match="Another trace of this island is being recorded"):
        job.port.profile(job.id, own, "other", 2)
    job.wait_until(lambda: job.port.profile(job.id, own, "short", None)["byte_count"], "the trace")
    about, content = job.port.profile(job.id, own, "short", None), b""
    assert (about["steps_taken"], about["problem"]) == (2, "")
    while len(content) < (about["byte_count"] or 0):
        content += job.port.read_profile(job.id, own, "short", len(content), about["byte_count"] or 0)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        assert {name.rpartition(".")[2] for name in archive.namelist()} == {"pb", "gz"}


def _noted(path: Path) -> list[tuple[int, int, str]]:
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(pid), int(number), batch) for pid, number, batch in lines]
