"""Functions of a user's package that a specification names: whatever they do, the error says where, what and what next."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from learners.factories import trainer_of
from learners.island_spec import IslandSpec
from learners.synthetic import SyntheticTrainer
from orchestrator.errors import ConfigurationError
from tests.ray import broken


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    mine = ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)
    vars(mine).update(vars(broken))
    mine.number = 3  # type: ignore[attr-defined]
    return mine


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("mine:exits", "raises SystemExit: no licence for this machine. Try it outside a job first"),
        ("mine:raises", "raises Unsendable: the layers do not fit. Try it outside a job first"),
        ("mine:returns_nothing", "returns None, which lacks add, cursor, device_count, .*learners.contract.Trainer"),
        ("mine:absent", "cannot be imported .AttributeError: .*absent"),
        ("nowhere.at_all:create", "cannot be imported .ModuleNotFoundError: No module named 'nowhere'"),
        ("mine:number", "is of type int, but must be a function"),
    ],
)
def test_a_trainer_that_is_none_is_the_specifications_fault(make_job: Any, path: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^trainer '{path}' {said}"):
        trainer_of(IslandSpec.of({**make_job(), "trainer": path}), 0, 1)


def test_what_the_system_refuses_to_a_trainer_may_be_granted_at_the_next_start(
    make_job: Any, package: ModuleType
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    vars(package)["full"] = full
    with pytest.raises(OSError, match="No space left"):
        trainer_of(IslandSpec.of({**make_job(), "trainer": "mine:full"}), 0, 1)


@pytest.mark.parametrize("method", ["tensor_shapes", "initial_parameters", "unigram_loss", "evaluate"])
def test_a_trainer_that_exits_while_the_evaluator_asks_it_does_not_end_its_process(
    make_job: Any, package: ModuleType, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    from learners import evaluator  # imports Ray, which reads its environment then

    def exits(*_: Any) -> None:
        sys.exit("enough")

    vars(package)["create"] = lambda spec, *_: type("Mine", (SyntheticTrainer,), {method: exits})(spec, 0)
    monkeypatch.setattr(evaluator.logbook, "keep", lambda book: None)  # this process has a standard output of its own
    measuring: Any = evaluator.Evaluator({**make_job(), "trainer": "mine:create"}, {}, None, 0)  # type: ignore[arg-type]
    asked = {
        "tensor_shapes": measuring.outline,
        "initial_parameters": lambda: measuring.initial_pieces([]),
        "unigram_loss": measuring.unigram_loss,
        "evaluate": lambda: measuring.evaluate(1, None),
    }
    with pytest.raises(ConfigurationError, match=f"^{method} of the trainer 'mine:create' raises SystemExit: enough"):
        asked[method]()
