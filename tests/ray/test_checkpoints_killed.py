"""Processes are killed while a checkpoint is taken, and on the way back to one: it is whole or not there, and all or nothing
of it is restored.

To catch them in the act, whoever writes a file waits for as long as the test needs: of the journal, because it is a pipe;
of a checkpoint, whose writer opens nothing that it has not made, because of a plug (``tests.ray.plugged``).
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounting.ledger import ROLLED_BACK
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.reading import verified
from orchestrator.checkpoints.resumption import find
from orchestrator.core import commands, events, saving
from orchestrator.core.vocabulary import RoundPhase
from orchestrator.roots import AllowedRoots
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import BRIEF_S, GROUPS, PLUGGED, Job, assert_sound, synthetic
from tests.ray.shared_job.test_recovery import kill
from tests.ray.test_checkpoints import carried_on, checkpoints_of, recorded, resumed, taken

pytestmark = pytest.mark.ray
Start = Callable[..., Job]
ENDLESS = 10**12
SEGMENTS_AHEAD = 8
"""More than are begun between two looks at the journal of a job that merges nothing."""


def effects_of(job: Job, kind: type) -> list[Any]:
    records = read_tape(job.run_dir / "tape.jsonl").records
    return [effect for record in records for effect in record.effects if isinstance(effect, kind)]


def test_islands_killed_while_a_checkpoint_is_taken_are_in_it_whole_or_not_at_all(
    start: Start, plug: Callable[[Path], Path]
) -> None:
    """One dies when its part is written, another while it writes it; the checkpoint is sealed, and gone on from."""
    groups = GROUPS[:3]
    writing, written, other = groups
    job = start(synthetic(steps=ENDLESS, groups=groups), trainer=PLUGGED)
    for group in groups:
        job.wait_for_merge(group, 1)
    checkpoint = job.run_dir / "checkpoints" / "000001"
    plug(checkpoint / writing / "part.json")
    job.command(commands.Checkpoint())
    job.wait_until(lambda: {e.island for e in recorded(job, saving.IslandSaved)} == {written, other}, "two parts")
    for name in (written, writing):
        assert not recorded(job, saving.CheckpointTaken)
        os.kill(job.island(name)["pid"], signal.SIGKILL)
        job.wait_until(lambda name=name: job.events(events.ConnectionLost, name), f"the death of {name}")
    (event,) = taken(job, 1)
    manifest = verified(Folder.own(checkpoint))
    assert (manifest.number, {part.island for part in manifest.parts}) == (event.checkpoint, {written, other})
    assert not any(file.name.startswith(writing) for file in manifest.files)
    for name in (written, writing):
        job.wait_for_merge(name, 2)
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)

    after = start(resumed(job, [{"node_group": group, "name": group} for group in groups], ENDLESS), trainer=PLUGGED)
    for group in groups:
        after.wait_for_merge(group, 1)
    after.command(commands.Cancel())
    after.wait_for_end()
    assert {saved.island for saved in carried_on(job, after).islands} == {written, other}
    sources = {group: after.events(events.IslandCaughtUp, group)[0].donor for group in groups}
    assert (sources[written], sources[other]) == (written, other)
    assert sources[writing] != writing
    assert_sound(after)


def everyone_saved(job: Job, number: int) -> bool:
    saved = {event.island for event in recorded(job, saving.IslandSaved) if event.checkpoint == number}
    return saved == {island["island"] for island in job.last["view"]["islands"]}


def one_saved(job: Job, number: int) -> bool:
    return any(event.checkpoint == number for event in recorded(job, saving.IslandSaved))


def is_sealing(job: Job, number: int) -> bool:
    return any(effect.checkpoint == number for effect in effects_of(job, saving.SealCheckpoint))


CAUGHT = (
    ("us-east/part.json", one_saved),
    ("fragment-0002.momentum", everyone_saved),
    ("manifest.json", is_sealing),
)
"""What of a checkpoint is being written when the synchroniser dies, and how that is known."""


def test_a_synchroniser_killed_while_it_takes_a_checkpoint_drops_it_and_the_one_before_stays(
    start: Start, home: Path, plug: Callable[[Path], Path]
) -> None:
    groups = ("us-east", "asia")
    job = start(synthetic(steps=ENDLESS, groups=groups), trainer=PLUGGED)
    for group in groups:
        job.wait_for_merge(group, 1)
    job.command(commands.Checkpoint())
    taken(job, 1)
    (first,) = checkpoints_of(job)
    root = job.run_dir / "checkpoints"
    for number, (file, caught) in enumerate(CAUGHT, start=2):
        plug(root / f"{number:06d}" / file)
        job.command(commands.Checkpoint())
        job.wait_until(
            lambda caught=caught, number=number: caught(job, number), f"checkpoint {number} in the making", BRIEF_S
        )
        kill(job, home)
        job.wait_until(lambda number=number: len(job.restarts()) == number - 1, "the next life")
        job.wait_until(lambda number=number: not (root / f"{number:06d}").exists(), f"no checkpoint {number}")
        job.status_once_back()
        assert find(AllowedRoots.only(root), str(root), first.spec).manifest == first
    dropped = effects_of(job, saving.DropCheckpoint)
    assert [(drop.checkpoint, "the synchroniser died" in drop.reason) for drop in dropped] == [
        (2, True),
        (3, True),
        (4, True),
    ]
    job.command(commands.Checkpoint())
    taken(job, 2)
    found = find(AllowedRoots.only(root), str(root), first.spec)
    assert (found.manifest.number, found.refused) == (5, ())
    assert {part.island for part in found.manifest.parts} == set(groups)
    job.command(commands.Cancel())
    job.wait_for_end()
    assert [job.island(group)["incarnation"] for group in groups] == [1, 1]
    assert_sound(job)


@contextmanager
def writing_to(job: Job, fragment: int) -> Iterator[Callable[[], bool]]:
    """The next entry of a fragment in the journal goes into a pipe; gives what says that it is being written. In the end
    the journal is as it was before that entry."""
    folder = job.run_dir / "journal"
    newest = max(folder.glob(f"fragment-{fragment:04d}-*.journal"))
    number = max(int(path.stem.rpartition("-")[2]) for path in folder.iterdir())
    ahead = [folder / f"fragment-{fragment:04d}-{number + n:08d}.journal" for n in range(1, SEGMENTS_AHEAD)]
    aside = job.run_dir / newest.name
    shutil.copyfile(newest, aside)
    newest.unlink()
    with ExitStack() as opened:
        pipes = []
        for path in (newest, *ahead):
            os.mkfifo(path)
            pipes.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            opened.callback(os.close, pipes[-1])

        def comes() -> bool:
            for pipe in pipes:
                with suppress(BlockingIOError):
                    if os.read(pipe, 1):
                        return True
            return False

        yield comes
        for path in ahead:
            path.unlink()
        aside.replace(newest)


def test_a_synchroniser_killed_on_the_way_back_to_a_checkpoint_goes_all_the_way(start: Start, home: Path) -> None:
    """It dies before the first fragment is restored, and between two of them; meanwhile one island alone is no quorum."""
    stays, goes = "us-east", "asia"
    job = start(synthetic(steps=ENDLESS, groups=(stays, goes), synchroniser={"quorum": 2}))
    for group in (stays, goes):
        job.wait_for_merge(group, 1)
    job.command(commands.Checkpoint())
    taken(job, 1)
    (saved,) = checkpoints_of(job)

    def moved_past(versions: list[int]) -> bool:
        fragments = job.status_once_back()["view"]["fragments"]
        return all(fragment["version"] > versions[fragment["fragment"]] for fragment in fragments)

    def nothing_merges() -> bool:
        fragments = job.status()["view"]["fragments"]
        return all(f["phase"] != RoundPhase.MERGING and goes not in f["offered"] for f in fragments)

    stood = [fragment.version for fragment in saved.fragments]
    for turn, caught_at in enumerate((0, 2), start=1):
        job.wait_until(lambda stood=stood: moved_past(stood), "merges of every fragment")
        job.command(commands.Kill(goes, restart=False))
        job.wait_for_state(goes, "stopped")
        job.wait_until(nothing_merges, "peace", BRIEF_S)
        before = len(recorded(job, saving.FragmentRestored))
        with writing_to(job, caught_at) as comes:
            job.port.submit(job.id, f"back-{turn}", "test", commands.Rollback(1))
            job.wait_until(comes, f"fragment {caught_at} in the making", BRIEF_S)
            assert len(effects_of(job, saving.RestoreFragments)) == 2 * turn - 1
            job.wait_until(
                lambda before=before, caught_at=caught_at: (
                    len(recorded(job, saving.FragmentRestored)) == before + caught_at
                ),
                "those before it",
            )
            pid = job.pid_of_synchroniser()
        os.kill(pid, signal.SIGKILL)
        job.wait_until(lambda turn=turn: len(job.restarts()) == turn, "the next life")
        job.wait_until(lambda before=before: len(recorded(job, saving.FragmentRestored)) == before + 4, "all of it")
        restored = recorded(job, saving.FragmentRestored)[before:]
        assert [event.digest for event in restored] == [fragment.digest for fragment in saved.fragments]
        assert [event.at > job.restarts()[-1].at for event in restored] == [p >= caught_at for p in range(4)]
        stood = [event.version for event in restored]
        job.status_once_back()
        job.command(commands.Readd(goes))
    job.wait_until(lambda: moved_past(stood), "merges of every fragment")
    job.command(commands.Cancel())
    status = job.wait_for_end()
    assert status["goodput"]["discarded_tokens"][ROLLED_BACK] > 0
    assert_sound(job)
