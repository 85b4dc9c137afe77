"""An island goes on from its part of a checkpoint as if nothing had happened: bit for bit, with the same offers."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learners import checkpointing, jax_trainer, synthetic
from learners.checkpointing import LEFT as LEFT_FILE
from learners.checkpointing import LEFT_AGE_MAX_S, Cut, LeftStates, Restored, read, restored, write
from learners.island_spec import IslandSpec
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import Part, seal, unseal
from orchestrator.core.messages import Adopted, LeftState, Offer
from orchestrator.core.vocabulary import AllOffers, Epoch, FragmentId, Incarnation, IslandId, Version
from orchestrator.errors import DataError, InfrastructureError, InternalError
from orchestrator.system import signals
from tests.checkpoints.making import make
from tests.waiting import PATIENCE_S

KINDS = {"jax": jax_trainer.create, "synthetic": synthetic.create}
BEFORE, AFTER, INTERVAL = 7, 9, 4


class Gated:
    """A trainer that takes a step only when told."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.permits, self.at_gate = threading.Semaphore(0), threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def step(self, schedule_step: int) -> Any:
        self.at_gate.release()
        self.permits.acquire()
        return self.trainer.step(schedule_step)


class Island:
    """A loop that stands before its first step once it is started."""

    def __init__(self, trainer: Any, adoption: str) -> None:
        self.trainer, self.outbox = Gated(trainer), Outbox()
        names = sorted(trainer.tensor_shapes())
        self.fragments = (tuple(names[::2]), tuple(names[1::2]))
        plan = LoopPlan(self.fragments, INTERVAL, adoption, report_every_s=1e9, tokens_per_schedule_step=128)
        self.loop = IslandLoop(self.trainer, plan, self.outbox)

    def start(self) -> None:
        self.loop.start()
        assert self.trainer.at_gate.acquire(timeout=PATIENCE_S)

    def steps(self, count: int) -> list[Any]:
        """The letters of so many steps, and of the boundary behind them."""
        letters = []
        for _ in range(count):
            self.trainer.permits.release()
            assert self.trainer.at_gate.acquire(timeout=PATIENCE_S)
            letters += self.outbox.take(0.0)  # before a newer offer takes the place of an older one
        return letters

    def deliver(self, fragment: int, version: int, arrays: dict[str, np.ndarray], step: int, merged: int = 0) -> None:
        self.loop.deliver(FragmentId(fragment), Version(version), step, arrays, merged)

    def end(self) -> None:
        self.loop._stopping.set()
        self.trainer.permits.release()
        self.loop.stop()


def said(letters: list[Any]) -> list[tuple[Any, ...]]:
    """What offers and adoptions say, but for numbers that begin anew with a process."""
    told: list[tuple[Any, ...]] = []
    for x in letters:
        if isinstance(x, Offer):
            told.append((x.fragment, x.step, x.base_version, x.step_count, x.token_count))
        elif isinstance(x, Adopted):
            told.append((x.fragment, x.version, x.step, x.kept_tokens))
    return told


def state_of(trainer: Any) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in trainer.export_state().arrays().items()}


