"""The inner optimizer of a job that goes on from a checkpoint: the islands' states are its own."""

from __future__ import annotations

from orchestrator.checkpoints.resumption import differences
from orchestrator.specification.config import parse_job

SMALLEST = {"islands": [{"node_group": "a"}], "budget": {"steps": 10}}


def spec(**inner: object) -> dict:
    return parse_job({**SMALLEST, "training": {"inner_optimizer": inner}}).model_dump(mode="json")


def test_a_job_goes_on_with_the_kind_of_inner_optimizer_whose_state_it_has() -> None:
    assert differences(spec(kind="muon"), spec(kind="muon", lr=0.01)) == []
    assert differences(spec(kind="muon"), spec()) == ["training.inner_optimizer.kind was 'muon' but is 'adamw'"]
    (line,) = differences(spec(), spec(factory="mine.optimizers:build"))
    assert line.startswith("training.inner_optimizer.factory was")


def test_a_checkpoint_from_before_there_were_kinds_is_of_adamw() -> None:
    before = spec()
    del before["training"]["inner_optimizer"]["kind"], before["training"]["inner_optimizer"]["factory"]
    assert differences(before, spec()) == []
    assert len(differences(before, spec(kind="lion"))) == 1
