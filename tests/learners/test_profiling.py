"""Traces of an island's steps: whole steps of a real JAX trainer, and every way in which there is none."""

from __future__ import annotations

import math
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from learners import profiling
from learners.profiling import Profiler, Recording
from orchestrator.core.commands import CANCEL_PROFILE
from orchestrator.core.vocabulary import IslandId
from orchestrator.errors import Conflict, NotFound
from orchestrator.system import logbook
from tests.waiting import wait_until


class Computing:
    """Stands for a trainer whose steps run in JAX."""

    profiler = "jax"


class Broken:
    """A profiler that fails where ``at`` says, or writes so many bytes."""

    def __init__(self, at: str = "", byte_count: int = 0) -> None:
        self.at, self.byte_count = at, byte_count

    def start(self, folder: Path) -> None:
        if self.at == "start":
            raise RuntimeError("another profiler runs")

    def step(self, number: int) -> None:
        pass

    def stop(self, folder: Path) -> None:
        if self.at == "stop":
            raise OSError(28, "No space left on device")
        folder.mkdir()
        if self.byte_count:
            (folder / "a.trace.json.gz").write_bytes(bytes(self.byte_count))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def profiler(trainer: Any = None) -> Profiler:
    return Profiler(trainer or Computing())


def run(own: Profiler, boundaries: int) -> None:
    for _ in range(boundaries):
        own.boundary(steps=True)


def complete(own: Profiler, name: str) -> dict[str, Any]:
    wait_until(lambda: (now := own.state(name, None))["byte_count"] is not None or now["problem"], "the trace")
    return dict(own.state(name, None))


def broken(monkeypatch: pytest.MonkeyPatch, trace: Broken) -> Profiler:
    monkeypatch.setitem(profiling.TRACES, "jax", lambda: trace)
    return profiler()


def test_a_trace_of_jax_has_as_many_steps_as_it_was_to_have(temporary: Path) -> None:
    import jax

    own = profiler()
    step = jax.jit(lambda x: x @ x)
    assert own.state("one", 3)["steps_taken"] == 0
    for _ in range(6):
        own.boundary(steps=True)
        step(jax.numpy.ones((64, 64))).block_until_ready()
    about = complete(own, "one")
    assert (about["steps_taken"], about["problem"]) == (3, "")
    assert about["stalled_s"] > 0.0
    content = b""
    while part := own.read("one", len(content), about["byte_count"]):
        content += part
    with zipfile.ZipFile(BytesIO(content)) as archive:
        names = archive.namelist()
        (planes,) = (name for name in names if name.endswith(".xplane.pb"))
        recorded = jax.profiler.ProfileData.from_serialized_xspace(archive.read(planes))
    assert any(name.endswith(".trace.json.gz") for name in names)
    events = [event.name for plane in recorded.planes for line in plane.lines for event in line.events]
    assert events.count("inner step") == 3
    assert list(temporary.iterdir()) == []


def test_a_second_trace_waits_for_the_end_of_the_first_and_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = broken(monkeypatch, Broken(byte_count=10))
    own.state("one", 2)
    run(own, 1)
    assert own.state("one", 2)["steps_taken"] == 0
    with pytest.raises(Conflict, match="Another trace of this island is being recorded, 0 of 2 steps so far"):
        own.state("two", 2)
    run(own, 2)
    complete(own, "one")
    own.state("two", 1)
    run(own, 2)
    assert complete(own, "two")["steps_taken"] == 1
    with pytest.raises(NotFound, match="knows no trace 'one'"):
        own.read("one", 0, 1)


