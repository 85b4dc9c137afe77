from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learners import jax_trainer, model
from learners.island_spec import IslandSpec
from learners.outbox import LOWEST_NICENESS
from learners.text import Text
from orchestrator.errors import DataError
from orchestrator.parameters import fragment_map
from orchestrator.parameters.pieces import taken
from tests.bench.device_memory import highest

PATIENCE_S = 60.0


@pytest.fixture
def new_trainer(make_job):
    def make(shard_index: int = 0, **sections) -> jax_trainer.JaxTrainer:
        trainer = jax_trainer.create(make_job(**sections), shard_index, 2)
        trainer.warm_up()
        return trainer

    return make


def parameters(trainer: jax_trainer.JaxTrainer) -> dict[str, np.ndarray]:
    return trainer.snapshot(trainer.tensor_shapes()).arrays()


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_the_loss_falls_below_the_unigram_models_within_60_steps(new_trainer):
    trainer = new_trainer(training={"batch_size": 8, "inner_optimizer": {"warmup_steps": 5, "lr": 4e-3}})
    before = trainer.evaluate(trainer.initial_parameters()).loss
    results = [trainer.step(step) for step in range(60)]
    after = trainer.evaluate(parameters(trainer)).loss
    assert before == pytest.approx(np.log(256), abs=1e-4)
    assert after < trainer.unigram_loss() < before
    assert {result.token_count for result in results} == {8 * 32}


