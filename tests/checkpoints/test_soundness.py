"""A checkpoint is whole, or is refused with the reason: every file of one is cut short and has bits flipped all over."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.checkpointing import read
from learners.synthetic import SyntheticTrainer
from orchestrator.checkpoints import writing
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import MANIFEST, PART, seal, unseal
from orchestrator.checkpoints.reading import listed, manifest_of, newest_sound, outer_states, verified
from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.errors import DataError
from orchestrator.parameters.outer_optimizer import Adam
from orchestrator.parameters.outer_state import Averaging, OuterState, OuterStep
from orchestrator.parameters.wire_format import displacement
from orchestrator.system.roots import EVERYTHING, AllowedRoots
from tests.checkpoints import making
from tests.checkpoints.making import SPEC, make, outer
from tests.soak import examples

OFFSETS = {"safetensors": examples(40), "orbax": examples(8)}
"""Places of each file at which a bit is flipped; the first and last bytes are among them. Orbax writes many small files."""


@pytest.fixture(scope="module", params=OFFSETS)
def kind(request: pytest.FixtureRequest) -> str:
    """Who writes islands' arrays."""
    return str(request.param)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for number in (1, 2):
        make(root, number, orbax=kind == "orbax")
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "here")
    return tmp_path / "here"


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def damages(content: bytes, offsets: int) -> Iterator[bytes]:
    """Cut short at many places, a bit flipped at many others, one byte too many, nothing at all."""
    chance = random.Random(len(content))
    last = len(content) - 1
    for place in sorted({0, last, *(chance.randint(0, last) for _ in range(offsets))} if content else ()):
        yield content[:place]
        yield content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]
    yield content + b"\0"


def test_what_was_written_is_what_is_read(root: Path) -> None:
    found = newest_sound(EVERYTHING, str(root))
    assert (found.manifest.number, found.refused) == (2, ())
    assert {path.relative_to(root / "000002").as_posix() for path in files_of(root / "000002")} == {
        MANIFEST,
        *(file.name for file in found.manifest.files),
    }
    states = list(outer_states(found.folder, found.manifest))
    assert [state.digest for state in states] == [outer().state(p).digest for p in range(2)]
    assert all((state.momentum[name] == 0).all() for state in states for name in state.momentum)


def test_every_file_damaged_anywhere_is_refused_by_name_and_the_previous_checkpoint_is_used(
    root: Path, kind: str
) -> None:
    newest, count = root / "000002", 0
    islands = {part.island: part for part in manifest_of(Folder.own(newest)).parts}
    for path in files_of(newest):
        content, island = path.read_bytes(), path.relative_to(newest).parts[0]
        for damaged in damages(content, OFFSETS[kind]):
            path.write_bytes(damaged)
            with pytest.raises(DataError) as refused:
                verified(Folder.own(newest))
            assert path.name in str(refused.value)
            if island in islands and path.name != PART:  # also by its island, which looks at nothing else
                with pytest.raises(DataError, match="is damaged"):
                    read(Folder.own(newest), islands[island])
            count += 1
        for asked in (root, newest):
            found = newest_sound(EVERYTHING, str(asked))
            assert found.manifest.number == 1
            assert path.name in found.refused[0]
        path.unlink()
        with pytest.raises(DataError, match=path.name):
            verified(Folder.own(newest))
        path.write_bytes(content)
    assert count > 9 * 2 * OFFSETS[kind] / 2
    assert newest_sound(EVERYTHING, str(root)).refused == ()


def test_when_all_are_damaged_every_reason_is_told(root: Path) -> None:
    for name in ("000001", "000002"):
        (root / name / MANIFEST).write_bytes(b"{}")
    with pytest.raises(DataError) as refused:
        newest_sound(EVERYTHING, str(root))
    assert str(refused.value).count("is damaged") == 2
    with pytest.raises(DataError, match="It has no checkpoint"):
        newest_sound(EVERYTHING, str(root / "nowhere"))


def test_without_its_manifest_a_checkpoint_is_none_and_is_not_listed(root: Path) -> None:
    (root / "000002" / MANIFEST).unlink()
    assert [manifest.number for manifest in listed(Folder.own(root))] == [1]
    with pytest.raises(DataError, match="no complete checkpoint"):
        manifest_of(Folder.own(root / "000002"))


