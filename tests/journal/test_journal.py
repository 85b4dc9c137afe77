"""Merges on disk: kept whole or not at all, whatever the disk does, and never more of them than are needed."""

from __future__ import annotations

import json
import random
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.fragment_round import FragmentRound
from orchestrator.core.vocabulary import Contribution, FragmentId, RoundPhase, Version
from orchestrator.errors import DataError
from orchestrator.parameters import tensors, wire_format
from orchestrator.parameters.journal import entry
from orchestrator.parameters.journal.reconciliation import lost_merges, undecided_merges, unrecorded_merges
from orchestrator.parameters.journal.storage import ENTRIES_PER_SEGMENT, Journal
from orchestrator.parameters.roles import Role
from tests.harness.disks import Died, FaultyDisk


def made(fragment: int, version: int) -> tuple[entry.Facts, bytes, bytes]:
    generator = np.random.default_rng([fragment, version])
    parameters = {"w": generator.standard_normal((5, 3), np.float32), "b": generator.standard_normal(3, np.float32)}
    momentum = {name: array.reshape(-1) * 2 for name, array in parameters.items()}
    digest = tensors.digest(parameters)
    facts = entry.Facts(fragment, version, version * 4, 1, digest, "before", (("a", 0.25), ("b", 0.75)), 0.01)
    return facts, wire_format.encode(parameters), wire_format.encode(momentum)


def filled(folder: Path, last: int, fragments: int = 1, **options: object) -> Journal:
    journal = Journal(folder, **options)
    for version in range(last + 1):
        for fragment in range(fragments):
            journal.append(*made(fragment, version))
    return journal


def assert_holds(journal: Journal, fragment: int, version: int) -> None:
    facts, state = journal.read(fragment, version)
    expected, parameters, momentum = made(fragment, version)
    assert facts == expected
    assert (state.version, state.digest) == (version, expected.digest)
    for kept, sent in ((state.parameters, parameters), (state.momentum, momentum)):
        wanted = wire_format.decode(sent)
        assert list(kept) == list(wanted)
        assert all(np.array_equal(kept[name], wanted[name]) for name in wanted)


def test_what_was_appended_is_read_back_bit_for_bit_also_after_opening_again(tmp_path: Path) -> None:
    filled(tmp_path, 2, fragments=3, versions_kept=3)
    again = Journal(tmp_path, versions_kept=3)
    assert again.damage == []
    for fragment in range(3):
        assert again.versions(fragment) == (0, 1, 2)
        for version in range(3):
            assert_holds(again, fragment, version)


def test_disk_use_is_bounded_and_the_versions_asked_for_are_there(tmp_path: Path) -> None:
    one = sum(map(len, entry.encode(*made(0, 0))))
    journal = Journal(tmp_path, versions_kept=3)
    for version in range(60):
        journal.append(*made(0, version))
        kept = [v for v in range(version - 2, version + 1) if v >= 0]
        assert set(kept) <= set(journal.versions(0))
        used = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert used <= (2 * ENTRIES_PER_SEGMENT + 3) * one * 1.05
    assert_holds(Journal(tmp_path), 0, 59)


@pytest.mark.parametrize("call", range(1, 9))
@pytest.mark.parametrize("fault", ["append before", "append torn", "append after", "sync before", "sync after"])
def test_whenever_the_process_dies_the_last_version_is_the_old_or_the_new_one_whole(
    tmp_path: Path, fault: str, call: int
) -> None:
    kind, what = fault.split()
    disk = FaultyDisk(**{kind: {call: what}})
    with pytest.raises(Died):
        filled(tmp_path, 20, disk=disk)
    again = Journal(tmp_path, disk=disk)
    new = call - 1
    wanted = new - 1 if what in ("torn",) or fault == "append before" else new
    assert again.newest(0) == (wanted if wanted >= 0 else None)
    assert bool(again.damage) == (what == "torn")
    for version in range(max(0, wanted + 1), 12):
        again.append(*made(0, version))
    assert_holds(Journal(tmp_path, disk=disk), 0, 11)


