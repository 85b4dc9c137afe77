"""A fault is defined once (``core.faults``): commands, requests, plans, the link and the simulator read that union."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, get_args

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import TypeAdapter, ValidationError

from api.http import problems
from api.routes import chaos as routes
from api.routes import dependencies
from orchestrator.chaos.plan import ISLANDLESS, NEEDS, PLANNED, TAKES, FaultSection, describe
from orchestrator.core import faults
from orchestrator.core.commands import Inject
from orchestrator.core.faults import CLASSES, Fault, JobFault, Kind, LinkFault, LinkImpairment, fault_of, flat
from orchestrator.simulation.faults import simulated_fault
from orchestrator.tape.codec import decode_command, encode_command

VALUES: dict[str, Any] = {
    "island": "asia",
    "duration_s": 6.0,
    "bytes_per_second": 5e4,
    "payloads": 3,
    "host": 1,
}
FAULTS = [kind(**{field.name: VALUES[field.name] for field in fields(kind)}) for kind in get_args(Fault)]
OF_JOBS = [fault for fault in FAULTS if isinstance(fault, JobFault)]
BODY: TypeAdapter[Any] = TypeAdapter(routes.Fault)


def named(fault: Fault) -> str:
    return str(fault.kind)


def test_every_kind_has_one_class_and_every_class_a_kind() -> None:
    assert CLASSES.keys() == set(Kind)
    assert [fault.kind for fault in FAULTS] == list(Kind)


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_a_fault_comes_back_from_its_flat_form(fault: Fault) -> None:
    assert fault_of(*flat(fault)) == fault


@pytest.mark.parametrize("fault", OF_JOBS, ids=named)
def test_a_fault_comes_back_from_its_command_in_the_store(fault: JobFault) -> None:
    command = Inject.of(fault)
    document = encode_command(command)
    assert document.keys() - {"host"} == {"kind", "fault", "island", "duration", "bytes_per_second", "payloads"}
    read = decode_command(document)
    assert isinstance(read, Inject)
    assert read.typed() == fault


@pytest.mark.parametrize("fault", OF_JOBS, ids=named)
def test_the_body_of_a_request_is_the_fault_and_refuses_what_its_kind_does_not_have(fault: JobFault) -> None:
    body = {"kind": fault.kind.value, **asdict(fault)}
    assert routes.command_of(BODY.validate_python(body)) == Inject.of(fault)
    for strange in VALUES.keys() - body.keys():
        with pytest.raises(ValidationError, match="extra_forbidden"):
            BODY.validate_python(body | {strange: VALUES[strange]})


@pytest.fixture(scope="module")
def client() -> TestClient:
    """A client of the routes alone: nothing behind them is reached."""
    app = FastAPI()
    problems.install(app)
    for router in (routes.router, routes.runs_router):
        app.include_router(router)
    for needed in (dependencies.caller_of, dependencies.service_of, routes.runs_of):
        app.dependency_overrides[needed] = lambda: None
    return TestClient(app)


KINDS = "kill, stop, cut, slow, corrupt, delay, drop, continue, kill_node, kill_host, kill_synchroniser"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("faults", {"kind": "kill"}, ["body.island: is missing."]),
        ("faults", {"kind": "kill", "isle": "a", "island": "a"}, ["body.isle: is unknown."]),
        (
            "faults",
            {"kind": "stop", "island": "asia", "duration_s": 0},
            ["body.duration_s: is 0, but must be at least 0.001."],
        ),
        ("faults", {"kind": "meteor"}, [f"body: is 'meteor', but must be one of {KINDS}."]),
        ("faults", {"island": "asia"}, ["body: has no field 'kind', which selects its kind."]),
        ("runs", {}, ["body: has no field 'shipped' or 'plan', which selects its kind."]),
        ("runs", {"shipped": 5}, ["body.shipped: is 5, but must be text."]),
        ("runs", {"plan": 5}, ["body.plan: is 5, but must be a mapping of fields to values or text."]),
        ("runs", {"shipped": "attrition", "refrence": "x"}, ["body.refrence: is unknown."]),
        (
            "runs",
            {"shiped": "attrition"},
            ["body: has no field 'shipped' or 'plan', which selects its kind.", "body.shiped: is unknown."],
        ),
        ("runs", [], ["body: is [], but must be a mapping of fields to values."]),
    ],
)
def test_a_body_is_refused_by_the_fields_of_the_document(
    client: TestClient, path: str, body: Any, says: list[str]
) -> None:
    """And not by the names of the models that read it."""
    answer = client.post(f"/v1/jobs/latest/chaos/{path}", json=body)
    assert answer.status_code == 422
    assert [f"{one['path']}: {one['message']}" for one in answer.json()["problems"]] == says


def test_what_an_entry_of_a_plan_needs_and_takes_is_what_its_fault_has() -> None:
    assert set(NEEDS) == set(TAKES) == set(PLANNED)
    assert set(PLANNED) == set(Kind) - {Kind.CONTINUE}
    assert (NEEDS[Kind.SLOW], TAKES[Kind.KILL_HOST]) == (("duration", "bytes_per_second"), ("host",))
    assert {Kind.KILL_SYNCHRONISER, Kind.KILL_API} == ISLANDLESS
    entry = FaultSection.model_validate({"kind": "slow", "at": 1, "duration": "6s", "bytes_per_second": 5e4})
    assert entry.fault(faults.IslandId("asia")) == faults.Slow(faults.IslandId("asia"), 6.0, 5e4)


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_the_link_and_the_simulated_world_know_every_fault_that_is_theirs(fault: Fault) -> None:
    if isinstance(fault, LinkFault):
        impairment = LinkImpairment()
        impairment.inject(fault, 10.0)
        assert impairment.cut_s(11.0) or impairment.slow(11.0) or impairment.payload_fault() == fault
    if isinstance(fault, faults.Continue | faults.Islandless):
        with pytest.raises(ValueError, match="does not know"):
            simulated_fault(1.0, faults.IslandId("asia"), fault)
    else:
        assert simulated_fault(1.0, faults.IslandId("asia"), fault).island == "asia"


def test_a_fault_in_words() -> None:
    assert describe(faults.Stop(faults.IslandId("asia"), 6.0), "asia") == "stop asia for 6 s"
    assert describe(faults.KillSynchroniser(), "") == "kill_synchroniser"
