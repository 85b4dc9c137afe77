"""A user's code that fails in a live job: what it said is the job's reason, with what to do, and nothing of Ray's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.runtime.control_port import RayControlPort
from orchestrator.specification.config import parse_job
from orchestrator.specification.training_sections import TrainerSection
from tests.ray.jobs import synthetic
from tests.waiting import wait_until

pytestmark = pytest.mark.ray

FACTORY = "Try it outside a job first"
SAID = {
    "exits": ("trainer 'tests.ray.broken:exits' raises SystemExit: no licence for this machine.", FACTORY),
    "raises": ("trainer 'tests.ray.broken:raises' raises Unsendable: the layers do not fit.", FACTORY),
    "is_killed": ("died",),  # the evaluator twice, or the island once: whichever comes first
    "returns_nothing": ("trainer 'tests.ray.broken:returns_nothing' returns None", "learners.contract.Trainer"),
    "missing": ("trainer 'tests.ray.broken:missing' cannot be imported (AttributeError", "package.module:function"),
    "exits_in_evaluator": ("tensor_shapes of the trainer 'tests.ray.broken:exits_in_evaluator'", "no table", FACTORY),
    "fails_at_step_five": ("us-east: given up after 1 failures", "Unsendable: the batch is ragged (at step 5)"),
    "exits_at_step_five": ("us-east: given up after 1 failures", "SystemExit: 3 (at step 5)"),
}


@pytest.mark.parametrize(
    "names",
    [
        ("exits", "is_killed", "fails_at_step_five"),
        pytest.param(tuple(SAID), marks=pytest.mark.soak("eight jobs, whose ways test_factories and test_errors try")),
    ],
)
def test_what_a_users_code_says_when_it_fails_is_the_reason_of_its_job(
    port: RayControlPort, tmp_path: Path, names: tuple[str, ...]
) -> None:
    for name in names:
        spec = parse_job(synthetic(steps=1_000, groups=("us-east",), recovery={"restarts_max": 0}))
        port.start_job(
            name,
            spec.model_copy(update={"trainer": TrainerSection(factory=f"tests.ray.broken:{name}")}),
            tmp_path / name,
        )
    for name in names:
        status = tmp_path / name / "status.json"
        wait_until(status.exists, f"the end of {name}")
        view = json.loads(status.read_text())["view"]
        assert view["outcome"] == "failed"
        for part in SAID[name]:
            assert part in view["reason"], (name, view["reason"])
        assert not [
            ours for ours in ("RayTaskError", "\x1b", "ray::", "Traceback", "ActorDied", "\n") if ours in view["reason"]
        ]