@pytest.mark.parametrize("boundaries", [0, 1, 3])
def test_a_cancelled_recording_ends_at_the_next_boundary_and_makes_room(
    boundaries: int, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = broken(monkeypatch, Broken(byte_count=100))
    own.state("long", 100)
    run(own, boundaries)
    with pytest.raises(NotFound):
        own.state("other", CANCEL_PROFILE)
    own.state("long", CANCEL_PROFILE)
    with pytest.raises(Conflict, match="is being cancelled"):
        own.state("next", 2)
    run(own, 1)
    assert (complete(own, "long")["problem"], list(temporary.iterdir())) == ("It was cancelled.", [])
    own.state("next", 2)
    run(own, 3)
    assert complete(own, "next")["byte_count"] > 0


def test_a_complete_trace_is_dropped_when_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    own = broken(monkeypatch, Broken(byte_count=100))
    own.state("one", 2)
    run(own, 3)
    assert complete(own, "one")["byte_count"] > 0
    assert own.state("one", CANCEL_PROFILE)["byte_count"] is None
    with pytest.raises(NotFound):
        own.read("one", 0, 10)


@pytest.mark.parametrize("at", ["start", "stop"])
def test_a_profiler_that_fails_ends_no_training_and_leaves_nothing(
    at: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = broken(monkeypatch, Broken(at))
    own.state("one", 1)
    run(own, 3)
    assert "The profiler failed: " in own.state("one", None)["problem"]
    assert list(temporary.iterdir()) == []
    own.state("two", 1)


def test_a_trace_that_is_too_large_is_dropped_with_a_sentence(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "ZIP_BYTES_MAX", 1_000)
    own = broken(monkeypatch, Broken(byte_count=1_000))
    own.state("one", 1)
    run(own, 2)
    assert "more than an island keeps (1,000 packed). Record fewer steps." in complete(own, "one")["problem"]
    assert list(temporary.iterdir()) == []


def test_an_island_that_stops_gives_the_steps_that_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    own = broken(monkeypatch, Broken(byte_count=10))
    own.state("one", 5)
    run(own, 2)
    own.boundary(steps=False)
    assert complete(own, "one")["steps_taken"] == 2
    own.state("two", 5)
    own.boundary(steps=False)
    assert "stopped training before a step" in own.state("two", None)["problem"]


def test_a_long_recording_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "SECONDS_MAX", 0.0)
    own = broken(monkeypatch, Broken(byte_count=10))
    own.state("one", 5)
    run(own, 2)
    assert complete(own, "one")["steps_taken"] == 1


def test_a_trace_that_nobody_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "KEPT_S", 0.0)
    own = broken(monkeypatch, Broken(byte_count=10))
    own.state("one", 1)
    run(own, 2)
    wait_until(lambda: "was not fetched in time" in own.state("one", None)["problem"], "the end of the trace")
    with pytest.raises(NotFound):
        own.read("one", 0, 1)


def test_a_trace_stays_while_its_reader_goes_on_over_a_slow_line(monkeypatch: pytest.MonkeyPatch) -> None:
    due: list[float] = []
    monkeypatch.setattr(profiling, "KEPT_S", 100.0)
    monkeypatch.setattr(Recording, "_drop_after", lambda own, seconds: due.append(seconds))
    own = broken(monkeypatch, Broken(byte_count=10))
    own.state("one", 1)
    run(own, 2)
    complete(own, "one")
    wait_until(lambda: due, "the first timer")
    start = profiling.monotonic()
    for later, is_kept in ((99.0, True), (150.0, True), (400.0, False)):
        monkeypatch.setattr(profiling, "monotonic", lambda at=start + later: at)
        if is_kept:
            assert own.read("one", 0, 1)
        own._latest._drop_unread()
        assert (own.state("one", None)["byte_count"] is not None) is is_kept, later
    assert due[1:] == [100.0, 100.0]


def test_a_trainer_without_a_profiler_is_refused() -> None:
    with pytest.raises(Conflict, match=r"\(object\) has no profiler. .* `profiler`: 'jax' or 'torch'"):
        profiler(object()).state("one", 1)


def test_an_island_that_builds_its_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from learners.island import Island  # here, because it imports Ray

    monkeypatch.setattr(logbook, "keep", lambda book: None)  # it would redirect the output of this process
    building = Island(IslandId("asia"), {}, logbook.island_logbook(tmp_path, "asia", 1), math.inf)
    for steps in (2, None):
        with pytest.raises(Conflict, match=r"Island asia builds its model\. Try again once it trains"):
            building.profile("short", steps)
    with pytest.raises(Conflict, match="builds its model"):
        building.read_profile("short", 0, 1)


def test_what_a_killed_process_left_is_removed_by_the_next(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = temporary / f"{profiling.FOLDER}0123"
    left.mkdir()
    (left / profiling.LOCK).touch()
    (left / "planes").write_bytes(b"x")
    own = broken(monkeypatch, Broken(byte_count=10))
    own.state("one", 1)
    run(own, 2)
    complete(own, "one")
    assert list(temporary.iterdir()) == []