@pytest.mark.parametrize("call", range(1, 9))
def test_after_a_loss_of_power_every_merge_that_was_told_is_there(tmp_path: Path, call: int) -> None:
    disk = FaultyDisk(sync={call: "before"})
    with pytest.raises(Died):
        filled(tmp_path, 20, disk=disk)
    disk.lose_power()
    told = call - 2
    assert Journal(tmp_path, disk=disk).newest(0) == (told if told >= 0 else None)


def test_what_a_dead_writer_had_not_synced_survives_a_loss_of_power_once_it_is_read_again(tmp_path: Path) -> None:
    disk = FaultyDisk(sync={3: "before"})
    with pytest.raises(Died):
        filled(tmp_path, 20, disk=disk)
    journal = Journal(tmp_path, disk=disk)
    newest = journal.newest(0)
    journal.settle()  # and now islands are told of it
    disk.lose_power()
    assert Journal(tmp_path, disk=disk).newest(0) == newest == 2


@pytest.mark.parametrize("failing", range(2, 8))
def test_async_what_a_failed_sync_left_behind_is_written_anew(tmp_path: Path, failing: int) -> None:
    """Two fragments: the one that is written goes into a new segment anyway, the other's pages count as clean."""
    disk = FaultyDisk(sync={failing: "error"})
    journal = Journal(tmp_path, disk=disk, merges_max=3)
    for version in range(8):
        for fragment in range(2):
            for _ in range(2):
                with suppress(OSError):
                    journal.append(*made(fragment, version))
                    break
    disk.lose_power()
    again = Journal(tmp_path, disk=disk)
    assert again.newest(0) + again.newest(1) >= 7 + 7 - 3
    assert_holds(again, 0, again.newest(0))
    assert_holds(again, 1, again.newest(1))


def test_async_a_loss_of_power_takes_at_most_the_merges_allowed(tmp_path: Path) -> None:
    disk = FaultyDisk()
    filled(tmp_path, 20, disk=disk, merges_max=4)
    assert disk.calls["sync"] < 20
    disk.lose_power()
    assert 20 - 4 <= Journal(tmp_path, disk=disk).newest(0) <= 20


@pytest.mark.parametrize("fault", [("append", "full"), ("sync", "error")])
@pytest.mark.parametrize("call", [1, 3, 6])
def test_an_append_that_failed_counts_for_nothing_and_may_be_asked_again(
    tmp_path: Path, fault: tuple[str, str], call: int
) -> None:
    kind, what = fault
    disk = FaultyDisk(**{kind: {call: what}})
    journal = Journal(tmp_path, versions_kept=2, disk=disk)
    for version in range(call - 1):
        journal.append(*made(0, version))
    with pytest.raises(OSError, match=r"space left|output error"):
        journal.append(*made(0, call - 1))
    assert journal.newest(0) == (call - 2 if call > 1 else None)
    journal.append(*made(0, call - 1))
    journal.append(*made(0, call))
    again = Journal(tmp_path, disk=disk)
    assert again.damage == []
    assert_holds(again, 0, call)
    assert_holds(again, 0, call - 1)


def test_a_changed_byte_anywhere_in_the_last_entry_is_found_and_the_one_before_is_used(tmp_path: Path) -> None:
    filled(tmp_path, 1, versions_kept=2)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    last = len(whole) - sum(map(len, entry.encode(*made(0, 1))))
    chance = random.Random(1)
    for where in {last, last + 9, len(whole) - 1, *(chance.randrange(last, len(whole)) for _ in range(60))}:
        path.write_bytes(whole[:where] + bytes([whole[where] ^ (1 << chance.randrange(8))]) + whole[where + 1 :])
        again = Journal(tmp_path)
        assert again.newest(0) == 0, where
        assert len(again.damage) == 1
        assert_holds(again, 0, 0)


