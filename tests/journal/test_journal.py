"""Merges on disk: kept whole or not at all, whatever the disk does, and never more of them than are needed."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from orchestrator.core import events
from orchestrator.core.effects import MergeFragment
from orchestrator.core.fragment_round import FragmentRound
from orchestrator.core.vocabulary import (
    CloseReason,
    Contribution,
    Epoch,
    FragmentId,
    IslandId,
    PayloadId,
    RoundPhase,
    Version,
    WeightedPayload,
)
from orchestrator.errors import DataError
from orchestrator.parameters import journal as storage
from orchestrator.parameters import tensors
from orchestrator.parameters.codec.registry import CODEC_NAMES, CodecName
from orchestrator.parameters.codec.registry import codec as coder
from orchestrator.parameters.journal import (
    ENTRIES_PER_SEGMENT,
    Journal,
    lost_merges,
    undecided_merges,
    unrecorded_merges,
)
from orchestrator.parameters.journaled_store import JournaledStore, recovered
from orchestrator.parameters.outer_optimizer import Adam, Momentum, Nesterov, Sgd
from orchestrator.parameters.outer_state import Averaging, FragmentState, OuterState, OuterStep
from orchestrator.parameters.pieces import Role
from orchestrator.parameters.wire_format import encoded
from orchestrator.tape.codec import decode_tagged, to_json
from tests.swarm.disk import Died, FaultyDisk


def made(fragment: int, version: int) -> tuple[storage.Facts, FragmentState]:
    generator = np.random.default_rng([fragment, version])
    parameters = {"w": generator.standard_normal((5, 3), np.float32), "b": generator.standard_normal(3, np.float32)}
    momentum = {name: array.reshape(-1) * 2 for name, array in parameters.items()}
    digest = tensors.digest(parameters)
    facts = storage.Facts(fragment, version, version * 4, 1, digest, "before", (("a", 0.25), ("b", 0.75)), 0.01)
    residue = {name: array * np.float32(0.01) for name, array in parameters.items()}
    return facts, FragmentState(Version(version), parameters, momentum, digest, {}, residue)


def filled(folder: Path, last: int, fragments: int = 1, **options: object) -> Journal:
    journal = Journal(folder, **options)
    for version in range(last + 1):
        for fragment in range(fragments):
            journal.append(*made(fragment, version))
    return journal


def assert_holds(journal: Journal, fragment: int, version: int) -> None:
    ((facts, state),) = journal.entries(fragment, version)
    expected, written = made(fragment, version)
    assert facts == expected == journal.facts(fragment, version)
    assert isinstance(state, FragmentState)
    assert (state.version, state.digest) == (version, expected.digest)
    for kept, wanted in zip(state.arrays(), written.arrays(), strict=True):
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
    one = sum(map(len, storage.encode(*made(0, 0))))
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
    last = len(whole) - sum(map(len, storage.encode(*made(0, 1))))
    chance = random.Random(1)
    for where in {last, last + 9, len(whole) - 1, *(chance.randrange(last, len(whole)) for _ in range(60))}:
        path.write_bytes(whole[:where] + bytes([whole[where] ^ (1 << chance.randrange(8))]) + whole[where + 1 :])
        again = Journal(tmp_path)
        assert again.newest(0) == 0, where
        assert len(again.damage) == 1
        assert_holds(again, 0, 0)


def test_an_entry_holds_the_roles_of_its_tensors_and_one_of_an_older_build_has_none(tmp_path: Path) -> None:
    facts, written = made(0, 1)
    journal = Journal(tmp_path)
    rows = (("experts", False, 2, True), ("table", True, 0, False))
    journal.append(replace(facts, roles=rows), written)
    ((read, state),) = Journal(tmp_path).entries(FragmentId(0), Version(1))
    assert read.roles == rows
    assert state.roles == {"experts": Role(stacked_axes=2), "table": Role(embedding=True, decays=False)}


def test_a_version_that_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lacks version 7 of fragment 0; it has 0, 1"):
        filled(tmp_path, 1, versions_kept=2).entries(0, 7)


# ── entries of inputs, and of their average ───────────────────────────────────────────────────────────────────────

CODED = OuterStep(Averaging.RADIAL, Nesterov(lr=0.7, decay=0.9), "int4")
EXACT = replace(CODED, update_codec="float32")
ADAM = replace(CODED, optimizer=Adam(0.01, 0.9, 0.999, 1e-8), clip_norm=8.0)
TWO_BITS = replace(CODED, optimizer=Momentum(0.5, 0.3), update_codec="int2", clip_norm=1e9)
PIECES = {"w": (40, 7), "b": (9,)}
VALUES = 40 * 7 + 9
FEW, MANY = 2, 11
"""So many islands send less than four bytes a parameter with four bits; and so many send more."""


def coded_store(folder: Path, step: OuterStep = CODED) -> JournaledStore:
    generator = np.random.default_rng(0)
    initial = {name: generator.standard_normal(shape, np.float32) for name, shape in PIECES.items()}
    journal = Journal(folder, versions_kept=2)
    if journal.fragments:
        outer, _ = recovered(journal, [FragmentId(0)], step)
        return JournaledStore(outer, journal, lambda _, work: work())
    store = JournaledStore(OuterState(initial, (tuple(PIECES),), step), journal, lambda _, work: work())
    store.begin(FragmentId(0), Epoch(1))
    return store


def merged(
    store: JournaledStore, version: int, islands: int = FEW, codec: CodecName = "int4", lr_ratio: float = 1.0
) -> str:
    generator, base = np.random.default_rng(version), Version(version - 1)
    weights = generator.dirichlet(np.ones(islands)).tolist()
    own = [{name: generator.standard_normal(shape, np.float32) for name, shape in PIECES.items()} for _ in weights]
    inputs = [(encoded(arrays, codec, base), weight) for arrays, weight in zip(own, weights, strict=True)]
    items = tuple(WeightedPayload(PayloadId(f"{n}"), IslandId(f"{n}"), weight) for n, weight in enumerate(weights))
    order = MergeFragment(Epoch(1), FragmentId(0), Version(version), 4, items, CloseReason.EVERYONE_IN, "", lr_ratio)
    return store.merge(order, inputs).facts.digest


def merged_often(store: JournaledStore, versions: Iterable[int], islands: int) -> list[str]:
    return [merged(store, version, islands) for version in versions]


def last_content(folder: Path, version: int) -> storage.Content:
    return Journal(folder, versions_kept=2).entries(FragmentId(0), Version(version))[-1][1]


@pytest.mark.parametrize("reopened_every", [1, 3, 7, 100])
@pytest.mark.parametrize(
    ("step", "codec", "islands"),
    [
        (CODED, "int4", [FEW]),
        (CODED, "int4", [MANY]),
        (CODED, "int4", [FEW, MANY, MANY]),
        (EXACT, "float32", [FEW]),
        (ADAM, "int4", [FEW, MANY]),
        (TWO_BITS, "int2", [FEW, MANY]),
    ],
    ids=["inputs", "averages", "both", "float32", "adam", "two bits"],
)
def test_merges_are_taken_again_from_the_journal_to_the_same_bits(
    tmp_path: Path, step: OuterStep, codec: CodecName, islands: list[int], reopened_every: int
) -> None:
    """Whenever the process is made again: Θ, μ and what updates lost are those of a run that never ended."""
    undisturbed = coded_store(tmp_path / "undisturbed", step)
    store = coded_store(tmp_path / "reopened", step)
    for version in range(1, 40):
        count = islands[version % len(islands)]
        assert merged(store, version, count, codec) == merged(undisturbed, version, count, codec)
        if version % reopened_every == 0:
            store = coded_store(tmp_path / "reopened", step)
        ours, wanted = (one.outer.state(FragmentId(0)) for one in (store, undisturbed))
        for mine, its in zip(ours.arrays(), wanted.arrays(), strict=True):
            assert mine.keys() == its.keys()
            assert all(np.array_equal(mine[name], its[name]) for name in its)


@pytest.mark.parametrize("islands", [FEW, MANY])
def test_merges_are_taken_again_at_the_outer_rate_that_they_were_taken_at(tmp_path: Path, islands: int) -> None:
    undisturbed, store = coded_store(tmp_path / "undisturbed"), coded_store(tmp_path / "reopened")
    full = coded_store(tmp_path / "full")
    for version in range(1, 9):
        ratio = 1 - version / 10
        digest = merged(undisturbed, version, islands, lr_ratio=ratio)
        assert merged(store, version, islands, lr_ratio=ratio) == digest != merged(full, version, islands)
        store = coded_store(tmp_path / "reopened")
        assert store.outer.state(FragmentId(0)).digest == digest


def test_the_norm_of_an_outer_gradient_before_it_is_clipped_is_in_its_entry_and_then_on_the_tape(
    tmp_path: Path,
) -> None:
    store, unlimited = coded_store(tmp_path / "limited", ADAM), coded_store(tmp_path / "unlimited")
    for version in range(1, 4):
        merged(store, version)
        merged(unlimited, version)
    journals = Journal(tmp_path / "limited", versions_kept=2), Journal(tmp_path / "unlimited", versions_kept=2)
    limited, free = (journal.facts(FragmentId(0), Version(3)) for journal in journals)
    assert ADAM.clip_norm < limited.gradient_norm < 3 * np.sqrt(VALUES)
    assert free.gradient_norm is None
    for facts in (limited, free):
        event = events.MergeCompleted(1.0, FragmentId(0), Version(3), "d", 0.1, gradient_norm=facts.gradient_norm)
        written = json.loads(to_json(event))
        assert ("gradient_norm" in written) == (facts is limited)  # without a limit tapes are as they were
        assert decode_tagged(written) == event


@pytest.mark.parametrize("islands", [FEW, MANY])
def test_how_far_routers_are_apart_is_in_the_entry_whatever_the_entry_holds(tmp_path: Path, islands: int) -> None:
    shapes = {"layers.feedforward.router": (2, 6, 4), "layers.experts.gate": (2, 4, 6, 6)}
    generator = np.random.default_rng(3)
    initial = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    journal = Journal(tmp_path, versions_kept=2)
    store = JournaledStore(OuterState(initial, (tuple(shapes),), CODED), journal, lambda _, work: work())
    store.begin(FragmentId(0), Epoch(1))
    for version in range(1, 3):
        own = [
            {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
            for _ in range(islands)
        ]
        inputs = [(encoded(arrays, "float32", Version(version - 1)), 1 / islands) for arrays in own]
        items = tuple(
            WeightedPayload(PayloadId(f"{n}"), IslandId(f"{n}"), weight) for n, (_, weight) in enumerate(inputs)
        )
        order = MergeFragment(Epoch(1), FragmentId(0), Version(version), 4, items, CloseReason.EVERYONE_IN, "")
        facts = store.merge(order, inputs).facts
        routers = [arrays["layers.feedforward.router"] for arrays in own]
        pairs = [np.sum((one - other) ** 2) for n, one in enumerate(routers) for other in routers[:n]]
        assert facts.router_distance == pytest.approx(np.sqrt(np.mean(pairs)), rel=1e-4)
        assert facts.router_travel == pytest.approx(np.sqrt(np.mean([np.sum(r**2) for r in routers])), rel=1e-4)
        assert journal.facts(FragmentId(0), Version(version)) == facts
    assert storage.set_back(facts, Version(2), Epoch(2)).router_distance is None, "nothing was merged"


def test_an_entry_from_before_the_outer_rate_changed_was_at_the_full_rate() -> None:
    facts, state = made(0, 3)
    prefix, _, header, *_ = storage.encode(facts, state)
    older = json.loads(bytes(header))
    del older["outer_lr_ratio"], older["gradient_norm"], older["router_distance"], older["router_travel"]
    text = json.dumps(older).encode()
    start = bytes(prefix[:8]) + struct.pack("<I", len(text)) + bytes(prefix[12:])
    assert storage.facts_of(start + struct.pack("<I", crc32c(text, crc32c(start))) + text).outer_lr_ratio == 1.0


def test_inputs_take_a_fraction_of_the_bytes_of_states_and_what_they_rest_on_is_kept(tmp_path: Path) -> None:
    store = coded_store(tmp_path)
    sizes = []
    for version in range(1, 60):
        before = sum(path.stat().st_size for path in tmp_path.iterdir())
        merged(store, version)
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()) - before)
        assert {version - 1, version} <= set(Journal(tmp_path, versions_kept=2).versions(FragmentId(0)))
    grown = [size for size in sizes if size > 0]
    assert min(grown) < 0.4 * max(grown)
    first, *rest = Journal(tmp_path).entries(FragmentId(0), Version(59))
    assert isinstance(first[1], FragmentState)
    assert not any(isinstance(content, FragmentState) for _, content in rest)


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("islands", [1, 2, 3, 7, 8, 9, 40])
def test_an_entry_between_states_is_at_most_four_bytes_a_parameter_however_many_islands_there_are(
    tmp_path: Path, codec: CodecName, islands: int
) -> None:
    store = coded_store(tmp_path)
    merged(store, 1, islands, codec)
    merged(store, 2, islands, codec)
    content = last_content(tmp_path, 2)
    sent = islands * sum(coder(codec).data_bytes(math.prod(shape)) for shape in PIECES.values())
    if sent <= 4 * VALUES:
        assert isinstance(content, tuple)
        assert sum(each.value_bytes for each in content) == sent
    else:
        assert isinstance(content, storage.OuterGradient)
        assert content.average.value_bytes == 4 * VALUES


def test_what_is_no_more_bytes_than_an_average_is_a_state(tmp_path: Path) -> None:
    """Plain descent without loss has nothing but Θ."""
    store = coded_store(tmp_path, OuterStep(Averaging.MEAN, Sgd(lr=1.0)))
    for version in range(1, 4):
        merged(store, version, MANY)
        assert isinstance(last_content(tmp_path, version), FragmentState)


@pytest.mark.parametrize("fault", ["append before", "append torn", "append after", "sync before", "sync after"])
@pytest.mark.parametrize("call", [2, 5, 9])
def test_a_death_while_an_average_is_written_costs_at_most_that_merge(tmp_path: Path, fault: str, call: int) -> None:
    kind, what = fault.split()
    disk = FaultyDisk(**{kind: {call: what}})
    journal = Journal(tmp_path, versions_kept=2, disk=disk)
    outer = coded_store(tmp_path / "other").outer
    store = JournaledStore(outer, journal, lambda _, work: work())
    digests = [store.begin(FragmentId(0), Epoch(1)).facts.digest]
    undisturbed = coded_store(tmp_path / "undisturbed")
    digests += merged_often(undisturbed, range(1, 12), MANY)
    with pytest.raises(Died):
        merged_often(store, range(1, 12), MANY)
    again = Journal(tmp_path, versions_kept=2, disk=disk)
    survived = call - 2 if fault in ("append before", "append torn") else call - 1
    assert again.newest(FragmentId(0)) == survived
    restored, _ = recovered(again, [FragmentId(0)], CODED)
    assert restored.state(FragmentId(0)).digest == digests[survived]
    store = JournaledStore(restored, again, lambda _, work: work())
    assert merged_often(store, range(survived + 1, 12), MANY) == digests[survived + 1 :]


def test_a_changed_byte_in_an_average_is_seen_and_the_version_before_is_used(tmp_path: Path) -> None:
    store = coded_store(tmp_path)
    for version in range(1, 3):
        merged(store, version, MANY)
    (path,) = tmp_path.iterdir()
    whole = bytearray(path.read_bytes())
    whole[-100] ^= 4
    path.write_bytes(whole)
    again = Journal(tmp_path, versions_kept=2)
    assert again.newest(FragmentId(0)) == 1
    assert len(again.damage) == 1


def test_an_entry_of_a_kind_that_only_a_later_build_knows_is_refused() -> None:
    prefix, _, header, *payloads = map(bytes, storage.encode(*made(0, 1)))
    header = header.replace(b'"body":"state"', b'"body":"novel"')
    checksum = crc32c(header, crc32c(prefix)).to_bytes(4, "little")
    with pytest.raises(DataError, match="'novel', which this build does not know"):
        storage.decode(b"".join([prefix, checksum, header, *payloads]))


def test_what_rests_on_a_damaged_entry_is_gone_with_it(tmp_path: Path) -> None:
    store = coded_store(tmp_path)
    for version in range(1, 10):
        merged(store, version)
    segments = sorted(tmp_path.iterdir())
    content = bytearray(segments[1].read_bytes())
    content[len(content) // 2] ^= 1
    segments[1].write_bytes(content)
    journal = Journal(tmp_path, versions_kept=2)
    newest = journal.newest(FragmentId(0))
    assert newest is not None
    assert ENTRIES_PER_SEGMENT <= newest < 2 * ENTRIES_PER_SEGMENT
    assert any("an earlier entry is missing" in detail for detail in journal.damage)
    assert Journal(tmp_path, versions_kept=2).damage == []


def test_a_merge_that_gives_something_else_when_it_is_taken_again_is_refused(tmp_path: Path) -> None:
    store = coded_store(tmp_path)
    merged(store, 1)
    other = replace(CODED, optimizer=Nesterov(lr=0.6, decay=0.9))
    with pytest.raises(DataError, match="repeated from the journal it gives"):
        recovered(Journal(tmp_path), [FragmentId(0)], other)


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
        (RoundPhase.MERGING, 2, "only goes up to version 2"),
        (RoundPhase.MERGING, None, "nothing of it"),
        (RoundPhase.MERGING, 5, "never decided on"),
        (RoundPhase.COLLECTING, 4, "never decided on"),
    ],
)
def test_a_journal_that_cannot_be_of_this_job_is_refused(phase: RoundPhase, held: int | None, words: str) -> None:
    with pytest.raises(DataError, match=words):
        unrecorded_merges([round_at(3, phase)], lambda _: held, over=False)
