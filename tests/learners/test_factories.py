"""Functions of a user's package that a specification names: whatever they do, the error says where, what and what next.

The trainer of docs/how-to-change/trainer.md keeps the contract, word for word as it stands there.
"""

from __future__ import annotations

import sys
import traceback
from asyncio import CancelledError
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from learners import factories
from learners.contract import Trainer
from learners.factories import called, trainer_of
from learners.island_spec import IslandSpec
from learners.synthetic import SyntheticTrainer
from orchestrator.errors import ConfigurationError, InfrastructureError, InvalidJobSpec
from orchestrator.specification.config import parse_job
from tests.documents import DOCS, blocks
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
    with pytest.raises(
        InfrastructureError, match=r"^trainer 'mine:full' raises OSError: .* No space left on device\. Try"
    ):
        trainer_of(IslandSpec.of({**make_job(), "trainer": "mine:full"}), 0, 1)


def test_a_trainer_that_lacks_memory_may_have_it_at_the_next_start(make_job: Any, package: ModuleType) -> None:
    vars(package)["large"] = raiser(MemoryError())
    with pytest.raises(InfrastructureError, match=r"^trainer 'mine:large' raises MemoryError\. Give"):
        trainer_of(IslandSpec.of({**make_job(), "trainer": "mine:large"}), 0, 1)


class Stop(KeyboardInterrupt):
    """As a package raises whose own loop is to end."""


class Alone(BaseException):
    pass


NO_EXCEPTIONS = [
    Stop("enough"),
    Alone("enough"),
    GeneratorExit("enough"),
    CancelledError("enough"),
    SystemExit("enough"),
]


def raiser(error: BaseException) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_what_is_no_exception_is_an_error_of_the_function_as_well(package: ModuleType, error: BaseException) -> None:
    vars(package)["ends"] = raiser(error)
    with pytest.raises(
        ConfigurationError, match=f"^model.factory 'mine:ends' raises {type(error).__name__}: enough. Try"
    ):
        called("model.factory", "mine:ends")


