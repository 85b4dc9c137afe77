"""The synchroniser is killed on the way back to a checkpoint: all or nothing of it is restored.

To catch it in the act, the file of the journal that it writes is a pipe.
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
from orchestrator.core import commands, saving
from orchestrator.core.vocabulary import RoundPhase
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import BRIEF_S, ENDLESS, Job, assert_sound, synthetic
from tests.ray.test_checkpoints import checkpoints_of, recorded, taken

pytestmark = pytest.mark.ray
Start = Callable[..., Job]
SEGMENTS_AHEAD = 8
"""More than are begun between two looks at the journal of a job that merges nothing."""


def effects_of(job: Job, kind: type) -> list[Any]:
    records = read_tape(job.run_dir / "tape.jsonl").records
    return [effect for record in records for effect in record.effects if isinstance(effect, kind)]


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


@pytest.mark.soak("live what tests/journal/test_crash_points_saving.py has")
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
