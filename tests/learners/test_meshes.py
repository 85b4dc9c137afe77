"""Parameters on meshes: what lies where, what is refused, and that a mesh changes nothing but that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from learners import mesh
from learners.island_spec import IslandSpec
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.specification.device_mesh import AXES, axis_lengths, mesh_problems
from tests.bench import host_bytes
from tests.learners import meshes

FLAGS = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
"""Programs are run a few times each: most of the time is compilation."""
Situation = Callable[[str], Any]


@pytest.fixture(scope="module")
def on_eight_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Situation]:
    """What came of a situation of ``meshes``, all in one process with eight devices."""
    flags = {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.learners.meshes", str(tmp_path_factory.mktemp("xla"))]
    with subprocess.Popen(
        command, env=os.environ | flags, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(situation: str) -> Any:
            print(situation, file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
            assert "failed" not in answer, answer["failed"]
            return answer["found"]

        yield ask
        process.stdin.close()


@pytest.mark.parametrize(
    "situation",
    ["trained", pytest.param("trained_by_other_axes", marks=pytest.mark.soak("half a minute of compiling"))],
)
def test_every_mesh_gives_the_losses_of_one_device(on_eight_devices: Situation, situation: str) -> None:
    one = meshes.trainer(None)
    expected = meshes.losses(one, 0, 3)
    held_out = one.evaluate(one.snapshot(meshes.PIECES).arrays()).loss
    assert expected[2] < expected[0]
    for name, found in on_eight_devices(situation).items():
        assert found["losses"] == pytest.approx(expected, rel=1e-5), name
        assert found["held out"] == pytest.approx(held_out, rel=1e-5), name
        assert found["moments alike"], name


def test_each_device_holds_only_its_shards(on_eight_devices: Situation) -> None:
    shards = {name: found["shards"] for name, found in on_eight_devices("trained").items()}
    assert shards["fsdp"]["layers.up"] == [2, 4, 32 // 8, 64]
    assert shards["mixed"]["layers.up"] == [2, 4 // 2, 32 // 2, 64 // 2]
    assert shards["fsdp"]["mix"] == [32 // 8, 32], "a tensor without axes"
    assert shards["fsdp"]["layers.norm"] == [2, 32], "a vector is everywhere"


@pytest.mark.soak("half a minute of compiling")
def test_each_device_holds_only_its_shards_by_other_axes(on_eight_devices: Situation) -> None:
    shards = {name: found["shards"] for name, found in on_eight_devices("trained_by_other_axes").items()}
    assert shards["tensor"]["layers.up"] == [2, 4, 32, 64 // 8]
    assert shards["expert"]["layers.up"] == [2, 4 // 4, 32, 64]
    assert shards["data"]["layers.up"] == [2, 4, 32, 64]


def test_pieces_cross_to_and_from_a_mesh_bit_for_bit(on_eight_devices: Situation) -> None:
    for name, found in on_eight_devices("pieces").items():
        assert found == dict.fromkeys(found, True), name


def test_a_state_of_one_mesh_goes_on_on_another(on_eight_devices: Situation) -> None:
    for name, (same, donor, peer) in on_eight_devices("moved").items():
        assert same, name
        assert peer == pytest.approx(donor, rel=1e-5), name


def test_nothing_is_gathered_on_the_way_out_or_in(on_eight_devices: Situation) -> None:
    found = on_eight_devices("gathered")
    assert found["programs"] > 40
    assert found["collectives"] == []
    assert max(found["ratios"]) < 1.3, "a tensor that comes is there besides, shard by shard"
    assert found["snapshot"] < 1.5, "all pieces at once, of shards twice as large as the smallest pieces"
    assert found["left"] < 1.05, "nothing stays on the devices"
    largest, tensor = on_eight_devices("placed_tensor_by_tensor").values()
    assert largest == tensor // 8


@pytest.mark.soak("ten seconds of compiling")
def test_experts_stay_on_their_devices_and_give_the_losses_of_one(on_eight_devices: Situation) -> None:
    expected = meshes.losses(meshes.mixture(None), 0, 2)
    for name, found in on_eight_devices("mixed_experts").items():
        assert found["losses"] == pytest.approx(expected, rel=1e-5), name
        matrices = [shape for shape in found["gathered"] if meshes.MIXTURE_EXPERTS in shape[:-2]]
        assert found["gathered"], "sizes of the experts' groups are"
        assert matrices == [], name


@pytest.mark.soak("ten seconds of compiling")
def test_adapters_give_the_losses_of_one_device_and_frozen_matrices_are_split(on_eight_devices: Situation) -> None:
    expected = meshes.losses(meshes.mixture(None, meshes.ADAPTERS), 0, 2)
    for name, found in on_eight_devices("adapted").items():
        assert found["losses"] == pytest.approx(expected, rel=1e-5), name
        assert found["part"] == {"fsdp": 1 / 8, "mixed": 1 / 4}[name]


@pytest.mark.soak("ten seconds of interpreting")
def test_each_device_attends_by_splash_to_sequences_and_heads_of_its_own(on_eight_devices: Situation) -> None:
    found = on_eight_devices("attended")
    assert found["devices"] == 4
    assert found["difference"] < 1e-6


def test_moments_in_other_shapes_and_counts_are_found_by_structure() -> None:
    abstract, shapes = AbstractMesh((1, 4, 1, 2), AXES), {"up": (8, 64), "gain": (8,)}
    lies = mesh.shardings(abstract, shapes, {"up": ("width", "hidden")})
    state = [{"up": np.zeros((8, 64)), "gain": np.zeros(8)}, {"up": np.zeros(64)}, np.zeros((12, 8)), np.zeros(())]
    found = jax.tree.map(lambda sharding: tuple(sharding.spec), mesh.like_parameters(state, shapes, lies, abstract))
    assert found == [{"up": ("fsdp", "tensor"), "gain": (None,)}, {"up": (None,)}, ("fsdp", None), ()]


@pytest.mark.parametrize(
    ("section", "devices", "batch", "said"),
    [
        ({}, 8, 3, None),
        ({"fsdp": 4}, 8, 8, None),
        ({"fsdp": 4}, None, 8, None),
        ({"fsdp": 3}, 8, 8, "islands.1.mesh: is fsdp 3: 3 devices, but an island has 8 .* whose product divides 8"),
        ({"data": 2, "fsdp": 2}, 8, 8, "islands.1.mesh: is data 2, fsdp 2: 4 devices, .* whose product is 8"),
        ({"fsdp": 4}, 8, 12, "split 8 ways .data 2 x fsdp 4., but has 12 .* multiple of 8 .the nearest are 8 and 16"),
        ({"fsdp": 4}, None, 6, "split 4 ways .*the nearest are 4 and 8"),
        ({"data": 8}, 8, 4, "the nearest are 8"),
    ],
)
def test_a_mesh_that_does_not_divide_devices_or_batch_is_refused(section, devices, batch, said) -> None:
    problems = [str(problem) for problem in mesh_problems("islands.1", section, devices, batch)]
    if said is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert re.search(said, problems[0]), problems[0]


def test_what_the_other_axes_leave_of_the_devices_is_along_data() -> None:
    assert axis_lengths({"fsdp": 2, "tensor": 2}, 8) == {"data": 2, "fsdp": 2, "expert": 1, "tensor": 2}


@pytest.mark.parametrize(
    ("section", "axes", "said"),
    [
        (
            {"tensor": 3},
            meshes.AXES,
            r"mesh.tensor: is 3, which does not divide embed \(256 of .* and 1 more. .* of 32\.",
        ),
        ({"expert": 8}, meshes.AXES, r"mesh.expert: is 8, which does not divide layers.up \(4 of .* divisor of 4"),
        ({"fsdp": 5}, meshes.AXES, r"mesh.fsdp: is 5, which divides none of the remaining dimensions of embed"),
        ({"tensor": 2}, {}, r"mesh.tensor: is 2, but splits nothing: .* vocabulary or heads or hidden"),
        ({"expert": 2}, {}, r"mesh.expert: is 2, but splits nothing: .* named experts"),
    ],
)
def test_a_mesh_that_does_not_divide_a_tensor_is_refused_by_name(section, axes, said) -> None:
    spec = meshes.document({})
    spec["islands"].append({**spec["islands"][0], "mesh": section, "name": "other"})
    spec["island"] = spec["islands"][1] | {"batch_size": 8}
    with pytest.raises(InvalidJobSpec, match=said) as of_the_island:
        mesh.require_division(IslandSpec.of(spec), meshes.SHAPES, axes, {})
    assert "islands.1.mesh" in str(of_the_island.value)
    del spec["island"]
    with pytest.raises(InvalidJobSpec, match=r"islands\.1\.mesh"):  # as the evaluator, before any island is placed
        mesh.require_division(IslandSpec.of(spec), meshes.SHAPES, axes, {})


def test_devices_that_were_promised_and_are_not_there_are_refused() -> None:
    spec = meshes.document({})
    spec["island"] |= {"accelerators": 4, "hosts": 2}
    with pytest.raises(
        InvalidJobSpec, match=r"islands.0.accelerators: promises 8 devices .* there are 1 of kind 'cpu'"
    ):
        mesh.of_island(IslandSpec.of(spec), jax.local_devices())
    spec["island"] |= {"accelerator": "gpu", "accelerators": 1, "hosts": 1}
    with pytest.raises(InvalidJobSpec, match=r"'gpu', but there are 1 of kind 'cpu'.* without its driver"):
        mesh.of_island(IslandSpec.of(spec), jax.local_devices())


def test_axes_that_do_not_name_each_dimension_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"names 1 dimensions of up, whose shape is \(8, 64\)"):
        mesh.require_division(IslandSpec.of(meshes.document({"fsdp": 2})), {"up": (8, 64)}, {"up": ("width",)}, {})


def test_processes_whose_devices_are_no_box_of_the_mesh_are_refused() -> None:
    def grid(processes: list[int], lengths: tuple[int, ...]) -> Any:
        devices = np.array([SimpleNamespace(process_index=process) for process in processes]).reshape(lengths)
        return SimpleNamespace(devices=devices, shape=dict(zip(AXES, lengths, strict=True)))

    mesh.require_boxes(grid([0, 0, 1, 1], (1, 2, 1, 2)))
    mesh.require_boxes(grid([0, 1, 2, 3], (1, 2, 1, 2)))
    with pytest.raises(
        ConfigurationError, match="fsdp 2, expert 1, tensor 3, the devices of a process do not form a box"
    ):
        mesh.require_boxes(grid([0, 0, 1, 1, 2, 2], (1, 2, 1, 3)))


def test_a_step_needs_no_array_to_say_how_much_memory_it_takes() -> None:
    one = meshes.trainer(None)
    before = {
        id(array): array for array in jax.live_arrays()
    }  # held, so that no new one has the identity of one that died
    figures = one.memory_analysis()
    assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []
    parameters = 4 * sum(int(np.prod(shape)) for shape in meshes.SHAPES.values())
    assert figures.argument_size_in_bytes == pytest.approx(3 * parameters, rel=0.01)


@pytest.mark.parametrize(("preset", "hosts"), [("llama3-20m", 2), ("moe-500m", 4)])
def test_each_host_is_sent_about_its_share_of_a_publication(preset: str, hosts: int) -> None:
    for codec_name, most in (("float32", 1.01), ("bfloat16", 1.01), ("int4", 1.4)):
        each = host_bytes.shares(preset, hosts, codec_name)
        assert len(each) == hosts
        assert sum(each) >= 1, "together it is all of it"
        assert max(each) < most / hosts, codec_name
