"""An island of two hosts takes the steps that one device takes: losses are equal across real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from orchestrator.runtime.ray_start import free_port
from tests.learners import host_processes, meshes
from tests.waiting import PATIENCE_S

FLAGS = (
    f"--xla_force_host_platform_device_count={host_processes.DEVICES} "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
MATRIX = 32


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each process says, by rank."""
    environment, port = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}, str(free_port())
    command = [sys.executable, "-m", "tests.learners.host_processes"]
    ranks = [
        subprocess.Popen([*command, str(rank), port], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(host_processes.HOSTS)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], b"\n".join(errors[-3000:] for _, errors in said).decode()
    return [json.loads(answer.splitlines()[-1]) for answer, _ in said]  # Gloo speaks before


def test_the_losses_of_two_hosts_are_those_of_one_device(found: list[dict[str, Any]]) -> None:
    one = meshes.trainer(None)
    expected = meshes.losses(one, 0, host_processes.STEPS)
    assert expected[-1] < expected[0]
    for rank, said in enumerate(found):
        assert said["counts"] == [host_processes.DEVICES] * host_processes.HOSTS
        for name, of_mesh in said["meshes"].items():
            assert of_mesh["losses"] == pytest.approx(expected, rel=1e-5), (rank, name)


def test_each_host_holds_its_part_and_both_together_the_whole(found: list[dict[str, Any]]) -> None:
    parts = [said["meshes"]["parameters over all"]["held"]["mix"][0] for said in found]
    assert parts == [[0, MATRIX // 2], [MATRIX // 2, MATRIX]]
    parts = [said["meshes"]["matrices over hosts"]["held"]["unembed"][1] for said in found]
    assert parts == [[0, meshes.VOCABULARY // 2], [meshes.VOCABULARY // 2, meshes.VOCABULARY]]
