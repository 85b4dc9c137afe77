"""Processes are killed while a checkpoint is taken: it is whole or not there.

To catch them in the act, the writer of a file waits for as long as the test needs (``tests.ray.plugged``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.reading import verified
from orchestrator.checkpoints.resumption import find
from orchestrator.core import commands, events, saving
from orchestrator.core.messages import CaughtUp, Saved
from orchestrator.system.roots import AllowedRoots
from tests.ray.jobs import BRIEF_S, ENDLESS, GROUPS, PLUGGED, Job, assert_sound
from tests.ray.shared_job.test_recovery import kill
from tests.ray.test_checkpoints import carried_on, checkpoints_of, recorded, resumed
from tests.ray.test_checkpoints_killed import effects_of

pytestmark = pytest.mark.ray
Start = Callable[..., Job]


def test_islands_killed_while_a_checkpoint_is_taken_are_in_it_whole_or_not_at_all(
    job: Job, start: Start, plug: Callable[[Path], Path]
) -> None:
    """One dies when its part is written, another while it writes it; the checkpoint is sealed, and gone on from."""
    writing, written, other = GROUPS
    number = next_number(job)
    checkpoint = job.run_dir / "checkpoints" / f"{number:06d}"
    plug(checkpoint / writing / "part.json")
    job.command(commands.Checkpoint())
    job.wait_until(lambda: saved_in(job, number) == {written, other}, "two parts")
    before = {name: job.island(name) for name in (written, writing)}
    for name, island in before.items():
        assert number not in numbers_taken(job)
        os.kill(island["pid"], signal.SIGKILL)
        job.wait_until(
            lambda name=name, of=island["incarnation"]: job.at_of(events.ConnectionLost, name, of),
            f"the death of {name}",
        )
    job.wait_until(lambda: number in numbers_taken(job), f"checkpoint {number}")
    manifest = verified(Folder.own(checkpoint))
    assert (manifest.number, {part.island for part in manifest.parts}) == (number, {written, other})
    assert not any(file.name.startswith(writing) for file in manifest.files)
    for name, island in before.items():
        job.wait_for_merge(name, island["incarnation"] + 1)

    islands = [{"node_group": group, "name": group} for group in GROUPS]
    after = start(resumed(job, islands, ENDLESS, seed=job.seed), trainer=PLUGGED)
    for group in GROUPS:
        after.wait_for_merge(group, 1)
    after.command(commands.Cancel())
    after.wait_for_end()
    assert {saved.island for saved in carried_on(job, after).islands} == {written, other}
    sources = {group: after.events(CaughtUp, group)[0].donor for group in GROUPS}
    assert (sources[written], sources[other]) == (written, other)
    assert sources[writing] != writing
    assert_sound(after)


def next_number(job: Job) -> int:
    """Of the next checkpoint."""
    return 1 + max((effect.checkpoint for effect in effects_of(job, saving.BeginCheckpoint)), default=0)


def numbers_taken(job: Job) -> list[int]:
    return [event.checkpoint for event in recorded(job, saving.CheckpointTaken)]


def saved_in(job: Job, number: int) -> set[str]:
    """Whose part this checkpoint has."""
    return {event.island for event in recorded(job, Saved) if event.checkpoint == number}


def everyone_saved(job: Job, number: int) -> bool:
    return saved_in(job, number) == set(GROUPS)


def one_saved(job: Job, number: int) -> bool:
    return bool(saved_in(job, number))


def is_sealing(job: Job, number: int) -> bool:
    return any(effect.checkpoint == number for effect in effects_of(job, saving.SealCheckpoint))


CAUGHT = (
    ("us-east/part.json", one_saved),
    ("fragment-0002.momentum", everyone_saved),
    ("manifest.json", is_sealing),
)
"""What of a checkpoint is being written when the synchroniser dies, and how that is known."""


@pytest.mark.soak("live what tests/journal/test_crash_points_saving.py has")
def test_a_synchroniser_killed_while_it_takes_a_checkpoint_drops_it_and_the_one_before_stays(
    job: Job, home: Path, plug: Callable[[Path], Path]
) -> None:
    began = next_number(job)
    incarnations = {group: job.island(group)["incarnation"] for group in GROUPS}
    deaths = len(job.restarts())
    job.command(commands.Checkpoint())
    job.wait_until(lambda: began in numbers_taken(job), "the first")
    first = checkpoints_of(job)[-1]
    root = job.run_dir / "checkpoints"
    for turn, (file, caught) in enumerate(CAUGHT, start=1):
        number = began + turn
        plug(root / f"{number:06d}" / file)
        job.command(commands.Checkpoint())
        job.wait_until(
            lambda caught=caught, number=number: caught(job, number), f"checkpoint {number} in the making", BRIEF_S
        )
        kill(job, home)
        job.wait_until(lambda turn=turn: len(job.restarts()) == deaths + turn, "the next life")
        job.wait_until(lambda number=number: not (root / f"{number:06d}").exists(), f"no checkpoint {number}")
        job.status_once_back()
        assert find(AllowedRoots.only(root), str(root), first.spec).manifest == first
    # those of earlier tests are dropped as well: the job keeps the latest only
    dropped = [effect for effect in effects_of(job, saving.DropCheckpoint) if effect.checkpoint > began]
    assert [(drop.checkpoint, "the synchroniser died" in drop.reason) for drop in dropped] == [
        (began + turn, True) for turn in (1, 2, 3)
    ]
    job.command(commands.Checkpoint())
    job.wait_until(lambda: began + 4 in numbers_taken(job), "the last")
    newest = find(AllowedRoots.only(root), str(root), first.spec)
    assert (newest.manifest.number, newest.refused) == (began + 4, ())
    assert {part.island for part in newest.manifest.parts} == set(GROUPS)
    assert {group: job.island(group)["incarnation"] for group in GROUPS} == incarnations