def test_one_that_is_removed_stops_being_one_before_its_files_go(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder.own(root / "000002")
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "remove_all", lambda _: (_ for _ in ()).throw(OSError("power")))
        with pytest.raises(OSError, match="power"):
            writing.remove(folder)
    assert newest_sound(EVERYTHING, str(root)).manifest.number == 1
    writing.remove(folder)
    assert not (root / "000002").exists()
    writing.remove(folder)


def test_a_part_that_is_not_the_one_its_island_told_of_is_refused(root: Path) -> None:
    with pytest.raises(DataError, match="the island wrote 0123"):
        writing.read_part(Folder.own(root / "000002"), "a", "0123")
    with pytest.raises(DataError, match="although the island has reported"):
        writing.read_part(Folder.own(root / "000002"), "nobody", "0123")


def test_a_store_that_is_no_disk_does_as_well(tmp_path: Path, kind: str) -> None:
    url, here = f"memory://{tmp_path.name}/job", tmp_path / "here"
    for root in (url, here):
        for number in (1, 2):
            make(root, number, orbax=kind == "orbax")
    files = fsspec.filesystem("memory")
    for there in (newest_sound(AllowedRoots.only(url), url), newest_sound(EVERYTHING, str(here))):
        assert there.manifest.number == 2
        for shard, part in enumerate(there.manifest.parts):
            trainer = SyntheticTrainer(SPEC, shard)
            trainer.import_state(read(there.folder, part))  # whole: every tensor, of its shape
            assert trainer.export_state().arrays()["steps"] == part.steps_total > 0
    name = f"/{tmp_path.name}/job/000002/fragment-0001.momentum"
    files.pipe_file(name, files.cat_file(name)[:-1])
    found = newest_sound(AllowedRoots.only(url), url)
    assert found.manifest.number == 1
    assert "fragment-0001.momentum" in found.refused[0]
    writing.remove(found.folder)
    assert not files.exists(f"/{tmp_path.name}/job/000001")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), plain, max_size=4), st.data())
def test_a_sealed_document_comes_back_and_no_flipped_bit_goes_unseen(document: dict, data: st.DataObject) -> None:
    sealed = seal(document)
    assert unseal(sealed, "it") == document
    place, bit = data.draw(st.integers(0, len(sealed) - 1)), data.draw(st.integers(0, 7))
    with pytest.raises(DataError, match="it is damaged"):
        unseal(sealed[:place] + bytes([sealed[place] ^ (1 << bit)]) + sealed[place + 1 :], "it")
    with pytest.raises(DataError, match="it is damaged"):
        unseal(sealed[:place], "it")


def test_a_checkpoint_has_both_moments_of_adam_and_its_steps_and_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = OuterStep(Averaging.MEAN, Adam(0.01, 0.9, 0.999, 1e-8), "int2", clip_norm=0.5)
    undisturbed = OuterState(outer().parameters(), making.FRAGMENTS, step)

    def merge(state: OuterState, version: int) -> None:
        for p in state.fragments:
            generator, anchor = np.random.default_rng([version, p]), state.fragment(p)
            moved = {name: a + generator.standard_normal(a.shape, np.float32) for name, a in anchor.items()}
            state.merge(p, Version(version), [(displacement(anchor, moved, Version(version - 1), "int2"), 1.0)])

    for version in range(1, 6):
        merge(undisturbed, version)
    monkeypatch.setattr(making, "outer", lambda: undisturbed)
    make(tmp_path, 1, ("a",))
    sound = newest_sound(EVERYTHING, str(tmp_path))
    states = {FragmentId(p): state for p, state in enumerate(outer_states(sound.folder, sound.manifest))}
    assert all(state.momentum[name][-1] == 5 for state in states.values() for name in state.momentum)
    resumed = OuterState.restored(states, step)
    # the first states of a resumed job have its version 0
    resumed._fragments = {p: replace(state, version=Version(5)) for p, state in resumed._fragments.items()}
    for version in range(6, 9):
        merge(undisturbed, version)
        merge(resumed, version)
    for p in undisturbed.fragments:
        assert resumed.state(p).digest == undisturbed.state(p).digest
