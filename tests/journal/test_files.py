"""What a synchroniser finds in its folder when it starts: nothing, its own past, another job's, or one not to be trusted."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core import commands
from orchestrator.core import events as e
from orchestrator.core.vocabulary import Epoch, FragmentId, JobPhase
from orchestrator.errors import ConfigurationError, DataError, InfrastructureError
from orchestrator.host import job_files
from orchestrator.host.job_files import JobFiles, open_files
from orchestrator.host.retry import Retrier, RetryingSink
from orchestrator.parameters.journal import Journal
from orchestrator.parameters.journaled_store import JournaledStore
from orchestrator.parameters.outer_state import OuterState, OuterStep
from orchestrator.specification.sections import SynchroniserSection
from orchestrator.system import run_folder
from orchestrator.system.disk import Disk
from orchestrator.tape.schema import Record, with_checksum, without_checksum
from tests.harness.shell import Fate, spec
from tests.journal.test_crash_points import run
from tests.swarm.disk import FaultyDisk

RETRY_S = 0.1


def opened(folder: Path, disk: Disk | None = None, **changed: object) -> JobFiles:
    job = spec(**changed)
    return open_files(folder, "job", job, job.policy(), 0.0, disk=disk)


def test_an_empty_folder_begins_a_job(tmp_path: Path) -> None:
    files = opened(tmp_path)
    assert (files.started, files.epoch, files.first_events, files.outer) == (False, 1, (), None)


@pytest.mark.parametrize("event", [e.SynchroniserRestarted(1.0, Epoch(2)), e.OuterStateSeeded(1.0, 10, "0" * 32)])
def test_an_epoch_and_the_beginning_of_theta_are_durable_before_anything_rests_on_them(
    tmp_path: Path, event: e.Event
) -> None:
    files = opened(tmp_path)
    sink = RetryingSink(files.tape, Retrier(RETRY_S), files.journal.settle)
    sink.append(Record(1, e.JobStarted(0.0), ()))
    assert files.tape.synced_count == 0
    sink.append(Record(2, event, ()))
    assert files.tape.synced_count == 2


def test_a_folder_with_a_past_is_never_salvaged_and_one_without_may_be(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert job_files.lacks_a_past(folder), "a lost folder, or a new one: the controller knows which"
    before = run(folder, Fate())
    before.shell.die()
    assert not job_files.lacks_a_past(folder)
    (folder / "tape.jsonl").unlink()
    with pytest.raises(DataError, match="the job has run before"):
        job_files.lacks_a_past(folder)


def test_no_job_continues_from_copies_which_a_salvage_sets_aside(tmp_path: Path) -> None:
    before = run(tmp_path, Fate())
    before.shell.die()
    run_folder.note_copied(tmp_path, 1, "east")
    (tmp_path / "checkpoints" / "000001").mkdir(parents=True)
    tape = (tmp_path / "tape.jsonl").read_bytes()
    assert job_files.lacks_a_past(tmp_path)
    job_files.begin_salvage(tmp_path)
    assert (tmp_path / "earlier" / "1" / "tape.jsonl").read_bytes() == tape
    files = opened(tmp_path)
    assert (files.past, files.outer) == (None, None)
    files.tape.let_go()
    job_files.end_salvage(tmp_path)
    assert not job_files.lacks_a_past(tmp_path)


def test_a_salvage_that_did_not_end_is_made_again_without_what_it_left(tmp_path: Path) -> None:
    job_files.begin_salvage(tmp_path)
    first = run(tmp_path, Fate())  # a new tape with Θ, as far as it came
    first.shell.die()
    assert job_files.lacks_a_past(tmp_path)
    job_files.begin_salvage(tmp_path)
    files = opened(tmp_path)
    assert (files.past, files.outer) == (None, None)
    files.tape.let_go()
    job_files.end_salvage(tmp_path)
    assert not job_files.lacks_a_past(tmp_path)


def test_a_job_that_begins_in_a_later_epoch_says_so_on_its_tape(tmp_path: Path) -> None:
    job = spec()
    begun = open_files(tmp_path, "job", job, job.policy(), 0.0, epoch=Epoch(5))
    assert begun.epoch == 5
    begun.tape.sync()
    begun.tape.let_go()
    assert opened(tmp_path).epoch == 6


def test_a_tape_without_a_whole_first_line_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "tape.jsonl").write_text('{"schema": "atoll-ta')
    assert opened(tmp_path).past is None


def test_a_job_that_ran_is_remembered_with_its_parameters_and_a_new_epoch(tmp_path: Path) -> None:
    before = run(tmp_path, Fate())
    before.shell.die()
    files = opened(tmp_path)
    assert files.started
    assert files.epoch == 2
    assert [type(make(9.0)) for make in files.first_events] == [e.SynchroniserRestarted]
    assert files.outer is not None
    assert files.outer.versions == tuple(state.version for state, _ in before.shell.shard.states().values())
    assert [facts.version for facts in files.merges] == list(files.outer.versions)


def test_while_one_lives_another_is_kept_out(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(InfrastructureError, match="another process"):
        opened(tmp_path)
    first.tape.let_go()
    assert opened(tmp_path).past is not None


def test_another_specification_does_not_go_on_from_this_folder(tmp_path: Path) -> None:
    opened(tmp_path).tape.let_go()
    with pytest.raises(ConfigurationError, match="another specification"):
        opened(tmp_path, interval_steps=12)
    assert opened(tmp_path).past is not None  # and does not hold its tape either


def test_a_job_that_failed_does_not_go_on(tmp_path: Path) -> None:
    opened(tmp_path).tape.close()
    with pytest.raises(ConfigurationError, match="ended by a failure"):
        opened(tmp_path)


def test_a_job_that_ended_is_only_ended_again(tmp_path: Path) -> None:
    outcome = run(tmp_path, Fate())
    outcome.shell.command("c", commands.Cancel())
    outcome.shell.files.tape.close()
    files = opened(tmp_path)
    assert files.core.state.phase is JobPhase.FINISHED
    assert files.first_events == ()
    assert files.outer is not None
    files.journal.clear()
    assert opened(tmp_path).outer is None  # whoever ended it wrote all, and cleaned up


def test_async_merges_that_a_loss_of_power_took_from_islands_that_hold_them_end_the_job_loudly(tmp_path: Path) -> None:
    disk = FaultyDisk()
    outcome = run(tmp_path, Fate(), disk, durability={"kind": "async", "merges_max": 100})
    outcome.shell.die()
    disk.lose_power()
    with pytest.raises(DataError, match=r"merges that islands already hold may be lost.*sync prevents this"):
        opened(tmp_path, disk, durability={"kind": "async", "merges_max": 100})


def test_a_build_that_decides_otherwise_does_not_go_on(tmp_path: Path) -> None:
    run(tmp_path, Fate()).shell.die()
    path = tmp_path / "tape.jsonl"
    changed = (
        without_checksum(line).replace('"reason":"everyone_in"', '"reason":"grace_over"')
        for line in path.read_text().splitlines()
    )
    path.write_text("".join(with_checksum(line) + "\n" for line in changed))
    with pytest.raises(DataError, match="decides differently"):
        opened(tmp_path)


def test_what_a_disk_refuses_is_asked_again_and_seen_meanwhile() -> None:
    retrier, seen, asked = (
        Retrier(retry_s=0.0),
        [],
        iter([OSError(28, "No space left"), OSError(28, "No space left")]),
    )

    def work() -> None:
        seen.append(retrier.trouble)
        for error in asked:
            raise error

    retrier.until_done("the journal cannot be written", work)
    assert seen[0] is None
    assert seen[1] == seen[2] == "the journal cannot be written: [Errno 28] No space left"
    assert retrier.trouble is None


def test_how_long_a_merge_took_to_be_journalled_includes_the_disks_refusals(tmp_path: Path) -> None:
    outer = OuterState({"w": np.zeros(4, np.float32)}, (("w",),), OuterStep.of(SynchroniserSection()))
    journal = Journal(tmp_path, disk=FaultyDisk(append={2: "full", 3: "full"}))
    store = JournaledStore(outer, journal, Retrier(retry_s=RETRY_S).until_done)
    quick, slow = (store.begin(FragmentId(0), Epoch(1)).journal_seconds for _ in range(2))
    assert 0.0 < quick < slow
    assert slow >= 2 * RETRY_S


def test_who_insists_for_nobody_gives_up() -> None:
    retrier = Retrier(retry_s=0.0)
    retrier.close()

    def refuse() -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(InfrastructureError, match="the tape cannot be written"):
        retrier.until_done("the tape cannot be written", refuse)


FOREIGN = [
    "x.journal",
    "fragment-0000-00000001 (copy).journal",
    "fragment--1-2.journal",
    "fragment-0-1.journal",
    "fragment-0000-00000001.journal.swp",
    "fragment-٠٠٠٠-00000001.journal",
    ".nfs0000",
]


def test_foreign_files_beside_the_journal_are_named_and_left_alone(tmp_path: Path) -> None:
    before = run(tmp_path, Fate())
    before.shell.die()
    for name in FOREIGN:
        (tmp_path / "journal" / name).write_bytes(b"not ours")
    files = opened(tmp_path)
    assert files.foreign == tuple(sorted(FOREIGN))
    assert files.outer is not None
    assert files.outer.versions == tuple(state.version for state, _ in before.shell.shard.states().values())
    (restarted,) = (make(9.0) for make in files.first_events)
    assert isinstance(restarted, e.SynchroniserRestarted)
    assert all(f"journal/{name} is not a file of this job's journal" in restarted.damage for name in FOREIGN)
    assert all((tmp_path / "journal" / name).read_bytes() == b"not ours" for name in FOREIGN)


def test_what_is_no_file_beside_the_journal_keeps_no_job_from_going_on(tmp_path: Path) -> None:
    before = run(tmp_path, Fate())
    before.shell.die()
    folder = tmp_path / "journal"
    (folder / "circle").symlink_to("circle")
    (folder / "gone").symlink_to("nowhere")
    (folder / "a folder.journal").mkdir()
    os.mkfifo(folder / "pipe.journal")
    files = opened(tmp_path)
    assert files.foreign == ()
    assert files.outer is not None
    assert files.outer.versions == tuple(state.version for state, _ in before.shell.shard.states().values())
