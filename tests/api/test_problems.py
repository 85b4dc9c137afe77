"""The problems of a request's body are named by the document's fields, whatever models read it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, ConfigDict, Field

from api.http import problems


class Circle(BaseModel):
    model_config = ConfigDict(extra="forbid")

    radius: int


class Square(BaseModel):
    model_config = ConfigDict(extra="forbid")

    side: int
    turned: bool = False


class Red(BaseModel):
    kind: Literal["red"]
    depth: int


class Blue(BaseModel):
    kind: Literal["blue"]
    depth: int


class Picture(BaseModel):
    shapes: list[Circle | Square] = []
    named: dict[str, Circle | Square] = {}
    frame: Circle | Square | None = None
    colour: Annotated[Red | Blue, Field(discriminator="kind")] | None = None
    colours: list[Annotated[Red | Blue, Field(discriminator="kind")]] = []
    size: int | Literal["auto"] = 1


def paint(picture: Picture) -> None: ...


def paint_two(picture: Picture, shape: Circle | Square) -> None: ...


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    problems.install(app)
    app.post("/one")(paint)
    app.post("/two")(paint_two)
    return TestClient(app)


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ({"shapes": [{"radius": "x"}]}, ["body.shapes.0.radius"]),
        ({"shapes": [{"side": 1}, {"side": "x", "turned": 2}]}, ["body.shapes.1.side", "body.shapes.1.turned"]),
        ({"shapes": [{"radius": 1, "side": 2}]}, ["body.shapes.0.side"]),
        ({"shapes": [{}, {"side": "x"}]}, ["body.shapes.0", "body.shapes.1.side"]),
        ({"named": {"Square": {"side": "x"}}}, ["body.named.Square.side"]),
        ({"frame": {"side": "x"}}, ["body.frame.side"]),
        ({"frame": 5}, ["body.frame"]),
        ({"colour": {"kind": "red", "depth": "x"}}, ["body.colour.depth"]),
        ({"colours": [{"kind": "blue", "depth": "x"}]}, ["body.colours.0.depth"]),
        ({"colours": [{"kind": "green"}]}, ["body.colours.0"]),
        ({"size": "big"}, ["body.size"]),
    ],
)
def test_a_union_of_models_is_not_part_of_a_path(client: TestClient, body: dict[str, Any], paths: list[str]) -> None:
    answer = client.post("/one", json=body)
    assert answer.status_code == 422
    assert [problem["path"] for problem in answer.json()["problems"]] == paths


def test_a_body_of_two_models_names_each_by_its_parameter(client: TestClient) -> None:
    answer = client.post("/two", json={"picture": {"frame": {"radius": "x"}}, "shape": {"side": "x"}})
    assert [problem["path"] for problem in answer.json()["problems"]] == [
        "body.picture.frame.radius",
        "body.shape.side",
    ]
