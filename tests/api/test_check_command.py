"""`atoll check`, with a service and without one: what would run, and every problem at once with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from api.client import Client
from orchestrator.errors import InvalidJobSpec
from tests.api.installation import Installation

JOB: dict[str, Any] = {"name": "mine", "islands": [{"node_group": "us-east", "count": 2}], "budget": {"steps": 100}}
MISTAKES: dict[str, Any] = {
    "islands": [{"node_group": "us_east", "count": 2}],
    "synchroniser": {"quorum": 5},
    "budget": {"stepss": 100},
    "trainer": "learners.synthetic:creat",
}


def written(folder: Path, document: dict[str, Any]) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_without_a_service_a_job_is_shown_and_what_was_not_checked_is_said(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    facts = json.loads(installation.atoll("check", written(tmp_path, JOB), "--json"))
    assert (facts["islands"], facts["steps"], facts["token_budget"]) == (["us-east-0", "us-east-1"], 100, 204_800)
    assert (facts["model"]["parameters"], facts["data"]["batch_shape"]) == (851_968, [8, 128])
    assert facts["memory_bytes"].keys() == {"head", "islands.0"}
    assert "no service answers" in facts["not_checked"][0]


def test_without_a_service_every_problem_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    told = Installation(tmp_path).atoll("check", written(tmp_path, MISTAKES), code=2)
    for part in (
        "(4 problems)",
        "islands.0.node_group: is 'us_east', but must be 1 to 40",
        "synchroniser.quorum: is 5, but the job has 2 islands",
        "budget.stepss: is unknown. Did you mean steps?",
        "trainer: 'learners.synthetic:creat' cannot be imported",
    ):
        assert part in told
    assert "Traceback" not in told


def test_with_a_service_the_fleet_is_checked_and_nothing_is_queued(
    service: Installation, client: Client, tmp_path: Path
) -> None:
    told = service.atoll(
        "check", written(tmp_path, {**JOB, **MISTAKES, "trainer": "learners.synthetic:create"}), code=2
    )
    assert "is 'us_east', but the fleet has asia, europe, us-east, us-west. Use us-east, if you mean that" in told
    assert "must be 1 to 40" not in told
    document = {**JOB, "trainer": "learners.synthetic:create"}
    shown = service.atoll("check", written(tmp_path, document))
    assert "mine: 2 islands on us-east" in shown
    assert "the text: learners.synthetic:create reads it itself" in shown
    assert client.jobs() == []


def test_a_check_by_rest_answers_with_what_would_be_taken(client: Client, http: httpx.Client) -> None:
    check = client.check(JOB)
    assert (check.island_count, check.token_budget, check.steps) == (2, 204_800, 100)
    assert check.specification["synchroniser"]["fragments"] == 8
    with pytest.raises(InvalidJobSpec) as refused:
        client.check({**JOB, **MISTAKES})
    paths = {problem.path for problem in refused.value.problems}
    assert paths == {"budget.stepss", "islands.0.node_group", "synchroniser.quorum", "trainer"}
    answer = http.post("/v1/jobs/check", content=yaml.safe_dump(JOB), headers={"content-type": "application/yaml"})
    assert answer.status_code == 200


def test_files_that_cannot_be_used_are_one_problem_each(tmp_path: Path) -> None:
    (tmp_path / "named-otherwise.jsonl").write_text('{"content": "a"}\n')
    data = {"source": "files", "files": ["named-otherwise.jsonl", "absent.txt"]}
    told = Installation(tmp_path).atoll("check", written(tmp_path, {**JOB, "data": data}), code=2)
    for part in ("(2 problems)", "data.files.1: ", "data.text_field: is 'text'", "it has 'content'"):
        assert part in told