def test_files_are_made_durable_while_another_process_renames_its_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of one host write their parts of a checkpoint into the same folder."""
    drafts, fsync, synced = [tmp_path / f"{name}.draft" for name in "ab"], os.fsync, list[int]()
    for draft in drafts:
        draft.touch()

    def renamed_meanwhile(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(descriptor)
        for draft in drafts:
            if draft.exists():
                draft.rename(draft.with_suffix(""))

    monkeypatch.setattr(os, "fsync", renamed_meanwhile)
    Folder.own(tmp_path).sync()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert len(synced) == 3  # the draft that was there, the folder, and the one above it


@pytest.mark.parametrize("adoption", ["rebase", "replace"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_resumed_island_is_the_uninterrupted_one_bit_for_bit(
    kind: str, adoption: str, make_job, tmp_path: Path
) -> None:
    spec = make_job()
    island = Island(KINDS[kind](spec, 1, 2), adoption)
    initial = island.trainer.initial_parameters()
    published = [{name: initial[name] + np.float32(0.01) for name in names} for names in island.fragments]
    island.loop.load(initial, (0, 0), 0, 0)
    island.start()
    island.steps(5)
    island.deliver(0, 1, published[0], 6)
    island.steps(BEFORE - 5)
    asked = island.loop.request_cut()
    island.deliver(1, 1, published[1], 0)  # behind the marker: not in the cut, though it comes at the same boundary
    after = island.steps(1)
    cut = asked.result(0)
    assert cut.position.versions == (1, 0)
    assert cut.cursor == cut.position.steps_total == BEFORE + 1
    after += island.steps(AFTER)
    part = write(cut, Folder.own(tmp_path), "it", 1)
    assert [file.name for file in part.files] == ["arrays.safetensors", "arrays.safetensors.blocks"]

    again = Island(KINDS[kind]({**spec, "legs": [(IslandSpec.of(spec).batch_size, (3, cut.cursor))]}, 1, 2), adoption)
    outer = (published[0], {name: initial[name] for name in again.fragments[1]})
    again.loop.load_saved(Restored(part, read(Folder.own(tmp_path), part), (1, 0), outer), 0)
    again.deliver(1, 1, published[1], 0)
    again.start()
    assert said(again.steps(AFTER)) == said(after)
    assert len(said(after)) >= 4
    island.end()
    again.end()
    one, other = state_of(island.trainer), state_of(again.trainer)
    assert one.keys() == other.keys()
    different = {name for name in one if one[name].tobytes() != other[name].tobytes()}
    assert different <= ({"steps"} if kind == "synthetic" else set())


def test_work_that_theta_has_moved_past_is_overwritten_and_the_rest_goes_on(make_job, tmp_path: Path) -> None:
    spec = make_job()
    trainer = synthetic.create(spec, 0, 2)
    names = sorted(trainer.tensor_shapes())
    arrays = trainer.export_state().arrays()
    outer = tuple({name: np.full_like(arrays[name], 7.0) for name in group} for group in (names[::2], names[1::2]))
    part = Part("it", 1, 40, 40, 12, 1200, 12, (3, 4), (5, 6), (500, 600))
    island = Island(synthetic.create(spec, 0, 2), "rebase")
    island.loop.load_saved(Restored(part, arrays, (3, 5), outer), 0)
    island.start()
    mine = island.trainer.snapshot(names).arrays()
    assert all((mine[name] == arrays[name]).all() for name in names[::2])
    assert all((mine[name] == 7.0).all() for name in names[1::2])
    offers = [letter for letter in island.steps(INTERVAL) if isinstance(letter, Offer)]
    tokens = {offer.fragment: offer.token_count for offer in offers}
    assert tokens[0] > 500
    assert tokens[1] < 600
    assert {offer.fragment: offer.base_version for offer in offers} == {0: 3, 1: 5}
    island.end()


def test_an_island_that_does_not_train_has_nothing_to_cut_and_one_with_a_state_takes_no_other(make_job) -> None:
    island = Island(synthetic.create(make_job(), 0, 2), "rebase")
    with pytest.raises(InfrastructureError, match="does not train"):
        island.loop.request_cut()
    island.loop.load(island.trainer.initial_parameters(), (0, 0), 0, 0)
    part = Part("it", 1, 0, 0, 0, 0, 0, (0, 0), (0, 0), (0, 0))
    with pytest.raises(InternalError, match="was given another one"):
        island.loop.load_saved(Restored(part, {}, (Version(0), Version(0)), ({}, {})), 0)


def test_an_island_that_the_checkpoint_does_not_know_or_whose_arrays_are_damaged_is_told(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    whole = restored(folder, "b")
    assert whole.part.island == "b"
    assert whole.versions == (0, 0)
    with pytest.raises(DataError, match="no state of nobody"):
        restored(folder, "nobody")
    path = tmp_path / "000001" / "b" / "arrays.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="is damaged"):
        restored(folder, "b")


def test_a_cut_holds_arrays_of_its_own(make_job) -> None:
    """The island trains on while they are written."""
    island = Island(synthetic.create(make_job(), 0, 2), "replace")
    island.loop.load(island.trainer.initial_parameters(), (0, 0), 0, 0)
    island.start()
    asked = island.loop.request_cut()
    island.steps(1)
    cut: Cut = asked.result(0)
    before = {name: array.copy() for name, array in cut.snapshot.arrays().items()}
    island.steps(8)
    island.end()
    assert all(np.array_equal(array, before[name]) for name, array in cut.snapshot.arrays().items())


@pytest.mark.parametrize("adoption", ["rebase", "mix", "replace"])
def test_of_what_is_rolled_back_nothing_is_kept_whatever_the_rule(adoption: str, make_job) -> None:
    island = Island(synthetic.create(make_job(), 0, 2), adoption)
    island.loop.load(island.trainer.initial_parameters(), (0, 0), 0, 0)
    island.start()
    island.steps(INTERVAL + 1)  # an offer stands, and there is work behind it
    back = {name: np.full_like(island.trainer.initial_parameters()[name], 7.0) for name in island.fragments[0]}
    island.deliver(0, 1, back, 0, AllOffers())
    letters = island.steps(1)
    assert [letter.kept_tokens for letter in letters if isinstance(letter, Adopted)] == [0]
    assert all((array == 7.0).all() for array in island.trainer.snapshot(island.fragments[0]).arrays().values())
    assert [offer.fragment for offer in island.loop.standing_offers()] == [1]
    island.end()


# ── a state that is left on the machine ───────────────────────────────────────────────────────────────────────────

IT, FIRST, SECOND = IslandId("it"), Incarnation(1), Incarnation(2)


class LeftHere:
    """An island at step 8 on version 1 of fragment 0, with unmerged work in both, that left its state in ``folder``."""

    def __init__(self, kind: str, spec: Any, folder: Path) -> None:
        self.spec, self.kind, self.folder = spec, kind, folder
        self.island = Island(KINDS[kind](spec, 1, 2), "rebase")
        initial = self.island.trainer.initial_parameters()
        moved = {name: initial[name] + np.float32(0.01) for name in self.island.fragments[0]}
        self.outer = {**initial, **moved}
        self.island.loop.load(initial, (0, 0), 0, 0)
        self.island.start()
        self.island.steps(5)
        self.island.deliver(0, 1, moved, 6)
        self.island.steps(2)

    def leave(self, job: str = "job") -> None:
        states = LeftStates(self.folder, job)
        leaving = threading.Thread(target=states.leave, args=(self.island.loop, IT, FIRST, Epoch(3)))
        leaving.start()
        while leaving.is_alive():  # the state is that of the next boundary
            self.island.steps(1)
            leaving.join(0.05)

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def restored(self, states: LeftStates, epoch: int = 4, **changed: Any) -> tuple[Restored, LeftState]:
        values = {**self.outer, **changed}
        return states.restored(Epoch(epoch), (Version(1), Version(0)), values, self.island.fragments)


@pytest.fixture
def here(make_job, tmp_path: Path) -> Iterator[LeftHere]:
    left = LeftHere("synthetic", make_job(), tmp_path / "left")
    left.folder.mkdir()
    yield left
    left.island.end()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_next_incarnation_continues_from_what_was_left_with_all_work_and_only_once(
    kind: str, make_job, tmp_path: Path
) -> None:
    here = LeftHere(kind, make_job(), tmp_path)
    here.leave()
    assert {path.stat().st_mode & 0o777 for path in here.files()} == {0o600}
    states = LeftStates(tmp_path, "job")
    left = states.find(IT, SECOND)
    assert left is not None
    assert (left.incarnation, left.versions, min(left.kept_tokens) > 0) == (1, (1, 0), True)
    saved, kept = here.restored(states)
    assert kept == left
    again = Island(KINDS[kind](here.spec, 1, 2), "rebase")
    again.loop.load_saved(saved, left.steps_total)
    states.forget("the island trains")
    assert here.files() == []
    assert LeftStates(tmp_path, "job").find(IT, Incarnation(3)) is None
    again.start()
    offers = [x for x in again.steps(INTERVAL + 1) if isinstance(x, Offer)]
    assert {x.fragment: x.token_count - x.tokens_total for x in offers} == dict(enumerate(left.kept_tokens))
    again.end()
    here.island.end()


def test_work_on_a_version_that_was_made_anew_with_other_bytes_is_not_kept(here: LeftHere) -> None:
    here.leave()
    states = LeftStates(here.folder, "job")
    found = states.find(IT, SECOND)
    assert found is not None
    name = here.island.fragments[1][0]
    saved, kept = here.restored(states, **{name: here.outer[name] + np.float32(1)})
    assert kept.kept_tokens == (found.kept_tokens[0], 0)
    assert saved.position.versions == (1, -1)


def other_job(here: LeftHere) -> None:
    here.leave("another")
    (here.folder / "another.it.1").rename(here.folder / "job.it.1")


def too_old(here: LeftHere) -> None:
    here.leave()
    document = unseal((here.folder / "job.it.1" / LEFT_FILE).read_bytes(), "it")
    document["left_at"] -= LEFT_AGE_MAX_S + 60
    (here.folder / "job.it.1" / LEFT_FILE).write_bytes(seal(document))


def other_build(here: LeftHere) -> None:
    here.leave()
    document = unseal((here.folder / "job.it.1" / LEFT_FILE).read_bytes(), "it")
    document["build"] = "0.0.1"
    (here.folder / "job.it.1" / LEFT_FILE).write_bytes(seal(document))


def torn_document(here: LeftHere) -> None:
    here.leave()
    path = here.folder / "job.it.1" / LEFT_FILE
    path.write_bytes(path.read_bytes()[:-9])


def no_document(here: LeftHere) -> None:
    here.leave()
    (here.folder / "job.it.1" / LEFT_FILE).unlink()


def damaged_part(here: LeftHere) -> None:
    here.leave()
    path = here.folder / "job.it.1" / "it" / "part.json"
    path.write_bytes(path.read_bytes().replace(b'"step":', b'"stop":'))


@pytest.mark.parametrize(
    "spoil", [other_job, too_old, other_build, torn_document, no_document, damaged_part], ids=lambda one: one.__name__
)
def test_a_state_that_does_not_belong_is_removed_with_the_reason(
    here: LeftHere, spoil: Callable[[LeftHere], None], caplog: pytest.LogCaptureFixture
) -> None:
    spoil(here)
    with caplog.at_level("INFO"):
        assert LeftStates(here.folder, "job").find(IT, SECOND) is None
    assert here.files() == []
    assert "removing the state in" in caplog.text


def test_an_incarnation_takes_only_the_latest_state_of_those_before_it_and_no_other_island_s(here: LeftHere) -> None:
    here.leave()
    shutil.copytree(here.folder / "job.it.1", here.folder / "job.other.1")
    shutil.copytree(
        here.folder / "job.it.1", here.folder / "job.it.9"
    )  # not what its document says: the later one counts
    states = LeftStates(here.folder, "job")
    assert states.find(IT, FIRST) is None, "its own is no earlier one"
    assert [path.name for path in here.folder.iterdir()] == ["job.other.1"]


@pytest.mark.parametrize("spoil", ["truncated", "flipped", "epoch"])
def test_arrays_that_are_damaged_or_of_a_later_epoch_are_not_loaded(here: LeftHere, spoil: str) -> None:
    here.leave()
    states = LeftStates(here.folder, "job")
    assert states.find(IT, SECOND) is not None
    arrays = here.folder / "job.it.1" / "it" / "arrays.safetensors"
    content = bytearray(arrays.read_bytes())
    if spoil == "truncated":
        del content[-1:]
    elif spoil == "flipped":
        content[-1] ^= 1
    arrays.write_bytes(content)
    with pytest.raises(DataError, match="epoch 3" if spoil == "epoch" else "damaged|size|bytes"):
        here.restored(states, epoch=2 if spoil == "epoch" else 4)


def test_an_island_on_a_full_disk_leaves_nothing_and_trains_on(
    here: LeftHere, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointing, "FREE_RATIO_MIN", 1.0)
    here.leave()
    assert "do not fit on the disk" in caplog.text
    monkeypatch.setattr(checkpointing, "FREE_RATIO_MIN", 0.0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limit[1]))  # the kernel refuses a longer file, as a full disk does
    try:
        here.leave()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "File too large" in caplog.text
    assert list(here.folder.iterdir()) == []
    here.island.steps(2)


PROCESS = """
import os, sys
from pathlib import Path
import numpy as np
import ray
from learners.factories import trainer_of
from learners.island import Island
from learners.island_spec import IslandSpec
from orchestrator.channel.endpoint import Membership, Terms
from orchestrator.core.messages import CatchUpFailure, CaughtUp, Offer, Ready
from orchestrator.core.vocabulary import NO_ANCHOR
from orchestrator.parameters import fragment_map
from orchestrator.parameters.wire_format import encode
from orchestrator.specification.config import parse_job
from orchestrator.system import logbook
from orchestrator.system.roots import AllowedRoots

