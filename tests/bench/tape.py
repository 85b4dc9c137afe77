"""The growth of a job's tape: 64 islands at one step a second, through the writer and the snapshots of a live job.

The events are those of a simulated job with the default schedule. What is counted are the sealed segments, per hour of the
time that they cover, and the plain segment, which never exceeds a few MiB. The last figure is what a restart reads.
"""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from time import perf_counter, sleep

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.host.retry import SnapshotWriter
from orchestrator.simulation.plan import WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.system.run_folder import SEALED, SNAPSHOT, TAPE
from orchestrator.tape.driver import Driver, Pending
from orchestrator.tape.schema import Header, continuation_at
from orchestrator.tape.storage import TapeWriter, read_snapshot, read_tape
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options

ISLANDS, STEP_S, MINUTES, SMALL_MINUTES = 64, 1.0, 10, 3
REPORT_EVERY_S = 1.0
RECORDS = 20_000
"""``durability.snapshot_every_records``, unless a job says otherwise."""
MB_PER_HOUR_GOAL = 15.0


def main(asked: Options) -> list[Goal]:
    minutes = SMALL_MINUTES if asked.small else MINUTES
    policy = sample_policy(ISLANDS, steps=int(minutes * 60 / STEP_S))
    plan = WorldPlan((STEP_S,) * ISLANDS, report_every_s=REPORT_EVERY_S)
    events = [record.event for record in World(policy, plan, seed=0).run().tape.records]
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        run_dir = Path(folder)
        writer = TapeWriter(run_dir / TAPE, Header("a job", policy))
        folds = (Pending(), Goodput(policy), Statistics(policy))
        driver = Driver(Synchroniser(policy), folds, writer)
        snapshots = SnapshotWriter(run_dir / SNAPSHOT, writer, 0, RECORDS)
        byte_count = 0
        for number, event in zip(count(1), events):
            before = writer.mark.size
            driver.step(event)
            byte_count += max(0, writer.mark.size - before)
            snapshots.consider(driver, event.at)
            if number % 1000 == 0:
                sleep(0.02)  # a live job takes minutes for so many, in which the sealing thread works
        snapshots.let_go()
        writer.let_go()
        with (run_dir / TAPE).open("rb") as plain:
            newest = continuation_at(plain.read(256))
        assert newest is not None, "the tape is too short to be sealed"
        sealed = sum(path.stat().st_size for path in (run_dir / SEALED).iterdir() if int(path.stem) < newest.segment)
        hours, hours_in_all = events[newest.after.count - 1].at / 3600, events[-1].at / 3600
        assert read_tape(run_dir / TAPE).count == len(events)
        snapshot = read_snapshot(run_dir / SNAPSHOT)
        began = perf_counter()
        TapeWriter.reopen(run_dir / TAPE, mark=snapshot.mark if snapshot else None)[0].let_go()
        seconds = perf_counter() - began
        plain_mb = (run_dir / TAPE).stat().st_size / 1e6
    rate = sealed / 1e6 / hours
    goal = at_most("tape MB an hour", rate, MB_PER_HOUR_GOAL)
    print(
        f"tape       {byte_count / 1e6 / hours_in_all:12.1f} MB/h of lines   ({ISLANDS} islands, {STEP_S:g} s a step)"
    )
    print(f"tape       {rate:12.1f} MB/h sealed, in {newest.segment - 1} segments of {hours * 60:.1f} min   ({goal})")
    print(f"tape       {plain_mb:12.1f} MB plain; a restart reads it in {seconds:.2f} s, and no sealed segment")
    return [goal]