def test_an_entry_holds_the_roles_of_its_tensors_and_one_of_an_older_build_has_none(tmp_path: Path) -> None:
    facts, parameters, momentum = made(0, 1)
    journal = Journal(tmp_path)
    rows = (("experts", False, 2, True), ("table", True, 0, False))
    journal.append(replace(facts, roles=rows), parameters, momentum)
    read, state = Journal(tmp_path).read(FragmentId(0), Version(1))
    assert read.roles == rows
    assert state.roles == {"experts": Role(stacked_axes=2), "table": Role(embedding=True, decays=False)}
    header = json.dumps({name: getattr(facts, name) for name in facts.__slots__ if name != "roles"}).encode()
    prefix = struct.pack("<8sIQQ", b"atollj1\n", len(header), len(parameters), len(momentum))
    checksum = struct.pack("<I", zlib.crc32(header, zlib.crc32(prefix)))
    assert entry.decode(prefix + checksum + header + parameters + momentum)[0] == facts


def test_a_version_that_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lacks version 7 of fragment 0; it has 0, 1"):
        filled(tmp_path, 1, versions_kept=2).read(0, 7)


# ── tape and journal ──────────────────────────────────────────────────────────────────────────────────────────────


def round_at(version: int, phase: RoundPhase) -> FragmentRound:
    offered = {"a": Contribution("a.1.0.1", "a", 1, 0, 1, 4, version, 4, 400, 400)}
    return FragmentRound(0, version, phase=phase, offered=offered)


@pytest.mark.parametrize("phase", list(RoundPhase))
def test_a_journal_at_the_tapes_version_has_nothing_to_tell(phase: RoundPhase) -> None:
    assert unrecorded_merges([round_at(3, phase)], lambda _: 3, over=False) == ()


def test_a_merge_that_only_the_journal_knows_is_told_unless_the_job_is_over() -> None:
    merging = [round_at(3, RoundPhase.MERGING)]
    assert unrecorded_merges(merging, lambda _: 4, over=False) == (0,)
    assert unrecorded_merges(merging, lambda _: 4, over=True) == ()


def test_a_merge_whose_decision_was_cut_off_the_tape_is_dropped_and_the_one_before_stands(tmp_path: Path) -> None:
    filled(tmp_path, 6, fragments=2, versions_kept=2)
    rounds = [round_at(5, RoundPhase.COLLECTING), replace(round_at(6, RoundPhase.COLLECTING), fragment=FragmentId(1))]
    journal = Journal(tmp_path, versions_kept=2)
    assert undecided_merges(rounds, journal.newest) == (0,)
    assert undecided_merges([round_at(5, RoundPhase.MERGING)], journal.newest) == ()
    assert journal.drop_newest(FragmentId(0)).endswith("version 6, whose decision is not on the tape")
    for again in (journal, Journal(tmp_path, versions_kept=2)):
        assert (again.newest(FragmentId(0)), again.newest(FragmentId(1))) == (5, 6)
        assert again.damage == []
        assert_holds(again, 0, 5)


def test_a_merge_that_the_journal_lost_is_one_whose_predecessor_it_has() -> None:
    held = {FragmentId(0): 2, FragmentId(1): 3, FragmentId(2): 1, FragmentId(3): 4}
    rounds = [replace(round_at(3, RoundPhase.COLLECTING), fragment=fragment) for fragment in held]
    assert lost_merges(rounds, held.get) == (0,)


@pytest.mark.parametrize(
    ("phase", "held", "words"),
    [
        (RoundPhase.MERGING, 2, "only up to version 2"),
        (RoundPhase.MERGING, None, "nothing of it"),
        (RoundPhase.MERGING, 5, "never decided on"),
        (RoundPhase.COLLECTING, 4, "never decided on"),
    ],
)
def test_a_journal_that_cannot_be_of_this_job_is_refused(phase: RoundPhase, held: int | None, words: str) -> None:
    with pytest.raises(DataError, match=words):
        unrecorded_merges([round_at(3, phase)], lambda _: held, over=False)
