"""A look at what a job would run: model, optimizer and text as islands have them, and all that is wrong at once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from learners.job_check import findings
from learners.models.model import Model


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    mine = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)
    return vars(mine)


def factory(make_job: Any, build: Any, package: dict[str, Any], **sections: Any) -> dict[str, Any]:
    package["build"] = build
    return findings(make_job(model={"factory": "mine:build", "compute_dtype": "float32"}, **sections))


def told(result: dict[str, Any]) -> dict[str, str]:
    return {problem["path"]: f"{problem['message']} {problem['remedy']}" for problem in result["problems"]}


def model(dtype: Any = jnp.float32, loss: Any = None) -> Model:
    of_tokens = loss or (lambda parameters, tokens: (parameters["head"][tokens] ** 2).mean())
    return Model(lambda seed: {"head": jnp.ones((256, 4), dtype)}, of_tokens, traceable=True)


def test_a_sound_job_is_shown_with_the_beginning_of_its_text(make_job: Any, tmp_path: Path) -> None:
    text = "Once upon a time there was a job that was checked. " * 2_000
    (tmp_path / "text.txt").write_text(text)
    result = findings(make_job(data={"source": "files", "files": [str(tmp_path / "text.txt")], "sequence_length": 32}))
    assert result["problems"] == []
    assert (result["model"]["parameters"], result["model"]["fragments"]) == (851_968, 8)
    assert result["model"]["fragment_parameters_min"] <= 851_968 / 8 <= result["model"]["fragment_parameters_max"]
    assert result["data"]["batch_shape"] == [4, 32]
    assert result["data"]["first_text"] in text
    assert result["data"]["held_out_sequences"] == 24


def test_a_model_and_a_text_that_are_wrong_are_told_together(
    make_job: Any, package: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"source": "files", "files": ["/nowhere/text.txt"]}
    result = factory(make_job, lambda spec: sys.exit("\x1b[31mno licence"), package, data=data)
    assert told(result).keys() == {"model.factory", "data.files"}
    assert "'mine:build' raises SystemExit: no licence. Try it outside a job" in told(result)["model.factory"]
    assert "'/nowhere/text.txt' cannot be read here" in told(result)["data.files"]
    assert (result["model"], result["data"]) == (None, None)


def test_lack_of_memory_is_told_with_a_remedy_and_one_full_stop(
    make_job: Any, package: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(spec: Any) -> None:
        raise MemoryError

    message = told(factory(make_job, lacks, package))["the job"]
    assert "'mine:build' raises MemoryError. Give its machine more memory" in message
    assert ".." not in message


def explodes(parameters: Any, tokens: Any) -> Any:
    raise IndexError("layer 7")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda spec: model(jnp.bfloat16), "head of bfloat16. It must return float32 arrays"),
        (lambda spec: model(loss=explodes), "raises IndexError: layer 7. Try it outside"),
        (lambda spec: model(loss=lambda parameters, tokens: parameters["head"][tokens]), "the mean over all positions"),
        (lambda spec: None, "returned NoneType; it must return a learners.model.Model"),
    ],
)
def test_a_factory_whose_model_cannot_take_a_step_is_told_without_one(
    make_job: Any, package: dict[str, Any], build: Any, said: str
) -> None:
    result = factory(make_job, build, package)
    assert said in " ".join(told(result).values())
    assert result["data"] is not None


def test_a_function_that_is_not_there_and_an_optimizer_that_fails(make_job: Any, package: dict[str, Any]) -> None:
    package["optimizer"] = lambda section: 1 / 0
    training = {"batch_size": 4, "inner_optimizer": {"factory": "mine:optimizer"}}
    assert "ZeroDivisionError" in " ".join(told(findings(make_job(training=training))).values())
    absent = told(findings(make_job(model={"factory": "mine:absent"})))
    assert "cannot be imported (AttributeError" in absent["model.factory"]


def test_the_text_of_another_trainer_is_its_own(make_job: Any) -> None:
    result = findings({**make_job(), "trainer": "learners.synthetic:create"})
    assert "data" not in result
    assert result["model"]["parameters"] == 952


def test_tokens_that_a_model_of_a_factory_does_not_have_are_told_before_a_job_reads_them(
    make_job: Any, package: dict[str, Any], tmp_path: Path
) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(60_000, dtype=np.int32) % 300)
    source = {"name": "a", "files": [str(tmp_path / "tokens.npy")]}
    data = {"source": "tokens", "sources": [source], "sequence_length": 32}
    result = factory(make_job, lambda spec: model(), package, data=data)
    assert told(result).keys() == {"data.sources"}
    assert "but the model's vocabulary has 256" in told(result)["data.sources"]
