"""A process of an island reads from a checkpoint only what its own devices hold, no matter which process wrote it."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from learners import plain_arrays
from learners.checkpointing import Cut, Needs, read, restored, write, write_rank
from learners.contract import HostCopy
from learners.island_arrays import ArraysPlan, HeldPieces, IslandArrays
from orchestrator.checkpoints import blocks, writing
from orchestrator.checkpoints.blocks import Window
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import part_digest
from orchestrator.checkpoints.reading import manifest_of
from orchestrator.core.vocabulary import FragmentId, IslandId, Version
from orchestrator.errors import DataError
from orchestrator.parameters.outer_state import FragmentState
from orchestrator.parameters.parts import Bounds, index_of, shape_of
from orchestrator.parameters.tensors import digest
from orchestrator.replica.replica import Position
from orchestrator.system.roots import AllowedRoots
from tests.checkpoints.making import as_earlier_builds_wrote_it, complete, without_blocks
from tests.checkpoints.reads import counted_reads
from tests.learners.conftest import job
from tests.learners.stepped import Sliced

IT = IslandId("it")
POSITION = Position(
    step=8, offered_step=8, steps_total=8, tokens_total=64, versions=(1, 1), step_counts=(1, 1), token_counts=(8, 8)
)
PARAMETERS = 400_000
"""In five matrices of eight columns."""


# ── arrays, whichever process wrote them ──────────────────────────────────────────────────────────────────────────────


def parts_of(shape: tuple[int, ...], chance: random.Random, count: int) -> list[Bounds]:
    """The array cut in two, ever again, along whatever axes."""
    parts: list[Bounds] = [tuple((0, extent) for extent in shape)]
    for _ in range(count):
        part = chance.choice(parts)
        axes = [axis for axis, (start, stop) in enumerate(part) if stop - start > 1]
        if axes:
            axis = chance.choice(axes)
            start, stop = part[axis]
            middle = chance.randrange(start + 1, stop)
            parts.remove(part)
            parts += [(*part[:axis], side, *part[axis + 1 :]) for side in ((start, middle), (middle, stop))]
    return parts


def any_window(shape: tuple[int, ...], chance: random.Random) -> Bounds:
    return tuple((start := chance.randrange(extent + 1), chance.randint(start, extent)) for extent in shape)


TYPES = (np.float32, np.int64, np.bool_, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("store", ["disk", "memory"])
def test_any_window_of_arrays_that_any_processes_wrote_is_what_numpy_would_cut(
    seed: int, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, draw = random.Random(seed), np.random.default_rng(seed)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", chance.choice([16, 64, 1000]))
    monkeypatch.setattr(plain_arrays, "FILE_BYTES_MAX", 2000)
    shapes = [(), (3,), (0, 4), *(tuple(chance.randint(1, 9) for _ in range(axes)) for axes in (1, 2, 2, 3, 4))]
    whole = {
        f"state/{number}": draw.integers(0, 2, shape).astype(chance.choice(TYPES))
        for number, shape in enumerate(shapes)
    }
    url = str(tmp_path) if store == "disk" else f"memory://{tmp_path.name}"
    folder = Folder.within(AllowedRoots.only(url), url)
    written: dict[int, tuple[dict[str, np.ndarray], dict[str, Bounds]]] = {rank: ({}, {}) for rank in range(3)}
    for name, array in whole.items():
        for number, bounds in enumerate(parts_of(array.shape, chance, 2)):
            arrays, parts = written[number]
            arrays[name], parts[name] = array[(*index_of(bounds), ...)], bounds
    files = [
        file
        for rank, (arrays, parts) in written.items()
        for file in plain_arrays.write(folder.sub(IT), f"arrays-{rank}", arrays, parts)
    ]
    part = replace(write(Cut(HostCopy({}), POSITION, 8, 0.0), folder, IT, 1), files=tuple(files))
    assert {name: array.tobytes() for name, array in read(folder, part).items()} == {
        name: array.tobytes() for name, array in whole.items()
    }
    for _ in range(5):
        windows = {name: any_window(array.shape, chance) for name, array in whole.items()}
        got = read(folder, part, {name: Window(bounds, whole[name].shape) for name, bounds in windows.items()})
        for name, bounds in windows.items():
            expected = whole[name][index_of(bounds)]
            assert (got[name].dtype, got[name].shape) == (expected.dtype, expected.shape)
            assert got[name].tobytes() == expected.tobytes(), (name, bounds)


def test_pieces_of_a_tensor_are_that_tensor_to_whoever_has_another_part_of_it(tmp_path: Path) -> None:
    table = np.arange(40, dtype=np.float32).reshape(10, 4)
    pieces = {"table[0:3]": table[:3], "table[3:10]": table[3:], "count": np.array(7)}
    folder = Folder.own(tmp_path)
    part = write(Cut(HostCopy(pieces), POSITION, 8, 0.0, {"table[3:10]": ((0, 7), (0, 4))}), folder, IT, 1)
    assert read(folder, part).keys() == pieces.keys()
    got = read(folder, part, {"table": Window(((2, 6), (1, 3)), (10, 4)), "count": Window(())})
    assert np.array_equal(got["table"], table[2:6, 1:3])
    assert got["count"] == 7


def test_others_read_the_files_and_no_more_of_memory_is_needed_than_the_windows(tmp_path: Path) -> None:
    arrays = {
        "a": np.ones((3, 5), np.float32),
        "b": np.arange(7, dtype=np.int8),
        "c": np.zeros((0, 2)),
        "d": np.array(2),
    }
    plain_arrays.write(Folder.own(tmp_path), "arrays", arrays, {})
    loaded = load_file(tmp_path / "arrays.safetensors")
    assert {name: array.tobytes() for name, array in loaded.items()} == {n: a.tobytes() for n, a in arrays.items()}
    with pytest.raises(DataError, match="which a checkpoint cannot hold"):
        plain_arrays.write(Folder.own(tmp_path), "arrays", {"words": np.array(["a"])}, {})


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_damage_is_refused_by_whoever_needs_what_it_hit_and_by_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)
    array = np.arange(4096, dtype=np.float32).reshape(64, 64)
    folder = Folder.own(tmp_path)
    part = write(Cut(HostCopy({"a": array}), POSITION, 8, 0.0), folder, IT, 1)
    path = tmp_path / IT / "arrays.safetensors"
    content = path.read_bytes()
    upper, lower = ({"a": Window((rows, (0, 64)), (64, 64))} for rows in ((0, 32), (32, 64)))
    for place in range(-4, -(len(content) - 300) // 2, -1013):
        damaged = bytearray(content)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="is damaged: its digest"):
            read(folder, part, lower)
        assert np.array_equal(read(folder, part, upper)["a"], array[:32])
    for wrong in (content[:-1], content + b"\0", b""):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match="It was cut or overwritten"):
            read(folder, part, upper)
    path.unlink()
    with pytest.raises(DataError, match=r"lacks arrays\.safetensors"):
        read(folder, part, upper)


def test_what_is_no_file_of_arrays_is_refused_however_sound_its_digests_are(tmp_path: Path) -> None:
    folder = Folder.own(tmp_path)
    part = write(Cut(HostCopy({"a": np.ones(4, np.float32)}), POSITION, 8, 0.0), folder, IT, 1)
    sound = (tmp_path / IT / "arrays.safetensors").read_bytes()
    for wrong in (
        b"",
        b"\xff" * 80,
        sound.replace(b"F32", b"F99"),
        sound.replace(b"[0,16]", b"[0,17]"),
        sound.replace(b"[0,16]", b"[8,24]"),
        sound.replace(b"[4]", b"[9]"),
        sound.replace(b"[4]", b"{ }"),
        (2).to_bytes(8, "little") + b"[]",
    ):
        files = blocks.write(folder.sub(IT), "arrays.safetensors", [wrong])
        with pytest.raises(DataError, match=r"is not a file of arrays|cannot be read up to"):
            read(folder, replace(part, files=files))


def test_a_checkpoint_of_another_model_is_refused_by_what_differs(tmp_path: Path) -> None:
    folder = Folder.own(tmp_path)
    part = write(Cut(HostCopy({"a": np.ones((8, 4), np.float32)}), POSITION, 8, 0.0), folder, IT, 1)
    half = ((0, 4), (0, 4))
    with pytest.raises(DataError, match=r"does not fit this island's model: only one of them has \['b'\]"):
        read(folder, part, {"a": Window(half, (8, 4)), "b": Window(half)})
    with pytest.raises(DataError, match=r"a has the shape \[8, 4\] in .*, but \[16, 4\] in this island's model"):
        read(folder, part, {"a": Window(half, (16, 4))})
    with pytest.raises(DataError, match=r"\[8, 4\] in .*, but \[4, 9\] in this"):
        read(folder, part, {"a": Window(((0, 4), (0, 9)))})  # of a trainer that does not say how large the whole is


# ── islands of hosts ──────────────────────────────────────────────────────────────────────────────────────────────────


def spec() -> dict[str, Any]:
    return job(synthetic={"parameters": PARAMETERS, "step_s": 0.001}, synchroniser={"fragments": 2})


def fragments_of(trainer: Sliced) -> tuple[tuple[str, ...], ...]:
    names = sorted(trainer.tensor_shapes())
    return tuple(names[::2]), tuple(names[1::2])


def arrays_of(trainer: Sliced, rank: int | None) -> IslandArrays:
    return IslandArrays(trainer, ArraysPlan(fragments_of(trainer), rank=rank), threading.Condition())


def an_island(hosts: int) -> list[Sliced]:
    """Its processes' trainers, none of whose numbers is another's."""
    trainers = [Sliced(spec(), rank, hosts) for rank in range(hosts)]
    for one in trainers:
        one._steps = 8
        for name, moment in one.moments.items():
            moment += (np.arange(moment.size) % 997).astype(np.float16).reshape(moment.shape)
            one._parameters[name] = one._parameters[name] * np.float32(1.5)
    return trainers


def saved(
    url: str, trainers: list[Sliced], *, earlier: bool = False
) -> tuple[Folder, tuple[dict[str, np.ndarray], ...]]:
    """A checkpoint of this island, and Θ in it; ``earlier``: as builds wrote it that knew of one process and Orbax."""
    root = Folder.within(AllowedRoots.only(url), url)
    folder = writing.checkpoint_folder(root, 1)
    rows = np.random.default_rng(1)
    fragments = fragments_of(trainers[0])
    shapes = trainers[0].tensor_shapes()
    outer = tuple({n: rows.standard_normal(shapes[n], np.float32) for n in names} for names in fragments)
    states = {
        FragmentId(p): FragmentState(
            Version(1), arrays, {n: np.zeros_like(a) for n, a in arrays.items()}, digest(arrays)
        )
        for p, arrays in enumerate(outer)
    }
    files = list(writing.write_outer(folder, states))
    several = len(trainers) > 1
    cuts = [arrays_of(one, rank if several else None).cut(POSITION) for rank, one in enumerate(trainers)]
    written = [file for rank, cut in enumerate(cuts[1:], 1) for file in write_rank(cut, folder, IT, rank)]
    part = write(cuts[0], folder, IT, 1, others=lambda: tuple(written))
    if earlier:
        files = without_blocks(folder, files)
        part = as_earlier_builds_wrote_it(folder, part, cuts[0].snapshot.arrays())
    _, of_part = writing.read_part(folder, IT, part_digest(part))
    return complete(folder, 1, states, [part], [*files, *of_part]), outer


def needs_of(trainer: Sliced, hosts: int, rank: int) -> Needs:
    return HeldPieces(trainer, fragments_of(trainer), rank if hosts > 1 else None).needs()


@pytest.mark.parametrize("kind", ["disk", "store", "earlier"])
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2)])
def test_an_island_of_any_number_of_hosts_goes_on_from_what_one_of_any_other_saved(
    writers: int, readers: int, kind: str, tmp_path: Path
) -> None:
    if kind == "earlier" and writers > 1:
        kind = "disk"  # islands of several hosts never wrote by Orbax
    before = an_island(writers)
    url = f"memory://{tmp_path.name}" if kind == "store" else str(tmp_path)
    folder, outer = saved(url, before, earlier=kind == "earlier")
    again = [Sliced(spec(), rank, readers) for rank in range(readers)]
    for rank, trainer in enumerate(again):
        held = arrays_of(trainer, rank if readers > 1 else None)
        state = restored(folder, IT, held.held.needs())
        held.load_saved(state, 8)
        assert (trainer.cursor(), trainer._steps) == (8, 8)
        for name in trainer.tensor_shapes():
            rows = trainer.rows(name)
            expected = np.concatenate([one._parameters[name][one.rows(name)] for one in before])[rows]
            assert np.array_equal(trainer._parameters[name][rows], expected)
            expected = np.concatenate([one.moments[name][one.rows(name)] for one in before])[rows]
            assert np.array_equal(trainer.moments[name][rows], expected)
        for p, names in enumerate(fragments_of(trainer)):
            adopted = held.published.at(FragmentId(p), Version(1))
            assert adopted is not None
            assert all(np.array_equal(adopted.arrays[name], outer[p][name][trainer.rows(name)]) for name in names)


@pytest.mark.parametrize("writers", [1, 2])
def test_each_of_two_hosts_reads_and_holds_half(writers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote it: a block at each end of an array's window more, and what lists the arrays."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 11)
    folder, _ = saved(str(tmp_path), an_island(writers))
    manifest = manifest_of(folder)
    all_bytes = sum(f.size for f in manifest.files if f.name.endswith((".safetensors", ".parameters")))
    for rank in range(2):
        trainer = Sliced(spec(), rank, 2)
        with counted_reads() as stretches:
            state = restored(folder, IT, needs_of(trainer, 2, rank))
        held = sum(
            array.nbytes for array in (*state.arrays.values(), *(a for own in state.outer for a in own.values()))
        )
        print(f"host {rank}: {sum(stretches) / all_bytes:.4f} of {all_bytes:,} bytes read")
        assert 0.49 * all_bytes < held < 0.51 * all_bytes
        assert 0.49 * all_bytes < sum(stretches) < 0.51 * all_bytes


def test_nothing_larger_than_a_window_and_a_block_is_ever_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of memory, in one piece: by the arrays made, and the stretches read."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 16)
    folder, _ = saved(str(tmp_path), an_island(1))
    trainer = Sliced(spec(), 1, 2)
    needs = needs_of(trainer, 2, 1)
    assert needs.state is not None
    largest = max(4 * int(np.prod(shape_of(window.bounds))) for window in needs.state.values())
    sizes: list[int] = []
    empty = np.empty

    def made(*arguments: Any, **more: Any) -> np.ndarray:
        array: np.ndarray = empty(*arguments, **more)
        sizes.append(array.nbytes)
        return array

    monkeypatch.setattr(np, "empty", made)
    with counted_reads() as stretches:
        restored(folder, IT, needs)
    assert max(sizes) == largest
    assert 0 < max(stretches) <= blocks.BLOCK_BYTES < largest


def test_numbers_that_are_none_are_refused_by_the_host_that_has_them(tmp_path: Path) -> None:
    before = an_island(2)
    name = sorted(before[1].moments)[0]
    before[1].moments[name][-1] = np.nan
    folder, _ = saved(str(tmp_path), before)
    for rank in range(2):
        trainer = Sliced(spec(), rank, 2)
        held = arrays_of(trainer, rank)
        state = restored(folder, IT, held.held.needs())
        if rank == 0:
            held.load_saved(state, 8)
        else:
            with pytest.raises(DataError, match=f"NaN or Inf in moment/{name}"):
                held.load_saved(state, 8)


def test_theta_of_another_model_is_refused_by_each_host(tmp_path: Path) -> None:
    folder, _ = saved(str(tmp_path), an_island(1))
    wider = Sliced({**spec(), "synthetic": {**spec()["synthetic"], "parameters": 2 * PARAMETERS}}, 1, 2)
    with pytest.raises(
        DataError, match=r"has the shape \[.*\] in .*fragment-0000.parameters, but \[.*\] in this island"
    ):
        restored(folder, IT, needs_of(wider, 2, 1))
    trainer = Sliced(spec(), 0, 2)
    needs = needs_of(trainer, 2, 0)
    assert needs.outer is not None
    with pytest.raises(DataError, match="has 2 fragments, but this island's model has 1"):
        restored(folder, IT, Needs(needs.state, needs.outer[:1]))
    with pytest.raises(DataError, match=r"fragment-0000.parameters lacks .* of this island's model"):
        restored(folder, IT, Needs(needs.state, needs.outer[::-1]))
