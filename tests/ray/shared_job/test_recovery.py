"""The synchroniser's process is killed: islands train on, it comes back by itself, and nothing is lost or counted twice."""

from __future__ import annotations

import fcntl
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounting.ledger import ROLLED_BACK
from orchestrator.actors import IslandInterface
from orchestrator.core import events
from orchestrator.core.messages import Progress
from orchestrator.core.saving import FragmentRestored, FromJournal
from orchestrator.core.vocabulary import Epoch, FragmentId
from orchestrator.parameters.journal import Journal, sizes_of
from orchestrator.runtime import cluster
from orchestrator.runtime.settings import island_name
from orchestrator.system.logbook import service_logbook
from tests.ray.jobs import GROUPS, Job, pid_of, pids_of, stop
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]
KILLS = int(os.environ.get("ATOLL_KILLS", "3"))
SEEN_BACK_EVERY = 3
SILENT_S = float(os.environ.get("ATOLL_SILENT_S", "0"))
"""Over so long a silence the islands' rates are measured, which wants a calm machine: ``make soak`` does."""
SHARE_MIN = 0.97
RECORDS_OF_A_SNAPSHOT = 250
"""Of these the last hundred or so may be in no snapshot yet."""


def kill(job: Job, home: Any) -> None:
    os.kill(job.wait_until(lambda: pid_of("SynchroniserActor", home), "a synchroniser's process"), signal.SIGKILL)


def contributors_since(job: Job, at: float) -> set[str]:
    return {
        record.event.contribution.island
        for record in job.records()
        if isinstance(record.event, events.ContributionArrived) and record.event.at > at
    }


def test_a_synchroniser_killed_at_random_moments_comes_back_each_time_and_no_island_is_disturbed(
    job: Job, home: Any
) -> None:
    """Also while it starts, remembers and reconnects. ``ATOLL_KILLS`` says how often; ``make soak`` wants 200."""
    job.wait_until(lambda: len(job.records()) > RECORDS_OF_A_SNAPSHOT, "records enough for a snapshot")
    islands, chance = {group: job.island(group) for group in GROUPS}, random.Random(5)
    epoch, deaths = job.last["view"]["epoch"], len(job.restarts())
    for number in range(1, KILLS + 1):
        time.sleep(chance.uniform(0.0, 2.0))
        kill(job, home)
        if number % SEEN_BACK_EVERY == 0:
            epochs = job.status_once_back()["view"]["epoch"] - epoch
            job.wait_until(lambda: contributors_since(job, job.restarts()[-1].at) == set(GROUPS), "everyone again")
            assert epochs == len(job.restarts()) - deaths
    assert KILLS // SEEN_BACK_EVERY <= epochs <= KILLS  # a life too short to remember raises none
    for group, before in islands.items():
        now = job.island(group)
        assert (now["pid"], now["incarnation"]) == (before["pid"], before["incarnation"])
    said = service_logbook(job.run_dir, "synchroniser").path.read_text()
    assert [int(count) for count in re.findall(r", (\d+) of them from a snapshot", said)][-1] > 0


