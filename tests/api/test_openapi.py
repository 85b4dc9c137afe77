"""The OpenAPI document is complete, and the running service keeps to it.

schemathesis reads the document, makes thousands of requests of it, valid and not, and holds every answer against it.
Only the functions that use it import it: the collection of each worker would pay a second of processor time for it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema_rs
import pytest

from api.openapi.examples import SHAPES, SPECIFICATION
from tests.api.installation import Installation
from tests.waiting import wait_until

if TYPE_CHECKING:
    from schemathesis.specs.openapi.schemas import OpenApiSchema

EXAMPLES_PER_OPERATION = int(os.environ.get("ATOLL_OPENAPI_EXAMPLES", "4"))
"""``make soak`` wants 300."""
OPERATIONS_MIN = 40
SEED = 4


@pytest.fixture(scope="module")
def document(service: Installation) -> dict[str, Any]:
    with service.http() as http:
        document: dict[str, Any] = http.get("/openapi.json").json()
    return document


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_every_operation_says_what_it_does_and_how_it_refuses(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        assert operation["summary"], name
        assert operation["tags"], name
        words = operation.get("description", "").partition("Needs the role")[0].split()
        assert len(words) > 3, f"{name} has no docstring"
        success, *more = sorted(operation["responses"])
        assert success.startswith("2"), name
        assert more, name
        for status in more:
            if status >= "400":
                assert list(operation["responses"][status]["content"]) == ["application/problem+json"], name


def test_every_body_and_every_json_answer_has_an_example_that_fits_its_shape(document: dict[str, Any]) -> None:
    shown = 0
    for name, operation in operations(document):
        bodies = [operation["requestBody"]] if "requestBody" in operation else []
        for holder in (*bodies, *operation["responses"].values()):
            for kind, content in holder.get("content", {}).items():
                if "json" not in kind or kind == "application/x-ndjson" or "$ref" not in str(content["schema"]):
                    continue
                assert "example" in content, f"{name} shows no example of {content['schema']}"
                whole = {**content["schema"], "components": document["components"]}
                jsonschema_rs.validator_for(whole).validate(content["example"])
                shown += 1
    assert shown > 100


def test_the_examples_name_shapes_that_exist_and_the_specification_can_be_submitted(
    service: Installation, document: dict[str, Any]
) -> None:
    assert SHAPES.keys() <= document["components"]["schemas"].keys()
    with service.client() as client:
        job = client.submit(SPECIFICATION)
        client.cancel(job.job)
    assert job.island_count == 2


def test_a_path_of_several_methods_allows_them_all(http: httpx.Client) -> None:
    refused = http.put("/v1/jobs")
    assert (refused.status_code, refused.headers["Allow"]) == (405, "GET, POST")


def test_the_running_service_keeps_to_its_document_in_very_many_cases(service: Installation, tended: None) -> None:
    from schemathesis import engine
    from schemathesis.engine import Status, events

    with service.client() as client:
        job = client.submit(service.spec(steps=4)).job
        wait_until(lambda: client.job(job).report_ready)
    failures: list[str] = []
    cases: Counter[str] = Counter()
    for event in engine.from_schema(schema_of(service)).execute():
        assert not isinstance(event, events.FatalError | events.NonFatalError), event
        if isinstance(event, events.ScenarioFinished):
            cases[event.phase.name] += len(event.recorder.cases)
            failures += [
                f"{event.recorder.label}, {check.name}: {told.failure.message}\n{told.code_sample}"
                for checks in event.recorder.checks.values()
                for check in checks
                if check.status is Status.FAILURE and (told := check.failure_info)
            ]
    assert not failures, f"{len(failures)} answers break the document:\n\n" + "\n\n".join(failures[:10])
    assert cases.total() >= EXAMPLES_PER_OPERATION * OPERATIONS_MIN / 2, cases


@pytest.fixture
def tended(service: Installation) -> Iterator[None]:
    """Half of the valid requests speak of what there is, one job at a time runs, and no stream waits for its end."""
    import schemathesis
    from schemathesis.generation import GenerationMode

    running: list[str] = []

    def before_call(_context: Any, case: Any, _options: Any) -> None:
        if case.meta.generation.mode is GenerationMode.POSITIVE and len(str(case.path_parameters)) % 2:
            known = {
                "job": "latest",
                "island": "asia",
                "node_group": "asia",
                "fragment": 1,
                "version": 2,
                "source": "asia",
            }
            case.path_parameters = {name: known.get(name, value) for name, value in case.path_parameters.items()}
        if case.path.endswith(("/events", "/logs/{source}")):
            case.query = {**(case.query or {}), "follow": "false"}

    def after_call(_context: Any, case: Any, response: Any) -> None:
        if (case.method, case.path, response.status_code) == ("POST", "/v1/jobs", 201):
            while running:
                client.cancel(running.pop())
            running.append(response.json()["job"])

    with service.client() as client:
        schemathesis.hook(before_call)
        schemathesis.hook(after_call)
        yield
        schemathesis.hooks.unregister(before_call)
        schemathesis.hooks.unregister(after_call)


def schema_of(service: Installation) -> OpenApiSchema:
    """The service's schema with an admin's token and one seed."""
    import schemathesis
    from schemathesis.config import SchemathesisConfig

    with service.http() as http:
        url = str(http.base_url).rstrip("/")
        authorization = http.headers["Authorization"]
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=SchemathesisConfig(seed=SEED))
    schema.config.update(headers={"Authorization": authorization}, workers=1, continue_on_failure=True)
    schema.config.generation.update(max_examples=EXAMPLES_PER_OPERATION, database="none")
    schema.config.phases.stateful.enabled = False
    # Many wrong tokens are answered 429, which this check does not know. tests/api/test_auth.py walks all routes instead.
    schema.config.checks.ignored_auth.enabled = False
    # Nor does it know that a version may be well formed and not the one that is there.
    accepted = schema.config.checks.positive_data_acceptance
    accepted.expected_statuses = [*accepted.expected_statuses, "412"]
    # Nor that what is too long may be refused before it is read.
    rejected = schema.config.checks.negative_data_rejection
    rejected.expected_statuses = [*rejected.expected_statuses, "413"]
    return schema
