"""`atoll data index` tells a specification from text by what is in it, and counts none as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from api.commands import data

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
