"""An island of two hosts takes the steps that one device takes: losses are equal across real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from learners import checkpointing
from learners.jax_trainer import JaxTrainer
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import PART, PART_BYTES_MAX, decode_part
from orchestrator.core.vocabulary import Incarnation
from orchestrator.system.ports import free_port
from tests.learners import host_processes, meshes
from tests.waiting import PATIENCE_S

FLAGS = (
    f"--xla_force_host_platform_device_count={host_processes.DEVICES} "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
MATRIX = 32


@dataclass(frozen=True, slots=True)
class One:
    """One device: its losses in ``STEPS`` steps, after which it saved its state, and the loss of the step that follows."""

    trainer: JaxTrainer
    folder: Path
    losses: list[float]
    following: list[float]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> One:
    path, trainer = tmp_path_factory.mktemp("saved"), meshes.trainer(None)
    losses = meshes.losses(trainer, 0, host_processes.STEPS)
    cut = host_processes.cut_of(trainer.export_state(), {})
    checkpointing.write(cut, Folder.own(path), host_processes.ONE, Incarnation(1))
    return One(trainer, path, losses, meshes.losses(trainer, host_processes.STEPS, 1))


@pytest.fixture(scope="module")
def found(one: One) -> list[dict[str, Any]]:
    """What each process says, by rank."""
    environment, port = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}, str(free_port())
    command = [sys.executable, "-m", "tests.learners.host_processes"]
    ranks = [
        subprocess.Popen([*command, str(rank), port, str(one.folder)], env=environment, stdout=PIPE, stderr=PIPE)
        for rank in range(host_processes.HOSTS)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], b"\n".join(errors[-3000:] for _, errors in said).decode()
    return [json.loads(answer.splitlines()[-1]) for answer, _ in said]  # Gloo speaks before


def test_the_losses_of_two_hosts_are_those_of_one_device(one: One, found: list[dict[str, Any]]) -> None:
    assert one.losses[-1] < one.losses[0]
    for rank, said in enumerate(found):
        assert said["counts"] == [host_processes.DEVICES] * host_processes.HOSTS
        for name, of_mesh in said["meshes"].items():
            assert of_mesh["losses"] == pytest.approx(one.losses, rel=1e-5), (rank, name)


def test_two_hosts_go_on_from_what_one_device_saved_and_each_reads_its_half(
    one: One, found: list[dict[str, Any]]
) -> None:
    for rank, said in enumerate(found):
        for name, of_mesh in said["meshes"].items():
            assert of_mesh["following"] == pytest.approx(one.following, rel=1e-5), (rank, name)
    assert [said["meshes"]["parameters over all"]["read"]["parameters/mix"] for said in found] == [MATRIX**2 // 2] * 2
    half = MATRIX * meshes.VOCABULARY // 2
    assert [said["meshes"]["matrices over hosts"]["read"]["parameters/unembed"] for said in found] == [half] * 2


@pytest.mark.parametrize("mesh", sorted(host_processes.MESHES))
def test_one_device_goes_on_from_what_two_hosts_saved(one: One, found: list[dict[str, Any]], mesh: str) -> None:
    folder = Folder.own(one.folder)
    islands = [host_processes.island_named(mesh, rank) for rank in range(len(found))]
    parts = [decode_part(folder.sub(island).read(PART, PART_BYTES_MAX), island) for island in islands]
    both = parts[0]
    for file in parts[1].files:
        name = file.name.replace("arrays", "arrays-1")
        folder.sub(islands[0]).write(name, folder.sub(islands[1]).read(file.name, file.size))
        both = replace(both, files=(*both.files, replace(file, name=name)))
    one.trainer.import_state(checkpointing.read(folder, both))
    one.trainer.seek(host_processes.STEPS)
    assert meshes.losses(one.trainer, host_processes.STEPS, 1) == pytest.approx(one.following, rel=1e-5)


def test_each_host_holds_its_part_and_both_together_the_whole(found: list[dict[str, Any]]) -> None:
    parts = [said["meshes"]["parameters over all"]["held"]["mix"][0] for said in found]
    assert parts == [[0, MATRIX // 2], [MATRIX // 2, MATRIX]]
    parts = [said["meshes"]["matrices over hosts"]["held"]["unembed"][1] for said in found]
    assert parts == [[0, meshes.VOCABULARY // 2], [meshes.VOCABULARY // 2, meshes.VOCABULARY]]