def test_ctrl_c_is_no_error_of_the_function(package: ModuleType) -> None:
    vars(package)["interrupted"] = raiser(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        called("model.factory", "mine:interrupted")


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_a_module_that_cannot_be_imported_may_raise_anything(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(factories.importlib, "import_module", raiser(error))
    with pytest.raises(ConfigurationError, match=f"cannot be imported .{type(error).__name__}: enough"):
        called("model.factory", "mine:create")


@pytest.mark.parametrize("method", ["tensor_shapes", "initial_parameters", "unigram_loss", "evaluate"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        *((error, f"{type(error).__name__}: enough") for error in (*NO_EXCEPTIONS, KeyboardInterrupt("enough"))),
        (ValueError("no file \udcff"), "ValueError: no file \ufffd"),
        (ConfigurationError(detail="enough"), "enough"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_of_the_trainer_that_the_evaluator_asks_reaches_the_other_process(
    make_job: Any, package: ModuleType, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException, told: str
) -> None:
    from learners import evaluator  # imports Ray, which reads its environment then

    error.__cause__ = ValueError("\udcff")
    vars(package)["create"] = lambda spec, *_: type("Mine", (SyntheticTrainer,), {method: raiser(error)})(spec, 0)
    monkeypatch.setattr(evaluator.logbook, "keep", lambda book: None)  # this process has a standard output of its own
    measuring: Any = evaluator.Evaluator({**make_job(), "trainer": "mine:create"}, {}, None, 0)  # type: ignore[arg-type]
    asked = {
        "tensor_shapes": measuring.outline,
        "initial_parameters": lambda: measuring.initial_pieces([]),
        "unigram_loss": measuring.unigram_loss,
        "evaluate": lambda: measuring.evaluate(1, None),
    }
    with pytest.raises(ConfigurationError) as raised:
        asked[method]()
    subject = "" if isinstance(error, ConfigurationError) else f"{method} of the trainer 'mine:create' raises "
    assert str(raised.value).startswith(subject + told)
    "".join(traceback.format_exception(raised.value)).encode()  # as Ray sends it


def test_settings_of_the_specification_reach_a_factory_and_belong_to_it(make_job: Any, package: ModuleType) -> None:
    got = []

    def make(spec: Any, shard_index: int, shard_count: int, *, settings: dict[str, Any]) -> SyntheticTrainer:
        got.append(settings["layers"].copy())
        settings["layers"].append("mine")
        return SyntheticTrainer(spec, shard_index, shard_count)

    vars(package)["make"] = make
    spec = IslandSpec.of({**make_job(), "trainer": {"factory": "mine:make", "settings": {"layers": [3, "wide"]}}})
    assert [trainer_of(spec, 0, 1).device_count, trainer_of(spec, 0, 1).device_count] == [1, 1]
    assert got == [[3, "wide"]] * 2
    assert spec.job.model_dump()["trainer"] == {"factory": "mine:make", "settings": {"layers": [3, "wide"]}}


def test_a_factory_without_settings_is_called_as_before_and_is_asked_to_take_those_that_there_are(
    package: ModuleType,
) -> None:
    vars(package)["build"] = lambda spec: spec
    assert called("model.factory", "mine:build", 7) == 7
    with pytest.raises(
        ConfigurationError, match=r"^model.settings has depth, but 'mine:build' has no parameter `settin"
    ):
        called("model.factory", "mine:build", 7, settings={"depth": 2})


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (nested(9), "is nested more than 8 deep"),
        ({"text": "x" * (64 << 10)}, "has a text of more than 10,000 characters"),
        ({"a": [1.0, float("inf")]}, "has inf, which is no finite number"),
        ({"a": {1: 2}}, "has a key that is no text"),
        ({"a": {1, 2}}, "which is no finite number"),
    ],
)
def test_settings_that_could_not_travel_are_refused_at_submission(settings: dict[str, Any], message: str) -> None:
    document = {"islands": [{"node_group": "a"}], "budget": {"steps": 1}}
    document["model"] = {"factory": "mine:model", "settings": settings}
    with pytest.raises(InvalidJobSpec) as refused:
        parse_job(document)
    (problem,) = refused.value.problems
    assert (problem.path, message in problem.message) == ("model.settings", True), problem


@pytest.mark.parametrize("path", ["trainer", "model", "training.inner_optimizer"])
def test_settings_without_a_factory_are_refused(path: str) -> None:
    section: dict[str, Any] = {"settings": {"a": 1}}
    for name in reversed(path.split(".")):
        section = {name: section}
    with pytest.raises(InvalidJobSpec, match="has settings, which only a factory takes"):
        parse_job({"islands": [{"node_group": "a"}], "budget": {"steps": 1}, **section})


SPEC = parse_job(
    {
        "trainer": "mypackage.bigrams:create",
        "islands": [{"node_group": "asia"}],
        "budget": {"steps": 10},
        "training": {"inner_optimizer": {"lr": 0.1}},
    }
).model_dump(mode="json")


@pytest.fixture
def bigrams() -> Any:
    (text,) = [b.text for b in blocks((DOCS / "how-to-change" / "trainer.md").read_text()) if b.kind == "python"]
    module = ModuleType("bigrams")
    exec(compile(text, "trainer.md", "exec"), vars(module))
    return module


def test_it_has_every_method_of_the_contract(bigrams: Any) -> None:
    wanted = {name for name in vars(Trainer) if not name.startswith("_")}
    assert {name for name in wanted if not hasattr(bigrams.create(SPEC, 0, 1), name)} == set()


def test_it_learns_and_beats_a_model_without_context(bigrams: Any) -> None:
    trainer = bigrams.create(SPEC, 0, 1)
    for step in range(100):
        trainer.step(step)
    assert trainer.evaluate(trainer.snapshot(trainer.tensor_shapes()).arrays()).loss < trainer.unigram_loss() - 0.8


def test_whoever_takes_its_state_goes_on_bit_for_bit(bigrams: Any) -> None:
    one, other = bigrams.create(SPEC, 0, 2), bigrams.create(SPEC, 1, 2)
    for step in range(5):
        one.step(step)
    other.import_state(one.export_state().arrays())
    other.take_shard(0)
    other.seek(one.cursor())
    for trainer in (one, other):
        trainer.step(5)
    mine, theirs = (trainer.snapshot(trainer.tensor_shapes()).arrays() for trainer in (one, other))
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_a_snapshot_is_not_changed_by_the_next_step(bigrams: Any) -> None:
    trainer = bigrams.create(SPEC, 0, 1)
    snapshot = trainer.snapshot(["rows[96:128]"])
    trainer.step(0)
    assert not snapshot.arrays()["rows[96:128]"].any()
    assert trainer.snapshot(["rows[96:128]"]).arrays()["rows[96:128]"].any()


def test_loading_a_piece_replaces_that_and_nothing_else(bigrams: Any) -> None:
    trainer = bigrams.create(SPEC, 0, 1)
    trainer.step(0)
    expected = trainer.snapshot(["rows"]).arrays()["rows"]
    expected[96:128] = 7.0
    trainer.load({"rows[96:128]": np.full((32, 256), 7.0, np.float32)})
    assert np.array_equal(trainer.snapshot(["rows"]).arrays()["rows"], expected)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trainer": {"kind": "torch", "model": "mine:build"}}, "trainer.kind"),
        (
            {
                "model": {"initial_weights": "/models/llama"},
                "islands": [{"node_group": "a"}, {"node_group": "b", "framework": "torch"}],
            },
            "islands.1.framework",
        ),
    ],
)
def test_a_job_in_pytorch_says_which_field_asks_for_it_where_it_is_missing(
    changes: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    job = parse_job({"islands": [{"node_group": "a"}], "budget": {"steps": 1}, **changes})
    spec = IslandSpec.of(job.island_document(job.islands[-1]))
    with pytest.raises(
        ConfigurationError, match=rf"^{field} is torch, but PyTorch cannot be imported here .*Install it"
    ):
        trainer_of(spec, 0, 1)