told = os.fdopen(os.dup(1), "w", buffering=1)
folder, incarnation = Path(sys.argv[1]), int(sys.argv[2])
ray.util.get_node_ip_address = lambda: "127.0.0.1"
spec = parse_job(
    {
        "trainer": "learners.synthetic:create",
        "synthetic": {"parameters": 1000, "step_s": 0.02},
        "synchroniser": {"fragments": 2, "interval_steps": 8, "overlap_steps": 4, "grace_cap_steps": 2},
        "islands": [{"name": "it", "node_group": "g", "cpus": 1}],
        "budget": {"steps": 100000},
    }
)
((_, section),) = spec.island_sections(slots=True).items()
document = spec.island_document(section) | {"legs": (), "roots": AllowedRoots()}
trainer = trainer_of(IslandSpec.of(document), 0, 1)
fragments = fragment_map.build(trainer.tensor_shapes(), 2, trainer.roles())
outer = [np.frombuffer(bytes(encode(trainer.snapshot(names).arrays())), np.uint8) for names in fragments]
island = Island("it", {}, logbook.island_logbook(folder / "job", "it", incarnation), 1e9)
island.join_channel(incarnation, Membership("job", f"it:{incarnation}", incarnation, Terms()))
island.prepare(document, 0, 1, True)
read = 0

