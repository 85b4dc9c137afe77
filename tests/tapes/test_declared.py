"""What is written by what classes declare is read as the same, exactly; a snapshot is, over whole jobs of the swarm."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections import Counter
from contextlib import closing
from enum import Enum, StrEnum
from typing import Any, Generic, NewType, TypeVar

import pytest

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.errors import DataError, InternalError
from orchestrator.tape.declared import INTEGER_MAX, coder
from orchestrator.tape.driver import Driver, MemorySink, Pending
from orchestrator.tape.replay import fresh_core
from orchestrator.tape.schema import Header, Mark, Tape
from orchestrator.tape.snapshot import Snapshot, decode, encode
from tests.swarm.checkers import Checkers
from tests.swarm.checkpointing_world import CheckpointingWorld
from tests.swarm.configurations import draw
from tests.swarm.mortality import draw_mortality

SEEDS = (1, 4, *(pytest.param(seed, marks=pytest.mark.soak("another of its kind")) for seed in (0, 2, 3, 5)))
"""The second has the most kinds of events."""
POINTS = 12
Name = NewType("Name", str)
T = TypeVar("T")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_goes_on_from_its_snapshots_as_if_there_had_been_none(seed: int) -> None:
    tape = tape_of(seed)
    assert isinstance(tape.header, Header)
    every = max(1, len(tape.records) // POINTS)
    whole, again = driver_of(tape.header), driver_of(tape.header)
    for record in tape.records:
        assert again.step(record.event) == whole.step(record.event) == record.effects
        if record.n % every == 0:
            raw = encode(snapshot_of(whole), "b")
            assert encode(snapshot_of(again), "b") == raw
            require_no_alias(again)
            back = decode(raw, "b")
            again = Driver(back.core, back.folds, MemorySink(), again.count)
    assert summaries(again) == summaries(whole)


def tape_of(seed: int) -> Tape:
    """Of a job with faults, operators, checkpoints and rollbacks, whose synchroniser dies twice."""
    drawn = draw(seed)
    mortality = draw_mortality(seed, 2, drawn.plan.calm_at)

    def checkers() -> Checkers:
        return Checkers(drawn.policy, drawn.plan.calm_at, drawn.patience)

    policy = dataclasses.replace(drawn.policy, standbys=())
    world = CheckpointingWorld(
        policy, drawn.plan, seed, drawn.event_faults, mortality, checkers, drawn.checkpoint_requests
    )
    with closing(world):
        world.run(until=600.0)
    return world.tape


def driver_of(header: Header) -> Driver[Synchroniser]:
    folds = Pending(), Goodput(header.policy), Statistics(header.policy)
    return Driver(fresh_core(header), folds, MemorySink())


def snapshot_of(driver: Driver[Synchroniser]) -> Snapshot:
    return Snapshot(Mark(driver.count, 0, ""), 0.0, driver.core, driver.folds)


def summaries(driver: Driver[Synchroniser]) -> list[Any]:
    return [fold.summary() for fold in driver.folds if isinstance(fold, Goodput | Statistics)]


def require_no_alias(driver: Driver[Synchroniser]) -> None:
    """Nothing that can change is held in two places: read again, it would be two things."""
    seen: dict[int, str] = {}
    entries: list[tuple[Any, str]] = [(driver.core, "core"), *((fold, type(fold).__name__) for fold in driver.folds)]
    while entries:
        value, where = entries.pop()
        if isinstance(value, type | Enum | str | int | float | None):
            continue
        if dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            continue
        if not isinstance(value, tuple | frozenset):
            assert id(value) not in seen, f"{where} is also {seen[id(value)]}"
            seen[id(value)] = where
        entries += [(inner, f"{where} > {type(inner).__name__}") for inner in gc.get_referents(value)]


class Colour(StrEnum):
    RED = "red"


@dataclasses.dataclass(frozen=True, slots=True)
class Spot:
    x: int
    colour: Colour | None = None


class Bag(Generic[T]):
    things: list[T]
    best: T | None

    def __init__(self, *things: T) -> None:
        self.things, self.best = list(things), None


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.tape.declared.OWN", ("orchestrator.", "tests.tapes.test_declared"))


CASES: list[tuple[Any, Any]] = [
    (int, INTEGER_MAX),
    (float, 1e-320),
    (float, 3),
    (str, "ümläut \u2028"),
    (Name, "a"),
    (tuple[int, ...], (1, 2)),
    (tuple[int, str], (1, "b")),
    (set[tuple[str, int]], {("a", 1), ("b", 2)}),
    (frozenset[int], frozenset({1, 2})),
    (dict[str, float], {"a": 1.0, "": 2}),
    (dict[int, list[Colour]], {3: [Colour.RED]}),
    (dict[tuple[str, int], Spot], {("a", 1): Spot(4, Colour.RED)}),
    (Counter[str], Counter("abca")),
    (Spot | None, None),
    (Spot | None, Spot(2)),
    (dict[str, float | str], {"a": 1.5, "b": "c", "d": 7}),
]


@pytest.mark.parametrize(("hint", "value"), CASES)
def test_what_is_read_is_what_was_written_of_the_same_kind(hint: Any, value: Any) -> None:
    back = there_and_back(hint, value)
    assert (back, type(back)) == (value, type(value))


def test_dictionaries_keep_their_order_and_generic_classes_their_parameter() -> None:
    assert list(there_and_back(dict[int, int], {3: 1, 1: 2, 2: 3})) == [3, 1, 2]
    assert there_and_back(Bag[Spot], Bag(Spot(1), Spot(2))).things == [Spot(1), Spot(2)]
    with pytest.raises(DataError, match=r"Bag\.things"):
        coder(Bag[Spot]).read([[1], None])


def there_and_back(hint: Any, value: Any) -> Any:
    one = coder(hint)
    return one.read(json.loads(json.dumps(value if one.write is None else one.write(value))))


WRONG: list[tuple[Any, Any]] = [
    *((int, value) for value in (True, 1.0, "1", None, INTEGER_MAX + 1, float("nan"), [1])),
    *((float, value) for value in (True, "1", None, 10**400)),
    *((str, value) for value in (1, None, "\ud800", ["a"])),
    *((bool, value) for value in (0, 1, "true", None)),
    *((Colour, value) for value in ("blue", 1, None, ["red"])),
    *((list[int], value) for value in ({}, "12", None, [True])),
    *((set[int], value) for value in ([1, 1], {"a": 1})),
    *((tuple[int, str], value) for value in ([1], [1, "a", 2], ["a", 1])),
    *((dict[str, int], value) for value in ([], [["a", 1]], {"a": "b"})),
    *((dict[int, int], value) for value in ({"1": 1}, [[1, 1], [1, 2]], [[1]], [[1, 2, 3]], [1])),
    *((Spot, value) for value in ([], [1], [1, None, 2], ["a", None], {"x": 1}, None, "Spot")),
    *((float | str, value) for value in (True, None, [], {})),
]


@pytest.mark.parametrize(("hint", "value"), WRONG)
def test_what_is_not_of_the_declared_kind_is_refused(hint: Any, value: Any) -> None:
    with pytest.raises((DataError, TypeError, ValueError)):
        coder(hint).read(value)


@pytest.mark.parametrize("hint", [Any, object, type, list[Any], dict[str, object], json.JSONDecoder])
def test_a_declaration_that_does_not_say_what_is_made_is_a_bug_of_ours(hint: Any) -> None:
    with pytest.raises(InternalError):
        coder(hint)


def test_what_an_object_holds_and_does_not_declare_is_a_bug_of_ours() -> None:
    bag = Bag(1)
    bag.extra = 3  # type: ignore[attr-defined]
    with pytest.raises(InternalError, match="extra"):
        there_and_back(Bag[int], bag)
