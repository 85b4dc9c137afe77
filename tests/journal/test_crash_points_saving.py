"""The synchroniser dies at every labelled point of checkpoints being taken and of the way back to one.

What comes after is what would have come, bit for bit: a checkpoint that is dropped is taken again from the same Θ, and a
rollback ends where it was going. Two checkpoints are taken, so that the second makes the first superfluous.
"""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from orchestrator.accounting.ledger import ROLLED_BACK
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import Manifest
from orchestrator.checkpoints.reading import listed, newest_sound
from orchestrator.system.roots import EVERYTHING
from tests.harness import saver, shell
from tests.harness.lives import Lives
from tests.harness.shell import FRAGMENTS, Fate
from tests.journal.test_crash_points import SNAPSHOTS, assert_sound
from tests.swarm.disk import Died, FaultyDisk

DEATHS_PER_POINT = int(os.environ.get("ATOLL_DEATHS_PER_POINT", "1"))
"""A point is reached up to fifty times; ``make soak`` dies at every one. The last time is always one more."""
SEEDS = min(20, 2 * DEATHS_PER_POINT)
POINTS = sorted({*saver.POINTS, *shell.POINTS} - {"before pull", "after pull", "before merge"})
"""Nothing is offered and nothing merged while a checkpoint is taken or restored here: that is another test's."""


class Watched:
    """Tells of points only while it is on."""

    def __init__(self, fate: Any) -> None:
        self.fate, self.on = fate, False

    def __call__(self, point: str) -> None:
        if self.on:
            self.fate(point)


def run(folder: Path, fate: Any, *disk: Any, **synchroniser: Any) -> Lives:
    """A job that is saved twice, goes on, goes back, and goes on; ``fate`` hears of saving and of going back."""
    watched = Watched(fate)
    lives = Lives(folder, watched, *disk, **synchroniser)
    for count, work in ((8, lives.save), (3, lives.save), (8, lives.roll_back)):
        lives.step(count)
        lives.adopt()
        watched.on = True
        work()
        watched.on = False
    lives.step(8)
    lives.adopt()
    return lives


def kept(lives: Lives, folder: Path) -> Manifest:
    """The one checkpoint of the job: sound, and nothing lies beside it."""
    (only,) = lives.shell.core.state.checkpoints.retained
    found = newest_sound(EVERYTHING, str(folder / "checkpoints"))
    assert (found.manifest.number, found.refused) == (only.number, ())
    assert Folder.own(folder / "checkpoints").folders() == [f"{only.number:06d}"]
    assert tuple(fragment.version for fragment in found.manifest.fragments) == only.versions
    return found.manifest


@cache
def undisturbed() -> tuple[Any, dict[str, int], dict[str, int], dict[str, float], Manifest]:
    """Also: how often the journal was written to before anything was restored."""
    with TemporaryDirectory() as name:
        folder, fate, disk = Path(name), Fate(), FaultyDisk()
        calls: dict[str, int] = {}

        def noting(point: str) -> None:
            fate(point)
            if point == "before restore" and not calls:
                calls.update(disk.calls)

        lives = run(folder, noting, disk)
        assert_sound(lives, folder)
        return lives.bits(), dict(fate.counts), calls, lives.shell.goodput.summary()["tokens"], kept(lives, folder)


def assert_same(lives: Lives, folder: Path) -> None:
    """Θ, momentum, versions, tokens, and what the checkpoint has, as in a job in which nobody died."""
    bits, _, _, tokens, manifest = undisturbed()
    assert lives.bits() == bits
    assert lives.shell.goodput.summary()["tokens"] == tokens
    here = kept(lives, folder)
    for name in ("fragments", "tokens_trained", "merged_tokens", "cursors"):
        assert getattr(here, name) == getattr(manifest, name), name
    for mine, its in zip(here.parts, manifest.parts, strict=True):
        assert (mine.island, mine.tokens_total, mine.versions) == (its.island, its.tokens_total, its.versions)
    assert_sound(lives, folder)


def test_the_undisturbed_job_goes_back_and_reaches_every_point() -> None:
    bits, counts, _, tokens, manifest = undisturbed()
    assert set(counts) == set(POINTS)
    restored = [fragment.version for fragment in manifest.fragments]
    assert all(version > before + 2 for (version, *_), before in zip(bits, restored, strict=True))
    assert tokens["discarded"] > 0 < tokens["merged"]
    assert sum(manifest.merged_tokens) > 0


@pytest.mark.parametrize("point", POINTS)
def test_a_death_at_any_labelled_point_changes_nothing_that_is_kept(tmp_path: Path, point: str) -> None:
    count = undisturbed()[1][point]
    every = -(-count // DEATHS_PER_POINT)
    for number in sorted({*range(1, count + 1, every), count}):
        folder = tmp_path / str(number)
        lives = run(folder, Fate(point, number), **(SNAPSHOTS if number % 2 else {}))
        assert lives.deaths == 1
        assert_same(lives, folder)


@pytest.mark.parametrize("fault", ["append before", "append torn", "append after", "sync before", "sync after"])
def test_a_death_while_the_journal_takes_what_is_restored_changes_nothing_either(tmp_path: Path, fault: str) -> None:
    kind, what = fault.split()
    before = undisturbed()[2][kind]
    for number in range(before + 1, before + FRAGMENTS + 1):
        folder = tmp_path / str(number)
        lives = run(folder, Fate(), FaultyDisk(**{kind: {number: what}}))
        assert lives.deaths == 1
        assert_same(lives, folder)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_many_deaths_at_random_points_change_nothing_either(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)

    def fate(_: str) -> None:
        if chance.random() < 0.03:
            raise Died

    lives = run(tmp_path, fate, **(SNAPSHOTS if seed % 2 else {}))
    assert lives.deaths > 0
    assert_same(lives, tmp_path)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_loss_of_power_takes_no_checkpoint_before_a_newer_one_is_known_for_certain(tmp_path: Path, seed: int) -> None:
    chance, disk, known = random.Random(seed), FaultyDisk(), [0]
    root = Folder.own(tmp_path / "checkpoints")

    def fate(point: str) -> None:
        if point == "before mark":  # all that was decided before is durable, and what is sealed was told
            known.append(max((manifest.number for manifest in listed(root)), default=0))
        if chance.random() < 0.03:
            raise Died

    def after_death() -> None:
        disk.lose_power(chance)
        assert not known[-1] or newest_sound(EVERYTHING, root.url).manifest.number >= known[-1]

    lives = run(tmp_path, fate, disk, after_death, **(SNAPSHOTS if seed % 2 else {}))
    assert lives.deaths > 0 < known[-1]
    kept(lives, tmp_path)
    assert lives.shell.goodput.summary()["discarded_tokens"][ROLLED_BACK] > 0
    assert_sound(lives, tmp_path)
