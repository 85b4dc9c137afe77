"""The status of a job: one model from the core to the REST API, and JSON that builds before and after this one can read."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from api.schemas import Fragment, Island, Job, JobSummary
from orchestrator.core.vocabulary import IslandState
from orchestrator.specification.config import parse_job
from orchestrator.status import (
    COUNT_MAX,
    FragmentStatus,
    GoodputFigures,
    IslandFacts,
    JobFacts,
    JobStatus,
    ProgressFacts,
    StatisticsFigures,
    StatusDocument,
)
from tests.api.installation import Installation
from tests.harness.carried import add_lines
from tests.harness.simulated_job import SimulatedJob


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> StatusDocument:
    """The answer of a job that has trained for a while."""
    drawn = Installation(tmp_path_factory.mktemp("status")).spec(steps=300)
    islands = [{**island, "price": {"chip_hour": 2.0}} for island in drawn["islands"]]
    spec = parse_job({**drawn, "islands": islands})
    status = SimulatedJob(spec, [], 5.0).status("trial-x", 1000.0, 5.0)
    add_lines(status)
    return status


def test_a_status_is_the_same_after_its_way_through_json(document: StatusDocument) -> None:
    live = JobStatus.model_validate(document)
    left = JobStatus.model_validate_json(json.dumps(document), strict=True)
    assert left == live
    assert json.loads(json.dumps(left.document())) == json.loads(json.dumps(document))


def test_every_figure_of_the_folds_has_a_type(document: StatusDocument) -> None:
    assert document["statistics"].keys() == StatisticsFigures.__annotations__.keys() - {"mixture"}, "a plain model"
    assert document["goodput"].keys() == GoodputFigures.__annotations__.keys() - {"carried"}, (
        "it continues no checkpoint"
    )


@pytest.mark.parametrize(
    ("shape", "facts"),
    [(Island, IslandFacts), (Fragment, FragmentStatus), (Job, JobFacts), (JobSummary, ProgressFacts)],
)
def test_the_rest_api_has_the_fields_of_the_status_and_no_second_definition(shape: Any, facts: Any) -> None:
    assert issubclass(shape, facts)
    assert not facts.model_fields.keys() & inspect.get_annotations(shape).keys()


def test_a_status_that_an_earlier_build_left_is_read_and_says_the_same_again() -> None:
    left = (Path(__file__).parent / "golden" / "status.json").read_text()
    assert json.loads(json.dumps(JobStatus.model_validate_json(left, strict=True).document())) == json.loads(left)


def test_what_an_earlier_build_did_not_write_is_left_out_again(document: StatusDocument) -> None:
    earlier = json.loads(json.dumps(document))
    del earlier["lines"], earlier["fragment_norms"], earlier["statistics"]["traffic"]
    for island in earlier["view"]["islands"]:
        del island["flag"], island["overdue_s"]
    status = JobStatus.model_validate_json(json.dumps(earlier), strict=True)
    assert (status.view.islands[0].flag, status.lines.islands) == ("", {})
    assert json.loads(json.dumps(status.document())) == earlier


def test_what_a_later_build_counts_passes_and_its_other_fields_are_ignored(document: StatusDocument) -> None:
    later = document | {"weather": "fair", "statistics": document["statistics"] | {"storms": 3}}
    status = JobStatus.model_validate_json(json.dumps(later), strict=True)
    assert status.statistics["storms"] == 3  # type: ignore[typeddict-item]
    assert "weather" not in status.document()


def test_a_job_of_an_earlier_build_answers_with_enumerations_and_tuples(document: StatusDocument) -> None:
    islands = tuple(island | {"state": IslandState(island["state"])} for island in document["view"]["islands"])
    view = document["view"] | {"islands": islands, "cordoned": ("asia",)}
    status = JobStatus.model_validate(document | {"view": view})
    assert status.view.cordoned == ["asia"]
    assert [type(island.state) for island in status.view.islands] == [str] * 4


def test_a_loss_that_is_no_number_reaches_the_service_as_that(document: StatusDocument) -> None:
    islands = [island | {"loss": math.nan} for island in document["view"]["islands"]]
    status = JobStatus.model_validate(document | {"view": document["view"] | {"islands": islands}})
    assert math.isnan(status.document()["view"]["islands"][0]["loss"])


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("view", "epoch", COUNT_MAX + 1),
        ("view", "tokens_trained", -1),
        ("view", "global_version", 2.5),
        ("view", "phase", "somewhere"),
        ("view", "at", 1e13),
        ("goodput", "goodput_ratio", math.inf),
        ("statistics", "recoveries", 7),
        ("statistics", "merges_per_island", {"asia": "many"}),
    ],
)
def test_a_file_with_a_value_beyond_its_bounds_is_no_status(
    document: StatusDocument, part: str, field: str, value: Any
) -> None:
    damaged = document | {part: document[part] | {field: value}}
    with pytest.raises(ValidationError, match=field):
        JobStatus.model_validate_json(json.dumps(damaged), strict=True)


def test_a_list_is_no_longer_than_a_job_can_have(document: StatusDocument) -> None:
    norms = [{"fragment": 0, "version": 1, "update_norm": 1.0, "residue_norm": None}] * 100_000
    with pytest.raises(ValidationError, match="at most"):
        JobStatus.model_validate_json(json.dumps(document | {"fragment_norms": norms}), strict=True)