def report(kind):
    global read
    while True:
        for read, each in island.reports(incarnation, read, read, 30.0):
            assert not isinstance(each, CatchUpFailure), each
            if isinstance(each, kind):
                return each

left = report(Ready).left
load = island.load if left is None else island.load_left
load(incarnation, (0, 0), 0, 0 if left is None else left.steps_total, *outer)
continued = report(CaughtUp).left
island.start(incarnation, NO_ANCHOR)
offer = report(Offer)
print(left is not None, left == continued, offer.token_count - offer.tokens_total, file=told)
sys.stdin.read()
"""


def test_a_process_that_is_asked_to_leave_is_continued_by_the_next_one(tmp_path: Path) -> None:
    """The synchroniser's calls reach the actor's class in processes of their own, with nothing between."""
    folder = tmp_path / "left"
    folder.mkdir()
    told = []
    for incarnation in (1, 2):
        with subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), str(incarnation)],
            env={**os.environ, signals.LEFT_STATES_VARIABLE: str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            told.append(process.stdout.readline().split())
            assert signals.ask_to_leave(folder, PATIENCE_S) == []
            process.kill()
        assert [path.name for path in folder.iterdir()] == [f"job.it.{incarnation}"]
        assert signals.left_labels(folder) == {signals.left_label("job.it"): "1"}
    assert told[0] == ["False", "True", "0"]
    assert told[1][:2] == ["True", "True"]
    assert int(told[1][2]) > 0, "its first offer has work of the incarnation before"
