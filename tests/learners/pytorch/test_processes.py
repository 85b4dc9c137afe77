"""Several PyTorch processes are one island."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from learners import checkpointing
from learners.factories import trainer_of
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import PART, PART_BYTES_MAX, decode_part
from orchestrator.core.vocabulary import Incarnation
from orchestrator.system.ports import free_port
from tests.learners.host_processes import HOSTS, ONE, STEPS, cut_of, island_named
from tests.learners.pytorch.small_models import (
    LORA,
    SEVERAL,
    chat,
    llama,
    own,
    torch,
    torch_layout,
)
from tests.waiting import PATIENCE_S


def test_a_process_without_its_gpu_is_counted_before_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_layout.join_processes("127.0.0.1", free_port(), 0, 1) == (0,)
    assert not torch.distributed.is_initialized()


def test_blocks_are_gathered_whole_with_the_lists_in_them() -> None:
    def block() -> Any:
        return torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])})

    layers = torch.nn.ModuleList([block(), torch.nn.ReLU(), block()])
    module = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.ModuleDict({"layers": layers}))
    assert list(torch_layout.blocks_of(module)) == [layers[0], layers[2]]


@pytest.mark.parametrize("part", [{}, LORA | {"model": {"remat": "full"}}], ids=["whole", "adapters"])
def test_two_processes_take_the_steps_of_one_and_each_continues_what_the_other_saved(
    tmp_path: Path, part: dict[str, Any]
) -> None:
    """Real processes with FSDP2 over gloo, without Ray, on conversations whose weights the two halves share unequally."""
    folder, changes = llama(tmp_path / "llama"), {"training": {"accumulation": 2, "z_loss": 0.01}, **part}
    alone = chat(tmp_path, folder, **changes)
    together = chat(tmp_path, folder, islands=[{"node_group": "a", "count": 2, "hosts": HOSTS}], **changes)
    one, steps = trainer_of(alone, 0, 2), range(STEPS)
    one.warm_up()
    expected = [one.step(step).loss for step in steps]
    files = Folder.own(tmp_path)
    checkpointing.write(cut_of(one.export_state(), {}), files, ONE, Incarnation(1))
    following = one.step(STEPS).loss
    command = [sys.executable, "-m", "tests.learners.pytorch.processes"]
    document = json.dumps({name: each for name, each in together.document.items() if name != "roots"})
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port, document, str(tmp_path)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(HOSTS)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], b"\n".join(errors[-3000:] for _, errors in said).decode()
    answers = [json.loads(answer.splitlines()[-1]) for answer, _ in said]
    for answer in answers:
        assert answer["losses"] == pytest.approx(expected, rel=1e-4)
        assert answer["following"] == pytest.approx([following], rel=1e-4)
        assert answer["moved"]
    assert "another process of the island cannot be reached" in answers[0]["lost"]
    for name, shape in one.tensor_shapes().items():
        (first, *_), (second, *_) = (answer["parts"][name] for answer in answers)
        assert first[0] == 0
        assert first[1] == second[0]
        assert second[1] == shape[0]
    parts = [
        decode_part(files.sub(island_named("fsdp", rank)).read(PART, PART_BYTES_MAX), PART) for rank in range(HOSTS)
    ]
    both = parts[0]
    for file in parts[1].files:
        name = file.name.replace("arrays", "arrays-1")
        content = files.sub(island_named("fsdp", 1)).read(file.name, file.size)
        files.sub(island_named("fsdp", 0)).write(name, content)
        both = replace(both, files=(*both.files, replace(file, name=name)))
    one.import_state(checkpointing.read(files, both))
    one.seek(STEPS)
    assert one.step(STEPS).loss == pytest.approx(following, rel=1e-4)


def test_the_entries_of_the_page_are_islands_of_several_processes(mine: ModuleType) -> None:
    job = own(islands=SEVERAL["islands"], training={"batch_size": 16}).job
    assert [island.process_count for island in job.islands] == [8, 2]
    assert [plan.accelerator_count for plan in job.policy().islands] == [8, 2]