def test_a_synchroniser_that_finds_its_last_records_damaged_goes_on_from_those_before(job: Job, home: Any) -> None:
    """A bit of the tape's last record is flipped, and behind the journal's last entry lies what begins like another one."""
    counted = job.status()["statistics"]["synchroniser"]
    deaths = len(job.restarts())
    pid = pid_of("SynchroniserActor", home)
    assert pid is not None
    stop(pid)
    tape = job.run_dir / "tape.jsonl"
    good = tape.read_bytes()
    good = good[: good.rindex(b"\n") + 1]
    damaged = bytearray(good)
    damaged[-12] ^= 0x01
    tape.write_bytes(bytes(damaged))
    segment = max((job.run_dir / "journal").glob("fragment-0000-*.journal"))
    entries = segment.read_bytes()
    torn = entries[: sizes_of(entries).total // 3]  # of one entry, however many the segment has
    segment.write_bytes(entries + torn)
    os.kill(pid, signal.SIGKILL)

    job.wait_until(lambda: len(job.restarts()) > deaths, "the next epoch")
    back = job.restarts()[deaths]
    assert "the last line is damaged" in back.damage
    assert f"{segment.name}: {len(torn)} bytes from {len(entries)} on were cut off" in back.damage
    kept = good[: good[:-1].rindex(b"\n") + 1]
    assert tape.read_bytes().startswith(kept)
    job.wait_until(lambda: contributors_since(job, back.at) == set(GROUPS), "everyone again")
    assert job.status_once_back()["statistics"]["synchroniser"] == {kind: count + 1 for kind, count in counted.items()}


def test_a_merge_that_islands_hold_and_the_journal_lost_is_replaced_by_the_one_before(job: Job, home: Any) -> None:
    job.wait_until(lambda: min(f["version"] for f in job.status()["view"]["fragments"]) >= 2, "two versions of each")
    deaths = len(job.restarts())
    rolled_back = job.last["goodput"]["discarded_tokens"].get(ROLLED_BACK, 0)
    pid = pid_of("SynchroniserActor", home)
    assert pid is not None
    stop(pid)
    versions = [
        r.event
        for r in job.records()
        if isinstance(r.event, events.MergeCompleted | FragmentRestored) and r.event.fragment == 0
    ]
    segments = sorted((job.run_dir / "journal").glob("fragment-0000-*.journal"))
    newest = Journal(job.run_dir / "journal").newest(FragmentId(0))
    content = bytearray(segments[-1].read_bytes())
    content[-20] ^= 0x01
    segments[-1].write_bytes(bytes(content))
    os.kill(pid, signal.SIGKILL)

    job.wait_until(lambda: len(job.restarts()) > deaths, "the next epoch")
    back = job.restarts()[deaths]
    assert f"{segments[-1].name}: " in back.damage
    if newest == versions[-1].version:  # else the damaged one was being made, and is made again

        def restored() -> list[FragmentRestored]:
            return [r.event for r in job.records() if isinstance(r.event, FragmentRestored) and r.event.at > back.at]

        (event,) = job.wait_until(restored, "the version before")
        assert (event.fragment, event.version, event.checkpoint) == (0, versions[-1].version + 1, FromJournal())
        assert event.digest == versions[-2].digest
    job.wait_until(lambda: contributors_since(job, back.at) == set(GROUPS), "everyone again")
    job.wait_until(
        lambda: job.status_once_back()["view"]["fragments"][0]["version"] > versions[-1].version + 2, "more merges"
    )
    tokens = job.last["goodput"]["tokens"]
    assert tokens["trained"] == pytest.approx(tokens["merged"] + tokens["discarded"] + tokens["in_flight"])
    if newest == versions[-1].version:
        assert job.last["goodput"]["discarded_tokens"][ROLLED_BACK] > rolled_back


def stepping_share(job: Job, island: str, since: float, until: float) -> float:
    """The part of its time that an island spends inside steps, by its own clock: what a machine with other work to do makes
    longer is the step, and what waiting for a synchroniser would make longer is the rest."""
    reports = [r for r in job.events(Progress, island) if since <= r.at <= until]
    return (reports[-1].stepping_seconds - reports[0].stepping_seconds) / (reports[-1].at - reports[0].at)


def test_islands_train_on_while_their_synchroniser_is_silent_dead_and_not_yet_back(
    job: Job, home: Any, train_on: Callable[..., None]
) -> None:
    islands, deaths = [job.island(group)["pid"] for group in GROUPS], len(job.restarts())
    before = job.status()["at"]
    time.sleep(SILENT_S)
    silent_from = job.status()["at"]
    pid = pid_of("SynchroniserActor", home)
    assert pid is not None
    stop(pid)
    train_on(*islands)
    time.sleep(SILENT_S)
    os.kill(pid, signal.SIGKILL)
    following = job.wait_until(lambda: min(pids_of("SynchroniserActor", home) - {pid}, default=None), "the next life")
    os.kill(following, signal.SIGSTOP)
    try:
        train_on(*islands)
    finally:
        os.kill(following, signal.SIGCONT)
    job.wait_until(lambda: len(job.restarts()) > deaths, "the next epoch")
    back = job.restarts()[deaths].at
    job.wait_until(lambda: contributors_since(job, back) == set(GROUPS), "everyone again")
    job.status_once_back()
    assert [job.island(group)["pid"] for group in GROUPS] == islands
    if SILENT_S:
        job.wait_until(lambda: job.answers() and job.status()["at"] > back + 2.0, "two seconds of peace")
        for group in GROUPS:
            usual = stepping_share(job, group, before, silent_from)
            ratio = stepping_share(job, group, silent_from - 1.0, back + 2.0) / usual
            assert ratio >= SHARE_MIN, f"{group} kept {ratio:.3f} of its rate"


def test_a_synchroniser_that_was_replaced_steps_aside_and_its_successor_goes_on(job: Job, home: Any) -> None:
    """One island hears of another epoch, as it would behind a partition: the first one's process lives, and may not act."""
    import ray  # not before the cluster's environment is set

    asia, epoch, deaths = job.island("asia"), job.last["view"]["epoch"], len(job.restarts())
    island = cluster.actor_named(island_name(job.id, "asia", asia["incarnation"]))
    ray.get(island.call(IslandInterface.reports, Epoch(epoch + 1), 0, 0, 0.0), timeout=PATIENCE_S)
    tape = job.run_dir / "tape.jsonl"
    job.wait_until(lambda: unlocked(tape), "the tape let go")
    written = tape.read_bytes()
    time.sleep(1.0)
    assert tape.read_bytes() == written
    assert not (job.run_dir / "crash.txt").exists()
    kill(job, home)
    job.wait_until(lambda: len(job.restarts()) > deaths, "the next epoch")
    job.wait_until(lambda: contributors_since(job, job.restarts()[-1].at) == set(GROUPS), "everyone again")


def unlocked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
