"""The synchroniser dies at every labelled point of a round: what comes after is what would have come, bit for bit."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from orchestrator.core import events as e
from orchestrator.core.saving import FragmentRestored
from orchestrator.system.run_folder import SEALED, SNAPSHOT
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.harness.lives import Lives
from tests.harness.shell import FRAGMENTS, POINTS, Fate, Shell
from tests.swarm.disk import Died, DiskFault, FaultyDisk, Operation, SimulatedDisk

STEPS = 14
SNAPSHOTS = {"durability": {"snapshot_every_records": 7}}
DEATHS_PER_POINT = int(os.environ.get("ATOLL_DEATHS_PER_POINT", "2"))
"""A point is reached up to ninety times in a job; ``make soak`` dies at every one."""


def run(folder: Path, reached: Callable[[str], None], *disk: Any, **synchroniser: Any) -> Lives:
    """A job after STEPS steps of every island."""
    lives = Lives(folder, reached, *disk, **synchroniser)
    lives.step(STEPS)
    lives.adopt()
    return lives


def assert_sound(outcome: Lives, folder: Path) -> None:
    """The tape replays, versions rise by one, digests chain, tokens are conserved, and nothing is held that was merged."""
    outcome.shell.files.tape.let_go()
    tape = read_tape(folder / "tape.jsonl", outcome.shell.disk)
    assert replay(tape).exact
    stands = dict.fromkeys(range(FRAGMENTS), (0, ""))
    for record in tape.records:
        event = record.event
        if isinstance(event, (e.MergeCompleted, FragmentRestored)) and record.effects:
            version, digest = stands[event.fragment]
            assert event.version == version + 1
            assert digest in ("", event.base_digest)
            stands[event.fragment] = (event.version, event.digest)
    assert [v for v, _ in stands.values()] == [r.version for r in outcome.shell.core.state.rounds]
    epochs = [r.event.epoch for r in tape.records if isinstance(r.event, e.SynchroniserRestarted)]
    assert epochs == list(range(2, 2 + len(epochs)))
    outcome.shell.goodput.check()


def settled(outcome: Lives) -> dict[str, float]:
    """Return the job's tokens apart from those in flight: steps are reported once a second, so these depend on the time."""
    tokens: dict[str, float] = dict(outcome.shell.goodput.summary()["tokens"])
    tokens["trained"] -= tokens.pop("in_flight")
    return tokens


@cache
def undisturbed() -> tuple[Any, dict[str, int], dict[str, int], dict[str, float]]:
    with TemporaryDirectory() as folder:
        fate, disk = Fate(), FaultyDisk()
        outcome = run(Path(folder), fate, disk)
        assert_sound(outcome, Path(folder))
        return outcome.bits(), dict(fate.counts), dict(disk.calls), settled(outcome)


def test_the_undisturbed_job_merges_every_fragment_several_times_with_everyone() -> None:
    bits, counts, calls, tokens = undisturbed()
    assert [version for version, *_ in bits] == [2, 2, 2]
    assert set(counts) == set(POINTS)
    assert calls == {"append": 9, "sync": 9}
    assert tokens["merged"] > 0 == tokens["discarded"]


@pytest.mark.parametrize("point", POINTS)
def test_a_death_at_any_labelled_point_changes_no_bit_of_what_is_merged(tmp_path: Path, point: str) -> None:
    bits, counts, _, tokens = undisturbed()
    every = -(-counts[point] // DEATHS_PER_POINT)
    for number in {*range(1, counts[point] + 1, every), counts[point]}:
        folder, fate = tmp_path / str(number), Fate(point, number)
        outcome = run(folder, fate, **(SNAPSHOTS if number % 2 else {}))
        late = fate.counts[point] < number  # islands tell of their progress by the clock, so there may be fewer records
        assert outcome.deaths == (0 if late else 1)
        assert not late or number > counts[point] // 2
        assert outcome.bits() == bits, number
        assert settled(outcome) == tokens
        assert_sound(outcome, folder)


@pytest.mark.parametrize("fault", ["append before", "append torn", "append after", "sync before", "sync after"])
def test_a_death_while_the_journal_is_written_changes_no_bit_either(tmp_path: Path, fault: str) -> None:
    bits, _, calls, _ = undisturbed()
    kind, what = fault.split()
    for number in range(1, calls[kind] + 1):
        folder = tmp_path / str(number)
        outcome = run(folder, Fate(), FaultyDisk(**{kind: {number: what}}))
        assert outcome.deaths == 1
        assert outcome.bits() == bits, number
        assert_sound(outcome, folder)


@pytest.mark.parametrize("fault", ["append full", "sync error"])
def test_a_disk_that_refuses_for_a_while_costs_no_bit_and_no_life(tmp_path: Path, fault: str) -> None:
    bits, _, calls, _ = undisturbed()
    kind, what = fault.split()
    outcome = run(tmp_path, Fate(), FaultyDisk(**{kind: dict.fromkeys(range(2, calls[kind] * 3, 3), what)}))
    assert outcome.deaths == 0
    assert outcome.bits() == bits
    assert_sound(outcome, tmp_path)


def deaths(chance: random.Random) -> Callable[[str], None]:
    """Return a process that dies at a random point among the first 100, and at one point in a hundred besides."""
    points, first = itertools.count(), chance.randrange(100)

    def reached(_: str) -> None:
        if next(points) == first or chance.random() < 0.01:
            raise Died

    return reached


@pytest.mark.parametrize("seed", range(20))
def test_many_deaths_at_random_points_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)

    outcome = run(tmp_path, deaths(chance), **(SNAPSHOTS if seed % 2 else {}))
    assert outcome.deaths > 0
    assert outcome.bits() == undisturbed()[0]
    assert_sound(outcome, tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_deaths_and_losses_of_power_while_the_tape_is_sealed_lose_nothing_either(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every few records a segment of the tape is sealed; process or power go at random points, half of them in between."""
    chance = random.Random(seed)

    def fault(operation: Operation, path: Path) -> DiskFault | None:
        of_sealing = operation is Operation.REPLACE and path.name != SNAPSHOT
        return chance.choice((DiskFault.BEFORE, DiskFault.AFTER)) if of_sealing and chance.random() < 0.2 else None

    monkeypatch.setattr(Shell, "seal_bytes", 2500)
    disk = SimulatedDisk(fault)
    outcome = run(tmp_path, deaths(chance), disk, (lambda: disk.lose_power(chance)) if seed % 2 else (lambda: None))
    assert outcome.deaths > 0
    assert len(disk.files(tmp_path / SEALED)) > 1
    if seed % 2:
        assert [version for version, *_ in outcome.bits()] == [2, 2, 2]
    else:
        assert outcome.bits() == undisturbed()[0]
    assert_sound(outcome, tmp_path)


@pytest.mark.parametrize("seed", range(10))
def test_a_loss_of_power_takes_only_what_nobody_was_told(tmp_path: Path, seed: int) -> None:
    """All that was not synced is gone from tape and journal alike, or is there in part, or spoilt; islands stay."""
    chance, disk = random.Random(seed), FaultyDisk()

    outcome = run(tmp_path, deaths(chance), disk, lambda: disk.lose_power(chance), **(SNAPSHOTS if seed % 2 else {}))
    assert outcome.deaths > 0
    assert [version for version, *_ in outcome.bits()] == [2, 2, 2]
    assert_sound(outcome, tmp_path)