def test_a_growing_batch_trains_the_first_sequences_of_each_batch_in_as_many_tokens(new_trainer):
    growing = {"parts": 4, "tokens": 6 * 2 * 4 * 32}
    inner = {"warmup_steps": 5}
    trainer = new_trainer(training={"batch_size": 4, "batch_ramp": growing, "inner_optimizer": inner})
    results = [trainer.step(step) for step in range(8)]
    assert [result.token_count for result in results] == [32 * part for part in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert trainer.cursor() == 8  # a batch has its place in the data, whatever part of it is trained
    by_hand = new_trainer(training={"batch_size": 4, "inner_optimizer": inner})
    by_hand._steps.clear()  # they are compiled for whole batches
    whole = by_hand._batch()
    by_hand._parameters, by_hand._state, loss, *_ = by_hand.program(
        by_hand._parameters, by_hand._state, by_hand.on_devices(whole[:1]), np.float32(1 / 5)
    )
    assert results[0].loss == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_a_step_says_its_learning_rate_and_the_norm_of_its_whole_gradient(make_job, clip_norm):
    settings = {"warmup_steps": 5, "lr": 4e-3, "clip_norm": clip_norm}
    document = make_job(training={"batch_size": 4, "accumulation": 2, "inner_optimizer": settings})
    trainer, spec = jax_trainer.create(document, 0, 2), IslandSpec.of(document)
    before, batch = trainer.initial_parameters(), Text(spec).draw(0, 2)(0)
    gradient = jax.grad(model.build(spec).loss)(before, jnp.asarray(batch))
    squares = sum(np.square(np.asarray(part, np.float64)).sum() for part in gradient.values())
    result = trainer.step(2, 0.5)
    assert result.gradient_norm == pytest.approx(np.sqrt(squares), rel=1e-4)
    assert result.learning_rate == pytest.approx(0.5 * 4e-3 * 3 / 5)
    assert result.ideal_seconds is None, "nothing is known of the peak of a CPU"


def test_the_ideal_time_of_a_step_is_that_of_the_models_operations_at_the_stated_peak(make_job):
    island = {"node_group": "here", "peak_flops": 2e12}
    document = make_job(islands=[island])
    document["island"] = document["islands"][0]
    count = model.build(IslandSpec.of(document)).flops_per_token
    assert count is not None
    assert jax_trainer.create(document, 0, 1).step(0).ideal_seconds == pytest.approx(4 * 32 * count(32) / 2e12)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device_is_that_of_the_longest_name_that_fits(make_job, kind, peak):
    seconds = IslandSpec.of(make_job()).ideal_seconds(4e12, kind, 4)
    assert seconds == (None if peak is None else pytest.approx(1e12 / peak))


def test_two_trainers_of_one_seed_stay_bit_identical_and_shards_differ(new_trainer):
    first, twin, sibling = new_trainer(), new_trainer(), new_trainer(shard_index=1)
    assert equal(parameters(first), parameters(sibling))
    losses = [[trainer.step(step).loss for step in range(3)] for trainer in (first, twin, sibling)]
    assert losses[0] == losses[1] != losses[2]
    assert equal(parameters(first), parameters(twin))


def test_a_step_at_half_the_learning_rate_moves_half_as_far(new_trainer):
    whole, half = new_trainer(), new_trainer()
    before = parameters(whole)
    whole.step(50)
    half.step(50, 0.5)
    moved, moved_half = parameters(whole), parameters(half)
    for name, start in before.items():
        np.testing.assert_allclose(2 * (moved_half[name] - start), moved[name] - start, rtol=1e-3, atol=1e-6)
    assert not equal(before, moved_half)


DECODER = {
    "width": 16,
    "layer_count": 2,
    "head_count": 2,
    "key_value_head_count": 1,
    "head_size": 8,
    "hidden_size": 32,
}


def test_pieces_of_version_0_have_the_bits_of_the_whole_and_are_made_when_they_are_asked_for(new_trainer):
    trainer, other = (new_trainer(model={"decoder": DECODER}) for _ in range(2))
    whole = other.initial_parameters()
    fragments = fragment_map.build(trainer.tensor_shapes(), 6, trainer.roles())
    assert any("[" in name for names in fragments for name in names), "some tensor is in several fragments"
    for names in fragments:
        made, again = trainer.initial_parameters(names), trainer.initial_parameters(names)
        assert equal(made, taken(whole, names))
        assert not any(np.shares_memory(made[name], again[name]) for name in names), "nothing of it stays"


def test_warming_up_trains_nothing(new_trainer):
    trainer = new_trainer()
    assert equal(parameters(trainer), trainer.initial_parameters())
    assert trainer.cursor() == 0


def test_a_snapshot_keeps_its_values_while_later_steps_donate_their_inputs(new_trainer):
    trainer, witness = new_trainer(), new_trainer()
    snapshots, expected = [], []
    for step in range(4):
        trainer.step(step)
        witness.step(step)
        snapshots.append(trainer.snapshot(["embed", "blocks.1.attention.query"]))
        expected.append({name: array.copy() for name, array in snapshots[-1].arrays().items()} if step % 2 else None)
        if expected[-1] is None:
            expected[-1] = {name: parameters(witness)[name].copy() for name in ("embed", "blocks.1.attention.query")}
    assert all(equal(snapshot.arrays(), want) for snapshot, want in zip(snapshots, expected, strict=True))


def test_steps_update_in_place_even_while_snapshots_and_exports_are_read(new_trainer):
    """If a view of the parameters escaped, donation would silently stop: the old buffers would stay alive."""
    trainer = new_trainer()
    held = [trainer.snapshot(trainer.tensor_shapes()), trainer.export_state()]
    for item in held:
        item.arrays()
    trainer.step(0)
    sizes = sum(array.nbytes for array in jax.live_arrays())
    held.append(trainer.snapshot(["embed"]))
    for step in range(1, 4):
        trainer.step(step)
    grown = sum(array.nbytes for array in jax.live_arrays()) - sizes
    assert grown <= 2 * 256 * 128 * 4


def test_a_peer_that_imports_a_state_continues_exactly_as_its_donor(new_trainer):
    donor, peer = new_trainer(), new_trainer()
    for step in range(3):
        donor.step(step)
    state = donor.export_state()
    ahead = [donor.step(step).loss for step in range(3, 6)]
    peer.import_state(state.arrays())
    peer.seek(3)
    assert [peer.step(step).loss for step in range(3, 6)] == ahead
    assert equal(parameters(peer), parameters(donor))


def test_importing_leaves_the_own_data_position_alone(new_trainer):
    donor, peer = new_trainer(), new_trainer()
    donor.step(0)
    peer.import_state(donor.export_state().arrays())
    assert (donor.cursor(), peer.cursor()) == (1, 0)


def test_seeking_back_repeats_the_batch(new_trainer):
    trainer = new_trainer()
    start = trainer.export_state().arrays()
    losses = [trainer.step(step).loss for step in range(3)]
    trainer.import_state(start)
    trainer.seek(0)
    assert [trainer.step(step).loss for step in range(3)] == losses


def test_loading_replaces_the_named_tensors_only_and_never_touches_the_callers_memory(new_trainer):
    trainer = new_trainer()
    trainer.step(0)
    before = parameters(trainer)
    mine = np.full((256, 128), 0.25, np.float32)
    trainer.load({"embed": mine})
    assert equal(parameters(trainer), before | {"embed": mine})
    trainer.step(1)
    assert (mine == 0.25).all()
    mine[:] = 7
    assert not (parameters(trainer)["embed"] == 7).any()


PIECES = ("embed[0:100]", "embed[100:256]", "unembed[:,0:7]", "unembed[:,7:256]")


def all_pieces(trainer):
    whole = [name for name in trainer.tensor_shapes() if name not in ("embed", "unembed")]
    return [*whole, *PIECES]


def test_a_snapshot_of_pieces_is_that_of_their_tensors_cut(new_trainer):
    trainer = new_trainer()
    trainer.step(0)
    assert equal(trainer.snapshot(PIECES).arrays(), taken(parameters(trainer), PIECES))


def test_loading_a_piece_leaves_the_rest_of_its_tensor_and_the_callers_memory_alone(new_trainer):
    trainer = new_trainer()
    trainer.step(0)
    expected = {name: array.copy() for name, array in parameters(trainer).items()}
    mine = np.full((249, 128), 0.25, np.float32).T  # as no C array lies in memory
    expected["unembed"][:, 7:256] = mine
    trainer.load({"unembed[:,7:256]": mine})
    assert equal(parameters(trainer), expected)
    trainer.step(1)
    assert (mine == 0.25).all()
    with pytest.raises(DataError, match=r"\(2, 2\).*\(128, 249\)"):
        trainer.load({"unembed[:,7:256]": np.zeros((2, 2), np.float32)})


def test_a_peer_that_imports_a_state_piece_by_piece_continues_exactly_as_its_donor(new_trainer):
    donor, peer = new_trainer(), new_trainer()
    for step in range(3):
        donor.step(step)
    names = all_pieces(donor)
    halves = [donor.export_state(names[half::2]).arrays() for half in (0, 1)]
    ahead = [donor.step(step).loss for step in range(3, 6)]
    assert not any("embed" in name and "[0:100]" in name for name in halves[0].keys() & halves[1].keys())
    peer.import_state(halves[0] | halves[1])
    peer.seek(3)
    assert [peer.step(step).loss for step in range(3, 6)] == ahead
    assert equal(parameters(peer), parameters(donor))


def test_pieces_are_evaluated_like_their_tensors(new_trainer):
    trainer = new_trainer()
    whole = trainer.initial_parameters()
    assert trainer.evaluate(taken(whole, all_pieces(trainer))).loss == trainer.evaluate(whole).loss


def test_what_comes_fragment_by_fragment_is_measured_like_all_of_it_and_let_go_of_on_the_way(new_trainer):
    trainer = new_trainer()
    whole, names = trainer.initial_parameters(), all_pieces(trainer)
    came = []

    def fragments():
        for number in range(3):
            alive = [weak for weaks in came[:-1] for weak in weaks if weak() is not None]
            assert not alive, "of the fragments before the last no piece is held any more"
            arrays = {name: array.copy() for name, array in taken(whole, names[number::3]).items()}
            came.append([weakref.ref(array) for name, array in arrays.items() if name not in whole])
            yield arrays

    assert trainer.evaluate_fragments(fragments()).loss == trainer.evaluate(whole).loss
    assert sum(map(len, came)) >= 4
    with pytest.raises(DataError, match="Parts of"):
        trainer.evaluate_fragments([taken(whole, names[1:])])


def test_what_does_not_fit_is_refused_with_the_shapes(new_trainer):
    trainer = new_trainer()
    with pytest.raises(DataError, match=r"\(2, 2\).*\(256, 128\)"):
        trainer.load({"embed": np.zeros((2, 2), np.float32)})
    with pytest.raises(DataError, match="does not fit"):
        trainer.import_state({"embed": np.zeros((2, 2), np.float32)})


@pytest.mark.parametrize("returns", [False, True])
def test_only_an_island_that_returns_is_ready_before_its_heap_has_grown(make_job, monkeypatch, returns):
    begun, go_on, grown = threading.Event(), threading.Event(), []

    def grow(compiled):
        begun.set()
        assert go_on.wait(PATIENCE_S)
        grown.append((os.getpriority(os.PRIO_PROCESS, 0), compiled.memory_analysis().temp_size_in_bytes > 0))

    monkeypatch.setattr(jax_trainer, "_grow_heap", grow)
    trainer = jax_trainer.create({**make_job(), "returns": returns}, 0, 2)

    def build():
        trainer.warm_up()
        trainer.first_run()

    ready = threading.Thread(target=build)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    ready.start()
    assert begun.wait(PATIENCE_S)
    if returns:
        ready.join(PATIENCE_S)
        assert np.isfinite(trainer.step(0).loss), "it trains meanwhile"
    assert ready.is_alive() is not returns
    go_on.set()
    ready.join(PATIENCE_S)
    for thread in threading.enumerate():
        if thread.name == "heap":
            thread.join(PATIENCE_S)
    assert grown == [(LOWEST_NICENESS if returns else before, True)]


@pytest.mark.parametrize("returns", [False, True])
def test_an_island_that_returns_leaves_the_first_run_until_its_state_is_on_its_way(make_job, monkeypatch, returns):
    runs, wait = [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda result: runs.append(result) or wait(result))
    trainer = jax_trainer.create({**make_job(), "returns": returns}, 0, 2)
    trainer.warm_up()
    assert len(runs) == (0 if returns else 1)
    trainer.first_run()
    assert len(runs) == 1
    assert np.isfinite(trainer.step(0).loss)


def test_a_donated_array_could_not_have_been_snapshotted_without_a_copy():
    """The fact behind ``DeviceCopy``, checked so that we notice should JAX change."""
    original = jnp.arange(1024.0)
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    update(original)
    assert original.is_deleted()


@pytest.mark.soak("ten seconds of compiling for eight devices, as test_meshes.py does")
def test_several_devices_share_a_batch_and_learn_the_same(make_job, new_trainer):
    """Two virtual devices in a process of their own against one: equal but for the order of float32 sums."""
    script = (
        "import json, sys\n"
        "from learners import jax_trainer\n"
        "for spec in json.load(sys.stdin):\n"
        "    trainer = jax_trainer.create(spec, 0, 2)\n"
        "    trainer.warm_up()\n"
        "    print(trainer.device_count, *(trainer.step(step).loss for step in range(3)))\n"
    )
    divisible, not_divisible = make_job(), make_job(training={"batch_size": 3})
    ran = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps([divisible, not_divisible]),
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    shared, replicated = ([float(word) for word in line.split()] for line in ran.stdout.splitlines())
    alone = new_trainer()
    assert shared == pytest.approx([2, *(alone.step(step).loss for step in range(3))], rel=1e-4)
    assert replicated[0] == 2
    assert np.isfinite(replicated).all()


@pytest.mark.soak("ten seconds of compiling for eight devices, as test_meshes.py does")
def test_a_state_goes_on_on_another_mesh(make_job, new_trainer, tmp_path):
    """What one device saved, two take, and the other way round: the next losses are those without the move."""
    script = (
        "import json, sys\n"
        "import numpy as np\n"
        "from learners import jax_trainer\n"
        "trainer = jax_trainer.create(json.load(sys.stdin), 0, 2)\n"
        "trainer.import_state(dict(np.load(sys.argv[1])))\n"
        "trainer.seek(3)\n"
        "print(trainer.device_count, *(trainer.step(step).loss for step in (3, 4)))\n"
        "np.savez(sys.argv[2], **trainer.export_state().arrays())\n"
    )
    here, there = tmp_path / "one.npz", tmp_path / "two.npz"
    alone = new_trainer()
    for step in range(3):
        alone.step(step)
    np.savez(here, **alone.export_state().arrays())
    ran = subprocess.run(
        [sys.executable, "-c", script, here, there],
        input=json.dumps(make_job()),
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    moved = [float(word) for word in ran.stdout.split()]
    assert moved == pytest.approx([2, *(alone.step(step).loss for step in (3, 4))], rel=1e-4)
    back = new_trainer()
    back.import_state(dict(np.load(there)))
    back.seek(5)
    assert back.step(5).loss == pytest.approx(alone.step(5).loss, rel=1e-4)


def test_a_state_leaves_and_reaches_the_devices_array_by_array(new_trainer):
    trainer, peer = new_trainer(), new_trainer(1)
    peer.step(0)
    state = trainer.export_state().arrays()
    largest = max(array.nbytes for array in state.values()) / sum(array.nbytes for array in state.values())
    for work in (trainer.export_state, lambda: trainer.import_state(state)):
        _, ratio = highest(work)
        assert ratio <= 1.0 + 2 * largest < 2.0  # what arrives may be there in its sender's memory, and in its own
