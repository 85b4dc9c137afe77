"""`atoll data index`: counts once, goes on where Ctrl-C stopped it, and says what it cannot count and what to do."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from api import cli
from api.commands import data
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from tests.api.installation import interruptible
from tests.waiting import wait_until

LINE = json.dumps({"text": "so many words, " * 70}) + "\n"
COMMAND = (sys.executable, "-m", "api.cli", "data", "index")


def specification(folder: Path, **data: object) -> Path:
    """Two sources, one of a pattern, as their paths are from the specification's folder."""
    for name in ("web-0.jsonl", "web-1.jsonl", "code.jsonl"):
        (folder / name).write_text(LINE * 40)
    sources = [{"name": "web", "files": ["web-*.jsonl"]}, {"name": "code", "files": ["code.jsonl"]}]
    section = {"source": "streamed", "sources": sources, "sequence_length": 8, "index": "not-made-yet", **data}
    document = {"islands": [{"node_group": "a"}], "budget": {"steps": 1}, "data": section}
    (folder / "job.yaml").write_text(json.dumps(document))
    return folder / "job.yaml"


def test_the_sources_of_a_specification_are_counted_once(tmp_path: Path) -> None:
    command = [*COMMAND, str(specification(tmp_path)), "--output", "made.index", "--json", "--processes", "1"]
    made, again = (
        subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True)
        for _ in range(2)
    )
    facts = json.loads(made.stdout)
    # of equal documents all are held out or none, but of a small source never all: here there is one document
    assert (facts["made"], facts["documents"], facts["files"]) == (True, 120, 3)
    assert facts["tokens"] == 120 * (len(json.loads(LINE)["text"]) + 1)
    assert json.loads(again.stdout) == {
        **{name: value for name, value in facts.items() if name not in ("unreadable", "cut_pieces")},
        "made": False,
    }
    assert sorted(path.name for path in tmp_path.glob("made*")) == ["made.index"]


def test_ctrl_c_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("one word and another\n" * 2_000_000)
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "word": 1}, "unk_token": "</s>"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    partial = tmp_path / "index.partial"
    command = [*COMMAND, str(tmp_path / "long.txt"), "--tokenizer", str(tmp_path / "tokenizer.json")]

    def whole_lines() -> list[bytes]:
        return partial.read_bytes().splitlines(keepends=True) if partial.exists() else []

    before: list[bytes] = []
    for time in range(2):
        process = subprocess.Popen(
            [*command, "--output", str(tmp_path / "index")],
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=interruptible,
        )
        enough = len(before) + 3
        wait_until(lambda enough=enough: len(whole_lines()) > enough, "some pieces are counted", pause_s=0.01)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        told = process.stderr.read().decode()
        assert process.wait() == 130, told
        assert f"The same command continues from {partial}" in told
        assert "Traceback" not in told
        assert (f"continuing after {len(before) - 1:,} pieces" in told) == (time == 1)
        after = whole_lines()
        assert after[: len(before)] == before
        assert all(line.endswith(b"\n") for line in after)
        before = after
    numbers = [json.loads(line)["piece"] for line in before[1:]]
    assert len(set(numbers)) == len(numbers), "a piece was counted twice"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--held-out-ratio", "0.1"], "--held-out-ratio: the specification sets this"),
        (["code.jsonl"], "is a specification, which names its files"),
    ],
)
def test_what_the_specification_says_is_not_said_again(tmp_path: Path, arguments: list[str], problem: str) -> None:
    command = ["data", "index", str(specification(tmp_path)), *arguments, "--output", str(tmp_path / "index")]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 2
    assert problem in " ".join(done.output.replace("│", " ").split())


def test_a_job_without_streamed_text_and_one_that_is_wrong_are_refused(tmp_path: Path) -> None:
    options = ["--output", str(tmp_path / "index")]
    path = specification(tmp_path, source="builtin", sources=[])
    done = CliRunner().invoke(cli.app, ["data", "index", str(path), *options])
    assert isinstance(done.exception, ConfigurationError)
    assert "data.source is builtin, but only streamed text has an index. Set it" in str(done.exception)
    done = CliRunner().invoke(cli.app, ["data", "index", "a.jsonl", "--held-out-ratio", "0.7", *options])
    assert isinstance(done.exception, InvalidJobSpec)
    assert "data.held_out_ratio" in str(done.exception)


def test_a_compressed_specification_is_not_counted_as_text(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml.gz"
    path.write_bytes(gzip.compress(specification(tmp_path).read_bytes()))
    done = CliRunner().invoke(cli.app, ["data", "index", str(path), "--output", str(tmp_path / "index")])
    assert isinstance(done.exception, ConfigurationError)
    assert "it is compressed. Decompress it first." in str(done.exception)


def test_what_cannot_be_read_is_said_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "damaged.jsonl").write_text(LINE + "{damaged\n")
    for name, problem in (
        ("damaged", "a job's .yaml file with a data.unreadable_max above 0"),
        ("gone", "cannot be read here"),
    ):
        command = [*COMMAND, str(tmp_path / f"{name}.jsonl"), "--output", str(tmp_path / "index")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert problem in done.stderr
        assert "Traceback" not in done.stderr


# ── a specification or text ─────────────────────────────────────────────────────────────────────────────────────────────

SPECIFICATION = {"islands": [{"node_group": "asia"}], "budget": {"steps": 1}, "data": {"source": "builtin"}}


@pytest.mark.parametrize("name", ["job.json", "job.JSON", "job", "job.txt", "job.YAML", "job.yml"])
def test_a_specification_is_one_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(SPECIFICATION))
    assert data._is_specification(str(path))


@pytest.mark.parametrize(
    "text", ['{"text": "a"}\n{"text": "b"}\n', '{"text": "a"}', "[1, 2]", "budget: islands", "", "\x1f\x8b\x00", "{"]
)
def test_text_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "part.json"
    path.write_text(text)
    assert not data._is_specification(str(path))


def test_a_specification_among_files_is_refused_by_name(tmp_path: Path) -> None:
    part, job = tmp_path / "part.jsonl", tmp_path / "job.json"
    part.write_text('{"text": "a"}\n')
    job.write_text(json.dumps(SPECIFICATION))
    with pytest.raises(typer.BadParameter, match=r"job\.json is a specification, which names its files"):
        data.index([str(part), str(job)], tmp_path / "index")
